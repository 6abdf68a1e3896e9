//! The owner of a device: the one thread that runs the teacher there, for all splits, and its helper that makes columns of the logits.
//!
//! ```text
//!   splits ──[QUEUE requests]──► forward: pass, logits ──[1 slice of 32 MB]──► columns: log-probabilities, noise, top-k ──► the split
//!                                   ▲                                             │
//!                                   └───────────── the slice's buffer ────────────┘
//! ```
//!
//! While the columns of one batch are made, the pass of the next one runs; two buffers of logits are all there are. Requests come from any
//! split and are served in their order; what is in one does not depend on the others, so neither do the bytes of a shard.
//!
//! In a job whose text the teacher writes, requests are prompts, and the first thread alone does the work (`written`): it takes the next
//! request as soon as a slot has nothing to do.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use stillhouse_operators::extract::{Columns, ExtractConfig, Forward, Slice, Workspace};
use stillhouse_operators::generate::{GenerateConfig, Writer};
use stillhouse_operators::operator::{Measure, Meter, OperatorError};
use stillhouse_schemas::manifest::Statistics;
use stillhouse_teacher::stillhouse_gpu::GpuError;
use stillhouse_teacher::{Logits, Teacher, TeacherError, TeacherInfo};
use tokio::sync::{mpsc, oneshot};

mod written;

/// Requests that wait for a device; more wait with their splits.
const QUEUE: usize = 2;
/// Buffers of logits of a device.
const BUFFERS: usize = 2;
/// How often an owner that has no buffer looks whether its device still has something to do.
const LOOKS: Duration = Duration::from_micros(200);

/// A batch with its new columns.
#[derive(Debug)]
pub struct Done {
    /// The batch.
    pub batch: RecordBatch,
    /// What is to be added to the statistics of its split.
    pub statistics: Statistics,
    /// How long the device was at work on it.
    pub busy: Duration,
}

/// Where an answer goes.
type Reply = oneshot::Sender<Result<Done, OperatorError>>;

/// What a split asks of a device.
enum Request {
    /// Text after these prompts.
    Write {
        config: Arc<GenerateConfig>,
        batch: RecordBatch,
        meter: Arc<dyn Meter>,
        reply: Reply,
    },
    Extract {
        forward: Forward,
        batch: RecordBatch,
        reply: Reply,
    },
    /// Where an error comes from.
    Origin {
        forward: Forward,
        error: OperatorError,
        reply: oneshot::Sender<OperatorError>,
    },
}

/// Hands requests to a device; its owner ends when the last one of these is dropped.
#[derive(Clone)]
pub struct DeviceQueue {
    owner: Arc<Owner>,
    info: Arc<TeacherInfo>,
    loss: Arc<Loss>,
    under_way: Arc<UnderWay>,
}

/// The threads of a device; they end with this value.
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
        // a GPU's memory and libraries have to be given back before the process ends; its batches are short
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Why a device is lost, if it is, and whether that was reported.
#[derive(Debug, Default)]
struct Loss {
    reason: OnceLock<String>,
    is_told: AtomicBool,
}

impl Loss {
    /// Looks whether an error is that of a device that is of no use any more.
    fn note(&self, error: &OperatorError) {
        if matches!(error, OperatorError::Teacher(TeacherError::Gpu(GpuError::Failed { lost: true, .. }))) {
            // the first error is the cause
            let _ = self.reason.set(error.to_string());
        }
    }
}

/// The answer to a request, when it is there.
pub struct Answer {
    /// What was asked for of a text that was given.
    forward: Option<Forward>,
    reply: oneshot::Receiver<Result<Done, OperatorError>>,
}

fn stopped() -> OperatorError {
    OperatorError::Config { operator: "extract", message: "the device stopped: a fault of this program".into() }
}

