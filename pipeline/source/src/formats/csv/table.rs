//! CSV as a table: the columns are those of all headers, their types come from the first 1000 good records.
//!
//! It detects whole numbers, numbers ([`crate::column_types`]), true and false, dates (`2024-12-31`) and times
//! (`2024-12-31T23:59:59`). Everything else is text, and so are the text column and values that a number would not
//! reproduce: `007`, `+5`. An empty field is null, but in the text column it is an empty text, as without a query. A
//! later value that does not fit its column's type makes a bad record.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Date32Array, Decimal128Array, Float64Array, Int64Array, LargeStringArray,
    TimestampMicrosecondArray, UInt64Array,
};
use arrow::compute::kernels::cast_utils::Parser;
use arrow::datatypes::{DataType, Date32Type, Field, Schema, TimestampMicrosecondType};
use stillhouse_base::source_error::{RecordPosition, SourceError, reason};
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::spec::Input;

use super::CsvRows;
use crate::column_types::{self as types, MAX_EXACT_FLOAT, TIME, WIDE_DIGITS, WIDE_INTEGER};
use crate::table_format::{
    BATCH_BYTES, BATCH_ROWS, BadRecords, FileColumns, MAX_RECORD_BYTES, SAMPLE_RECORDS, TableFormat, TakeRows,
    record_batch,
};

/// Types in the order in which they are tried.
const KINDS: [DataType; 7] =
    [DataType::Int64, DataType::UInt64, WIDE_INTEGER, DataType::Float64, DataType::Boolean, DataType::Date32, TIME];

/// Returns the digits of a whole number in canonical form: no `+`, no leading zeros.
fn digits(text: &str) -> Option<&str> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_whole = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    (is_whole && (digits == "0" || !digits.starts_with('0')) && text != "-0").then_some(digits)
}

fn float(text: &str) -> Option<f64> {
    let unsigned = text.strip_prefix('-').unwrap_or(text).as_bytes();
    let has_zeros_before = unsigned.len() > 1 && unsigned[0] == b'0' && unsigned[1].is_ascii_digit();
    // "nan" and "inf" are words
    if has_zeros_before || text.starts_with('+') || !text.bytes().any(|b| b.is_ascii_digit()) {
        return None;
    }
    match digits(text) {
        Some(digits) if digits.parse::<u64>().map_or(true, |n| n > MAX_EXACT_FLOAT) => None,
        _ => text.parse().ok(),
    }
}

fn boolean(text: &str) -> Option<bool> {
    let is = |word: &str| text.eq_ignore_ascii_case(word);
    if is("true") { Some(true) } else { is("false").then_some(false) }
}

pub(in super::super) fn date(text: &str) -> Option<i32> {
    (text.len() == 10).then(|| Date32Type::parse(text)).flatten()
}

pub(in super::super) fn time(text: &str) -> Option<i64> {
    (text.len() >= 19).then(|| TimestampMicrosecondType::parse(text)).flatten()
}

fn fits(text: &str, kind: &DataType) -> bool {
    match kind {
        DataType::Int64 => digits(text).is_some() && text.parse::<i64>().is_ok(),
        DataType::UInt64 => digits(text).is_some() && text.parse::<u64>().is_ok(),
        DataType::Decimal128(..) => digits(text).is_some_and(|digits| digits.len() <= WIDE_DIGITS),
        DataType::Float64 => float(text).is_some(),
        DataType::Boolean => boolean(text).is_some(),
        DataType::Date32 => date(text).is_some(),
        DataType::Timestamp(..) => time(text).is_some(),
        _ => true,
    }
}

/// A column while its type is inferred.
struct TypeGuess {
    name: String,
    /// For each of [`KINDS`], whether all values so far fit it.
    fits: [bool; KINDS.len()],
    seen: bool,
}

/// Files of this format as a table.
pub(super) struct CsvTable;

impl TableFormat for CsvTable {
    fn schema(&self, store: &Store, files: &[InputFile], input: &Input) -> Result<Schema, SourceError> {
        let mut guesses: Vec<TypeGuess> = Vec::new();
        let mut seen = 0;
        let mut fields = Vec::new();
        for file in files {
            let mut rows = CsvRows::open(store, file, input)?;
            for name in &rows.names {
                if guesses.iter().all(|g| g.name != *name) {
                    guesses.push(TypeGuess { name: name.clone(), fits: [true; KINDS.len()], seen: false });
                }
            }
            while seen < SAMPLE_RECORDS
                && let Some((_, record)) =
                    rows.next(&mut fields, MAX_RECORD_BYTES).map_err(|e| SourceError::from_io(&file.path, e))?
            {
                if record.is_err() {
                    continue;
                }
                seen += 1;
                for (name, value) in rows.names.iter().zip(&fields).filter(|(_, value)| !value.is_empty()) {
                    let text = String::from_utf8_lossy(value);
                    if let Some(guess) = guesses.iter_mut().find(|g| g.name == *name) {
                        guess.seen = true;
                        guess.fits.iter_mut().zip(&KINDS).for_each(|(fit, kind)| *fit &= fits(&text, kind));
                    }
                }
            }
        }
        let names: Vec<&str> = guesses.iter().map(|guess| guess.name.as_str()).collect();
        if let Some(unknown) = input.schema.keys().find(|name| !names.contains(&name.as_str())) {
            return Err(types::unknown_column(unknown, &names));
        }
        let field = |guess: TypeGuess| {
            if let Some(kind) = input.schema.get(&guess.name) {
                return Field::new(guess.name, types::arrow_type(*kind), true);
            }
            let kind = KINDS.into_iter().zip(guess.fits).find(|(_, fits)| *fits && guess.seen);
            let kind = kind.filter(|_| guess.name != input.text).map_or(DataType::LargeUtf8, |(kind, _)| kind);
            Field::new(guess.name, kind, true)
        };
        Ok(Schema::new(guesses.into_iter().map(field).collect::<Vec<_>>()))
    }

