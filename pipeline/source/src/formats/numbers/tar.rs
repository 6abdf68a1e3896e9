//! Tar files of images. A record is a sample as in WebDataset: consecutive members whose names are equal up to the
//! first dot of the last path component. In a plain tar of images, each sample has one member.
//!
//! ```text
//!   header 512 ─ content, filled up to 512 ─ header ─ … ─ two blocks of zeros
//!   class/00012.jpg  class/00012.cls  class/00013.jpg …      (ustar, GNU long names, pax path and size)
//! ```
//!
//! A range begins at a header, so a reader seeks there directly; in a compressed tar it uses the checkpoints of the
//! stream. It skips contents that it does not need, folders, and names that begin with a dot. It checks the checksum of
//! every header.

use std::io;

use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_input_files::{Cursor, FIRST_CHUNK_BYTES, InputFile, Store, compression};
use stillhouse_operators::images::{BadImage, reason as image};
use stillhouse_schemas::manifest::Range;
use stillhouse_schemas::spec::{Compression, ImageLabels, Images, Input};

use super::files::max_stored_bytes;
use super::{Content, RawRecord, RawRecords, bad_record, class_label, label, length, reason};
use crate::segment::Segment;

const BLOCK: u64 = 512;
/// Maximum bytes of a long name, of a pax header, of a label.
const MAX_METADATA_BYTES: u64 = 1 << 20;

/// A member: its name and position.
struct Member {
    /// Offset of its first header, including that of a long name.
    header: u64,
    content: u64,
    size: u64,
    name: String,
    is_file: bool,
    is_link: bool,
}

/// Iterates over the members, in order.
struct Members {
    store: Store,
    file: InputFile,
    input: Input,
    /// `None` only while it is moved.
    cursor: Option<Cursor>,
    end: u64,
}

impl Members {
    fn open(store: &Store, file: &InputFile, input: &Input, (start, end): (u64, u64)) -> Result<Self, SourceError> {
        let cursor = Cursor::open_range(store, file, input, (start, end))?;
        Ok(Self { store: store.clone(), file: file.clone(), input: input.clone(), cursor: Some(cursor), end })
    }

    fn corrupt(&self, message: impl std::fmt::Display) -> SourceError {
        SourceError::corrupt(&self.file.path, format!("cannot be read as tar: {message}"))
    }

    fn cursor(&mut self) -> Result<&mut Cursor, SourceError> {
        let gone = SourceError::corrupt(&self.file.path, "was given up after an error");
        self.cursor.as_mut().ok_or(gone)
    }

    fn offset(&self) -> u64 {
        self.cursor.as_ref().map_or(0, |cursor| cursor.offset)
    }

    /// Advances to an offset: skips the bytes before it, or reopens the file there if they are many and need no
    /// decompression.
    fn advance_to(&mut self, to: u64) -> Result<(), SourceError> {
        let far = to.saturating_sub(self.offset()) > 4 * FIRST_CHUNK_BYTES;
        if far && compression(&self.file, &self.input) == Compression::None && to <= self.file.size {
            let cursor = self.cursor.take().ok_or_else(|| self.corrupt("was given up after an error"))?;
            self.cursor = Some(cursor.forward(&self.store, &self.file, &self.input, (to, self.end))?);
            return Ok(());
        }
        let path = self.file.path.clone();
        self.cursor()?.skip_to(to).map_err(|e| SourceError::from_io(&path, e))?;
        match self.offset() < to {
            true => {
                Err(self.corrupt(format_args!("is cut off: a member ends at byte {to}, the file at {}", self.offset())))
            }
            false => Ok(()),
        }
    }

    /// Reads `size` bytes; fewer only at the end of the file.
    fn take(&mut self, size: u64) -> Result<Vec<u8>, SourceError> {
        let path = self.file.path.clone();
        let cursor = self.cursor()?;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < size {
            let available = cursor.fill().map_err(|e| SourceError::from_io(&path, e))?;
            if available.is_empty() {
                break;
            }
            let n = available.len().min((size - bytes.len() as u64) as usize);
            bytes.extend_from_slice(&available[..n]);
            cursor.consume(n);
        }
        Ok(bytes)
    }

    /// Reads the content of a member; the cursor is before it.
    fn content(&mut self, member: &Member) -> Result<Vec<u8>, SourceError> {
        self.advance_to(member.content)?;
        let bytes = self.take(member.size)?;
        match bytes.len() as u64 == member.size {
            true => Ok(bytes),
            false => {
                let ends = member.content + member.size;
                Err(self.corrupt(format_args!("is cut off: {:?} ends at byte {ends}, the file before", member.name)))
            }
        }
    }

