//! Failed requests to a store, reduced to what may be shown.
//!
//! Bodies of error responses can contain tokens, signatures and keys (`ExpiredToken` repeats the token). Only the code
//! is kept, and the message unless the code concerns credentials.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderMap, Method, StatusCode, Uri};
use object_store::path::Path;
use rustls::InvalidMessage;
use serde_json::Value;
use stillhouse_schemas::storage::Scheme;

const MAX_MESSAGE_CHARS: usize = 300;

/// A request that failed permanently, or that exceeded the retry limits.
#[derive(Debug, Clone)]
pub struct TransportError {
    /// The request.
    pub request: RequestInfo,
    /// Number of attempts.
    pub attempts: u32,
    /// Time since the first attempt.
    pub elapsed: Duration,
    /// Result of the last attempt.
    pub outcome: Outcome,
    /// Whether the same request can succeed later.
    pub transient: bool,
}

/// A description of a request without secrets.
#[derive(Debug, Clone)]
pub struct RequestInfo {
    /// HTTP method.
    pub method: Method,
    /// The object or bucket, such as `s3://b/k`; for a credential service, its URL.
    pub place: String,
    /// Scheme, host and port of the service.
    pub service: String,
    /// Whether the service is the store. Otherwise it is a service that issues credentials, or one that keeps contents of
    /// the hub.
    pub at_store: bool,
    /// The permission that the credentials need, named as in S3.
    pub permission: &'static str,
}

impl RequestInfo {
    /// Whether the request is about a data set of the hub.
    pub(super) fn is_hub(&self) -> bool {
        self.place.starts_with("hf://")
    }
}

/// How a failed attempt ended.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// The service answered with an error.
    Refused(ErrorResponse),
    /// No complete response arrived.
    Broken(NoResponseReason, String),
}

/// An error response.
#[derive(Debug, Clone)]
pub struct ErrorResponse {
    /// HTTP status.
    pub status: StatusCode,
    /// The store's error code, such as `SlowDown`.
    pub code: Option<String>,
    /// The store's error message. Absent if it could contain credentials.
    pub message: Option<String>,
    /// Region of the bucket, if the response names it.
    pub region: Option<String>,
}

/// Why no complete response arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoResponseReason {
    /// The host name does not resolve.
    UnknownHost,
    /// Nothing listens at the address.
    ConnectionRefused,
    /// No connection, for another reason.
    NoConnection,
    /// The certificate is not trusted, or belongs to another host.
    Certificate,
    /// The attempt exceeded its timeout.
    Timeout,
    /// The connection broke, or the body does not have its announced length.
    Connection,
    /// The body exceeds the limit for one response.
    TooLarge,
    /// The request cannot be sent at all, for example as plain HTTP where only TLS is allowed.
    Unsendable,
    /// The guard refused the request: the address is not public, or a redirect is not allowed.
    RefusedByGuard,
}

impl NoResponseReason {
    /// Whether no server was reached.
    pub fn is_unreached(self) -> bool {
        matches!(self, Self::UnknownHost | Self::ConnectionRefused | Self::NoConnection)
    }

    /// Whether a retry can help.
    pub fn is_transient(self) -> bool {
        !matches!(self, Self::Certificate | Self::TooLarge | Self::Unsendable | Self::RefusedByGuard)
    }
}

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: ", self.request.method, self.request.place)?;
        match &self.outcome {
            Outcome::Refused(response) => response.fmt(f)?,
            Outcome::Broken(_, text) => f.write_str(text)?,
        }
        if self.attempts > 1 {
            write!(f, " (gave up after {} attempts in {:.1} s)", self.attempts, self.elapsed.as_secs_f64())?;
        }
        Ok(())
    }
}

impl Error for TransportError {}

impl fmt::Display for ErrorResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.code.as_deref().or(self.status.canonical_reason()).unwrap_or("unknown");
        write!(f, "{} {word}", self.status.as_u16())?;
        self.message.as_ref().map_or(Ok(()), |message| write!(f, ": {message}"))
    }
}

/// Finds the [`TransportError`] that caused an error.
pub fn find_transport_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a TransportError> {
    find_cause(error)
}

/// Returns the first error of type `T` among an error and its causes.
pub fn find_cause<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<T>() {
            return Some(found);
        }
        // the error inside an `io::Error` is not its `source`
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = inner.map(|inner| inner as &(dyn Error + 'static)).or_else(|| error.source());
    }
    None
}

