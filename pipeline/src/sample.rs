//! Prepares the first documents of a job in memory, to show its rows before a long run.
//!
//! ```text
//!   the job's plan without its sink, split after split ─► rows of the first N documents ─► decoded, as `inspect` shows them
//! ```
//!
//! These are the rows that `run` stores, ids and noise included: the same plan in the same batches. Writes only
//! temporary files (long documents, staged rows).
//!
//! Cost: loads the teacher and runs it over these rows and a few later batches; stages all rows of `input.sql` or of a mixture. Memory: that
//! of one split of a run, and the decoded rows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{RecordBatch, UInt64Array};
use datafusion::common::DataFusionError;
use futures::TryStreamExt;
use serde::Serialize;
use stillhouse_datasets::inspect::{InspectOptions, RowView, decode};
use stillhouse_operators::operator::OperatorError;
use stillhouse_operators::rows::ListRows;
pub use stillhouse_query::MixedTable;
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::{Manifest, SplitRecord};

use crate::engine::device::DeviceQueue;
use crate::engine::operator_plan;
use crate::engine::pool::Pool;
use crate::engine::session::Session;
use crate::engine::shard::count_tokens;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::identity::JobHash;
use crate::job::{Prepared, blocking};
use crate::measure::{self, SampleMeasurements};
use crate::run::splits::{sample_resources, shard_names, source_of};
use crate::teacher::{JobInput, LoadedTeachers, load_all};
use crate::{finish, plan, staged_rows};
use stillhouse_input_files::InputFile;

/// Maximum number of rows that a sample decodes, however long its documents are.
pub const MAX_ROWS: usize = 256;
/// Batches of the teacher that are timed, so that the speed has an interval. The first one, which waits for the first
/// document, does not count.
const TIMED_BATCHES: usize = 6;
/// Maximum time for batches that are only timed.
const TIMING_LIMIT: Duration = Duration::from_secs(10);

/// The prepared first documents of a job.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// Number of documents that the rows come from.
    pub documents: u64,
    /// The rows that begin in these documents, as the job would store them; at most [`MAX_ROWS`].
    pub rows: Vec<RowView>,
    /// Whether these documents have more rows.
    pub cut: bool,
    /// Number of skipped records, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Number of documents that filters dropped, by rule and reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub dropped: BTreeMap<String, u64>,
    /// The tables of a mixture, with what it has of each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mixture: Vec<MixedTable>,
    /// V, the vocabulary size.
    pub vocab_size: u64,
    /// Sizes and speed, measured on these rows; `None` without rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<SampleMeasurements>,
}

/// Prepares the first documents of a job, from its first split and as many later ones as needed.
///
/// # Errors
/// See a run of the job: if the input cannot be read, or the teacher cannot be loaded or fails.
pub async fn sample(
    prepared: Arc<Prepared>,
    hash: &JobHash,
    documents: u64,
    observer: Arc<dyn Observer>,
) -> Result<Sample> {
    let of = hash.clone();
    let SampleInput { splits, files, devices, device_count, manifest, staged } =
        &blocking(&prepared, &observer, move |p, o| SampleInput::prepare(p, &of, o)).await?;
    observer.event(&Event::Preparing { what: "preparing the first documents".into() });
    let pool = Pool::of_this_process()?;
    let plan = operator_plan(source_of(&prepared, files, splits), &prepared.operators);
    let resources = sample_resources(&prepared, devices, splits, pool.spawner()?);
    let session = Session::new(plan, resources, &prepared.spec.engine)?;
    let names = shard_names(splits);
    let mut sample = Sample {
        documents: 0,
        rows: Vec::new(),
        cut: false,
        skipped: BTreeMap::new(),
        dropped: BTreeMap::new(),
        mixture: staged.as_ref().map_or(Vec::new(), |staged| staged.tables.clone()),
        vocab_size: prepared.vocab_size as u64,
        measured: None,
    };
    let (mut all_rows, mut batch_times) = (Vec::new(), Vec::new());
    for (partition, split) in splits.iter().enumerate() {
        if sample.documents == documents || sample.cut {
            break;
        }
        let batches = sample.add_split(&session, partition, documents, &mut batch_times).await?;
        let shard = names.get(&split.split).map(|name| format!("data/{name}")).unwrap_or_default();
        for (number, row) in rows_of(&batches).enumerate() {
            let options = InspectOptions::default();
            let view = decode(manifest, &prepared.vocabulary, &row, &options, &shard, number as u64)?;
            sample.rows.push(view);
        }
        all_rows.extend(batches);
    }
    sample.measured = measure::sample(&prepared, &all_rows, &batch_times, *device_count)?;
    Ok(sample)
}

