//! The splits of a job at work: so many at once, each read, worked on, written and committed by itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use futures::{Stream, StreamExt};
use stillhouse_operators::operator::{SharedStatistics, SplitContext};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use tokio::runtime::Handle;

use super::Job;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Progress, StalledSplit};
use crate::exec::{DocumentsExec, OperatorExec};
use crate::shard::{self, Writing};
use crate::stages::Stages;
use crate::stall::{self, Stall, StallWatch};
use crate::verdict::Tally;
use crate::{operators, source, threads};

const TICK: Duration = Duration::from_millis(250);

impl Job {
    pub(super) async fn run_splits(&self, mut pending: Vec<SplitRecord>, began: Instant) -> Result<()> {
        self.held.check()?;
        // a holdout that comes out empty is told before the work on all the rest
        pending.sort_by_key(|split| split.dataset_split == source::TRAIN);
        let names = shard_names(&self.splits);
        let wanted = match self.prepared.spec.engine.parallel_splits {
            Some(n) => n as usize,
            None if self.teacher.is_some() => 1,
            None => rayon::current_num_threads(),
        };
        let tally = Tally::new(&self.prepared.spec, &self.splits, &self.done);
        let splits = futures::stream::iter(pending)
            .map(|split| {
                let name = names.get(&split.split).cloned().unwrap_or_default();
                let tally = &tally;
                async move {
                    if !self.stop.load(Ordering::Relaxed) {
                        let record = self.run_split(&split, &name).await?;
                        if let Some(message) = tally.committed(&record)? {
                            self.observer.event(&Event::Warning { message });
                        }
                    }
                    Ok::<_, PipelineError>(())
                }
            })
            .buffer_unordered(threads::splits_at_once(wanted, self.stages.count()));
        let work = self.until_one_fails(splits);
        tokio::pin!(work);
        let mut ticks = tokio::time::interval(TICK);
        let mut watch = StallWatch::new(stall::PATIENCE, Instant::now());
        loop {
            tokio::select! {
                result = &mut work => {
                    self.progress(began);
                    if result.is_err() && tally.is_fruitless() {
                        self.output.remove().await?;
                    }
                    return result;
                }
                _ = ticks.tick() => {
                    self.progress(began);
                    self.look_for_a_stall(&mut watch);
                }
            }
        }
    }

