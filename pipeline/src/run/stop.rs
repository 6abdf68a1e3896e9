//! Requests to stop a run. The run then cancels its remote work and releases its output, instead of leaving both
//! behind.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::output::Lock;

/// Time limit for work to end after a request to stop. Workers also notice the end of the run by themselves.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for releasing the output. Its lease also expires by itself.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// A request to stop a run. Clones refer to the same run.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    requested: Arc<AtomicBool>,
    notify: Arc<Notify>,
    /// Set by a request to stop, and by the run itself when a split fails.
    flag: Arc<AtomicBool>,
}

impl Stop {
    /// Requests the stop.
    pub fn request(&self) {
        self.flag.store(true, Ordering::Relaxed);
        self.requested.store(true, Ordering::Relaxed);
        self.notify.notify_waiters();
    }

    /// Completes once the stop was requested.
    pub async fn requested(&self) {
        loop {
            let notify = self.notify.notified();
            tokio::pin!(notify);
            // register before the check, so that a request between the check and the wait is not missed
            notify.as_mut().enable();
            if self.requested.load(Ordering::Relaxed) {
                return;
            }
            notify.await;
        }
    }

    /// Flag that is set by a request to stop, and by the run itself when a split fails.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.flag)
    }

    /// Runs `work` until it is done; a request to stop drops it.
    pub(crate) async fn or<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            result = work => result,
            () = self.requested() => Err(stopped()),
        }
    }

    /// Like [`Self::or`], for a run that holds its output. A request to stop gives the work [`END_TIMEOUT`] to end by itself:
    /// splits end at their next batch, a split that is being committed is also reported, and remote work is cancelled.
    pub(crate) async fn or_end<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::pin!(work);
        let ended = tokio::select! {
            biased;
            result = &mut work => return result,
            () = self.requested() => tokio::time::timeout(END_TIMEOUT, work).await,
        };
        match ended {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(_)) | Err(_) => Err(stopped()),
        }
    }
}

/// Releases an output after a run.
pub(crate) async fn release<T>(lock: Lock, result: &Result<T>) {
    match was_stopped(result) {
        false => lock.release().await,
        true => {
            if tokio::time::timeout(RELEASE_TIMEOUT, lock.release()).await.is_err() {
                tracing::warn!("cannot release the output in time; its lease expires by itself");
            }
        }
    }
}

/// Whether a run ended because of a request to stop.
pub(crate) fn was_stopped<T>(result: &Result<T>) -> bool {
    matches!(result, Err(e) if e.kind == ErrorKind::Cancelled)
}

fn stopped() -> PipelineError {
    PipelineError::new(ErrorKind::Cancelled, "stopped; committed splits stay: run the same command again to resume")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_told_before_is_heard_and_work_that_ends_first_counts() {
        let stop = Stop::default();
        assert_eq!(stop.or(async { Ok(1) }).await.unwrap(), 1);
        let other = stop.clone();
        let waits = tokio::spawn(async move { other.or(std::future::pending::<Result<()>>()).await });
        stop.request();
        assert!(was_stopped(&waits.await.unwrap()));
        assert!(was_stopped(&stop.or(std::future::pending::<Result<()>>()).await));
        // work that sees the flag and ends by itself is awaited
        let flag = stop.flag();
        let cancelled = async {
            tokio::task::yield_now().await;
            assert!(flag.load(Ordering::Relaxed));
            Err::<(), _>(PipelineError::new(ErrorKind::Output, "called back"))
        };
        assert!(was_stopped(&stop.or_end(cancelled).await));
        let done = async {
            tokio::task::yield_now().await;
            Ok(7)
        };
        assert_eq!(stop.or_end(done).await.unwrap(), 7);
    }
}
