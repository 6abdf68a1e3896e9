//! The forward pass of decoders on a CPU. One net serves every family; families differ in the weights and settings they
//! put into it.
//!
//! ```text
//!   tokens ─► embedding ─► x ─┬─► before_attention ─► qkv ─► rotation ─► attention ─► out ─► after_attention ─► x += ─┐
//!                             │   ┌──────────────────────────────────────────────────────────────────────────────┘
//!                             │   └─► before_mlp ─► up ─► activation ─► down ─► after_mlp ─► x += ─► … layers … ─► last ─► states
//!                             └─ the MLP of a parallel layer reads x as it was before attention
//! ```
//!
//! Runs of tokens are stored back to back, and positions start at 0 in each. A task takes some rows through a whole
//! layer: attention over the available keys, the rest of the layer, and the next layer's q, k and v, which go into a
//! second buffer. Threads therefore join once per layer. Every product and norm computes a row on its own, so neither
//! the threads nor the other rows of a batch change a bit of it.
//!
//! Activations and sums are f32, and products use the given [`Arithmetic`]. Attention's own products are bf16 if the
//! others are, else f32. Nothing is allocated once the buffers have grown to the size of a batch. Cost per token and
//! layer: 2 flops per weight, and 4 · heads · D per key in view.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod attention;
mod decode;
mod kernels;
mod linear;
mod loader;
mod rope;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

pub(crate) use attention::{Attention, HeadNorms};
pub(crate) use decode::{DecodeBuffers, SequenceKvCache};
pub(crate) use kernels::soft_cap;
pub(crate) use linear::{Linear, Scratch as ProductScratch, WeightLayout};
pub(crate) use loader::{Bias, Loader};
pub(crate) use rope::{Rope, RopeFields, Tables};
use stillhouse_cpu::AttentionScratch;
pub(crate) use stillhouse_cpu::{Arithmetic, attention_level_name, level_name};

use crate::contract::Runs;
use crate::error::Result;
use attention::{BLOCK_POSITIONS, Run};

/// Maximum number of rows in a task: enough for a product to reuse each weight it fetches.
const MAX_TASK_ROWS: usize = 512;
/// Minimum number of rows in a task, even if threads are idle: with fewer, products reuse weights too little.
const MIN_TASK_ROWS: usize = 2 * BLOCK_POSITIONS;
/// Tokens that pass through the net together, in whole runs. They need 4·(H + 2·(heads + 2·kv_heads)·D) bytes each.
const PASS_TOKENS: usize = 4096;
/// Tasks per thread on machines with many threads.
const TASKS_PER_THREAD: usize = 2;

/// A norm before or after attention or the MLP.
#[derive(Debug)]
pub(crate) enum Norm {
    /// Normalises by the root mean square.
    Rms { weight: Vec<f32>, eps: f32 },
    /// Normalises by mean and standard deviation.
    Layer { weight: Vec<f32>, bias: Vec<f32>, eps: f32 },
}

impl Norm {
    fn apply(&self, x: &[f32], out: &mut [f32]) {
        match self {
            Self::Rms { weight, eps } => kernels::rms_norm(x, weight, *eps, out),
            Self::Layer { weight, bias, eps } => kernels::layer_norm(x, weight, bias, *eps, out),
        }
    }
}

/// The activation between the two products of an MLP. The first product's epilogue computes the first two variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    /// `silu(gate) ⊙ up`.
    SwiGlu,
    /// GELU in the tanh approximation.
    GeluTanh,
    /// `gelu(gate) ⊙ up`, in the tanh approximation.
    GeGlu,
    /// Exact GELU.
    Gelu,
}

/// A feed-forward part (MLP) of inner width I.
#[derive(Debug)]
pub(crate) struct Mlp {
    /// Maps H to I, or to 2I (gate ‖ up) for [`Activation::GeGlu`].
    pub up: Linear,
    pub activation: Activation,
    pub down: Linear,
}

/// A layer. Norms that a family lacks are `None`.
#[derive(Debug)]
pub(crate) struct Layer {
    pub before_attention: Option<Norm>,
    /// q ‖ k ‖ v.
    pub qkv: Linear,
    pub attention: Attention,
    pub out: Linear,
    pub after_attention: Option<Norm>,
    pub before_mlp: Option<Norm>,
    pub mlp: Mlp,
    pub after_mlp: Option<Norm>,
    /// Whether the MLP reads the same input as attention.
    pub parallel: bool,
}

