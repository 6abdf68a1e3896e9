//! One teacher pass over a batch of packed sequences. It passes the logits on slice by slice and keeps none.
//!
//! ```text
//!   sequences ─► runs (whole rows, or documents) ─► hidden states, on the teacher's device ─► slices [n, V] ─► visit
//! ```
//!
//! What the teacher sees (docs/FORMAT.md): it predicts position i from the tokens before it in its run. If a run does
//! not begin with BOS, the pass puts one before it, so all of its positions are predicted. If it does begin with BOS,
//! the pass leaves it as it is, and its first position is given. Padding is never predicted.
//!
//! Memory: the hidden states of a batch (of every layer that is stored) and one slice of logits
//! ([`Teacher::slice_rows`]). `visit` takes the slice's buffer and returns it, or another one if it processes slices on
//! another thread. [B, L, V] never exists.

use std::time::Instant;

use stillhouse_schemas::spec::TeacherContext;
use stillhouse_teacher::{Logits, Runs, Teacher};

use crate::operator::{Measure, Meter, OperatorError};

/// A packed sequence as the teacher pass reads it.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// Sequence id: the key of its random numbers.
    pub id: u64,
    /// Tokens, padding included.
    pub tokens: Vec<u32>,
    /// Number of tokens that are not padding; padding is at the end.
    pub valid: usize,
    /// Positions at which documents begin.
    pub offsets: Vec<usize>,
}

impl Sequence {
    /// Returns the sequence's first `length` tokens.
    fn prefix(&self, length: usize) -> Self {
        let offsets = self.offsets.iter().copied().filter(|&offset| offset < length).collect();
        Self { id: self.id, tokens: self.tokens[..length].to_vec(), valid: length.min(self.valid), offsets }
    }
}

/// The place of a predicted position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PredictedPosition {
    /// Row of the batch.
    pub row: usize,
    /// Position in the sequence.
    pub position: usize,
}

/// Predicted positions with their logits.
#[derive(Debug)]
pub struct Slice {
    /// The n positions.
    pub positions: Vec<PredictedPosition>,
    /// Their logits [n, V], on the device that computed them.
    pub logits: Logits,
    /// Their hidden states [n, layers, H]; empty if the pass keeps none.
    pub states: Vec<f32>,
}

/// Takes a slice and returns a buffer for the next slice's logits. The buffer's content does not matter.
pub type SliceVisitor<'a> = dyn FnMut(Slice) -> Result<Logits, OperatorError> + 'a;

/// Settings of a teacher pass.
pub struct TeacherPass<'a> {
    /// The teacher.
    pub teacher: &'a dyn Teacher,
    /// Token put before a run that does not begin with it.
    pub bos: u32,
    /// Context of each prediction: the whole sequence or one document.
    pub context: TeacherContext,
    /// Tokens per forward pass.
    pub batch_tokens: usize,
    /// Layers whose hidden states each slice includes, numbered as in [`Teacher::pass_with_states`].
    pub hidden_layers: &'a [usize],
    /// Counts the teacher's time.
    pub meter: &'a dyn Meter,
}

/// A range of a sequence that the teacher sees without the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    row: usize,
    start: usize,
    length: usize,
}

