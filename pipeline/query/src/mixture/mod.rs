//! Mixtures: documents of several tables in amounts that the job asks for, in a random order, as staged rows.
//!
//! ```text
//!   tables ── read ─► tokens of each document, counted by its key ─► amounts: where each table ends (`amounts`)
//!   tables ── read ─► the copies that are taken, with their places ─► sort (spills) ─► dir/part-NNNNN.parquet
//! ```
//!
//! A key is a function of the seed, the name of the table and the number of the document in it. It decides whether a document is
//! taken, how often, and where its copies lie. So the rows depend on the input and the job alone, not on memory or threads.
//! The place of a copy is random in its stage: each shard is a sample of the mixture.
//!
//! Cost: reads the tables twice and tokenizes once; the sort writes the rows once more to the disk beyond its memory. Memory: 2 MB
//! for each table, the memory of the sort, and rows of 8 MB.

mod amounts;
mod table_rows;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::Builder;
use std::time::{Duration, Instant};

use datafusion::arrow::array::{ArrayRef, AsArray, FixedSizeBinaryBuilder, RecordBatch, UInt32Array};
use datafusion::arrow::compute::take_record_batch;
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::error::DataFusionError;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::{PartitionStream, StreamingTableExec};
use futures::StreamExt;
use sha2::{Digest, Sha256};
use stillhouse_base::source_error::{SourceError, Stopped};
use stillhouse_input_files::Store;
use stillhouse_noise::philox4x32_10;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Input;
use stillhouse_source::QueryTable;

use self::amounts::{Taken, TokensByKey, decide};
use self::table_rows::{TableRows, carried_by_none};
use crate::error::sql_error;
use crate::session::session;
use crate::stage::{MixedTable, PartWriter, StagedRows, stage};

/// Most bytes of rows that the sort hands on at once, and their part of its memory: it merges several sorted files at once.
const BATCH_BYTES: u64 = 8 << 20;
const BATCHES_IN_MEMORY: u64 = 64;
const REPORTED_EVERY: Duration = Duration::from_secs(1);
/// Name of the column with the place of a row.
const PLACE: &str = "__stillhouse_place";
/// Bytes of a place: stage, random number, table, document, copy.
const PLACE_BYTES: i32 = 4 + 8 + 4 + 8 + 4;

/// Counts the tokens of rows: for a batch with the text in its first column, the tokens of each row.
pub type CountTokens<'a> = dyn FnMut(&RecordBatch) -> Result<Vec<u64>, SourceError> + 'a;

/// How far a mixture is, in documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixtureProgress {
    /// The tokens of as many are counted.
    Counted(u64),
    /// Those of `chosen` that were read once more, to be sorted.
    Sorting {
        /// Documents and copies read.
        read: u64,
        /// All that the mixture takes, about.
        chosen: u64,
    },
    /// Those of `chosen` that are staged.
    Staged {
        /// Documents and copies staged.
        written: u64,
        /// All that the mixture takes, about.
        chosen: u64,
    },
}

/// The job of a mixture.
#[derive(Debug, Clone, Copy)]
pub struct MixtureJob<'a> {
    /// The input, with its tables and their amounts.
    pub input: &'a Input,
    /// The seed of the job.
    pub seed: u64,
    /// Whether a table may be read more than once. `deduplicate` would drop the copies.
    pub may_repeat: bool,
}

/// Random numbers of the documents of a table.
#[derive(Debug, Clone, Copy)]
struct Keys([u32; 2]);

impl Keys {
    fn new(seed: u64, table: &str) -> Self {
        let hash =
            Sha256::new().chain_update(b"stillhouse mixture").chain_update(seed.to_le_bytes()).chain_update(table);
        let hash = hash.finalize();
        let word = |i: usize| hash.iter().skip(4 * i).take(4).fold(0, |word, byte| word << 8 | u32::from(*byte));
        Self([word(0), word(1)])
    }

