//! Running a job on this machine: splits in parallel, each committed on its own, then the manifest.
//!
//! ```text
//!   plan ─► splits not yet committed ─► [parallel_splits at once] ─► stage, commit ─► manifest, card, _SUCCESS
//! ```
//!
//! Nothing that depends on the number of threads, on time or on earlier runs reaches a shard: a split is a function
//! of the job, its piece of the input and the teacher.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use futures::{Stream, StreamExt};
use stillhouse_operators::operator::{Counters, SharedStatistics, SplitContext};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use stillhouse_schemas::spec::Dtype;
use stillhouse_teacher::{LoadOptions, Precision, Teacher};
use tokio::runtime::Handle;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer, Progress};
use crate::exec::{Corpus, DocumentsExec, OperatorExec};
use crate::finish;
use crate::job::{Prepared, chain};
use crate::output::{self, Found, Output, PlanRecord};
use crate::plan::{self, JobHash};
use crate::shard::{self, Writing};
use crate::source::{self, Staged};
use crate::stages::Stages;
use crate::{functions, operators};

/// How to run.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunOptions {
    /// Remove the output of another job first.
    pub overwrite: bool,
}

const TICK: Duration = Duration::from_millis(250);

/// Runs a job to its end; goes on where an earlier run of the same job stopped.
///
/// # Errors
/// When the output belongs to another job, when a split fails, when the output cannot be written. Committed splits stay.
pub async fn run(prepared: Arc<Prepared>, options: RunOptions, observer: Arc<dyn Observer>) -> Result<()> {
    let began = Instant::now();
    let hash = blocking(&prepared, &observer, |p, o| plan::job_hash(p, o)).await?;
    let output = prepared.output()?;
    // before anything is written, so that a job that must not write here leaves no trace
    if let Err(e) = output.look(&hash.hash).await
        && !(options.overwrite && e.kind == ErrorKind::Usage && output.is_of_a_job().await?)
    {
        return Err(e);
    }
    let fresh = output.is_nothing().await?;
    let made_folder = output.folder().is_some_and(|folder| !folder.exists());
    let output = output.create(observer.as_ref()).await?.for_job(&hash.hash);
    let lock = output.lock(observer.as_ref()).await?;
    let result = run_locked(prepared, hash, &output, options, observer, began).await;
    if result.is_err() && fresh {
        output.remove_if_nothing_is_committed(made_folder).await;
    }
    lock.release().await;
    result
}

async fn run_locked(
    prepared: Arc<Prepared>,
    hash: JobHash,
    output: &Output,
    options: RunOptions,
    observer: Arc<dyn Observer>,
    began: Instant,
) -> Result<()> {
    let mut found = output.look(&hash.hash).await;
    if options.overwrite && matches!(&found, Err(e) if e.kind == ErrorKind::Usage) && output.is_of_a_job().await? {
        output.remove().await?;
        found = output.look(&hash.hash).await;
    }
    let done = match found? {
        Found::Complete => {
            output.clean_state().await?;
            return finish::already_done(output, observer.as_ref()).await;
        }
        Found::Nothing => {
            output.recover(Vec::new()).await?;
            BTreeMap::new()
        }
        Found::Resumable { mut done, unsettled } => {
            done.extend(output.recover(unsettled).await?);
            done
        }
    };
    let job = Job::start(prepared, hash, output.clone(), done, Arc::clone(&observer)).await?;
    job.run_splits(began).await?;
    job.finish(began).await
}

async fn blocking<T: Send + 'static>(
    prepared: &Arc<Prepared>,
    observer: &Arc<dyn Observer>,
    f: impl FnOnce(&Prepared, &dyn Observer) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (prepared, observer) = (Arc::clone(prepared), Arc::clone(observer));
    tokio::task::spawn_blocking(move || f(&prepared, observer.as_ref()))
        .await
        .map_err(|e| PipelineError::caused(ErrorKind::Input, "a worker stopped", e))?
}

struct Job {
    prepared: Arc<Prepared>,
    hash: JobHash,
    output: Output,
    splits: Vec<SplitRecord>,
    corpus: Corpus,
    /// Bad records that `input.sql` met; they are counted with the first split.
    skipped: BTreeMap<String, u64>,
    done: BTreeMap<SplitId, ShardRecord>,
    teacher: Option<Arc<dyn Teacher>>,
    counters: Arc<Counters>,
    stages: Arc<Stages>,
    /// Bytes of the shards that this run has committed.
    bytes: AtomicU64,
    /// Set when a split has failed: the others end at their next batch.
    stop: Arc<AtomicBool>,
    observer: Arc<dyn Observer>,
}

