//! The requests to the hub: retries, the meaning of each status, and redirects, which it follows itself to keep the
//! token at the hub's origin.

use std::error::Error;
use std::io::Read;
use std::thread;
use std::time::Duration;

use reqwest::blocking::Response;
use reqwest::header::HeaderMap;
use reqwest::redirect::Policy;
use reqwest::{Method, StatusCode};
use serde_json::Value;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::storage::hub::{HubConfig, Token};
use stillhouse_base::storage::retry::is_transient_status;
use stillhouse_base::storage::{self, Backoff, retry_after};
use stillhouse_schemas::hub_names::is_commit;
use url::Url;

use super::reference::HubRef;

const MAX_REDIRECTS: usize = 8;
/// Largest accepted file list: about 400,000 files.
const MAX_LISTING_BYTES: u64 = 64 << 20;
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Longest wait that a server can request, which may exceed [`MAX_BACKOFF`].
const MAX_REQUESTED_WAIT: Duration = Duration::from_secs(120);

/// Whether and how to retry within the same call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RetryPolicy {
    Never,
    /// Retry after a backoff, and not before the time that the server requested.
    AfterBackoff(Option<Duration>),
    /// Retry from the beginning of the file: the server does not have the requested range.
    FromStart,
}

/// A failed attempt.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: PipelineError,
    pub(super) retry: RetryPolicy,
}

impl Failure {
    /// A transient failure.
    pub(super) fn transient(message: impl Into<String>) -> Self {
        Self {
            error: PipelineError::new(ErrorKind::Model, message).retryable(),
            retry: RetryPolicy::AfterBackoff(None),
        }
    }
}

impl From<PipelineError> for Failure {
    fn from(error: PipelineError) -> Self {
        Self { error, retry: RetryPolicy::Never }
    }
}

type AttemptResult<T> = std::result::Result<T, Failure>;

/// The commit and files of a revision.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<String>,
}

/// The hub's metadata of a file, requested before its download.
#[derive(Debug, Clone)]
pub(super) struct Metadata {
    /// Restricted to characters that are safe in a file name.
    pub(super) etag: String,
    pub(super) size: Option<u64>,
}

impl Metadata {
    /// The SHA-256, which is the etag of files in LFS or Xet.
    pub(super) fn sha256(&self) -> Option<&str> {
        Some(self.etag.as_str()).filter(|etag| etag.len() == 64 && etag.bytes().all(|b| b.is_ascii_hexdigit()))
    }
}

/// How far to follow redirects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FollowRedirects {
    All,
    /// Up to the response that carries the file's etag, which precedes the one with the content.
    UntilEtag,
}

/// An HTTP client of one hub.
pub(super) struct Client {
    http: reqwest::blocking::Client,
    endpoint: Url,
    token: Option<Token>,
    pub(super) attempts: u32,
    backoff: Backoff,
}

