//! Errors of the input: the file, the line or row, the value found, what is valid, and whether a retry can help.

use std::env;
use std::fmt;
use std::io;

use crate::file_state::Changed;
use crate::storage::{explain, is_retryable};

/// Position of a record in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordPosition {
    /// Line number, from 1.
    Line(u64),
    /// Row number in a columnar file, from 0.
    Row(u64),
    /// Name of a member of an archive.
    Member(String),
    /// The file holds one record.
    Whole,
}

impl fmt::Display for RecordPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Row(row) => write!(f, "row {row} (from 0)"),
            Self::Member(name) => write!(f, "member {name:?}"),
            Self::Whole => f.write_str("the image"),
        }
    }
}

/// The consumer of the batches stopped: the job was cancelled or another stage failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the next stage stopped")]
pub struct Stopped;

/// An error while reading, planning or querying the input.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The store failed to deliver the bytes.
    #[error("{}", explain(error, "read", file))]
    Store {
        /// The file, as the job names it.
        file: String,
        /// The store's error. It is not exposed as `source()`, because its text repeats addresses.
        error: Box<object_store::Error>,
    },
    /// The whole file is not in the declared format, or it is truncated.
    #[error("{file}: {message}")]
    Corrupt {
        /// The file, as the job names it.
        file: String,
        /// What was found and what is valid.
        message: String,
    },
    /// A bad record, with `on_error: fail`.
    #[error("{file}: {position}: {reason}: {message}; `input.on_error: skip` leaves such records out and counts them")]
    Record {
        /// The file, as the job names it.
        file: String,
        /// Position of the record.
        position: RecordPosition,
        /// The reason under which `on_error: skip` would count the record.
        reason: &'static str,
        /// What was found and what is valid.
        message: String,
    },
    /// The file changed after the job began.
    #[error("{file} has changed since the job began: {change}; run the job again once it stays as it is")]
    Changed {
        /// The file, as the job names it.
        file: String,
        /// The old and the new state.
        change: Box<Changed>,
    },
    /// The plan names a file that the listing does not contain.
    #[error(
        "{file}: is in the plan but not in the listing of the input; the input has changed since the plan was made"
    )]
    Unlisted {
        /// The file, as the plan names it.
        file: String,
    },
    /// The input exceeds a limit of the plan.
    #[error("{field}: {message}")]
    Plan {
        /// Field of the job file that sets the limit.
        field: String,
        /// What was found and what is valid.
        message: String,
    },
    /// A temporary file could not be written or read.
    #[error("{path}: {source}; long documents and queries need disk space for temporary files")]
    Temporary {
        /// The temporary file; for a file without a name, its folder.
        path: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The query failed.
    #[error("input.sql: {message}")]
    Sql {
        /// DataFusion's message.
        message: String,
        /// Whether the same query can succeed later.
        retryable: bool,
    },
    /// The tables could not be mixed.
    #[error("input.tables: {message}")]
    Mixture {
        /// What was found and what is valid.
        message: String,
        /// Whether the same mixture can succeed later.
        retryable: bool,
    },
    /// The consumer stopped.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl SourceError {
    /// Whether the same call can succeed later: the store does not answer, or the disk is full for now.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Store { error, .. } => is_retryable(error),
            Self::Temporary { .. } => true,
            Self::Sql { retryable, .. } | Self::Mixture { retryable, .. } => *retryable,
            _ => false,
        }
    }

    /// Converts a store error. A [`Changed`] inside it becomes [`SourceError::Changed`].
    pub fn from_store(file: &str, error: object_store::Error) -> Self {
        if let object_store::Error::Generic { source, .. } = &error
            && let Some(change) = source.downcast_ref::<Changed>()
        {
            return Self::Changed { file: file.into(), change: Box::new(change.clone()) };
        }
        Self::Store { file: file.into(), error: Box::new(error) }
    }

    /// Converts an error of a reader over a store, perhaps through a decoder: a store error keeps its type; any other
    /// error means that the file is corrupt.
    pub fn from_io(file: &str, error: io::Error) -> Self {
        let kind = error.kind();
        match error.downcast::<object_store::Error>() {
            Ok(error) => Self::from_store(file, error),
            Err(error) => Self::Corrupt {
                file: file.into(),
                message: match kind {
                    io::ErrorKind::UnexpectedEof => format!("is cut off: {error}"),
                    _ => format!("cannot be decoded: {error}"),
                },
            },
        }
    }

    /// The whole file is not what it should be.
    pub fn corrupt(file: &str, message: impl fmt::Display) -> Self {
        Self::Corrupt { file: file.into(), message: message.to_string() }
    }

    /// A temporary file without a name failed. The message names its folder, whose disk may be full.
    pub fn temporary_file(source: io::Error) -> Self {
        Self::Temporary { path: env::temp_dir().display().to_string(), source }
    }
}

/// Reasons why a record is bad. Manifests contain these texts, so they must not change.
pub mod reason {
    /// Invalid UTF-8.
    pub const UTF8: &str = "invalid UTF-8";
    /// Broken JSON.
    pub const JSON: &str = "broken JSON";
    /// Missing column.
    pub const MISSING: &str = "missing column";
    /// Null text.
    pub const NULL: &str = "null text";
    /// Not a string.
    pub const TYPE: &str = "not a string";
    /// Wrong number of fields.
    pub const FIELDS: &str = "wrong number of fields";
    /// Value of another type.
    pub const VALUE: &str = "value of another type";
    /// Too long for a query.
    pub const LONG: &str = "too long for a query";
    /// A value of `input.carry`, or the record that has it, is too long.
    pub const LONG_CARRIED: &str = "too long to carry";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_spool_names_the_folder_of_temporary_files() {
        let error = SourceError::temporary_file(io::Error::other("no space left"));
        let expected = format!(
            "{}: no space left; long documents and queries need disk space for temporary files",
            env::temp_dir().display()
        );
        assert_eq!((error.to_string(), error.retryable()), (expected, true));
    }
}
