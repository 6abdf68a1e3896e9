//! What every crate of the pipeline shares: errors, events, the states of files, and what paths of a job file stand for.
//!
//! Nothing here reads or writes data.

pub mod error;
pub mod events;
pub mod file_state;
pub mod path_expansion;
pub mod progress_estimate;
pub mod source_error;
pub mod units;

pub use stillhouse_storage as storage;
