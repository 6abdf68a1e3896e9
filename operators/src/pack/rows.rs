//! Collects the rows of the next output batch.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int32Array, RecordBatch, UInt64Array};
use arrow::datatypes::SchemaRef;
use stillhouse_schemas::columns;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Statistic, TRAINED_TOKENS};

use super::{NAME, PackConfig, UNTRAINED_ROWS};
use crate::operator::{Emit, Measure, Meter, OperatorError, SharedStatistics, SplitContext, TRAINED};
use crate::rows::list_column;

/// The offset in a row at which a document begins, and the document's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub offset: usize,
    pub document: u64,
}

/// Collects rows and emits them in batches of `rows_per_batch`.
#[derive(Debug)]
pub(super) struct RowWriter {
    schema: SchemaRef,
    rows_per_batch: usize,
    split: SplitId,
    /// Rows so far, including those not yet emitted.
    row_count: u64,
    ids: Vec<i32>,
    lengths: Vec<usize>,
    /// Tokens of each row that are not padding.
    valid: Vec<usize>,
    segments: Vec<Segment>,
    segment_counts: Vec<usize>,
    has_loss_mask: bool,
    statistics: SharedStatistics,
    meter: Arc<dyn Meter>,
}

impl RowWriter {
    pub(super) fn new(config: &PackConfig, context: &SplitContext) -> Self {
        Self {
            schema: config.schema(),
            rows_per_batch: config.rows_per_batch.max(1),
            split: context.split,
            row_count: 0,
            ids: Vec::new(),
            lengths: Vec::new(),
            valid: Vec::new(),
            segments: Vec::new(),
            segment_counts: Vec::new(),
            has_loss_mask: config.has_loss_mask,
            statistics: context.statistics.clone(),
            meter: context.meter.clone(),
        }
    }

    /// Whether tokens may have the mark [`TRAINED`].
    pub(super) fn has_loss_mask(&self) -> bool {
        self.has_loss_mask
    }

    pub(super) fn statistics(&self) -> &SharedStatistics {
        &self.statistics
    }

    /// Adds a row; emits a batch once there are `rows_per_batch`.
    pub(super) fn push(
        &mut self,
        ids: &[i32],
        valid: usize,
        segments: &[Segment],
        emit: &mut Emit<'_>,
    ) -> Result<(), OperatorError> {
        if self.has_loss_mask {
            let trained = ids.iter().filter(|id| id.cast_unsigned() & TRAINED != 0).count() as u64;
            let mut statistics = self.statistics.lock();
            statistics.count(TRAINED_TOKENS, Statistic::Sum(trained));
            statistics.count(UNTRAINED_ROWS, Statistic::Sum(u64::from(trained == 0)));
        }
        self.ids.extend_from_slice(ids);
        self.lengths.push(ids.len());
        self.valid.push(valid);
        self.segments.extend_from_slice(segments);
        self.segment_counts.push(segments.len());
        self.row_count += 1;
        if self.lengths.len() < self.rows_per_batch { Ok(()) } else { self.flush(emit) }
    }

    /// Emits the collected rows.
    pub(super) fn flush(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let rows = self.lengths.len() as u64;
        if rows == 0 {
            return Ok(());
        }
        let last = u32::try_from(self.row_count - 1).map_err(|_| OperatorError::Data {
            operator: NAME,
            place: format!("split {}", self.split.0),
            message: format!("got {} rows, valid: up to 2^32 rows in a split", self.row_count),
        })?;
        let first = last - (rows - 1) as u32;
        self.meter.add(Measure::Sequences, rows);
        let batch = self.batch(first..=last).map_err(OperatorError::arrow(NAME))?;
        emit(batch)
    }

    fn batch(&mut self, rows: std::ops::RangeInclusive<u32>) -> Result<RecordBatch, arrow::error::ArrowError> {
        let lengths = std::mem::take(&mut self.lengths);
        let counts = std::mem::take(&mut self.segment_counts);
        let segments = std::mem::take(&mut self.segments);
        let valid = std::mem::take(&mut self.valid);
        let mut ids = std::mem::take(&mut self.ids);
        let mut loss_mask = BooleanArray::new_null(0);
        if self.has_loss_mask {
            loss_mask = ids.iter().map(|id| Some(id.cast_unsigned() & TRAINED != 0)).collect();
            ids.iter_mut().for_each(|id| *id &= !TRAINED.cast_signed());
        }
        let columns = self.schema.fields().iter().map(|field| -> Result<ArrayRef, _> {
            match field.name().as_str() {
                columns::SEQUENCE_ID => {
                    Ok(Arc::new(UInt64Array::from_iter_values(rows.clone().map(|row| self.split.sequence(row).0))))
                }
                columns::INPUT_IDS => {
                    list_column(field, Arc::new(Int32Array::from(std::mem::take(&mut ids))), &lengths)
                }
                columns::ATTENTION_MASK => {
                    let mask = lengths
                        .iter()
                        .zip(&valid)
                        .flat_map(|(&length, &valid)| (0..length).map(move |i| Some(i < valid)));
                    list_column(field, Arc::new(mask.collect::<BooleanArray>()), &lengths)
                }
                columns::LOSS_MASK => list_column(field, Arc::new(loss_mask.clone()), &lengths),
                columns::DOCUMENT_OFFSETS => {
                    let offsets = Int32Array::from_iter_values(segments.iter().map(|segment| segment.offset as i32));
                    list_column(field, Arc::new(offsets), &counts)
                }
                _ => {
                    let documents = UInt64Array::from_iter_values(segments.iter().map(|segment| segment.document));
                    list_column(field, Arc::new(documents), &counts)
                }
            }
        });
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        RecordBatch::try_new(self.schema.clone(), columns)
    }
}