    /// Tells where everything stands when nothing has moved for a while.
    fn look_for_a_stall(&self, watch: &mut StallWatch) {
        let at_work = self.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        let moved = self.stages.rows()
            + self.committed.load(Ordering::Relaxed)
            + self.counters.teacher_tokens.load(Ordering::Relaxed)
            + self.prepared.storages.requests().sent;
        let rows = at_work.iter().map(|(split, (_, stages))| (*split, stages.rows()));
        let Some(Stall { time, splits }) = watch.look(Instant::now(), moved, rows) else { return };
        let place = |(split, still): &(SplitId, Duration)| {
            let (reads, stages) = at_work.get(split)?;
            let (seconds, stages) = (still.as_secs_f64(), stages.places());
            Some(StalledSplit { split: *split, reads: reads.clone(), seconds, stages })
        };
        self.observer.event(&Event::Stalled {
            seconds: time.as_secs_f64(),
            at_work: splits.len() as u64,
            splits: splits.iter().take(stall::MOST_SHOWN).filter_map(place).collect(),
        });
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

    fn progress(&self, began: Instant) {
        let c = &self.counters;
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let requests = self.prepared.storages.requests();
        self.observer.event(&Event::Progress(Progress {
            seconds: began.elapsed().as_secs_f64(),
            splits_done: get(&self.committed),
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

    async fn run_split(&self, split: &SplitRecord, shard: &str) -> Result<ShardRecord> {
        let stages = Arc::new(self.stages.of_a_split());
        let at_work = || self.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        at_work()
            .insert(split.split, (split.pieces.first().map(|p| p.file.clone()).unwrap_or_default(), stages.clone()));
        let result = self.make(split, shard, &stages).await;
        at_work().remove(&split.split);
        result
    }

    /// One split from its piece of the input to its committed shard.
    async fn make(&self, split: &SplitRecord, shard: &str, stages: &Stages) -> Result<ShardRecord> {
        self.observer.event(&Event::SplitStarted { split: split.split, dataset_split: split.dataset_split.clone() });
        let statistics = SharedStatistics::default();
        if self.splits.first().is_some_and(|first| first.split == split.split) {
            statistics.lock().skipped.clone_from(&self.skipped);
        }
        let context = SplitContext {
            split: split.split,
            dataset_split: split.dataset_split.clone(),
            vocabulary: Arc::clone(&self.prepared.vocabulary),
            teacher: self.teacher.clone(),
            statistics: statistics.clone(),
            counters: Arc::clone(&self.counters),
        };
        let place = describe(split);
        let read = Arc::new(Mutex::new(Vec::new()));
        let plan = self.split_plan(split, &context, stages, &read)?;
        let (output, spec, name) = (self.output.clone(), self.prepared.spec.output.clone(), shard.to_owned());
        let specials = self.prepared.vocabulary.special_tokens();
        let limits = operators::limits(&self.prepared.spec, self.prepared.vocab_size, &specials, split.split);
        let (stop, stage) = (Arc::clone(&self.stop), Arc::clone(&stages.write));
        let checksums = self.remade.get(&split.split).is_none_or(|was| was.footer.is_some());
        let runtime = Handle::current();
        // Encoding and compressing a shard is long work for an async worker, so the writer has a thread of its own, as each stage has.
        let written = threads::start("write", move || {
            runtime.block_on(async {
                let stream = plan
                    .execute(0, Arc::new(TaskContext::default()))
                    .map_err(|e| PipelineError::from_stage(place.clone(), e))?;
                let how =
                    Writing { spec: &spec, limits: &limits, context: &place, stop: &stop, stage: &stage, checksums };
                shard::write(&output, &name, stream, how).await
            })
        });
        let written = written.map_err(PipelineError::output("the system gives no thread for the writer"))?;
        let written = written
            .await
            .map_err(|_| PipelineError::new(ErrorKind::Output, "the writer stopped: a fault of this program"))??;
        let record = ShardRecord {
            path: format!("data/{shard}"),
            dataset_split: split.dataset_split.clone(),
            split: split.split,
            rows: written.rows,
            tokens: written.tokens,
            bytes: written.staged.bytes,
            sha256: written.staged.sha256.clone(),
            footer: written.footer,
            column_bytes: written.column_bytes,
            input_sha256: read.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            statistics: statistics.lock().clone(),
        };
        let record = match self.remade.get(&split.split) {
            Some(was) => {
                self.output.replace(written.staged, &record, was).await?;
                was.clone()
            }
            None => self.output.commit(written.staged, record).await?,
        };
        self.made.lock().unwrap_or_else(PoisonError::into_inner).insert(split.split);
        self.committed.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(record.bytes, Ordering::Relaxed);
        self.held.committed(&record)?;
        self.observer.event(&Event::SplitCommitted {
            split: split.split,
            shard: record.path.clone(),
            rows: record.rows,
            tokens: record.tokens,
            bytes: record.bytes,
        });
        Ok(record)
    }

    fn split_plan(
        &self,
        split: &SplitRecord,
        context: &SplitContext,
        stages: &Stages,
        read: &Arc<Mutex<Vec<String>>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let stage = Arc::clone(&stages.read);
        let documents = DocumentsExec::new(self.corpus.clone(), split.clone(), context.clone(), stage).noting(read);
        let mut plan: Arc<dyn ExecutionPlan> = Arc::new(documents);
        for (spec, stage) in self.prepared.operators.iter().zip(&stages.operators) {
            plan = Arc::new(OperatorExec::new(spec.clone(), context.clone(), Arc::clone(stage), plan));
        }
        Ok(plan)
    }
}

/// `train-00003-of-00042.parquet` for each split.
pub(crate) fn shard_names(splits: &[SplitRecord]) -> BTreeMap<SplitId, String> {
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
        let split = |id, name: &str| SplitRecord {
            split: SplitId(id),
            dataset_split: name.into(),
            pieces: Vec::new(),
            keys: None,
        };
        let names = shard_names(&[split(0, "train"), split(1, "train"), split(2, "validation")]);
        assert_eq!(names[&SplitId(1)], "train-00001-of-00002.parquet");
        assert_eq!(names[&SplitId(2)], "validation-00000-of-00001.parquet");
    }
}
