//! The declarations of `extract`: columns, checks, size estimate and view.

use arrow::array::RecordBatch;
use arrow::datatypes::Field;
use arrow::error::ArrowError;
use stillhouse_schemas::columns;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{NoiseCodec, NoisePrecision};

use super::{ExtractConfig, HiddenConfig, NAME, NoiseConfig, SignalsConfig, invariants, predicted, sequences, view};
use crate::config::{Column, JobContext, OperatorConfig, OperatorView, token_id_bits};
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Operator, OperatorError, SplitContext};
use crate::vocabulary::Role;

impl OperatorConfig for ExtractConfig {
    const NAME: &'static str = NAME;
    const COLUMNS: &'static [Column] = &[
        Column {
            name: columns::LOGPROB,
            dtype: "fixed list float32",
            when: "teacher",
            shape: "[L]",
            contract: "ln p(x_i given what the teacher saw), natural log; the nearest f32, below −64 the next one down",
            meaning: "natural logarithm of the probability that the teacher gave to each token, from what stands before it",
        },
        Column {
            name: columns::NOISE_COUNT,
            dtype: "fixed list uint8 (V ≤ 85) / uint16 / uint32 (V > 21,845 and a tolerance below 2e-4)",
            when: "codec `replay`",
            shape: "[D, L]",
            contract: "corrections of each token",
            meaning: "number of corrections of each token, by draw and position",
        },
        Column {
            name: columns::NOISE_INDEX,
            dtype: "list uint16 (V ≤ 65,536) / uint32",
            when: "codec `replay`",
            shape: "[*]",
            contract: "corrections of draw 0 position 0, 1, …, then draw 1 …",
            meaning: "the corrections: ids of vocabulary entries; draw 0 position 0 first, then position 1, …, then draw 1",
        },
        Column {
            name: columns::NOISE_LOGPROB,
            dtype: "list float16 / float32",
            when: "codec `replay`",
            shape: "[*]",
            contract: "ln p of each",
            meaning: "natural logarithm of the probability of each correction; values of one entry add up as probabilities",
        },
        Column {
            name: columns::NOISE,
            dtype: "list float16 / float32",
            when: "codec `dense`",
            shape: "[D, L, V]",
            contract: "ξ",
            meaning: "posterior Gumbel noise ξ of each vocabulary entry: argmax(l + ξ) is the token, l being the teacher's logits",
        },
        Column {
            name: columns::TOPK_INDEX,
            dtype: "fixed list int32",
            when: "`topk` > 0",
            shape: "[L, k]",
            contract: "the k likeliest entries, descending, ties by lower index",
            meaning: "the likeliest vocabulary entries at each position, the likeliest first",
        },
        Column {
            name: columns::TOPK_LOGPROB,
            dtype: "fixed list float32",
            when: "`topk` > 0",
            shape: "[L, k]",
            contract: "ln p of each",
            meaning: "natural logarithms of their probabilities",
        },
        Column {
            name: columns::LOGZ,
            dtype: "fixed list float32",
            when: "`logz_temperatures`",
            shape: "[L, temperatures]",
            contract: "ln Σ exp(l / T) for each T in the order of the job, to 1e-5 nat or half a unit of its f32; certain: 0",
            meaning: "logarithm of the sum of exp(logit / T) over the vocabulary at each of the job's temperatures T",
        },
        Column {
            name: columns::ENTROPY,
            dtype: "fixed list float32",
            when: "`entropy`",
            shape: "[L]",
            contract: "−Σ p ln p of the teacher's distribution, nat, to 1e-5; certain: 0",
            meaning: "entropy of the teacher's distribution of the token, in nat",
        },
        Column {
            name: columns::CANDIDATE_LOGPROB,
            dtype: "fixed list float32",
            when: "`candidates`",
            shape: "[L, candidates]",
            contract: "ln p of each of `candidates`, in their order; certain: 0 for the token itself, −∞ for others",
            meaning: "natural logarithms of the probabilities of the job's candidate tokens at each position",
        },
        Column {
            name: columns::SAMPLED_COUNT,
            dtype: "fixed list uint16",
            when: "`samples`",
            shape: "[L]",
            contract: "distinct tokens drawn",
            meaning: "number of distinct tokens drawn from the teacher's distribution at each position",
        },
        Column {
            name: columns::SAMPLED_INDEX,
            dtype: "list uint16 (V ≤ 65,536) / uint32",
            when: "`samples`",
            shape: "[*]",
            contract: "the tokens of position 0, then 1, …; ascending within a position",
            meaning: "the drawn tokens, those of position 0 first",
        },
        Column {
            name: columns::SAMPLED_TIMES,
            dtype: "list uint16",
            when: "`samples`",
            shape: "[*]",
            contract: "how often each was drawn; those of a position add up to N. times/N estimates p without bias where `power` is 1",
            meaning: "how often each was drawn; divided by the number of draws it estimates the probability without bias",
        },
        Column {
            name: columns::SAMPLED_RATIO,
            dtype: "list float32",
            when: "`samples.power` ≠ 1",
            shape: "[*]",
            contract: "p/q of each: times/N · ratio estimates p without bias (not divided by its sum)",
            meaning: "probability over that of the proposal: times/N · ratio estimates the probability without bias",
        },
        Column {
            name: columns::TOP_P_COUNT,
            dtype: "fixed list uint16",
            when: "`top_p`",
            shape: "[L]",
            contract: "the fewest of the likeliest that hold `mass`, `most` at most; certain: 1",
            meaning: "how many of the likeliest tokens are kept at each position",
        },
        Column {
            name: columns::TOP_P_INDEX,
            dtype: "list uint16 (V ≤ 65,536) / uint32",
            when: "`top_p`",
            shape: "[*]",
            contract: "those of position 0, then 1, …; the likeliest first, ties by lower index",
            meaning: "the kept tokens, those of position 0 first, the likeliest of a position first",
        },
        Column {
            name: columns::TOP_P_LOGPROB,
            dtype: "list float32",
            when: "`top_p`",
            shape: "[*]",
            contract: "ln p of each",
            meaning: "natural logarithms of the probabilities of the kept tokens",
        },
        Column {
            name: columns::TOP_P_TAIL,
            dtype: "fixed list float32",
            when: "`top_p`",
            shape: "[L]",
            contract: "ln of the probability of all others, to 1e-5 (not 1 − Σ: a tail of 1e-9 is kept); certain: −∞",
            meaning: "natural logarithm of the probability of all tokens that are not kept",
        },
        Column {
            name: columns::HIDDEN_STATES,
            dtype: "fixed list float16 / float32",
            when: "`hidden_states`",
            shape: "[L, layers, H]",
            contract: "the states that each token is predicted from, of the job's layers, rounded to the type; certain: 0",
            meaning: "hidden states of the teacher that each token is predicted from, by layer in the order of the job",
        },
    ];

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
        let mut bytes = before + (3.6 + self.topk as f64 * (bits / 8.0 + 3.6));
        if let Some(noise) = &self.noise {
            let width = match noise.precision {
                NoisePrecision::F16 => 2.0,
                NoisePrecision::F32 => 4.0,
            };
            let bytes_per_draw = match noise.codec {
                NoiseCodec::Dense => vocab_size as f64 * width,
                NoiseCodec::Replay => 0.5 + (1e-3 / noise.tolerance).powf(1.2) * (bits / 8.0 + width),
            };
            bytes += f64::from(noise.draws) * bytes_per_draw;
        }
        let states = self.hidden.as_ref().map_or(0, HiddenConfig::bytes_per_token);
        bytes + self.signals.bytes_per_token(bits) + states as f64
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
            topk: extract.topk as usize,
            signals: SignalsConfig::of(extract, context.spec.seed),
            hidden: extract.hidden_states.as_ref().map(HiddenConfig::from_job).transpose()?,
            rows: context.rows(),
        }))
    }
}
