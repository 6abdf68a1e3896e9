//! Finds duplicate documents, paragraphs and lines, near-duplicates, and text of benchmarks, with the results of datatrove
//! 0.10.1.
//!
//! ```
//! use std::collections::HashMap;
//!
//! use stillhouse_dedup::{Clusters, MinHash, MinHashConfig};
//!
//! let texts = [
//!     "The committee will meet on 3 May at noon in the large hall of the town.",
//!     "A completely different text, which has nothing to do with the others.",
//!     "The Committee will meet on 17 May, at noon, in the large hall of the town (sic).",
//! ];
//! let minhash = MinHash::new(&MinHashConfig { ngram_words: 3, ..MinHashConfig::default() })?;
//! let (mut first_with, mut clusters) = (HashMap::new(), Clusters::new(texts.len() as u64)?);
//! for (document, text) in (0u64..).zip(&texts) {
//!     let Some(signature) = minhash.signature(text) else { continue };
//!     for key in minhash.band_keys(&signature) {
//!         clusters.union(*first_with.entry(key).or_insert(document), document)?;
//!     }
//! }
//! let clusters = clusters.finish()?;
//! assert_eq!([0, 1, 2].map(|document| clusters.is_first(document)), [true, true, false]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```text
//!            ┌─► MinHash ─► signature ─► band_keys ─┐
//!   text ────┤                                      ├─► equal keys ─► pairs ─► Clusters ─► the first document
//!            ├─► ExactKeys ─► keys ─────────────────┤   (caller)                           of each cluster stays
//!            │                                      └─► repeated parts ─► ExactKeys::without ─► text
//!            └─► ContaminationIndex ─► find ─► the benchmark and its n-gram
//! ```
//!
//! | type | datatrove |
//! |---|---|
//! | [`MinHash`] | `MinhashDedupSignature`, `MinhashDedupBuckets` |
//! | [`Clusters`] | `MinhashDedupCluster` |
//! | [`ExactKeys`] | `ExactDedupSignature`, `SentenceDedupSignature` |
//! | [`ContaminationIndex`] | `NGramsDecontIndexer`, `NGramsDecontFilter` |
//! | [`Normalization`] | `TextNormConfig`, `simplify_text` |
//!
//! The crate reads and writes no files. The caller compares keys, in memory or by sorting them. Results depend on texts and
//! options alone, not on the machine or the order of calls. Words and sentences are those of English text, see
//! [`stillhouse_filters::words`].
//!
//! Differences from datatrove:
//! - [`Clusters`] keeps the first document of a cluster. datatrove keeps the root of its union-find. As many documents stay.
//! - With a hash function of 32 bits, datatrove's bucket step stops at the first signature of a band that begins with
//!   2³² − 1. It is compared as all others are.
//! - datatrove's keys of documents and sentences have 64 bits, and those of bands are the values themselves. All keys have
//!   128 bits here.
//! - datatrove's `SentenceDedupFilter` drops documents that have become short. [`ExactKeys::without`] only removes parts. It
//!   keeps what separates the parts that remain.
//! - datatrove identifies n-grams of benchmarks by 64 bits, and names a benchmark by its file, with `_` instead of spaces.
//!   Benchmarks whose names differ only in this overwrite each other. Here 96 bits identify an n-gram, and names remain.
//! - datatrove removes the word `IS_ALPHA` if spaCy has met it before; see [`stillhouse_filters`].

mod clusters;
mod contamination;
mod error;
mod exact;
mod minhash;
mod mt19937;
mod ngrams;
mod normalization;
#[cfg(test)]
mod tests;
mod unicode;
mod unicode_tables;

pub use clusters::{ClusterError, Clusters, FinishedClusters};
pub use contamination::{ContaminationConfig, ContaminationIndex, ContaminationIndexBuilder, Hit};
pub use error::OptionError;
pub use exact::{ExactConfig, ExactKeys, Unit};
pub use minhash::{MinHash, MinHashConfig, NgramHash};
pub use normalization::Normalization;
