//! The service's client, for the commands that call one: requests, readable problem details, streams that survive a
//! lost connection.

use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use reqwest::blocking::{Client as HttpClient, Response};
use reqwest::redirect::Policy;
use reqwest::{Method, StatusCode, header};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use stillhouse_pipeline::storage::{Backoff, NoResponseReason, classify_no_response};
use stillhouse_schemas::problems::Problem;
use url::{Host, Url};

use super::api::BASE;
use super::config::DEFAULT_PORT;
use super::model::{EventView, FieldProblem};

/// Where a service is, and with what it is asked.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Service (the token comes from STILLHOUSE_TOKEN)")]
pub struct ServiceOptions {
    /// Address of the service [default: http://127.0.0.1:7373]
    #[arg(long, value_name = "URL", env = "STILLHOUSE_URL", global = true)]
    url: Option<String>,
}

/// Why a request to a service failed.
#[derive(Debug)]
pub enum ClientError {
    /// The caller used it wrongly.
    Usage(String),
    /// The connection failed or broke; a retry may help.
    Connection(String),
    /// The connection was refused: no server listens at the address.
    ConnectionRefused(String),
    /// The service refused the request.
    Refused(Box<Refusal>),
}

/// The parts of a problem detail that a user needs.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Refusal {
    /// HTTP status of the answer.
    pub status: u16,
    /// The kind of problem.
    pub title: String,
    /// What is wrong, for the user.
    pub detail: String,
    /// The service's id of the request, as in its log.
    pub request_id: Option<String>,
    /// Problems of the job file, by field.
    pub problems: Vec<FieldProblem>,
}

impl std::fmt::Display for ClientError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usage(message) | Self::Connection(message) | Self::ConnectionRefused(message) => f.write_str(message),
            Self::Refused(refusal) => {
                write!(f, "{}", refusal.detail)?;
                for problem in &refusal.problems {
                    write!(f, "\n  {}", render_problem(problem))?;
                }
                if refusal.status >= 500
                    && let Some(id) = &refusal.request_id
                {
                    write!(f, " (request {id})")?;
                }
                Ok(())
            }
        }
    }
}

/// Renders a problem of a job file as `run` does.
pub fn render_problem(problem: &FieldProblem) -> String {
    Problem::from(problem).render(None)
}

type Result<T, E = ClientError> = std::result::Result<T, E>;

/// A client of one service.
#[derive(Debug, Clone)]
pub struct Client {
    base: String,
    token: Option<String>,
    http: HttpClient,
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
const MAX_ANSWER_BYTES: u64 = 256 << 20;
const MAX_LINE_BYTES: u64 = 64 << 20;

impl ServiceOptions {
    /// Creates the client of the chosen service.
    ///
    /// # Errors
    /// When the address or the token is not valid.
    pub fn client(&self) -> Result<Client> {
        let usage = |message: &str| ClientError::Usage(message.to_owned());
        let address = self.url.clone().unwrap_or_else(|| format!("http://127.0.0.1:{DEFAULT_PORT}"));
        let url =
            Url::parse(&address).map_err(|e| usage(&format!("--url: {e}; valid: http://host:port, https://host")))?;
        // the message must not repeat parts that may hold a secret
        if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
            return Err(usage(
                "--url: must have no user, password, query or fragment; a token goes into STILLHOUSE_TOKEN",
            ));
        }
        if !matches!(url.scheme(), "http" | "https") {
            return Err(usage("--url: valid: http://host:port, https://host"));
        }
        let token = std::env::var("STILLHOUSE_TOKEN").ok().map(|t| t.trim().to_owned()).filter(|t| !t.is_empty());
        if token.as_ref().is_some_and(|t| !t.bytes().all(|b| b.is_ascii_graphic())) {
            return Err(usage("STILLHOUSE_TOKEN: not a token; valid: sh_…, as `stillhouse token create` prints it"));
        }
        let http = http_client(is_this_machine(&url), ANSWER_TIMEOUT)?;
        Ok(Client { base: format!("{}{BASE}", url.as_str().trim_end_matches('/')), token, http })
    }
}

/// Whether a URL points to this machine, which needs no proxy.
fn is_this_machine(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// Creates an HTTP client. `timeout` limits the wait for the head of an answer, and each read.
fn http_client(is_local: bool, timeout: Duration) -> Result<HttpClient> {
    let settings = HttpClient::builder()
        .redirect(Policy::none())
        .user_agent(concat!("stillhouse/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(timeout);
    let settings = if is_local { settings.no_proxy() } else { settings };
    settings
        .build()
        .map_err(|e| ClientError::Usage(format!("cannot set up the HTTP client: {}", classify_no_response(&e).1)))
}

/// A body that may be silent for any time: a read that times out is repeated.
struct RetryTimeouts<R>(R);

impl<R: Read> Read for RetryTimeouts<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                Err(e) if classify_no_response(&e).0 == NoResponseReason::Timeout => {}
                read => return read,
            }
        }
    }
}

