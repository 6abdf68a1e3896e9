//! Accepts connections within the limits and serves them until the service stops.
//!
//! ```text
//!   accepted ─► ordinary slot, limited by address ─────────────► every request
//!        └─ none left ─► reserved slot ─► health, readiness, metrics, admin tokens; all others get 429
//!                               └─ none left ─► replaces the oldest reserved connection without such a request
//! ```
//!
//! A client that sends nothing, or a byte now and then, loses its connection after `limits.header_seconds`. Data that
//! arrives after an answer is discarded for a while ([`drain_body`]). So streams, requests and idle connections,
//! however many, never lock out administrators.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::api::ConnectionInfo;
use super::client_limits::{AddressCount, AddressCounts};
use super::config::{Config, Limits};
use super::drain_body::{self, UnreadBody};
use super::proxies::Proxies;
use super::{process, wait_until_set};

/// How long a client may leave sent data unacknowledged; a live stream sends something every 15 seconds.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Longest time for unfinished answers once the service stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves until `stopping` is true, then lets running answers finish.
pub async fn serve(listener: TcpListener, router: Router, config: &Config, mut stopping: watch::Receiver<bool>) {
    let mut slots = ConnectionSlots::new(config);
    let limits = Arc::new(config.limits.clone());
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = wait_until_set(&mut stopping) => break,
            Some(_) = connections.join_next() => continue,
            accepted = accept(&listener) => accepted,
        };
        let stream = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                // for example too many open files: other connections end meanwhile
                tracing::warn!("a connection could not be accepted: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok((local, peer)) = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?))) else {
            continue;
        };
        let Some(slot) = slots.acquire(peer.ip()) else { continue };
        let reserved = match &slot {
            ConnectionSlot::Reserved(reserved) => Some(Arc::clone(&reserved.privileged)),
            ConnectionSlot::Ordinary { .. } => None,
        };
        let info = ConnectionInfo { local, peer, reserved };
        connections.spawn(serve_connection(stream, info, router.clone(), Arc::clone(&limits), stopping.clone(), slot));
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, all).await;
}

async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    process::set_user_timeout(&stream, UNACKNOWLEDGED_TIMEOUT)?;
    Ok(stream)
}

async fn serve_connection(
    mut stream: TcpStream,
    info: ConnectionInfo,
    router: Router,
    limits: Arc<Limits>,
    stopping: watch::Receiver<bool>,
    slot: ConnectionSlot,
) {
    let evicted = match &slot {
        ConnectionSlot::Reserved(reserved) => Some(Arc::clone(&reserved.evicted)),
        ConnectionSlot::Ordinary { .. } => None,
    };
    let stopped = async {
        match &evicted {
            Some(evicted) => evicted.notified().await,
            None => std::future::pending().await,
        }
    };
    let served = async {
        // a reserved slot serves one request
        let keep_alive = evicted.is_none();
        let is_data_left = answer_requests(&mut stream, info, router, keep_alive, &limits, stopping).await;
        if is_data_left {
            if let ConnectionSlot::Reserved(reserved) = &slot {
                reserved.privileged.store(false, Ordering::Relaxed);
            }
            drain_body::discard_rest(&mut stream, &limits).await;
        }
    };
    tokio::select! {
        () = served => {}
        () = stopped => {}
    }
}

/// Answers requests until the connection ends. Returns whether the client may still send data that nothing reads.
async fn answer_requests(
    stream: &mut TcpStream,
    info: ConnectionInfo,
    router: Router,
    keep_alive: bool,
    limits: &Limits,
    mut stopping: watch::Receiver<bool>,
) -> bool {
    let peer = info.peer;
    let unread = UnreadBody::default();
    let handler = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(info.clone()));
        let (router, unread) = (router.clone(), unread.clone());
        async move {
            let answer = router.oneshot(unread.track(request)).await.unwrap_or_else(|never| match never {});
            Ok::<_, Infallible>(unread.close_if_unread(answer))
        }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(Duration::from_secs(limits.header_seconds.into()))
            .max_buf_size(MAX_HEAD_BYTES)
            .keep_alive(keep_alive)
            .serve_connection(TokioIo::new(stream), handler)
    );
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = wait_until_set(&mut stopping) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = &result {
        tracing::debug!(address = %peer.ip(), "a connection ended: {e}");
    }
    // hyper also answers an invalid head
    unread.is_unread() || result.is_err_and(|e| e.is_parse())
}

/// The slot that a connection occupies.
enum ConnectionSlot {
    Ordinary { _permit: OwnedSemaphorePermit, _address_count: Option<AddressCount> },
    Reserved(ReservedSlot),
}

struct ConnectionSlots {
    ordinary: Arc<Semaphore>,
    addresses: AddressCounts,
    proxies: Proxies,
    reserved: ReservedSlots,
    warned: Option<Instant>,
}

/// Shortest interval between two warnings about too many connections of an address.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