    /// Returns the next member; `None` at the end of the archive.
    fn next(&mut self) -> Result<Option<Member>, SourceError> {
        let first = self.offset();
        let (mut long_name, mut pax) = (None, Pax::default());
        loop {
            let at = self.offset();
            let header = self.take(BLOCK)?;
            if header.is_empty() {
                return Err(self.corrupt("is cut off: the empty blocks of its end are missing"));
            }
            if header.iter().all(|byte| *byte == 0) && header.len() as u64 == BLOCK {
                return match first == at {
                    true => Ok(None),
                    false => Err(self.corrupt("ends behind a name without a member")),
                };
            }
            if (header.len() as u64) < BLOCK {
                return Err(self.corrupt(format_args!("is cut off in the header at byte {at}")));
            }
            let header = Header::parse(&header).map_err(|m| self.corrupt(format_args!("header at byte {at}: {m}")))?;
            let content = at + BLOCK;
            let size = pax.size.filter(|_| !matches!(header.kind, b'L' | b'K' | b'x' | b'g')).unwrap_or(header.size);
            let after = content.checked_add(size).and_then(|end| end.checked_next_multiple_of(BLOCK));
            let after = after.ok_or_else(|| self.corrupt(format_args!("header at byte {at}: its size is {size}")))?;
            if matches!(header.kind, b'L' | b'K' | b'x' | b'g') {
                if size > MAX_METADATA_BYTES {
                    return Err(self.corrupt(format_args!("header at byte {at}: a name of {size} bytes")));
                }
                let bytes = self.take(size)?;
                match header.kind {
                    b'L' => long_name = Some(text(&bytes)),
                    b'x' => {
                        pax = Pax::parse(&bytes).ok_or_else(|| self.corrupt(format_args!("pax header at byte {at}")))?
                    }
                    _ => {}
                }
                self.advance_to(after)?;
                continue;
            }
            let name = pax.path.or(long_name).unwrap_or(header.name);
            let is_file = matches!(header.kind, 0 | b'0' | b'7');
            let is_link = matches!(header.kind, b'1' | b'2');
            let size = if is_link { 0 } else { size };
            return Ok(Some(Member { header: first, content, size, name, is_file, is_link }));
        }
    }

    /// Goes to the end of a member.
    fn skip(&mut self, member: &Member) -> Result<(), SourceError> {
        let end = (member.content + member.size).next_multiple_of(BLOCK);
        if compression(&self.file, &self.input) == Compression::None && member.content + member.size > self.file.size {
            return Err(self.corrupt(format_args!("is cut off: {:?} ends behind the file", member.name)));
        }
        // the last member may lack its padding
        if compression(&self.file, &self.input) == Compression::None {
            return self.advance_to(end.min(self.file.size));
        }
        self.advance_to(member.content + member.size)?;
        let path = self.file.path.clone();
        self.cursor()?.skip_to(end).map_err(|e| SourceError::from_io(&path, e))
    }
}

struct Header {
    name: String,
    size: u64,
    kind: u8,
}

impl Header {
    fn parse(block: &[u8]) -> Result<Self, String> {
        let stored = octal(&block[148..156]).ok_or("its checksum is no number")?;
        let sum: u64 =
            block.iter().enumerate().map(|(i, b)| if (148..156).contains(&i) { 32 } else { u64::from(*b) }).sum();
        if stored != sum {
            return Err(format!("its checksum is {stored}, its bytes add up to {sum}"));
        }
        let size = octal(&block[124..136]).ok_or("its size is no number")?;
        let (name, prefix) = (text(&block[..100]), text(&block[345..500]));
        let ustar = &block[257..263] == b"ustar\0";
        let name = if ustar && !prefix.is_empty() { format!("{prefix}/{name}") } else { name };
        Ok(Self { name, size, kind: block[156] })
    }
}

/// Parses a number of a header: octal digits, or (GNU) big-endian after a set bit.
fn octal(field: &[u8]) -> Option<u64> {
    if field.first()? & 0x80 != 0 {
        let (high, low) = field.split_at(field.len() - 8);
        let is_small = high.iter().enumerate().all(|(i, b)| *b == if i == 0 { 0x80 } else { 0 });
        return is_small.then(|| low.iter().fold(0, |n, b| n << 8 | u64::from(*b)));
    }
    let digits = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    if digits.is_empty() { Some(0) } else { u64::from_str_radix(digits, 8).ok() }
}

/// Returns a text up to its first zero byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The fields of a pax header that apply to the following member.
#[derive(Default)]
struct Pax {
    path: Option<String>,
    size: Option<u64>,
}

