//! One split read into batches of documents.

use std::collections::{BTreeMap, HashMap, HashSet};

use arrow::array::RecordBatch;
use sha2::{Digest, Sha256};
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::{Range, SplitRecord};
use stillhouse_schemas::spec::{Input, InputFormat, OnError, TextDocument};

use super::batch::Batches;
use super::decode::Cursor;
use super::error::{Place, SourceError, Stopped, reason};
use super::list::InputFile;
use super::records::{self, Fault};
use super::spool::{Key, Spool, cut};
use super::store::Store;
use super::{ipc, parquet_rows};
use crate::shard::hex;

/// The data set split of all that no holdout takes.
pub const TRAIN: &str = "train";

/// What a split held.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadSummary {
    /// Documents emitted.
    pub documents: u64,
    /// Bytes of text emitted.
    pub text_bytes: u64,
    /// Records skipped, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Documents that were too long for one piece and went through a temporary file.
    pub spooled_to_disk: u64,
    /// For each piece of the split, in order, the sha256 of its records, in hexadecimal: of a document that the split takes the number of
    /// bytes of its text (8 bytes, little-endian) and its text, of a bad record eight bytes 0xff.
    pub sha256: Vec<String>,
}

/// The checksum of what a piece held. It is of the texts, not of the stored bytes: a record that is stored in another way (another key
/// beside the text, another level of compression) is the same record.
#[derive(Default)]
struct RecordsDigest(Sha256);

impl RecordsDigest {
    fn good(&mut self, length: u64) {
        self.0.update(length.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.0.update(text);
    }

    fn bad(&mut self) {
        self.0.update([0xff; 8]);
    }

    fn take(&mut self) -> String {
        hex(&self.0.finalize_reset())
    }
}

/// The checksums of what a split would read now, piece by piece.
///
/// Cost: reads the split.
///
/// # Errors
/// As [`read_split`].
pub fn digests(
    store: &Store,
    files: &[InputFile],
    split: &SplitRecord,
    input: &Input,
) -> Result<Vec<String>, SourceError> {
    Ok(read_split(store, files, split, input, &mut |_| Ok(()))?.sha256)
}

/// Reads the records of one split, in order, and emits them as `documents_schema` batches of at most 1024 rows
/// and about 1 MB (4 MB, or one longer piece, at the most).
///
/// `files` must be the listing that the split was planned from. `document_id` counts bad records too, and those that the split
/// does not take. Of splits that share their pieces that of `train` counts the bad records.
///
/// # Errors
/// When a file cannot be read or is corrupt; at the first bad record with `on_error: fail`; when `emit` says that it is over.
pub fn read_split(
    store: &Store,
    files: &[InputFile],
    split: &SplitRecord,
    input: &Input,
    emit: &mut dyn FnMut(RecordBatch) -> Result<(), Stopped>,
) -> Result<ReadSummary, SourceError> {
    let by_path: HashMap<&str, &InputFile> = files.iter().map(|f| (f.path.as_str(), f)).collect();
    let of_split: HashSet<&str> = split.pieces.iter().map(|p| p.file.as_str()).collect();
    let store = &store.expecting(of_split.iter().filter_map(|path| by_path.get(path).copied()));
    let mut documents = Documents {
        split,
        ordinal: 0,
        batches: Batches::new(emit),
        summary: ReadSummary::default(),
        records: RecordsDigest::default(),
    };
    let mut reader = Reader::new(store, input, &mut documents);
    for piece in &split.pieces {
        let file =
            by_path.get(piece.file.as_str()).ok_or_else(|| SourceError::Unlisted { file: piece.file.clone() })?;
        let read = reader.range(file, piece.range);
        if !matches!(read, Err(SourceError::Stopped(_))) {
            // first: in a file that changes under the reader, a record that makes no sense is not what is wrong
            store.check(&file.location, false).map_err(|e| SourceError::of_store(&file.path, e))?;
        }
        read?;
        reader.sink.end_of_piece();
    }
    let (rolled, skipped) = (reader.spool.rolled, reader.skipped);
    documents.batches.flush()?;
    let mut summary = documents.summary;
    summary.spooled_to_disk = rolled;
    if split.keys.is_none() || split.dataset_split == TRAIN {
        summary.skipped = skipped;
    }
    Ok(summary)
}

/// Gives the key of every document of a range.
///
/// # Errors
/// As [`read_split`].
pub(crate) fn read_keys(
    store: &Store,
    file: &InputFile,
    range: Range,
    input: &Input,
    seed: u64,
    each: &mut dyn FnMut(u64),
) -> Result<(), SourceError> {
    Reader::new(store, input, &mut Keys { seed, each }).range(file, range)
}

/// Takes the records of a range one after another.
trait Sink {
    /// Goes to the next record, good or bad.
    fn next(&mut self) -> Result<(), SourceError>;

