//! An epoch as a stream of batches: rows in the order of the epoch, dealt to ranks and workers, read ahead.
//!
//! ```text
//! positions start ..                     global batch n = the next W·B of them; rank r takes r, r + W, … of it; worker k of K takes the
//!                                        batches n with n mod K = k
//! producer ──rows──► blocks of the cache ──2──► batches ──► trainer
//!     └─ looks one window ahead and has its blocks read, while the cache has room
//! ```
//!
//! After any batch the rows given out so far, over all ranks, are exactly the positions below the batch's `next`: that one number
//! is the state of an epoch, whatever W, B and K are when it goes on.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::columns::Column;
use crate::dataset::{DataSet, Reading};
use crate::order::{LANES, Order};
use crate::process::runtime;
use crate::{ReadError, Result};

/// Batches that wait for the trainer.
const QUEUE: usize = 2;
/// Blocks that are read ahead at once.
const READ_AHEAD: usize = 16;

/// Who takes what of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// The order of the epoch.
    pub order: Order,
    /// First position; what comes before was given out already.
    pub start: u64,
    /// This trainer, of `world`.
    pub rank: u64,
    /// Trainers, W.
    pub world: u64,
    /// Rows of a batch of one trainer, B.
    pub batch_rows: u64,
    /// Whether the last global batch is left out when it is not full.
    pub drop_last: bool,
    /// This worker, of `workers`.
    pub worker: u64,
    /// Workers of each trainer, K.
    pub workers: u64,
}

/// One batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Its rows.
    pub rows: Vec<u64>,
    /// The positions below this one are given out, over all ranks, once this batch is.
    pub next: u64,
    /// The first window that it needs.
    pub window: u64,
}

impl Plan {
    /// Global batches left in the epoch.
    pub fn batches(&self) -> u64 {
        let left = self.order.rows().saturating_sub(self.start);
        let global = self.global();
        if self.drop_last { left / global } else { left.div_ceil(global) }
    }

    /// Rows that this trainer gets, over all its workers.
    pub fn rows(&self) -> u64 {
        let left = self.order.rows().saturating_sub(self.start);
        let full = left / self.global();
        let rest = if self.drop_last { 0 } else { left % self.global() };
        full * self.batch_rows + (rest + self.world - 1).saturating_sub(self.rank) / self.world
    }

    /// Batches that this trainer gets, over all its workers: one less where the last global batch has no row for it.
    pub fn own_batches(&self) -> u64 {
        self.rows().div_ceil(self.batch_rows)
    }

    /// The batches of this worker.
    pub fn steps(self) -> Steps {
        Steps { plan: self, next: self.worker, window: 0, rows: None }
    }

    /// Rows of the blocks of a window that this rank meets: ranks divide the lanes, but the last window has none.
    fn window_rows(&self, window: u64) -> u64 {
        let positions = self.order.positions(window);
        let rows = positions.end - positions.start;
        if window + 1 >= self.order.windows() {
            return rows;
        }
        let (mut a, mut b) = (self.world, LANES);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        rows.div_ceil(a)
    }

    fn global(&self) -> u64 {
        self.batch_rows.saturating_mul(self.world)
    }
}

/// Iterator over the batches of one worker. Holds the rows of one window.
#[derive(Debug, Clone)]
pub struct Steps {
    plan: Plan,
    next: u64,
    window: u64,
    rows: Option<Vec<u64>>,
}

impl Iterator for Steps {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let plan = self.plan;
        if self.next >= plan.batches() {
            return None;
        }
        let begin = plan.start + self.next * plan.global();
        let end = begin.saturating_add(plan.global()).min(plan.order.rows());
        self.next += plan.workers;
        let mut rows = Vec::with_capacity(plan.batch_rows.min(end - begin) as usize);
        let mut position = begin + plan.rank;
        let window = plan.order.window_of(begin.min(plan.order.rows() - 1));
        while position < end {
            rows.push(self.row(position));
            position += plan.world;
        }
        // the last global batch may be shorter than there are trainers
        if rows.is_empty() { None } else { Some(Step { rows, next: end, window }) }
    }
}

impl Steps {
    fn row(&mut self, position: u64) -> u64 {
        let order = self.plan.order;
        if self.rows.is_none() || !order.positions(self.window).contains(&position) {
            self.window = order.window_of(position);
            match order.window(self.window) {
                Some(rows) => self.rows = Some(rows),
                None => return position,
            }
        }
        let start = order.positions(self.window).start;
        self.rows.as_ref().and_then(|rows| rows.get((position - start) as usize)).copied().unwrap_or(position)
    }
}

