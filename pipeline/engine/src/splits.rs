//! The source of the plan: each partition reads one split of the job.

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
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Listing};
use stillhouse_operators::grid::numbers_schema;
use stillhouse_operators::operator::documents_schema;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{SplitRecord, Statistics};
use stillhouse_schemas::spec::Input;
use stillhouse_source::SplitReader;

use crate::node_metrics::{NodeMetrics, properties};
use crate::pool::Task;
use crate::resources::JobResources;
use crate::stage_state::{StageActivity, StageState};

/// The input of a job and its splits.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The files of the job.
    pub files: Arc<Vec<InputFile>>,
    /// How to read them.
    pub input: Arc<Input>,
    /// The splits, one partition each.
    pub splits: Arc<Vec<SplitRecord>>,
    /// Bad records found while rows were staged, and the split whose statistics include them.
    pub staging_skipped: Option<(SplitId, Statistics)>,
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
        match input.staged_by().filter(|_| splits.is_empty()) {
            Some(what) => write!(f, "SplitsExec: rows of {what} over {} files, split once they are made", files.len()),
            None => {
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
            stage.set_activity(StageActivity::Works);
            let began = Instant::now();
            let batch = reader.next().transpose();
            // Set it now, not when the operators receive the error: other splits could begin until then.
            resources.has_failed.fetch_or(batch.is_err(), Ordering::Relaxed);
            metrics.worked_since(began);
            stage.set_activity(StageActivity::WaitsForConsumer);
            (reader, batch)
        }));
    }

    async fn next(mut self) -> Result<Option<(RecordBatch, Self)>> {
        let Some(step) = self.step.take() else { return Ok(None) };
        let stopped = |_| DataFusionError::Execution("reading stopped: a bug in this program".into());
        let (reader, batch) = step.wait().await.map_err(stopped)?;
        match batch.map_err(|e| DataFusionError::External(Box::new(e)))? {
            Some(batch) => {
                self.metrics.count_output(batch.num_rows(), batch.get_array_memory_size());
                self.stage.count_output(batch.num_rows());
                self.start_reading(reader);
                Ok(Some((batch, self)))
            }
            None => {
                self.stage.set_activity(StageActivity::Done);
                let summary = reader.summary();
                self.stage.split().set_input_sha256(summary.sha256.clone());
                let mut statistics = self.stage.split().statistics.lock();
                for (reason, n) in &summary.skipped {
                    *statistics.skipped.entry(reason.clone()).or_default() += n;
                }
                for (table, documents) in &summary.of_tables {
                    statistics.sources.entry(table.clone()).or_default().documents += documents;
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
        let state = resources.split_state(split);
        if let Some((first, skipped)) = &self.corpus.staging_skipped
            && *first == split.split
        {
            let mut statistics = state.statistics.lock();
            statistics.skipped.clone_from(&skipped.skipped);
            for (table, counts) in &skipped.sources {
                statistics.sources.entry(table.clone()).or_default().skipped.clone_from(&counts.skipped);
            }
        }
        let stage = StageState::new(&state, 0);
        let reader = SplitReader::new(&resources.store, &self.listing, split.clone(), Arc::clone(input));
        if let Some(carried) = reader.carried() {
            state.set_carried(carried);
        }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use futures::StreamExt;
    use stillhouse_input_files::Store;
    use stillhouse_operators::operator_spec::RowChecks;
    use stillhouse_operators::vocabulary::Vocabulary;
    use stillhouse_schemas::manifest::{Piece, Range};
    use stillhouse_schemas::spec::Engine;
    use tokio::runtime::Handle;

    use super::*;
    use crate::pool::Pool;
    use crate::resources::{SplitsInProgress, stages};
    use crate::session::Session;

    /// A session that reads this number of documents without text as one split.
    fn session(documents: u64, pool: &Pool) -> Session {
        let input = serde_json::json!({"format": "none", "documents": documents});
        let file = InputFile::placeholder();
        let piece = Piece { file: file.path.clone(), range: Range::Rows { start: 0, end: documents } };
        let (pieces, dataset_split) = (vec![piece], "train".into());
        let split = SplitRecord { split: SplitId(0), dataset_split, pieces, keys: None, appended: 0, place: None };
        let splits = Arc::new(vec![split]);
        let corpus = Corpus {
            files: Arc::new(vec![file]),
            input: Arc::new(serde_json::from_value(input).unwrap()),
            splits: Arc::clone(&splits),
            staging_skipped: None,
        };
        let resources = JobResources {
            splits,
            store: Store::local(Handle::current()),
            vocabulary: Arc::new(Vocabulary::for_numbers(2, "none").unwrap()),
            duplicates: None,
            devices: Vec::new(),
            output: None,
            row_checks: Arc::new(|_: &SplitRecord| -> RowChecks { panic!("no row is written") }),
            spawner: pool.spawner().unwrap(),
            operators_overlap: false,
            has_failed: AtomicBool::new(false),
            stop: Arc::default(),
            stages: stages(&[]),
            splits_in_progress: SplitsInProgress::default(),
        };
        Session::new(Arc::new(SplitsExec::new(corpus)), resources, &Engine::default()).unwrap()
    }

    #[tokio::test]
    async fn a_reader_whose_batch_is_not_taken_waits_for_the_stage_after_it() {
        let pool = Pool::new(1).unwrap();
        let session = session(20_000, &pool);
        let mut rows = session.rows(0).unwrap();
        let states = session.resources.splits_in_progress.all();
        let read = || states[0].statuses()[0].clone();
        assert!(rows.next().await.unwrap().unwrap().num_rows() > 0);
        let waits = async {
            while read().doing != "waits for the stage after it" {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waits).await.unwrap();
        assert!(read().rows > 0);
        while let Some(batch) = rows.next().await {
            batch.unwrap();
        }
        assert_eq!((read().rows, read().doing.as_str()), (20_000, "has ended"));
    }
}
