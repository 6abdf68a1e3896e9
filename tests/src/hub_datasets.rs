//! Data sets of the hub on this machine: the hub itself, and the server of contents to which it redirects.
//!
//! A commit is a state of a folder. Files that are not UTF-8 are contents of their own, at URLs with a signature that the
//! test can end; the hub answers the others itself. Listings have pages of two entries.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use serde_json::{Value, json};

use crate::{files, hex_sha256};

/// The token that the hub accepts, if it wants one.
pub const TOKEN: &str = "hf_TESTTOKENOFTHEHUB";
const ENTRIES_PER_PAGE: usize = 2;
/// Bytes of the pointer that git keeps for a content of its own.
const POINTER_BYTES: usize = 134;

/// A hub with the data set `tests/corpus`.
#[derive(Clone)]
pub struct DatasetHub {
    /// URL of the hub.
    pub url: String,
    content_url: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    commits: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Commit of each branch.
    branches: BTreeMap<String, String>,
    /// The signature that URLs of contents get, and the only one that is accepted.
    signature: usize,
    is_private: bool,
    /// Responses of coming requests whose `METHOD URL` contains the text: a status and header lines.
    faults: VecDeque<(&'static str, u16, &'static str)>,
    requests: Vec<Request>,
}

/// A request that the hub got.
#[derive(Debug, Clone)]
pub struct Request {
    /// Whether it came to the server of contents.
    pub for_content: bool,
    /// Method and URL.
    pub line: String,
    /// Whether it had the header `Authorization`.
    pub has_token: bool,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Response(u16, String, Vec<u8>);

impl DatasetHub {
    /// URL of the data set in a job.
    pub const DATASET: &str = "hf://datasets/tests/corpus";