/// A batch with its columns.
#[derive(Debug)]
pub struct Batch {
    /// The columns, in the order of the data set.
    pub columns: Vec<Column>,
    /// Rows.
    pub rows: usize,
    /// [`Step::next`].
    pub next: u64,
}

/// What waiting for a batch brought.
#[derive(Debug)]
pub enum Next {
    /// A batch.
    Batch(Batch),
    /// The end of the epoch.
    End,
    /// Nothing yet.
    Waiting,
}

/// Batches that are read ahead. Dropping it ends the reading.
#[derive(Debug)]
pub struct Stream {
    /// `None` is the end: a channel that closes without it is a failure.
    batches: mpsc::Receiver<Result<Option<Batch>>>,
    process: u32,
}

impl Stream {
    /// Starts to read.
    ///
    /// # Errors
    /// When there are no threads, or the plan makes no sense.
    pub fn start(dataset: &Arc<DataSet>, plan: Plan) -> Result<Self> {
        let bad =
            |what: &str, got: u64, valid: String| Err(ReadError::Usage(format!("{what}: got {got}, valid: {valid}")));
        if plan.rank >= plan.world {
            return bad("rank", plan.rank, format!("below world_size = {}", plan.world));
        }
        if plan.batch_rows == 0 {
            return bad("batch_size", 0, "1 or more".into());
        }
        if plan.worker >= plan.workers {
            return bad("worker", plan.worker, format!("below num_workers = {}", plan.workers));
        }
        let (sender, batches) = mpsc::channel(QUEUE);
        runtime()?.spawn(produce(Arc::clone(dataset), plan, sender));
        Ok(Self { batches, process: std::process::id() })
    }

    /// Waits for the next batch, but not for longer than `wait`, so that the caller can look at signals.
    ///
    /// # Errors
    /// What went wrong with the reading; the stream has ended then.
    pub fn next(&mut self, wait: Duration) -> Result<Next> {
        if self.process != std::process::id() {
            return Err(ReadError::Usage("this iterator was made in another process; make a new one".into()));
        }
        let waited = runtime()?.block_on(async { tokio::time::timeout(wait, self.batches.recv()).await });
        match waited {
            Err(_) => Ok(Next::Waiting),
            Ok(None) => Err(ReadError::DataSet(
                "reading stopped before the end of the epoch; `stillhouse verify` checks the shards".into(),
            )),
            Ok(Some(batch)) => Ok(batch?.map_or(Next::End, Next::Batch)),
        }
    }
}

async fn produce(dataset: Arc<DataSet>, plan: Plan, sender: mpsc::Sender<Result<Option<Batch>>>) {
    let mut ahead = Ahead::new(&dataset, plan);
    let mut window = None;
    let mut reading = Reading::Blocks;
    for step in plan.steps() {
        if window.replace(step.window) != Some(step.window) {
            reading = match dataset.fit_in_cache(plan.window_rows(step.window).max(8 * dataset.block_rows())).await {
                Ok(true) => Reading::Blocks,
                // a window that the cache cannot hold would be read again for every batch
                Ok(false) => Reading::Rows,
                Err(e) => {
                    let _ = sender.send(Err(e)).await;
                    return;
                }
            };
        }
        if reading == Reading::Blocks {
            ahead.move_to(step.window);
        }
        let columns = dataset.read(&step.rows, reading).await;
        let failed = columns.is_err();
        let batch = columns.map(|columns| Some(Batch { columns, rows: step.rows.len(), next: step.next }));
        if sender.send(batch).await.is_err() || failed {
            ahead.release_all();
            return; // nobody listens any more
        }
    }
    ahead.release_all();
    let _ = sender.send(Ok(None)).await;
}

/// Has the blocks of the next window read, and lets go of those of past ones.
struct Ahead<'a> {
    dataset: &'a Arc<DataSet>,
    /// Blocks by window, as they will be needed.
    coming: std::iter::Peekable<Box<dyn Iterator<Item = (u64, u64)> + Send>>,
    held: BTreeSet<(u64, u64)>,
    reading: VecDeque<tokio::task::JoinHandle<Result<()>>>,
}

