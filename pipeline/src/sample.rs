//! The first documents of a job, prepared in memory: what its rows will look like, before a week of work.
//!
//! ```text
//!   splits, in order ─► read ─► the operators of the job ─► rows of the first N documents ─► decoded, as `inspect` shows them
//! ```
//!
//! These are the rows that `run` stores, ids and noise included: the same operators see the same batches, and one that the last
//! of these rows shares with later rows is worked on whole. Nothing is written but temporary files (long documents, the rows of `input.sql`).
//!
//! Cost: the teacher is loaded and goes over these rows; `input.sql` runs whole. Memory: one batch, and the decoded rows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::array::{RecordBatch, UInt64Array};
use datafusion::common::DataFusionError;
use serde::Serialize;
use stillhouse_operators::operator::{Counters, Operator, OperatorError, SharedStatistics, SplitContext};
use stillhouse_operators::rows::ListRows;
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::{Manifest, SplitRecord};
use stillhouse_teacher::Teacher;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::identity::JobHash;
use crate::inspect::{InspectOptions, RowView, decode};
use crate::job::Prepared;
use crate::plan;
use crate::source::{self, InputFile, SourceError, Stopped};
use crate::{finish, functions, run, teacher};

/// Most rows that a sample decodes, however long its documents are.
pub const MOST_ROWS: usize = 256;

/// The first documents of a job, prepared.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// Documents that the rows are of.
    pub documents: u64,
    /// The rows that begin in these documents, as the job will store them; at most [`MOST_ROWS`].
    pub rows: Vec<RowView>,
    /// Whether there are more rows of these documents.
    pub cut: bool,
    /// Records skipped on the way, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// V.
    pub vocab_size: u64,
}

/// Prepares the first documents of a job: those of its first split, and where that has fewer, of the splits after it.
///
/// # Errors
/// As a run of the job: when the input cannot be read, when the teacher cannot be loaded or fails.
pub fn sample(prepared: &Prepared, hash: &JobHash, documents: u64, observer: &dyn Observer) -> Result<Sample> {
    let staged = match prepared.spec.input.sql {
        Some(_) => Some(Query::run(prepared, observer)?),
        None => None,
    };
    let ordered = plan::in_order(hash, &prepared.files);
    let files: &[InputFile] = staged.as_ref().map_or(&ordered, |query| &query.files);
    let splits = plan::all_splits(prepared, hash, files, observer)?;
    let input = teacher::JobInput { splits: &splits, files };
    let teacher::Loaded { teachers, arithmetic } = teacher::load_all(prepared, input, None, true, observer)?;
    let teacher = teachers.into_iter().next();
    let info = teacher.as_ref().map(|t| t.info().clone());
    let manifest = finish::manifest(prepared, hash, info.as_ref(), arithmetic.as_ref(), splits.clone(), Vec::new())?;
    let names = run::splits::shard_names(&splits);
    observer.event(&Event::Preparing { what: "preparing the first documents".into() });
    let mut sampler = Sampler {
        prepared,
        files,
        teacher,
        manifest,
        left: documents,
        sample: Sample {
            documents: 0,
            rows: Vec::new(),
            cut: false,
            skipped: BTreeMap::new(),
            vocab_size: prepared.vocab_size as u64,
        },
    };
    for split in &splits {
        if sampler.left == 0 || sampler.sample.cut {
            break;
        }
        let shard = names.get(&split.split).map(|name| format!("data/{name}")).unwrap_or_default();
        sampler.split(split, &shard)?;
    }
    Ok(sampler.sample)
}

/// The rows of `input.sql`, gone with this value.
struct Query {
    files: Vec<InputFile>,
    _folder: tempfile::TempDir,
}

impl Query {
    fn run(prepared: &Prepared, observer: &dyn Observer) -> Result<Self> {
        observer.event(&Event::Preparing { what: "running input.sql".into() });
        let folder = tempfile::tempdir()
            .map_err(|e| PipelineError::caused(ErrorKind::Input, "no temporary folder for the rows of input.sql", e))?;
        let memory = u64::from(prepared.spec.engine.sql_memory_megabytes) * 1_000_000;
        let place = folder.path().join("input");
        let input = &prepared.spec.input;
        let staged = source::stage_sql(&prepared.store, &prepared.tables, input, memory, &place, functions::register)
            .map_err(|e| PipelineError::source("input.sql", e))?;
        Ok(Self { files: staged.files, _folder: folder })
    }
}

struct Sampler<'a> {
    prepared: &'a Prepared,
    files: &'a [InputFile],
    teacher: Option<Arc<dyn Teacher>>,
    manifest: Manifest,
    /// Documents that are still asked for.
    left: u64,
    sample: Sample,
}

/// What came out of the operators of one split.
struct Rows<'a> {
    /// Documents that are asked for; the first ones that the rows name.
    most: u64,
    documents: BTreeSet<u64>,
    room: usize,
    batches: Vec<RecordBatch>,
    full: bool,
    cut: &'a mut bool,
}

