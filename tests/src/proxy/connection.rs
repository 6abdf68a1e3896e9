//! Serves one client's connection: its requests in order, each forwarded, broken or refused.
//!
//! ```text
//!   head ─► fault? ─► body ─► [500, 503] ─► gate ─► upstream ─► gate ─► [lost, 500, truncated, reset] ─► response ─►
//!   next
//! ```

use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::http::Message;
use super::{Fault, FaultKind, HoldPoint, Request, Shared};

/// Read timeout; only a hang takes that long.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

type Client = BufReader<TcpStream>;

/// Serves a client until one side closes.
pub fn serve(client: TcpStream, shared: &Shared) {
    let _ = client.set_nodelay(true);
    let _ = client.set_read_timeout(Some(READ_TIMEOUT));
    let mut client = BufReader::new(client);
    while let Ok(Some(request)) = Message::read_head(&mut client) {
        match exchange(&mut client, request, shared) {
            Ok(ConnectionAction::KeepOpen) => {}
            Ok(ConnectionAction::Close) | Err(_) => return,
            Ok(ConnectionAction::Reset) => {
                // Give the client time to read: a reset discards unread data.
                std::thread::sleep(Duration::from_millis(20));
                reset_on_close(client.get_ref());
                return;
            }
        }
    }
}

/// Makes closing the stream send a reset.
fn reset_on_close(stream: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: The descriptor is open, and the option is read from a value of its type and size.
    let done = unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), size)
    };
    assert_eq!(done, 0, "SO_LINGER: {}", io::Error::last_os_error());
}

/// What happens to the connection after a request.
enum ConnectionAction {
    KeepOpen,
    Close,
    Reset,
}

fn exchange(client: &mut Client, mut request: Message, shared: &Shared) -> io::Result<ConnectionAction> {
    let number = shared.number.fetch_add(1, Ordering::SeqCst);
    let mut words = request.start.split(' ').map(str::to_owned);
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let mut record = Request {
        number,
        method: method.clone(),
        path: path.to_owned(),
        query: query.to_owned(),
        range: request.header("range").map(str::to_owned),
        status: 0,
        request_bytes: 0,
        response_bytes: 0,
        fault: None,
    };
    let fault = shared.fault(number, &method, &target);
    let is = |kind| fault.is_some_and(|fault| fault.kind == kind);
    let keep_alive = !request.says("connection", "close") && !request.start.ends_with("HTTP/1.0");

    if request.says("expect", "100-continue") {
        client.get_mut().write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        request.set("Expect", None);
    }
    if is(FaultKind::ResetRequest) {
        let half = request.length().unwrap_or(0) / 2;
        io::copy(&mut client.take(half), &mut io::sink())?;
        record.fault = Some(FaultKind::ResetRequest);
        shared.record(&target, record);
        return Ok(ConnectionAction::Reset);
    }
    request.read_request_body(client)?;
    record.request_bytes = request.body.len() as u64;

    if let Some(fault) = fault {
        if fault.kind == FaultKind::Latency {
            std::thread::sleep(Duration::from_secs_f64(0.05 + 0.25 * fault.detail));
            record.fault = Some(FaultKind::Latency);
        }
        if matches!(fault.kind, FaultKind::Error500 | FaultKind::SlowDown503) {
            refuse(client, fault, record, &target, shared)?;
            return Ok(if keep_alive { ConnectionAction::KeepOpen } else { ConnectionAction::Close });
        }
    }

    shared.wait_at_gate(HoldPoint::Request, &method, &target);
    let Ok(response) = forward(&mut request, &method, shared) else {
        shared.unanswered.fetch_add(1, Ordering::SeqCst);
        shared.record(&target, record);
        return Ok(ConnectionAction::Close);
    };
    shared.wait_at_gate(HoldPoint::Response, &method, &target);
    if is(FaultKind::LostResponse) {
        record.fault = Some(FaultKind::LostResponse);
        shared.record(&target, record);
        return Ok(ConnectionAction::Close);
    }
    if let Some(fault) = fault.filter(|fault| fault.kind == FaultKind::False500) {
        refuse(client, fault, record, &target, shared)?;
        return Ok(if keep_alive { ConnectionAction::KeepOpen } else { ConnectionAction::Close });
    }
    if is(FaultKind::ResetResponse) || (is(FaultKind::Truncated) && response.body.len() >= 2) {
        let (head, body) = (response.head(), response.framed_body());
        // half of the body, or of the head if the body is too short
        let sent = if response.body.len() >= 2 { [head, body[..body.len() / 2].to_vec()].concat() } else { half(head) };
        record.fault = fault.map(|fault| fault.kind);
        record.response_bytes = (response.body.len() / 2) as u64;
        shared.record(&target, record);
        client.get_mut().write_all(&sent)?;
        return Ok(if is(FaultKind::ResetResponse) { ConnectionAction::Reset } else { ConnectionAction::Close });
    }
    record.status = response.status();
    record.response_bytes = response.body.len() as u64;
    shared.record(&target, record);
    let has_body = method != "HEAD" && !matches!(response.status(), 204 | 304);
    response.write(client.get_mut(), has_body)?;
    Ok(if keep_alive { ConnectionAction::KeepOpen } else { ConnectionAction::Close })
}

