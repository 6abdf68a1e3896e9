//! The plan of a running job, whose partitions are its splits. Several run at once; each is read, processed, written
//! and committed on its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use datafusion::physical_plan::ExecutionPlan;
use stillhouse_operators::operator::NoDuplicates;
use stillhouse_operators::registry;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use stillhouse_schemas::spec::JobSpec;

use super::Job;
use crate::acceptance::Tally;
use crate::driver::TaskSpec;
use crate::engine;
use crate::engine::device::DeviceQueue;
use crate::engine::pool::{Pool, Spawner};
use crate::engine::resources::{JobResources, SplitsInProgress, stages};
use crate::engine::runner::{SplitRunner, Workers};
use crate::engine::session::Session;
use crate::engine::sink::{Shard, Shards};
use crate::engine::splits::{Corpus, SplitsExec};
use crate::error::{ErrorKind, PipelineError, Result};
use crate::job::Prepared;
use crate::output::Output;
use crate::{plan, source};
use stillhouse_input_files::InputFile;

/// Default number of concurrent splits per device.
const SPLITS_PER_DEVICE: usize = 2;

/// Row groups that a split holds in memory: one being encoded, the encoder's working memory, and an encoded one being
/// sent.
pub(super) const ROW_GROUPS_PER_SPLIT: u32 = 3;

impl Job {
    /// Builds these splits.
    pub(crate) async fn run_splits(&self, pending: Vec<SplitRecord>, began: Instant) -> Result<()> {
        let pool = Pool::of_this_process()?;
        let session = self.session(pending, &self.runner.remade, pool.spawner()?)?;
        let tally = Tally::new(&self.prepared.spec, &self.runner.splits, &self.runner.done);
        let remote = match &self.driver {
            Some(driver) => {
                // before creating the ticket, which names the holder of the output
                self.runner.output.let_others_join().await?;
                Some((driver.as_ref(), self.task_spec()?))
            }
            None => None,
        };
        let workers = match &remote {
            Some((driver, spec)) => Workers::Remote { driver: *driver, spec },
            None => Workers::Local { max_splits: self.concurrent_splits() },
        };
        self.runner.run(&session, workers, &tally, began).await
    }

    /// Number of concurrent splits in this process. Two splits per device keep it busy while one is written and the
    /// next begins.
    fn concurrent_splits(&self) -> usize {
        let by_device = || SPLITS_PER_DEVICE * self.runner.devices.len().max(1);
        let default = self.prepared.spec.extract.as_ref().map_or_else(rayon::current_num_threads, |_| by_device());
        max_concurrent_splits(&self.prepared.spec, default)
    }

    /// Creates the session with the plan over these splits. The shards of `remade` must get the same bytes as before.
    pub(super) fn session(
        &self,
        mut pending: Vec<SplitRecord>,
        remade: &BTreeMap<SplitId, ShardRecord>,
        spawner: Spawner,
    ) -> Result<Session> {
        // holdouts first, so that an empty one fails before the work on train
        pending.sort_by_key(|split| split.dataset_split == source::TRAIN);
        let SplitRunner { output, devices, stop, .. } = &self.runner;
        let prepared = &self.prepared;
        let (names, splits) = (shard_names(&self.runner.splits), Arc::new(pending));
        let staging_skipped = self.runner.splits.first().map(|first| (first.split, self.skipped.clone()));
        let corpus = Corpus { staging_skipped, ..corpus(prepared, &self.files, &splits) };
        let plan = plan_over(corpus, prepared, shards(prepared, &splits, &names, remade));
        let concurrent_splits = self.concurrent_splits().min(splits.len());
        let resources = JobResources {
            operators_overlap: concurrent_splits < rayon::current_num_threads(),
            stop: Arc::clone(stop),
            duplicates: self.duplicates.clone(),
            ..resources(prepared, Some(output.clone()), devices, &splits, spawner)
        };
        Session::new(plan.map_err(PipelineError::from_plan)?, resources, &prepared.spec.engine)
    }

