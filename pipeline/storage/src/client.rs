//! The settings of HTTP clients: those of object_store's own, for all that this crate builds.

use std::time::Duration;

use reqwest::ClientBuilder;

/// The `User-Agent` of every client.
pub(super) const USER_AGENT: &str = concat!("stillhouse/", env!("CARGO_PKG_VERSION"));
/// Longer than any attempt: the transport sets its own timeout.
pub(super) const CLIENT_TIMEOUT_SECONDS: u64 = 3600;

/// The value that object_store's own clients use.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns a builder with the settings of object_store's clients.
pub(super) fn client_builder() -> ClientBuilder {
    reqwest::Client::builder()
        .user_agent(USER_AGENT)
        .timeout(Duration::from_secs(CLIENT_TIMEOUT_SECONDS))
        .connect_timeout(CONNECT_TIMEOUT)
        .http1_only()
        // the length of a response must be that of the file
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
}