/// Classifies why a request of any HTTP client got no complete response, with a text that contains no addresses.
pub fn classify_no_response(error: &(dyn Error + 'static)) -> (NoResponseReason, String) {
    let mut texts = Vec::new();
    let mut next = error.source();
    while let Some(cause) = next {
        texts.push(cause.to_string());
        next = cause.source();
    }
    let last = texts.last().cloned().unwrap_or_else(|| error.to_string());
    let client = find_cause::<reqwest::Error>(error);
    let (is_connect, is_timeout) = client.map_or((false, false), |e| (e.is_connect(), e.is_timeout()));
    let tls = find_cause::<rustls::Error>(error);
    let certificate =
        matches!(tls, Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented));
    // the server speaks no TLS, or no version that we support
    let no_tls = matches!(
        tls,
        Some(rustls::Error::PeerIncompatible(_) | rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType))
    );
    // hyper's type for this error is private, so the text decides
    let is_lookup = is_connect && texts.iter().any(|text| text.contains("dns error"));
    match find_cause::<io::Error>(error).map(io::Error::kind) {
        _ if certificate => (NoResponseReason::Certificate, last),
        _ if no_tls => (NoResponseReason::Unsendable, format!("no TLS can be spoken with it: {last}")),
        _ if is_lookup => (NoResponseReason::UnknownHost, "no such host is known".into()),
        Some(io::ErrorKind::ConnectionRefused) => {
            (NoResponseReason::ConnectionRefused, "the connection is refused".into())
        }
        _ if is_connect && is_timeout => {
            (NoResponseReason::NoConnection, "no connection: the host does not answer".into())
        }
        _ if is_connect => (NoResponseReason::NoConnection, format!("no connection: {last}")),
        _ if is_timeout => (NoResponseReason::Timeout, "no answer in time".into()),
        _ if client.is_some_and(reqwest::Error::is_builder) => {
            (NoResponseReason::Unsendable, format!("cannot be sent: {last}"))
        }
        _ => (NoResponseReason::Connection, format!("the connection broke: {last}")),
    }
}

/// The store that a transport serves.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub scheme: Scheme,
    pub bucket: String,
    /// URL of the bucket, if it is known before the store is built.
    pub base: Option<String>,
}

impl Target {
    /// Describes a request without secrets.
    pub fn describe(&self, method: &Method, uri: &Uri) -> RequestInfo {
        let service = format!(
            "{}://{}",
            uri.scheme_str().unwrap_or("http"),
            // the URL may contain a user name, which must not be shown
            uri.authority().map_or("", |a| a.as_str().rsplit('@').next().unwrap_or_default())
        );
        if self.scheme == Scheme::Hf {
            return self.describe_hub(method, uri, service);
        }
        let key = self.key(&service, uri.path());
        let place = match &key {
            Some(key) if key.is_empty() => format!("{}://{}", self.scheme, self.bucket),
            Some(key) => format!("{}://{}/{key}", self.scheme, self.bucket),
            None => format!("{service}{}", uri.path()),
        };
        let permission = permission(method, uri.query().unwrap_or_default());
        RequestInfo { method: method.clone(), place, service, at_store: key.is_some(), permission }
    }

    /// Describes a request to the hub, or to a server of contents that it named, whose URL names no file.
    fn describe_hub(&self, method: &Method, uri: &Uri, service: String) -> RequestInfo {
        let path = uri.path();
        let at_store = self.base.as_deref().is_some_and(|base| format!("{service}{path}").starts_with(base));
        let key = ["/resolve/", "/tree/"].into_iter().find_map(|request| path.split_once(request)?.1.split_once('/'));
        let mut place = format!("{}://{}", self.scheme, self.bucket);
        if let (true, Some((_, key))) = (at_store, key) {
            let key = Path::from_url_path(key).map_or_else(|_| key.to_owned(), |path| path.to_string());
            place = format!("{place}/{key}");
        }
        RequestInfo { method: method.clone(), place, service, at_store, permission: "reading" }
    }

