//! The guard of web servers: who may name an address is not thereby let into the network of this machine.
//!
//! ```text
//!   http://h/x ─► is h an address? ──► it must be public
//!                 is h a name? ──────► the resolver of the client drops what is not public, at every connection
//!   302 ───────► the same for its target, which must be allowed as well; ten times at most, never from https to http
//! ```
//!
//! The addresses that are judged are those that are connected to, so a name that changes its address between two questions gains
//! nothing. A guarded client goes through no proxy, whatever the environment says: a proxy would look names up itself, in
//! its own network, and the guard would see nothing of it.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ::url::{Host, Url};
use async_trait::async_trait;
use futures::future::BoxFuture;
use object_store::client::{HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService};
use reqwest::dns::{Addrs, Name, Resolving};
use reqwest::redirect::{Action, Attempt, Policy};

use super::addresses::is_public;

/// What every client says of itself.
pub(super) const USER_AGENT: &str = concat!("stillhouse/", env!("CARGO_PKG_VERSION"));
/// Longer than any attempt: the transport has its own limit.
pub(super) const CLIENT_TIMEOUT_SECONDS: u64 = 3600;

/// What object_store's own clients have.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const MOST_REDIRECTS: usize = 10;

/// Why the guard let a request not through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Guarded {
    #[error("the server's configuration does not allow http input from private addresses")]
    Private,
    #[error("a redirect from https to http, which is not followed")]
    Downgrade,
    #[error("more than {MOST_REDIRECTS} redirects")]
    TooManyRedirects,
    #[error("a redirect to where the server's configuration does not allow reading")]
    Elsewhere,
}

/// Whether a URL may be read.
type Judge = Arc<dyn Fn(&Url) -> bool + Send + Sync>;
type Lookup = Arc<dyn Fn(String) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// Lets requests through to public addresses only.
#[derive(Clone)]
pub struct Guard {
    lookup: Lookup,
    permits: fn(IpAddr) -> bool,
    allows: Judge,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guard")
    }
}

impl Guard {
    /// A guard that asks the system for the addresses of names.
    pub fn new() -> Self {
        let lookup: Lookup =
            Arc::new(|name| Box::pin(async move { Ok(tokio::net::lookup_host((name, 0)).await?.collect()) }));
        Self { lookup, permits: is_public, allows: Arc::new(|_| true) }
    }

    /// The same, for redirects only to what may be read.
    #[must_use]
    pub fn redirecting(self, allows: impl Fn(&Url) -> bool + Send + Sync + 'static) -> Self {
        Self { allows: Arc::new(allows), ..self }
    }

    /// The same, for addresses of private networks as well.
    #[must_use]
    pub fn with_private_networks(self) -> Self {
        Self { permits: |_| true, ..self }
    }

    /// A guard over names and addresses of a test.
    #[cfg(test)]
    pub(super) fn of_test(lookup: Lookup, permits: fn(IpAddr) -> bool) -> Self {
        Self { lookup, permits, allows: Arc::new(|_| true) }
    }

    /// Whether the host of a URL may be asked, as far as can be told without looking its name up.
    fn check(&self, url: &Url) -> Result<(), Guarded> {
        let address = match url.host() {
            Some(Host::Ipv4(address)) => IpAddr::V4(address),
            Some(Host::Ipv6(address)) => IpAddr::V6(address),
            Some(Host::Domain(_)) => return Ok(()),
            None => return Err(Guarded::Private),
        };
        if (self.permits)(address) { Ok(()) } else { Err(Guarded::Private) }
    }

    /// Whether a redirect is followed to its target, after these URLs.
    pub(super) fn follows(&self, next: &Url, previous: &[Url]) -> Result<(), Guarded> {
        let from_tls = previous.last().is_some_and(|url| url.scheme() == "https");
        match self.check(next) {
            _ if previous.len() > MOST_REDIRECTS => Err(Guarded::TooManyRedirects),
            _ if from_tls && next.scheme() != "https" => Err(Guarded::Downgrade),
            Ok(()) if !(self.allows)(next) => Err(Guarded::Elsewhere),
            judged => judged,
        }
    }

    fn redirect(&self, attempt: Attempt<'_>) -> Action {
        match self.follows(attempt.url(), attempt.previous()) {
            Ok(()) => attempt.follow(),
            Err(guarded) => attempt.error(guarded),
        }
    }

    /// A client that is as those of object_store, but guarded; `plain` lets it speak without TLS.
    pub(super) fn client(&self, plain: bool) -> Result<HttpClient, reqwest::Error> {
        let policy = self.clone();
        let client = reqwest::Client::builder()
            .user_agent(USER_AGENT)
            .timeout(Duration::from_secs(CLIENT_TIMEOUT_SECONDS))
            .connect_timeout(CONNECT_TIMEOUT)
            .http1_only()
            // the length of an answer is that of the file
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .no_proxy()
            .https_only(!plain)
            .dns_resolver(Arc::new(Resolver(self.clone())))
            // it would tell the next server what was asked of this one
            .referer(false)
            .redirect(Policy::custom(move |attempt| policy.redirect(attempt)))
            .build()?;
        Ok(HttpClient::new(Service { client, guard: self.clone() }))
    }
}

impl Default for Guard {
    fn default() -> Self {
        Self::new()
    }
}

struct Resolver(Guard);

impl reqwest::dns::Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.0.clone();
        Box::pin(async move {
            let found = (guard.lookup)(name.as_str().to_owned()).await?;
            let any = !found.is_empty();
            let permitted: Vec<_> = found.into_iter().filter(|a| (guard.permits)(a.ip())).collect();
            if any && permitted.is_empty() {
                return Err(Box::new(Guarded::Private) as Box<dyn Error + Send + Sync>);
            }
            Ok(Box::new(permitted.into_iter()) as Addrs)
        })
    }
}

/// The client connects to an address in a URL without asking the resolver, so addresses are judged before.
#[derive(Debug)]
struct Service {
    client: reqwest::Client,
    guard: Guard,
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let url = Url::parse(&request.uri().to_string()).map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
        self.guard.check(&url).map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
        self.client.call(request).await
    }
}
