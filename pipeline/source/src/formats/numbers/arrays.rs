//! Arrays in files: IDX, the format of MNIST, and `.npy`. A record is a row of the first axis.
//!
//! ```text
//!   IDX     0 0 8 rank ─ each length, 4 bytes, big-endian ─ bytes            rank 3: images, rank 1: labels
//!   npy     \x93NUMPY major minor ─ length of the header ─ {'descr': '<i4', 'fortran_order': False, 'shape': (n, L), } ─ values
//! ```
//!
//! Labels are in a separate file, found by its name among the files of the job.

use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_input_files::{Cursor, InputFile, Store, compression};
use stillhouse_schemas::spec::{Codes, Compression, ImageLabels, Images, Input};

use super::{Content, FindFile, RawRecord, RawRecords, label};

/// Maximum bytes read to parse a header.
const MAX_HEADER_BYTES: u64 = 1 << 16;

/// Reads exactly `size` bytes, or returns the error that the file is cut off.
pub(super) fn read_exactly(cursor: &mut Cursor, file: &str, size: usize) -> Result<Vec<u8>, SourceError> {
    let mut bytes = Vec::with_capacity(size);
    while bytes.len() < size {
        let available = cursor.fill().map_err(|e| SourceError::from_io(file, e))?;
        if available.is_empty() {
            return Err(SourceError::corrupt(file, format!("is cut off at byte {}", cursor.offset)));
        }
        let n = available.len().min(size - bytes.len());
        bytes.extend_from_slice(&available[..n]);
        cursor.consume(n);
    }
    Ok(bytes)
}

/// The header of an IDX file: its lengths.
struct IdxHeader {
    lengths: Vec<u64>,
    bytes: u64,
}

fn idx_header(store: &Store, file: &InputFile, input: &Input, rank: u8) -> Result<IdxHeader, SourceError> {
    let mut cursor = Cursor::open(store, file, input, 0)?;
    let magic = read_exactly(&mut cursor, &file.path, 4)?;
    if magic != [0, 0, 8, rank] {
        let message = format!("begins with {magic:?}; valid: [0, 0, 8, {rank}], IDX of bytes with {rank} axes");
        return Err(SourceError::corrupt(&file.path, message));
    }
    let lengths = read_exactly(&mut cursor, &file.path, 4 * usize::from(rank))?;
    let lengths: Vec<u64> =
        lengths.chunks_exact(4).map(|four| four.iter().fold(0, |n, byte| n << 8 | u64::from(*byte))).collect();
    let bytes = 4 + 4 * u64::from(rank);
    let whole = lengths.iter().try_fold(1u64, |all, n| all.checked_mul(*n)).and_then(|all| all.checked_add(bytes));
    if compression(file, input) == Compression::None && whole != Some(file.size) {
        let message = format!("has {} bytes; its header says {lengths:?}", file.size);
        return Err(SourceError::corrupt(&file.path, message));
    }
    Ok(IdxHeader { lengths, bytes })
}

/// Checks that a compressed IDX file ends after its last row. For an uncompressed file its size shows that.
///
/// Cost: decompresses the file.
pub(super) fn check_idx_end(
    store: &Store,
    file: &InputFile,
    input: &Input,
    images: &Images,
) -> Result<(), SourceError> {
    let holds_labels = is_idx_labels(&file.path);
    if compression(file, input) == Compression::None || (holds_labels && images.labels() != ImageLabels::Stored) {
        return Ok(());
    }
    let header = idx_header(store, file, input, if holds_labels { 1 } else { 3 })?;
    let whole = header.lengths.iter().try_fold(1u64, |all, n| all.checked_mul(*n));
    let end = whole.and_then(|all| all.checked_add(header.bytes)).unwrap_or(u64::MAX);
    let mut cursor = Cursor::open(store, file, input, 0)?;
    let io = |e| SourceError::from_io(&file.path, e);
    cursor.skip_to(end).map_err(io)?;
    let has_more = cursor.offset == end && !cursor.fill().map_err(io)?.is_empty();
    if cursor.offset == end && !has_more {
        return Ok(());
    }
    let has = if has_more { format!("more than {end}") } else { cursor.offset.to_string() };
    let message = format!("has {has} bytes after decompression; its header says {:?}, which are {end}", header.lengths);
    Err(SourceError::corrupt(&file.path, message))
}

