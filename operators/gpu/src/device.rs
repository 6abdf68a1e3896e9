//! What the forward pass and the extraction ask of a device: memory, copies, launches, products, an order among them.
//!
//! Two implementations: CUDA, and the host, where the same kernels run as fibers of one thread. Everything above this trait is written
//! once and tested on the host.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::error::GpuError;

/// The result of what a device does.
pub type Result<T> = std::result::Result<T, GpuError>;

/// The type of the elements of a matrix.
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
    /// Bytes of one.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// As kernels' names end: `f32`, `bf16`, `f16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// Work within a stream is done in its order; streams wait for each other through events only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The forward pass and the logits.
    Pass,
    /// What is made of slices of logits, and copies to the host.
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

/// How a kernel is launched.
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
    /// Its first element.
    pub pointer: u64,
    /// Type of its elements.
    pub element: Element,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

/// D = A · Bᵀ (+ bias) (+ D): A `[m, k]`, B `[n, k]` as linear layers store their weights, D `[m, n]`, bias `[n]` of D's type. Products are
/// summed in f32 whatever the types are.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// A.
    pub a: Matrix,
    /// B.
    pub b: Matrix,
    /// D; may be f32 where A and B are not.
    pub d: Matrix,
    /// Pointer to the bias, 0 for none.
    pub bias: u64,
    /// Whether the product is added to what D holds.
    pub add: bool,
    /// Whether D is GELU, in its tanh form, of the sum: where [`Device::ends_in_gelu`] says so, and not with `add`.
    pub gelu: bool,
}

/// A row-major matrix of e4m3 (8 bits: a sign, 4 of the exponent, 3 of the mantissa; finite up to 448), with a factor for each row.
#[derive(Debug, Clone, Copy)]
pub struct Scaled {
    /// Its first element; rows lie one after the other.
    pub pointer: u64,
    /// What each row is multiplied with, f32 `[rows]`.
    pub scales: u64,
    /// Rows.
    pub rows: usize,
    /// Columns, a multiple of 16.
    pub columns: usize,
}

/// As [`Product`], of 8-bit numbers.
#[derive(Debug, Clone, Copy)]
pub struct ScaledProduct {
    /// A.
    pub a: Scaled,
    /// B; its rows are a multiple of 16.
    pub b: Scaled,
    /// D, of 16 bits.
    pub d: Matrix,
    /// Pointer to the bias, 0 for none.
    pub bias: u64,
    /// Whether the product is added to what D holds.
    pub add: bool,
}

/// Bytes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Free now.
    pub free: u64,
    /// In all.
    pub total: u64,
}

/// A point in a stream's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event(u64);

impl Event {
    /// A point by the number that a device gave it.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The device's number of it.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// A GPU, or the host in the place of one. All methods may be called from any thread; the order within a stream is that of the calls.
///
/// Implementations only hand out and take addresses: that a launch stays within its buffers is the caller's to see to, which is why
/// [`Device::launch`] and the raw copies are unsafe.
pub trait Device: Send + Sync + fmt::Debug {
    /// As a job file and messages name it: `cuda:0`, `host`.
    fn name(&self) -> &str;

    /// The model of the device: `NVIDIA H200`.
    fn model(&self) -> &str;

    /// All that the last bits of what it computes may depend on: the model, and the libraries that work for it.
    fn arithmetic(&self) -> String {
        self.model().into()
    }

    /// Tokens that show what a pass over so many takes of memory. All of them, since libraries choose their kernels by size and take memory at
    /// the first use of one; fewer where kernels take none.
    fn rehearsed(&self, tokens: usize) -> usize {
        tokens
    }

    /// Multiprocessors, for the size of grids.
    fn multiprocessors(&self) -> u32;

    /// Memory, free and in all.
    ///
    /// # Errors
    /// When the device fails.
    fn memory(&self) -> Result<Memory>;

    /// Memory for [`Buffer::new`]; freed with [`Device::free`].
    ///
    /// # Errors
    /// When there is not enough.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Frees what [`Device::allocate`] gave; errors are left to the next call.
    fn free(&self, pointer: u64);

    /// Memory of the host that copies do not wait for; freed with [`Device::free_pinned`].
    ///
    /// # Errors
    /// When there is not enough.
    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8>;

    /// Frees what [`Device::allocate_pinned`] gave.
    fn free_pinned(&self, pointer: *mut u8, bytes: usize);

    /// Copies to the device, in the order of a stream.
    ///
    /// # Safety
    /// `from` stays as it is until the stream has come there, and `bytes` bytes are behind both addresses.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn copy_in(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()>;

