//! JSON lines as a table: the columns are those of the first 1000 good records.
//!
//! Types of numbers are inferred without loss ([`crate::column_types`]); objects become structs, arrays lists. A key
//! with values of several kinds is text, and so is a key with only nulls. A later value that does not fit makes a bad
//! record; a later key does not become a column, unless `schema` names it.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Date32Array, Decimal128Array, Float64Array, Int64Array, LargeStringArray, ListArray,
    StructArray, TimestampMicrosecondArray, UInt64Array,
};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use serde_json::{Map, Value};
use stillhouse_base::source_error::{RecordPosition, SourceError, reason};
use stillhouse_input_files::{Cursor, InputFile, Store};
use stillhouse_schemas::spec::Input;

use super::super::csv::table as csv;
use crate::column_types::{self as types, MAX_EXACT_FLOAT, NumberRange, WIDE_INTEGER};
use crate::table_format::{
    BATCH_BYTES, BATCH_ROWS, BadRecords, FileColumns, MAX_RECORD_BYTES, SAMPLE_RECORDS, TableFormat, TakeRows,
    record_batch,
};

/// A record, or why it is bad: the reason and the message.
type Parsed = Result<Record, (&'static str, String)>;

/// The values of a record.
struct Record {
    values: Map<String, Value>,
    /// Keys of whole numbers that are too large for 64 bits, so that their values are rounded.
    rounded_keys: Vec<String>,
}

/// Calls `on_record` with every record of a file, its line number and its bytes, until `on_record` returns false.
fn for_each_record(
    store: &Store,
    file: &InputFile,
    input: &Input,
    on_record: &mut dyn FnMut(u64, usize, Parsed) -> Result<bool, SourceError>,
) -> Result<(), SourceError> {
    let io_error = |e| SourceError::from_io(&file.path, e);
    let mut cursor = Cursor::open(store, file, input, 0)?;
    let mut line = Vec::new();
    loop {
        cursor.skip_byte_order_mark().map_err(io_error)?;
        if cursor.fill().map_err(io_error)?.is_empty() {
            return Ok(());
        }
        let number = cursor.newlines + 1;
        let mut bytes = 0;
        line.clear();
        let add = |part: &[u8]| {
            bytes += part.len();
            if bytes <= MAX_RECORD_BYTES {
                line.extend_from_slice(part);
            }
        };
        cursor.finish_line(add).map_err(io_error)?;
        if bytes <= MAX_RECORD_BYTES && line.iter().all(|b| matches!(b, b' ' | b'\t' | b'\r')) {
            continue;
        }
        let parsed = match bytes > MAX_RECORD_BYTES {
            true => {
                Err((reason::LONG, format!("the line has {bytes} bytes; valid in a table: at most {MAX_RECORD_BYTES}")))
            }
            false => parse(&line),
        };
        if !on_record(number, bytes, parsed)? {
            return Ok(());
        }
    }
}

fn parse(line: &[u8]) -> Parsed {
    let text = str::from_utf8(line)
        .map_err(|_| (reason::UTF8, "got bytes that are not UTF-8; valid: JSON in UTF-8".to_owned()))?;
    match serde_json::from_str(text) {
        Ok(Value::Object(values)) => {
            let rounded_keys = if has_long_number(line) { rounded_keys(text) } else { Vec::new() };
            Ok(Record { values, rounded_keys })
        }
        Ok(other) => Err((reason::JSON, format!("got {}; valid: one JSON object per line", kind_name(&other)))),
        Err(e) => {
            let what = e.to_string();
            let what = what.split(" at line ").next().unwrap_or_default();
            Err((reason::JSON, format!("{what} at byte {} of the line; valid: one JSON object per line", e.column())))
        }
    }
}

fn kind_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The kinds of values seen under a key.
#[derive(Debug, Clone, PartialEq)]
enum ValueKind {
    Null,
    Boolean,
    Number(NumberRange),
    Text,
    List(Box<Self>),
    Object(Vec<(String, Self)>),
}

/// Files of this format as a table.
pub(super) struct JsonlTable;

impl TableFormat for JsonlTable {
    fn schema(&self, store: &Store, files: &[InputFile], input: &Input) -> Result<Schema, SourceError> {
        let mut kinds: Vec<(String, ValueKind)> = Vec::new();
        let mut seen = 0;
        for file in files {
            if seen >= SAMPLE_RECORDS {
                break;
            }
            for_each_record(store, file, input, &mut |_, _, record| {
                if let Ok(record) = record {
                    add_fields(&mut kinds, &record.values);
                    seen += 1;
                }
                Ok(seen < SAMPLE_RECORDS)
            })?;
        }
        for name in input.schema.keys().filter(|_| seen > 0) {
            if kinds.iter().all(|(known, _)| known != name) {
                kinds.push((name.clone(), ValueKind::Null));
            }
        }
        let field = |(name, kind): (String, ValueKind)| {
            let data_type = match input.schema.get(&name) {
                Some(named) => types::arrow_type(*named),
                None if name == input.text => DataType::LargeUtf8,
                None => kind.data_type(),
            };
            Field::new(name, data_type, true)
        };
        Ok(Schema::new(kinds.into_iter().map(field).collect::<Vec<_>>()))
    }

    fn read(
        &self,
        columns: FileColumns<'_>,
        bad_records: &mut BadRecords,
        take: &mut TakeRows<'_>,
    ) -> Result<(), SourceError> {
        let FileColumns { store, file, input, schema } = columns;
        let (mut records, mut held) = (Vec::new(), 0);
        for_each_record(store, file, input, &mut |line, bytes, parsed| {
            let record = parsed.and_then(|record| check_fit(&record, schema.fields(), input).map(|()| record.values));
            match record {
                Ok(record) => {
                    records.push(record);
                    held += bytes;
                }
                Err((reason, message)) => bad_records.add(file, RecordPosition::Line(line), reason, message)?,
            }
            if records.len() >= BATCH_ROWS || held >= BATCH_BYTES {
                take(rows(&records, schema)?, bad_records)?;
                records.clear();
                held = 0;
            }
            Ok(true)
        })?;
        if records.is_empty() { Ok(()) } else { take(rows(&records, schema)?, bad_records) }
    }
}

fn add_fields(kinds: &mut Vec<(String, ValueKind)>, record: &Map<String, Value>) {
    for (name, value) in record {
        add(kinds, name, ValueKind::of(value));
    }
}

fn add(kinds: &mut Vec<(String, ValueKind)>, name: &str, kind: ValueKind) {
    match kinds.iter_mut().find(|(known, _)| known == name) {
        Some((_, known)) => *known = std::mem::replace(known, ValueKind::Null).and(kind),
        None => kinds.push((name.to_owned(), kind)),
    }
}

impl ValueKind {
    fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(_) => Self::Boolean,
            Value::Number(n) => Self::Number(match (n.as_i64(), n.as_u64()) {
                (Some(n), _) => NumberRange::whole(n < 0, n.unsigned_abs()),
                (_, Some(n)) => NumberRange::whole(false, n),
                _ => NumberRange::fraction(),
            }),
            Value::String(_) => Self::Text,
            Value::Array(items) => Self::List(Box::new(items.iter().map(Self::of).fold(Self::Null, Self::and))),
            Value::Object(record) => {
                let mut kinds = Vec::new();
                add_fields(&mut kinds, record);
                Self::Object(kinds)
            }
        }
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Null, other) | (other, Self::Null) => other,
            (Self::Boolean, Self::Boolean) => Self::Boolean,
            (Self::Number(a), Self::Number(b)) => Self::Number(a.and(b)),
            (Self::List(a), Self::List(b)) => Self::List(Box::new(a.and(*b))),
            (Self::Object(mut a), Self::Object(b)) => {
                b.into_iter().for_each(|(name, kind)| add(&mut a, &name, kind));
                Self::Object(a)
            }
            _ => Self::Text,
        }
    }

    /// Returns the Arrow type. A key that is null in all records is text. An object without keys is text too:
    /// DataFusion does not support it.
    fn data_type(self) -> DataType {
        match self {
            Self::Null | Self::Text => DataType::LargeUtf8,
            Self::Boolean => DataType::Boolean,
            Self::Number(numbers) => numbers.data_type(),
            Self::List(item) => DataType::new_list(item.data_type(), true),
            Self::Object(kinds) if kinds.is_empty() => DataType::LargeUtf8,
            Self::Object(kinds) => {
                let field = |(name, kind): (String, Self)| Field::new(name, kind.data_type(), true);
                DataType::Struct(kinds.into_iter().map(field).collect())
            }
        }
    }
}

