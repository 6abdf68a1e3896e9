//! Telling a run to stop, from outside: it calls back what it has sent elsewhere and gives its output free, instead of leaving both behind.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::output::Lock;

/// How long a run waits until what it has sent elsewhere is called back. Those who make it see the end of the run by themselves too.
const CALLS_BACK: Duration = Duration::from_secs(2);
/// How long it tries to give its output free. A lease ends by itself too.
const GIVES_FREE: Duration = Duration::from_secs(2);

/// Tells a run to stop; its clones tell the same run.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    asked: Arc<AtomicBool>,
    news: Arc<Notify>,
    /// Set with it; the run itself sets it when a split has failed.
    flag: Arc<AtomicBool>,
}

impl Stop {
    /// Tells it.
    pub fn ask(&self) {
        self.flag.store(true, Ordering::Relaxed);
        self.asked.store(true, Ordering::Relaxed);
        self.news.notify_waiters();
    }

    /// Ends once it was told.
    pub async fn asked(&self) {
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // what is told between the look and the wait is heard
            news.as_mut().enable();
            if self.asked.load(Ordering::Relaxed) {
                return;
            }
            news.await;
        }
    }

    /// Set once it was told, or by the run itself when a split has failed.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.flag)
    }

    /// Works until it is done or told to stop, which drops it.
    pub(crate) async fn or<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            result = work => result,
            () = self.asked() => Err(stopped()),
        }
    }

    /// The same for a run that has its output. What others make for it is called back: it is waited for a little then.
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

/// Gives an output free after a run.
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

/// Whether a run ended because it was told to.
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
        // what sees the flag ends by itself, and is waited for where it is elsewhere
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