    /// Copies to the host, in the order of a stream.
    ///
    /// # Safety
    /// Nobody touches `to` until the stream has come there, and `bytes` bytes are behind both addresses.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn copy_out(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()>;

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are of the kernel's types, and what it reads and writes is within live buffers.
    ///
    /// # Errors
    /// When there is no such kernel, or the device fails.
    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()>;

    /// Computes a product, in the order of a stream.
    ///
    /// # Safety
    /// The matrices are within live buffers.
    ///
    /// # Errors
    /// With shapes that do not fit, or when the device fails.
    unsafe fn product(&self, stream: Stream, product: &Product) -> Result<()>;

    /// Whether [`Device::product`] ends this product with GELU; else [`gelu_new`](crate::net::kernels::Kernels::gelu_new) is to follow it.
    ///
    /// # Errors
    /// With shapes that do not fit, or when the device fails.
    fn ends_in_gelu(&self, product: &Product) -> Result<bool>;

    /// Why this device has no products of 8-bit numbers; none where it has.
    fn lacks_fp8(&self) -> Option<String> {
        Some("it has no products of e4m3".into())
    }

    /// Computes a product of 8-bit numbers, in the order of a stream.
    ///
    /// # Safety
    /// The matrices and their scales are within live buffers.
    ///
    /// # Errors
    /// With shapes that do not fit, where there are no such products ([`Device::lacks_fp8`]), or when the device fails.
    unsafe fn scaled_product(&self, _: Stream, _: &ScaledProduct) -> Result<()> {
        let (call, message) = ("product of e4m3".into(), self.lacks_fp8().unwrap_or_default());
        Err(GpuError::Failed { device: self.name().into(), call, message, lost: false })
    }

    /// The point where a stream is now.
    ///
    /// # Errors
    /// When the device fails.
    fn record(&self, stream: Stream) -> Result<Event>;

    /// Lets a stream wait for a point of another one.
    ///
    /// # Errors
    /// When the device fails.
    fn wait_in(&self, stream: Stream, event: Event) -> Result<()>;

    /// Whether a stream has come to a point; false where the device cannot tell.
    ///
    /// # Errors
    /// When the device fails.
    fn is_done(&self, event: Event) -> Result<bool> {
        let _ = event;
        Ok(false)
    }

    /// Waits on the host until a stream has come to a point.
    ///
    /// # Errors
    /// When the device fails, also in what was to be done before that point.
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
    /// So many bytes, aligned to 256; whatever they hold.
    ///
    /// # Errors
    /// When there is not enough memory: with what was asked for and what is free.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let pointer = device.allocate(bytes.max(1))?;
        Ok(Self { device: Arc::clone(device), pointer, bytes })
    }

    /// A copy of these bytes; comes back when they are there.
    ///
    /// # Errors
    /// As [`Buffer::new`].
    pub fn of(device: &Arc<dyn Device>, bytes: &[u8]) -> Result<Self> {
        let buffer = Self::new(device, bytes.len())?;
        // SAFETY: both are as long as `bytes`, which is borrowed until the copy is done
        unsafe { device.copy_in(Stream::Pass, buffer.pointer, bytes.as_ptr(), bytes.len())? };
        device.wait(device.record(Stream::Pass)?)?;
        Ok(buffer)
    }

    /// Its address.
    #[must_use]
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A copy on the host, when a stream has come here; for tests and small things.
    ///
    /// # Errors
    /// When the device fails.
    pub fn to_host(&self, stream: Stream) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: both are this long, and the copy is waited for
        unsafe { self.device.copy_out(stream, bytes.as_mut_ptr(), self.pointer, self.bytes)? };
        self.device.wait(self.device.record(stream)?)?;
        Ok(bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.free(self.pointer);
    }
}

/// What buffers of these sizes take: none is empty.
pub(crate) fn taken(sizes: &[usize]) -> u64 {
    sizes.iter().map(|bytes| (*bytes).max(1) as u64).sum()
}

/// Memory of the host that copies to and from a device do not wait for.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<dyn Device>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: it owns its memory, as a `Vec` does
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads
unsafe impl Sync for Pinned {}

impl Pinned {
    /// So many bytes, zeroed.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let bytes = bytes.max(1);
        let pointer = device.allocate_pinned(bytes)?;
        // SAFETY: so many bytes were just allocated there
        unsafe { pointer.write_bytes(0, bytes) };
        Ok(Self { device: Arc::clone(device), pointer, bytes })
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated and zeroed in `new`
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
