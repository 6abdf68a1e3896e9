//! Tests requests that are refused before their body is read: a client that sends all of it first still reads the
//! response, in bounded time.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use serde_json::{Value, json};
use stillhouse_tests::service::{Api, Service, TIMEOUT, eventually};

/// Limits under which no client of these tests counts as slow, even on a slow machine.
fn patient_limits() -> Value {
    json!({"limits": {"header_seconds": 180, "body_seconds": 180}})
}

/// A client with a raw socket.
struct RawClient {
    stream: TcpStream,
}

impl RawClient {
    /// Sends the head of a request with the headers `host` and the token of `api`.
    fn head(service: &Service, api: &Api, line: &str, headers: &[&str]) -> Self {
        let mut head = format!("{line} HTTP/1.1\r\n");
        if !headers.iter().any(|header| header.starts_with("host:")) {
            write!(head, "host: {}\r\n", &api.url()["http://".len()..]).unwrap();
        }
        if !api.secret().is_empty() {
            write!(head, "authorization: Bearer {}\r\n", api.secret()).unwrap();
        }
        headers.iter().for_each(|header| write!(head, "{header}\r\n").unwrap());
        let mut raw = Self { stream: service.connect() };
        raw.stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        raw.stream.write_all((head + "\r\n").as_bytes()).unwrap();
        raw
    }

