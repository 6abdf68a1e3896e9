//! The declarations of `extract`: columns, checks, size estimate and view.

use arrow::array::RecordBatch;
use arrow::datatypes::Field;
use arrow::error::ArrowError;
use stillhouse_schemas::columns::{self, Column};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{NoiseCodec, NoisePrecision};
use stillhouse_signals::SIGNALS;

use super::{ExtractConfig, HiddenConfig, NAME, NoiseConfig, invariants, predicted, sequences, view};
use crate::config::{JobContext, OperatorConfig, OperatorView, token_id_bits};
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Operator, OperatorError, SplitContext};
use crate::vocabulary::Role;

/// The columns before those of the signals.
const FIRST_COLUMNS: &[Column] = &[
    Column {
        name: columns::LOGPROB,
        dtype: "fixed list float32",
        when: "teacher",
        shape: "[L]",
        contract: "ln p(x_i given what the teacher saw), rounded to the nearest f32; below −64, rounded down",
        meaning: "natural logarithm of the teacher's probability of each token, given the tokens before it",
    },
    Column {
        name: columns::NOISE_COUNT,
        dtype: "fixed list uint8 (V ≤ 85) / uint16 / uint32 (V > 21,845 and a tolerance below 2e-4)",
        when: "codec `replay`",
        shape: "[D, L]",
        contract: "number of corrections of each token",
        meaning: "number of corrections of each token, per draw and position",
    },
    Column {
        name: columns::NOISE_INDEX,
        dtype: "list uint16 (V ≤ 65,536) / uint32",
        when: "codec `replay`",
        shape: "[*]",
        contract: "vocabulary ids of the corrections of draw 0 at positions 0, 1, …, then of draw 1, …",
        meaning: "vocabulary ids of the corrections: first those of draw 0 at position 0, then at position 1, …; then draw 1",
    },
    Column {
        name: columns::NOISE_LOGPROB,
        dtype: "list float16 / float32",
        when: "codec `replay`",
        shape: "[*]",
        contract: "ln p of each",
        meaning: "natural logarithm of the probability of each correction; if an entry occurs several times, its probabilities add up",
    },
    Column {
        name: columns::NOISE,
        dtype: "list float16 / float32",
        when: "codec `dense`",
        shape: "[D, L, V]",
        contract: "ξ",
        meaning: "posterior Gumbel noise ξ of each vocabulary entry: argmax(l + ξ) is the token, where l are the teacher's logits",
    },
];

/// The columns after those of the signals.
const LAST_COLUMNS: &[Column] = &[Column {
    name: columns::HIDDEN_STATES,
    dtype: "fixed list float16 / float32",
    when: "`hidden_states`",
    shape: "[L, layers, H]",
    contract: "states from which each token is predicted, for the job's layers, rounded to the type; certain: 0",
    meaning: "hidden states of the teacher from which each token is predicted, one per layer, in the order of the job",
}];

/// All columns, in their order in a shard.
const ALL_COLUMNS: [Column; column_count()] = {
    let mut all = [FIRST_COLUMNS[0]; column_count()];
    let mut count = append(&mut all, 0, FIRST_COLUMNS);
    let mut kind = 0;
    while kind < SIGNALS.len() {
        count = append(&mut all, count, SIGNALS[kind].columns);
        kind += 1;
    }
    append(&mut all, count, LAST_COLUMNS);
    all
};

const fn column_count() -> usize {
    let (mut count, mut kind) = (FIRST_COLUMNS.len() + LAST_COLUMNS.len(), 0);
    while kind < SIGNALS.len() {
        count += SIGNALS[kind].columns.len();
        kind += 1;
    }
    count
}

/// Writes columns after the first `count`; returns the new number.
const fn append(all: &mut [Column], count: usize, columns: &[Column]) -> usize {
    let mut n = 0;
    while n < columns.len() {
        all[count + n] = columns[n];
        n += 1;
    }
    count + n
}

/// How many times as many corrections as [`corrections`] a teacher needs that predicts the text badly. Measured at a
/// tolerance of 1e-3: 6.95 per token of the demo, at a perplexity of 223; 1.36 with SmolLM2-135M
/// (docs/benchmarks/noise.md).
const MAX_CORRECTIONS_RATIO: f64 = 7.0;

/// Bytes of a stored value.
fn value_bytes(precision: NoisePrecision) -> f64 {
    match precision {
        NoisePrecision::F16 => 2.0,
        NoisePrecision::F32 => 4.0,
    }
}

/// Estimated corrections per token and draw of a teacher that predicts the text well, at a tolerance.
fn corrections(tolerance: f64) -> f64 {
    (1e-3 / tolerance).powf(1.2)
}

impl OperatorConfig for ExtractConfig {
    const NAME: &'static str = NAME;
    const COLUMNS: &'static [Column] = &ALL_COLUMNS;

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        // `generate` makes the columns if the teacher writes the text
        if context.spec.sequential().is_some() { Ok(None) } else { Self::resolve(context) }
    }

    fn fields(&self) -> Vec<Field> {
        Self::fields(self)
    }

    fn check(&self, batch: &RecordBatch, _: &CheckContext, violations: &mut Vec<Violation>) -> Result<(), ArrowError> {
        invariants::check(self, batch, violations)
    }

    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        let bits = token_id_bits(vocab_size);
        let mut bytes = before + 3.6;
        if let Some(noise) = &self.noise {
            let width = value_bytes(noise.precision);
            let bytes_per_draw = match noise.codec {
                NoiseCodec::Dense => vocab_size as f64 * width,
                NoiseCodec::Replay => 0.5 + corrections(noise.tolerance) * (bits / 8.0 + width),
            };
            bytes += f64::from(noise.draws) * bytes_per_draw;
        }
        let states = self.hidden.as_ref().map_or(0, HiddenConfig::bytes_per_token);
        let signals: f64 = self.signals.iter().map(|signal| signal.bytes_per_token(bits / 8.0)).sum();
        bytes + signals + states as f64
    }

    fn excess_bytes_per_token(&self, vocab_size: usize) -> f64 {
        let Some(noise) = self.noise.as_ref().filter(|noise| noise.codec == NoiseCodec::Replay) else { return 0.0 };
        let width = value_bytes(noise.precision);
        let more = (MAX_CORRECTIONS_RATIO - 1.0) * corrections(noise.tolerance);
        f64::from(noise.draws) * more * (token_id_bits(vocab_size) / 8.0 + width)
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let sequences = sequences(row)?;
        let Some(sequence) = sequences.first() else { return Ok(None) };
        view::view(self, row, &predicted(sequence, self.context, self.bos))
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(self.build(context)?))
    }
}

impl ExtractConfig {
    /// Returns the config of a job with a teacher.
    pub(crate) fn resolve(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(extract) = &context.spec.extract else { return Ok(None) };
        let eos = context.special_ids.id(Role::Eos);
        let bos = context.require(Role::Bos, "the teacher").or_else(|missing| eos.ok_or(missing))?;
        Ok(Some(Self {
            vocab_size: context.vocab_size,
            bos,
            context: extract.context,
            batch_tokens: extract.teacher.batch_tokens as usize,
            noise: extract.noise.as_ref().map(|noise| NoiseConfig {
                codec: noise.codec,
                tolerance: noise.tolerance,
                condition: noise.condition,
                draws: noise.draws,
                precision: noise.resolved_precision(),
                seed: context.spec.noise_seed(),
            }),
            signals: stillhouse_signals::from_job(extract, context.spec.seed),
            hidden: extract.hidden_states.as_ref().map(HiddenConfig::from_job).transpose()?,
            rows: context.rows(),
        }))
    }
}
