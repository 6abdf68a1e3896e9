//! Finished data sets: opening, inspecting, verifying, describing and exporting them.
//!
//! ```text
//!   Dataset::open ─► inspect   decoded rows and statistics
//!                 ─► verify    every invariant; with a teacher, every stored value of some batches
//!                 ─► export    a copy, or the file format of another trainer
//!   damage, clean              missing, damaged or leftover files
//!   card                       README.md of a data set
//! ```
//!
//! This crate reads manifests. It does not know job files, inputs or runs; those are in `stillhouse-pipeline`, which
//! depends on this crate.

pub mod card;
pub mod clean;
pub mod damage;
pub mod dataset;
pub mod export;
pub mod inspect;
pub mod verify;