    /// The object key of a URL; `None` if the URL is not in the bucket.
    fn key(&self, service: &str, path: &str) -> Option<String> {
        let rest = match &self.base {
            Some(base) => format!("{service}{path}").strip_prefix(base.trim_end_matches('/'))?.to_owned(),
            None => {
                // host/bucket/key, or host/account/bucket/key for the Azure emulator
                let path = path.trim_start_matches('/');
                let (first, rest) = path.split_once('/').unwrap_or((path, ""));
                let (second, below) = rest.split_once('/').unwrap_or((rest, ""));
                match self.bucket.as_str() {
                    bucket if bucket == first => rest.to_owned(),
                    bucket if bucket == second => below.to_owned(),
                    _ => return None,
                }
            }
        };
        let rest = rest.trim_start_matches('/');
        Some(Path::from_url_path(rest).map_or_else(|_| rest.to_owned(), |path| path.to_string()))
    }
}

fn permission(method: &Method, query: &str) -> &'static str {
    let has = |name: &str| query.split('&').any(|pair| pair.split('=').next() == Some(name));
    match method.as_str() {
        "GET" if has("uploads") => "s3:ListBucketMultipartUploads",
        "GET" if has("list-type") || has("comp") => "s3:ListBucket",
        "GET" => "s3:GetObject",
        "HEAD" => "s3:GetObject and s3:ListBucket",
        "DELETE" if has("uploadId") => "s3:AbortMultipartUpload",
        "DELETE" => "s3:DeleteObject",
        "POST" if has("delete") => "s3:DeleteObject",
        "PROPFIND" => "listing",
        _ => "s3:PutObject and s3:AbortMultipartUpload",
    }
}

impl ErrorResponse {
    /// Parses an error response. `sent` are the headers of the request, whose secrets are redacted.
    pub(super) fn parse(status: StatusCode, headers: &HeaderMap, body: &[u8], sent: &HeaderMap) -> Self {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let text = String::from_utf8_lossy(&body[..body.len().min(64 << 10)]);
        let json = || serde_json::from_slice::<Value>(body).ok().filter(|_| text.starts_with('{'));
        let (code, message) = match (element(&text, "Code"), json()) {
            (Some(code), _) => (Some(code), element(&text, "Message")),
            (None, Some(value)) => parse_json_error(&value),
            (None, None) => (None, None),
        };
        let code = code.or_else(|| header("x-ms-error-code")).or_else(|| header("x-error-code")).map(|code| {
            let word = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ' ');
            code.chars().filter(word).take(64).collect::<String>()
        });
        let code = code.filter(|code| !code.is_empty());
        let message = message.filter(|_| !code.as_deref().is_some_and(is_about_credentials));
        let region = header("x-amz-bucket-region").or_else(|| element(&text, "Region"));
        let region = region.filter(|r| r.len() <= 64 && r.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'));
        Self { status, code, message: message.map(|m| one_line(&redacted(m, sent))), region }
    }

    /// The body that replaces the store's own.
    pub(super) fn body(&self) -> String {
        match (&self.code, &self.message) {
            (Some(code), Some(message)) => format!("{code}: {message}"),
            (code, message) => code.clone().or_else(|| message.clone()).unwrap_or_default(),
        }
    }
}

/// Whether a response with this error code can repeat the credentials of the request, in its message or other elements.
fn is_about_credentials(code: &str) -> bool {
    const CODES: [&str; 8] = [
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
        "AuthenticationFailed",
        "AuthorizationHeaderMalformed",
        "InvalidSecurity",
    ];
    CODES.contains(&code)
}

/// Returns the text of the first XML element with a name.
pub(super) fn element(text: &str, name: &str) -> Option<String> {
    let rest = &text[text.find(&format!("<{name}>"))? + name.len() + 2..];
    let inner = &rest[..rest.find("</")?];
    quick_xml::escape::unescape(inner.trim()).ok().map(|text| text.into_owned())
}

/// Parses `{"error": {"status", "message"}}` of Google's services, and `{"error", "error_description"}` of OAuth token
/// services.
fn parse_json_error(value: &Value) -> (Option<String>, Option<String>) {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let error = &value["error"];
    let code = text(error).or_else(|| text(&error["status"])).or_else(|| text(&value["code"]));
    let message = text(&error["message"]).or_else(|| text(&value["error_description"]));
    (code, message)
}

/// Redacts the credentials of the request in a message.
fn redacted(message: String, sent: &HeaderMap) -> String {
    let text = |name: &str| sent.get(name).and_then(|value| value.to_str().ok());
    let authorization = text(AUTHORIZATION.as_str()).unwrap_or_default();
    let mut secrets: Vec<&str> =
        authorization.split([' ', ',', '=', '/', ':']).filter(|part| part.len() >= 12).collect();
    secrets.extend(text("x-amz-security-token").filter(|token| !token.is_empty()));
    secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    secrets.into_iter().fold(message, |message, secret| message.replace(secret, "…"))
}

