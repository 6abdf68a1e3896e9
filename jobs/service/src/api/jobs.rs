//! Jobs: list, show, cancel, retry, delete.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::auth::{Caller, not_own_job};
use super::problem::{ApiResult, ProblemDetails};
use super::query::{Id, NoQuery, Params};
use super::{App, require_visible, run_uncancelled};
use crate::bounds::quoted_prefix;
use crate::model::{Job, JobState, RatePoint, Time};
use crate::pending_cancels;
use crate::rates::Rates;
use crate::store::jobs::{self, Filter};
use crate::store::tokens::Scope;

/// Which jobs to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// States, separated by commas.
    #[param(
        pattern = "^(queued|running|cancelling|retrying|succeeded|failed|cancelled)(,(queued|running|cancelling|retrying|succeeded|failed|cancelled))*$",
        example = "running,queued"
    )]
    state: Option<String>,
    /// Only jobs of this user.
    #[param(max_length = 100)]
    user: Option<String>,
    /// Only jobs with this name.
    #[param(max_length = 100)]
    name: Option<String>,
    /// Most jobs to return.
    #[param(minimum = 1, maximum = 500, default = 50)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    #[param(pattern = "^[0-7]?[0-9a-f]{1,15}$")]
    cursor: Option<String>,
}

/// A page of jobs.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct JobList {
    /// The jobs, newest first.
    pub jobs: Vec<Job>,
    /// The `cursor` of the next page, with older jobs; null on the last page.
    pub next_cursor: Option<String>,
}

const MAX_PAGE: u32 = 500;

impl ListQuery {
    fn filter(self) -> ApiResult<Filter> {
        let bad_request = |what: String| ProblemDetails::bad_request(what);
        let states = self.state.iter().flat_map(|s| s.split(',')).map(|s| {
            s.parse().map_err(|()| {
                let valid: Vec<&str> = JobState::ALL.iter().map(|s| s.name()).collect();
                bad_request(format!("state: got {s:?}; valid: {}", valid.join(", ")))
            })
        });
        let limit = self.limit.unwrap_or(50);
        if !(1..=MAX_PAGE).contains(&limit) {
            return Err(bad_request(format!("limit: got {limit}; valid: 1 to {MAX_PAGE}")));
        }
        for (key, text) in [("user", &self.user), ("name", &self.name)] {
            let length = text.as_ref().map_or(0, |text| text.chars().count());
            if length > 100 {
                return Err(bad_request(format!("{key}: got {length} characters; valid: at most 100")));
            }
        }
        let before = self.cursor.map(|cursor| {
            let number =
                i64::from_str_radix(&cursor, 16).ok().filter(|_| cursor.bytes().all(|b| b.is_ascii_hexdigit()));
            number.ok_or_else(|| {
                let got = quoted_prefix(&cursor);
                bad_request(format!("cursor: got {got}; valid: the `next_cursor` of the previous page"))
            })
        });
        Ok(Filter {
            states: states.collect::<ApiResult<_>>()?,
            user: self.user,
            name: self.name,
            before: before.transpose()?,
            limit,
        })
    }
}

/// List jobs
///
/// Newest first, in pages. A failure here has only the first line of its message and no problems; get the job itself
/// for the rest. A token with the scope `submit` alone sees only its user's jobs.
#[utoipa::path(get, path = "/jobs", operation_id = "listJobs", tag = "jobs", params(ListQuery), responses(
    (status = 200, description = "A page of jobs", body = JobList),
))]
pub async fn list(
    State(app): State<App>,
    caller: Caller,
    Params(query): Params<ListQuery>,
) -> ApiResult<Json<JobList>> {
    let own = caller.visible_user()?.map(str::to_owned);
    let mut filter = query.filter()?;
    if let Some(own) = own {
        if filter.user.as_ref().is_some_and(|asked| *asked != own) {
            return Err(not_own_job());
        }
        filter.user = Some(own);
    }
    let (mut jobs, next) = app.service.store.read(move |c| jobs::list(c, &filter)).await?;
    jobs.iter_mut().for_each(|job| app.service.pending_cancels.apply(job));
    Ok(Json(JobList { jobs, next_cursor: next.map(|n| format!("{n:x}")) }))
}

/// Show a job
#[utoipa::path(get, path = "/jobs/{id}", operation_id = "getJob", tag = "jobs", params(Id), responses(
    (status = 200, description = "The job", body = Job),
))]
pub async fn show(State(app): State<App>, caller: Caller, Id(id): Id, _: Params<NoQuery>) -> ApiResult<Json<Job>> {
    require_visible(&app, &caller, &id).await?;
    let mut job = app.service.store.read(move |c| jobs::get_with_position(c, &id)).await?;
    app.service.pending_cancels.apply(&mut job);
    Ok(Json(job))
}

