//! The splits of a job at work: the partitions of one plan, so many at once, each read, worked on, written and committed by itself.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::{GreedyMemoryPool, TrackConsumersPool};
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::physical_plan::ExecutionPlan;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use stillhouse_schemas::spec::{Engine, JobSpec};

use super::Job;
use crate::acceptance::Tally;
use crate::driver::{Driver, EventSink, SplitTask, Step, TaskSpec, Work};
use crate::engine;
use crate::engine::device::DeviceQueue;
use crate::engine::pool::{Pool, Spawner};
use crate::engine::session::{JobResources, SplitsAtWork, stages};
use crate::engine::sink::{Shard, Shards, describe, records};
use crate::engine::source::Corpus;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Progress, StageStatus, StalledSplit};
use crate::job::Prepared;
use crate::output::Output;
use crate::source::InputFile;
use crate::stage_state::SplitState;
use crate::stall::{self, Stall, StallWatch};
use crate::{operators, plan, source};

const TICK: Duration = Duration::from_millis(250);
/// Splits at work at once per device, where the job does not say: while one is written and the next one begins, the device has work.
const SPLITS_OF_A_DEVICE: usize = 2;

/// Row groups that a split has in memory: one that is encoded, with what the encoder needs beside it, and an encoded one on its way.
pub(super) const ROW_GROUPS_OF_A_SPLIT: u32 = 3;
/// Who has most of the memory, where there is not enough.
const CONSUMERS_LISTED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(2);

/// A plan in a session of this process.
pub(crate) struct Session {
    pub plan: Arc<dyn ExecutionPlan>,
    splits: Arc<Vec<SplitRecord>>,
    context: Arc<TaskContext>,
    pub resources: Arc<JobResources>,
}

impl Job {
    pub(crate) async fn run_splits(&self, pending: Vec<SplitRecord>, began: Instant) -> Result<()> {
        self.holdouts.check()?;
        let pool = Pool::new(rayon::current_num_threads());
        let pool = pool.map_err(PipelineError::output("the system gives no threads for the splits"))?;
        let spawner = pool.spawner().map_err(PipelineError::output("the splits"))?;
        let session = self.session(pending, spawner)?;
        let tally = Tally::new(&self.prepared.spec, &self.splits, &self.done);
        let here = LocalDriver { session: &session, at_once: splits_at_once(&self.prepared.spec, self.devices.len()) };
        let driver: &dyn Driver = match &self.driver {
            Some(elsewhere) => elsewhere.as_ref(),
            None => &here,
        };
        if self.driver.is_some() {
            self.output.let_others_join().await?;
        }
        let work = Work {
            order: self.order()?,
            splits: session.splits.iter().map(|split| self.wanted(split)).collect(),
            output: self.output.clone(),
            stop: Arc::clone(&self.stop),
        };
        let tell = |step| self.take(step, &tally);
        let work = driver.drive(&work, &tell);
        tokio::pin!(work);
        let mut ticks = tokio::time::interval(TICK);
        let mut watch = StallWatch::new(stall::PATIENCE, Instant::now());
        loop {
            tokio::select! {
                result = &mut work => {
                    self.observer.event(&Event::Progress(self.progress(began)));
                    if result.is_err() && tally.is_fruitless() {
                        self.output.remove().await?;
                    }
                    return result;
                }
                _ = ticks.tick() => {
                    self.sample_device_waits(&session.resources.at_work);
                    let progress = self.progress(began);
                    match self.driver.is_none() {
                        true => self.look_for_a_stall_here(&mut watch, &progress, &session.resources.at_work),
                        false => self.look_for_a_stall_elsewhere(&mut watch, &progress),
                    }
                    self.observer.event(&Event::Progress(progress));
                }
            }
        }
    }

