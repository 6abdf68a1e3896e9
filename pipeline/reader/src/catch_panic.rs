//! Panics of a library that are an answer like another: caught, and not told on the terminal.

use std::cell::Cell;
use std::future::poll_fn;
use std::panic::{self, AssertUnwindSafe};
use std::pin::pin;
use std::sync::Once;

use futures::FutureExt;

thread_local! {
    /// Whether a panic on this thread is caught and told as an error.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What a future gives, `None` where it panics. The panic's text does not go to stderr; that of all others does, as before.
pub(crate) async fn caught<T>(work: impl Future<Output = T>) -> Option<T> {
    hush();
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

/// Puts a hook before the one that is there, once in a process.
fn hush() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let reported = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.try_with(Cell::get).unwrap_or(false) {
                reported(info);
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
        assert_eq!(block_on(caught(async { 7 })), Some(7));
        assert_eq!(block_on(caught::<()>(async { panic!("of a library") })), None);
        assert_eq!(reported.load(Ordering::Relaxed), 0);
        // nor does it last: neither on this thread nor on another
        assert!(panic::catch_unwind(|| panic!("ours")).is_err());
        assert!(std::thread::spawn(|| panic!("another's")).join().is_err());
        assert_eq!(reported.load(Ordering::Relaxed), 2);
    }
}
