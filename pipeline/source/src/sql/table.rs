//! A table of a query: its files in the job's order, in one partition, read by the readers of this house.
//!
//! So a byte order mark, a broken record, a file that is compressed or not, and what a person is told are the same with and without a query.
//! Only the columns that the query uses are decoded; a record is bad where one of them is, or where its line or its number of fields is.
//!
//! ```text
//!   read (a thread) ──2 batches, each with the bad records so far──► the query
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

use async_trait::async_trait;
use datafusion::arrow::array::{LargeStringBuilder, RecordBatch, RecordBatchOptions};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::catalog::{Session, TableProvider};
use datafusion::datasource::TableType;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::{PartitionStream, StreamingTableExec};
use stillhouse_base::source_error::{RecordPosition, SourceError, Stopped};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Piece, Range, SplitRecord};
use stillhouse_schemas::spec::{Input, InputFormat, OnError};

use super::super::list::InputFile;
use super::super::read::read_split;
use super::super::store::Store;
use super::{BATCH_BYTES, BATCH_ROWS, columnar, csv, json};

/// A table of a query.
#[derive(Debug, Clone)]
pub struct QueryTable {
    /// Its name in the query.
    pub name: String,
    /// Its field in the job file, such as `input.tables.labels`.
    pub field: String,
    /// How its files are read.
    pub input: Input,
    /// Its files, in order.
    pub files: Vec<InputFile>,
}

/// Bad records that the query's scans have met, by table and reason. Of several scans of a table the largest count stands.
#[derive(Debug, Clone, Default)]
pub(super) struct Skipped(Arc<Mutex<BTreeMap<(String, String), u64>>>);

impl Skipped {
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

/// What a bad record does.
#[derive(Debug)]
pub(super) struct Judge {
    on_error: OnError,
    pub skipped: BTreeMap<String, u64>,
}

impl Judge {
    pub fn new(on_error: OnError) -> Self {
        Self { on_error, skipped: BTreeMap::new() }
    }

    /// A bad record: an error, or one more of the skipped.
    pub fn bad(
        &mut self,
        file: &InputFile,
        position: RecordPosition,
        reason: &'static str,
        message: String,
    ) -> std::result::Result<(), SourceError> {
        if self.on_error == OnError::Fail {
            return Err(SourceError::Record { file: file.path.clone(), position, reason, message });
        }
        *self.skipped.entry(reason.into()).or_default() += 1;
        Ok(())
    }
}

/// Takes the rows of a file, with the judge, who knows of the bad records before them.
pub(super) type Take<'a> = dyn FnMut(RecordBatch, &Judge) -> std::result::Result<(), SourceError> + 'a;

/// A batch, also of no columns.
pub(super) fn batch(
    schema: &SchemaRef,
    columns: Vec<datafusion::arrow::array::ArrayRef>,
    rows: usize,
) -> std::result::Result<RecordBatch, SourceError> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(|e| SourceError::Sql { message: e.to_string(), retryable: false })
}

/// The table as DataFusion sees it.
#[derive(Debug)]
pub(super) struct FilesTable {
    store: Store,
    table: Arc<QueryTable>,
    schema: SchemaRef,
    skipped: Skipped,
}

