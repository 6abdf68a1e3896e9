//! Events: history, and live streams (server-sent events).
//!
//! A stream begins to listen before it reads the history, so nothing falls between; a watcher that is too slow for the bus
//! reads what it missed from the store. So memory does not grow with slow watchers.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::auth::Caller;
use super::limits::Watcher;
use super::problem::{Answer, ProblemDetails};
use super::query::{Id, Nothing, Params};
use crate::service::model::{EventType, EventView, JobId};
use crate::service::store::tokens::Scope;
use crate::service::store::{Store, events, jobs};
use crate::service::until;

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Only events with a higher number.
    #[param(minimum = 0)]
    after: Option<i64>,
    /// How many at most; of a stream all are sent.
    #[param(minimum = 1, maximum = 1000, default = 500)]
    limit: Option<u32>,
}

/// Events of a job.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Oldest first.
    pub events: Vec<EventView>,
    /// What `after` must be for those that follow; null when there are none yet.
    pub next_after: Option<i64>,
}

const LARGEST_PAGE: u32 = 1000;
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Events of a job
///
/// With `Accept: text/event-stream` they come live, after those that were before; `Last-Event-ID` goes on after a lost connection. The
/// stream ends with an event `end` when the job is over.
#[utoipa::path(get, path = "/jobs/{id}/events", operation_id = "listJobEvents", tag = "events", params(Id, EventsQuery), responses(
    (status = 200, description = "Events", content((EventList = "application/json"), (String = "text/event-stream"))),
    (status = 429, description = "As many streams as there may be, or too many requests", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn of_job(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id,
    Params(query): Params<EventsQuery>,
    headers: HeaderMap,
) -> Answer<Response> {
    caller.must(Scope::Read)?;
    let limit = query.limit.unwrap_or(500);
    if !(1..=LARGEST_PAGE).contains(&limit) {
        return Err(ProblemDetails::bad_request(format!("limit: got {limit}; valid: 1 to {LARGEST_PAGE}")));
    }
    let last_id = headers.get("last-event-id").and_then(|v| v.to_str().ok()?.parse().ok());
    let after = query.after.or(last_id).unwrap_or(0);
    if after < 0 {
        return Err(ProblemDetails::bad_request(format!("after: got {after}; valid: 0 or more")));
    }
    if wants_stream(&headers) {
        let watcher = enter(&app)?;
        let receiver = app.service.store.watch();
        let found = id.clone();
        app.service.store.read(move |c| jobs::get(c, &found)).await?;
        let follower = Follower {
            store: Arc::clone(&app.service.store),
            id,
            after,
            ready: VecDeque::new(),
            receiver,
            stopping: app.service.stopping.subscribe(),
            stage: Stage::History,
            _watcher: watcher,
        };
        return Ok(streamed(stream::unfold(follower, |mut f| async move { Some((Ok(f.next().await?), f)) })));
    }
    let found = app.service.store.read(move |c| {
        jobs::get(c, &id)?;
        events::history(c, &id, after, limit)
    });
    let events = found.await?;
    let next_after = events.last().filter(|_| events.len() == limit as usize).and_then(|e| e.seq);
    Ok(Json(EventList { events, next_after }).into_response())
}

/// Changes of all jobs, live
///
/// `state` and, at most twice a second for each job, `progress`; no history.
#[utoipa::path(get, path = "/events", operation_id = "watchEvents", tag = "events", responses(
    (status = 200, description = "Events", content((String = "text/event-stream"))),
    (status = 429, description = "As many streams as there may be, or too many requests", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn of_all(State(app): State<App>, caller: Caller, _: Params<Nothing>) -> Answer<Response> {
    caller.must(Scope::Read)?;
    let watcher = enter(&app)?;
    let all = Everything {
        receiver: app.service.store.watch(),
        stopping: app.service.stopping.subscribe(),
        _watcher: watcher,
    };
    Ok(streamed(stream::unfold(all, |mut all| async move { Some((Ok(all.next().await?), all)) })))
}

fn wants_stream(headers: &HeaderMap) -> bool {
    headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).is_some_and(|accept| accept.contains("text/event-stream"))
}

/// One more live stream.
pub fn enter(app: &App) -> Answer<Watcher> {
    let most = app.service.config.limits.watchers;
    app.watchers
        .enter()
        .ok_or_else(|| ProblemDetails::too_many(format!("{most} live streams are open, as many as there may be"), 10))
}

fn streamed(events: impl Stream<Item = Result<Sent, Infallible>> + Send + 'static) -> Response {
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

fn sent(event: &EventView) -> Sent {
    let made = Sent::default().event(event.kind.name());
    let made = event.seq.map_or(made.clone(), |seq| made.id(seq.to_string()));
    // of our own types, which JSON can hold
    made.json_data(event).unwrap_or_default()
}

enum Stage {
    History,
    MayHaveEnded,
    Live,
    Ended,
}

/// The events of one job, from a number on.
struct Follower {
    store: Arc<Store>,
    id: JobId,
    after: i64,
    ready: VecDeque<EventView>,
    receiver: Receiver<Arc<EventView>>,
    stopping: watch::Receiver<bool>,
    stage: Stage,
    _watcher: Watcher,
}

impl Follower {
    async fn next(&mut self) -> Option<Sent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.after = event.seq.unwrap_or(self.after);
                return Some(sent(&event));
            }
            match self.stage {
                Stage::Ended => return None,
                Stage::History => match self.read().await {
                    Ok(true) => {}
                    Ok(false) => self.stage = Stage::MayHaveEnded,
                    // the client asks again, after the last one that it has
                    Err(()) => return None,
                },
                Stage::MayHaveEnded => {
                    if let Some(end) = self.end().await {
                        self.stage = Stage::Ended;
                        return Some(end);
                    }
                    self.stage = Stage::Live;
                }
                Stage::Live => {
                    if !self.wait().await {
                        return None;
                    }
                }
            }
        }
    }

    /// Reads more of the history; `false` when there is none.
    async fn read(&mut self) -> Result<bool, ()> {
        let (id, after) = (self.id.clone(), self.after);
        let read = self.store.read(move |c| events::history(c, &id, after, LARGEST_PAGE)).await;
        self.ready.extend(read.map_err(|e| tracing::error!("a stream of events: {e}"))?);
        Ok(!self.ready.is_empty())
    }

    /// What the stream ends with, when the job is over and all of its events are sent.
    async fn end(&self) -> Option<Sent> {
        let (id, after) = (self.id.clone(), self.after);
        let look = self.store.read(move |c| {
            let job = jobs::get(c, &id)?;
            Ok((job.state, events::history(c, &id, after, 1)?.is_empty()))
        });
        match look.await {
            Ok((state, true)) if state.is_final() => {
                Some(Sent::default().event("end").data(format!("{{\"state\":\"{state}\"}}")))
            }
            Ok(_) => None,
            // it was deleted
            Err(_) => Some(Sent::default().event("end").data("{\"state\":null}")),
        }
    }

    /// Waits for something new; `false` when the stream is over.
    async fn wait(&mut self) -> bool {
        loop {
            let event = tokio::select! {
                event = self.receiver.recv() => event,
                () = until(&mut self.stopping) => return false,
            };
            match event {
                Ok(event) if event.job != self.id => {}
                Ok(event) if event.seq.is_some_and(|seq| seq <= self.after) => {}
                Ok(event) => {
                    if event.kind == EventType::State {
                        self.stage = Stage::MayHaveEnded;
                    }
                    self.ready.push_back(event.as_ref().clone());
                    return true;
                }
                Err(RecvError::Lagged(_)) => {
                    self.stage = Stage::History;
                    return true;
                }
                Err(RecvError::Closed) => return false,
            }
        }
    }
}

/// Changes of all jobs.
struct Everything {
    receiver: Receiver<Arc<EventView>>,
    stopping: watch::Receiver<bool>,
    _watcher: Watcher,
}

impl Everything {
    async fn next(&mut self) -> Option<Sent> {
        loop {
            let event = tokio::select! {
                event = self.receiver.recv() => event,
                () = until(&mut self.stopping) => return None,
            };
            match event {
                Ok(event) if matches!(event.kind, EventType::State | EventType::Progress) => return Some(sent(&event)),
                // who missed something lists the jobs anew when told so
                Err(RecvError::Lagged(_)) => return Some(Sent::default().event("missed").data("{}")),
                Ok(_) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    }
}
