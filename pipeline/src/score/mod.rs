//! Scores texts under a teacher: perplexity, unigram entropy, and MAUVE against other texts.
//!
//! ```text
//!   FILE ─► read ─► tokenize ─┬─► windows of W tokens, every S ─► teacher ─► Σ −ln p of each text ─► perplexity
//!                             ├─► frequency of each token ─────────────────────────────────────────► entropy
//!                             └─► first W tokens ─► teacher ─► last hidden state ─┐
//!   REFERENCE ─► read ─► tokenize ─► first W tokens ─► teacher ─► … ──────────────┴────────────────► MAUVE
//! ```
//!
//! | score | definition | unit |
//! |---|---|---|
//! | perplexity | exp of the mean of −ln p(x_i given up to W − 1 earlier tokens) | |
//! | entropy | −Σ_v c_v/n · ln(c_v/n) over the n tokens of a text, then the mean over texts (Partition Generative Modeling, Eq. 11) | nat |
//! | MAUVE | see [`mauve`] | 0 to 1 |
//!
//! Windows follow transformers' guide to perplexity; Gumbel Distillation uses W = 1,024 and S = 512.
//!
//! With `first_token: bos`, a text that does not begin with BOS gets one prepended, so that its first token is
//! predicted too. evaluate's `perplexity` and our own shards do the same. With `first_token: given`, the first token is
//! given, as in transformers' guide.
//!
//! Cost: W/S teacher passes over each text longer than W, one over a shorter one; with a reference one more over the
//! first W tokens. Memory: a batch of windows, and the hidden states of at most [`ScoreOptions::most_texts`] texts per
//! side. The length of a text does not matter.

mod job;
mod mauve;
mod windows;

use std::sync::Arc;

use arrow::array::{AsArray, BooleanArray, RecordBatch, UInt32Array, UInt64Array};
use arrow::datatypes::{UInt32Type, UInt64Type};
use futures::TryStreamExt;
use serde::Serialize;
use stillhouse_operators::operator::OperatorError;
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_schemas::spec::{Dtype, InputFormat, SpecialTokens, TextDocument};
use stillhouse_teacher::Teacher;

pub use self::mauve::{Features, Mauve, MauveOptions, mauve};
use self::windows::{Finished, Scorer};
use crate::engine::pool::{Pool, Spawner};
use crate::engine::session::Session;
use crate::engine::{operator_plan, teacher};
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::job::Prepared;
use crate::plan;
use crate::run::splits::{resources, source_of};

/// Options of [`score`].
#[derive(Debug, Clone)]
pub struct ScoreOptions {
    /// File with the texts, as an entry of `input.paths`.
    pub file: String,
    /// File with the reference texts for MAUVE.
    pub reference: Option<String>,
    /// Format of the files; `None` derives it from their extensions.
    pub format: Option<InputFormat>,
    /// Column or key of the text.
    pub text: String,
    /// For text files: the unit that is one text.
    pub document: TextDocument,
    /// Teacher, as in `extract.teacher.path`.
    pub teacher: String,
    /// Tokenizer; `None` means the teacher's own.
    pub tokenizer: Option<String>,
    /// Device of the teacher.
    pub device: String,
    /// Arithmetic of the teacher.
    pub dtype: Dtype,
    /// Tokens per pass.
    pub batch_tokens: u32,
    /// W, tokens per window.
    pub window_tokens: u32,
    /// S, tokens between the starts of two windows.
    pub stride_tokens: u32,
    /// What precedes the first token of a text.
    pub first_token: FirstToken,
    /// How to treat special tokens that occur in a text.
    pub special_tokens: SpecialTokens,
    /// Maximum number of texts per side that MAUVE uses, from the start of the file.
    pub most_texts: usize,
    /// Settings of MAUVE.
    pub mauve: MauveOptions,
}

/// What precedes the first token of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FirstToken {
    /// BOS, unless the text begins with it: the first token is predicted.
    Bos,
    /// Nothing: the first token is given.
    Given,
}

/// The scores of a file.
#[derive(Debug, Clone, Serialize)]
pub struct Scores {
    /// Number of texts with a score.
    pub texts: u64,
    /// Number of texts without a predicted token: empty, or with one given token only.
    pub empty_texts: u64,
    /// Number of predicted tokens.
    pub tokens: u64,
    /// exp of the mean of −ln p over all predicted tokens.
    pub perplexity: f64,
    /// Mean perplexity per text.
    pub text_perplexity: Mean,
    /// Mean unigram entropy per text, in nat.
    pub entropy_nats: Mean,
    /// MAUVE, if there is a reference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mauve: Option<Mauve>,
    /// Source of the teacher.
    pub teacher: String,
    /// Arithmetic of the teacher.
    pub arithmetic: String,
    /// W, tokens per window.
    pub window_tokens: u32,
    /// S, tokens between the starts of two windows.
    pub stride_tokens: u32,
    /// What preceded the first token of a text.
    pub first_token: FirstToken,
}

