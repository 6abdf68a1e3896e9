//! Scores of texts under a teacher: perplexity, unigram entropy, and MAUVE beside other texts.
//!
//! ```text
//!   FILE ─► read ─► tokenize ─┬─► windows of W tokens, every S ─► teacher ─► Σ −ln p of each text ─► perplexity
//!                             ├─► how often each token occurs ─────────────────────────────────────► entropy
//!                             └─► the first W tokens ─► teacher ─► the last hidden state ─┐
//!   REFERENCE ─► read ─► tokenize ─► the first W tokens ─► teacher ─► … ──────────────────┴────────► MAUVE
//! ```
//!
//! | score | definition | unit |
//! |---|---|---|
//! | perplexity | exp of the mean of −ln p(x_i given up to W − 1 tokens before it); windows as in transformers' guide to perplexity (W = 1,024, S = 512 in Gumbel Distillation) | |
//! | entropy | −Σ_v c_v/n · ln(c_v/n) over the n tokens of a text, then the mean over texts (Partition Generative Modeling, Eq. 11) | nat |
//! | MAUVE | see [`mauve`] | 0 to 1 |
//!
//! A text that does not begin with BOS gets one put before it, so that its first token is predicted too (`first_token: bos`, as evaluate's
//! `perplexity` and our own shards have it), or its first token is given (`first_token: given`, as in transformers' guide).
//!
//! Cost: W/S teacher passes over each text that is longer than W, one over a shorter one; with a reference one more over the first W tokens.
//! Memory: a batch of windows, the hidden states of at most [`ScoreOptions::most_texts`] texts on each side; nothing grows with a text.

mod job;
mod mauve;
mod windows;

use std::sync::Arc;

use arrow::array::{AsArray, BooleanArray, RecordBatch, UInt32Array, UInt64Array};
use arrow::datatypes::{UInt32Type, UInt64Type};
use serde::Serialize;
use stillhouse_operators::operator::{Counters, OperatorError, SharedStatistics, SplitContext};
use stillhouse_schemas::spec::{Dtype, InputFormat, SpecialTokens, TextDocument};
use stillhouse_teacher::Teacher;

pub use self::mauve::{Features, Mauve, MauveOptions, mauve};
use self::windows::{Finished, Scorer};
use crate::engine::teacher;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::job::Prepared;
use crate::plan;
use crate::source::{self, SourceError, Stopped};

/// What is scored, by which teacher.
#[derive(Debug, Clone)]
pub struct ScoreOptions {
    /// The file with the texts, as an entry of `input.paths`.
    pub file: String,
    /// The texts to compare with, for MAUVE.
    pub reference: Option<String>,
    /// Format of the files; by their endings where not said.
    pub format: Option<InputFormat>,
    /// Column or key of the text.
    pub text: String,
    /// For text files: what a text is.
    pub document: TextDocument,
    /// The teacher, as `extract.teacher.path`.
    pub teacher: String,
    /// The tokenizer, where it is not the teacher's own.
    pub tokenizer: Option<String>,
    /// Device of the teacher.
    pub device: String,
    /// Arithmetic of the teacher.
    pub dtype: Dtype,
    /// Tokens of one pass.
    pub batch_tokens: u32,
    /// W.
    pub window_tokens: u32,
    /// S.
    pub stride_tokens: u32,
    /// What stands before the first token of a text.
    pub first_token: FirstToken,
    /// What a special token is that is written in a text.
    pub special_tokens: SpecialTokens,
    /// Of each side the first so many texts take part in MAUVE.
    pub most_texts: usize,
    /// How MAUVE is computed.
    pub mauve: MauveOptions,
}

/// What stands before the first token of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FirstToken {
    /// BOS, where the text does not begin with it: the first token is predicted.
    Bos,
    /// Nothing: the first token is given.
    Given,
}

/// The scores of a file.
#[derive(Debug, Clone, Serialize)]
pub struct Scores {
    /// Texts with a score.
    pub texts: u64,
    /// Texts in which nothing is to be predicted: without a token, or with a given one only.
    pub empty_texts: u64,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// exp of the mean of −ln p over all of these tokens.
    pub perplexity: f64,
    /// The perplexities of the texts.
    pub text_perplexity: Mean,
    /// The unigram entropies of the texts, nat.
    pub entropy_nats: Mean,
    /// MAUVE, where there is a reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mauve: Option<Mauve>,
    /// The teacher: where it is from, and what it computes in.
    pub teacher: String,
    /// Arithmetic of the teacher.
    pub arithmetic: String,
    /// W.
    pub window_tokens: u32,
    /// S.
    pub stride_tokens: u32,
    /// What stood before the first token.
    pub first_token: FirstToken,
}

