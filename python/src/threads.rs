//! Pools of threads that outlive neither a fork nor their use.
//!
//! `DataLoader` forks its workers. A child has none of its parent's threads, so a pool made before the fork would wait for
//! ever; rayon's global pool has no way back. Pools are therefore kept per process id, and those of another process are
//! forgotten, not dropped: dropping would signal threads that are not there.
//!
//! The lock is taken only while the interpreter is held, and `os.fork` holds it too: no fork can happen with it locked.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

struct Pools {
    process: u32,
    by_size: Vec<(usize, Arc<ThreadPool>)>,
}

static POOLS: Mutex<Pools> = Mutex::new(Pools { process: 0, by_size: Vec::new() });

/// A pool of `threads` threads (0: as many as this process may use), or none for one thread: the caller's own.
pub fn pool(_py: Python<'_>, threads: usize) -> PyResult<Option<Arc<ThreadPool>>> {
    let threads = match threads {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        given => given,
    };
    if threads == 1 {
        return Ok(None);
    }
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if pools.process != process {
        std::mem::forget(std::mem::take(&mut pools.by_size));
        pools.process = process;
    }
    if let Some((_, pool)) = pools.by_size.iter().find(|(size, _)| *size == threads) {
        return Ok(Some(Arc::clone(pool)));
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("stillhouse-{i}"))
        .build()
        .map_err(|e| PyRuntimeError::new_err(format!("cannot start {threads} threads: {e}")))?;
    let pool = Arc::new(pool);
    pools.by_size.push((threads, Arc::clone(&pool)));
    Ok(Some(pool))
}
