//! The contracts of Stillhouse: the job file, the content of a data set, and the meaning of ids.
//!
//! ```text
//!   job.yaml ──► spec::JobSpec ──► (pipeline plans and runs) ──► columns + manifest::Manifest
//!                   ▲                                                 ▲
//!               problems::Problems: all errors at once            ids::{SequenceId, DocumentId, SplitId}
//! ```
//!
//! The parts that a trainer's reader needs (columns, ids, pages, storage) are always compiled. The job file and the
//! manifest require the feature `job`.
//!
//! This crate does no I/O and knows no engine. It defines each contract once; writers and readers both check against
//! it.
//!
//! ```
//! let job = stillhouse_schemas::parse::JobFormat::new(Vec::new()).read(
//!     "version: 1\nname: demo\ninput: {format: text, paths: [a.txt]}\n\
//!      tokenizer: {path: tokenizer.json}\npack: {length: 128}\noutput: {path: out}\n",
//! )?;
//! assert_eq!(job.pack.length, 128);
//! # Ok::<(), stillhouse_schemas::problems::Problems>(())
//! ```

#[cfg(feature = "job")]
pub mod checks;
pub mod columns;
#[cfg(feature = "job")]
mod document;
pub mod hub_names;
pub mod ids;
#[cfg(feature = "job")]
pub mod manifest;
pub mod pages;
#[cfg(feature = "job")]
pub mod parse;
#[cfg(feature = "job")]
pub mod paths;
#[cfg(feature = "job")]
pub mod problems;
#[cfg(feature = "job")]
pub mod sequence_range;
#[cfg(feature = "job")]
pub mod spec;
pub mod storage;

#[cfg(feature = "job")]
pub use self::spec::sections;