fn half(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() / 2);
    bytes
}

/// Sends an error response instead of forwarding the request.
fn refuse(client: &mut Client, fault: Fault, mut record: Request, target: &str, shared: &Shared) -> io::Result<()> {
    let refusal = refusal(fault);
    let has_body = record.method != "HEAD";
    record.fault = Some(fault.kind);
    record.status = refusal.status();
    record.response_bytes = if has_body { refusal.body.len() as u64 } else { 0 };
    // Counted before the response is sent, so that a client that has it also sees the count.
    shared.record(target, record);
    refusal.write(client.get_mut(), has_body).map(drop)
}

/// The error response, in S3's format.
fn refusal(fault: Fault) -> Message {
    let (start, code, message) = match fault.kind {
        FaultKind::SlowDown503 => ("HTTP/1.1 503 Slow Down", "SlowDown", "Please reduce your request rate."),
        _ => (
            "HTTP/1.1 500 Internal Server Error",
            "InternalError",
            "We encountered an internal error, please try again.",
        ),
    };
    let xml = r#"<?xml version="1.0" encoding="UTF-8"?>"#;
    let body = format!("{xml}\n<Error><Code>{code}</Code><Message>{message}</Message></Error>").into_bytes();
    let mut refusal = Message { start: start.into(), headers: Vec::new(), body };
    refusal.set("Content-Type", Some("application/xml"));
    refusal.set("Content-Length", Some(&refusal.body.len().to_string()));
    if fault.kind == FaultKind::SlowDown503 && fault.detail < 0.5 {
        refusal.set("Retry-After", Some("1"));
    }
    refusal
}

/// Sends a request to the upstream server over a new connection and reads the whole response.
fn forward(request: &mut Message, method: &str, shared: &Shared) -> io::Result<Message> {
    let upstream = TcpStream::connect(shared.upstream)?;
    upstream.set_nodelay(true)?;
    upstream.set_read_timeout(Some(READ_TIMEOUT))?;
    // A hop-by-hop header, so it is not signed. All other headers, including Host, are unchanged.
    request.set("Connection", Some("close"));
    let sent = request.write(&mut &upstream, true)?;
    shared.sent.fetch_add(sent, Ordering::SeqCst);
    let mut upstream = BufReader::new(upstream);
    loop {
        let mut response = Message::read_head(&mut upstream)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        response.read_response_body(method, &mut upstream)?;
        let received = response.head().len() + response.framed_body().len();
        shared.received.fetch_add(received as u64, Ordering::SeqCst);
        // Skips interim responses such as 100 Continue.
        if response.status() >= 200 {
            response.set("Connection", None);
            return Ok(response);
        }
    }
}
