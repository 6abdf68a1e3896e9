//! Catches panics of libraries as ordinary results, without printing them to stderr.

use std::cell::Cell;
use std::future::poll_fn;
use std::panic::{self, AssertUnwindSafe};
use std::pin::pin;
use std::sync::Once;

use futures::FutureExt;

thread_local! {
    /// Whether a panic on this thread is caught and reported as an error.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Returns the output of a future, or `None` if it panics. The panic message is not printed; those of other panics
/// still are.
pub(crate) async fn catch_panic<T>(work: impl Future<Output = T>) -> Option<T> {
    install_quiet_hook();
    let mut work = pin!(AssertUnwindSafe(work).catch_unwind());
    poll_fn(|context| {
        let before = QUIET.replace(true);
        let polled = work.as_mut().poll(context);
        QUIET.set(before);
        polled
    })
    .await
    .ok()
}

/// Installs a hook in front of the current panic hook, once per process.
fn install_quiet_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.try_with(Cell::get).unwrap_or(false) {
                previous(info);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use futures::executor::block_on;

    use super::*;

    #[test]
    fn only_what_is_caught_is_not_reported() {
        let reported = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&reported);
        panic::set_hook(Box::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        assert_eq!(block_on(catch_panic(async { 7 })), Some(7));
        assert_eq!(block_on(catch_panic::<()>(async { panic!("of a library") })), None);
        assert_eq!(reported.load(Ordering::Relaxed), 0);
        // the suppression ends with the call, and never affects other threads
        assert!(panic::catch_unwind(|| panic!("ours")).is_err());
        assert!(std::thread::spawn(|| panic!("another's")).join().is_err());
        assert_eq!(reported.load(Ordering::Relaxed), 2);
    }
}
