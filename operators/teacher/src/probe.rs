//! What another type of products changes, and how fast it is, measured on a text.
//!
//! ```text
//!   text ─► f32 teacher ─► ln p [n, V] ─┐
//!   text ─► bf16 teacher ─► ln q [n, V] ─┴─► mean and largest KL(p ‖ q), largest |ln p − ln q| of a token of the text
//! ```
//!
//! One teacher is loaded at a time, so what is kept of the first one is ln p of the whole vocabulary: at most [`MOST_BYTES`], which bounds the
//! positions of a text.

use std::time::{Duration, Instant};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TeacherError};
use crate::{Logits, Runs, Teacher};

/// Bytes of log-probabilities that are kept.
pub const MOST_BYTES: usize = 256 << 20;
/// Tokens of a text at most: enough for a mean, and for a pass that fills the cores.
pub const MOST_TOKENS: usize = 1024;

/// Passes of [`seconds`], and what they take together at most before the last one begins.
const PASSES: usize = 3;
const PASSES_TAKE: Duration = Duration::from_secs(2);

/// How next-token distributions in a type differ from those in f32, over the positions of a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Positions.
    pub tokens: u64,
    /// Mean of KL(f32 ‖ this type), nat.
    pub mean_kl_nats: f64,
    /// The largest.
    pub max_kl_nats: f64,
    /// The largest change of the log-probability of a token of the text, nat.
    pub max_logprob_change_nats: f64,
}

/// A text, as runs of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    runs: Runs,
}

impl Text {
    /// The first tokens of `runs`, for a vocabulary of `vocab_size`: as many as are bounded, at least one.
    pub fn new<'a>(runs: impl IntoIterator<Item = &'a [u32]>, vocab_size: usize) -> Self {
        let mut room = (MOST_BYTES / (size_of::<f32>() * vocab_size.max(1))).clamp(1, MOST_TOKENS);
        let mut text = Runs::new();
        for run in runs {
            let run = &run[..run.len().min(room)];
            room -= run.len();
            if !run.is_empty() {
                text.push(run.iter().copied());
            }
        }
        Self { runs: text }
    }

    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.runs.tokens().len()
    }
}

/// What a teacher in f32 says of a text.
pub struct Reference {
    text: Text,
    vocab_size: usize,
    /// ln p `[n, V]`.
    logprobs: Vec<f32>,
}

impl Reference {
    /// Of `teacher`, whose arithmetic is f32.
    ///
    /// # Errors
    /// When the text has no tokens, or the teacher fails.
    pub fn new(text: Text, teacher: &dyn Teacher) -> Result<Self> {
        let vocab_size = teacher.info().vocab_size;
        let mut logprobs = Vec::with_capacity(text.tokens() * vocab_size);
        if text.tokens() == 0 {
            let valid = "one token at least".into();
            return Err(TeacherError::Input { what: "text of a probe", got: "no tokens".into(), valid });
        }
        for_each_slice(teacher, &text, &mut |_, logits| {
            let start = logprobs.len();
            logprobs.extend_from_slice(logits);
            logprobs[start..].par_chunks_exact_mut(vocab_size).for_each(log_softmax);
        })?;
        Ok(Self { text, vocab_size, logprobs })
    }

