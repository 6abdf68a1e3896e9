//! Things that live in one process: made where they are first needed, and made anew in a forked child.
//!
//! After `fork` a child has the parent's memory but none of its threads: a runtime would wait for ever, a connection would be
//! shared with the parent, and a lock that another thread held stays locked. So nothing of the parent is touched; the child adds
//! its own to the end of a list. Nothing blocks: a parent never works on the entry that a child will make.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Runtime};

use crate::{ReadError, Result};

/// A value of each process.
#[derive(Debug, Default)]
pub struct PerProcess<T> {
    first: OnceLock<Box<Entry<T>>>,
}

#[derive(Debug)]
struct Entry<T> {
    process: u32,
    value: T,
    next: OnceLock<Box<Entry<T>>>,
}

impl<T> PerProcess<T> {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self { first: OnceLock::new() }
    }

    /// This process's value, made by `make` where there is none yet. (Two threads may both make one; the first stays.)
    pub fn get_or_init(&self, make: impl Fn() -> T) -> &T {
        let process = std::process::id();
        let mut slot = &self.first;
        loop {
            let entry = match slot.get() {
                Some(entry) => entry,
                None => {
                    // made before the slot is touched: a fork in the meantime must not find it half set
                    let made = Box::new(Entry { process, value: make(), next: OnceLock::new() });
                    slot.get_or_init(|| made)
                }
            };
            if entry.process == process {
                return &entry.value;
            }
            slot = &entry.next;
        }
    }
}

/// Threads that read and decode. More help little: a trainer's process shares its machine with others.
const THREADS: usize = 4;

/// The runtime of this process.
///
/// # Errors
/// When the operating system gives no threads.
pub fn runtime() -> Result<&'static Runtime> {
    static RUNTIMES: PerProcess<std::io::Result<Runtime>> = PerProcess::new();
    let made = RUNTIMES.get_or_init(|| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
        Builder::new_multi_thread().worker_threads(threads).thread_name("stillhouse").enable_all().build()
    });
    made.as_ref().map_err(|e| ReadError::Usage(format!("cannot start threads for reading: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_value() {
        let values = PerProcess::new();
        assert_eq!(values.get_or_init(|| 1), &1);
        assert_eq!(values.get_or_init(|| 2), &1);
    }

    #[test]
    fn another_process_makes_its_own() {
        let values = PerProcess::new();
        let parent = Entry { process: 0, value: 1, next: OnceLock::new() }; // nobody's number
        assert!(values.first.set(Box::new(parent)).is_ok());
        assert_eq!((values.get_or_init(|| 2), values.get_or_init(|| 3)), (&2, &2));
    }
}
