//! Live streams of events.
//!
//! ```text
//!   store ──history, in pages──► stream ◄──live── bus
//!                                   │ falls behind the bus ─► reads the missed events from the store
//! ```
//!
//! So a slow watcher costs no extra memory. A stream ends with its token, and when the service stops.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use axum::response::sse::Event as SseEvent;
use rusqlite::Connection;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;

use super::events::MAX_PAGE;
use crate::client_limits::Watcher;
use crate::model::{EventType, EventView, JobId};
use crate::store::events::{self, Position};
use crate::store::{Store, StoreError, jobs};
use crate::{Service, wait_until_set};

fn to_sse(event: &EventView) -> SseEvent {
    let message = SseEvent::default().event(event.kind.name());
    let message = event.seq.map_or(message.clone(), |seq| message.id(seq.to_string()));
    // these are our own types, which always serialize
    message.json_data(event).unwrap_or_default()
}

/// The live inputs of a stream.
struct LiveInput {
    receiver: Receiver<Arc<EventView>>,
    stopping: watch::Receiver<bool>,
    watcher: Watcher,
}

impl LiveInput {
    fn new(service: &Service, receiver: Receiver<Arc<EventView>>, watcher: Watcher) -> Self {
        Self { receiver, stopping: service.stopping.subscribe(), watcher }
    }

    /// The next event; `None` when the stream has to end.
    async fn next(&mut self) -> Option<Result<Arc<EventView>, Lagged>> {
        let received = tokio::select! {
            biased;
            () = self.watcher.token_ended() => return None,
            () = wait_until_set(&mut self.stopping) => return None,
            received = self.receiver.recv() => received,
        };
        match received {
            Ok(event) => Some(Ok(event)),
            Err(RecvError::Lagged(_)) => Some(Err(Lagged)),
            Err(RecvError::Closed) => None,
        }
    }

    /// Whether the token was revoked or expired. A stream that reads its history checks this too.
    async fn has_ended(&mut self) -> bool {
        tokio::select! {
            biased;
            () = self.watcher.token_ended() => true,
            () = std::future::ready(()) => false,
        }
    }
}

/// The stream fell behind the bus, which dropped events.
struct Lagged;

/// State of both kinds of stream: the live input, the events ready to send, and the last event sent.
struct Feed {
    store: Arc<Store>,
    live_input: LiveInput,
    ready: VecDeque<EventView>,
    /// Number of the last event sent.
    after: i64,
}

impl Feed {
    fn new(service: &Service, receiver: Receiver<Arc<EventView>>, watcher: Watcher, after: i64) -> Self {
        let live_input = LiveInput::new(service, receiver, watcher);
        Self { store: Arc::clone(&service.store), live_input, ready: VecDeque::new(), after }
    }

    /// What precedes all other work: the end of the stream (`Some(None)`), or a ready event.
    async fn next_ready(&mut self) -> Option<Option<SseEvent>> {
        if self.live_input.has_ended().await {
            return Some(None);
        }
        let event = self.ready.pop_front()?;
        self.after = event.seq.unwrap_or(self.after);
        Some(Some(to_sse(&event)))
    }

    /// Reads more history; `false` when there is none left, `None` when the store fails.
    async fn read_history(
        &mut self,
        read: impl FnOnce(&Connection, i64) -> Result<Vec<EventView>, StoreError> + Send + 'static,
    ) -> Option<bool> {
        let after = self.after;
        let read = self.store.read(move |c| read(c, after)).await;
        self.ready.extend(read.map_err(|e| tracing::error!("cannot read the events of a live stream: {e}")).ok()?);
        Some(!self.ready.is_empty())
    }
}

enum Stage {
    History,
    MayHaveEnded,
    Live,
    Ended,
}

/// The events of one job after a number.
pub struct JobStream {
    feed: Feed,
    id: JobId,
    stage: Stage,
}

impl JobStream {
    /// `receiver` must have been created before the caller read the store.
    pub fn new(service: &Service, receiver: Receiver<Arc<EventView>>, watcher: Watcher, id: JobId, after: i64) -> Self {
        Self { feed: Feed::new(service, receiver, watcher, after), id, stage: Stage::History }
    }

    /// The next event to send; `None` at the end.
    pub async fn next(&mut self) -> Option<SseEvent> {
        loop {
            if let Some(first) = self.feed.next_ready().await {
                return first;
            }
            match self.stage {
                Stage::Ended => return None,
                Stage::History => {
                    let id = self.id.clone();
                    // if the store fails the stream ends, and the client reconnects after its last event
                    if !self.feed.read_history(move |c, after| events::history(c, &id, after, MAX_PAGE)).await? {
                        self.stage = Stage::MayHaveEnded;
                    }
                }
                Stage::MayHaveEnded => {
                    if let Some(end) = self.end_message().await {
                        self.stage = Stage::Ended;
                        return Some(end);
                    }
                    self.stage = Stage::Live;
                }
                Stage::Live => {
                    if !self.wait_for_event().await {
                        return None;
                    }
                }
            }
        }
    }

