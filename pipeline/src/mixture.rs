//! Mixtures of tables as a job wants them: what counts as a token, and what a person is told.
//!
//! Tokens are those of the documents that the job's operators before `deduplicate` and `pack` keep, so the shares hold for what
//! is trained on. `deduplicate` comes later: it compares the documents of the mixture.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::{Array, AsArray, BooleanBuilder, RecordBatch, StringBuilder, UInt64Array, UInt64Builder};
use stillhouse_operators::deduplicate;
use stillhouse_operators::operator::{
    CarriedValues, Counters, FooterEntries, Operator, OperatorError, SharedStatistics, SplitContext, documents_schema,
};
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::pack::PackConfig;
use stillhouse_operators::rows::ListRows;
use stillhouse_query::{MixtureJob, MixtureProgress, StagedRows, stage_mixture};
use stillhouse_schemas::ids::SplitId;
use stillhouse_source::TRAIN;

use crate::error::{PipelineError, Result};
use crate::events::{Event, Observer};
use crate::job::{Prepared, chain};
use crate::source_error::SourceError;
use crate::units;

/// Mixes the tables of a job and stages the rows in `folder`; the sort uses at most `memory_bytes`.
///
/// # Errors
/// If a table cannot be read or cannot give what the job asks for, and if the rows cannot be written.
pub(crate) fn stage(
    prepared: &Prepared,
    folder: &Path,
    memory_bytes: u64,
    observer: &dyn Observer,
) -> Result<StagedRows> {
    let failed = |e| PipelineError::source("input.tables", e);
    let mut counter = TokenCounter::new(prepared).map_err(failed)?;
    let mut count = |rows: &RecordBatch| counter.count(rows);
    let of = |done: u64, chosen: u64| format!("{} of about {}", units::count(done), units::counted(chosen, "document"));
    let mut progress = |progress: MixtureProgress| {
        let what = match progress {
            MixtureProgress::Counted(n) => format!("counting tokens of the mixture: {}", units::counted(n, "document")),
            MixtureProgress::Sorting { read, chosen } => format!("sorting the mixture: {}", of(read, chosen)),
            MixtureProgress::Staged { written, chosen } => format!("staging the mixture: {}", of(written, chosen)),
        };
        observer.event(&Event::Preparing { what });
    };
    let may_repeat = prepared.operators.iter().all(|operator| operator.name() != deduplicate::NAME);
    let job = MixtureJob { input: &prepared.spec.input, seed: prepared.spec.seed, may_repeat };
    let staged = stage_mixture(&prepared.store, &prepared.tables, job, memory_bytes, folder, &mut count, &mut progress)
        .map_err(failed)?;
    for table in staged.tables.iter().filter(|table| table.epochs > 1.0) {
        let (times, tokens) = (table.epochs, units::counted(table.tokens, "token"));
        let message = format!("{} is read {times:.2} times: it has {tokens}", table.name);
        observer.event(&Event::Warning { message });
    }
    Ok(staged)
}

/// Counts the tokens of documents with the operators of the job.
struct TokenCounter {
    operators: Vec<Box<dyn Operator>>,
    carried: Arc<BatchValues>,
    /// Names of the carried values.
    names: Vec<String>,
    piece_bytes: usize,
    documents: u64,
}

/// The carried values of the documents of the last batch.
#[derive(Debug, Default)]
struct BatchValues(Mutex<HashMap<u64, Arc<[Option<String>]>>>);

impl CarriedValues for BatchValues {
    fn of_document(&self, document: u64) -> io::Result<Option<Arc<[Option<String>]>>> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&document).cloned())
    }

    fn is_mixture(&self) -> bool {
        true
    }
}