/// Returns the keys of an object that have a whole number outside of -2^63 to 2^64-1, which serde_json would round to a
/// float.
///
/// Cost: one pass over the line; the caller skips lines without a run of 19 digits.
fn rounded_keys(line: &str) -> Vec<String> {
    const RUN: usize = 19;
    let bytes = line.as_bytes();
    let (mut found, mut depth, mut key, mut at) = (Vec::new(), 0_usize, String::new(), 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                let start = at;
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                let is_key = line[at.min(line.len())..].trim_start_matches('"').trim_start().starts_with(':');
                if depth == 1
                    && is_key
                    && let Some(Ok(name)) = line.get(start..=at).map(serde_json::from_str)
                {
                    key = name;
                }
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'-' | b'0'..=b'9' => {
                let start = at;
                while at + 1 < bytes.len() && matches!(bytes[at + 1], b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-') {
                    at += 1;
                }
                let number = &line[start..=at];
                let is_whole = number.len() >= RUN && !number.contains(['.', 'e', 'E']);
                if is_whole && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
                    found.push(key.clone());
                }
            }
            _ => {}
        }
        at += 1;
    }
    found
}

fn has_long_number(line: &[u8]) -> bool {
    let mut run = 0;
    line.iter().any(|b| {
        run = if b.is_ascii_digit() { run + 1 } else { 0 };
        run >= 19
    })
}

