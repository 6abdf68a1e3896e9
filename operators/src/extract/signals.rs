//! The columns of the signals (`stillhouse_signals`): writes each position's values as lists, and reads and checks them.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use stillhouse_noise::{LoadedRow, RowSignals, Values};
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_signals::{ColumnShape, ItemType, SignalColumn, StoredSignal, Tolerances, certain, split};

use super::collect::unsigned;
use super::{ExtractConfig, NAME};
use crate::invariants::{Violation, Widened, float_column, token_column, unsigned_column};
use crate::operator::OperatorError;
use crate::rows::{ListRows, list_column};

/// The signals of a job, in the order of their columns.
pub type JobSignals = Vec<Arc<dyn StoredSignal>>;

fn columns_of(signals: &[Arc<dyn StoredSignal>]) -> impl Iterator<Item = SignalColumn> {
    signals.iter().flat_map(|signal| signal.columns())
}

/// Returns the fields of the columns, in the order of [`arrays`].
pub(super) fn fields(signals: &[Arc<dyn StoredSignal>], rows: RowLength, vocab_size: usize) -> Vec<Field> {
    let field = |column: SignalColumn| {
        let item = match column.item {
            ItemType::F32 => DataType::Float32,
            ItemType::I32 => DataType::Int32,
            ItemType::U16 => DataType::UInt16,
            ItemType::Token => columns::noise_index_type(vocab_size),
        };
        match column.shape {
            ColumnShape::Scalar | ColumnShape::Count => rows.field(column.name, item, None, None),
            ColumnShape::Vector(width) => rows.field(column.name, item, None, Some(width)),
            ColumnShape::List => columns::list_field(column.name, item),
        }
    };
    columns_of(signals).map(field).collect()
}

/// Builds the columns from the signals of all positions, of rows of these lengths; takes their fields from `next`. Each
/// position's values are freed once they are in their column, so that memory holds them once.
pub(super) fn arrays<'f>(
    signals: &[Arc<dyn StoredSignal>],
    mut positions: Vec<RowSignals>,
    row_lengths: &[usize],
    next: &mut impl FnMut() -> Result<&'f Field, OperatorError>,
) -> Result<Vec<ArrayRef>, OperatorError> {
    let array = |(n, column): (usize, SignalColumn)| {
        let field = next()?;
        let counts: Vec<usize> = positions.iter().map(|values| values.get(n).map_or(0, Values::len)).collect();
        let mut rest = counts.as_slice();
        let list_lengths: Vec<usize> = row_lengths
            .iter()
            .map(|length| {
                let (row, after) = rest.split_at(*length);
                rest = after;
                row.iter().sum()
            })
            .collect();
        let count = list_lengths.iter().sum();
        let taken = positions.iter_mut().filter_map(|values| values.get_mut(n).map(take_values));
        let values: ArrayRef = match column.item {
            ItemType::F32 => {
                let mut floats = Vec::with_capacity(count);
                taken.for_each(|values| floats.extend_from_slice(values.f32s()));
                Arc::new(Float32Array::from(floats))
            }
            ItemType::I32 => {
                let mut tokens = Vec::with_capacity(count);
                taken.for_each(|values| tokens.extend(values.u32s().iter().map(|token| *token as i32)));
                Arc::new(Int32Array::from(tokens))
            }
            ItemType::U16 | ItemType::Token => {
                let mut integers = Vec::with_capacity(count);
                taken.for_each(|values| integers.extend_from_slice(values.u32s()));
                unsigned(field, integers)?
            }
        };
        list_column(field, values, &list_lengths).map_err(OperatorError::arrow(NAME))
    };
    columns_of(signals).enumerate().map(array).collect()
}

fn take_values(values: &mut Values) -> Values {
    std::mem::replace(values, Values::U32(Vec::new()))
}

/// The signals stored in a batch.
#[derive(Debug, Clone)]
pub struct StoredSignals {
    signals: JobSignals,
    columns: Vec<StoredColumn>,
}

#[derive(Debug, Clone)]
struct StoredColumn {
    values: StoredValues,
    positions: PositionRanges,
}

#[derive(Debug, Clone)]
enum StoredValues {
    F32(Widened<f32>),
    U32(Widened<u32>),
}

/// Where the values of a position are among those of its row.
#[derive(Debug, Clone)]
enum PositionRanges {
    Every(usize),
    /// For each row, where the list of each position begins: `[length + 1]`.
    Starts(Arc<Vec<Vec<usize>>>),
}

impl StoredValues {
    fn read(column: SignalColumn, batch: &RecordBatch) -> Result<Self, ArrowError> {
        Ok(match column.item {
            ItemType::F32 => Self::F32(float_column(batch, column.name)?),
            ItemType::I32 => Self::U32(token_column(batch, column.name)?),
            ItemType::U16 | ItemType::Token => Self::U32(unsigned_column(batch, column.name)?),
        })
    }

    fn len(&self, row: usize) -> usize {
        match self {
            Self::F32(values) => values.row(row).len(),
            Self::U32(values) => values.row(row).len(),
        }
    }