    fn random(self, document: u64, purpose: u32, copy: u32) -> u64 {
        let words = philox4x32_10([document as u32, (document >> 32) as u32, purpose, copy], self.0);
        u64::from(words[0]) << 32 | u64::from(words[1])
    }

    /// Decides what part of the table a document is in.
    fn key(self, document: u64) -> u64 {
        self.random(document, 0, 0)
    }

    /// Decides the place of a copy in its stage.
    fn place(self, document: u64, copy: u32) -> u64 {
        self.random(document, 1, copy)
    }
}

/// Checks the tables of a mixture without reading all of them: what determines their columns.
///
/// # Errors
/// When a store does not answer, which is not a problem of the job.
pub fn check_mixture(store: &Store, tables: &[QueryTable], input: &Input) -> Result<Vec<Problem>, SourceError> {
    let (mut opened, mut problems) = (Vec::new(), Vec::new());
    for table in tables {
        let found = table.check(store)?;
        let is_readable = found.is_empty();
        problems.extend(found);
        match TableRows::open(store, table, input) {
            Ok(table) => opened.push(table),
            Err(e) if e.retryable() => return Err(e),
            Err(SourceError::Mixture { message, .. }) => problems.push(Problem::missing(table.field.clone(), message)),
            Err(e) if is_readable => problems.push(Problem::missing(format!("{}.paths", table.field), e.to_string())),
            Err(_) => {}
        }
    }
    if problems.is_empty() {
        problems = carried_by_none(&opened, input);
    }
    Ok(problems)
}

/// Mixes the tables and stages the rows in `dir`, which it creates if needed and which may hold files of an earlier run. Reports
/// progress about once a second. Blocks.
///
/// # Errors
/// When a table cannot be read or cannot give what the job asks for, and when the files cannot be written.
pub fn stage_mixture(
    store: &Store,
    tables: &[QueryTable],
    job: MixtureJob<'_>,
    memory_bytes: u64,
    dir: &Path,
    count: &mut CountTokens<'_>,
    progress: &mut dyn FnMut(MixtureProgress),
) -> Result<StagedRows, SourceError> {
    let MixtureJob { input, seed, may_repeat } = job;
    stage(store, tables, input, dir, |spill, parts| {
        let open = |table| Ok((TableRows::open(store, table, input)?, Keys::new(seed, table_name(table))));
        let opened = tables.iter().map(open).collect::<Result<Vec<_>, SourceError>>()?;
        let mut skipped_of = BTreeMap::new();
        let mut tokens = BTreeMap::new();
        let mut reports = Reports { progress, counted: 0, last: None };
        for (table, keys) in &opened {
            let (of_table, bad) = count_table(store, table, *keys, count, &mut reports)?;
            tokens.insert(table.name().to_owned(), of_table);
            skipped_of.insert(table.name().to_owned(), bad);
        }
        let invalid = |message| SourceError::Mixture { message, retryable: false };
        let mut taken = decide(input, &tokens, may_repeat).map_err(invalid)?;
        let mut skipped = BTreeMap::new();
        for (reason, n) in skipped_of.values().flatten() {
            *skipped.entry(reason.clone()).or_default() += n;
        }
        let mixed_tables = mixed_tables(&tokens, &taken, &mut skipped_of);
        let (rows, bytes) = tokens.values().fold((0, 0), |sum, of| (sum.0 + of.documents, sum.1 + of.bytes));
        let batch_bytes = BATCH_BYTES.min(memory_bytes / BATCHES_IN_MEMORY);
        let batch_rows = (batch_bytes * rows / bytes.max(1)).clamp(1, stillhouse_source::BATCH_ROWS as u64);
        let mixed = opened.into_iter().filter_map(|(table, keys)| {
            let (documents, taken) = (tokens.get(table.name())?.documents, taken.remove(table.name())?);
            Some(TakenTable { table, keys, taken, documents })
        });
        let scan = MixtureScan::new(store.clone(), mixed.collect(), batch_rows as usize);
        let chosen = mixed_tables.iter().map(|table| table.epochs * table.documents as f64).sum::<f64>() as u64;
        let read = Arc::clone(&scan.read);
        let written =
            async { write_rows(sorted(scan, memory_bytes, spill)?, parts, (&read, chosen), &mut reports).await };
        store.wait(written).map_err(of_mixture)?;
        Ok((skipped, mixed_tables))
    })
}

