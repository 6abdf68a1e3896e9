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
//! Memory: at most [`MOST_BYTES`] for all checkpoints of a store, plus, for each file with checkpoints, about the size
//! of its listing entry. A checkpoint takes about 12 KB (its window is stored compressed), one inside a block 48 KB. At
//! the bound, the interval doubles and every second checkpoint of all files is dropped. Planning knows where splits
//! begin, so it keeps only the checkpoints of each file before those offsets.

use std::collections::HashMap;
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::path::Path;
use stillhouse_base::file_state::FileState;

use super::inflate::{Inflate, STREAM};
use super::input_file::InputFile;

/// Initial interval between two checkpoints, in decompressed bytes.
const INTERVAL: u64 = 1 << 20;
/// Maximum size in bytes of all checkpoints of a store.
const MOST_BYTES: usize = 64 << 20;

/// A position where decompression can begin.
#[derive(Debug)]
pub(super) struct Checkpoint {
    /// Decompressed bytes before it.
    pub decompressed: u64,
    /// Stored bytes before it.
    pub stored: u64,
    /// `None` at the start of a gzip member or a Zstandard frame.
    pub inside: Option<Inside>,
}

/// The state needed to begin inside a gzip member.
#[derive(Debug)]
pub(super) struct Inside {
    /// CRC-32 of the member's bytes so far.
    pub crc: u32,
    /// Number of the member's bytes so far, modulo 2^32.
    pub length: u32,
    pub stream: Stream,
}

/// The state of a member's deflate stream.
#[derive(Debug)]
pub(super) enum Stream {
    /// Between two blocks.
    Between {
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
            + match self.inside.as_ref().map(|inside| &inside.stream) {
                None => 0,
                Some(Stream::Between { window, .. }) => window.len(),
                Some(Stream::Copy(_)) => STREAM,
            }
    }
}

/// Where the next checkpoint is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    /// The first decompressed offset at which it may be.
    pub from: u64,
    /// The offset from which a checkpoint inside a block, which costs more memory, is accepted.
    pub late: u64,
}

/// The checkpoints of all files of a store.
#[derive(Debug)]
pub(super) struct Checkpoints {
    places: Mutex<Places>,
    most_bytes: usize,
    /// Bytes decompressed so far.
    #[cfg(test)]
    pub decompressed: AtomicU64,
}

#[derive(Debug)]
struct Places {
    files: HashMap<Path, OfFile>,
    bytes: usize,
    interval: u64,
}

#[derive(Debug)]
struct OfFile {
    state: FileState,
    /// Checkpoints in order of their offsets.
    list: Vec<Arc<Checkpoint>>,
    /// Decompressed bytes up to which checkpoints were recorded.
    reached: u64,
    /// Locked while a reader decompresses the bytes before a split, so that other readers wait for the checkpoints that
    /// it records.
    turn: Arc<Mutex<()>>,
}

impl Default for Checkpoints {
    fn default() -> Self {
        Self::new(INTERVAL, MOST_BYTES)
    }
}

impl Checkpoints {
    pub fn new(interval: u64, most_bytes: usize) -> Self {
        Self {
            places: Mutex::new(Places { files: HashMap::new(), bytes: 0, interval }),
            most_bytes,
            #[cfg(test)]
            decompressed: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the last checkpoint at or before a decompressed offset.
    pub fn before(&self, file: &InputFile, offset: u64) -> Option<Arc<Checkpoint>> {
        let places = self.lock();
        let list = &places.files.get(&file.location).filter(|of| of.state == file.state)?.list;
        let after = list.partition_point(|place| place.decompressed <= offset);
        list.get(after.checked_sub(1)?).cloned()
    }

    /// Returns the lock to hold while decompressing up to an offset. `None` if the checkpoints reach that far or the
    /// offset is near.
    pub fn turn(&self, file: &InputFile, offset: u64) -> Option<Arc<Mutex<()>>> {
        let mut places = self.lock();
        let interval = places.interval;
        let of = places.of(file);
        (offset > of.reached.saturating_add(interval)).then(|| Arc::clone(&of.turn))
    }

    /// Returns where the next checkpoint is wanted.
    pub fn due(&self, file: &InputFile) -> Due {
        let places = self.lock();
        let of = places.files.get(&file.location).filter(|of| of.state == file.state);
        let from = of.map_or(0, |of| of.reached).saturating_add(places.interval);
        Due { from, late: from.saturating_add(places.interval) }
    }

    /// Records a checkpoint if it is still wanted.
    pub fn note(&self, file: &InputFile, checkpoint: Checkpoint) {
        let mut places = self.lock();
        let interval = places.interval;
        let of = places.of(file);
        if checkpoint.decompressed < of.reached.saturating_add(interval) {
            return;
        }
        of.reached = checkpoint.decompressed;
        let bytes = checkpoint.bytes();
        of.list.push(Arc::new(checkpoint));
        places.bytes += bytes;
        while places.bytes > self.most_bytes && places.thin() {}
    }

    /// Keeps only the last checkpoint before each of these offsets, which are in order. The file was decompressed to
    /// its end.
    pub fn keep(&self, file: &InputFile, starts: impl Iterator<Item = u64>) {
        let mut places = self.lock();
        // a file without an entry is too short to have checkpoints
        let Some(of) = places.files.get_mut(&file.location).filter(|of| of.state == file.state) else { return };
        of.reached = u64::MAX;
        let before = std::mem::take(&mut of.list);
        for start in starts {
            let after = before.partition_point(|place| place.decompressed <= start);
            if let Some(place) = after.checked_sub(1).and_then(|i| before.get(i))
                && of.list.last().is_none_or(|last| !Arc::ptr_eq(last, place))
            {
                of.list.push(Arc::clone(place));
            }
        }
        of.list.shrink_to_fit();
        places.count();
    }

    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.lock().files.values().map(|of| of.list.len()).sum()
    }

    #[cfg(test)]
    pub fn add_decompressed(&self, bytes: usize) {
        self.decompressed.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Places {
    fn of(&mut self, file: &InputFile) -> &mut OfFile {
        let new = || OfFile { state: file.state.clone(), list: Vec::new(), reached: 0, turn: Arc::default() };
        let of = self.files.entry(file.location.clone()).or_insert_with(new);
        if of.state != file.state {
            *of = new();
        }
        of
    }

    /// Doubles the interval and drops the checkpoints in between. Returns false if none is left to drop.
    fn thin(&mut self) -> bool {
        self.interval = self.interval.saturating_mul(2);
        let interval = self.interval;
        for of in self.files.values_mut() {
            let mut last = 0;
            of.list.retain(|place| {
                let keep = place.decompressed - last >= interval;
                last = if keep { place.decompressed } else { last };
                keep
            });
        }
        self.count();
        self.bytes > 0
    }

    fn count(&mut self) {
        self.bytes = self.files.values().flat_map(|of| &of.list).map(|place| place.bytes()).sum();
    }
}