/// Splits batches into single rows.
fn rows_of(batches: &[RecordBatch]) -> impl Iterator<Item = RecordBatch> {
    batches.iter().flat_map(|batch| (0..batch.num_rows()).map(|row| batch.slice(row, 1)))
}

/// What a sample is built from.
struct SampleInput {
    splits: Arc<Vec<SplitRecord>>,
    files: Arc<Vec<InputFile>>,
    devices: Vec<DeviceQueue>,
    /// Devices of a run; the sample uses one.
    device_count: usize,
    manifest: Manifest,
    /// Staged rows; dropping this removes them.
    staged: Option<TemporaryRows>,
}

impl SampleInput {
    fn prepare(prepared: &Prepared, hash: &JobHash, observer: &dyn Observer) -> Result<Self> {
        let is_staged = prepared.spec.input.is_staged();
        let mut staged = is_staged.then(|| TemporaryRows::make(prepared, observer)).transpose()?;
        let files = match &mut staged {
            Some(staged) => std::mem::take(&mut staged.files),
            None => plan::in_order(hash, &prepared.files),
        };
        let splits = plan::all_splits(prepared, hash, &files, observer)?;
        let input = JobInput { splits: &splits, files: &files };
        let LoadedTeachers { teachers, arithmetic } = load_all(prepared, input, None, true, observer)?;
        let info = teachers.first().map(|teacher| teacher.info().clone());
        let (arithmetic, own) = (arithmetic.as_ref(), splits.clone());
        let manifest = finish::manifest(prepared, hash, info.as_ref(), arithmetic, own, Vec::new())?;
        let device_count = teachers.len();
        // splits are built one after the other, so one device is enough
        let first = teachers.into_iter().next().map(DeviceQueue::start).transpose();
        let first = first.map_err(|e| PipelineError::caused(ErrorKind::Model, "teacher", e))?;
        let (splits, files, devices) = (Arc::new(splits), Arc::new(files), first.into_iter().collect());
        Ok(Self { splits, files, devices, device_count, manifest, staged })
    }
}

/// Staged rows in a temporary folder; dropping this removes it.
struct TemporaryRows {
    files: Vec<InputFile>,
    tables: Vec<MixedTable>,
    _folder: tempfile::TempDir,
}

impl TemporaryRows {
    fn make(prepared: &Prepared, observer: &dyn Observer) -> Result<Self> {
        let folder = tempfile::tempdir()
            .map_err(|e| PipelineError::caused(ErrorKind::Input, "no temporary folder for the staged rows", e))?;
        let staged = staged_rows::make_rows(prepared, &folder.path().join("input"), observer)?;
        Ok(Self { files: staged.files, tables: staged.tables, _folder: folder })
    }
}

impl Sample {
    /// Tokens of a mixture, all of which were counted; `None` for other inputs.
    pub fn mixed_tokens(&self) -> Option<u64> {
        (!self.mixture.is_empty()).then(|| self.mixture.iter().map(|table| table.mixed_tokens).sum())
    }

