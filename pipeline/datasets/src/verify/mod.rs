//! Reads a data set again and checks everything that can be checked: checksums, shapes, invariants, and with the
//! teacher the noise itself.

mod limits;
mod noise;
mod report;
mod shards;
mod signals;
mod states;

use std::path::PathBuf;

use serde::Serialize;
use stillhouse_schemas::spec::Dtype;

pub use self::report::{Comparison, Distribution, Report};
use crate::dataset::Dataset;
use stillhouse_base::error::Result;
use stillhouse_base::events::Observer;
use stillhouse_output::Output;
use stillhouse_output::commands::{derive_command, repair_command};

/// Faults that are told one by one; more are only counted.
pub const FAULTS_SHOWN: usize = 100;

/// How to verify.
#[derive(Debug, Clone, Default)]
pub struct VerifyOptions {
    /// Recompute log-probabilities and noise on a sample, with the teacher.
    pub teacher: bool,
    /// Where the teacher is now; default: where the job found it (relative to the working directory).
    pub teacher_path: Option<PathBuf>,
    /// Device for the teacher; default: the job's.
    pub device: Option<String>,
    /// Batches to recompute (a batch is what the teacher saw at once), spread over the data set.
    pub teacher_batches: usize,
    /// Compare what storing costs with what computing in this other arithmetic, and in batches of another shape, costs.
    pub report: Option<Dtype>,
}

/// What a verification found.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Verification {
    /// Shards read.
    pub shards: u64,
    /// Rows read.
    pub rows: u64,
    /// Tokens read, padding not counted.
    pub tokens: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Number of faults.
    pub fault_count: u64,
    /// The first faults.
    pub faults: Vec<Fault>,
    /// The command that makes again what is missing or not what was written, where that is among the faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
    /// What the teacher said.
    pub teacher: Option<TeacherCheck>,
    /// What storing costs beside what the arithmetic costs, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<Report>,
}

impl Verification {
    /// Whether nothing is wrong.
    pub fn passed(&self) -> bool {
        self.fault_count == 0
    }

    /// A file that is not there, or not as it was written: made again it would be.
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

/// Something wrong.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fault {
    /// File, and row where there is one.
    pub place: String,
    /// What was got and what should be.
    pub message: String,
}

/// The noise, recomputed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TeacherCheck {
    /// Sequences recomputed.
    pub sequences: u64,
    /// Predicted tokens recomputed.
    pub tokens: u64,
    /// Tokens times draws whose noise was recomputed.
    pub noises: u64,
    /// Largest |stored − recomputed| of a log-probability.
    pub logprob_difference_max: f64,
    /// How many noises are within the tolerance as they are stored (of codec `dense`: within the rounding of its type).
    pub within_tolerance: u64,
    /// How often argmax_k(l_k + ξ̂_k) is the observed token, ξ̂ as it is stored.
    pub argmax_hits: u64,
    /// Whether the job promised that it always is (`condition`).
    pub condition: bool,
    /// Whether the teacher wrote the tokens, so that nothing of their noise is stored.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub written: bool,
    /// Largest total variation between stored and recomputed softmax(ξ).
    pub total_variation_max: f64,
    /// Mean total variation.
    pub total_variation_mean: f64,
    /// What the job promised.
    pub tolerance: Option<f64>,
}

/// Verifies a data set.
///
/// # Errors
/// When the data set cannot be opened or the teacher cannot be had. What is wrong with the data is in the result.
pub async fn verify(dataset: &Dataset, options: &VerifyOptions, observer: &dyn Observer) -> Result<Verification> {
    let mut found = Verification::default();
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
        found.mend = Some(match dataset.manifest().derived_from {
            Some(_) => derive_command(dataset.output()),
            None => repair_command(dataset.output(), job.as_deref().and_then(|file| file.to_str())),
        });
    }
    Ok(found)
}
