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

use super::api::Ends;
use super::api::limits::{Address, Addresses};
use super::config::{Config, Limits};
use super::drain_body::{self, Unread};
use super::proxies::Proxies;
use super::{process, until};

/// How long a client may leave sent data unacknowledged; a live stream sends something every 15 seconds.
const STUCK: Duration = Duration::from_secs(60);
const HEAD_BYTES: usize = 64 << 10;
/// Longest time for unfinished answers once the service stops.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Serves until `stopping` is true, then lets running answers finish.
pub async fn serve(listener: TcpListener, router: Router, config: &Config, mut stopping: watch::Receiver<bool>) {
    let mut slots = ConnectionSlots::new(config);
    let limits = Arc::new(config.limits.clone());
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = until(&mut stopping) => break,
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
        let Some(slot) = slots.enter(peer.ip()) else { continue };
        let kept = match &slot {
            ConnectionSlot::Kept(guest) => Some(Arc::clone(&guest.welcome)),
            ConnectionSlot::Ordinary { .. } => None,
        };
        let ends = Ends { local, peer, kept };
        connections.spawn(connection(stream, ends, router.clone(), Arc::clone(&limits), stopping.clone(), slot));
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(LAST_ANSWERS, all).await;
}

async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    process::close_when_stuck(&stream, STUCK)?;
    Ok(stream)
}

async fn connection(
    mut stream: TcpStream,
    ends: Ends,
    router: Router,
    limits: Arc<Limits>,
    stopping: watch::Receiver<bool>,
    slot: ConnectionSlot,
) {
    let gives_way = match &slot {
        ConnectionSlot::Kept(guest) => Some(Arc::clone(&guest.gives_way)),
        ConnectionSlot::Ordinary { .. } => None,
    };
    let stopped = async {
        match &gives_way {
            Some(gives_way) => gives_way.notified().await,
            None => std::future::pending().await,
        }
    };
    let served = async {
        // a reserved slot serves one request
        let keep_alive = gives_way.is_none();
        let more = requests(&mut stream, ends, router, keep_alive, &limits, stopping).await;
        if more {
            if let ConnectionSlot::Kept(guest) = &slot {
                guest.welcome.store(false, Ordering::Relaxed);
            }
            drain_body::throw_away(&mut stream, &limits).await;
        }
    };
    tokio::select! {
        () = served => {}
        () = stopped => {}
    }
}

/// Answers requests until the connection ends. Returns whether the client may still send data that nothing reads.
async fn requests(
    stream: &mut TcpStream,
    ends: Ends,
    router: Router,
    keep_alive: bool,
    limits: &Limits,
    mut stopping: watch::Receiver<bool>,
) -> bool {
    let peer = ends.peer;
    let unread = Unread::default();
    let handler = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(ends.clone()));
        let (router, unread) = (router.clone(), unread.clone());
        async move {
            let answer = router.oneshot(unread.watch(request)).await.unwrap_or_else(|never| match never {});
            Ok::<_, Infallible>(unread.close(answer))
        }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(Duration::from_secs(limits.header_seconds.into()))
            .max_buf_size(HEAD_BYTES)
            .keep_alive(keep_alive)
            .serve_connection(TokioIo::new(stream), handler)
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = until(&mut stopping) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = &ended {
        tracing::debug!(address = %peer.ip(), "a connection ended: {e}");
    }
    // hyper also answers an invalid head
    unread.is_left() || ended.is_err_and(|e| e.is_parse())
}

/// The slot that a connection occupies.
enum ConnectionSlot {
    Ordinary { _permit: OwnedSemaphorePermit, _of_address: Option<Address> },
    Kept(Guest),
}

struct ConnectionSlots {
    ordinary: Arc<Semaphore>,
    addresses: Addresses,
    proxies: Proxies,
    kept: Kept,
    warned: Option<Instant>,
}

/// Shortest interval between two warnings about too many connections of an address.
const WARN_EVERY: Duration = Duration::from_secs(60);

impl ConnectionSlots {
    fn new(config: &Config) -> Self {
        let limits = &config.limits;
        Self {
            ordinary: Arc::new(Semaphore::new(limits.connections as usize)),
            addresses: Addresses::new(limits.connections_per_address),
            proxies: Proxies::of(config),
            kept: Kept { guests: Arc::default(), next: 0, most: limits.connections_kept as usize },
            warned: None,
        }
    }