impl ConnectionSlots {
    fn new(config: &Config) -> Self {
        let limits = &config.limits;
        Self {
            ordinary: Arc::new(Semaphore::new(limits.connections as usize)),
            addresses: AddressCounts::new(limits.connections_per_address),
            proxies: Proxies::new(&config.trusted_proxies, config.proxy_header),
            reserved: ReservedSlots { entries: Arc::default(), next: 0, max: limits.connections_kept as usize },
            warned: None,
        }
    }

    /// A slot for a connection; `None` when all reserved slots serve privileged requests.
    fn acquire(&mut self, peer: std::net::IpAddr) -> Option<ConnectionSlot> {
        let peer = peer.to_canonical();
        // the clients of a proxy are counted by request
        let address_count = match self.proxies.trusts(peer) {
            true => Some(None),
            false => self.addresses.acquire(peer).map(Some),
        };
        if address_count.is_none() && self.warned.is_none_or(|warned| warned.elapsed() > WARNING_INTERVAL) {
            self.warned = Some(Instant::now());
            tracing::warn!(address = %peer, "more connections than one address may have");
        }
        let permit = Arc::clone(&self.ordinary).try_acquire_owned();
        match (permit, address_count) {
            (Ok(permit), Some(address_count)) => {
                Some(ConnectionSlot::Ordinary { _permit: permit, _address_count: address_count })
            }
            _ => self.reserved.acquire().map(ConnectionSlot::Reserved),
        }
    }
}

/// The reserved slots, in the order in which they were taken.
struct ReservedSlots {
    entries: Arc<Mutex<VecDeque<Entry>>>,
    next: u64,
    max: usize,
}

struct Entry {
    number: u64,
    privileged: Arc<AtomicBool>,
    evicted: Arc<Notify>,
}

/// The holder of a reserved slot.
struct ReservedSlot {
    number: u64,
    entries: Arc<Mutex<VecDeque<Entry>>>,
    /// Whether its request is one that the reserved slots are for.
    privileged: Arc<AtomicBool>,
    evicted: Arc<Notify>,
}

impl ReservedSlots {
    fn acquire(&mut self) -> Option<ReservedSlot> {
        let mut entries = lock(&self.entries);
        if entries.len() >= self.max {
            let is_privileged = |entry: &Entry| entry.privileged.load(Ordering::Relaxed);
            let oldest = entries.iter().position(|entry| !is_privileged(entry))?;
            entries.remove(oldest)?.evicted.notify_one();
        }
        self.next += 1;
        let (privileged, evicted): (Arc<AtomicBool>, Arc<Notify>) = Default::default();
        let entry = Entry { number: self.next, privileged: Arc::clone(&privileged), evicted: Arc::clone(&evicted) };
        entries.push_back(entry);
        Some(ReservedSlot { number: self.next, entries: Arc::clone(&self.entries), privileged, evicted })
    }
}

impl Drop for ReservedSlot {
    fn drop(&mut self) {
        lock(&self.entries).retain(|entry| entry.number != self.number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_reserved(slot: &Option<ConnectionSlot>) -> Option<bool> {
        slot.as_ref().map(|slot| matches!(slot, ConnectionSlot::Reserved(_)))
    }

    #[tokio::test]
    async fn there_is_always_a_place_for_who_looks_after_the_service() {
        let limits = Limits { connections: 3, connections_per_address: 2, connections_kept: 2, ..Limits::default() };
        let mut slots =
            ConnectionSlots::new(&Config { limits, trusted_proxies: vec!["10.0.0.1".into()], ..Config::default() });
        let (one, two) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let ordinary: Vec<_> = [one, one, two].map(|address| slots.acquire(address)).into();
        assert!(ordinary.iter().all(|slot| is_reserved(slot) == Some(false)));
        // address `one` exceeds its own limit, `two` the limit of all connections
        let first = slots.acquire(one);
        let second = slots.acquire(two);
        assert_eq!((is_reserved(&first), is_reserved(&second)), (Some(true), Some(true)));
        let (Some(ConnectionSlot::Reserved(first)), Some(ConnectionSlot::Reserved(second))) = (first, second) else {
            panic!()
        };
        // the first sends a privileged request, so a third connection replaces the second
        first.privileged.store(true, Ordering::Relaxed);
        let third = slots.acquire(one);
        second.evicted.notified().await;
        assert_eq!(is_reserved(&third), Some(true));
        let Some(ConnectionSlot::Reserved(third)) = third else { panic!() };
        third.privileged.store(true, Ordering::Relaxed);
        assert_eq!(is_reserved(&slots.acquire(one)), None);
        drop((first, second, third));
        assert!(lock(&slots.reserved.entries).is_empty());
        drop(ordinary);
        // all clients of a proxy share its address
        let many: Vec<_> = (0..3).map(|_| slots.acquire("10.0.0.1".parse().unwrap())).collect();
        assert!(many.iter().all(|slot| is_reserved(slot) == Some(false)));
    }
}