/// The embedding: `tokens[token] · scale + positions[position]`.
#[derive(Debug)]
pub(crate) struct Embedding {
    /// `[V, H]`.
    pub tokens: Vec<f32>,
    pub scale: f32,
    /// `[positions, H]`.
    pub positions: Option<Vec<f32>>,
}

/// The output layer: `soft_cap(states · weightᵀ)`.
#[derive(Debug)]
pub(crate) struct Head {
    pub weight: Linear,
    /// Whether the weight is the embedding's (tied).
    pub tied: bool,
    pub soft_cap: Option<f32>,
}

/// A decoder-only model.
#[derive(Debug)]
pub(crate) struct Net {
    pub width: usize,
    pub embedding: Embedding,
    /// Rotations of positions; layers refer to them by index.
    pub ropes: Vec<Rope>,
    pub layers: Vec<Layer>,
    pub last: Norm,
    pub head: Head,
}

/// Hidden states to return besides the final ones: those of `layers` for each token, numbered as in
/// [`crate::Teacher::pass_with_states`].
#[derive(Debug, Default)]
pub(crate) struct StateCapture<'a> {
    pub layers: &'a [usize],
    /// `[tokens, layers, H]`.
    pub out: &'a mut [f32],
}

impl StateCapture<'_> {
    /// Returns the part for some tokens.
    fn for_rows(&mut self, rows: Range<usize>, width: usize) -> StateCapture<'_> {
        let floats_per_token = self.layers.len() * width;
        StateCapture {
            layers: self.layers,
            out: &mut self.out[rows.start * floats_per_token..rows.end * floats_per_token],
        }
    }

    /// Copies the states `[tokens, H]` of a layer, if they are requested.
    fn capture(&mut self, layer: usize, states: &[f32], width: usize) {
        self.capture_rows(layer, states.chunks_exact(width), width);
    }

    /// Like `capture`, for rows that are not adjacent.
    fn capture_rows<'s>(&mut self, layer: usize, states: impl Iterator<Item = &'s [f32]> + Clone, width: usize) {
        let places = self.layers.iter().enumerate().filter(|(_, kept)| **kept == layer);
        for (place, _) in places {
            let out = self.out.chunks_exact_mut(self.layers.len() * width);
            for (out, states) in out.zip(states.clone()) {
                out[place * width..][..width].copy_from_slice(states);
            }
        }
    }
}

/// Buffers of a pass, reused by the next one.
#[derive(Debug, Default)]
pub(crate) struct PassBuffers {
    x: Vec<f32>,
    qkv: [Vec<f32>; 2],
    tasks: Vec<Task>,
    runs: Vec<Run>,
    /// For each rotation, the angles of usual and of long sequences.
    angles: Vec<[Tables; 2]>,
    /// One per task in progress.
    scratch: Mutex<Vec<Scratch>>,
}

/// Buffers of a task.
#[derive(Debug, Default)]
struct Scratch {
    n: Vec<f32>,
    a: Vec<f32>,
    y: Vec<f32>,
    up: Vec<f32>,
    inner: Vec<f32>,
    attention: AttentionScratch,
    product: linear::Scratch,
}

/// Some rows of a pass, and the runs that they are part of.
#[derive(Debug, Clone, Default)]
struct Task {
    rows: Range<usize>,
    /// Indices of these runs.
    runs: Range<usize>,
}

impl Net {
    /// Computes the final, normalised states `[tokens, H]` of runs, and the requested states of other layers.
    pub(crate) fn states(
        &self,
        runs: &Runs,
        work: &mut PassBuffers,
        out: &mut [f32],
        capture: &mut StateCapture<'_>,
    ) -> Result<()> {
        let threads = rayon::current_num_threads();
        let tokens_at_once = PASS_TOKENS.max(threads * TASKS_PER_THREAD * MIN_TASK_ROWS);
        let (offsets, mut first) = (runs.offsets(), 0);
        while first + 1 < offsets.len() {
            let begin = offsets[first] as usize;
            let fits = offsets[first + 1..].iter().take_while(|end| **end as usize - begin <= tokens_at_once).count();
            let last = first + fits.max(1);
            let rows = begin..offsets[last] as usize;
            if !rows.is_empty() {
                let tokens = &runs.tokens()[rows.clone()];
                let out = &mut out[rows.start * self.width..rows.end * self.width];
                self.pass(tokens, &offsets[first..=last], work, out, capture.for_rows(rows, self.width))?;
            }
            first = last;
        }
        Ok(())
    }

