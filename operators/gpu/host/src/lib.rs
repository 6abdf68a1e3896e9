//! A [`Device`] whose kernels run on the host: the same source, compiled as C++. The threads of a block are fibers of
//! one thread.
//!
//! It is for tests on machines without a GPU. Launches, copies and products go into the queue of their stream. They run
//! when something waits for them, or earlier: a seed decides how far each stream runs ahead. The seed also decides the
//! order in which the threads of a block run between two barriers. A result that depends on either order is a race.
//!
//! | CUDA | this host |
//! |---|---|
//! | a copy from pinned memory reads it when the stream reaches the copy | the same, and reports memory that was written in between |
//! | pinned memory freed while a copy uses it | reported; the memory is kept until the host is dropped |
//! | a copy from other memory takes the bytes at the call, a copy to it blocks | the same |
//! | device memory is freed once the work that uses it is done | the same |
//! | a later call returns the error of a kernel | the next wait returns it |

mod memory;
mod products;
mod queue;

use std::sync::{Mutex, MutexGuard, PoisonError};

use stillhouse_gpu::{Arg, Device, Element, Event, GpuError, Launch, Memory, Product, Result, ScaledProduct, Stream};

use memory::Allocations;
pub use products::e4m3;
use queue::{Queues, Work};

const NAME: &str = "host";
/// Default size of the device's memory.
const DEFAULT_MEMORY_BYTES: u64 = 4 << 30;
/// An environment variable with a number that is added to the seed of the streams' order, to run all tests in another
/// order.
const SEED_OFFSET_VARIABLE: &str = "STILLHOUSE_HOST_STREAMS";

/// The host as a device, in place of a GPU.
#[derive(Debug)]
pub struct Host {
    total: u64,
    /// Bytes that are free but cannot be allocated, as if fragmented.
    unusable: u64,
    state: Mutex<State>,
}

/// The state that calls from all threads share.
#[derive(Debug)]
struct State {
    device_memory: Allocations,
    pinned_memory: Allocations,
    allocations: u64,
    /// Peak of the allocated device bytes.
    peak_bytes: u64,
    /// Bytes copied to the host.
    copied_out: u64,
    queues: Queues,
}

impl Host {
    /// A host whose threads and streams run in an order that follows from the seed.
    ///
    /// Seed 0 runs the threads of a block by number. For the streams, seed modulo 4 decides:
    ///
    /// - 0: both streams run only when something waits for them.
    /// - 1: the pass runs as early as possible, the extraction as late as possible.
    /// - 2: the pass runs as late as possible, the extraction as early as possible.
    /// - 3: both run at random points in between.
    #[must_use]
    pub fn new(schedule_seed: u64) -> Self {
        Self::with_memory(schedule_seed, DEFAULT_MEMORY_BYTES)
    }

    /// As [`Host::new`], with `total` bytes of device memory.
    #[must_use]
    pub fn with_memory(schedule_seed: u64, total: u64) -> Self {
        Self::fragmented(schedule_seed, total, 0)
    }

    /// As [`Host::with_memory`], where `unusable` of the free bytes are fragmented and cannot be allocated, as on a
    /// shared device.
    #[must_use]
    pub fn fragmented(schedule_seed: u64, total: u64, unusable: u64) -> Self {
        let seed_offset = std::env::var(SEED_OFFSET_VARIABLE).unwrap_or_default();
        let seed_offset =
            seed_offset.bytes().fold(0u64, |n, b| n.wrapping_mul(10).wrapping_add(u64::from(b.wrapping_sub(b'0'))));
        let queues = Queues::new(schedule_seed, schedule_seed.wrapping_add(seed_offset));
        let (device_memory, pinned_memory) = (Allocations::default(), Allocations::default());
        let state = State { device_memory, pinned_memory, allocations: 0, peak_bytes: 0, copied_out: 0, queues };
        Self { total, unusable, state: Mutex::new(state) }
    }