fn one_line(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", &words[..end]),
        None => words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> ErrorResponse {
        let mut sent = HeaderMap::new();
        sent.insert(
            "authorization",
            "AWS4-HMAC-SHA256 Credential=AKIASECRETSECRET/20260101/r, Signature=abc".parse().unwrap(),
        );
        sent.insert("x-amz-security-token", "TOKENSECRET".parse().unwrap());
        ErrorResponse::parse(StatusCode::FORBIDDEN, &HeaderMap::new(), body.as_bytes(), &sent)
    }

    /// Wraps an I/O error as HTTP clients do.
    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_certificate_that_is_not_trusted_is_known_by_its_type() {
        let untrusted = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let error = Outer(io::Error::new(io::ErrorKind::InvalidData, untrusted));
        let (why, text) = classify_no_response(&error);
        assert!(why == NoResponseReason::Certificate && !why.is_transient(), "{why:?}: {text}");
        let plain = rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType);
        let (why, text) = classify_no_response(&Outer(io::Error::new(io::ErrorKind::InvalidData, plain)));
        assert!(why == NoResponseReason::Unsendable && !why.is_transient(), "{why:?}: {text}");
        let (why, text) =
            classify_no_response(&Outer(io::Error::new(io::ErrorKind::InvalidData, rustls::Error::DecryptError)));
        assert!(why == NoResponseReason::Connection && why.is_transient(), "{why:?}: {text}");
    }

    #[tokio::test]
    async fn who_is_not_reached_is_known_by_the_client() {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let send = |address: std::net::SocketAddr| client.get(format!("http://{address}")).send();
        let closes = async { drop(listener.accept().await.unwrap()) };
        let (closed, ()) = tokio::join!(send(address), closes);
        assert_eq!(classify_no_response(&closed.unwrap_err()).0, NoResponseReason::Connection);
        drop(listener);
        let refused = classify_no_response(&send(address).await.unwrap_err());
        assert_eq!(refused, (NoResponseReason::ConnectionRefused, "the connection is refused".to_owned()));
        let odd = client.get("no scheme").send().await.unwrap_err();
        assert_eq!(classify_no_response(&odd).0, NoResponseReason::Unsendable);
    }

    #[test]
    fn code_and_message_are_kept_and_nothing_else() {
        let xml = "<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access\n &quot;Denied&quot; to AKIASECRETSECRET \
                   with TOKENSECRET</Message><StringToSign>SECRET</StringToSign></Error>";
        assert_eq!(read(xml).to_string(), "403 AccessDenied: Access \"Denied\" to … with …");
        let expired = "<Error><Code>ExpiredToken</Code><Message>of SECRET</Message><Token-0>SECRET</Token-0></Error>";
        assert_eq!(read(expired).to_string(), "403 ExpiredToken");
        assert_eq!(
            read(r#"{"error": {"code": 403, "status": "DENIED", "message": "no"}}"#).to_string(),
            "403 DENIED: no"
        );
        assert_eq!(read("<html>SECRET</html>").to_string(), "403 Forbidden");
    }

    #[test]
    fn addresses_become_places() {
        let target = |base: Option<&str>| Target { scheme: Scheme::S3, bucket: "b".into(), base: base.map(Into::into) };
        let place = |base, uri: &str| {
            let request = target(base).describe(&Method::PUT, &uri.parse().unwrap());
            (request.place, request.at_store)
        };
        let base = Some("http://h:1/b");
        assert_eq!(place(base, "http://h:1/b/x%20y/k?uploadId=1"), ("s3://b/x y/k".into(), true));
        assert_eq!(place(base, "http://h:1/b?uploads"), ("s3://b".into(), true));
        assert_eq!(place(Some("https://b.h"), "https://b.h/k"), ("s3://b/k".into(), true));
        assert_eq!(place(base, "http://169.254.169.254/latest"), ("http://169.254.169.254/latest".into(), false));
        assert_eq!(place(None, "https://storage/b/k").0, "s3://b/k");
        assert_eq!(place(None, "http://emulator/account/b/k").0, "s3://b/k");
    }
}