/// Reads a body of at most `limit` bytes to its end.
fn read_text(response: Response, limit: u64) -> std::io::Result<String> {
    let mut text = String::new();
    response.take(limit + 1).read_to_string(&mut text)?;
    match text.len() as u64 > limit {
        true => Err(std::io::Error::other(format!("the answer has more than {limit} bytes"))),
        false => Ok(text),
    }
}

/// A request: method, path below the API, query, headers and body.
#[derive(Debug, Clone, Default)]
pub struct ApiRequest<'a> {
    /// The HTTP method.
    pub method: &'a str,
    /// The path below `/api/v1`.
    pub path: String,
    /// Parameters of the query.
    pub query: Vec<(&'a str, String)>,
    /// Headers beyond those of every request.
    pub headers: Vec<(&'a str, String)>,
    /// The body.
    pub body: Option<String>,
}

impl<'a> ApiRequest<'a> {
    /// A request without parameters, headers and body.
    pub fn new(method: &'a str, path: impl Into<String>) -> Self {
        Self { method, path: path.into(), ..Self::default() }
    }

    #[must_use]
    /// Adds a parameter to the query, if it has a value.
    pub fn with(mut self, key: &'a str, value: Option<impl ToString>) -> Self {
        self.query.extend(value.map(|v| (key, v.to_string())));
        self
    }

    #[must_use]
    /// Adds a header.
    pub fn header(mut self, name: &'a str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

impl Client {
    /// Sends a request and reads the answer as JSON.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn json<T: DeserializeOwned>(&self, request: &ApiRequest<'_>) -> Result<T> {
        let text = self.text(request)?;
        serde_json::from_str(&text).map_err(|e| {
            ClientError::Connection(format!("{}: the answer is not from a Stillhouse service: {e}", self.base))
        })
    }

    /// Sends a request and reads the answer as text.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn text(&self, request: &ApiRequest<'_>) -> Result<String> {
        read_text(self.send(request)?, MAX_ANSWER_BYTES).map_err(|e| self.connection_error(&e))
    }

    /// Sends a request and returns the answer's body as it arrives. The body may be silent for any time.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stream(&self, request: &ApiRequest<'_>) -> Result<impl Read + use<>> {
        Ok(RetryTimeouts(self.send(request)?))
    }

    /// Opens a stream of events.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn events(&self, request: ApiRequest<'_>) -> Result<Events<impl Read + use<>>> {
        // silence longer than the read timeout means a lost connection: a service sends a keep-alive every 15 s
        let body = self.send(&request.header("accept", "text/event-stream"))?;
        Ok(Events { lines: BufReader::new(body), last_id: None })
    }

    /// Follows a stream of events to its end, across lost connections and restarts of the service. Each new connection
    /// resumes after the last event.
    ///
    /// `retry_first`: retry even if the first connection fails.
    ///
    /// # Errors
    /// Those of `on_item`; a refusal by the service; no service for ten minutes.
    pub fn follow<E: From<ClientError>>(
        &self,
        path: &str,
        retry_first: bool,
        mut on_item: impl FnMut(StreamItem<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut cursor = Cursor { last_id: None, connected: retry_first, opened: false, lost_since: None, failures: 0 };
        loop {
            match self.follow_once(path, &mut cursor, &mut on_item) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(FollowError::Callback(e)) => return Err(e),
                Err(FollowError::Client(lost @ (ClientError::Connection(_) | ClientError::ConnectionRefused(_))))
                    if cursor.connected =>
                {
                    let now = Instant::now();
                    if cursor.lost_since.is_none() {
                        on_item(StreamItem::Note(&format!("{lost}; trying again")))?;
                    }
                    if cursor.lost_since.get_or_insert(now).elapsed() > OUTAGE_TIMEOUT {
                        return Err(lost.into());
                    }
                }
                // the event numbers belong to another service, or their events were deleted
                Err(FollowError::Client(ClientError::Refused(refusal)))
                    if refusal.status == 409 && cursor.last_id.is_some() =>
                {
                    on_item(StreamItem::Note(&format!("some events may be missing: {}", refusal.detail)))?;
                    cursor.last_id = None;
                    continue;
                }
                Err(FollowError::Client(e)) => return Err(e.into()),
            }
            cursor.failures += 1;
            std::thread::sleep(BACKOFF.wait(cursor.failures, None));
        }
    }

    /// One connection of [`Client::follow`]; returns whether the stream reached its end.
    fn follow_once<E>(
        &self,
        path: &str,
        cursor: &mut Cursor,
        on_item: &mut impl FnMut(StreamItem<'_>) -> Result<(), E>,
    ) -> Result<bool, FollowError<E>> {
        let mut request = ApiRequest::new("GET", path);
        if let Some(last_id) = &cursor.last_id {
            request = request.header("last-event-id", last_id);
        }
        let mut events = self.events(request).map_err(FollowError::Client)?;
        (cursor.connected, cursor.failures) = (true, 0);
        if !std::mem::replace(&mut cursor.opened, true) {
            on_item(StreamItem::Open).map_err(FollowError::Callback)?;
        }
        if cursor.lost_since.take().is_some() {
            on_item(StreamItem::Note("the service is back")).map_err(FollowError::Callback)?;
        }
        loop {
            let received = events.receive();
            if let Some(last_id) = events.last_id.take() {
                cursor.last_id = Some(last_id);
            }
            match received.map_err(FollowError::Client)? {
                Some(Received::Event(event)) => on_item(StreamItem::Event(&event)).map_err(FollowError::Callback)?,
                Some(Received::Missed) => {
                    let text = "some changes were missed; `stillhouse jobs list` shows the current state of each job";
                    on_item(StreamItem::Note(text)).map_err(FollowError::Callback)?;
                }
                Some(Received::End) => return Ok(true),
                None => return Ok(false),
            }
        }
    }

    fn send(&self, request: &ApiRequest<'_>) -> Result<Response> {
        let usage_error =
            |what: &dyn std::fmt::Display| ClientError::Usage(format!("the request cannot be sent: {what}"));
        let mut url = Url::parse(&format!("{}{}", self.base, request.path)).map_err(|e| usage_error(&e))?;
        if !request.query.is_empty() {
            url.query_pairs_mut().extend_pairs(&request.query);
        }
        let method = Method::from_bytes(request.method.as_bytes()).map_err(|e| usage_error(&e))?;
        let mut builder = self.http.request(method, url);
        if let Some(token) = &self.token {
            builder = builder.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        for (name, value) in &request.headers {
            builder = builder.header(*name, value);
        }
        if let Some(body) = &request.body {
            builder = builder.body(body.clone());
        }
        let response = builder.send().map_err(|e| self.connection_error(&e))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let text = read_text(response, 1 << 20).unwrap_or_default();
        let refusal: Refusal = serde_json::from_str(&text).unwrap_or_default();
        Err(self.refused(status, refusal))
    }

    fn refused(&self, status: StatusCode, mut refusal: Refusal) -> ClientError {
        refusal.status = status.as_u16();
        if refusal.detail.is_empty() {
            refusal.detail = format!("{} answered {status}, but not in the form of a Stillhouse service", self.base);
        }
        if matches!(status.as_u16(), 429 | 502 | 503 | 504) {
            // a proxy in front of a restarting service, or too many requests: a retry may succeed
            return ClientError::Connection(format!("{} ({status})", refusal.detail));
        }
        if status == StatusCode::UNAUTHORIZED {
            refusal.detail = match self.token {
                Some(_) => "the service does not accept the token in STILLHOUSE_TOKEN: it has expired, was revoked, or belongs to another service".into(),
                None => "the service needs a token: put it into STILLHOUSE_TOKEN (`stillhouse token create` on its machine creates one)".into(),
            };
        }
        ClientError::Refused(Box::new(refusal))
    }

    fn connection_error(&self, error: &(dyn Error + 'static)) -> ClientError {
        let service = self.base.strip_suffix(BASE).unwrap_or(&self.base);
        match classify_no_response(error) {
            (NoResponseReason::ConnectionRefused, _) => ClientError::ConnectionRefused(format!(
                "{service}: no service listens there; `stillhouse serve` starts a service, --url chooses another one"
            )),
            (NoResponseReason::Unsendable, text) => ClientError::Usage(format!("{service}: the request {text}")),
            (_, text) => ClientError::Connection(format!("{service}: {text}")),
        }
    }
}

/// An item of a followed stream.
pub enum StreamItem<'a> {
    /// The first connection is open.
    Open,
    /// An event of a job.
    Event(&'a EventView),
    /// A message for the user: the connection is lost or restored, or events are missing.
    Note(&'a str),
}

/// Progress of a followed stream.
struct Cursor {
    /// Id of the last event that had one.
    last_id: Option<String>,
    connected: bool,
    opened: bool,
    lost_since: Option<Instant>,
    /// Consecutive failed connections.
    failures: u32,
}

/// Why a connection is no longer followed.
enum FollowError<E> {
    Client(ClientError),
    Callback(E),
}

/// How long a service may be unreachable before a follower gives up.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(600);
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), largest: Duration::from_secs(15) };

/// A reader of server-sent events.
pub struct Events<R> {
    lines: BufReader<R>,
    last_id: Option<String>,
}

/// A message of the stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Received {
    /// An event of a job.
    Event(Box<EventView>),
    /// The job has ended.
    End,
    /// The stream skipped events.
    Missed,
}