    /// Starts a hub whose branch `main` has the files of a folder.
    pub fn start(folder: &Path) -> Self {
        let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let [url, content_url] = [0, 1].map(|i: usize| format!("http://{}", listeners[i].local_addr().unwrap()));
        let this = Self { url, content_url, state: Arc::default() };
        this.commit("main", folder);
        for (for_content, listener) in listeners.into_iter().enumerate() {
            let hub = this.clone();
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let hub = hub.clone();
                    thread::spawn(move || hub.serve(for_content == 1, stream));
                }
            });
        }
        this
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves a branch to a new commit, of the files that a folder has now. Returns the commit.
    pub fn commit(&self, branch: &str, folder: &Path) -> String {
        let names = files(folder).into_keys().map(|name| name.to_str().unwrap().to_owned());
        let contents: BTreeMap<_, _> = names.map(|name| (name.clone(), fs::read(folder.join(name)).unwrap())).collect();
        let mut state = self.state();
        let commit = format!("{:040x}", 0xabc_0000 + state.commits.len());
        state.commits.insert(commit.clone(), contents);
        state.branches.insert(branch.to_owned(), commit.clone());
        commit
    }

    /// Refuses requests without [`TOKEN`] from now on.
    pub fn make_private(&self) {
        self.state().is_private = true;
    }

    /// Ends the validity of all URLs of contents that were given so far.
    pub fn expire_content_urls(&self) {
        self.state().signature += 1;
    }

    /// Answers the next request whose `METHOD URL` contains `what` with a status and header lines.
    pub fn add_fault(&self, what: &'static str, status: u16, headers: &'static str) {
        self.state().faults.push_back((what, status, headers));
    }

    /// Returns the requests since the last call.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().requests)
    }

    /// Sets the environment of a command that uses the hub, without a token.
    pub fn environment(&self, command: &mut Command) {
        command.env("HF_ENDPOINT", &self.url).env("NO_PROXY", "127.0.0.1").env("HF_TOKEN_PATH", "/nonexistent");
        command.env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN");
    }

    fn serve(&self, for_content: bool, mut stream: TcpStream) {
        let Some(request) = read_request(for_content, &stream) else { return };
        let mut state = self.state();
        state.requests.push(request.clone());
        let fault = state.faults.iter().position(|(what, ..)| request.line.contains(what));
        let Response(status, headers, body) = match fault.and_then(|at| state.faults.remove(at)) {
            Some((_, status, headers)) => Response(status, headers.to_owned(), b"no".to_vec()),
            None if for_content => content(&state, &request),
            None => self.answer(&state, &request),
        };
        drop(state);
        let length = body.len();
        let head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n");
        let body = if request.line.starts_with("HEAD ") { &[][..] } else { &body[..] };
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    }

    /// The hub's own answer.
    fn answer(&self, state: &State, request: &Request) -> Response {
        let is_known = request.headers.get("authorization").is_some_and(|value| *value == format!("Bearer {TOKEN}"));
        let (method, url) = request.line.split_once(' ').unwrap();
        let (path, query) = url.split_once('?').unwrap_or((url, ""));
        // without a revision, it is the information about `main`
        let path = if path == "/api/datasets/tests/corpus" { "/api/datasets/tests/corpus/revision/main" } else { path };
        let repository = path.trim_start_matches("/api").strip_prefix("/datasets/tests/corpus/");
        let Some(rest) = repository.filter(|_| is_known || !state.is_private) else {
            return Response(if is_known { 404 } else { 401 }, "x-error-code: RepoNotFound\r\n".into(), Vec::new());
        };
        let parts: Vec<String> = rest.splitn(3, '/').map(decoded).collect();
        let revision = parts.get(1).map_or("", String::as_str);
        let commit = state.branches.get(revision).map_or(revision, String::as_str);
        let Some(contents) = state.commits.get(commit) else {
            return Response(404, "x-error-code: RevisionNotFound\r\n".into(), Vec::new());
        };
        let name = parts.get(2).map_or("", String::as_str);
        match (method, parts[0].as_str()) {
            ("GET", "revision") => json_response(&json!({"id": "tests/corpus", "sha": commit}), ""),
            ("GET", "tree") => self.page(contents, name, query, path),
            ("POST", "paths-info") => json_response(&paths_info(contents, request), ""),
            ("GET" | "HEAD", "resolve") => self.resolve(contents, name, commit, state.signature, request),
            _ => Response(400, String::new(), Vec::new()),
        }
    }

    fn page(&self, contents: &BTreeMap<String, Vec<u8>>, folder: &str, query: &str, path: &str) -> Response {
        let below = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let is_recursive = query.to_ascii_lowercase().contains("recursive=true");
        let mut entries: Vec<Value> = Vec::new();
        let mut folders = BTreeSet::new();
        for (name, bytes) in contents.iter().filter(|(name, _)| name.starts_with(&below)) {
            let inner: Vec<&str> = name[below.len()..].split('/').collect();
            let depth = if is_recursive { inner.len() - 1 } else { (inner.len() - 1).min(1) };
            for n in 1..=depth {
                let folder = format!("{below}{}", inner[..n].join("/"));
                if folders.insert(folder.clone()) {
                    entries.push(json!({"type": "directory", "oid": "t", "size": 0, "path": folder}));
                }
            }
            if is_recursive || inner.len() == 1 {
                entries.push(file_info(name, bytes));
            }
        }
        if entries.is_empty() {
            return Response(404, "x-error-code: EntryNotFound\r\n".into(), Vec::new());
        }
        let first = query.split('&').find_map(|pair| pair.strip_prefix("cursor=")?.parse().ok()).unwrap_or(0);
        let last = entries.len().min(first + ENTRIES_PER_PAGE);
        let more =
            format!("link: <{}{path}?recursive={is_recursive}&expand=false&cursor={last}>; rel=\"next\"\r\n", self.url);
        json_response(&json!(entries[first..last]), if last < entries.len() { &more } else { "" })
    }

    fn resolve(
        &self,
        contents: &BTreeMap<String, Vec<u8>>,
        name: &str,
        commit: &str,
        signature: usize,
        request: &Request,
    ) -> Response {
        let Some(bytes) = contents.get(name) else {
            return Response(404, "x-error-code: EntryNotFound\r\n".into(), Vec::new());
        };
        let sha256 = hex_sha256(bytes);
        let size = bytes.len();
        let headers = format!("x-repo-commit: {commit}\r\netag: \"{}\"\r\n", &sha256[..40]);
        if std::str::from_utf8(bytes).is_ok() {
            return ranged(bytes, headers, request);
        }
        let to = format!("{}/contents/{commit}/{}?Signature=secret{signature}", self.content_url, encoded(name));
        let linked = format!("x-linked-etag: \"{sha256}\"\r\nx-linked-size: {size}\r\n");
        Response(302, format!("{headers}{linked}location: {to}\r\n"), Vec::new())
    }
}

