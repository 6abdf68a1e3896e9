//! Describes the progress of an export.

use std::time::Instant;

use stillhouse_pipeline::units;

/// Seconds before a rate is meaningful.
const MIN_RATE_SECONDS: f64 = 2.0;

/// Measures an export from its start.
#[derive(Debug, Clone, Copy)]
pub struct Copies {
    began: Instant,
}

/// Counters of an export.
#[derive(Debug, Clone, Copy)]
pub struct Copied {
    pub files_done: u64,
    pub files: u64,
    pub bytes_done: u64,
    pub bytes: u64,
    /// The part of `bytes_done` that the destination already had.
    pub bytes_there: u64,
}

impl Copies {
    pub fn new() -> Self {
        Self { began: Instant::now() }
    }

    /// `12 of 40 files, 3.1 GB of 10.2 GB, 210 MB/s, 00:33 left`.
    pub fn text(&self, now: &Copied) -> String {
        text(now, self.began.elapsed().as_secs_f64())
    }
}

fn text(now: &Copied, seconds: f64) -> String {
    let mut text = format!(
        "{} of {}, {} of {}",
        units::count(now.files_done),
        units::counted(now.files, "file"),
        units::bytes(now.bytes_done),
        units::bytes(now.bytes)
    );
    let copied = now.bytes_done.saturating_sub(now.bytes_there);
    if seconds >= MIN_RATE_SECONDS && copied > 0 {
        let rate = copied as f64 / seconds;
        let left = now.bytes.saturating_sub(now.bytes_done) as f64 / rate;
        text += &format!(", {}/s, {} left", units::bytes(rate as u64), units::clock(left));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_of_what_was_copied() {
        let now = Copied {
            files_done: 12,
            files: 40,
            bytes_done: 3_000_000_000,
            bytes: 10_000_000_000,
            bytes_there: 1_000_000_000,
        };
        assert_eq!(text(&now, 1.0), "12 of 40 files, 3.0 GB of 10.0 GB");
        assert_eq!(text(&now, 10.0), "12 of 40 files, 3.0 GB of 10.0 GB, 200.0 MB/s, 00:35 left");
    }
}
