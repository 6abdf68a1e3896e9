//! The source of a template in minijinja's dialect.
//!
//! | source | becomes | because |
//! |---|---|---|
//! | `{%- generation %}` … `{%- endgeneration %}` | `{%- call … %}` … `{%- endcall %}` | minijinja does not know the tag |
//! | `{% for x in y %}` | `{% for x in iterable((y)) %}` | minijinja takes None as an empty list, Python fails |
//! | `{% set x.a = y %}` | `{% set x.a = bounded((y), true) %}` | [`bounded`] keeps a loop from building a value of any depth, whose drop would overflow the stack |
//!
//! Delimiters and white space control stay as they are.

use std::collections::BTreeSet;
use std::ops::Range;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

use crate::ChatError;
use crate::generation::FUNCTION;

/// Name of [`iterable`].
pub(crate) const ITERABLE: &str = "__stillhouse_iterable";

/// Name of [`bounded`].
pub(crate) const BOUNDED: &str = "__stillhouse_bounded";

/// Deepest value that a template can assign. JSON that was read has at most 128 levels.
const MAX_DEPTH: usize = 200;

/// Most items of a value that a template assigns, with those of its items.
const MAX_ITEMS: u64 = 4_000_000;

/// Python's `iter()` fails on None.
pub(crate) fn iterable(value: Value) -> Result<Value, Error> {
    match value.is_none() {
        true => Err(Error::new(ErrorKind::InvalidOperation, "None is not iterable")),
        false => Ok(value),
    }
}

/// The value, unless it has too many levels or contains a namespace, which a template could make contain itself.
pub(crate) fn bounded(state: &State, value: Value, to_namespace: bool) -> Result<Value, Error> {
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        let mut items = 0;
        walk(&value, if to_namespace { 1 } else { 0 }, &mut items)?;
        state.consume_fuel(items / 4)?;
    }
    Ok(value)
}

fn walk(value: &Value, depth: usize, items: &mut u64) -> Result<(), Error> {
    let invalid = |problem: String| Err(Error::new(ErrorKind::InvalidOperation, problem));
    *items += 1;
    if depth > MAX_DEPTH {
        return invalid(format!("the template builds a value of more than {MAX_DEPTH} levels"));
    }
    if *items > MAX_ITEMS {
        return invalid(format!("the template builds a value of more than {MAX_ITEMS} items"));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                walk(&item, depth + 1, items)?;
            }
        }
        ValueKind::Map => {
            let Some(object) = value.as_object() else { return Ok(()) };
            if depth > 0 && object.type_name().ends_with("::Namespace") {
                return invalid("the template stores a namespace in another value".into());
            }
            for (_, item) in object.try_iter_pairs().into_iter().flatten() {
                walk(&item, depth + 1, items)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Whether the source has generation blocks.
pub(crate) fn has_blocks(source: &str) -> bool {
    tags(source).iter().any(|tag| tag.name == "generation" && source[tag.body.clone()].trim() == "generation")
}

/// The source in minijinja's dialect, without carriage returns, as Jinja2's lexer takes it.
pub(crate) fn rewrite(source: &str) -> Result<String, ChatError> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let tags = tags(&source);
    let call = call(&source, &tags);
    let mut text = String::with_capacity(source.len());
    let mut copied = 0;
    let mut open = 0usize;
    for tag in tags {
        let body = &source[tag.body.clone()];
        // the tags of the extension have no arguments
        let alone = body.trim() == tag.name;
        let replacement = match tag.name {
            "generation" if alone => {
                open += 1;
                call.clone()
            }
            "endgeneration" if alone => {
                let closed = ChatError::Template("{% endgeneration %} without {% generation %}".into());
                open = open.checked_sub(1).ok_or(closed)?;
                " endcall ".to_string()
            }
            "for" => match for_iterable(body) {
                Some(range) => wrap(body, range, ITERABLE, ""),
                None => continue,
            },
            "set" => match body.find('=').filter(|&equals| is_target(&body[..equals])) {
                Some(equals) if body[..equals].contains('.') => wrap(body, equals + 1..body.len(), BOUNDED, ", true"),
                Some(equals) if body[equals..].contains(['(', '[', '{', '|']) => {
                    wrap(body, equals + 1..body.len(), BOUNDED, ", false")
                }
                _ => continue,
            },
            _ => continue,
        };
        text.push_str(&source[copied..tag.body.start]);
        text.push_str(&replacement);
        copied = tag.body.end;
    }
    if open > 0 {
        return Err(ChatError::Template("{% generation %} without {% endgeneration %}".into()));
    }
    text.push_str(&source[copied..]);
    Ok(text)
}

/// Whether `text` can stand before the `=` of a `set` tag: a block assignment can have a `=` in a filter's arguments.
fn is_target(text: &str) -> bool {
    text.chars().all(|c| c.is_alphanumeric() || c.is_whitespace() || "_.,()".contains(c))
}

/// The body with a call of `function` around the expression at `range`.
fn wrap(body: &str, range: Range<usize>, function: &str, arguments: &str) -> String {
    let expression = body[range.clone()].trim();
    format!("{} {function}(({expression}){arguments}) {}", &body[..range.start], &body[range.end..])
}

/// The opening tag of a call block. minijinja's macros see a variable of their surroundings only where they read it, and
/// `{% set name.attribute = … %}` does not count as that; a parameter's default value does.
fn call(source: &str, tags: &[Tag]) -> String {
    let mut names = BTreeSet::new();
    for tag in tags.iter().filter(|tag| tag.name == "set") {
        let target = source[tag.body.clone()].trim_start().trim_start_matches("set").trim_start();
        let name = target.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default();
        if !name.is_empty() && target[name.len()..].trim_start().starts_with('.') {
            names.insert(name);
        }
    }
    let parameters = names.iter().enumerate().map(|(index, name)| format!("__stillhouse_{index}={name}"));
    match names.is_empty() {
        true => format!(" call {FUNCTION}() "),
        false => format!(" call({}) {FUNCTION}() ", parameters.collect::<Vec<_>>().join(", ")),
    }
}

/// The expression that a `for` tag iterates over: after the first `in`, up to a filter condition or `recursive`.
fn for_iterable(body: &str) -> Option<Range<usize>> {
    let bytes = body.as_bytes();
    let (mut start, mut depth, mut quote, mut place) = (None, 0usize, None, 0);
    while place < bytes.len() {
        let byte = bytes[place];
        match quote {
            Some(_) if byte == b'\\' => place += 1,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None => match byte {
                b'"' | b'\'' => quote = Some(byte),
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ if byte.is_ascii_alphanumeric() || byte == b'_' => {
                    let word = bytes[place..].iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_');
                    let end = place + word.count();
                    match (start, &body[place..end]) {
                        (None, "in") if depth == 0 => start = Some(end),
                        (Some(start), "if" | "recursive") if depth == 0 => return Some(start..place),
                        _ => {}
                    }
                    place = end - 1;
                }
                _ => {}
            },
        }
        place += 1;
    }
    start.map(|start| start..body.len())
}

/// A block tag: `body` is what its delimiters and white space control enclose.
struct Tag<'a> {
    name: &'a str,
    body: Range<usize>,
}

