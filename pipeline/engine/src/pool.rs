//! The threads of a job: their number is fixed when it begins and does not depend on the number of splits.
//!
//! ```text
//!   workers   N            pull the operator chains of splits: clean, tokenize, pack, …, encode   (this pool)
//!   readers   max(N, 2)    one step of a split at a time: its next batch of documents             (this pool)
//!   products  N            rayon: parallel parts of an operator's or teacher's work on one batch  (the process's)
//!   device    2 each       forward pass and logits; columns from logits                           ([`super::device`])
//!   requests  8 + 24       stores; files and commits: the program's runtime ([`REQUEST_WORKERS`], [`FILE_THREADS`])
//! ```
//!
//! A split holds no thread while it waits for its reader, the device or a request. A worker's task always ends by
//! itself. A reader's step waits only for files and requests, which other threads serve. Therefore the job always makes
//! progress, for any number of splits and threads.

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

/// Maximum number of workers of the request runtime. It does no computation, so a few are enough.
pub const REQUEST_WORKERS: usize = 8;

/// Threads of that runtime for file calls. All are short except the one that prepares a job; none waits for another
/// split.
pub const FILE_THREADS: usize = 24;

/// The worker and reader threads of a job. Dropping it ends them.
#[derive(Debug)]
pub struct Pool(Option<Runtime>);

/// A handle that starts work in a pool.
#[derive(Debug, Clone)]
pub struct Spawner(Handle);

impl Pool {
    /// Starts a pool of `workers` threads, at least one.
    ///
    /// # Errors
    /// When the system cannot start a thread.
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

    /// Starts a pool with one worker for each thread that this process may use.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn of_this_process() -> Result<Self> {
        let no_threads = PipelineError::output("cannot start the threads that make the splits");
        Self::new(rayon::current_num_threads()).map_err(no_threads)
    }

    /// Returns a handle that starts work in the pool.
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
            // A pool may be dropped in async code, which must not block. The remaining work ends by itself.
            runtime.shutdown_background();
        }
    }
}

impl Spawner {
    /// Runs a chain of operators on a worker.
    pub fn chain<F>(&self, chain: F) -> Task<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        Task(self.0.spawn(chain))
    }

    /// Runs a blocking step on a reader thread.
    pub fn step<T: Send + 'static>(&self, step: impl FnOnce() -> T + Send + 'static) -> Task<T> {
        Task(self.0.spawn_blocking(step))
    }
}

impl Spawner {
    /// Returns the same batches, pulled by a separate task one batch ahead of the consumer.
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
            // The channel also closes when the task panics; only a task that ended normally ends the stream.
            let broken = pulling.take()?.wait().await.is_err();
            let stopped = || DataFusionError::Execution("a stage stopped: a bug in this program".into());
            broken.then(|| (Err(stopped()), (taken, None)))
        });
        Box::pin(RecordBatchStreamAdapter::new(schema, stream))
    }
}

/// Work in a pool. Dropping it aborts the work: a chain stops at its next await, a running step finishes unobserved.
#[derive(Debug)]
pub struct Task<T>(JoinHandle<T>);

impl<T> Task<T> {
    /// Waits for the result.
    ///
    /// # Errors
    /// When the task panicked, or its pool has ended.
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
        assert!(broken[5].as_ref().unwrap_err().to_string().ends_with("a stage stopped: a bug in this program"));
    }
}
