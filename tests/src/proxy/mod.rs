//! An HTTP proxy that simulates a bad network: it breaks requests to an S3 server according to a seed, and counts them.
//!
//! ```text
//!   program ─► FaultProxy (127.0.0.1) ─────────► Seaweed
//!                 │ number n: fault = f(seed, n)    Host is forwarded unchanged: it is signed
//!                 ├─ fired(): faults that really happened, by kind
//!                 └─ requests(): method, path, range, bytes
//! ```
//!
//! It uses one thread per connection and buffers whole messages (up to 64 MiB). A request meets at most
//! [`FaultPlan::max_consecutive`] faults in a row, so a client that retries once more succeeds.

mod connection;
mod http;

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// Adds 50 to 300 ms.
    Latency,
    /// Resets the connection in the middle of the request body, or after the head. The server does not receive the
    /// request.
    ResetRequest,
    /// The server acts; the connection is reset in the middle of the response body, or of the head.
    ResetResponse,
    /// Responds 500 `InternalError`. The server does not receive the request.
    Error500,
    /// Responds 503 `SlowDown`, sometimes with `Retry-After`. The server does not receive the request.
    SlowDown503,
    /// The server acts; half of the response body is sent, then the connection closes normally. Responses without a
    /// body are unchanged.
    Truncated,
    /// The server acts; the connection closes normally without a response.
    LostResponse,
    /// The server acts; the response is 500 `InternalError` anyway.
    False500,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::Latency,
        Self::ResetRequest,
        Self::ResetResponse,
        Self::Error500,
        Self::SlowDown503,
        Self::Truncated,
        Self::LostResponse,
        Self::False500,
    ];
}

/// Decides which requests meet which faults.
#[derive(Debug, Clone)]
pub struct FaultPlan {
    /// Seed of all choices, together with the request's number.
    pub seed: u64,
    /// Probability that a request meets a fault.
    pub probability: f64,
    /// The possible kinds, with equal probability.
    pub kinds: Vec<FaultKind>,
    /// Maximum number of consecutive faults per method, path and query. Latency does not count.
    pub max_consecutive: u32,
    /// Only requests accepted by this predicate (method, path and query) meet faults.
    pub only: RequestFilter,
}

impl Default for FaultPlan {
    fn default() -> Self {
        Self { seed: 0, probability: 0.1, kinds: FaultKind::ALL.to_vec(), max_consecutive: 4, only: |_, _| true }
    }
}

/// Where requests wait for [`FaultProxy::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldPoint {
    /// Before they reach the server.
    Request,
    /// After the server has acted, before the client gets the response.
    Response,
}

/// A completed request.
#[derive(Debug, Clone)]
pub struct Request {
    /// Number in the order of arrival, from 0.
    pub number: u64,
    /// HTTP method.
    pub method: String,
    /// Percent-encoded path.
    pub path: String,
    /// Query without the question mark.
    pub query: String,
    /// Value of the `Range` header.
    pub range: Option<String>,
    /// Status sent to the client; 0 if none, or if the response broke off.
    pub status: u16,
    /// Size of the request body; 0 if it was incomplete.
    pub request_bytes: u64,
    /// Bytes of the response body sent to the client.
    pub response_bytes: u64,
    /// The fault that happened.
    pub fault: Option<FaultKind>,
}

/// Traffic with the upstream server, heads and bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes sent to the server.
    pub sent: u64,
    /// Bytes received from the server.
    pub received: u64,
    /// Requests without a complete response, for example because the server was killed. The client's connection was
    /// closed.
    pub unanswered: u64,
}

/// The proxy. Dropping it stops it.
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accept: Option<JoinHandle<()>>,
}

struct Shared {
    upstream: SocketAddr,
    plan: Mutex<FaultPlan>,
    is_enabled: AtomicBool,
    is_stopped: AtomicBool,
    number: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    unanswered: AtomicU64,
    consecutive_faults: Mutex<HashMap<(String, String), u32>>,
    fired: Mutex<BTreeMap<FaultKind, u64>>,
    requests: Mutex<Vec<Request>>,
    gate: Mutex<Gate>,
    /// Notified whenever the gate changes.
    gate_changed: Condvar,
}

/// A predicate on requests: method, and path with query.
pub type RequestFilter = fn(&str, &str) -> bool;

/// The requests that must wait, and the number waiting.
#[derive(Default)]
struct Gate {
    closed: Option<(HoldPoint, RequestFilter)>,
    waiting: usize,
}

