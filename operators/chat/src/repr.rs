//! Python's `repr` of values.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use crate::MAX_TEXT_BYTES;

/// Deepest list or dict that is written.
const MAX_DEPTH: usize = 256;

/// Python's `repr` of a value; undefined values and those of Jinja itself print as minijinja prints them.
pub(crate) fn repr(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_repr(&mut text, value, 0)?;
    Ok(text)
}

fn write_repr(text: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH || text.len() > MAX_TEXT_BYTES {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is too deep or too long to be written"));
    }
    match value.kind() {
        ValueKind::String => write_string(text, value.as_str().unwrap_or_default()),
        ValueKind::Number => match is_float(value) {
            Some(float) => text.push_str(&float_repr(float)),
            None => text.push_str(&value.to_string()),
        },
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            text.push(open);
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                text.push_str(if count > 0 { ", " } else { "" });
                write_repr(text, &item, depth + 1)?;
                count += 1;
            }
            text.push_str(if value.is_tuple() && count == 1 { "," } else { "" });
            text.push(close);
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                write_repr(text, &key, depth + 1)?;
                text.push_str(": ");
                write_repr(text, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            text.push('}');
        }
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

fn write_string(text: &mut String, string: &str) {
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in string.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if c == quote => {
                text.push('\\');
                text.push(c);
            }
            c if !is_printable(c) => {
                // writing to a String does not fail
                let _ = match c as u32 {
                    code @ ..0x100 => write!(text, "\\x{code:02x}"),
                    code @ ..0x10000 => write!(text, "\\u{code:04x}"),
                    code => write!(text, "\\U{code:08x}"),
                };
            }
            c => text.push(c),
        }
    }
    text.push(quote);
}

/// Python's `str.isprintable` of a character, except for unassigned ones, which count as printable.
fn is_printable(c: char) -> bool {
    let invisible = matches!(c,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{e000}'..='\u{f8ff}' | '\u{feff}'
        | '\u{fff0}'..='\u{fffb}' | '\u{fffe}'..='\u{ffff}' | '\u{e0000}'..='\u{10ffff}');
    c == ' ' || !(c.is_control() || c.is_whitespace() || invisible)
}

/// The float, if the value is a number that Python holds as a float.
pub(crate) fn is_float(value: &Value) -> Option<f64> {
    (value.kind() == ValueKind::Number && !value.is_integer()).then(|| f64::try_from(value.clone()).ok())?
}

/// Python's `repr` of a float. Rust's `Debug` switches to exponents at the same magnitudes.
pub(crate) fn float_repr(value: f64) -> String {
    let text = format!("{value:?}");
    if value.is_nan() {
        return "nan".into();
    }
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}