    /// Device bytes allocated at present.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.state().device_memory.total_bytes()
    }

    /// Peak of the allocated device bytes.
    #[must_use]
    pub fn peak_used(&self) -> u64 {
        self.state().peak_bytes
    }

    /// Bytes of pinned memory allocated at present.
    #[must_use]
    pub fn used_pinned(&self) -> u64 {
        self.state().pinned_memory.total_bytes()
    }

    /// Bytes copied from the device so far.
    #[must_use]
    pub fn copied_out(&self) -> u64 {
        self.state().copied_out
    }

    /// Number of allocations so far, of device and pinned memory.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.state().allocations
    }

    /// Finishes all queued work, and returns and clears the faults: what callers did that no device allows. Dropping a
    /// host with faults panics.
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
        state.run_ahead();
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

    /// At most 3: the kernels are loops, and would take minutes for more.
    fn trial_tokens(&self, tokens: usize) -> usize {
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
        if memory::allocated_size(bytes).is_none_or(|size| size > free.saturating_sub(self.unusable)) {
            return Err(GpuError::Memory { device: NAME.into(), bytes: bytes as u64, free, total });
        }
        let mut state = self.state();
        state.allocations += 1;
        let pointer = state.device_memory.allocate(bytes)?;
        state.peak_bytes = state.peak_bytes.max(state.device_memory.total_bytes());
        Ok(pointer)
    }

    fn free(&self, pointer: u64) {
        let mut state = self.state();
        if let Some(allocation) = state.device_memory.get(pointer) {
            state.run_uses_of(allocation);
        }
        state.device_memory.free(pointer);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        let mut state = self.state();
        state.allocations += 1;
        state.pinned_memory.allocate(bytes).map(|pointer| pointer as *mut u8)
    }

    fn free_pinned(&self, pointer: *mut u8, _: usize) {
        let mut state = self.state();
        let Some(allocation) = state.pinned_memory.get(pointer as u64) else { return };
        if state.queues.uses(allocation) {
            state.queues.add_fault(format!(
                "{} bytes of pinned memory were given back with a copy on its way",
                allocation.bytes
            ));
            state.pinned_memory.quarantine(pointer as u64);
        } else {
            state.pinned_memory.free(pointer as u64);
        }
    }

    unsafe fn copy_to_device(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        self.enqueue(stream, |state| {
            state.device_memory.check("copy_in", to, bytes)?;
            // SAFETY: the caller guarantees `bytes` bytes
            let snapshot = unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec();
            let pinned = state.pinned_memory.contains_range(from as u64, bytes).then_some(from as u64);
            Ok((bytes > 0).then_some(Work::CopyIn { to, pinned, snapshot }))
        })
    }

    unsafe fn copy_to_host(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        let mut is_pinned = true;
        self.enqueue(stream, |state| {
            state.device_memory.check("copy_out", from, bytes)?;
            is_pinned = state.pinned_memory.contains_range(to as u64, bytes);
            state.copied_out += bytes as u64;
            Ok((bytes > 0).then_some(Work::CopyOut { to: to as u64, from, bytes }))
        })?;
        // Waits, because the target may be freed after this returns.
        if is_pinned { Ok(()) } else { self.wait(self.record(stream)?) }
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        self.enqueue(stream, |state| {
            for (at, arg) in args.iter().enumerate() {
                if let Arg::Pointer(pointer) = *arg
                    && pointer != 0
                    && !state.device_memory.touches(pointer)
                {
                    return Err(failed(launch.kernel, format!("argument {at}, {pointer:#x}, points to no buffer")));
                }
            }
            Ok(Some(Work::Launch(state.queues.queue_launch(launch, args)?)))
        })
    }

    unsafe fn product(&self, stream: Stream, product: &Product) -> Result<()> {
        self.enqueue(stream, |state| {
            products::check_shapes(product)?;
            products::regions(product).try_for_each(|(what, at, bytes)| state.device_memory.check(what, at, bytes))?;
            Ok(Some(Work::Product(*product)))
        })
    }

    fn fuses_gelu(&self, product: &Product) -> Result<bool> {
        // As cuBLASLt, which does not document the accuracy of its tanh.
        Ok(product.d.element != Element::F32 && !product.accumulate)
    }

    fn fp8_unsupported_reason(&self) -> Option<String> {
        None
    }

    unsafe fn scaled_product(&self, stream: Stream, product: &ScaledProduct) -> Result<()> {
        self.enqueue(stream, |state| {
            products::check_scaled_shapes(product)?;
            products::scaled_regions(product)
                .try_for_each(|(what, at, bytes)| state.device_memory.check(what, at, bytes))?;
            Ok(Some(Work::ScaledProduct(*product)))
        })
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let mut state = self.state();
        state.run_ahead();
        Ok(state.queues.end(stream))
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.enqueue(stream, |_| Ok(Some(Work::Wait(event))))
    }

    fn is_done(&self, event: Event) -> Result<bool> {
        let mut state = self.state();
        state.run_ahead();
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
