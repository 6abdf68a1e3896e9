//! The host with callers that forget to wait: what they ask for is not passed on.

use std::sync::Mutex;

use stillhouse_gpu::{Arg, Device, Event, Launch, Memory, Product, Result, ScaledProduct, Stream};
use stillhouse_gpu_host::Host;

/// What callers forget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forgets {
    Nothing,
    /// That one stream waits for the other.
    WaitIn,
    /// To wait for what this stream does.
    WaitFor(Stream),
    /// To wait for either.
    AnyWait,
}

#[derive(Debug)]
pub struct Careless {
    pub host: Host,
    forgets: Mutex<Forgets>,
}

impl Careless {
    pub fn new(seed: u64, forgets: Forgets) -> Self {
        Self { host: Host::new(seed), forgets: Mutex::new(forgets) }
    }

    pub fn forget_from_now_on(&self, forgets: Forgets) {
        *self.forgets.lock().unwrap() = forgets;
    }

    fn forgets(&self) -> Forgets {
        *self.forgets.lock().unwrap()
    }
}

/// The stream that an event of the host is of.
fn stream(event: Event) -> Stream {
    if event.number().is_multiple_of(2) { Stream::Pass } else { Stream::Extract }
}

impl Device for Careless {
    fn name(&self) -> &str {
        self.host.name()
    }
    fn model(&self) -> &str {
        self.host.model()
    }
    fn multiprocessors(&self) -> u32 {
        self.host.multiprocessors()
    }
    fn memory(&self) -> Result<Memory> {
        self.host.memory()
    }
    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.host.allocate(bytes)
    }
    fn free(&self, pointer: u64) {
        self.host.free(pointer);
    }
    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        self.host.allocate_pinned(bytes)
    }
    fn free_pinned(&self, pointer: *mut u8, bytes: usize) {
        self.host.free_pinned(pointer, bytes);
    }
    unsafe fn copy_in(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        unsafe { self.host.copy_in(stream, to, from, bytes) }
    }
    unsafe fn copy_out(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        unsafe { self.host.copy_out(stream, to, from, bytes) }
    }
    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        unsafe { self.host.launch(stream, launch, args) }
    }
    unsafe fn product(&self, stream: Stream, product: &Product) -> Result<()> {
        unsafe { self.host.product(stream, product) }
    }
    fn ends_in_gelu(&self, product: &Product) -> Result<bool> {
        self.host.ends_in_gelu(product)
    }
    fn lacks_fp8(&self) -> Option<String> {
        self.host.lacks_fp8()
    }
    unsafe fn scaled_product(&self, stream: Stream, product: &ScaledProduct) -> Result<()> {
        unsafe { self.host.scaled_product(stream, product) }
    }
    fn record(&self, stream: Stream) -> Result<Event> {
        self.host.record(stream)
    }
    fn wait_in(&self, stream: Stream, event: Event) -> Result<()> {
        if self.forgets() == Forgets::WaitIn { Ok(()) } else { self.host.wait_in(stream, event) }
    }
    fn wait(&self, event: Event) -> Result<()> {
        let forgotten = [Forgets::WaitFor(stream(event)), Forgets::AnyWait].contains(&self.forgets());
        if forgotten { Ok(()) } else { self.host.wait(event) }
    }
}