/// The score of a text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TextScore {
    /// Which record of the file, from 0.
    pub text: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Of those the predicted ones.
    pub predicted: u64,
    /// Σ −ln p of them, nat.
    pub nats: f64,
    /// exp(nats / predicted).
    pub perplexity: f64,
    /// Unigram entropy, nat.
    pub entropy_nats: f64,
}

/// A mean with the error of its estimate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Mean {
    /// The mean over texts.
    pub mean: f64,
    /// Its standard error, s/√n; `None` of a single text.
    pub standard_error: Option<f64>,
}

/// Sums from which a mean and its error come (Welford).
#[derive(Debug, Clone, Copy, Default)]
struct Moments {
    count: f64,
    mean: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, value: f64) {
        self.count += 1.0;
        let before = value - self.mean;
        self.mean += before / self.count;
        self.squares += before * (value - self.mean);
    }

    fn mean(&self) -> Mean {
        let several = self.count > 1.0;
        let variance = self.squares / (self.count - 1.0);
        Mean { mean: self.mean, standard_error: several.then(|| (variance / self.count).sqrt()) }
    }
}

/// Scores the texts of a file, each handed to `each` in the order of the file.
///
/// # Errors
/// When a file, the tokenizer or the teacher cannot be had or do not fit together, when a logit is no number, when nothing in the file has a
/// score; what `each` gives back.
pub fn score(
    options: &ScoreOptions,
    observer: &dyn Observer,
    each: &mut dyn FnMut(&TextScore) -> Result<()>,
) -> Result<Scores> {
    let prepared = job::prepare(options, &options.file, "FILE", observer)?;
    let reference = match &options.reference {
        Some(file) => Some(job::prepare(options, file, "--reference", observer)?),
        None => None,
    };
    let teacher = load(&prepared, options, observer)?;
    score_under(&teacher, options, &prepared, reference.as_ref(), observer, each)
}

/// The scores under a teacher that is loaded, wherever it is.
fn score_under(
    teacher: &Arc<dyn Teacher>,
    options: &ScoreOptions,
    prepared: &Prepared,
    reference: Option<&Prepared>,
    observer: &dyn Observer,
    each: &mut dyn FnMut(&TextScore) -> Result<()>,
) -> Result<Scores> {
    let mut sums = Sums::default();
    let most_texts = if reference.is_some() { options.most_texts } else { 0 };
    let scored = Texts { options, prepared, teacher, most_texts, scores: true }.run(
        observer,
        &options.file,
        &mut |finished| {
            sums.add(&finished);
            finished.score.as_ref().map_or(Ok(()), &mut *each)
        },
    )?;
    if sums.texts == 0 {
        let message = format!("{}: no text in which a token is to be predicted ({} without)", options.file, sums.empty);
        return Err(PipelineError::new(ErrorKind::Input, message));
    }
    let found = match (reference, &options.reference) {
        (Some(prepared), Some(file)) => {
            let other = Texts { options, prepared, teacher, most_texts, scores: false };
            let other = other.run(observer, file, &mut |_| Ok(()))?;
            observer.event(&Event::Preparing { what: format!("MAUVE of {} and {} texts", scored.len(), other.len()) });
            let found = mauve(&scored, &other, &options.mauve)
                .map_err(|e| PipelineError::new(ErrorKind::Input, format!("--reference {file}: {e}")))?;
            Some(found)
        }
        _ => None,
    };
    Ok(Scores {
        texts: sums.texts,
        empty_texts: sums.empty,
        tokens: sums.predicted,
        perplexity: (sums.nats / sums.predicted as f64).exp(),
        text_perplexity: sums.perplexity.mean(),
        entropy_nats: sums.entropy.mean(),
        mauve: found,
        teacher: prepared.teacher.as_ref().map(|t| t.source.clone()).unwrap_or_default(),
        arithmetic: teacher.info().arithmetic.clone(),
        window_tokens: options.window_tokens,
        stride_tokens: options.stride_tokens,
        first_token: options.first_token,
    })
}

#[derive(Default)]
struct Sums {
    texts: u64,
    empty: u64,
    predicted: u64,
    nats: f64,
    perplexity: Moments,
    entropy: Moments,
}

impl Sums {
    fn add(&mut self, finished: &Finished) {
        let Some(score) = &finished.score else {
            self.empty += 1;
            return;
        };
        self.texts += 1;
        self.predicted += score.predicted;
        self.nats += score.nats;
        self.perplexity.add(score.perplexity);
        self.entropy.add(score.entropy_nats);
    }
}

