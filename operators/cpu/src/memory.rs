//! Memory in whole cache lines, so that no load of a kernel straddles two of them.

/// A cache line: 64 bytes that hold numbers of any [`Number`] type.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; LINE]);

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

impl Line {
    pub(crate) const ZERO: Self = Self([0; LINE]);
}

/// A plain number type: every byte pattern is a valid value.
///
/// # Safety
/// Every bit pattern is a valid value, the type has no padding, and its alignment divides 64.
pub(crate) unsafe trait Number: Copy {}
// SAFETY: a primitive number.
unsafe impl Number for f32 {}
// SAFETY: as above.
unsafe impl Number for u16 {}
// SAFETY: as above.
unsafe impl Number for i32 {}
// SAFETY: as above.
unsafe impl Number for u32 {}
// SAFETY: an array of two primitive numbers, without padding.
unsafe impl Number for [u16; 2] {}

/// Views `lines` as numbers of type `T`.
pub(crate) fn as_numbers<T: Number>(lines: &[Line]) -> &[T] {
    // SAFETY: any bytes are valid values of T (`Number`). Lines are aligned for T and have no padding. The slice covers
    // the same bytes under the same borrow.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), std::mem::size_of_val(lines) / size_of::<T>()) }
}

/// The mutable form of [`as_numbers`].
pub(crate) fn as_numbers_mut<T: Number>(lines: &mut [Line]) -> &mut [T] {
    // SAFETY: as in `as_numbers`; any T is also valid as bytes of a line.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), std::mem::size_of_val(lines) / size_of::<T>()) }
}