impl Pax {
    fn parse(mut bytes: &[u8]) -> Option<Self> {
        let mut pax = Self::default();
        while !bytes.is_empty() {
            let space = bytes.iter().position(|byte| *byte == b' ')?;
            let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
            let record = bytes.get(space + 1..length)?.strip_suffix(b"\n")?;
            let equals = record.iter().position(|byte| *byte == b'=')?;
            let value = String::from_utf8_lossy(&record[equals + 1..]).into_owned();
            match &record[..equals] {
                b"path" => pax.path = Some(value),
                b"size" => pax.size = Some(value.parse().ok()?),
                _ => {}
            }
            bytes = &bytes[length..];
        }
        Some(pax)
    }
}

/// Splits a name as WebDataset does: into the key of a sample and the ending of the member.
fn split_name(name: &str) -> Option<(&str, String)> {
    let base = name.rfind('/').map_or(0, |slash| slash + 1);
    let file = &name[base..];
    if file.is_empty() || file.starts_with('.') {
        return None;
    }
    match file.find('.') {
        Some(dot) => Some((&name[..base + dot], file[dot + 1..].to_ascii_lowercase())),
        None => Some((name, String::new())),
    }
}

/// The members of one sample.
struct Sample {
    header: u64,
    key: String,
    name: Option<String>,
    image: Option<Result<Vec<u8>, BadImage>>,
    label: Option<Vec<u8>>,
    /// The endings of its members, up to a maximum number, and one that occurred twice.
    endings: Vec<String>,
    duplicate: Option<String>,
}

/// Maximum number of endings kept per sample: no sample has that many kinds of members.
const MAX_ENDINGS: usize = 1_000;

/// Reads samples, in order.
pub(super) struct TarRecords {
    members: Members,
    images: Images,
    labels: ImageLabels,
    /// The first member after the last sample.
    waiting: Option<Member>,
    /// Whether to read contents.
    reads_contents: bool,
    end: u64,
}

impl TarRecords {
    pub fn open(store: &Store, file: &InputFile, input: &Input, range: (u64, u64)) -> Result<Self, SourceError> {
        let missing = || SourceError::corrupt(&file.path, "is read as images, but the job has no section for them");
        let images = input.images.clone().ok_or_else(missing)?;
        let members = Members::open(store, file, input, range)?;
        let labels = images.labels();
        Ok(Self { members, images, labels, waiting: None, reads_contents: true, end: range.1 })
    }

    /// Returns the next member that belongs to a sample; skips others.
    fn member(&mut self) -> Result<Option<Member>, SourceError> {
        if let Some(member) = self.waiting.take() {
            return Ok(Some(member));
        }
        while let Some(member) = self.members.next()? {
            if (member.is_file || member.is_link) && split_name(&member.name).is_some() {
                return Ok(Some(member));
            }
            self.members.skip(&member)?;
        }
        Ok(None)
    }

    fn sample(&mut self) -> Result<Option<Sample>, SourceError> {
        let mut sample: Option<Sample> = None;
        while let Some(member) = self.member()? {
            let Some((key, ending)) = split_name(&member.name) else { continue };
            if sample.as_ref().is_some_and(|sample| sample.key != key) || member.header >= self.end {
                self.waiting = Some(member);
                break;
            }
            let sample = sample.get_or_insert_with(|| Sample {
                header: member.header,
                key: key.to_owned(),
                name: None,
                image: None,
                label: None,
                endings: Vec::new(),
                duplicate: None,
            });
            if self.reads_contents {
                self.add(sample, &member, &ending)?;
            }
            self.members.skip(&member)?;
        }
        Ok(sample)
    }

    fn add(&mut self, sample: &mut Sample, member: &Member, ending: &str) -> Result<(), SourceError> {
        let is_image = matches!(ending, "png" | "jpg" | "jpeg");
        if !is_image && sample.endings.iter().any(|had| had == ending) {
            // it is ambiguous which of the two is meant
            sample.duplicate.get_or_insert_with(|| member.name.clone());
            return Ok(());
        }
        if !is_image && sample.endings.len() < MAX_ENDINGS {
            sample.endings.push(ending.to_owned());
        }
        let wanted = match self.labels {
            ImageLabels::Cls => "cls",
            ImageLabels::Json => "json",
            _ => "",
        };
        if is_image {
            let most = max_stored_bytes(&self.images);
            let image = if sample.image.is_some() {
                bad_record(reason::SEVERAL, "has several images under one name; valid: one")
            } else if member.is_link {
                bad_record(reason::NO_IMAGE, "is a link; valid: a file with its bytes")
            } else if member.size > most {
                let message =
                    format!("has {} bytes; valid: at most {most} with `input.images.max_pixels`", member.size);
                bad_record(image::LARGE, message)
            } else {
                Ok(self.members.content(member)?)
            };
            sample.image = Some(image);
            sample.name = Some(member.name.clone());
        } else if ending == wanted && !wanted.is_empty() && member.size <= MAX_METADATA_BYTES {
            sample.label = Some(self.members.content(member)?);
        }
        Ok(())
    }

