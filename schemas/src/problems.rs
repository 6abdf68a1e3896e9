//! Everything that is wrong with a job, told at once: the path of the field, the value got, what is valid.

use std::fmt;

use serde::Serialize;

/// A place in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Position {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
}

impl Position {
    pub(crate) const START: Self = Self { line: 1, column: 1 };

    /// From what counts from 0.
    pub(crate) fn from_zero(line: u64, column: u64) -> Self {
        let number = |n: u64| u32::try_from(n.saturating_add(1)).unwrap_or(u32::MAX);
        Self { line: number(line), column: number(column) }
    }
}

/// One thing wrong with a job file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Problem {
    /// Path of the field, such as `extract.noise.tolerance` or `input.paths[1]`; empty for the whole file.
    pub field: String,
    /// What was got, as it stands in the file; `None` where nothing was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub got: Option<String>,
    /// What is wrong and what is valid.
    pub message: String,
    /// Where it stands in the file, as `line` and `column`; `None` for what no text was read for.
    #[serde(flatten)]
    pub position: Option<Position>,
}

impl Problem {
    /// A problem with a value that was given.
    pub fn new(field: impl Into<String>, got: impl fmt::Display, message: impl Into<String>) -> Self {
        Self { field: field.into(), got: Some(got.to_string()), message: message.into(), position: None }
    }

    /// A problem without a value to show, such as a missing field.
    pub fn missing(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), got: None, message: message.into(), position: None }
    }

    /// The problem with the place where it stands in the file.
    #[must_use]
    pub fn at(mut self, position: Position) -> Self {
        self.position = Some(position);
        self
    }

    /// In one line, as compilers tell: `job.yaml:12:3: input.path: …`; without a file `12:3: input.path: …`.
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

/// A list of problems, never empty when it is an error.
#[derive(Debug, Clone, Default, PartialEq, Serialize, thiserror::Error)]
#[serde(transparent)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// Adds a problem.
    pub fn push(&mut self, problem: Problem) {
        self.0.push(problem);
    }

    /// Whether a problem with this field, or with a field that holds it, is already told.
    pub fn touches(&self, field: &str) -> bool {
        self.0.iter().any(|p| {
            p.field == field
                || (field.starts_with(&p.field) && matches!(field.as_bytes().get(p.field.len()), Some(b'.' | b'[')))
                || p.field.is_empty()
        })
    }

    /// Sorts them by where they stand; those without a place come last.
    pub fn sort(&mut self) {
        self.0.sort_by_key(|p| p.position.map_or((1, Position { line: 0, column: 0 }), |position| (0, position)));
    }

    /// All of them, a line for each, with the name of the file.
    pub fn render(&self, file: Option<&str>) -> String {
        let n = self.0.len();
        let mut text = format!("the job file has {n} problem{}", if n == 1 { "" } else { "s" });
        for problem in &self.0 {
            text.push_str("\n  ");
            text.push_str(&problem.render(file));
        }
        text
    }

    /// `Ok` when nothing is wrong.
    pub fn into_result(self) -> Result<(), Problems> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(None))
    }
}