    /// A good record whose text is in the spool.
    fn spooled(&mut self, text: &mut Spool) -> Result<(), SourceError>;

    /// A good record whose text is in memory, to be handed on in pieces of this many bytes.
    fn whole(&mut self, text: &str, piece: usize) -> Result<(), SourceError>;

    /// The record is bad, and left out.
    fn bad(&mut self) {}

    /// All records of a piece of the split have been seen.
    fn end_of_piece(&mut self) {}
}

/// The documents that a split takes, into batches.
struct Documents<'a, 'b> {
    split: &'a SplitRecord,
    /// Records before the next one.
    ordinal: u64,
    batches: Batches<'a, 'b>,
    summary: ReadSummary,
    records: RecordsDigest,
}

impl Documents<'_, '_> {
    fn id(&self) -> Result<DocumentId, SourceError> {
        let ordinal = u32::try_from(self.ordinal - 1).map_err(|_| SourceError::Plan {
            field: "input.split_megabytes".into(),
            message: format!("split {} has more than 2^32 records; make splits smaller", self.split.split.0),
        })?;
        Ok(self.split.split.document(ordinal))
    }

    fn count(&mut self, bytes: u64) {
        self.summary.documents += 1;
        self.summary.text_bytes += bytes;
        self.records.good(bytes);
    }
}

impl Sink for Documents<'_, '_> {
    fn next(&mut self) -> Result<(), SourceError> {
        self.ordinal += 1;
        Ok(())
    }

    fn spooled(&mut self, text: &mut Spool) -> Result<(), SourceError> {
        if let Some(keys) = self.split.keys
            && !keys.holds(text.key(keys.seed).map_err(SourceError::spool)?)
        {
            return Ok(());
        }
        let id = self.id()?;
        self.count(text.length());
        let (batches, records) = (&mut self.batches, &mut self.records);
        text.pieces(SourceError::spool, &mut |text, end| {
            records.text(text);
            batches.push(id, text, end)
        })
    }

    fn whole(&mut self, text: &str, piece: usize) -> Result<(), SourceError> {
        if self.split.keys.is_some_and(|keys| !keys.holds(Key::new(keys.seed).with(text).get())) {
            return Ok(());
        }
        let id = self.id()?;
        self.count(text.len() as u64);
        self.records.text(text);
        let batches = &mut self.batches;
        cut(text, piece, &mut |text, end| batches.push(id, text, end))
    }

    fn bad(&mut self) {
        self.records.bad();
    }

    fn end_of_piece(&mut self) {
        self.summary.sha256.push(self.records.take());
    }
}

/// The keys of all documents.
struct Keys<'a> {
    seed: u64,
    each: &'a mut dyn FnMut(u64),
}

impl Sink for Keys<'_> {
    fn next(&mut self) -> Result<(), SourceError> {
        Ok(())
    }

    fn spooled(&mut self, text: &mut Spool) -> Result<(), SourceError> {
        (self.each)(text.key(self.seed).map_err(SourceError::spool)?);
        Ok(())
    }

    fn whole(&mut self, text: &str, _piece: usize) -> Result<(), SourceError> {
        (self.each)(Key::new(self.seed).with(text).get());
        Ok(())
    }
}

