//! The list of duplicates of a job: a Parquet file with `document_id` (uint64, ascending), `first_document_id` (uint64) and
//! `kind` (utf8: `exact`, `minhash` or `parts`). In a job with `deduplicate.parts` also `part` (uint32, ascending in a document):
//! which part of the document is removed, or null if the document is dropped.

#![expect(clippy::disallowed_methods, reason = "callers run it through `blocking`, or as an operator")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, UInt32Type, UInt64Type};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::WriterProperties;
use parquet::file::statistics::Statistics;
use sha2::{Digest, Sha256};
use stillhouse_operators::deduplicate::NAME;
use stillhouse_operators::operator::{Duplicate, DuplicateKind, DuplicateList, OperatorError};
use stillhouse_schemas::ids::SplitId;

use crate::error::{ErrorKind, PipelineError, Result};

/// Duplicates that are encoded at once.
const BATCH: usize = 1 << 16;
/// Duplicates of a row group, which is read for each of its splits.
const GROUP: usize = 1 << 18;

fn schema(with_parts: bool) -> SchemaRef {
    let mut fields = vec![
        Field::new("document_id", DataType::UInt64, false),
        Field::new("first_document_id", DataType::UInt64, false),
        Field::new("kind", DataType::Utf8, false),
    ];
    if with_parts {
        fields.push(Field::new("part", DataType::UInt32, true));
    }
    Arc::new(Schema::new(fields))
}

fn failed<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> PipelineError {
    let path = path.display().to_string();
    move |e| PipelineError::new(ErrorKind::Output, format!("{path}: the list of duplicates: {e}"))
}

/// The checksum of the values of a list, which does not depend on how they are encoded.
#[derive(Default)]
struct Checksum(Sha256);

impl Checksum {
    fn add(&mut self, duplicate: Duplicate) {
        let Duplicate { document, first, kind, part } = duplicate;
        self.0.update(document.to_le_bytes());
        self.0.update(first.to_le_bytes());
        self.0.update(kind.name());
        if let Some(part) = part {
            self.0.update(part.to_le_bytes());
        }
    }

    fn finish(self) -> String {
        hex::encode(self.0.finalize())
    }
}

/// Writes a list.
pub(super) struct ListWriter {
    path: PathBuf,
    schema: SchemaRef,
    file: ArrowWriter<File>,
    batch: Vec<Duplicate>,
    checksum: Checksum,
}

impl ListWriter {
    pub(super) fn create(path: &Path, with_parts: bool) -> Result<Self> {
        let schema = schema(with_parts);
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_dictionary_enabled(false)
            .set_column_dictionary_enabled("kind".into(), true)
            .set_column_encoding("document_id".into(), Encoding::DELTA_BINARY_PACKED)
            .set_column_encoding("first_document_id".into(), Encoding::DELTA_BINARY_PACKED)
            .set_max_row_group_row_count(Some(GROUP))
            .build();
        let file = File::create(path).map_err(failed(path))?;
        let file = ArrowWriter::try_new(file, Arc::clone(&schema), Some(properties)).map_err(failed(path))?;
        Ok(Self { path: path.to_owned(), schema, file, batch: Vec::new(), checksum: Checksum::default() })
    }

