//! JSON lines as a table: the columns are those of the first 1000 good records.
//!
//! Whole numbers are Int64, other numbers Float64, objects structs, arrays lists; values of several kinds under one key are text, as is what
//! was null in all of them. A later value that does not fit makes a bad record; a later key is not a column.

use std::sync::Arc;

use datafusion::arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int64Array, LargeStringArray, ListArray, StructArray,
};
use datafusion::arrow::buffer::{NullBuffer, OffsetBuffer};
use datafusion::arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use serde_json::{Map, Value};
use stillhouse_schemas::spec::Input;

use super::super::decode::Cursor;
use super::super::error::{RecordPosition, SourceError, reason};
use super::super::list::InputFile;
use super::super::store::Store;
use super::table::{Asked, Judge, Take, batch};
use super::{BATCH_BYTES, BATCH_ROWS, LARGEST_RECORD, SAMPLE};

/// A record, or why it is none: the reason and what was got.
type Parsed = Result<Map<String, Value>, (&'static str, String)>;

/// Shows every record of a file with its line and its bytes, until it is told that it is enough.
fn each(
    store: &Store,
    file: &InputFile,
    input: &Input,
    see: &mut dyn FnMut(u64, usize, Parsed) -> Result<bool, SourceError>,
) -> Result<(), SourceError> {
    let wrong = |e| SourceError::from_io(&file.path, e);
    let mut cursor = Cursor::open(store, file, input, 0)?;
    let mut line = Vec::new();
    loop {
        cursor.skip_byte_order_mark().map_err(wrong)?;
        if cursor.fill().map_err(wrong)?.is_empty() {
            return Ok(());
        }
        let number = cursor.newlines + 1;
        let mut bytes = 0;
        line.clear();
        let add = |part: &[u8]| {
            bytes += part.len();
            if bytes <= LARGEST_RECORD {
                line.extend_from_slice(part);
            }
        };
        cursor.finish_line(add).map_err(wrong)?;
        if bytes <= LARGEST_RECORD && line.iter().all(|b| matches!(b, b' ' | b'\t' | b'\r')) {
            continue;
        }
        let parsed = match bytes > LARGEST_RECORD {
            true => {
                Err((reason::LONG, format!("the line has {bytes} bytes; valid in a query: at most {LARGEST_RECORD}")))
            }
            false => parse(&line),
        };
        if !see(number, bytes, parsed)? {
            return Ok(());
        }
    }
}

fn parse(line: &[u8]) -> Parsed {
    let text = str::from_utf8(line)
        .map_err(|_| (reason::UTF8, "got bytes that are not UTF-8; valid: JSON in UTF-8".to_owned()))?;
    match serde_json::from_str(text) {
        Ok(Value::Object(record)) => Ok(record),
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

/// The columns of the files.
pub(super) fn schema(store: &Store, files: &[InputFile], input: &Input) -> Result<Schema, SourceError> {
    let mut fields: Vec<(String, DataType)> = Vec::new();
    let mut seen = 0;
    for file in files {
        if seen >= SAMPLE {
            break;
        }
        each(store, file, input, &mut |_, _, record| {
            if let Ok(record) = record {
                add_fields(&mut fields, &record);
                seen += 1;
            }
            Ok(seen < SAMPLE)
        })?;
    }
    let field = |(name, kind): (String, DataType)| {
        let kind = if name == input.text { DataType::LargeUtf8 } else { without_nulls(kind) };
        Field::new(name, kind, true)
    };
    Ok(Schema::new(fields.into_iter().map(field).collect::<Vec<_>>()))
}

fn add_fields(fields: &mut Vec<(String, DataType)>, record: &Map<String, Value>) {
    for (name, value) in record {
        let kind = kind(value);
        match fields.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = merged(known, &kind),
            None => fields.push((name.clone(), kind)),
        }
    }
}

fn kind(value: &Value) -> DataType {
    match value {
        Value::Null => DataType::Null,
        Value::Bool(_) => DataType::Boolean,
        Value::Number(n) if n.is_i64() => DataType::Int64,
        Value::Number(_) => DataType::Float64,
        Value::String(_) => DataType::LargeUtf8,
        Value::Array(items) => {
            let item = items.iter().map(kind).reduce(|a, b| merged(&a, &b)).unwrap_or(DataType::Null);
            DataType::new_list(item, true)
        }
        Value::Object(record) => {
            let mut fields = Vec::new();
            add_fields(&mut fields, record);
            structure(fields)
        }
    }
}

fn structure(fields: Vec<(String, DataType)>) -> DataType {
    DataType::Struct(fields.into_iter().map(|(name, kind)| Field::new(name, kind, true)).collect())
}

fn merged(a: &DataType, b: &DataType) -> DataType {
    match (a, b) {
        _ if a == b => a.clone(),
        (DataType::Null, other) | (other, DataType::Null) => other.clone(),
        (DataType::Int64, DataType::Float64) | (DataType::Float64, DataType::Int64) => DataType::Float64,
        (DataType::List(a), DataType::List(b)) => DataType::new_list(merged(a.data_type(), b.data_type()), true),
        (DataType::Struct(a), DataType::Struct(b)) => {
            let own = |f: &Arc<Field>| (f.name().clone(), f.data_type().clone());
            let mut fields: Vec<_> = a.iter().map(own).collect();
            for field in b {
                match fields.iter_mut().find(|(name, _)| name == field.name()) {
                    Some((_, known)) => *known = merged(known, field.data_type()),
                    None => fields.push(own(field)),
                }
            }
            structure(fields)
        }
        _ => DataType::LargeUtf8,
    }
}

/// What was null in all records is text; DataFusion has no use for an object without keys.
fn without_nulls(kind: DataType) -> DataType {
    match kind {
        DataType::Null => DataType::LargeUtf8,
        DataType::List(item) => DataType::new_list(without_nulls(item.data_type().clone()), true),
        DataType::Struct(fields) if fields.is_empty() => DataType::LargeUtf8,
        DataType::Struct(fields) => {
            structure(fields.iter().map(|f| (f.name().clone(), without_nulls(f.data_type().clone()))).collect())
        }
        other => other,
    }
}

/// Reads these columns of a file.
pub(super) fn read(asked: Asked<'_>, judge: &mut Judge, take: &mut Take<'_>) -> Result<(), SourceError> {
    let Asked { store, file, input, schema } = asked;
    let (mut records, mut held) = (Vec::new(), 0);
    each(store, file, input, &mut |line, bytes, parsed| {
        let record = parsed.and_then(|record| fit(&record, schema.fields(), &input.text).map(|()| record));
        match record {
            Ok(record) => {
                records.push(record);
                held += bytes;
            }
            Err((reason, message)) => judge.bad(file, RecordPosition::Line(line), reason, message)?,
        }
        if records.len() >= BATCH_ROWS || held >= BATCH_BYTES {
            take(rows(&records, schema)?, judge)?;
            records.clear();
            held = 0;
        }
        Ok(true)
    })?;
    if records.is_empty() { Ok(()) } else { take(rows(&records, schema)?, judge) }
}

/// Why a record does not fit the columns, if it does not.
fn fit(record: &Map<String, Value>, fields: &Fields, text: &str) -> Result<(), (&'static str, String)> {
    for field in fields {
        let Some(value) = record.get(field.name()) else { continue };
        let name = field.name();
        if name == text && !matches!(value, Value::String(_) | Value::Null) {
            return Err((reason::TYPE, format!("the value of {name:?} is {}; valid: a string", kind_name(value))));
        }
        if let Some(valid) = misfit(value, field.data_type()) {
            let got: String = value.to_string().chars().take(80).collect();
            let message =
                format!("the value of {name:?} is or holds {got}; valid: {valid}, as in the first {SAMPLE} records");
            return Err((reason::VALUE, message));
        }
    }
    Ok(())
}

/// What a type takes, where this value is something else.
fn misfit(value: &Value, kind: &DataType) -> Option<&'static str> {
    match (kind, value) {
        (_, Value::Null) | (DataType::LargeUtf8, _) => None,
        (DataType::Boolean, value) => (!value.is_boolean()).then_some("true or false"),
        (DataType::Int64, value) => (!value.is_i64()).then_some("a whole number below 2^63"),
        (DataType::Float64, value) => (!value.is_number()).then_some("a number"),
        (DataType::List(item), Value::Array(items)) => items.iter().find_map(|v| misfit(v, item.data_type())),
        (DataType::List(_), _) => Some("an array"),
        (DataType::Struct(fields), Value::Object(record)) => {
            fields.iter().find_map(|f| misfit(record.get(f.name())?, f.data_type()))
        }
        (DataType::Struct(_), _) => Some("an object"),
        _ => None,
    }
}

fn rows(
    records: &[Map<String, Value>],
    schema: &SchemaRef,
) -> Result<datafusion::arrow::array::RecordBatch, SourceError> {
    let column =
        |field: &Arc<Field>| array(&records.iter().map(|r| r.get(field.name())).collect::<Vec<_>>(), field.data_type());
    batch(schema, schema.fields().iter().map(column).collect(), records.len())
}

/// Values that [`fit`] a type.
fn array(values: &[Option<&Value>], kind: &DataType) -> ArrayRef {
    let there = || NullBuffer::from_iter(values.iter().map(|v| v.is_some_and(|v| !v.is_null())));
    match kind {
        DataType::Boolean => Arc::new(values.iter().map(|v| v.and_then(Value::as_bool)).collect::<BooleanArray>()),
        DataType::Int64 => Arc::new(values.iter().map(|v| v.and_then(Value::as_i64)).collect::<Int64Array>()),
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
