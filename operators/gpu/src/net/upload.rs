//! Small uploads to the device through pinned memory. A slot is rewritten only after the stream has copied it.

use std::sync::Arc;

use crate::device::{Device, Event, Pinned, Result, Stream};
use crate::error::GpuError;

/// Uploads in flight at once; the next one waits for the oldest.
const SLOTS: usize = 4;

#[derive(Debug)]
struct Slot {
    memory: Pinned,
    /// The event after the copy out of this memory.
    copied: Option<Event>,
}

/// A ring of pinned memory, for copies on [`Stream::Pass`].
#[derive(Debug)]
pub(super) struct UploadRing {
    device: Arc<dyn Device>,
    slots: [Slot; SLOTS],
    next: usize,
}

impl UploadRing {
    /// A ring for uploads of at most `bytes` bytes each.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let slot = || Ok::<_, GpuError>(Slot { memory: Pinned::new(device, bytes)?, copied: None });
        Ok(Self { device: Arc::clone(device), slots: [slot()?, slot()?, slot()?, slot()?], next: 0 })
    }

    /// Lets `fill` write `bytes` bytes, and copies them to `to`.
    ///
    /// # Safety
    /// The `bytes` bytes from `to` on are within a live buffer, and no more than the ring was made for.
    pub unsafe fn send(&mut self, to: u64, bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.next = (self.next + 1) % SLOTS;
        let slot = &mut self.slots[self.next];
        if let Some(event) = slot.copied.take() {
            self.device.wait(event)?;
        }
        let capacity = slot.memory.len();
        let Some(memory) = slot.memory.get_mut(..bytes) else {
            let valid = format!("at most {capacity}");
            return Err(GpuError::Input { what: "bytes of an upload", got: bytes.to_string(), valid });
        };
        fill(memory);
        // SAFETY: the caller guarantees the target; nothing writes the source until `copied` has been waited for, above
        // or in `drop`
        unsafe { self.device.copy_to_device(Stream::Pass, to, memory.as_ptr(), bytes)? };
        slot.copied = Some(self.device.record(Stream::Pass)?);
        Ok(())
    }
}

impl Drop for UploadRing {
    fn drop(&mut self) {
        for event in self.slots.iter_mut().filter_map(|slot| slot.copied.take()) {
            // A device that fails no longer reads the memory.
            let _ = self.device.wait(event);
        }
    }
}

/// Writes the bytes of `words`, one word after another.
pub(super) fn write_words<T: Copy, const N: usize>(words: &[T], memory: &mut [u8], bytes: impl Fn(T) -> [u8; N]) {
    for (to, word) in memory.chunks_exact_mut(N).zip(words) {
        to.copy_from_slice(&bytes(*word));
    }
}
