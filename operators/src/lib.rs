//! Operators of Stillhouse: one file per operator, each a transform from record batch to record batch.
//!
//! ```text
//!   documents ──► clean ──► tokenize ──► pack ──► extract ──► subtokens, partitions ──► (pipeline writes shards)
//!   [id, text, end]        [id, tokens, end]  [one row = one packed sequence, more columns at each step]
//!
//!   images, codes ──► grid ──► subtokens, partitions       [images]: from the bytes of an image to the numbers of its row
//!   [id, tokens, label]
//! ```
//!
//! An operator knows nothing of engines, files or tasks: see [`operator::Operator`]. A new operator is one new file, in which it
//! declares itself ([`config::OperatorConfig`]), and one line of [`registry::OPERATORS`].

pub mod clean;
pub mod config;
pub mod extract;
pub mod generate;
pub mod grid;
pub mod images;
pub mod invariants;
pub mod operator;
pub mod orders;
pub mod pack;
pub mod partitions;
mod pieces;
pub mod registry;
pub mod rows;
mod sparkline;
pub mod subtokens;
#[cfg(test)]
mod testing;
pub mod tokenize;
pub mod vocabulary;
