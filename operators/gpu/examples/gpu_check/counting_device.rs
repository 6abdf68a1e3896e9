//! A device wrapper that counts allocated bytes and bytes copied to the host, and on request times every launch.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use stillhouse_gpu::{Arg, Device, Event, Launch, Memory, Product, Result, ScaledProduct, Stream};

/// The launches of one kernel.
#[derive(Debug, Clone, Copy, Default)]
pub struct Calls {
    pub count: u64,
    pub seconds: f64,
    /// Floating-point operations; 0 unless it is a product.
    pub flops: f64,
}

/// Counts since the last [`CountingDevice::reset`]; `allocated` counts since the beginning.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    pub allocated: u64,
    pub peak_allocated: u64,
    pub to_host: u64,
    pub calls: BTreeMap<String, Calls>,
    sizes: HashMap<u64, u64>,
}

/// The device wrapper.
pub struct CountingDevice {
    device: Arc<dyn Device>,
    counts: Mutex<Counts>,
    timed: AtomicBool,
}

impl fmt::Debug for CountingDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.device.fmt(f)
    }
}

impl CountingDevice {
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, counts: Mutex::default(), timed: AtomicBool::new(false) }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the counts.
    pub fn snapshot(&self) -> Counts {
        self.counts().clone()
    }

    /// Resets the counts. If `timed`, every call waits for all work before and after it, so nothing overlaps.
    pub fn reset(&self, timed: bool) {
        self.timed.store(timed, Ordering::Relaxed);
        let mut counts = self.counts();
        counts.to_host = 0;
        counts.calls.clear();
        counts.peak_allocated = counts.allocated;
    }

    /// Waits for both streams.
    pub fn synchronize(&self) -> Result<()> {
        for stream in [Stream::Pass, Stream::Extract] {
            self.device.wait(self.device.record(stream)?)?;
        }
        Ok(())
    }

    fn count(&self, name: &str, stream: Stream, flops: f64, operation: impl FnOnce() -> Result<()>) -> Result<()> {
        let timed = self.timed.load(Ordering::Relaxed);
        if timed {
            self.synchronize()?;
        }
        let began = Instant::now();
        operation()?;
        if timed {
            self.device.wait(self.device.record(stream)?)?;
        }
        let seconds = if timed { began.elapsed().as_secs_f64() } else { 0.0 };
        let mut counts = self.counts();
        if !counts.calls.contains_key(name) {
            counts.calls.insert(name.into(), Calls::default());
        }
        if let Some(calls) = counts.calls.get_mut(name) {
            calls.count += 1;
            calls.seconds += seconds;
            calls.flops += flops;
        }
        Ok(())
    }
}

impl Device for CountingDevice {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn model(&self) -> &str {
        self.device.model()
    }

    fn arithmetic(&self) -> String {
        self.device.arithmetic()
    }

    fn multiprocessors(&self) -> u32 {
        self.device.multiprocessors()
    }

    fn memory(&self) -> Result<Memory> {
        self.device.memory()
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let pointer = self.device.allocate(bytes)?;
        let mut counts = self.counts();
        counts.sizes.insert(pointer, bytes as u64);
        counts.allocated += bytes as u64;
        counts.peak_allocated = counts.peak_allocated.max(counts.allocated);
        Ok(pointer)
    }

    fn free(&self, pointer: u64) {
        self.device.free(pointer);
        let mut counts = self.counts();
        let bytes = counts.sizes.remove(&pointer).unwrap_or_default();
        counts.allocated -= bytes;
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        self.device.allocate_pinned(bytes)
    }

    fn free_pinned(&self, pointer: *mut u8, bytes: usize) {
        self.device.free_pinned(pointer, bytes);
    }

    unsafe fn copy_to_device(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller keeps the contract of `copy_to_device`
        self.count("copy to the device", stream, 0.0, || unsafe { self.device.copy_to_device(stream, to, from, bytes) })
    }

    unsafe fn copy_to_host(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        self.counts().to_host += bytes as u64;
        // SAFETY: the caller keeps the contract of `copy_to_host`
        self.count("copy to the host", stream, 0.0, || unsafe { self.device.copy_to_host(stream, to, from, bytes) })
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch`
        self.count(launch.kernel, stream, 0.0, || unsafe { self.device.launch(stream, launch, args) })
    }

    unsafe fn product(&self, stream: Stream, product: &Product) -> Result<()> {
        let [m, n, k] = [product.a.rows, product.b.rows, product.a.columns];
        let name = format!("product [{k}, {n}]");
        let flops = 2.0 * m as f64 * n as f64 * k as f64;
        // SAFETY: the caller keeps the contract of `product`
        self.count(&name, stream, flops, || unsafe { self.device.product(stream, product) })
    }

    fn fuses_gelu(&self, product: &Product) -> Result<bool> {
        self.device.fuses_gelu(product)
    }

    fn fp8_unsupported_reason(&self) -> Option<String> {
        self.device.fp8_unsupported_reason()
    }

    unsafe fn scaled_product(&self, stream: Stream, product: &ScaledProduct) -> Result<()> {
        let [m, n, k] = [product.a.rows, product.b.rows, product.a.columns];
        let name = format!("product of e4m3 [{k}, {n}]");
        let flops = 2.0 * m as f64 * n as f64 * k as f64;
        // SAFETY: the caller keeps the contract of `scaled_product`
        self.count(&name, stream, flops, || unsafe { self.device.scaled_product(stream, product) })
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        self.device.record(stream)
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.device.stream_wait_event(stream, event)
    }

    fn is_done(&self, event: Event) -> Result<bool> {
        self.device.is_done(event)
    }

    fn wait(&self, event: Event) -> Result<()> {
        self.device.wait(event)
    }
}
