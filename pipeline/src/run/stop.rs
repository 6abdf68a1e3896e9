//! Requests to stop a run. The run then cancels its remote work and releases its output, instead of leaving both
//! behind.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::output::Lock;

/// Time limit for cancelling remote work. Workers also notice the end of the run by themselves.
const CALLS_BACK: Duration = Duration::from_secs(2);
/// Time limit for releasing the output. Its lease also expires by itself.
const GIVES_FREE: Duration = Duration::from_secs(2);

/// A request to stop a run. Clones refer to the same run.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    asked: Arc<AtomicBool>,
    news: Arc<Notify>,
    /// Set by a request to stop, and by the run itself when a split fails.
    flag: Arc<AtomicBool>,
}

impl Stop {
    /// Requests the stop.
    pub fn ask(&self) {
        self.flag.store(true, Ordering::Relaxed);
        self.asked.store(true, Ordering::Relaxed);
        self.news.notify_waiters();
    }

    /// Completes once the stop was requested.
    pub async fn asked(&self) {
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // register before the check, so that a request between the check and the wait is not missed
            news.as_mut().enable();
            if self.asked.load(Ordering::Relaxed) {
                return;
            }
            news.await;
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
            () = self.asked() => Err(stopped()),
        }
    }

    /// Like [`Self::or`], for a run that holds its output. If work is remote, waits [`CALLS_BACK`] for its
    /// cancellation.
    pub(crate) async fn or_call_back<T>(&self, is_elsewhere: bool, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::pin!(work);
        let done = tokio::select! {
            biased;
            result = &mut work => return result,
            () = self.asked(), if !is_elsewhere => None,
            () = self.asked(), if is_elsewhere => tokio::time::timeout(CALLS_BACK, work).await.ok(),
        };
        match done {
            Some(Ok(done)) => Ok(done),
            Some(Err(_)) | None => Err(stopped()),
        }
    }
}

/// Releases an output after a run.
pub(crate) async fn release<T>(lock: Lock, result: &Result<T>) {
    match was_stopped(result) {
        false => lock.release().await,
        true => {
            if tokio::time::timeout(GIVES_FREE, lock.release()).await.is_err() {
                tracing::warn!("the output could not be given free in time; it becomes free by itself");
            }
        }
    }
}

/// Whether a run ended because of a request to stop.
pub(crate) fn was_stopped<T>(result: &Result<T>) -> bool {
    matches!(result, Err(e) if e.kind == ErrorKind::Cancelled)
}

fn stopped() -> PipelineError {
    PipelineError::new(
        ErrorKind::Cancelled,
        "told to stop; what is committed stays: run the same command again to go on",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_told_before_is_heard_and_work_that_ends_first_counts() {
        let stop = Stop::default();
        assert_eq!(stop.or(async { Ok(1) }).await.unwrap(), 1);
        let told = stop.clone();
        let waits = tokio::spawn(async move { told.or(std::future::pending::<Result<()>>()).await });
        stop.ask();
        assert!(was_stopped(&waits.await.unwrap()));
        assert!(was_stopped(&stop.or(std::future::pending::<Result<()>>()).await));
        // remote work sees the flag, ends by itself, and is awaited
        let flag = stop.flag();
        let called_back = async {
            tokio::task::yield_now().await;
            assert!(flag.load(Ordering::Relaxed));
            Err::<(), _>(PipelineError::new(ErrorKind::Output, "called back"))
        };
        assert!(was_stopped(&stop.or_call_back(true, called_back).await));
        let done = async {
            tokio::task::yield_now().await;
            Ok(7)
        };
        assert_eq!(stop.or_call_back(true, done).await.unwrap(), 7);
    }
}
