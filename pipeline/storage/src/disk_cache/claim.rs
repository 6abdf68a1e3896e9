//! Claims: for each segment of an object one process or task fetches at a time. The others wait, then find the segment
//! stored.
//!
//! A claim is a lock on one of a fixed number of files. So the kernel releases it when the process dies, and no file is
//! left over.

#![allow(clippy::disallowed_methods, reason = "called through `blocking` where a runtime waits")]

use std::fs::{File, TryLockError};
use std::io;
use std::time::{Duration, Instant};

use super::cache_quota::{CacheFolder, open_lock};
use crate::blocking;

/// Number of lock files. If two segments share a file, one waits needlessly.
const CLAIM_FILES: u32 = 4096;
/// Timeout for a claim whose holder may be stopped. After it, the segment is fetched twice.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(1);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A claim, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim(#[allow(dead_code)] File);

impl Claim {
    /// Waits for a claim; `None` after a timeout or an error.
    pub async fn acquire(cache_folder: &CacheFolder, number: u32) -> Option<Self> {
        Self::acquire_within(cache_folder, number, CLAIM_TIMEOUT).await
    }

    async fn acquire_within(cache_folder: &CacheFolder, number: u32, timeout: Duration) -> Option<Self> {
        let path = cache_folder.claim(number % CLAIM_FILES);
        let mut file = blocking(move || open_lock(&path)).await.ok()?;
        let (start, mut poll_interval) = (Instant::now(), MIN_POLL_INTERVAL);
        loop {
            let tried = blocking(move || Ok::<_, io::Error>((file.try_lock(), file))).await.ok()?;
            file = tried.1;
            match tried.0 {
                Ok(()) => return Some(Self(file)),
                Err(TryLockError::WouldBlock) if start.elapsed() < timeout => {
                    tokio::time::sleep(poll_interval).await;
                    poll_interval = (poll_interval * 2).min(MAX_POLL_INTERVAL);
                }
                Err(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wait for a claim that stays locked times out; a released claim can be taken.
    #[tokio::test]
    async fn nobody_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let cache_folder = CacheFolder::open(folder.path(), &"0".repeat(32), 1000).unwrap();
        let first = Claim::acquire(&cache_folder, 7).await;
        assert!(first.is_some());
        assert!(Claim::acquire(&cache_folder, 8).await.is_some());
        assert!(Claim::acquire_within(&cache_folder, 7 + CLAIM_FILES, Duration::from_millis(5)).await.is_none());
        let waiting = Claim::acquire(&cache_folder, 7);
        let ending = async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            drop(first);
        };
        assert!(futures::join!(waiting, ending).0.is_some());
    }
}
