//! A table of a query as a DataFusion provider: its files in the job's order, in one partition, read by the readers of
//! [`stillhouse_source`]. So byte order marks, broken records, compression and messages are the same with and without a
//! query.
//!
//! ```text
//!   read (a thread) ──2 batches, each with the bad records so far──► the query
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

use async_trait::async_trait;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::{Session, TableProvider};
use datafusion::datasource::TableType;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::{PartitionStream, StreamingTableExec};
use stillhouse_base::source_error::{SourceError, Stopped};
use stillhouse_input_files::Store;
use stillhouse_source::{QueryTable, TakeRows};

/// Bad records that the query's scans have met, by table and reason. If a table is scanned several times, the largest
/// count counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct SkippedCounts(Arc<Mutex<BTreeMap<(String, String), u64>>>);

impl SkippedCounts {
    fn record(&self, table: &str, counts: &BTreeMap<String, u64>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (reason, n) in counts {
            let most = all.entry((table.to_owned(), reason.clone())).or_default();
            *most = (*most).max(*n);
        }
    }

    pub fn take(&self) -> BTreeMap<String, u64> {
        let mut sums = BTreeMap::new();
        for ((_, reason), n) in std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)) {
            *sums.entry(reason).or_default() += n;
        }
        sums
    }
}

/// The table as a DataFusion provider.
#[derive(Debug)]
pub(crate) struct FilesTable {
    store: Store,
    table: Arc<QueryTable>,
    schema: SchemaRef,
    skipped: SkippedCounts,
}

impl FilesTable {
    /// Opens the table and determines the columns and their types. Blocks.
    pub fn open(store: &Store, table: &QueryTable, skipped: &SkippedCounts) -> std::result::Result<Self, SourceError> {
        let schema = Arc::new(table.schema(store)?);
        Ok(Self { store: store.clone(), table: Arc::new(table.clone()), schema, skipped: skipped.clone() })
    }
}

#[async_trait]
impl TableProvider for FilesTable {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        _state: &dyn Session,
        projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let schema = match projection {
            Some(columns) => Arc::new(self.schema.project(columns)?),
            None => self.schema.clone(),
        };
        let scan = Scan {
            store: self.store.clone(),
            table: self.table.clone(),
            schema: schema.clone(),
            skipped: self.skipped.clone(),
        };
        let exec = StreamingTableExec::try_new(schema, vec![Arc::new(scan)], None, [], false, limit)?;
        Ok(Arc::new(exec))
    }
}

/// One scan of some columns of a table.
#[derive(Debug, Clone)]
struct Scan {
    store: Store,
    table: Arc<QueryTable>,
    schema: SchemaRef,
    skipped: SkippedCounts,
}

enum Message {
    Rows(RecordBatch, BTreeMap<String, u64>),
    Done(BTreeMap<String, u64>),
    Failed(SourceError),
}

impl PartitionStream for Scan {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _context: Arc<TaskContext>) -> SendableRecordBatchStream {
        let (tx, mut rx) = tokio::sync::mpsc::channel(2);
        let scan = self.clone();
        // a thread of its own: it waits for the query, which may wait for other scans, and its reads wait for tokio's
        // pool
        let scanning = Builder::new().name("scan".into()).spawn(move || {
            let send: &mut TakeRows<'_> =
                &mut |rows, skipped| tx.blocking_send(Message::Rows(rows, skipped.clone())).map_err(|_| Stopped.into());
            let last = match scan.table.read(&scan.store, &scan.schema, send) {
                Ok(skipped) => Message::Done(skipped),
                Err(SourceError::Stopped(_)) => return,
                Err(e) => Message::Failed(e),
            };
            // the receiver may be gone, if the query has enough rows
            let _ = tx.blocking_send(last);
        });
        if let Err(e) = scanning {
            tracing::error!("the system gives no thread for reading {}: {e}", self.table.name);
        }
        // counted as the query takes the batches, so that the counts do not depend on how far the reader is ahead
        let (skipped, name, mut ended) = (self.skipped.clone(), self.table.name.clone(), false);
        let batches = futures::stream::poll_fn(move |cx| {
            rx.poll_recv(cx).map(|message| match message {
                Some(Message::Rows(rows, counts)) => {
                    skipped.record(&name, &counts);
                    Some(Ok(rows))
                }
                Some(Message::Done(counts)) => {
                    skipped.record(&name, &counts);
                    ended = true;
                    None
                }
                Some(Message::Failed(e)) => {
                    ended = true;
                    Some(Err(DataFusionError::External(Box::new(e))))
                }
                None if ended => None,
                None => {
                    ended = true;
                    Some(Err(DataFusionError::Execution(format!("the reader of the table {name} stopped"))))
                }
            })
        });
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), batches))
    }
}