    /// Waits, without reading, until the server has sent everything and closed its side.
    fn until_answered(&self) {
        let mut ready = libc::pollfd { fd: self.stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        let milliseconds = i32::try_from(TIMEOUT.as_millis()).unwrap();
        // SAFETY: The struct outlives the call, and its descriptor is open.
        let found = unsafe { libc::poll(&raw mut ready, 1, milliseconds) };
        assert_eq!(found, 1, "no answer in {} s", TIMEOUT.as_secs());
    }

    /// Sends `bytes` bytes in pieces, the first ones slowly, so that a closed connection is noticed.
    fn send(&mut self, bytes: usize) -> std::io::Result<()> {
        let piece = [b'#'; 1 << 15];
        for (n, start) in (0..bytes).step_by(piece.len()).enumerate() {
            self.stream.write_all(&piece[..piece.len().min(bytes - start)])?;
            if n < 8 {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }

    /// Sends `bytes` bytes as chunks, without the final one.
    fn send_chunks(&mut self, bytes: usize) -> std::io::Result<()> {
        let chunk = format!("8000\r\n{}\r\n", "#".repeat(0x8000));
        for n in 0..bytes.div_ceil(0x8000) {
            self.stream.write_all(chunk.as_bytes())?;
            if n < 8 {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }

    /// Reads everything that the server sent.
    fn read(&mut self) -> std::io::Result<String> {
        let mut all = String::new();
        self.stream.read_to_string(&mut all).map(|_| all)
    }
}

/// Asserts that a response is a problem of this status that closes the connection.
#[track_caller]
fn assert_refusal(what: &str, answer: &str, status: u16) {
    assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{what}: {answer:?}");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.lines().any(|line| line == "connection: close"), "{what}: {head}");
    let problem: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{what}: {e}: {body:?}"));
    assert_eq!(problem["status"], status, "{what}");
}

const YAML: &str = "content-type: application/yaml";
const LARGE: &str = "content-length: 1024001";
const MEGABYTE: usize = 1_024_001;
const POST: &str = "POST /api/v1/jobs";

/// Description, client, request line, headers, bytes of the body, and expected status.
type Case<'a> = (&'a str, &'a Api, &'a str, &'a [&'a str], usize, u16);

#[test]
fn who_sends_the_whole_body_first_reads_the_answer() {
    let mut service = Service::new(&patient_limits());
    service.configure(&json!({"auth": "token"}));
    service.launch();
    let (nobody, ada) = (service.api.clone(), service.token("ada", &["read", "submit"]));
    let cases: [Case<'_>; 10] = [
        ("a megabyte", &ada, POST, &[YAML, LARGE], MEGABYTE, 413),
        ("50 MB", &ada, POST, &[YAML, "content-length: 50000000"], 50_000_000, 413),
        ("9 GB, of which some comes", &ada, POST, &[YAML, "content-length: 9000000000"], 5_000_000, 413),
        ("another media type", &ada, POST, &["content-type: text/plain", LARGE], MEGABYTE, 415),
        ("a wrong query", &ada, "POST /api/v1/jobs?colour=red", &[YAML, LARGE], MEGABYTE, 400),
        ("no token", &nobody, POST, &[YAML, LARGE], MEGABYTE, 401),
        ("no token, chunks", &nobody, POST, &[YAML, "transfer-encoding: chunked"], MEGABYTE, 401),
        ("another path", &ada, "POST /nothing", &[YAML, LARGE], MEGABYTE, 404),
        ("another method", &ada, "PUT /api/v1/jobs", &[YAML, LARGE], MEGABYTE, 405),
        ("another host", &ada, POST, &["host: elsewhere", YAML, LARGE], MEGABYTE, 421),
    ];
    for (what, api, line, headers, bytes, status) in cases {
        let mut client = RawClient::head(&service, api, line, headers);
        client.until_answered();
        client.send(bytes).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_refusal(what, &client.read().unwrap_or_else(|e| panic!("{what}: {e}")), status);
    }
    // a body without a length is refused once the limit is exceeded
    let mut client = RawClient::head(&service, &ada, POST, &[YAML, "transfer-encoding: chunked"]);
    client.send_chunks(MEGABYTE).unwrap();
    client.until_answered();
    client.send_chunks(5_000_000).unwrap();
    assert_refusal("chunks", &client.read().unwrap(), 413);
    // a head that is too long is refused before it is a request
    let mut client = RawClient::head(&service, &ada, "GET /api/v1/jobs", &[&format!("x-a: {}", "a".repeat(MEGABYTE))]);
    client.until_answered();
    client.send(MEGABYTE).unwrap();
    assert!(client.read().unwrap().starts_with("HTTP/1.1 431 "));
    // an ordinary HTTP client
    let body = "#".repeat(20_000_000);
    ada.send("POST", "/jobs", &[("content-type", "application/yaml")], Some(&body)).problem(413);
}

#[test]
fn who_asks_too_often_with_a_body_reads_so() {
    let mut service = Service::new(&patient_limits());
    service.configure(&json!({"limits": {"submissions_per_minute": 1}}));
    service.launch();
    let api = &service.api;
    api.send("POST", "/validate", &[("content-type", "application/yaml")], Some("version: 1")).expect(200);
    let mut client = RawClient::head(&service, api, POST, &[YAML, LARGE]);
    client.until_answered();
    client.send(MEGABYTE).unwrap();
    assert_refusal("too often", &client.read().unwrap(), 429);
}

#[test]
fn who_asks_whether_to_go_on_is_reported_before_the_body() {
    let service = Service::start(&patient_limits());
    let api = &service.api;
    let expect = "expect: 100-continue";
    let mut client = RawClient::head(&service, api, POST, &[YAML, LARGE, expect]);
    // the body was not requested and is not sent
    assert_refusal("refused", &client.read().unwrap(), 413);
    drop(client);
    let mut client = RawClient::head(&service, api, "POST /api/v1/validate", &[YAML, "content-length: 10", expect]);
    let mut reported = [0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
    client.stream.read_exact(&mut reported).unwrap();
    assert_eq!(&reported, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.stream.write_all(b"version: 1").unwrap();
    // the body was read, so the connection serves the next request
    client.stream.write_all(b"GET /api/v1/health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n").unwrap();
    let answers = client.read().unwrap();
    let statuses: Vec<&str> = answers.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
    assert_eq!((statuses, answers.matches("connection: close").count()), (vec!["200", "200"], 1), "{answers}");
}

#[test]
fn what_is_sent_after_a_refusal_is_taken_for_a_while() {
    let mut service = Service::new(&json!({
        "limits": {"connections": 1, "connections_kept": 1, "header_seconds": 1, "body_seconds": 2},
    }));
    service.launch();
    let refused = || {
        let client = RawClient::head(&service, &service.api, POST, &[YAML, "content-length: 50000000"]);
        client.until_answered();
        client
    };
    // a silent client loses its connection slot after one second
    let silent = refused();
    eventually("the place of the silent one", || (service.api.try_get("/jobs")?.status == 200).then_some(()));
    drop(silent);
    // a byte now and then does not extend that beyond two seconds
    let mut slow = refused();
    eventually("the end of the slow one", || {
        std::thread::sleep(Duration::from_millis(100));
        slow.stream.write_all(b"#").err()
    });
    eventually("the place of the slow one", || (service.api.try_get("/jobs")?.status == 200).then_some(()));

    // even from a fast client at most 64 MB are read
    service.configure(&patient_limits());
    service.kill();
    service.launch();
    let mut fast = RawClient::head(&service, &service.api, POST, &[YAML, "content-length: 9000000000"]);
    fast.until_answered();
    let piece = [b'#'; 100_000];
    let taken = (0..).find(|_| fast.stream.write_all(&piece).is_err()).unwrap() * piece.len();
    assert!((64_000_000..100_000_000).contains(&taken), "{taken}");
}

#[test]
fn a_refused_client_gives_way_in_the_places_that_are_kept() {
    // The reserved connections serve health checks, but not clients that keep sending after a refusal.
    for line in ["POST /api/v1/health", "GET /api/v1/health", POST] {
        let mut service = Service::new(&patient_limits());
        service.configure(&json!({"limits": {"connections": 1, "connections_kept": 1}}));
        service.launch();
        let mut idle = service.connect();
        idle.write_all(b"GET /").unwrap();
        let mut client = RawClient::head(&service, &service.api, line, &[YAML, "content-length: 50000000"]);
        client.until_answered();
        client.send(100_000).unwrap_or_else(|e| panic!("{line}: {e}"));
        eventually("the place that is kept", || (service.api.try_get("/health")?.status == 200).then_some(()));
    }
}