    fn label(&self, sample: &Sample) -> Result<Option<i32>, BadImage> {
        let json = match self.labels {
            ImageLabels::Folder => {
                let folder = sample.key.rsplit('/').nth(1).unwrap_or_default();
                return class_label(folder, &self.images);
            }
            ImageLabels::Cls => false,
            ImageLabels::Json => true,
            _ => return Ok(None),
        };
        let Some(bytes) = &sample.label else {
            let ending = if json { "json" } else { "cls" };
            return bad_record(reason::NO_LABEL, format!("has no member {:?}", format!("{}.{ending}", sample.key)));
        };
        let text = String::from_utf8_lossy(bytes);
        let number = match json {
            false => text.trim().parse().ok(),
            true => {
                let value: Option<serde_json::Value> = serde_json::from_slice(bytes).ok();
                value.and_then(|value| value.get(&self.images.label_key)?.as_i64())
            }
        };
        let shown: String = text.trim().chars().take(40).collect();
        match (number, json) {
            (Some(number), _) => label(number),
            (None, false) => bad_record(reason::LABEL, format!("its .cls says {shown:?}; valid: a whole number")),
            (None, true) => {
                let key = &self.images.label_key;
                bad_record(
                    reason::LABEL,
                    format!("its .json says {shown:?}; valid: an object with a whole number under {key:?}"),
                )
            }
        }
    }
}

impl RawRecords for TarRecords {
    fn next(&mut self) -> Result<Option<RawRecord>, SourceError> {
        let Some(sample) = self.sample()? else { return Ok(None) };
        let label = self.label(&sample);
        let position = RecordPosition::Member(sample.name.unwrap_or(sample.key));
        let (stored, content) = match sample.image {
            Some(Ok(bytes)) => match sample.duplicate {
                Some(name) => {
                    (bytes, bad_record(reason::TWICE, format!("has two members {name:?}; valid: one of each ending")))
                }
                None => (bytes, Ok(Content::Encoded)),
            },
            Some(Err(wrong)) => (Vec::new(), Err(wrong)),
            None => (Vec::new(), bad_record(reason::NO_IMAGE, "has no member that ends in .png, .jpg or .jpeg")),
        };
        Ok(Some(RawRecord { position, stored, label, content }))
    }
}

/// Cuts at the start of a sample before the segment would exceed the target.
pub(super) fn segments(
    store: &Store,
    index: usize,
    file: &InputFile,
    input: &Input,
    target: u64,
) -> Result<Vec<Segment>, SourceError> {
    let mut records = TarRecords { reads_contents: false, ..TarRecords::open(store, file, input, (0, u64::MAX))? };
    let length = length(input);
    let mut segments = Vec::new();
    let (mut start, mut count) = (0, 0);
    let mut cut = |start: u64, end: u64, records: u64| {
        let range = Range::Bytes { start, end, line: None };
        segments.push(Segment { file: index, range, weight: records * length, records: Some(records) });
    };
    while let Some(sample) = records.sample()? {
        if count > 0 && (count + 1) * length > target {
            cut(start, sample.header, count);
            (start, count) = (sample.header, 0);
        }
        count += 1;
    }
    let end = records.members.offset();
    if count > 0 {
        cut(start, end, count);
    }
    check_end(&mut records.members)?;
    let starts = segments.iter().filter_map(|segment| match segment.range {
        Range::Bytes { start, .. } => Some(start),
        Range::Rows { .. } => None,
    });
    store.keep_checkpoints_before(file, starts);
    Ok(segments)
}

/// Refuses data after the end of an archive: of concatenated tars, only the first would be read.
fn check_end(members: &mut Members) -> Result<(), SourceError> {
    let path = members.file.path.clone();
    loop {
        let at = members.offset();
        let cursor = members.cursor()?;
        let seen: io::Result<(usize, bool)> = cursor.fill().map(|bytes| (bytes.len(), bytes.iter().any(|b| *b != 0)));
        match seen.map_err(|e| SourceError::from_io(&path, e))? {
            (0, _) => return Ok(()),
            (_, true) => {
                return Err(members
                    .corrupt(format_args!("has something behind its end, at byte {at} or after; valid: one archive")));
            }
            (n, false) => cursor.consume(n),
        }
    }
}

/// Returns the offset of the sample with this index, counted from 0, in a range.
pub(super) fn offset_of(
    store: &Store,
    file: &InputFile,
    input: &Input,
    range: (u64, u64),
    record: u64,
) -> Result<u64, SourceError> {
    let mut records = TarRecords { reads_contents: false, ..TarRecords::open(store, file, input, range)? };
    for _ in 0..record {
        records.sample()?;
    }
    Ok(records.sample()?.map_or(range.1, |sample| sample.header))
}
