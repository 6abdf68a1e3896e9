//! One teacher pass over a batch of packed sequences, in slices of logits that are handed out and forgotten.
//!
//! ```text
//!   sequences ─► runs (whole rows, or documents) ─► hidden states, where the teacher is ─► slices [n, V] there ─► visit
//! ```
//!
//! What the teacher sees (NOISE.md): position i is predicted from the tokens before it in its run. A run that does
//! not begin with BOS gets one put before it, so all of its positions are predicted; a run that does begin with BOS is
//! taken as it is, and its first position is given. Padding is never predicted.
//!
//! Memory: the hidden states of a batch (of every layer that is kept) and one slice of logits ([`Teacher::slice_rows`]), whose buffer `visit` takes and gives back (or
//! another one, where slices are worked on elsewhere); [B, L, V] never exists.

use std::time::Instant;

use stillhouse_schemas::spec::TeacherContext;
use stillhouse_teacher::{Logits, Runs, Teacher};

use crate::operator::{Measure, Meter, OperatorError};

/// A packed sequence as the teacher pass sees it.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// Key of its randomness.
    pub id: u64,
    /// Its tokens, padding included.
    pub tokens: Vec<u32>,
    /// How many of them are no padding; padding is at the end.
    pub valid: usize,
    /// Where documents begin.
    pub offsets: Vec<usize>,
}

impl Sequence {
    /// Its first `length` tokens.
    fn cut(&self, length: usize) -> Self {
        let offsets = self.offsets.iter().copied().filter(|&offset| offset < length).collect();
        Self { id: self.id, tokens: self.tokens[..length].to_vec(), valid: length.min(self.valid), offsets }
    }
}

/// A predicted position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Predicted {
    /// Row in the batch.
    pub row: usize,
    /// Position in the sequence.
    pub position: usize,
}

/// Predicted positions with their logits.
#[derive(Debug)]
pub struct Slice {
    /// The n positions.
    pub positions: Vec<Predicted>,
    /// Their logits [n, V], where they were made.
    pub logits: Logits,
    /// Their hidden states [n, layers, H], where the pass keeps any.
    pub states: Vec<f32>,
}

/// Takes a slice and gives a buffer for the logits of the next one, whatever it holds.
pub type Visit<'a> = dyn FnMut(Slice) -> Result<Logits, OperatorError> + 'a;

/// How the pass runs.
pub struct TeacherPass<'a> {
    /// The teacher.
    pub teacher: &'a dyn Teacher,
    /// The token before the first one.
    pub bos: u32,
    /// What the teacher sees.
    pub context: TeacherContext,
    /// Tokens of one forward pass.
    pub batch_tokens: usize,
    /// The layers whose hidden states are handed out too, as [`Teacher::pass_keeping`] counts them.
    pub hidden_layers: &'a [usize],
    /// Where the teacher's time is counted.
    pub meter: &'a dyn Meter,
}

/// A stretch of a sequence that the teacher sees on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    row: usize,
    start: usize,
    length: usize,
}

/// The runs of a sequence, in order.
fn runs_of(sequence: &Sequence, row: usize, context: TeacherContext) -> Vec<Run> {
    let end = sequence.valid;
    let mut runs = Vec::new();
    match context {
        TeacherContext::Sequence => runs.push(Run { row, start: 0, length: end }),
        TeacherContext::Document => {
            for (i, &start) in sequence.offsets.iter().enumerate() {
                let stop = sequence.offsets.get(i + 1).map_or(end, |&next| next.min(end));
                if start < stop {
                    runs.push(Run { row, start, length: stop - start });
                }
            }
        }
    }
    runs.retain(|run| run.length > 0);
    runs
}

/// Which positions of a sequence the teacher predicts: those of its runs, but for a BOS that one begins with.
pub(crate) fn predicted(sequence: &Sequence, context: TeacherContext, bos: u32) -> Vec<bool> {
    let mut predicted = vec![false; sequence.tokens.len()];
    for Run { start, length, .. } in runs_of(sequence, 0, context) {
        let given = usize::from(sequence.tokens[start] == bos);
        predicted[start + given..start + length].fill(true);
    }
    predicted
}

