//! The operators of Stillhouse. Each is one file: a transform from record batch to record batch.
//!
//! ```text
//!   documents ──► clean ──► block_urls, filter, decontaminate, deduplicate ──► tokenize, chat ──► pack ──► extract ──► subtokens, partitions ──► (the pipeline writes shards)
//!   [id, text, end]        [id, tokens, end]  [one row = one packed sequence; each step adds columns]
//!
//!   images, codes ──► grid ──► subtokens, partitions       [images]: decodes an image's bytes into the numbers of its row
//!   [id, tokens, label]
//! ```
//!
//! Operators do not depend on engines, files or tasks: see [`operator::Operator`]. To add one, write a file that
//! declares it ([`config::OperatorConfig`]) and add a line to [`registry::OPERATORS`].

pub mod block_urls;
pub mod carry;
pub mod chat;
pub mod clean;
pub mod config;
pub mod decontaminate;
pub mod deduplicate;
mod document_pieces;
mod document_table;
mod dropped;
pub mod extract;
pub mod filter;
pub mod generate;
pub mod grid;
pub mod images;
pub mod invariants;
mod judged_documents;
pub mod operator;
pub mod operator_spec;
pub mod orders;
pub mod pack;
pub mod partitions;
pub mod registry;
pub mod rows;
mod sparkline;
pub mod subtokens;
#[cfg(test)]
mod testing;
pub mod tokenize;
pub mod vocabulary;
