//! Runs blocking calls outside the threads of the runtime.

use tokio::task::{JoinError, spawn_blocking};

/// Runs blocking work (file systems, fsync, DNS, processes) on tokio's pool for it, and awaits the result.
///
/// A runtime thread that blocks on a disk stalls every task on it: requests in progress, lease renewals, responses of
/// the service. Work that has begun runs to its end, even if the future is dropped.
///
/// # Errors
/// Errors of the work, and a `JoinError` if the work panicked or the runtime shut down.
pub async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<JoinError> + Send + 'static,
{
    spawn_blocking(work).await?
}
