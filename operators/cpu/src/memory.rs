//! Memory in whole cache lines, so that no load of a kernel straddles two.

/// 64 bytes of numbers of some type, zeros at first.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; LINE]);

/// Bytes of a line.
pub(crate) const LINE: usize = 64;

impl Line {
    pub(crate) const ZERO: Self = Self([0; LINE]);
}

/// A number that any bytes are a value of.
///
/// # Safety
/// Every pattern of bits is a value, there is no padding, and its alignment divides 64.
pub(crate) unsafe trait Number: Copy {}
// SAFETY: plain numbers.
unsafe impl Number for f32 {}
// SAFETY: as above.
unsafe impl Number for u16 {}
// SAFETY: as above.
unsafe impl Number for i32 {}
// SAFETY: as above.
unsafe impl Number for u32 {}
// SAFETY: two plain numbers, one after the other.
unsafe impl Number for [u16; 2] {}

/// The numbers in `lines`.
pub(crate) fn numbers<T: Number>(lines: &[Line]) -> &[T] {
    // SAFETY: any bytes are numbers of type T (`Number`), lines are aligned for them and have no padding, and the
    // slice covers the same bytes under the same borrow.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), std::mem::size_of_val(lines) / size_of::<T>()) }
}

/// As [`numbers`], to be written.
pub(crate) fn numbers_mut<T: Number>(lines: &mut [Line]) -> &mut [T] {
    // SAFETY: as in `numbers`, and any T is bytes of a line as well.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), std::mem::size_of_val(lines) / size_of::<T>()) }
}