    /// Computes runs that pass through the net together. The first offset may be any number.
    fn pass(
        &self,
        tokens: &[u32],
        offsets: &[u32],
        work: &mut PassBuffers,
        out: &mut [f32],
        mut capture: StateCapture<'_>,
    ) -> Result<()> {
        let rows = tokens.len().div_ceil(rayon::current_num_threads()).next_multiple_of(BLOCK_POSITIONS);
        work.divide_into_tasks(offsets, rows.clamp(MIN_TASK_ROWS, MAX_TASK_ROWS));
        self.extend_angles(work);
        let (width, qkv_width) = (self.width, self.layers.first().map_or(0, |layer| layer.qkv.outputs()));
        let PassBuffers { x, qkv, tasks, runs, angles, scratch } = work;
        x.resize(tokens.len() * width, 0.0);
        qkv.iter_mut().for_each(|qkv| qkv.resize(tokens.len() * qkv_width, 0.0));
        let [mut qkv, mut next] = qkv.each_mut().map(Vec::as_mut_slice);
        let context = PassContext { net: self, angles, runs, scratch };

        let rows = split_rows(tasks, x, width).zip(split_rows(tasks, next, qkv_width));
        rows.collect::<Vec<_>>().into_par_iter().zip(&*tasks).try_for_each(|((x, qkv), task)| {
            self.embed(&tokens[task.rows.clone()], task, runs, x);
            match self.layers.first() {
                Some(layer) => context.project(layer, task, x, qkv),
                None => Ok(()),
            }
        })?;
        for (i, layer) in self.layers.iter().enumerate() {
            capture.capture(i, x, width);
            (qkv, next) = (next, qkv);
            let (all, following) = (&*qkv, self.layers.get(i + 1));
            let rows = split_rows(tasks, x, width).zip(split_rows(tasks, next, qkv_width));
            rows.collect::<Vec<_>>().into_par_iter().zip(&*tasks).try_for_each(|((x, next), task)| {
                context.layer(layer, task, all, x)?;
                following.map_or(Ok(()), |following| context.project(following, task, x, next))
            })?;
        }
        let rows = split_rows(tasks, x, width).zip(split_rows(tasks, out, width));
        rows.collect::<Vec<_>>().into_par_iter().for_each(|(x, out)| self.last.apply(x, out));
        capture.capture(self.layers.len(), out, width);
        Ok(())
    }

    fn embed(&self, tokens: &[u32], task: &Task, runs: &[Run], x: &mut [f32]) {
        let positions = task.runs.clone().flat_map(|run| runs[run].positions_of(&task.rows));
        for ((token, position), x) in tokens.iter().zip(positions).zip(x.chunks_exact_mut(self.width)) {
            self.embed_token(*token, position, x);
        }
    }

    fn embed_token(&self, token: u32, position: usize, x: &mut [f32]) {
        let Embedding { tokens, scale, positions } = &self.embedding;
        let row = &tokens[token as usize * self.width..][..self.width];
        x.iter_mut().zip(row).for_each(|(x, e)| *x = e * scale);
        if let Some(table) = positions {
            kernels::add(x, &table[position * self.width..][..self.width]);
        }
    }

    /// Extends the tables of angles to the length of the runs.
    fn extend_angles(&self, work: &mut PassBuffers) {
        work.angles.resize_with(self.ropes.len(), Default::default);
        for (rope, tables) in self.ropes.iter().zip(&mut work.angles) {
            for run in &work.runs {
                let long = rope.is_long(run.length);
                rope.extend_tables(&mut tables[usize::from(long)], long, run.length);
            }
        }
    }
}

/// State that every task of a pass reads.
struct PassContext<'a> {
    net: &'a Net,
    angles: &'a [[Tables; 2]],
    runs: &'a [Run],
    scratch: &'a Mutex<Vec<Scratch>>,
}

