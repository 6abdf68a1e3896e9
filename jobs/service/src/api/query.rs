//! Strict extractors: an unknown or repeated query key is an error.

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use utoipa::IntoParams;

use super::auth::Caller;
use super::problem::ProblemDetails;
use crate::model::JobId;

/// The query of a request.
pub struct Params<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = ProblemDetails;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ProblemDetails> {
        match Query::<T>::try_from_uri(&parts.uri) {
            Ok(Query(value)) => Ok(Self(value)),
            Err(e) => Err(ProblemDetails::bad_request(format!("the query: {}", e.body_text()))),
        }
    }
}

/// The job id in the path.
#[derive(IntoParams)]
#[into_params(names("id"), parameter_in = Path)]
pub struct Id(
    /// Id of the job
    #[param(value_type = String, pattern = "^[0-9a-hjkmnp-tv-z]{12}$")]
    pub JobId,
);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ProblemDetails;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ProblemDetails> {
        let none =
            || ProblemDetails::new(StatusCode::NOT_FOUND, "there is no such job; ids have 12 letters and digits");
        let Path(text) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| none())?;
        text.parse().map(Self).map_err(|()| none())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ProblemDetails;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ProblemDetails> {
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(|| ProblemDetails::internal(&"a request that nobody admitted"))
    }
}

/// A query without keys.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoQuery {}
