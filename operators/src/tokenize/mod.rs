//! `tokenize`: converts text to token ids, on all cores, in order.
//!
//! ```text
//!  [document_id, text, end] ──► documents of one piece: encoded whole ─────────────────────┐
//!                     └───────► longer ones: buffered, cut where a check finds no change ──┴─► [document_id, tokens, end]
//! ```
//!
//! The ids of a document are those of its whole text, for any division into pieces and any number of threads. A long
//! document is cut only where the tokenizer returns the same ids with and without the cut, on 4 KiB to both sides.
//! `cut.rs` explains for which tokenizers this check is a proof. The operator adds no special tokens; `pack` does.
//!
//! Cost: the tokenizer's own (100 MB of text per second and core or more; a few MB if it goes through `tokenizers`),
//! and for long documents about 1 % more for the cuts. Memory: one input batch, its ids (u32), and one buffered piece.

mod cut;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{BooleanArray, RecordBatch, UInt32Array, UInt64Array};
use arrow::datatypes::{Schema, SchemaRef};
use rayon::prelude::*;
use stillhouse_schemas::manifest::SourceStatistics;
use stillhouse_schemas::problems::Problem;

use crate::config::{JobContext, OperatorConfig};
use crate::document_pieces::{document_name, document_pieces, unfinished_document};
use crate::document_table::DocumentTables;
use crate::operator::{Emit, Measure, Meter, Operator, OperatorError, SharedStatistics, SplitContext, tokens_schema};
use crate::rows::list_column;
use crate::vocabulary::{Vocabulary, VocabularyError};

const NAME: &str = "tokenize";

/// Bound on the buffered text of a document without a good place to cut, in pieces; at least [`MIN_BUFFER_BYTES`]
/// bytes.
const MAX_BUFFERED_PIECES: usize = 4;
const MIN_BUFFER_BYTES: usize = 64 * 1024;

/// Configuration of `tokenize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizeConfig {
    /// Bytes of text to encode at once (`input.piece_kilobytes` · 1000). A longer text is encoded at once only if it
    /// cannot be cut.
    pub piece_bytes: usize,
}

impl OperatorConfig for TokenizeConfig {
    const NAME: &'static str = NAME;

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let text = !context.spec.input.is_rows() && context.spec.input.messages.is_none();
        Ok(text.then_some(Self { piece_bytes: context.spec.input.piece_kilobytes as usize * 1000 }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        tokens_schema()
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(self.build(context)?))
    }
}

impl TokenizeConfig {
    /// Builds the operator for one split.
    ///
    /// # Errors
    /// Fails if `piece_bytes` is 0.
    pub fn build(&self, context: &SplitContext) -> Result<Tokenize, OperatorError> {
        if self.piece_bytes == 0 {
            return Err(OperatorError::Config {
                operator: NAME,
                message: "piece_bytes: got 0, valid: 1 or more".into(),
            });
        }
        Ok(Tokenize {
            piece_bytes: self.piece_bytes,
            vocabulary: context.vocabulary.clone(),
            buffered: None,
            tables: DocumentTables::new(context),
            statistics: context.statistics.clone(),
            meter: context.meter.clone(),
        })
    }
}

/// The operator.
#[derive(Debug)]
pub struct Tokenize {
    piece_bytes: usize,
    vocabulary: Arc<Vocabulary>,
    buffered: Option<BufferedDocument>,
    tables: DocumentTables,
    statistics: SharedStatistics,
    meter: Arc<dyn Meter>,
}

/// The buffered text of a document: not encoded yet, and more pieces follow.
#[derive(Debug)]
struct BufferedDocument {
    id: u64,
    text: String,
    /// Length in bytes at which to try the next cut.
    try_at: usize,
}

/// A text to encode.
struct Task<'a> {
    id: u64,
    text: Cow<'a, str>,
    end: bool,
}