impl Sampler<'_> {
    fn split(&mut self, split: &SplitRecord, shard: &str) -> Result<()> {
        let prepared = self.prepared;
        let place = format!("split {}", split.split.0);
        let of_operator =
            |e: OperatorError| PipelineError::from_stage(place.clone(), DataFusionError::External(Box::new(e)));
        let context = SplitContext {
            split: split.split,
            dataset_split: split.dataset_split.clone(),
            place: split.place,
            vocabulary: Arc::clone(&prepared.vocabulary),
            teacher: self.teacher.clone(),
            statistics: SharedStatistics::default(),
            meter: Arc::new(Counters::default()),
        };
        let built = prepared.operators.iter().map(|spec| spec.build(&context));
        let mut chain: Vec<Box<dyn Operator>> = built.collect::<Result<_, _>>().map_err(of_operator)?;
        let mut rows = Rows {
            most: self.left,
            documents: BTreeSet::new(),
            room: MOST_ROWS - self.sample.rows.len(),
            batches: Vec::new(),
            full: false,
            cut: &mut self.sample.cut,
        };
        let mut failed = None;
        let read = {
            let mut emit = |batch: RecordBatch| {
                push(&mut chain, &batch, &mut |out| rows.take(&out)).map_err(|e| {
                    failed = Some(e);
                    Stopped
                })
            };
            let input = crate::job::query_input(prepared);
            source::read_split(&prepared.store, self.files, split, &input, &mut emit)
        };
        match (read, failed) {
            (Ok(summary), _) => {
                let skipped = &mut self.sample.skipped;
                summary.skipped.into_iter().for_each(|(reason, n)| *skipped.entry(reason).or_default() += n);
                match finish_all(&mut chain, &mut |out| rows.take(&out)) {
                    Ok(()) | Err(OperatorError::Stopped) => {}
                    Err(e) => return Err(of_operator(e)),
                }
            }
            (Err(SourceError::Stopped(_)), Some(OperatorError::Stopped) | None) => {}
            (Err(SourceError::Stopped(_)), Some(e)) => return Err(of_operator(e)),
            (Err(e), _) => return Err(PipelineError::source(place, e)),
        }
        // a split that gave fewer documents than asked for is all read; documents without a row count as read
        let found = rows.documents.len() as u64;
        let read = if rows.full { found } else { context.statistics.lock().documents.min(self.left) };
        let batches = std::mem::take(&mut rows.batches);
        self.left -= read.min(self.left);
        self.sample.documents += read;
        self.decode(&batches, shard)
    }

    fn decode(&mut self, batches: &[RecordBatch], shard: &str) -> Result<()> {
        let options = InspectOptions::default();
        let mut number = 0;
        for batch in batches {
            for row in 0..batch.num_rows() {
                let one = batch.slice(row, 1);
                let view = decode(&self.manifest, &self.prepared.vocabulary, &one, &options, shard, number)?;
                self.sample.rows.push(view);
                number += 1;
            }
        }
        Ok(())
    }
}

impl Rows<'_> {
    /// Keeps the rows that begin in the documents asked for; says that it is over at the first that does not.
    fn take(&mut self, batch: &RecordBatch) -> Result<(), OperatorError> {
        let arrow = OperatorError::arrow("sample");
        let lists = ListRows::of(batch, columns::DOCUMENT_IDS).map_err(&arrow)?;
        let ids = lists.values::<UInt64Array>(columns::DOCUMENT_IDS).map_err(&arrow)?;
        let mut kept = 0;
        for row in 0..batch.num_rows() {
            let mut own = lists.range(row).map(|i| ids.value(i));
            let Some(first) = own.next() else { continue };
            if !self.documents.contains(&first) && self.documents.len() as u64 >= self.most {
                self.full = true;
                break;
            }
            if kept == self.room {
                (self.full, *self.cut) = (true, true);
                break;
            }
            self.documents.insert(first);
            // those that end in this row without beginning one
            for id in own {
                if (self.documents.len() as u64) < self.most {
                    self.documents.insert(id);
                }
            }
            kept += 1;
        }
        self.room -= kept;
        if kept > 0 {
            self.batches.push(batch.slice(0, kept));
        }
        if self.full { Err(OperatorError::Stopped) } else { Ok(()) }
    }
}

type Sink<'a> = dyn FnMut(RecordBatch) -> Result<(), OperatorError> + 'a;

/// A batch through all operators.
fn push(chain: &mut [Box<dyn Operator>], batch: &RecordBatch, sink: &mut Sink<'_>) -> Result<(), OperatorError> {
    match chain.split_first_mut() {
        None => sink(batch.clone()),
        Some((first, rest)) => first.process(batch, &mut |out| push(rest, &out, sink)),
    }
}

/// The end of a split: what each operator holds back goes through those after it.
fn finish_all(chain: &mut [Box<dyn Operator>], sink: &mut Sink<'_>) -> Result<(), OperatorError> {
    match chain.split_first_mut() {
        None => Ok(()),
        Some((first, rest)) => {
            first.finish(&mut |out| push(rest, &out, sink))?;
            finish_all(rest, sink)
        }
    }
}
