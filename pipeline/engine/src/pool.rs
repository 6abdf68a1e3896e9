//! The threads of a job: counted when it begins, whatever the number of its splits.
//!
//! ```text
//!   workers   N            pull the chains of splits: clean, tokenize, pack, …, encode            (this pool)
//!   readers   max(N, 2)    one step of a split at a time: its next batch of documents             (this pool)
//!   products  N            rayon: the parts of an operator's or a teacher's work on one batch     (the process's)
//!   device    2 each       forward pass and logits; columns made of them                          ([`super::device`])
//!   requests  8 + 24       stores; files and commits: the runtime of the program ([`REQUEST_WORKERS`], [`FILE_THREADS`])
//! ```
//!
//! A split holds no thread while it waits: for a step of its reader, for the device, for a request. What a worker does ends by itself, and
//! a step of a reader waits for nothing but files and requests, which are served by other threads. So however many splits are at work, on
//! however few threads, something always moves.

use std::future::Future;
use std::io;

use datafusion::common::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::StreamExt;
use futures::stream::unfold;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinHandle};

/// Workers of the runtime that serves requests, where so many threads are asked for: it computes nothing.
pub const REQUEST_WORKERS: usize = 8;

/// Threads of that runtime for calls on files. They are short, but for the one that prepares a job; none waits for another split.
pub const FILE_THREADS: usize = 24;

/// The workers and readers of a job; they end with this value.
#[derive(Debug)]
pub struct Pool(Option<Runtime>);

/// Starts work in a pool.
#[derive(Debug, Clone)]
pub struct Spawner(Handle);

impl Pool {
    /// A pool of so many workers (one at least).
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn new(workers: usize) -> io::Result<Self> {
        let workers = workers.max(1);
        let runtime = Builder::new_multi_thread()
            .worker_threads(workers)
            .max_blocking_threads(workers.max(2))
            .thread_name("split")
            .enable_all()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    /// A pool with a worker for each thread that this process may use.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn of_this_process() -> Result<Self> {
        let no_threads = PipelineError::output("the system gives no threads for the splits");
        Self::new(rayon::current_num_threads()).map_err(no_threads)
    }

    /// Starts work in it.
    ///
    /// # Errors
    /// When the pool has ended.
    pub fn spawner(&self) -> Result<Spawner> {
        let ended = || PipelineError::new(ErrorKind::Output, "the splits: the pool of the job has ended");
        self.0.as_ref().map(|runtime| Spawner(runtime.handle().clone())).ok_or_else(ended)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // a pool may be dropped where nothing may wait; what is left of its work ends by itself
            runtime.shutdown_background();
        }
    }
}

impl Spawner {
    /// Runs a chain on a worker.
    pub fn chain<F>(&self, chain: F) -> Task<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        Task(self.0.spawn(chain))
    }

    /// Runs a step on a reader's thread.
    pub fn step<T: Send + 'static>(&self, step: impl FnOnce() -> T + Send + 'static) -> Task<T> {
        Task(self.0.spawn_blocking(step))
    }
}

impl Spawner {
    /// The same batches, pulled by a chain of their own one batch ahead of whoever takes them.
    pub fn ahead(&self, mut batches: SendableRecordBatchStream) -> SendableRecordBatchStream {
        let schema = batches.schema();
        let (ready, taken) = mpsc::channel(1);
        let pulling = self.chain(async move {
            while let Some(batch) = batches.next().await {
                if ready.send(batch).await.is_err() {
                    return;
                }
            }
        });
        let stream = unfold((taken, Some(pulling)), async |(mut taken, mut pulling)| {
            if let Some(batch) = taken.recv().await {
                return Some((batch, (taken, pulling)));
            }
            // that nothing comes any more is only an end where the chain has come to its own
            let broken = pulling.take()?.wait().await.is_err();
            let stopped = || DataFusionError::Execution("a stage stopped: a fault of this program".into());
            broken.then(|| (Err(stopped()), (taken, None)))
        });
        Box::pin(RecordBatchStreamAdapter::new(schema, stream))
    }
}

/// Work in a pool; it is not waited for any more when this value is dropped, and a chain ends at its next wait.
#[derive(Debug)]
pub struct Task<T>(JoinHandle<T>);

impl<T> Task<T> {
    /// What came out of it.
    ///
    /// # Errors
    /// When it panicked, or its pool has ended.
    pub async fn wait(mut self) -> Result<T, JoinError> {
        (&mut self.0).await
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::RecordBatch;
    use arrow::datatypes::Schema;
    use futures::stream;

    use super::*;

    fn batches(count: usize, panics: bool) -> SendableRecordBatchStream {
        let schema = Arc::new(Schema::empty());
        let empty = RecordBatch::new_empty(Arc::clone(&schema));
        let stream = stream::iter(0..=count).filter_map(move |n| {
            if n == count && panics {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            std::future::ready((n < count).then(|| Ok(empty.clone())))
        });
        Box::pin(RecordBatchStreamAdapter::new(schema, stream))
    }

    #[tokio::test]
    async fn a_stream_ahead_ends_where_its_chain_ends_and_nowhere_else() {
        let pool = Pool::new(1).unwrap();
        let ahead = |panics| pool.spawner().unwrap().ahead(batches(5, panics)).collect::<Vec<_>>();
        let (whole, broken) = (ahead(false).await, ahead(true).await);
        assert!(whole.len() == 5 && whole.iter().all(Result::is_ok));
        assert!(broken.len() == 6 && broken[..5].iter().all(Result::is_ok));
        assert!(broken[5].as_ref().unwrap_err().to_string().ends_with("a stage stopped: a fault of this program"));
    }
}
