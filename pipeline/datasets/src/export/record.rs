//! The record that a format export writes (`export.json`), and the check that a destination is usable.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_output::{MANIFEST, Output};

use super::convert::Conversion;
use super::formats::LeftOut;
use super::sparse::Signal;
use super::{MARKER_FILE, Marker};

/// Name of the file that records the source and settings of a format export.
pub(super) const RECORD: &str = "export.json";

/// Content of `export.json`. A repeated export recognizes its own earlier output by it.
#[derive(Serialize, Deserialize)]
pub(super) struct Record {
    pub conversion: Conversion,
    pub signal: Signal,
    pub entries: usize,
    pub source: Value,
    pub left_out: LeftOut,
    pub files: BTreeMap<String, FileRecord>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct FileRecord {
    pub bytes: u64,
    pub sha256: String,
}

/// Accepts a destination that is empty or holds this export or a part of it.
pub(super) async fn check_destination(destination: &Output, identity: &str) -> Result<()> {
    let refuse = |what: &str| {
        let message = format!("{destination}: holds {what}; choose another place, or remove it first");
        Err(PipelineError::new(ErrorKind::Usage, message))
    };
    if let Some(mark) = destination.get_json::<Marker>(MARKER_FILE).await? {
        return match mark.manifest_sha256 == identity {
            true => Ok(()),
            false => refuse("another unfinished export"),
        };
    }
    if let Some(record) = destination.get_json::<Record>(RECORD).await? {
        return match record.source.get("export_sha256").and_then(Value::as_str) == Some(identity) {
            true => Ok(()),
            false => refuse("another export"),
        };
    }
    if destination.exists(MANIFEST).await? {
        return refuse("a data set");
    }
    if destination.is_of_a_job().await? {
        return refuse("the unfinished data set of a job");
    }
    if destination.is_nothing().await? { Ok(()) } else { refuse("files that are not of this export") }
}