    /// The plan over these splits, in a session with what this job works with.
    pub(crate) fn session(&self, pending: Vec<SplitRecord>, spawner: Spawner) -> Result<Session> {
        let session = self.session_of(pending, &self.remade, spawner)?;
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&session.plan));
        Ok(session)
    }

    /// The same, of which some shards must come out as they were; its metrics are nobody's.
    pub(super) fn session_of(
        &self,
        mut pending: Vec<SplitRecord>,
        remade: &BTreeMap<SplitId, ShardRecord>,
        spawner: Spawner,
    ) -> Result<Session> {
        // a holdout that comes out empty is told before the work on all the rest
        pending.sort_by_key(|split| split.dataset_split == source::TRAIN);
        let prepared = &self.prepared;
        let (names, splits) = (shard_names(&self.splits), Arc::new(pending));
        let query_skipped = self.splits.first().map(|first| (first.split, self.skipped.clone()));
        let corpus = Corpus { query_skipped, ..corpus(prepared, &self.files, &splits) };
        let plan = engine::job_plan(corpus, &prepared.operators, shards(prepared, &splits, &names, remade));
        let plan = plan.map_err(PipelineError::of_plan)?;
        let mut resources = resources(prepared, &self.output, &self.devices, spawner, &self.stop);
        let at_once = splits_at_once(&prepared.spec, self.devices.len());
        resources.operators_overlap = at_once.min(splits.len()) < rayon::current_num_threads();
        let resources = Arc::new(resources);
        let session = resources.session(runtime(&prepared.spec.engine)?).map_err(PipelineError::of_plan)?;
        let context = session.task_ctx();
        Ok(Session { plan, splits, context, resources })
    }

    /// What another process has to know to work for this run.
    fn order(&self) -> Result<TaskSpec> {
        let spec = serde_json::to_string(&self.prepared.spec)
            .map_err(|e| PipelineError::caused(ErrorKind::Usage, "the job cannot be sent", e))?;
        // those who get it are in other folders
        let base = std::path::absolute(&self.prepared.base).unwrap_or_else(|_| self.prepared.base.clone());
        let teacher = self.arithmetic.clone();
        let device = teacher.as_ref().map(|_| plan::device_kind(&self.prepared.spec).to_owned());
        Ok(TaskSpec { spec, base, ticket: self.output.ticket(), teacher, device })
    }

    fn wanted(&self, split: &SplitRecord) -> SplitTask {
        let (dataset_split, was) = (split.dataset_split.clone(), self.remade.get(&split.split).cloned());
        SplitTask { split: split.split, dataset_split, was }
    }

    /// Tells where everything stands when nothing has moved in this process for a while.
    fn look_for_a_stall_here(&self, watch: &mut StallWatch, progress: &Progress, at_work: &SplitsAtWork) {
        let at_work: BTreeMap<SplitId, Arc<SplitState>> =
            at_work.all().into_iter().map(|state| (state.split, state)).collect();
        let rows = at_work.iter().map(|(split, state)| (*split, state.rows()));
        let place = |split| at_work.get(&split).map(|state| (state.reads.clone(), state.statuses()));
        self.look_for_a_stall(watch, moved(progress) + progress.store_requests, rows, place);
    }

    /// The same of the others' work. That they send requests says nothing: they tell of a standstill too.
    fn look_for_a_stall_elsewhere(&self, watch: &mut StallWatch, progress: &Progress) {
        let at_work = {
            let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            self.elsewhere.lock().unwrap_or_else(PoisonError::into_inner).at_work(|split| !made.contains(&split))
        };
        let rows = at_work.iter().map(|(split, at)| (*split, at.rows()));
        let place = |split| at_work.get(&split).map(|at| (at.reads.clone(), at.stages.clone()));
        self.look_for_a_stall(watch, moved(progress), rows, place);
    }

    fn look_for_a_stall(
        &self,
        watch: &mut StallWatch,
        moved: u64,
        rows: impl Iterator<Item = (SplitId, u64)>,
        place: impl Fn(SplitId) -> Option<(String, Vec<StageStatus>)>,
    ) {
        let Some(Stall { time, splits }) = watch.look(Instant::now(), moved, rows) else { return };
        let place = |(split, still): &(SplitId, Duration)| {
            let (reads, stages) = place(*split)?;
            Some(StalledSplit { split: *split, reads, seconds: still.as_secs_f64(), stages })
        };
        self.observer.event(&Event::Stalled {
            seconds: time.as_secs_f64(),
            at_work: splits.len() as u64,
            splits: splits.iter().take(stall::MOST_SHOWN).filter_map(place).collect(),
        });
    }

    /// What the metrics of the plan say now.
    pub(super) fn progress(&self, began: Instant) -> Progress {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let requests = self.prepared.storages.requests();
        let mut progress = Progress {
            seconds: began.elapsed().as_secs_f64(),
            splits_done: get(&self.committed),
            splits: self.splits.len() as u64,
            store_requests: requests.sent,
            store_retries: requests.again,
            bytes: get(&self.bytes),
            devices: self.devices.len() as u64,
            ..Progress::default()
        };
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner).clone();
        plans.iter().for_each(|plan| engine::add_progress(plan.as_ref(), &mut progress));
        self.add_awaited(&mut progress);
        if self.driver.is_some() {
            self.elsewhere.lock().unwrap_or_else(PoisonError::into_inner).add_to(&mut progress);
        }
        progress
    }

    /// What has happened; an error where the job is to stop for it.
    fn take(&self, step: Step, tally: &Tally<'_>) -> Result<()> {
        match step {
            Step::Begun { split, dataset_split, executor } => {
                self.observer.event(&Event::SplitStarted { split, dataset_split, executor });
            }
            Step::AtWork(reports) => {
                self.elsewhere.lock().unwrap_or_else(PoisonError::into_inner).told(reports, Instant::now())
            }
            Step::Warning(message) => self.observer.event(&Event::Warning { message }),
            Step::Made(record) => {
                self.committed(&record)?;
                if let Some(message) = tally.committed(&record)? {
                    self.observer.event(&Event::Warning { message });
                }
            }
        }
        Ok(())
    }

    fn committed(&self, record: &ShardRecord) -> Result<()> {
        let is_first = self.made.lock().unwrap_or_else(PoisonError::into_inner).insert(record.split);
        // one that is made again because it was damaged was done already
        if is_first && !self.done.contains_key(&record.split) {
            self.committed.fetch_add(1, Ordering::Relaxed);
        }
        self.bytes.fetch_add(record.bytes, Ordering::Relaxed);
        if self.driver.is_some() {
            self.elsewhere.lock().unwrap_or_else(PoisonError::into_inner).committed(record);
        }
        self.holdouts.committed(record)?;
        self.observer.event(&Event::SplitCommitted {
            split: record.split,
            shard: record.path.clone(),
            rows: record.rows,
            tokens: record.tokens,
            bytes: record.bytes,
        });
        Ok(())
    }
}

