//! The Hugging Face hub: its settings, and its data sets as a store.
//!
//! ```text
//!   hf://datasets/org/name@main/data/a.parquet
//!     the revision  GET  /api/datasets/org/name/revision/main            once: all other requests name its commit
//!     a folder      GET  /api/datasets/org/name/tree/COMMIT/data         in pages
//!     a file        POST /api/datasets/org/name/paths-info/COMMIT        its size and the hash of its content
//!     bytes         GET  /datasets/org/name/resolve/COMMIT/data/a.parquet
//!                     └─► 302, to a server of contents: without the token, and reused for later ranges of the file
//!                   or from the hub's cache, if it has the whole file
//! ```
//!
//! A commit cannot change, so neither can what one store reads. Another process may open a later commit of the same
//! branch; the ETag of a file is the hash of its content, so it notices files that have changed since they were listed.

mod api;
mod config;
mod store;

pub use config::{HubConfig, Token};
pub(crate) use store::{HubStore, connect};
