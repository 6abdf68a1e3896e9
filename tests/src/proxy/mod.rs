//! A bad network: an HTTP proxy in front of an S3 server that breaks requests as a seed says, and counts.
//!
//! ```text
//!   program ─► FaultProxy (127.0.0.1) ─────────► Seaweed
//!                 │ number n: fault = f(seed, n)    Host as it came: it is signed
//!                 ├─ fired(): what really happened, by kind
//!                 └─ requests(): method, path, range, bytes
//! ```
//!
//! One thread per connection, messages held whole (up to 64 MiB). The same request never meets more than
//! [`Plan::in_a_row`] faults one after the other, so that a client that tries once more than that gets through.

mod connection;
mod http;

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// What can happen to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// It takes 50 to 300 ms more.
    Latency,
    /// The connection is reset in the middle of its body (or after its head); the server never hears of it.
    ResetRequest,
    /// The server acted; the connection is reset in the middle of the body of the answer (or of its head).
    ResetResponse,
    /// 500 `InternalError`; the server never hears of it.
    Error500,
    /// 503 `SlowDown`, sometimes with `Retry-After`; the server never hears of it.
    SlowDown503,
    /// The server acted; half of the body of the answer, then the connection is closed in good order. Answers
    /// without a body are left alone.
    Truncated,
    /// The server acted; the connection is closed in good order without an answer.
    LostResponse,
    /// The server acted; the answer is 500 `InternalError` all the same.
    False500,
}

impl Kind {
    /// All of them.
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

/// Which requests meet which faults.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Everything is keyed by it and by the number of the request.
    pub seed: u64,
    /// How likely a request meets a fault.
    pub probability: f64,
    /// Each as likely as the other.
    pub kinds: Vec<Kind>,
    /// The most faults in a row for one method, path and query; delays do not count.
    pub in_a_row: u32,
    /// Spares the requests for which this is false: method, path and query.
    pub only: Which,
}

impl Default for Plan {
    fn default() -> Self {
        Self { seed: 0, probability: 0.1, kinds: Kind::ALL.to_vec(), in_a_row: 4, only: |_, _| true }
    }
}

/// Where requests wait for [`FaultProxy::let_go`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// Before the server hears of them.
    Request,
    /// After the server has acted, before it is told.
    Answer,
}

/// A request that has come to its end.
#[derive(Debug, Clone)]
pub struct Request {
    /// From 0, in the order of arrival.
    pub number: u64,
    /// `GET`.
    pub method: String,
    /// Path, percent-encoded.
    pub path: String,
    /// Query without the question mark.
    pub query: String,
    /// The header `Range`.
    pub range: Option<String>,
    /// The status that the client was given; 0 for none, also when the answer broke off.
    pub status: u16,
    /// Bytes of the body of the request (0 if it did not come whole).
    pub request_bytes: u64,
    /// Bytes of the body of the answer that were sent to the client.
    pub response_bytes: u64,
    /// The fault that it met.
    pub fault: Option<Kind>,
}

/// Traffic with the server behind, heads and bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes sent to it.
    pub sent: u64,
    /// Bytes received from it.
    pub received: u64,
    /// Requests that it did not answer whole (it was killed, say); the client's connection was closed.
    pub unanswered: u64,
}

/// The proxy; gone when dropped.
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accept: Option<JoinHandle<()>>,
}

struct Shared {
    upstream: SocketAddr,
    plan: Mutex<Plan>,
    is_enabled: AtomicBool,
    is_over: AtomicBool,
    number: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    unanswered: AtomicU64,
    in_a_row: Mutex<HashMap<(String, String), u32>>,
    fired: Mutex<BTreeMap<Kind, u64>>,
    requests: Mutex<Vec<Request>>,
    gate: Mutex<Gate>,
    /// Told whenever the gate changes.
    moved: Condvar,
}

/// Tells requests apart by method, and path with query.
pub type Which = fn(&str, &str) -> bool;

/// Which requests wait, and how many there are.
#[derive(Default)]
struct Gate {
    closed: Option<(Waits, Which)>,
    waiting: usize,
}

