//! Causal grouped-query attention over runs, in memory that does not grow with the square of their length.
//!
//! ```text
//!                 keys 0 .............. L
//!   queries  0..b  ▓                          scores exist for one block of b query rows at a time, for the heads that share a key,
//!            b..2b ▓▓                         over no more keys than the block's rows may see
//!            ...    ▓▓▓                       with a window: none before the first that its first row may see
//! ```
//!
//! q, k and v lie in rows `heads ‖ kv_heads ‖ kv_heads` of D, one row per token; out are rows of `heads · D`. The query rows of a group of
//! heads are put under each other, so that a block is two products with the group's keys and values: `[group · b, D] × [D, keys]` and
//! `[group · b, keys] × [keys, D]`.

use std::ops::Range;

use super::kernels::{rms_norm_in_place, soft_cap, softmax_seen};
use super::rope::rotate;
use crate::error::Result;
use crate::product::{Matrix, product};

/// Query rows of a block: 64 × 1,024 scores are 256 KiB per head of the group. Blocks begin at its multiples in every run.
pub(super) const BLOCK: usize = 64;

/// The heads of a layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// What scores are multiplied with; 1 / sqrt(D) mostly.
    pub scale: f32,
    /// Scores become `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// A token sees itself and so many before it, less one.
    pub window: Option<usize>,
    /// The number of the rotation; none in layers without positions.
    pub rope: Option<usize>,
    /// Norms of queries and keys.
    pub norms: Option<HeadNorms>,
}

/// RMS norms of queries and keys before they are rotated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HeadNorms {
    /// `[D]`: of each head; `[heads · D]`: of all together.
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub eps: f32,
}

/// A run in the rows of a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// Its first row.
    pub first: usize,
    /// Its tokens.
    pub length: usize,
}

impl Run {
    /// The positions of the run that lie in these rows of the pass.
    pub(super) fn positions_of(&self, rows: &Range<usize>) -> Range<usize> {
        let from = rows.start.clamp(self.first, self.first + self.length);
        let to = rows.end.clamp(self.first, self.first + self.length);
        from - self.first..to - self.first
    }
}

/// What a block works in.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    queries: Vec<f32>,
    scores: Vec<f32>,
    out: Vec<f32>,
}

impl Attention {
    /// Width of the output rows.
    pub(super) fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of the rows of q, k and v.
    pub(crate) fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Normalises queries and keys where the family does.
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

    /// The keys that a query sees.
    fn seen(&self, position: usize) -> Range<usize> {
        let from = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        from..position + 1
    }

    /// Attention of the queries at these positions of a run, into rows `into` of `out`.
    pub(super) fn forward(
        &self,
        qkv: &[f32],
        run: &Run,
        queries: Range<usize>,
        into: Range<usize>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let mut row = into.start;
        for first in queries.clone().step_by(BLOCK) {
            let block = first..queries.end.min(first + BLOCK);
            let rows = block.len();
            for kv in 0..self.kv_heads {
                self.block(qkv, run, block.clone(), kv, scratch)?;
                self.put(&scratch.out, kv, rows, &mut out[row * self.width()..]);
            }
            row += rows;
        }
        Ok(())
    }

    /// The heads of one key head, for a block of queries, into `scratch.out` `[group · rows, D]`.
    fn block(&self, qkv: &[f32], run: &Run, block: Range<usize>, kv: usize, scratch: &mut Scratch) -> Result<()> {
        let (dim, width, group) = (self.head_dim, self.qkv_width(), self.heads / self.kv_heads);
        let (rows, all) = (block.len(), group * block.len());
        let keys = self.seen(block.start).start..block.end;
        let Scratch { queries, scores, out, .. } = scratch;
        queries.clear();
        for head in kv * group..(kv + 1) * group {
            for position in block.clone() {
                queries.extend_from_slice(&qkv[(run.first + position) * width + head * dim..][..dim]);
            }
        }
        let shared = |head: usize| Matrix {
            data: &qkv[(run.first + keys.start) * width + head * dim..],
            shape: (keys.len(), dim),
            strides: (width, 1),
        };
        scores.resize(all * keys.len(), 0.0);
        let q = Matrix { data: queries, shape: (all, dim), strides: (dim, 1) };
        product(scores, keys.len(), self.scale, &q, &shared(self.heads + kv).transposed())?;
        if let Some(cap) = self.soft_cap {
            soft_cap(scores, cap);
        }
        softmax_seen(scores, keys.len(), |row| {
            let Range { start, end } = self.seen(block.start + row % rows);
            start - keys.start..end - keys.start
        });
        out.resize(all * dim, 0.0);
        let p = Matrix { data: scores, shape: (all, keys.len()), strides: (keys.len(), 1) };
        product(out, dim, 1.0, &p, &shared(self.heads + self.kv_heads + kv))
    }

    fn put(&self, heads: &[f32], kv: usize, rows: usize, out: &mut [f32]) {
        let (dim, group) = (self.head_dim, self.heads / self.kv_heads);
        for (g, head) in heads.chunks_exact(rows * dim).enumerate() {
            let at = (kv * group + g) * dim;
            for (row, from) in out.chunks_exact_mut(self.width()).zip(head.chunks_exact(dim)) {
                row[at..at + dim].copy_from_slice(from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Softmax over what is seen, in f64, one query after the other.
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
            let (mut out, mut scratch) = (vec![f32::NAN; 2 * run.length * attention.width()], Scratch::default());
            attention.forward(&qkv, &run, 0..128, 0..128, &mut out, &mut scratch).unwrap();
            attention.forward(&qkv, &run, 128..200, 128..200, &mut out, &mut scratch).unwrap();
            for position in 0..run.length {
                let want = by_definition(&attention, &qkv, &run, position);
                let got = &out[position * attention.width()..][..want.len()];
                let off = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 1e-5, "{attention:?} at {position}: off by {off}");
            }
        }
    }
}
