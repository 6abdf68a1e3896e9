//! Object stores: their URLs, their credentials, and the one way in which requests to them are sent, tried again and explained.
//!
//! ```text
//!   "s3://b/k" ─► url::Location ─► open::Storages ─► Opened { store, multipart, uploads, statistics }
//!                 profile: AWS files ─┘  │ every builder gets transport::Connector
//!                                        ▼
//!        object_store ── request, signed ──► transport::Transport ──► the network
//!                     ◄─ whole answer, or failure::TransportError ─┘  explain::explain makes one line of it
//! ```
//!
//! object_store's own retries are off: those of [`transport`] see every request, of every store, and the credentials' as well.
//! No secret leaves this room: not by `Debug`, not in an error, not in a log.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod addresses;
pub mod blocking;
pub mod disk_cache;
pub mod explain;
pub mod failure;
pub mod guard;
pub mod open;
pub mod profile;
pub mod retry;
mod sealed;
pub mod transport;
pub mod uploads;
pub mod url;

#[cfg(test)]
mod tests;

pub use addresses::is_public;
pub use blocking::blocking;
pub use disk_cache::{DiskCache, DiskCacheOptions};
pub use explain::{explain, explain_cause, is_retryable};
pub use failure::{Breakage, Outcome, TransportError, breakage, find_cause, find_failure};
pub use guard::Guard;
pub use open::{Opened, Requests, StorageError, Storages};
pub use profile::Environment;
pub use retry::{Backoff, asked_wait};
pub use transport::TransportStatistics;
pub use uploads::{Upload, Uploads};
pub use url::{Location, Scheme, StoreUrl};