    pub(super) fn push(&mut self, duplicate: Duplicate) -> Result<()> {
        self.checksum.add(duplicate);
        self.batch.push(duplicate);
        if self.batch.len() < BATCH { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> Result<()> {
        let all = std::mem::take(&mut self.batch);
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(UInt64Array::from_iter_values(all.iter().map(|duplicate| duplicate.document))),
            Arc::new(UInt64Array::from_iter_values(all.iter().map(|duplicate| duplicate.first))),
            Arc::new(StringArray::from_iter_values(all.iter().map(|duplicate| duplicate.kind.name()))),
        ];
        if self.schema.fields().len() > columns.len() {
            columns.push(Arc::new(UInt32Array::from_iter(all.iter().map(|duplicate| duplicate.part))));
        }
        let batch = RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(failed(&self.path))?;
        self.file.write(&batch).map_err(failed(&self.path))
    }

    /// Returns the SHA-256 of the values.
    pub(super) fn finish(mut self) -> Result<String> {
        self.flush()?;
        self.file.close().map_err(failed(&self.path))?;
        Ok(self.checksum.finish())
    }
}

/// A list on the disk of this machine. Reads the part of a split when it is asked for.
#[derive(Debug)]
pub(super) struct ListFile {
    path: PathBuf,
    metadata: ArrowReaderMetadata,
    /// The folder of a list that was fetched, which goes with it.
    _folder: Option<tempfile::TempDir>,
}

impl ListFile {
    /// Opens a list. `None` if its values have another SHA-256, or it is damaged. Reads all of it.
    pub(super) fn open(path: &Path, sha256: &str, folder: Option<tempfile::TempDir>) -> Option<Self> {
        let metadata = ArrowReaderMetadata::load(&File::open(path).ok()?, Default::default()).ok()?;
        let list = Self { path: path.to_owned(), metadata, _folder: folder };
        let (mut checksum, mut last, mut in_order) = (Checksum::default(), None, true);
        let all = (0..list.metadata.metadata().num_row_groups()).collect();
        let mut add = |duplicate: Duplicate| {
            let place = (duplicate.document, duplicate.part);
            in_order &= last.replace(place).is_none_or(|last| last < place);
            checksum.add(duplicate);
        };
        list.read(all, &mut add).ok()?;
        (in_order && checksum.finish() == sha256).then_some(list)
    }

    /// Passes the duplicates of row groups on.
    fn read(&self, groups: Vec<usize>, each: &mut impl FnMut(Duplicate)) -> Result<(), String> {
        let file = File::open(&self.path).map_err(|e| e.to_string())?;
        let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone());
        let reader = reader.with_row_groups(groups).with_batch_size(BATCH).build().map_err(|e| e.to_string())?;
        for batch in reader {
            let batch = batch.map_err(|e| e.to_string())?;
            let fields = batch.schema().fields().clone();
            if ![false, true].iter().any(|with_parts| fields == *schema(*with_parts).fields()) {
                return Err("has other columns".into());
            }
            let [documents, firsts] = [0, 1].map(|column| batch.column(column).as_primitive::<UInt64Type>());
            let kinds = batch.column(2).as_string::<i32>();
            let parts = batch.columns().get(3).map(|column| column.as_primitive::<UInt32Type>());
            for row in 0..batch.num_rows() {
                let kind = match kinds.value(row) {
                    "exact" => DuplicateKind::Exact,
                    "minhash" => DuplicateKind::MinHash,
                    "parts" => DuplicateKind::Parts,
                    other => return Err(format!("kind is {other:?}; valid: exact, minhash, parts")),
                };
                let part = parts.and_then(|parts| parts.is_valid(row).then(|| parts.value(row)));
                if part.is_some() != (kind == DuplicateKind::Parts) {
                    return Err(format!("part is {part:?} where kind is {}", kind.name()));
                }
                each(Duplicate { document: documents.value(row), first: firsts.value(row), kind, part });
            }
        }
        Ok(())
    }

    /// Row groups that may have documents of a split.
    fn groups_of(&self, split: SplitId) -> Vec<usize> {
        let (first, last) = (split.document(0).0, split.document(u32::MAX).0);
        let overlaps = |statistics: &Statistics| match statistics {
            Statistics::Int64(values) => values
                .min_opt()
                .zip(values.max_opt())
                .is_none_or(|(&least, &most)| least as u64 <= last && most as u64 >= first),
            _ => true,
        };
        let groups = self.metadata.metadata().row_groups().iter().enumerate();
        groups
            .filter(|(_, group)| group.column(0).statistics().is_none_or(overlaps))
            .map(|(number, _)| number)
            .collect()
    }
}

