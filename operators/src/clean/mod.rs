//! `clean`: undoes the tokenization of published benchmark corpora, so that a model sees ordinary text.
//!
//! ```text
//!  [document_id, text, end] ──► detokenizer rules, text by text, on all cores ──► [document_id, text, end]
//!                     └─ none: the same batch, not copied
//! ```
//!
//! The rules are those of MDLM's `dataloader.py` (Sahoo et al. 2024), which the zero-shot evaluations of the five
//! papers share. [`rules`](self::detokenize) describes how they translate Python's regular expressions. A document of
//! up to `input.piece_kilobytes` is cleaned whole. A longer one streams through the rules (`stream.rs`); the result is
//! the same for any division into pieces.
//!
//! Cost: about one pass over the text per rule that matches; for a long document up to twice that, on one core. Memory:
//! one input batch, its cleaned copy, and what the rules buffer of a long document. Each buffers a few bytes, or the
//! text from an opening bracket with white space to the closing one: up to four pieces, and at least 4 MB.

mod rules;
mod section;
mod stream;

use std::borrow::Cow;
use std::sync::Arc;

use arrow::array::{BooleanArray, RecordBatch, StringArray, UInt64Array};
use arrow::datatypes::{Schema, SchemaRef};
use rayon::prelude::*;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

pub use rules::detokenize;
pub use section::{CleanSection, Detokenizer};

use crate::config::{JobContext, OperatorConfig};
use crate::document_pieces::{document_name, document_pieces, unfinished_document};
use crate::operator::{
    Emit, Measure, Meter, Operator, OperatorError, SharedStatistics, SplitContext, documents_schema,
};
use stream::{Stream, TooLong};

const NAME: &str = "clean";

/// Bound on the text that a rule buffers of a long document, in pieces; at least [`MIN_BUFFER_BYTES`] bytes.
const MAX_BUFFERED_PIECES: usize = 4;
const MIN_BUFFER_BYTES: usize = 4_000_000;

/// Configuration of `clean`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CleanConfig {
    /// The rules to apply.
    pub detokenizer: Detokenizer,
    /// Longest text to clean at once, in bytes (`input.piece_kilobytes` · 1000). The output does not depend on it.
    pub piece_bytes: usize,
}

impl OperatorConfig for CleanConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<CleanSection>());

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let section = context.section::<CleanSection>()?.unwrap_or_default();
        let piece_bytes = context.spec.input.piece_kilobytes as usize * 1000;
        let text = !context.spec.input.is_rows();
        Ok(text.then_some(Self { detokenizer: section.detokenizer, piece_bytes }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        documents_schema()
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(self.build(context)))
    }
}

impl CleanConfig {
    /// Builds the operator for one split.
    pub fn build(&self, context: &SplitContext) -> Clean {
        Clean {
            config: self.clone(),
            open_document: None,
            statistics: context.statistics.clone(),
            meter: context.meter.clone(),
        }
    }
}

/// The operator.
#[derive(Debug)]
pub struct Clean {
    config: CleanConfig,
    open_document: Option<OpenDocument>,
    statistics: SharedStatistics,
    meter: Arc<dyn Meter>,
}

/// A document that has not ended yet.
#[derive(Debug)]
struct OpenDocument {
    id: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Not cleaned yet: the document may still fit `piece_bytes`.
    Whole(String),
    /// Longer than `piece_bytes`: cleaned while it arrives.
    Streaming(Stream),
}

/// A text to emit.
struct Task<'a> {
    id: u64,
    text: Cow<'a, str>,
    /// Whether it is a whole document that still needs cleaning; otherwise it is already clean.
    whole: bool,
    end: bool,
}

