//! Sends every request to a store, reads the whole response, and retries where that can help.
//!
//! | event | action |
//! |---|---|
//! | no connection, reset, timeout, truncated body | retry |
//! | 408, 425, 429, 5xx (but 501, 505, 507); `RequestTimeout`, `IncompleteBody`, `OperationAborted`, … | retry |
//! | 200 for a POST or a copy, with an S3 `<Error>` as its body | retry if transient, else as for its code |
//! | 2xx, 304, 404, 409, 412 | return the response; error bodies are reduced to code and message |
//! | a redirect of the hub | return the response: its store follows it |
//! | a missing bucket, data set or revision, 401, 403, any other status, refusal by the guard | fail with [`TransportError`] at once |
//!
//! Between attempts it waits a random time up to a limit that doubles, or as long as `Retry-After` asks. Until a
//! service has answered once, failures to connect are retried up to three attempts only: a wrong host must not take
//! minutes.
//!
//! All methods are retried, even those that are not idempotent: the lost response may have reported success. Callers of
//! conditional writes, completions and deletions must accept "already exists" and "already gone" as success.
//!
//! Memory: a response is held whole, so callers read objects in bounded ranges; more than 1 GiB is refused. No task is
//! spawned: dropping the future cancels the request.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Method, StatusCode};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
    ReqwestConnector,
};
use stillhouse_schemas::storage::{RetryLimits, Scheme};

use super::failure::{
    ErrorResponse, NoResponseReason, Outcome, RequestInfo, Target, TransportError, classify_no_response, element,
    find_cause,
};
use super::guard::{Guard, GuardError};
use super::retry::{Backoff, is_transient_status, retry_after};

const MAX_BODY_BYTES: u64 = 1 << 30;
/// Maximum memory to allocate in advance, whatever `Content-Length` says.
const MAX_PREALLOCATED_BYTES: u64 = 64 << 20;
/// Attempts at a service that never answered, or at a metadata service of cloud machines.
const MAX_UNREACHED_ATTEMPTS: u32 = 3;

/// Traffic counters, for logs.
#[derive(Debug, Default)]
pub struct TransportStatistics {
    requests: AtomicU64,
    retries: AtomicU64,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
}

impl TransportStatistics {
    /// Requests sent, including retries.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Number of retries.
    pub fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    /// Bytes of request bodies sent, whether they arrived or not.
    pub fn bytes_up(&self) -> u64 {
        self.bytes_up.load(Ordering::Relaxed)
    }

    /// Bytes of response bodies that arrived complete.
    pub fn bytes_down(&self) -> u64 {
        self.bytes_down.load(Ordering::Relaxed)
    }
}

impl fmt::Display for TransportStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        write!(f, "{} requests, {} of them again, ", self.requests(), self.retries())?;
        write!(f, "{:.1} MB up, {:.1} MB down", megabytes(self.bytes_up()), megabytes(self.bytes_down()))
    }
}

/// Creates the HTTP clients of one store; passed to the store's builder.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    pub target: Arc<Target>,
    pub limits: RetryLimits,
    pub statistics: Arc<TransportStatistics>,
    /// Set for web servers that must have public addresses.
    pub guard: Option<Guard>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = match &self.guard {
            Some(guard) => guard
                .client(self.target.scheme == Scheme::Http)
                .map_err(|e| object_store::Error::Generic { store: "HTTP client", source: Box::new(e) })?,
            None => ReqwestConnector::default().connect(options)?,
        };
        Ok(self.transport(client))
    }
}

impl Connector {
    /// Returns a client that sends the requests of this store through another client.
    pub fn transport(&self, client: HttpClient) -> HttpClient {
        let Self { target, limits, statistics, .. } = self.clone();
        HttpClient::new(Transport { client, target, limits, statistics, answered: AtomicBool::new(false) })
    }
}

#[derive(Debug)]
struct Transport {
    client: HttpClient,
    target: Arc<Target>,
    limits: RetryLimits,
    statistics: Arc<TransportStatistics>,
    /// Whether the service has ever answered.
    answered: AtomicBool,
}

/// A failed attempt.
struct AttemptError {
    outcome: Outcome,
    transient: bool,
    /// Whether to send the same request again. A conflicting completion is transient, but its upload must begin anew.
    resend: bool,
    /// The wait that the service asked for.
    wait: Option<Duration>,
}