/// Returns the number of images of an IDX file; 0 if it holds labels.
pub(super) fn idx_rows(store: &Store, file: &InputFile, input: &Input) -> Result<u64, SourceError> {
    match is_idx_labels(&file.path) {
        true => Ok(0),
        false => Ok(idx_header(store, file, input, 3)?.lengths[0]),
    }
}

pub(super) fn is_idx_labels(path: &str) -> bool {
    file_name(path).contains("labels")
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Reads images of an IDX file with their labels.
pub(super) struct Idx {
    cursor: Cursor,
    file: String,
    size: (usize, usize),
    labels: Option<(Cursor, String)>,
    rows: (u64, u64),
}

impl Idx {
    pub fn open(
        store: &Store,
        file: &InputFile,
        others: FindFile<'_>,
        input: &Input,
        images: &Images,
        rows: (u64, u64),
    ) -> Result<Self, SourceError> {
        let header = idx_header(store, file, input, 3)?;
        let (height, width) = (header.lengths[1], header.lengths[2]);
        let pixels = height.checked_mul(width).filter(|pixels| (1..=u64::from(images.max_pixels)).contains(pixels));
        let Some(pixels) = pixels else {
            let message = format!("has images of {width}×{height} pixels; valid: 1 to {} pixels", images.max_pixels);
            return Err(SourceError::corrupt(&file.path, message));
        };
        let at = |row: u64| header.bytes + row * pixels;
        let cursor = Cursor::open_range(store, file, input, (at(rows.0), at(rows.1)))?;
        let labels = match images.labels() {
            ImageLabels::Stored => Some(Self::labels(store, file, others, input, header.lengths[0], rows)?),
            _ => None,
        };
        Ok(Self { cursor, file: file.path.clone(), size: (width as usize, height as usize), labels, rows })
    }

    fn labels(
        store: &Store,
        file: &InputFile,
        others: FindFile<'_>,
        input: &Input,
        images: u64,
        rows: (u64, u64),
    ) -> Result<(Cursor, String), SourceError> {
        let name = file_name(&file.path);
        let folder = &file.path[..file.path.len() - name.len()];
        let path = format!("{folder}{}", name.replace("images", "labels").replace("idx3", "idx1"));
        let other = labels_file(file, &path, others)?;
        let header = idx_header(store, &other, input, 1)?;
        if header.lengths[0] != images {
            let message = format!("has {} labels for the {images} images of {}", header.lengths[0], file.path);
            return Err(SourceError::corrupt(&other.path, message));
        }
        let range = (header.bytes + rows.0, header.bytes + rows.1);
        Ok((Cursor::open_range(store, &other, input, range)?, path))
    }
}

fn labels_file(file: &InputFile, path: &str, others: FindFile<'_>) -> Result<InputFile, SourceError> {
    let found = others(path).filter(|found| found.path != file.path);
    found.ok_or_else(|| {
        let message =
            format!("its labels are looked for in {path}, which is none of `input.paths`; add it, or leave labels out");
        SourceError::corrupt(&file.path, message)
    })
}

impl RawRecords for Idx {
    fn next(&mut self) -> Result<Option<RawRecord>, SourceError> {
        if self.rows.0 == self.rows.1 {
            return Ok(None);
        }
        let (width, height) = self.size;
        let stored = read_exactly(&mut self.cursor, &self.file, width * height)?;
        let label = match &mut self.labels {
            Some((cursor, file)) => label(i64::from(read_exactly(cursor, file, 1)?[0])),
            None => Ok(None),
        };
        let position = RecordPosition::Row(self.rows.0);
        self.rows.0 += 1;
        Ok(Some(RawRecord { position, stored, label, content: Ok(Content::Grey { width, height }) }))
    }
}

/// The header of a `.npy` file.
struct NpyHeader {
    kind: IntegerType,
    shape: Vec<u64>,
    bytes: u64,
}

/// An integer type.
#[derive(Debug, Clone, Copy)]
struct IntegerType {
    bytes: usize,
    signed: bool,
    little: bool,
}

impl IntegerType {
    fn parse(text: &str) -> Option<Self> {
        let (order, rest) = text.split_at_checked(1)?;
        let (kind, bytes) = rest.split_at_checked(1)?;
        let bytes = bytes.parse().ok().filter(|bytes| matches!(bytes, 1 | 2 | 4 | 8))?;
        let signed = match kind {
            "i" => true,
            "u" => false,
            _ => return None,
        };
        let little = match order {
            "<" => true,
            ">" => false,
            "|" if bytes == 1 => true,
            _ => return None,
        };
        Some(Self { bytes, signed, little })
    }

    fn read(self, bytes: &[u8]) -> i128 {
        let add = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        let raw = if self.little { bytes.iter().rev().fold(0, add) } else { bytes.iter().fold(0, add) };
        let shift = 64 - 8 * self.bytes as u32;
        if self.signed { i128::from(((raw << shift) as i64) >> shift) } else { i128::from(raw) }
    }
}

fn npy_header(store: &Store, file: &InputFile) -> Result<NpyHeader, SourceError> {
    let wrong = |message: String| SourceError::corrupt(&file.path, format!("cannot be read as .npy: {message}"));
    let head = store.get(&file.location, 0, file.size.min(MAX_HEADER_BYTES));
    let head = head.map_err(|e| SourceError::from_store(&file.path, e))?;
    if !head.starts_with(b"\x93NUMPY") || head.len() < 12 {
        return Err(wrong("it does not begin as such a file does".into()));
    }
    let (start, length): (usize, usize) = match head[6] {
        1 => (10, usize::from(u16::from_le_bytes([head[8], head[9]]))),
        2 | 3 => (12, u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize),
        other => return Err(wrong(format!("its version is {other}; valid: 1 to 3"))),
    };
    let text = head.get(start..start.saturating_add(length)).map(String::from_utf8_lossy);
    let text = text.ok_or_else(|| wrong(format!("its header has {length} bytes")))?;
    let after = |key: &str| text.split_once(&format!("'{key}':")).map(|(_, rest)| rest.trim_start());
    let quoted = after("descr").and_then(|rest| rest.strip_prefix('\'')?.split_once('\''));
    let descr = quoted.map(|(name, _)| name).ok_or_else(|| wrong("its header names no type of numbers".into()))?;
    let kind = IntegerType::parse(descr).ok_or_else(|| {
        wrong(format!("its numbers are of type {descr:?}; valid: whole numbers, such as <i4, <i8, |u1, <u2"))
    })?;
    if !after("fortran_order").is_some_and(|rest| rest.starts_with("False")) {
        return Err(wrong(
            "it is stored column by column (fortran_order); valid: row by row (`np.ascontiguousarray`)".into(),
        ));
    }
    let inside = after("shape").and_then(|rest| rest.strip_prefix('(')?.split_once(')')).map(|(inside, _)| inside);
    let numbers = inside.into_iter().flat_map(|inside| inside.split(',')).map(str::trim).filter(|n| !n.is_empty());
    let shape: Result<Vec<u64>, _> = numbers.map(str::parse).collect();
    let shape =
        shape.ok().filter(|shape| !shape.is_empty()).ok_or_else(|| wrong("its header names no shape".into()))?;
    let bytes = (start + length) as u64;
    let values = shape.iter().try_fold(kind.bytes as u64, |all, n| all.checked_mul(*n));
    if values.and_then(|values| values.checked_add(bytes)) != Some(file.size) {
        return Err(wrong(format!("it has {} bytes; its header says {shape:?} of {descr}", file.size)));
    }
    Ok(NpyHeader { kind, shape, bytes })
}

/// Returns the number of rows of a `.npy` file; 0 if it holds labels.
pub(super) fn npy_rows(store: &Store, file: &InputFile, codes: &Codes) -> Result<u64, SourceError> {
    if codes.labels.as_ref().is_some_and(|ending| is_npy_labels(&file.path, ending)) {
        return Ok(0);
    }
    let shape = npy_header(store, file)?.shape;
    let width = shape[1..].iter().try_fold(1u64, |all, n| all.checked_mul(*n));
    if shape.len() < 2 || width != Some(codes.length.into()) {
        let length = codes.length;
        let message =
            format!("has shape {shape:?}; valid: [n, {length}], or {length} in several axes (`input.codes.length`)");
        return Err(SourceError::corrupt(&file.path, message));
    }
    Ok(shape[0])
}

pub(super) fn is_npy_labels(path: &str, ending: &str) -> bool {
    !ending.is_empty() && path.strip_suffix(".npy").is_some_and(|stem| stem.ends_with(ending))
}

/// Reads rows of codes.
pub(super) struct Npy {
    cursor: Cursor,
    file: String,
    kind: IntegerType,
    /// Numbers of a row.
    width: usize,
    size: u32,
    labels: Option<(Cursor, String, IntegerType)>,
    rows: (u64, u64),
}

impl Npy {
    pub fn open(
        store: &Store,
        file: &InputFile,
        others: FindFile<'_>,
        codes: &Codes,
        rows: (u64, u64),
    ) -> Result<Self, SourceError> {
        let header = npy_header(store, file)?;
        npy_rows(store, file, codes)?;
        let width = u64::from(codes.length);
        let cursor = Self::at(store, file, &header, width, rows)?;
        let labels = match &codes.labels {
            Some(ending) => {
                let stem = file.path.strip_suffix(".npy").unwrap_or(&file.path);
                let other = labels_file(file, &format!("{stem}{ending}.npy"), others)?;
                let of = npy_header(store, &other)?;
                if of.shape.iter().product::<u64>() != header.shape[0] {
                    let message = format!("has shape {:?}, {} has {} rows", of.shape, file.path, header.shape[0]);
                    return Err(SourceError::corrupt(&other.path, message));
                }
                Some((Self::at(store, &other, &of, 1, rows)?, other.path, of.kind))
            }
            None => None,
        };
        let file = file.path.clone();
        Ok(Self { cursor, file, kind: header.kind, width: width as usize, size: codes.size, labels, rows })
    }

    fn at(
        store: &Store,
        file: &InputFile,
        header: &NpyHeader,
        width: u64,
        rows: (u64, u64),
    ) -> Result<Cursor, SourceError> {
        let at = |row: u64| header.bytes + row * width * header.kind.bytes as u64;
        Cursor::stored(store, file, (at(rows.0), at(rows.1)))
    }
}

impl RawRecords for Npy {
    fn next(&mut self) -> Result<Option<RawRecord>, SourceError> {
        if self.rows.0 == self.rows.1 {
            return Ok(None);
        }
        let bytes = read_exactly(&mut self.cursor, &self.file, self.width * self.kind.bytes)?;
        let numbers = bytes.chunks_exact(self.kind.bytes).map(|bytes| self.kind.read(bytes));
        let label = match &mut self.labels {
            Some((cursor, file, kind)) => {
                let number = kind.read(&read_exactly(cursor, file, kind.bytes)?);
                label(i64::try_from(number).unwrap_or(-1))
            }
            None => Ok(None),
        };
        let position = RecordPosition::Row(self.rows.0);
        self.rows.0 += 1;
        Ok(Some(super::parquet_codes::raw(position, numbers, self.size, label)))
    }
}
