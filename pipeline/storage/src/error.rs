//! The error of a store that cannot be opened.

/// Invalid options, environment or profile file. No request was sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StorageError(pub(crate) String);
