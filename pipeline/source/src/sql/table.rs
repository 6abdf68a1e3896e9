//! A table of a query: its files in the job's order, in one partition, read by this crate's own readers.
//!
//! So byte order marks, broken records, compression and messages are the same with and without a query. It decodes only
//! the columns that the query uses; a record is bad if one of them is, or if its line or its number of fields is
//! invalid.
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
use stillhouse_schemas::spec::Input;

use super::super::formats;
use super::super::input_file::InputFile;
use super::super::store::Store;
use super::super::table_format::{BadRecords, FileColumns, TakeRows};

/// A table of a query.
#[derive(Debug, Clone)]
pub struct QueryTable {
    /// Name in the query.
    pub name: String,
    /// Field in the job file, such as `input.tables.labels`.
    pub field: String,
    /// Input settings of its files.
    pub input: Input,
    /// The files, in order.
    pub files: Vec<InputFile>,
}

/// Bad records that the query's scans have met, by table and reason. If a table is scanned several times, the largest
/// count counts.
#[derive(Debug, Clone, Default)]
pub(super) struct SkippedCounts(Arc<Mutex<BTreeMap<(String, String), u64>>>);

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
pub(super) struct FilesTable {
    store: Store,
    table: Arc<QueryTable>,
    schema: SchemaRef,
    skipped: SkippedCounts,
}

impl FilesTable {
    /// Opens the table and determines the columns and their types. Blocks.
    pub fn open(store: &Store, table: &QueryTable, skipped: &SkippedCounts) -> std::result::Result<Self, SourceError> {
        let QueryTable { files, input, .. } = table;
        let schema = formats::for_input(input).table()?.schema(store, files, input)?;
        let table = Arc::new(table.clone());
        Ok(Self { store: store.clone(), table, schema: Arc::new(schema), skipped: skipped.clone() })
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

impl Scan {
    fn read(&self, take: &mut TakeRows<'_>) -> std::result::Result<BadRecords, SourceError> {
        let QueryTable { input, files, .. } = &*self.table;
        let (table, mut bad_records) = (formats::for_input(input).table()?, BadRecords::new(input.on_error));
        for file in files {
            let columns = FileColumns { store: &self.store, file, input, schema: &self.schema };
            table.read(columns, &mut bad_records, take)?;
        }
        Ok(bad_records)
    }
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
            let read = scan.read(&mut |rows, bad_records| {
                tx.blocking_send(Message::Rows(rows, bad_records.skipped.clone())).map_err(|_| Stopped.into())
            });
            let last = match read {
                Ok(bad_records) => Message::Done(bad_records.skipped),
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
