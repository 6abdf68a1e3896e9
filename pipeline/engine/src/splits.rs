//! The source of the plan: each partition reads one split of the job.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use arrow::array::RecordBatch;
use datafusion::common::{DataFusionError, Result, internal_err};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties};
use futures::stream::try_unfold;
use stillhouse_operators::grid::numbers_schema;
use stillhouse_operators::operator::documents_schema;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_schemas::spec::Input;
use stillhouse_source::{InputFile, Listing, SourceError, SplitReader};

use crate::node_metrics::{NodeMetrics, properties};
use crate::pool::Task;
use crate::resources::JobResources;
use crate::stage_state::{Doing, StageState};

/// The input of a job and its splits.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The files of the job.
    pub files: Arc<Vec<InputFile>>,
    /// How to read them.
    pub input: Arc<Input>,
    /// The splits, one partition each.
    pub splits: Arc<Vec<SplitRecord>>,
    /// Bad records found by `input.sql`, counted by reason, and the split whose statistics include them.
    pub query_skipped: Option<(SplitId, BTreeMap<String, u64>)>,
}

/// Reads the documents of the splits.
#[derive(Debug)]
pub struct SplitsExec {
    corpus: Corpus,
    listing: Listing,
    properties: Arc<PlanProperties>,
    metrics: Arc<NodeMetrics>,
}

impl SplitsExec {
    /// A source that reads these splits.
    pub fn new(corpus: Corpus) -> Self {
        let schema = if corpus.input.is_rows() { numbers_schema() } else { documents_schema() };
        let properties = properties(schema, corpus.splits.len());
        let listing = Listing::new(Arc::clone(&corpus.files));
        Self { corpus, listing, properties, metrics: NodeMetrics::new() }
    }

    /// The input and its splits.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }
}

impl DisplayAs for SplitsExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Corpus { files, input, splits, .. } = &self.corpus;
        match input.sql.is_some() && splits.is_empty() {
            true => write!(f, "SplitsExec: rows of input.sql over {} files, split once it has run", files.len()),
            false => {
                write!(f, "SplitsExec: splits={}, files={}, format={:?}", splits.len(), files.len(), input.format())
            }
        }
    }
}

/// One split being read. A step on a reader thread makes the next batch while the operators process the previous one.
struct SplitStream {
    step: Option<Task<ReadResult>>,
    resources: Arc<JobResources>,
    metrics: Arc<NodeMetrics>,
    stage: StageState,
}

type ReadResult = (SplitReader, Result<Option<RecordBatch>, SourceError>);

impl SplitStream {
    fn start_reading(&mut self, mut reader: SplitReader) {
        let (metrics, stage) = (Arc::clone(&self.metrics), self.stage.clone());
        let resources = Arc::clone(&self.resources);
        self.step = Some(self.resources.spawner.step(move || {
            stage.does(Doing::Works);
            let began = Instant::now();
            let batch = reader.next().transpose();
            // Set it now, not when the operators receive the error: other splits could begin until then.
            resources.has_failed.fetch_or(batch.is_err(), Ordering::Relaxed);
            metrics.worked_since(began);
            stage.does(Doing::Nothing);
            (reader, batch)
        }));
    }

    async fn next(mut self) -> Result<Option<(RecordBatch, Self)>> {
        let Some(step) = self.step.take() else { return Ok(None) };
        let stopped = |_| DataFusionError::Execution("reading stopped: a fault of this program".into());
        let (reader, batch) = step.wait().await.map_err(stopped)?;
        match batch.map_err(|e| DataFusionError::External(Box::new(e)))? {
            Some(batch) => {
                self.metrics.put_out(batch.num_rows(), batch.get_array_memory_size());
                self.stage.put_out(batch.num_rows());
                self.start_reading(reader);
                Ok(Some((batch, self)))
            }
            None => {
                self.stage.does(Doing::Done);
                let summary = reader.summary();
                self.stage.split().note_input(summary.sha256.clone());
                let mut statistics = self.stage.split().statistics.lock();
                for (reason, n) in &summary.skipped {
                    *statistics.skipped.entry(reason.clone()).or_default() += n;
                }
                Ok(None)
            }
        }
    }
}

impl ExecutionPlan for SplitsExec {
    crate::node_basics!();
    crate::no_input!();

    fn name(&self) -> &str {
        "SplitsExec"
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let Corpus { input, splits, .. } = &self.corpus;
        let Some(split) = splits.get(partition) else {
            return internal_err!("SplitsExec has {} partitions, asked for {partition}", splits.len());
        };
        let resources = JobResources::of(&context)?;
        let state = resources.state_of(split);
        if let Some((first, skipped)) = &self.corpus.query_skipped
            && *first == split.split
        {
            state.statistics.lock().skipped.clone_from(skipped);
        }
        let stage = StageState::new(&state, 0);
        let reader = SplitReader::new(&resources.store, &self.listing, split.clone(), Arc::clone(input));
        let metrics = Arc::clone(&self.metrics);
        let stream = try_unfold(
            (Some(reader), SplitStream { step: None, resources, metrics, stage }),
            async |(unstarted_reader, mut stream)| {
                // Reading starts with the first poll.
                if let Some(reader) = unstarted_reader {
                    stream.start_reading(reader);
                }
                Ok(stream.next().await?.map(|(batch, stream)| (batch, (None, stream))))
            },
        );
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), stream)))
    }
}
