//! The device interface of the forward pass and the extraction: memory, copies, kernel launches, matrix products, and
//! their order.
//!
//! CUDA and the host implement it. The host runs the same kernels, as fibers of one thread. Code above this trait is
//! written once and tested on the host.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::error::GpuError;

/// The result of a device call.
pub type Result<T> = std::result::Result<T, GpuError>;

/// The dtype of matrix elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// 32-bit.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

impl Element {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The suffix of kernel names: `f32`, `bf16`, `f16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// A queue of work. Work of one stream runs in order; streams wait for each other through events only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The forward pass and the logits.
    Pass,
    /// The extraction from slices of logits, and copies to the host.
    Extract,
}

/// A parameter of a kernel, of exactly the type that the kernel declares.
#[derive(Debug, Clone, Copy)]
pub enum Arg {
    /// A pointer to device memory (`T*`).
    Pointer(u64),
    /// `unsigned int`.
    U32(u32),
    /// `int`.
    I32(i32),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
}

/// The launch configuration of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// The kernel's name.
    pub kernel: &'static str,
    /// Blocks: x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block: x, y, z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

/// A row-major matrix in device memory: `rows` rows of `columns` elements, `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// Address of the first element.
    pub pointer: u64,
    /// Dtype of the elements.
    pub element: Element,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
    /// Elements between the starts of two rows.
    pub stride: usize,
}

/// A matrix product: D = A · Bᵀ (+ bias) (+ D).
///
/// A is `[m, k]`, B `[n, k]` as linear layers store their weights, D `[m, n]`, and the bias `[n]` of D's dtype. Sums
/// are f32 for all dtypes.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// A.
    pub a: Matrix,
    /// B.
    pub b: Matrix,
    /// D; may be f32 even if A and B are not.
    pub d: Matrix,
    /// Address of the bias; 0 for none.
    pub bias: u64,
    /// Whether to add the product to the present contents of D.
    pub accumulate: bool,
    /// Whether to apply the tanh approximation of GELU to the sum. Valid only if [`Device::fuses_gelu`] returns true,
    /// and never with `accumulate`.
    pub gelu: bool,
}

/// A row-major e4m3 matrix with a scale per row. e4m3 is 8 bits: a sign, 4 of the exponent, 3 of the mantissa; finite
/// up to 448.
#[derive(Debug, Clone, Copy)]
pub struct ScaledMatrix {
    /// Address of the first element; rows are contiguous.
    pub pointer: u64,
    /// Address of the factors of the rows, f32 `[rows]`.
    pub scales: u64,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns, a multiple of 16.
    pub columns: usize,
}

/// A [`Product`] of 8-bit matrices.
#[derive(Debug, Clone, Copy)]
pub struct ScaledProduct {
    /// A.
    pub a: ScaledMatrix,
    /// B; its number of rows is a multiple of 16.
    pub b: ScaledMatrix,
    /// D, of a 16-bit dtype.
    pub d: Matrix,
    /// Address of the bias; 0 for none.
    pub bias: u64,
    /// Whether to add the product to the present contents of D.
    pub accumulate: bool,
}

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Free at present.
    pub free: u64,
    /// In total.
    pub total: u64,
}

/// A point in the order of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event(u64);

impl Event {
    /// An event with the number that a device gave it.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The device's number of the event.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// A GPU, or the host in its place. Any thread may call any method; a stream runs work in the order of the calls.
///
/// Implementations only return and accept addresses. The caller must keep launches within their buffers, so
/// [`Device::launch`] and the raw copies are unsafe.
pub trait Device: Send + Sync + fmt::Debug {
    /// The name in job files and messages: `cuda:0`, `host`.
    fn name(&self) -> &str;

    /// The model of the device: `NVIDIA H200`.
    fn model(&self) -> &str;

    /// Names everything that the last bits of results may depend on: the model, and the libraries it uses.
    fn arithmetic(&self) -> String {
        self.model().into()
    }

    /// The number of tokens of a trial pass that shows the memory use of a pass over `tokens` tokens.
    ///
    /// The default is all of them: libraries choose kernels by size and allocate at the first use of each. Devices
    /// whose kernels allocate nothing return fewer.
    fn trial_tokens(&self, tokens: usize) -> usize {
        tokens
    }

    /// Number of multiprocessors, from which callers choose grid sizes.
    fn multiprocessors(&self) -> u32;

    /// Free and total memory.
    ///
    /// # Errors
    /// If the device fails.
    fn memory(&self) -> Result<Memory>;

    /// Allocates memory for [`Buffer::new`]; [`Device::free`] frees it.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Frees memory of [`Device::allocate`]. The next call reports an error, if there is one.
    fn free(&self, pointer: u64);

    /// Allocates pinned host memory, so that copies are asynchronous; [`Device::free_pinned`] frees it.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8>;

    /// Frees memory of [`Device::allocate_pinned`].
    fn free_pinned(&self, pointer: *mut u8, bytes: usize);

