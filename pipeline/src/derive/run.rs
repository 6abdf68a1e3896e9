//! Runs a derivation with the plan, runner, memory limit and commits of a run, over the shards of the data set instead
//! of text.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use arrow::datatypes::{Schema, SchemaRef};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use stillhouse_datasets::damage;
use stillhouse_operators::config::rows_per_batch;
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::registry;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ColumnRecord;
use stillhouse_schemas::manifest::{Manifest, Piece, Range, ShardRecord, SplitRecord};
use tokio::runtime::Handle;

use super::source::{DatasetExec, Source};
use super::{Derivation, manifest_digest};
use crate::acceptance::Tally;
use crate::engine::operator_plan;
use crate::engine::pool::Pool;
use crate::engine::resources::{JobResources, SplitsInProgress, stages};
use crate::engine::runner::{SplitRunner, Workers};
use crate::engine::session::Session;
use crate::engine::sink::{Shard, ShardSinkExec, Shards};
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::job_diff::differences_of;
use crate::output::{Found, Output, PlanRecord};
use crate::run::locked_output::{LockedOutput, may_overwrite, remove_overwritten};
use crate::run::splits::max_concurrent_splits;
use crate::{acceptance, finish};
use stillhouse_input_files::Store;

/// Options of a derivation.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeriveOptions {
    /// Remove the output of another job first.
    pub overwrite: bool,
}