/// Reports progress about once a second.
struct Reports<'a> {
    progress: &'a mut dyn FnMut(MixtureProgress),
    counted: u64,
    last: Option<Instant>,
}

impl Reports<'_> {
    fn report(&mut self, progress: MixtureProgress) {
        if self.last.is_none_or(|last| last.elapsed() >= REPORTED_EVERY) {
            (self.progress)(progress);
            self.last = Some(Instant::now());
        }
    }
}

/// Writes the sorted rows. The sort reads all of them before it gives the first.
async fn write_rows(
    mut rows: SendableRecordBatchStream,
    parts: &mut PartWriter<'_>,
    (read, chosen): (&AtomicU64, u64),
    reports: &mut Reports<'_>,
) -> Result<(), SourceError> {
    let (mut ticks, mut written) = (tokio::time::interval(REPORTED_EVERY), 0);
    loop {
        tokio::select! {
            biased;
            batch = rows.next() => {
                let Some(batch) = batch else { return Ok(()) };
                let batch = batch.map_err(sql_error)?;
                parts.write_batch(&batch)?;
                written += batch.num_rows() as u64;
                reports.report(MixtureProgress::Staged { written, chosen });
            }
            _ = ticks.tick() => {
                let read = read.load(Ordering::Relaxed);
                reports.report(MixtureProgress::Sorting { read, chosen });
            }
        }
    }
}

fn table_name(table: &QueryTable) -> &str {
    &table.name
}

fn mixed_tables(
    tokens: &BTreeMap<String, TokensByKey>,
    taken: &BTreeMap<String, Taken>,
    skipped: &mut BTreeMap<String, BTreeMap<String, u64>>,
) -> Vec<MixedTable> {
    let table = |(name, of): (&String, &TokensByKey)| {
        let taken = taken.get(name)?;
        Some(MixedTable {
            name: name.clone(),
            documents: of.documents,
            tokens: of.tokens,
            epochs: taken.epochs,
            mixed_tokens: taken.tokens as u64,
            skipped: skipped.remove(name).unwrap_or_default(),
        })
    };
    tokens.iter().filter_map(table).collect()
}

/// An error of DataFusion names the query, and there is none.
fn of_mixture(error: SourceError) -> SourceError {
    match error {
        SourceError::Sql { message, retryable } => SourceError::Mixture { message, retryable },
        other => other,
    }
}

/// Counts the tokens of a table by key; also returns the bad records, by reason. Reads on a thread of its own.
fn count_table(
    store: &Store,
    table: &TableRows,
    keys: Keys,
    count: &mut CountTokens<'_>,
    reports: &mut Reports<'_>,
) -> Result<(TokensByKey, BTreeMap<String, u64>), SourceError> {
    let (sender, batches) = mpsc::sync_channel(2);
    std::thread::scope(|scope| {
        let read = move || table.read(store, &mut |batch| sender.send(batch).map_err(|_| Stopped.into()));
        let reading = Builder::new().name("read table".into()).spawn_scoped(scope, read);
        let reading = reading.map_err(SourceError::temporary_file)?;
        let mut counted = Ok(TokensByKey::new());
        for batch in batches {
            reports.counted += batch.num_rows() as u64;
            reports.report(MixtureProgress::Counted(reports.counted));
            counted = counted.and_then(|mut tokens| add_batch(&mut tokens, &batch, keys, count).map(|()| tokens));
            if counted.is_err() {
                break;
            }
        }
        let stopped =
            || SourceError::Mixture { message: format!("reading {} stopped", table.name()), retryable: false };
        match (counted, reading.join().map_err(|_| stopped())?) {
            // reading stops after an error of counting
            (Err(e), _) => Err(e),
            (_, Err(e)) => Err(e),
            (Ok(tokens), Ok(bad)) => Ok((tokens, bad)),
        }
    })
}

