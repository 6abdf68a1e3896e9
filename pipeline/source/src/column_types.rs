//! Infers types of the columns of JSON lines and CSV without loss.
//!
//! | whole numbers | fractions | type |
//! |---|---|---|
//! | -2^63 to 2^63-1 | no | Int64 |
//! | 0 to 2^64-1, one of them from 2^63 | no | UInt64 |
//! | some negative and some at or above 2^63 | no | Decimal128(38, 0) |
//! | -2^53 to 2^53 | yes | Float64 |
//! | beyond 2^53, where a 64-bit float cannot hold every whole number | yes | text |
//!
//! `input.schema` names the type of a column instead.

use arrow::datatypes::{DataType, TimeUnit};
use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::spec::{ColumnType, Input};

use super::table_format::SAMPLE_RECORDS;

/// The largest integer up to which a 64-bit float represents every whole number.
pub(crate) const MAX_EXACT_FLOAT: u64 = 1 << 53;
/// Decimal digits of [`WIDE_INTEGER`].
pub(crate) const WIDE_DIGITS: usize = 38;
/// Whole numbers that do not fit in 64 bits.
pub(crate) const WIDE_INTEGER: DataType = DataType::Decimal128(38, 0);
pub(crate) const TIME: DataType = DataType::Timestamp(TimeUnit::Microsecond, None);

/// The kinds of numbers seen in a column.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NumberRange {
    negative: bool,
    largest: u64,
    fraction: bool,
}

impl NumberRange {
    pub fn whole(negative: bool, magnitude: u64) -> Self {
        Self { negative, largest: magnitude, fraction: false }
    }

    pub fn fraction() -> Self {
        Self { fraction: true, ..Self::default() }
    }

    pub fn and(self, other: Self) -> Self {
        Self {
            negative: self.negative || other.negative,
            largest: self.largest.max(other.largest),
            fraction: self.fraction || other.fraction,
        }
    }

    pub fn data_type(self) -> DataType {
        const MAX_I64: u64 = i64::MAX as u64;
        match self {
            Self { fraction: true, largest, .. } if largest <= MAX_EXACT_FLOAT => DataType::Float64,
            Self { fraction: true, .. } => DataType::LargeUtf8,
            Self { largest, .. } if largest <= MAX_I64 => DataType::Int64,
            Self { negative: false, .. } => DataType::UInt64,
            _ => WIDE_INTEGER,
        }
    }
}

/// Returns the Arrow type of a column type of the job file.
pub(crate) fn arrow_type(kind: ColumnType) -> DataType {
    match kind {
        ColumnType::String => DataType::LargeUtf8,
        ColumnType::Boolean => DataType::Boolean,
        ColumnType::Int64 => DataType::Int64,
        ColumnType::Uint64 => DataType::UInt64,
        ColumnType::Float64 => DataType::Float64,
        ColumnType::Date => DataType::Date32,
        ColumnType::Timestamp => TIME,
    }
}

/// Returns the message about a value that does not fit its column's type.
pub(crate) fn misfit_message(name: &str, kind: &DataType, input: &Input) -> String {
    let valid = valid(kind);
    match input.schema.contains_key(name) {
        true => format!("valid: {valid}, as `schema` says of this column"),
        false => format!(
            "valid: {valid}, as in the first {SAMPLE_RECORDS} records; another type can be named: `schema: {{{name}: string}}` beside `paths`"
        ),
    }
}

/// Returns the error about a name in `schema` that no column has.
pub(crate) fn unknown_column(name: &str, columns: &[&str]) -> SourceError {
    let message = format!("schema names a column {name:?}, which is not there; the columns: {}", columns.join(", "));
    SourceError::Sql { message, retryable: false }
}

/// Describes a valid value of a type, for messages.
fn valid(kind: &DataType) -> &'static str {
    match kind {
        DataType::Int64 => "a whole number from -2^63 to 2^63-1",
        DataType::UInt64 => "a whole number from 0 to 2^64-1",
        DataType::Decimal128(..) => "a whole number of at most 38 digits",
        DataType::Float64 => "a number; of whole numbers those from -2^53 to 2^53, which a 64-bit float holds exactly",
        DataType::Boolean => "true or false",
        DataType::Date32 => "a date such as 2024-12-31",
        DataType::Timestamp(..) => "a time such as 2024-12-31T23:59:59",
        _ => "text",
    }
}
