//! Allocations of one kind of memory, by address.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

use stillhouse_gpu::Result;

use crate::failed;

const ALIGNMENT: usize = 256;
/// The byte that fills new memory: reads before a write show, because it makes f32 and f64 NaN.
const POISON: u8 = 0xFF;

/// An allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    pub start: u64,
    pub bytes: usize,
}

impl Allocation {
    /// Whether an address is in the allocation or just behind it. A pointer just behind it is valid, as long as nothing
    /// reads there.
    pub fn touches(self, pointer: u64) -> bool {
        (self.start..=self.start + self.bytes as u64).contains(&pointer)
    }

    fn contains_range(self, pointer: u64, bytes: usize) -> bool {
        pointer.checked_add(bytes as u64).is_some_and(|end| end <= self.start + self.bytes as u64)
    }
}

/// Allocations, freed with this value.
#[derive(Debug, Default)]
pub struct Allocations {
    live: BTreeMap<u64, usize>,
    /// Allocations freed too early. They stay allocated, so that late writes to them do no harm.
    quarantined: Vec<Allocation>,
}

impl Allocations {
    pub fn total_bytes(&self) -> u64 {
        self.live.values().map(|bytes| *bytes as u64).sum()
    }

    pub fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let layout = layout(bytes).ok_or_else(|| failed("allocate", format!("{bytes} bytes")))?;
        // SAFETY: the layout is not empty
        let pointer = unsafe { alloc(layout) };
        if pointer.is_null() {
            return Err(failed("allocate", "the system gives no memory"));
        }
        // SAFETY: the bytes of the layout were just allocated
        unsafe { pointer.write_bytes(POISON, layout.size()) };
        self.live.insert(pointer as u64, bytes);
        Ok(pointer as u64)
    }

    /// The allocation that begins at this address.
    pub fn get(&self, start: u64) -> Option<Allocation> {
        self.live.get(&start).map(|&bytes| Allocation { start, bytes })
    }

    fn at_or_before(&self, pointer: u64) -> Option<Allocation> {
        self.live.range(..=pointer).next_back().map(|(&start, &bytes)| Allocation { start, bytes })
    }

    pub fn touches(&self, pointer: u64) -> bool {
        self.at_or_before(pointer).is_some_and(|allocation| allocation.touches(pointer))
    }

    /// Whether `bytes` bytes from an address on are within one allocation.
    pub fn contains_range(&self, pointer: u64, bytes: usize) -> bool {
        self.at_or_before(pointer).is_some_and(|allocation| allocation.contains_range(pointer, bytes))
    }

    pub fn check(&self, what: &str, pointer: u64, bytes: usize) -> Result<()> {
        self.contains_range(pointer, bytes)
            .then_some(())
            .ok_or_else(|| failed(what, format!("{bytes} bytes at {pointer:#x} are within no buffer")))
    }

    /// Frees the allocation that begins at this address; does nothing if there is none.
    pub fn free(&mut self, start: u64) {
        if let Some(bytes) = self.live.remove(&start) {
            deallocate(Allocation { start, bytes });
        }
    }

    /// Removes an allocation from its owner, overwrites it and keeps it allocated.
    pub fn quarantine(&mut self, start: u64) {
        if let Some(bytes) = self.live.remove(&start) {
            // SAFETY: the allocation is allocated, and its owner is done with it
            unsafe { (start as *mut u8).write_bytes(POISON, bytes) };
            self.quarantined.push(Allocation { start, bytes });
        }
    }
}

impl Drop for Allocations {
    fn drop(&mut self) {
        let live = std::mem::take(&mut self.live).into_iter().map(|(start, bytes)| Allocation { start, bytes });
        live.chain(self.quarantined.drain(..)).for_each(deallocate);
    }
}

fn deallocate(allocation: Allocation) {
    if let Some(layout) = layout(allocation.bytes) {
        // SAFETY: it was allocated with this layout, and no list holds it any more
        unsafe { dealloc(allocation.start as *mut u8, layout) };
    }
}

/// The bytes that an allocation of `bytes` bytes takes, rounded up.
pub fn allocated_size(bytes: usize) -> Option<u64> {
    layout(bytes).map(|layout| layout.size() as u64)
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1).next_multiple_of(ALIGNMENT), ALIGNMENT).ok()
}
