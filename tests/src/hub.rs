//! A model hub on this machine: one repository with the files of a folder, which counts what is asked for, and may keep a download under way.

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
/// A download that is kept is let go after so long in any case: the client calls a longer silence a failure.
const KEPT: Duration = Duration::from_secs(20);

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
    /// How often, by method and file.
    asked: BTreeMap<(String, String), usize>,
    /// Downloads of this file wait until it was looked at so often.
    kept: Option<(String, usize)>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hub {
    /// How a job names its repository.
    pub const REFERENCE: &str = "hf://tests/teacher";

    /// With the files of a folder.
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

    /// A command that uses it, with this cache.
    pub fn environment(&self, command: &mut Command, cache: &Path) {
        command.env("HF_ENDPOINT", format!("http://{}", self.address)).env("HF_HUB_CACHE", cache);
        command.env("NO_PROXY", "127.0.0.1").env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN");
    }

    /// How often a file was looked at (`HEAD`) or downloaded (`GET`).
    pub fn asked(&self, method: &str, file: &str) -> usize {
        self.shared.state().asked.get(&(method.to_owned(), file.to_owned())).copied().unwrap_or(0)
    }

    /// From now on downloads of a file are kept under way until it was looked at so often in all.
    pub fn keeps(&self, file: &str, looks: usize) {
        self.shared.state().kept = Some((file.to_owned(), looks));
    }
}

fn serve(shared: &Shared, mut stream: TcpStream) {
    let Some((method, path)) = asked(&stream) else { return };
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

/// Method and path of a request, which is read with all its headers.
fn asked(stream: &TcpStream) -> Option<(String, String)> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let _ = lines.take_while(|line| !line.is_empty()).count();
    let mut words = first.split(' ').map(str::to_owned);
    Some((words.next()?, words.next()?))
}

fn count(shared: &Shared, method: &str, name: &str) {
    let mut state = shared.state();
    *state.asked.entry((method.to_owned(), name.to_owned())).or_default() += 1;
    shared.changed.notify_all();
    let looks = (method == "GET").then(|| state.kept.clone()).flatten().filter(|(file, _)| file == name);
    if let Some((_, looks)) = looks {
        let key = ("HEAD".to_owned(), name.to_owned());
        let too_few = |state: &mut State| state.asked.get(&key).copied().unwrap_or(0) < looks;
        drop(shared.changed.wait_timeout_while(state, KEPT, too_few));
    }
}