fn add_batch(
    tokens: &mut TokensByKey,
    batch: &RecordBatch,
    keys: Keys,
    count: &mut CountTokens<'_>,
) -> Result<(), SourceError> {
    let counts = count(batch)?;
    if counts.len() != batch.num_rows() {
        let message =
            format!("{} rows have {} counts of tokens: a bug in this program", batch.num_rows(), counts.len());
        return Err(SourceError::Mixture { message, retryable: false });
    }
    let lengths = row_lengths(batch);
    for (n, bytes) in counts.into_iter().zip(lengths) {
        tokens.add(keys.key(tokens.documents), n, bytes);
    }
    Ok(())
}

/// Bytes of the values of each row.
fn row_lengths(batch: &RecordBatch) -> Vec<u64> {
    let mut lengths = vec![0; batch.num_rows()];
    for column in batch.columns() {
        let Some(texts) = column.as_string_opt::<i64>() else { continue };
        lengths.iter_mut().zip(texts).for_each(|(sum, text)| *sum += text.map_or(0, |text| text.len() as u64));
    }
    lengths
}

/// A table with what is taken of it.
#[derive(Debug)]
struct TakenTable {
    table: TableRows,
    keys: Keys,
    taken: Taken,
    /// Number of documents that were counted.
    documents: u64,
}

impl TakenTable {
    /// The copies of rows that are taken, with their places. `first` is the number of the first row.
    fn copies(
        &self,
        batch: &RecordBatch,
        first: u64,
        number: u32,
        schema: &SchemaRef,
    ) -> Result<RecordBatch, SourceError> {
        let (mut rows, mut places) = (Vec::new(), FixedSizeBinaryBuilder::new(PLACE_BYTES));
        let arrow = |e| sql_error(DataFusionError::ArrowError(Box::new(e), None));
        for (row, document) in (0..batch.num_rows() as u32).zip(first..) {
            for (copy, stage) in (0..).zip(self.taken.stages_of(self.keys.key(document))) {
                let mut place = stage.to_be_bytes().to_vec();
                place.extend(self.keys.place(document, copy).to_be_bytes());
                // equal random numbers: one in 2^64
                place.extend(number.to_be_bytes());
                place.extend(document.to_be_bytes());
                place.extend(copy.to_be_bytes());
                places.append_value(place).map_err(arrow)?;
                rows.push(row);
            }
        }
        let taken = take_record_batch(batch, &UInt32Array::from(rows)).map_err(arrow)?;
        let places: ArrayRef = Arc::new(places.finish());
        let columns = taken.columns().iter().cloned().chain([places]).collect();
        RecordBatch::try_new(schema.clone(), columns).map_err(arrow)
    }
}

/// Reads the tables one after the other.
#[derive(Debug)]
struct MixtureScan {
    store: Store,
    tables: Arc<Vec<TakenTable>>,
    schema: SchemaRef,
    batch_rows: usize,
    /// Documents and copies read so far.
    read: Arc<AtomicU64>,
}

impl MixtureScan {
    fn new(store: Store, tables: Vec<TakenTable>, batch_rows: usize) -> Self {
        let staged = tables.first().map(|table| table.table.staged_schema());
        let staged = staged.iter().flat_map(|schema| schema.fields().iter().cloned());
        let place = Arc::new(Field::new(PLACE, DataType::FixedSizeBinary(PLACE_BYTES), false));
        let schema = Arc::new(Schema::new(staged.chain([place]).collect::<Vec<_>>()));
        Self { store, tables: Arc::new(tables), schema, batch_rows, read: Arc::default() }
    }
}

