//! Lists, plans and reads a folder of input files. Shared with the tests of `stillhouse-query`; the parent module imports
//! the crates as `source` and `input_files`.

#[path = "../../../input_files/src/tests/folder.rs"]
mod folder;

use std::path::Path;
use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::UInt64Type;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use stillhouse_base::path_expansion::PathExpander;
use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_schemas::spec::Input;

use stillhouse_input_files::{InputFile, InputPaths, ListError, Listing, Store, list_files};

pub(crate) use folder::{Bench, gzip, input, zstandard};

use super::input_files;
use super::source::{ReadSummary, SplitReader, file_endings, plan_splits};

/// Documents with their ids, and the summary over all splits.
#[derive(Debug, PartialEq)]
pub(crate) struct Got {
    pub documents: Vec<String>,
    pub ids: Vec<DocumentId>,
    pub summary: ReadSummary,
    pub longest_piece: usize,
}

/// Lists the files of an input; relative paths start at `base_dir`.
pub(crate) fn list(store: &Store, base_dir: &Path, input: &Input) -> Result<Vec<InputFile>, ListError> {
    let names = PathExpander::from_environment();
    let paths = InputPaths { input, field: "input", base_dir, names: &names, endings: file_endings(input) };
    list_files(store, paths, &|_| Ok(()), &mut |_| {})
}

impl Bench {
    pub fn try_files(&self, input: &Input) -> Result<Vec<InputFile>, ListError> {
        list(&self.store, self.path(), input)
    }

    pub fn files(&self, input: &Input) -> Vec<InputFile> {
        self.try_files(input).unwrap()
    }

    pub fn plan(&self, input: &Input, target: u64) -> Result<Vec<SplitRecord>, SourceError> {
        plan_splits(&self.store, &self.files(input), input, target, 0, &|_| {}).map(|weighed| weighed.splits)
    }

    pub fn read(&self, files: &[InputFile], input: &Input, splits: &[SplitRecord]) -> Result<Got, SourceError> {
        let mut got = Got { documents: vec![], ids: vec![], summary: ReadSummary::default(), longest_piece: 0 };
        let (listing, input) = (Listing::new(Arc::new(files.to_vec())), Arc::new(input.clone()));
        for split in splits {
            let mut partial = String::new();
            let mut reader = SplitReader::new(&self.store, &listing, split.clone(), Arc::clone(&input));
            for batch in &mut reader {
                let batch = batch?;
                assert_eq!(batch.schema(), stillhouse_operators::operator::documents_schema());
                assert!((1..=1024).contains(&batch.num_rows()));
                let bytes: usize = batch.column(1).as_string::<i32>().iter().flatten().map(str::len).sum();
                assert!(bytes <= 4 << 20 || batch.num_rows() == 1, "{bytes}");
                let ids = batch.column(0).as_primitive::<UInt64Type>();
                for row in 0..batch.num_rows() {
                    let text = batch.column(1).as_string::<i32>().value(row);
                    got.longest_piece = got.longest_piece.max(text.len());
                    partial.push_str(text);
                    if batch.column(2).as_boolean().value(row) {
                        got.documents.push(std::mem::take(&mut partial));
                        got.ids.push(DocumentId(ids.value(row)));
                    }
                }
            }
            let summary = reader.into_summary();
            assert_eq!(partial, "", "a document without an end");
            got.summary.documents += summary.documents;
            got.summary.text_bytes += summary.text_bytes;
            got.summary.spooled_to_disk += summary.spooled_to_disk;
            for (reason, n) in summary.skipped {
                *got.summary.skipped.entry(reason).or_default() += n;
            }
        }
        assert_eq!(got.summary.documents, got.documents.len() as u64);
        assert!(got.ids.windows(2).all(|w| w[0] < w[1]));
        Ok(got)
    }

    pub fn try_all(&self, input: &Input, target: u64) -> Result<Got, SourceError> {
        self.read(&self.files(input), input, &self.plan(input, target)?)
    }

    pub fn all(&self, input: &Input, target: u64) -> Got {
        self.try_all(input, target).unwrap()
    }
}

pub(crate) fn parquet_bytes(batch: &RecordBatch, group: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(group)).build();
    let mut writer = ArrowWriter::try_new(&mut out, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    out
}
