//! Connections: accepted within limits, served until the service stops.
//!
//! A client that sends nothing, or a byte now and then, loses its connection after `limits.header_seconds`; connections are bounded in
//! all and by address, so that one client cannot take them all.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::api::Ends;
use super::config::Limits;
use super::{process, until};

/// How long a client may take nothing of what is sent to it; a live stream is sent something every 15 seconds.
const STUCK: Duration = Duration::from_secs(60);
const HEAD_BYTES: usize = 64 << 10;
/// Longest that answers may take once the service stops.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Serves until `stopping` is true, then lets answers end that have begun.
pub async fn serve(listener: TcpListener, router: Router, limits: &Limits, mut stopping: watch::Receiver<bool>) {
    let permits = Arc::new(Semaphore::new(limits.connections as usize));
    let addresses = Addresses { now: Arc::default(), most: limits.connections_per_address };
    let header_seconds = Duration::from_secs(limits.header_seconds.into());
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = until(&mut stopping) => break,
            Some(_) = connections.join_next() => continue,
            accepted = accept(&listener, &permits) => accepted,
        };
        let (stream, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                // such as too many open files: others end meanwhile
                tracing::warn!("a connection could not be accepted: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok((local, peer)) = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?))) else {
            continue;
        };
        let Some(held) = addresses.enter(peer.ip()) else {
            tracing::warn!(address = %peer.ip(), "more connections than one address may have");
            continue;
        };
        let ends = Ends { local, peer };
        connections.spawn(connection(stream, ends, router.clone(), header_seconds, stopping.clone(), (permit, held)));
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(LAST_ANSWERS, all).await;
}

async fn accept(listener: &TcpListener, permits: &Arc<Semaphore>) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(permits).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    process::close_when_stuck(&stream, STUCK)?;
    Ok((stream, permit))
}

async fn connection(
    stream: TcpStream,
    ends: Ends,
    router: Router,
    header_seconds: Duration,
    mut stopping: watch::Receiver<bool>,
    _held: (OwnedSemaphorePermit, Address),
) {
    let handler = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(ends));
        let router = router.clone();
        async move {
            Ok::<_, Infallible>(router.oneshot(request.map(Body::new)).await.unwrap_or_else(|never| match never {}))
        }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(header_seconds)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), handler)
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = until(&mut stopping) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!(address = %ends.peer.ip(), "a connection ended: {e}");
    }
}

/// Connections by address.
struct Addresses {
    now: Arc<Mutex<HashMap<IpAddr, u32>>>,
    most: u32,
}

/// One of them.
struct Address {
    all: Arc<Mutex<HashMap<IpAddr, u32>>>,
    address: IpAddr,
}

impl Addresses {
    fn enter(&self, address: IpAddr) -> Option<Address> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let n = now.entry(address).or_default();
        if *n >= self.most {
            return None;
        }
        *n += 1;
        Some(Address { all: Arc::clone(&self.now), address })
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(n) = all.get_mut(&self.address) {
            *n -= 1;
            if *n == 0 {
                all.remove(&self.address);
            }
        }
    }
}
