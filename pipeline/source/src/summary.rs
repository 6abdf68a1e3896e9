//! What reading a split gives beside its documents: counts, and checksums of its records.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

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
    /// bytes of its text (8 bytes, little-endian) and its text, of a bad record eight bytes 0xff. Of an image or of codes that the split
    /// takes the number of bytes as they are stored, these bytes, and the label (4 bytes), or eight bytes 0xff where the record is bad.
    pub sha256: Vec<String>,
}

/// The checksum of what a piece held. It is of the texts, not of the stored bytes: a record that is stored in another way (another key
/// beside the text, another level of compression) is the same record.
#[derive(Default)]
pub(crate) struct RecordsDigest(Sha256);

impl RecordsDigest {
    pub(crate) fn good(&mut self, length: u64) {
        self.0.update(length.to_le_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.0.update(text);
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn bad(&mut self) {
        self.0.update([0xff; 8]);
    }

    pub(crate) fn take(&mut self) -> String {
        hex::encode(self.0.finalize_reset())
    }
}
