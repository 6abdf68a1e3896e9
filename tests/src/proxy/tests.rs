use std::io::{self, BufReader, Read, Write};

use super::http::Message;
use super::*;

/// A server that echoes each request. Returns its URL and the number of requests received completely.
fn upstream() -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let whole = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&whole);
    std::thread::spawn(move || {
        for stream in listener.incoming().map(Result::unwrap) {
            let mut stream = BufReader::new(stream);
            let Ok(Some(mut asked)) = Message::read_head(&mut stream) else { continue };
            if asked.read_request_body(&mut stream).is_err() {
                continue;
            }
            counter.fetch_add(1, Ordering::SeqCst);
            let host = asked.header("host").unwrap();
            let said = format!("{} host={host} body={}", asked.start, String::from_utf8_lossy(&asked.body));
            let path = asked.start.split(' ').nth(1).unwrap();
            let answer = match path {
                "/chunks" => format!(
                    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{said}\r\n2;x=y\r\n!!\r\n0\r\nT: r\r\n\r\n",
                    said.len()
                ),
                "/until-close" => format!("HTTP/1.0 200 OK\r\n\r\n{said}"),
                "/204" => "HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n".into(),
                "/304" => "HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n".into(),
                _ if asked.start.starts_with("HEAD") => "HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n".into(),
                _ => format!(
                    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\n\r\n{said}",
                    said.len()
                ),
            };
            let _ = stream.get_mut().write_all(answer.as_bytes());
        }
    });
    (endpoint, whole)
}

/// A client with one connection.
struct Wire(BufReader<TcpStream>);

impl Wire {
    fn to(proxy: &FaultProxy) -> Self {
        Self(BufReader::new(TcpStream::connect(proxy.address).unwrap()))
    }

    fn send(&mut self, request: &str) {
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
    }

    fn answer(&mut self, method: &str) -> io::Result<Message> {
        let mut answer = Message::read_head(&mut self.0)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        answer.read_response_body(method, &mut self.0)?;
        Ok(answer)
    }

    /// Reads until the end; returns the bytes and how the stream ended.
    fn rest(&mut self) -> (Vec<u8>, io::Result<usize>) {
        let mut bytes = Vec::new();
        let end = self.0.read_to_end(&mut bytes);
        (bytes, end)
    }
}

