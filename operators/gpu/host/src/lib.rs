//! A [`Device`] whose kernels run on the host: the same source, compiled as C++, a thread block as fibers of one thread.
//!
//! For tests on machines without a GPU. Copies, launches and products are done when they are called, so streams and events only keep their
//! contract. The order in which the threads of a block run between two barriers follows from a seed: what depends on it is a race.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::{bf16, f16};
use stillhouse_gpu::{
    Arg, Device, Element, Event, GpuError, Launch, Matrix, Memory, Product, Result, Scaled, ScaledProduct, Stream,
};

unsafe extern "C" {
    fn stillhouse_host_launch(
        kernel: *const c_char,
        grid: *const u32,
        block: *const u32,
        shared_bytes: u32,
        args: *mut *mut c_void,
        schedule_seed: u64,
    ) -> c_int;
}

const ALIGNMENT: usize = 256;
/// What is free at the beginning, unless a test says otherwise.
const MEMORY_BYTES: u64 = 4 << 30;
/// Fresh memory holds this: what reads it before it was written shows (as f32 and f64 it is NaN).
const POISON: u8 = 0xFF;

/// The host in the place of a GPU.
#[derive(Debug)]
pub struct Host {
    schedule_seed: u64,
    total: u64,
    blocks: Mutex<BTreeMap<u64, usize>>,
    pinned: Mutex<BTreeMap<u64, usize>>,
    launches: AtomicU64,
    allocations: AtomicU64,
}

impl Host {
    /// A host whose threads run in an order that follows from the seed; 0 is by number.
    #[must_use]
    pub fn new(schedule_seed: u64) -> Self {
        Self::with_memory(schedule_seed, MEMORY_BYTES)
    }

    /// A host with so much memory.
    #[must_use]
    pub fn with_memory(schedule_seed: u64, total: u64) -> Self {
        let (launches, allocations) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { schedule_seed, total, blocks: Mutex::default(), pinned: Mutex::default(), launches, allocations }
    }

    /// Bytes of the device that are allocated now.
    #[must_use]
    pub fn used(&self) -> u64 {
        held(&self.blocks)
    }

    /// Bytes of pinned memory that are allocated now.
    #[must_use]
    pub fn used_pinned(&self) -> u64 {
        held(&self.pinned)
    }

    /// Allocations so far, of both kinds.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    fn take_memory(&self, list: &Mutex<BTreeMap<u64, usize>>, bytes: usize) -> Result<u64> {
        let layout = layout(bytes).ok_or_else(|| self.failed("allocate", format!("{bytes} bytes")))?;
        // SAFETY: the layout is not empty
        let pointer = unsafe { alloc(layout) };
        if pointer.is_null() {
            return Err(self.failed("allocate", "the system gives no memory"));
        }
        // SAFETY: so many bytes were just allocated
        unsafe { pointer.write_bytes(POISON, layout.size()) };
        self.allocations.fetch_add(1, Ordering::Relaxed);
        locked(list).insert(pointer as u64, bytes);
        Ok(pointer as u64)
    }

    fn failed(&self, call: impl Into<String>, message: impl Into<String>) -> GpuError {
        GpuError::Failed { device: self.name().into(), call: call.into(), message: message.into(), lost: false }
    }

    /// That so many bytes from an address on are within one allocation.
    fn check(&self, what: &str, pointer: u64, bytes: usize) -> Result<()> {
        let blocks = locked(&self.blocks);
        let within = blocks.range(..=pointer).next_back().is_some_and(|(start, length)| {
            pointer.checked_add(bytes as u64).is_some_and(|end| end <= start + *length as u64)
        });
        drop(blocks);
        within
            .then_some(())
            .ok_or_else(|| self.failed(what, format!("{bytes} bytes at {pointer:#x} are within no buffer")))
    }

    fn check_matrix(&self, what: &str, matrix: &Matrix) -> Result<()> {
        let Matrix { pointer, element, rows, columns, stride } = *matrix;
        if stride < columns {
            return Err(self.failed(what, format!("a stride of {stride} for {columns} columns")));
        }
        let elements = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
        self.check(what, pointer, elements * element.bytes())
    }
}

fn locked(list: &Mutex<BTreeMap<u64, usize>>) -> MutexGuard<'_, BTreeMap<u64, usize>> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

fn held(list: &Mutex<BTreeMap<u64, usize>>) -> u64 {
    locked(list).values().map(|bytes| *bytes as u64).sum()
}

