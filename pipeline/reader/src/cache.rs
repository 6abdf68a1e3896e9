//! An LRU cache bounded in bytes. Concurrent requests for a value load it once.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

use crate::Result;

/// A value with a known memory size.
pub(crate) trait MemorySize {
    /// Memory size in bytes.
    fn bytes(&self) -> usize;
}

type Cell<V> = Arc<OnceCell<Arc<V>>>;

/// Values by numeric key.
#[derive(Debug)]
pub(crate) struct Cache<V> {
    limit: usize,
    inner: Mutex<Inner<V>>,
}

#[derive(Debug)]
struct Inner<V> {
    entries: HashMap<u64, Entry<V>>,
    by_use: BTreeMap<u64, u64>,
    clock: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Entry<V> {
    cell: Cell<V>,
    used: u64,
    /// 0 while the value is being loaded.
    bytes: usize,
}

impl<V: MemorySize> Cache<V> {
    /// Creates an empty cache that holds up to `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let inner = Inner { entries: HashMap::new(), by_use: BTreeMap::new(), clock: 0, bytes: 0 };
        Self { limit, inner: Mutex::new(inner) }
    }

    /// Whether another value of the average size would fit.
    pub fn fits_another(&self) -> bool {
        let inner = self.lock();
        let average_bytes = inner.bytes / inner.entries.len().max(1);
        inner.bytes + average_bytes <= self.limit
    }

    /// Whether a value is cached or being loaded.
    pub fn contains(&self, key: u64) -> bool {
        self.lock().entries.contains_key(&key)
    }

    /// Returns a value. Calls `load` unless the value is cached or being loaded.
    ///
    /// # Errors
    /// Errors of `load`; the next call tries again.
    pub async fn get_or_load<F: Future<Output = Result<V>>>(
        &self,
        key: u64,
        load: impl FnOnce() -> F,
    ) -> Result<Arc<V>> {
        let cell = self.lock().cell(key);
        match cell.get_or_try_init(|| async { load().await.map(Arc::new) }).await {
            Ok(value) => {
                self.lock().record_size(key, &cell, value.bytes(), self.limit);
                Ok(Arc::clone(value))
            }
            Err(e) => {
                self.lock().forget(key);
                Err(e)
            }
        }
    }

    /// Drops a value that will not be needed again soon.
    pub fn release(&self, key: u64) {
        self.lock().forget(key);
    }

    fn lock(&self) -> MutexGuard<'_, Inner<V>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<V> Inner<V> {
    /// Returns the cell of a key, and marks it as used now.
    fn cell(&mut self, key: u64) -> Cell<V> {
        self.clock += 1;
        let now = self.clock;
        let entry = self.entries.entry(key).or_insert_with(|| Entry { cell: Cell::default(), used: now, bytes: 0 });
        self.by_use.remove(&entry.used);
        entry.used = now;
        self.by_use.insert(now, key);
        Arc::clone(&entry.cell)
    }

    /// Counts the size of a loaded value, if the cache still holds its cell. Evicts the least recently used values
    /// until the rest fits. The new value stays, whatever its size.
    fn record_size(&mut self, key: u64, cell: &Cell<V>, bytes: usize, limit: usize) {
        match self.entries.get_mut(&key) {
            Some(entry) if entry.bytes == 0 && Arc::ptr_eq(&entry.cell, cell) => entry.bytes = bytes.max(1),
            _ => return,
        }
        self.bytes += bytes.max(1);
        while self.bytes > limit {
            let counted = |other: &u64| *other != key && self.entries.get(other).is_some_and(|e| e.bytes > 0);
            let Some(oldest) = self.by_use.values().copied().find(|other| counted(other)) else { return };
            self.forget(oldest);
        }
    }

    fn forget(&mut self, key: u64) {
        if let Some(entry) = self.entries.remove(&key) {
            self.by_use.remove(&entry.used);
            self.bytes -= entry.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::ReadError;

    struct Size(usize);

    impl MemorySize for Size {
        fn bytes(&self) -> usize {
            self.0
        }
    }

    async fn put(cache: &Cache<Size>, key: u64, size: usize) {
        cache.get_or_load(key, || async { Ok(Size(size)) }).await.unwrap();
    }

    #[tokio::test]
    async fn the_least_recently_used_leave_first() {
        let cache = Cache::new(10);
        for key in 0..3 {
            put(&cache, key, 3).await;
        }
        put(&cache, 0, 99).await; // cached, so only marked as used
        put(&cache, 3, 4).await;
        assert_eq!((0..4).map(|k| cache.contains(k)).collect::<Vec<_>>(), [true, false, true, true]);
        put(&cache, 4, 1000).await;
        assert_eq!((0..5).map(|k| cache.contains(k)).collect::<Vec<_>>(), [false, false, false, false, true]);
        cache.release(4);
        assert_eq!(cache.lock().bytes, 0);
    }

    #[tokio::test]
    async fn what_is_released_on_its_way_is_not_counted() {
        let cache = Cache::new(10);
        let load = || async {
            cache.release(1);
            Ok(Size(5))
        };
        cache.get_or_load(1, load).await.unwrap();
        assert_eq!((cache.contains(1), cache.lock().bytes), (false, 0));
    }

    #[tokio::test]
    async fn a_failure_is_reported_and_tried_again() {
        let cache = Cache::new(10);
        let failed = cache.get_or_load(1, || async { Err::<Size, _>(ReadError::Usage("no".into())) }).await;
        assert!(failed.is_err() && !cache.contains(1));
        put(&cache, 1, 1).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn many_at_once_load_once() {
        let cache = Arc::new(Cache::new(1000));
        let loads = Arc::new(AtomicUsize::new(0));
        let tasks: Vec<_> = (0..64)
            .map(|i| {
                let (cache, loads) = (Arc::clone(&cache), Arc::clone(&loads));
                tokio::spawn(async move {
                    let load = || async {
                        loads.fetch_add(1, Ordering::SeqCst);
                        tokio::task::yield_now().await;
                        Ok(Size(1))
                    };
                    cache.get_or_load(i % 4, load).await.unwrap();
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!((loads.load(Ordering::SeqCst), cache.lock().bytes), (4, 4));
    }
}
