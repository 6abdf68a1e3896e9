//! Events: history, and live streams (server-sent events); [`super::event_streams`] implements the streams.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::event_streams::{AllJobsStream, JobStream};
use super::problem::{ApiResult, ProblemDetails};
use super::query::{Id, NoQuery, Params};
use super::{App, require_visible};
use crate::bounds::quoted_prefix;
use crate::client_limits::{ReachedLimit, Watcher};
use crate::model::EventView;
use crate::store::events::{self, Position};
use crate::store::jobs;

/// Which events to return.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Only events with a higher number; the header `Last-Event-ID` overrides it.
    #[param(minimum = 0)]
    after: Option<i64>,
    /// Most events to return; ignored for a stream.
    #[param(minimum = 1, maximum = 1000, default = 500)]
    limit: Option<u32>,
}

/// Events of a job.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// The events, oldest first.
    pub events: Vec<EventView>,
    /// The `after` of the next page; null if this page is the last for now.
    pub next_after: Option<i64>,
}

pub const MAX_PAGE: u32 = 1000;
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// List or watch the events of a job
///
/// With `Accept: text/event-stream` the answer is a live stream that begins with the past events. `Last-Event-ID`
/// resumes it after a lost connection. The stream ends with an event `end` when the job has ended.
#[utoipa::path(get, path = "/jobs/{id}/events", operation_id = "listJobEvents", tag = "events", params(Id, EventsQuery,
    ("Last-Event-ID" = Option<i64>, Header, description = "Number of the last event that the client received; the answer begins with the next one", minimum = 0)), responses(
    (status = 200, description = "The events", content((EventList = "application/json"), (String = "text/event-stream"))),
    (status = 409, description = "This service has no event with that number; repeat the request without it", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 429, description = "Too many live streams, or too many requests", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn job_events(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id,
    Params(query): Params<EventsQuery>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    require_visible(&app, &caller, &id).await?;
    let limit = query.limit.unwrap_or(500);
    if !(1..=MAX_PAGE).contains(&limit) {
        return Err(ProblemDetails::bad_request(format!("limit: got {limit}; valid: 1 to {MAX_PAGE}")));
    }
    if let Some(after) = query.after.filter(|after| *after < 0) {
        return Err(ProblemDetails::bad_request(format!("after: got {after}; valid: 0 or more")));
    }
    let last_id = last_event_id(&headers)?;
    let after = last_id.or(query.after).unwrap_or(0);
    let is_live = wants_stream(&headers);
    let watcher = if is_live { Some(open_stream(&app, &caller)?) } else { None };
    // subscribe before the history is read, so that no event falls between the two
    let receiver = app.service.store.subscribe();
    let job_id = id.clone();
    let newest = app.service.store.read(move |c| jobs::get(c, &job_id).and_then(|_| events::newest_seq(c))).await?;
    if after > newest && (is_live || last_id.is_some()) {
        return Err(unknown_event(after, newest, "repeat the request without it to receive all events of the job"));
    }
    if let Some(watcher) = watcher {
        let follower = JobStream::new(&app.service, receiver, watcher, id, after);
        return Ok(sse_response(stream::unfold(follower, |mut f| async move { Some((Ok(f.next().await?), f)) })));
    }
    let events = app.service.store.read(move |c| events::history(c, &id, after, limit)).await?;
    let next_after = events.last().filter(|_| events.len() == limit as usize).and_then(|e| e.seq);
    Ok(Json(EventList { events, next_after }).into_response())
}

/// Watch changes of all jobs
///
/// Streams `state` events and, at most twice a second per job, `progress` events. With `Last-Event-ID` it first sends
/// the changes of state since that event, which may come from this stream or a job's. A token with the scope `submit`
/// alone sees only its user's jobs.
#[utoipa::path(get, path = "/events", operation_id = "watchEvents", tag = "events", params(
    ("Last-Event-ID" = Option<i64>, Header, description = "Number of the last event that the client received; the stream begins with the changes of state since then", minimum = 0)), responses(
    (status = 200, description = "The events", content((String = "text/event-stream"))),
    (status = 409, description = "Some changes since that event are no longer stored; open the stream without the header, then list the jobs", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 429, description = "Too many live streams, or too many requests", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn all_events(
    State(app): State<App>,
    caller: Caller,
    _: Params<NoQuery>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    const RESUBSCRIBE: &str = "open the stream without Last-Event-ID, then list the jobs (GET /api/v1/jobs)";
    let user = caller.visible_user()?.map(str::to_owned);
    let last_id = last_event_id(&headers)?;
    let watcher = open_stream(&app, &caller)?;
    let receiver = app.service.store.subscribe();
    let query = app.service.store.read(move |c| {
        let newest = events::newest_seq(c)?;
        Ok((newest, last_id.map(|last| events::position(c, last)).transpose()?))
    });
    let (newest, position) = query.await?;
    let after = last_id.unwrap_or(newest);
    let conflict = |what: String| Err(ProblemDetails::new(StatusCode::CONFLICT, format!("{what}; {RESUBSCRIBE}")));
    match position {
        None | Some(Position::Complete) => {}
        Some(Position::Unknown(newest)) => return Err(unknown_event(after, newest, RESUBSCRIBE)),
        Some(Position::Deleted) => {
            return conflict(format!("some events after number {after} were deleted together with their jobs"));
        }
        Some(Position::TooOld) => {
            return conflict(format!(
                "{} events follow number {after}, more than the service sends again",
                newest.saturating_sub(after)
            ));
        }
    }
    let all = AllJobsStream::new(&app.service, receiver, watcher, user, after);
    Ok(sse_response(stream::unfold(all, |mut all| async move { Some((Ok(all.next().await?), all)) })))
}

fn last_event_id(headers: &HeaderMap) -> ApiResult<Option<i64>> {
    let Some(value) = headers.get("last-event-id") else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.parse().ok()).filter(|n| *n >= 0);
    let refused = || {
        let got = quoted_prefix(&String::from_utf8_lossy(value.as_bytes()));
        let valid = "the `id` of an event that this service sent";
        ProblemDetails::bad_request(format!("Last-Event-ID: got {got}; valid: {valid}"))
    };
    number.map(Some).ok_or_else(refused)
}

fn unknown_event(after: i64, newest: i64, what_to_do: &str) -> ProblemDetails {
    let detail = format!(
        "this service has no event with the number {after} (the newest has {newest}): the number comes from another service, or this service's data was replaced by an older copy; {what_to_do}"
    );
    ProblemDetails::new(StatusCode::CONFLICT, detail)
}

fn wants_stream(headers: &HeaderMap) -> bool {
    headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).is_some_and(|accept| accept.contains("text/event-stream"))
}

/// Opens one more live stream, within the caller's limits.
pub fn open_stream(app: &App, caller: &Caller) -> ApiResult<Watcher> {
    let holder =
        caller.holder.as_ref().ok_or_else(|| ProblemDetails::internal(&"a live stream was opened without a caller"))?;
    if caller.has_reserved_slot {
        let detail = "the remaining connections are reserved and do not accept live streams; try again soon";
        return Err(ProblemDetails::too_many_requests(detail, 10));
    }
    app.watchers.open(holder).map_err(|reached| {
        let most = app.service.config.limits.streams();
        let one = "one stream of all jobs (GET /api/v1/events) can replace many";
        let detail = match reached {
            ReachedLimit::Token => {
                format!(
                    "{} live streams of this token are open, the maximum (limits.watchers_per_token); close some: {one}",
                    most.per_token
                )
            }
            ReachedLimit::User => format!(
                "{} live streams of {} are open, the maximum for one user (limits.watchers_per_user); close some: {one}",
                most.per_user, holder.user
            ),
            ReachedLimit::All => {
                format!(
                    "{} live streams are open, the maximum of this server (limits.watchers, at most half of \
                     limits.connections); try again later",
                    most.all
                )
            }
        };
        ProblemDetails::too_many_requests(detail, 10)
    })
}

fn sse_response(events: impl Stream<Item = Result<SseEvent, Infallible>> + Send + 'static) -> Response {
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL)).into_response()
}
