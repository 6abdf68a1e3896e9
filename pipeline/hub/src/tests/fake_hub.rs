//! A fake hub of two servers: the hub itself, and the storage to which it redirects large files.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use sha2::{Digest, Sha256};

pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A fault that a response has.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// This status with these headers.
    Status(u16, &'static str),
    /// The connection closes without a response.
    Reset,
    /// The body ends after this many bytes.
    Truncate(usize),
    /// The body has the same length but different bytes.
    Corrupt,
    /// The server ignores the range.
    IgnoreRange,
    /// A redirect to this URL.
    Redirect(String),
}

#[derive(Debug, Clone)]
pub(super) struct Request {
    /// `hub` or `storage`.
    pub(super) server: &'static str,
    pub(super) method: String,
    pub(super) path: String,
    pub(super) headers: BTreeMap<String, String>,
}

#[derive(Default)]
pub(super) struct State {
    /// Bytes of each file by name. Files that are not UTF-8 come from the storage.
    pub(super) files: BTreeMap<String, Vec<u8>>,
    /// Names that occur only in the file list.
    pub(super) listed: Vec<String>,
    pub(super) commit: String,
    /// Replaces the correct etag.
    pub(super) etag: Option<String>,
    pub(super) with_size: bool,
    /// Faults of coming responses: each applies once, to the next request whose `METHOD path` contains the text.
    pub(super) faults: VecDeque<(&'static str, Fault)>,
    pub(super) requests: Vec<Request>,
}

#[derive(Clone)]
pub(super) struct FakeHub {
    state: Arc<Mutex<State>>,
    pub(super) hub_url: String,
    pub(super) storage_url: String,
}

impl FakeHub {
    pub(super) fn new(files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        let state = Arc::new(Mutex::new(State { files, commit: COMMIT.into(), with_size: true, ..State::default() }));
        let listeners = ["hub", "storage"].map(|name| (name, TcpListener::bind("127.0.0.1:0").unwrap()));
        let [hub_url, storage_url] = [0, 1].map(|i| format!("http://{}", listeners[i].1.local_addr().unwrap()));
        let fake_hub = Self { state, hub_url, storage_url };
        for (server, listener) in listeners {
            let fake_hub = fake_hub.clone();
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let fake_hub = fake_hub.clone();
                    thread::spawn(move || fake_hub.serve(server, stream));
                }
            });
        }
        fake_hub
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_fault(&self, what: &'static str, fault: Fault) {
        self.state().faults.push_back((what, fault));
    }

    /// Returns the requests since the last call.
    pub(super) fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().requests)
    }

    fn serve(&self, server: &'static str, mut stream: TcpStream) {
        let Some(request) = read_request(server, &stream) else { return };
        let line = format!("{} {}", request.method, request.path);
        let mut state = self.state();
        state.requests.push(request.clone());
        let fault = state.faults.iter().position(|(what, _)| line.contains(what));
        let fault = fault.and_then(|at| state.faults.remove(at)).map(|(_, fault)| fault);
        let response = match fault {
            Some(Fault::Reset) => return,
            Some(Fault::Status(status, headers)) => Response::new(status, headers, b"no".to_vec()),
            Some(Fault::Redirect(to)) => Response::new(307, format!("location: {to}\r\n"), Vec::new()),
            other => self.respond(&state, &request, other),
        };
        drop(state);
        let head = format!(
            "HTTP/1.1 {} X\r\nconnection: close\r\ncontent-length: {}\r\n{}\r\n",
            response.status,
            response.body.len(),
            response.headers
        );
        let body = if request.method == "HEAD" {
            &[][..]
        } else {
            &response.body[..response.truncated_at.unwrap_or(response.body.len())]
        };
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    }

    fn respond(&self, state: &State, request: &Request, fault: Option<Fault>) -> Response {
        let path = request.path.as_str();
        if request.server == "hub" && path.starts_with("/api/models/") {
            let names: Vec<_> = state.files.keys().chain(&state.listed).collect();
            let names: Vec<_> = names.into_iter().map(|name| serde_json::json!({"rfilename": name})).collect();
            let body = serde_json::json!({"sha": state.commit, "siblings": names}).to_string();
            return Response::new(200, String::new(), body.into_bytes());
        }
        let marker = format!("/resolve/{}/", state.commit);
        let name = path.split_once(&marker).map_or_else(|| path.trim_start_matches("/bucket/"), |(_, name)| name);
        let name = name.split('?').next().unwrap_or_default();
        let Some(bytes) = state.files.get(name) else {
            return Response::new(404, "x-error-code: EntryNotFound\r\n", Vec::new());
        };
        let large = std::str::from_utf8(bytes).is_err();
        if request.server == "hub" && large {
            let etag = state.etag.clone().unwrap_or_else(|| sha256(bytes));
            let size = if state.with_size { format!("x-linked-size: {}\r\n", bytes.len()) } else { String::new() };
            let headers = format!(
                "location: {}/bucket/{name}?sig=SIGNATURE\r\nx-linked-etag: \"{etag}\"\r\n{size}",
                self.storage_url
            );
            return Response::new(302, headers, Vec::new());
        }
        let etag = state.etag.clone().unwrap_or_else(|| sha256(bytes)[..40].to_owned());
        let mut headers = format!("etag: \"{etag}\"\r\n");
        let from = request.headers.get("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        let from = from.filter(|_| !matches!(fault, Some(Fault::IgnoreRange)));
        let mut body = bytes[from.unwrap_or(0)..].to_vec();
        if let Some(from) = from {
            headers += &format!("content-range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len());
        }
        if matches!(fault, Some(Fault::Corrupt)) {
            body[0] ^= 1;
        }
        let truncated_at = if let Some(Fault::Truncate(at)) = fault { Some(at) } else { None };
        Response { status: if from.is_some() { 206 } else { 200 }, headers, body, truncated_at }
    }
}

struct Response {
    status: u16,
    headers: String,
    body: Vec<u8>,
    truncated_at: Option<usize>,
}

impl Response {
    fn new(status: u16, headers: impl Into<String>, body: Vec<u8>) -> Self {
        Self { status, headers: headers.into(), body, truncated_at: None }
    }
}

fn read_request(server: &'static str, stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    Some(Request { server, method, path, headers })
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
