//! The service itself: health, version, documents, metrics.

use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stillhouse_operators::registry::job_format;
use utoipa::ToSchema;

use super::App;
use super::auth::Caller;
use super::problem::{ApiResult, ProblemDetails};
use super::query::{NoQuery, Params};
use crate::disk_space;
use crate::store::jobs;
use crate::store::tokens::Scope;

/// The status of the service.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// `ok` or `ready`.
    pub status: String,
}

/// Version of the service, and the caller.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Version of the program.
    pub version: String,
    /// `open`: everyone on this machine is the user `local`. `token`: requests need a token.
    pub auth: String,
    /// The caller; null without a valid token if one is needed.
    pub user: Option<String>,
    /// What the caller may do.
    pub scopes: Vec<Scope>,
}

/// How long an answer of the database counts as recent.
const ANSWER_TTL: Duration = Duration::from_millis(250);

/// Check whether the process is alive
#[utoipa::path(get, path = "/health", operation_id = "getHealth", tag = "service", security(()), responses((status = 200, description = "The process is alive", body = Status)))]
pub async fn health(_: Params<NoQuery>) -> Json<Status> {
    Json(Status { status: "ok".into() })
}

/// Check whether the service accepts jobs
#[utoipa::path(get, path = "/ready", operation_id = "getReadiness", tag = "service", security(()), responses(
    (status = 200, description = "The service accepts jobs", body = Status),
    (status = 503, description = "The service is stopping, its database does not answer or is damaged, or its disk is full", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn ready(State(app): State<App>, _: Params<NoQuery>) -> ApiResult<Json<Status>> {
    let refused = |detail: &str| ProblemDetails::new(StatusCode::SERVICE_UNAVAILABLE, detail);
    if *app.service.stopping.borrow() {
        return Err(refused("the service is stopping"));
    }
    if app.service.store.is_corrupt() {
        return Err(refused("the service's database is damaged; the service's log says how to repair it"));
    }
    if app.service.store.disk_space.is_full() {
        return Err(refused(disk_space::FULL_MESSAGE));
    }
    // one query for all concurrent requests, because nothing limits the number of these
    let mut last_answer = app.last_answer.lock().await;
    if last_answer.is_none_or(|at| at.elapsed() > ANSWER_TTL) {
        *last_answer = None;
        app.service.store.read(jobs::counts).await.map_err(|e| {
            tracing::error!("not ready: {e}");
            refused("the service's database does not answer")
        })?;
        *last_answer = Some(Instant::now());
    }
    Ok(Json(Status { status: "ready".into() }))
}

/// Get the version, and the caller
#[utoipa::path(get, path = "/version", operation_id = "getVersion", tag = "service", security((), ("token" = [])), responses((status = 200, description = "The version, and the caller", body = Version)))]
pub async fn version(State(app): State<App>, caller: Caller, _: Params<NoQuery>) -> Json<Version> {
    let auth = if app.service.config.needs_token() { "token" } else { "open" };
    let (user, scopes) = caller.holder.map_or((None, Vec::new()), |h| (Some(h.user), h.scopes));
    Json(Version { version: env!("CARGO_PKG_VERSION").into(), auth: auth.into(), user, scopes })
}

/// Get this document
#[utoipa::path(get, path = "/openapi.json", operation_id = "getOpenApi", tag = "service", security(()), responses((status = 200, description = "OpenAPI 3.1", body = Value)))]
pub async fn openapi(_: Params<NoQuery>) -> Json<Value> {
    Json(super::openapi::document())
}

/// Get the JSON Schema of job files
#[utoipa::path(get, path = "/schema", operation_id = "getJobSchema", tag = "service", security(()), responses((status = 200, description = "JSON Schema, draft 2020-12", body = Value)))]
pub async fn schema(_: Params<NoQuery>) -> Json<Value> {
    Json(job_format().json_schema())
}

/// Get metrics for Prometheus
///
/// Gauges, counters and histograms of the service and its jobs. `/metrics`, outside the API, returns the same, because
/// Prometheus looks there by default.
#[utoipa::path(get, path = "/metrics", operation_id = "getMetrics", tag = "service", responses(
    (status = 200, description = "The metrics, in the Prometheus text format 0.0.4", body = String, content_type = "text/plain; version=0.0.4"),
))]
pub async fn metrics(State(app): State<App>, caller: Caller) -> ApiResult<Response> {
    caller.require(Scope::Read)?;
    let text = crate::metrics::render(&app.service).await?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"))], text).into_response())
}
