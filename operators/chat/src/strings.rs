//! Python's string methods, where those of minijinja-contrib differ or are missing: white space is Python's, arguments
//! have their keywords, and `rsplit`, `partition`, `removeprefix` and their kind exist.

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// White space of Python's `str.strip()` and `str.split()`.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// The methods of values that minijinja does not know, as Python's.
pub(crate) fn call_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(state, text, method, args)?
    {
        return Ok(result);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// Python's `str.strip(chars)`, on the sides asked for.
pub(crate) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let matches = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(matches) } else { text };
    if right { text.trim_end_matches(matches) } else { text }
}

fn invalid(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// Python's `str.split(separator, maxsplit)`; a negative maximum is none.
fn split(text: &str, separator: Option<&str>, maximum: i64) -> Result<Vec<Value>, Error> {
    let maximum = usize::try_from(maximum).unwrap_or(usize::MAX - 1);
    if let Some(separator) = separator {
        if separator.is_empty() {
            return Err(invalid("split: empty separator"));
        }
        return Ok(text.splitn(maximum + 1, separator).map(Value::from).collect());
    }
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if parts.len() == maximum {
            parts.push(Value::from(rest));
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        parts.push(Value::from(&rest[..end]));
        rest = rest[end..].trim_start_matches(is_space);
    }
    Ok(parts)
}

/// Python's `str.rsplit(separator, maxsplit)`.
fn rsplit(text: &str, separator: Option<&str>, maximum: i64) -> Result<Vec<Value>, Error> {
    let maximum = usize::try_from(maximum).unwrap_or(usize::MAX - 1);
    let mut parts = Vec::new();
    if let Some(separator) = separator {
        if separator.is_empty() {
            return Err(invalid("rsplit: empty separator"));
        }
        parts = text.rsplitn(maximum + 1, separator).map(Value::from).collect();
    } else {
        let mut rest = text.trim_end_matches(is_space);
        while !rest.is_empty() {
            if parts.len() == maximum {
                parts.push(Value::from(rest));
                break;
            }
            let start =
                rest.char_indices().rev().find(|(_, c)| is_space(*c)).map_or(0, |(place, c)| place + c.len_utf8());
            parts.push(Value::from(&rest[start..]));
            rest = rest[..start].trim_end_matches(is_space);
        }
    }
    parts.reverse();
    Ok(parts)
}

/// Python's `str.splitlines(keepends)`.
fn split_lines(text: &str, keep_ends: bool) -> Vec<Value> {
    let ends = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(ends).unwrap_or(rest.len());
        let width = match rest[end..].chars().next() {
            Some('\r') if rest[end + 1..].starts_with('\n') => 2,
            Some(c) => c.len_utf8(),
            None => 0,
        };
        lines.push(Value::from(&rest[..if keep_ends { end + width } else { end }]));
        rest = &rest[end + width..];
    }
    lines
}

/// Python's `startswith` and `endswith` accept a string or a tuple of strings.
fn any_affix(affixes: &Value, test: impl Fn(&str) -> bool) -> Result<bool, Error> {
    if let Some(affix) = affixes.as_str() {
        return Ok(test(affix));
    }
    if affixes.kind() != ValueKind::Seq {
        return Err(invalid("startswith and endswith take a string or a tuple of strings"));
    }
    for affix in affixes.try_iter()? {
        if test(affix.as_str().ok_or_else(|| invalid("startswith and endswith take strings"))?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Python's `str.title()`.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        match in_word {
            true => titled.extend(c.to_lowercase()),
            false => titled.extend(c.to_uppercase()),
        }
        in_word = c.is_alphabetic();
    }
    titled
}

/// `text[start..end]` in characters, with Python's negative indices, and the bytes before it.
fn slice(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    if start.is_none() && end.is_none() {
        return Some((0, text));
    }
    let count = text.chars().count() as i64;
    let clamp = |index: i64| if index < 0 { (index + count).max(0) } else { index.min(count) } as usize;
    if start.is_some_and(|start| start > count) {
        return None;
    }
    let byte = |index: usize| text.char_indices().nth(index).map_or(text.len(), |(place, _)| place);
    let (start, end) = (byte(clamp(start.unwrap_or(0))), byte(clamp(end.unwrap_or(count))));
    (start <= end).then(|| (start, &text[start..end]))
}

