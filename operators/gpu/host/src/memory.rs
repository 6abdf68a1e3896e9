//! Memory of one kind, by its addresses.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

use stillhouse_gpu::Result;

use crate::failed;

const ALIGNMENT: usize = 256;
/// Fresh memory holds this: what reads it before it was written shows (as f32 and f64 it is NaN).
const POISON: u8 = 0xFF;

/// An allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pub start: u64,
    pub bytes: usize,
}

impl Block {
    /// Whether an address is in it, or just behind it, where nothing is read.
    pub fn touches(self, pointer: u64) -> bool {
        (self.start..=self.start + self.bytes as u64).contains(&pointer)
    }

    fn holds(self, pointer: u64, bytes: usize) -> bool {
        pointer.checked_add(bytes as u64).is_some_and(|end| end <= self.start + self.bytes as u64)
    }
}

/// Allocations, freed with this value.
#[derive(Debug, Default)]
pub struct Blocks {
    live: BTreeMap<u64, usize>,
    /// Given back too early, and of no use to anybody: what still writes there spoils nothing.
    aside: Vec<Block>,
}

impl Blocks {
    pub fn held(&self) -> u64 {
        self.live.values().map(|bytes| *bytes as u64).sum()
    }

    pub fn take(&mut self, bytes: usize) -> Result<u64> {
        let layout = layout(bytes).ok_or_else(|| failed("allocate", format!("{bytes} bytes")))?;
        // SAFETY: the layout is not empty
        let pointer = unsafe { alloc(layout) };
        if pointer.is_null() {
            return Err(failed("allocate", "the system gives no memory"));
        }
        // SAFETY: so many bytes were just allocated
        unsafe { pointer.write_bytes(POISON, layout.size()) };
        self.live.insert(pointer as u64, bytes);
        Ok(pointer as u64)
    }

    /// The allocation that begins here.
    pub fn of(&self, start: u64) -> Option<Block> {
        self.live.get(&start).map(|&bytes| Block { start, bytes })
    }

    fn before(&self, pointer: u64) -> Option<Block> {
        self.live.range(..=pointer).next_back().map(|(&start, &bytes)| Block { start, bytes })
    }

    pub fn touches(&self, pointer: u64) -> bool {
        self.before(pointer).is_some_and(|block| block.touches(pointer))
    }

    /// Whether so many bytes from an address on are within one allocation.
    pub fn holds(&self, pointer: u64, bytes: usize) -> bool {
        self.before(pointer).is_some_and(|block| block.holds(pointer, bytes))
    }

    pub fn check(&self, what: &str, pointer: u64, bytes: usize) -> Result<()> {
        self.holds(pointer, bytes)
            .then_some(())
            .ok_or_else(|| failed(what, format!("{bytes} bytes at {pointer:#x} are within no buffer")))
    }

    /// Frees what begins here, and nothing else.
    pub fn give_back(&mut self, start: u64) {
        if let Some(bytes) = self.live.remove(&start) {
            free(Block { start, bytes });
        }
    }

    /// Takes it from its owner, and keeps it.
    pub fn set_aside(&mut self, start: u64) {
        if let Some(bytes) = self.live.remove(&start) {
            // SAFETY: it is allocated, and its owner is done with it
            unsafe { (start as *mut u8).write_bytes(POISON, bytes) };
            self.aside.push(Block { start, bytes });
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        let live = std::mem::take(&mut self.live).into_iter().map(|(start, bytes)| Block { start, bytes });
        live.chain(self.aside.drain(..)).for_each(free);
    }
}

fn free(block: Block) {
    if let Some(layout) = layout(block.bytes) {
        // SAFETY: it was allocated with this layout, and is in no list any more
        unsafe { dealloc(block.start as *mut u8, layout) };
    }
}

/// What so many bytes take.
pub fn size(bytes: usize) -> Option<u64> {
    layout(bytes).map(|layout| layout.size() as u64)
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1).next_multiple_of(ALIGNMENT), ALIGNMENT).ok()
}
