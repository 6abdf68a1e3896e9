//! Live counters of the stages of a job: what came out of each, and how long it was at work itself.
//!
//! A stage is at work while it computes, reads or writes; not while it waits for a batch of the stage before it, or for room in the queue
//! of the stage after it. So the stage whose busy time is nearest the time of the run is the one that the job waits for.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use datafusion::physical_plan::metrics::Time;
use stillhouse_operators::operator::OperatorSpec;

use crate::events::{StagePlace, StageProgress};

/// What a stage of a split is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Doing {
    /// Its thread has not begun.
    Nothing,
    /// It computes, reads or writes.
    Works,
    /// It waits for a batch of the stage before it.
    WaitsForInput,
    /// It waits for room in the queue of the stage after it.
    WaitsForRoom,
    /// It has come to its end.
    Done,
}

impl Doing {
    const ALL: [Self; 5] = [Self::Nothing, Self::Works, Self::WaitsForInput, Self::WaitsForRoom, Self::Done];

    fn words(self) -> &'static str {
        match self {
            Self::Nothing => "has not begun",
            Self::Works => "is at work",
            Self::WaitsForInput => "waits for the stage before it",
            Self::WaitsForRoom => "waits for the stage after it",
            Self::Done => "has ended",
        }
    }
}

/// Counters of one stage: over all splits, or of one of them, which then counts for the whole too.
#[derive(Debug)]
pub struct Stage {
    name: &'static str,
    rows: AtomicU64,
    busy_nanos: AtomicU64,
    doing: AtomicU8,
    whole: Option<Arc<Stage>>,
}

impl Stage {
    fn new(name: &'static str, whole: Option<Arc<Self>>) -> Arc<Self> {
        let doing = AtomicU8::new(Doing::Nothing as u8);
        Arc::new(Self { name, rows: AtomicU64::new(0), busy_nanos: AtomicU64::new(0), doing, whole })
    }

    fn of_a_split(self: &Arc<Self>) -> Arc<Self> {
        Self::new(self.name, Some(Arc::clone(self)))
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Adds rows that came out of the stage.
    pub fn put_out(&self, rows: usize) {
        self.rows.fetch_add(rows as u64, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.put_out(rows);
        }
    }

    /// Adds time at work.
    pub fn worked(&self, time: Duration) {
        self.busy_nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.worked(time);
        }
    }

    /// Notes what it is doing from now on.
    pub fn does(&self, doing: Doing) {
        self.doing.store(doing as u8, Ordering::Relaxed);
    }

    fn place(&self) -> StagePlace {
        let doing = Doing::ALL.get(usize::from(self.doing.load(Ordering::Relaxed))).map_or("", |d| d.words());
        StagePlace { name: self.name.to_owned(), rows: self.rows.load(Ordering::Relaxed), doing: doing.to_owned() }
    }

    fn progress(&self) -> StageProgress {
        StageProgress {
            name: self.name.to_owned(),
            rows: self.rows.load(Ordering::Relaxed),
            busy_seconds: self.busy_nanos.load(Ordering::Relaxed) as f64 / 1e9,
        }
    }
}

/// The stages of a job, in the order of the pipeline: `read`, the operators, `write`.
#[derive(Debug)]
pub struct Stages {
    /// Reading the documents.
    pub read: Arc<Stage>,
    /// The operators, in order.
    pub operators: Vec<Arc<Stage>>,
    /// Writing the shards.
    pub write: Arc<Stage>,
}

impl Stages {
    /// The stages of a job with these operators.
    pub fn of(operators: &[OperatorSpec]) -> Self {
        Self {
            read: Stage::new("read", None),
            operators: operators.iter().map(|o| Stage::new(o.name(), None)).collect(),
            write: Stage::new("write", None),
        }
    }

    /// The same stages of one split, which count for these too.
    pub fn of_a_split(&self) -> Self {
        Self {
            read: self.read.of_a_split(),
            operators: self.operators.iter().map(Stage::of_a_split).collect(),
            write: self.write.of_a_split(),
        }
    }

    /// How many there are: each takes a thread.
    pub fn count(&self) -> usize {
        self.operators.len() + 2
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Stage>> {
        std::iter::once(&self.read).chain(&self.operators).chain(std::iter::once(&self.write))
    }

    /// Rows that came out of all stages: grows as long as anything moves.
    pub fn rows(&self) -> u64 {
        self.all().map(|stage| stage.rows.load(Ordering::Relaxed)).sum()
    }

    /// Where each stage is, in order.
    pub fn places(&self) -> Vec<StagePlace> {
        self.all().map(|stage| stage.place()).collect()
    }

    /// The counters as they are now, in order.
    pub fn progress(&self) -> Vec<StageProgress> {
        self.all().map(|stage| stage.progress()).collect()
    }
}

/// The watch of one thread that works for a stage; it stands still until it is started. What runs when it is dropped counts.
pub(crate) struct Watch {
    stage: Arc<Stage>,
    also: Time,
    since: Cell<Option<Instant>>,
}

impl Watch {
    /// A watch for a stage; DataFusion's own metric counts the same time.
    pub fn new(stage: &Arc<Stage>, also: &Time) -> Self {
        Self { stage: Arc::clone(stage), also: also.clone(), since: Cell::new(None) }
    }

    pub fn start(&self) {
        self.stage.does(Doing::Works);
        self.since.set(Some(Instant::now()));
    }

    pub fn stop(&self) {
        if let Some(since) = self.since.take() {
            let time = since.elapsed();
            self.stage.worked(time);
            self.also.add_duration(time);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop();
    }
}