impl Client {
    pub(super) fn new(config: &HubConfig) -> Result<Self> {
        // Requests have no body, so the timeout applies to the response headers and to each read.
        let mut settings = reqwest::blocking::Client::builder()
            .redirect(Policy::none())
            .user_agent(concat!("stillhouse/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(config.timeout)
            .timeout(config.timeout);
        if !config.use_proxy {
            settings = settings.no_proxy();
        }
        let trusted = config.certificates()?;
        if !trusted.is_empty() {
            settings = settings.tls_built_in_root_certs(false);
            settings = trusted.into_iter().fold(settings, reqwest::blocking::ClientBuilder::add_root_certificate);
        }
        let client_error = |e: reqwest::Error| {
            let (_, why) = storage::classify_no_response(&e);
            PipelineError::new(ErrorKind::Usage, format!("no connection to the hub can be made: {why}"))
        };
        Ok(Self {
            http: settings.build().map_err(client_error)?,
            endpoint: config.endpoint.clone(),
            token: config.token.clone(),
            attempts: config.attempts.max(1),
            backoff: Backoff { first: config.backoff, largest: MAX_BACKOFF },
        })
    }

    /// Requests the commit of a revision and its files.
    pub(super) fn request_listing(&self, reference: &HubRef, attempts: u32) -> Result<Listing> {
        let mut path = vec!["api", "models"];
        path.extend(reference.repo().split('/'));
        path.extend(["revision", reference.revision()]);
        let url = self.endpoint_url(&path);
        self.with_retries(attempts, || {
            let response = self.send(Method::GET, &url, None, FollowRedirects::All, reference, None)?;
            let mut body = Vec::new();
            response
                .take(MAX_LISTING_BYTES + 1)
                .read_to_end(&mut body)
                .map_err(|e| self.transport_failure(&url, &e))?;
            if body.len() as u64 > MAX_LISTING_BYTES {
                let problem = format!("more than {MAX_LISTING_BYTES} bytes");
                return Err(self.invalid_response(&format!("the list of files of {reference}"), &problem).into());
            }
            Listing::parse(&body)
                .map_err(|problem| self.invalid_response(&format!("the list of files of {reference}"), &problem).into())
        })
    }

    /// Requests the size and hash of a file.
    pub(super) fn request_metadata(&self, reference: &HubRef, commit: &str, file: &str) -> Result<Metadata> {
        let url = self.resolve_url(reference, commit, file);
        self.with_retries(self.attempts, || {
            let response = self.send(Method::HEAD, &url, None, FollowRedirects::UntilEtag, reference, Some(file))?;
            let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            let etag = header("x-linked-etag").or_else(|| header("etag")).unwrap_or_default();
            let etag = etag.trim_start_matches("W/").trim_matches('"');
            let safe = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
            if etag.is_empty() || etag.len() > 128 || !etag.bytes().all(safe) {
                return Err(self.invalid_response(file, &format!("its etag, {etag:?}, cannot name a file")).into());
            }
            let size = header("x-linked-size")
                .or_else(|| header("content-length").filter(|_| !response.status().is_redirection()))
                .and_then(|size| size.parse().ok());
            Ok(Metadata { etag: etag.to_owned(), size })
        })
    }

    /// Requests the bytes of a file from an offset on. Status 200 means that the server sends the whole file.
    pub(super) fn open(&self, reference: &HubRef, commit: &str, file: &str, offset: u64) -> AttemptResult<Response> {
        let url = self.resolve_url(reference, commit, file);
        self.send(Method::GET, &url, Some(offset).filter(|&o| o > 0), FollowRedirects::All, reference, Some(file))
    }

    /// Waits before the next attempt, with a backoff that grows with consecutive failures. Returns the error if no
    /// attempt is left.
    pub(super) fn pause(&self, failure: Failure, failures: u32, attempts: u32) -> Result<()> {
        let requested = match failure.retry {
            RetryPolicy::AfterBackoff(requested) if failures < attempts => {
                requested.map(|requested| requested.min(MAX_REQUESTED_WAIT))
            }
            RetryPolicy::FromStart if failures < attempts => None,
            _ => return Err(failure.error),
        };
        let wait = self.backoff.wait(failures, requested);
        tracing::info!(error = %failure.error, ?wait, failures, "the hub failed, trying again");
        thread::sleep(wait);
        Ok(())
    }

    fn with_retries<T>(&self, attempts: u32, mut attempt: impl FnMut() -> AttemptResult<T>) -> Result<T> {
        let mut failures = 0;
        loop {
            match attempt() {
                Ok(result) => return Ok(result),
                Err(failure) => {
                    failures += 1;
                    self.pause(failure, failures, attempts)?;
                }
            }
        }
    }

    fn resolve_url(&self, reference: &HubRef, commit: &str, file: &str) -> Url {
        let mut path: Vec<_> = reference.repo().split('/').collect();
        path.extend(["resolve", commit]);
        path.extend(file.split('/'));
        self.endpoint_url(&path)
    }

    /// Appends the parts to the endpoint, each as one path segment: a slash inside a part becomes `%2F`.
    fn endpoint_url(&self, path: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        url
    }

    /// Sends one request and follows its redirects. Returns a response with a success status or, for metadata, with an
    /// etag.
    fn send(
        &self,
        method: Method,
        url: &Url,
        offset: Option<u64>,
        follow: FollowRedirects,
        reference: &HubRef,
        file: Option<&str>,
    ) -> AttemptResult<Response> {
        let mut url = url.clone();
        let mut at_endpoint = true;
        for _ in 0..=MAX_REDIRECTS {
            // Once a redirect leaves the origin, the token is never sent again: another server must not choose requests
            // that carry it.
            at_endpoint &= url.origin() == self.endpoint.origin();
            let mut request = self.http.request(method.clone(), url.clone()).header("accept-encoding", "identity");
            if let Some(offset) = offset {
                request = request.header("range", format!("bytes={offset}-"));
            }
            if let Some(token) = self.token.as_ref().filter(|_| at_endpoint) {
                request = request.header("authorization", token.bearer());
            }
            let response = request.send().map_err(|e| self.transport_failure(&url, &e))?;

            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED {
                return self.check_status(response, &url, at_endpoint, reference, file);
            }
            let location =
                response.headers().get("location").and_then(|l| l.to_str().ok()).and_then(|l| url.join(l).ok());
            let Some(next) = location.filter(|next| matches!(next.scheme(), "http" | "https")) else {
                return Err(self.invalid_response(host(&url), "it redirects to nowhere").into());
            };
            if url.scheme() == "https" && next.scheme() == "http" {
                return Err(self.invalid_response(host(&url), "it redirects from https to plain http").into());
            }
            let has = |name: &str| response.headers().contains_key(name);
            let leaves_origin = next.origin() != url.origin();
            if follow == FollowRedirects::UntilEtag && (has("x-linked-etag") || (leaves_origin && has("etag"))) {
                return Ok(response);
            }
            url = next;
        }
        Err(self.invalid_response(host(&url), &format!("more than {MAX_REDIRECTS} redirects")).into())
    }

    /// Returns a success unchanged. Turns any other status into an error with its meaning and remedy.
    fn check_status(
        &self,
        response: Response,
        url: &Url,
        at_endpoint: bool,
        reference: &HubRef,
        file: Option<&str>,
    ) -> AttemptResult<Response> {
        let status = response.status();
        let what = file.map_or_else(|| reference.to_string(), |file| format!("{file:?} of {reference}"));
        let status_text = format!("{} answered {}", host(url), status.as_u16());
        let usage = |message: String| Err(PipelineError::new(ErrorKind::Usage, message).into());
        match status.as_u16() {
            200..=299 => Ok(response),
            416 => {
                Err(Failure { retry: RetryPolicy::FromStart, ..Failure::transient(format!("{what}: {status_text}")) })
            }
            _ if is_transient_status(status) => Err(Failure {
                retry: RetryPolicy::AfterBackoff(retry_after(response.headers())),
                ..Failure::transient(format!("{what}: {status_text}"))
            }),
            // A signed storage URL may have expired; a retry gets a new one.
            400..=499 if !at_endpoint => Err(Failure::transient(format!("{what}: {status_text}"))),
            401 | 403 => {
                usage(format!("{what}: {}", self.access_denied_message(response.headers(), &status_text, reference)))
            }
            404 => usage(match (error_code(response.headers()), file) {
                ("RevisionNotFound", _) => {
                    format!("{reference}: the repository has no revision {:?} ({status_text})", reference.revision())
                }
                ("RepoNotFound", _) => {
                    format!("{reference}: there is no repository {:?} ({status_text})", reference.repo())
                }
                (_, Some(file)) => format!("{reference}: there is no file {file:?} ({status_text})"),
                (_, None) => format!(
                    "{reference}: there is no repository {:?}, or no revision {:?} in it ({status_text})",
                    reference.repo(),
                    reference.revision()
                ),
            }),
            _ => Err(PipelineError::new(ErrorKind::Model, format!("{what}: {status_text}")).into()),
        }
    }

    fn access_denied_message(&self, headers: &HeaderMap, status_text: &str, reference: &HubRef) -> String {
        let state = match error_code(headers) {
            "GatedRepo" => {
                format!("is gated ({status_text}): accept its terms on the page {:?} of the hub", reference.repo())
            }
            "RepoNotFound" => format!("does not exist or is private ({status_text}): check the name"),
            _ => format!("is gated or private, or does not exist ({status_text}): check the name"),
        };
        match &self.token {
            Some(token) => {
                format!(
                    "{state}, and set HF_TOKEN to a valid token that may read it (the one from {} may not)",
                    token.source()
                )
            }
            None => format!("{state}, and set HF_TOKEN to a token that may read it"),
        }
    }

    fn invalid_response(&self, what: &str, problem: &str) -> PipelineError {
        let hub = host(&self.endpoint);
        PipelineError::new(ErrorKind::Model, format!("the hub at {hub} makes no sense: {what}: {problem}"))
    }

    /// Describes a request without a response. Shows the host only, because storage URLs are signed.
    fn transport_failure(&self, url: &Url, error: &(dyn Error + 'static)) -> Failure {
        let (why, text) = storage::classify_no_response(error);
        let message = format!(
            "the hub cannot be reached: {}: {text}; a folder with the model's files works without it",
            host(url)
        );
        match why.is_transient() {
            true => Failure::transient(message),
            false => PipelineError::new(ErrorKind::Model, message).into(),
        }
    }
}

impl Listing {
    fn parse(body: &[u8]) -> std::result::Result<Self, String> {
        let json: Value = serde_json::from_slice(body).map_err(|e| format!("not JSON: {e}"))?;
        let commit = json["sha"].as_str().filter(|sha| is_commit(sha)).ok_or("its sha is not a commit")?;
        let siblings = json["siblings"].as_array().ok_or("it has no siblings")?;
        let files = siblings.iter().filter_map(|sibling| sibling["rfilename"].as_str()).map(str::to_owned);
        Ok(Self { commit: commit.to_owned(), files: files.collect() })
    }
}

/// Host and port: the only part of a URL that messages may show.
pub(super) fn host(url: &Url) -> &str {
    &url[url::Position::BeforeHost..url::Position::AfterPort]
}

fn error_code(headers: &HeaderMap) -> &str {
    headers.get("x-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default()
}