impl FaultProxy {
    /// Starts a proxy for `http://127.0.0.1:port` on a free port.
    pub fn start(upstream: &str, plan: FaultPlan) -> Self {
        let upstream = upstream.trim_start_matches("http://").trim_end_matches('/').parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            upstream,
            plan: Mutex::new(plan),
            is_enabled: AtomicBool::new(true),
            is_stopped: AtomicBool::new(false),
            number: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            unanswered: AtomicU64::new(0),
            consecutive_faults: Mutex::default(),
            fired: Mutex::default(),
            requests: Mutex::default(),
            gate: Mutex::default(),
            gate_changed: Condvar::new(),
        });
        let for_thread = Arc::clone(&shared);
        let accept = std::thread::spawn(move || {
            for client in listener.incoming() {
                if for_thread.is_stopped.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(client) = client else { continue };
                let shared = Arc::clone(&for_thread);
                std::thread::spawn(move || connection::serve(client, &shared));
            }
        });
        Self { address, shared, accept: Some(accept) }
    }

    /// `http://127.0.0.1:port`, for `AWS_ENDPOINT_URL`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Enables or disables faults. Requests are recorded either way.
    pub fn set_enabled(&self, enabled: bool) {
        self.shared.is_enabled.store(enabled, Ordering::SeqCst);
    }

    /// Replaces the plan.
    pub fn set_plan(&self, plan: FaultPlan) {
        *self.shared.plan.lock().unwrap() = plan;
    }

    /// Makes requests wait that match the predicate.
    pub fn hold(&self, hold_point: HoldPoint, only: RequestFilter) {
        self.shared.gate.lock().unwrap().closed = Some((hold_point, only));
    }

    /// Number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.shared.gate.lock().unwrap().waiting
    }

    /// Releases the waiting requests and stops holding new ones.
    pub fn release(&self) {
        self.shared.gate.lock().unwrap().closed = None;
        self.shared.gate_changed.notify_all();
    }

    /// Number of faults that really happened, by kind; omits kinds without any.
    pub fn fired(&self) -> BTreeMap<FaultKind, u64> {
        self.shared.fired.lock().unwrap().clone()
    }

    /// Every completed request, in the order of completion.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Number of requests by method.
    pub fn by_method(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for request in self.shared.requests.lock().unwrap().iter() {
            *counts.entry(request.method.clone()).or_default() += 1;
        }
        counts
    }

    /// Traffic with the upstream server.
    pub fn traffic(&self) -> Traffic {
        let load = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let shared = &self.shared;
        Traffic { sent: load(&shared.sent), received: load(&shared.received), unanswered: load(&shared.unanswered) }
    }

    /// Clears requests, traffic and faults, but not the request counter.
    pub fn clear(&self) {
        self.shared.requests.lock().unwrap().clear();
        self.shared.fired.lock().unwrap().clear();
        for counter in [&self.shared.sent, &self.shared.received, &self.shared.unanswered] {
            counter.store(0, Ordering::SeqCst);
        }
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::SeqCst);
        self.release();
        // Wakes the accept thread. The threads of open connections end with their clients.
        let _ = TcpStream::connect(self.address);
        if let Some(accept) = self.accept.take() {
            let _ = accept.join();
        }
    }
}

/// A planned fault, with a number in [0, 1) for its details.
#[derive(Debug, Clone, Copy)]
struct Fault {
    kind: FaultKind,
    detail: f64,
}

impl Shared {
    /// Returns the planned fault of a request.
    fn fault(&self, number: u64, method: &str, target: &str) -> Option<Fault> {
        let plan = self.plan.lock().unwrap();
        let enabled = self.is_enabled.load(Ordering::SeqCst) && (plan.only)(method, target);
        let [whether, which, detail] = [0, 1, 2].map(|draw| unit(plan.seed, number, draw));
        if !enabled || plan.kinds.is_empty() || whether >= plan.probability {
            return None;
        }
        let kind = plan.kinds[(which * plan.kinds.len() as f64) as usize];
        let met =
            self.consecutive_faults.lock().unwrap().get(&(method.to_owned(), target.to_owned())).copied().unwrap_or(0);
        (kind == FaultKind::Latency || met < plan.max_consecutive).then_some(Fault { kind, detail })
    }

    /// Waits while the gate is closed for this request at this point.
    fn wait_at_gate(&self, point: HoldPoint, method: &str, target: &str) {
        let holds =
            |gate: &Gate| gate.closed.is_some_and(|(hold_point, only)| hold_point == point && only(method, target));
        let mut gate = self.gate.lock().unwrap();
        if holds(&gate) {
            gate.waiting += 1;
            gate = self.gate_changed.wait_while(gate, |gate| holds(gate)).unwrap();
            gate.waiting -= 1;
        }
    }

    /// Records a request. A fault is counted only here, after it has happened.
    fn record(&self, target: &str, request: Request) {
        let key = (request.method.clone(), target.to_owned());
        match request.fault {
            None | Some(FaultKind::Latency) => drop(self.consecutive_faults.lock().unwrap().remove(&key)),
            Some(_) => *self.consecutive_faults.lock().unwrap().entry(key).or_default() += 1,
        }
        if let Some(kind) = request.fault {
            *self.fired.lock().unwrap().entry(kind).or_default() += 1;
        }
        self.requests.lock().unwrap().push(request);
    }
}

/// A number in [0, 1) that depends only on its key (splitmix64).
fn unit(seed: u64, number: u64, draw: u64) -> f64 {
    let mixed = [seed, number, draw].into_iter().fold(0u64, |state, key| {
        let mut z = (state ^ key).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    });
    (mixed >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
