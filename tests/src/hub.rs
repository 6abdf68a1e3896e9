//! A model hub on this machine. It serves the files of a folder as one repository, counts requests, and can delay a
//! download.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::hex_sha256;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Maximum delay of a download. The client treats a longer silence as a failure.
const MAX_DOWNLOAD_DELAY: Duration = Duration::from_secs(20);

/// The hub.
pub struct Hub {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of requests by method and file.
    request_counts: BTreeMap<(String, String), usize>,
    /// Delays downloads of this file until it has had this many `HEAD` requests.
    delayed: Option<(String, usize)>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hub {
    /// The URL of the repository in a job.
    pub const REFERENCE: &str = "hf://tests/teacher";

    /// Starts a hub that serves the files of a folder.
    pub fn start(folder: &Path) -> Self {
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let files =
            files.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()));
        let shared = Shared { files: files.collect(), state: Mutex::default(), changed: Condvar::new() };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let this = Self { address: listener.local_addr().unwrap(), shared: Arc::new(shared) };
        let shared = Arc::clone(&this.shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(&shared, stream));
            }
        });
        this
    }

    /// Sets the environment of a command that uses the hub with this cache folder.
    pub fn environment(&self, command: &mut Command, cache: &Path) {
        command.env("HF_ENDPOINT", format!("http://{}", self.address)).env("HF_HUB_CACHE", cache);
        command.env("NO_PROXY", "127.0.0.1").env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN");
    }

    /// Number of `HEAD` or `GET` requests for a file.
    pub fn request_count(&self, method: &str, file: &str) -> usize {
        self.shared.state().request_counts.get(&(method.to_owned(), file.to_owned())).copied().unwrap_or(0)
    }

    /// Delays downloads of a file from now on, until it has had `head_requests` `HEAD` requests in total.
    pub fn delay_download(&self, file: &str, head_requests: usize) {
        self.shared.state().delayed = Some((file.to_owned(), head_requests));
    }
}

fn serve(shared: &Shared, mut stream: TcpStream) {
    let Some((method, path)) = read_request(&stream) else { return };
    let (status, headers, body) = match path.split_once(&format!("/resolve/{COMMIT}/")) {
        Some((_, name)) => match shared.files.get(name) {
            Some(bytes) => {
                count(shared, &method, name);
                (200, format!("etag: \"{}\"\r\n", hex_sha256(bytes)), bytes.clone())
            }
            None => (404, "x-error-code: EntryNotFound\r\n".to_owned(), Vec::new()),
        },
        None => {
            let names = shared.files.keys().map(|name| json!({"rfilename": name}));
            let listing = json!({"sha": COMMIT, "siblings": names.collect::<Vec<_>>()});
            (200, String::new(), listing.to_string().into_bytes())
        }
    };
    let head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n", body.len());
    let body = if method == "HEAD" { &[][..] } else { &body[..] };
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

/// Reads a request with its headers; returns its method and path.
fn read_request(stream: &TcpStream) -> Option<(String, String)> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let _ = lines.take_while(|line| !line.is_empty()).count();
    let mut words = first.split(' ').map(str::to_owned);
    Some((words.next()?, words.next()?))
}

fn count(shared: &Shared, method: &str, name: &str) {
    let mut state = shared.state();
    *state.request_counts.entry((method.to_owned(), name.to_owned())).or_default() += 1;
    shared.changed.notify_all();
    let head_requests = (method == "GET").then(|| state.delayed.clone()).flatten().filter(|(file, _)| file == name);
    if let Some((_, head_requests)) = head_requests {
        let key = ("HEAD".to_owned(), name.to_owned());
        let too_few = |state: &mut State| state.request_counts.get(&key).copied().unwrap_or(0) < head_requests;
        drop(shared.changed.wait_timeout_while(state, MAX_DOWNLOAD_DELAY, too_few));
    }
}