/// Checks that a record fits the columns; returns the reason if it does not.
fn check_fit(record: &Record, fields: &Fields, input: &Input) -> Result<(), (&'static str, String)> {
    for field in fields {
        let Some(value) = record.values.get(field.name()) else { continue };
        let name = field.name();
        if *name == input.text && !matches!(value, Value::String(_) | Value::Null) {
            return Err((reason::TYPE, format!("the value of {name:?} is {}; valid: a string", kind_name(value))));
        }
        if record.rounded_keys.contains(name) {
            let message = format!(
                "the value of {name:?} is or holds a whole number outside of -2^63 to 2^64-1; valid: one that 64 bits hold, or a string"
            );
            return Err((reason::VALUE, message));
        }
        if !fits(value, field.data_type()) {
            let got: String = value.to_string().chars().take(80).collect();
            let valid = types::misfit_message(name, field.data_type(), input);
            return Err((reason::VALUE, format!("the value of {name:?} is or holds {got}; {valid}")));
        }
    }
    Ok(())
}

fn fits(value: &Value, kind: &DataType) -> bool {
    match (kind, value) {
        (_, Value::Null) | (DataType::LargeUtf8, _) => true,
        (DataType::Boolean, value) => value.is_boolean(),
        (DataType::Int64, value) => value.is_i64(),
        (DataType::UInt64, value) => value.is_u64(),
        (DataType::Decimal128(..), value) => value.is_i64() || value.is_u64(),
        (DataType::Float64, Value::Number(n)) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => n.unsigned_abs() <= MAX_EXACT_FLOAT,
            (_, whole) => whole.is_none(),
        },
        (DataType::Date32, Value::String(text)) => csv::date(text).is_some(),
        (DataType::Timestamp(..), Value::String(text)) => csv::time(text).is_some(),
        (DataType::List(item), Value::Array(items)) => items.iter().all(|v| fits(v, item.data_type())),
        (DataType::Struct(fields), Value::Object(record)) => {
            fields.iter().all(|f| record.get(f.name()).is_none_or(|v| fits(v, f.data_type())))
        }
        _ => false,
    }
}

fn rows(records: &[Map<String, Value>], schema: &SchemaRef) -> Result<arrow::array::RecordBatch, SourceError> {
    let column =
        |field: &Arc<Field>| array(&records.iter().map(|r| r.get(field.name())).collect::<Vec<_>>(), field.data_type());
    record_batch(schema, schema.fields().iter().map(column).collect(), records.len())
}

/// Converts values that pass [`check_fit`] for a type to an array.
fn array(values: &[Option<&Value>], kind: &DataType) -> ArrayRef {
    let there = || NullBuffer::from_iter(values.iter().map(|v| v.is_some_and(|v| !v.is_null())));
    match kind {
        DataType::Boolean => Arc::new(values.iter().map(|v| v.and_then(Value::as_bool)).collect::<BooleanArray>()),
        DataType::Int64 => Arc::new(values.iter().map(|v| v.and_then(Value::as_i64)).collect::<Int64Array>()),
        DataType::UInt64 => Arc::new(values.iter().map(|v| v.and_then(Value::as_u64)).collect::<UInt64Array>()),
        DataType::Decimal128(..) => {
            let whole = |v: &Value| v.as_i64().map(i128::from).or(v.as_u64().map(i128::from));
            Arc::new(values.iter().map(|v| v.and_then(whole)).collect::<Decimal128Array>().with_data_type(WIDE_INTEGER))
        }
        DataType::Date32 => {
            Arc::new(values.iter().map(|v| csv::date(v.and_then(Value::as_str)?)).collect::<Date32Array>())
        }
        DataType::Timestamp(..) => {
            let times = values.iter().map(|v| csv::time(v.and_then(Value::as_str)?));
            Arc::new(times.collect::<TimestampMicrosecondArray>())
        }
        DataType::Float64 => Arc::new(values.iter().map(|v| v.and_then(Value::as_f64)).collect::<Float64Array>()),
        DataType::List(item) => {
            let lists: Vec<&[Value]> =
                values.iter().map(|v| v.and_then(Value::as_array).map_or(&[][..], Vec::as_slice)).collect();
            let items: Vec<Option<&Value>> = lists.iter().flat_map(|list| list.iter().map(Some)).collect();
            let offsets = OffsetBuffer::from_lengths(lists.iter().map(|list| list.len()));
            Arc::new(ListArray::new(item.clone(), offsets, array(&items, item.data_type()), Some(there())))
        }
        DataType::Struct(fields) => {
            let column = |field: &Arc<Field>| {
                let inside = values.iter().map(|v| v.and_then(|v| v.get(field.name())));
                array(&inside.collect::<Vec<_>>(), field.data_type())
            };
            Arc::new(StructArray::new(fields.clone(), fields.iter().map(column).collect(), Some(there())))
        }
        _ => {
            let text = |v: &Option<&Value>| match v {
                None | Some(Value::Null) => None,
                Some(Value::String(text)) => Some(text.clone()),
                Some(other) => Some(other.to_string()),
            };
            Arc::new(values.iter().map(text).collect::<LargeStringArray>())
        }
    }
}