impl Session {
    /// The partition of each split.
    pub fn partitions(&self) -> HashMap<SplitId, usize> {
        self.splits.iter().enumerate().map(|(partition, split)| (split.split, partition)).collect()
    }

    /// The split of a partition.
    pub fn split(&self, partition: usize) -> Option<SplitRecord> {
        self.splits.get(partition).cloned()
    }

    /// One split from its piece of the input to its committed shard; tells of devices that were lost meanwhile.
    pub async fn execute(&self, partition: usize, lost: &(dyn Fn(String) + Send + Sync)) -> Result<Vec<ShardRecord>> {
        let resources = Arc::clone(&self.resources);
        let (plan, context) = (Arc::clone(&self.plan), Arc::clone(&self.context));
        let split = self.splits.get(partition).map(|split| split.split);
        let chain = async move {
            loop {
                let lost = resources.lost_devices();
                if let Some(split) = split {
                    resources.at_work.begin_anew(split);
                }
                let made = async { plan.execute(partition, Arc::clone(&context))?.try_collect::<Vec<_>>().await }.await;
                // a device that is gone takes nothing along: what it had of a split is made again by another one
                let now_lost = resources.lost_devices();
                if made.is_err() && now_lost > lost && now_lost < resources.devices.len() {
                    continue;
                }
                resources.has_failed.fetch_or(made.is_err(), Ordering::Relaxed);
                return made;
            }
        };
        let stopped = || match self.splits.get(partition) {
            Some(split) => format!("{} stopped: a fault of this program", describe(split)),
            None => format!("the plan has no partition {partition}"),
        };
        let made = self.resources.spawner.chain(chain).wait().await;
        for device in self.resources.devices.iter().filter_map(DeviceQueue::newly_lost) {
            lost(format!("{device} is lost; its splits go to the other devices"));
        }
        let batches = made
            .map_err(|e| PipelineError::caused(ErrorKind::Output, stopped(), e))?
            .map_err(PipelineError::of_plan)?;
        let mut made = Vec::new();
        for batch in &batches {
            made.append(&mut records(batch).map_err(PipelineError::of_plan)?);
        }
        Ok(made)
    }
}

/// This process: so many splits at once.
struct LocalDriver<'a> {
    session: &'a Session,
    at_once: usize,
}

impl LocalDriver<'_> {
    async fn run_split(&self, work: &Work, partition: usize, tell: EventSink<'_>) -> Result<()> {
        if work.stop.load(Ordering::Relaxed) || self.session.resources.has_failed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let SplitTask { split, dataset_split, .. } = work.splits[partition].clone();
        tell(Step::Begun { split, dataset_split, executor: None })?;
        let warn = |message| drop(tell(Step::Warning(message)));
        for record in self.session.execute(partition, &warn).await? {
            tell(Step::Made(Box::new(record)))?;
        }
        Ok(())
    }
}

impl Driver for LocalDriver<'_> {
    /// After a failure the others are told to stop and waited for, so that nothing is written once this returns.
    fn drive<'a>(&'a self, work: &'a Work, tell: EventSink<'a>) -> BoxFuture<'a, Result<()>> {
        let splits = futures::stream::iter(0..work.splits.len())
            .map(move |partition| self.run_split(work, partition, tell))
            .buffer_unordered(self.at_once);
        let until_one_fails = async move {
            tokio::pin!(splits);
            let mut failure = None;
            while let Some(result) = splits.next().await {
                if let Err(e) = result {
                    work.stop.store(true, Ordering::Relaxed);
                    // what the others say afterwards is that they were stopped
                    failure.get_or_insert(e);
                }
            }
            failure.map_or(Ok(()), Err)
        };
        until_one_fails.boxed()
    }
}

