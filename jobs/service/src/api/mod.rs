//! The REST API under `/api/v1`, the web page at `/`, metrics at `/metrics`.
//!
//! ```text
//!   request ─► id, host and origin ─► token ─► slot, rate limit ─► handler ─► id, security headers, log line, metrics
//! ```
//!
//! Every error is a problem detail (RFC 9457). The handlers define the OpenAPI document; a test compares
//! `jobs/openapi.json` with it.

mod admission;
pub mod auth;
mod events;
mod fair_semaphore;
mod follow;
mod jobs;
pub mod limits;
mod meta;
pub mod openapi;
mod page;
pub mod problem;
mod query;
mod report_cache;
mod results;
mod submit;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use http_body_util::BodyExt;
use metrics::{counter, histogram};
use tracing::Instrument;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::admission::Admission;
use self::auth::Caller;
use self::fair_semaphore::FairSemaphore;
use self::limits::{Address, Addresses, Rate, Watchers};
use self::problem::{Answer, ProblemDetails};
use self::report_cache::ReportCache;
use super::Service;
use super::model::{JobId, Time};
use super::proxies::Proxies;
use super::store::{StoreError, jobs as stored, tokens};

/// Path prefix of the API.
pub const BASE: &str = "/api/v1";

/// State that all handlers share.
pub struct Shared {
    pub service: Arc<Service>,
    pub watchers: Watchers,
    /// Permits for reports and manifests of data sets on disk, and of those in object stores: a store that hangs does
    /// not block disks.
    disk_reports: FairSemaphore,
    store_reports: FairSemaphore,
    reports: ReportCache,
    /// Permits for checks of job files, and for searches of a log's last lines: both use a CPU for a while.
    checks: FairSemaphore,
    tails: FairSemaphore,
    admission: Arc<Admission>,
    /// When the database last answered.
    answered: tokio::sync::Mutex<Option<Instant>>,
    proxies: Proxies,
    /// Concurrent requests by client address, for clients behind a trusted proxy.
    passed_on: Addresses,
    requests: Rate,
    /// Separate rate limit for admin tokens and metrics, so that other requests never exhaust it.
    kept_requests: Rate,
    submissions: Rate,
}

pub type App = Arc<Shared>;

const CHECKS: usize = 4;
const TAILS: usize = 4;

/// Longest time between the revocation of a token and the end of its streams.
const LOOK_AT_TOKENS: Duration = Duration::from_millis(200);

/// The two ends of a connection.
#[derive(Debug, Clone)]
pub struct Ends {
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// Set if the connection has a reserved slot. A request of the kind that these slots are for makes it true.
    pub kept: Option<Arc<AtomicBool>>,
}

/// The id of a request.
#[derive(Debug, Clone)]
pub struct RequestId(String);

/// The handlers and their documentation.
pub fn documented() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(meta::health))
        .routes(routes!(meta::ready))
        .routes(routes!(meta::version))
        .routes(routes!(meta::openapi))
        .routes(routes!(meta::schema))
        .routes(routes!(meta::metrics))
        .routes(routes!(jobs::list, submit::submit))
        .routes(routes!(submit::validate))
        .routes(routes!(jobs::show, jobs::delete))
        .routes(routes!(jobs::file))
        .routes(routes!(jobs::cancel))
        .routes(routes!(jobs::retry))
        .routes(routes!(events::of_job))
        .routes(routes!(events::of_all))
        .routes(routes!(jobs::rates))
        .routes(routes!(results::logs))
        .routes(routes!(results::manifest))
        .routes(routes!(results::report))
}

/// Everything that the server serves.
pub fn router(service: Arc<Service>) -> Router {
    let limits = &service.config.limits;
    let shared: App = Arc::new(Shared {
        watchers: Watchers::new(limits.streams()),
        answered: tokio::sync::Mutex::default(),
        proxies: Proxies::of(&service.config),
        passed_on: Addresses::new(limits.connections_per_address),
        disk_reports: FairSemaphore::new(limits.reports_at_once as usize),
        store_reports: FairSemaphore::new(limits.reports_at_once as usize),
        reports: ReportCache::default(),
        checks: FairSemaphore::new(CHECKS),
        tails: FairSemaphore::new(TAILS),
        admission: Arc::default(),
        requests: Rate::new(limits.requests_per_minute),
        kept_requests: Rate::new(limits.requests_per_minute),
        submissions: Rate::new(limits.submissions_per_minute),
        service,
    });
    tokio::spawn(end_streams(Arc::downgrade(&shared)));
    let (api, _) = documented().split_for_parts();
    Router::new()
        .nest(BASE, api)
        .merge(page::router())
        .route("/metrics", axum::routing::get(meta::metrics))
        .fallback(|| async {
            ProblemDetails::new(StatusCode::NOT_FOUND, "there is nothing here; see /api/v1/openapi.json")
        })
        .method_not_allowed_fallback(|| async {
            ProblemDetails::new(StatusCode::METHOD_NOT_ALLOWED, "this cannot be done here; see the header Allow")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), around))
        .with_state(shared)
}

