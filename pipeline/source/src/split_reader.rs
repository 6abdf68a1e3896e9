//! Reads one split as batches of documents, which the consumer pulls.

use std::collections::HashSet;
use std::iter::FusedIterator;
use std::sync::Arc;

use arrow::array::RecordBatch;
use stillhouse_base::source_error::{SourceError, Stopped};
use stillhouse_input_files::{InputFile, Listing, Store};
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::{Range, SplitRecord};
use stillhouse_schemas::spec::Input;

use super::batch::BatchBuilder;
use super::carried_table::CarriedTable;
use super::formats::numbers::{self, NumbersReader};
use super::record_reader::{RecordKind, RecordReader};
use super::summary::{ReadSummary, RecordsDigest, TRAIN};

/// An iterator over the documents of a split, as `documents_schema` batches of at most 1024 rows and about 1 MB (at
/// most 4 MB, or one longer piece).
///
/// Each [`next`](Iterator::next) is one blocking call: it waits only for the input, reads up to the end of one batch
/// and returns it. Between two calls the reader holds no batch, only the texts of an unfinished one. Any thread may
/// call it, one at a time, but not a runtime's own worker thread ([`Store`]). If the split takes few of the records
/// that it reads, a call may read far to fill its batch.
///
/// `document_id` also counts bad records and records that the split does not take. Of several splits with the same
/// pieces, the one of `train` counts the bad records.
///
/// After an error or the end it returns `None`.
///
/// # Errors
/// When a file cannot be read, is corrupt, or has changed since it was listed; at the first bad record with `on_error:
/// fail`.
pub struct SplitReader {
    store: Store,
    listing: Listing,
    split: SplitRecord,
    /// Index of the current piece.
    piece: usize,
    documents: Option<ContentReader>,
    summary: ReadSummary,
}

/// The reader of a split, by the kind of its records.
enum ContentReader {
    Texts(Box<DocumentReader>),
    Numbers(Box<NumbersReader>),
}

impl SplitReader {
    /// Creates a reader of a split; it opens nothing before the first call for a batch. `listing` must be the one from
    /// which the split was planned.
    ///
    /// Cost: a lookup of the split's files in the listing.
    pub fn new(store: &Store, listing: &Listing, split: SplitRecord, input: Arc<Input>) -> Self {
        let store = store.expecting(split.pieces.iter().filter_map(|piece| listing.get(&piece.file)));
        let documents = match input.is_rows() {
            true => ContentReader::Numbers(Box::new(NumbersReader::new(store.clone(), input))),
            false => ContentReader::Texts(Box::new(DocumentReader {
                carried: (!input.carry.is_empty()).then(|| Arc::new(CarriedTable::new(input.is_mixture()))),
                is_mixture: input.is_mixture(),
                reader: RecordReader::new(store.clone(), input),
                ordinal: 0,
                document: None,
                batch_builder: BatchBuilder::new(),
                records: RecordsDigest::default(),
            })),
        };
        let (documents, summary) = (Some(documents), ReadSummary::default());
        Self { store, listing: listing.clone(), split, piece: 0, documents, summary }
    }

    /// The values of `input.carry` of the documents read so far; `None` in a job without it.
    pub fn carried(&self) -> Option<Arc<CarriedTable>> {
        match &self.documents {
            Some(ContentReader::Texts(texts)) => texts.carried.clone(),
            _ => None,
        }
    }

    /// Counts and checksums of what was read; complete after the reader has returned `None`.
    pub fn summary(&self) -> &ReadSummary {
        &self.summary
    }