fn put(target: &str, body: &str) -> String {
    format!("PUT {target} HTTP/1.1\r\nHost: bucket.example:9\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

fn get(target: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nhost: h\r\nRange: bytes=2-5\r\n\r\n")
}

fn always(kind: FaultKind) -> FaultPlan {
    FaultPlan { seed: 7, probability: 1.0, kinds: vec![kind], max_consecutive: u32::MAX, ..FaultPlan::default() }
}

#[test]
fn without_faults_it_is_not_there() {
    let (endpoint, whole) = upstream();
    let proxy = FaultProxy::start(&endpoint, FaultPlan { probability: 0.0, ..FaultPlan::default() });
    // all over one connection
    let mut wire = Wire::to(&proxy);
    wire.send(&put("/a?x=1", "hello"));
    let answer = wire.answer("PUT").unwrap();
    assert_eq!(answer.start, "HTTP/1.1 206 Partial Content");
    assert_eq!(answer.body, b"PUT /a?x=1 HTTP/1.1 host=bucket.example:9 body=hello");

    wire.send("PUT /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
    assert_eq!(wire.answer("PUT").unwrap().body, b"PUT /b HTTP/1.1 host=h body=abcde");
    wire.send(&get("/chunks"));
    let answer = wire.answer("GET").unwrap();
    assert_eq!(answer.header("Transfer-Encoding"), Some("chunked"));
    assert_eq!(answer.body, b"GET /chunks HTTP/1.1 host=h body=!!");
    wire.send(&get("/until-close"));
    assert_eq!(wire.answer("GET").unwrap().body, b"GET /until-close HTTP/1.1 host=h body=");
    wire.send("HEAD /c HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(wire.answer("HEAD").unwrap().header("content-length"), Some("1234"));
    wire.send(&get("/204"));
    assert_eq!(wire.answer("GET").unwrap().header("x-a"), Some("b"));
    wire.send(&get("/304"));
    assert_eq!(wire.answer("GET").unwrap().status(), 304);

    wire.send("PUT /d HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    assert_eq!(wire.answer("PUT").unwrap().status(), 100);
    wire.send("ok");
    assert_eq!(wire.answer("PUT").unwrap().body, b"PUT /d HTTP/1.1 host=h body=ok");

    assert_eq!(whole.load(Ordering::SeqCst), 8);
    assert_eq!(proxy.fired(), BTreeMap::new());
    assert_eq!(proxy.by_method(), [("GET", 4), ("HEAD", 1), ("PUT", 3)].map(|(m, n)| (m.to_owned(), n)).into());
    let requests = proxy.requests();
    assert_eq!((requests[0].path.as_str(), requests[0].query.as_str(), requests[0].request_bytes), ("/a", "x=1", 5));
    assert_eq!((requests[2].range.as_deref(), requests[2].response_bytes), (Some("bytes=2-5"), 35));
    let traffic = proxy.traffic();
    assert!(traffic.sent > 400 && traffic.received > 400 && traffic.unanswered == 0, "{traffic:?}");
}

#[test]
fn every_fault_happens_and_counts() {
    let (endpoint, whole) = upstream();
    for kind in FaultKind::ALL {
        let proxy = FaultProxy::start(&endpoint, always(kind));
        let before = whole.load(Ordering::SeqCst);
        let body = "0123456789".repeat(1000);
        let mut wire = Wire::to(&proxy);
        wire.send(&put("/a", &body));
        let (seen, acted) = match kind {
            FaultKind::Latency | FaultKind::Error500 | FaultKind::SlowDown503 | FaultKind::False500 => {
                let answer = wire.answer("PUT").unwrap();
                let status = answer.status();
                // the connection stays usable
                wire.send(&put("/b", "x"));
                assert_eq!(wire.answer("PUT").unwrap().status(), status);
                if kind == FaultKind::SlowDown503 {
                    assert!(String::from_utf8(answer.body).unwrap().contains("<Code>SlowDown</Code>"));
                }
                (format!("{status}"), whole.load(Ordering::SeqCst) - before)
            }
            _ => {
                let (bytes, end) = wire.rest();
                let end = end.map_err(|e| e.kind());
                let text = String::from_utf8(bytes).unwrap();
                let head = text.starts_with("HTTP/1.1 206") && text.contains("Content-Length: 10043");
                let half = head && text.len() > 5000 && text.len() < 6000;
                (
                    format!("{end:?} half={half}").replace(&text.len().to_string(), "n"),
                    whole.load(Ordering::SeqCst) - before,
                )
            }
        };
        let expected = match kind {
            FaultKind::Latency => ("206", 2),
            FaultKind::Error500 => ("500", 0),
            FaultKind::SlowDown503 => ("503", 0),
            FaultKind::ResetRequest => ("Err(ConnectionReset) half=false", 0),
            FaultKind::ResetResponse => ("Err(ConnectionReset) half=true", 1),
            FaultKind::Truncated => ("Ok(n) half=true", 1),
            FaultKind::LostResponse => ("Ok(0) half=false", 1),
            FaultKind::False500 => ("500", 2),
        };
        let seen = if kind == FaultKind::LostResponse { seen.replace("Ok(n)", "Ok(0)") } else { seen };
        assert_eq!((seen.as_str(), acted), expected, "{kind:?}");
        let requests = proxy.requests();
        assert_eq!(proxy.fired(), [(kind, requests.len() as u64)].into());
        assert!(requests.iter().all(|r| r.fault == Some(kind)));
    }
}

#[test]
fn what_does_not_happen_does_not_count() {
    let (endpoint, _) = upstream();
    let proxy = FaultProxy::start(&endpoint, always(FaultKind::Truncated));
    let mut wire = Wire::to(&proxy);
    wire.send("HEAD /a HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(wire.answer("HEAD").unwrap().status(), 200);
    proxy.set_plan(FaultPlan { only: |method, _| method == "PUT", ..always(FaultKind::Error500) });
    wire.send(&get("/a"));
    assert_eq!(wire.answer("GET").unwrap().status(), 206);
    proxy.set_enabled(false);
    wire.send(&put("/a", "x"));
    assert_eq!(wire.answer("PUT").unwrap().status(), 206);
    assert_eq!(proxy.fired(), BTreeMap::new());
    proxy.set_enabled(true);
    wire.send(&put("/a", "x"));
    assert_eq!(wire.answer("PUT").unwrap().status(), 500);
    assert_eq!(proxy.fired(), [(FaultKind::Error500, 1)].into());
}

#[test]
fn the_same_request_gets_through_in_the_end() {
    let (endpoint, _) = upstream();
    let proxy = FaultProxy::start(&endpoint, FaultPlan { max_consecutive: 3, ..always(FaultKind::Error500) });
    let mut wire = Wire::to(&proxy);
    let statuses = |wire: &mut Wire, target: &str| {
        let status = |_| {
            wire.send(&put(target, "x"));
            wire.answer("PUT").unwrap().status()
        };
        (0..5).map(status).collect::<Vec<_>>()
    };
    assert_eq!(statuses(&mut wire, "/a?part=1"), [500, 500, 500, 206, 500]);
    assert_eq!(statuses(&mut wire, "/a?part=2"), [500, 500, 500, 206, 500]);
}

#[test]
fn faults_are_of_the_seed_and_as_many_as_reported() {
    let (endpoint, _) = upstream();
    let draw = |seed| {
        let proxy = FaultProxy::start(&endpoint, FaultPlan { seed, probability: 0.3, ..FaultPlan::default() });
        (0..2000).map(|n| proxy.shared.fault(n, "GET", "/").map(|f| f.kind)).collect::<Vec<_>>()
    };
    let (one, two) = (draw(1), draw(2));
    assert_eq!(one, draw(1));
    assert_ne!(one, two);
    let faults = one.iter().flatten().count();
    assert!((520..680).contains(&faults), "{faults} of 2000");
    for kind in FaultKind::ALL {
        let count = one.iter().flatten().filter(|&&k| k == kind).count();
        assert!((50..130).contains(&count), "{kind:?} {count}");
    }
}

#[test]
fn a_server_that_is_gone_closes_the_connection() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let proxy = FaultProxy::start(&format!("http://{gone}"), FaultPlan::default());
    proxy.set_enabled(false);
    let mut wire = Wire::to(&proxy);
    wire.send(&get("/a"));
    assert!(wire.answer("GET").is_err());
    assert_eq!((proxy.traffic().unanswered, proxy.requests()[0].status), (1, 0));
}

#[test]
fn what_is_held_goes_when_it_is_let_go() {
    for (waits, acted) in [(HoldPoint::Request, 0), (HoldPoint::Response, 1)] {
        let (endpoint, whole) = upstream();
        let proxy = FaultProxy::start(&endpoint, FaultPlan { probability: 0.0, ..FaultPlan::default() });
        proxy.hold(waits, |method, target| method == "PUT" && target == "/a");
        let [mut held, mut other] = [(); 2].map(|()| Wire::to(&proxy));
        held.send(&put("/a", "x"));
        while proxy.waiting() == 0 || whole.load(Ordering::SeqCst) < acted {
            std::thread::yield_now();
        }
        other.send(&get("/a"));
        assert_eq!(other.answer("GET").unwrap().status(), 206);
        assert_eq!((proxy.waiting(), whole.load(Ordering::SeqCst)), (1, acted + 1));
        proxy.release();
        assert_eq!(held.answer("PUT").unwrap().status(), 206);
        held.send(&put("/a", "x"));
        assert_eq!(held.answer("PUT").unwrap().status(), 206);
        assert_eq!((proxy.waiting(), whole.load(Ordering::SeqCst)), (0, 3));
    }
}
