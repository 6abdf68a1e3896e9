//! Checkpoints: positions inside compressed files where decompression can begin. The first reader that decompresses up
//! to one records it.
//!
//! ```text
//!   stored        ├─ header ─ block ─ block ─┼─ block ─ ... ─┼─ ... ─ trailer ├─ header ─ ...      (or frames of Zstandard)
//!   decompressed  0                         1 MB            2 MB              a member
//!                                            └─ bits of a byte, 32 KB of text  └─ only the offset
//! ```
//!
//! Fast compressors write very long blocks. If no block ends within twice the interval, the checkpoint holds the whole
//! state of the decompressor.
//!
//! A split that begins inside a file starts at the last checkpoint before it instead of at the start of the file.
//! Checkpoints belong to one state of a file. They are used and recorded only if every range that is read is compared
//! with that state ([`super::Store::expecting`]).
//!
//! Memory: at most [`MAX_BYTES`] for all checkpoints of a store, plus, for each file with checkpoints, about the size
//! of its listing entry. A checkpoint takes about 12 KB (its window is stored compressed), one inside a block 48 KB. At
//! the bound, the interval doubles and every second checkpoint of all files is dropped. Planning knows where splits
//! begin, so it keeps only the checkpoints of each file before those offsets.

use std::collections::HashMap;
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::path::Path;
use stillhouse_base::file_state::FileState;

use super::inflate::{Inflate, STREAM_BYTES};
use super::input_file::InputFile;

/// Initial interval between two checkpoints, in decompressed bytes.
const INTERVAL: u64 = 1 << 20;
/// Maximum size in bytes of all checkpoints of a store.
const MAX_BYTES: usize = 64 << 20;

/// A position where decompression can begin.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// Decompressed bytes before it.
    pub decompressed: u64,
    /// Stored bytes before it.
    pub stored: u64,
    /// `None` at the start of a gzip member or a Zstandard frame.
    pub member_state: Option<MemberState>,
}

/// The state needed to begin inside a gzip member.
#[derive(Debug)]
pub(crate) struct MemberState {
    /// CRC-32 of the member's bytes so far.
    pub crc: u32,
    /// Number of the member's bytes so far, modulo 2^32.
    pub length: u32,
    pub deflate: DeflateState,
}

/// The state of a member's deflate stream.
#[derive(Debug)]
pub(crate) enum DeflateState {
    /// Between two blocks.
    BetweenBlocks {
        /// The last stored byte before the position.
        last: u8,
        /// Number of bits of `last` that belong to the next block.
        bits: u8,
        /// The window, compressed with Zstandard.
        window: Box<[u8]>,
    },
    /// Anywhere: a copy of the decompressor's state.
    Copy(Inflate),
}

impl Checkpoint {
    fn bytes(&self) -> usize {
        size_of::<Self>()
            + match self.member_state.as_ref().map(|state| &state.deflate) {
                None => 0,
                Some(DeflateState::BetweenBlocks { window, .. }) => window.len(),
                Some(DeflateState::Copy(_)) => STREAM_BYTES,
            }
    }
}

/// Where the next checkpoint is wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NextCheckpoint {
    /// The first decompressed offset at which it may be.
    pub from: u64,
    /// The offset from which a checkpoint inside a block, which costs more memory, is accepted.
    pub inside_block_from: u64,
}

/// The checkpoints of all files of a store.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    table: Mutex<CheckpointTable>,
    max_bytes: usize,
    /// Bytes decompressed so far.
    #[cfg(test)]
    pub decompressed: AtomicU64,
}

#[derive(Debug)]
struct CheckpointTable {
    files: HashMap<Path, FileCheckpoints>,
    bytes: usize,
    interval: u64,
}

#[derive(Debug)]
struct FileCheckpoints {
    state: FileState,
    /// Checkpoints in order of their offsets.
    list: Vec<Arc<Checkpoint>>,
    /// Decompressed bytes up to which checkpoints were recorded.
    recorded_until: u64,
    /// Locked while a reader decompresses the bytes before a split, so that other readers wait for the checkpoints that
    /// it records.
    decompression_lock: Arc<Mutex<()>>,
}

impl Default for Checkpoints {
    fn default() -> Self {
        Self::new(INTERVAL, MAX_BYTES)
    }
}