    /// Returns the summary, as [`SplitReader::summary`].
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
                ContentReader::Texts(texts) => texts.next(split, file, piece.range, summary),
                ContentReader::Numbers(rows) => rows.next(split, file, &others, piece.range, summary),
            };
            if let Ok(Some(batch)) = read {
                return Ok(Some(batch));
            }
            // before the read error: if the file has changed, a bad record is not the cause
            self.store.check(file)?;
            read?;
            self.summary.sha256.push(match documents {
                ContentReader::Texts(texts) => texts.records.take(),
                ContentReader::Numbers(rows) => rows.records.take(),
            });
            self.piece += 1;
        }
        let last = match documents {
            ContentReader::Texts(texts) => texts.batch_builder.close()?,
            ContentReader::Numbers(rows) => rows.close()?,
        };
        match self.documents.take() {
            Some(ContentReader::Texts(texts)) => {
                let (skipped, spooled) = texts.reader.into_counts();
                self.summary.spooled_to_disk = spooled;
                if self.split.keys.is_none() || self.split.dataset_split == TRAIN {
                    self.summary.skipped = skipped;
                }
            }
            // a bad record of these has a key and is counted by the split that takes the key
            Some(ContentReader::Numbers(rows)) => self.summary.skipped = rows.skipped,
            None => {}
        }
        Ok(last)
    }

    /// Bytes of text in memory between two batches.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        match &self.documents {
            Some(ContentReader::Texts(d)) => d.batch_builder.bytes() + d.reader.held_bytes(),
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

/// Collects the documents that a split takes into batches.
struct DocumentReader {
    reader: RecordReader,
    /// Number of records so far.
    ordinal: u64,
    /// The document whose pieces are being returned.
    document: Option<DocumentId>,
    batch_builder: BatchBuilder,
    records: RecordsDigest,
    /// Receives the carried values of the documents, in a job with `input.carry`.
    carried: Option<Arc<CarriedTable>>,
    /// Whether the first carried value is the table of the document.
    is_mixture: bool,
}

impl DocumentReader {
    /// Returns the next full batch, or `None` at the end of the range.
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
            if self.batch_builder.is_full() {
                return self.batch_builder.close();
            }
            let Some(id) = self.document else {
                match self.reader.next()? {
                    None => return Ok(None),
                    Some(found) => self.handle_record(split, found, summary)?,
                }
                continue;
            };
            let (text, end) = self.reader.next_piece()?;
            self.records.add_text(text);
            if end {
                self.document = None;
            }
            if let Some(full) = self.batch_builder.push(id, text, end)? {
                return Ok(Some(full));
            }
        }
    }

    /// Processes a record to which the reader has advanced: takes it, skips it, or counts it as bad.
    fn handle_record(
        &mut self,
        split: &SplitRecord,
        found: RecordKind,
        summary: &mut ReadSummary,
    ) -> Result<(), SourceError> {
        self.ordinal += 1;
        if found == RecordKind::Bad {
            self.records.add_bad_record();
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
        self.records.add_length(length);
        let document = split.split.document(ordinal);
        if let Some(carried) = &self.carried {
            let values = self.reader.carried();
            self.records.add_carried(&values);
            if self.is_mixture
                && let Some(Some(table)) = values.first()
            {
                *summary.of_tables.entry(table.clone()).or_default() += 1;
            }
            carried.add(document, values).map_err(SourceError::temporary_file)?;
        }
        self.reader.rewind()?;
        self.document = Some(document);
        Ok(())
    }
}

/// Returns the current checksums of a split's pieces.
///
/// Cost: reads the split.
///
/// # Errors
/// As [`SplitReader`].
pub fn piece_checksums(
    store: &Store,
    files: &[InputFile],
    split: &SplitRecord,
    input: &Input,
) -> Result<Vec<String>, SourceError> {
    Ok(read_split(store, files, split, input, &mut |_| Ok(()))?.sha256)
}

/// Reads all of a split, as [`SplitReader`], and calls `emit` with each batch.
///
/// Cost: one lookup for every file of `files` in addition to reading. To read many splits, create one [`Listing`]
/// instead.
///
/// # Errors
/// As [`SplitReader`]; when `emit` returns `Stopped`.
pub(crate) fn read_split(
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

/// Calls `each` with the key of every document of a range.
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
        if found == RecordKind::Document {
            each(reader.key(seed)?);
        }
    }
    Ok(())
}