/// Get the job file as it was submitted
#[utoipa::path(get, path = "/jobs/{id}/file", operation_id = "getJobFile", tag = "jobs", params(Id), responses(
    (status = 200, description = "The job file", content((String = "application/yaml"), (serde_json::Value = "application/json"))),
))]
pub async fn file(State(app): State<App>, caller: Caller, Id(id): Id, _: Params<NoQuery>) -> ApiResult<Response> {
    require_visible(&app, &caller, &id).await?;
    let (media_type, text) = app.service.store.read(move |c| jobs::file(c, &id)).await?;
    let media_type = if media_type == super::submit::JSON { super::submit::JSON } else { super::submit::YAML };
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static(media_type))], text).into_response())
}

/// Cancel a job
///
/// Cancels a waiting job at once and stops the worker of a running job within seconds. Committed splits stay, and a
/// retry continues from them. While the disk of the data folder is full, the cancel of a waiting job takes effect when
/// there is space.
#[utoipa::path(post, path = "/jobs/{id}/cancel", operation_id = "cancelJob", tag = "jobs", params(Id), responses(
    (status = 200, description = "The job is cancelled", body = Job),
    (status = 202, description = "The worker of the job is being stopped, or the cancel cannot be stored yet because the disk is full", body = Job),
    (status = 409, description = "The job has already ended", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn cancel(State(app): State<App>, caller: Caller, Id(id): Id, _: Params<NoQuery>) -> ApiResult<Response> {
    owned_job(&app, &caller, &id).await?;
    let by = caller.require(Scope::Submit)?.user.clone();
    let service = Arc::clone(&app.service);
    let job = run_uncancelled(async move { Ok(pending_cancels::cancel(&service, id, by).await?) }).await?;
    let status = if job.state == JobState::Cancelled { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(job)).into_response())
}

/// Retry a job
///
/// Queues a failed or cancelled job again, under the same id. It continues after its committed splits.
#[utoipa::path(post, path = "/jobs/{id}/retry", operation_id = "retryJob", tag = "jobs", params(Id), responses(
    (status = 202, description = "The job waits for its next attempt", body = Job),
    (status = 409, description = "The job is neither failed nor cancelled", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn retry(State(app): State<App>, caller: Caller, Id(id): Id, _: Params<NoQuery>) -> ApiResult<Response> {
    owned_job(&app, &caller, &id).await?;
    let by = caller.require(Scope::Submit)?.user.clone();
    let service = Arc::clone(&app.service);
    let job = run_uncancelled(async move {
        let job = service.store.write(move |t, appended| jobs::retry(t, &id, &by, Time::now(), appended)).await?;
        service.wake.notify_one();
        Ok(job)
    });
    let job = job.await?;
    Ok((StatusCode::ACCEPTED, Json(job)).into_response())
}

/// Delete a job
///
/// Deletes a finished job with its events and its log. The data set stays at its output.
#[utoipa::path(delete, path = "/jobs/{id}", operation_id = "deleteJob", tag = "jobs", params(Id), responses(
    (status = 204, description = "The job is deleted"),
    (status = 409, description = "The job has not ended", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn delete(State(app): State<App>, caller: Caller, Id(id): Id, _: Params<NoQuery>) -> ApiResult<StatusCode> {
    owned_job(&app, &caller, &id).await?;
    let service = Arc::clone(&app.service);
    run_uncancelled(async move {
        let job_id = id.clone();
        service.store.write(move |t, _| jobs::delete(t, &job_id)).await?;
        service.logs.remove(&id).await;
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

/// The job, if the caller may change it.
async fn owned_job(app: &App, caller: &Caller, id: &crate::model::JobId) -> ApiResult<Job> {
    caller.require(Scope::Submit)?;
    require_visible(app, caller, id).await?;
    let id = id.clone();
    let job = app.service.store.read(move |c| jobs::get(c, &id)).await?;
    caller.require_owner(&job.user)?;
    Ok(job)
}

/// Points of a job's rate plot.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct RateList {
    /// At most 600 points, oldest first; their distance grows with the duration of the job.
    pub points: Vec<RatePoint>,
}

/// Get the rate of a job over time
#[utoipa::path(get, path = "/jobs/{id}/rates", operation_id = "listJobRates", tag = "jobs", params(Id), responses(
    (status = 200, description = "The points of the plot", body = RateList),
))]
pub async fn rates(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id,
    _: Params<NoQuery>,
) -> ApiResult<Json<RateList>> {
    require_visible(&app, &caller, &id).await?;
    let stored = app.service.store.read(move |c| jobs::rates(c, &id)).await?;
    let rates: Rates = match stored {
        Some(text) => serde_json::from_str(&text).map_err(|e| ProblemDetails::internal(&e))?,
        None => Rates::default(),
    };
    Ok(Json(RateList { points: rates.into_points() }))
}