impl Checkpoints {
    pub fn new(interval: u64, max_bytes: usize) -> Self {
        Self {
            table: Mutex::new(CheckpointTable { files: HashMap::new(), bytes: 0, interval }),
            max_bytes,
            #[cfg(test)]
            decompressed: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, CheckpointTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the last checkpoint at or before a decompressed offset.
    pub fn before(&self, file: &InputFile, offset: u64) -> Option<Arc<Checkpoint>> {
        let table = self.lock();
        let list = &table.files.get(&file.location).filter(|entry| entry.state == file.state)?.list;
        let after = list.partition_point(|checkpoint| checkpoint.decompressed <= offset);
        list.get(after.checked_sub(1)?).cloned()
    }

    /// Returns the lock to hold while decompressing up to an offset. `None` if the checkpoints reach that far or the
    /// offset is near.
    pub fn decompression_lock(&self, file: &InputFile, offset: u64) -> Option<Arc<Mutex<()>>> {
        let mut table = self.lock();
        let interval = table.interval;
        let entry = table.file_mut(file);
        (offset > entry.recorded_until.saturating_add(interval)).then(|| Arc::clone(&entry.decompression_lock))
    }

    /// Returns where the next checkpoint is wanted.
    pub fn next_wanted(&self, file: &InputFile) -> NextCheckpoint {
        let table = self.lock();
        let entry = table.files.get(&file.location).filter(|entry| entry.state == file.state);
        let from = entry.map_or(0, |entry| entry.recorded_until).saturating_add(table.interval);
        NextCheckpoint { from, inside_block_from: from.saturating_add(table.interval) }
    }

    /// Records a checkpoint if it is still wanted.
    pub fn record(&self, file: &InputFile, checkpoint: Checkpoint) {
        let mut table = self.lock();
        let interval = table.interval;
        let entry = table.file_mut(file);
        if checkpoint.decompressed < entry.recorded_until.saturating_add(interval) {
            return;
        }
        entry.recorded_until = checkpoint.decompressed;
        let bytes = checkpoint.bytes();
        entry.list.push(Arc::new(checkpoint));
        table.bytes += bytes;
        while table.bytes > self.max_bytes && table.double_interval() {}
    }

    /// See [`Store::keep_checkpoints_before`](crate::Store::keep_checkpoints_before).
    pub fn keep_before(&self, file: &InputFile, starts: impl Iterator<Item = u64>) {
        let mut table = self.lock();
        // a file without an entry is too short to have checkpoints
        let Some(entry) = table.files.get_mut(&file.location).filter(|entry| entry.state == file.state) else { return };
        entry.recorded_until = u64::MAX;
        let before = std::mem::take(&mut entry.list);
        for start in starts {
            let after = before.partition_point(|checkpoint| checkpoint.decompressed <= start);
            if let Some(checkpoint) = after.checked_sub(1).and_then(|i| before.get(i))
                && entry.list.last().is_none_or(|last| !Arc::ptr_eq(last, checkpoint))
            {
                entry.list.push(Arc::clone(checkpoint));
            }
        }
        entry.list.shrink_to_fit();
        table.recount_bytes();
    }

    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.lock().files.values().map(|entry| entry.list.len()).sum()
    }

    #[cfg(test)]
    pub fn add_decompressed(&self, bytes: usize) {
        self.decompressed.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl CheckpointTable {
    fn file_mut(&mut self, file: &InputFile) -> &mut FileCheckpoints {
        let new = || FileCheckpoints {
            state: file.state.clone(),
            list: Vec::new(),
            recorded_until: 0,
            decompression_lock: Arc::default(),
        };
        let entry = self.files.entry(file.location.clone()).or_insert_with(new);
        if entry.state != file.state {
            *entry = new();
        }
        entry
    }

    /// Doubles the interval and drops the checkpoints in between. Returns false if none is left to drop.
    fn double_interval(&mut self) -> bool {
        self.interval = self.interval.saturating_mul(2);
        let interval = self.interval;
        for entry in self.files.values_mut() {
            let mut last = 0;
            entry.list.retain(|checkpoint| {
                let keep = checkpoint.decompressed - last >= interval;
                last = if keep { checkpoint.decompressed } else { last };
                keep
            });
        }
        self.recount_bytes();
        self.bytes > 0
    }

    fn recount_bytes(&mut self) {
        self.bytes = self.files.values().flat_map(|entry| &entry.list).map(|checkpoint| checkpoint.bytes()).sum();
    }
}
