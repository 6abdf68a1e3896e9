//! The queues of the streams, and when their work runs.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use stillhouse_gpu::{Arg, Event, GpuError, Launch, Product, Result, ScaledProduct, Stream};

use crate::memory::Allocation;
use crate::{State, failed, products};

unsafe extern "C" {
    fn stillhouse_host_launch(
        kernel: *const c_char,
        grid: *const u32,
        block: *const u32,
        shared_bytes: u32,
        args: *mut *mut c_void,
        schedule_seed: u64,
    ) -> c_int;
    fn stillhouse_host_kernels() -> *const c_char;
}

/// Initial capacity of a queue: more than a batch has in flight, so that tests which measure memory do not measure
/// queue growth.
const INITIAL_CAPACITY: usize = 1024;

const STREAMS: [Stream; 2] = [Stream::Pass, Stream::Extract];

/// The arguments of a kernel launch.
#[derive(Debug)]
pub struct QueuedLaunch {
    kernel: CString,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    args: Vec<Arg>,
    schedule_seed: u64,
}

/// A piece of work of a stream.
#[derive(Debug)]
pub enum Work {
    /// `snapshot` holds the source bytes at the time of the call. It is the source, unless the memory is `pinned`: pinned
    /// memory is read later, and must still be equal.
    CopyIn {
        to: u64,
        pinned: Option<u64>,
        snapshot: Vec<u8>,
    },
    CopyOut {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Launch(QueuedLaunch),
    Product(Product),
    ScaledProduct(ScaledProduct),
    Wait(Event),
}

impl Work {
    /// Whether it accesses memory of this allocation.
    fn uses(&self, allocation: Allocation) -> bool {
        match self {
            Self::CopyIn { to, pinned, .. } => {
                allocation.touches(*to) || pinned.is_some_and(|from| allocation.touches(from))
            }
            Self::CopyOut { to, from, .. } => allocation.touches(*to) || allocation.touches(*from),
            Self::Launch(launch) => {
                launch.args.iter().any(|arg| matches!(arg, Arg::Pointer(pointer) if allocation.touches(*pointer)))
            }
            Self::Product(product) => products::regions(product).any(|(_, at, _)| allocation.touches(at)),
            Self::ScaledProduct(product) => products::scaled_regions(product).any(|(_, at, _)| allocation.touches(at)),
            Self::Wait(_) => false,
        }
    }
}

/// How early a stream runs its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// When something waits for it.
    Late,
    /// At once.
    Early,
    /// At random.
    Random,
}

/// The queues of the streams.
#[derive(Debug)]
pub struct Queues {
    schedule_seed: u64,
    launches: u64,
    paces: [Pace; 2],
    random_state: u64,
    queues: [VecDeque<Work>; 2],
    /// Pieces of work that each stream has completed.
    done: [u64; 2],
    /// The first error not yet returned to a caller.
    error: Option<GpuError>,
    faults: Vec<String>,
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The stream of an event, and the number of pieces of work before it.
fn stream_and_position(event: Event) -> (usize, u64) {
    ((event.number() % 2) as usize, event.number() / 2)
}

fn kernels() -> &'static BTreeSet<&'static [u8]> {
    static NAMES: OnceLock<BTreeSet<&'static [u8]>> = OnceLock::new();
    NAMES.get_or_init(|| {
        // SAFETY: the string is created once and never freed
        let names = unsafe { CStr::from_ptr(stillhouse_host_kernels()) };
        names.to_bytes().split(|byte| *byte == b'\n').collect()
    })
}

impl Queues {
    pub fn new(schedule_seed: u64, stream_seed: u64) -> Self {
        let paces = match stream_seed % 4 {
            0 => [Pace::Late, Pace::Late],
            1 => [Pace::Early, Pace::Late],
            2 => [Pace::Late, Pace::Early],
            _ => [Pace::Random, Pace::Random],
        };
        let random_state = mix(stream_seed);
        let (queues, done) = ([(); 2].map(|()| VecDeque::with_capacity(INITIAL_CAPACITY)), [0; 2]);
        Self { schedule_seed, launches: 0, paces, random_state, queues, done, error: None, faults: Vec::new() }
    }

