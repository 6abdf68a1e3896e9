//! Mode `wrap`: joins documents and cuts the stream into blocks.

use arrow::array::RecordBatch;
use stillhouse_schemas::spec::Remainder;

use super::rows::{RowWriter, Segment};
use super::{BoundaryTokens, PackConfig, SegmentBreaks, config_error, push_tokens, token_pieces, unfinished_document};
use crate::operator::{Emit, Operator, OperatorError};

/// State of mode `wrap`.
#[derive(Debug)]
pub(super) struct Wrap {
    length: usize,
    /// Length of a full row without its EOS.
    full_length: usize,
    boundary: Option<BoundaryTokens>,
    separator: Option<i32>,
    remainder: Remainder,
    pad: i32,
    segment_breaks: SegmentBreaks,
    row: Vec<i32>,
    segments: Vec<Segment>,
    /// The document that has not ended yet.
    document: Option<u64>,
    /// Whether that document has had a token yet.
    has_tokens: bool,
    /// Whether the next token continues the row's last segment.
    continues_segment: bool,
    writer: RowWriter,
}

impl Wrap {
    pub(super) fn new(
        config: &PackConfig,
        remainder: Remainder,
        boundary: Option<BoundaryTokens>,
        separator: Option<i32>,
        pad: i32,
        writer: RowWriter,
    ) -> Result<Self, OperatorError> {
        let length = config.length;
        let least = if boundary.is_some() { 3 } else { 1 };
        if length < least {
            return Err(config_error(format!("length: got {length}, valid: {least} or more")));
        }
        let mut wrap = Self {
            length,
            full_length: length - usize::from(boundary.is_some()),
            boundary,
            separator,
            remainder,
            pad,
            segment_breaks: config.segment_breaks,
            row: Vec::with_capacity(length),
            segments: Vec::new(),
            document: None,
            has_tokens: false,
            continues_segment: false,
            writer,
        };
        wrap.begin_row();
        Ok(wrap)
    }

    fn begin_row(&mut self) {
        self.row.clear();
        self.row.extend(self.boundary.map(|boundary| boundary.bos));
        self.segments.clear();
        self.continues_segment = false;
    }

    /// Number of the stream's tokens in the current row.
    fn token_count(&self) -> usize {
        self.row.len() - usize::from(self.boundary.is_some())
    }

    fn ensure_segment(&mut self, document: u64) {
        if !self.continues_segment {
            let offset = if self.segments.is_empty() { 0 } else { self.row.len() };
            self.segments.push(Segment { offset, document });
            self.continues_segment = true;
        }
    }

    fn feed(&mut self, document: u64, tokens: &[u32], emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for run in self.segment_breaks.segment_runs(tokens) {
            self.continues_segment &= !run.begins_segment;
            self.feed_segment(document, run.tokens, emit)?;
            self.continues_segment &= !run.ends_segment;
        }
        Ok(())
    }

    fn feed_segment(&mut self, document: u64, mut tokens: &[u32], emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        while !tokens.is_empty() {
            self.ensure_segment(document);
            let (now, later) = tokens.split_at(tokens.len().min(self.full_length - self.row.len()));
            push_tokens(&mut self.row, now);
            self.end_full_row(emit)?;
            tokens = later;
        }
        Ok(())
    }

    fn end_full_row(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if self.row.len() < self.full_length {
            return Ok(());
        }
        self.row.extend(self.boundary.map(|boundary| boundary.eos));
        self.writer.push(&self.row, self.length, &self.segments, emit)?;
        self.begin_row();
        Ok(())
    }
}

impl Operator for Wrap {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for piece in token_pieces(batch, self.writer.has_loss_mask())? {
            if let Some(open) = self.document.filter(|&open| open != piece.id) {
                return Err(unfinished_document(super::NAME, open));
            }
            self.document = Some(piece.id);
            self.has_tokens |= !piece.tokens.is_empty();
            self.feed(piece.id, piece.tokens, emit)?;
            if piece.end {
                if let Some(separator) = self.separator {
                    // a separator never begins a segment, even after a parsed special token at the end of the text
                    self.continues_segment |= self.segments.last().is_some_and(|last| last.document == piece.id);
                    self.ensure_segment(piece.id);
                    self.row.push(separator);
                    self.end_full_row(emit)?;
                }
                if !self.has_tokens {
                    self.writer.statistics().lock().empty_documents += 1;
                }
                self.document = None;
                self.has_tokens = false;
                self.continues_segment = false;
            }
        }
        Ok(())
    }

    fn finish(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if let Some(open) = self.document {
            return Err(unfinished_document(super::NAME, open));
        }
        let held = self.token_count();
        if held > 0 {
            if self.remainder == Remainder::Drop {
                self.writer.statistics().lock().dropped_tokens += held as u64;
            } else {
                self.row.extend(self.boundary.map(|boundary| boundary.eos));
                let valid = self.row.len();
                if self.remainder == Remainder::Pad {
                    self.row.resize(self.length, self.pad);
                }
                self.writer.push(&self.row, valid, &self.segments, emit)?;
            }
            self.begin_row();
        }
        self.writer.flush(emit)
    }
}