/// Returns the runs of a sequence, in order.
fn sequence_runs(sequence: &Sequence, row: usize, context: TeacherContext) -> Vec<Run> {
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

/// Says for each position of a sequence whether the teacher predicts it: all positions of its runs, except a leading
/// BOS.
pub(crate) fn predicted(sequence: &Sequence, context: TeacherContext, bos: u32) -> Vec<bool> {
    let mut predicted = vec![false; sequence.tokens.len()];
    for Run { start, length, .. } in sequence_runs(sequence, 0, context) {
        let given = usize::from(sequence.tokens[start] == bos);
        predicted[start + given..start + length].fill(true);
    }
    predicted
}

impl TeacherPass<'_> {
    /// Runs the teacher over the sequences and visits every predicted position with its logits once. `logits` is a
    /// buffer whose content does not matter.
    ///
    /// Positions of a row arrive in ascending order within a run. The batch fixes the order of the runs.
    ///
    /// # Errors
    /// Fails if the teacher or `visit` does.
    pub fn run(
        &self,
        sequences: &[Sequence],
        logits: &mut Logits,
        visit: &mut SliceVisitor<'_>,
    ) -> Result<(), OperatorError> {
        let mut runs = self.runs(sequences);
        if self.context == TeacherContext::Document {
            // Documents of similar length share a forward pass, which keeps padding low.
            runs.sort_by_key(|run| (std::cmp::Reverse(run.length), run.row, run.start));
        }
        let mut rest = runs.as_slice();
        while let Some(first) = rest.first() {
            let most = match self.context {
                TeacherContext::Sequence => rest.len(),
                TeacherContext::Document => (self.batch_tokens / first.length.max(1)).clamp(1, rest.len()),
            };
            let (group, after) = rest.split_at(self.count_fitting(&rest[..most]));
            self.forward(sequences, group, logits, visit)?;
            rest = after;
        }
        Ok(())
    }

    /// Returns how many of the first runs, at least one, fit one forward pass of the teacher.
    fn count_fitting(&self, runs: &[Run]) -> usize {
        let most = self.teacher.pass_tokens();
        let mut tokens = 0usize;
        let fitting = runs.iter().take_while(|run| {
            tokens = tokens.saturating_add(run.length);
            tokens <= most
        });
        fitting.count().max(1)
    }

    /// Finds the position that a non-finite logit comes from. In attention a bad position can spoil earlier ones (0 ·
    /// NaN is NaN, also behind a mask). So this looks for the shortest prefix of the sequence that still fails. Returns
    /// other errors unchanged. Cost: about ten forward passes of one sequence.
    pub fn locate_non_finite(&self, sequences: &[Sequence], error: OperatorError) -> OperatorError {
        let OperatorError::NotFinite { sequence_id, .. } = error else { return error };
        let Some(sequence) = sequences.iter().find(|s| s.id == sequence_id) else { return error };
        // Bisects for the shortest prefix that fails: tokens after a prefix cannot make it fail.
        let (mut sound, mut wrong) = (0, sequence.valid);
        while wrong - sound > 1 {
            let middle = sound + (wrong - sound) / 2;
            match self.last_not_finite(sequence, middle) {
                Ok(None) => sound = middle,
                Ok(Some(_)) => wrong = middle,
                Err(_) => return error, // the error at hand is the best answer
            }
        }
        match self.last_not_finite(sequence, wrong) {
            Ok(Some(found)) => found,
            _ => error,
        }
    }

    /// Returns an error for the last position with a non-finite logit among the first `length` of a sequence, if any.
    fn last_not_finite(&self, sequence: &Sequence, length: usize) -> Result<Option<OperatorError>, OperatorError> {
        let mut prefix = sequence.prefix(length);
        // In a run that begins with BOS, the last token is an input that predicts nothing but could spoil other
        // positions.
        if let Some(run) = self.runs(std::slice::from_ref(&prefix)).last()
            && run.length > 1
            && prefix.tokens[run.start] == self.bos
        {
            prefix.tokens[run.start + run.length - 1] = self.bos;
        }
        let vocab = self.teacher.info().vocab_size;
        let mut found: Option<(u32, usize, f32)> = None;
        self.run(&[prefix], &mut self.teacher.buffer()?, &mut |Slice { positions, logits, .. }| {
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
        let runs_of_row = |(row, sequence)| sequence_runs(sequence, row, self.context);
        sequences.iter().enumerate().flat_map(runs_of_row).collect()
    }

    fn forward(
        &self,
        sequences: &[Sequence],
        group: &[Run],
        logits: &mut Logits,
        visit: &mut SliceVisitor<'_>,
    ) -> Result<(), OperatorError> {
        let (inputs, targets) = self.inputs(sequences, group);
        let began = Instant::now();
        let (hidden, kept) = self.teacher.pass_with_states(&inputs, self.hidden_layers)?;
        let values_per_token = self.hidden_layers.len() * self.teacher.info().hidden_size;
        self.meter.add_since(Measure::TeacherNanos, began);
        for targets in targets.chunks(self.teacher.slice_rows().max(1)) {
            let began = Instant::now();
            let tokens: Vec<u32> = targets.iter().map(|(token, _)| *token).collect();
            self.teacher.slice(&hidden, &tokens, logits)?;
            self.meter.add_since(Measure::TeacherNanos, began);
            let positions = targets.iter().map(|(_, position)| *position).collect();
            let states = match values_per_token {
                0 => Vec::new(),
                n => tokens.iter().flat_map(|token| &kept[*token as usize * n..][..n]).copied().collect(),
            };
            *logits = visit(Slice { positions, logits: std::mem::take(logits), states })?;
        }
        Ok(())
    }

    /// Returns the teacher's inputs, and which input predicts which position.
    fn inputs(&self, sequences: &[Sequence], group: &[Run]) -> (Runs, Vec<(u32, PredictedPosition)>) {
        let (mut inputs, mut targets) = (Runs::new(), Vec::new());
        for run in group {
            let tokens = &sequences[run.row].tokens[run.start..run.start + run.length];
            let given = usize::from(tokens.first() == Some(&self.bos));
            let first = inputs.tokens().len();
            let shown = tokens[..tokens.len() - (1 - given)].iter().copied();
            inputs.push((given == 0).then_some(self.bos).into_iter().chain(shown));
            targets
                .extend((given..run.length).map(|i| {
                    ((first + i - given) as u32, PredictedPosition { row: run.row, position: run.start + i })
                }));
        }
        (inputs, targets)
    }
}
