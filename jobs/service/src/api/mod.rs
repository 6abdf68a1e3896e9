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
mod event_streams;
mod events;
mod fair_semaphore;
mod jobs;
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
use self::problem::{ApiResult, ProblemDetails};
use self::report_cache::ReportCache;
use super::Service;
use super::client_limits::{AddressCount, AddressCounts, RateLimit, Watchers};
use super::model::{JobId, Time};
use super::proxies::Proxies;
use super::store::{StoreError, jobs as job_store, tokens};

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
    check_permits: FairSemaphore,
    tail_permits: FairSemaphore,
    admission: Arc<Admission>,
    /// When the database last answered.
    last_answer: tokio::sync::Mutex<Option<Instant>>,
    proxies: Proxies,
    /// Concurrent requests by client address, for clients behind a trusted proxy.
    proxied: AddressCounts,
    requests: RateLimit,
    /// Separate rate limit for admin tokens and metrics, so that other requests never exhaust it.
    privileged_requests: RateLimit,
    submissions: RateLimit,
}

pub type App = Arc<Shared>;

const MAX_CHECKS: usize = 4;
const MAX_TAILS: usize = 4;

/// Longest time between the revocation of a token and the end of its streams.
const TOKEN_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The two ends of a connection.
#[derive(Debug, Clone)]
pub struct ConnectionInfo {
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// Set if the connection has a reserved slot. A request of the kind that these slots are for makes it true.
    pub reserved: Option<Arc<AtomicBool>>,
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
        .routes(routes!(events::job_events))
        .routes(routes!(events::all_events))
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
        last_answer: tokio::sync::Mutex::default(),
        proxies: Proxies::new(&service.config.trusted_proxies, service.config.proxy_header),
        proxied: AddressCounts::new(limits.connections_per_address),
        disk_reports: FairSemaphore::new(limits.reports_at_once as usize),
        store_reports: FairSemaphore::new(limits.reports_at_once as usize),
        reports: ReportCache::default(),
        check_permits: FairSemaphore::new(MAX_CHECKS),
        tail_permits: FairSemaphore::new(MAX_TAILS),
        admission: Arc::default(),
        requests: RateLimit::new(limits.requests_per_minute),
        privileged_requests: RateLimit::new(limits.requests_per_minute),
        submissions: RateLimit::new(limits.submissions_per_minute),
        service,
    });
    tokio::spawn(end_streams(Arc::downgrade(&shared)));
    let (api, _) = documented().split_for_parts();
    Router::new()
        .nest(BASE, api)
        .merge(page::router())
        .route("/metrics", axum::routing::get(meta::metrics))
        .fallback(|| async {
            ProblemDetails::new(
                StatusCode::NOT_FOUND,
                "nothing exists at this path; /api/v1/openapi.json lists all paths",
            )
        })
        .method_not_allowed_fallback(|| async {
            ProblemDetails::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not support the method; valid: the methods in the header Allow",
            )
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), request_middleware))
        .with_state(shared)
}

/// Ends the streams of tokens that were revoked or expired. Another process revokes them, so this polls the store.
async fn end_streams(shared: Weak<Shared>) {
    let mut interval = tokio::time::interval(TOKEN_CHECK_INTERVAL);
    loop {
        interval.tick().await;
        let Some(shared) = shared.upgrade() else { return };
        let tokens = shared.watchers.tokens();
        if tokens.is_empty() {
            continue;
        }
        let invalid = shared.service.store.read(move |c| {
            let now = Time::now();
            let mut invalid = Vec::new();
            for token in tokens {
                if !tokens::is_good(c, &token, now)? {
                    invalid.push(token);
                }
            }
            Ok(invalid)
        });
        match invalid.await {
            Ok(invalid) => invalid.iter().for_each(|token| shared.watchers.end(token)),
            Err(e) => tracing::warn!("cannot check the tokens of live streams: {e}"),
        }
    }
}

/// Checks that the caller may see a job; the scope `submit` alone allows only the caller's own jobs.
///
/// # Errors
/// 401 or 403; the answer for another user's job is the same whether it exists or not.
async fn require_visible(app: &App, caller: &Caller, id: &JobId) -> ApiResult<()> {
    let Some(user) = caller.visible_user()? else { return Ok(()) };
    let id = id.clone();
    match app.service.store.read(move |c| job_store::owner(c, &id)).await {
        Ok(owner) if owner == user => Ok(()),
        Ok(_) | Err(StoreError::NoJob(_)) => Err(auth::not_own_job()),
        Err(e) => Err(e.into()),
    }
}

/// Paths that check whether the service runs; never limited by other requests.
fn is_health_path(path: &str) -> bool {
    matches!(path, "/api/v1/health" | "/api/v1/ready")
}

/// Paths of the metrics.
fn is_metrics_path(path: &str) -> bool {
    matches!(path, "/metrics" | "/api/v1/metrics")
}

/// Paths that need no token, because they reveal nothing about jobs.
fn is_public_path(path: &str) -> bool {
    matches!(
        path,
        "/" | "/api/v1/health" | "/api/v1/ready" | "/api/v1/version" | "/api/v1/openapi.json" | "/api/v1/schema"
    ) || path.starts_with("/page/")
}

