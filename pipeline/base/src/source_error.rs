//! What can go wrong with the input: the file, the line or row, what was got, what is valid, and whether a retry can help.

use std::fmt;
use std::io;

use crate::file_state::Changed;
use crate::storage::{explain, is_retryable};

/// Where in a file a record is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordPosition {
    /// A line, from 1.
    Line(u64),
    /// A row of a columnar file, from 0.
    Row(u64),
    /// A member of an archive, by its name.
    Member(String),
    /// The file is the record.
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

/// The consumer of the batches is gone: the job was cancelled or another stage failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the next stage stopped")]
pub struct Stopped;

/// Reading, planning or querying the input failed.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The store could not give the bytes.
    #[error("{}", explain(error, "read", file))]
    Store {
        /// The file, as the job names it.
        file: String,
        /// What the store says; not told as a cause, because it repeats addresses.
        error: Box<object_store::Error>,
    },
    /// The file as a whole is not what the job says it is, or it is cut off.
    #[error("{file}: {message}")]
    Corrupt {
        /// The file, as the job names it.
        file: String,
        /// What was got and what is valid.
        message: String,
    },
    /// A bad record, with `on_error: fail`.
    #[error("{file}: {position}: {reason}: {message}; `input.on_error: skip` leaves such records out and counts them")]
    Record {
        /// The file, as the job names it.
        file: String,
        /// The line or the row.
        position: RecordPosition,
        /// The reason under which `on_error: skip` would count it.
        reason: &'static str,
        /// What was got and what is valid.
        message: String,
    },
    /// A file is another one than it was when the job began.
    #[error("{file} has changed since the job began: {change}; run the job again once it stays as it is")]
    Changed {
        /// The file, as the job names it.
        file: String,
        /// What it was, and what it is.
        change: Box<Changed>,
    },
    /// The plan names a file that the listing does not have.
    #[error(
        "{file}: is in the plan but not in the listing of the input; the input has changed since the plan was made"
    )]
    Unlisted {
        /// The file, as the plan names it.
        file: String,
    },
    /// A bound of the plan does not hold.
    #[error("{field}: {message}")]
    Plan {
        /// The field of the job file that decides it.
        field: String,
        /// What was got and what is valid.
        message: String,
    },
    /// Temporary files could not be written or read.
    #[error("{path}: {source}; long documents and queries need room for temporary files")]
    Temporary {
        /// Which temporary file.
        path: String,
        /// What the system says.
        source: io::Error,
    },
    /// The query failed.
    #[error("input.sql: {message}")]
    Sql {
        /// What DataFusion says.
        message: String,
        /// Whether the same query could succeed later.
        retryable: bool,
    },
    /// The consumer is gone.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl SourceError {
    /// Whether the same call could succeed later: a store that does not answer, a disk that is full for now.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Store { error, .. } => is_retryable(error),
            Self::Temporary { .. } => true,
            Self::Sql { retryable, .. } => *retryable,
            _ => false,
        }
    }

    /// What a store said, or that it has another file by now.
    pub fn of_store(file: &str, error: object_store::Error) -> Self {
        if let object_store::Error::Generic { source, .. } = &error
            && let Some(change) = source.downcast_ref::<Changed>()
        {
            return Self::Changed { file: file.into(), change: Box::new(change.clone()) };
        }
        Self::Store { file: file.into(), error: Box::new(error) }
    }

    /// An error of a reader over a store and perhaps a decoder: the store's own, else the file is corrupt.
    pub fn from_io(file: &str, error: io::Error) -> Self {
        let kind = error.kind();
        match error.downcast::<object_store::Error>() {
            Ok(error) => Self::of_store(file, error),
            Err(error) => Self::Corrupt {
                file: file.into(),
                message: match kind {
                    io::ErrorKind::UnexpectedEof => format!("is cut off: {error}"),
                    _ => format!("cannot be decoded: {error}"),
                },
            },
        }
    }

    /// A file as a whole is not what it should be.
    pub fn corrupt(file: &str, message: impl fmt::Display) -> Self {
        Self::Corrupt { file: file.into(), message: message.to_string() }
    }

    /// A temporary file failed.
    pub fn spool(source: io::Error) -> Self {
        Self::Temporary { path: "temporary file of a long document".into(), source }
    }
}

/// Why a record is bad. The texts are in manifests: they stay as they are.
pub mod reason {
    /// invalid UTF-8.
    pub const UTF8: &str = "invalid UTF-8";
    /// broken JSON.
    pub const JSON: &str = "broken JSON";
    /// missing column.
    pub const MISSING: &str = "missing column";
    /// null text.
    pub const NULL: &str = "null text";
    /// not a string.
    pub const TYPE: &str = "not a string";
    /// wrong number of fields.
    pub const FIELDS: &str = "wrong number of fields";
    /// value of another type.
    pub const VALUE: &str = "value of another type";
    /// too long for a query.
    pub const LONG: &str = "too long for a query";
}
