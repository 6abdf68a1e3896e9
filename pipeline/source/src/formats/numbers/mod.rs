//! Records that are rows of numbers: images, and codes of images.
//!
//! ```text
//!   files: PNG, JPEG ─┐                                  ┌─ label
//!   tar: samples ─────┤ Raw: bytes as stored, their ─────┤
//!   CIFAR, IDX ───────┤ kind, label or why it has none   └─ row(): decoded, resized, checked ─► batches of numbers_schema
//!   npy, Parquet ─────┘
//! ```
//!
//! | layout | a record | where a split begins | planning reads |
//! |---|---|---|---|
//! | `files` | a file | at a file | nothing |
//! | `tar`, also compressed | the members with one name up to the first dot | at the header of such a member | the headers (compressed: all) |
//! | CIFAR, binary | 3,073 (3,074) bytes | at a record | nothing |
//! | CIFAR, Python | a row of `data` | at a row | the files |
//! | IDX, `.npy` | a row | at a row | the headers (of a compressed IDX, the whole file) |
//! | Parquet | a row | at a row | the footers |
//!
//! To plan a compressed tar, it reads the whole file, which records checkpoints. Splits follow from the listing and
//! these reads.
//!
//! A record's checksum and its key cover its bytes as stored, so a split decodes only the records that it takes. A bad
//! record has a key too, and is counted by the split that takes the key.
//!
//! Memory per reader: one record as stored, one decoded image (bounded by `max_pixels`), a batch of about 1 MB; for
//! CIFAR's Python version, a file.

mod arrays;
mod cifar;
mod files;
mod parquet_codes;
mod pickle;
mod read;
mod tar;

use std::borrow::Cow;
use std::collections::BTreeSet;

use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_input_files::{FileEndings, InputFile, Store, class_name, defines_classes};
use stillhouse_operators::images::{BadImage, Image, decode_pixels, to_row_pixels};
use stillhouse_schemas::manifest::Range;
use stillhouse_schemas::spec::{Codes, ImageLabels, Images, Input, InputFormat, Layout};

pub(crate) use self::read::{NumbersReader, read_keys, skip_reason};
use crate::segment::Segment;

/// Reasons why a record is bad, in addition to those of its image. The strings are in manifests, so they must not
/// change.
mod reason {
    pub const CLASS: &str = "unknown class";
    pub const LABEL: &str = "bad label";
    pub const NO_LABEL: &str = "no label";
    pub const NO_IMAGE: &str = "no image";
    pub const SEVERAL: &str = "several images";
    pub const TWICE: &str = "member twice";
    pub const RANGE: &str = "code out of range";
    pub const LENGTH: &str = "another length";
    pub const NULL: &str = "null codes";
}

fn bad_record<T>(reason: &'static str, message: impl Into<String>) -> Result<T, BadImage> {
    Err(BadImage { reason, message: message.into() })
}

/// A record as stored.
pub(crate) struct RawRecord {
    pub position: RecordPosition,
    /// The bytes that its checksum and its key cover.
    pub stored: Vec<u8>,
    pub label: Result<Option<i32>, BadImage>,
    pub content: Result<Content, BadImage>,
}

/// The kind of the stored bytes.
pub(crate) enum Content {
    /// A PNG or JPEG.
    Encoded,
    /// Three planes of 32×32, as in CIFAR.
    Planes,
    /// An image of one channel, row by row.
    Grey { width: usize, height: usize },
    /// Codes.
    Numbers(Vec<u32>),
}

impl RawRecord {
    /// Decodes the record to the numbers of its row and its label.
    pub fn row(self, input: &Input) -> Result<(Vec<u32>, Option<i32>), BadImage> {
        let label = self.label?;
        let picture = match self.content? {
            Content::Numbers(numbers) => return Ok((check_length(numbers, length(input))?, label)),
            Content::Encoded => None,
            Content::Planes => Some(cifar::interleaved(&self.stored)),
            Content::Grey { width, height } => Some(Image { width, height, channels: 1, values: self.stored.clone() }),
        };
        let Some(images) = &input.images else { return bad_record(reason::NO_IMAGE, "the job names no images") };
        let values = match picture {
            Some(picture) => to_row_pixels(picture, images)?,
            None => decode_pixels(&self.stored, images)?,
        };
        Ok((values.into_iter().map(u32::from).collect(), label))
    }
}

