//! Mode `pad`: one document per row, truncated or padded.

use arrow::array::RecordBatch;
use stillhouse_schemas::manifest::Statistic;

use super::rows::{RowWriter, Segment};
use super::{
    BoundaryTokens, CUT_DOCUMENTS, PADDING, PackConfig, SegmentBreaks, config_error, push_tokens, token_pieces,
    unfinished_document,
};
use crate::operator::{Emit, Operator, OperatorError};

/// State of mode `pad`.
#[derive(Debug)]
pub(super) struct Pad {
    length: usize,
    boundary: Option<BoundaryTokens>,
    /// Token after the document; only without `boundary`.
    separator: Option<i32>,
    pad: i32,
    /// Maximum tokens of a document in a row.
    max_document_tokens: usize,
    segment_breaks: SegmentBreaks,
    row: Vec<i32>,
    segments: Vec<Segment>,
    /// Whether the next token continues the last segment.
    continues_segment: bool,
    document: Option<u64>,
    /// Tokens of the document that did not fit.
    truncated: u64,
    writer: RowWriter,
}

impl Pad {
    pub(super) fn new(
        config: &PackConfig,
        boundary: Option<BoundaryTokens>,
        separator: Option<i32>,
        pad: i32,
        writer: RowWriter,
    ) -> Result<Self, OperatorError> {
        let length = config.length;
        let separator = if boundary.is_some() { None } else { separator };
        let reserved = 2 * usize::from(boundary.is_some()) + usize::from(separator.is_some());
        if length <= reserved {
            return Err(config_error(format!("length: got {length}, valid: {} or more", reserved + 1)));
        }
        Ok(Self {
            length,
            boundary,
            separator,
            pad,
            max_document_tokens: length - reserved,
            segment_breaks: config.segment_breaks,
            row: Vec::with_capacity(length),
            segments: Vec::new(),
            continues_segment: false,
            document: None,
            truncated: 0,
            writer,
        })
    }

    fn token_count(&self) -> usize {
        self.row.len() - usize::from(self.boundary.is_some())
    }

    fn end_document(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        if self.token_count() == 0 {
            self.writer.statistics().lock().empty_documents += 1;
            return Ok(());
        }
        self.row.extend(self.boundary.map(|boundary| boundary.eos).or(self.separator));
        let valid = self.row.len();
        self.row.resize(self.length, self.pad);
        {
            let statistics = self.writer.statistics();
            let mut statistics = statistics.lock();
            statistics.dropped_tokens += self.truncated;
            statistics.count(PADDING, Statistic::Sum((self.length - valid) as u64));
            if self.truncated > 0 {
                statistics.count(CUT_DOCUMENTS, Statistic::Sum(1));
            }
        }
        self.writer.push(&self.row, valid, &self.segments, emit)
    }

    fn feed(&mut self, document: u64, tokens: &[u32]) -> Result<(), OperatorError> {
        let taken = tokens.len().min(self.max_document_tokens - self.token_count());
        for run in self.segment_breaks.segment_runs(&tokens[..taken]) {
            if !self.continues_segment || run.begins_segment {
                let offset = if self.segments.is_empty() { 0 } else { self.row.len() };
                self.segments.push(Segment { offset, document });
            }
            push_tokens(&mut self.row, run.tokens);
            self.continues_segment = !run.ends_segment;
        }
        self.truncated += (tokens.len() - taken) as u64;
        Ok(())
    }
}

impl Operator for Pad {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for piece in token_pieces(batch, self.writer.has_loss_mask())? {
            match self.document {
                Some(open) if open != piece.id => return Err(unfinished_document(super::NAME, open)),
                Some(_) => {}
                None => {
                    self.row.clear();
                    self.row.extend(self.boundary.map(|boundary| boundary.bos));
                    self.segments.clear();
                    self.continues_segment = false;
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
            Some(open) => Err(unfinished_document(super::NAME, open)),
            None => self.writer.flush(emit),
        }
    }
}