impl DeviceQueue {
    /// Starts the owner of the device that a teacher is on.
    ///
    /// # Errors
    /// When the system gives no thread, or the device no room for logits.
    pub fn start(teacher: Arc<dyn Teacher>) -> Result<Self, OperatorError> {
        let info = Arc::new(teacher.info().clone());
        let (requests, received) = mpsc::channel(QUEUE);
        let (parts, to_columns) = sync_channel(1);
        let (buffers, free) = sync_channel(BUFFERS);
        // one is with the owner, the others circulate; there is room for all of them
        for _ in 1..BUFFERS {
            let _ = buffers.try_send(teacher.buffer()?);
        }
        let mut logits = teacher.buffer()?;
        let is_gpu = matches!(logits, Logits::Device(_));
        let thread = |name: &str| Builder::new().name(format!("{} {name}", info.device));
        let none = |e: io::Error| OperatorError::Config { operator: "extract", message: format!("no thread: {e}") };
        let loss = Arc::new(Loss::default());
        let under_way = Arc::new(UnderWay(Mutex::new((0, Instant::now()))));
        let (noted, ends, begins) = (Arc::clone(&loss), Arc::clone(&under_way), Arc::clone(&under_way));
        let columns = move || make_columns(&to_columns, &buffers, &noted, &ends);
        let columns = thread("columns").spawn(columns).map_err(none)?;
        let forward = move || own(teacher.as_ref(), &mut logits, received, &parts, &free, &begins);
        let forward = thread("forward").spawn(forward).map_err(none)?;
        // a batch of a CPU may take minutes, and nothing is to be given back there
        let threads = if is_gpu { vec![forward, columns] } else { Vec::new() };
        let owner = Arc::new(Owner { requests: Some(requests), threads });
        Ok(Self { owner, info, loss, under_way })
    }

    /// Whether it has no batch now.
    pub fn is_idle(&self) -> bool {
        self.under_way.state().0 == 0
    }

    /// Whether the device is of no use any more.
    pub fn is_lost(&self) -> bool {
        self.lost_because().is_some()
    }

    /// The error by which the device was lost.
    pub fn lost_because(&self) -> Option<&str> {
        self.loss.reason.get().map(String::as_str)
    }

    /// The device's name, once, when it was lost.
    pub fn newly_lost(&self) -> Option<&str> {
        (self.is_lost() && !self.loss.is_told.swap(true, Ordering::Relaxed)).then_some(&self.info.device)
    }

    /// The teacher on this device.
    pub fn info(&self) -> &TeacherInfo {
        &self.info
    }

    /// Hands in a batch; waits while the queue is full.
    ///
    /// # Errors
    /// When the batch does not hold packed sequences.
    pub async fn submit(
        &self,
        config: &Arc<ExtractConfig>,
        batch: RecordBatch,
        meter: Arc<dyn Meter>,
    ) -> Result<Answer, OperatorError> {
        let forward = Forward::new(config, &batch, meter)?;
        let (reply, answer) = oneshot::channel();
        let request = Request::Extract { forward: forward.clone(), batch, reply };
        self.owner.send(request).await?;
        Ok(Answer { forward: Some(forward), reply: answer })
    }

    /// Hands in a batch of prompts; waits while the queue is full.
    ///
    /// # Errors
    /// When the device has stopped.
    pub async fn write(
        &self,
        config: &Arc<GenerateConfig>,
        batch: RecordBatch,
        meter: Arc<dyn Meter>,
    ) -> Result<Answer, OperatorError> {
        let (reply, answer) = oneshot::channel();
        self.owner.send(Request::Write { config: Arc::clone(config), batch, meter, reply }).await?;
        Ok(Answer { forward: None, reply: answer })
    }
}

impl Answer {
    /// The batch with its columns.
    ///
    /// # Errors
    /// When the teacher fails, or gives logits that are no numbers.
    pub async fn wait(self, device: &DeviceQueue) -> Result<Done, OperatorError> {
        let error = match self.reply.await {
            Ok(Ok(done)) => return Ok(done),
            Ok(Err(error @ OperatorError::NotFinite { .. })) => error,
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(stopped()),
        };
        // a text that is written goes wrong where it does
        let Some(forward) = self.forward else { return Err(error) };
        let (reply, origin) = oneshot::channel();
        let request = Request::Origin { forward, error, reply };
        device.owner.send(request).await?;
        Err(origin.await.unwrap_or_else(|_| stopped()))
    }
}

/// What goes from the owner to its helper, batch after batch.
enum Part {
    Begin { forward: Forward, batch: RecordBatch, failed: Arc<AtomicBool> },
    Logits(Slice),
    End { ran: Result<(), OperatorError>, busy: Duration, reply: Reply },
}

/// How many batches are under way on a device, and since when there is none.
#[derive(Debug)]
struct UnderWay(Mutex<(usize, Instant)>);