/// Reads the records of a range of a file, in order.
pub(crate) trait RawRecords: Send {
    fn next(&mut self) -> Result<Option<RawRecord>, SourceError>;
}

/// Finds another file of the listing by its path: one that holds labels.
pub(crate) type FindFile<'a> = &'a dyn Fn(&str) -> Option<InputFile>;

/// Opens the records of a range.
pub(crate) fn open(
    store: &Store,
    file: &InputFile,
    others: FindFile<'_>,
    input: &Input,
    range: Range,
) -> Result<Box<dyn RawRecords>, SourceError> {
    let rows = match range {
        Range::Rows { start, end } => (start, end),
        Range::Bytes { start, end, .. } => {
            return Ok(Box::new(tar::TarRecords::open(store, file, input, (start, end))?));
        }
    };
    Ok(match kind(file, input)? {
        Kind::Image(images) => Box::new(files::ImageFile::new(store, file, images)),
        Kind::Tar => return Err(SourceError::corrupt(&file.path, "is planned by rows, and is a tar file")),
        Kind::Cifar(cifar) => cifar::open(store, file, input, cifar, rows)?,
        Kind::Idx(images) => Box::new(arrays::Idx::open(store, file, others, input, images, rows)?),
        Kind::Npy(codes) => Box::new(arrays::Npy::open(store, file, others, codes, rows)?),
        Kind::Parquet(codes) => Box::new(parquet_codes::ParquetCodes::open(store, file, codes, rows)?),
    })
}