    fn read(
        &self,
        columns: FileColumns<'_>,
        bad_records: &mut BadRecords,
        take: &mut TakeRows<'_>,
    ) -> Result<(), SourceError> {
        let FileColumns { store, file, input, schema } = columns;
        let mut records = CsvRows::open(store, file, input)?;
        let positions: Vec<Option<usize>> =
            schema.fields().iter().map(|f| records.names.iter().position(|name| name == f.name())).collect();
        let mut fields = Vec::new();
        let mut columns: Vec<Vec<Option<String>>> = vec![Vec::new(); positions.len()];
        let (mut rows, mut held) = (0, 0);
        while let Some((newlines, record)) =
            records.next(&mut fields, MAX_RECORD_BYTES).map_err(|e| SourceError::from_io(&file.path, e))?
        {
            let record = record.map_err(|bad| (bad.reason, bad.message)).and_then(|()| {
                positions
                    .iter()
                    .zip(schema.fields())
                    .map(|(position, field)| cell(*position, &fields, field, input))
                    .collect()
            });
            let record: Vec<Option<String>> = match record {
                Ok(record) => record,
                Err((reason, message)) => {
                    bad_records.add(file, RecordPosition::Line(newlines + 1), reason, message)?;
                    continue;
                }
            };
            for (column, value) in columns.iter_mut().zip(record) {
                held += value.as_ref().map_or(0, String::len);
                column.push(value);
            }
            rows += 1;
            if rows >= BATCH_ROWS || held >= BATCH_BYTES {
                take(record_batch(schema, arrays(&mut columns, schema), rows)?, bad_records)?;
                (rows, held) = (0, 0);
            }
        }
        if rows == 0 { Ok(()) } else { take(record_batch(schema, arrays(&mut columns, schema), rows)?, bad_records) }
    }
}

/// Returns the value of a column in a record, or the reason why it does not fit.
fn cell(
    position: Option<usize>,
    fields: &[Vec<u8>],
    field: &Field,
    input: &Input,
) -> Result<Option<String>, (&'static str, String)> {
    let Some(bytes) = position.and_then(|position| fields.get(position)) else { return Ok(None) };
    let name = field.name();
    let text = str::from_utf8(bytes).map_err(|_| {
        (reason::UTF8, format!("got bytes in the field {name:?} that are not UTF-8; valid: text in UTF-8"))
    })?;
    if text.is_empty() {
        return Ok((*name == input.text).then(String::new));
    }
    if !fits(text, field.data_type()) {
        let got: String = text.chars().take(80).collect();
        let message =
            format!("the field {name:?} is {got:?}; {}", types::misfit_message(name, field.data_type(), input));
        return Err((reason::VALUE, message));
    }
    Ok(Some(text.to_owned()))
}

fn arrays(columns: &mut [Vec<Option<String>>], schema: &Schema) -> Vec<ArrayRef> {
    columns.iter_mut().zip(schema.fields()).map(|(column, f)| array(std::mem::take(column), f.data_type())).collect()
}

fn array(values: Vec<Option<String>>, kind: &DataType) -> ArrayRef {
    let values = values.iter().map(Option::as_deref);
    match kind {
        DataType::Int64 => Arc::new(values.map(|v| v?.parse().ok()).collect::<Int64Array>()),
        DataType::UInt64 => Arc::new(values.map(|v| v?.parse().ok()).collect::<UInt64Array>()),
        DataType::Decimal128(..) => {
            let wide = values.map(|v| v?.parse().ok()).collect::<Decimal128Array>();
            Arc::new(wide.with_data_type(WIDE_INTEGER))
        }
        DataType::Float64 => Arc::new(values.map(|v| float(v?)).collect::<Float64Array>()),
        DataType::Boolean => Arc::new(values.map(|v| boolean(v?)).collect::<BooleanArray>()),
        DataType::Date32 => Arc::new(values.map(|v| date(v?)).collect::<Date32Array>()),
        DataType::Timestamp(..) => Arc::new(values.map(|v| time(v?)).collect::<TimestampMicrosecondArray>()),
        _ => Arc::new(values.collect::<LargeStringArray>()),
    }
}
