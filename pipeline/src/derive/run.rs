//! The derivation at work: shard after shard, so many at once, and the manifest at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::SchemaRef;
use datafusion::common::DataFusionError;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, UnboundedMemoryPool};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};
use sha2::{Digest, Sha256};
use stillhouse_operators::extract::LOOSENED;
use stillhouse_operators::operator::{Counters, Operator, OperatorError, SplitContext};
use stillhouse_operators::subtokens::SubtokensConfig;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Manifest, ShardRecord, Statistics, SubtokenRecord, Totals};
use tokio::runtime::Handle;

use super::{Derivation, beside, manifest_digest};
use crate::card::card;
use crate::dataset::Selection;
use crate::engine::pool::Pool;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer, Progress};
use crate::job_diff::differences_of;
use crate::node_metrics::NodeMetrics;
use crate::output::{CARD, Found, MANIFEST, Output, PlanRecord, TOKENIZER};
use crate::shard::{self, Writing};
use crate::stage_state::SplitState;
use crate::stage_state::StageState;
use crate::{acceptance, damage, finish, operators};

const TICK: Duration = Duration::from_millis(250);
const STAGES: [&str; 2] = ["derive", "write"];

/// How to derive.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeriveOptions {
    /// Remove the output of another job first.
    pub overwrite: bool,
}