/// Frees what is in a list, and nothing else.
fn give_back(list: &Mutex<BTreeMap<u64, usize>>, pointer: u64) {
    let bytes = locked(list).remove(&pointer);
    if let Some(layout) = bytes.and_then(layout) {
        // SAFETY: it was allocated with this layout, and is no longer in the list
        unsafe { dealloc(pointer as *mut u8, layout) };
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1).next_multiple_of(ALIGNMENT), ALIGNMENT).ok()
}

/// # Safety
/// `element` number `at` from the address on is readable memory.
unsafe fn read(pointer: u64, element: Element, at: usize) -> f32 {
    // SAFETY: as the caller says
    unsafe {
        match element {
            Element::F32 => *(pointer as *const f32).add(at),
            Element::Bf16 => (*(pointer as *const bf16).add(at)).to_f32(),
            Element::F16 => (*(pointer as *const f16).add(at)).to_f32(),
        }
    }
}

/// # Safety
/// `element` number `at` from the address on is writable memory.
unsafe fn write(pointer: u64, element: Element, at: usize, value: f32) {
    // SAFETY: as the caller says
    unsafe {
        match element {
            Element::F32 => *(pointer as *mut f32).add(at) = value,
            Element::Bf16 => *(pointer as *mut bf16).add(at) = bf16::from_f32(value),
            Element::F16 => *(pointer as *mut f16).add(at) = f16::from_f32(value),
        }
    }
}

/// A row of a matrix, widened.
///
/// # Safety
/// The matrix is readable memory.
unsafe fn row(matrix: &Matrix, row: usize, out: &mut Vec<f32>) {
    out.clear();
    // SAFETY: as the caller says
    out.extend((0..matrix.columns).map(|c| unsafe { read(matrix.pointer, matrix.element, row * matrix.stride + c) }));
}

/// GELU in its tanh form.
fn gelu_new(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())) as f32
}

/// The number that a byte of e4m3 is.
#[must_use]
pub fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if byte >> 7 == 1 { -size } else { size }
}

impl Device for Host {
    fn name(&self) -> &str {
        "host"
    }

    fn model(&self) -> &str {
        "host"
    }

    fn multiprocessors(&self) -> u32 {
        4
    }

    fn memory(&self) -> Result<Memory> {
        Ok(Memory { free: self.total.saturating_sub(self.used()), total: self.total })
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let Memory { free, total } = self.memory()?;
        if layout(bytes).is_none_or(|layout| layout.size() as u64 > free) {
            return Err(GpuError::Memory { device: self.name().into(), bytes: bytes as u64, free, total });
        }
        self.take_memory(&self.blocks, bytes)
    }

    fn free(&self, pointer: u64) {
        give_back(&self.blocks, pointer);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        self.take_memory(&self.pinned, bytes).map(|pointer| pointer as *mut u8)
    }

    fn free_pinned(&self, pointer: *mut u8, _: usize) {
        give_back(&self.pinned, pointer as u64);
    }

