//! The owner of a device: the one thread that runs the teacher there for all splits, and a helper thread that makes
//! columns from logits.
//!
//! ```text
//!   splits ──[QUEUE_CAPACITY requests]──► forward: pass, logits ──[1 slice of 32 MB]──► columns: log-probabilities,
//!                                                     ▲                                  │  noise, top-k ──► split
//!                                                     └──────── the slice's buffer ──────┘
//! ```
//!
//! The forward pass of a batch runs while the columns of the previous one are made; only two logits buffers exist.
//! Requests come from any split and are served in order. Batches do not affect each other, so the bytes of a shard do
//! not depend on the order.
//!
//! In a job whose text the teacher generates, requests are batches of prompts and the first thread does all the work
//! (`generation`). It takes the next request as soon as a slot is free.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use stillhouse_operators::extract::{BatchForward, ColumnBuilder, ExtractConfig, Slice, Workspace};
use stillhouse_operators::generate::{BatchedDecoder, GenerateConfig};
use stillhouse_operators::operator::{Measure, Meter, OperatorError};
use stillhouse_schemas::manifest::Statistics;
use stillhouse_teacher::stillhouse_gpu::GpuError;
use stillhouse_teacher::{Logits, Teacher, TeacherError, TeacherInfo};
use tokio::sync::{mpsc, oneshot};

mod generation;

/// Capacity of a device's request queue. Further requests wait in their splits.
const QUEUE_CAPACITY: usize = 2;
/// Logits buffers of a device: one being filled while the helper reads the other.
const LOGITS_BUFFERS: usize = 2;
/// Interval at which an owner without a free buffer checks whether its device has finished its work.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// A batch with its new columns.
#[derive(Debug)]
pub struct FinishedBatch {
    /// The batch.
    pub batch: RecordBatch,
    /// Statistics to add to those of the split.
    pub statistics: Statistics,
    /// Time that the device spent on the batch.
    pub busy: Duration,
}

/// The channel for the result of a request.
type Reply = oneshot::Sender<Result<FinishedBatch, OperatorError>>;

/// A request from a split to a device.
enum Request {
    /// Generates text after these prompts.
    Generate {
        config: Arc<GenerateConfig>,
        batch: RecordBatch,
        meter: Arc<dyn Meter>,
        reply: Reply,
    },
    Extract {
        forward: BatchForward,
        batch: RecordBatch,
        reply: Reply,
    },
    /// Locates the position that caused an error.
    LocateError {
        forward: BatchForward,
        error: OperatorError,
        reply: oneshot::Sender<OperatorError>,
    },
}

/// Sends requests to a device. The owner ends when the last clone is dropped.
#[derive(Clone)]
pub struct DeviceQueue {
    owner: Arc<Owner>,
    info: Arc<TeacherInfo>,
    loss: Arc<Loss>,
    in_flight: Arc<InFlight>,
}

/// The threads of a device. Dropping it ends and, on a GPU, joins them.
struct Owner {
    requests: Option<mpsc::Sender<Request>>,
    threads: Vec<JoinHandle<()>>,
}

