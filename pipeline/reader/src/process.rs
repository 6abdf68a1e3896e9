//! Values that belong to one process: created at first use, and created again in a forked child.
//!
//! After `fork`, a child has its parent's memory but none of its threads: a runtime would wait forever, a connection
//! would be shared with the parent, and a lock held by another thread would stay locked. So a child never touches its
//! parent's value; it appends its own to a list. Nothing blocks: a parent never works on the entry that a child will
//! create.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Runtime};

use crate::{ReadError, Result};

/// A value per process.
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
    /// Creates the container without a value.
    pub const fn new() -> Self {
        Self { first: OnceLock::new() }
    }

    /// Returns the value of this process, created by `make` at first use. (If two threads both create one, the first is
    /// kept.)
    pub fn get_or_init(&self, make: impl Fn() -> T) -> &T {
        let process = std::process::id();
        let mut slot = &self.first;
        loop {
            let entry = match slot.get() {
                Some(entry) => entry,
                None => {
                    // created before the slot is touched: a fork in the meantime must not find a half-initialized slot
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

/// Maximum threads that read and decode. More would help little: a trainer's process shares its machine with others.
const MAX_THREADS: usize = 4;

/// The tokio runtime of this process.
///
/// # Errors
/// If the operating system provides no threads.
pub fn runtime() -> Result<&'static Runtime> {
    static RUNTIMES: PerProcess<std::io::Result<Runtime>> = PerProcess::new();
    let made = RUNTIMES.get_or_init(|| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
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
        let parent = Entry { process: 0, value: 1, next: OnceLock::new() }; // no process has id 0
        assert!(values.first.set(Box::new(parent)).is_ok());
        assert_eq!((values.get_or_init(|| 2), values.get_or_init(|| 3)), (&2, &2));
    }
}