/// The block tags outside comments, expressions and raw blocks.
fn tags(source: &str) -> Vec<Tag<'_>> {
    let mut tags = Vec::new();
    let mut place = 0;
    while let Some(open) = source[place..].find('{').map(|offset| place + offset) {
        let rest = &source[open..];
        if rest.starts_with("{#") {
            place = rest.find("#}").map_or(source.len(), |end| open + end + 2);
        } else if rest.starts_with("{{") {
            place = tag_end(source, open + 2, "}}") + 2;
        } else if rest.starts_with("{%") {
            let end = tag_end(source, open + 2, "%}");
            let body = trimmed(source, open + 2..end);
            let content = source[body.clone()].trim();
            let name = content.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default();
            place = end + 2;
            if name == "raw" && content == "raw" {
                place = raw_end(source, place.min(source.len()));
            }
            tags.push(Tag { name, body });
        } else {
            place = open + 1;
        }
        if place >= source.len() {
            break;
        }
    }
    tags
}

/// `range` without the `-` and `+` of white space control.
fn trimmed(source: &str, range: Range<usize>) -> Range<usize> {
    let text = &source[range.clone()];
    let start = range.start + usize::from(text.starts_with(['-', '+']));
    let end = range.end - usize::from(text.len() > 1 && text.ends_with(['-', '+']));
    start..end.max(start)
}

/// Where the tag that is open at `start` ends, outside strings.
fn tag_end(source: &str, start: usize, close: &str) -> usize {
    let bytes = source.as_bytes();
    let mut quote = None;
    let mut place = start;
    while place < bytes.len() {
        let byte = bytes[place];
        match quote {
            Some(_) if byte == b'\\' => place += 1,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if byte == b'"' || byte == b'\'' => quote = Some(byte),
            None if bytes[place..].starts_with(close.as_bytes()) => return place,
            None => {}
        }
        place += 1;
    }
    source.len()
}

/// Where the content of a raw block that begins at `start` ends.
fn raw_end(source: &str, start: usize) -> usize {
    let mut place = start;
    while let Some(open) = source[place..].find("{%").map(|offset| place + offset) {
        let tail = source[open + 2..].trim_start_matches(['-', '+']).trim_start();
        if tail.starts_with("endraw") {
            return open;
        }
        place = open + 2;
    }
    source.len()
}