    pub fn push(&mut self, stream: Stream, work: Work) {
        self.queues[stream as usize].push_back(work);
    }

    /// Records a launch with the order of its threads. The order differs between launches, and repeats in every run of
    /// the program.
    pub fn queue_launch(&mut self, launch: &Launch, args: &[Arg]) -> Result<QueuedLaunch> {
        let Launch { kernel, grid, block, shared_bytes } = *launch;
        if !kernels().contains(kernel.as_bytes()) {
            return Err(failed(kernel, "there is no such kernel"));
        }
        let name = CString::new(kernel).map_err(|e| failed(kernel, e.to_string()))?;
        let seed = if self.schedule_seed == 0 { 0 } else { self.schedule_seed.wrapping_add(self.launches).max(1) };
        self.launches += 1;
        Ok(QueuedLaunch { kernel: name, grid, block, shared_bytes, args: args.to_vec(), schedule_seed: seed })
    }

    /// The event at the present end of a stream's queue.
    pub fn end(&self, stream: Stream) -> Event {
        let at = stream as usize;
        Event::new((self.done[at] + self.queues[at].len() as u64) * 2 + at as u64)
    }

    pub fn is_done(&self, event: Event) -> bool {
        let (stream, position) = stream_and_position(event);
        self.done[stream] >= position
    }

    /// Whether unfinished work uses this allocation.
    pub fn uses(&self, allocation: Allocation) -> bool {
        self.queues.iter().flatten().any(|work| work.uses(allocation))
    }

    /// The event after the last unfinished work of a stream that uses this allocation.
    fn last_use(&self, stream: Stream, allocation: Allocation) -> Option<Event> {
        let at = stream as usize;
        let last = self.queues[at].iter().rposition(|work| work.uses(allocation))?;
        Some(Event::new((self.done[at] + last as u64 + 1) * 2 + at as u64))
    }

    pub fn add_fault(&mut self, message: String) {
        self.error.get_or_insert(failed("memory", message.clone()));
        self.faults.push(message);
    }

    pub fn take_faults(&mut self) -> Vec<String> {
        std::mem::take(&mut self.faults)
    }

    pub fn take_error(&mut self) -> Option<GpuError> {
        self.error.take()
    }

    fn next_random(&mut self) -> u64 {
        self.random_state = mix(self.random_state);
        self.random_state
    }

    fn runs_ahead(&mut self, stream: usize) -> bool {
        match self.paces[stream] {
            Pace::Late => false,
            Pace::Early => true,
            Pace::Random => self.next_random() & 1 == 0,
        }
    }

    /// The event that a stream waits for, if the other stream has not reached it.
    fn pending_wait(&self, stream: usize) -> Option<(usize, u64)> {
        match self.queues[stream].front() {
            Some(Work::Wait(event)) => {
                Some(stream_and_position(*event)).filter(|(other, position)| self.done[*other] < *position)
            }
            _ => None,
        }
    }
}

impl State {
    /// Lets the streams run ahead, as far as their paces say.
    pub fn run_ahead(&mut self) {
        let first = (self.queues.next_random() & 1) as usize;
        for stream in [first, 1 - first, first] {
            while self.queues.runs_ahead(stream) && self.step(stream) {}
        }
    }

    /// Runs all work before an event, and the work that it depends on.
    pub fn run_to(&mut self, event: Event) {
        let (stream, position) = stream_and_position(event);
        while self.queues.done[stream] < position {
            let mut needed = stream;
            // Events only refer to earlier work, so there is no cycle.
            while let Some((other, _)) = self.queues.pending_wait(needed) {
                needed = other;
            }
            if !self.step(needed) {
                return;
            }
            self.run_ahead();
        }
    }

