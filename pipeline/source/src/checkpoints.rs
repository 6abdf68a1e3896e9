//! Places inside of compressed files where reading can begin, found by whoever decompresses up to them first.
//!
//! ```text
//!   stored        ├─ header ─ block ─ block ─┼─ block ─ ... ─┼─ ... ─ trailer ├─ header ─ ...      (or frames of Zstandard)
//!   decompressed  0                         1 MB            2 MB              a member
//!                                            └─ bits of a byte, 32 KB of text  └─ nothing but the place
//! ```
//!
//! Fast compressors write blocks without end. Where none ends within twice the distance, the whole state of the decompressor is the place.
//!
//! A split that begins somewhere in a file begins at the last place before it instead of the file's start. Places are of one state of
//! a file, and are used and noted only where every range that is read is held against that state ([`super::Store::expecting`]).
//!
//! Memory: at most [`MOST_BYTES`] for all places of a store, and for each file that has any about what the listing has of it. A place takes about 12 KB (its text is kept compressed),
//! one inside of a block 48 KB; where the bound is
//! met, the distance between places is doubled and every second one is given up, of all files. Planning, which knows where splits begin, keeps of
//! each file only the places before those.

use std::collections::HashMap;
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::path::Path;
use stillhouse_base::file_state::FileState;

use super::inflate::{Inflate, STREAM};
use super::input_file::InputFile;

/// Decompressed bytes between two places, at first.
const INTERVAL: u64 = 1 << 20;
/// Bytes of all places of a store.
const MOST_BYTES: usize = 64 << 20;

/// A place where reading can begin.
#[derive(Debug)]
pub(super) struct Checkpoint {
    /// Decompressed bytes before it.
    pub decompressed: u64,
    /// Stored bytes before it.
    pub stored: u64,
    /// None where a gzip member or a frame of Zstandard begins.
    pub inside: Option<Inside>,
}

/// What it takes to begin inside of a gzip member.
#[derive(Debug)]
pub(super) struct Inside {
    /// CRC-32 of the member's bytes so far.
    pub crc: u32,
    /// Number of the member's bytes so far, modulo 2^32.
    pub length: u32,
    pub stream: Stream,
}

/// The deflate stream of a member.
#[derive(Debug)]
pub(super) enum Stream {
    /// Between two blocks.
    Between {
        /// The stored byte before.
        last: u8,
        /// Bits of it that belong to the next block.
        bits: u8,
        /// The window, compressed with Zstandard.
        window: Box<[u8]>,
    },
    /// Anywhere.
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

/// The next place that is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    /// The first offset at which it may be.
    pub from: u64,
    /// From here on it may cost more.
    pub late: u64,
}

/// The places of all files of a store.
#[derive(Debug)]
pub(super) struct Checkpoints {
    places: Mutex<Places>,
    most_bytes: usize,
    /// Bytes that were decompressed.
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
    /// In order.
    list: Vec<Arc<Checkpoint>>,
    /// Decompressed bytes up to which places were noted.
    reached: u64,
    /// Held while somebody decompresses what is before a split, so that others wait for the places that this yields.
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

    /// The last place that is no later than an offset of the decompressed bytes.
    pub fn before(&self, file: &InputFile, offset: u64) -> Option<Arc<Checkpoint>> {
        let places = self.lock();
        let list = &places.files.get(&file.location).filter(|of| of.state == file.state)?.list;
        let after = list.partition_point(|place| place.decompressed <= offset);
        list.get(after.checked_sub(1)?).cloned()
    }

    /// What to hold while decompressing up to an offset; none where the places reach that far, or it is near.
    pub fn turn(&self, file: &InputFile, offset: u64) -> Option<Arc<Mutex<()>>> {
        let mut places = self.lock();
        let interval = places.interval;
        let of = places.of(file);
        (offset > of.reached.saturating_add(interval)).then(|| Arc::clone(&of.turn))
    }

    /// Where the next place is wanted.
    pub fn due(&self, file: &InputFile) -> Due {
        let places = self.lock();
        let of = places.files.get(&file.location).filter(|of| of.state == file.state);
        let from = of.map_or(0, |of| of.reached).saturating_add(places.interval);
        Due { from, late: from.saturating_add(places.interval) }
    }

    /// Notes a place, where it is still wanted.
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

    /// Keeps of a file that was decompressed to its end only the places before these offsets, which are in order.
    pub fn keep(&self, file: &InputFile, starts: impl Iterator<Item = u64>) {
        let mut places = self.lock();
        // a file without places has none because it is short
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

    /// Doubles the distance; false where nothing is left to give up.
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