fn load(prepared: &Prepared, options: &ScoreOptions, observer: &dyn Observer) -> Result<Arc<dyn Teacher>> {
    let (Some(found), Some(extract)) = (&prepared.teacher, &prepared.spec.extract) else {
        return Err(PipelineError::new(ErrorKind::Usage, "--teacher: none"));
    };
    observer.event(&Event::Preparing { what: format!("loading the teacher {}", found.source) });
    let device = stillhouse_teacher::devices(&options.device)
        .ok()
        .and_then(|devices| devices.first().map(ToString::to_string))
        .unwrap_or_else(|| options.device.clone());
    // one more: the BOS that is put before a text
    let length = options.window_tokens as usize;
    teacher::load(&found.path, &extract.teacher, options.dtype, length, &device)
}

/// The texts of a file, on their way through the teacher.
struct Texts<'a> {
    options: &'a ScoreOptions,
    prepared: &'a Prepared,
    teacher: &'a Arc<dyn Teacher>,
    /// Texts whose last hidden state is kept.
    most_texts: usize,
    /// Whether they are scored; of a reference only the hidden states are wanted.
    scores: bool,
}

impl Texts<'_> {
    /// Every text of the file, in order, and the hidden states of the first ones.
    fn run(
        &self,
        observer: &dyn Observer,
        file: &str,
        each: &mut dyn FnMut(Finished) -> Result<()>,
    ) -> Result<Features> {
        let prepared = self.prepared;
        let splits = plan::splits(prepared, &prepared.files, observer)?;
        observer.event(&Event::Preparing { what: format!("scoring the texts of {file}") });
        let bos = prepared.teacher.as_ref().map_or(0, |t| t.bos);
        let mut scorer = Scorer::new(self.teacher.as_ref(), self.options, bos, self.scores, self.most_texts);
        let of_teacher = |e: OperatorError| PipelineError::caused(ErrorKind::Model, file.to_owned(), e);
        for split in &splits {
            let context = SplitContext {
                split: split.split,
                dataset_split: split.dataset_split.clone(),
                place: split.place,
                vocabulary: Arc::clone(&prepared.vocabulary),
                teacher: None,
                statistics: SharedStatistics::default(),
                meter: Arc::new(Counters::default()),
            };
            let tokenize = prepared.operators.iter().find(|spec| spec.name() == "tokenize");
            let Some(mut tokenize) = tokenize.map(|spec| spec.build(&context)).transpose().map_err(of_teacher)? else {
                return Err(PipelineError::new(ErrorKind::Usage, "a job without a tokenizer"));
            };
            let mut failed = None;
            let mut emit = |batch: RecordBatch| {
                let done = tokenize
                    .process(&batch, &mut |tokens| scorer.take(&tokens))
                    .map_err(of_teacher)
                    .and_then(|()| scorer.finished().try_for_each(&mut *each));
                done.map_err(|e| {
                    failed = Some(e);
                    Stopped
                })
            };
            let read = source::read_split(
                &prepared.store,
                &prepared.files,
                split,
                &crate::job::query_input(prepared),
                &mut emit,
            );
            match (read, failed) {
                (Ok(_), None) => {}
                (_, Some(e)) => return Err(e),
                (Err(SourceError::Stopped(_)), None) => {}
                (Err(e), None) => return Err(PipelineError::source(file.to_owned(), e)),
            }
            tokenize.finish(&mut |tokens| scorer.take(&tokens)).map_err(of_teacher)?;
        }
        scorer.flush().map_err(of_teacher)?;
        scorer.finished().try_for_each(each)?;
        Ok(scorer.into_features())
    }
}

/// The rows of a batch of `tokens_schema`: tokens of a document, and whether it ends there.
fn token_rows(batch: &RecordBatch) -> Option<impl Iterator<Item = (&[u32], bool)>> {
    let tokens = batch.column(1).as_list_opt::<i32>()?;
    let values: &UInt32Array = tokens.values().as_primitive_opt::<UInt32Type>()?;
    let ends: &BooleanArray = batch.column(2).as_boolean_opt()?;
    let _: &UInt64Array = batch.column(0).as_primitive_opt::<UInt64Type>()?;
    let offsets = tokens.value_offsets();
    Some((0..batch.num_rows()).map(move |row| {
        let range = offsets[row] as usize..offsets[row + 1] as usize;
        (&values.values()[range], ends.value(row))
    }))
}

#[cfg(test)]
mod tests;
