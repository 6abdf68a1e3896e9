//! The contracts of Stillhouse: what a job file may say, what a data set holds, and what the ids mean.
//!
//! ```text
//!   job.yaml ──► spec::JobSpec ──► (pipeline plans and runs) ──► columns + manifest::Manifest
//!                   ▲                                                 ▲
//!               problems::Problems: every error at once           ids::{SequenceId, DocumentId, SplitId}
//! ```
//!
//! What a trainer's reader needs (columns, ids, storage) stands alone; the job file and the manifest are behind the feature `job`.
//!
//! Nothing here does I/O or knows an engine. A contract is written once, in this crate, and is
//! checked where data is written and where it is read.
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