/// Grows as long as anything of the work moves.
fn moved(progress: &Progress) -> u64 {
    progress.stages.iter().map(|stage| stage.rows).sum::<u64>() + progress.splits_done + progress.teacher_tokens
}

/// What the plan of a job works with in this process.
pub(crate) fn resources(
    prepared: &Arc<Prepared>,
    output: &Output,
    devices: &[DeviceQueue],
    spawner: Spawner,
    stop: &Arc<AtomicBool>,
) -> JobResources {
    let (of, specials) = (Arc::clone(prepared), prepared.vocabulary.special_tokens());
    JobResources {
        store: prepared.store.clone(),
        vocabulary: Arc::clone(&prepared.vocabulary),
        devices: devices.to_vec(),
        output: output.clone(),
        limits: Arc::new(move |split| {
            operators::limits(&of.spec, of.vocab_size, &specials, (split.split, split.place))
        }),
        spawner,
        operators_overlap: false,
        has_failed: AtomicBool::new(false),
        stop: Arc::clone(stop),
        stages: stages(&prepared.operators),
        at_work: SplitsAtWork::default(),
    }
}

fn corpus(prepared: &Prepared, files: &Arc<Vec<InputFile>>, splits: &Arc<Vec<SplitRecord>>) -> Corpus {
    let input = Arc::new(crate::job::query_input(prepared));
    Corpus { files: Arc::clone(files), input, splits: Arc::clone(splits), query_skipped: None }
}

fn shards(
    prepared: &Prepared,
    splits: &[SplitRecord],
    names: &BTreeMap<SplitId, String>,
    remade: &BTreeMap<SplitId, ShardRecord>,
) -> Shards {
    let shard = |split: &SplitRecord| Shard {
        name: names.get(&split.split).cloned().unwrap_or_default(),
        was: remade.get(&split.split).cloned(),
    };
    Shards { spec: prepared.spec.output.clone(), shards: Arc::new(splits.iter().map(shard).collect()) }
}

/// The plan of a job over these splits, for looking at it.
pub(crate) fn physical_plan(
    prepared: &Prepared,
    files: &[InputFile],
    splits: Vec<SplitRecord>,
) -> datafusion::common::Result<Arc<dyn ExecutionPlan>> {
    let names = shard_names(&splits);
    let corpus = corpus(prepared, &Arc::new(files.to_vec()), &Arc::new(splits));
    let shards = shards(prepared, &corpus.splits, &names, &BTreeMap::new());
    engine::job_plan(corpus, &prepared.operators, shards)
}

/// How many splits may be at work at once.
fn splits_at_once(spec: &JobSpec, devices: usize) -> usize {
    let wanted = match spec.engine.parallel_splits {
        Some(n) => n as usize,
        None if spec.extract.is_some() => SPLITS_OF_A_DEVICE * devices.max(1),
        None => rayon::current_num_threads(),
    };
    wanted.min(splits_with_memory(spec)).max(1)
}

/// Splits at once that the memory of a job has room for: at least one.
pub(super) fn splits_with_memory(spec: &JobSpec) -> usize {
    let room = spec
        .engine
        .memory_megabytes
        .map(|megabytes| megabytes / (ROW_GROUPS_OF_A_SPLIT * spec.output.row_group_megabytes));
    room.map_or(usize::MAX, |room| room as usize).max(1)
}

/// What the nodes of a plan share of this machine: the memory of the job.
fn runtime(engine: &Engine) -> Result<Arc<RuntimeEnv>> {
    let builder = RuntimeEnvBuilder::new();
    let builder = match engine.memory_megabytes {
        Some(megabytes) => {
            let pool = GreedyMemoryPool::new(megabytes as usize * 1_000_000);
            builder.with_memory_pool(Arc::new(TrackConsumersPool::new(pool, CONSUMERS_LISTED)))
        }
        None => builder,
    };
    builder.build_arc().map_err(PipelineError::of_plan)
}

/// `train-00003-of-00042.parquet` for each split. The count is of the splits that there were with the append that it came with,
/// so that no shard changes its name when others come after it.
pub(crate) fn shard_names(splits: &[SplitRecord]) -> BTreeMap<SplitId, String> {
    let of = |split: &SplitRecord| (split.dataset_split.clone(), split.appended);
    let mut counts: BTreeMap<(String, u32), usize> = BTreeMap::new();
    for split in splits {
        *counts.entry(of(split)).or_default() += 1;
    }
    // each with those before it
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