/// Ends the streams of tokens that were revoked or expired. Another process revokes them, so this polls the store.
async fn end_streams(shared: Weak<Shared>) {
    let mut looks = tokio::time::interval(LOOK_AT_TOKENS);
    loop {
        looks.tick().await;
        let Some(shared) = shared.upgrade() else { return };
        let tokens = shared.watchers.tokens();
        if tokens.is_empty() {
            continue;
        }
        let bad = shared.service.store.read(move |c| {
            let now = Time::now();
            let mut bad = Vec::new();
            for token in tokens {
                if !tokens::is_good(c, &token, now)? {
                    bad.push(token);
                }
            }
            Ok(bad)
        });
        match bad.await {
            Ok(bad) => bad.iter().for_each(|token| shared.watchers.end(token)),
            Err(e) => tracing::warn!("the tokens of live streams: {e}"),
        }
    }
}

/// Checks that the caller may see a job; the scope `submit` alone allows only the caller's own jobs.
///
/// # Errors
/// 401 or 403; the answer for another user's job is the same whether it exists or not.
async fn must_see(app: &App, caller: &Caller, id: &JobId) -> Answer<()> {
    let Some(user) = caller.sight()? else { return Ok(()) };
    let id = id.clone();
    match app.service.store.read(move |c| stored::owner(c, &id)).await {
        Ok(owner) if owner == user => Ok(()),
        Ok(_) | Err(StoreError::NoJob(_)) => Err(auth::not_own()),
        Err(e) => Err(e.into()),
    }
}

/// Paths that check whether the service runs; never limited by other requests.
fn is_vital(path: &str) -> bool {
    matches!(path, "/api/v1/health" | "/api/v1/ready")
}

/// Paths of the metrics.
fn is_figures(path: &str) -> bool {
    matches!(path, "/metrics" | "/api/v1/metrics")
}

/// Paths that need no token, because they reveal nothing about jobs.
fn is_public(path: &str) -> bool {
    matches!(
        path,
        "/" | "/api/v1/health" | "/api/v1/ready" | "/api/v1/version" | "/api/v1/openapi.json" | "/api/v1/schema"
    ) || path.starts_with("/page/")
}

async fn around(State(shared): State<App>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = match super::model::JobId::new() {
        Ok(id) => RequestId(id.as_str().to_owned()),
        Err(e) => return ProblemDetails::internal(&e).into_response(),
    };
    let route = request.extensions().get::<MatchedPath>().map_or("none", |p| p.as_str()).to_owned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let span = tracing::info_span!("request", request_id = %id.0, method = %method, path = %path);
    request.extensions_mut().insert(id.clone());
    let ends = request.extensions().get::<ConnectInfo<Ends>>().map(|c| c.0.clone());
    let headers = request.headers().clone();
    let address = ends.as_ref().map(|ends| shared.proxies.client(ends.peer.ip(), &headers));
    let mut user = String::new();
    let response = async {
        match admit(&shared, ends, address, &headers, &path).await {
            Ok((caller, held)) => {
                user.clone_from(&caller.counted_as);
                request.extensions_mut().insert(caller);
                held_by_body(next.run(request).await, held)
            }
            Err(problem) => problem.into_response(),
        }
    };
    let mut response = response.instrument(span.clone()).await;
    let status = response.status();
    if let Some(mut problem) = response.extensions_mut().remove::<ProblemDetails>() {
        problem.request_id = Some(id.0.as_str().into());
        // keep the problem's headers with its media type; the id makes the body longer
        let mut headers = std::mem::take(response.headers_mut());
        headers.remove(header::CONTENT_LENGTH);
        response = (status, Json(&problem)).into_response();
        *response.headers_mut() = headers;
    }
    secure(response.headers_mut(), &id, &path);
    counter!("stillhouse_http_requests_total", "method" => method_name(&method), "route" => route.clone(), "status" => status.as_str().to_owned())
        .increment(1);
    let seconds = began.elapsed().as_secs_f64();
    let class = format!("{}xx", status.as_u16() / 100);
    histogram!(super::metrics::HTTP, "route" => route, "status" => class).record(seconds);
    let _entered = span.enter();
    let address = address.map(tracing::field::display);
    // a full disk or a stopping service is logged once, where it is found
    let reported = matches!(status, StatusCode::INSUFFICIENT_STORAGE | StatusCode::SERVICE_UNAVAILABLE);
    match status.is_server_error() && !reported {
        true => tracing::error!(status = status.as_u16(), user, address, seconds, "answered"),
        false => tracing::info!(status = status.as_u16(), user, address, seconds, "answered"),
    }
    response
}

