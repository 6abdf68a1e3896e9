//! Calls that block, off the threads of the runtime.

use tokio::task::{JoinError, spawn_blocking};

/// Does what blocks (file systems, fsync, DNS, processes) on tokio's pool for that, and waits for it.
///
/// A thread of the runtime that waits for a disk makes every task on it wait: requests under way, leases to be renewed, answers of the
/// service. What was begun ends also where nobody waits for it any more.
///
/// # Errors
/// Those of the work; and that of the task where it panicked or the runtime ends.
pub async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<JoinError> + Send + 'static,
{
    spawn_blocking(work).await?
}
