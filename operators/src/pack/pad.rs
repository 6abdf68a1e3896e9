//! One document per row, truncated or filled up.

use arrow::array::RecordBatch;

use super::rows::{RowWriter, Segment};
use super::{Ends, config_error, extend, token_pieces, unfinished};
use crate::operator::{Emit, Operator, OperatorError};

/// Mode `pad`.
#[derive(Debug)]
pub(super) struct Pad {
    length: usize,
    ends: Option<Ends>,
    /// Stands after the document; only without `ends`.
    separator: Option<i32>,
    pad: i32,
    /// Most tokens of a document in a row.
    room: usize,
    row: Vec<i32>,
    document: Option<u64>,
    /// Tokens of the document that did not fit.
    truncated: u64,
    writer: RowWriter,
}

impl Pad {
    pub(super) fn new(
        length: usize,
        ends: Option<Ends>,
        separator: Option<i32>,
        pad: i32,
        writer: RowWriter,
    ) -> Result<Self, OperatorError> {
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
            row: Vec::with_capacity(length),
            document: None,
            truncated: 0,
            writer,
        })
    }

    fn held(&self) -> usize {
        self.row.len() - usize::from(self.ends.is_some())
    }

    fn end_document(&mut self, document: u64, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if self.held() == 0 {
            self.writer.statistics().lock().empty_documents += 1;
            return Ok(());
        }
        self.row.extend(self.ends.map(|ends| ends.eos).or(self.separator));
        let valid = self.row.len();
        self.row.resize(self.length, self.pad);
        self.writer.statistics().lock().dropped_tokens += self.truncated;
        self.writer.push(&self.row, valid, &[Segment { offset: 0, document }], emit)
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
                    self.truncated = 0;
                    self.document = Some(piece.id);
                }
            }
            let taken = piece.tokens.len().min(self.room - self.held());
            extend(&mut self.row, &piece.tokens[..taken], piece.id)?;
            self.truncated += (piece.tokens.len() - taken) as u64;
            if piece.end {
                self.end_document(piece.id, emit)?;
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
