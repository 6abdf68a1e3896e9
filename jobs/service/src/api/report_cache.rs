//! A cache of reports and manifests, so that repeated and concurrent requests share one worker.
//!
//! The key holds the job, so an answer never shows another job's data set. An entry expires after five seconds, because
//! a run outside of this service may overwrite the data set. It also expires when an attempt at any job begins or ends,
//! because that attempt may write to the same output.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use moka::future::Cache;

use super::problem::ApiResult;
use crate::model::JobId;

/// Age at which an entry expires.
const TIME_TO_LIVE: Duration = Duration::from_secs(5);
/// Size of the cache; one entry may fill it.
const MAX_BYTES: u64 = 64 << 20;

/// What a request reads of a job's data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DatasetQuery {
    Manifest,
    /// With this row decoded.
    Report(u64),
}

/// The job, the query, and the number of attempts that had begun or ended when the request came.
type Key = (JobId, DatasetQuery, u64);

/// Answers as JSON.
pub struct ReportCache(Cache<Key, Bytes>);

impl Default for ReportCache {
    fn default() -> Self {
        let weight = |_: &Key, answer: &Bytes| u32::try_from(answer.len()).unwrap_or(u32::MAX).saturating_add(256);
        Self(Cache::builder().max_capacity(MAX_BYTES).weigher(weight).time_to_live(TIME_TO_LIVE).build())
    }
}

impl ReportCache {
    /// The entry, if there is one.
    pub async fn get(&self, key: &Key) -> Option<Bytes> {
        self.0.get(key).await
    }

    /// The entry, or the result of `make`. Concurrent requests for the same key wait for one `make`.
    ///
    /// # Errors
    /// The error of `make`; the cache does not store errors.
    pub async fn get_or_make(&self, key: Key, make: impl Future<Output = ApiResult<Bytes>>) -> ApiResult<Bytes> {
        self.0.try_get_with(key, make).await.map_err(Arc::unwrap_or_clone)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::api::problem::ProblemDetails;

    #[tokio::test]
    async fn what_many_ask_at_once_is_made_once_and_errors_are_not_kept() {
        let (cache, id, made) = (ReportCache::default(), JobId::new().unwrap(), AtomicU32::new(0));
        let ask = |row, attempts, works: bool| {
            let made = &made;
            cache.get_or_make((id.clone(), DatasetQuery::Report(row), attempts), async move {
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
        assert_eq!(cache.get(&(id.clone(), DatasetQuery::Report(0), 1)).await.unwrap(), "3");
        assert_eq!(cache.get(&(id.clone(), DatasetQuery::Manifest, 1)).await, None);
    }
}