#[async_trait]
impl HttpService for Transport {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let started = Instant::now();
        let info = self.target.describe(request.method(), request.uri());
        let mut attempts = 0;
        loop {
            attempts += 1;
            let failed = match self.attempt(&request, &info, started).await {
                Ok(response) => return Ok(response),
                Err(failed) => failed,
            };
            let Some(wait) = self.wait(&failed, &info, attempts, started) else {
                let AttemptError { outcome, transient, .. } = failed;
                let error = TransportError { request: info, attempts, elapsed: started.elapsed(), outcome, transient };
                // of a kind that object_store does not retry
                return Err(HttpError::new(HttpErrorKind::Unknown, error));
            };
            let RequestInfo { method, place, .. } = &info;
            tracing::debug!(%method, place, attempts, ?wait, outcome = ?failed.outcome, "trying again");
            self.statistics.retries.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(wait).await;
        }
    }
}

impl Transport {
    async fn attempt(
        &self,
        request: &HttpRequest,
        info: &RequestInfo,
        started: Instant,
    ) -> Result<HttpResponse, AttemptError> {
        self.statistics.requests.fetch_add(1, Ordering::Relaxed);
        self.statistics.bytes_up.fetch_add(request.body().content_length() as u64, Ordering::Relaxed);
        let left = self.limits.max_elapsed.saturating_sub(started.elapsed()).max(Duration::from_millis(1));
        // a large body gets more time, enough for 100 kB/s
        let upload_time = Duration::from_secs(request.body().content_length() as u64 / 100_000);
        let limit = (self.limits.request_timeout + upload_time).min(left);
        let exchange = tokio::time::timeout(limit, async {
            let response = self.client.execute(request.clone()).await?;
            self.answered.store(true, Ordering::Relaxed);
            let (parts, body) = response.into_parts();
            Ok(match read(&parts.headers, parts.status, request.method(), body).await? {
                Ok(body) => Ok((parts, body)),
                Err(failed) => Err(failed),
            })
        });
        let (mut parts, body) = match exchange.await {
            Ok(Ok(answer)) => answer?,
            Ok(Err(error)) => return Err(classify_error(&error)),
            Err(_) => {
                return Err(AttemptError::no_response(
                    NoResponseReason::Timeout,
                    format!("no answer in {} s", limit.as_secs_f32()),
                ));
            }
        };
        self.statistics.bytes_down.fetch_add(body.len() as u64, Ordering::Relaxed);
        if parts.status.is_success() {
            let Some(status) = status_in_body(request, &body) else {
                return Ok(HttpResponse::from_parts(parts, body.into()));
            };
            parts.status = status;
        }
        // clients follow redirects by themselves, except the hub's, which hands them on
        let is_redirect = parts.status.is_redirection() && self.target.scheme == Scheme::Hf;
        if parts.status == StatusCode::NOT_MODIFIED || is_redirect {
            parts.headers.remove(CONTENT_LENGTH);
            return Ok(HttpResponse::from_parts(parts, Bytes::new().into()));
        }
        let response = ErrorResponse::parse(parts.status, &parts.headers, &body, request.headers());
        match classify(&response, info) {
            Verdict::Return => {
                parts.headers.remove(CONTENT_LENGTH);
                Ok(HttpResponse::from_parts(parts, response.body().into()))
            }
            Verdict::Fail { transient, resend } => Err(AttemptError {
                outcome: Outcome::Refused(response),
                transient,
                resend,
                wait: retry_after(&parts.headers),
            }),
        }
    }

    /// Returns the wait before the next attempt; `None` to give up.
    fn wait(&self, failed: &AttemptError, info: &RequestInfo, attempts: u32, started: Instant) -> Option<Duration> {
        let is_unreached = matches!(&failed.outcome, Outcome::Broken(reason, _) if reason.is_unreached())
            && !self.answered.load(Ordering::Relaxed);
        let max_attempts = match is_unreached || is_metadata_service(&info.service) {
            true => self.limits.max_attempts.min(MAX_UNREACHED_ATTEMPTS),
            false => self.limits.max_attempts,
        };
        if !failed.resend || attempts >= max_attempts {
            return None;
        }
        let backoff = Backoff { first: self.limits.first_backoff, largest: self.limits.max_backoff };
        let wait = backoff.wait(attempts, failed.wait);
        // a service may ask for any number of seconds
        (started.elapsed().saturating_add(wait) < self.limits.max_elapsed).then_some(wait)
    }
}

impl AttemptError {
    fn no_response(reason: NoResponseReason, text: impl Into<String>) -> Self {
        let transient = reason.is_transient();
        Self { outcome: Outcome::Broken(reason, text.into()), transient, resend: transient, wait: None }
    }
}

