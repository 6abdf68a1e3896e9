//! Checks that no holdout is empty; otherwise only a trainer would notice, much later.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use stillhouse_source::TRAIN;

/// Counts of a holdout so far.
#[derive(Debug, Default)]
struct HoldoutCounts {
    splits_left: u64,
    documents: u64,
    rows: u64,
}

impl HoldoutCounts {
    fn add(&mut self, shard: &ShardRecord) {
        self.splits_left = self.splits_left.saturating_sub(1);
        self.documents += shard.statistics.documents;
        self.rows += shard.rows;
    }

    fn check(&self, name: &str) -> Result<()> {
        if self.splits_left > 0 || self.rows > 0 {
            return Ok(());
        }
        let what = match self.documents {
            0 => "took no document of the input; valid: a larger holdout".to_owned(),
            n => format!(
                "its {n} document(s) fill no sequence; valid: a larger holdout, a smaller pack.length, or remainder: pad"
            ),
        };
        Err(PipelineError::new(ErrorKind::Input, format!("input.holdout.{name}: {what}")))
    }
}

/// The holdouts of a job while it runs.
#[derive(Debug)]
pub struct Holdouts(Mutex<BTreeMap<String, HoldoutCounts>>);

impl Holdouts {
    /// The holdouts among these splits; `done` are the shards that are already committed.
    pub fn new<'a>(splits: &[SplitRecord], done: impl Iterator<Item = &'a ShardRecord>) -> Self {
        let mut entries: BTreeMap<String, HoldoutCounts> = BTreeMap::new();
        for split in splits.iter().filter(|split| split.dataset_split != TRAIN) {
            entries.entry(split.dataset_split.clone()).or_default().splits_left += 1;
        }
        for shard in done {
            if let Some(entry) = entries.get_mut(&shard.dataset_split) {
                entry.add(shard);
            }
        }
        Self(Mutex::new(entries))
    }

    /// Checks every holdout.
    ///
    /// # Errors
    /// When all of a holdout has been made, and it holds no sequence.
    pub fn check(&self) -> Result<()> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter().try_for_each(|(name, entry)| entry.check(name))
    }

    /// Counts a committed shard.
    ///
    /// # Errors
    /// As [`Holdouts::check`].
    pub fn add_committed(&self, shard: &ShardRecord) -> Result<()> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = entries.get_mut(&shard.dataset_split) else { return Ok(()) };
        entry.add(shard);
        entry.check(&shard.dataset_split)
    }
}