    /// Runs all work that uses an allocation.
    pub fn run_uses_of(&mut self, allocation: Allocation) {
        for stream in STREAMS {
            if let Some(event) = self.queues.last_use(stream, allocation) {
                self.run_to(event);
            }
        }
    }

    pub fn finish(&mut self) {
        for stream in STREAMS {
            self.run_to(self.queues.end(stream));
        }
    }

    /// Runs the next work of a stream. Returns false if there is none, or it waits for the other stream.
    fn step(&mut self, stream: usize) -> bool {
        if self.queues.pending_wait(stream).is_some() {
            return false;
        }
        let Some(work) = self.queues.queues[stream].pop_front() else { return false };
        self.queues.done[stream] += 1;
        if let Err(error) = self.execute(work) {
            self.queues.error.get_or_insert(error);
        }
        true
    }

    fn execute(&mut self, work: Work) -> Result<()> {
        match work {
            Work::CopyIn { to, pinned, snapshot } => {
                if let Some(at) = pinned {
                    self.check_unchanged(at, &snapshot);
                }
                let from = pinned.unwrap_or(snapshot.as_ptr() as u64) as *const u8;
                // SAFETY: device memory lives until its work is done, pinned memory until the host is dropped; both
                // were checked
                unsafe { std::ptr::copy_nonoverlapping(from, to as *mut u8, snapshot.len()) };
                Ok(())
            }
            Work::CopyOut { to, from, bytes } => {
                // SAFETY: as above; for memory that is not pinned, the call itself waits
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
                Ok(())
            }
            Work::Launch(launch) => run_launch(launch),
            Work::Product(product) => {
                // SAFETY: device memory lives until its work is done; the matrices were checked
                unsafe { products::multiply(&product) };
                Ok(())
            }
            Work::ScaledProduct(product) => {
                // SAFETY: as above, for 8-bit matrices
                unsafe { products::multiply_scaled(&product) };
                Ok(())
            }
            Work::Wait(_) => Ok(()),
        }
    }

    /// Reports a fault if pinned memory changed since its copy was called.
    fn check_unchanged(&mut self, at: u64, snapshot: &[u8]) {
        // SAFETY: pinned memory of this length lives until the host is dropped
        let now = unsafe { std::slice::from_raw_parts(at as *const u8, snapshot.len()) };
        if let Some(byte) = now.iter().zip(snapshot).position(|(now, snapshot)| now != snapshot) {
            let bytes = snapshot.len();
            self.queues.add_fault(format!("byte {byte} of {bytes} of pinned memory changed before its copy was done"));
        }
    }
}

fn run_launch(launch: QueuedLaunch) -> Result<()> {
    let QueuedLaunch { kernel, grid, block, shared_bytes, mut args, schedule_seed } = launch;
    let mut pointers: Vec<*mut c_void> = args
        .iter_mut()
        .map(|arg| match arg {
            Arg::Pointer(v) | Arg::U64(v) => std::ptr::from_mut(v).cast(),
            Arg::U32(v) => std::ptr::from_mut(v).cast(),
            Arg::I32(v) => std::ptr::from_mut(v).cast(),
            Arg::F32(v) => std::ptr::from_mut(v).cast(),
            Arg::F64(v) => std::ptr::from_mut(v).cast(),
        })
        .collect();
    let (grid, block, pointers) = (grid.as_ptr(), block.as_ptr(), pointers.as_mut_ptr());
    // SAFETY: grid and block have three numbers each; the caller guaranteed the types of the arguments
    let code = unsafe { stillhouse_host_launch(kernel.as_ptr(), grid, block, shared_bytes, pointers, schedule_seed) };
    let message = match code {
        0 => return Ok(()),
        1 => "there is no such kernel".into(),
        2 => "threads of a block wait at different barriers for ever".into(),
        3 => "more than 1,024 threads or 227 KiB of shared memory".into(),
        other => format!("code {other}"),
    };
    Err(failed(kernel.to_string_lossy(), message))
}
