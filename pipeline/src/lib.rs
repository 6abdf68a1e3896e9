//! The pipeline: planning, the local engine, shards, appending, reading back and verifying. Readers of input ([`source`]), outputs with their
//! commits ([`output`]), the hub and errors are crates below it, under the names that they have here.
//!
//! ```text
//!   job.yaml ─► job::prepare ─► plan::plan ─► run::run ─► output folder ─► dataset, inspect, verify
//!                (all checks)    (splits)      │
//!                engine: SplitsExec ─► OperatorExec … ─► ShardSinkExec (shard, output)
//! ```
//!
//! All I/O is in this crate and those below it; operators are pure. A split is pulled batch by batch ([`engine`]), so memory is
//! bounded by the configuration: batches in flight, one row group per split at work, the teacher.

pub mod access;
pub mod append;
pub mod derive;
mod estimates;
pub mod finish;
pub mod functions;
pub mod inputs;
pub mod job;
pub mod job_diff;
pub mod plan;
pub mod plan_report;
mod query_rows;
pub mod repair;
pub mod run;
pub mod sample;
pub mod score;
mod sequence_offsets;
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