    /// The final message of the stream, once the job has ended and all its events are sent.
    async fn end_message(&self) -> Option<SseEvent> {
        let (id, after) = (self.id.clone(), self.feed.after);
        let query = self.feed.store.read(move |c| {
            let job = jobs::get(c, &id)?;
            Ok((job.state, events::history(c, &id, after, 1)?.is_empty()))
        });
        match query.await {
            Ok((state, true)) if state.is_final() => {
                Some(SseEvent::default().event("end").data(format!("{{\"state\":\"{state}\"}}")))
            }
            Ok(_) => None,
            // the job was deleted
            Err(_) => Some(SseEvent::default().event("end").data("{\"state\":null}")),
        }
    }

    /// Waits for a new event; `false` when the stream has to end.
    async fn wait_for_event(&mut self) -> bool {
        loop {
            match self.feed.live_input.next().await {
                None => return false,
                Some(Ok(event)) if event.job != self.id => {}
                Some(Ok(event)) if event.seq.is_some_and(|seq| seq <= self.feed.after) => {}
                Some(Ok(event)) => {
                    if event.kind == EventType::State {
                        self.stage = Stage::MayHaveEnded;
                    }
                    self.feed.ready.push_back(event.as_ref().clone());
                    return true;
                }
                Some(Err(Lagged)) => {
                    self.stage = Stage::History;
                    return true;
                }
            }
        }
    }
}

/// Most jobs whose owner a stream remembers.
const MAX_REMEMBERED_OWNERS: usize = 10_000;

enum AllJobsStage {
    /// No event was sent yet.
    Begin,
    /// Reads earlier events from the store.
    Missed,
    Live,
}

/// Changes of all jobs, or of one user's jobs.
pub struct AllJobsStream {
    feed: Feed,
    user: Option<String>,
    own_jobs: HashMap<JobId, bool>,
    stage: AllJobsStage,
}

impl AllJobsStream {
    /// `receiver` must have been created before the caller read the store.
    pub fn new(
        service: &Service,
        receiver: Receiver<Arc<EventView>>,
        watcher: Watcher,
        user: Option<String>,
        after: i64,
    ) -> Self {
        Self {
            feed: Feed::new(service, receiver, watcher, after),
            user,
            own_jobs: HashMap::new(),
            stage: AllJobsStage::Begin,
        }
    }

    /// The next event to send; `None` at the end.
    pub async fn next(&mut self) -> Option<SseEvent> {
        loop {
            if let Some(first) = self.feed.next_ready().await {
                return first;
            }
            match self.stage {
                // an id without an event: a client that disconnects before the first event can resume without a gap
                AllJobsStage::Begin => {
                    self.stage = AllJobsStage::Missed;
                    return Some(SseEvent::default().id(self.feed.after.to_string()));
                }
                AllJobsStage::Missed => {
                    let user = self.user.clone();
                    let read = move |c: &Connection, after| events::state_changes(c, user.as_deref(), after, MAX_PAGE);
                    if !self.feed.read_history(read).await? {
                        self.stage = AllJobsStage::Live;
                    }
                }
                AllJobsStage::Live => match self.feed.live_input.next().await? {
                    Ok(event) => {
                        let is_new = event.seq.is_none_or(|seq| seq > self.feed.after);
                        let is_shown = matches!(event.kind, EventType::State | EventType::Progress);
                        if is_new && is_shown && self.is_own(&event.job).await? {
                            self.feed.ready.push_back(event.as_ref().clone());
                        }
                    }
                    Err(Lagged) => {
                        let after = self.feed.after;
                        let read =
                            self.feed.store.read(move |c| Ok((events::position(c, after)?, events::newest_seq(c)?)));
                        let (position, newest) = read
                            .await
                            .map_err(|e| tracing::error!("cannot read the events of a live stream: {e}"))
                            .ok()?;
                        if position != Position::Complete {
                            // the client must list the jobs again after `missed`
                            self.feed.after = newest;
                            return Some(SseEvent::default().event("missed").data("{}").id(newest.to_string()));
                        }
                        self.stage = AllJobsStage::Missed;
                    }
                },
            }
        }
    }

    /// Whether the stream may show the job; `None` when the store fails.
    async fn is_own(&mut self, job: &JobId) -> Option<bool> {
        let Some(user) = &self.user else { return Some(true) };
        if let Some(own) = self.own_jobs.get(job) {
            return Some(*own);
        }
        let id = job.clone();
        let own = match self.feed.store.read(move |c| jobs::owner(c, &id)).await {
            Ok(owner) => owner == *user,
            Err(StoreError::NoJob(_)) => false,
            Err(e) => {
                tracing::error!("cannot read the events of a live stream: {e}");
                return None;
            }
        };
        if self.own_jobs.len() >= MAX_REMEMBERED_OWNERS {
            self.own_jobs.clear();
        }
        self.own_jobs.insert(job.clone(), own);
        Some(own)
    }
}