/// The answer of the server of contents.
fn content(state: &State, request: &Request) -> Response {
    let url = request.line.split(' ').nth(1).unwrap();
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    if query != format!("Signature=secret{}", state.signature) {
        let body = "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>";
        return Response(403, String::new(), body.into());
    }
    let (commit, name) = path.strip_prefix("/contents/").and_then(|rest| rest.split_once('/')).unwrap();
    ranged(&state.commits[commit][&decoded(name)], "etag: \"of-the-store\"\r\n".into(), request)
}

fn ranged(bytes: &[u8], mut headers: String, request: &Request) -> Response {
    let range = request.headers.get("range").and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        let last = bytes.len() - 1;
        Some((from.parse::<usize>().ok()?, if to.is_empty() { last } else { to.parse::<usize>().ok()?.min(last) }))
    });
    let Some((from, to)) = range else { return Response(200, headers, bytes.to_vec()) };
    headers += &format!("content-range: bytes {from}-{to}/{}\r\n", bytes.len());
    Response(206, headers, bytes[from..=to].to_vec())
}

fn file_info(name: &str, bytes: &[u8]) -> Value {
    let sha256 = hex_sha256(bytes);
    if std::str::from_utf8(bytes).is_ok() {
        return json!({"type": "file", "oid": &sha256[..40], "size": bytes.len(), "path": name});
    }
    let lfs = json!({"oid": sha256, "size": bytes.len(), "pointerSize": POINTER_BYTES});
    json!({"type": "file", "oid": &sha256[24..], "size": bytes.len(), "path": name, "lfs": lfs})
}

/// The files and folders among those that a request asks for, as JSON or as a form.
fn paths_info(contents: &BTreeMap<String, Vec<u8>>, request: &Request) -> Value {
    let text = String::from_utf8(request.body.clone()).unwrap();
    let asked: Vec<String> = match serde_json::from_str::<Value>(&text) {
        Ok(value) => value["paths"].as_array().unwrap().iter().map(|p| p.as_str().unwrap().to_owned()).collect(),
        Err(_) => text.split('&').filter_map(|pair| pair.strip_prefix("paths=")).map(decoded).collect(),
    };
    let info = |path: &String| match contents.get(path) {
        Some(bytes) => Some(file_info(path, bytes)),
        None if contents.keys().any(|name| name.starts_with(&format!("{path}/"))) => {
            Some(json!({"type": "directory", "oid": "t", "size": 0, "path": path}))
        }
        None => None,
    };
    asked.iter().filter_map(info).collect()
}

fn json_response(value: &Value, headers: &str) -> Response {
    Response(200, format!("content-type: application/json\r\n{headers}"), value.to_string().into_bytes())
}

/// Encodes a path for a URL.
fn encoded(path: &str) -> String {
    let keep = |b: u8| b.is_ascii_alphanumeric() || b"-._/".contains(&b);
    path.bytes().map(|b| if keep(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// Decodes `%41` and `+`.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let hex = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(if bytes[at] == b'+' { b' ' } else { bytes[at] });
                at += 1;
            }
        }
    }
    String::from_utf8(out).unwrap()
}

fn read_request(for_content: bool, stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut read_line = || {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        Some(line.trim_end().to_owned())
    };
    let line = read_line()?.rsplit_once(' ')?.0.to_owned();
    let mut headers = BTreeMap::new();
    while let Some((name, value)) = read_line()?.split_once(':') {
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { for_content, line, has_token: headers.contains_key("authorization"), headers, body })
}
