//! Guards requests to web servers: a user who can name a URL must not reach the network of this machine through it.
//!
//! ```text
//!   http://h/x ─► is h an address? ──► it must be public
//!                 is h a name? ──────► the client's resolver drops addresses that are not public, for every connection
//!   302 ───────► the same for the target, which must also be allowed; at most ten redirects, never from https to http
//! ```
//!
//! The guard checks the addresses that the client connects to. So a name that changes its address between two lookups
//! gains nothing. A guarded client ignores proxy settings of the environment: a proxy would resolve names in its own
//! network, unseen by the guard.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ::url::{Host, Url};
use async_trait::async_trait;
use futures::future::BoxFuture;
use object_store::client::{HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService};
use reqwest::dns::{Addrs, Name, Resolving};
use reqwest::redirect::{Action, Attempt, Policy};

use super::addresses::is_public;
use super::client::client_builder;

const MAX_REDIRECTS: usize = 10;

/// Why the guard refused a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum GuardError {
    #[error("the server's configuration does not allow http input from private addresses")]
    Private,
    #[error("a redirect from https to http, which is not followed")]
    Downgrade,
    #[error("more than {MAX_REDIRECTS} redirects")]
    TooManyRedirects,
    #[error("a redirect to where the server's configuration does not allow reading")]
    RedirectNotAllowed,
}

/// Returns whether a URL may be read.
type RedirectFilter = Arc<dyn Fn(&Url) -> bool + Send + Sync>;
type Lookup = Arc<dyn Fn(String) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// Allows requests to public addresses only.
#[derive(Clone)]
pub struct Guard {
    lookup: Lookup,
    permits: fn(IpAddr) -> bool,
    allows_redirect: RedirectFilter,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guard")
    }
}

impl Guard {
    /// Creates a guard that resolves names with the system's resolver.
    pub fn new() -> Self {
        let lookup: Lookup =
            Arc::new(|name| Box::pin(async move { Ok(tokio::net::lookup_host((name, 0)).await?.collect()) }));
        Self { lookup, permits: is_public, allows_redirect: Arc::new(|_| true) }
    }

    /// Restricts redirects to URLs for which `allows_redirect` returns true.
    #[must_use]
    pub fn with_redirect_filter(self, allows_redirect: impl Fn(&Url) -> bool + Send + Sync + 'static) -> Self {
        Self { allows_redirect: Arc::new(allows_redirect), ..self }
    }

    /// Also permits addresses of private networks.
    #[must_use]
    pub fn with_private_networks(self) -> Self {
        Self { permits: |_| true, ..self }
    }

    /// Creates a guard with the names and addresses of a test.
    #[cfg(test)]
    pub(super) fn for_test(lookup: Lookup, permits: fn(IpAddr) -> bool) -> Self {
        Self { lookup, permits, allows_redirect: Arc::new(|_| true) }
    }

    /// Whether the host of a URL may be contacted, as far as that is known before its name is resolved.
    fn check(&self, url: &Url) -> Result<(), GuardError> {
        let address = match url.host() {
            Some(Host::Ipv4(address)) => IpAddr::V4(address),
            Some(Host::Ipv6(address)) => IpAddr::V6(address),
            Some(Host::Domain(_)) => return Ok(()),
            None => return Err(GuardError::Private),
        };
        if (self.permits)(address) { Ok(()) } else { Err(GuardError::Private) }
    }

    /// Whether to follow a redirect to `next`, after the URLs `previous`.
    pub(super) fn check_redirect(&self, next: &Url, previous: &[Url]) -> Result<(), GuardError> {
        let from_tls = previous.last().is_some_and(|url| url.scheme() == "https");
        match self.check(next) {
            _ if previous.len() > MAX_REDIRECTS => Err(GuardError::TooManyRedirects),
            _ if from_tls && next.scheme() != "https" => Err(GuardError::Downgrade),
            Ok(()) if !(self.allows_redirect)(next) => Err(GuardError::RedirectNotAllowed),
            checked => checked,
        }
    }

    fn redirect(&self, attempt: Attempt<'_>) -> Action {
        match self.check_redirect(attempt.url(), attempt.previous()) {
            Ok(()) => attempt.follow(),
            Err(refused) => attempt.error(refused),
        }
    }

    /// Builds a guarded client with the settings of object_store's clients. `allow_http` allows HTTP without TLS.
    pub(super) fn client(&self, allow_http: bool) -> Result<HttpClient, reqwest::Error> {
        let policy = self.clone();
        let client = client_builder()
            .no_proxy()
            .https_only(!allow_http)
            .dns_resolver(Arc::new(GuardedResolver(self.clone())))
            // a referrer would tell the next server the URL of this request
            .referer(false)
            .redirect(Policy::custom(move |attempt| policy.redirect(attempt)))
            .build()?;
        Ok(HttpClient::new(GuardedClient { client, guard: self.clone() }))
    }
}

impl Default for Guard {
    fn default() -> Self {
        Self::new()
    }
}

struct GuardedResolver(Guard);

impl reqwest::dns::Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.0.clone();
        Box::pin(async move {
            let found = (guard.lookup)(name.as_str().to_owned()).await?;
            let any = !found.is_empty();
            let permitted: Vec<_> = found.into_iter().filter(|a| (guard.permits)(a.ip())).collect();
            if any && permitted.is_empty() {
                return Err(Box::new(GuardError::Private) as Box<dyn Error + Send + Sync>);
            }
            Ok(Box::new(permitted.into_iter()) as Addrs)
        })
    }
}

/// Checks addresses in URLs before a request: the client connects to them without asking the resolver.
#[derive(Debug)]
struct GuardedClient {
    client: reqwest::Client,
    guard: Guard,
}

#[async_trait]
impl HttpService for GuardedClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let url = Url::parse(&request.uri().to_string()).map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
        self.guard.check(&url).map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
        self.client.call(request).await
    }
}