impl Owner {
    async fn send(&self, request: Request) -> Result<(), OperatorError> {
        let requests = self.requests.as_ref().ok_or_else(stopped)?;
        requests.send(request).await.map_err(|_| stopped())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.requests = None;
        // A GPU's memory and libraries must be released before the process exits. Its batches are short.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Why a device was lost, if it was, and whether that has been reported.
#[derive(Debug, Default)]
struct Loss {
    reason: OnceLock<String>,
    is_reported: AtomicBool,
}

impl Loss {
    /// Records the error if it means that the device can no longer be used.
    fn record_if_lost(&self, error: &OperatorError) {
        if matches!(error, OperatorError::Teacher(TeacherError::Gpu(GpuError::Failed { lost: true, .. }))) {
            // The first error is the cause.
            let _ = self.reason.set(error.to_string());
        }
    }
}

/// A pending result of a request.
pub struct PendingBatch {
    /// The extraction request, if this is one; needed to locate an error.
    forward: Option<BatchForward>,
    result: oneshot::Receiver<Result<FinishedBatch, OperatorError>>,
}

fn stopped() -> OperatorError {
    OperatorError::Config { operator: "extract", message: "the device stopped: a bug in this program".into() }
}

impl DeviceQueue {
    /// Starts the owner threads of the device that holds the teacher.
    ///
    /// # Errors
    /// When a thread cannot be started, or the device has no memory for the logits buffers.
    pub fn start(teacher: Arc<dyn Teacher>) -> Result<Self, OperatorError> {
        let info = Arc::new(teacher.info().clone());
        let (requests, received) = mpsc::channel(QUEUE_CAPACITY);
        let (messages, received_messages) = sync_channel(1);
        let (buffers, free) = sync_channel(LOGITS_BUFFERS);
        // The owner holds one buffer and the others circulate. The channel has capacity for all of them.
        for _ in 1..LOGITS_BUFFERS {
            let _ = buffers.try_send(teacher.buffer()?);
        }
        let mut logits = teacher.buffer()?;
        let is_gpu = matches!(logits, Logits::Device(_));
        let thread = |name: &str| Builder::new().name(format!("{} {name}", info.device));
        let none = |e: io::Error| OperatorError::Config { operator: "extract", message: format!("no thread: {e}") };
        let loss = Arc::new(Loss::default());
        let in_flight = Arc::new(InFlight(Mutex::new((0, Instant::now()))));
        let (helper_loss, helper_in_flight, owner_in_flight) =
            (Arc::clone(&loss), Arc::clone(&in_flight), Arc::clone(&in_flight));
        let columns = move || make_columns(&received_messages, &buffers, &helper_loss, &helper_in_flight);
        let columns = thread("columns").spawn(columns).map_err(none)?;
        let forward = move || run_owner(teacher.as_ref(), &mut logits, received, &messages, &free, &owner_in_flight);
        let forward = thread("forward").spawn(forward).map_err(none)?;
        // A CPU batch may take minutes and leaves nothing to release, so those threads are not joined.
        let threads = if is_gpu { vec![forward, columns] } else { Vec::new() };
        let owner = Arc::new(Owner { requests: Some(requests), threads });
        Ok(Self { owner, info, loss, in_flight })
    }

    /// Whether the device has no batch now.
    pub fn is_idle(&self) -> bool {
        self.in_flight.state().0 == 0
    }

    /// Whether the device can no longer be used.
    pub fn is_lost(&self) -> bool {
        self.loss_reason().is_some()
    }

    /// The error that lost the device.
    pub fn loss_reason(&self) -> Option<&str> {
        self.loss.reason.get().map(String::as_str)
    }

    /// Returns the device's name the first time it is called after the device was lost.
    pub fn newly_lost(&self) -> Option<&str> {
        (self.is_lost() && !self.loss.is_reported.swap(true, Ordering::Relaxed)).then_some(&self.info.device)
    }

    /// The teacher on this device.
    pub fn info(&self) -> &TeacherInfo {
        &self.info
    }

    /// Submits a batch for extraction; waits while the queue is full.
    ///
    /// # Errors
    /// When the batch does not hold packed sequences.
    pub async fn submit(
        &self,
        config: &Arc<ExtractConfig>,
        batch: RecordBatch,
        meter: Arc<dyn Meter>,
    ) -> Result<PendingBatch, OperatorError> {
        let forward = BatchForward::new(config, &batch, meter)?;
        let (reply, result) = oneshot::channel();
        let request = Request::Extract { forward: forward.clone(), batch, reply };
        self.owner.send(request).await?;
        Ok(PendingBatch { forward: Some(forward), result })
    }

    /// Submits a batch of prompts; waits while the queue is full.
    ///
    /// # Errors
    /// When the device has stopped.
    pub async fn write(
        &self,
        config: &Arc<GenerateConfig>,
        batch: RecordBatch,
        meter: Arc<dyn Meter>,
    ) -> Result<PendingBatch, OperatorError> {
        let (reply, result) = oneshot::channel();
        self.owner.send(Request::Generate { config: Arc::clone(config), batch, meter, reply }).await?;
        Ok(PendingBatch { forward: None, result })
    }
}

impl PendingBatch {
    /// Waits for the batch with its new columns.
    ///
    /// # Errors
    /// When the teacher fails or produces logits that are not finite.
    pub async fn wait(self, device: &DeviceQueue) -> Result<FinishedBatch, OperatorError> {
        let error = match self.result.await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error @ OperatorError::NotFinite { .. })) => error,
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(stopped()),
        };
        // Generated text already reports the position of its error.
        let Some(forward) = self.forward else { return Err(error) };
        let (reply, origin) = oneshot::channel();
        let request = Request::LocateError { forward, error, reply };
        device.owner.send(request).await?;
        Err(origin.await.unwrap_or_else(|_| stopped()))
    }
}

/// Messages from the owner to its helper, in this order for each batch.
enum HelperMessage {
    Begin { forward: BatchForward, batch: RecordBatch, failed: Arc<AtomicBool> },
    Logits(Slice),
    End { ran: Result<(), OperatorError>, busy: Duration, reply: Reply },
}

/// Number of batches in progress on a device, and the time at which the last one ended.
#[derive(Debug)]
struct InFlight(Mutex<(usize, Instant)>);

impl InFlight {
    fn state(&self) -> MutexGuard<'_, (usize, Instant)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a batch, and counts the time that the device was idle before it.
    fn begin(&self, meter: &dyn Meter) {
        let mut state = self.state();
        if state.0 == 0 {
            meter.add_since(Measure::DeviceIdleNanos, state.1);
        }
        state.0 += 1;
    }

    fn end(&self) {
        let mut state = self.state();
        *state = (state.0.saturating_sub(1), Instant::now());
    }
}