    /// The text.
    #[must_use]
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// How `teacher`, the same in another type, differs.
    ///
    /// # Errors
    /// When it has another vocabulary, gives what is no number, or fails.
    pub fn difference(&self, teacher: &dyn Teacher) -> Result<Difference> {
        let (vocab_size, of) = (self.vocab_size, teacher.info());
        if of.vocab_size != vocab_size {
            let (got, valid) = (of.vocab_size.to_string(), vocab_size.to_string());
            return Err(TeacherError::Input { what: "vocabulary of a teacher to compare", got, valid });
        }
        let tokens = self.text.runs.tokens();
        // the last token of a run predicts none of the text's
        let ends = &self.text.runs.offsets()[1..];
        let follows = |position: usize| (!ends.contains(&(position as u32 + 1))).then(|| tokens[position + 1] as usize);
        let mut all = Vec::with_capacity(tokens.len());
        for_each_slice(teacher, &self.text, &mut |first, logits| {
            let expected = &self.logprobs[first * vocab_size..][..logits.len()];
            let rows = logits.par_chunks_exact(vocab_size).zip(expected.par_chunks_exact(vocab_size)).enumerate();
            let compared = rows.map(|(row, (logits, p))| compare(p, logits, follows(first + row)));
            all.par_extend(compared);
        })?;
        if let Some(position) = all.iter().position(|(kl, change)| !(kl.is_finite() && change.is_finite())) {
            let (got, valid) = (format!("no number at position {position} in {}", of.dtype), "numbers".into());
            return Err(TeacherError::Input { what: "logits of a probe", got, valid });
        }
        // in the order of the positions, so that the sum is the same for any number of threads
        let sum: f64 = all.iter().map(|(kl, _)| kl).sum();
        Ok(Difference {
            tokens: all.len() as u64,
            mean_kl_nats: sum / all.len() as f64,
            max_kl_nats: all.iter().map(|(kl, _)| *kl).fold(0.0, f64::max),
            max_logprob_change_nats: all.iter().map(|(_, change)| *change).fold(0.0, f64::max),
        })
    }
}

/// Seconds of the passes over the text with all its logits, which stay where they are made: the best of three, or of fewer where they take
/// long. One should have gone before, which made what a pass needs.
///
/// # Errors
/// When the teacher fails.
pub fn seconds(teacher: &dyn Teacher, text: &Text) -> Result<f64> {
    let (began, mut best) = (Instant::now(), f64::INFINITY);
    let mut logits = teacher.buffer()?;
    for pass in 0..PASSES {
        if pass > 0 && began.elapsed() > PASSES_TAKE {
            break;
        }
        let start = Instant::now();
        slices(teacher, text, &mut logits, &mut |_, _| Ok(()))?;
        // the work of a device is done in its order, so the last slice is there when all are
        logits.settle()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Hands out the number of the first position of each slice of logits with the slice, in memory.
fn for_each_slice(teacher: &dyn Teacher, text: &Text, visit: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
    slices(teacher, text, &mut teacher.buffer()?, &mut |first, logits| {
        visit(first, &logits.on_host()?);
        Ok(())
    })
}

/// The same with the slice where it is made.
fn slices(
    teacher: &dyn Teacher,
    text: &Text,
    logits: &mut Logits,
    visit: &mut dyn FnMut(usize, &Logits) -> Result<()>,
) -> Result<()> {
    let mut before = 0;
    for runs in passes(&text.runs, teacher.pass_tokens()) {
        let hidden = teacher.pass(&runs)?;
        let numbers: Vec<u32> = (0..runs.tokens().len() as u32).collect();
        for slice in numbers.chunks(teacher.slice_rows()) {
            teacher.slice(&hidden, slice, logits)?;
            visit(before + slice[0] as usize, logits)?;
        }
        before += numbers.len();
    }
    Ok(())
}

/// The runs, as many at a time as a pass may have tokens, at least one.
fn passes(runs: &Runs, most_tokens: usize) -> Vec<Runs> {
    let mut passes: Vec<Runs> = Vec::new();
    for run in runs.iter() {
        match passes.last_mut() {
            Some(pass) if pass.tokens().len() + run.len() <= most_tokens => pass.push(run.iter().copied()),
            _ => {
                let mut pass = Runs::new();
                pass.push(run.iter().copied());
                passes.push(pass);
            }
        }
    }
    passes
}

fn log_partition(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from((l - max).exp())).sum();
    f64::from(max) + sum.ln()
}

fn log_softmax(logits: &mut [f32]) {
    let log_z = log_partition(logits);
    logits.iter_mut().for_each(|l| *l = (f64::from(*l) - log_z) as f32);
}

/// KL(p ‖ q), and |ln p − ln q| of the token that follows.
fn compare(logprobs: &[f32], logits: &[f32], follows: Option<usize>) -> (f64, f64) {
    let log_z = log_partition(logits);
    let change = |k: usize| f64::from(logprobs[k]) - (f64::from(logits[k]) - log_z);
    let terms = (0..logits.len()).map(|k| f64::from(logprobs[k].exp()) * change(k));
    // rounding may take it below zero
    let kl = terms.sum::<f64>();
    (if kl.is_nan() { kl } else { kl.max(0.0) }, follows.map_or(0.0, |k| change(k).abs()))
}