    /// A slot for a connection; `None` when all reserved slots serve privileged requests.
    fn enter(&mut self, peer: std::net::IpAddr) -> Option<ConnectionSlot> {
        let peer = peer.to_canonical();
        // the clients of a proxy are counted by request
        let of_address = match self.proxies.trusts(peer) {
            true => Some(None),
            false => self.addresses.enter(peer).map(Some),
        };
        if of_address.is_none() && self.warned.is_none_or(|warned| warned.elapsed() > WARN_EVERY) {
            self.warned = Some(Instant::now());
            tracing::warn!(address = %peer, "more connections than one address may have");
        }
        let permit = Arc::clone(&self.ordinary).try_acquire_owned();
        match (permit, of_address) {
            (Ok(permit), Some(of_address)) => {
                Some(ConnectionSlot::Ordinary { _permit: permit, _of_address: of_address })
            }
            _ => self.kept.enter().map(ConnectionSlot::Kept),
        }
    }
}

/// The reserved slots, in the order in which they were taken.
struct Kept {
    guests: Arc<Mutex<VecDeque<Seat>>>,
    next: u64,
    most: usize,
}

struct Seat {
    number: u64,
    welcome: Arc<AtomicBool>,
    gives_way: Arc<Notify>,
}

/// The holder of a reserved slot.
struct Guest {
    number: u64,
    guests: Arc<Mutex<VecDeque<Seat>>>,
    /// Whether its request is one that the reserved slots are for.
    welcome: Arc<AtomicBool>,
    gives_way: Arc<Notify>,
}

impl Kept {
    fn enter(&mut self) -> Option<Guest> {
        let mut guests = lock(&self.guests);
        if guests.len() >= self.most {
            let stays = |seat: &Seat| seat.welcome.load(Ordering::Relaxed);
            let oldest = guests.iter().position(|seat| !stays(seat))?;
            guests.remove(oldest)?.gives_way.notify_one();
        }
        self.next += 1;
        let (welcome, gives_way): (Arc<AtomicBool>, Arc<Notify>) = Default::default();
        let seat = Seat { number: self.next, welcome: Arc::clone(&welcome), gives_way: Arc::clone(&gives_way) };
        guests.push_back(seat);
        Some(Guest { number: self.next, guests: Arc::clone(&self.guests), welcome, gives_way })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        lock(&self.guests).retain(|seat| seat.number != self.number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_kept(slot: &Option<ConnectionSlot>) -> Option<bool> {
        slot.as_ref().map(|slot| matches!(slot, ConnectionSlot::Kept(_)))
    }

    #[tokio::test]
    async fn there_is_always_a_place_for_who_looks_after_the_service() {
        let limits = Limits { connections: 3, connections_per_address: 2, connections_kept: 2, ..Limits::default() };
        let mut slots =
            ConnectionSlots::new(&Config { limits, trusted_proxies: vec!["10.0.0.1".into()], ..Config::default() });
        let (one, two) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let ordinary: Vec<_> = [one, one, two].map(|address| slots.enter(address)).into();
        assert!(ordinary.iter().all(|slot| is_kept(slot) == Some(false)));
        // address `one` exceeds its own limit, `two` the limit of all connections
        let first = slots.enter(one);
        let second = slots.enter(two);
        assert_eq!((is_kept(&first), is_kept(&second)), (Some(true), Some(true)));
        let (Some(ConnectionSlot::Kept(first)), Some(ConnectionSlot::Kept(second))) = (first, second) else { panic!() };
        // the first sends a privileged request, so a third connection replaces the second
        first.welcome.store(true, Ordering::Relaxed);
        let third = slots.enter(one);
        second.gives_way.notified().await;
        assert_eq!(is_kept(&third), Some(true));
        let Some(ConnectionSlot::Kept(third)) = third else { panic!() };
        third.welcome.store(true, Ordering::Relaxed);
        assert_eq!(is_kept(&slots.enter(one)), None);
        drop((first, second, third));
        assert!(lock(&slots.kept.guests).is_empty());
        drop(ordinary);
        // all clients of a proxy share its address
        let many: Vec<_> = (0..3).map(|_| slots.enter("10.0.0.1".parse().unwrap())).collect();
        assert!(many.iter().all(|slot| is_kept(slot) == Some(false)));
    }
}