impl FilesTable {
    /// Finds out the columns and their types; blocking.
    pub fn open(store: &Store, table: &QueryTable, skipped: &Skipped) -> std::result::Result<Self, SourceError> {
        let QueryTable { files, input, .. } = table;
        let schema = match input.format() {
            InputFormat::Text => Schema::new(vec![Field::new(&input.text, DataType::LargeUtf8, true)]),
            InputFormat::Jsonl => json::schema(store, files, input)?,
            InputFormat::Csv => csv::schema(store, files, input)?,
            _ => columnar::schema(store, files, input)?,
        };
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

/// One reading of some columns of a table.
#[derive(Debug, Clone)]
struct Scan {
    store: Store,
    table: Arc<QueryTable>,
    schema: SchemaRef,
    skipped: Skipped,
}

enum Message {
    Rows(RecordBatch, BTreeMap<String, u64>),
    Done(BTreeMap<String, u64>),
    Failed(SourceError),
}

/// A file of a table, and the columns that are asked of it.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub store: &'a Store,
    pub file: &'a InputFile,
    pub input: &'a Input,
    pub schema: &'a SchemaRef,
}

impl Scan {
    fn read(&self, take: &mut Take<'_>) -> std::result::Result<Judge, SourceError> {
        let QueryTable { input, files, .. } = &*self.table;
        let mut judge = Judge::new(input.on_error);
        for file in files {
            let asked = Asked { store: &self.store, file, input, schema: &self.schema };
            match input.format() {
                InputFormat::Text => read_lines(asked, &mut judge, take)?,
                InputFormat::Jsonl => json::read(asked, &mut judge, take)?,
                InputFormat::Csv => csv::read(asked, &mut judge, take)?,
                _ => columnar::read(asked, &mut judge, take)?,
            }
        }
        Ok(judge)
    }
}

impl PartitionStream for Scan {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _context: Arc<TaskContext>) -> SendableRecordBatchStream {
        let (tx, mut rx) = tokio::sync::mpsc::channel(2);
        let scan = self.clone();
        // a thread of its own: it waits for the query, which may wait for other scans, and its reads for tokio's pool
        let scanning = Builder::new().name("scan".into()).spawn(move || {
            let read = scan.read(&mut |rows, judge| {
                tx.blocking_send(Message::Rows(rows, judge.skipped.clone())).map_err(|_| Stopped.into())
            });
            let last = match read {
                Ok(judge) => Message::Done(judge.skipped),
                Err(SourceError::Stopped(_)) => return,
                Err(e) => Message::Failed(e),
            };
            // nobody waits for it where the query has enough
            let _ = tx.blocking_send(last);
        });
        if let Err(e) = scanning {
            tracing::error!("the system gives no thread for reading {}: {e}", self.table.name);
        }
        // counted as the query takes the batches, so that the counts do not depend on how far ahead the reader is
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

/// Lines of text files: one column.
fn read_lines(asked: Asked<'_>, judge: &mut Judge, take: &mut Take<'_>) -> std::result::Result<(), SourceError> {
    use datafusion::arrow::array::AsArray;
    let Asked { store, file, input, schema } = asked;
    let split = SplitRecord {
        split: SplitId(0),
        dataset_split: String::new(),
        pieces: vec![Piece { file: file.path.clone(), range: Range::Bytes { start: 0, end: u64::MAX, line: Some(1) } }],
        keys: None,
        appended: 0,
        place: None,
    };
    let (mut texts, mut line, mut rows, mut bytes) = (LargeStringBuilder::new(), String::new(), 0, 0);
    let mut flush = |texts: &mut LargeStringBuilder, rows: usize, judge: &Judge| {
        let column = Arc::new(texts.finish());
        let columns = if schema.fields().is_empty() { Vec::new() } else { vec![column as _] };
        take(batch(schema, columns, rows)?, judge)
    };
    let mut failed = None;
    let read = read_split(store, std::slice::from_ref(file), &split, input, &mut |pieces| {
        let ends = pieces.column(2).as_boolean();
        for (text, end) in pieces.column(1).as_string::<i32>().iter().zip(ends.iter()) {
            line.push_str(text.unwrap_or_default());
            if end == Some(true) {
                texts.append_value(&line);
                (rows, bytes) = (rows + 1, bytes + line.len());
                line.clear();
                if rows >= BATCH_ROWS || bytes >= BATCH_BYTES {
                    flush(&mut texts, rows, judge).map_err(|e| {
                        failed = Some(e);
                        Stopped
                    })?;
                    (rows, bytes) = (0, 0);
                }
            }
        }
        Ok(())
    });
    if let Some(failed) = failed {
        return Err(failed);
    }
    for (reason, n) in read?.skipped {
        *judge.skipped.entry(reason).or_default() += n;
    }
    if rows > 0 { flush(&mut texts, rows, judge) } else { Ok(()) }
}
