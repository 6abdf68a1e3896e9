//! Errors of reading a data set. Every message names the file or the column, and the remedy.

/// The reason why a data set cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The data set is missing, unfinished, damaged or in a newer format.
    #[error("{0}")]
    DataSet(String),
    /// A column is missing or has another type.
    #[error("{0}")]
    Column(String),
    /// A store refused the request or is unreachable.
    #[error("{0}")]
    Store(String),
    /// The call is invalid: it names a row, split or option that does not exist.
    #[error("{0}")]
    Usage(String),
}