/// Makes it; goes on where an earlier derivation stopped, and mends a finished one that is damaged.
///
/// # Errors
/// When the output belongs to another job or holds the data set itself, when a shard is not what its manifest says, when the output cannot
/// be written. Committed shards stay.
pub async fn derive(derivation: Derivation, options: DeriveOptions, observer: Arc<dyn Observer>) -> Result<()> {
    let began = Instant::now();
    let output = derivation.output.clone();
    if manifest_digest(&output).await?.is_some_and(|digest| digest == derivation.from.manifest_sha256) {
        let message =
            format!("output.path: {output} holds the data set that this is derived from; choose another folder");
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    let may_replace = async |e: &PipelineError| -> Result<bool> {
        Ok(options.overwrite && e.kind == ErrorKind::Usage && output.is_of_a_job().await?)
    };
    let differs = |plan: &PlanRecord| differences_of(plan, &derivation.identity, &[]);
    if let Err(e) = output.look_as(&derivation.hash, &differs).await
        && !may_replace(&e).await?
    {
        return Err(e);
    }
    let fresh = output.is_nothing().await?;
    let made_folder = output.folder().is_some() && !output.has_folder().await;
    let output = output.clone().create(observer.as_ref()).await?.for_job(&derivation.hash);
    let lock = output.lock(observer.as_ref()).await?;
    let work = Work {
        derivation,
        output,
        observer,
        stop: AtomicBool::new(false),
        made: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        rows: AtomicU64::new(0),
    };
    let work = Arc::new(work);
    let result = Arc::clone(&work).all(options, began).await;
    if result.is_err() && fresh {
        work.output.remove_if_nothing_is_committed(made_folder).await;
    }
    lock.release().await;
    result
}

struct Work {
    derivation: Derivation,
    output: Output,
    observer: Arc<dyn Observer>,
    /// Set when a shard has failed: the others end at their next batch.
    stop: AtomicBool,
    made: AtomicU64,
    bytes: AtomicU64,
    rows: AtomicU64,
}

impl Work {
    async fn all(self: Arc<Self>, options: DeriveOptions, began: Instant) -> Result<()> {
        let (output, hash) = (&self.output, &self.derivation.hash);
        let mut found = output.look(hash).await;
        if options.overwrite && matches!(&found, Err(e) if e.kind == ErrorKind::Usage) && output.is_of_a_job().await? {
            output.remove().await?;
            found = output.look(hash).await;
        }
        let (done, complete) = match found? {
            Found::Nothing => (output.recover(Vec::new()).await?, false),
            Found::Resumable { mut done, unsettled } => {
                done.extend(output.recover(unsettled).await?);
                (done, false)
            }
            Found::Complete => {
                let manifest = finish::manifest_of(output).await?;
                (manifest.shards.into_iter().map(|shard| (shard.split, shard)).collect(), true)
            }
        };
        // what an earlier derivation made may have been damaged since
        let damaged = damage::damaged_shards(output, done.values(), true, self.observer.as_ref()).await?;
        for damage in &damaged {
            let message = format!("{}: {}; it is made again", output.shown(&damage.name), damage.message);
            self.observer.event(&Event::Warning { message });
        }
        let again: BTreeSet<SplitId> = damaged.iter().filter_map(|damage| damage.split).collect();
        if !complete {
            output.begin(&self.plan()).await?;
        }
        self.started(&done);
        let made = Arc::clone(&self).shards(&done, &again, began).await?;
        let manifest = self.manifest(done, made)?;
        acceptance::judge(&self.derivation.spec, &manifest)?;
        output.put_own(TOKENIZER, self.derivation.tokenizer.clone()).await?;
        for (name, bytes) in beside(&self.derivation.operators) {
            output.put_own(name, bytes).await?;
        }
        output.put_own_json(MANIFEST, &manifest).await?;
        output.put_own(CARD, card(&manifest).into_bytes()).await?;
        output.finish().await?;
        let nothing_to_do = complete && again.is_empty();
        finish::report(output, &manifest, began.elapsed().as_secs_f64(), nothing_to_do, self.observer.as_ref());
        Ok(())
    }

    fn source(&self) -> &Manifest {
        self.derivation.source.manifest()
    }

    fn plan(&self) -> PlanRecord {
        PlanRecord {
            job_hash: self.derivation.hash.clone(),
            name: self.derivation.spec.name.clone(),
            job_folder: String::new(),
            job_file: String::new(),
            identity: self.derivation.identity.clone(),
            files: Vec::new(),
            splits: self.derivation.splits.clone(),
            appended: Vec::new(),
            teacher: None,
            staged: Vec::new(),
        }
    }

    fn started(&self, done: &BTreeMap<SplitId, ShardRecord>) {
        self.observer.event(&Event::JobStarted {
            name: self.derivation.spec.name.clone(),
            output: self.output.to_string(),
            splits: self.source().shards.len() as u64,
            splits_done: done.len() as u64,
            bytes_done: done.values().map(|shard| shard.bytes).sum(),
            input_bytes: self.source().shards.iter().map(|shard| shard.bytes).sum(),
            teacher: None,
            job_hash: self.derivation.hash.clone(),
        });
    }

    /// Makes what is not there, and again what is damaged.
    async fn shards(
        self: Arc<Self>,
        done: &BTreeMap<SplitId, ShardRecord>,
        again: &BTreeSet<SplitId>,
        began: Instant,
    ) -> Result<Vec<ShardRecord>> {
        let pending: Vec<(ShardRecord, Option<ShardRecord>)> = (self.source().shards.iter())
            .filter(|shard| !done.contains_key(&shard.split) || again.contains(&shard.split))
            .map(|shard| (shard.clone(), done.get(&shard.split).cloned()))
            .collect();
        self.made.store((self.source().shards.len() - pending.len()) as u64, Ordering::Relaxed);
        let at_once =
            self.derivation.spec.engine.parallel_splits.map_or_else(rayon::current_num_threads, |n| n as usize);
        let pool = Pool::new(rayon::current_num_threads());
        let pool = pool.map_err(PipelineError::output("the system gives no threads for the splits"))?;
        let spawner = pool.spawner().map_err(PipelineError::output("the splits"))?;
        let requests = Handle::current();
        let make = |(from, was): (ShardRecord, Option<ShardRecord>)| {
            let (work, requests) = (Arc::clone(&self), requests.clone());
            let split = from.split;
            let making = spawner.chain(async move { work.shard(&from, was, &requests).await });
            async move {
                let stopped = |e| {
                    PipelineError::caused(
                        ErrorKind::Output,
                        format!("split {} stopped: a fault of this program", split.0),
                        e,
                    )
                };
                making.wait().await.map_err(stopped)?.map_err(|e| e.of_split(split))
            }
        };
        let mut working = futures::stream::iter(pending).map(make).buffer_unordered(at_once.max(1));
        let mut ticks = tokio::time::interval(TICK);
        let (mut made, mut failure) = (Vec::new(), None);
        loop {
            tokio::select! {
                result = working.next() => match result {
                    None => break,
                    Some(Ok(record)) => made.push(record),
                    Some(Err(e)) => {
                        self.stop.store(true, Ordering::Relaxed);
                        // what the others say afterwards is that they were stopped
                        failure.get_or_insert(e);
                    }
                },
                _ = ticks.tick() => self.observer.event(&Event::Progress(self.progress(began))),
            }
        }
        self.observer.event(&Event::Progress(self.progress(began)));
        failure.map_or(Ok(made), Err)
    }

    fn progress(&self, began: Instant) -> Progress {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Progress {
            seconds: began.elapsed().as_secs_f64(),
            splits_done: get(&self.made),
            splits: self.source().shards.len() as u64,
            sequences: get(&self.rows),
            bytes: get(&self.bytes),
            ..Progress::default()
        }
    }

    /// One shard from the data set to its commit.
    async fn shard(
        self: Arc<Self>,
        from: &ShardRecord,
        was: Option<ShardRecord>,
        requests: &Handle,
    ) -> Result<ShardRecord> {
        let Derivation { source, spec, .. } = &self.derivation;
        if self.stop.load(Ordering::Relaxed) {
            return Err(PipelineError::new(ErrorKind::Output, format!("split {} was stopped", from.split.0)));
        }
        let (split, dataset_split) = (from.split, from.dataset_split.clone());
        self.observer.event(&Event::SplitStarted { split, dataset_split, executor: None });
        let shown = source.shown(&from.path);
        let (sha256, bytes) = source.output().read_whole(&from.path, |_| {}).await?;
        if (&sha256, bytes) != (&from.sha256, from.bytes) {
            let message = format!(
                "{shown}: sha256 {sha256} and {bytes} bytes, the manifest has {} and {}",
                from.sha256, from.bytes
            );
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        let state = Arc::new(SplitState::new(from.split, shown.clone(), &STAGES));
        let columns = Columns::of(&self, from, &state)?;
        let selection = Selection { batch_rows: operators::rows_per_batch(spec), ..Selection::default() };
        let unreadable = shown.clone();
        let batches = source.read(from, &selection).await?;
        let batches = batches.map_err(move |e| PipelineError::dataset(unreadable.clone())(e));
        let schema = Arc::clone(&columns.schema);
        let derived = batches.scan(columns, |columns, batch| {
            let derived = batch.and_then(|batch| columns.derive(&batch));
            futures::future::ready(Some(derived.map_err(|e| DataFusionError::External(Box::new(e)))))
        });
        let batches = Box::pin(RecordBatchStreamAdapter::new(schema, derived));
        let name = from.path.strip_prefix("data/").unwrap_or(&from.path).to_owned();
        let place = self.derivation.place(from.split);
        let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
        let (specials, vocab) = (&self.source().tokenizer.special_tokens, self.source().vocab_size as usize);
        let how = Writing {
            spec: &spec.output,
            limits: &operators::limits(spec, vocab, specials, (from.split, place)),
            context: &shown,
            stop: &self.stop,
            memory: &MemoryConsumer::new(&name).register(&pool),
            requests,
            metrics: &NodeMetrics::new(),
            stage: &StageState::new(&state, 1),
            checksums: was.as_ref().is_none_or(|was| was.footer.is_some()),
        };
        let written = shard::write(&self.output, &name, batches, how).await?;
        let record = ShardRecord {
            path: from.path.clone(),
            dataset_split: from.dataset_split.clone(),
            split: from.split,
            rows: written.rows,
            tokens: written.tokens,
            bytes: written.staged.bytes,
            sha256: written.staged.sha256.clone(),
            footer: written.footer,
            column_bytes: written.column_bytes,
            input_sha256: from.input_sha256.clone(),
            statistics: self.statistics(from, &state),
        };
        if (record.rows, record.tokens) != (from.rows, from.tokens) {
            let message = format!(
                "{shown}: {} rows and {} tokens, the manifest has {} and {}",
                record.rows, record.tokens, from.rows, from.tokens
            );
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        let output = self.output.clone();
        let commit = async move {
            match was {
                Some(was) => output.replace(written.staged, &record, &was).await.map(|()| was),
                None => output.commit(written.staged, record).await,
            }
        };
        let committed = requests.spawn(commit).await;
        let record = committed
            .map_err(|_| PipelineError::new(ErrorKind::Output, "the commit stopped: a fault of this program"))??;
        self.made.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(record.bytes, Ordering::Relaxed);
        self.observer.event(&Event::SplitCommitted {
            split: record.split,
            shard: record.path.clone(),
            rows: record.rows,
            tokens: record.tokens,
            bytes: record.bytes,
        });
        Ok(record)
    }

    /// Those of the shard it comes from; corrections are counted anew where there are fewer.
    fn statistics(&self, from: &ShardRecord, state: &SplitState) -> Statistics {
        let counted = state.statistics.lock().clone();
        let mut statistics = from.statistics.clone();
        if self.derivation.loosen.is_some() {
            statistics.corrections = counted.corrections;
            statistics.corrections_max = counted.corrections_max;
            statistics.total_variation_max = counted.total_variation_max;
            statistics.corrections_histogram = counted.corrections_histogram.clone();
            // of the lists that are empty, only how many there are is known
            let draws =
                self.derivation.spec.extract.as_ref().and_then(|e| e.noise.as_ref()).map_or(1, |noise| noise.draws);
            let lists = from.statistics.predicted_tokens * u64::from(draws);
            let filled: u64 = statistics.corrections_histogram.iter().sum();
            if lists > 0 && statistics.corrections_histogram.is_empty() {
                statistics.corrections_histogram.push(0);
            }
            if let Some(empty) = statistics.corrections_histogram.first_mut() {
                *empty = lists.saturating_sub(filled);
            }
        }
        for (name, statistic) in counted.operators {
            statistics.count(&name, statistic);
        }
        statistics
    }

    fn manifest(&self, done: BTreeMap<SplitId, ShardRecord>, made: Vec<ShardRecord>) -> Result<Manifest> {
        let mut shards = done;
        shards.extend(made.into_iter().map(|shard| (shard.split, shard)));
        let (source, derivation) = (self.source(), &self.derivation);
        let in_order = source.shards.iter().map(|from| {
            let gone = || {
                PipelineError::new(
                    ErrorKind::Output,
                    format!("{}: the record of split {} is gone", self.output, from.split.0),
                )
            };
            shards.remove(&from.split).ok_or_else(gone)
        });
        let in_order = in_order.collect::<Result<Vec<_>>>()?;
        let (mut statistics, mut totals) = (Statistics::default(), BTreeMap::<String, Totals>::new());
        for shard in &in_order {
            statistics.add(&shard.statistics);
            let total = totals.entry(shard.dataset_split.clone()).or_default();
            total.shards += 1;
            total.rows += shard.rows;
            total.tokens += shard.tokens;
            total.bytes += shard.bytes;
        }
        let subtokens = derivation.operators.iter().find_map(|operator| operator.config::<SubtokensConfig>());
        Ok(Manifest {
            job: derivation.spec.clone(),
            job_hash: derivation.hash.clone(),
            subtokens: subtokens.map(|config| SubtokenRecord { base: config.base, length: config.length as u32 }),
            beside: beside(&derivation.operators)
                .map(|(name, bytes)| (name.to_owned(), hex::encode(Sha256::digest(&bytes))))
                .collect(),
            columns: finish::columns(&finish::schema(&derivation.operators)),
            splits: derivation.splits.clone(),
            shards: in_order,
            totals,
            statistics,
            derived_from: Some(Box::new(derivation.from.clone())),
            ..source.clone()
        })
    }
}

/// What makes the columns of one shard.
struct Columns {
    work: Arc<Work>,
    operators: Vec<Box<dyn Operator>>,
    state: Arc<SplitState>,
    /// Of the shard that is made.
    schema: SchemaRef,
    /// The largest total variation that its noise may have.
    stored_variation: f64,
}

impl Columns {
    fn of(work: &Arc<Work>, from: &ShardRecord, state: &Arc<SplitState>) -> Result<Self> {
        let context = SplitContext {
            split: from.split,
            dataset_split: from.dataset_split.clone(),
            place: work.derivation.place(from.split),
            vocabulary: Arc::clone(&work.derivation.vocabulary),
            teacher: None,
            statistics: state.statistics.clone(),
            meter: Arc::new(Counters::default()),
        };
        let made = work.derivation.anew.iter().map(|operator| operator.build(&context)).collect::<Result<_, _>>();
        Ok(Self {
            work: Arc::clone(work),
            operators: made.map_err(failed(&state.reads))?,
            state: Arc::clone(state),
            schema: Arc::new(finish::schema(&work.derivation.operators)),
            stored_variation: from.statistics.total_variation_max,
        })
    }

    /// A batch with its new columns, all in the order of the format.
    fn derive(&mut self, batch: &RecordBatch) -> Result<RecordBatch> {
        let derivation = &self.work.derivation;
        let arrow = |e| PipelineError::caused(ErrorKind::DataSet, self.state.reads.clone(), e);
        let stays: Vec<usize> = (batch.schema().fields().iter().enumerate())
            .filter(|(_, field)| !derivation.from.columns.contains(field.name()))
            .map(|(column, _)| column)
            .collect();
        let mut made: BTreeMap<String, ArrayRef> = BTreeMap::new();
        if let Some(loosen) = &derivation.loosen {
            let mut statistics = self.state.statistics.lock();
            let arrays = loosen.columns(batch, self.stored_variation, &mut statistics);
            made.extend(LOOSENED.map(str::to_owned).into_iter().zip(arrays.map_err(failed(&self.state.reads))?));
        }
        let mut batches = vec![batch.project(&stays).map_err(arrow)?];
        for operator in &mut self.operators {
            let mut out = Vec::new();
            for batch in &batches {
                let mut emit = |batch| {
                    out.push(batch);
                    Ok(())
                };
                operator.process(batch, &mut emit).map_err(failed(&self.state.reads))?;
            }
            batches = out;
        }
        let [whole] = batches.as_slice() else {
            return Err(PipelineError::new(
                ErrorKind::DataSet,
                format!("{}: columns that are no batch", self.state.reads),
            ));
        };
        let column = |name: &String| made.get(name).or_else(|| whole.column_by_name(name)).cloned();
        let columns = self.schema.fields().iter().map(|field| {
            let missing = || {
                PipelineError::new(
                    ErrorKind::DataSet,
                    format!("{}: column {} is missing", self.state.reads, field.name()),
                )
            };
            column(field.name()).ok_or_else(missing)
        });
        let columns = columns.collect::<Result<Vec<_>>>()?;
        self.work.rows.fetch_add(whole.num_rows() as u64, Ordering::Relaxed);
        RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(arrow)
    }
}

fn failed(place: &str) -> impl Fn(OperatorError) -> PipelineError {
    let place = place.to_owned();
    move |e| PipelineError::caused(ErrorKind::DataSet, place.clone(), e)
}
