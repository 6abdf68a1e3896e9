//! `verify`: reads a data set and checks checksums, shapes and invariants; with the teacher also the noise.

mod noise;
mod report;
mod shards;
mod states;

use std::path::PathBuf;

use serde::Serialize;
use stillhouse_schemas::spec::Dtype;

pub use self::report::{Comparison, Distribution, Report};
use crate::dataset::Dataset;
use stillhouse_base::error::Result;
use stillhouse_base::events::Observer;
use stillhouse_output::Output;
use stillhouse_output::commands::{derive_command, overwrite_command, repair_command};

/// Maximum number of faults that are reported individually; further ones are only counted.
pub const FAULTS_SHOWN: usize = 100;

/// Options of [`verify`].
#[derive(Debug, Clone, Default)]
pub struct VerifyOptions {
    /// Recompute log-probabilities and noise of a sample with the teacher.
    pub teacher: bool,
    /// Path of the teacher; default: the job's path, relative to the working directory.
    pub teacher_path: Option<PathBuf>,
    /// Device for the teacher; default: the job's.
    pub device: Option<String>,
    /// Number of batches to recompute, spread over the data set. A batch is what the job passed to the teacher at once.
    pub teacher_batches: usize,
    /// Also report how the error of storing compares with the error of computing in this other arithmetic and in
    /// batches of another shape.
    pub report: Option<Dtype>,
}

/// Result of a verification.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Verification {
    /// Number of shards read.
    pub shards: u64,
    /// Number of rows read.
    pub rows: u64,
    /// Number of tokens read, without padding.
    pub tokens: u64,
    /// Number of bytes read.
    pub bytes: u64,
    /// Number of faults.
    pub fault_count: u64,
    /// The first [`FAULTS_SHOWN`] faults.
    pub faults: Vec<Fault>,
    /// Command that repairs missing or damaged files, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
    /// Whether a teacher made values of the data set.
    pub has_teacher: bool,
    /// Result of the teacher's checks, if requested.
    pub teacher: Option<TeacherCheck>,
    /// The faithfulness report, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<Report>,
}

impl Verification {
    /// Whether there are no faults.
    pub fn passed(&self) -> bool {
        self.fault_count == 0
    }

    /// Records a fault of a missing or damaged file, which a repair can rebuild.
    pub(crate) fn damaged(&mut self, output: &Output, place: &str, message: impl Into<String>) {
        self.fault(place, message);
        self.mend.get_or_insert_with(|| repair_command(output, None));
    }

    pub(crate) fn fault(&mut self, place: impl Into<String>, message: impl Into<String>) {
        self.fault_count += 1;
        if self.faults.len() < FAULTS_SHOWN {
            self.faults.push(Fault { place: place.into(), message: message.into() });
        }
    }
}

/// A fault of a data set.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fault {
    /// File, and row where there is one.
    pub place: String,
    /// The actual and the expected value.
    pub message: String,
}

/// Result of recomputing log-probabilities and noise.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TeacherCheck {
    /// Number of sequences recomputed.
    pub sequences: u64,
    /// Number of predicted tokens recomputed.
    pub tokens: u64,
    /// Number of noise vectors recomputed: tokens times draws.
    pub noises: u64,
    /// Largest |stored − recomputed| of a log-probability.
    pub logprob_difference_max: f64,
    /// Number of noise vectors whose stored form is within the tolerance (codec `dense`: within the rounding of its
    /// type).
    pub within_tolerance: u64,
    /// How often argmax_k(l_k + ξ̂_k), with ξ̂ the stored noise, is the observed token.
    pub argmax_hits: u64,
    /// Whether the job promises that this argmax always is the observed token (`condition`).
    pub condition: bool,
    /// Whether the teacher wrote the tokens, so that the data set stores no noise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub written: bool,
    /// Largest total variation between stored and recomputed softmax(ξ).
    pub total_variation_max: f64,
    /// Mean total variation.
    pub total_variation_mean: f64,
    /// Total variation that the job promises.
    pub tolerance: Option<f64>,
}

/// Verifies a data set.
///
/// # Errors
/// If the data set or the teacher cannot be opened. Faults of the data are in the result.
pub async fn verify(dataset: &Dataset, options: &VerifyOptions, observer: &dyn Observer) -> Result<Verification> {
    let has_teacher = dataset.manifest().job.extract.is_some();
    let mut found = Verification { has_teacher, ..Verification::default() };
    shards::check_folder(dataset, &mut found).await?;
    for shard in &dataset.manifest().shards {
        shards::check_shard(dataset, shard, &mut found, observer).await?;
    }
    shards::check_manifest(dataset.manifest(), &mut found);
    if options.teacher {
        noise::check(dataset, options, &mut found, observer).await?;
    }
    if found.mend.is_some() {
        let job = dataset.output().job_file().await;
        let job_file = job.as_deref().and_then(|file| file.to_str());
        let manifest = dataset.manifest();
        let is_int8 = manifest.job.extract.as_ref().is_some_and(|extract| extract.teacher.dtype == Dtype::Int8);
        found.mend = Some(match manifest.derived_from {
            Some(_) => derive_command(dataset.output()),
            None if is_int8 => overwrite_command(job_file, "extract.teacher.dtype", Dtype::Int8.name()),
            None => repair_command(dataset.output(), job_file),
        });
    }
    Ok(found)
}