    /// The job as other processes need it to work for this run.
    fn task_spec(&self) -> Result<TaskSpec> {
        let spec = serde_json::to_string(&self.prepared.spec)
            .map_err(|e| PipelineError::caused(ErrorKind::Usage, "the job cannot be sent", e))?;
        // executors have other working directories
        let base = std::path::absolute(&self.prepared.base).unwrap_or_else(|_| self.prepared.base.clone());
        let teacher = self.arithmetic.clone();
        let device = teacher.as_ref().map(|_| plan::device_kind(&self.prepared.spec).to_owned());
        Ok(TaskSpec { spec, base, ticket: self.runner.output.ticket(), teacher, device })
    }
}

fn corpus(prepared: &Prepared, files: &Arc<Vec<InputFile>>, splits: &Arc<Vec<SplitRecord>>) -> Corpus {
    let input = Arc::new(crate::job::staged_input(prepared));
    Corpus { files: Arc::clone(files), input, splits: Arc::clone(splits), staging_skipped: None }
}

fn shards(
    prepared: &Prepared,
    splits: &[SplitRecord],
    names: &BTreeMap<SplitId, String>,
    remade: &BTreeMap<SplitId, ShardRecord>,
) -> Shards {
    let shard = |split: &SplitRecord| Shard {
        name: names.get(&split.split).cloned().unwrap_or_default(),
        expected_record: remade.get(&split.split).cloned(),
    };
    Shards { spec: prepared.spec.output.clone(), shards: Arc::new(splits.iter().map(shard).collect()) }
}

/// The plan of a job over these splits, for display.
pub(crate) fn physical_plan(
    prepared: &Prepared,
    files: &[InputFile],
    splits: Vec<SplitRecord>,
) -> datafusion::common::Result<Arc<dyn ExecutionPlan>> {
    let names = shard_names(&splits);
    let corpus = corpus(prepared, &Arc::new(files.to_vec()), &Arc::new(splits));
    let shards = shards(prepared, &corpus.splits, &names, &BTreeMap::new());
    plan_over(corpus, prepared, shards)
}

fn plan_over(
    corpus: Corpus,
    prepared: &Prepared,
    shards: Shards,
) -> datafusion::common::Result<Arc<dyn ExecutionPlan>> {
    engine::job_plan(Arc::new(SplitsExec::new(corpus)), &prepared.operators, shards)
}

/// The source of a job's plan, with one partition per split.
pub(crate) fn source_of(
    prepared: &Prepared,
    files: &Arc<Vec<InputFile>>,
    splits: &Arc<Vec<SplitRecord>>,
) -> Arc<dyn ExecutionPlan> {
    Arc::new(SplitsExec::new(corpus(prepared, files, splits)))
}

/// The resources in this process for the nodes of a job's plan. `output` is `None` for a plan without a sink.
pub(crate) fn resources(
    prepared: &Arc<Prepared>,
    output: Option<Output>,
    devices: &[DeviceQueue],
    splits: &Arc<Vec<SplitRecord>>,
    spawner: Spawner,
) -> JobResources {
    let (of, specials) = (Arc::clone(prepared), prepared.vocabulary.special_tokens());
    let row_checks =
        move |split: &SplitRecord| registry::row_checks(&of.spec, of.vocab_size, &specials, (split.split, split.place));
    JobResources {
        splits: Arc::clone(splits),
        store: prepared.store.clone(),
        vocabulary: Arc::clone(&prepared.vocabulary),
        duplicates: None,
        devices: devices.to_vec(),
        output,
        row_checks: Arc::new(row_checks),
        spawner,
        operators_overlap: false,
        has_failed: AtomicBool::new(false),
        stop: Arc::default(),
        stages: stages(&prepared.operators),
        splits_in_progress: SplitsInProgress::default(),
    }
}

