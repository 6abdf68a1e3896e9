//! An epoch as a stream of batches: rows in the order of the epoch, divided among ranks and workers, and read ahead.
//!
//! ```text
//! positions start ..   global batch n = the next W·B positions; rank r takes r, r + W, … of it;
//!                      worker k of K takes the batches n with n mod K = k
//! producer ──rows──► cached blocks ──2──► batches ──► trainer
//!     └─ reads the blocks of the next window ahead, while the cache has space
//! ```
//!
//! After any batch, the rows delivered so far over all ranks are exactly the positions below the batch's `next`. This
//! one number is the state of an epoch, whatever W, B and K are after a resume.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::columns::Column;
use crate::dataset::{DataSet, ReadMode};
use crate::order::{LANES, Order};
use crate::process::runtime;
use crate::{ReadError, Result};

/// Maximum finished batches that wait for the trainer.
const MAX_QUEUED_BATCHES: usize = 2;
/// Maximum blocks read ahead concurrently.
const MAX_PREFETCHES: usize = 16;

/// The part of an epoch that one worker of one trainer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// The order of the epoch.
    pub order: Order,
    /// First position; earlier ones were delivered before.
    pub start: u64,
    /// Rank of this trainer, below `world`.
    pub rank: u64,
    /// Number of trainers, W.
    pub world: u64,
    /// Rows of a trainer's batch, B.
    pub batch_rows: u64,
    /// Whether to drop the last global batch if it is not full.
    pub drop_last: bool,
    /// Number of this worker, below `workers`.
    pub worker: u64,
    /// Workers per trainer, K.
    pub workers: u64,
}

/// One batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Row numbers of the batch.
    pub rows: Vec<u64>,
    /// Once this batch is delivered, all positions below this one are delivered, over all ranks.
    pub next: u64,
    /// The first window that the batch needs.
    pub window: u64,
}

impl Plan {
    /// Number of global batches left in the epoch.
    pub fn batches(&self) -> u64 {
        let left = self.order.rows().saturating_sub(self.start);
        let global = self.global_batch_rows();
        if self.drop_last { left / global } else { left.div_ceil(global) }
    }

    /// Number of rows for this trainer, over all its workers.
    pub fn rows(&self) -> u64 {
        let left = self.order.rows().saturating_sub(self.start);
        let full = left / self.global_batch_rows();
        let rest = if self.drop_last { 0 } else { left % self.global_batch_rows() };
        full * self.batch_rows + (rest + self.world - 1).saturating_sub(self.rank) / self.world
    }

    /// Number of batches for this trainer, over all its workers: one less if the last global batch has no row for it.
    pub fn own_batches(&self) -> u64 {
        self.rows().div_ceil(self.batch_rows)
    }

    /// Iterates over the batches of this worker.
    pub fn steps(self) -> Steps {
        Steps { plan: self, next: self.worker, window: 0, rows: None }
    }

    /// Rows in the blocks of a window that this rank reads: ranks divide the lanes, except in the last window, which
    /// has none.
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

    fn global_batch_rows(&self) -> u64 {
        self.batch_rows.saturating_mul(self.world)
    }
}

/// Iterator over the batches of one worker. Holds the rows of one window in memory.
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
        let begin = plan.start + self.next * plan.global_batch_rows();
        let end = begin.saturating_add(plan.global_batch_rows()).min(plan.order.rows());
        self.next += plan.workers;
        let mut rows = Vec::with_capacity(plan.batch_rows.min(end - begin) as usize);
        let mut position = begin + plan.rank;
        let window = plan.order.window_of(begin.min(plan.order.rows() - 1));
        while position < end {
            rows.push(self.row(position));
            position += plan.world;
        }
        // the last global batch may have fewer rows than there are trainers
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

/// A batch with the values of its columns.
#[derive(Debug)]
pub struct Batch {
    /// The columns, in the order of the data set.
    pub columns: Vec<Column>,
    /// Number of rows.
    pub rows: usize,
    /// [`Step::next`].
    pub next: u64,
}

/// The result of waiting for a batch.
#[derive(Debug)]
pub enum Next {
    /// A batch.
    Batch(Batch),
    /// The epoch ended.
    End,
    /// The wait timed out.
    Waiting,
}

