//! A checked door to the `gemm` crate: strided f32 products on the calling thread, into memory of the caller's: attention's. Those of weights are `stillhouse-cpu`'s.

use crate::error::{Result, TeacherError};

/// A strided matrix over borrowed floats; strides in elements.
pub(crate) struct Matrix<'a> {
    pub data: &'a [f32],
    pub shape: (usize, usize),
    pub strides: (usize, usize),
}

impl Matrix<'_> {
    pub(crate) fn transposed(self) -> Self {
        let ((rows, columns), (row, column)) = (self.shape, self.strides);
        Self { data: self.data, shape: (columns, rows), strides: (column, row) }
    }

    fn fits(&self) -> bool {
        last(self.shape, self.strides).is_some_and(|last| last < self.data.len())
    }
}

fn last((rows, columns): (usize, usize), strides: (usize, usize)) -> Option<usize> {
    let row = rows.checked_sub(1)?.checked_mul(strides.0)?;
    row.checked_add(columns.checked_sub(1)?.checked_mul(strides.1)?)
}

/// `dst = scale · a · b`, with the rows of dst `stride` apart (at least as many as it has columns).
pub(crate) fn product(dst: &mut [f32], stride: usize, scale: f32, a: &Matrix<'_>, b: &Matrix<'_>) -> Result<()> {
    let ((rows, inner), (inner_b, columns)) = (a.shape, b.shape);
    let dst_fits = last((rows, columns), (stride, 1)).is_some_and(|last| last < dst.len()) && stride >= columns;
    if inner != inner_b || !a.fits() || !b.fits() || !dst_fits {
        let got =
            format!("{:?} and {:?} in {}, {} and {} floats", a.shape, b.shape, a.data.len(), b.data.len(), dst.len());
        return Err(TeacherError::Input { what: "shapes of a product", got, valid: "that fit their memory".into() });
    }
    // SAFETY: the largest index that shape and strides lead to lies inside each slice (checked above), the elements
    // of dst do not overlap since its rows are at least as far apart as they are long, and dst is borrowed mutably, so
    // it overlaps neither operand.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            dst.as_mut_ptr(),
            1,
            stride as isize,
            false,
            a.data.as_ptr(),
            a.strides.1 as isize,
            a.strides.0 as isize,
            b.data.as_ptr(),
            b.strides.1 as isize,
            b.strides.0 as isize,
            0.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
    Ok(())
}
