//! How much one client may ask: a bucket of tokens for each user, or each address without one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use metrics::gauge;

/// Clients that are remembered; when there are more, those with a full bucket are forgotten.
const CLIENTS: usize = 10_000;

/// So many requests a minute, a minute's worth at once.
pub struct Rate {
    per_minute: f64,
    buckets: Mutex<HashMap<String, Bucket>>,
}

#[derive(Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Rate {
    pub fn new(per_minute: u32) -> Self {
        Self { per_minute: f64::from(per_minute), buckets: Mutex::default() }
    }

    /// Takes one.
    ///
    /// # Errors
    /// Seconds until there is one.
    pub fn take(&self, client: &str, now: Instant) -> Result<(), u64> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let full = self.per_minute;
        let filled = |b: &Bucket| (b.left + now.saturating_duration_since(b.at).as_secs_f64() * full / 60.0).min(full);
        if buckets.len() >= CLIENTS && !buckets.contains_key(client) {
            buckets.retain(|_, b| filled(b) < full);
            if buckets.len() >= CLIENTS {
                return Err(1);
            }
        }
        let bucket = buckets.entry(client.to_owned()).or_insert(Bucket { left: full, at: now });
        let left = filled(bucket);
        *bucket = Bucket { left, at: now };
        if left < 1.0 {
            return Err(((1.0 - left) * 60.0 / full).ceil() as u64);
        }
        bucket.left = left - 1.0;
        Ok(())
    }
}

/// Live streams, counted.
pub struct Watchers {
    now: Arc<AtomicU32>,
    most: u32,
}

/// One of them.
pub struct Watcher(Arc<AtomicU32>);

impl Watchers {
    pub fn new(most: u32) -> Self {
        Self { now: Arc::default(), most }
    }

    /// One more; `None` when there are as many as there may be.
    pub fn enter(&self) -> Option<Watcher> {
        let entered = self.now.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < self.most).then_some(n + 1));
        entered.ok()?;
        let watcher = Watcher(Arc::clone(&self.now));
        watcher.show();
        Some(watcher)
    }
}

impl Watcher {
    fn show(&self) {
        gauge!("stillhouse_watchers").set(f64::from(self.0.load(Ordering::Relaxed)));
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        self.show();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_minutes_worth_at_once_and_then_at_the_rate() {
        let rate = Rate::new(60);
        let start = Instant::now();
        assert_eq!((0..60).filter(|_| rate.take("a", start).is_ok()).count(), 60);
        assert_eq!(rate.take("a", start), Err(1));
        assert_eq!(rate.take("b", start), Ok(()));
        assert_eq!(rate.take("a", start + Duration::from_millis(1100)), Ok(()));
        assert_eq!(rate.take("a", start + Duration::from_millis(1200)), Err(1));
    }

    #[test]
    fn clients_that_are_remembered_are_bounded() {
        let rate = Rate::new(60);
        let start = Instant::now();
        for n in 0..CLIENTS {
            rate.take(&n.to_string(), start).unwrap();
        }
        assert_eq!(rate.take("one more", start), Err(1));
        assert_eq!(rate.take("0", start), Ok(()));
        assert_eq!(rate.take("one more", start + Duration::from_secs(60)), Ok(()));
        assert_eq!(rate.buckets.lock().unwrap().len(), 1);
    }

    #[test]
    fn streams_are_counted() {
        let watchers = Watchers::new(2);
        let (first, second) = (watchers.enter().unwrap(), watchers.enter());
        assert!(second.is_some() && watchers.enter().is_none());
        drop(first);
        assert!(watchers.enter().is_some());
    }
}
