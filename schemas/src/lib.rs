//! The contracts of Stillhouse: what a job file may say, what a data set holds, and what the ids mean.
//!
//! ```text
//!   job.yaml ──► spec::JobSpec ──► (pipeline plans and runs) ──► columns + manifest::Manifest
//!                   ▲                                                 ▲
//!               problems::Problems: every error at once           ids::{SequenceId, DocumentId, SplitId}
//! ```
//!
//! Nothing here does I/O or knows an engine. A contract is written once, in this crate, and is
//! checked where data is written and where it is read.
//!
//! ```
//! let job = stillhouse_schemas::spec::JobSpec::from_yaml(
//!     "version: 1\nname: demo\ninput: {format: text, paths: [a.txt]}\n\
//!      tokenizer: {path: tokenizer.json}\npack: {length: 128}\noutput: {path: out}\n",
//! )?;
//! assert_eq!(job.pack.length, 128);
//! # Ok::<(), stillhouse_schemas::problems::Problems>(())
//! ```

pub mod checks;
pub mod columns;
mod document;
pub mod ids;
pub mod manifest;
pub mod pages;
pub mod parse;
pub mod paths;
pub mod problems;
pub mod spec;
pub mod storage;
