//! Cuts texts into windows, collects windows into batches, and passes batches through the teacher.
//!
//! ```text
//!   tokens  0 … … … W          S … … … S + W          2S …        window k begins at k·S and ends at most W later;
//!           └ predicted: 1 … W ┘ └ predicted: W … S + W ┘          tokens that an earlier window predicted are only context
//! ```

use std::collections::{HashMap, VecDeque};

use arrow::array::RecordBatch;
use rayon::prelude::*;
use stillhouse_noise::Softmax;
use stillhouse_operators::operator::OperatorError;
use stillhouse_teacher::{Hidden, Logits, Runs, Teacher};

use super::{Features, FirstToken, ScoreOptions, TextScore, token_rows};

/// Maximum number of texts in progress. Beyond it the queue goes through the teacher even if it is not full.
const MAX_TEXTS: usize = 1 << 16;

/// Result of a text.
pub(super) struct Finished {
    /// The score; `None` if the text has no predicted token.
    pub score: Option<TextScore>,
}

/// A text in progress.
#[derive(Default)]
struct Text {
    /// Occurrences of each token.
    counts: HashMap<u32, u64>,
    tokens: u64,
    predicted: u64,
    nats: f64,
    /// Number of windows that have not passed through the teacher.
    open: usize,
    ended: bool,
}

/// What to compute from a window.
enum Target {
    /// −ln p of its tokens from index `first`.
    Nats { first: usize },
    /// The hidden state of its last token.
    Feature,
}

/// A sequence of tokens to pass through the teacher.
struct Window {
    /// Number of the window's text.
    text: u64,
    tokens: Vec<u32>,
    target: Target,
}

/// The text that is being read.
#[derive(Default)]
struct OpenText {
    /// Tokens from the start of the next window.
    buffer: Vec<u32>,
    /// Number of tokens at the start of the buffer that earlier windows have predicted or were given.
    seen: usize,
    /// Whether the buffer starts at the start of the text.
    at_start: bool,
    /// The first tokens of the text, for its hidden state.
    head: Vec<u32>,
}

/// Takes texts in pieces and returns their scores in order.
pub(super) struct Scorer<'a> {
    teacher: &'a dyn Teacher,
    bos: Option<u32>,
    window: usize,
    stride: usize,
    batch_tokens: usize,
    scores: bool,
    most_texts: u64,
    reading: Option<OpenText>,
    /// Number of the text that is being read or comes next.
    number: u64,
    /// Texts in progress. The first has the number `number − texts.len()`, or one more while a text is being read.
    texts: VecDeque<Text>,
    first: u64,
    queue: Vec<Window>,
    queued_tokens: usize,
    logits: Option<Logits>,
    features: Features,
}

impl<'a> Scorer<'a> {
    pub(super) fn new(
        teacher: &'a dyn Teacher,
        options: &ScoreOptions,
        bos: u32,
        scores: bool,
        most_texts: usize,
    ) -> Self {
        let batch_tokens = (options.batch_tokens.max(options.window_tokens) as usize).min(teacher.pass_tokens());
        Self {
            teacher,
            bos: (options.first_token == FirstToken::Bos).then_some(bos),
            window: options.window_tokens as usize,
            stride: options.stride_tokens as usize,
            batch_tokens,
            scores,
            most_texts: most_texts as u64,
            reading: None,
            number: 0,
            texts: VecDeque::new(),
            first: 0,
            queue: Vec::new(),
            queued_tokens: 0,
            logits: None,
            features: Features::default(),
        }
    }

    /// Takes a batch of pieces of texts.
    pub(super) fn take(&mut self, batch: &RecordBatch) -> Result<(), OperatorError> {
        let none = || OperatorError::Config { operator: "score", message: "no batch of tokens".into() };
        for (tokens, end) in token_rows(batch).ok_or_else(none)? {
            self.add_piece(tokens)?;
            if end {
                self.end()?;
            }
        }
        Ok(())
    }

