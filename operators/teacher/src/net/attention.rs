//! Causal grouped-query attention over runs, in memory that does not grow with the square of their length.
//!
//! Each row of q, k and v holds one token as `heads ‖ kv_heads ‖ kv_heads` vectors of D floats. Output rows have `heads
//! · D` floats. [`stillhouse_cpu::attention`] processes the query heads that share a key head together.

use std::ops::Range;

use stillhouse_cpu::{Arithmetic, AttentionScratch, Heads, attention};

use super::kernels::rms_norm_in_place;
use super::rope::rotate;
use crate::error::Result;

/// Tasks cut each run at multiples of this number of positions.
pub(super) const BLOCK_POSITIONS: usize = 64;

/// The attention of a layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Factor of the scores; usually 1 / sqrt(D).
    pub scale: f32,
    /// Replaces each score by `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Positions that a token sees: its own and the `window - 1` before it. `None` for all before it.
    pub window: Option<usize>,
    /// Index of the rotation; `None` in layers without positions.
    pub rope: Option<usize>,
    /// Norms of queries and keys, if any.
    pub norms: Option<HeadNorms>,
}

/// RMS norms of queries and keys, applied before the rotation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HeadNorms {
    /// `[D]` for a norm per head, or `[heads · D]` for one over all heads.
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub eps: f32,
}

/// The place of a run among the rows of a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// First row of the run.
    pub first: usize,
    /// Number of tokens.
    pub length: usize,
}

impl Run {
    /// Returns the positions of the run within `rows` of the pass.
    pub(super) fn positions_of(&self, rows: &Range<usize>) -> Range<usize> {
        let from = rows.start.clamp(self.first, self.first + self.length);
        let to = rows.end.clamp(self.first, self.first + self.length);
        from - self.first..to - self.first
    }
}

impl Attention {
    /// Width of the output rows.
    pub(super) fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of the rows that hold q, k and v.
    pub(crate) fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Normalises queries and keys if the family does so.
    pub(super) fn norm_heads(&self, qkv: &mut [f32], width: usize) {
        let Some(HeadNorms { q: q_weight, k: k_weight, eps }) = &self.norms else { return };
        for row in qkv.chunks_exact_mut(width) {
            let (q, rest) = row.split_at_mut(self.width());
            rms_norm_in_place(q, q_weight, *eps);
            rms_norm_in_place(&mut rest[..self.kv_heads * self.head_dim], k_weight, *eps);
        }
    }

    /// Rotates the queries and keys of a row.
    pub(super) fn rotate(&self, row: &mut [f32], cos: &[f32], sin: &[f32]) {
        let heads = row.chunks_exact_mut(self.head_dim).take(self.heads + self.kv_heads);
        heads.for_each(|head| rotate(&mut head[..2 * cos.len()], cos, sin));
    }

    /// Describes the query heads that share a key head, in rows of q, k and v.
    pub(super) fn group<'a>(&self, queries: &'a [f32], keys: &'a [f32], values: &'a [f32]) -> Heads<'a> {
        Heads {
            queries,
            keys,
            values,
            stride: self.qkv_width(),
            group: self.heads / self.kv_heads,
            dim: self.head_dim,
            scale: self.scale,
            soft_cap: self.soft_cap,
            window: self.window,
        }
    }

    /// Computes attention of the queries at these positions of a run, into rows of `out`.
    pub(super) fn forward(
        &self,
        qkv: &[f32],
        run: &Run,
        queries: Range<usize>,
        arithmetic: Arithmetic,
        out: &mut [f32],
        scratch: &mut AttentionScratch,
    ) -> Result<()> {
        let (dim, stride, group) = (self.head_dim, self.qkv_width(), self.heads / self.kv_heads);
        let head = |number: usize| &qkv[run.first * stride + number * dim..];
        for kv in 0..self.kv_heads {
            let [keys, values] = [head(self.heads + kv), head(self.heads + self.kv_heads + kv)];
            let heads = self.group(head(kv * group), keys, values);
            let out = &mut out[kv * group * dim..];
            attention(&heads, queries.clone(), arithmetic, out, self.width(), scratch)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference attention in f64, one query at a time: softmax over the positions that the query sees.
    fn by_definition(attention: &Attention, qkv: &[f32], run: &Run, position: usize) -> Vec<f32> {
        let (dim, width) = (attention.head_dim, attention.qkv_width());
        let row = |position: usize, head: usize| &qkv[(run.first + position) * width + head * dim..][..dim];
        let mut out = Vec::new();
        for head in 0..attention.heads {
            let kv = head / (attention.heads / attention.kv_heads);
            let from = attention.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let weights: Vec<f64> = (from..=position)
                .map(|key| {
                    let pairs = row(position, head).iter().zip(row(key, attention.heads + kv));
                    let score = pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
                    let score = score * f64::from(attention.scale);
                    let capped = |cap: f32| f64::from(cap) * (score / f64::from(cap)).tanh();
                    attention.soft_cap.map_or(score, capped).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            for d in 0..dim {
                let value = |key: usize| f64::from(row(key, attention.heads + attention.kv_heads + kv)[d]);
                let sum: f64 = weights.iter().zip(from..).map(|(w, key)| w * value(key)).sum();
                out.push((sum / total) as f32);
            }
        }
        out
    }

    #[test]
    fn blocks_windows_caps_and_groups_are_attention() {
        let run = Run { first: 3, length: 200 };
        for (heads, kv_heads, window, soft_cap) in [
            (4, 2, None, None),
            (4, 2, Some(50), None),
            (6, 2, Some(1), Some(2.0)),
            (2, 2, Some(64), Some(5.0)),
            (3, 1, Some(500), None),
        ] {
            let attention =
                Attention { heads, kv_heads, head_dim: 8, scale: 0.4, soft_cap, window, ..Attention::default() };
            let width = attention.qkv_width();
            let qkv: Vec<f32> = (0..(run.first + run.length) * width).map(|i| (i as f32 * 0.73).sin() * 2.0).collect();
            let mut out = vec![f32::NAN; 2 * run.length * attention.width()];
            let mut scratch = AttentionScratch::default();
            for queries in [0..128, 128..200] {
                let out = &mut out[queries.start * attention.width()..];
                attention.forward(&qkv, &run, queries, Arithmetic::F32, out, &mut scratch).unwrap();
            }
            for position in 0..run.length {
                let want = by_definition(&attention, &qkv, &run, position);
                let got = &out[position * attention.width()..][..want.len()];
                let off = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 1e-5, "{attention:?} at {position}: off by {off}");
            }
        }
    }
}
