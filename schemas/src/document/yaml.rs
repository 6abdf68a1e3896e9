//! Builds a tree from the events of a YAML parser.

use std::collections::HashMap;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Tag};
use serde_json::{Number, Value};

use super::{DEEPEST, Entry, Kind, Node, Position, Unreadable};

/// Maximum bytes that all aliases together may expand to. Otherwise a few lines of text could fill the memory.
const MOST_REPEATED: usize = 1_000_000;

/// Parses one document.
pub(super) fn read(text: &str) -> Result<Node, Unreadable> {
    printable(text)?;
    let mut composer = Composer::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|e| Unreadable {
            position: position(e.marker()),
            message: format!("is not YAML: {}", e.info()),
        })?;
        composer.take(event, position(&span.start))?;
    }
    Ok(composer.root.unwrap_or(Node { position: Position::START, kind: Kind::Scalar(Value::Null) }))
}

/// Refuses control characters, which YAML forbids. The parser would let them pass into file names.
fn printable(text: &str) -> Result<(), Unreadable> {
    let odd = |c: char| {
        (c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\u{85}')) || matches!(c, '\u{fffe}' | '\u{ffff}')
    };
    let Some((at, found)) = text.char_indices().find(|(_, c)| odd(*c)) else { return Ok(()) };
    let before = &text[..at];
    let (line, start) = (before.matches('\n').count(), before.rfind('\n').map_or(0, |end| end + 1));
    let position = Position::from_zero(line as u64, before[start..].chars().count() as u64);
    Err(Unreadable { position, message: format!("is not YAML: has the control character U+{:04X}", u32::from(found)) })
}

fn position(marker: &Marker) -> Position {
    Position::from_zero((marker.line() as u64).saturating_sub(1), marker.col() as u64)
}

/// A list or mapping whose end has not been reached.
struct Open {
    anchor: usize,
    position: Position,
    inside: Inside,
}

enum Inside {
    List(Vec<Node>),
    /// The entries, and the key that waits for its value.
    Map(Vec<Entry>, Option<(String, Position)>),
}

#[derive(Default)]
struct Composer {
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    repeated: usize,
    root: Option<Node>,
}

impl Composer {
    fn take(&mut self, event: Event<'_>, at: Position) -> Result<(), Unreadable> {
        match event {
            Event::DocumentStart(_) if self.root.is_some() => {
                refuse(at, "holds more than one document; a job file is one, without a second ---")
            }
            Event::Scalar(text, style, anchor, tag) => {
                if let Some(key) = self.awaited_key() {
                    *key = Some((text.clone().into_owned(), at));
                    if anchor != 0 {
                        self.anchors.insert(anchor, Node { position: at, kind: Kind::Scalar(text.as_ref().into()) });
                    }
                    return Ok(());
                }
                let value = scalar(&text, style, tag.as_deref(), at)?;
                self.hang(anchor, Node { position: at, kind: Kind::Scalar(value) })
            }
            Event::SequenceStart(anchor, tag) => {
                known(tag.as_deref(), "seq", at)?;
                self.begin(anchor, at, Inside::List(Vec::new()))
            }
            Event::MappingStart(anchor, tag) => {
                known(tag.as_deref(), "map", at)?;
                self.begin(anchor, at, Inside::Map(Vec::new(), None))
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(anchor) => self.repeat(anchor, at),
            Event::DocumentStart(_) | Event::DocumentEnd | Event::StreamStart | Event::StreamEnd | Event::Nothing => {
                Ok(())
            }
        }
    }

    /// The slot for the next key, if the next event must be one.
    fn awaited_key(&mut self) -> Option<&mut Option<(String, Position)>> {
        match self.open.last_mut() {
            Some(Open { inside: Inside::Map(_, key @ None), .. }) => Some(key),
            _ => None,
        }
    }

    fn begin(&mut self, anchor: usize, position: Position, inside: Inside) -> Result<(), Unreadable> {
        if self.awaited_key().is_some() {
            return refuse(position, "has a list or a mapping for a key; valid: text");
        }
        if self.open.len() >= DEEPEST {
            return refuse(position, &format!("has more than {DEEPEST} levels, one inside of the other"));
        }
        self.open.push(Open { anchor, position, inside });
        Ok(())
    }

    fn end(&mut self) -> Result<(), Unreadable> {
        let Some(Open { anchor, position, inside }) = self.open.pop() else { return Ok(()) };
        let kind = match inside {
            Inside::List(items) => Kind::List(items),
            Inside::Map(entries, _) => Kind::Map(entries),
        };
        self.hang(anchor, Node { position, kind })
    }

    fn repeat(&mut self, anchor: usize, at: Position) -> Result<(), Unreadable> {
        let Some(named) = self.anchors.get(&anchor) else {
            return refuse(at, "has an alias inside of what it stands for");
        };
        self.repeated = self.repeated.saturating_add(weight(named));
        if self.repeated > MOST_REPEATED {
            return refuse(at, &format!("has aliases that stand for more than {MOST_REPEATED} bytes"));
        }
        let node = Node { position: at, kind: named.kind.clone() };
        if let Some(key) = self.awaited_key() {
            let Kind::Scalar(value) = node.kind else {
                return refuse(at, "has a list or a mapping for a key; valid: text");
            };
            *key = Some((value.as_str().map_or_else(|| value.to_string(), str::to_owned), at));
            return Ok(());
        }
        self.hang(0, node)
    }

    /// Adds a value to the innermost open list or mapping, or makes it the root.
    fn hang(&mut self, anchor: usize, node: Node) -> Result<(), Unreadable> {
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut().map(|open| &mut open.inside) {
            None => self.root = Some(node),
            Some(Inside::List(items)) => items.push(node),
            Some(Inside::Map(entries, key)) => {
                if let Some((key, position)) = key.take() {
                    entries.push(Entry { position, key, node });
                }
            }
        }
        Ok(())
    }
}

fn refuse(position: Position, message: &str) -> Result<(), Unreadable> {
    Err(Unreadable { position, message: message.into() })
}

/// Approximate bytes of a copy.
fn weight(node: &Node) -> usize {
    const EACH: usize = 64;
    EACH + match &node.kind {
        Kind::Scalar(Value::String(text)) => text.len(),
        Kind::Scalar(_) => 0,
        Kind::List(items) => items.iter().map(weight).sum(),
        Kind::Map(entries) => entries.iter().map(|e| EACH + e.key.len() + weight(&e.node)).sum(),
    }
}

fn known(tag: Option<&Tag>, expected: &str, at: Position) -> Result<(), Unreadable> {
    match tag {
        None => Ok(()),
        Some(tag) if tag.is_yaml_core_schema() && tag.suffix == expected => Ok(()),
        Some(tag) => refuse(at, &format!("has the tag {tag}, which means nothing here; leave it out")),
    }
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>, at: Position) -> Result<Value, Unreadable> {
    let Some(tag) = tag else {
        return Ok(if style == ScalarStyle::Plain { plain(text) } else { text.into() });
    };
    let wanted = match tag.is_yaml_core_schema() {
        true => tag.suffix.as_str(),
        // the tag `!` alone: the value is a string, whatever it looks like
        false if tag.handle.is_empty() && tag.suffix == "!" => "str",
        false => "",
    };
    let value = match (wanted, plain(text).as_f64()) {
        ("float", Some(number)) => number.into(),
        _ => plain(text),
    };
    let fits = match wanted {
        "str" => return Ok(text.into()),
        "null" => value.is_null(),
        "bool" => value.is_boolean(),
        "int" => value.is_i64() || value.is_u64(),
        "float" => value.is_number(),
        _ => {
            let message = format!("has the tag {tag}, which means nothing here; leave it out");
            return Err(Unreadable { position: at, message });
        }
    };
    match fits {
        true => Ok(value),
        false => Err(Unreadable { position: at, message: format!("has the tag !!{wanted} before what is none") }),
    }
}

/// Resolves a plain scalar: null, a boolean, a number, else text.
///
/// A value that is not a finite number (`.inf`, `.nan`, `1e999`) stays text, and is refused where a number is required.
fn plain(text: &str) -> Value {
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
