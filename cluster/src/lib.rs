//! A job on a cluster: Apache DataFusion Ballista hands out the splits, the pipeline makes them.
//!
//! ```text
//!   run (driver)                      scheduler                    executor, one per device or machine
//!   plan, lock or lease                                            prepare the job, load the teacher: once per job
//!   JobExec over N rows ──submit────► N tasks of one row ◄──poll── slots free
//!   lists commits at the output                          ──task──► Worker::make: its split, committed at the output
//!   manifest, _SUCCESS ◄─────────────────── the output ◄────────── shard, record
//! ```
//!
//! No scheduler, queue or worker protocol of our own: the scheduler and the executors are Ballista's, with this house's codec and its engine
//! in the places that it has for them. What is sent is an `order`, the job and not what to do with it, and the number of a split; shards and
//! records go straight to the output, from where the run takes them. An executor listens on no port: it asks the scheduler for work.
//!
//! Who may: driver, scheduler and executors share a `token`. Each call to the scheduler carries what only its owner can compute, with the
//! build of the program; each order is sealed with it, so that an executor makes no job of strangers even where the scheduler is not what it
//! seems; and an executor prepares a job under its own rules of access, as it would anybody's.
//!
//! On loopback nothing is encrypted. Elsewhere the scheduler shows a certificate (`tls`), and callers name it `https://host:port`; or a person gives
//! the word that nobody else is on that network.
//!
//! Compiled only with the feature `distributed`: Ballista asks for more of DataFusion than a program without it has.

#![cfg(feature = "distributed")]

mod codec;
mod driver;
pub mod executor;
mod failure;
mod folder;
mod ledger;
pub mod log;
pub mod memory;
mod node;
mod order;
mod place;
pub mod scheduler;
pub mod tls;
pub mod token;
pub mod wire;

pub use driver::connect;
pub use order::BUILD;