    /// Counts the documents of a split and returns its rows that begin in a requested document. Goes on for a few batches
    /// if the teacher was timed on too few. Adds the tokens of each batch and the time that it took to come to `batch_times`.
    async fn add_split(
        &mut self,
        session: &Session,
        partition: usize,
        documents: u64,
        batch_times: &mut Vec<(u64, Duration)>,
    ) -> Result<Vec<RecordBatch>> {
        let split = &session.splits()[partition];
        let place = format!("split {}", split.split.0);
        let of_stage = |e| PipelineError::from_stage(place.clone(), e);
        // the split's counts live as long as this handle
        let state = session.resources.split_state(split);
        let max_documents = documents - self.documents;
        let remaining_rows = MAX_ROWS - self.rows.len();
        let mut rows = Rows {
            max_documents,
            documents: BTreeSet::new(),
            remaining_rows,
            batches: Vec::new(),
            full: false,
            cut: &mut self.cut,
        };
        let mut stream = session.rows(partition).map_err(of_stage)?;
        let mut began = Instant::now();
        // when the rows are complete, and then further batches are only timed
        let mut full_since: Option<Instant> = None;
        while full_since.is_none_or(|since| {
            let has_teacher = !session.resources.devices.is_empty();
            has_teacher && batch_times.len() <= TIMED_BATCHES && since.elapsed() < TIMING_LIMIT
        }) && let Some(batch) = stream.try_next().await.map_err(of_stage)?
        {
            let tokens = count_tokens(&batch).map_err(|e| PipelineError::caused(ErrorKind::DataSet, &*place, e))?;
            batch_times.push((tokens, began.elapsed()));
            began = Instant::now();
            if full_since.is_none() {
                rows.take(&batch).map_err(|e| of_stage(DataFusionError::External(Box::new(e))))?;
                full_since = rows.full.then(Instant::now);
            }
        }
        let statistics = state.statistics.lock().clone();
        // a split with fewer documents than requested was read to its end: its documents without a row count as well
        let read = if rows.full { rows.documents.len() as u64 } else { statistics.documents.min(max_documents) };
        if !rows.full {
            add_counts(&mut self.skipped, statistics.skipped);
            add_counts(&mut self.dropped, statistics.dropped);
        }
        self.documents += read.min(max_documents);
        Ok(rows.batches)
    }
}

fn add_counts(sums: &mut BTreeMap<String, u64>, counts: BTreeMap<String, u64>) {
    counts.into_iter().for_each(|(reason, n)| *sums.entry(reason).or_default() += n);
}

/// Collects the rows of one split.
struct Rows<'a> {
    /// Number of requested documents; the first ones that the rows name count.
    max_documents: u64,
    documents: BTreeSet<u64>,
    remaining_rows: usize,
    batches: Vec<RecordBatch>,
    full: bool,
    cut: &'a mut bool,
}

impl Rows<'_> {
    /// Keeps the rows that begin in a requested document. The first other row sets `full`.
    fn take(&mut self, batch: &RecordBatch) -> Result<(), OperatorError> {
        let arrow = OperatorError::arrow("sample");
        let lists = ListRows::from_batch(batch, columns::DOCUMENT_IDS).map_err(&arrow)?;
        let ids = lists.values::<UInt64Array>(columns::DOCUMENT_IDS).map_err(&arrow)?;
        let mut kept = 0;
        for row in 0..batch.num_rows() {
            let mut own = lists.range(row).map(|i| ids.value(i));
            let Some(first) = own.next() else { continue };
            if !self.documents.contains(&first) && self.documents.len() as u64 >= self.max_documents {
                self.full = true;
                break;
            }
            if kept == self.remaining_rows {
                (self.full, *self.cut) = (true, true);
                break;
            }
            self.documents.insert(first);
            // further documents that end in this row
            for id in own {
                if (self.documents.len() as u64) < self.max_documents {
                    self.documents.insert(id);
                }
            }
            kept += 1;
        }
        self.remaining_rows -= kept;
        if kept > 0 {
            self.batches.push(batch.slice(0, kept));
        }
        Ok(())
    }
}
