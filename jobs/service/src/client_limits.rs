//! Limits per client: a token bucket of requests for each user, or each address without a token; live streams by user
//! and token; connections by address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use metrics::gauge;
use tokio::sync::watch;

use crate::store::tokens::Holder;
use crate::wait_until_set;

/// Most clients to remember. Beyond this number, those with a full bucket are dropped.
const MAX_CLIENTS: usize = 10_000;

/// A rate limit of requests per minute, with a burst of one minute's requests.
pub struct RateLimit {
    per_minute: f64,
    buckets: Mutex<HashMap<String, Bucket>>,
}

#[derive(Clone, Copy)]
struct Bucket {
    tokens: f64,
    updated: Instant,
}

impl RateLimit {
    pub fn new(per_minute: u32) -> Self {
        Self { per_minute: f64::from(per_minute), buckets: Mutex::default() }
    }

    /// Takes one request from the client's bucket.
    ///
    /// # Errors
    /// Seconds until the bucket has a request.
    pub fn take(&self, client: &str, now: Instant) -> Result<(), u64> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let full = self.per_minute;
        let filled =
            |b: &Bucket| (b.tokens + now.saturating_duration_since(b.updated).as_secs_f64() * full / 60.0).min(full);
        if buckets.len() >= MAX_CLIENTS && !buckets.contains_key(client) {
            buckets.retain(|_, b| filled(b) < full);
            if buckets.len() >= MAX_CLIENTS {
                return Err(1);
            }
        }
        let bucket = buckets.entry(client.to_owned()).or_insert(Bucket { tokens: full, updated: now });
        let tokens = filled(bucket);
        *bucket = Bucket { tokens, updated: now };
        if tokens < 1.0 {
            return Err(((1.0 - tokens) * 60.0 / full).ceil() as u64);
        }
        bucket.tokens = tokens - 1.0;
        Ok(())
    }
}

/// Most concurrent live streams.
#[derive(Debug, Clone, Copy)]
pub struct StreamLimits {
    pub all: u32,
    pub per_user: u32,
    pub per_token: u32,
}

/// Which limit of streams is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReachedLimit {
    All,
    User,
    Token,
}

/// Live streams, counted in total, by user and by token. The streams of a token end with it.
pub struct Watchers {
    open: Arc<Mutex<OpenStreams>>,
    limits: StreamLimits,
}

#[derive(Default)]
struct OpenStreams {
    all: u32,
    users: HashMap<String, u32>,
    tokens: HashMap<String, TokenStreams>,
}

struct TokenStreams {
    streams: u32,
    ended: watch::Sender<bool>,
}

/// An open live stream; dropping it frees its place.
pub struct Watcher {
    open: Arc<Mutex<OpenStreams>>,
    user: String,
    token: Option<String>,
    ended: Option<watch::Receiver<bool>>,
}

