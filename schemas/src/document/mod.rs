//! Parses the text of a job file into a tree of values with positions.
//!
//! ```text
//!   text ─► json (begins with `{`) ─┐
//!        └► yaml ───────────────────┴─► Document: values for the schema, positions for problems, duplicate keys
//! ```
//!
//! The tree keeps duplicate keys, so that a problem can name both. Scalars follow the core schema of YAML 1.2: `yes`,
//! `on` and `0123` are text, `1e-3`, `0x10` and `0o17` are numbers, `~` is null.

mod json;
#[cfg(test)]
mod tests;
mod yaml;

use std::collections::HashMap;
use std::collections::hash_map;

use serde_json::{Map, Value};

use crate::problems::{Position, Problem};

/// Maximum nesting depth. A job has five levels.
const MAX_DEPTH: usize = 64;

/// The reason why a text cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SyntaxError {
    position: Position,
    message: String,
}

impl From<SyntaxError> for Problem {
    fn from(e: SyntaxError) -> Self {
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
    /// Null, a boolean, a number or a string.
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

/// A parsed text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Document {
    root: Node,
}

impl Document {
    /// Parses JSON if the text is JSON, else YAML.
    ///
    /// Cost: linear in the text. Nesting deeper than 64, and aliases that expand to more than a megabyte, are refused
    /// when they occur.
    ///
    /// # Errors
    /// The syntax error, with its position.
    pub fn read(text: &str) -> Result<Self, Problem> {
        let text = without_bom(text);
        let braces = text.trim_start().strip_prefix('{');
        let Some(inside) = braces else { return Ok(Self { root: yaml::read(text)? }) };
        let root = json::read(text).or_else(|not_json| {
            // braces can also hold a YAML mapping; if the first key is quoted, the text was meant as JSON
            let meant = inside.trim_start().starts_with('"');
            yaml::read(text).map_err(|not_yaml| if meant { not_json } else { not_yaml })
        });
        Ok(Self { root: root? })
    }

    /// Parses JSON only.
    ///
    /// # Errors
    /// As [`Document::read`].
    pub fn read_json(text: &str) -> Result<Self, Problem> {
        Ok(Self { root: json::read(without_bom(text))? })
    }

    /// The values. For a duplicate key, the first value.
    pub fn value(&self) -> Value {
        value(&self.root)
    }

    /// Returns up to `max` keys that occur twice in one mapping, at any depth.
    pub fn duplicate_keys(&self, max: usize) -> Vec<Problem> {
        let mut found = Vec::new();
        collect_duplicate_keys(&self.root, "", max, &mut found);
        found
    }

    /// Whether the text contains a field such as `input.paths[1]`.
    pub fn has(&self, field: &str) -> bool {
        let (mut node, mut rest) = (&self.root, field);
        while let Some((inner, _, after)) = step(node, rest) {
            (node, rest) = (inner, after);
        }
        rest.is_empty()
    }

    /// Position of a field such as `input.paths[1]`: its key, or the item of a list. For a missing field, the position
    /// of the innermost parent that exists.
    pub fn position(&self, field: &str) -> Position {
        let (mut node, mut at, mut rest) = (&self.root, self.root.position, field);
        while let Some((inner, position, after)) = step(node, rest) {
            (node, at, rest) = (inner, position, after);
        }
        at
    }
}

/// Removes a byte order mark, which some editors write at the start of a file.
fn without_bom(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// Descends one level along a path. Returns the node, its position and the rest of the path.
fn step<'a, 'p>(node: &'a Node, path: &'p str) -> Option<(&'a Node, Position, &'p str)> {
    match &node.kind {
        _ if path.is_empty() => None,
        Kind::Scalar(_) => None,
        Kind::Map(entries) => {
            let fits = |e: &&Entry| {
                path.strip_prefix(e.key.as_str()).is_some_and(|r| r.is_empty() || r.starts_with(['.', '[']))
            };
            // names may contain dots, so the longest key that fits wins
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

fn collect_duplicate_keys(node: &Node, path: &str, max: usize, found: &mut Vec<Problem>) {
    match &node.kind {
        Kind::Scalar(_) => {}
        Kind::List(items) => {
            for (i, item) in items.iter().enumerate() {
                collect_duplicate_keys(item, &format!("{path}[{i}]"), max, found);
            }
        }
        Kind::Map(entries) => {
            let mut seen: HashMap<&str, Position> = HashMap::with_capacity(entries.len());
            for entry in entries {
                if found.len() >= max {
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
                collect_duplicate_keys(&entry.node, &field, max, found);
            }
        }
    }
}