struct Reader<'a> {
    store: &'a Store,
    input: &'a Input,
    spool: Spool,
    skipped: BTreeMap<String, u64>,
    sink: &'a mut dyn Sink,
}

impl<'a> Reader<'a> {
    fn new(store: &'a Store, input: &'a Input, sink: &'a mut dyn Sink) -> Self {
        let spool = Spool::new(input.piece_kilobytes as usize * 1000);
        Self { store, input, spool, skipped: BTreeMap::new(), sink }
    }

    fn range(&mut self, file: &InputFile, range: Range) -> Result<(), SourceError> {
        match range {
            Range::Rows { start, end } => self.rows(file, (start, end)),
            Range::Bytes { start, end, line } => self.bytes(file, start, end, line),
        }
    }

    fn bad(
        &mut self,
        file: &InputFile,
        reason: &'static str,
        message: String,
        place: impl FnOnce() -> Result<Place, SourceError>,
    ) -> Result<(), SourceError> {
        if self.input.on_error == OnError::Fail {
            return Err(SourceError::Record { file: file.path.clone(), place: place()?, reason, message });
        }
        tracing::debug!(file = file.path, reason, message, "record skipped");
        *self.skipped.entry(reason.into()).or_default() += 1;
        self.sink.bad();
        Ok(())
    }

    fn bytes(&mut self, file: &InputFile, start: u64, end: u64, line: Option<u64>) -> Result<(), SourceError> {
        let (store, input) = (self.store, self.input);
        let whole = input.format() == InputFormat::Text && input.document == TextDocument::File;
        let (mut records, from) = records::open(store, file, input, start)?;
        let input_fault = |e| SourceError::from_io(&file.path, e);
        while let Some(at) = records.next().map_err(input_fault)? {
            if at.offset >= end && !whole {
                break;
            }
            self.sink.next()?;
            self.spool.clear().map_err(SourceError::spool)?;
            let outcome = records.read(&mut self.spool).map_err(|fault| match fault {
                Fault::Input(e) => SourceError::from_io(&file.path, e),
                Fault::Spool(e) => SourceError::spool(e),
            })?;
            if let Err(bad) = outcome {
                self.bad(file, bad.reason, bad.message, || {
                    let first = match line.or((from == 0).then_some(1)) {
                        Some(line) => line,
                        None => {
                            let newlines = Cursor::open(store, file, input, 0)?.count_newlines(from);
                            1 + newlines.map_err(|e| SourceError::from_io(&file.path, e))?
                        }
                    };
                    Ok(Place::Line(first + bad.newlines))
                })?;
                continue;
            }
            self.sink.spooled(&mut self.spool)?;
        }
        Ok(())
    }

    fn rows(&mut self, file: &InputFile, rows: (u64, u64)) -> Result<(), SourceError> {
        let (store, input) = (self.store, self.input);
        let each = &mut |row: u64, cell: parquet_rows::Cell<'_>| {
            self.sink.next()?;
            let place = || Ok(Place::Row(row));
            let Some(bytes) = cell else {
                let message = format!("the value of {:?} is null; valid: a string", input.text);
                return self.bad(file, reason::NULL, message, place);
            };
            let Ok(text) = std::str::from_utf8(bytes) else {
                let message = format!("the value of {:?} is not UTF-8; valid: text in UTF-8", input.text);
                return self.bad(file, reason::UTF8, message, place);
            };
            self.sink.whole(text, input.piece_kilobytes as usize * 1000)
        };
        match input.format() {
            InputFormat::Arrow => ipc::read_rows(store, file, &input.text, rows, each),
            _ => parquet_rows::read_rows(store, file, &input.text, rows, each),
        }
    }
}