impl Job {
    async fn start(
        prepared: Arc<Prepared>,
        hash: JobHash,
        output: Output,
        done: BTreeMap<SplitId, ShardRecord>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let earlier = output.get_json::<PlanRecord>("_stillhouse/plan.json").await?;
        let (files, skipped) = match &prepared.spec.input.sql {
            Some(_) => {
                let folder = output.sql_folder(&hash.hash)?;
                let staged = blocking(&prepared, &observer, move |p, o| stage_query(p, &folder, o)).await?;
                (staged.files, staged.skipped)
            }
            None => (prepared.files.clone(), BTreeMap::new()),
        };
        let splits = match earlier {
            Some(plan) => plan.splits,
            None => {
                let files = files.clone();
                blocking(&prepared, &observer, move |p, o| plan::splits(p, &files, o)).await?
            }
        };
        if splits.is_empty() {
            let read =
                if prepared.spec.input.sql.is_some() { "input.sql gave no rows" } else { "the input holds no records" };
            return Err(PipelineError::new(ErrorKind::Input, format!("{read}: there is nothing to prepare")));
        }
        let record = PlanRecord {
            job_hash: hash.hash.clone(),
            name: prepared.spec.name.clone(),
            job_folder: output
                .folder()
                .and_then(|folder| output::relative(folder, &prepared.base))
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            splits: splits.clone(),
        };
        output.begin(&record).await?;
        let pending = splits.iter().any(|s| !done.contains_key(&s.split));
        let teacher = if prepared.teacher.is_some() {
            blocking(&prepared, &observer, move |p, o| load_teacher(p, pending, o)).await?
        } else {
            None
        };
        observer.event(&Event::JobStarted {
            name: prepared.spec.name.clone(),
            output: output.to_string(),
            splits: splits.len() as u64,
            splits_done: done.len() as u64,
            bytes_done: done.values().map(|shard| shard.bytes).sum(),
            input_bytes: plan::text_bytes(&pending_splits(&splits, &done)),
            teacher: teacher.as_ref().map(|t| {
                let info = t.info();
                format!(
                    "{}, {:.1}M parameters, {} on {}",
                    info.architecture.name(),
                    info.parameters as f64 / 1e6,
                    info.arithmetic,
                    info.device
                )
            }),
            job_hash: hash.hash.clone(),
        });
        let corpus =
            Corpus { store: prepared.store.clone(), files: Arc::new(files), input: Arc::new(query_input(&prepared)) };
        Ok(Self {
            stages: Arc::new(Stages::of(&prepared.operators)),
            bytes: AtomicU64::new(0),
            prepared,
            hash,
            output,
            splits,
            corpus,
            skipped,
            done,
            teacher,
            counters: Arc::new(Counters::default()),
            stop: Arc::default(),
            observer,
        })
    }