impl Watchers {
    pub fn new(limits: StreamLimits) -> Self {
        Self { open: Arc::default(), limits }
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// The limit that is reached.
    pub fn open(&self, holder: &Holder) -> Result<Watcher, ReachedLimit> {
        let mut open = lock(&self.open);
        let of_user = open.users.get(&holder.user).copied().unwrap_or_default();
        let of_token = holder.token.as_ref().and_then(|t| open.tokens.get(t)).map_or(0, |t| t.streams);
        // report the narrowest limit first: its holder can do something about it
        if holder.token.is_some() && of_token >= self.limits.per_token {
            return Err(ReachedLimit::Token);
        }
        if of_user >= self.limits.per_user {
            return Err(ReachedLimit::User);
        }
        if open.all >= self.limits.all {
            return Err(ReachedLimit::All);
        }
        open.all += 1;
        *open.users.entry(holder.user.clone()).or_default() += 1;
        let ended = holder.token.as_ref().map(|token| {
            let fresh = || TokenStreams { streams: 0, ended: watch::channel(false).0 };
            let of_token = open.tokens.entry(token.clone()).or_insert_with(fresh);
            of_token.streams += 1;
            of_token.ended.subscribe()
        });
        set_gauge(open.all);
        Ok(Watcher { open: Arc::clone(&self.open), user: holder.user.clone(), token: holder.token.clone(), ended })
    }

    /// Ids of the tokens with open streams.
    pub fn tokens(&self) -> Vec<String> {
        lock(&self.open).tokens.keys().cloned().collect()
    }

    /// Ends the streams of a token.
    pub fn end(&self, token: &str) {
        if let Some(of_token) = lock(&self.open).tokens.get(token) {
            of_token.ended.send_replace(true);
        }
    }
}

impl Watcher {
    /// Waits until the token is revoked or expires; forever without a token.
    pub async fn token_ended(&mut self) {
        match &mut self.ended {
            Some(ended) => wait_until_set(ended).await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.all = open.all.saturating_sub(1);
        if let Some(n) = open.users.get_mut(&self.user) {
            *n -= 1;
            if *n == 0 {
                open.users.remove(&self.user);
            }
        }
        if let Some(token) = &self.token
            && let Some(of_token) = open.tokens.get_mut(token)
        {
            of_token.streams -= 1;
            if of_token.streams == 0 {
                open.tokens.remove(token);
            }
        }
        set_gauge(open.all);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set_gauge(streams: u32) {
    gauge!("stillhouse_watchers").set(f64::from(streams));
}

/// Concurrent connections, or requests through a proxy, by client address.
#[derive(Clone)]
pub struct AddressCounts {
    counts: Arc<Mutex<HashMap<IpAddr, u32>>>,
    max_per_address: u32,
}

/// One connection or request of an address; dropping it ends the count.
pub struct AddressCount {
    counts: Arc<Mutex<HashMap<IpAddr, u32>>>,
    address: IpAddr,
}

impl AddressCounts {
    pub fn new(max_per_address: u32) -> Self {
        Self { counts: Arc::default(), max_per_address }
    }

    /// Counts one more; `None` if the address has reached its limit.
    pub fn acquire(&self, address: IpAddr) -> Option<AddressCount> {
        let mut counts = lock(&self.counts);
        let n = counts.entry(address).or_default();
        if *n >= self.max_per_address {
            return None;
        }
        *n += 1;
        Some(AddressCount { counts: Arc::clone(&self.counts), address })
    }
}

impl Drop for AddressCount {
    fn drop(&mut self) {
        let mut counts = lock(&self.counts);
        if let Some(n) = counts.get_mut(&self.address) {
            *n -= 1;
            if *n == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_minutes_worth_at_once_and_then_at_the_rate() {
        let rate = RateLimit::new(60);
        let start = Instant::now();
        assert_eq!((0..60).filter(|_| rate.take("a", start).is_ok()).count(), 60);
        assert_eq!(rate.take("a", start), Err(1));
        assert_eq!(rate.take("b", start), Ok(()));
        assert_eq!(rate.take("a", start + Duration::from_millis(1100)), Ok(()));
        assert_eq!(rate.take("a", start + Duration::from_millis(1200)), Err(1));
    }

    #[test]
    fn clients_that_are_remembered_are_bounded() {
        let rate = RateLimit::new(60);
        let start = Instant::now();
        for n in 0..MAX_CLIENTS {
            rate.take(&n.to_string(), start).unwrap();
        }
        assert_eq!(rate.take("one more", start), Err(1));
        assert_eq!(rate.take("0", start), Ok(()));
        assert_eq!(rate.take("one more", start + Duration::from_secs(60)), Ok(()));
        assert_eq!(rate.buckets.lock().unwrap().len(), 1);
    }

    fn holder(user: &str, token: Option<&str>) -> Holder {
        Holder { user: user.into(), scopes: Vec::new(), token: token.map(str::to_owned) }
    }

    #[test]
    fn streams_are_counted_by_token_by_user_and_in_all() {
        let watchers = Watchers::new(StreamLimits { all: 4, per_user: 3, per_token: 2 });
        let (a1, a2, b1) = (holder("a", Some("a1")), holder("a", Some("a2")), holder("b", Some("b1")));
        let open = |holder: &Holder| watchers.open(holder);
        let first = open(&a1).unwrap();
        let _second = open(&a1).unwrap();
        assert_eq!(open(&a1).err(), Some(ReachedLimit::Token));
        let third = open(&a2).unwrap();
        assert_eq!(open(&a2).err(), Some(ReachedLimit::User));
        let _fourth = open(&b1).unwrap();
        assert_eq!(open(&b1).err(), Some(ReachedLimit::All));
        drop(third);
        assert_eq!(open(&a1).err(), Some(ReachedLimit::Token));
        let _fifth = open(&a2).unwrap();
        drop(first);
        let _sixth = open(&a1).unwrap();
        // users without streams are not remembered
        assert_eq!(lock(&watchers.open).users.len(), 2);
    }

    #[tokio::test]
    async fn the_streams_of_a_token_end_with_it() {
        let watchers = Watchers::new(StreamLimits { all: 9, per_user: 9, per_token: 9 });
        let mut ended = watchers.open(&holder("a", Some("a1"))).unwrap();
        let mut other = watchers.open(&holder("a", Some("a2"))).unwrap();
        let mut open = watchers.open(&holder("local", None)).unwrap();
        let mut tokens = watchers.tokens();
        tokens.sort();
        assert_eq!(tokens, ["a1", "a2"]);
        watchers.end("a1");
        watchers.end("nobody");
        ended.token_ended().await;
        let still = tokio::time::timeout(std::time::Duration::ZERO, async {
            tokio::select! { () = other.token_ended() => {}, () = open.token_ended() => {} }
        });
        assert!(still.await.is_err());
        drop(ended);
        assert_eq!(watchers.tokens(), ["a2"]);
    }
}
