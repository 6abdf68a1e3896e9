//! Tests of the input readers: they read a folder of files with a job's input and compare all documents, for any size
//! of split.

mod ahead;
mod bench;
mod by_hand;
mod carried;
mod changes;
mod cifar;
mod classes;
mod columnar;
mod content;
mod errors;
mod holdouts;
mod json_both;
mod large;
mod nested_fields;
mod numbers;
mod odd_files;
mod plans;
mod pull;
mod rows;
mod warc;

use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::UInt64Type;
use object_store::ObjectStore;
use serde_json::{Value, json};
use stillhouse_base::source_error::{SourceError, Stopped};
use stillhouse_base::storage::{Opened, StoreUrl};
use stillhouse_input_files::{self as input_files, InputFile, ListError, Listing, Store};
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_schemas::spec::Input;
use tokio::runtime::Handle;

use super::split_reader::read_split;
use super::*;
use crate as source;
pub(crate) use bench::*;

/// Creates a store with the one bucket `s3://corpora`.
pub(super) fn with_corpora(handle: &Handle, bucket: Arc<dyn ObjectStore>) -> Store {
    let opened = Opened { store: bucket, multipart: None, uploads: None, statistics: Arc::default() };
    let url = StoreUrl::parse("s3://corpora/").unwrap().unwrap();
    Store::with_buckets(handle.clone(), [(url, opened)])
}

impl Bench {
    /// Checks that every size of split gives the same documents, and that the plan has consecutive splits.
    pub fn assert_documents(&self, input: &Input, expected: &[impl AsRef<str>]) {
        let expected: Vec<&str> = expected.iter().map(AsRef::as_ref).collect();
        for target in [1, 2, 3, 5, 8, 13, 40, 97, 1000, 1 << 20, u64::MAX] {
            let splits = self.plan(input, target).unwrap();
            assert!(splits.iter().enumerate().all(|(i, s)| s.split.0 as usize == i));
            let got = self.all(input, target);
            assert_eq!(got.documents, expected, "target {target}: {splits:?}");
        }
    }
}
