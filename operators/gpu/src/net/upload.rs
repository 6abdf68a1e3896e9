//! Small things on their way to the device, through pinned memory that is written again only once the stream has passed it.

use std::sync::Arc;

use crate::device::{Device, Event, Pinned, Result, Stream};
use crate::error::GpuError;

/// So many may be on their way; the next one waits for the oldest.
const SLOTS: usize = 4;

#[derive(Debug)]
struct Slot {
    memory: Pinned,
    /// Where the stream is when the copy out of this memory is done.
    read: Option<Event>,
}

/// A ring of pinned memory, for copies on [`Stream::Pass`].
#[derive(Debug)]
pub(super) struct Upload {
    device: Arc<dyn Device>,
    slots: [Slot; SLOTS],
    next: usize,
}

impl Upload {
    /// For at most so many bytes at a time.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let slot = || Ok::<_, GpuError>(Slot { memory: Pinned::new(device, bytes)?, read: None });
        Ok(Self { device: Arc::clone(device), slots: [slot()?, slot()?, slot()?, slot()?], next: 0 })
    }

    /// Copies what `fill` writes.
    ///
    /// # Safety
    /// `bytes` bytes from `to` on are within a live buffer, and no more than the ring was made for.
    pub unsafe fn send(&mut self, to: u64, bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.next = (self.next + 1) % SLOTS;
        let slot = &mut self.slots[self.next];
        if let Some(event) = slot.read.take() {
            self.device.wait(event)?;
        }
        let room = slot.memory.len();
        let Some(memory) = slot.memory.get_mut(..bytes) else {
            let valid = format!("at most {room}");
            return Err(GpuError::Input { what: "bytes of an upload", got: bytes.to_string(), valid });
        };
        fill(memory);
        // SAFETY: the target is as the caller says; the source stays as it is until the event that is waited for above, or at the end
        unsafe { self.device.copy_in(Stream::Pass, to, memory.as_ptr(), bytes)? };
        slot.read = Some(self.device.record(Stream::Pass)?);
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        for event in self.slots.iter_mut().filter_map(|slot| slot.read.take()) {
            // A device that fails does not read any more.
            let _ = self.device.wait(event);
        }
    }
}

/// Writes words, one after the other.
pub(super) fn put<T: Copy, const N: usize>(words: &[T], memory: &mut [u8], bytes: impl Fn(T) -> [u8; N]) {
    for (to, word) in memory.chunks_exact_mut(N).zip(words) {
        to.copy_from_slice(&bytes(*word));
    }
}
