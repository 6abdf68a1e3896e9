//! Upper bounds on the speed of this device: its library's largest products, and copies.

use std::sync::Arc;
use std::time::Instant;

use stillhouse_gpu::net::kernels::Kernels;
use stillhouse_gpu::{Buffer, Device, Element, Matrix, Pinned, Product, Stream};

use crate::counting_device::CountingDevice;
use crate::{Check, Outcome};

/// Mean seconds of a call, over about a third of a second, after two warm-up calls.
fn seconds_of(counting: &CountingDevice, mut operation: impl FnMut() -> stillhouse_gpu::Result<()>) -> Outcome<f64> {
    operation()?;
    operation()?;
    counting.synchronize()?;
    let began = Instant::now();
    operation()?;
    counting.synchronize()?;
    let once = began.elapsed().as_secs_f64().max(1e-6);
    let times = ((0.3 / once) as usize).clamp(3, 2000);
    let began = Instant::now();
    for _ in 0..times {
        operation()?;
    }
    counting.synchronize()?;
    Ok(began.elapsed().as_secs_f64() / times as f64)
}

/// A buffer of small non-zero numbers: products of zeros would be faster.
fn random_buffer(device: &Arc<dyn Device>, count: usize, element: Element) -> Outcome<Buffer> {
    let mut state = 1u32;
    let mut word = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(0x3F80_0000 | state >> 9) - 1.5
    };
    let piece: Vec<f32> = (0..count.min((1 << 20) + 3)).map(|_| word()).collect();
    let piece: Vec<u8> = match element {
        Element::F32 => piece.iter().flat_map(|v| v.to_ne_bytes()).collect(),
        Element::Bf16 => piece.iter().flat_map(|v| half::bf16::from_f32(*v).to_ne_bytes()).collect(),
        Element::F16 => piece.iter().flat_map(|v| half::f16::from_f32(*v).to_ne_bytes()).collect(),
    };
    let mut bytes = piece.repeat((count * element.bytes()).div_ceil(piece.len()));
    bytes.truncate(count * element.bytes());
    Ok(Buffer::from_bytes(device, &bytes)?)
}

fn product(check: &Check, element: Element, out: Element, [m, n, k]: [usize; 3]) -> Outcome<f64> {
    let (a, b) = (random_buffer(&check.device, m * k, element)?, random_buffer(&check.device, n * k, element)?);
    let d = Buffer::new(&check.device, m * n * out.bytes())?;
    let matrix = |buffer: &Buffer, element, rows, columns| Matrix {
        pointer: buffer.pointer(),
        element,
        rows,
        columns,
        stride: columns,
    };
    let product = Product {
        a: matrix(&a, element, m, k),
        b: matrix(&b, element, n, k),
        d: matrix(&d, out, m, n),
        bias: 0,
        accumulate: false,
        gelu: false,
    };
    // SAFETY: the buffers have these shapes
    let seconds = seconds_of(&check.counting, || unsafe { check.device.product(Stream::Pass, &product) })?;
    Ok(2.0 * m as f64 * n as f64 * k as f64 / seconds)
}

/// Runs the part `ceilings`.
pub fn run(check: &mut Check) -> Outcome<()> {
    let (side, vocab) = if check.host { (32, 100) } else { (8192, 128_256) };
    let products = [
        (Element::Bf16, Element::Bf16, [side; 3]),
        (Element::F16, Element::F16, [side; 3]),
        (Element::F32, Element::F32, [side / 2; 3]),
        (Element::Bf16, Element::F32, [side / 8, vocab, side / 2]),
    ];
    for (element, out, shape @ [m, n, k]) in products {
        let what = format!("product {} into {}, [{m}, {k}] · [{n}, {k}]ᵀ", element.name(), out.name());
        if check.has_time(3.0) {
            let rate = product(check, element, out, shape)?;
            if element == Element::Bf16 {
                check.ceiling = Some(check.ceiling.map_or(rate, |best| best.max(rate)));
            }
            check.report.figure(what, rate / 1e12, "TFLOP/s", "");
        } else {
            check.report.skipped(what, "out of time");
        }
    }
    copies(check)
}

fn copies(check: &mut Check) -> Outcome<()> {
    let bytes = if check.host { 1 << 16 } else { 256 << 20 };
    let (device, counting) = (Arc::clone(&check.device), Arc::clone(&check.counting));
    let buffer = random_buffer(&device, bytes / 4, Element::F32)?;
    let mut pinned = Pinned::new(&device, bytes)?;
    // SAFETY: both have this length; nothing reads while the copies run
    let out = seconds_of(&counting, || unsafe {
        device.copy_to_host(Stream::Extract, pinned.as_mut_ptr(), buffer.pointer(), bytes)
    })?;
    check.report.figure("copy to pinned memory of the host", bytes as f64 / out / 1e9, "GB/s", "");
    // SAFETY: as above
    let copy_in_seconds = seconds_of(&counting, || unsafe {
        device.copy_to_device(Stream::Extract, buffer.pointer(), pinned.as_ptr(), bytes)
    })?;
    check.report.figure("copy from pinned memory of the host", bytes as f64 / copy_in_seconds / 1e9, "GB/s", "");

    let (width, rows) = if check.host { (64, 64) } else { (8192, 1 << 16) };
    let (from, to) = (Buffer::new(&device, rows * width * 2)?, Buffer::new(&device, rows * width * 2)?);
    let row_numbers: Vec<u8> = (0..rows as u32).flat_map(u32::to_ne_bytes).collect();
    let row_numbers = Buffer::from_bytes(&device, &row_numbers)?;
    let kernels = Kernels::new(&device, Element::Bf16);
    // SAFETY: both buffers hold these rows
    let seconds = seconds_of(&counting, || unsafe {
        kernels.gather(from.pointer(), row_numbers.pointer(), to.pointer(), [rows, width])
    })?;
    let moved = 2.0 * (rows * width * 2) as f64;
    check.report.figure("device memory, read and written (gather_rows)", moved / seconds / 1e9, "GB/s", "");
    Ok(())
}
