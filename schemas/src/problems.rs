//! All problems of a job file, reported at once: the path of the field, the value found, what is valid.

use std::fmt;

use serde::Serialize;

/// A position in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Position {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
}

impl Position {
    pub(crate) const START: Self = Self { line: 1, column: 1 };

    /// Converts from numbers that count from 0.
    pub(crate) fn from_zero_based(line: u64, column: u64) -> Self {
        let number = |n: u64| u32::try_from(n.saturating_add(1)).unwrap_or(u32::MAX);
        Self { line: number(line), column: number(column) }
    }
}

/// One problem of a job file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Problem {
    /// Path of the field, such as `extract.noise.tolerance` or `input.paths[1]`; empty for the whole file.
    pub field: String,
    /// The value found, as written in the file; `None` if there is no value to show.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub got: Option<String>,
    /// What is wrong and what is valid.
    pub message: String,
    /// Line and column in the file; `None` if the job was not read from text.
    #[serde(flatten)]
    pub position: Option<Position>,
}

impl Problem {
    /// Creates a problem with the value found.
    pub fn new(field: impl Into<String>, got: impl fmt::Display, message: impl Into<String>) -> Self {
        Self { field: field.into(), got: Some(got.to_string()), message: message.into(), position: None }
    }

    /// Creates a problem without a value, such as a missing field.
    pub fn missing(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), got: None, message: message.into(), position: None }
    }

    /// Sets the position in the file.
    #[must_use]
    pub fn at(mut self, position: Position) -> Self {
        self.position = Some(position);
        self
    }

    /// Formats the problem in one line, as compilers do: `job.yaml:12:3: input.path: …`; without a file
    /// `12:3: input.path: …`.
    pub fn render(&self, file: Option<&str>) -> String {
        let position = self.position.map(|at| format!("{}:{}", at.line, at.column));
        let parts = file.map(str::to_owned).into_iter().chain(position);
        let head = parts.collect::<Vec<_>>().join(":");
        if head.is_empty() || self.position.is_none() { self.to_string() } else { format!("{head}: {self}") }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let field = if self.field.is_empty() { "job file" } else { &self.field };
        match &self.got {
            Some(got) => write!(f, "{field}: got {got}: {}", self.message),
            None => write!(f, "{field}: {}", self.message),
        }
    }
}

/// A list of problems. Never empty when it is an error.
#[derive(Debug, Clone, Default, PartialEq, Serialize, thiserror::Error)]
#[serde(transparent)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// Adds a problem.
    pub fn push(&mut self, problem: Problem) {
        self.0.push(problem);
    }

    /// Whether the list contains a problem with this field or one of its parents.
    pub fn touches(&self, field: &str) -> bool {
        self.0.iter().any(|p| {
            p.field == field
                || (field.starts_with(&p.field) && matches!(field.as_bytes().get(p.field.len()), Some(b'.' | b'[')))
                || p.field.is_empty()
        })
    }

    /// Sorts by position; problems without a position come last.
    pub fn sort(&mut self) {
        self.0.sort_by_key(|p| p.position.map_or((1, Position { line: 0, column: 0 }), |position| (0, position)));
    }

    /// Formats all problems, one per line, with the name of the file.
    pub fn render(&self, file: Option<&str>) -> String {
        let n = self.0.len();
        let mut text = format!("the job file has {n} problem{}", if n == 1 { "" } else { "s" });
        for problem in &self.0 {
            text.push_str("\n  ");
            text.push_str(&problem.render(file));
        }
        text
    }

    /// Returns `Ok` if the list is empty.
    pub fn into_result(self) -> Result<(), Problems> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(None))
    }
}