impl UnderWay {
    fn state(&self) -> MutexGuard<'_, (usize, Instant)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more; counts the time in which there was none.
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

fn own(
    teacher: &dyn Teacher,
    logits: &mut Logits,
    mut requests: mpsc::Receiver<Request>,
    parts: &SyncSender<Part>,
    free: &Receiver<Logits>,
    under_way: &UnderWay,
) {
    let (mut writer, mut next): (Option<Writer<'_, Reply>>, _) = (None, None);
    while let Some(request) = next.take().or_else(|| requests.blocking_recv()) {
        match request {
            Request::Write { reply, .. } if reply.is_closed() => {}
            Request::Write { config, batch, meter, reply } => {
                let first = written::Prompts { config, batch, meter, reply };
                next = written::write(teacher, &mut writer, first, &mut requests, under_way);
            }
            // whose split has ended meanwhile
            Request::Extract { reply, .. } if reply.is_closed() => {}
            Request::Extract { forward, batch, reply } => {
                under_way.begin(forward.meter());
                let began = Instant::now();
                let failed = Arc::new(AtomicBool::new(false));
                let begin = Part::Begin { forward: forward.clone(), batch, failed: Arc::clone(&failed) };
                if parts.send(begin).is_err() {
                    return;
                }
                let mut kept = None;
                let ran = forward.run(teacher, logits, &mut |slice| {
                    let made = slice.logits.made();
                    parts.send(Part::Logits(slice)).map_err(|_| OperatorError::Stopped)?;
                    // what fails here is told by what comes next
                    let is_made = || made.as_ref().is_none_or(|made| made.is_there().unwrap_or(true));
                    let buffer = next_buffer(free, is_made, forward.meter())?;
                    if failed.load(Ordering::Relaxed) {
                        // the rest of the batch is of no use; the buffer is, to the next one
                        kept = Some(buffer);
                        return Err(OperatorError::Stopped);
                    }
                    Ok(buffer)
                });
                if let Some(buffer) = kept {
                    *logits = buffer;
                }
                if parts.send(Part::End { ran, busy: began.elapsed(), reply }).is_err() {
                    return;
                }
            }
            Request::Origin { forward, error, reply } => {
                let _ = reply.send(forward.origin(teacher, error));
            }
        }
    }
}

/// Waits for a free buffer, and counts the time in which a device waits for it: from when on it has made what it was told to.
fn next_buffer<T>(free: &Receiver<T>, is_made: impl Fn() -> bool, meter: &dyn Meter) -> Result<T, OperatorError> {
    match free.try_recv() {
        Ok(buffer) => return Ok(buffer),
        Err(TryRecvError::Disconnected) => return Err(OperatorError::Stopped),
        Err(TryRecvError::Empty) => {}
    }
    while !is_made() {
        match free.recv_timeout(LOOKS) {
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

fn make_columns(parts: &Receiver<Part>, buffers: &SyncSender<Logits>, loss: &Loss, under_way: &UnderWay) {
    let mut workspace = Workspace::default();
    let mut columns: Result<Columns, OperatorError> = Err(stopped());
    let mut has_failed = Arc::new(AtomicBool::new(false));
    for part in parts {
        match part {
            Part::Begin { forward, batch, failed } => {
                columns = forward.columns(batch);
                has_failed = failed;
            }
            Part::Logits(slice) => {
                let found = columns.as_mut().ok().map(|columns| columns.extract(&slice, &mut workspace));
                has_failed.fetch_or(matches!(found, None | Some(Err(_))), Ordering::Relaxed);
                // before the rest of the work on it: the device has the next slice to make
                let _ = buffers.try_send(slice.logits);
                let placed = found.map(|found| {
                    columns.as_mut().map_or(Ok(()), |c| c.place(&slice.positions, &found?, &slice.states))
                });
                if let Some(Err(e)) = placed {
                    columns = Err(e);
                }
                has_failed.fetch_or(columns.is_err(), Ordering::Relaxed);
            }
            Part::End { ran, busy, reply } => {
                let made = std::mem::replace(&mut columns, Err(stopped()));
                let done = made.and_then(|columns| {
                    ran?;
                    let (batch, statistics) = columns.finish()?;
                    Ok(Done { batch, statistics, busy })
                });
                let _ = done.as_ref().inspect_err(|error| loss.note(error));
                under_way.end();
                // nobody may be left to take it
                let _ = reply.send(done);
            }
        }
    }
}

#[cfg(test)]
mod tests;