/// Like [`resources`], for a part of the input: its documents are not compared with the others.
pub(crate) fn sample_resources(
    prepared: &Arc<Prepared>,
    devices: &[DeviceQueue],
    splits: &Arc<Vec<SplitRecord>>,
    spawner: Spawner,
) -> JobResources {
    JobResources { duplicates: Some(Arc::new(NoDuplicates)), ..resources(prepared, None, devices, splits, spawner) }
}

/// Number of concurrent splits: the job's setting, else `default`, limited by the job's memory.
pub(crate) fn max_concurrent_splits(spec: &JobSpec, default: usize) -> usize {
    let wanted = spec.engine.parallel_splits.map_or(default, |n| n as usize);
    wanted.min(splits_with_memory(spec)).max(1)
}

/// Number of concurrent splits that fit into the job's memory, at least one.
pub(super) fn splits_with_memory(spec: &JobSpec) -> usize {
    let fitting = spec
        .engine
        .memory_megabytes
        .map(|megabytes| megabytes / (ROW_GROUPS_PER_SPLIT * spec.output.row_group_megabytes));
    fitting.map_or(usize::MAX, |fitting| fitting as usize).max(1)
}

/// `train-00003-of-00042.parquet` for each split. The total counts only splits up to the same append, so that later
/// appends do not rename shards.
pub(crate) fn shard_names(splits: &[SplitRecord]) -> BTreeMap<SplitId, String> {
    let of = |split: &SplitRecord| (split.dataset_split.clone(), split.appended);
    let mut counts: BTreeMap<(String, u32), usize> = BTreeMap::new();
    for split in splits {
        *counts.entry(of(split)).or_default() += 1;
    }
    // add the splits of earlier appends
    let (mut name, mut sum) = ("", 0);
    for ((dataset_split, _), count) in &mut counts {
        if name != dataset_split.as_str() {
            (name, sum) = (dataset_split.as_str(), 0);
        }
        sum += *count;
        *count = sum;
    }
    let mut next: BTreeMap<&str, usize> = BTreeMap::new();
    let mut names = BTreeMap::new();
    for split in splits {
        let number = next.entry(&split.dataset_split).or_default();
        let count = counts.get(&of(split)).copied().unwrap_or_default();
        names.insert(split.split, format!("{}-{number:05}-of-{count:05}.parquet", split.dataset_split));
        *number += 1;
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_counted_by_data_set_split() {
        let split = |id, name: &str| SplitRecord {
            split: SplitId(id),
            dataset_split: name.into(),
            pieces: Vec::new(),
            keys: None,
            appended: 0,
            place: None,
        };
        let names = shard_names(&[split(0, "train"), split(1, "train"), split(2, "validation")]);
        assert_eq!(names[&SplitId(1)], "train-00001-of-00002.parquet");
        assert_eq!(names[&SplitId(2)], "validation-00000-of-00001.parquet");
    }

    #[test]
    fn what_is_appended_renames_nothing() {
        let split = |id, name: &str, appended| SplitRecord {
            split: SplitId(id),
            dataset_split: name.into(),
            pieces: Vec::new(),
            keys: None,
            appended,
            place: None,
        };
        let all = [
            split(0, "train", 0),
            split(1, "train", 0),
            split(2, "validation", 0),
            split(3, "train", 1),
            split(4, "train", 2),
            split(5, "train", 2),
            split(6, "validation", 2),
        ];
        let names: Vec<String> = shard_names(&all).into_values().collect();
        assert_eq!(
            names,
            [
                "train-00000-of-00002.parquet",
                "train-00001-of-00002.parquet",
                "validation-00000-of-00001.parquet",
                "train-00002-of-00003.parquet",
                "train-00003-of-00005.parquet",
                "train-00004-of-00005.parquet",
                "validation-00001-of-00002.parquet",
            ]
        );
        assert_eq!(shard_names(&all[..3]).into_values().collect::<Vec<_>>(), names[..3]);
    }
}
