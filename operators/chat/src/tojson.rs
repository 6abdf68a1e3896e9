//! Python's `json.dumps`.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use crate::MAX_TEXT_BYTES;
use crate::repr::{float_repr, is_float};

/// Deepest value that is written. JSON that was read has at most 128 levels.
const MAX_DEPTH: usize = 256;

/// The arguments of `json.dumps` that transformers' `tojson` accepts.
pub(crate) struct Style {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
}

/// `json.dumps(value, …)`.
pub(crate) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut text = String::new();
    write_value(&mut text, value, style, 0)?;
    Ok(text)
}

fn invalid(problem: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

fn write_value(text: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid(format!("tojson: the value has more than {MAX_DEPTH} levels")));
    }
    if text.len() > MAX_TEXT_BYTES {
        return Err(invalid(format!("tojson: the text exceeds {} MiB", MAX_TEXT_BYTES >> 20)));
    }
    match value.kind() {
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => text.push_str(&number(value)),
        ValueKind::String => write_string(text, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq => {
            let items = value.try_iter()?.collect::<Vec<_>>();
            if items.is_empty() {
                text.push_str("[]");
                return Ok(());
            }
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                separate(text, style, depth, index > 0);
                write_value(text, item, style, depth + 1)?;
            }
            close(text, style, depth);
            text.push(']');
        }
        ValueKind::Map => {
            let mut keys = value.try_iter()?.collect::<Vec<_>>();
            if keys.is_empty() {
                text.push_str("{}");
                return Ok(());
            }
            if style.sort_keys {
                keys.sort();
            }
            text.push('{');
            for (index, key) in keys.iter().enumerate() {
                separate(text, style, depth, index > 0);
                write_key(text, key, style)?;
                text.push_str(&style.key_separator);
                write_value(text, &value.get_item(key)?, style, depth + 1)?;
            }
            close(text, style, depth);
            text.push('}');
        }
        kind => return Err(invalid(format!("tojson: a value of type {kind} is not JSON serializable"))),
    }
    Ok(())
}

fn write_key(text: &mut String, key: &Value, style: &Style) -> Result<(), Error> {
    let name = match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_string(),
        ValueKind::None => "null".to_string(),
        ValueKind::Bool => key.is_true().to_string(),
        ValueKind::Number => number(key),
        kind => return Err(invalid(format!("tojson: a key of type {kind} is not JSON serializable"))),
    };
    write_string(text, &name, style.ensure_ascii);
    Ok(())
}

fn separate(text: &mut String, style: &Style, depth: usize, comma: bool) {
    if comma {
        text.push_str(&style.item_separator);
    }
    if let Some(indent) = &style.indent {
        text.push('\n');
        (0..=depth).for_each(|_| text.push_str(indent));
    }
}

fn close(text: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        text.push('\n');
        (0..depth).for_each(|_| text.push_str(indent));
    }
}

fn write_string(text: &mut String, string: &str, ensure_ascii: bool) {
    text.push('"');
    for c in string.chars() {
        match c {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            c if c < ' ' || (ensure_ascii && !(' '..='~').contains(&c)) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // writing to a String does not fail
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
            c => text.push(c),
        }
    }
    text.push('"');
}

fn number(value: &Value) -> String {
    match is_float(value) {
        Some(float) if float.is_nan() => "NaN".into(),
        Some(float) if float.is_infinite() => if float > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        Some(float) => float_repr(float),
        None => value.to_string(),
    }
}
