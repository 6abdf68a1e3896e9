//! The source of a derivation's plan. Its partitions are the shards of a finished data set, without the columns that
//! are made anew.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::SchemaRef;
use datafusion::common::{DataFusionError, Result, internal_err};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties};
use futures::TryStreamExt;
use futures::stream::try_unfold;
use parquet::arrow::async_reader::ParquetRecordBatchStream;
use stillhouse_datasets::dataset::{Dataset, Selection};
use stillhouse_operators::extract::{LOOSENED_COLUMNS, NoiseLoosener};
use stillhouse_operators::operator::Measure;
use stillhouse_reader::ShardFile;
use stillhouse_schemas::manifest::{ShardRecord, Statistics};

use crate::engine::node_metrics::{NodeMetrics, properties};
use crate::engine::resources::JobResources;
use crate::engine::stage_state::{SplitMeter, StageActivity, StageState};
use crate::error::{ErrorKind, PipelineError};

/// What a derivation reads.
pub(super) struct Source {
    pub dataset: Arc<Dataset>,
    /// The unchanged columns, and those of [`LOOSENED_COLUMNS`] if the noise is stored again.
    pub schema: SchemaRef,
    pub loosener: Option<NoiseLoosener>,
    /// Noise draws per token.
    pub draws: u32,
    /// Rows per batch.
    pub batch_rows: usize,
}

/// Reads the shards of a data set. Compares each with its checksum before it returns rows.
#[derive(Debug)]
pub(super) struct DatasetExec {
    source: Arc<Source>,
    /// One shard per partition.
    shards: Vec<ShardRecord>,
    properties: Arc<PlanProperties>,
    metrics: Arc<NodeMetrics>,
}

impl DatasetExec {
    pub fn new(source: Source, shards: Vec<ShardRecord>) -> Self {
        let properties = properties(Arc::clone(&source.schema), shards.len());
        Self { source: Arc::new(source), shards, properties, metrics: NodeMetrics::new() }
    }
}

impl Source {
    /// Compares a shard with its checksum and starts reading it.
    async fn open(
        &self,
        shard: &ShardRecord,
        shown: &str,
    ) -> std::result::Result<ParquetRecordBatchStream<ShardFile>, PipelineError> {
        let (sha256, bytes) = self.dataset.output().read_whole(&shard.path, |_| {}).await?;
        if (&sha256, bytes) != (&shard.sha256, shard.bytes) {
            let message = format!(
                "{shown}: sha256 {sha256} and {bytes} bytes, the manifest has {} and {}",
                shard.sha256, shard.bytes
            );
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        let columns = self.schema.fields().iter().map(|field| field.name().clone()).collect();
        let selection = Selection { columns: Some(columns), batch_rows: self.batch_rows, ..Selection::default() };
        self.dataset.read(shard, &selection).await
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("dataset", &self.dataset.shown("")).finish_non_exhaustive()
    }
}

impl DisplayAs for DatasetExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DatasetExec: {}, shards={}", self.source.dataset.shown(""), self.shards.len())
    }
}

/// A shard that is being read.
struct ShardStream {
    source: Arc<Source>,
    shard: ShardRecord,
    /// Path for messages.
    shown: String,
    /// `None` until the shard's checksum has been compared.
    batches: Option<ParquetRecordBatchStream<ShardFile>>,
    rows: u64,
    stage: StageState,
    metrics: Arc<NodeMetrics>,
}

impl ShardStream {
    async fn next(mut self) -> std::result::Result<Option<(RecordBatch, Self)>, PipelineError> {
        let began = Instant::now();
        self.stage.set_activity(StageActivity::Works);
        let mut batches = match self.batches.take() {
            Some(batches) => batches,
            None => self.source.open(&self.shard, &self.shown).await?,
        };
        let next = batches.try_next().await.map_err(PipelineError::dataset(self.shown.clone()))?;
        self.batches = Some(batches);
        let Some(batch) = next else {
            self.end()?;
            return Ok(None);
        };
        let batch = self.columns(&batch)?;
        self.rows += batch.num_rows() as u64;
        SplitMeter::of(&self.metrics, self.stage.split()).add(Measure::Sequences, batch.num_rows() as u64);
        self.metrics.worked_since(began);
        self.metrics.count_output(batch.num_rows(), batch.get_array_memory_size());
        self.stage.count_output(batch.num_rows());
        self.stage.set_activity(StageActivity::WaitsForConsumer);
        Ok(Some((batch, self)))
    }