/// A stream of batches that are read ahead. Dropping it stops the reading.
#[derive(Debug)]
pub struct Stream {
    /// `None` marks the end of the epoch; a channel that closes without it means that reading failed.
    batches: mpsc::Receiver<Result<Option<Batch>>>,
    process: u32,
}

impl Stream {
    /// Starts reading.
    ///
    /// # Errors
    /// If threads cannot be started, or the plan is invalid.
    pub fn start(dataset: &Arc<DataSet>, plan: Plan) -> Result<Self> {
        let invalid =
            |what: &str, got: u64, valid: String| Err(ReadError::Usage(format!("{what}: got {got}, valid: {valid}")));
        if plan.rank >= plan.world {
            return invalid("rank", plan.rank, format!("below world_size = {}", plan.world));
        }
        if plan.batch_rows == 0 {
            return invalid("batch_size", 0, "1 or more".into());
        }
        if plan.worker >= plan.workers {
            return invalid("worker", plan.worker, format!("below num_workers = {}", plan.workers));
        }
        let (sender, batches) = mpsc::channel(MAX_QUEUED_BATCHES);
        runtime()?.spawn(produce(Arc::clone(dataset), plan, sender));
        Ok(Self { batches, process: std::process::id() })
    }

    /// Waits for the next batch, for at most `wait`, so that the caller can handle signals.
    ///
    /// # Errors
    /// Errors of the reading. The stream ends after an error.
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
    let mut prefetcher = Prefetcher::new(&dataset, plan);
    let mut window = None;
    let mut reading = ReadMode::Blocks;
    for step in plan.steps() {
        if window.replace(step.window) != Some(step.window) {
            reading = match dataset.fit_in_cache(plan.window_rows(step.window).max(8 * dataset.block_rows())).await {
                Ok(true) => ReadMode::Blocks,
                // a window that does not fit into the cache would be read again for every batch
                Ok(false) => ReadMode::Rows,
                Err(e) => {
                    let _ = sender.send(Err(e)).await;
                    return;
                }
            };
        }
        if reading == ReadMode::Blocks {
            prefetcher.advance_to(step.window);
        }
        let columns = dataset.read(&step.rows, reading).await;
        let failed = columns.is_err();
        let batch = columns.map(|columns| Some(Batch { columns, rows: step.rows.len(), next: step.next }));
        if sender.send(batch).await.is_err() || failed {
            prefetcher.release_all();
            return; // the receiver was dropped, or reading failed
        }
    }
    prefetcher.release_all();
    let _ = sender.send(Ok(None)).await;
}

/// Reads the blocks of the next window ahead, and releases those of past windows.
struct Prefetcher<'a> {
    dataset: &'a Arc<DataSet>,
    /// Pairs of window and block, in the order in which they will be needed.
    upcoming: std::iter::Peekable<Box<dyn Iterator<Item = (u64, u64)> + Send>>,
    held_blocks: BTreeSet<(u64, u64)>,
    reading: VecDeque<tokio::task::JoinHandle<Result<()>>>,
}

impl<'a> Prefetcher<'a> {
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
        Self { dataset, upcoming: boxed.peekable(), held_blocks: BTreeSet::new(), reading: VecDeque::new() }
    }

    /// Advances to the window that the trainer reads now.
    fn advance_to(&mut self, window: u64) {
        while let Some(&(old, block)) = self.held_blocks.first()
            && old < window
        {
            self.held_blocks.pop_first();
            // a batch across two windows needs blocks of both
            if old + 1 < window || !self.held_blocks.iter().any(|(_, other)| *other == block) {
                self.dataset.release(block);
            }
        }
        self.reading.retain(|task| !task.is_finished());
        while self.reading.len() < MAX_PREFETCHES && self.dataset.fits_another_block() {
            let Some((of_window, block)) = self.upcoming.next_if(|(of_window, _)| *of_window <= window + 1) else {
                return;
            };
            self.held_blocks.insert((of_window, block));
            if of_window >= window {
                self.reading.push_back(self.dataset.prefetch(block));
            }
        }
    }

    fn release_all(&self) {
        for (_, block) in &self.held_blocks {
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

    /// The batches of all trainers' DataLoaders: for each trainer, its workers take turns.
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
        /// An epoch that is stopped after any batch and resumed in another shape delivers every row once.
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

        /// The shape decides which trainer gets a row, but not in which global batch.
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
