//! Uploads weights in the format in which they are stored.
//!
//! The bytes go from the mapped file through pinned memory into one of two device buffers (stages). A kernel then
//! widens them and writes them to where the products read them. Weights that are stored in the net's dtype are copied
//! directly.
//!
//! ```text
//!   file, mapped ─► pinned A ─► stage A ─► widen ─► weight        A and B alternate: the device widens one while the other is copied
//!                   pinned B ─► stage B ─► widen ─►
//! ```
//!
//! Cost per element: reads its bytes once from the file, sends them once over the bus, and writes 2 or 4 bytes on the
//! device.

use std::sync::Arc;

use super::kernels::{HeadPadding, Kernels, Widening};
use super::upload::write_words;
use crate::device::{Buffer, Device, Element, Event, Pinned, Result, Stream};
use crate::error::GpuError;

/// Bytes of a stage: enough to reach the full speed of a bus whose copies take some microseconds to start.
const STAGE_BYTES: usize = 2 << 20;
/// Device bytes of both stages while weights load.
pub const STAGES_BYTES: usize = 2 * STAGE_BYTES;

/// The storage format of a tensor's elements. The block formats are those of GGUF files.
#[allow(missing_docs, reason = "the formats' own names")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StorageFormat {
    F64,
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
}

impl StorageFormat {
    /// All formats.
    pub const ALL: [Self; 16] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q8_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Q8K,
    ];

    /// Elements and bytes of a block; formats without blocks have one element.
    #[must_use]
    pub const fn block(self) -> [usize; 2] {
        match self {
            Self::F64 => [1, 8],
            Self::F32 => [1, 4],
            Self::F16 | Self::Bf16 => [1, 2],
            Self::Q4_0 => [32, 18],
            Self::Q4_1 => [32, 20],
            Self::Q5_0 => [32, 22],
            Self::Q5_1 => [32, 24],
            Self::Q8_0 => [32, 34],
            Self::Q8_1 => [32, 36],
            Self::Q2K => [256, 84],
            Self::Q3K => [256, 110],
            Self::Q4K => [256, 144],
            Self::Q5K => [256, 176],
            Self::Q6K => [256, 210],
            Self::Q8K => [256, 292],
        }
    }

    /// The number of the format in `kernels/widen/formats.cuh`.
    pub(super) const fn number(self) -> u32 {
        self as u32
    }

    fn matches_element(self, element: Element) -> bool {
        matches!((self, element), (Self::F32, Element::F32) | (Self::Bf16, Element::Bf16) | (Self::F16, Element::F16))
    }
}

/// The order of the elements of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageOrder {
    /// Row-major in the requested shape.
    RowMajor,
    /// Column-major in the requested shape.
    Transposed,
    /// Row-major, with the two halves of each head interleaved: a0 b0 a1 b1.
    Interleaved,
}

/// A tensor as its source stores it.
#[derive(Debug)]
pub enum StoredTensor<'a> {
    /// Numbers that the source computed, row-major.
    F32(Vec<f32>),
    /// Bytes of a file.
    Bytes {
        /// The bytes.
        bytes: &'a [u8],
        /// Their format.
        format: StorageFormat,
        /// The order of the elements.
        order: StorageOrder,
    },
}

/// The target of a tensor `[rows, columns]` in a weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub to: u64,
    pub size: [usize; 2],
    pub padding: [HeadPadding; 2],
    /// Elements between two rows and between two columns.
    pub strides: [usize; 2],
}

#[derive(Debug)]
struct Stage {
    pinned: Pinned,
    memory: Buffer,
    /// The event on [`Stream::Pass`] after which both may be written again.
    reusable_after: Option<Event>,
}

/// Two stages, and the kernels that widen them.
pub(super) struct Stages {
    device: Arc<dyn Device>,
    kernels: Kernels,
    element: Element,
    stages: [Stage; 2],
    next: usize,
}

impl Stages {
    pub fn new(device: &Arc<dyn Device>, element: Element) -> Result<Self> {
        let stage = || {
            let (pinned, memory) = (Pinned::new(device, STAGE_BYTES)?, Buffer::new(device, STAGE_BYTES)?);
            Ok::<_, GpuError>(Stage { pinned, memory, reusable_after: None })
        };
        let (device, kernels) = (Arc::clone(device), Kernels::new(device, element));
        Ok(Self { stages: [stage()?, stage()?], device, kernels, element, next: 0 })
    }

    /// Sets a buffer to zero, for the padding that no tensor fills.
    pub fn clear(&self, buffer: &Buffer) -> Result<()> {
        // SAFETY: this is the buffer's length, and its elements have 2 or 4 bytes
        unsafe { self.kernels.clear(buffer.pointer(), buffer.bytes()) }
    }

