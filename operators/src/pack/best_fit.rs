//! Mode `best_fit`: each document goes whole into the open row in which it leaves the least space.
//!
//! ```text
//!   document ─► parts of a full row ─────────────────────────────► rows of their own
//!            └► what is left ─► the fullest open row with space ─► row, once it is full or too many are open
//! ```
//!
//! A row is never cut between two documents, so a document is cut only if it is longer than a row (Ding et al. 2024, "Fewer
//! Truncations Improve Language Modeling": best-fit packing). The paper sorts the whole corpus by length first. Here documents
//! come in the order of the split, and at most `max_open` rows are open: then the fullest is padded and closed.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use stillhouse_schemas::manifest::Statistic;

use super::rows::{RowWriter, Segment};
use super::{
    BoundaryTokens, CUT_DOCUMENTS, PADDING, PackConfig, SegmentBreaks, config_error, push_tokens, token_pieces,
    unfinished_document,
};
use crate::operator::{Emit, Operator, OperatorError};

/// Tokens of all open rows, at most. They decide which row a document finds, and so the bytes of a data set.
const MAX_OPEN_TOKENS: usize = 1 << 22;
/// Open rows, at most.
const MAX_OPEN_ROWS: usize = 1 << 12;

/// A row that has space left.
#[derive(Debug)]
struct OpenRow {
    ids: Vec<i32>,
    segments: Vec<Segment>,
}

/// State of mode `best_fit`.
#[derive(Debug)]
pub(super) struct BestFit {
    length: usize,
    /// Tokens of documents and separators that a row takes.
    capacity: usize,
    boundary: Option<BoundaryTokens>,
    separator: Option<i32>,
    pad: i32,
    segment_breaks: SegmentBreaks,
    /// The last part of the current document, shorter than a full row, and where segments begin in it.
    part: Vec<i32>,
    starts: Vec<usize>,
    /// Whether the next token continues the last segment.
    continues_segment: bool,
    document: Option<u64>,
    /// Tokens of the current document.
    document_tokens: usize,
    /// By free tokens, then in the order of their opening.
    open: BTreeMap<(usize, u64), OpenRow>,
    opened: u64,
    max_open: usize,
    writer: RowWriter,
}

impl BestFit {
    pub(super) fn new(
        config: &PackConfig,
        boundary: Option<BoundaryTokens>,
        separator: Option<i32>,
        pad: i32,
        writer: RowWriter,
    ) -> Result<Self, OperatorError> {
        let length = config.length;
        let reserved = 2 * usize::from(boundary.is_some());
        if length <= reserved {
            return Err(config_error(format!("length: got {length}, valid: {} or more", reserved + 1)));
        }
        Ok(Self {
            length,
            capacity: length - reserved,
            boundary,
            separator,
            pad,
            segment_breaks: config.segment_breaks,
            part: Vec::new(),
            starts: Vec::new(),
            continues_segment: false,
            document: None,
            document_tokens: 0,
            open: BTreeMap::new(),
            opened: 0,
            max_open: (MAX_OPEN_TOKENS / length).clamp(1, MAX_OPEN_ROWS),
            writer,
        })
    }

    /// Sets the number of rows that may be open.
    #[cfg(test)]
    pub(super) fn with_max_open(self, max_open: usize) -> Self {
        Self { max_open, ..self }
    }

    fn new_row(&self) -> OpenRow {
        OpenRow { ids: self.boundary.iter().map(|boundary| boundary.bos).collect(), segments: Vec::new() }
    }

    fn feed(&mut self, document: u64, tokens: &[u32], emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for run in self.segment_breaks.segment_runs(tokens) {
            self.continues_segment &= !run.begins_segment;
            let mut rest = run.tokens;
            while !rest.is_empty() {
                self.ensure_segment();
                let (now, later) = rest.split_at(rest.len().min(self.capacity - self.part.len()));
                push_tokens(&mut self.part, now);
                self.end_full_part(document, emit)?;
                rest = later;
            }
            self.continues_segment &= !run.ends_segment;
        }
        Ok(())
    }

    fn ensure_segment(&mut self) {
        if !self.continues_segment {
            self.starts.push(self.part.len());
            self.continues_segment = true;
        }
    }

    /// Writes a part that fills a row as a row of its own.
    fn end_full_part(&mut self, document: u64, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if self.part.len() < self.capacity {
            return Ok(());
        }
        let mut row = self.new_row();
        self.move_part(document, &mut row);
        self.close(row, emit)
    }

    /// Appends the part to a row.
    fn move_part(&mut self, document: u64, row: &mut OpenRow) {
        for start in self.starts.drain(..) {
            let offset = if row.segments.is_empty() { 0 } else { row.ids.len() + start };
            row.segments.push(Segment { offset, document });
        }
        row.ids.append(&mut self.part);
        self.continues_segment = false;
    }

    fn end_document(&mut self, document: u64, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if self.document_tokens == 0 {
            self.writer.statistics().lock().empty_documents += 1;
            return Ok(());
        }
        if self.document_tokens > self.capacity {
            self.writer.statistics().lock().count(CUT_DOCUMENTS, Statistic::Sum(1));
        }
        if let Some(separator) = self.separator {
            // a separator never begins a segment, even after a parsed special token at the end of the text
            self.continues_segment = !self.starts.is_empty();
            self.ensure_segment();
            self.part.push(separator);
            self.end_full_part(document, emit)?;
        }
        if self.part.is_empty() { Ok(()) } else { self.place(document, emit) }
    }

    /// Puts the part into the open row in which it leaves the least space, else into a new one.
    fn place(&mut self, document: u64, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let tokens = self.part.len();
        let fullest = self.open.range((tokens, 0)..).next().map(|(key, _)| *key);
        let found = fullest.and_then(|key| self.open.remove(&key).map(|row| (key, row)));
        let ((free, order), mut row) = found.unwrap_or_else(|| {
            self.opened += 1;
            ((self.capacity, self.opened), self.new_row())
        });
        self.move_part(document, &mut row);
        if free == tokens {
            return self.close(row, emit);
        }
        self.open.insert((free - tokens, order), row);
        match self.open.len() > self.max_open {
            true => self.open.pop_first().map_or(Ok(()), |(_, row)| self.close(row, emit)),
            false => Ok(()),
        }
    }

    fn close(&mut self, mut row: OpenRow, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        row.ids.extend(self.boundary.map(|boundary| boundary.eos));
        let valid = row.ids.len();
        row.ids.resize(self.length, self.pad);
        let padding = Statistic::Sum((self.length - valid) as u64);
        self.writer.statistics().lock().count(PADDING, padding);
        self.writer.push(&row.ids, valid, &row.segments, emit)
    }
}

impl Operator for BestFit {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for piece in token_pieces(batch, self.writer.has_loss_mask())? {
            if let Some(open) = self.document.filter(|&open| open != piece.id) {
                return Err(unfinished_document(super::NAME, open));
            }
            self.document = Some(piece.id);
            self.document_tokens += piece.tokens.len();
            self.feed(piece.id, piece.tokens, emit)?;
            if piece.end {
                self.end_document(piece.id, emit)?;
                self.document = None;
                self.document_tokens = 0;
                self.continues_segment = false;
            }
        }
        Ok(())
    }

    fn finish(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if let Some(open) = self.document {
            return Err(unfinished_document(super::NAME, open));
        }
        let open = std::mem::take(&mut self.open).into_iter();
        let in_order: BTreeMap<u64, OpenRow> = open.map(|((_, order), row)| (order, row)).collect();
        for row in in_order.into_values() {
            self.close(row, emit)?;
        }
        self.writer.flush(emit)
    }
}