fn run_owner(
    teacher: &dyn Teacher,
    logits: &mut Logits,
    mut requests: mpsc::Receiver<Request>,
    messages: &SyncSender<HelperMessage>,
    free: &Receiver<Logits>,
    in_flight: &InFlight,
) {
    let (mut decoder, mut next): (Option<BatchedDecoder<'_, Reply>>, _) = (None, None);
    while let Some(request) = next.take().or_else(|| requests.blocking_recv()) {
        match request {
            Request::Generate { reply, .. } if reply.is_closed() => {}
            Request::Generate { config, batch, meter, reply } => {
                let first = generation::GenerationRequest { config, batch, meter, reply };
                next = generation::serve(teacher, &mut decoder, first, &mut requests, in_flight);
            }
            // the split has ended meanwhile
            Request::Extract { reply, .. } if reply.is_closed() => {}
            Request::Extract { forward, batch, reply } => {
                in_flight.begin(forward.meter());
                let began = Instant::now();
                let failed = Arc::new(AtomicBool::new(false));
                let begin = HelperMessage::Begin { forward: forward.clone(), batch, failed: Arc::clone(&failed) };
                if messages.send(begin).is_err() {
                    return;
                }
                let mut kept = None;
                let ran = forward.run(teacher, logits, &mut |slice| {
                    let made = slice.logits.ready_event();
                    messages.send(HelperMessage::Logits(slice)).map_err(|_| OperatorError::Stopped)?;
                    // The result of `End` reports any error of this.
                    let is_made = || made.as_ref().is_none_or(|made| made.is_done().unwrap_or(true));
                    let buffer = next_buffer(free, is_made, forward.meter())?;
                    if failed.load(Ordering::Relaxed) {
                        // The rest of the batch is not needed. Keep the buffer for the next one.
                        kept = Some(buffer);
                        return Err(OperatorError::Stopped);
                    }
                    Ok(buffer)
                });
                if let Some(buffer) = kept {
                    *logits = buffer;
                }
                if messages.send(HelperMessage::End { ran, busy: began.elapsed(), reply }).is_err() {
                    return;
                }
            }
            Request::LocateError { forward, error, reply } => {
                let _ = reply.send(forward.locate_non_finite(teacher, error));
            }
        }
    }
}

/// Waits for a free buffer. Counts the device as blocked only from the moment at which it has finished the logits it
/// was making.
fn next_buffer<T>(free: &Receiver<T>, is_made: impl Fn() -> bool, meter: &dyn Meter) -> Result<T, OperatorError> {
    match free.try_recv() {
        Ok(buffer) => return Ok(buffer),
        Err(TryRecvError::Disconnected) => return Err(OperatorError::Stopped),
        Err(TryRecvError::Empty) => {}
    }
    while !is_made() {
        match free.recv_timeout(POLL_INTERVAL) {
            Ok(buffer) => return Ok(buffer),
            Err(RecvTimeoutError::Disconnected) => return Err(OperatorError::Stopped),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    let waits = Instant::now();
    let buffer = free.recv().map_err(|_| OperatorError::Stopped)?;
    meter.add_since(Measure::DeviceBlockedNanos, waits);
    Ok(buffer)
}

fn make_columns(messages: &Receiver<HelperMessage>, buffers: &SyncSender<Logits>, loss: &Loss, in_flight: &InFlight) {
    let mut workspace = Workspace::default();
    let mut columns: Result<ColumnBuilder, OperatorError> = Err(stopped());
    let mut has_failed = Arc::new(AtomicBool::new(false));
    for message in messages {
        match message {
            HelperMessage::Begin { forward, batch, failed } => {
                columns = forward.columns(batch);
                has_failed = failed;
            }
            HelperMessage::Logits(slice) => {
                let found = columns.as_mut().ok().map(|columns| columns.extract(&slice, &mut workspace));
                has_failed.fetch_or(matches!(found, None | Some(Err(_))), Ordering::Relaxed);
                // Return the buffer before the remaining work on the slice: the device needs it for the next one.
                let _ = buffers.try_send(slice.logits);
                let placed = found
                    .map(|found| columns.as_mut().map_or(Ok(()), |c| c.store(&slice.positions, found?, &slice.states)));
                if let Some(Err(e)) = placed {
                    columns = Err(e);
                }
                has_failed.fetch_or(columns.is_err(), Ordering::Relaxed);
            }
            HelperMessage::End { ran, busy, reply } => {
                let made = std::mem::replace(&mut columns, Err(stopped()));
                let done = made.and_then(|columns| {
                    ran?;
                    let (batch, statistics) = columns.finish()?;
                    Ok(FinishedBatch { batch, statistics, busy })
                });
                let _ = done.as_ref().inspect_err(|error| loss.record_if_lost(error));
                in_flight.end();
                // The receiver may be gone.
                let _ = reply.send(done);
            }
        }
    }
}

#[cfg(test)]
mod tests;