impl DuplicateList for ListFile {
    fn of_split(&self, split: SplitId) -> Result<Vec<Duplicate>, OperatorError> {
        let mut found = Vec::new();
        let mut add = |duplicate: Duplicate| {
            if stillhouse_schemas::ids::DocumentId(duplicate.document).parts().0 == split {
                found.push(duplicate);
            }
        };
        self.read(self.groups_of(split), &mut add).map_err(|e| OperatorError::Config {
            operator: NAME,
            message: format!("{}: the list of duplicates: {e}; run again", self.path.display()),
        })?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn duplicates() -> Vec<Duplicate> {
        let of = |split: u32, ordinal: u32| Duplicate {
            document: SplitId(split).document(ordinal).0,
            first: SplitId(0).document(ordinal / 2).0,
            kind: if ordinal.is_multiple_of(3) { DuplicateKind::Exact } else { DuplicateKind::MinHash },
            part: None,
        };
        let split = |split| (0..200_000).step_by(1 + split as usize).map(move |ordinal| of(split, ordinal));
        [0, 1, 5].into_iter().flat_map(split).collect()
    }

    fn written(path: &Path, duplicates: &[Duplicate]) -> String {
        let with_parts = duplicates.iter().any(|duplicate| duplicate.part.is_some());
        let mut list = ListWriter::create(path, with_parts).unwrap();
        duplicates.iter().for_each(|duplicate| list.push(*duplicate).unwrap());
        list.finish().unwrap()
    }

    #[test]
    fn a_split_reads_its_part_and_no_more_row_groups_than_that() {
        let folder = tempfile::tempdir().unwrap();
        let (path, all) = (folder.path().join("list.parquet"), duplicates());
        let sha256 = written(&path, &all);
        let list = ListFile::open(&path, &sha256, None).unwrap();
        for split in [0, 1, 2, 5, 9].map(SplitId) {
            let range = split.document(0).0..=split.document(u32::MAX).0;
            let own: Vec<_> = all.iter().filter(|duplicate| range.contains(&duplicate.document)).copied().collect();
            assert_eq!(list.of_split(split).unwrap(), own, "{split:?}");
        }
        assert_eq!(list.metadata.metadata().num_row_groups(), 2);
        assert_eq!((list.groups_of(SplitId(0)), list.groups_of(SplitId(5))), (vec![0], vec![1]));
        assert!(list.groups_of(SplitId(9)).is_empty());
    }

    #[test]
    fn parts_are_listed_beside_documents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list.parquet");
        let of = |ordinal: u32, part: Option<u32>| Duplicate {
            document: SplitId(2).document(ordinal).0,
            first: SplitId(0).document(1).0,
            kind: if part.is_some() { DuplicateKind::Parts } else { DuplicateKind::Exact },
            part,
        };
        let all = [of(0, None), of(3, Some(0)), of(3, Some(7)), of(4, Some(1)), of(9, None)];
        let sha256 = written(&path, &all);
        assert_eq!(ListFile::open(&path, &sha256, None).unwrap().of_split(SplitId(2)).unwrap(), all);
        let unsorted = written(&path, &[all[0], all[2], all[1]]);
        assert!(ListFile::open(&path, &unsorted, None).is_none());
        assert_ne!(sha256, written(&path, &[all[0], all[1], of(3, Some(8)), all[3], all[4]]));
    }

    #[test]
    fn an_empty_list_is_a_list() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list.parquet");
        let sha256 = written(&path, &[]);
        assert!(ListFile::open(&path, &sha256, None).unwrap().of_split(SplitId(0)).unwrap().is_empty());
    }

    #[test]
    fn another_list_or_a_damaged_one_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (path, few) = (folder.path().join("list.parquet"), &duplicates()[..50]);
        let sha256 = written(&path, few);
        let other = written(&folder.path().join("other.parquet"), &few[..49]);
        assert!(ListFile::open(&path, &other, None).is_none());
        assert!(ListFile::open(&folder.path().join("none"), &sha256, None).is_none());
        let whole = std::fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(7) {
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(ListFile::open(&path, &sha256, None).is_none(), "cut at {at}");
        }
        std::fs::write(&path, &whole).unwrap();
        assert!(ListFile::open(&path, &sha256, None).is_some());
    }
}
