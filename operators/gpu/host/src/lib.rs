//! A [`Device`] whose kernels run on the host: the same source, compiled as C++, a thread block as fibers of one thread.
//!
//! For tests on machines without a GPU. What is launched, copied or multiplied waits in the queue of its stream, and is done when something
//! waits for it, or as early as a stream may be: how far each runs ahead follows from a seed, as does the order in which the threads of a
//! block run between two barriers. What depends on either is a race.
//!
//! | of CUDA | here |
//! |---|---|
//! | a copy from pinned memory reads it when the stream comes there | so too; and memory that was written meanwhile is told |
//! | pinned memory given back while a copy of it is on its way | told, and kept until the host is dropped |
//! | a copy from other memory takes the bytes at once, a copy to it is waited for | so too |
//! | device memory is freed once what uses it is done | so too |
//! | an error of a kernel shows at a later call | at the next wait |

mod memory;
mod queue;
mod values;

use std::sync::{Mutex, MutexGuard, PoisonError};

use stillhouse_gpu::{Arg, Device, Element, Event, GpuError, Launch, Memory, Product, Result, ScaledProduct, Stream};

use memory::Blocks;
use queue::{Queues, Work};
pub use values::e4m3;

const NAME: &str = "host";
/// What is free at the beginning, unless a test says otherwise.
const MEMORY_BYTES: u64 = 4 << 30;
/// A number that is added to the seed of the streams' order: all tests in another one.
const OTHER_ORDER: &str = "STILLHOUSE_HOST_STREAMS";

/// The host in the place of a GPU.
#[derive(Debug)]
pub struct Host {
    total: u64,
    /// Bytes that are free and cannot be had.
    unusable: u64,
    state: Mutex<State>,
}

/// What calls from any thread share.
#[derive(Debug)]
struct State {
    blocks: Blocks,
    pinned: Blocks,
    allocations: u64,
    /// Bytes of the device that were allocated at once at most.
    most: u64,
    /// Bytes that were copied to the host.
    copied_out: u64,
    queues: Queues,
}

impl Host {
    /// A host whose threads and streams run in an order that follows from the seed. Threads: 0 is by number. Streams: of four seeds in a row,
    /// from 0 on, nothing is done before it is waited for; the pass is always as early as it may be, and the extraction as late; the other way
    /// round; both are somewhere between.
    #[must_use]
    pub fn new(schedule_seed: u64) -> Self {
        Self::with_memory(schedule_seed, MEMORY_BYTES)
    }

    /// A host with so much memory.
    #[must_use]
    pub fn with_memory(schedule_seed: u64, total: u64) -> Self {
        Self::fragmented(schedule_seed, total, 0)
    }

    /// A host with so much memory, of which some is free and in pieces that are of no use, as on a device that others use too.
    #[must_use]
    pub fn fragmented(schedule_seed: u64, total: u64, unusable: u64) -> Self {
        let other = std::env::var(OTHER_ORDER).unwrap_or_default();
        let other = other.bytes().fold(0u64, |n, b| n.wrapping_mul(10).wrapping_add(u64::from(b.wrapping_sub(b'0'))));
        let queues = Queues::new(schedule_seed, schedule_seed.wrapping_add(other));
        let (blocks, pinned) = (Blocks::default(), Blocks::default());
        let state = State { blocks, pinned, allocations: 0, most: 0, copied_out: 0, queues };
        Self { total, unusable, state: Mutex::new(state) }
    }

    /// Bytes of the device that are allocated now.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.state().blocks.held()
    }

    /// Bytes of the device that were allocated at once at most.
    #[must_use]
    pub fn most_used(&self) -> u64 {
        self.state().most
    }

    /// Bytes of pinned memory that are allocated now.
    #[must_use]
    pub fn used_pinned(&self) -> u64 {
        self.state().pinned.held()
    }

    /// Bytes that were copied from the device so far.
    #[must_use]
    pub fn copied_out(&self) -> u64 {
        self.state().copied_out
    }

    /// Allocations so far, of both kinds.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.state().allocations
    }

    /// Does what is left in the queues, and gives what callers did that no device allows, and forgets it. A host that is dropped with such
    /// faults panics.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut state = self.state();
        state.finish();
        state.queues.take_faults()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enqueue(&self, stream: Stream, work: impl FnOnce(&mut State) -> Result<Option<Work>>) -> Result<()> {
        let mut state = self.state();
        if let Some(work) = work(&mut state)? {
            state.queues.push(stream, work);
        }
        state.drift();
        Ok(())
    }
}

fn failed(call: impl Into<String>, message: impl Into<String>) -> GpuError {
    GpuError::Failed { device: NAME.into(), call: call.into(), message: message.into(), lost: false }
}