/// Derives the data set. Resumes where an earlier derivation stopped, and repairs a finished one that is damaged.
///
/// # Errors
/// If the output belongs to another job or holds the source data set, a shard does not match its manifest, or the
/// output cannot be written. Committed shards stay.
pub async fn derive(derivation: Derivation, options: DeriveOptions, observer: Arc<dyn Observer>) -> Result<()> {
    let began = Instant::now();
    let output = derivation.output.clone();
    if manifest_digest(&output).await?.is_some_and(|digest| digest == derivation.from.manifest_sha256) {
        let message =
            format!("output.path: {output} holds the data set that this is derived from; choose another folder");
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    let differs = |plan: &PlanRecord| differences_of(plan, &derivation.identity, &[]);
    if let Err(e) = output.inspect_with(&derivation.hash, &differs).await
        && !may_overwrite(&output, options.overwrite, &e).await?
    {
        return Err(e);
    }
    let locked = LockedOutput::lock(output, |output| output.for_job(&derivation.hash), observer.as_ref()).await?;
    let result = derivation.make(locked.output.clone(), options, observer, began).await;
    locked.release(&result).await;
    result
}

impl Derivation {
    async fn make(
        self,
        output: Output,
        options: DeriveOptions,
        observer: Arc<dyn Observer>,
        began: Instant,
    ) -> Result<()> {
        let found =
            remove_overwritten(&output, &self.hash, options.overwrite, output.inspect(&self.hash).await).await?;
        let (done, complete) = match found {
            Found::Nothing => (output.recover(Vec::new()).await?, false),
            Found::Resumable { mut done, incomplete_uploads } => {
                done.extend(output.recover(incomplete_uploads).await?);
                (done, false)
            }
            Found::Complete => {
                let manifest = finish::manifest_of(&output).await?;
                (manifest.shards.into_iter().map(|shard| (shard.split, shard)).collect(), true)
            }
        };
        // the shards of an earlier derivation may have been damaged since
        let damaged = damage::damaged_shards(&output, done.values(), true, observer.as_ref()).await?;
        for damage in &damaged {
            let message = format!("{}: {}; it is made again", output.shown(&damage.name), damage.message);
            observer.event(&Event::Warning { message });
        }
        if !complete {
            output.begin(&self.plan_record()).await?;
        }
        let splits = self.shard_splits()?;
        let mut runner = SplitRunner::new(output, Arc::clone(&self.storages), splits, done, observer);
        let again: BTreeSet<SplitId> = damaged.iter().filter_map(|damage| damage.split).collect();
        runner.remade = again.iter().filter_map(|split| Some((*split, runner.done.get(split)?.clone()))).collect();
        self.report_start(&runner);
        self.make_shards(&runner, began).await?;
        let mut records = std::mem::take(&mut runner.done);
        let own = runner.output.records().await?.into_iter().filter(|record| record.job_hash == self.hash);
        records.extend(own.map(|record| (record.shard.split, record.shard)));
        let (output, nothing_to_do) = (&runner.output, complete && again.is_empty());
        output.check_ownership().await?;
        let shards = finish::in_order(self.source_manifest().shards.iter().map(|shard| shard.split), records, output)?;
        let manifest = self.manifest(shards);
        acceptance::check_dataset(&self.spec, &manifest)?;
        finish::write(output, self.tokenizer.clone(), &self.operators, &manifest).await?;
        let seconds = began.elapsed().as_secs_f64();
        finish::report_finished(output, &manifest, seconds, nothing_to_do, runner.observer.as_ref());
        Ok(())
    }

    fn source_manifest(&self) -> &Manifest {
        self.source.manifest()
    }

    fn plan_record(&self) -> PlanRecord {
        PlanRecord {
            job_hash: self.hash.clone(),
            name: self.spec.name.clone(),
            job_folder: String::new(),
            job_file: String::new(),
            identity: self.identity.clone(),
            files: Vec::new(),
            splits: self.splits.clone(),
            appended: Vec::new(),
            teacher: None,
            staged: Vec::new(),
            duplicates: None,
        }
    }

    fn report_start(&self, runner: &SplitRunner) {
        runner.observer.event(&Event::JobStarted {
            name: self.spec.name.clone(),
            output: runner.output.to_string(),
            splits: runner.splits.len() as u64,
            splits_done: runner.done.len() as u64,
            bytes_done: runner.done.values().map(|shard| shard.bytes).sum(),
            input_bytes: self.source_manifest().shards.iter().map(|shard| shard.bytes).sum(),
            teacher: None,
            job_hash: self.hash.clone(),
        });
    }

    /// The splits of the data set, with their shards as input.
    fn shard_splits(&self) -> Result<Vec<SplitRecord>> {
        let splits: BTreeMap<SplitId, &SplitRecord> = self.splits.iter().map(|split| (split.split, split)).collect();
        let of_shard = |shard: &ShardRecord| {
            let unknown = || {
                let message = format!("{}: no split {} in the manifest", self.source.shown(&shard.path), shard.split.0);
                PipelineError::new(ErrorKind::DataSet, message)
            };
            let split = splits.get(&shard.split).ok_or_else(unknown)?;
            let range = Range::Rows { start: 0, end: shard.rows };
            let pieces = vec![Piece { file: self.source.shown(&shard.path), range }];
            Ok(SplitRecord { pieces, ..SplitRecord::clone(split) })
        };
        self.source_manifest().shards.iter().map(of_shard).collect()
    }

    /// Builds the missing shards and rebuilds the damaged ones.
    async fn make_shards(&self, runner: &SplitRunner, began: Instant) -> Result<()> {
        let is_pending = |split: &SplitId| !runner.done.contains_key(split) || runner.remade.contains_key(split);
        let splits: Vec<SplitRecord> = runner.splits.iter().filter(|s| is_pending(&s.split)).cloned().collect();
        let shards: Vec<ShardRecord> =
            self.source_manifest().shards.iter().filter(|s| is_pending(&s.split)).cloned().collect();
        let concurrent_splits = max_concurrent_splits(&self.spec, rayon::current_num_threads());
        let pool = Pool::of_this_process()?;
        let plan = self.plan(shards, &runner.remade).map_err(PipelineError::from_plan)?;
        let manifest = self.source_manifest();
        let (spec, specials) = (self.spec.clone(), manifest.tokenizer.special_tokens.clone());
        let vocab_size = manifest.vocab_size as usize;
        let row_checks =
            move |split: &SplitRecord| registry::row_checks(&spec, vocab_size, &specials, (split.split, split.place));
        let resources = JobResources {
            operators_overlap: concurrent_splits.min(splits.len()) < rayon::current_num_threads(),
            splits: Arc::new(splits),
            store: Store::with_buckets(Handle::current(), BTreeMap::new()),
            vocabulary: Arc::clone(&self.vocabulary),
            duplicates: None,
            devices: Vec::new(),
            output: Some(runner.output.clone()),
            row_checks: Arc::new(row_checks),
            spawner: pool.spawner()?,
            has_failed: AtomicBool::new(false),
            stop: Arc::clone(&runner.stop),
            stages: stages(&self.new_operators),
            splits_in_progress: SplitsInProgress::default(),
        };
        let session = Session::new(plan, resources, &self.spec.engine)?;
        let tally = Tally::new(&self.spec, &runner.splits, &runner.done);
        runner.run(&session, Workers::Local { max_splits: concurrent_splits }, &tally, began).await
    }

    /// The plan: the shards of the data set, the operators over them, and the columns in the order of the format.
    fn plan(
        &self,
        shards: Vec<ShardRecord>,
        remade: &BTreeMap<SplitId, ShardRecord>,
    ) -> datafusion::common::Result<Arc<dyn ExecutionPlan>> {
        let of_shard = |from: &ShardRecord| Shard {
            name: from.path.strip_prefix("data/").unwrap_or(&from.path).to_owned(),
            expected_record: remade.get(&from.split).cloned(),
        };
        let into = Shards { spec: self.spec.output.clone(), shards: Arc::new(shards.iter().map(of_shard).collect()) };
        let schema = finish::schema(&self.operators);
        let source = Source {
            dataset: Arc::clone(&self.source),
            schema: without_columns_of(&schema, &self.new_operators),
            loosener: self.loosener.clone(),
            draws: self.spec.extract.as_ref().and_then(|e| e.noise.as_ref()).map_or(1, |noise| noise.draws),
            batch_rows: rows_per_batch(&self.spec),
        };
        let made = operator_plan(Arc::new(DatasetExec::new(source, shards)), &self.new_operators);
        let in_order = schema.fields().iter().map(|field| {
            let column = Column::new_with_schema(field.name(), &made.schema())?;
            Ok(ProjectionExpr::new(Arc::new(column), field.name().clone()))
        });
        let in_order = in_order.collect::<datafusion::common::Result<Vec<_>>>()?;
        let projected = Arc::new(ProjectionExec::try_new(in_order, made)?);
        Ok(Arc::new(ShardSinkExec::new(into, projected)?))
    }

    fn manifest(&self, shards: Vec<ShardRecord>) -> Manifest {
        let (statistics, totals) = finish::sum_shards(&shards);
        Manifest {
            job: self.spec.clone(),
            job_hash: self.hash.clone(),
            subtokens: finish::subtokens(&self.operators),
            sidecar_files: finish::sidecar_sha256(&self.operators),
            columns: ColumnRecord::of_schema(&finish::schema(&self.operators)),
            splits: self.splits.clone(),
            shards,
            totals,
            statistics,
            derived_from: Some(Box::new(self.from.clone())),
            ..self.source_manifest().clone()
        }
    }
}

/// A schema without the columns that these operators make.
fn without_columns_of(schema: &Schema, operators: &[OperatorSpec]) -> SchemaRef {
    let made: Vec<SchemaRef> = operators.iter().map(|operator| operator.output_schema(&Schema::empty())).collect();
    let stays = |name: &str| made.iter().all(|schema| schema.column_with_name(name).is_none());
    let fields = schema.fields().iter().filter(|field| stays(field.name())).cloned();
    Arc::new(Schema::new_with_metadata(fields.collect::<Vec<_>>(), schema.metadata().clone()))
}
