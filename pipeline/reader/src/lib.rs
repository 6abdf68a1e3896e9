//! Reading finished data sets for training: any rows, fast, and whole epochs in a shuffled order that can be resumed.
//!
//! ```text
//!   DataSet::open ─► manifest ─► shards, columns
//!        │
//!        ├─ rows(&[r]) ──► blocks in the cache │ blocks to read │ single rows ──► gather ─► [B, …] per column
//!        │                      (blocks)          (shard: pages of Parquet by offset index)
//!        └─ stream(Plan) ─► order: position ─► row ─► batches ahead of the trainer, next window's blocks ahead of them
//! ```
//!
//! A *block* is a run of [`dataset::BLOCK_TOKENS`] tokens' worth of rows. It is what the shuffle moves about, what is read at
//! once, and what the cache holds; the cache has a bound in bytes, and so do the footers of the shards.
//!
//! Shards of a store can be kept on this machine's disk, see [`stillhouse_storage::disk_cache`].
//!
//! DataLoader workers fork. A forked child has none of the parent's threads or connections, so all that lives in a process
//! (runtime, stores, caches) is made anew in every process, see [`process`].

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
pub use dataset::{DataSet, OpenOptions, Reading};
pub use error::ReadError;
pub use file::ShardFile;
pub use order::{Order, Shuffle};
pub use stillhouse_storage::DiskCacheOptions;
pub use stream::{Plan, Stream};

type Result<T, E = ReadError> = std::result::Result<T, E>;
