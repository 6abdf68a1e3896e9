//! Live streams of events, one by one.
//!
//! ```text
//!   store ──history, in pages──► stream ◄──live── bus
//!                                   │ too slow for the bus ─► what it missed is read from the store
//! ```
//!
//! So memory does not grow with slow watchers. A stream ends when its token does, and when the service stops.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use axum::response::sse::Event as Sent;
use rusqlite::Connection;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;

use super::events::LARGEST_PAGE;
use super::limits::Watcher;
use crate::model::{EventType, EventView, JobId};
use crate::store::events::{self, Position};
use crate::store::{Store, StoreError, jobs};
use crate::{Service, until};

fn sent(event: &EventView) -> Sent {
    let made = Sent::default().event(event.kind.name());
    let made = event.seq.map_or(made.clone(), |seq| made.id(seq.to_string()));
    // of our own types, which JSON can hold
    made.json_data(event).unwrap_or_default()
}

/// What a stream hears.
struct Ear {
    receiver: Receiver<Arc<EventView>>,
    stopping: watch::Receiver<bool>,
    watcher: Watcher,
}

impl Ear {
    fn new(service: &Service, receiver: Receiver<Arc<EventView>>, watcher: Watcher) -> Self {
        Self { receiver, stopping: service.stopping.subscribe(), watcher }
    }

    /// The next event; `None` when the stream is over.
    async fn hear(&mut self) -> Option<Result<Arc<EventView>, Behind>> {
        let heard = tokio::select! {
            biased;
            () = self.watcher.over() => return None,
            () = until(&mut self.stopping) => return None,
            heard = self.receiver.recv() => heard,
        };
        match heard {
            Ok(event) => Some(Ok(event)),
            Err(RecvError::Lagged(_)) => Some(Err(Behind)),
            Err(RecvError::Closed) => None,
        }
    }

    /// Whether the token is revoked or over; also where a stream is busy with its history.
    async fn is_over(&mut self) -> bool {
        tokio::select! {
            biased;
            () = self.watcher.over() => true,
            () = std::future::ready(()) => false,
        }
    }
}

/// It was too slow.
struct Behind;

/// What both streams have: what they hear, what they may send by now, and how far they have sent.
struct Feed {
    store: Arc<Store>,
    ear: Ear,
    ready: VecDeque<EventView>,
    /// Number of the last event that was sent.
    after: i64,
}

impl Feed {
    fn new(service: &Service, receiver: Receiver<Arc<EventView>>, watcher: Watcher, after: i64) -> Self {
        let ear = Ear::new(service, receiver, watcher);
        Self { store: Arc::clone(&service.store), ear, ready: VecDeque::new(), after }
    }

    /// What is to be done before anything else: to end (`Some(None)`), or to send what is ready.
    async fn first(&mut self) -> Option<Option<Sent>> {
        if self.ear.is_over().await {
            return Some(None);
        }
        let event = self.ready.pop_front()?;
        self.after = event.seq.unwrap_or(self.after);
        Some(Some(sent(&event)))
    }

    /// Reads more of what there was; `false` when there is nothing more, `None` when the store fails.
    async fn fill(
        &mut self,
        read: impl FnOnce(&Connection, i64) -> Result<Vec<EventView>, StoreError> + Send + 'static,
    ) -> Option<bool> {
        let after = self.after;
        let read = self.store.read(move |c| read(c, after)).await;
        self.ready.extend(read.map_err(|e| tracing::error!("a stream of events: {e}")).ok()?);
        Some(!self.ready.is_empty())
    }
}

enum Stage {
    History,
    MayHaveEnded,
    Live,
    Ended,
}

/// The events of one job, from a number on.
pub struct Follower {
    feed: Feed,
    id: JobId,
    stage: Stage,
}

impl Follower {
    /// `receiver` must be older than the look at what there is.
    pub fn new(service: &Service, receiver: Receiver<Arc<EventView>>, watcher: Watcher, id: JobId, after: i64) -> Self {
        Self { feed: Feed::new(service, receiver, watcher, after), id, stage: Stage::History }
    }