/// Reads what is taken of all tables and calls `send` with batches of at most `batch_rows` rows.
fn read_taken(
    store: &Store,
    tables: &[TakenTable],
    (schema, batch_rows): (&SchemaRef, usize),
    send: &dyn Fn(RecordBatch) -> Result<(), Stopped>,
) -> Result<(), SourceError> {
    for (number, table) in (0..).zip(tables) {
        let mut read = 0;
        table.table.read(store, &mut |batch| {
            let mut start = 0;
            while start < batch.num_rows() {
                let part = batch.slice(start, batch_rows.min(batch.num_rows() - start));
                let copies = table.copies(&part, read, number, schema)?;
                (start, read) = (start + part.num_rows(), read + part.num_rows() as u64);
                if copies.num_rows() > 0 {
                    send(copies)?;
                }
            }
            Ok(())
        })?;
        if read != table.documents {
            let (name, counted) = (table.table.name(), table.documents);
            let message =
                format!("{name} had {counted} documents when its tokens were counted, and now {read}; run again");
            return Err(SourceError::Mixture { message, retryable: true });
        }
    }
    Ok(())
}

impl PartitionStream for MixtureScan {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let (tx, mut rx) = tokio::sync::mpsc::channel(2);
        let (store, tables, schema, rows) =
            (self.store.clone(), self.tables.clone(), self.schema.clone(), self.batch_rows);
        let count = Arc::clone(&self.read);
        // a thread of its own, as it waits for the sort
        let reading = Builder::new().name("read tables".into()).spawn(move || {
            let send = |batch: RecordBatch| {
                count.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
                tx.blocking_send(Ok(Some(batch))).map_err(|_| Stopped)
            };
            let last = match read_taken(&store, &tables, (&schema, rows), &send) {
                Ok(()) => Ok(None),
                Err(e) => Err(DataFusionError::External(Box::new(e))),
            };
            // the sort may have failed
            let _ = tx.blocking_send(last);
        });
        if let Err(e) = reading {
            tracing::error!("the system gives no thread for reading the tables: {e}");
        }
        let mut ended = false;
        let batches = futures::stream::poll_fn(move |cx| {
            if ended {
                return std::task::Poll::Ready(None);
            }
            rx.poll_recv(cx).map(|message| {
                ended = !matches!(message, Some(Ok(Some(_))));
                let died = || DataFusionError::Execution("reading the tables stopped: a bug in this program".into());
                message.unwrap_or_else(|| Err(died())).transpose()
            })
        });
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), batches))
    }
}

/// The rows of a scan in the order of their places.
fn sorted(scan: MixtureScan, memory_bytes: u64, spill: &Path) -> Result<SendableRecordBatchStream, SourceError> {
    let (schema, batch_rows) = (scan.schema.clone(), scan.batch_rows);
    let context = session(Vec::new(), memory_bytes, Some(spill), |_| {})?;
    let state = context.state();
    let config = state.config().clone().with_batch_size(batch_rows);
    let task = TaskContext::from(&state).with_session_config(config);
    let place = schema.index_of(PLACE).map_err(|e| sql_error(DataFusionError::ArrowError(Box::new(e), None)))?;
    let place = PhysicalSortExpr::new_default(Arc::new(Column::new(PLACE, place)));
    let rows = StreamingTableExec::try_new(schema, vec![Arc::new(scan)], None, [], false, None).map_err(sql_error)?;
    let no_order = || SourceError::Mixture { message: "no order: a bug in this program".into(), retryable: false };
    let order = LexOrdering::new([place]).ok_or_else(no_order)?;
    SortExec::new(order, Arc::new(rows)).execute(0, Arc::new(task)).map_err(sql_error)
}