    fn add_piece(&mut self, tokens: &[u32]) -> Result<(), OperatorError> {
        let mut reading = match self.reading.take() {
            Some(reading) => reading,
            None => {
                self.texts.push_back(Text::default());
                OpenText { at_start: true, ..OpenText::default() }
            }
        };
        if let Some(text) = self.texts.back_mut() {
            text.tokens += tokens.len() as u64;
            if self.scores {
                tokens.iter().for_each(|token| *text.counts.entry(*token).or_default() += 1);
            }
        }
        if self.number < self.most_texts {
            let room = self.window - reading.head.len();
            reading.head.extend(&tokens[..tokens.len().min(room)]);
        }
        if self.scores && !tokens.is_empty() {
            if reading.at_start && reading.buffer.is_empty() {
                reading.buffer.extend(self.bos.filter(|bos| tokens.first() != Some(bos)));
            }
            // fill at most one window at a time, so that the buffer never holds more than a window
            let mut rest = tokens;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(self.window - reading.buffer.len()));
                reading.buffer.extend(now);
                rest = later;
                if reading.buffer.len() == self.window {
                    self.window(&mut reading)?;
                }
            }
        }
        self.reading = Some(reading);
        Ok(())
    }

    /// Queues the full buffer as a window. The next window starts a stride later.
    fn window(&mut self, reading: &mut OpenText) -> Result<(), OperatorError> {
        self.last_window(reading)?;
        reading.buffer.drain(..self.stride);
        reading.seen = reading.buffer.len();
        reading.at_start = false;
        Ok(())
    }

    /// Queues the buffer as a window, if it has a token that no earlier window had.
    fn last_window(&mut self, reading: &OpenText) -> Result<(), OperatorError> {
        // the first token of a window has no token before it
        let first = if reading.at_start { 1 } else { reading.seen.max(1) };
        if first >= reading.buffer.len() {
            return Ok(());
        }
        if let Some(text) = self.texts.back_mut() {
            text.open += 1;
        }
        self.push(reading.buffer.clone(), Target::Nats { first })
    }

    fn end(&mut self) -> Result<(), OperatorError> {
        if let Some(reading) = self.reading.take() {
            self.last_window(&reading)?;
            if !reading.head.is_empty() {
                if let Some(text) = self.texts.back_mut() {
                    text.open += 1;
                }
                self.push(reading.head, Target::Feature)?;
            }
        }
        if let Some(text) = self.texts.back_mut() {
            text.ended = true;
        }
        self.number += 1;
        // texts without a token cannot finish before an earlier one in the queue
        if self.texts.len() >= MAX_TEXTS { self.flush() } else { Ok(()) }
    }

    fn push(&mut self, tokens: Vec<u32>, target: Target) -> Result<(), OperatorError> {
        if self.queued_tokens + tokens.len() > self.batch_tokens {
            self.flush()?;
        }
        self.queued_tokens += tokens.len();
        self.queue.push(Window { text: self.number, tokens, target });
        Ok(())
    }

    /// Passes the queue through the teacher.
    pub(super) fn flush(&mut self) -> Result<(), OperatorError> {
        let queue = std::mem::take(&mut self.queue);
        self.queued_tokens = 0;
        if queue.is_empty() {
            return Ok(());
        }
        let mut runs = Runs::new();
        // for each predicted token: the row of the pass that predicts it, and its text and id; and the rows whose
        // hidden state is wanted
        let (mut rows, mut wanted, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let mut start = 0;
        for window in &queue {
            runs.push(window.tokens.iter().copied());
            match window.target {
                Target::Nats { first } => {
                    for at in first..window.tokens.len() {
                        rows.push((start + at - 1) as u32);
                        wanted.push((window.text, window.tokens[at]));
                    }
                }
                Target::Feature => ends.push(start + window.tokens.len() - 1),
            }
            start += window.tokens.len();
        }
        // keep the last layer's states only if one is wanted
        let last = [self.teacher.info().layers];
        let (hidden, states) = self.teacher.pass_with_states(&runs, if ends.is_empty() { &[] } else { &last })?;
        for (rows, wanted) in rows.chunks(self.teacher.slice_rows()).zip(wanted.chunks(self.teacher.slice_rows())) {
            self.slice(&hidden, rows, wanted)?;
        }
        self.add_features(&states, &ends)?;
        for window in &queue {
            if let Some(text) = self.texts.get_mut((window.text - self.first) as usize) {
                text.open -= 1;
            }
        }
        Ok(())
    }

    fn slice(&mut self, hidden: &Hidden, rows: &[u32], wanted: &[(u64, u32)]) -> Result<(), OperatorError> {
        let mut logits = match self.logits.take() {
            Some(logits) => logits,
            None => self.teacher.buffer()?,
        };
        self.teacher.slice(hidden, rows, &mut logits)?;
        let vocab = self.teacher.info().vocab_size;
        let nats: Vec<f64> = {
            let on_host = logits.on_host()?;
            let rows = on_host.par_chunks_exact(vocab).zip(wanted.par_iter());
            rows.map(|(logits, (text, token))| negative_log_prob(logits, *token, *text)).collect::<Result<_, _>>()?
        };
        // sequentially, so that the sums do not depend on the number of threads
        for ((text, _), nats) in wanted.iter().zip(nats) {
            if let Some(text) = self.texts.get_mut((text - self.first) as usize) {
                text.nats += nats;
                text.predicted += 1;
            }
        }
        self.logits = Some(logits);
        Ok(())
    }

    /// Keeps the hidden states of the tokens `ends` from `states` `[tokens, H]`.
    fn add_features(&mut self, states: &[f32], ends: &[usize]) -> Result<(), OperatorError> {
        let width = self.teacher.info().hidden_size;
        for end in ends {
            let state = states.get(end * width..(end + 1) * width).ok_or_else(|| OperatorError::Config {
                operator: "score",
                message: format!("no hidden state of token {end} of a pass: a bug in this program"),
            })?;
            self.features.push(state);
        }
        Ok(())
    }

    /// Removes and returns the finished texts, in order.
    pub(super) fn finished(&mut self) -> impl Iterator<Item = Finished> + use<> {
        let mut done = Vec::new();
        while self.texts.front().is_some_and(|text| text.ended && text.open == 0) {
            let Some(text) = self.texts.pop_front() else { break };
            done.push(Finished { score: text.score(self.first) });
            self.first += 1;
        }
        done.into_iter()
    }

    pub(super) fn into_features(self) -> Features {
        self.features
    }
}

