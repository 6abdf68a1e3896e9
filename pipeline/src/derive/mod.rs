//! `stillhouse derive`: adds or replaces columns of a finished data set, without its text and teacher.
//!
//! ```text
//!   data set ──► its shards, one by one ──► unchanged columns ───┬─► shards of the same rows ─► commit ─► manifest with both jobs
//!   job ───────► operators that differ, noise ──► new columns ───┘
//! ```
//!
//! A split of the data set becomes a split of the result: same rows, same order, same `sequence_id`s. So every keyed
//! choice, and the bytes of the shards, are those of a run of the whole job (a test compares them). The exception is
//! noise at a looser tolerance: a run would know the true error and keep fewer corrections
//! (`stillhouse_noise::CorrectionPruner`).
//!
//! The plan is that of a run with another source, the shards of the data set (`source.rs`). So threads,
//! `engine.memory_megabytes`, progress and commits work as in a run: a stopped derivation resumes, and a finished one
//! that is damaged is repaired. Every shard is compared with its checksum before a row of it is used.
//!
//! Memory per concurrent shard: two batches of rows, and the writer's row groups. Cost: reads the data set twice and
//! writes it once; noise takes about two passes over V per token and draw.

mod run;
mod source;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stillhouse_datasets::dataset::Dataset;
use stillhouse_operators::extract::{LOOSENED_COLUMNS, NoiseLoosener};
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::orders::OrdersConfig;
use stillhouse_operators::registry;
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_schemas::manifest::{ColumnRecord, DerivedFrom, Manifest, SplitRecord};
use stillhouse_schemas::parse::Positions;
use stillhouse_schemas::problems::{Problem, Problems};
use stillhouse_schemas::spec::{JobSpec, NoiseCodec};

use crate::error::{ErrorKind, PipelineError, Result};
use crate::finish;
use crate::job::fill_in;
use crate::job::{NamedContent, read_section_file, simplify_path};
use crate::output::{MANIFEST, Output, TOKENIZER};
use crate::path_expansion::PathExpander;
use crate::path_expansion::local_path;
use crate::sequence_offsets;
use crate::storage::{Location, Storages};

pub use self::run::{DeriveOptions, derive};

/// A derivation: the data set and the columns to make.
pub struct Derivation {
    source: Arc<Dataset>,
    /// The job that would make the whole result.
    spec: JobSpec,
    /// All operators of that job.
    operators: Vec<OperatorSpec>,
    /// The operators that run.
    new_operators: Vec<OperatorSpec>,
    /// The splits of the data set, with the positions of their sequences if the orders need them.
    splits: Vec<SplitRecord>,
    loosener: Option<NoiseLoosener>,
    vocabulary: Arc<Vocabulary>,
    tokenizer: Vec<u8>,
    from: DerivedFrom,
    output: Output,
    hash: String,
    identity: Value,
    storages: Arc<Storages>,
}

impl Derivation {
    /// Checks a job for a data set. The job's relative paths are relative to `base`.
    ///
    /// # Errors
    /// With all problems of the job and their positions; if the data set is damaged.
    pub async fn prepare(source: Dataset, text: &str, base: &Path) -> Result<Self> {
        let parsed = registry::job_format().parse_derived(text, &source.manifest().job);
        let positions = parsed.positions.clone();
        let completed = parsed.into_result().and_then(|mut spec| {
            let files = section_files(&spec, base, &positions, source.manifest())?;
            let stored = source.manifest().job.extract.as_ref().and_then(|e| e.hidden_states.as_ref()?.width);
            fill_in(&mut spec, files, stored.map(|width| width as usize));
            Ok(spec)
        });
        let made = match completed {
            Ok(spec) => Self::from_spec(source, spec, base).await,
            Err(problems) => Err(problems.into()),
        };
        made.map_err(|e| e.with_positions(&positions))
    }