impl TokenCounter {
    fn new(prepared: &Prepared) -> std::result::Result<Self, SourceError> {
        let carried = Arc::new(BatchValues::default());
        let context = SplitContext {
            split: SplitId(0),
            dataset_split: TRAIN.into(),
            sequence_range: None,
            vocabulary: Arc::clone(&prepared.vocabulary),
            duplicates: None,
            carried: Some(Arc::clone(&carried) as Arc<dyn CarriedValues>),
            teacher: None,
            statistics: SharedStatistics::default(),
            footer: FooterEntries::default(),
            meter: Arc::new(Counters::default()),
        };
        let before_pack = prepared.operators.iter().take_while(|operator| operator.config::<PackConfig>().is_none());
        let counted = before_pack.filter(|operator| operator.name() != deduplicate::NAME);
        let operators = counted.map(|operator: &OperatorSpec| operator.build(&context));
        let piece_bytes = prepared.spec.input.piece_kilobytes as usize * 1000;
        let names = prepared.spec.input.carry.clone();
        Ok(Self {
            operators: operators.collect::<std::result::Result<_, _>>().map_err(failed)?,
            carried,
            names,
            piece_bytes,
            documents: 0,
        })
    }

    /// Returns the tokens of each row; its first column is the text, and null has none.
    fn count(&mut self, rows: &RecordBatch) -> std::result::Result<Vec<u64>, SourceError> {
        let first = self.documents;
        self.documents += rows.num_rows() as u64;
        self.set_carried(rows, first);
        let mut tokens = vec![0; rows.num_rows()];
        let documents = self.documents_of(rows, first).map_err(|e| failed(OperatorError::arrow("mixture")(e)))?;
        run(&mut self.operators, &documents, &mut |batch| add_tokens(batch, first, &mut tokens)).map_err(failed)?;
        Ok(tokens)
    }

    fn set_carried(&self, rows: &RecordBatch, first: u64) {
        let columns = self.names.iter().map(|name| rows.column_by_name(name).and_then(|c| c.as_string_opt::<i64>()));
        let columns: Vec<_> = columns.collect();
        let value = |row: usize| {
            columns.iter().map(move |column| column.filter(|c| c.is_valid(row)).map(|c| c.value(row).to_owned()))
        };
        let values = (first..).zip(0..rows.num_rows()).map(|(id, row)| (id, value(row).collect())).collect();
        *self.carried.0.lock().unwrap_or_else(PoisonError::into_inner) = values;
    }

    /// The rows as pieces of documents.
    fn documents_of(
        &self,
        rows: &RecordBatch,
        first: u64,
    ) -> std::result::Result<RecordBatch, arrow::error::ArrowError> {
        let (mut ids, mut texts, mut ends) = (UInt64Builder::new(), StringBuilder::new(), BooleanBuilder::new());
        let column = rows.column(0).as_string::<i64>();
        for (id, text) in (first..).zip(column) {
            let Some(mut text) = text else { continue };
            loop {
                let (piece, rest) = text.split_at(text.floor_char_boundary(self.piece_bytes));
                ids.append_value(id);
                texts.append_value(piece);
                ends.append_value(rest.is_empty());
                text = rest;
                if rest.is_empty() {
                    break;
                }
            }
        }
        let columns: Vec<arrow::array::ArrayRef> =
            vec![Arc::new(ids.finish()), Arc::new(texts.finish()), Arc::new(ends.finish())];
        RecordBatch::try_new(documents_schema(), columns)
    }
}

/// Runs a batch through operators, one after the other.
fn run(
    operators: &mut [Box<dyn Operator>],
    batch: &RecordBatch,
    last: &mut dyn FnMut(&RecordBatch) -> std::result::Result<(), OperatorError>,
) -> std::result::Result<(), OperatorError> {
    match operators {
        [] => last(batch),
        [first, rest @ ..] => first.process(batch, &mut |made| run(rest, &made, last)),
    }
}

/// Adds the tokens of pieces to those of their documents.
fn add_tokens(batch: &RecordBatch, first: u64, tokens: &mut [u64]) -> std::result::Result<(), OperatorError> {
    let arrow = OperatorError::arrow("mixture");
    let lists = ListRows::from_batch(batch, "tokens").map_err(&arrow)?;
    let ids = batch.column_by_name("document_id").and_then(|ids| ids.as_any().downcast_ref::<UInt64Array>());
    for (row, id) in ids.into_iter().flat_map(|ids| ids.values().iter().enumerate()) {
        if let Some(sum) = tokens.get_mut((id - first) as usize) {
            *sum += lists.range(row).len() as u64;
        }
    }
    Ok(())
}

fn failed(error: OperatorError) -> SourceError {
    SourceError::Mixture { message: format!("counting tokens: {}", chain(&error)), retryable: false }
}
