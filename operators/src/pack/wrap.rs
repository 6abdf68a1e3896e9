//! Mode `wrap`: joins documents and cuts the stream into blocks.

use arrow::array::RecordBatch;
use stillhouse_schemas::spec::Remainder;

use super::rows::{RowWriter, Segment};
use super::{Breaks, Ends, PackConfig, config_error, extend, token_pieces, unfinished};
use crate::operator::{Emit, Operator, OperatorError};

/// State of mode `wrap`.
#[derive(Debug)]
pub(super) struct Wrap {
    length: usize,
    /// Length of a full row without its EOS.
    full: usize,
    ends: Option<Ends>,
    separator: Option<i32>,
    remainder: Remainder,
    pad: i32,
    breaks: Breaks,
    row: Vec<i32>,
    segments: Vec<Segment>,
    /// The document that has not ended yet.
    document: Option<u64>,
    /// Whether that document has had a token yet.
    filled: bool,
    /// Whether the next token continues the row's last segment.
    listed: bool,
    writer: RowWriter,
}

impl Wrap {
    pub(super) fn new(
        config: &PackConfig,
        remainder: Remainder,
        ends: Option<Ends>,
        separator: Option<i32>,
        pad: i32,
        writer: RowWriter,
    ) -> Result<Self, OperatorError> {
        let length = config.length;
        let least = if ends.is_some() { 3 } else { 1 };
        if length < least {
            return Err(config_error(format!("length: got {length}, valid: {least} or more")));
        }
        let mut wrap = Self {
            length,
            full: length - usize::from(ends.is_some()),
            ends,
            separator,
            remainder,
            pad,
            breaks: config.breaks,
            row: Vec::with_capacity(length),
            segments: Vec::new(),
            document: None,
            filled: false,
            listed: false,
            writer,
        };
        wrap.begin_row();
        Ok(wrap)
    }

    fn begin_row(&mut self) {
        self.row.clear();
        self.row.extend(self.ends.map(|ends| ends.bos));
        self.segments.clear();
        self.listed = false;
    }

    /// Number of the stream's tokens in the current row.
    fn held(&self) -> usize {
        self.row.len() - usize::from(self.ends.is_some())
    }

    fn list(&mut self, document: u64) {
        if !self.listed {
            let offset = if self.segments.is_empty() { 0 } else { self.row.len() };
            self.segments.push(Segment { offset, document });
            self.listed = true;
        }
    }

    fn feed(&mut self, document: u64, tokens: &[u32], emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for stretch in self.breaks.stretches(tokens) {
            self.listed &= !stretch.begins;
            self.feed_segment(document, stretch.tokens, emit)?;
            self.listed &= !stretch.ends;
        }
        Ok(())
    }

    fn feed_segment(&mut self, document: u64, mut tokens: &[u32], emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        while !tokens.is_empty() {
            self.list(document);
            let (now, later) = tokens.split_at(tokens.len().min(self.full - self.row.len()));
            extend(&mut self.row, now, document)?;
            self.end_full_row(emit)?;
            tokens = later;
        }
        Ok(())
    }

    fn end_full_row(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if self.row.len() < self.full {
            return Ok(());
        }
        self.row.extend(self.ends.map(|ends| ends.eos));
        self.writer.push(&self.row, self.length, &self.segments, emit)?;
        self.begin_row();
        Ok(())
    }
}

impl Operator for Wrap {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for piece in token_pieces(batch)? {
            if let Some(open) = self.document.filter(|&open| open != piece.id) {
                return Err(unfinished(super::NAME, open));
            }
            self.document = Some(piece.id);
            self.filled |= !piece.tokens.is_empty();
            self.feed(piece.id, piece.tokens, emit)?;
            if piece.end {
                if let Some(separator) = self.separator {
                    // a separator never begins a segment, even after a parsed special token at the end of the text
                    self.listed |= self.segments.last().is_some_and(|last| last.document == piece.id);
                    self.list(piece.id);
                    self.row.push(separator);
                    self.end_full_row(emit)?;
                }
                if !self.filled {
                    self.writer.statistics().lock().empty_documents += 1;
                }
                self.document = None;
                self.filled = false;
                self.listed = false;
            }
        }
        Ok(())
    }

    fn finish(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if let Some(open) = self.document {
            return Err(unfinished(super::NAME, open));
        }
        let held = self.held();
        if held > 0 {
            if self.remainder == Remainder::Drop {
                self.writer.statistics().lock().dropped_tokens += held as u64;
            } else {
                self.row.extend(self.ends.map(|ends| ends.eos));
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
