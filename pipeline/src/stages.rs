//! Live counters of the stages of a job: what came out of each, and how long it was at work itself.
//!
//! A stage is at work while it computes, reads or writes; not while it waits for a batch of the stage before it, or for room in the queue
//! of the stage after it. So the stage whose busy time is nearest the time of the run is the one that the job waits for.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use datafusion::physical_plan::metrics::Time;
use stillhouse_operators::operator::OperatorSpec;

use crate::events::StageProgress;

/// Counters of one stage over all splits.
#[derive(Debug)]
pub struct Stage {
    name: &'static str,
    rows: AtomicU64,
    busy_nanos: AtomicU64,
}

impl Stage {
    fn new(name: &'static str) -> Arc<Self> {
        Arc::new(Self { name, rows: AtomicU64::new(0), busy_nanos: AtomicU64::new(0) })
    }

    /// Adds rows that came out of the stage.
    pub fn put_out(&self, rows: usize) {
        self.rows.fetch_add(rows as u64, Ordering::Relaxed);
    }

    /// Adds time at work.
    pub fn worked(&self, time: Duration) {
        self.busy_nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
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
            read: Stage::new("read"),
            operators: operators.iter().map(|o| Stage::new(o.name())).collect(),
            write: Stage::new("write"),
        }
    }

    /// The counters as they are now, in order.
    pub fn progress(&self) -> Vec<StageProgress> {
        let all = std::iter::once(&self.read).chain(&self.operators).chain(std::iter::once(&self.write));
        all.map(|stage| stage.progress()).collect()
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
