//! Builds a tree from the events of a YAML parser.

use std::collections::HashMap;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Tag};
use serde_json::{Number, Value};

use super::{Entry, Kind, MAX_DEPTH, Node, Position, SyntaxError};

/// Maximum bytes that all aliases together may expand to. Otherwise a few lines of text could fill the memory.
const MAX_ALIAS_BYTES: usize = 1_000_000;

/// Parses one document.
pub(super) fn read(text: &str) -> Result<Node, SyntaxError> {
    check_printable(text)?;
    let mut composer = Composer::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|e| SyntaxError {
            position: position(e.marker()),
            message: format!("is not YAML: {}", e.info()),
        })?;
        composer.handle(event, position(&span.start))?;
    }
    Ok(composer.root.unwrap_or(Node { position: Position::START, kind: Kind::Scalar(Value::Null) }))
}

/// Refuses control characters, which YAML forbids. The parser would let them pass into file names.
fn check_printable(text: &str) -> Result<(), SyntaxError> {
    let is_forbidden = |c: char| {
        (c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\u{85}')) || matches!(c, '\u{fffe}' | '\u{ffff}')
    };
    let Some((at, found)) = text.char_indices().find(|(_, c)| is_forbidden(*c)) else { return Ok(()) };
    let before = &text[..at];
    let (line, start) = (before.matches('\n').count(), before.rfind('\n').map_or(0, |end| end + 1));
    let position = Position::from_zero_based(line as u64, before[start..].chars().count() as u64);
    Err(SyntaxError { position, message: format!("is not YAML: has the control character U+{:04X}", u32::from(found)) })
}

fn position(marker: &Marker) -> Position {
    Position::from_zero_based((marker.line() as u64).saturating_sub(1), marker.col() as u64)
}

/// A list or mapping whose end has not been reached.
struct OpenCollection {
    anchor: usize,
    position: Position,
    contents: Contents,
}

enum Contents {
    List(Vec<Node>),
    /// The entries, and the key that waits for its value.
    Map(Vec<Entry>, Option<(String, Position)>),
}

#[derive(Default)]
struct Composer {
    open: Vec<OpenCollection>,
    anchors: HashMap<usize, Node>,
    alias_bytes: usize,
    root: Option<Node>,
}

impl Composer {
    fn handle(&mut self, event: Event<'_>, at: Position) -> Result<(), SyntaxError> {
        match event {
            Event::DocumentStart(_) if self.root.is_some() => {
                refuse(at, "holds more than one document; a job file is one, without a second ---")
            }
            Event::Scalar(text, style, anchor, tag) => {
                if let Some(key) = self.key_slot() {
                    *key = Some((text.clone().into_owned(), at));
                    if anchor != 0 {
                        self.anchors.insert(anchor, Node { position: at, kind: Kind::Scalar(text.as_ref().into()) });
                    }
                    return Ok(());
                }
                let value = scalar(&text, style, tag.as_deref(), at)?;
                self.attach(anchor, Node { position: at, kind: Kind::Scalar(value) })
            }
            Event::SequenceStart(anchor, tag) => {
                check_tag(tag.as_deref(), "seq", at)?;
                self.begin(anchor, at, Contents::List(Vec::new()))
            }
            Event::MappingStart(anchor, tag) => {
                check_tag(tag.as_deref(), "map", at)?;
                self.begin(anchor, at, Contents::Map(Vec::new(), None))
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(anchor) => self.expand_alias(anchor, at),
            Event::DocumentStart(_) | Event::DocumentEnd | Event::StreamStart | Event::StreamEnd | Event::Nothing => {
                Ok(())
            }
        }
    }

    /// The slot for the next key, if the next event must be one.
    fn key_slot(&mut self) -> Option<&mut Option<(String, Position)>> {
        match self.open.last_mut() {
            Some(OpenCollection { contents: Contents::Map(_, key @ None), .. }) => Some(key),
            _ => None,
        }
    }

    fn begin(&mut self, anchor: usize, position: Position, contents: Contents) -> Result<(), SyntaxError> {
        if self.key_slot().is_some() {
            return refuse(position, "has a list or a mapping for a key; valid: text");
        }
        if self.open.len() >= MAX_DEPTH {
            return refuse(position, &format!("has more than {MAX_DEPTH} levels, one inside of the other"));
        }
        self.open.push(OpenCollection { anchor, position, contents });
        Ok(())
    }

    fn end(&mut self) -> Result<(), SyntaxError> {
        let Some(OpenCollection { anchor, position, contents }) = self.open.pop() else { return Ok(()) };
        let kind = match contents {
            Contents::List(items) => Kind::List(items),
            Contents::Map(entries, _) => Kind::Map(entries),
        };
        self.attach(anchor, Node { position, kind })
    }

    fn expand_alias(&mut self, anchor: usize, at: Position) -> Result<(), SyntaxError> {
        let Some(anchored) = self.anchors.get(&anchor) else {
            return refuse(at, "has an alias inside of what it stands for");
        };
        self.alias_bytes = self.alias_bytes.saturating_add(approximate_bytes(anchored));
        if self.alias_bytes > MAX_ALIAS_BYTES {
            return refuse(at, &format!("has aliases that stand for more than {MAX_ALIAS_BYTES} bytes"));
        }
        let node = Node { position: at, kind: anchored.kind.clone() };
        if let Some(key) = self.key_slot() {
            let Kind::Scalar(value) = node.kind else {
                return refuse(at, "has a list or a mapping for a key; valid: text");
            };
            *key = Some((value.as_str().map_or_else(|| value.to_string(), str::to_owned), at));
            return Ok(());
        }
        self.attach(0, node)
    }

    /// Adds a value to the innermost open list or mapping, or makes it the root.
    fn attach(&mut self, anchor: usize, node: Node) -> Result<(), SyntaxError> {
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut().map(|open| &mut open.contents) {
            None => self.root = Some(node),
            Some(Contents::List(items)) => items.push(node),
            Some(Contents::Map(entries, key)) => {
                if let Some((key, position)) = key.take() {
                    entries.push(Entry { position, key, node });
                }
            }
        }
        Ok(())
    }
}

fn refuse(position: Position, message: &str) -> Result<(), SyntaxError> {
    Err(SyntaxError { position, message: message.into() })
}

/// Approximate bytes of a copy.
fn approximate_bytes(node: &Node) -> usize {
    const NODE_BYTES: usize = 64;
    NODE_BYTES
        + match &node.kind {
            Kind::Scalar(Value::String(text)) => text.len(),
            Kind::Scalar(_) => 0,
            Kind::List(items) => items.iter().map(approximate_bytes).sum(),
            Kind::Map(entries) => entries.iter().map(|e| NODE_BYTES + e.key.len() + approximate_bytes(&e.node)).sum(),
        }
}

fn check_tag(tag: Option<&Tag>, expected: &str, at: Position) -> Result<(), SyntaxError> {
    match tag {
        None => Ok(()),
        Some(tag) if tag.is_yaml_core_schema() && tag.suffix == expected => Ok(()),
        Some(tag) => refuse(at, &format!("has the tag {tag}, which means nothing here; leave it out")),
    }
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>, at: Position) -> Result<Value, SyntaxError> {
    let Some(tag) = tag else {
        return Ok(if style == ScalarStyle::Plain { plain_scalar(text) } else { text.into() });
    };
    let wanted = match tag.is_yaml_core_schema() {
        true => tag.suffix.as_str(),
        // the tag `!` alone: the value is a string, whatever it looks like
        false if tag.handle.is_empty() && tag.suffix == "!" => "str",
        false => "",
    };
    let value = match (wanted, plain_scalar(text).as_f64()) {
        ("float", Some(number)) => number.into(),
        _ => plain_scalar(text),
    };
    let fits = match wanted {
        "str" => return Ok(text.into()),
        "null" => value.is_null(),
        "bool" => value.is_boolean(),
        "int" => value.is_i64() || value.is_u64(),
        "float" => value.is_number(),
        _ => {
            let message = format!("has the tag {tag}, which means nothing here; leave it out");
            return Err(SyntaxError { position: at, message });
        }
    };
    match fits {
        true => Ok(value),
        false => Err(SyntaxError { position: at, message: format!("has the tag !!{wanted} before what is none") }),
    }
}

/// Resolves a plain scalar: null, a boolean, a number, else text.
///
/// A value that is not a finite number (`.inf`, `.nan`, `1e999`) stays text, and is refused where a number is required.
fn plain_scalar(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return true.into(),
        "false" | "False" | "FALSE" => return false.into(),
        _ => {}
    }
    match integer(text).or_else(|| float(text)) {
        Some(number) => Value::Number(number),
        None => text.into(),
    }
}

fn integer(text: &str) -> Option<Number> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (radix, digits) = [("0x", 16), ("0o", 8), ("0b", 2)]
        .into_iter()
        .find_map(|(prefix, radix)| Some((radix, digits.strip_prefix(prefix)?)))
        .unwrap_or((10, digits));
    if digits.starts_with(['+', '-']) || (radix == 10 && has_leading_zero(digits)) {
        return None;
    }
    match text.starts_with('-') {
        true => i64::from_str_radix(&format!("-{digits}"), radix).ok().map(Number::from),
        false => u64::from_str_radix(digits, radix).ok().map(Number::from),
    }
}

/// `0123` is text, since its meaning differs between versions of YAML.
fn has_leading_zero(digits: &str) -> bool {
    digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit())
}

fn float(text: &str) -> Option<Number> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if !is_number || has_leading_zero(digits) {
        return None;
    }
    // std accepts one sign and no `_`, and returns infinity for values that are too large
    text.parse::<f64>().ok().and_then(Number::from_f64)
}