impl<R: Read> Events<R> {
    /// Waits for the next message; `None` at the end of the stream.
    ///
    /// # Errors
    /// When the connection breaks.
    pub fn receive(&mut self) -> Result<Option<Received>> {
        let (mut kind, mut data) = (String::new(), String::new());
        loop {
            let mut line = Vec::new();
            let connection_error = |e: std::io::Error| {
                ClientError::Connection(format!("the stream was interrupted: {}", classify_no_response(&e).1))
            };
            if (&mut self.lines).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).map_err(connection_error)? == 0 {
                return Ok(None);
            }
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches(['\r', '\n']);
            if let Some(value) = line.strip_prefix("id:") {
                self.last_id = Some(value.trim_start().to_owned());
            } else if let Some(value) = line.strip_prefix("event:") {
                kind = value.trim_start().to_owned();
            } else if let Some(value) = line.strip_prefix("data:") {
                data.push_str(value.strip_prefix(' ').unwrap_or(value));
            } else if line.is_empty() && !kind.is_empty() {
                match kind.as_str() {
                    "end" => return Ok(Some(Received::End)),
                    "missed" => return Ok(Some(Received::Missed)),
                    // a newer service may send other kinds
                    _ => match serde_json::from_str(&data) {
                        Ok(event) => return Ok(Some(Received::Event(Box::new(event)))),
                        Err(e) => tracing::debug!("an event of kind {kind:?}: {e}"),
                    },
                }
                kind.clear();
                data.clear();
            }
        }
    }
}

