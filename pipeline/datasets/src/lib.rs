//! Finished data sets: what reads them, checks them, describes them and writes them in other formats.
//!
//! ```text
//!   Dataset::open ─► inspect   rows as people read them
//!                 ─► verify    every invariant; with a teacher, every stored value of some batches
//!                 ─► export    a copy, or the format of another trainer
//!   damage, clean              files that are missing, damaged or left over
//!   card                       README.md of a data set
//! ```
//!
//! Nothing in this crate knows job files, inputs or runs: it reads the manifest. Jobs are in `stillhouse-pipeline`, above this crate.

pub mod card;
pub mod clean;
pub mod damage;
pub mod dataset;
pub mod export;
pub mod inspect;
pub mod verify;
