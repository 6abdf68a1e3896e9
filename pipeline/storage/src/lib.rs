//! Object stores: URLs, credentials, and one path on which all requests are sent, retried and explained.
//!
//! ```text
//!   "s3://b/k" ─► url::Location ─► open::Storages ─► Opened { store, multipart, uploads, statistics }
//!                 profile: AWS files ─┘  │ every builder gets a transport::Connector
//!                                        ▼
//!        object_store ── signed request ───► transport::Transport ──► the network
//!                     ◄─ whole response or failure::TransportError ─┘  explain::explain formats it as one line
//! ```
//!
//! Data sets of the Hugging Face hub are a store too ([`hub`]), on the same transport.
//!
//! The retries of object_store are disabled. [`transport`] retries the requests of every store, including those for
//! credentials. No secret leaves this crate: not by `Debug`, not in an error, not in a log.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod addresses;
pub mod blocking;
mod client;
pub mod disk_cache;
mod error;
pub mod explain;
pub mod failure;
pub mod guard;
pub mod hub;
pub mod open;
pub mod profile;
mod redacted_store;
pub mod retry;
pub mod transport;
pub mod uploads;
pub mod url;

#[cfg(test)]
mod tests;

pub use addresses::is_public;
pub use blocking::blocking;
pub use disk_cache::{DiskCache, DiskCacheOptions};
pub use error::StorageError;
pub use explain::{explain, explain_cause, is_retryable};
pub use failure::{NoResponseReason, Outcome, TransportError, classify_no_response, find_cause, find_transport_error};
pub use guard::Guard;
pub use open::{Opened, Requests, Storages};
pub use profile::Environment;
pub use retry::{Backoff, retry_after};
pub use transport::TransportStatistics;
pub use uploads::{Upload, Uploads};
pub use url::{Location, Scheme, StoreUrl};