/// The text of a value in a table.
pub fn display_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::model::EventType;

    #[test]
    fn streams_are_read_event_by_event() {
        let text = ": keep-alive\n\nid: 7\nevent: state\ndata: {\"seq\":7,\"job\":\"k3v9x0m2t8qa\",\"time\":\"2026-01-01T00:00:00.000Z\",\"attempt\":1,\"type\":\"state\",\"data\":{}}\r\n\r\n\
            event: newer\ndata: ?\n\nevent: end\ndata: {}\n\n";
        let mut events = Events { lines: BufReader::new(text.as_bytes()), last_id: None };
        match events.receive().unwrap() {
            Some(Received::Event(event)) => assert_eq!((event.seq, event.kind), (Some(7), EventType::State)),
            other => panic!("{other:?}"),
        }
        assert_eq!(events.last_id.as_deref(), Some("7"));
        assert_eq!(events.receive().unwrap(), Some(Received::End));
        assert_eq!(events.receive().unwrap(), None);
    }

    /// A server that answers one request: sends the head at once or never, and the body after `silence`.
    fn slow(has_head: bool, silence: Duration) -> Client {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            if has_head {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n").unwrap();
            }
            std::thread::sleep(silence);
            let _ = stream.write_all(b"line");
        });
        Client { base, token: None, http: http_client(true, silence / 3).unwrap() }
    }

    #[test]
    fn a_log_may_be_silent_and_an_answer_may_not() {
        // `silence` and the timeout derived from it are long, because a busy machine may be slow to begin an answer
        let silence = Duration::from_secs(6);
        let late = |has_head| {
            let error = slow(has_head, silence).text(&ApiRequest::new("GET", "/job")).unwrap_err();
            assert!(
                matches!(&error, ClientError::Connection(text) if text.ends_with("no answer in time")),
                "{error:?}"
            );
        };
        std::thread::scope(|scope| {
            scope.spawn(|| late(true));
            scope.spawn(|| late(false));
            scope.spawn(|| {
                let mut events = slow(true, silence).events(ApiRequest::new("GET", "/events")).unwrap();
                assert_eq!(events.receive().unwrap_err().to_string(), "the stream was interrupted: no answer in time");
            });
            // even a log must begin within the timeout
            scope.spawn(|| assert!(slow(false, silence).stream(&ApiRequest::new("GET", "/log")).is_err()));
            let mut text = String::new();
            slow(true, silence).stream(&ApiRequest::new("GET", "/log")).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "line");
        });
    }

    #[test]
    fn addresses_hold_no_secrets() {
        let client = |url: &str| ServiceOptions { url: Some(url.into()) }.client();
        assert_eq!(client("http://h:1/").unwrap().base, "http://h:1/api/v1");
        assert_eq!(client("https://h/behind/a/proxy").unwrap().base, "https://h/behind/a/proxy/api/v1");
        for url in ["http://u:SECRET@h", "http://h?SECRET", "ftp://h", "h:7373", ""] {
            let message = client(url).unwrap_err().to_string();
            assert!(message.starts_with("--url: ") && !message.contains("SECRET"), "{message}");
        }
    }
}
