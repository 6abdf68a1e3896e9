//! An entry: the file that holds the cached parts of one object.
//!
//! ```text
//!   header │ table: one slot per unit │ data: the object's bytes at their offsets, with holes (a sparse file)
//! ```
//!
//! The slot of a unit holds the CRC-32 of its bytes and is written after them. So publishing needs no rename. A killed
//! process, a power cut or a bad disk can leave a slot without its bytes, torn bytes or a flipped bit. Such a unit
//! fails its checksum, counts as missing, and is overwritten once it has been fetched again.

#![allow(clippy::disallowed_methods, reason = "called through `blocking` where a runtime waits")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use bytes::Bytes;

/// Bytes of a unit, which has one checksum and is read whole: about as long as the pages of one column of a block.
pub(crate) const UNIT_BYTES: u64 = 64 << 10;
const MAGIC: [u8; 16] = *b"stillhouse-disk1";
/// Bytes of the header: magic, size of the object, CRC-32 of both, zeros.
const HEADER_BYTES: u64 = 64;
const HEADER_CHECKSUMMED_BYTES: usize = 24;
const SLOT_BYTES: u64 = 8;
/// The data begin at a multiple of this.
const PAGE_BYTES: u64 = 4096;
/// Maximum error of the time of last use, so that not every read writes to the disk.
const TOUCH_INTERVAL: Duration = Duration::from_secs(60);

/// An open entry file.
#[derive(Debug)]
pub(crate) struct Entry {
    file: File,
    /// Size of the object in bytes.
    bytes: u64,
}

/// The units that contain a byte range.
pub(crate) fn units_of(range: &Range<u64>) -> Range<u64> {
    range.start / UNIT_BYTES..range.end.div_ceil(UNIT_BYTES)
}

/// The byte range of a range of units, in an object of `bytes` bytes.
pub(crate) fn bytes_of(units: &Range<u64>, bytes: u64) -> Range<u64> {
    units.start * UNIT_BYTES..(units.end * UNIT_BYTES).min(bytes)
}

/// Groups ascending numbers into runs of consecutive ones.
pub(crate) fn runs(units: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for unit in units {
        match runs.last_mut() {
            Some(run) if run.end == unit => run.end += 1,
            _ => runs.push(unit..unit + 1),
        }
    }
    runs
}

/// Bytes of the header and the table, for an object of `bytes` bytes.
pub(crate) fn table_bytes(bytes: u64) -> u64 {
    (HEADER_BYTES + bytes.div_ceil(UNIT_BYTES) * SLOT_BYTES).next_multiple_of(PAGE_BYTES)
}

impl Entry {
    /// Opens the entry of an object of `bytes` bytes; `None` if the file is missing or invalid.
    pub fn open(path: &Path, bytes: u64) -> io::Result<Option<Self>> {
        Ok(Self::open_any(path)?.filter(|entry| entry.bytes == bytes))
    }

    /// Opens the entry of an object of any size; `None` also if the file was truncated.
    pub fn open_any(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::options().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut header = [0; HEADER_BYTES as usize];
        match file.read_exact_at(&mut header, 0) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(e) => return Err(e),
        }
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let bytes = number(MAGIC.len());
        let is_good =
            header == Self::header(bytes) && file.metadata()?.len() == table_bytes(bytes).saturating_add(bytes);
        Ok(is_good.then_some(Self { file, bytes }))
    }

    /// Creates an empty entry, replacing any existing file.
    pub fn create(path: &Path, bytes: u64) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
        file.set_len(table_bytes(bytes) + bytes)?;
        file.write_all_at(&Self::header(bytes), 0)?;
        Ok(Self { file, bytes })
    }

    fn header(bytes: u64) -> [u8; HEADER_BYTES as usize] {
        let mut header = [0; HEADER_BYTES as usize];
        header[..MAGIC.len()].copy_from_slice(&MAGIC);
        header[MAGIC.len()..HEADER_CHECKSUMMED_BYTES].copy_from_slice(&bytes.to_le_bytes());
        let sum = crc32fast::hash(&header[..HEADER_CHECKSUMMED_BYTES]);
        header[HEADER_CHECKSUMMED_BYTES..HEADER_CHECKSUMMED_BYTES + 4].copy_from_slice(&sum.to_le_bytes());
        header
    }

    /// Reads the stored units of a range whose checksums match: runs of bytes in order, each with the offset of its
    /// first byte.
    pub fn read(&self, units: &Range<u64>) -> io::Result<Vec<(u64, Bytes)>> {
        let checksums = self.checksums(units)?;
        let mut found = Vec::new();
        for run in runs(units.clone().zip(&checksums).filter(|(_, sum)| sum.is_some()).map(|(unit, _)| unit)) {
            let whole = bytes_of(&run, self.bytes);
            let mut data = vec![0; (whole.end - whole.start) as usize];
            self.file.read_exact_at(&mut data, table_bytes(self.bytes) + whole.start)?;
            let is_good = |unit: &u64| {
                let at = ((unit - run.start) * UNIT_BYTES) as usize;
                let sum = crc32fast::hash(&data[at..data.len().min(at + UNIT_BYTES as usize)]);
                checksums[(unit - units.start) as usize] == Some(sum)
            };
            let good = runs(run.clone().filter(is_good));
            let data = Bytes::from(data);
            found.extend(good.into_iter().map(|good| {
                let part = bytes_of(&good, self.bytes);
                (part.start, data.slice((part.start - whole.start) as usize..(part.end - whole.start) as usize))
            }));
        }
        Ok(found)
    }

    /// Writes whole units, beginning with unit `first`.
    pub fn write(&self, first: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, table_bytes(self.bytes) + first * UNIT_BYTES)?;
        let slots: Vec<u8> = data.chunks(UNIT_BYTES as usize).flat_map(|unit| slot(crc32fast::hash(unit))).collect();
        self.file.write_all_at(&slots, HEADER_BYTES + first * SLOT_BYTES)
    }

    /// Bytes that count towards the limit: the table and the stored units.
    pub fn counted_bytes(&self) -> io::Result<u64> {
        let units = 0..self.bytes.div_ceil(UNIT_BYTES);
        Ok(table_bytes(self.bytes) + self.bytes_where(&units, |sum| sum.is_some())?)
    }

    /// Bytes that storing these units would add.
    pub fn missing_bytes(&self, units: &Range<u64>) -> io::Result<u64> {
        self.bytes_where(units, |sum| sum.is_none())
    }

    /// Sets the time of last use to now.
    pub fn touch(&self) -> io::Result<()> {
        let now = SystemTime::now();
        let used = self.file.metadata()?.modified()?;
        if now.duration_since(used).is_ok_and(|age| age < TOUCH_INTERVAL) {
            return Ok(());
        }
        self.file.set_modified(now)
    }

    fn bytes_where(&self, units: &Range<u64>, is_chosen: impl Fn(&Option<u32>) -> bool) -> io::Result<u64> {
        let checksums = self.checksums(units)?;
        let size = |unit: u64| {
            let range = bytes_of(&(unit..unit + 1), self.bytes);
            range.end - range.start
        };
        Ok(units.clone().zip(checksums).filter(|(_, sum)| is_chosen(sum)).map(|(unit, _)| size(unit)).sum())
    }

    /// The checksum of each unit; `None` for units that are not stored.
    fn checksums(&self, units: &Range<u64>) -> io::Result<Vec<Option<u32>>> {
        let mut table = vec![0; ((units.end - units.start) * SLOT_BYTES) as usize];
        self.file.read_exact_at(&mut table, HEADER_BYTES + units.start * SLOT_BYTES)?;
        let checksum_of = |bytes: &[u8]| {
            let sum = u32::from_le_bytes(std::array::from_fn(|i| bytes[i]));
            (bytes == slot(sum)).then_some(sum)
        };
        Ok(table.chunks_exact(SLOT_BYTES as usize).map(checksum_of).collect())
    }
}

