//! A fake store that returns scripted responses and records requests.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// A scripted response.
#[derive(Debug, Clone)]
pub(super) enum Answer {
    /// Status, header lines, body.
    Status(u16, &'static str, String),
    /// Closes the connection without a response.
    Reset,
    /// Truncates the body.
    Truncated,
    /// Sends nothing, for longer than any client waits.
    Silence,
    /// Sends a valid response, then stops listening.
    Last,
}

#[derive(Debug, Clone)]
pub(super) struct Request {
    pub method: String,
    pub path: String,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

#[derive(Default)]
struct State {
    answers: VecDeque<Answer>,
    requests: Vec<Request>,
    closed: bool,
}

#[derive(Clone)]
pub(super) struct FakeStore {
    state: Arc<Mutex<State>>,
    pub url: String,
}

pub(super) const BODY: &str = "0123456789";

/// An error body in S3's format.
pub(super) fn xml(code: &str) -> String {
    format!("<?xml version=\"1.0\"?>\n<Error><Code>{code}</Code><Message>m</Message></Error>")
}

impl FakeStore {
    /// Returns these responses, then `BODY` for every further request.
    pub fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        Self::at("127.0.0.1", answers)
    }

    /// Like `new`, at a given address of this machine.
    pub fn at(address: &str, answers: impl IntoIterator<Item = Answer>) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = State { answers: answers.into_iter().collect(), ..State::default() };
        let fake_store = Self { state: Arc::new(Mutex::new(state)), url };
        let serving = fake_store.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let silence = serving.serve(stream);
                if serving.state().closed {
                    return;
                }
                // kept open, so that the client waits
                thread::spawn(move || {
                    let _stream = silence;
                    thread::sleep(Duration::from_secs(20));
                });
            }
        });
        fake_store
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.state().requests.clone()
    }

    pub fn count(&self) -> usize {
        self.state().requests.len()
    }

    fn serve(&self, mut stream: TcpStream) -> Option<TcpStream> {
        let request = read_request(&stream)?;
        let head = request.method == "HEAD";
        let mut state = self.state();
        state.requests.push(request);
        let answer = state.answers.pop_front().unwrap_or(Answer::Status(200, "etag: \"e\"", BODY.into()));
        state.closed = matches!(answer, Answer::Last);
        drop(state);
        let (status, headers, body, sent) = match answer {
            Answer::Reset => return None,
            Answer::Silence => return Some(stream),
            Answer::Status(status, headers, body) => {
                let sent = body.len();
                (status, headers, body, sent)
            }
            Answer::Truncated => (200, "etag: \"e\"", BODY.to_owned(), BODY.len() / 2),
            Answer::Last => (200, "etag: \"e\"", BODY.to_owned(), BODY.len()),
        };
        let separator = if headers.is_empty() { "" } else { "\r\n" };
        let length = if status == 204 { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        let start = format!("HTTP/1.1 {status} X\r\nconnection: close\r\n{length}{headers}{separator}\r\n");
        let body = if head { "" } else { &body[..sent] };
        let _ = stream.write_all(start.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        None
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { method, path, headers, body })
}
