//! Matrices in memory, and their products.

use half::{bf16, f16};
use stillhouse_gpu::{Element, Matrix, Product, Result};

use crate::failed;

/// That a product's shapes belong together.
pub fn check(product: &Product) -> Result<()> {
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

/// What a product reads and writes: names, addresses, bytes.
pub fn matrices(product: &Product) -> impl Iterator<Item = (&'static str, u64, usize)> + use<> {
    let Product { a, b, d, bias, .. } = *product;
    let bytes = |Matrix { element, rows, columns, stride, .. }: Matrix| {
        let elements = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
        elements * element.bytes()
    };
    let named = [("A of a product", a), ("B of a product", b), ("D of a product", d)];
    let bias = (bias != 0).then_some(("bias of a product", bias, d.columns * d.element.bytes()));
    named.into_iter().map(move |(what, matrix)| (what, matrix.pointer, bytes(matrix))).chain(bias)
}

/// # Safety
/// All of [`matrices`] is live memory, and [`check`] finds nothing.
pub unsafe fn multiply(product: &Product) {
    let Product { a, b, d, bias, add } = product;
    let (mut rows, mut x, mut y) = (Vec::new(), Vec::new(), Vec::new());
    for m in 0..a.rows {
        // SAFETY: A is live memory
        unsafe { row(a, m, &mut x) };
        rows.push(x.clone());
    }
    for n in 0..b.rows {
        // SAFETY: so are the others
        unsafe {
            row(b, n, &mut y);
            let bias = if *bias == 0 { 0.0 } else { read(*bias, d.element, n) };
            for (m, x) in rows.iter().enumerate() {
                let sum = x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>() as f32;
                let at = m * d.stride + n;
                let before = if *add { read(d.pointer, d.element, at) } else { 0.0 };
                write(d.pointer, d.element, at, sum + bias + before);
            }
        }
    }
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
