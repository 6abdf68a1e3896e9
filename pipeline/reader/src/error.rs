//! What can go wrong when a data set is read; every message names the file or column and says what to do.

/// Why a data set cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Missing, unfinished, damaged or of a newer format.
    #[error("{0}")]
    DataSet(String),
    /// A column that is not there or has another type.
    #[error("{0}")]
    Column(String),
    /// A store refused or could not be reached.
    #[error("{0}")]
    Store(String),
    /// The call makes no sense: a row, split or option that is not there.
    #[error("{0}")]
    Usage(String),
}