impl Clean {
    /// Adds a piece; pushes what can be emitted now to `tasks`.
    fn add_piece<'a>(
        &mut self,
        id: u64,
        text: &'a str,
        end: bool,
        tasks: &mut Vec<Task<'a>>,
    ) -> Result<(), OperatorError> {
        let limit = self.config.piece_bytes;
        let mut state = match self.open_document.take() {
            Some(open_document) if open_document.id != id => return Err(unfinished_document(NAME, open_document.id)),
            Some(open_document) => open_document.state,
            None if end && text.len() <= limit => {
                tasks.push(Task { id, text: text.into(), whole: true, end });
                return Ok(());
            }
            None => State::Whole(String::new()),
        };
        let mut cleaned = String::new();
        state = match state {
            State::Whole(held) if held.len() + text.len() <= limit => State::Whole(held + text),
            State::Whole(held) => {
                let mut stream = self.stream()?;
                cleaned = stream.feed(&held).map_err(|e| too_long(id, &e))?;
                cleaned += &stream.feed(text).map_err(|e| too_long(id, &e))?;
                State::Streaming(stream)
            }
            State::Streaming(mut stream) => {
                cleaned = stream.feed(text).map_err(|e| too_long(id, &e))?;
                State::Streaming(stream)
            }
        };
        match state {
            State::Whole(held) if end => tasks.push(Task { id, text: held.into(), whole: true, end }),
            State::Streaming(stream) if end => {
                cleaned += &stream.finish().map_err(|e| too_long(id, &e))?;
                tasks.push(Task { id, text: cleaned.into(), whole: false, end });
            }
            state => {
                if !cleaned.is_empty() {
                    tasks.push(Task { id, text: cleaned.into(), whole: false, end });
                }
                self.open_document = Some(OpenDocument { id, state });
            }
        }
        Ok(())
    }

    fn cleaned<'t>(&self, task: &'t Task<'_>) -> Cow<'t, str> {
        if task.whole { detokenize(self.config.detokenizer, &task.text) } else { Cow::Borrowed(&task.text) }
    }

    fn stream(&self) -> Result<Stream, OperatorError> {
        let limit = (MAX_BUFFERED_PIECES * self.config.piece_bytes).max(MIN_BUFFER_BYTES);
        Stream::new(self.config.detokenizer, limit)
            .map_err(|e| OperatorError::Config { operator: NAME, message: e.to_string() })
    }
}

fn too_long(id: u64, error: &TooLong) -> OperatorError {
    OperatorError::Data {
        operator: NAME,
        place: document_name(id),
        message: format!(
            "{error}, and only the closing mark decides how the text is cleaned; valid: text whose brackets and quotation \
             marks are closed, or an input.piece_kilobytes larger than the document"
        ),
    }
}

impl Operator for Clean {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut tasks = Vec::with_capacity(batch.num_rows());
        let (mut documents, mut bytes_in) = (0, 0);
        for piece in document_pieces(batch, NAME)? {
            documents += u64::from(piece.end);
            bytes_in += piece.text.len() as u64;
            if self.config.detokenizer != Detokenizer::None {
                self.add_piece(piece.id, piece.text, piece.end, &mut tasks)?;
            }
        }
        self.meter.add(Measure::Documents, documents);
        self.meter.add(Measure::TextBytes, bytes_in);
        if self.config.detokenizer == Detokenizer::None {
            let mut statistics = self.statistics.lock();
            statistics.documents += documents;
            statistics.text_bytes += bytes_in;
            drop(statistics);
            return emit(batch.clone());
        }

        let texts: Vec<Cow<'_, str>> = tasks.par_iter().map(|task| self.cleaned(task)).collect();
        {
            let mut statistics = self.statistics.lock();
            statistics.documents += documents;
            statistics.text_bytes += texts.iter().map(|text| text.len() as u64).sum::<u64>();
        }
        if tasks.is_empty() {
            return Ok(());
        }
        let cleaned = RecordBatch::try_new(
            documents_schema(),
            vec![
                Arc::new(UInt64Array::from_iter_values(tasks.iter().map(|task| task.id))),
                Arc::new(StringArray::from_iter_values(&texts)),
                Arc::new(tasks.iter().map(|task| Some(task.end)).collect::<BooleanArray>()),
            ],
        );
        emit(cleaned.map_err(OperatorError::arrow(NAME))?)
    }

    fn finish(&mut self, _emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        self.open_document.take().map_or(Ok(()), |open_document| Err(unfinished_document(NAME, open_document.id)))
    }
}

#[cfg(test)]
mod tests;