impl TeacherPass<'_> {
    /// Runs the teacher over the sequences and hands out every predicted position with its logits, once; `logits` is a buffer, whatever it holds.
    ///
    /// Positions of one row come in ascending order within a run; the
    /// order of runs is fixed by the batch.
    ///
    /// # Errors
    /// When the teacher fails or `visit` does.
    pub fn run(&self, sequences: &[Sequence], logits: &mut Logits, visit: &mut Visit<'_>) -> Result<(), OperatorError> {
        let mut runs = self.runs(sequences);
        if self.context == TeacherContext::Document {
            // Documents of like length share a forward pass, so that little of it is padding.
            runs.sort_by_key(|run| (std::cmp::Reverse(run.length), run.row, run.start));
        }
        let mut rest = runs.as_slice();
        while let Some(first) = rest.first() {
            let most = match self.context {
                TeacherContext::Sequence => rest.len(),
                TeacherContext::Document => (self.batch_tokens / first.length.max(1)).clamp(1, rest.len()),
            };
            let (group, after) = rest.split_at(self.with_room(&rest[..most]));
            self.forward(sequences, group, logits, visit)?;
            rest = after;
        }
        Ok(())
    }

    /// How many of these runs, one at least, the teacher has room for at once.
    fn with_room(&self, runs: &[Run]) -> usize {
        let most = self.teacher.pass_tokens();
        let mut tokens = 0usize;
        let fitting = runs.iter().take_while(|run| {
            tokens = tokens.saturating_add(run.length);
            tokens <= most
        });
        fitting.count().max(1)
    }

    /// Where a logit that is no number comes from. In attention a position that goes wrong may take earlier ones along
    /// (0 · NaN is NaN, also behind a mask), so the sequence is shortened until it only just goes wrong. Other errors
    /// stay what they are. Cost: forward passes of one sequence, ten or so.
    pub fn origin(&self, sequences: &[Sequence], error: OperatorError) -> OperatorError {
        let OperatorError::NotFinite { sequence_id, .. } = error else { return error };
        let Some(sequence) = sequences.iter().find(|s| s.id == sequence_id) else { return error };
        // The shortest piece that goes wrong, by bisection: what comes after a position cannot make a shorter piece wrong.
        let (mut sound, mut wrong) = (0, sequence.valid);
        while wrong - sound > 1 {
            let middle = sound + (wrong - sound) / 2;
            match self.last_not_finite(sequence, middle) {
                Ok(None) => sound = middle,
                Ok(Some(_)) => wrong = middle,
                Err(_) => return error, // what is known stands
            }
        }
        match self.last_not_finite(sequence, wrong) {
            Ok(Some(found)) => found,
            _ => error,
        }
    }

    /// The last position among the first `length` of a sequence with a logit that is no number, as an error.
    fn last_not_finite(&self, sequence: &Sequence, length: usize) -> Result<Option<OperatorError>, OperatorError> {
        let mut piece = sequence.cut(length);
        // The last token of a run that begins with BOS is an input that predicts nothing, but could smear.
        if let Some(run) = self.runs(std::slice::from_ref(&piece)).last()
            && run.length > 1
            && piece.tokens[run.start] == self.bos
        {
            piece.tokens[run.start + run.length - 1] = self.bos;
        }
        let vocab = self.teacher.info().vocab_size;
        let mut found: Option<(u32, usize, f32)> = None;
        self.run(&[piece], &mut self.teacher.buffer()?, &mut |Slice { positions, logits, .. }| {
            for (p, row) in positions.iter().zip(logits.on_host()?.chunks_exact(vocab)) {
                if found.is_none_or(|(position, ..)| position < p.position as u32)
                    && let Some(token) = row.iter().position(|l| !l.is_finite())
                {
                    found = Some((p.position as u32, token, row[token]));
                }
            }
            Ok(logits)
        })?;
        Ok(found.map(|(position, token, value)| OperatorError::NotFinite {
            sequence_id: sequence.id,
            position,
            token,
            value,
        }))
    }

    fn runs(&self, sequences: &[Sequence]) -> Vec<Run> {
        let of = |(row, sequence)| runs_of(sequence, row, self.context);
        sequences.iter().enumerate().flat_map(of).collect()
    }

    fn forward(
        &self,
        sequences: &[Sequence],
        group: &[Run],
        logits: &mut Logits,
        visit: &mut Visit<'_>,
    ) -> Result<(), OperatorError> {
        let (inputs, wanted) = self.inputs(sequences, group);
        let began = Instant::now();
        let (hidden, kept) = self.teacher.pass_keeping(&inputs, self.hidden_layers)?;
        let of_a_token = self.hidden_layers.len() * self.teacher.info().hidden_size;
        self.meter.add_since(Measure::TeacherNanos, began);
        for wanted in wanted.chunks(self.teacher.slice_rows().max(1)) {
            let began = Instant::now();
            let tokens: Vec<u32> = wanted.iter().map(|(token, _)| *token).collect();
            self.teacher.slice(&hidden, &tokens, logits)?;
            self.meter.add_since(Measure::TeacherNanos, began);
            let positions = wanted.iter().map(|(_, position)| *position).collect();
            let states = match of_a_token {
                0 => Vec::new(),
                n => tokens.iter().flat_map(|token| &kept[*token as usize * n..][..n]).copied().collect(),
            };
            *logits = visit(Slice { positions, logits: std::mem::take(logits), states })?;
        }
        Ok(())
    }

    /// The inputs, and which of them predict which position.
    fn inputs(&self, sequences: &[Sequence], group: &[Run]) -> (Runs, Vec<(u32, Predicted)>) {
        let (mut inputs, mut wanted) = (Runs::new(), Vec::new());
        for run in group {
            let tokens = &sequences[run.row].tokens[run.start..run.start + run.length];
            let given = usize::from(tokens.first() == Some(&self.bos));
            let first = inputs.tokens().len();
            let shown = tokens[..tokens.len() - (1 - given)].iter().copied();
            inputs.push((given == 0).then_some(self.bos).into_iter().chain(shown));
            wanted.extend(
                (given..run.length)
                    .map(|i| ((first + i - given) as u32, Predicted { row: run.row, position: run.start + i })),
            );
        }
        (inputs, wanted)
    }
}
