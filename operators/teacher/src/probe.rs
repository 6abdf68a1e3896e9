//! Measures the accuracy and speed of another precision on a text.
//!
//! ```text
//!   text ─► f32 teacher ─► ln p [n, V] ─┐
//!   text ─► bf16 teacher ─► ln q [n, V] ─┴─► mean and largest KL(p ‖ q), largest |ln p − ln q| of a token of the text
//! ```
//!
//! Only one teacher is loaded at a time, so ln p of the first one is kept for the whole vocabulary. [`MAX_BYTES`]
//! bounds its size, and thereby the number of positions.

use std::time::{Duration, Instant};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TeacherError};
use crate::{Logits, Runs, Teacher};

/// Maximum bytes of stored log-probabilities.
pub const MAX_BYTES: usize = 256 << 20;
/// Maximum number of tokens in a text: enough for a mean, and for a pass that fills the cores.
pub const MAX_TOKENS: usize = 1024;

/// Number of passes in [`seconds`], and the total duration after which no further pass starts.
const MAX_PASSES: usize = 3;
const PASSES_TIME_LIMIT: Duration = Duration::from_secs(2);

/// How next-token distributions in one precision differ from those in f32, over the positions of a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PrecisionDifference {
    /// Number of positions.
    pub tokens: u64,
    /// Mean of KL(f32 ‖ this precision), in nats.
    pub mean_kl_nats: f64,
    /// Largest KL, in nats.
    pub max_kl_nats: f64,
    /// Largest change of the log-probability of a token of the text, in nats.
    pub max_logprob_change_nats: f64,
}

/// A text as runs of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    runs: Runs,
}

impl Text {
    /// Takes the first tokens of `runs`, at least one, within the bounds for a vocabulary of `vocab_size`.
    pub fn new<'a>(runs: impl IntoIterator<Item = &'a [u32]>, vocab_size: usize) -> Self {
        let mut remaining = (MAX_BYTES / (size_of::<f32>() * vocab_size.max(1))).clamp(1, MAX_TOKENS);
        let mut text = Runs::new();
        for run in runs {
            let run = &run[..run.len().min(remaining)];
            remaining -= run.len();
            if !run.is_empty() {
                text.push(run.iter().copied());
            }
        }
        Self { runs: text }
    }

    /// Number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.runs.tokens().len()
    }
}

/// The log-probabilities of an f32 teacher on a text.
pub struct Reference {
    text: Text,
    vocab_size: usize,
    /// ln p `[n, V]`.
    logprobs: Vec<f32>,
}

impl Reference {
    /// Computes the reference with `teacher`, whose arithmetic must be f32.
    ///
    /// # Errors
    /// If the text has no tokens, or the teacher fails.
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

    /// The text of the reference.
    #[must_use]
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// Compares `teacher`, the same model in another precision, with the reference.
    ///
    /// # Errors
    /// If its vocabulary differs, a logit is not finite, or it fails.
    pub fn difference(&self, teacher: &dyn Teacher) -> Result<PrecisionDifference> {
        let (vocab_size, of) = (self.vocab_size, teacher.info());
        if of.vocab_size != vocab_size {
            let (got, valid) = (of.vocab_size.to_string(), vocab_size.to_string());
            return Err(TeacherError::Input { what: "vocabulary of a teacher to compare", got, valid });
        }
        let tokens = self.text.runs.tokens();
        // The last token of a run predicts no token of the text.
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
            let (got, valid) =
                (format!("NaN or an infinite number at position {position} in {}", of.dtype), "numbers".into());
            return Err(TeacherError::Input { what: "logits of a probe", got, valid });
        }
        // Sums in the order of positions, so that the result does not depend on the number of threads.
        let sum: f64 = all.iter().map(|(kl, _)| kl).sum();
        Ok(PrecisionDifference {
            tokens: all.len() as u64,
            mean_kl_nats: sum / all.len() as f64,
            max_kl_nats: all.iter().map(|(kl, _)| *kl).fold(0.0, f64::max),
            max_logprob_change_nats: all.iter().map(|(_, change)| *change).fold(0.0, f64::max),
        })
    }
}

/// Returns the seconds of a pass over the text with all its logits, which stay in the teacher's memory. Takes the best
/// of up to three passes. Call it after a warm-up pass that has allocated the buffers.
///
/// # Errors
/// If the teacher fails.
pub fn seconds(teacher: &dyn Teacher, text: &Text) -> Result<f64> {
    let (began, mut best) = (Instant::now(), f64::INFINITY);
    let mut logits = teacher.buffer()?;
    for pass in 0..MAX_PASSES {
        if pass > 0 && began.elapsed() > PASSES_TIME_LIMIT {
            break;
        }
        let start = Instant::now();
        slices(teacher, text, &mut logits, &mut |_, _| Ok(()))?;
        // A device works in order, so the last slice is complete when all are.
        logits.wait()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Calls `visit` with each slice of logits in host memory and the index of its first position.
fn for_each_slice(teacher: &dyn Teacher, text: &Text, visit: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
    slices(teacher, text, &mut teacher.buffer()?, &mut |first, logits| {
        visit(first, &logits.on_host()?);
        Ok(())
    })
}

/// Like [`for_each_slice`], but leaves the slice in the teacher's memory.
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

/// Groups the runs into passes of at most `max_tokens` tokens, and at least one run.
fn passes(runs: &Runs, max_tokens: usize) -> Vec<Runs> {
    let mut passes: Vec<Runs> = Vec::new();
    for run in runs.iter() {
        match passes.last_mut() {
            Some(pass) if pass.tokens().len() + run.len() <= max_tokens => pass.push(run.iter().copied()),
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

/// Returns KL(p ‖ q), and |ln p − ln q| of the following token.
fn compare(logprobs: &[f32], logits: &[f32], follows: Option<usize>) -> (f64, f64) {
    let log_z = log_partition(logits);
    let change = |k: usize| f64::from(logprobs[k]) - (f64::from(logits[k]) - log_z);
    let terms = (0..logits.len()).map(|k| f64::from(logprobs[k].exp()) * change(k));
    // Rounding may make the sum negative.
    let kl = terms.sum::<f64>();
    (if kl.is_nan() { kl } else { kl.max(0.0) }, follows.map_or(0.0, |k| change(k).abs()))
}
