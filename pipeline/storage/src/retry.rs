//! The backoff policy for all retries: stores, the model hub, attempts of jobs, and clients of the service.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use chrono::{DateTime, Utc};
use http::header::RETRY_AFTER;
use http::{HeaderMap, StatusCode};

/// Exponential backoff with full jitter: the wait is random, up to a limit that doubles with every consecutive failure.
/// So clients that failed together do not retry together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The limit after the first failure.
    pub first: Duration,
    /// The largest limit.
    pub largest: Duration,
}

impl Backoff {
    /// Returns the upper limit of the wait after `failures` consecutive failures. A client that retries alone can wait
    /// this long.
    pub fn limit(&self, failures: u32) -> Duration {
        self.first.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(self.largest)
    }

    /// Returns the wait after `failures` consecutive failures: random, but at least as long as the service asked for.
    pub fn wait(&self, failures: u32, requested: Option<Duration>) -> Duration {
        let limit = self.limit(failures);
        // the keys of a `RandomState` are random enough for jitter
        let random = RandomState::new().build_hasher().finish();
        limit.mul_f64(random as f64 / u64::MAX as f64).max(requested.unwrap_or_default())
    }
}

/// The wait that a service asks for: `Retry-After` in seconds or as a date, or the hub's `RateLimit: "api";r=0;t=30`.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    let until = |text: &str| (DateTime::parse_from_rfc2822(text).ok()?.with_timezone(&Utc) - Utc::now()).to_std().ok();
    let asked = || {
        let text = text(RETRY_AFTER.as_str())?;
        text.parse().ok().map(Duration::from_secs).or_else(|| until(text))
    };
    let limited = || {
        let parts: Vec<_> = text("ratelimit")?.split(';').map(str::trim).collect();
        let seconds = parts.contains(&"r=0").then(|| parts.iter().find_map(|part| part.strip_prefix("t=")))??;
        seconds.trim().parse().ok().map(Duration::from_secs)
    };
    asked().or_else(limited)
}

/// Whether a response with this status may succeed when the request is sent again. 501, 505 and 507 are permanent: the
/// server does not implement the request, or its disk is full.
pub fn is_transient_status(status: StatusCode) -> bool {
    match status.as_u16() {
        501 | 505 | 507 => false,
        status => matches!(status, 408 | 425 | 429 | 500..),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_of_a_request_that_cannot_succeed_are_permanent() {
        let transient = |status| is_transient_status(StatusCode::from_u16(status).unwrap());
        for status in [408, 425, 429, 500, 502, 503, 504, 599] {
            assert!(transient(status), "{status}");
        }
        for status in [200, 307, 400, 401, 403, 404, 409, 412, 416, 501, 505, 507] {
            assert!(!transient(status), "{status}");
        }
    }

    #[test]
    fn limits_double_up_to_the_largest_and_a_service_may_ask_for_more() {
        let backoff = Backoff { first: Duration::from_millis(100), largest: Duration::from_secs(1) };
        let longest = |failures| (0..300).map(|_| backoff.wait(failures, None)).max().unwrap();
        for (failures, limit) in [(0, 100), (1, 100), (2, 200), (4, 800), (5, 1000), (u32::MAX, 1000)] {
            let (longest, limit) = (longest(failures), Duration::from_millis(limit));
            assert!(longest <= limit && longest > limit / 2, "{failures}: {longest:?}");
        }
        assert_eq!(backoff.wait(9, Some(Duration::from_secs(30))), Duration::from_secs(30));
    }

    #[test]
    fn services_ask_in_seconds_and_by_date() {
        let requested = |text: &str| retry_after(&HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]));
        assert_eq!(requested(" 7"), Some(Duration::from_secs(7)));
        assert!(requested(&(Utc::now() + Duration::from_secs(90)).to_rfc2822()).unwrap() > Duration::from_secs(60));
        assert_eq!((requested("soon"), requested("Wed, 21 Oct 2015 07:28:00 GMT")), (None, None));
    }
}
