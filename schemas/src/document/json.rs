//! Parses JSON into a tree with positions.

use serde_json::{Number, Value};
use struson::reader::{JsonReader, JsonStreamReader, ReaderError, ReaderSettings, ValueType};

use super::{Entry, Kind, MAX_DEPTH, Node, Position, SyntaxError};

type Reader<'a> = JsonStreamReader<&'a [u8]>;

/// Parses one value.
pub(super) fn read(text: &str) -> Result<Node, SyntaxError> {
    // serde_json has better error messages; the reader below knows positions
    if let Err(e) = serde_json::from_str::<Value>(text) {
        let position =
            Position::from_zero_based((e.line() as u64).saturating_sub(1), (e.column() as u64).saturating_sub(1));
        let words = e.to_string();
        let words = words.split_once(" at line ").map_or(words.as_str(), |(words, _)| words);
        return Err(SyntaxError { position, message: format!("is not JSON: {words}") });
    }
    let settings = ReaderSettings {
        max_nesting_depth: Some(MAX_DEPTH as u32),
        restrict_number_values: false,
        track_path: false,
        ..ReaderSettings::default()
    };
    let mut reader = JsonStreamReader::new_custom(text.as_bytes(), settings);
    node(&mut reader).map_err(|e| {
        let message = match e {
            ReaderError::MaxNestingDepthExceeded { .. } => {
                format!("has more than {MAX_DEPTH} levels, one inside of the other")
            }
            other => format!("is not JSON: {other}"),
        };
        SyntaxError { position: position(&reader), message }
    })
}

fn position(reader: &Reader<'_>) -> Position {
    let at = reader.current_position(false).line_pos;
    at.map_or(Position::START, |at| Position::from_zero_based(at.line, at.column))
}

fn node(reader: &mut Reader<'_>) -> Result<Node, ReaderError> {
    let value_type = reader.peek()?;
    let position = position(reader);
    let kind = match value_type {
        ValueType::Null => {
            reader.next_null()?;
            Kind::Scalar(Value::Null)
        }
        ValueType::Boolean => Kind::Scalar(reader.next_bool()?.into()),
        ValueType::String => Kind::Scalar(reader.next_string()?.into()),
        ValueType::Number => Kind::Scalar(number(reader.next_number_as_str()?)),
        ValueType::Array => {
            let mut items = Vec::new();
            reader.begin_array()?;
            while reader.has_next()? {
                items.push(node(reader)?);
            }
            reader.end_array()?;
            Kind::List(items)
        }
        ValueType::Object => Kind::Map(entries(reader)?),
    };
    Ok(Node { position, kind })
}

fn entries(reader: &mut Reader<'_>) -> Result<Vec<Entry>, ReaderError> {
    let mut entries = Vec::new();
    reader.begin_object()?;
    while reader.has_next()? {
        let position = position(reader);
        let key = reader.next_name_owned()?;
        entries.push(Entry { position, key, node: node(reader)? });
    }
    reader.end_object()?;
    Ok(entries)
}

fn number(text: &str) -> Value {
    let whole = || text.parse::<u64>().map(Number::from).or_else(|_| text.parse::<i64>().map(Number::from)).ok();
    let number = whole().or_else(|| text.parse::<f64>().ok().and_then(Number::from_f64));
    // a number that no type can hold becomes text, and is refused where a number is required
    number.map_or_else(|| text.into(), Value::Number)
}
