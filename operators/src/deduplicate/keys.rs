//! The keys by which documents are compared.

use arrow::array::RecordBatch;
use rayon::prelude::*;
use stillhouse_dedup::{ExactKeys, MinHash, MinHashConfig};
use stillhouse_schemas::problems::Problem;

use super::section::option_problem;
use super::{DeduplicateConfig, NAME};
use crate::document_pieces::{WholeDocument, WholeDocuments, document_pieces};
use crate::operator::OperatorError;

/// The keys of a document. Documents that share one are duplicates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeysOfDocument {
    /// The document.
    pub id: u64,
    /// Key of its text, if `exact` is on.
    pub exact: Option<u128>,
    /// Keys of the bands of its MinHash signature; empty without `minhash`, and for a document with too few words.
    pub bands: Vec<u128>,
    /// Keys of its parts, in order, but of those that are too short; empty without `parts`.
    pub parts: Vec<u128>,
}

/// Makes the keys of the documents of a split, on all cores and in order. A document that is too large for the operator has
/// none.
///
/// Memory: one batch of documents and one open document.
pub struct DocumentKeys {
    exact: Option<ExactKeys>,
    minhash: Option<MinHash>,
    parts: Option<ExactKeys>,
    documents: WholeDocuments,
}

impl DocumentKeys {
    /// Checks the options and draws the permutations of MinHash.
    ///
    /// # Errors
    /// Fails if an option is not valid.
    pub fn new(config: &DeduplicateConfig) -> Result<Self, OperatorError> {
        let invalid =
            |e: stillhouse_dedup::OptionError| OperatorError::Config { operator: NAME, message: e.to_string() };
        Ok(Self {
            exact: config.exact.as_ref().map(|exact| ExactKeys::new(&exact.config())).transpose().map_err(invalid)?,
            minhash: config.minhash.as_ref().map(MinHash::new).transpose().map_err(invalid)?,
            parts: config.parts.as_ref().map(|parts| ExactKeys::new(&parts.config())).transpose().map_err(invalid)?,
            documents: WholeDocuments::new(NAME, config.max_document_bytes),
        })
    }

    /// Checks the options of MinHash.
    pub(super) fn check(minhash: Option<&MinHashConfig>) -> Result<(), Problem> {
        minhash.map(MinHash::new).transpose().map(drop).map_err(|e| option_problem(&e))
    }

    /// Returns the keys of the documents that end in a batch of document pieces.
    ///
    /// # Errors
    /// Fails if the batch has not the schema of documents, or misses the end of one.
    pub fn add(&mut self, batch: &RecordBatch) -> Result<Vec<KeysOfDocument>, OperatorError> {
        let mut documents = Vec::with_capacity(batch.num_rows());
        for piece in document_pieces(batch, NAME)? {
            documents.extend(self.documents.add(piece)?);
        }
        Ok(documents.par_iter().map(|document| self.keys(document)).collect())
    }

    /// Checks that the split has ended with a whole document.
    ///
    /// # Errors
    /// Fails if a document is open.
    pub fn finish(&self) -> Result<(), OperatorError> {
        self.documents.finish()
    }

    fn keys(&self, document: &WholeDocument<'_>) -> KeysOfDocument {
        if document.is_too_large {
            return KeysOfDocument { id: document.id, exact: None, bands: Vec::new(), parts: Vec::new() };
        }
        let exact = self.exact.as_ref().and_then(|exact| exact.keys(&document.text).next());
        let signature = self.minhash.as_ref().and_then(|minhash| Some((minhash, minhash.signature(&document.text)?)));
        KeysOfDocument {
            id: document.id,
            exact: exact.map(|(_, key)| key),
            parts: self.parts.iter().flat_map(|parts| parts.keys(&document.text)).map(|(_, key)| key).collect(),
            bands: signature.map(|(minhash, values)| minhash.band_keys(&values).collect()).unwrap_or_default(),
        }
    }
}
