//! Errors as problem details (RFC 9457).

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use stillhouse_schemas::problems::Problems;
use utoipa::ToSchema;

use crate::bounds;
use crate::disk_space;
use crate::model::FieldProblem;
use crate::store::StoreError;

/// Why a request failed.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ProblemDetails {
    /// Kind of problem: `about:blank` if the status explains it.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Name of the kind.
    pub title: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// Explanation of this problem.
    pub detail: String,
    /// Id of the request, as in the header `x-request-id` and in the service's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub request_id: Option<Box<str>>,
    /// All problems of the job file, by field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<FieldProblem>,
    #[serde(skip)]
    retry_after_seconds: Option<u32>,
}

pub const MEDIA_TYPE: &str = "application/problem+json";

impl ProblemDetails {
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            kind: "about:blank",
            title: status.canonical_reason().unwrap_or("Error"),
            status: status.as_u16(),
            detail: detail.into(),
            request_id: None,
            problems: Vec::new(),
            retry_after_seconds: None,
        }
    }

    /// A job file with problems.
    pub fn from_file_problems(problems: &Problems) -> Self {
        let n = problems.0.len();
        let detail = format!("the job file has {n} problem{}", if n == 1 { "" } else { "s" });
        Self {
            problems: bounds::limit_problems(problems.0.iter().map(Into::into)),
            ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
        }
    }

    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub fn too_many_requests(detail: impl Into<String>, retry_after_seconds: u64) -> Self {
        Self {
            retry_after_seconds: Some(u32::try_from(retry_after_seconds).unwrap_or(u32::MAX).max(1)),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, detail)
        }
    }

    /// The disk is full; `disk_space` logs that once.
    pub fn disk_full() -> Self {
        Self { retry_after_seconds: Some(60), ..Self::new(StatusCode::INSUFFICIENT_STORAGE, disk_space::FULL_MESSAGE) }
    }

    /// Logs the error; the client learns only that the service failed.
    pub fn internal(error: &dyn std::fmt::Display) -> Self {
        tracing::error!("{error}");
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the service failed; its log has the reason, under the request's id",
        )
    }
}

impl From<StoreError> for ProblemDetails {
    fn from(e: StoreError) -> Self {
        match e {
            StoreError::NoJob(_) => Self::new(StatusCode::NOT_FOUND, e.to_string()),
            StoreError::WrongState { .. } => Self::new(StatusCode::CONFLICT, e.to_string()),
            StoreError::Full(message) => Self::too_many_requests(message, 60),
            StoreError::DiskFull(_) => Self::disk_full(),
            StoreError::KeyReused => Self::new(StatusCode::UNPROCESSABLE_ENTITY, e.to_string()),
            other => Self::internal(&other),
        }
    }
}

impl IntoResponse for ProblemDetails {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let retry_after = self.retry_after_seconds;
        let mut response = (status, Json(&self)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"stillhouse\""));
        }
        // the middleware adds the request's id to the body
        response.extensions_mut().insert(self);
        response
    }
}

pub type ApiResult<T> = Result<T, ProblemDetails>;
