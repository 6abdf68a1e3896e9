//! Incremental decoding: a few new tokens of several sequences at a time, with a KV cache.
//!
//! ```text
//!   new tokens of some slots ─► x ─► per layer: q, k, v ─► k, v pushed to the slot's [`HeadKvCache`] ─► attention over all of them ─► … ─► states
//! ```
//!
//! Every product and norm computes a row on its own, and attention sums over the same panels as for a whole run. States
//! are therefore bit-identical to those of [`Net::states`], whatever else is in the step and however a sequence was
//! split into steps.
//!
//! Products have few rows, so all threads share each one. A step with one token in each of n slots reads every weight
//! once and does 2 · n flops with it. Per layer and slot, it reads the cache once. Memory of a slot: 2 · layers ·
//! kv_heads · D · length · 4 bytes (half with bf16 on machines that support it).

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use stillhouse_cpu::{AttentionScratch, HeadKvCache};

use super::attention::Attention;
use super::rope::Tables;
use super::{Layer, Net, ProductScratch, Scratch, StateCapture, normed};
use crate::error::Result;

/// Tokens that pass through the net together, in whole pieces of sequences.
const STEP_TOKENS: usize = 1024;

/// The KV cache of a sequence.
pub(crate) struct SequenceKvCache {
    /// For each layer, one cache per key head.
    layers: Vec<Vec<HeadKvCache>>,
    length: usize,
}

impl SequenceKvCache {
    /// Allocates memory for `length` tokens.
    pub(crate) fn new(net: &Net, length: usize) -> Result<Self> {
        let of_layer = |layer: &Layer| -> Result<Vec<HeadKvCache>> {
            let Attention { kv_heads, head_dim, .. } = layer.attention;
            let head = |_| Ok(HeadKvCache::new(head_dim, length, layer.qkv.arithmetic())?);
            (0..kv_heads).map(head).collect()
        };
        Ok(Self { layers: net.layers.iter().map(of_layer).collect::<Result<_>>()?, length: 0 })
    }

    /// Number of cached tokens.
    pub(crate) const fn length(&self) -> usize {
        self.length
    }

    /// Bytes that the cache occupies.
    pub(crate) fn bytes(&self) -> usize {
        self.layers.iter().flatten().map(HeadKvCache::bytes).sum()
    }

    /// Removes all tokens.
    pub(crate) fn clear(&mut self) {
        self.layers.iter_mut().flatten().for_each(HeadKvCache::clear);
        self.length = 0;
    }
}

/// Buffers of steps, reused by the next one.
pub(crate) struct DecodeBuffers {
    x: Vec<f32>,
    qkv: Vec<f32>,
    /// Output of the heads; the heads that share a key are contiguous.
    heads: Vec<f32>,
    scratch: Scratch,
    /// Tables of each rotation.
    angles: Vec<Tables>,
    /// One per task in progress.
    attention: Mutex<Vec<AttentionScratch>>,
}

impl Default for DecodeBuffers {
    fn default() -> Self {
        let scratch = Scratch { product: ProductScratch::in_pool(), ..Scratch::default() };
        let (x, qkv, heads) = Default::default();
        Self { x, qkv, heads, scratch, angles: Vec::new(), attention: Mutex::default() }
    }
}

/// The next tokens of a sequence.
struct NextTokens<'a> {
    cache: &'a mut SequenceKvCache,
    tokens: &'a [u32],
    /// Its rows within the step.
    rows: Range<usize>,
}

impl Net {
    /// Whether all runs of up to `length` tokens are rotated in the same way.
    pub(crate) fn decodes_up_to(&self, length: usize) -> bool {
        !self.ropes.iter().any(|rope| rope.is_long(length))
    }

