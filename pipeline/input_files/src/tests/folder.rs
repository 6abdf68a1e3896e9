//! A folder of input files and a store that reads it. The tests of the readers above this crate use it too.

use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};
use stillhouse_schemas::spec::Input;

use super::input_files::Store;

/// A folder of input files and a store that reads it.
pub(crate) struct Bench {
    pub dir: tempfile::TempDir,
    pub store: Store,
    pub _runtime: tokio::runtime::Runtime,
}

pub(crate) fn input(fields: Value) -> Input {
    let mut all = json!({"format": "jsonl", "paths": ["*"], "piece_kilobytes": 4});
    all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    serde_json::from_value(all).unwrap()
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

pub(crate) fn zstandard(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

impl Bench {
    pub fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let store = Store::local(runtime.handle().clone());
        Self { dir: tempfile::tempdir().unwrap(), store, _runtime: runtime }
    }

    pub fn with(files: &[(&str, &[u8])]) -> Self {
        let bench = Self::new();
        for (name, bytes) in files {
            bench.put(name, bytes);
        }
        bench
    }

    pub fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}