    /// The kernels that these stages launch.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Loads a tensor into its target.
    ///
    /// # Safety
    /// All elements are within a live buffer.
    ///
    /// # Errors
    /// If the number of bytes does not match the number of elements, or the device fails.
    pub unsafe fn load(&mut self, name: &str, stored: &StoredTensor<'_>, target: &Target) -> Result<()> {
        let [rows, columns] = target.size;
        let count = rows * columns;
        let (format, order) = match stored {
            StoredTensor::F32(_) => (StorageFormat::F32, StorageOrder::RowMajor),
            StoredTensor::Bytes { format, order, .. } => (*format, *order),
        };
        let [elements, bytes] = format.block();
        let (got, valid) = match stored {
            StoredTensor::F32(numbers) => (numbers.len(), count),
            StoredTensor::Bytes { bytes: stored, .. } => (stored.len(), count / elements * bytes),
        };
        if got != valid || !count.is_multiple_of(elements) || rows.max(columns) > i32::MAX as usize {
            let unit = if matches!(stored, StoredTensor::F32(_)) { "numbers" } else { "bytes" };
            let valid = format!("{valid} {unit} of {format:?} for {:?}, whole blocks", target.size);
            return Err(GpuError::Input { what: "size of a weight", got: format!("{got} of {name}"), valid });
        }
        let target = target.in_order(order);
        let is_contiguous_copy =
            format.matches_element(self.element) && order != StorageOrder::Interleaved && target.is_contiguous();
        let step = STAGE_BYTES / bytes * elements;
        for first in (0..count).step_by(step) {
            let part = step.min(count - first);
            let fill = |memory: &mut [u8]| match stored {
                StoredTensor::F32(numbers) => write_words(&numbers[first..first + part], memory, f32::to_ne_bytes),
                StoredTensor::Bytes { bytes: stored, .. } => {
                    let at = first / elements * bytes;
                    memory.copy_from_slice(&stored[at..at + memory.len()]);
                }
            };
            let length = part / elements * bytes;
            // SAFETY: the caller guarantees the target; plain elements are contiguous there, in their stored form
            unsafe {
                match is_contiguous_copy {
                    true => self.copy(target.to + (first * bytes) as u64, length, fill)?,
                    false => {
                        let widening = target.widening(format, first, part, order == StorageOrder::Interleaved);
                        self.widen(widening, length, fill)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits for a free stage, and lets `fill` write its pinned memory.
    fn fill_next_stage(&mut self, length: usize, fill: impl FnOnce(&mut [u8])) -> Result<&mut Stage> {
        self.next = (self.next + 1) % self.stages.len();
        let stage = &mut self.stages[self.next];
        if let Some(event) = stage.reusable_after.take() {
            self.device.wait(event)?;
        }
        fill(&mut stage.pinned[..length]);
        Ok(stage)
    }

    /// # Safety
    /// The `length` bytes from `to` on are within a live buffer.
    unsafe fn copy(&mut self, to: u64, length: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        let device = Arc::clone(&self.device);
        let stage = self.fill_next_stage(length, fill)?;
        // SAFETY: the caller guarantees the target; nothing writes the pinned memory before the event below
        unsafe { device.copy_to_device(Stream::Pass, to, stage.pinned.as_ptr(), length)? };
        stage.reusable_after = Some(device.record(Stream::Pass)?);
        Ok(())
    }

    /// # Safety
    /// All elements are within a live buffer.
    unsafe fn widen(&mut self, widening: Widening, length: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        let (device, kernels) = (Arc::clone(&self.device), self.kernels.clone());
        let stage = self.fill_next_stage(length, fill)?;
        let from = stage.memory.pointer();
        // SAFETY: the stage holds `length` bytes and stays unchanged until the event below; the caller guarantees the
        // rest
        unsafe {
            // On the other stream, so that this copy overlaps with the widening of the previous stage.
            device.copy_to_device(Stream::Extract, from, stage.pinned.as_ptr(), length)?;
            device.stream_wait_event(Stream::Pass, device.record(Stream::Extract)?)?;
            kernels.widen(&Widening { from, ..widening })?;
        }
        stage.reusable_after = Some(device.record(Stream::Pass)?);
        Ok(())
    }
}

impl Drop for Stages {
    fn drop(&mut self) {
        // Waits even after a failure: a copy may still read the memory that is freed now. A device that fails reads
        // none.
        for stream in [Stream::Extract, Stream::Pass] {
            if let Ok(event) = self.device.record(stream) {
                let _ = self.device.wait(event);
            }
        }
    }
}

impl Target {
    /// The target for a tensor stored in this order.
    fn in_order(&self, order: StorageOrder) -> Self {
        let Self {
            to,
            size: [rows, columns],
            padding: [row_padding, column_padding],
            strides: [row_stride, column_stride],
        } = *self;
        match order {
            StorageOrder::Transposed => Self {
                to,
                size: [columns, rows],
                padding: [column_padding, row_padding],
                strides: [column_stride, row_stride],
            },
            StorageOrder::RowMajor | StorageOrder::Interleaved => *self,
        }
    }

    /// Whether the elements are contiguous.
    fn is_contiguous(&self) -> bool {
        let [_, columns] = self.size;
        self.padding.iter().all(|padding| padding.model == padding.padded) && self.strides == [columns, 1]
    }

    fn widening(&self, format: StorageFormat, first: usize, count: usize, interleaved: bool) -> Widening {
        let [_, columns] = self.size;
        Widening {
            from: 0,
            format,
            count,
            to: self.to,
            first: [first / columns, first % columns],
            columns,
            padding: self.padding,
            interleaved,
            strides: self.strides,
        }
    }
}