    /// Computes the final, normalised state `[n, H]` after the last token of each slot, and the requested states of
    /// other layers at that token. Slots must be in ascending order, with at least one token each.
    pub(crate) fn decode_step(
        &self,
        slots: &mut [SequenceKvCache],
        inputs: &[(usize, &[u32])],
        work: &mut DecodeBuffers,
        out: &mut [f32],
        mut capture: StateCapture<'_>,
    ) -> Result<()> {
        let mut wanted = inputs.iter().peekable();
        let (mut pieces, mut rows, mut done) = (Vec::new(), 0, 0);
        let mut step = |pieces: &mut Vec<NextTokens<'_>>| {
            let these = done..done + pieces.len();
            done = these.end;
            self.step(
                pieces,
                work,
                &mut out[these.start * self.width..these.end * self.width],
                capture.for_rows(these, self.width),
            )
        };
        for (slot, cache) in slots.iter_mut().enumerate() {
            let Some((_, tokens)) = wanted.next_if(|(wanted, _)| *wanted == slot) else { continue };
            if rows > 0 && rows + tokens.len() > STEP_TOKENS {
                step(&mut pieces)?;
                (pieces, rows) = (Vec::new(), 0);
            }
            pieces.push(NextTokens { cache, tokens, rows: rows..rows + tokens.len() });
            rows += tokens.len();
        }
        step(&mut pieces)
    }

    fn step(
        &self,
        pieces: &mut [NextTokens<'_>],
        work: &mut DecodeBuffers,
        out: &mut [f32],
        mut capture: StateCapture<'_>,
    ) -> Result<()> {
        let Some(rows) = pieces.last().map(|piece| piece.rows.end) else { return Ok(()) };
        work.x.resize(rows * self.width, 0.0);
        let mut x = work.x.chunks_exact_mut(self.width);
        for piece in &*pieces {
            for ((token, position), x) in piece.tokens.iter().zip(piece.cache.length..).zip(&mut x) {
                self.embed_token(*token, position, x);
            }
        }
        let longest = pieces.iter().map(|piece| piece.cache.length + piece.tokens.len()).max().unwrap_or(0);
        work.angles.resize_with(self.ropes.len(), Tables::default);
        for (rope, tables) in self.ropes.iter().zip(&mut work.angles) {
            rope.extend_tables(tables, false, longest);
        }
        let last = |row: usize| (row - 1) * self.width..row * self.width;
        for number in 0..self.layers.len() {
            capture.capture_rows(number, pieces.iter().map(|piece| &work.x[last(piece.rows.end)]), self.width);
            self.layer(number, pieces, work)?;
        }
        for (piece, out) in pieces.iter_mut().zip(out.chunks_exact_mut(self.width)) {
            piece.cache.length += piece.tokens.len();
            self.last.apply(&work.x[last(piece.rows.end)], out);
        }
        capture.capture(self.layers.len(), out, self.width);
        Ok(())
    }

    fn layer(&self, number: usize, pieces: &mut [NextTokens<'_>], work: &mut DecodeBuffers) -> Result<()> {
        let layer = &self.layers[number];
        let DecodeBuffers { x, qkv, heads, scratch, angles, attention } = work;
        let attention = &*attention;
        let (width, qkv_width) = (layer.attention.width(), layer.attention.qkv_width());
        let rows = x.len() / self.width;
        qkv.resize(rows * qkv_width, 0.0);
        layer.qkv.forward(normed(layer.before_attention.as_ref(), x, &mut scratch.n), qkv, &mut scratch.product)?;
        layer.attention.norm_heads(qkv, qkv_width);
        if let Some(rope) = layer.attention.rope {
            let (Tables { cos, sin }, half) = (&angles[rope], self.ropes[rope].rotated() / 2);
            let positions = pieces.iter().flat_map(|piece| (piece.cache.length..).take(piece.tokens.len()));
            for (position, row) in positions.zip(qkv.chunks_exact_mut(qkv_width)) {
                let angles = position * half..(position + 1) * half;
                layer.attention.rotate(row, &cos[angles.clone()], &sin[angles]);
            }
        }
        heads.resize(rows * width, 0.0);
        let mut rest = heads.as_mut_slice();
        let mut tasks = Vec::new();
        for piece in pieces.iter_mut() {
            let (positions, n) = (piece.cache.length..piece.cache.length + piece.rows.len(), piece.rows.len());
            let rows = &qkv[piece.rows.start * qkv_width..piece.rows.end * qkv_width];
            for (kv, cache) in piece.cache.layers[number].iter_mut().enumerate() {
                let (out, after) = std::mem::take(&mut rest).split_at_mut(n * width / layer.attention.kv_heads);
                rest = after;
                tasks.push((kv, cache, positions.clone(), rows, out));
            }
        }
        tasks.into_par_iter().try_for_each(|(kv, cache, positions, rows, out)| {
            let lock = || attention.lock().unwrap_or_else(PoisonError::into_inner);
            let mut scratch = lock().pop().unwrap_or_default();
            let done = layer.attention.decode(cache, kv, positions, rows, out, &mut scratch);
            lock().push(scratch);
            done
        })?;
        // Converts from heads grouped by key to rows.
        scratch.a.resize(rows * width, 0.0);
        let part = width / layer.attention.kv_heads;
        for piece in pieces.iter() {
            let made = heads[piece.rows.start * width..piece.rows.end * width].chunks_exact(part);
            let rows = piece.rows.len();
            for (i, made) in made.enumerate() {
                let to = (piece.rows.start + i % rows) * width + i / rows * part;
                scratch.a[to..to + part].copy_from_slice(made);
            }
        }
        layer.after_heads(x, scratch)
    }
}

impl Attention {
    /// Caches the keys and values of some rows, and computes attention over all cached ones. `out` has rows of the
    /// heads that share this key.
    fn decode(
        &self,
        cache: &mut HeadKvCache,
        kv: usize,
        positions: Range<usize>,
        rows: &[f32],
        out: &mut [f32],
        scratch: &mut AttentionScratch,
    ) -> Result<()> {
        let (dim, group) = (self.head_dim, self.heads / self.kv_heads);
        let [keys, values] = [self.heads + kv, self.heads + self.kv_heads + kv].map(|head| &rows[head * dim..]);
        cache.push(keys, values, self.qkv_width(), positions.len(), scratch)?;
        let heads = self.group(&rows[kv * group * dim..], keys, values);
        Ok(cache.attention(&heads, positions, out, group * dim, scratch)?)
    }
}