    fn get(&self, row: usize, range: Range<usize>) -> Values {
        match self {
            Self::F32(values) => Values::F32(values.row(row)[range].to_vec()),
            Self::U32(values) => Values::U32(values.row(row)[range].to_vec()),
        }
    }

    /// The counts of a row, if these are integers.
    fn counts(&self, row: usize) -> &[u32] {
        match self {
            Self::F32(_) => &[],
            Self::U32(values) => values.row(row),
        }
    }
}

impl PositionRanges {
    fn range(&self, row: usize, position: usize) -> Range<usize> {
        match self {
            Self::Every(width) => position * width..(position + 1) * width,
            Self::Starts(starts) => starts[row][position]..starts[row][position + 1],
        }
    }

    /// Number of values of a row of `length` positions.
    fn row_length(&self, row: usize, length: usize) -> usize {
        match self {
            Self::Every(width) => length * width,
            Self::Starts(starts) => starts[row].last().copied().unwrap_or(0),
        }
    }
}

impl StoredSignals {
    /// Reads the signals of a batch. Also returns the rows in which lists or lengths do not match; do not call
    /// [`StoredSignals::at`] on those rows.
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    pub fn of(signals: &[Arc<dyn StoredSignal>], batch: &RecordBatch) -> Result<(Self, Vec<Violation>), ArrowError> {
        let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
        let (mut stored, mut violations) = (Vec::new(), Vec::new());
        let mut starts = Arc::new(Vec::new());
        for column in columns_of(signals) {
            let values = StoredValues::read(column, batch)?;
            let positions = match column.shape {
                ColumnShape::Scalar => PositionRanges::Every(1),
                ColumnShape::Vector(width) => PositionRanges::Every(width),
                ColumnShape::Count => {
                    let starts_of = |row| list_starts(values.counts(row));
                    starts = Arc::new((0..batch.num_rows()).map(starts_of).collect());
                    PositionRanges::Every(1)
                }
                ColumnShape::List => PositionRanges::Starts(Arc::clone(&starts)),
            };
            for row in 0..batch.num_rows() {
                let (got, expected) = (values.len(row), positions.row_length(row, tokens.range(row).len()));
                if got != expected {
                    let message = format!("{} has {got} values, valid: {expected}", column.name);
                    violations.push(Violation::new(row, message));
                }
            }
            stored.push(StoredColumn { values, positions });
        }
        Ok((Self { signals: signals.to_vec(), columns: stored }, violations))
    }

    /// Reads the signals of a batch that the check of shards has accepted.
    ///
    /// # Errors
    /// As [`StoredSignals::of`], and for the first row in which lists or lengths do not match.
    pub fn read(signals: &[Arc<dyn StoredSignal>], batch: &RecordBatch) -> Result<Self, ArrowError> {
        let (stored, misfits) = Self::of(signals, batch)?;
        match misfits.first() {
            Some(misfit) => Err(ArrowError::InvalidArgumentError(format!("row {}: {}", misfit.row, misfit.message))),
            None => Ok(stored),
        }
    }

    /// Returns the signals of a position in the form in which they were computed.
    #[must_use]
    pub fn at(&self, row: usize, position: usize) -> RowSignals {
        let values = |column: &StoredColumn| column.values.get(row, column.positions.range(row, position));
        self.columns.iter().map(values).collect()
    }

    /// Whether a position is stored as certain, that is with all probability on its token.
    #[must_use]
    pub fn is_certain(&self, row: usize, position: usize, token: u32) -> bool {
        self.at(row, position) == certain(&self.signals, token)
    }

    /// Compares a position with its recomputed logits and describes the first mismatch.
    #[must_use]
    pub fn find_mismatch(&self, row: usize, recomputed: &LoadedRow<'_>, tolerances: Tolerances) -> Option<String> {
        let stored = self.at(row, recomputed.position as usize);
        split(&self.signals, &stored).find_map(|(signal, got)| {
            let mut expected = RowSignals::new();
            signal.compute(recomputed, &mut expected);
            signal.compare(got, &expected, recomputed, tolerances)
        })
    }
}

fn list_starts(counts: &[u32]) -> Vec<usize> {
    let sum = |sum: &mut usize, count: &u32| {
        *sum += *count as usize;
        Some(*sum)
    };
    std::iter::once(0).chain(counts.iter().scan(0, sum)).collect()
}

/// Checks the signal columns of a batch.
pub(super) fn check(
    config: &ExtractConfig,
    batch: &RecordBatch,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    if config.signals.is_empty() {
        return Ok(());
    }
    let (stored, misfits) = StoredSignals::of(&config.signals, batch)?;
    let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    let ids = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    for row in 0..batch.num_rows() {
        if misfits.iter().any(|misfit| misfit.row == row) {
            continue;
        }
        let wrong = (0..ids[tokens.range(row)].len()).find_map(|position| {
            let values = stored.at(row, position);
            let message =
                split(&config.signals, &values).find_map(|(signal, values)| signal.check(values, config.vocab_size))?;
            Some(format!("position {position}: {message}"))
        });
        violations.extend(wrong.map(|message| Violation::new(row, message)));
    }
    violations.extend(misfits);
    Ok(())
}
