//! The text of a job file as a tree of values that know their places.
//!
//! ```text
//!   text ─► json (begins with `{`) ─┐
//!        └► yaml ───────────────────┴─► Document: values for the schema, places for the problems, keys that stand twice
//! ```
//!
//! The tree keeps every key, also one that stands twice, so that both can be told. Scalars mean what the core schema of YAML 1.2 says:
//! `yes`, `on` and `0123` are text, `1e-3`, `0x10` and `0o17` are numbers, `~` is null.

mod json;
#[cfg(test)]
mod tests;
mod yaml;

use std::collections::HashMap;
use std::collections::hash_map;

use serde_json::{Map, Value};

use crate::problems::{Position, Problem};

/// Deepest nesting: a job has five levels.
const DEEPEST: usize = 64;

/// Why a text gives no tree.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Unreadable {
    position: Position,
    message: String,
}

impl From<Unreadable> for Problem {
    fn from(e: Unreadable) -> Self {
        Problem::missing("", e.message).at(e.position)
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Node {
    position: Position,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq)]
enum Kind {
    /// Null, a boolean, a number or text.
    Scalar(Value),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Debug, Clone, PartialEq)]
struct Entry {
    position: Position,
    key: String,
    node: Node,
}

/// A text that was read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Document {
    root: Node,
}

impl Document {
    /// Reads JSON where the text is JSON, else YAML.
    ///
    /// Cost: linear in the text. Nesting deeper than 64 and aliases that would make a megabyte are refused when they are met.
    ///
    /// # Errors
    /// What is wrong, with its place.
    pub fn read(text: &str) -> Result<Self, Problem> {
        let text = without_mark(text);
        let braces = text.trim_start().strip_prefix('{');
        let Some(inside) = braces else { return Ok(Self { root: yaml::read(text)? }) };
        let root = json::read(text).or_else(|not_json| {
            // a mapping of YAML may stand in braces too; with quoted keys it was meant as JSON
            let meant = inside.trim_start().starts_with('"');
            yaml::read(text).map_err(|not_yaml| if meant { not_json } else { not_yaml })
        });
        Ok(Self { root: root? })
    }

    /// Reads JSON alone.
    ///
    /// # Errors
    /// As [`Document::read`].
    pub fn read_json(text: &str) -> Result<Self, Problem> {
        Ok(Self { root: json::read(without_mark(text))? })
    }

    /// The values. Of a key that stands twice the first.
    pub fn value(&self) -> Value {
        value(&self.root)
    }

    /// The keys that stand twice in one mapping, at any depth; at most `most`.
    pub fn twice(&self, most: usize) -> Vec<Problem> {
        let mut found = Vec::new();
        twice(&self.root, "", most, &mut found);
        found
    }

    /// Whether a field such as `input.paths[1]` stands there.
    pub fn has(&self, field: &str) -> bool {
        let (mut node, mut rest) = (&self.root, field);
        while let Some((inner, _, after)) = step(node, rest) {
            (node, rest) = (inner, after);
        }
        rest.is_empty()
    }

    /// Where a field such as `input.paths[1]` stands: its key, or the item of a list; of one that is not there, what would hold it.
    pub fn position(&self, field: &str) -> Position {
        let (mut node, mut at, mut rest) = (&self.root, self.root.position, field);
        while let Some((inner, position, after)) = step(node, rest) {
            (node, at, rest) = (inner, position, after);
        }
        at
    }
}

/// Editors of one system put a byte order mark before a text.
fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// One step down: what the path begins with, where that stands, the rest of the path.
fn step<'a, 'p>(node: &'a Node, path: &'p str) -> Option<(&'a Node, Position, &'p str)> {
    match &node.kind {
        _ if path.is_empty() => None,
        Kind::Scalar(_) => None,
        Kind::Map(entries) => {
            let fits = |e: &&Entry| {
                path.strip_prefix(e.key.as_str()).is_some_and(|r| r.is_empty() || r.starts_with(['.', '[']))
            };
            // names may hold dots, so the longest that fits is the one
            let entry = entries.iter().filter(fits).max_by_key(|e| e.key.len())?;
            let rest = &path[entry.key.len()..];
            Some((&entry.node, entry.position, rest.strip_prefix('.').unwrap_or(rest)))
        }
        Kind::List(items) => {
            let (index, rest) = path.strip_prefix('[')?.split_once(']')?;
            let item = items.get(index.parse::<usize>().ok()?)?;
            Some((item, item.position, rest.strip_prefix('.').unwrap_or(rest)))
        }
    }
}

fn value(node: &Node) -> Value {
    match &node.kind {
        Kind::Scalar(value) => value.clone(),
        Kind::List(items) => Value::Array(items.iter().map(value).collect()),
        Kind::Map(entries) => {
            let mut map = Map::new();
            for entry in entries {
                map.entry(&entry.key).or_insert_with(|| value(&entry.node));
            }
            Value::Object(map)
        }
    }
}

fn twice(node: &Node, path: &str, most: usize, found: &mut Vec<Problem>) {
    match &node.kind {
        Kind::Scalar(_) => {}
        Kind::List(items) => {
            for (i, item) in items.iter().enumerate() {
                twice(item, &format!("{path}[{i}]"), most, found);
            }
        }
        Kind::Map(entries) => {
            let mut seen: HashMap<&str, Position> = HashMap::with_capacity(entries.len());
            for entry in entries {
                if found.len() >= most {
                    return;
                }
                let field = if path.is_empty() { entry.key.clone() } else { format!("{path}.{}", entry.key) };
                match seen.entry(&entry.key) {
                    hash_map::Entry::Vacant(first) => {
                        first.insert(entry.position);
                    }
                    hash_map::Entry::Occupied(first) => {
                        let line = first.get().line;
                        let message = match line == entry.position.line {
                            true => format!("is given twice in line {line}; leave one out"),
                            false => format!("is given twice, in line {line} and here; leave one out"),
                        };
                        found.push(Problem::missing(&field, message).at(entry.position));
                    }
                }
                twice(&entry.node, &field, most, found);
            }
        }
    }
}