    /// The next one; `None` at the end.
    pub async fn next(&mut self) -> Option<Sent> {
        loop {
            if let Some(first) = self.feed.first().await {
                return first;
            }
            match self.stage {
                Stage::Ended => return None,
                Stage::History => {
                    let id = self.id.clone();
                    // where the store fails the client asks again, after the last one that it has
                    if !self.feed.fill(move |c, after| events::history(c, &id, after, LARGEST_PAGE)).await? {
                        self.stage = Stage::MayHaveEnded;
                    }
                }
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

    /// What the stream ends with, when the job is over and all of its events are sent.
    async fn end(&self) -> Option<Sent> {
        let (id, after) = (self.id.clone(), self.feed.after);
        let look = self.feed.store.read(move |c| {
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
            match self.feed.ear.hear().await {
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
                Some(Err(Behind)) => {
                    self.stage = Stage::History;
                    return true;
                }
            }
        }
    }
}

/// Jobs of which a stream remembers whether they are its user's.
const REMEMBERED: usize = 10_000;

enum Part {
    /// Nothing was sent yet.
    Begin,
    /// What there was before is read from the store.
    Missed,
    Live,
}

/// Changes of all jobs, or of one user's.
pub struct Everything {
    feed: Feed,
    user: Option<String>,
    own: HashMap<JobId, bool>,
    part: Part,
}

impl Everything {
    /// `receiver` must be older than the look at what there is.
    pub fn new(
        service: &Service,
        receiver: Receiver<Arc<EventView>>,
        watcher: Watcher,
        user: Option<String>,
        after: i64,
    ) -> Self {
        Self { feed: Feed::new(service, receiver, watcher, after), user, own: HashMap::new(), part: Part::Begin }
    }

    /// The next one; `None` at the end.
    pub async fn next(&mut self) -> Option<Sent> {
        loop {
            if let Some(first) = self.feed.first().await {
                return first;
            }
            match self.part {
                // a number without an event: who loses the connection before the first one misses nothing
                Part::Begin => {
                    self.part = Part::Missed;
                    return Some(Sent::default().id(self.feed.after.to_string()));
                }
                Part::Missed => {
                    let user = self.user.clone();
                    let fill = move |c: &Connection, after| events::changes(c, user.as_deref(), after, LARGEST_PAGE);
                    if !self.feed.fill(fill).await? {
                        self.part = Part::Live;
                    }
                }
                Part::Live => match self.feed.ear.hear().await? {
                    Ok(event) => {
                        let is_new = event.seq.is_none_or(|seq| seq > self.feed.after);
                        let is_told = matches!(event.kind, EventType::State | EventType::Progress);
                        if is_new && is_told && self.is_own(&event.job).await? {
                            self.feed.ready.push_back(event.as_ref().clone());
                        }
                    }
                    Err(Behind) => {
                        let after = self.feed.after;
                        let read = self.feed.store.read(move |c| Ok((events::position(c, after)?, events::newest(c)?)));
                        let (position, newest) = read.await.map_err(|e| tracing::error!("a stream: {e}")).ok()?;
                        if position != Position::Here {
                            // who missed something lists the jobs anew when told so
                            self.feed.after = newest;
                            return Some(Sent::default().event("missed").data("{}").id(newest.to_string()));
                        }
                        self.part = Part::Missed;
                    }
                },
            }
        }
    }

    /// Whether a job is of those that may be seen; `None` when the store fails.
    async fn is_own(&mut self, job: &JobId) -> Option<bool> {
        let Some(user) = &self.user else { return Some(true) };
        if let Some(own) = self.own.get(job) {
            return Some(*own);
        }
        let id = job.clone();
        let own = match self.feed.store.read(move |c| jobs::owner(c, &id)).await {
            Ok(owner) => owner == *user,
            Err(StoreError::NoJob(_)) => false,
            Err(e) => {
                tracing::error!("a stream of events: {e}");
                return None;
            }
        };
        if self.own.len() >= REMEMBERED {
            self.own.clear();
        }
        self.own.insert(job.clone(), own);
        Some(own)
    }
}
