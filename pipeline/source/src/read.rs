//! One split read into batches of documents, which the consumer pulls.

use std::collections::HashSet;
use std::iter::FusedIterator;
use std::sync::Arc;

use arrow::array::RecordBatch;
use stillhouse_base::source_error::{SourceError, Stopped};
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::{Range, SplitRecord};
use stillhouse_schemas::spec::Input;

use super::batch::Batches;
use super::formats::numbers::{self, Numbers};
use super::input_file::{InputFile, Listing};
use super::range::{Found, RecordReader};
use super::store::Store;
use super::summary::{ReadSummary, RecordsDigest, TRAIN};

/// The documents of a split, batch by batch, as `documents_schema` batches of at most 1024 rows and about 1 MB (4 MB, or one
/// longer piece, at the most).
///
/// Every [`next`](Iterator::next) is one blocking call that ends by itself: it waits for the input and for nothing else, reads up to the
/// end of one batch and gives it. Between two calls no batch is held, only the texts of the one that is not full yet. It may be called
/// from any thread, one at a time; not from a runtime's own worker thread ([`Store`]). Where the split takes few of the records that it
/// reads, a call may read far to fill its batch.
///
/// `document_id` counts bad records too, and those that the split does not take. Of splits that share their pieces that of `train`
/// counts the bad records.
///
/// After an error and after the end it gives nothing more.
///
/// # Errors
/// When a file cannot be read or is corrupt, or is not what it was when it was listed; at the first bad record with `on_error: fail`.
pub struct SplitReader {
    store: Store,
    listing: Listing,
    split: SplitRecord,
    /// The piece that is being read.
    piece: usize,
    documents: Option<Reading>,
    summary: ReadSummary,
}

/// What a split is read into.
enum Reading {
    Texts(Box<Documents>),
    Numbers(Box<Numbers>),
}

impl SplitReader {
    /// A reader of a split; nothing is opened before the first batch is asked for. `listing` must be the one that the split was planned from.
    ///
    /// Cost: a search for the files of the split in the listing.
    pub fn new(store: &Store, listing: &Listing, split: SplitRecord, input: Arc<Input>) -> Self {
        let store = store.expecting(split.pieces.iter().filter_map(|piece| listing.get(&piece.file)));
        let documents = match input.is_rows() {
            true => Reading::Numbers(Box::new(Numbers::new(store.clone(), input))),
            false => Reading::Texts(Box::new(Documents {
                reader: RecordReader::new(store.clone(), input),
                ordinal: 0,
                document: None,
                batches: Batches::new(),
                records: RecordsDigest::default(),
            })),
        };
        let (documents, summary) = (Some(documents), ReadSummary::default());
        Self { store, listing: listing.clone(), split, piece: 0, documents, summary }
    }

    /// What was read: whole once the reader has given its last batch and then none.
    pub fn summary(&self) -> &ReadSummary {
        &self.summary
    }

    /// What was read, as [`SplitReader::summary`].
    pub fn into_summary(self) -> ReadSummary {
        self.summary
    }

    fn batch(&mut self) -> Result<Option<RecordBatch>, SourceError> {
        let Some(documents) = &mut self.documents else { return Ok(None) };
        while let Some(piece) = self.split.pieces.get(self.piece) {
            let file =
                self.listing.get(&piece.file).ok_or_else(|| SourceError::Unlisted { file: piece.file.clone() })?;
            let (split, summary) = (&self.split, &mut self.summary);
            let others = |path: &str| self.listing.get(path).cloned();
            let read = match documents {
                Reading::Texts(texts) => texts.next(split, file, piece.range, summary),
                Reading::Numbers(rows) => rows.next(split, file, &others, piece.range, summary),
            };
            if let Ok(Some(batch)) = read {
                return Ok(Some(batch));
            }
            // first: in a file that changes under the reader, a record that makes no sense is not what is wrong
            self.store.check(&file.location, false).map_err(|e| SourceError::from_store(&file.path, e))?;
            read?;
            self.summary.sha256.push(match documents {
                Reading::Texts(texts) => texts.records.take(),
                Reading::Numbers(rows) => rows.records.take(),
            });
            self.piece += 1;
        }
        let last = match documents {
            Reading::Texts(texts) => texts.batches.close()?,
            Reading::Numbers(rows) => rows.close()?,
        };
        match self.documents.take() {
            Some(Reading::Texts(texts)) => {
                let (skipped, spooled) = texts.reader.into_counts();
                self.summary.spooled_to_disk = spooled;
                if self.split.keys.is_none() || self.split.dataset_split == TRAIN {
                    self.summary.skipped = skipped;
                }
            }
            // a bad record of these has a key, and is of the split that takes it
            Some(Reading::Numbers(rows)) => self.summary.skipped = rows.skipped,
            None => {}
        }
        Ok(last)
    }