    async fn run_splits(&self, began: Instant) -> Result<()> {
        let pending = pending_splits(&self.splits, &self.done);
        let names = shard_names(&self.splits);
        let at_once = match self.prepared.spec.engine.parallel_splits {
            Some(n) => n as usize,
            None if self.teacher.is_some() => 1,
            None => rayon::current_num_threads(),
        };
        let committed = AtomicU64::new(self.done.len() as u64);
        let splits = futures::stream::iter(pending)
            .map(|split| {
                let name = names.get(&split.split).cloned().unwrap_or_default();
                let committed = &committed;
                async move {
                    if !self.stop.load(Ordering::Relaxed) {
                        self.run_split(&split, &name).await?;
                        committed.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok::<_, PipelineError>(())
                }
            })
            .buffer_unordered(at_once);
        let work = self.until_one_fails(splits);
        tokio::pin!(work);
        let mut ticks = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                result = &mut work => {
                    self.progress(began, committed.load(Ordering::Relaxed));
                    return result;
                }
                _ = ticks.tick() => self.progress(began, committed.load(Ordering::Relaxed)),
            }
        }
    }

    /// Runs the splits; after a failure the others are told to stop and waited for, so that nothing is written once
    /// this returns.
    async fn until_one_fails(&self, splits: impl Stream<Item = Result<()>>) -> Result<()> {
        tokio::pin!(splits);
        let mut failure = None;
        while let Some(result) = splits.next().await {
            if let Err(e) = result {
                self.stop.store(true, Ordering::Relaxed);
                // what the others say afterwards is that they were stopped
                failure.get_or_insert(e);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    fn progress(&self, began: Instant, splits_done: u64) {
        let c = &self.counters;
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let requests = self.prepared.storages.requests();
        self.observer.event(&Event::Progress(Progress {
            seconds: began.elapsed().as_secs_f64(),
            splits_done,
            splits: self.splits.len() as u64,
            documents: get(&c.documents),
            text_bytes: get(&c.text_bytes),
            tokens: get(&c.tokens),
            sequences: get(&c.sequences),
            teacher_tokens: get(&c.teacher_tokens),
            teacher_seconds: get(&c.teacher_nanos) as f64 / 1e9,
            extract_seconds: get(&c.extract_nanos) as f64 / 1e9,
            stages: self.stages.progress(),
            store_requests: requests.sent,
            store_retries: requests.again,
            bytes: get(&self.bytes),
        }));
    }

    /// One split from its piece of the input to its committed shard.
    async fn run_split(&self, split: &SplitRecord, shard: &str) -> Result<()> {
        self.observer.event(&Event::SplitStarted { split: split.split, dataset_split: split.dataset_split.clone() });
        let statistics = SharedStatistics::default();
        if self.splits.first().is_some_and(|first| first.split == split.split) {
            statistics.lock().skipped.clone_from(&self.skipped);
        }
        let context = SplitContext {
            split: split.split,
            vocabulary: Arc::clone(&self.prepared.vocabulary),
            teacher: self.teacher.clone(),
            statistics: statistics.clone(),
            counters: Arc::clone(&self.counters),
        };
        let place = describe(split);
        let plan = self.split_plan(split, &context)?;
        let (output, spec, name) = (self.output.clone(), self.prepared.spec.output.clone(), shard.to_owned());
        let limits = operators::limits(&self.prepared.spec, self.prepared.vocab_size, split.split);
        let (stop, stage) = (Arc::clone(&self.stop), Arc::clone(&self.stages.write));
        // Encoding and compressing a shard is long work for an async worker, so the writer has a thread of its own.
        let written = tokio::task::spawn_blocking(move || {
            let stream = plan
                .execute(0, Arc::new(TaskContext::default()))
                .map_err(|e| PipelineError::from_stage(place.clone(), e))?;
            let how = Writing { spec: &spec, limits: &limits, context: &place, stop: &stop, stage: &stage };
            Handle::current().block_on(shard::write(&output, &name, stream, how))
        })
        .await
        .map_err(|e| PipelineError::caused(ErrorKind::Output, "a worker stopped", e))??;
        let record = ShardRecord {
            path: format!("data/{shard}"),
            dataset_split: split.dataset_split.clone(),
            split: split.split,
            rows: written.rows,
            tokens: written.tokens,
            bytes: written.staged.bytes,
            sha256: written.staged.sha256.clone(),
            column_bytes: written.column_bytes,
            statistics: statistics.lock().clone(),
        };
        let record = self.output.commit(written.staged, record).await?;
        self.bytes.fetch_add(record.bytes, Ordering::Relaxed);
        self.observer.event(&Event::SplitCommitted {
            split: split.split,
            shard: record.path,
            rows: record.rows,
            tokens: record.tokens,
            bytes: record.bytes,
        });
        Ok(())
    }

    fn split_plan(&self, split: &SplitRecord, context: &SplitContext) -> Result<Arc<dyn ExecutionPlan>> {
        let read = Arc::clone(&self.stages.read);
        let documents = DocumentsExec::new(self.corpus.clone(), split.clone(), context.clone(), read);
        let mut plan: Arc<dyn ExecutionPlan> = Arc::new(documents);
        let (spec, operators) = (&self.prepared.spec, &self.prepared.operators);
        let specs = operators::for_split(spec, operators, &split.dataset_split, &self.prepared.vocabulary)?;
        for (spec, stage) in specs.into_iter().zip(&self.stages.operators) {
            plan = Arc::new(OperatorExec::new(spec, context.clone(), Arc::clone(stage), plan));
        }
        Ok(plan)
    }

    async fn finish(self, began: Instant) -> Result<()> {
        let own = self.output.records().await?.into_iter().filter(|r| r.job_hash == self.hash.hash);
        let mut records: BTreeMap<SplitId, ShardRecord> = own.map(|r| (r.shard.split, r.shard)).collect();
        self.output.still_ours().await?;
        let mut shards = Vec::new();
        for split in &self.splits {
            shards.push(records.remove(&split.split).ok_or_else(|| {
                let gone = format!("{}: the record of split {} is gone", self.output, split.split.0);
                PipelineError::new(ErrorKind::Output, gone)
            })?);
        }
        let info = self.teacher.as_ref().map(|t| t.info().clone());
        let manifest = finish::manifest(&self.prepared, &self.hash, info.as_ref(), self.splits, shards)?;
        finish::write(&self.prepared, &self.output, &manifest).await?;
        if self.output.folder().is_none() && self.prepared.spec.input.sql.is_some() {
            // beside an output on a disk they go with the rest of the state
            let folder = self.output.sql_folder(&self.hash.hash)?;
            if let Err(e) = std::fs::remove_dir_all(&folder) {
                tracing::warn!("the rows of input.sql could not be removed from {}: {e}", folder.display());
            }
        }
        finish::report(&self.output, &manifest, began.elapsed().as_secs_f64(), false, self.observer.as_ref());
        Ok(())
    }
}

/// The input as a split reads it: what a query gave is Parquet, whatever the query read.
pub(crate) fn query_input(prepared: &Prepared) -> stillhouse_schemas::spec::Input {
    let mut input = prepared.spec.input.clone();
    if input.sql.is_some() {
        input.format = stillhouse_schemas::spec::InputFormat::Parquet;
        input.compression = stillhouse_schemas::spec::Compression::Auto;
    }
    input
}

/// Runs `input.sql` once and keeps its rows beside the output, so that every split reads the same rows.
///
/// Rows that an earlier run of this job has staged are used again.
fn stage_query(prepared: &Prepared, folder: &Path, observer: &dyn Observer) -> Result<Staged> {
    if let Some(staged) = source::staged(folder) {
        return Ok(staged);
    }
    observer.event(&Event::Preparing { what: "running input.sql".into() });
    let memory = u64::from(prepared.spec.engine.sql_memory_megabytes) * 1_000_000;
    source::stage_sql(&prepared.store, &prepared.files, &prepared.spec.input, memory, folder, functions::register)
        .map_err(|e| PipelineError::source("input.sql", e))
}

/// Loads the teacher; when every split is done only its description is needed, and loading gives that too.
fn load_teacher(prepared: &Prepared, pending: bool, observer: &dyn Observer) -> Result<Option<Arc<dyn Teacher>>> {
    let (Some(found), Some(extract)) = (&prepared.teacher, &prepared.spec.extract) else { return Ok(None) };
    if pending {
        observer.event(&Event::Preparing { what: format!("loading the teacher {}", found.source) });
    }
    load(&found.path, &extract.teacher.device, extract.teacher.dtype).map(Some)
}

/// Loads a teacher.
///
/// # Errors
/// When its files or the device cannot be had.
pub fn load(path: &Path, device: &str, dtype: Dtype) -> Result<Arc<dyn Teacher>> {
    let fail =
        |e: stillhouse_teacher::TeacherError| PipelineError::new(ErrorKind::Model, format!("teacher: {}", chain(&e)));
    let options = LoadOptions {
        device: device.parse().map_err(fail)?,
        dtype: match dtype {
            Dtype::F32 => Precision::F32,
            Dtype::Bf16 => Precision::Bf16,
            Dtype::F16 => Precision::F16,
        },
    };
    stillhouse_teacher::load(path, &options).map(Arc::from).map_err(fail)
}

fn pending_splits(splits: &[SplitRecord], done: &BTreeMap<SplitId, ShardRecord>) -> Vec<SplitRecord> {
    splits.iter().filter(|s| !done.contains_key(&s.split)).cloned().collect()
}

/// `train-00003-of-00042.parquet` for each split.
fn shard_names(splits: &[SplitRecord]) -> BTreeMap<SplitId, String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for split in splits {
        *counts.entry(&split.dataset_split).or_default() += 1;
    }
    let mut next: BTreeMap<&str, usize> = BTreeMap::new();
    let mut names = BTreeMap::new();
    for split in splits {
        let number = next.entry(&split.dataset_split).or_default();
        let count = counts.get(split.dataset_split.as_str()).copied().unwrap_or_default();
        names.insert(split.split, format!("{}-{number:05}-of-{count:05}.parquet", split.dataset_split));
        *number += 1;
    }
    names
}

fn describe(split: &SplitRecord) -> String {
    let place = split.pieces.first().map_or_else(String::new, |p| match split.pieces.len() {
        1 => format!(" ({})", p.file),
        n => format!(" ({} and {} more)", p.file, n - 1),
    });
    format!("split {}{place}", split.split.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_counted_by_data_set_split() {
        let split = |id, name: &str| SplitRecord { split: SplitId(id), dataset_split: name.into(), pieces: Vec::new() };
        let names = shard_names(&[split(0, "train"), split(1, "train"), split(2, "validation")]);
        assert_eq!(names[&SplitId(1)], "train-00001-of-00002.parquet");
        assert_eq!(names[&SplitId(2)], "validation-00000-of-00001.parquet");
    }
}