async fn request_middleware(State(shared): State<App>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = match super::model::JobId::new() {
        Ok(id) => RequestId(id.as_str().to_owned()),
        Err(e) => return ProblemDetails::internal(&e).into_response(),
    };
    let route = request.extensions().get::<MatchedPath>().map_or("none", |p| p.as_str()).to_owned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let span = tracing::info_span!("request", request_id = %id.0, method = %method, path = %path);
    request.extensions_mut().insert(id.clone());
    let info = request.extensions().get::<ConnectInfo<ConnectionInfo>>().map(|c| c.0.clone());
    let headers = request.headers().clone();
    let address = info.as_ref().map(|info| shared.proxies.client_address(info.peer.ip(), &headers));
    let mut user = String::new();
    let response = async {
        match admit(&shared, info, address, &headers, &path).await {
            Ok((caller, address_count)) => {
                user.clone_from(&caller.rate_key);
                request.extensions_mut().insert(caller);
                count_until_sent(next.run(request).await, address_count)
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
    set_headers(response.headers_mut(), &id, &path);
    counter!("stillhouse_http_requests_total", "method" => method_name(&method), "route" => route.clone(), "status" => status.as_str().to_owned())
        .increment(1);
    let seconds = began.elapsed().as_secs_f64();
    let class = format!("{}xx", status.as_u16() / 100);
    histogram!(super::metrics::HTTP_SECONDS, "route" => route, "status" => class).record(seconds);
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
fn count_until_sent(response: Response, address_count: Option<AddressCount>) -> Response {
    match address_count {
        Some(address_count) => response.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _ = &address_count;
                frame
            }))
        }),
        None => response,
    }
}

/// Runs a change and its consequences to the end, even if the client disconnects meanwhile.
pub async fn run_uncancelled<T: Send + 'static>(
    change: impl Future<Output = ApiResult<T>> + Send + 'static,
) -> ApiResult<T> {
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
    info: Option<ConnectionInfo>,
    address: Option<IpAddr>,
    headers: &HeaderMap,
    path: &str,
) -> ApiResult<(Caller, Option<AddressCount>)> {
    let config = &shared.service.config;
    let (Some(info), Some(address)) = (info, address) else {
        return Err(ProblemDetails::internal(&"a request without a connection"));
    };
    auth::check_origin(config, info.local, headers, !path.starts_with("/api/"))?;
    let has_reserved_slot = info.reserved.is_some();
    let mark_privileged = || info.reserved.iter().for_each(|privileged| privileged.store(true, Ordering::Relaxed));
    if is_health_path(path) {
        mark_privileged();
        return Ok((Caller { holder: None, rate_key: address.to_string(), has_reserved_slot }, None));
    }
    let public = is_public_path(path);
    let holder = match auth::bearer_token(headers) {
        Ok(Some(token)) => {
            let token = token.to_owned();
            shared.service.store.read(move |c| tokens::holder(c, &token, Time::now())).await?
        }
        Ok(None) if !config.needs_token() => Some(auth::local_user()),
        Ok(None) => None,
        Err(problem) if !public => return Err(problem),
        Err(_) => None,
    };
    let admin = holder.as_ref().is_some_and(|h| h.token.is_some() && h.scopes.contains(&tokens::Scope::Admin));
    let is_privileged = admin || (is_metrics_path(path) && holder.is_some());
    if has_reserved_slot {
        if !is_privileged {
            return Err(no_slot_left(config.limits.connections));
        }
        mark_privileged();
    }
    let rate_key = holder.as_ref().map_or_else(|| address.to_string(), |h| h.user.clone());
    let requests = if is_privileged { &shared.privileged_requests } else { &shared.requests };
    requests.take(&rate_key, Instant::now()).map_err(|seconds| {
        let most = config.limits.requests_per_minute;
        ProblemDetails::too_many_requests(format!("more than {most} requests in a minute"), seconds)
    })?;
    let mut address_count = None;
    if shared.proxies.trusts(info.peer.ip()) && !is_privileged {
        address_count = Some(shared.proxied.acquire(address).ok_or_else(|| {
            let most = config.limits.connections_per_address;
            let detail = format!(
                "{most} requests from {address} are in progress, the most that one address may have; close some"
            );
            ProblemDetails::too_many_requests(detail, 5)
        })?);
    }
    let caller = Caller { holder, rate_key, has_reserved_slot };
    if !public {
        caller.visible_user()?;
    }
    Ok((caller, address_count))
}

fn no_slot_left(most: u32) -> ProblemDetails {
    let detail = format!(
        "all {most} connections of this server, or of your address, are in use; the remaining ones are reserved for /api/v1/health, /api/v1/ready, \
         /metrics and tokens with the scope admin. Close connections that you do not need, or try again soon"
    );
    ProblemDetails::too_many_requests(detail, 5)
}

const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
    form-action 'none'; base-uri 'none'; frame-ancestors 'none'";
const API_POLICY: &str = "default-src 'none'; frame-ancestors 'none'; sandbox";

fn set_headers(headers: &mut HeaderMap, id: &RequestId, path: &str) {
    let page = path == "/" || path.starts_with("/page/");
    let mut set = |name: &'static str, value: &'static str| {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    };
    set("content-security-policy", if page { PAGE_POLICY } else { API_POLICY });
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
