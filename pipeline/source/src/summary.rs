//! Counts and checksums of reading a split.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

/// The data set split of all documents that no holdout takes.
pub const TRAIN: &str = "train";

/// Counts and checksums of a split.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadSummary {
    /// Documents emitted.
    pub documents: u64,
    /// Documents emitted of each table, in a mixture.
    pub of_tables: BTreeMap<String, u64>,
    /// Bytes of text emitted.
    pub text_bytes: u64,
    /// Number of records skipped, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Number of documents that were too long for one piece and went through a temporary file.
    pub spooled_to_disk: u64,
    /// SHA-256 in hexadecimal of the records of each piece of the split, in order. It covers:
    ///
    /// - for a document that the split takes: the number of bytes of its text (8 bytes, little-endian) and its text;
    /// - in a job with `input.carry`, after this number: for each name, the number of bytes of its value and the value, or
    ///   eight bytes 0xff for null;
    /// - for a bad record: eight bytes 0xff;
    /// - for an image or codes that the split takes: the number of stored bytes, these bytes, and the label (4 bytes),
    ///   or eight bytes
    ///   0xff if the record is bad.
    pub sha256: Vec<String>,
}

/// The checksum of the records of a piece. It covers the texts, not the stored bytes: a record that is stored
/// differently (another key beside the text, another compression level) has the same checksum.
#[derive(Default)]
pub(crate) struct RecordsDigest(Sha256);

impl RecordsDigest {
    pub(crate) fn add_length(&mut self, length: u64) {
        self.0.update(length.to_le_bytes());
    }

    pub(crate) fn add_carried(&mut self, values: &[Option<String>]) {
        for value in values {
            match value {
                Some(value) => {
                    self.add_length(value.len() as u64);
                    self.add_text(value);
                }
                None => self.0.update([0xff; 8]),
            }
        }
    }

    pub(crate) fn add_text(&mut self, text: &str) {
        self.0.update(text);
    }

    pub(crate) fn add_bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn add_bad_record(&mut self) {
        self.0.update([0xff; 8]);
    }

    pub(crate) fn take(&mut self) -> String {
        hex::encode(self.0.finalize_reset())
    }
}