    /// Enqueues a copy to the device on a stream.
    ///
    /// # Safety
    /// `from` stays unchanged until the stream has done the copy. Both addresses have `bytes` bytes.
    ///
    /// # Errors
    /// If the device fails.
    unsafe fn copy_to_device(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()>;

    /// Enqueues a copy to the host on a stream.
    ///
    /// # Safety
    /// Nothing accesses `to` until the stream has done the copy. Both addresses have `bytes` bytes.
    ///
    /// # Errors
    /// If the device fails.
    unsafe fn copy_to_host(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()>;

    /// Enqueues a kernel on a stream.
    ///
    /// # Safety
    /// The arguments have the kernel's types, and the kernel accesses live buffers only.
    ///
    /// # Errors
    /// If there is no such kernel, or the device fails.
    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()>;

    /// Enqueues a product on a stream.
    ///
    /// # Safety
    /// The matrices are within live buffers.
    ///
    /// # Errors
    /// If the shapes do not match, or the device fails.
    unsafe fn product(&self, stream: Stream, product: &Product) -> Result<()>;

    /// Whether [`Device::product`] can apply GELU to this product. Otherwise the caller launches
    /// [`gelu_new`](crate::net::kernels::Kernels::gelu_new) after it.
    ///
    /// # Errors
    /// If the shapes do not match, or the device fails.
    fn fuses_gelu(&self, product: &Product) -> Result<bool>;

    /// The reason why this device has no 8-bit products, or `None` if it has them.
    fn fp8_unsupported_reason(&self) -> Option<String> {
        Some("it has no products of e4m3".into())
    }

    /// Enqueues an 8-bit product on a stream.
    ///
    /// # Safety
    /// The matrices and their scales are within live buffers.
    ///
    /// # Errors
    /// If the shapes do not match, the device has no such products ([`Device::fp8_unsupported_reason`]), or the device fails.
    unsafe fn scaled_product(&self, _: Stream, _: &ScaledProduct) -> Result<()> {
        let (call, message) = ("product of e4m3".into(), self.fp8_unsupported_reason().unwrap_or_default());
        Err(GpuError::Failed { device: self.name().into(), call, message, lost: false })
    }

    /// Returns the present end of a stream's work as an event.
    ///
    /// # Errors
    /// If the device fails.
    fn record(&self, stream: Stream) -> Result<Event>;

    /// Makes a stream wait for an event of another one.
    ///
    /// # Errors
    /// If the device fails.
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()>;

    /// Whether a stream has reached an event. Returns false if the device cannot tell.
    ///
    /// # Errors
    /// If the device fails.
    fn is_done(&self, event: Event) -> Result<bool> {
        let _ = event;
        Ok(false)
    }

    /// Blocks the calling thread until a stream has reached an event.
    ///
    /// # Errors
    /// If the device fails, also in the work before the event.
    fn wait(&self, event: Event) -> Result<()>;
}

/// Memory of a device, freed with this value.
#[derive(Debug)]
pub struct Buffer {
    device: Arc<dyn Device>,
    pointer: u64,
    bytes: usize,
}

impl Buffer {
    /// Allocates `bytes` bytes, aligned to 256. The contents are undefined.
    ///
    /// # Errors
    /// If there is not enough memory. The error has the bytes requested and the bytes free.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let pointer = device.allocate(bytes.max(1))?;
        Ok(Self { device: Arc::clone(device), pointer, bytes })
    }

    /// Allocates a copy of these bytes, and waits for the copy.
    ///
    /// # Errors
    /// As [`Buffer::new`].
    pub fn from_bytes(device: &Arc<dyn Device>, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::new(device, bytes.len())?;
        // SAFETY: both have the length of `bytes`, which is borrowed until the copy is done
        unsafe { device.copy_to_device(Stream::Pass, buffer.pointer, bytes.as_ptr(), bytes.len())? };
        device.wait(device.record(Stream::Pass)?)?;
        Ok(buffer)
    }

    /// The device address.
    #[must_use]
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// The length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies the buffer to the host once the stream has done its present work. For tests and small buffers.
    ///
    /// # Errors
    /// If the device fails.
    pub fn to_host(&self, stream: Stream) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: both have this length, and the copy is waited for
        unsafe { self.device.copy_to_host(stream, bytes.as_mut_ptr(), self.pointer, self.bytes)? };
        self.device.wait(self.device.record(stream)?)?;
        Ok(bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.free(self.pointer);
    }
}

/// Device bytes of buffers of these sizes; an empty buffer takes 1 byte.
pub(crate) fn allocated_bytes(sizes: &[usize]) -> u64 {
    sizes.iter().map(|bytes| (*bytes).max(1) as u64).sum()
}

/// Pinned host memory, freed with this value: copies to and from a device are asynchronous.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<dyn Device>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: this value owns its memory, as a `Vec` does
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `bytes` bytes, zeroed.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let bytes = bytes.max(1);
        let pointer = device.allocate_pinned(bytes)?;
        // SAFETY: `bytes` bytes were just allocated at this address
        unsafe { pointer.write_bytes(0, bytes) };
        Ok(Self { device: Arc::clone(device), pointer, bytes })
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `new` allocated and zeroed the bytes
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this borrow is the only one
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.device.free_pinned(self.pointer, self.bytes);
    }
}