impl Tokenize {
    /// Adds a piece to the buffer; pushes what can be encoded now to `tasks`.
    fn add_piece<'a>(
        &mut self,
        id: u64,
        text: &'a str,
        end: bool,
        tasks: &mut Vec<Task<'a>>,
    ) -> Result<(), OperatorError> {
        let first_try = self.piece_bytes + cut::MIN_BYTES_AFTER_CUT;
        let mut buffered = match self.buffered.take() {
            Some(buffered) if buffered.id != id => return Err(unfinished_document(NAME, buffered.id)),
            Some(buffered) => buffered,
            None if end => {
                tasks.push(Task { id, text: text.into(), end });
                return Ok(());
            }
            None => BufferedDocument { id, text: String::new(), try_at: first_try },
        };
        buffered.text.push_str(text);
        if end {
            tasks.push(Task { id, text: buffered.text.into(), end });
            return Ok(());
        }
        if buffered.text.len() >= buffered.try_at {
            if let Some(cut) = cut::find(&buffered.text, &self.vocabulary).map_err(|e| encode_error(id, &e))? {
                let tail = buffered.text[cut.tail..].to_owned();
                buffered.text.truncate(cut.head);
                tasks.push(Task { id, text: buffered.text.into(), end: false });
                buffered = BufferedDocument { id, text: tail, try_at: first_try };
            } else {
                let held = buffered.text.len();
                if held >= (MAX_BUFFERED_PIECES * self.piece_bytes).max(MIN_BUFFER_BYTES) {
                    return Err(OperatorError::Data {
                        operator: NAME,
                        place: document_name(id),
                        message: format!(
                            "got {held} bytes without a position where a cut does not change the tokens; valid: text \
                             with words or lines, or an input.piece_kilobytes larger than the document"
                        ),
                    });
                }
                buffered.try_at = 2 * held;
            }
        }
        self.buffered = Some(buffered);
        Ok(())
    }
}

impl Tokenize {
    fn count_by_table(&self, tasks: &[Task<'_>], lengths: &[usize]) -> Result<(), OperatorError> {
        let mut counts: BTreeMap<Arc<str>, SourceStatistics> = BTreeMap::new();
        for (task, tokens) in tasks.iter().zip(lengths) {
            let Some(table) = self.tables.of_document(task.id, NAME)? else { return Ok(()) };
            let count = counts.entry(table).or_default();
            count.text_tokens += *tokens as u64;
            count.kept_documents += u64::from(task.end);
        }
        let mut statistics = self.statistics.lock();
        for (table, count) in counts {
            *statistics.sources.entry(table.to_string()).or_default() += &count;
        }
        Ok(())
    }
}

/// Returns the ids of all tasks, concatenated, and the number of ids of each. Runs on all cores; each run of tasks
/// shares a buffer.
fn encode_all(vocabulary: &Vocabulary, tasks: &[Task<'_>]) -> Result<(Vec<u32>, Vec<usize>), OperatorError> {
    let mut runs: Vec<(Vec<u32>, Vec<usize>)> = tasks
        .par_iter()
        .try_fold(Default::default, |(mut ids, mut lengths): (Vec<u32>, Vec<usize>), task| {
            let first = ids.len();
            vocabulary.encode_into(&task.text, &mut ids).map_err(|e| encode_error(task.id, &e))?;
            lengths.push(ids.len() - first);
            Ok((ids, lengths))
        })
        .collect::<Result<_, OperatorError>>()?;
    if let [_] = runs.as_slice() {
        return Ok(runs.swap_remove(0));
    }
    let (ids, lengths): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
    Ok((ids.concat(), lengths.concat()))
}

fn encode_error(id: u64, error: &VocabularyError) -> OperatorError {
    OperatorError::Data { operator: NAME, place: document_name(id), message: error.to_string() }
}

impl Operator for Tokenize {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut tasks = Vec::with_capacity(batch.num_rows());
        for piece in document_pieces(batch, NAME)? {
            self.add_piece(piece.id, piece.text, piece.end, &mut tasks)?;
        }
        if tasks.is_empty() {
            return Ok(());
        }
        let (ids, lengths) = encode_all(&self.vocabulary, &tasks)?;
        let total = ids.len() as u64;
        self.statistics.lock().text_tokens += total;
        self.count_by_table(&tasks, &lengths)?;
        self.meter.add(Measure::Tokens, total);

        let schema = tokens_schema();
        let ids = Arc::new(UInt32Array::from(ids));
        let tokens = list_column(schema.field(1), ids, &lengths).map_err(OperatorError::arrow(NAME))?;
        let output = RecordBatch::try_new(
            schema,
            vec![
                Arc::new(UInt64Array::from_iter_values(tasks.iter().map(|task| task.id))),
                tokens,
                Arc::new(tasks.iter().map(|task| Some(task.end)).collect::<BooleanArray>()),
            ],
        );
        emit(output.map_err(OperatorError::arrow(NAME))?)
    }

    fn finish(&mut self, _emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        self.buffered.take().map_or(Ok(()), |buffered| Err(unfinished_document(NAME, buffered.id)))
    }
}

#[cfg(test)]
mod tests;