/// The kind of a file, determined by the job and the file's name.
enum Kind<'a> {
    Image(&'a Images),
    Tar,
    Cifar(cifar::Cifar),
    Idx(&'a Images),
    Npy(&'a Codes),
    Parquet(&'a Codes),
}

fn kind<'a>(file: &InputFile, input: &'a Input) -> Result<Kind<'a>, SourceError> {
    let missing =
        || SourceError::corrupt(&file.path, "is read as images or codes, but the job has no section for them");
    if input.format() == InputFormat::Codes {
        let codes = input.codes.as_ref().ok_or_else(missing)?;
        let name = file.path.to_ascii_lowercase();
        return match name.rsplit_once('.').map(|(_, ending)| ending) {
            Some("npy") => Ok(Kind::Npy(codes)),
            Some("parquet" | "pq") => Ok(Kind::Parquet(codes)),
            _ => Err(SourceError::corrupt(&file.path, "the ending of its name is not .npy, .parquet or .pq")),
        };
    }
    let images = input.images.as_ref().ok_or_else(missing)?;
    let labels = images.labels() == ImageLabels::Stored;
    let cifar = |python, classes| Kind::Cifar(cifar::Cifar { python, classes, labels });
    Ok(match images.layout {
        Layout::Files => Kind::Image(images),
        Layout::Tar => Kind::Tar,
        Layout::Cifar10Python => cifar(true, 10),
        Layout::Cifar10Binary => cifar(false, 10),
        Layout::Cifar100Python => cifar(true, 100),
        Layout::Cifar100Binary => cifar(false, 100),
        Layout::Idx => Kind::Idx(images),
    })
}

/// Returns the endings of the files that a folder stands for; none if the job must name every file.
pub(super) fn endings(input: &Input) -> FileEndings {
    let plain = |endings| FileEndings { endings, may_be_compressed: false };
    if input.format() == InputFormat::Codes {
        return plain(&[".npy", ".parquet", ".pq"]);
    }
    match input.images.as_ref().map(|images| images.layout) {
        Some(Layout::Files) => plain(&[".png", ".jpg", ".jpeg"]),
        Some(Layout::Tar) => FileEndings { endings: &[".tar", ".tgz"], may_be_compressed: true },
        // the folders of the other layouts also hold the test set
        _ => plain(&[]),
    }
}

/// Returns the count of numbers in a row, which is the weight of a record.
fn length(input: &Input) -> u64 {
    input.row_length().unwrap_or(1).max(1)
}

/// Returns the number of records of a file, if they are numbered.
fn rows(store: &Store, file: &InputFile, input: &Input) -> Result<Option<u64>, SourceError> {
    Ok(Some(match kind(file, input)? {
        Kind::Tar => return Ok(None),
        Kind::Image(_) => 1,
        Kind::Cifar(cifar) => cifar::rows(store, file, cifar)?,
        Kind::Idx(_) => arrays::idx_rows(store, file, input)?,
        Kind::Npy(codes) => arrays::npy_rows(store, file, codes)?,
        Kind::Parquet(codes) => parquet_codes::rows(store, file, codes)?,
    }))
}

/// Returns the range of a whole file; `None` if it has no records.
fn whole_range(store: &Store, file: &InputFile, input: &Input) -> Result<Option<Range>, SourceError> {
    Ok(match rows(store, file, input)? {
        None => Some(Range::Bytes { start: 0, end: u64::MAX, line: None }),
        Some(0) => None,
        Some(rows) => Some(Range::Rows { start: 0, end: rows }),
    })
}

/// Returns the segments of a file: see the table of this module.
pub(crate) fn segments(
    store: &Store,
    index: usize,
    file: &InputFile,
    input: &Input,
    target: u64,
) -> Result<Vec<Segment>, SourceError> {
    let Some(rows) = rows(store, file, input)? else { return tar::segments(store, index, file, input, target) };
    if let Kind::Idx(images) = kind(file, input)? {
        arrays::check_idx_end(store, file, input, images)?;
    }
    let length = length(input);
    let parts = rows.div_ceil((target / length).max(1));
    let at = |i: u64| (u128::from(rows) * u128::from(i) / u128::from(parts.max(1))) as u64;
    let part = |i: u64| Segment {
        file: index,
        range: Range::Rows { start: at(i), end: at(i + 1) },
        weight: (at(i + 1) - at(i)) * length,
        records: Some(at(i + 1) - at(i)),
    };
    Ok((0..parts).map(part).collect())
}

/// Returns the offset of the record with this index in a range of a tar file.
pub(crate) fn offset_of(
    store: &Store,
    file: &InputFile,
    input: &Input,
    range: (u64, u64),
    record: u64,
) -> Result<u64, SourceError> {
    tar::offset_of(store, file, input, range, record)
}

/// Whether a file holds the labels of another file, and no records of its own.
pub(crate) fn holds_labels(path: &str, input: &Input) -> bool {
    match (&input.images, &input.codes) {
        (Some(images), _) if images.layout == Layout::Idx => arrays::is_idx_labels(path),
        (_, Some(codes)) => codes.labels.as_ref().is_some_and(|ending| arrays::is_npy_labels(path, ending)),
        _ => false,
    }
}

/// Checks that a row of codes has the length of the job's rows.
fn check_length(numbers: Vec<u32>, length: u64) -> Result<Vec<u32>, BadImage> {
    match numbers.len() as u64 == length {
        true => Ok(numbers),
        false => {
            bad_record(reason::LENGTH, format!("has {} codes; valid: {length} (`input.codes.length`)", numbers.len()))
        }
    }
}

/// Returns the input with the names of all classes in order. If the job takes the classes from the folders of images,
/// they are these folders' names.
pub fn with_class_names<'a>(input: &'a Input, files: &[InputFile]) -> Cow<'a, Input> {
    if !defines_classes(input) {
        return Cow::Borrowed(input);
    }
    let mut named = input.clone();
    if let Some(images) = &mut named.images {
        let names: BTreeSet<&str> = files.iter().map(|file| class_name(&file.location)).collect();
        images.classes = names.into_iter().map(str::to_owned).collect();
    }
    Cow::Owned(named)
}

/// Returns the label of a class.
fn class_label(class: &str, images: &Images) -> Result<Option<i32>, BadImage> {
    match images.classes.iter().position(|name| name == class) {
        Some(label) => Ok(i32::try_from(label).ok()),
        None => {
            bad_record(reason::CLASS, format!("is in the folder {class:?}, which is not in `input.images.classes`"))
        }
    }
}

/// Checks a label that was read as a number.
fn label(number: i64) -> Result<Option<i32>, BadImage> {
    match i32::try_from(number) {
        Ok(label) if label >= 0 => Ok(Some(label)),
        _ => bad_record(reason::LABEL, format!("got label {number}; valid: 0 to {}", i32::MAX)),
    }
}