/// The score of a text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TextScore {
    /// Index of the text's record in the file, from 0.
    pub text: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of predicted tokens.
    pub predicted: u64,
    /// Σ −ln p of the predicted tokens, in nat.
    pub nats: f64,
    /// exp(nats / predicted).
    pub perplexity: f64,
    /// Unigram entropy, in nat.
    pub entropy_nats: f64,
}

/// A mean and its standard error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Mean {
    /// Mean over texts.
    pub mean: f64,
    /// Standard error of the mean, s/√n; `None` for a single text.
    pub standard_error: Option<f64>,
}

/// Running sums for a mean and its error (Welford's algorithm).
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

/// Scores the texts of a file and passes each score to `each`, in the order of the file.
///
/// # Errors
/// If a file, the tokenizer or the teacher is unavailable or they do not fit together, a logit is not finite, or no
/// text of the file has a score. Also the errors of `each`.
pub fn score(
    options: &ScoreOptions,
    observer: &dyn Observer,
    each: &mut dyn FnMut(&TextScore) -> Result<()>,
) -> Result<Scores> {
    let prepared = Arc::new(job::prepare(options, &options.file, "FILE", observer)?);
    let reference = match &options.reference {
        Some(file) => Some(Arc::new(job::prepare(options, file, "--reference", observer)?)),
        None => None,
    };
    let teacher = load(&prepared, options, observer)?;
    score_under(&teacher, options, &prepared, reference.as_ref(), observer, each)
}

/// Scores texts with a loaded teacher on any device.
fn score_under(
    teacher: &Arc<dyn Teacher>,
    options: &ScoreOptions,
    prepared: &Arc<Prepared>,
    reference: Option<&Arc<Prepared>>,
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
    let device = stillhouse_teacher::parse_devices(&options.device)
        .ok()
        .and_then(|devices| devices.first().map(ToString::to_string))
        .unwrap_or_else(|| options.device.clone());
    // a window includes the BOS that is put before a text
    let length = options.window_tokens as usize;
    teacher::load(&found.path, &extract.teacher, options.dtype, length, &device)
}

/// Passes the texts of a file through the teacher.
struct Texts<'a> {
    options: &'a ScoreOptions,
    prepared: &'a Arc<Prepared>,
    teacher: &'a Arc<dyn Teacher>,
    /// Number of texts whose last hidden state is kept.
    most_texts: usize,
    /// Whether to score the texts; a reference needs only hidden states.
    scores: bool,
}

impl Texts<'_> {
    /// Processes every text of the file in order, and returns the hidden states of the first ones.
    fn run(
        &self,
        observer: &dyn Observer,
        file: &str,
        each: &mut dyn FnMut(Finished) -> Result<()>,
    ) -> Result<Features> {
        let prepared = self.prepared;
        let splits = Arc::new(plan::splits(prepared, &prepared.files, observer)?);
        observer.event(&Event::Preparing { what: format!("scoring the texts of {file}") });
        let bos = prepared.teacher.as_ref().map_or(0, |t| t.bos);
        let mut scorer = Scorer::new(self.teacher.as_ref(), self.options, bos, self.scores, self.most_texts);
        let of_teacher = |e: OperatorError| PipelineError::caused(ErrorKind::Model, file.to_owned(), e);
        let of_stage = |e| PipelineError::from_stage(file.to_owned(), e);
        let pool = Pool::of_this_process()?;
        let session = self.tokenizing(&splits, pool.spawner()?)?;
        for (partition, split) in splits.iter().enumerate() {
            // the split's counts live as long as this handle
            let _state = session.resources.split_state(split);
            let mut tokens = session.rows(partition).map_err(of_stage)?;
            while let Some(batch) = prepared.store.handle.block_on(tokens.try_next()).map_err(of_stage)? {
                scorer.take(&batch).map_err(of_teacher)?;
                scorer.finished().try_for_each(&mut *each)?;
            }
        }
        scorer.flush().map_err(of_teacher)?;
        scorer.finished().try_for_each(each)?;
        Ok(scorer.into_features())
    }

    /// Plans reading and tokenizing as in a run of a job: a batch ahead of the teacher, in the job's memory limit.
    fn tokenizing(&self, splits: &Arc<Vec<SplitRecord>>, spawner: Spawner) -> Result<Session> {
        let prepared = self.prepared;
        let tokenize: Vec<OperatorSpec> =
            prepared.operators.iter().filter(|spec| spec.name() == "tokenize").cloned().collect();
        if tokenize.is_empty() {
            return Err(PipelineError::new(ErrorKind::Usage, "a job without a tokenizer"));
        }
        let files = Arc::new(prepared.files.clone());
        let plan = operator_plan(source_of(prepared, &files, splits), &tokenize);
        Session::new(plan, resources(prepared, None, &[], splits, spawner), &prepared.spec.engine)
    }
}

/// The rows of a batch of `tokens_schema`: tokens of a document, and whether the document ends there.
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