impl FaultProxy {
    /// Listens on a free port, in front of `http://127.0.0.1:port`.
    pub fn start(upstream: &str, plan: Plan) -> Self {
        let upstream = upstream.trim_start_matches("http://").trim_end_matches('/').parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            upstream,
            plan: Mutex::new(plan),
            is_enabled: AtomicBool::new(true),
            is_over: AtomicBool::new(false),
            number: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            unanswered: AtomicU64::new(0),
            in_a_row: Mutex::default(),
            fired: Mutex::default(),
            requests: Mutex::default(),
            gate: Mutex::default(),
            moved: Condvar::new(),
        });
        let for_thread = Arc::clone(&shared);
        let accept = std::thread::spawn(move || {
            for client in listener.incoming() {
                if for_thread.is_over.load(Ordering::SeqCst) {
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

    /// Switches the faults; what passes is recorded all the same.
    pub fn set_enabled(&self, enabled: bool) {
        self.shared.is_enabled.store(enabled, Ordering::SeqCst);
    }

    /// Another plan from now on.
    pub fn set_plan(&self, plan: Plan) {
        *self.shared.plan.lock().unwrap() = plan;
    }

    /// From now on requests for which this is true wait: method, path and query.
    pub fn hold(&self, waits: Waits, only: Which) {
        self.shared.gate.lock().unwrap().closed = Some((waits, only));
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.shared.gate.lock().unwrap().waiting
    }

    /// Lets the requests go that wait, and no other ones wait.
    pub fn let_go(&self) {
        self.shared.gate.lock().unwrap().closed = None;
        self.shared.moved.notify_all();
    }

    /// How many faults of each kind have really happened; kinds that have not are left out.
    pub fn fired(&self) -> BTreeMap<Kind, u64> {
        self.shared.fired.lock().unwrap().clone()
    }

    /// Every request that has come to its end, in that order.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// The number of requests of each method.
    pub fn by_method(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for request in self.shared.requests.lock().unwrap().iter() {
            *counts.entry(request.method.clone()).or_default() += 1;
        }
        counts
    }

    /// Traffic with the server behind.
    pub fn traffic(&self) -> Traffic {
        let load = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let shared = &self.shared;
        Traffic { sent: load(&shared.sent), received: load(&shared.received), unanswered: load(&shared.unanswered) }
    }

    /// Forgets requests, traffic and faults, not the number of the next request.
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
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.let_go();
        // Wakes the thread that accepts; those of open connections end with their clients.
        let _ = TcpStream::connect(self.address);
        if let Some(accept) = self.accept.take() {
            let _ = accept.join();
        }
    }
}

/// A fault that a request is to meet, with a number in [0, 1) for what else is to be chosen.
#[derive(Debug, Clone, Copy)]
struct Fault {
    kind: Kind,
    how: f64,
}

impl Shared {
    /// What the plan has for a request.
    fn fault(&self, number: u64, method: &str, target: &str) -> Option<Fault> {
        let plan = self.plan.lock().unwrap();
        let enabled = self.is_enabled.load(Ordering::SeqCst) && (plan.only)(method, target);
        let [whether, which, how] = [0, 1, 2].map(|draw| unit(plan.seed, number, draw));
        if !enabled || plan.kinds.is_empty() || whether >= plan.probability {
            return None;
        }
        let kind = plan.kinds[(which * plan.kinds.len() as f64) as usize];
        let met = self.in_a_row.lock().unwrap().get(&(method.to_owned(), target.to_owned())).copied().unwrap_or(0);
        (kind == Kind::Latency || met < plan.in_a_row).then_some(Fault { kind, how })
    }

    /// Waits as long as the gate is closed for a request, at this place.
    fn pass(&self, here: Waits, method: &str, target: &str) {
        let holds = |gate: &Gate| gate.closed.is_some_and(|(waits, only)| waits == here && only(method, target));
        let mut gate = self.gate.lock().unwrap();
        if holds(&gate) {
            gate.waiting += 1;
            gate = self.moved.wait_while(gate, |gate| holds(gate)).unwrap();
            gate.waiting -= 1;
        }
    }

    /// Records a request; a fault counts here and only here, when it has happened.
    fn ended(&self, target: &str, request: Request) {
        let key = (request.method.clone(), target.to_owned());
        match request.fault {
            None | Some(Kind::Latency) => drop(self.in_a_row.lock().unwrap().remove(&key)),
            Some(_) => *self.in_a_row.lock().unwrap().entry(key).or_default() += 1,
        }
        if let Some(kind) = request.fault {
            *self.fired.lock().unwrap().entry(kind).or_default() += 1;
        }
        self.requests.lock().unwrap().push(request);
    }
}

/// A number in [0, 1) that depends on its key alone (splitmix64).
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
