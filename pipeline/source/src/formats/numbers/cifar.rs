//! CIFAR-10 and CIFAR-100 in the versions that their authors publish.
//!
//! | | a record | label |
//! |---|---|---|
//! | binary, 10 | `label`, 3,072 bytes | the first byte |
//! | binary, 100 | `coarse`, `fine`, 3,072 bytes | the second byte |
//! | Python | a row of `data` [n, 3072] uint8 | the same index of `labels` (100: `fine_labels`) |
//!
//! The 3,072 bytes are three planes of 32×32: red, green, blue. Our rows have the channel last.

use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_input_files::{Cursor, InputFile, Store, compression};
use stillhouse_operators::images::Image;
use stillhouse_schemas::spec::{Compression, Input};

use super::pickle::{self, CifarBatch};
use super::{Content, RawRecord, RawRecords, bad_record, label, reason};

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
pub(super) const IMAGE: usize = 3 * PLANE;
/// Maximum bytes of a pickled file. A published file has 31 MB (CIFAR-100: 155 MB).
const MAX_PICKLE_BYTES: u64 = 1 << 28;

/// Which of the four versions it is, and whether the job wants labels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cifar {
    pub python: bool,
    pub classes: u32,
    pub labels: bool,
}

impl Cifar {
    /// Returns the number of bytes of a binary record before its image.
    fn head(self) -> usize {
        if self.classes == 100 { 2 } else { 1 }
    }

    /// Converts a number to a label, which must be one of the classes.
    fn label(self, number: i64) -> Result<Option<i32>, stillhouse_operators::images::BadImage> {
        match (self.labels, number) {
            (false, _) => Ok(None),
            (true, n) if n >= i64::from(self.classes) => {
                bad_record(reason::LABEL, format!("got label {n}; valid: 0 to {}", self.classes - 1))
            }
            (true, n) => label(n),
        }
    }
}

/// Converts planes to interleaved pixels.
pub(super) fn interleaved(planes: &[u8]) -> Image {
    let values = (0..PLANE).flat_map(|i| [0, 1, 2].map(|c| planes.get(c * PLANE + i).copied().unwrap_or(0))).collect();
    Image { width: SIDE, height: SIDE, channels: 3, values }
}

/// Returns the number of records of a file.
pub(super) fn rows(store: &Store, file: &InputFile, cifar: Cifar) -> Result<u64, SourceError> {
    if cifar.python {
        return Ok(pickled(store, file, cifar)?.1.rows as u64);
    }
    let record = (cifar.head() + IMAGE) as u64;
    match file.size % record {
        0 => Ok(file.size / record),
        rest => {
            let message = format!(
                "has {} bytes, which is {} records of {record} bytes and {rest} more; valid: CIFAR-{}'s binary version, decompressed",
                file.size,
                file.size / record,
                cifar.classes
            );
            Err(SourceError::corrupt(&file.path, message))
        }
    }
}

pub(super) fn open(
    store: &Store,
    file: &InputFile,
    input: &Input,
    cifar: Cifar,
    rows: (u64, u64),
) -> Result<Box<dyn RawRecords>, SourceError> {
    if cifar.python {
        let (bytes, batch) = pickled(store, file, cifar)?;
        return Ok(Box::new(Python { bytes, batch, cifar, rows }));
    }
    if compression(file, input) != Compression::None {
        return Err(SourceError::corrupt(&file.path, "is compressed; valid: uncompressed files of CIFAR"));
    }
    let record = (cifar.head() + IMAGE) as u64;
    let cursor = Cursor::stored(store, file, (rows.0 * record, rows.1 * record))?;
    Ok(Box::new(Binary { cursor, file: file.path.clone(), cifar, rows }))
}

fn pickled(store: &Store, file: &InputFile, cifar: Cifar) -> Result<(bytes::Bytes, CifarBatch), SourceError> {
    if file.size > MAX_PICKLE_BYTES {
        let message =
            format!("has {} bytes; valid: a batch of CIFAR's Python version, at most {MAX_PICKLE_BYTES}", file.size);
        return Err(SourceError::corrupt(&file.path, message));
    }
    let bytes = store.get(&file.location, 0, file.size).map_err(|e| SourceError::from_store(&file.path, e))?;
    let labels = if cifar.classes == 100 { "fine_labels" } else { "labels" };
    let batch = pickle::batch(&bytes, labels, IMAGE).map_err(|message| {
        let version = cifar.classes;
        SourceError::corrupt(&file.path, format!("is no batch of CIFAR-{version}'s Python version: {message}"))
    })?;
    Ok((bytes, batch))
}

struct Binary {
    cursor: Cursor,
    file: String,
    cifar: Cifar,
    rows: (u64, u64),
}

impl RawRecords for Binary {
    fn next(&mut self) -> Result<Option<RawRecord>, SourceError> {
        if self.rows.0 == self.rows.1 {
            return Ok(None);
        }
        let size = self.cifar.head() + IMAGE;
        let record = super::arrays::read_exactly(&mut self.cursor, &self.file, size)?;
        let row = self.rows.0;
        self.rows.0 += 1;
        let (head, image) = record.split_at(self.cifar.head());
        let label = self.cifar.label(head.last().map_or(0, |byte| i64::from(*byte)));
        Ok(Some(RawRecord {
            position: RecordPosition::Row(row),
            stored: image.to_vec(),
            label,
            content: Ok(Content::Planes),
        }))
    }
}

struct Python {
    bytes: bytes::Bytes,
    batch: CifarBatch,
    cifar: Cifar,
    rows: (u64, u64),
}

impl RawRecords for Python {
    fn next(&mut self) -> Result<Option<RawRecord>, SourceError> {
        if self.rows.0 == self.rows.1 {
            return Ok(None);
        }
        let row = self.rows.0 as usize;
        self.rows.0 += 1;
        let start = self.batch.data.start + row * IMAGE;
        let stored = self.bytes.get(start..start + IMAGE).unwrap_or_default().to_vec();
        let label = self.batch.labels.get(row).map_or(Ok(None), |number| self.cifar.label(*number));
        Ok(Some(RawRecord { position: RecordPosition::Row(row as u64), stored, label, content: Ok(Content::Planes) }))
    }
}
