//! Reads finished data sets for training: any rows, fast, and whole epochs in a shuffled order that can be resumed.
//!
//! ```text
//!   DataSet::open ─► manifest ─► shards, columns
//!        │
//!        ├─ rows(&[r]) ──► cached blocks │ blocks to read │ single rows ──► gather ─► [B, …] per column
//!        │                    (blocks)      (shard: Parquet pages by offset index)
//!        └─ stream(Plan) ─► order: position ─► row ─► batches ahead of the trainer, next window's blocks ahead of them
//! ```
//!
//! A *block* is a run of consecutive rows with [`dataset::BLOCK_TOKENS`] tokens in total. It is the unit that the
//! shuffle permutes, that one read decodes, and that the cache stores. The block cache and the footer cache are bounded
//! in bytes.
//!
//! Shards in a store can be cached on the local disk, see [`stillhouse_storage::disk_cache`].
//!
//! DataLoader workers fork. A forked child has none of its parent's threads or connections, so every process creates
//! its own runtime, stores and caches, see [`process`].

mod blocks;
mod cache;
mod catch_panic;
pub mod columns;
pub mod dataset;
mod error;
mod file;
pub mod order;
mod pages;
pub mod process;
mod shard;
mod source;
pub mod stream;

pub use columns::{Column, Layout, Values};
pub use dataset::{DataSet, OpenOptions, ReadMode};
pub use error::ReadError;
pub use file::ShardFile;
pub use order::{Order, Shuffle};
pub use stillhouse_storage::DiskCacheOptions;
pub use stream::{Plan, Stream};

type Result<T, E = ReadError> = std::result::Result<T, E>;