impl Device for Host {
    fn name(&self) -> &str {
        NAME
    }

    fn model(&self) -> &str {
        NAME
    }

    /// Its kernels are loops, which would take minutes.
    fn rehearsed(&self, tokens: usize) -> usize {
        tokens.min(3)
    }

    fn multiprocessors(&self) -> u32 {
        4
    }

    fn memory(&self) -> Result<Memory> {
        Ok(Memory { free: self.total.saturating_sub(self.used()), total: self.total })
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let Memory { free, total } = self.memory()?;
        if memory::size(bytes).is_none_or(|size| size > free.saturating_sub(self.unusable)) {
            return Err(GpuError::Memory { device: NAME.into(), bytes: bytes as u64, free, total });
        }
        let mut state = self.state();
        state.allocations += 1;
        let pointer = state.blocks.take(bytes)?;
        state.most = state.most.max(state.blocks.held());
        Ok(pointer)
    }

    fn free(&self, pointer: u64) {
        let mut state = self.state();
        if let Some(block) = state.blocks.of(pointer) {
            state.run_past(block);
        }
        state.blocks.give_back(pointer);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        let mut state = self.state();
        state.allocations += 1;
        state.pinned.take(bytes).map(|pointer| pointer as *mut u8)
    }

    fn free_pinned(&self, pointer: *mut u8, _: usize) {
        let mut state = self.state();
        let Some(block) = state.pinned.of(pointer as u64) else { return };
        if state.queues.uses(block) {
            state
                .queues
                .fault(format!("{} bytes of pinned memory were given back with a copy on its way", block.bytes));
            state.pinned.set_aside(pointer as u64);
        } else {
            state.pinned.give_back(pointer as u64);
        }
    }

    unsafe fn copy_in(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        self.enqueue(stream, |state| {
            state.blocks.check("copy_in", to, bytes)?;
            // SAFETY: so many bytes are there, as the caller says
            let seen = unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec();
            let pinned = state.pinned.holds(from as u64, bytes).then_some(from as u64);
            Ok((bytes > 0).then_some(Work::CopyIn { to, pinned, seen }))
        })
    }

    unsafe fn copy_out(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        let mut is_pinned = true;
        self.enqueue(stream, |state| {
            state.blocks.check("copy_out", from, bytes)?;
            is_pinned = state.pinned.holds(to as u64, bytes);
            state.copied_out += bytes as u64;
            Ok((bytes > 0).then_some(Work::CopyOut { to: to as u64, from, bytes }))
        })?;
        // the target may be gone once this has returned
        if is_pinned { Ok(()) } else { self.wait(self.record(stream)?) }
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        self.enqueue(stream, |state| {
            for (at, arg) in args.iter().enumerate() {
                if let Arg::Pointer(pointer) = *arg
                    && pointer != 0
                    && !state.blocks.touches(pointer)
                {
                    return Err(failed(launch.kernel, format!("argument {at}, {pointer:#x}, points to no buffer")));
                }
            }
            Ok(Some(Work::Launch(state.queues.launched(launch, args)?)))
        })
    }

    unsafe fn product(&self, stream: Stream, product: &Product) -> Result<()> {
        self.enqueue(stream, |state| {
            values::check(product)?;
            values::matrices(product).try_for_each(|(what, at, bytes)| state.blocks.check(what, at, bytes))?;
            Ok(Some(Work::Product(*product)))
        })
    }

    fn ends_in_gelu(&self, product: &Product) -> Result<bool> {
        // as where a library does it, which does not say how exact its tanh is
        Ok(product.d.element != Element::F32 && !product.add)
    }

    fn lacks_fp8(&self) -> Option<String> {
        None
    }

    unsafe fn scaled_product(&self, stream: Stream, product: &ScaledProduct) -> Result<()> {
        self.enqueue(stream, |state| {
            values::check_scaled(product)?;
            values::scaled_matrices(product).try_for_each(|(what, at, bytes)| state.blocks.check(what, at, bytes))?;
            Ok(Some(Work::ScaledProduct(*product)))
        })
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let mut state = self.state();
        state.drift();
        Ok(state.queues.here(stream))
    }

    fn wait_in(&self, stream: Stream, event: Event) -> Result<()> {
        self.enqueue(stream, |_| Ok(Some(Work::Wait(event))))
    }

    fn is_done(&self, event: Event) -> Result<bool> {
        let mut state = self.state();
        state.drift();
        Ok(state.queues.is_done(event))
    }

    fn wait(&self, event: Event) -> Result<()> {
        let mut state = self.state();
        state.run_to(event);
        state.queues.take_error().map_or(Ok(()), Err)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let faults = self.faults();
        assert!(faults.is_empty() || std::thread::panicking(), "{}", faults.join("; "));
    }
}