impl PassContext<'_> {
    /// Computes q, k and v of some rows, rotated.
    fn project(&self, layer: &Layer, task: &Task, x: &[f32], qkv: &mut [f32]) -> Result<()> {
        self.with_scratch(|scratch| {
            let Scratch { n, product, .. } = scratch;
            let n = normed(layer.before_attention.as_ref(), x, n);
            layer.qkv.forward(n, qkv, product)?;
            let width = layer.qkv.outputs();
            layer.attention.norm_heads(qkv, width);
            let Some(number) = layer.attention.rope else { return Ok(()) };
            let rope = &self.net.ropes[number];
            let mut rows = qkv.chunks_exact_mut(width);
            for run in &self.runs[task.runs.clone()] {
                let Tables { cos, sin } = &self.angles[number][usize::from(rope.is_long(run.length))];
                let half = rope.rotated() / 2;
                for (position, row) in run.positions_of(&task.rows).zip(&mut rows) {
                    let angles = position * half..(position + 1) * half;
                    layer.attention.rotate(row, &cos[angles.clone()], &sin[angles]);
                }
            }
            Ok(())
        })
    }

    /// Adds a layer's result to some rows of x, given q, k and v of all rows.
    fn layer(&self, layer: &Layer, task: &Task, qkv: &[f32], x: &mut [f32]) -> Result<()> {
        self.with_scratch(|scratch| {
            let rows = task.rows.len();
            scratch.a.resize(rows * layer.attention.width(), 0.0);
            let mut done = 0;
            for run in &self.runs[task.runs.clone()] {
                let queries = run.positions_of(&task.rows);
                let out = &mut scratch.a[done * layer.attention.width()..];
                done += queries.len();
                layer.attention.forward(qkv, run, queries, layer.qkv.arithmetic(), out, &mut scratch.attention)?;
            }
            layer.after_heads(x, scratch)
        })
    }

    fn with_scratch<T>(&self, work: impl FnOnce(&mut Scratch) -> Result<T>) -> Result<T> {
        let lock = || self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = lock().pop().unwrap_or_default();
        let done = work(&mut scratch);
        lock().push(scratch);
        done
    }
}

impl Layer {
    /// Adds the layer's result to rows of x, given the output of its heads in the scratch.
    fn after_heads(&self, x: &mut [f32], scratch: &mut Scratch) -> Result<()> {
        let Scratch { n, a, y, up, inner, product, .. } = scratch;
        if self.parallel {
            // Adds attention's result only after the MLP has read x.
            y.resize(x.len(), 0.0);
            self.out.forward(a, y, product)?;
            feed_forward(self, x, [n, up, inner], product, |mlp, inner, x, product| {
                kernels::add(x, y);
                mlp.down.add(inner, x, product)
            })
        } else {
            add_normed(&self.out, self.after_attention.as_ref(), a, x, [n, y], product)?;
            feed_forward(self, x, [n, up, inner], product, |mlp, inner, x, product| {
                add_normed(&mlp.down, self.after_mlp.as_ref(), inner, x, [a, y], product)
            })
        }
    }
}

/// Returns x, or its norm if there is one.
fn normed<'a>(norm: Option<&Norm>, x: &'a [f32], n: &'a mut Vec<f32>) -> &'a [f32] {
    match norm {
        None => x,
        Some(norm) => {
            n.resize(x.len(), 0.0);
            norm.apply(x, n);
            n
        }
    }
}

/// `x += norm(linear(from))`.
fn add_normed(
    linear: &Linear,
    norm: Option<&Norm>,
    from: &[f32],
    x: &mut [f32],
    [n, y]: [&mut Vec<f32>; 2],
    product: &mut linear::Scratch,
) -> Result<()> {
    let Some(norm) = norm else { return linear.add(from, x, product) };
    y.resize(x.len(), 0.0);
    n.resize(x.len(), 0.0);
    linear.forward(from, y, product)?;
    norm.apply(y, n);
    kernels::add(x, n);
    Ok(())
}

