//! Who fetches: one process or task at a time for a segment of an object, the others wait and find it stored.
//!
//! A claim is a lock on one of a fixed number of files, so the kernel takes it back from a process that dies, and no file is left over.

#![allow(clippy::disallowed_methods, reason = "called through `blocking` where a runtime waits")]

use std::fs::{File, TryLockError};
use std::io;
use std::time::{Duration, Instant};

use super::cache_quota::{Room, open_lock};
use crate::blocking;

/// Files. Two segments may share one: then one waits without need.
const CLAIMS: u32 = 4096;
/// How long to wait for somebody who may be stopped; then the same is fetched twice.
const PATIENCE: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Held until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim(#[allow(dead_code)] File);

impl Claim {
    /// Waits for a claim; `None` where there is none to be had.
    pub async fn take(room: &Room, number: u32) -> Option<Self> {
        Self::take_within(room, number, PATIENCE).await
    }

    async fn take_within(room: &Room, number: u32, patience: Duration) -> Option<Self> {
        let path = room.claim(number % CLAIMS);
        let mut file = blocking(move || open_lock(&path)).await.ok()?;
        let (start, mut pause) = (Instant::now(), FIRST_PAUSE);
        loop {
            let tried = blocking(move || Ok::<_, io::Error>((file.try_lock(), file))).await.ok()?;
            file = tried.1;
            match tried.0 {
                Ok(()) => return Some(Self(file)),
                Err(TryLockError::WouldBlock) if start.elapsed() < patience => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that is stopped keeps its locks, one that ends does not.
    #[tokio::test]
    async fn nobody_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let room = Room::open(folder.path(), &"0".repeat(32), 1000).unwrap();
        let first = Claim::take(&room, 7).await;
        assert!(first.is_some());
        assert!(Claim::take(&room, 8).await.is_some());
        assert!(Claim::take_within(&room, 7 + CLAIMS, Duration::from_millis(5)).await.is_none());
        let waiting = Claim::take(&room, 7);
        let ending = async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            drop(first);
        };
        assert!(futures::join!(waiting, ending).0.is_some());
    }
}
