//! `clean`: undoes the tokenization that a benchmark corpus was published with, so that a model sees ordinary text.
//!
//! ```text
//!  [document_id, text, end] ──► detokenizer rules, text by text, on all cores ──► [document_id, text, end]
//!                     └─ none: the same batch, not copied
//! ```
//!
//! The rules are those of MDLM's `dataloader.py` (Sahoo et al. 2024), which the five papers' zero-shot evaluations
//! share; [`rules`](self::detokenize) says how Python's regular expressions were carried over. For `wikitext`, `ptb`, `lm1b`,
//! `lambada` and `scientific_papers` a document of up to `input.piece_kilobytes` is cleaned whole, exactly as the
//! official code does it. A longer one is cleaned in pieces of that size, cut after the last newline (else
//! the last space, else between two characters): exact but for what spans a cut, such as a pair
//! of quotation marks. Where the cuts are depends on the text alone, not on the pieces it came in.
//!
//! Cost: about one pass over the text for each rule that matches something. Memory: one input batch, its cleaned copy, and at most
//! one piece carried over.

mod rules;

use std::borrow::Cow;
use std::sync::Arc;

use arrow::array::{BooleanArray, RecordBatch, StringArray, UInt64Array};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::spec::Detokenizer;

pub use rules::detokenize;

use crate::operator::{Counters, Emit, Operator, OperatorError, SharedStatistics, SplitContext, documents_schema};
use crate::pieces::{pieces, unfinished};
use rules::{Ends, detokenize_part};

const NAME: &str = "clean";

/// Config of `clean`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CleanConfig {
    /// Which rules.
    pub detokenizer: Detokenizer,
    /// Longest text that is cleaned at once, in bytes (`input.piece_kilobytes` · 1000).
    pub piece_bytes: usize,
}

impl CleanConfig {
    /// Makes the operator for one split.
    pub fn build(&self, context: &SplitContext) -> Clean {
        Clean {
            config: self.clone(),
            carried: None,
            statistics: context.statistics.clone(),
            counters: context.counters.clone(),
        }
    }
}

/// The operator.
#[derive(Debug)]
pub struct Clean {
    config: CleanConfig,
    carried: Option<Carried>,
    statistics: SharedStatistics,
    counters: Arc<Counters>,
}

/// The text of a document that has not ended yet and is not cleaned yet.
#[derive(Debug)]
struct Carried {
    id: u64,
    text: String,
    /// Whether nothing of the document has been cleaned.
    first: bool,
}

/// A text to clean.
struct Task<'a> {
    id: u64,
    text: Cow<'a, str>,
    ends: Ends,
}

impl Clean {
    /// Takes a piece; hands on what can be cleaned now.
    fn take<'a>(&mut self, id: u64, text: &'a str, end: bool, tasks: &mut Vec<Task<'a>>) -> Result<(), OperatorError> {
        let mut carried = match self.carried.take() {
            Some(carried) if carried.id != id => return Err(unfinished(NAME, carried.id)),
            Some(carried) => carried,
            None if end && text.len() <= self.config.piece_bytes => {
                tasks.push(Task { id, text: text.into(), ends: Ends { first: true, last: true } });
                return Ok(());
            }
            None => Carried { id, text: String::new(), first: true },
        };
        carried.text.push_str(text);
        let mut done = 0;
        while carried.text.len() - done > self.config.piece_bytes {
            let cut = done + cut_within(&carried.text[done..], self.config.piece_bytes);
            let ends = Ends { first: carried.first, last: false };
            tasks.push(Task { id, text: carried.text[done..cut].to_owned().into(), ends });
            carried.first = false;
            done = cut;
        }
        carried.text.drain(..done);
        if end {
            let ends = Ends { first: carried.first, last: true };
            tasks.push(Task { id, text: carried.text.into(), ends });
        } else {
            self.carried = Some(carried);
        }
        Ok(())
    }
}

/// Where to cut a text that is longer than `limit`: after the last newline up to there, else the last space, else
/// at the last character boundary. Never 0.
fn cut_within(text: &str, limit: usize) -> usize {
    let boundary = text.floor_char_boundary(limit);
    let head = &text[..boundary];
    let after = |c: char| head.rfind(c).map(|at| at + 1);
    let next = text.chars().next().map_or(1, char::len_utf8);
    after('\n').or_else(|| after(' ')).unwrap_or(boundary).max(next)
}

impl Operator for Clean {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut tasks = Vec::with_capacity(batch.num_rows());
        let (mut documents, mut bytes_in) = (0, 0);
        for piece in pieces(batch, NAME)? {
            documents += u64::from(piece.end);
            bytes_in += piece.text.len() as u64;
            if self.config.detokenizer != Detokenizer::None {
                self.take(piece.id, piece.text, piece.end, &mut tasks)?;
            }
        }
        Counters::add(&self.counters.documents, documents);
        Counters::add(&self.counters.text_bytes, bytes_in);
        if self.config.detokenizer == Detokenizer::None {
            let mut statistics = self.statistics.lock();
            statistics.documents += documents;
            statistics.text_bytes += bytes_in;
            drop(statistics);
            return emit(batch.clone());
        }

        let texts: Vec<Cow<'_, str>> =
            tasks.par_iter().map(|task| detokenize_part(self.config.detokenizer, &task.text, task.ends)).collect();
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
                Arc::new(tasks.iter().map(|task| Some(task.ends.last)).collect::<BooleanArray>()),
            ],
        );
        emit(cleaned.map_err(OperatorError::arrow(NAME))?)
    }

    fn finish(&mut self, _emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        self.carried.take().map_or(Ok(()), |carried| Err(unfinished(NAME, carried.id)))
    }
}

#[cfg(test)]
mod tests;