/// A checksum and its complement, so that neither zeros nor a flipped bit form a valid slot.
fn slot(sum: u32) -> [u8; SLOT_BYTES as usize] {
    (u64::from(sum) | u64::from(!sum) << 32).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_there_when_they_were_written_and_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("entry");
        let bytes = UNIT_BYTES * 3 + 17;
        let content: Vec<u8> = (0..bytes).map(|i| (i * i % 251) as u8).collect();
        let run = |range: Range<u64>| {
            (range.start, Bytes::copy_from_slice(&content[range.start as usize..range.end as usize]))
        };

        assert!(Entry::open(&path, bytes).unwrap().is_none());
        let entry = Entry::create(&path, bytes).unwrap();
        assert_eq!((entry.read(&(0..4)).unwrap(), entry.counted_bytes().unwrap()), (vec![], 4096));
        entry.write(1, &content[UNIT_BYTES as usize..2 * UNIT_BYTES as usize]).unwrap();
        entry.write(3, &content[3 * UNIT_BYTES as usize..]).unwrap();
        assert_eq!(
            (entry.counted_bytes().unwrap(), entry.missing_bytes(&(0..4)).unwrap()),
            (4096 + UNIT_BYTES + 17, 2 * UNIT_BYTES)
        );
        let entry = Entry::open(&path, bytes).unwrap().unwrap();
        assert_eq!(entry.read(&(0..4)).unwrap(), [run(UNIT_BYTES..2 * UNIT_BYTES), run(3 * UNIT_BYTES..bytes)]);
        assert_eq!(entry.read(&(3..4)).unwrap(), [run(3 * UNIT_BYTES..bytes)]);
        assert_eq!(entry.read(&(2..3)).unwrap(), []);
        assert!(Entry::open(&path, bytes + 1).unwrap().is_none(), "another object");

        // a damaged unit splits the run
        entry.write(0, &content[..3 * UNIT_BYTES as usize]).unwrap();
        entry.file.write_all_at(&[1], table_bytes(bytes) + UNIT_BYTES).unwrap();
        assert_eq!(entry.read(&(0..4)).unwrap(), [run(0..UNIT_BYTES), run(2 * UNIT_BYTES..bytes)]);
    }

    /// Any single flipped bit, in the header, the table or the data, is detected or harmless.
    #[test]
    fn no_flipped_bit_is_given_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("entry");
        let content = [0xa5; 20];
        Entry::create(&path, 20).unwrap().write(0, &content).unwrap();
        let good = std::fs::read(&path).unwrap();
        let meaningful = (0..HEADER_BYTES as usize + SLOT_BYTES as usize).chain(4096..good.len());
        for bit in meaningful.flat_map(|byte| (0..8).map(move |bit| byte * 8 + bit)) {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &bad).unwrap();
            let read = Entry::open(&path, 20).unwrap().map_or(vec![], |entry| entry.read(&(0..1)).unwrap());
            assert_eq!(read, [], "bit {bit}");
        }
    }
}