    /// The columns of the schema, in its order.
    fn columns(&self, batch: &RecordBatch) -> std::result::Result<RecordBatch, PipelineError> {
        let Self { source, shard, shown, stage, .. } = self;
        let mut loosened: Vec<(&str, ArrayRef)> = Vec::new();
        if let Some(loosener) = &source.loosener {
            let mut statistics = stage.split().statistics.lock();
            let arrays = loosener.columns(batch, shard.statistics.total_variation_max, &mut statistics);
            loosened.extend(LOOSENED_COLUMNS.into_iter().zip(arrays.map_err(PipelineError::dataset(shown.clone()))?));
        }
        let columns = source.schema.fields().iter().map(|field| {
            let made = loosened.iter().find(|(name, _)| name == field.name()).map(|(_, array)| array);
            let missing = || {
                let message = format!("{shown}: column {} is missing", field.name());
                PipelineError::new(ErrorKind::DataSet, message)
            };
            made.or_else(|| batch.column_by_name(field.name())).cloned().ok_or_else(missing)
        });
        let columns = columns.collect::<std::result::Result<Vec<_>, _>>()?;
        RecordBatch::try_new(Arc::clone(&source.schema), columns).map_err(PipelineError::dataset(shown.clone()))
    }

    fn end(&self) -> std::result::Result<(), PipelineError> {
        let Self { source, shard, shown, stage, .. } = self;
        if self.rows != shard.rows {
            let message = format!("{shown}: {} rows, the manifest has {}", self.rows, shard.rows);
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        if source.loosener.is_some() {
            count_empty_lists(&mut stage.split().statistics.lock(), source.draws);
        }
        stage.set_activity(StageActivity::Done);
        Ok(())
    }
}

/// The statistics of a shard that remain valid for the derived one. Corrections are counted again if the noise is
/// stored again.
fn kept_statistics(from: &Statistics, is_loosened: bool) -> Statistics {
    let mut kept = from.clone();
    if is_loosened {
        (kept.corrections, kept.corrections_max, kept.total_variation_max) = (0, 0, 0.0);
        kept.corrections_histogram.clear();
    }
    kept
}

/// Counts the lists without a correction. Every predicted token has one list per draw; the lists with corrections are
/// already counted.
fn count_empty_lists(statistics: &mut Statistics, draws: u32) {
    let lists = statistics.predicted_tokens * u64::from(draws);
    let filled: u64 = statistics.corrections_histogram.iter().sum();
    if lists > 0 && statistics.corrections_histogram.is_empty() {
        statistics.corrections_histogram.push(0);
    }
    if let Some(empty) = statistics.corrections_histogram.first_mut() {
        *empty = lists.saturating_sub(filled);
    }
}

impl ExecutionPlan for DatasetExec {
    stillhouse_engine::node_basics!();
    stillhouse_engine::no_input!();

    fn name(&self) -> &str {
        "DatasetExec"
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let Some(shard) = self.shards.get(partition).cloned() else {
            return internal_err!("DatasetExec has {} partitions, asked for {partition}", self.shards.len());
        };
        let resources = JobResources::of(&context)?;
        let state = resources.split_state(&resources.split(partition)?);
        state.set_input_sha256(shard.input_sha256.clone());
        *state.statistics.lock() = kept_statistics(&shard.statistics, self.source.loosener.is_some());
        let shard_stream = ShardStream {
            shown: self.source.dataset.shown(&shard.path),
            source: Arc::clone(&self.source),
            shard,
            batches: None,
            rows: 0,
            stage: StageState::new(&state, 0),
            metrics: Arc::clone(&self.metrics),
        };
        let stream = try_unfold(shard_stream, ShardStream::next).map_err(|e| DataFusionError::External(Box::new(e)));
        Ok(resources.spawner.ahead(Box::pin(RecordBatchStreamAdapter::new(self.schema(), stream))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_list_of_a_predicted_token_is_in_the_histogram() {
        let mut statistics = Statistics { predicted_tokens: 5, ..Statistics::default() };
        count_empty_lists(&mut statistics, 2);
        assert_eq!(statistics.corrections_histogram, [10]);
        let mut statistics =
            Statistics { predicted_tokens: 5, corrections_histogram: vec![0, 3, 1], ..Statistics::default() };
        count_empty_lists(&mut statistics, 2);
        assert_eq!(statistics.corrections_histogram, [6, 3, 1]);
        // without predicted tokens there is nothing to count
        let mut statistics = Statistics::default();
        count_empty_lists(&mut statistics, 2);
        assert!(statistics.corrections_histogram.is_empty());
    }
}
