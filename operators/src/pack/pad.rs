//! Mode `pad`: one document per row, truncated or padded.

use arrow::array::RecordBatch;

use super::rows::{RowWriter, Segment};
use super::{Breaks, Ends, PackConfig, config_error, extend, token_pieces, unfinished};
use crate::operator::{Emit, Operator, OperatorError};

/// State of mode `pad`.
#[derive(Debug)]
pub(super) struct Pad {
    length: usize,
    ends: Option<Ends>,
    /// Token after the document; only without `ends`.
    separator: Option<i32>,
    pad: i32,
    /// Maximum tokens of a document in a row.
    room: usize,
    breaks: Breaks,
    row: Vec<i32>,
    segments: Vec<Segment>,
    /// Whether the next token continues the last segment.
    listed: bool,
    document: Option<u64>,
    /// Tokens of the document that did not fit.
    truncated: u64,
    writer: RowWriter,
}

impl Pad {
    pub(super) fn new(
        config: &PackConfig,
        ends: Option<Ends>,
        separator: Option<i32>,
        pad: i32,
        writer: RowWriter,
    ) -> Result<Self, OperatorError> {
        let length = config.length;
        let separator = if ends.is_some() { None } else { separator };
        let taken = 2 * usize::from(ends.is_some()) + usize::from(separator.is_some());
        if length <= taken {
            return Err(config_error(format!("length: got {length}, valid: {} or more", taken + 1)));
        }
        Ok(Self {
            length,
            ends,
            separator,
            pad,
            room: length - taken,
            breaks: config.breaks,
            row: Vec::with_capacity(length),
            segments: Vec::new(),
            listed: false,
            document: None,
            truncated: 0,
            writer,
        })
    }

    fn held(&self) -> usize {
        self.row.len() - usize::from(self.ends.is_some())
    }

    fn end_document(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if self.held() == 0 {
            self.writer.statistics().lock().empty_documents += 1;
            return Ok(());
        }
        self.row.extend(self.ends.map(|ends| ends.eos).or(self.separator));
        let valid = self.row.len();
        self.row.resize(self.length, self.pad);
        self.writer.statistics().lock().dropped_tokens += self.truncated;
        self.writer.push(&self.row, valid, &self.segments, emit)
    }

    fn feed(&mut self, document: u64, tokens: &[u32]) -> Result<(), OperatorError> {
        let taken = tokens.len().min(self.room - self.held());
        for stretch in self.breaks.stretches(&tokens[..taken]) {
            if !self.listed || stretch.begins {
                let offset = if self.segments.is_empty() { 0 } else { self.row.len() };
                self.segments.push(Segment { offset, document });
            }
            extend(&mut self.row, stretch.tokens, document)?;
            self.listed = !stretch.ends;
        }
        self.truncated += (tokens.len() - taken) as u64;
        Ok(())
    }
}

impl Operator for Pad {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for piece in token_pieces(batch)? {
            match self.document {
                Some(open) if open != piece.id => return Err(unfinished(super::NAME, open)),
                Some(_) => {}
                None => {
                    self.row.clear();
                    self.row.extend(self.ends.map(|ends| ends.bos));
                    self.segments.clear();
                    self.listed = false;
                    self.truncated = 0;
                    self.document = Some(piece.id);
                }
            }
            self.feed(piece.id, piece.tokens)?;
            if piece.end {
                self.end_document(emit)?;
                self.document = None;
            }
        }
        Ok(())
    }

    fn finish(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        match self.document {
            Some(open) => Err(unfinished(super::NAME, open)),
            None => self.writer.flush(emit),
        }
    }
}
