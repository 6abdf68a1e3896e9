//! Matrices in memory, and their products.

use half::{bf16, f16};
use stillhouse_gpu::{Element, Matrix, Product, Result, ScaledMatrix, ScaledProduct};

use crate::failed;

/// Checks that the shapes of a product match.
pub fn check_shapes(product: &Product) -> Result<()> {
    let Product { a, b, d, .. } = product;
    if let Some(narrow) = [a, b, d].into_iter().find(|matrix| matrix.stride < matrix.columns) {
        return Err(failed("product", format!("a stride of {} for {} columns", narrow.stride, narrow.columns)));
    }
    if a.columns != b.columns || (d.rows, d.columns) != (a.rows, b.rows) {
        let shape = |m: &Matrix| format!("[{}, {}]", m.rows, m.columns);
        return Err(failed("product", format!("{} · {}ᵀ into {}", shape(a), shape(b), shape(d))));
    }
    Ok(())
}

/// The memory regions of a product: name, address, bytes.
pub fn regions(product: &Product) -> impl Iterator<Item = (&'static str, u64, usize)> + use<> {
    let Product { a, b, d, bias, .. } = *product;
    let named = [("A of a product", a), ("B of a product", b), ("D of a product", d)];
    let bias = (bias != 0).then_some(("bias of a product", bias, d.columns * d.element.bytes()));
    named.into_iter().map(move |(what, matrix)| (what, matrix.pointer, matrix_bytes(matrix))).chain(bias)
}

fn matrix_bytes(Matrix { element, rows, columns, stride, .. }: Matrix) -> usize {
    let elements = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
    elements * element.bytes()
}

/// Checks that the shapes of an 8-bit product match.
pub fn check_scaled_shapes(product: &ScaledProduct) -> Result<()> {
    let ScaledProduct { a, b, d, .. } = product;
    let fits = a.columns == b.columns && (d.rows, d.columns) == (a.rows, b.rows) && d.stride >= d.columns;
    if !fits || d.element == Element::F32 || !a.columns.is_multiple_of(16) || !b.rows.is_multiple_of(16) {
        let shape = |rows, columns| format!("[{rows}, {columns}]");
        let (a, b, of_d) = (shape(a.rows, a.columns), shape(b.rows, b.columns), shape(d.rows, d.columns));
        let (name, stride) = (d.element.name(), d.stride);
        return Err(failed("product of e4m3", format!("{a} · {b}ᵀ into {of_d} of {name}, {stride} apart")));
    }
    Ok(())
}

/// The memory regions of an 8-bit product, as [`regions`].
pub fn scaled_regions(product: &ScaledProduct) -> impl Iterator<Item = (&'static str, u64, usize)> + use<> {
    let ScaledProduct { a, b, d, bias, .. } = *product;
    let matrix_regions = |what, scales, m: ScaledMatrix| {
        [(what, m.pointer, m.rows * m.columns), (scales, m.scales, m.rows * size_of::<f32>())]
    };
    let bias = (bias != 0).then_some(("bias of a product", bias, d.columns * d.element.bytes()));
    matrix_regions("A of a product", "scales of A of a product", a)
        .into_iter()
        .chain(matrix_regions("B of a product", "scales of B of a product", b))
        .chain([("D of a product", d.pointer, matrix_bytes(d))])
        .chain(bias)
}

/// # Safety
/// All regions of [`regions`] are live memory, and [`check_shapes`] returned no error.
pub unsafe fn multiply(product: &Product) {
    let Product { a, b, d, bias, accumulate, gelu } = product;
    let (mut rows, mut x, mut y) = (Vec::new(), Vec::new(), Vec::new());
    for m in 0..a.rows {
        // SAFETY: A is live memory
        unsafe { read_row(a, m, &mut x) };
        rows.push(x.clone());
    }
    for n in 0..b.rows {
        // SAFETY: B, D and the bias are live memory
        unsafe {
            read_row(b, n, &mut y);
            let bias = if *bias == 0 { 0.0 } else { read(*bias, d.element, n) };
            for (m, x) in rows.iter().enumerate() {
                let sum = x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>() as f32;
                let at = m * d.stride + n;
                let before = if *accumulate { read(d.pointer, d.element, at) } else { 0.0 };
                let sum = sum + bias + before;
                write(d.pointer, d.element, at, if *gelu { gelu_new(sum) } else { sum });
            }
        }
    }
}

/// # Safety
/// All regions of [`scaled_regions`] are live memory, and [`check_scaled_shapes`] returned no error.
pub unsafe fn multiply_scaled(product: &ScaledProduct) {
    let ScaledProduct { a, b, d, bias, accumulate } = product;
    let e4m3_values: Vec<f64> = (0..=u8::MAX).map(|byte| f64::from(e4m3(byte))).collect();
    // SAFETY: the caller guarantees the matrices
    let rows = |m: &ScaledMatrix| unsafe { std::slice::from_raw_parts(m.pointer as *const u8, m.rows * m.columns) };
    let rows = [rows(a), rows(b)].map(|all| all.iter().map(|byte| e4m3_values[usize::from(*byte)]).collect::<Vec<_>>());
    for (m, x) in rows[0].chunks_exact(a.columns).enumerate() {
        for (n, y) in rows[1].chunks_exact(a.columns).enumerate() {
            let sum = x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>() as f32;
            let at = m * d.stride + n;
            // SAFETY: the caller guarantees scales, bias and D
            unsafe {
                let scale = [(a.scales, m), (b.scales, n)].map(|(scales, i)| read(scales, Element::F32, i));
                let bias = if *bias == 0 { 0.0 } else { read(*bias, d.element, n) };
                let before = if *accumulate { read(d.pointer, d.element, at) } else { 0.0 };
                write(d.pointer, d.element, at, sum * scale[0] * scale[1] + bias + before);
            }
        }
    }
}

/// The tanh approximation of GELU.
fn gelu_new(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())) as f32
}

/// The value of an e4m3 byte.
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

/// # Safety
/// The `at`-th element from the address on is readable memory.
unsafe fn read(pointer: u64, element: Element, at: usize) -> f32 {
    // SAFETY: the caller upholds the safety contract
    unsafe {
        match element {
            Element::F32 => *(pointer as *const f32).add(at),
            Element::Bf16 => (*(pointer as *const bf16).add(at)).to_f32(),
            Element::F16 => (*(pointer as *const f16).add(at)).to_f32(),
        }
    }
}

/// # Safety
/// The `at`-th element from the address on is writable memory.
unsafe fn write(pointer: u64, element: Element, at: usize, value: f32) {
    // SAFETY: the caller upholds the safety contract
    unsafe {
        match element {
            Element::F32 => *(pointer as *mut f32).add(at) = value,
            Element::Bf16 => *(pointer as *mut bf16).add(at) = bf16::from_f32(value),
            Element::F16 => *(pointer as *mut f16).add(at) = f16::from_f32(value),
        }
    }
}

/// Reads a row of a matrix, widened to f32.
///
/// # Safety
/// The matrix is readable memory.
unsafe fn read_row(matrix: &Matrix, row: usize, out: &mut Vec<f32>) {
    out.clear();
    // SAFETY: the caller upholds the safety contract
    out.extend((0..matrix.columns).map(|c| unsafe { read(matrix.pointer, matrix.element, row * matrix.stride + c) }));
}