/// Computes the MLP up to its last product, which `finish` computes.
fn feed_forward(
    layer: &Layer,
    x: &mut [f32],
    [n, up, inner]: [&mut Vec<f32>; 3],
    product: &mut linear::Scratch,
    finish: impl FnOnce(&Mlp, &[f32], &mut [f32], &mut linear::Scratch) -> Result<()>,
) -> Result<()> {
    let mlp = &layer.mlp;
    let (rows, width) = (x.len() / mlp.down.outputs(), mlp.down.inputs());
    up.resize(rows * mlp.up.outputs(), 0.0);
    mlp.up.forward(normed(layer.before_mlp.as_ref(), x, n), up, product)?;
    let inner = match mlp.activation {
        Activation::SwiGlu | Activation::GeluTanh => up,
        Activation::GeGlu => {
            inner.resize(rows * width, 0.0);
            kernels::geglu(up, inner, width);
            inner
        }
        Activation::Gelu => {
            kernels::gelu(up);
            up
        }
    };
    finish(mlp, inner, x, product)
}

impl PassBuffers {
    /// Divides runs into tasks of at most `task_rows` rows: several short runs, or parts of a long run cut at the ends
    /// of attention's blocks. A row's bits do not depend on its task.
    fn divide_into_tasks(&mut self, offsets: &[u32], task_rows: usize) {
        let Self { runs, tasks, .. } = self;
        let base = offsets.first().copied().unwrap_or(0);
        runs.clear();
        tasks.clear();
        for ends in offsets.windows(2) {
            let run = Run { first: (ends[0] - base) as usize, length: (ends[1] - ends[0]) as usize };
            let number = runs.len();
            runs.push(run);
            let mut done = 0;
            while done < run.length {
                let (left, at) = (run.length - done, run.first + done);
                let free_rows = tasks.last().map_or(0, |task| task_rows - task.rows.len());
                let rows = if left <= free_rows { left } else { free_rows / BLOCK_POSITIONS * BLOCK_POSITIONS };
                match tasks.last_mut() {
                    Some(task) if rows > 0 => (task.rows.end, task.runs.end) = (at + rows, number + 1),
                    _ => tasks.push(Task { rows: at..at, runs: number..number + 1 }),
                }
                done += rows;
            }
        }
    }
}

/// Splits a matrix into the rows of each task.
fn split_rows<'a>(tasks: &'a [Task], mut rows: &'a mut [f32], width: usize) -> impl Iterator<Item = &'a mut [f32]> {
    tasks.iter().map(move |task| {
        let (part, rest) = std::mem::take(&mut rows).split_at_mut(task.rows.len() * width);
        rows = rest;
        part
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_all_rows_in_order_and_know_their_runs() {
        let mut work = PassBuffers::default();
        let all_lengths = [&[5][..], &[0, 3, 0, 0, 2], &[300], &[100, 28, 1, 127, 500, 0, 4], &[128, 128], &[1; 300]];
        for (lengths, task_rows) in
            all_lengths.into_iter().flat_map(|lengths| [128, 192, 512].map(|rows| (lengths, rows)))
        {
            let mut offsets = vec![7u32];
            lengths.iter().for_each(|length| offsets.push(offsets.last().unwrap() + length));
            work.divide_into_tasks(&offsets, task_rows);
            let all: Vec<usize> = work.tasks.iter().flat_map(|task| task.rows.clone()).collect();
            assert_eq!(all, (0..lengths.iter().sum::<u32>() as usize).collect::<Vec<_>>(), "{lengths:?}");
            let positions = work.tasks.iter().flat_map(|task| {
                let rows = task.rows.clone();
                let runs = &work.runs;
                task.runs.clone().flat_map(move |run| runs[run].positions_of(&rows))
            });
            let want = lengths.iter().flat_map(|length| 0..*length as usize);
            assert_eq!(positions.collect::<Vec<_>>(), want.collect::<Vec<_>>(), "{lengths:?}");
            assert!(work.tasks.iter().all(|task| (1..=task_rows).contains(&task.rows.len())), "{lengths:?}");
            let cut = |task: &Task, run: &Run| run.positions_of(&task.rows).start.is_multiple_of(BLOCK_POSITIONS);
            assert!(work.tasks.iter().all(|task| work.runs[task.runs.clone()].iter().all(|run| cut(task, run))));
        }
    }
}