    unsafe fn copy_in(&self, _: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        self.check("copy_in", to, bytes)?;
        // SAFETY: the target was just checked, the source is the caller's to see to
        unsafe { std::ptr::copy_nonoverlapping(from, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn copy_out(&self, _: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        self.check("copy_out", from, bytes)?;
        // SAFETY: the source was just checked, the target is the caller's to see to
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, _: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        let kernel = CString::new(launch.kernel).map_err(|e| self.failed(launch.kernel, e.to_string()))?;
        let mut args = args.to_vec();
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
        // another order at every launch, the same ones in every run
        let number = self.launches.fetch_add(1, Ordering::Relaxed);
        let seed = if self.schedule_seed == 0 { 0 } else { self.schedule_seed.wrapping_add(number).max(1) };
        let (grid, block) = (launch.grid.as_ptr(), launch.block.as_ptr());
        // SAFETY: three numbers each; the arguments are of the kernel's types, as the caller says
        let code = unsafe {
            stillhouse_host_launch(kernel.as_ptr(), grid, block, launch.shared_bytes, pointers.as_mut_ptr(), seed)
        };
        let message = match code {
            0 => return Ok(()),
            1 => "there is no such kernel".into(),
            2 => "threads of a block wait at different barriers for ever".into(),
            3 => "more than 1,024 threads or 227 KiB of shared memory".into(),
            other => format!("code {other}"),
        };
        Err(self.failed(launch.kernel, message))
    }

    unsafe fn product(&self, _: Stream, product: &Product) -> Result<()> {
        let Product { a, b, d, bias, add, gelu } = product;
        for (what, matrix) in [("A of a product", a), ("B of a product", b), ("D of a product", d)] {
            self.check_matrix(what, matrix)?;
        }
        if a.columns != b.columns || (d.rows, d.columns) != (a.rows, b.rows) {
            let shape = |m: &Matrix| format!("[{}, {}]", m.rows, m.columns);
            return Err(self.failed("product", format!("{} · {}ᵀ into {}", shape(a), shape(b), shape(d))));
        }
        let (mut rows, mut x, mut y) = (Vec::new(), Vec::new(), Vec::new());
        for m in 0..a.rows {
            // SAFETY: A was just checked
            unsafe { row(a, m, &mut x) };
            rows.push(x.clone());
        }
        for n in 0..b.rows {
            // SAFETY: all matrices were just checked; the bias is the caller's to see to
            unsafe {
                row(b, n, &mut y);
                let bias = if *bias == 0 { 0.0 } else { read(*bias, d.element, n) };
                for (m, x) in rows.iter().enumerate() {
                    let sum = x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>() as f32;
                    let at = m * d.stride + n;
                    let before = if *add { read(d.pointer, d.element, at) } else { 0.0 };
                    let sum = sum + bias + before;
                    write(d.pointer, d.element, at, if *gelu { gelu_new(sum) } else { sum });
                }
            }
        }
        Ok(())
    }

    fn ends_in_gelu(&self, product: &Product) -> Result<bool> {
        // as where a library does it, which does not say how exact its tanh is
        Ok(product.d.element != Element::F32 && !product.add)
    }

    fn lacks_fp8(&self) -> Option<String> {
        None
    }

    unsafe fn scaled_product(&self, _: Stream, product: &ScaledProduct) -> Result<()> {
        let ScaledProduct { a, b, d, bias, add } = product;
        for (what, Scaled { pointer, scales, rows, columns }) in [("A of a product", a), ("B of a product", b)] {
            self.check(what, *pointer, rows * columns)?;
            self.check(what, *scales, rows * size_of::<f32>())?;
        }
        self.check_matrix("D of a product", d)?;
        let fits = a.columns == b.columns && (d.rows, d.columns) == (a.rows, b.rows) && d.element != Element::F32;
        if !fits || !a.columns.is_multiple_of(16) || !b.rows.is_multiple_of(16) {
            let shape = |rows, columns| format!("[{rows}, {columns}]");
            let (a, b, d) = (shape(a.rows, a.columns), shape(b.rows, b.columns), shape(d.rows, d.columns));
            return Err(self.failed("product of e4m3", format!("{a} · {b}ᵀ into {d}")));
        }
        let number: Vec<f64> = (0..=u8::MAX).map(|byte| f64::from(e4m3(byte))).collect();
        // SAFETY: just checked
        let rows = |m: &Scaled| unsafe { std::slice::from_raw_parts(m.pointer as *const u8, m.rows * m.columns) };
        let rows = [rows(a), rows(b)].map(|all| all.iter().map(|byte| number[usize::from(*byte)]).collect::<Vec<_>>());
        for (m, x) in rows[0].chunks_exact(a.columns).enumerate() {
            for (n, y) in rows[1].chunks_exact(a.columns).enumerate() {
                let sum = x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>() as f32;
                let at = m * d.stride + n;
                // SAFETY: all was just checked; the bias is the caller's to see to
                unsafe {
                    let scale = [(a.scales, m), (b.scales, n)].map(|(scales, i)| read(scales, Element::F32, i));
                    let bias = if *bias == 0 { 0.0 } else { read(*bias, d.element, n) };
                    let before = if *add { read(d.pointer, d.element, at) } else { 0.0 };
                    write(d.pointer, d.element, at, sum * scale[0] * scale[1] + bias + before);
                }
            }
        }
        Ok(())
    }

    fn record(&self, _: Stream) -> Result<Event> {
        Ok(Event::new(0))
    }

    fn wait_in(&self, _: Stream, _: Event) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _: Event) -> Result<()> {
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for list in [&self.blocks, &self.pinned] {
            let left: Vec<u64> = locked(list).keys().copied().collect();
            left.into_iter().for_each(|pointer| give_back(list, pointer));
        }
    }
}
