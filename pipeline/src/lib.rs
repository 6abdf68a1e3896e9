//! The pipeline: checks and plans jobs, runs them, and appends to, repairs, derives and scores data sets. The crates
//! below read input ([`source`]), write outputs and commits ([`output`]), fetch models ([`hub`]) and define errors;
//! this crate re-exports them under short names.
//!
//! ```text
//!   job.yaml ─► job::prepare ─► plan::plan ─► run::run ─► output folder ─► dataset, inspect, verify
//!                (all checks)    (splits)      │
//!                engine: SplitsExec ─► OperatorExec … ─► ShardSinkExec (shard, output)
//! ```
//!
//! This crate and those below it do all I/O; operators are pure. The engine pulls a split batch by batch ([`engine`]).
//! So the configuration bounds the memory: batches in flight, one row group per concurrent split, the teacher.

pub mod access;
pub mod append;
pub mod derive;
mod estimates;
pub mod finish;
pub mod functions;
pub mod input_summary;
pub mod inputs;
pub mod job;
pub mod job_diff;
pub mod measure;
mod mixture;
pub mod plan;
pub mod plan_report;
pub mod repair;
pub mod run;
pub mod sample;
pub mod score;
mod sequence_offsets;
pub mod source_record;
mod staged_rows;
pub(crate) mod teacher;
#[cfg(test)]
mod tests;

pub use stillhouse_base::{error, events, file_state, path_expansion, progress_estimate, source_error, storage, units};
pub use stillhouse_engine as engine;
pub use stillhouse_engine::{acceptance, driver};
pub use stillhouse_hub as hub;
pub use stillhouse_output as output;
pub use stillhouse_output::identity;
pub use stillhouse_source as source;
