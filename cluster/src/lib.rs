//! A job on a cluster: Apache DataFusion Ballista schedules the splits, the pipeline makes them.
//!
//! ```text
//!   run (driver)                      scheduler                    executor, one per device or machine
//!   plan, lock or lease                                            prepare the job, load the teacher: once per job
//!   JobExec over N rows ──submit────► N tasks of one row ◄──poll── free slots
//!   lists commits at the output                          ──task──► Worker::make: its split, committed at the output
//!   manifest, _SUCCESS ◄─────────────────── the output ◄────────── shard, record
//! ```
//!
//! The scheduler, the executors and the protocol between them are Ballista's; this crate plugs its codec and its
//! execution engine into Ballista's hooks. A task carries a `TaskSpec` (the job, not a plan of how to run it) and the
//! number of a split. Executors write shards and records straight to the output, where the run reads them. An executor
//! listens on no port: it polls the scheduler for work.
//!
//! Authentication: driver, scheduler and executors share a `token`. Each call to the scheduler carries the build of the
//! program and a proof that only an owner of the token can compute. Each spec is sealed with the token, so an executor
//! refuses jobs of strangers even behind a forged scheduler. An executor prepares a job under its own access rules.
//!
//! Calls on loopback are not encrypted. On other addresses the scheduler presents a certificate (`tls`) and callers use
//! `https://host:port`, or the user declares the network trusted.
//!
//! The crate is empty without the feature `distributed`: Ballista enables more of DataFusion than the program needs
//! otherwise.

#![cfg(feature = "distributed")]

mod codec;
mod driver;
pub mod executor;
mod executor_jobs;
mod failure;
pub mod log_bridge;
mod lost_tasks;
pub mod memory;
mod node;
pub mod scheduler;
pub mod scheduler_client;
mod sealed_spec;
pub mod tls;
pub mod token;
mod work_folder;

pub use driver::connect;
pub use sealed_spec::BUILD;