impl<'a> Ahead<'a> {
    fn new(dataset: &'a Arc<DataSet>, plan: Plan) -> Self {
        let block_rows = dataset.block_rows();
        let mut window = u64::MAX;
        let mut seen = BTreeSet::new();
        let needed = plan.steps().flat_map(move |step| {
            if step.window != window {
                (window, seen) = (step.window, BTreeSet::new());
            }
            let mut new = Vec::new();
            for block in step.rows.iter().map(|row| row / block_rows) {
                if seen.insert(block) {
                    new.push((step.window, block));
                }
            }
            new
        });
        let boxed: Box<dyn Iterator<Item = (u64, u64)> + Send> = Box::new(needed);
        Self { dataset, coming: boxed.peekable(), held: BTreeSet::new(), reading: VecDeque::new() }
    }

    /// The trainer is in this window now.
    fn move_to(&mut self, window: u64) {
        while let Some(&(old, block)) = self.held.first()
            && old < window
        {
            self.held.pop_first();
            // a batch across two windows needs blocks of both
            if old + 1 < window || !self.held.iter().any(|(_, other)| *other == block) {
                self.dataset.release(block);
            }
        }
        self.reading.retain(|task| !task.is_finished());
        while self.reading.len() < READ_AHEAD && self.dataset.has_room() {
            let Some((of, block)) = self.coming.next_if(|(of, _)| *of <= window + 1) else { return };
            self.held.insert((of, block));
            if of >= window {
                self.reading.push_back(self.dataset.prefetch(block));
            }
        }
    }

    fn release_all(&self) {
        for (_, block) in &self.held {
            self.dataset.release(*block);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::order::Shuffle;

    fn plan(rows: u64, start: u64, world: u64, batch_rows: u64, workers: u64) -> Plan {
        let order = Order::new(rows, 4, 1, Some(Shuffle { seed: 5, window_blocks: 64 }));
        Plan { order, start, rank: 0, world, batch_rows, drop_last: false, worker: 0, workers }
    }

    /// What the DataLoaders of all trainers give, batch after batch: of each trainer the workers in turn.
    fn batches(plan: Plan) -> Vec<Vec<Step>> {
        (0..plan.world)
            .map(|rank| {
                let mut workers: Vec<Steps> =
                    (0..plan.workers).map(|worker| Plan { rank, worker, ..plan }.steps()).collect();
                let turns = (0..workers.len()).cycle();
                let all: Vec<Step> = turns.map_while(|turn| workers[turn].next()).collect();
                assert_eq!(all.len() as u64, Plan { rank, ..plan }.own_batches());
                assert_eq!(all.iter().map(|s| s.rows.len() as u64).sum::<u64>(), Plan { rank, ..plan }.rows());
                all
            })
            .collect()
    }

    proptest! {
        /// Stopped after any batch and gone on in another shape, an epoch has every row once.
        #[test]
        fn epochs_are_whole_whatever_the_shape(
            rows in 1u64..3_000, shapes in prop::collection::vec((1u64..6, 1u64..40, 1u64..4, 0usize..20), 1..5),
        ) {
            let mut seen = Vec::new();
            let mut start = 0;
            let shapes_then_end = shapes.into_iter().chain([(3, 7, 2, usize::MAX)]);
            for (world, batch_rows, workers, stop) in shapes_then_end {
                let given = batches(plan(rows, start, world, batch_rows, workers));
                let first = &given[0];
                let taken = first.len().min(stop);
                for trainer in &given {
                    seen.extend(trainer.iter().take(taken).flat_map(|step| step.rows.iter().copied()));
                }
                if taken > 0 {
                    start = first[taken - 1].next;
                }
            }
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..rows), "not every row once");
        }

        /// The shape changes who gets a row, not when.
        #[test]
        fn global_batches_do_not_depend_on_the_shape(rows in 1u64..3_000, each in 1u64..8) {
            let of = |world: u64, workers: u64| -> Vec<Vec<u64>> {
                let given = batches(plan(rows, 0, world, each * 12 / world, workers));
                (0..given[0].len())
                    .map(|n| {
                        let mut all: Vec<u64> =
                            given.iter().filter_map(|t| t.get(n)).flat_map(|s| s.rows.clone()).collect();
                        all.sort_unstable();
                        all
                    })
                    .collect()
            };
            let one = of(1, 1);
            prop_assert_eq!(&one, &of(3, 2));
            prop_assert_eq!(&one, &of(4, 3));
        }
    }

    #[test]
    fn a_short_end_can_be_left_out() {
        let plan = Plan { drop_last: true, ..plan(103, 0, 4, 5, 1) };
        let given = batches(plan);
        assert!(given.iter().all(|trainer| trainer.len() == 5 && trainer.iter().all(|s| s.rows.len() == 5)));
    }
}