    /// Bytes of text that are in memory between two batches.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        match &self.documents {
            Some(Reading::Texts(d)) => d.batches.bytes() + d.reader.held_bytes(),
            _ => 0,
        }
    }
}

impl Iterator for SplitReader {
    type Item = Result<RecordBatch, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batch();
        if batch.is_err() {
            self.documents = None;
        }
        batch.transpose()
    }
}

impl FusedIterator for SplitReader {}

/// The documents that a split takes, into batches.
struct Documents {
    reader: RecordReader,
    /// Records so far.
    ordinal: u64,
    /// The document that is being handed on.
    document: Option<DocumentId>,
    batches: Batches,
    records: RecordsDigest,
}

impl Documents {
    /// The next batch that is full; none at the end of the range.
    fn next(
        &mut self,
        split: &SplitRecord,
        file: &InputFile,
        range: Range,
        summary: &mut ReadSummary,
    ) -> Result<Option<RecordBatch>, SourceError> {
        if !self.reader.is_open() {
            self.reader.open(file, range)?;
        }
        loop {
            if self.batches.is_full() {
                return self.batches.close();
            }
            let Some(id) = self.document else {
                match self.reader.next()? {
                    None => return Ok(None),
                    Some(found) => self.take(split, found, summary)?,
                }
                continue;
            };
            let (text, end) = self.reader.next_piece()?;
            self.records.text(text);
            if end {
                self.document = None;
            }
            if let Some(full) = self.batches.push(id, text, end)? {
                return Ok(Some(full));
            }
        }
    }

    /// A record that the reader has gone to.
    fn take(&mut self, split: &SplitRecord, found: Found, summary: &mut ReadSummary) -> Result<(), SourceError> {
        self.ordinal += 1;
        if found == Found::Bad {
            self.records.bad();
            return Ok(());
        }
        if let Some(keys) = split.keys
            && !keys.contains(self.reader.key(keys.seed)?)
        {
            return Ok(());
        }
        let ordinal = u32::try_from(self.ordinal - 1).map_err(|_| SourceError::Plan {
            field: "input.split_megabytes".into(),
            message: format!("split {} has more than 2^32 records; make splits smaller", split.split.0),
        })?;
        let length = self.reader.length();
        summary.documents += 1;
        summary.text_bytes += length;
        self.records.good(length);
        self.reader.rewind()?;
        self.document = Some(split.split.document(ordinal));
        Ok(())
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

/// Reads all of a split, as [`SplitReader`], and hands each batch on.
///
/// Cost: a look at every file of `files` beside the reading; who reads many splits makes one [`Listing`].
///
/// # Errors
/// As [`SplitReader`]; when `emit` says that it is over.
pub fn read_split(
    store: &Store,
    files: &[InputFile],
    split: &SplitRecord,
    input: &Input,
    emit: &mut dyn FnMut(RecordBatch) -> Result<(), Stopped>,
) -> Result<ReadSummary, SourceError> {
    let named: HashSet<&str> = split.pieces.iter().map(|piece| piece.file.as_str()).collect();
    let is_of = |file: &&InputFile| named.contains(file.path.as_str()) || numbers::holds_labels(&file.path, input);
    let of_split = files.iter().filter(is_of).cloned().collect();
    let listing = Listing::new(Arc::new(of_split));
    let mut reader = SplitReader::new(store, &listing, split.clone(), Arc::new(input.clone()));
    for batch in &mut reader {
        emit(batch?)?;
    }
    Ok(reader.into_summary())
}

/// Gives the key of every document of a range.
///
/// # Errors
/// As [`SplitReader`].
pub(crate) fn read_keys(
    store: &Store,
    files: &[InputFile],
    file: &InputFile,
    range: Range,
    input: &Input,
    seed: u64,
    each: &mut dyn FnMut(u64),
) -> Result<(), SourceError> {
    if input.is_rows() {
        let others = |path: &str| files.iter().find(|file| file.path == path).cloned();
        return numbers::read_keys(store, file, &others, range, input, seed, each);
    }
    let mut reader = RecordReader::new(store.clone(), Arc::new(input.clone()));
    reader.open(file, range)?;
    while let Some(found) = reader.next()? {
        if found == Found::Document {
            each(reader.key(seed)?);
        }
    }
    Ok(())
}
