//! The threads that stages run on, and how many there can be.
//!
//! A stage holds a thread from its split's first batch to its last, and most of that time it waits: for the stage before it, for room
//! in the queue after it, for a read. In a pool that others use too, such as tokio's for blocking calls, enough of them leave no
//! thread to those that they wait for (a file is read on that pool), and nothing moves again. So:
//!
//! - every stage, the writer included, has a thread of its own, which nobody else can take and for which it never queues;
//! - a split begins only where all of its threads fit: [`splits_at_once`] of them are at work, [`MOST_THREADS`] threads at most;
//! - what a stage waits for (another stage of its split, a request, a file, rayon's pool) never waits for a stage of another split.
//!
//! Tokio's own pool has short calls only, which end by themselves.
//!
//! The memory of a run is that of a split times the splits at work, so the same bound holds for both.

use std::io;
use std::thread::Builder;

use tokio::sync::oneshot;

/// Threads of all stages of a job at once.
pub const MOST_THREADS: usize = 512;

/// Bytes of a thread's stack: reserved, and used as far as it is needed.
const STACK: usize = 4 << 20;

/// How many splits may be at work at once, where so many are asked for and each takes so many threads; at least one.
pub fn splits_at_once(wanted: usize, threads_per_split: usize) -> usize {
    wanted.min(MOST_THREADS / threads_per_split.max(1)).max(1)
}

/// Starts work on a thread of its own; what comes out of it is what it gives. A sender that is dropped tells that it panicked.
///
/// # Errors
/// When the system gives no thread.
pub fn start<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<oneshot::Receiver<T>> {
    let (done, ended) = oneshot::channel();
    let run = move || {
        // nobody may be left to take it
        let _ = done.send(work());
    };
    Builder::new().name(name.to_owned()).stack_size(STACK).spawn(run)?;
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_of_the_splits_at_work_stay_within_the_bound() {
        for threads in 1..=40 {
            for wanted in [1, 2, 64, 128, 1024, usize::MAX] {
                let splits = splits_at_once(wanted, threads);
                assert!(splits >= 1 && splits <= wanted);
                assert!(splits == 1 || splits * threads <= MOST_THREADS, "{splits} splits of {threads} threads");
                assert!(splits == wanted || (splits + 1) * threads > MOST_THREADS, "room for more than {splits}");
            }
        }
    }

    #[tokio::test]
    async fn a_thread_that_panics_is_told() {
        assert_eq!(start("good", || 7).unwrap().await, Ok(7));
        assert!(start("bad", || std::panic::resume_unwind(Box::new("on purpose"))).unwrap().await.is_err());
    }
}
