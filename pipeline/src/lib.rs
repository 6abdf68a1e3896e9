//! The pipeline: corpus readers, planning, the local engine, shards, commit and resume, reading back and verifying.
//!
//! ```text
//!   job.yaml ─► job::prepare ─► plan::plan ─► run::run ─► output folder ─► dataset, inspect, verify
//!                (all checks)    (splits)      │
//!                engine: SplitsExec ─► OperatorExec … ─► ShardSinkExec (shard, output)
//! ```
//!
//! All I/O lives here; operators are pure. A split is pulled batch by batch ([`engine`]), so memory is
//! bounded by the configuration: batches in flight, one row group per split at work, the teacher.

pub mod access;
pub mod append;
pub mod card;
pub mod clean;
pub mod dataset;
pub mod derive;
pub mod differs;
pub mod engine;
pub mod error;
pub mod events;
pub mod export;
pub mod finish;
pub mod functions;
mod holdouts;
pub mod hub;
pub mod inputs;
pub mod inspect;
pub mod job;
pub mod names;
pub mod operators;
mod outlook;
pub mod output;
mod places;
pub mod plan;
pub mod repair;
pub mod run;
pub mod sample;
pub mod score;
pub mod shard;
pub mod source;
pub mod stall;
pub(crate) mod teacher;
pub mod verdict;
pub mod verify;

pub use stillhouse_storage as storage;
