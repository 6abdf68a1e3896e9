//! Answers about data sets that are kept for some seconds: who asks again, and everybody who asks meanwhile, has one worker answer.
//!
//! An answer is never of another job's data set, as it is kept by job. It is not given any more [`FRESH`] after it was made, nor once an attempt
//! at any job has begun or ended: what overwrote the data set may be another job's, or a run's that this service knows nothing of.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use moka::future::Cache;

use super::problem::Answer;
use crate::service::model::JobId;

/// How old an answer may be.
pub const FRESH: Duration = Duration::from_secs(5);
/// Bytes that are kept; an answer alone may have as many.
const MOST_BYTES: u64 = 64 << 20;

/// What is asked of a job's data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Asked {
    Manifest,
    /// With this row decoded.
    Report(u64),
}

/// A job, what is asked of its data set, and how many attempts had begun or ended by then.
type Key = (JobId, Asked, u64);

/// JSON, by what was asked.
pub struct Answers(Cache<Key, Bytes>);

impl Default for Answers {
    fn default() -> Self {
        let weight = |_: &Key, answer: &Bytes| u32::try_from(answer.len()).unwrap_or(u32::MAX).saturating_add(256);
        Self(Cache::builder().max_capacity(MOST_BYTES).weigher(weight).time_to_live(FRESH).build())
    }
}

impl Answers {
    /// What is kept.
    pub async fn kept(&self, key: &Key) -> Option<Bytes> {
        self.0.get(key).await
    }

    /// What is kept, or is being made for somebody else, or is made now.
    ///
    /// # Errors
    /// Of `make`; they are not kept.
    pub async fn kept_or(&self, key: Key, make: impl Future<Output = Answer<Bytes>>) -> Answer<Bytes> {
        self.0.try_get_with(key, make).await.map_err(Arc::unwrap_or_clone)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::service::api::problem::ProblemDetails;

    #[tokio::test]
    async fn what_many_ask_at_once_is_made_once_and_errors_are_not_kept() {
        let (answers, id, made) = (Answers::default(), JobId::new().unwrap(), AtomicU32::new(0));
        let ask = |row, attempts, works: bool| {
            let made = &made;
            answers.kept_or((id.clone(), Asked::Report(row), attempts), async move {
                tokio::task::yield_now().await;
                let nth = made.fetch_add(1, Ordering::Relaxed);
                if works { Ok(nth.to_string().into()) } else { Err(ProblemDetails::bad_request("no")) }
            })
        };
        assert!(ask(0, 0, false).await.is_err());
        let (first, second) = tokio::join!(ask(0, 0, true), ask(0, 0, true));
        assert_eq!((first.unwrap(), second.unwrap()), ("1".into(), "1".into()));
        assert_eq!(ask(0, 0, true).await.unwrap(), "1");
        // another row, and the same one after an attempt
        assert_eq!(ask(1, 0, true).await.unwrap(), "2");
        assert_eq!(ask(0, 1, true).await.unwrap(), "3");
        assert_eq!(answers.kept(&(id.clone(), Asked::Report(0), 1)).await.unwrap(), "3");
        assert_eq!(answers.kept(&(id.clone(), Asked::Manifest, 1)).await, None);
    }
}