/// Counts a request against its address until the body of its answer is sent or dropped.
fn held_by_body(response: Response, held: Option<Address>) -> Response {
    match held {
        Some(held) => response.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _ = &held;
                frame
            }))
        }),
        None => response,
    }
}

/// Runs a change and its consequences to the end, even if the client disconnects meanwhile.
pub async fn to_the_end<T: Send + 'static>(change: impl Future<Output = Answer<T>> + Send + 'static) -> Answer<T> {
    tokio::spawn(change).await.map_err(|e| ProblemDetails::internal(&e))?
}

/// The method as a label; unknown methods share one, so that clients cannot create labels.
fn method_name(method: &axum::http::Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "DELETE" => "DELETE",
        _ => "other",
    }
}

/// Decides whether to accept a request, and returns its caller.
async fn admit(
    shared: &App,
    ends: Option<Ends>,
    address: Option<IpAddr>,
    headers: &HeaderMap,
    path: &str,
) -> Answer<(Caller, Option<Address>)> {
    let config = &shared.service.config;
    let (Some(ends), Some(address)) = (ends, address) else {
        return Err(ProblemDetails::internal(&"a request without a connection"));
    };
    auth::refuse_other_sites(config, ends.local, headers, !path.starts_with("/api/"))?;
    let is_kept = ends.kept.is_some();
    let welcome = || ends.kept.iter().for_each(|kept| kept.store(true, Ordering::Relaxed));
    if is_vital(path) {
        welcome();
        return Ok((Caller { holder: None, counted_as: address.to_string(), kept: is_kept }, None));
    }
    let public = is_public(path);
    let holder = match auth::bearer(headers) {
        Ok(Some(token)) => {
            let token = token.to_owned();
            shared.service.store.read(move |c| tokens::holder(c, &token, Time::now())).await?
        }
        Ok(None) if !config.needs_token() => Some(auth::local()),
        Ok(None) => None,
        Err(problem) if !public => return Err(problem),
        Err(_) => None,
    };
    let admin = holder.as_ref().is_some_and(|h| h.token.is_some() && h.scopes.contains(&tokens::Scope::Admin));
    let looks_after = admin || (is_figures(path) && holder.is_some());
    if is_kept {
        if !looks_after {
            return Err(crowded(config.limits.connections));
        }
        welcome();
    }
    let counted_as = holder.as_ref().map_or_else(|| address.to_string(), |h| h.user.clone());
    let requests = if looks_after { &shared.kept_requests } else { &shared.requests };
    requests.take(&counted_as, Instant::now()).map_err(|seconds| {
        let most = config.limits.requests_per_minute;
        ProblemDetails::too_many(format!("more than {most} requests in a minute"), seconds)
    })?;
    let mut held = None;
    if shared.proxies.trusts(ends.peer.ip()) && !looks_after {
        held = Some(shared.passed_on.enter(address).ok_or_else(|| {
            let most = config.limits.connections_per_address;
            let detail =
                format!("{most} requests of {address} are being answered, as many as one address may have; close some");
            ProblemDetails::too_many(detail, 5)
        })?);
    }
    let caller = Caller { holder, counted_as, kept: is_kept };
    if !public {
        caller.sight()?;
    }
    Ok((caller, held))
}

fn crowded(most: u32) -> ProblemDetails {
    let detail = format!(
        "all {most} connections of this server, or of your address, are taken; the last ones are kept for /api/v1/health, /api/v1/ready, \
         /metrics and tokens with the scope admin. Close connections that you do not need, or try again soon"
    );
    ProblemDetails::too_many(detail, 5)
}

const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
    form-action 'none'; base-uri 'none'; frame-ancestors 'none'";
const ELSE_POLICY: &str = "default-src 'none'; frame-ancestors 'none'; sandbox";

fn secure(headers: &mut HeaderMap, id: &RequestId, path: &str) {
    let page = path == "/" || path.starts_with("/page/");
    let mut set = |name: &'static str, value: &'static str| {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    };
    set("content-security-policy", if page { PAGE_POLICY } else { ELSE_POLICY });
    set("x-content-type-options", "nosniff");
    set("x-frame-options", "DENY");
    set("referrer-policy", "no-referrer");
    set("cross-origin-opener-policy", "same-origin");
    set("cross-origin-resource-policy", "same-origin");
    set("permissions-policy", "camera=(), geolocation=(), microphone=()");
    set("cache-control", if page { "no-cache" } else { "no-store" });
    let live = headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    if live {
        // nginx must not buffer a stream
        headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    }
    if let Ok(value) = HeaderValue::from_str(&id.0) {
        headers.insert(HeaderName::from_static("x-request-id"), value);
    }
}