/// Reads the whole body, and checks its length.
async fn read(
    headers: &HeaderMap,
    status: StatusCode,
    method: &Method,
    body: HttpResponseBody,
) -> Result<Result<Bytes, AttemptError>, HttpError> {
    // such responses announce a length, but send no body
    if method == Method::HEAD || status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED {
        return Ok(Ok(Bytes::new()));
    }
    let announced = headers.get(CONTENT_LENGTH).and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
    let too_large = || {
        let text = format!("the answer has more than {MAX_BODY_BYTES} bytes, the most that is read at once");
        Ok(Err(AttemptError::no_response(NoResponseReason::TooLarge, text)))
    };
    if announced.is_some_and(|n| n > MAX_BODY_BYTES) {
        return too_large();
    }
    let mut whole = BytesMut::with_capacity(announced.unwrap_or(0).min(MAX_PREALLOCATED_BYTES) as usize);
    let mut chunks = body.bytes_stream();
    while let Some(chunk) = chunks.next().await {
        whole.extend_from_slice(&chunk?);
        if whole.len() as u64 > MAX_BODY_BYTES {
            return too_large();
        }
    }
    let got = whole.len() as u64;
    Ok(match announced {
        Some(n) if n != got => Err(AttemptError::no_response(
            NoResponseReason::Connection,
            format!("the answer ended after {got} of {n} bytes"),
        )),
        _ => Ok(whole.freeze()),
    })
}

/// How an error response is handled.
enum Verdict {
    /// Returns the response: it is about the object, and the caller decides.
    Return,
    Fail {
        transient: bool,
        resend: bool,
    },
}

fn classify(response: &ErrorResponse, info: &RequestInfo) -> Verdict {
    let resend = Verdict::Fail { transient: true, resend: true };
    let fail = Verdict::Fail { transient: false, resend: false };
    let code = response.code.as_deref().unwrap_or_default();
    match response.status.as_u16() {
        _ if is_transient_code(code) => resend,
        409 if code == "ConditionalRequestConflict" => {
            // a PUT may be sent again as it is; a multipart upload must begin anew
            Verdict::Fail { transient: true, resend: info.method == Method::PUT }
        }
        404 if matches!(code, "NoSuchBucket" | "ContainerNotFound" | "RepoNotFound" | "RevisionNotFound") => fail,
        404 | 409 | 412 if info.at_store => Verdict::Return,
        _ if is_transient_status(response.status) => resend,
        _ => fail,
    }
}

fn is_transient_code(code: &str) -> bool {
    const CODES: [&str; 10] = [
        "InternalError",
        "SlowDown",
        "ServiceUnavailable",
        "RequestTimeout",
        "ThrottlingException",
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "OperationAborted",
        "ServerBusy",
    ];
    CODES.contains(&code)
}

/// Returns the status that an S3 response of 200 should have had: completions and copies respond before they finish.
fn status_in_body(request: &HttpRequest, body: &[u8]) -> Option<StatusCode> {
    let is_copy = request.headers().contains_key("x-amz-copy-source");
    if !(request.method() == Method::POST || is_copy) || body.len() > 1 << 20 {
        return None;
    }
    let text = std::str::from_utf8(body).ok()?.trim_start();
    let has_transient_deletion_error = text.contains("<DeleteResult")
        && text.split("<Code>").skip(1).any(|rest| is_transient_code(rest.split('<').next().unwrap_or_default()));
    let root = match text.strip_prefix("<?xml") {
        Some(rest) => rest.split_once("?>")?.1.trim_start(),
        None => text,
    };
    if !has_transient_deletion_error && !root.starts_with("<Error>") && !root.starts_with("<Error ") {
        return None;
    }
    Some(match element(text, "Code").as_deref() {
        Some("AccessDenied") => StatusCode::FORBIDDEN,
        Some("NoSuchUpload" | "NoSuchKey" | "NoSuchBucket") => StatusCode::NOT_FOUND,
        Some("PreconditionFailed") => StatusCode::PRECONDITION_FAILED,
        Some("ConditionalRequestConflict" | "OperationAborted") => StatusCode::CONFLICT,
        Some(code) if !is_transient_code(code) => StatusCode::BAD_REQUEST,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    })
}

/// Converts a request without a complete response. The text contains no addresses.
fn classify_error(error: &HttpError) -> AttemptError {
    if let Some(refused) = find_cause::<GuardError>(error) {
        return AttemptError::no_response(NoResponseReason::RefusedByGuard, refused.to_string());
    }
    let (why, text) = classify_no_response(error);
    AttemptError::no_response(why, text)
}

/// Whether only cloud machines have this service. On other machines nothing, or a proxy, answers.
fn is_metadata_service(service: &str) -> bool {
    let host = service.split("://").last().unwrap_or_default();
    ["169.254.", "[fd00:ec2::", "metadata.google.internal"].iter().any(|machine| host.starts_with(machine))
}