impl Text {
    fn score(&self, number: u64) -> Option<TextScore> {
        (self.predicted > 0).then(|| TextScore {
            text: number,
            tokens: self.tokens,
            predicted: self.predicted,
            nats: self.nats,
            perplexity: (self.nats / self.predicted as f64).exp(),
            entropy_nats: entropy(self.counts.values().copied().collect()),
        })
    }
}

/// −Σ c/n · ln(c/n), summed in ascending order of counts, so that the result does not depend on the order of the map.
pub(super) fn entropy(mut counts: Vec<u64>) -> f64 {
    counts.sort_unstable();
    let all = counts.iter().sum::<u64>() as f64;
    let sum: f64 = counts.iter().map(|&count| count as f64 / all).map(|share| share * share.ln()).sum();
    0.0 - sum
}

fn negative_log_prob(logits: &[f32], token: u32, text: u64) -> Result<f64, OperatorError> {
    let wrong = |message: String| OperatorError::Data { operator: "score", place: format!("text {text}"), message };
    let mut softmax = Softmax::new(logits.len()).map_err(|e| wrong(e.to_string()))?;
    softmax.load(logits).map_err(|e| wrong(e.to_string()))?;
    let logit = logits.get(token as usize).copied().ok_or_else(|| {
        wrong(format!("got token {token}, valid: below {}, the vocabulary of the teacher", logits.len()))
    })?;
    Ok(-softmax.logprob(logit))
}
