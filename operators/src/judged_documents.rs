//! Operators that keep or drop whole documents, on all cores and in order.

use std::borrow::Cow;
use std::sync::Arc;

use arrow::array::{BooleanBuilder, RecordBatch, StringBuilder, UInt64Builder};
use rayon::prelude::*;

use crate::document_pieces::{WholeDocument, WholeDocuments, document_pieces};
use crate::dropped::DroppedDocuments;
use crate::operator::{Emit, Operator, OperatorError, SharedStatistics, SplitContext, documents_schema};

/// Text of kept documents in a batch, unless one piece is longer. Arrow's offsets end at 2^31.
const MAX_BATCH_BYTES: usize = 64 << 20;

/// Decides over a document by its id and its text.
pub(crate) trait Judge: Send + Sync {
    fn judge<'t>(&self, id: u64, text: &'t str) -> Judgement<'t>;
}

/// What becomes of a document.
pub(crate) enum Judgement<'t> {
    /// It is kept, with this text.
    Keep(Cow<'t, str>),
    /// It is counted under the reason; `problem` says more of a sample than the reason.
    Drop { reason: String, problem: Option<String> },
}

/// The operator. A document that is longer than `max_document_bytes` is dropped as `NAME.too_large`.
pub(crate) struct JudgeDocuments<J> {
    name: &'static str,
    judge: J,
    /// Longest piece of a kept document, in bytes.
    piece_bytes: usize,
    documents: WholeDocuments,
    dropped: DroppedDocuments,
    statistics: SharedStatistics,
}

impl<J: Judge> JudgeDocuments<J> {
    pub(crate) fn new(
        name: &'static str,
        judge: J,
        (max_document_bytes, piece_bytes): (usize, usize),
        context: &SplitContext,
    ) -> Self {
        Self {
            name,
            judge,
            piece_bytes,
            documents: WholeDocuments::new(name, max_document_bytes),
            dropped: DroppedDocuments::new(name, context),
            statistics: context.statistics.clone(),
        }
    }

    fn judge<'d>(&self, document: &'d WholeDocument<'_>) -> Judgement<'d> {
        match document.is_too_large {
            true => Judgement::Drop { reason: format!("{}.too_large", self.name), problem: None },
            false => self.judge.judge(document.id, &document.text),
        }
    }
}

impl<J: Judge> Operator for JudgeDocuments<J> {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut documents = Vec::with_capacity(batch.num_rows());
        for piece in document_pieces(batch, self.name)? {
            documents.extend(self.documents.add(piece)?);
        }
        let judgements: Vec<_> = documents.par_iter().map(|document| self.judge(document)).collect();
        let mut kept = KeptPieces::new(self.name, self.piece_bytes);
        let mut cut_bytes = 0;
        for (document, judgement) in documents.iter().zip(judgements) {
            match judgement {
                Judgement::Keep(text) => {
                    // a rule may also make a text longer, for example by replacing an address
                    cut_bytes += document.bytes.saturating_sub(text.len()) as u64;
                    kept.push(document.id, &text, emit)?;
                }
                Judgement::Drop { reason, problem } => {
                    self.dropped.add(&reason, document, problem.as_deref())?;
                }
            }
        }
        self.statistics.lock().filtered_bytes += cut_bytes;
        kept.flush(emit)
    }

    fn finish(&mut self, _emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        self.documents.finish()?;
        self.dropped.finish()
    }
}

/// Collects the pieces of kept documents.
struct KeptPieces {
    operator: &'static str,
    piece_bytes: usize,
    ids: UInt64Builder,
    texts: StringBuilder,
    ends: BooleanBuilder,
}

impl KeptPieces {
    fn new(operator: &'static str, piece_bytes: usize) -> Self {
        Self {
            operator,
            piece_bytes,
            ids: UInt64Builder::new(),
            texts: StringBuilder::new(),
            ends: BooleanBuilder::new(),
        }
    }

    fn push(&mut self, id: u64, mut text: &str, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        loop {
            let (piece, rest) = text.split_at(text.floor_char_boundary(self.piece_bytes));
            if self.texts.values_slice().len() + piece.len() > MAX_BATCH_BYTES {
                self.flush(emit)?;
            }
            self.ids.append_value(id);
            self.texts.append_value(piece);
            self.ends.append_value(rest.is_empty());
            text = rest;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn flush(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let ids = self.ids.finish();
        if ids.is_empty() {
            return Ok(());
        }
        let columns: Vec<arrow::array::ArrayRef> =
            vec![Arc::new(ids), Arc::new(self.texts.finish()), Arc::new(self.ends.finish())];
        emit(RecordBatch::try_new(documents_schema(), columns).map_err(OperatorError::arrow(self.operator))?)
    }
}
