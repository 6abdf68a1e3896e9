//! Shared by all crates of the pipeline: errors, events, states of files, and the expansion of paths in job files.
//!
//! This crate reads and writes no data.

pub mod error;
pub mod events;
pub mod file_state;
pub mod path_expansion;
pub mod progress_estimate;
pub mod source_error;
pub mod units;

pub use stillhouse_storage as storage;
