//! Runs many small checks concurrently and returns their results in order.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Minimum number of items per thread; fewer are not worth a thread.
const MIN_ITEMS_PER_THREAD: usize = 4;

/// Maximum number of files on a disk that a check before a job opens; this takes a small fraction of a second.
pub const MAX_CHECKED_FILES: usize = 10_000;

/// Calls `look` with each item on at most `threads` threads. Starts no further item after a result for which `stops`
/// holds; only items after such a result can be `None`.
pub(crate) fn map_in_order<T: Sync, R: Send + Sync>(
    items: &[T],
    threads: usize,
    look: &(dyn Fn(&T) -> R + Sync),
    stops: &(dyn Fn(&R) -> bool + Sync),
) -> Vec<Option<R>> {
    let threads = threads.min(items.len().div_ceil(MIN_ITEMS_PER_THREAD));
    let next = AtomicUsize::new(0);
    let results: Vec<OnceLock<R>> = items.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        // items start in order, so all items before the last one are done when the threads end
        while let i = next.fetch_add(1, Ordering::Relaxed)
            && let (Some(thing), Some(result)) = (items.get(i), results.get(i))
        {
            let found = look(thing);
            if stops(&found) {
                next.store(items.len(), Ordering::Relaxed);
            }
            let _ = result.set(found);
        }
    };
    match threads {
        0 | 1 => work(),
        _ => std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work)))),
    }
    results.into_iter().map(OnceLock::into_inner).collect()
}

/// Returns the number of threads that this machine runs in parallel.
pub(crate) fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Returns at most `max_items` of the `all` items, evenly spaced.
pub fn evenly_spaced<T>(items: impl IntoIterator<Item = T>, all: usize, max_items: usize) -> impl Iterator<Item = T> {
    items.into_iter().step_by(all.div_ceil(max_items.max(1)).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_and_nothing_is_begun_after_the_last() {
        let items: Vec<u32> = (0..1000).collect();
        for threads in [1, 2, 16] {
            let all = map_in_order(&items, threads, &|n| n * 2, &|_| false);
            assert!(all.iter().zip(&items).all(|(found, n)| *found == Some(n * 2)));
            let some = map_in_order(&items, threads, &|n| *n, &|n| *n == 50);
            let seen = some.iter().take_while(|found| found.is_some()).count();
            assert!((51..51 + threads).contains(&seen), "{threads} threads: {seen}");
            assert!(some[..=50].iter().all(Option::is_some));
        }
        assert_eq!(evenly_spaced(0..10, 10, 4).collect::<Vec<_>>(), [0, 3, 6, 9]);
        assert_eq!(evenly_spaced(0..3, 3, 4).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(evenly_spaced(0..0, 0, 4).count(), 0);
    }
}
