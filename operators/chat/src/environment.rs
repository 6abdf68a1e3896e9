//! The Jinja environment of transformers (`utils/chat_template_utils.py`), in minijinja.
//!
//! What minijinja does differently from Jinja2 in Python is bridged here, not by a change of the template:
//!
//! | Jinja2 in Python | minijinja |
//! |---|---|
//! | `tojson` is `json.dumps(ensure_ascii=False)` with Python's separators, indents and floats | compact JSON that escapes HTML |
//! | `str.strip`, `split` and the `trim` filter know Python's white space, keywords and tuples | Rust's white space |
//! | numbers, lists and dicts print as `repr` writes them | floats with all digits; other escapes |
//! | `for x in none` fails | no iteration: see [`crate::rewrite`] |
//! | `is sequence` holds for strings and maps, `is iterable` for strings | not |
//! | `{% generation %}`, of transformers | unknown tag: see [`crate::rewrite`] |

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value};

use crate::json::Json;
use crate::repr::repr;
use crate::strftime::Date;
use crate::tojson::{Style, dumps};
use crate::{ChatError, generation, rewrite, strings};

/// Fuel of one render: about one unit for each instruction and for 64 bytes of text.
pub(crate) const RENDER_FUEL: u64 = 8_000_000;

/// Name of the template in its environment. It has no extension, which would turn escaping on.
pub(crate) const NAME: &str = "chat_template";

/// The environment with `source` compiled in it.
pub(crate) fn environment(
    source: &str,
    special_tokens: &BTreeMap<String, String>,
    options: &[(String, Json)],
    date: Option<Date>,
) -> Result<Environment<'static>, ChatError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| ChatError::Template(describe(&error)))?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(RENDER_FUEL));
    environment.set_unknown_method_callback(strings::call_method);
    environment.set_formatter(write_value);
    environment.add_filter("tojson", tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("string", string);
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    environment.add_test("iterable", |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Map | String | Iterable | Undefined)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |pattern: String| strftime_now(date, &pattern));
    environment.add_function(generation::FUNCTION, generation::mark);
    environment.add_function(rewrite::ITERABLE, rewrite::iterable);
    environment.add_function(rewrite::BOUNDED, rewrite::bounded);
    environment.remove_global("debug");
    for (name, text) in special_tokens {
        environment.add_global(name.clone(), Value::from(text.as_str()));
    }
    for (name, value) in options {
        environment.add_global(name.clone(), value.to_value());
    }
    environment
        .add_template_owned(NAME, rewrite::rewrite(source)?)
        .map_err(|error| ChatError::Template(describe(&error)))?;
    Ok(environment)
}

/// The problem and the line of the template.
pub(crate) fn describe(error: &Error) -> String {
    let mut text = match error.detail() {
        Some(detail) => detail.to_string(),
        None => error.kind().to_string(),
    };
    if let Some(line) = error.line() {
        text.push_str(&format!(" (line {line} of the template)"));
    }
    text
}

fn write_value(output: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            let text = repr(value)?;
            state.consume_fuel(text.len() as u64 / 4)?;
            output.write_str(&text).map_err(Error::from)
        }
        _ => minijinja::escape_formatter(output, state, value),
    }
}

fn text_of(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_string()),
        None => repr(value),
    }
}

fn string(value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => text_of(value).map(Value::from),
    }
}

fn trim(value: &Value, chars: Option<&Value>) -> Result<Value, Error> {
    let chars = match chars {
        None => None,
        Some(chars) if chars.is_none() => None,
        Some(chars) => Some(
            chars
                .as_str()
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "trim: the characters are no string"))?,
        ),
    };
    Ok(Value::from(strings::strip(&text_of(value)?, chars, true, true)))
}

fn tojson(state: &State, value: &Value, ensure_ascii: Option<bool>, kwargs: Kwargs) -> Result<Value, Error> {
    let invalid = |problem: &'static str| Error::new(ErrorKind::InvalidOperation, problem);
    let indent: Option<Value> = kwargs.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_i64()) {
            (Some(text), _) => text.to_string(),
            (None, Some(width)) if width <= 64 => " ".repeat(usize::try_from(width).unwrap_or(0)),
            _ => return Err(invalid("tojson: `indent` is neither a string nor a number up to 64")),
        }),
    };
    let separators: Option<Value> = kwargs.get("separators")?;
    let (item_separator, key_separator) = match separators.filter(|separators| !separators.is_none()) {
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
        Some(pair) => {
            let parts = pair.try_iter()?.map(|part| part.as_str().map(String::from)).collect::<Option<Vec<_>>>();
            match parts.as_deref() {
                Some([item, key]) => (item.clone(), key.clone()),
                _ => return Err(invalid("tojson: `separators` is no pair of strings")),
            }
        }
    };
    let style = Style {
        ensure_ascii: ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let text = dumps(value, &style)?;
    state.consume_fuel(text.len() as u64 / 4)?;
    Ok(Value::from(text))
}

fn strftime_now(date: Option<Date>, pattern: &str) -> Result<String, Error> {
    let invalid = |problem: String| Error::new(ErrorKind::InvalidOperation, problem);
    let date = date.ok_or_else(|| {
        invalid("the template writes today's date, which would differ between runs: set `date: YYYY-MM-DD`".into())
    })?;
    date.format(pattern).map_err(|directive| {
        invalid(format!("strftime_now: {directive} is not supported; valid: %d %b %B %m %Y %y %A %a"))
    })
}