/// The result of a string method, or `None` if minijinja-contrib's has to do.
fn string_method(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let bounded = |args: &[Value]| -> Result<(Value, Option<i64>, Option<i64>), Error> { from_args(args) };
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => {
            let (separator, maximum, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = match separator {
                Some(separator) => Some(separator),
                None => kwargs.get("sep")?,
            };
            let maximum = match maximum {
                Some(maximum) => maximum,
                None => kwargs.get::<Option<i64>>("maxsplit")?.unwrap_or(-1),
            };
            kwargs.assert_all_used()?;
            let separator = match &separator {
                None => None,
                Some(separator) if separator.is_none() => None,
                Some(separator) => Some(separator.as_str().ok_or_else(|| invalid("split: separator is no string"))?),
            };
            Value::from(if method == "split" {
                split(text, separator, maximum)?
            } else {
                rsplit(text, separator, maximum)?
            })
        }
        "splitlines" => {
            let (keep_ends, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
            let keep_ends = keep_ends.or(kwargs.get("keepends")?).unwrap_or(false);
            kwargs.assert_all_used()?;
            Value::from(split_lines(text, keep_ends))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            if separator.is_empty() {
                return Err(invalid("partition: empty separator"));
            }
            let place = if method == "partition" { text.find(separator) } else { text.rfind(separator) };
            let parts = match place {
                Some(place) => [&text[..place], separator, &text[place + separator.len()..]],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Value::from(minijinja::value::Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => {
            let (affix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(affix).unwrap_or(text))
        }
        "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(affix).unwrap_or(text))
        }
        "startswith" | "endswith" => {
            let (affixes, start, end) = bounded(args)?;
            let Some((_, part)) = slice(text, start, end) else { return Ok(Some(Value::from(false))) };
            Value::from(any_affix(&affixes, |affix| match method {
                "startswith" => part.starts_with(affix),
                _ => part.ends_with(affix),
            })?)
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (what, start, end) = bounded(args)?;
            let what = what.as_str().ok_or_else(|| invalid("find: the argument is no string"))?;
            let found = slice(text, start, end).and_then(|(offset, part)| {
                let place = if method.starts_with('r') { part.rfind(what) } else { part.find(what) };
                place.map(|place| text[..offset + place].chars().count() as i64)
            });
            match found {
                Some(place) => Value::from(place),
                None if method.ends_with("index") => return Err(invalid("substring not found")),
                None => Value::from(-1),
            }
        }
        "count" => {
            let (what, start, end) = bounded(args)?;
            let what = what.as_str().ok_or_else(|| invalid("count: the argument is no string"))?;
            Value::from(slice(text, start, end).map_or(0, |(_, part)| part.matches(what).count()))
        }
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text))
        }
        "isspace" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(is_space))
        }
        "isdigit" | "isdecimal" => {
            let () = from_args(args)?;
            Value::from(
                !text.is_empty() && text.chars().all(|c| c.is_ascii_digit() || (!c.is_ascii() && c.is_numeric())),
            )
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        "zfill" | "ljust" | "rjust" | "center" => {
            let (width, fill): (i64, Option<&str>) = from_args(args)?;
            let fill = if method == "zfill" { "0" } else { fill.unwrap_or(" ") };
            if fill.chars().count() != 1 {
                return Err(invalid("the fill character must be exactly one character long"));
            }
            let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
            state.consume_fuel(missing as u64)?;
            Value::from(pad(text, method, fill, missing))
        }
        "encode" | "format_map" | "translate" | "maketrans" => {
            let _: (Rest<Value>,) = from_args(args)?;
            return Err(invalid("this string method is not supported in chat templates"));
        }
        _ => return Ok(None),
    }))
}

fn pad(text: &str, method: &str, fill: &str, missing: usize) -> String {
    match method {
        "ljust" => format!("{text}{}", fill.repeat(missing)),
        "rjust" => format!("{}{text}", fill.repeat(missing)),
        "center" => {
            // CPython puts the odd character to the left if the width is odd
            let width = missing + text.chars().count();
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left))
        }
        _ => match text.strip_prefix(['+', '-']) {
            Some(digits) => format!("{}{}{digits}", &text[..1], fill.repeat(missing)),
            None => format!("{}{text}", fill.repeat(missing)),
        },
    }
}