    async fn from_spec(source: Dataset, spec: JobSpec, base: &Path) -> Result<Self> {
        let manifest = source.manifest();
        let (before, unknown) = registry::operators_from_manifest(manifest);
        if let Some(problem) = unknown.first() {
            let message = format!("{}: {problem}", source.shown(MANIFEST));
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        let mut problems = Problems::default();
        let (after, wrong) = registry::operators_from_manifest(&Manifest { job: spec.clone(), ..manifest.clone() });
        wrong.into_iter().for_each(|problem| problems.push(problem));
        let is_new = |spec: &&OperatorSpec| spec.is_derivable() && !before.contains(spec);
        let new_operators: Vec<OperatorSpec> = after.iter().filter(is_new).cloned().collect();
        let loosener = noise_loosener(&before, &after, &mut problems)?;
        if new_operators.is_empty() && loosener.is_none() && problems.0.is_empty() {
            let message = "nothing is different from what the data set has; valid: other subtokens, partitions or orders, or a looser \
                           extract.noise.tolerance";
            problems.push(Problem::missing("", message));
        }
        problems.into_result()?;
        let bytes = source.output().get(TOKENIZER).await?.unwrap_or_default().to_vec();
        let digest = hex::encode(Sha256::digest(&bytes));
        if digest != manifest.tokenizer.sha256 {
            let message =
                format!("{}: sha256 {digest}, the manifest has {}", source.shown(TOKENIZER), manifest.tokenizer.sha256);
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        let vocabulary = Vocabulary::from_tokenizer(source.tokenizer().await?, &manifest.tokenizer.source)
            .map_err(|e| PipelineError::caused(ErrorKind::DataSet, source.shown(TOKENIZER), e))?;
        let from = DerivedFrom {
            manifest_sha256: manifest_digest(source.output()).await?.unwrap_or_default(),
            job: manifest.job.clone(),
            job_hash: manifest.job_hash.clone(),
            columns: columns_of(&new_operators, loosener.is_some()),
            derived_from: manifest.derived_from.clone(),
        };
        let identity = identity(&spec, &from, &finish::sidecar_sha256(&after));
        let hash = hex::encode(Sha256::digest(identity.to_string().as_bytes()));
        let storages = Arc::new(Storages::new());
        let output = output_of(&spec, base, &storages)?.for_job(&hash);
        let has_new_orders = new_operators.iter().any(|operator| operator.config::<OrdersConfig>().is_some());
        let splits = if has_new_orders {
            sequence_offsets::splits_with_actual_ranges(&spec, manifest)
        } else {
            manifest.splits.clone()
        };
        Ok(Self {
            splits,
            source: Arc::new(source),
            operators: after,
            new_operators,
            loosener,
            vocabulary: Arc::new(vocabulary),
            tokenizer: bytes,
            from,
            output,
            hash,
            identity,
            storages,
            spec,
        })
    }

    /// Descriptions of the columns that are made.
    pub fn columns(&self) -> &[String] {
        &self.from.columns
    }
}

/// The files that the sections name: those of sections in the job file are read, those of other sections are the data
/// set's.
fn section_files(
    spec: &JobSpec,
    base: &Path,
    positions: &Positions,
    manifest: &Manifest,
) -> std::result::Result<Vec<NamedContent>, Problems> {
    let mut read = Vec::new();
    for file in registry::job_format().files(spec) {
        let section = file.field.split_once('.').map_or(&*file.field, |(section, _)| section);
        if positions.contains(section) && !file.path.is_empty() {
            let wrong = |e: String| Problems(vec![Problem::new(&*file.field, format!("{:?}", file.path), e)]);
            let path = PathExpander::from_environment().expand(&file.path).map_err(wrong)?;
            let content = read_section_file(&local_path(base, &path), &file).map_err(wrong)?;
            read.push((file.field, content));
        } else if let Some(bytes) = manifest.job.sections.file(&file.field) {
            read.push((file.field, Arc::clone(bytes)));
        }
    }
    Ok(read)
}

/// sha256 of the manifest of a data set.
async fn manifest_digest(of: &Output) -> Result<Option<String>> {
    Ok(of.get(MANIFEST).await?.map(|bytes| hex::encode(Sha256::digest(&bytes))))
}

/// How to store the noise at a looser tolerance, if the job asks for another one.
fn noise_loosener(
    before: &[OperatorSpec],
    after: &[OperatorSpec],
    problems: &mut Problems,
) -> Result<Option<NoiseLoosener>> {
    let (Some(from), Some(to)) = (registry::extract_config(before), registry::extract_config(after)) else {
        return Ok(None);
    };
    let (Some(stored), Some(requested)) = (&from.noise, &to.noise) else { return Ok(None) };
    if stored.tolerance == requested.tolerance {
        return Ok(None);
    }
    let mut wrong = |message: String| {
        problems.push(Problem::new("extract.noise.tolerance", requested.tolerance, message));
        Ok(None)
    };
    if stored.codec != NoiseCodec::Replay {
        return wrong("the data set has dense noise, which has no tolerance; leave it out".into());
    }
    let made = NoiseLoosener::new(from, to).map_err(|e| PipelineError::caused(ErrorKind::Usage, "extract.noise", e))?;
    match made {
        Some(loosener) => Ok(Some(loosener)),
        None => wrong(format!(
            "the data set was stored at {0}, and what is left out adds to that; valid: {1} or more",
            stored.tolerance,
            (stored.tolerance + 1e-6) / 0.999
        )),
    }
}

fn columns_of(new_operators: &[OperatorSpec], loosened: bool) -> Vec<String> {
    let noise = loosened.then_some(LOOSENED_COLUMNS).into_iter().flatten().map(str::to_owned);
    let views = new_operators.iter().flat_map(|operator| {
        ColumnRecord::of_schema(operator.output_schema(&arrow::datatypes::Schema::empty()).as_ref())
    });
    noise.chain(views.map(|column| column.name)).collect()
}

/// Everything that decides the bytes of the result.
fn identity(spec: &JobSpec, from: &DerivedFrom, sidecar_sha256: &BTreeMap<String, String>) -> Value {
    let mut job = json!(spec);
    // `sidecar_sha256` has the checksums of the files that sections name
    registry::job_format().retain_derived_identity(&mut job);
    json!({"job": job, "derived_from": from.manifest_sha256, "beside": sidecar_sha256})
}

fn output_of(spec: &JobSpec, base: &Path, storages: &Storages) -> Result<Output> {
    let names = PathExpander::from_environment();
    let usage = |e: String| {
        PipelineError::from(Problems(vec![Problem::new("output.path", format!("{:?}", spec.output.path), e)]))
    };
    let path = names.expand(&spec.output.path).map_err(usage)?;
    let location = Location::parse(base, &path).map_err(|e| usage(e.to_string()))?;
    let output = Output::at(&simplify_path(location), &spec.output_storage(), storages)?;
    Ok(output.for_shards_of(spec.output.shard_megabytes * 1e6))
}
