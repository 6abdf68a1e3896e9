//! Recomputes the teacher's other signals and checks each against its tolerance.
//!
//! If the teacher computes as the job's did, on a CPU, its logits have the same bits (δ = 0 in [`Tolerances`]). Each
//! column must then meet the promise in docs/FORMAT.md. Otherwise logits may be off by δ:
//!
//! | signal | tolerance, in addition to its promise |
//! |---|---|
//! | `logz`, `candidate_logprob`, `topk_logprob`, `top_p_logprob` | that of a log-probability |
//! | `entropy` | δ · (1 + ln V), the most by which a change of δ in the logits changes it |
//! | `topk_index` | other entries whose logit is within 2δ of the last one's |
//! | `sampled_…` | draws that fall on other tokens: 1 + N/64 on a GPU of the same kind, 1 + N/4 on another machine. Ratios: 5 · δ, relative |
//! | `top_p_tail` | 5 · δ, relative, or 1e-6. Ties may change which entries are kept |

use std::cmp::Ordering;
use std::collections::BTreeMap;

use arrow::array::{Int32Array, RecordBatch};
use arrow::error::ArrowError;
use stillhouse_noise::{RowSignals, Softmax, signals_of_loaded, top_k_of_loaded};
use stillhouse_operators::extract::{SignalsConfig, StoredSignals};
use stillhouse_operators::invariants::{Widened, float_column};
use stillhouse_operators::rows::ListRows;
use stillhouse_schemas::columns;
use stillhouse_schemas::spec::Extract;

use super::tolerances::Tolerances;

/// The stored signals of a batch.
pub(super) struct Signals {
    stored: StoredSignals,
}

impl Signals {
    /// Reads the signals of a batch; `None` if the job stores none. Lists of wrong length are an error; the check of
    /// the shard, which runs first, reports them as faults.
    pub(super) fn of(extract: &Extract, seed: u64, batch: &RecordBatch) -> Result<Option<Self>, ArrowError> {
        let config = SignalsConfig::of(extract, seed);
        if config.is_none() {
            return Ok(None);
        }
        let (stored, misfits) = StoredSignals::of(&config, batch)?;
        match misfits.first() {
            Some(misfit) => Err(ArrowError::InvalidArgumentError(format!("row {}: {}", misfit.row, misfit.message))),
            None => Ok(Some(Self { stored })),
        }
    }

    /// Whether a position is stored as certain, that is with all probability on its token.
    pub(super) fn is_certain(&self, row: usize, position: usize, token: u32) -> bool {
        self.stored.at(row, position) == self.stored.asked().one_hot(token)
    }

    /// Compares a predicted position with its recomputed logits and describes the first fault.
    pub(super) fn find_mismatch(
        &self,
        (row, position): (usize, usize),
        softmax: &Softmax,
        logits: &[f32],
        sequence_id: u64,
        tolerances: Tolerances,
    ) -> Option<String> {
        let right = signals_of_loaded(self.stored.asked(), softmax, logits, sequence_id, position as u32);
        let draws = self.stored.asked().sampling.map_or(0, |s| s.draws);
        compare(&self.stored.at(row, position), &right, (softmax, logits), draws, tolerances)
    }
}

/// The stored top-k of a batch.
pub(super) struct TopK {
    k: usize,
    tokens: Vec<Vec<i32>>,
    logprobs: Widened<f32>,
}

impl TopK {
    /// Reads the top-k of a batch; `None` if the job stores none.
    pub(super) fn of(extract: &Extract, batch: &RecordBatch) -> Result<Option<Self>, ArrowError> {
        let k = extract.topk as usize;
        if k == 0 {
            return Ok(None);
        }
        let (ids, listed) =
            (ListRows::from_batch(batch, columns::INPUT_IDS)?, ListRows::from_batch(batch, columns::TOPK_INDEX)?);
        let values = listed.values::<Int32Array>(columns::TOPK_INDEX)?.values();
        let logprobs = float_column(batch, columns::TOPK_LOGPROB)?;
        let tokens: Vec<Vec<i32>> = (0..batch.num_rows()).map(|row| values[listed.range(row)].to_vec()).collect();
        let fits = |(row, tokens): (usize, &Vec<i32>)| {
            let wanted = k * ids.range(row).len();
            tokens.len() == wanted && logprobs.row(row).len() == wanted
        };
        match tokens.iter().enumerate().all(fits) {
            true => Ok(Some(Self { k, tokens, logprobs })),
            false => {
                Err(ArrowError::InvalidArgumentError(format!("{} is not {k} for every token", columns::TOPK_INDEX)))
            }
        }
    }

    fn at(&self, row: usize, position: usize) -> (&[i32], &[f32]) {
        let range = position * self.k..(position + 1) * self.k;
        (&self.tokens[row][range.clone()], &self.logprobs.row(row)[range])
    }

    /// Whether a position is stored as certain, that is with all probability on its token.
    pub(super) fn is_certain(&self, row: usize, position: usize, token: u32) -> bool {
        let (tokens, logprobs) = self.at(row, position);
        tokens[0] == token as i32 && logprobs[0] == 0.0 && logprobs[1..].iter().all(|lp| *lp == f32::NEG_INFINITY)
    }

    /// Compares a predicted position with its recomputed logits and describes the first fault.
    pub(super) fn find_mismatch(
        &self,
        (row, position): (usize, usize),
        softmax: &Softmax,
        logits: &[f32],
        tolerances: Tolerances,
    ) -> Option<String> {
        let (tokens, logprobs) = self.at(row, position);
        let right = top_k_of_loaded(softmax, logits, self.k);
        compare_topk((tokens, logprobs), &right, (softmax, logits), tolerances)
    }
}

fn compare_topk(
    (tokens, logprobs): (&[i32], &[f32]),
    right: &[(u32, f32)],
    (softmax, logits): (&Softmax, &[f32]),
    tolerances: Tolerances,
) -> Option<String> {
    let least = right.last().map_or(f32::NEG_INFINITY, |entry| entry.1);
    let pairs = tokens.iter().zip(logprobs).zip(right);
    pairs.enumerate().find_map(|(n, ((token, logprob), (right, _)))| {
        let exact = logits.get(*token as usize).map_or(f32::NAN, |logit| softmax.logprob(*logit) as f32);
        if differs(*logprob, exact, tolerances.listed(exact)) {
            return mismatch_message(&format!("topk_logprob of {token}"), *logprob, exact);
        }
        let is_listed = match tolerances.is_exact() {
            true => *token == *right as i32,
            false => f64::from(exact) >= f64::from(least) - 2.0 * tolerances.listed(exact),
        };
        (!is_listed).then(|| format!("topk_index {n} is {token}, recomputed it is {right}"))
    })
}

fn apart(got: f32, right: f32) -> f64 {
    (f64::from(got) - f64::from(right)).abs()
}

/// NaN differs from every value.
fn differs(got: f32, right: f32, limit: f64) -> bool {
    got != right && apart(got, right).partial_cmp(&limit).is_none_or(Ordering::is_gt)
}

fn mismatch_message(name: &str, got: f32, right: f32) -> Option<String> {
    Some(format!("{name} is {got}, recomputed it is {right}"))
}

fn compare(
    got: &RowSignals,
    right: &RowSignals,
    (softmax, logits): (&Softmax, &[f32]),
    draws: u32,
    tolerances: Tolerances,
) -> Option<String> {
    for (got, right) in got.logz.iter().zip(&right.logz) {
        if differs(*got, *right, tolerances.logz(*right)) {
            return mismatch_message("logz", *got, *right);
        }
    }
    if differs(got.entropy, right.entropy, tolerances.entropy(logits.len())) {
        return mismatch_message("entropy", got.entropy, right.entropy);
    }
    for (got, right) in got.candidates.iter().zip(&right.candidates) {
        if differs(*got, *right, tolerances.listed(*right)) {
            return mismatch_message("candidate_logprob", *got, *right);
        }
    }
    let times: BTreeMap<u32, u32> = right.sampled.iter().map(|s| (s.index, s.count)).collect();
    let kept: u32 = got.sampled.iter().map(|s| s.count.min(times.get(&s.index).copied().unwrap_or(0))).sum();
    let moved = draws.saturating_sub(kept);
    if moved > tolerances.moved_draws(draws) {
        return Some(format!("{moved} of {draws} sampled tokens are not those of the seed"));
    }
    let ratios: BTreeMap<u32, f32> = right.sampled.iter().map(|s| (s.index, s.ratio)).collect();
    for s in &got.sampled {
        if let Some(right) = ratios.get(&s.index)
            && differs(s.ratio, *right, tolerances.relative() * f64::from(*right))
        {
            return mismatch_message("sampled_ratio", s.ratio, *right);
        }
    }
    for (token, logprob) in &got.top_p {
        let exact = logits.get(*token as usize).map_or(f32::NAN, |l| softmax.logprob(*l) as f32);
        if differs(*logprob, exact, tolerances.listed(exact)) {
            return mismatch_message(&format!("top_p_logprob of {token}"), *logprob, exact);
        }
    }
    let count = || format!("top_p_count is {}, recomputed it is {}", got.top_p.len(), right.top_p.len());
    if tolerances.is_exact() {
        let ids = |signals: &RowSignals| signals.top_p.iter().map(|entry| entry.0).collect::<Vec<u32>>();
        let (got_ids, right_ids) = (ids(got), ids(right));
        if got_ids.len() != right_ids.len() {
            return Some(count());
        }
        if got_ids != right_ids {
            return Some(format!("top_p_index is {got_ids:?}, recomputed it is {right_ids:?}"));
        }
        return if differs(got.tail, right.tail, tolerances.relative()) {
            mismatch_message("top_p_tail", got.tail, right.tail)
        } else {
            None
        };
    }
    let (tail, exact) = (f64::from(got.tail).exp(), f64::from(right.tail).exp());
    if got.top_p.len() == right.top_p.len() && (tail - exact).abs() > tolerances.relative() * exact + 1e-6 {
        return mismatch_message("top_p_tail", got.tail, right.tail);
    }
    // the kept entries hold just the required mass: their number must equal the recomputed one, except in close calls
    let held = |signals: &RowSignals| signals.top_p.iter().map(|entry| f64::from(entry.1).exp()).sum::<f64>();
    let more = got.top_p.len().abs_diff(right.top_p.len());
    let close = (held(got) - held(right)).abs() <= more as f64 * 0.5 + tolerances.relative();
    let one_off = more <= 1 + right.top_p.len() / 8;
    (!(close && one_off)).then(count)
}

#[cfg(test)]
mod tests {
    use stillhouse_noise::{LogitSampling, SampledLogit, TopP};

    use super::*;

    #[test]
    fn every_signal_that_is_not_the_teachers_is_found() {
        let logits: Vec<f32> = (0..50).map(|k| 3.0 * (k as f32 * 1.7).sin()).collect();
        let mut softmax = Softmax::new(50).unwrap();
        softmax.load(&logits).unwrap();
        let asked = stillhouse_noise::SignalSpec {
            temperatures: vec![1.0, 3.0],
            entropy: true,
            candidates: vec![1],
            sampling: Some(LogitSampling { draws: 64, power: 0.9, seed: 1 }),
            top_p: Some(TopP { mass: 0.7, max_entries: 40 }),
        };
        let right = signals_of_loaded(&asked, &softmax, &logits, 3, 2);
        let under = |got: &RowSignals, tolerances| compare(got, &right, (&softmax, &logits), 64, tolerances);
        let of = |got: &RowSignals| under(got, Tolerances::other_machine());
        for tolerances in [
            Tolerances::other_machine(),
            Tolerances::for_arithmetic(true, "NVIDIA H100"),
            Tolerances::for_arithmetic(true, "cpu"),
        ] {
            assert_eq!(under(&right, tolerances), None);
        }
        let elsewhere = signals_of_loaded(&asked, &softmax, &logits, 3, 1).sampled;
        type Break = fn(&mut RowSignals);
        let broken: [(&str, Break); 6] = [
            ("logz is", |s| s.logz[1] += 0.01),
            ("entropy is", |s| s.entropy += 0.02),
            ("candidate_logprob is", |s| s.candidates[0] -= 0.01),
            ("sampled_ratio is", |s| s.sampled[0].ratio *= 1.1),
            ("top_p_logprob of", |s| s.top_p[0].1 -= 0.01),
            ("top_p_tail is", |s| s.tail += 0.1),
        ];
        for (says, change) in broken {
            let mut got = right.clone();
            change(&mut got);
            let said = of(&got).unwrap_or_default();
            assert!(said.starts_with(says), "{says}: {said:?}");
        }
        // with the job's bits, the format's promises apply; they are a thousand times tighter
        let closer: [(&str, Break); 8] = [
            ("logz is", |s| s.logz[1] += 3e-5),
            ("entropy is", |s| s.entropy += 3e-5),
            ("candidate_logprob is", |s| s.candidates[0] -= 1e-5),
            ("1 of 64 sampled", |s| {
                // one draw moves to the next entry
                let moved = SampledLogit { index: s.sampled[0].index + 1, count: 1, ratio: 1.0 };
                s.sampled[0].count -= 1;
                match s.sampled.iter_mut().find(|other| other.index == moved.index) {
                    Some(other) => other.count += 1,
                    None => s.sampled.push(moved),
                }
            }),
            ("sampled_ratio is", |s| s.sampled[0].ratio *= 1.0001),
            ("top_p_logprob of", |s| s.top_p[0].1 -= 1e-5),
            ("top_p_index is", |s| s.top_p.swap(0, 1)),
            ("top_p_tail is", |s| s.tail += 1e-4),
        ];
        for (says, change) in closer {
            let mut got = right.clone();
            change(&mut got);
            assert_eq!(of(&got), None, "{says}: as much may be the arithmetic's");
            let said = under(&got, Tolerances::for_arithmetic(true, "cpu")).unwrap_or_default();
            assert!(said.starts_with(says), "{says}: {said:?}");
        }
        let said = of(&RowSignals { sampled: elsewhere, ..right.clone() }).unwrap_or_default();
        assert!(said.contains("sampled tokens are not those of the seed"), "{said}");
        let mut short = right.clone();
        short.top_p.truncate(1);
        assert!(right.top_p.len() > 3 && of(&short).unwrap_or_default().starts_with("top_p_count is 1"));
    }

    #[test]
    fn a_top_k_that_is_not_the_teachers_is_found() {
        let logits: Vec<f32> = (0..50).map(|k| 3.0 * (k as f32 * 1.7).sin()).collect();
        let mut softmax = Softmax::new(50).unwrap();
        softmax.load(&logits).unwrap();
        let right = top_k_of_loaded(&softmax, &logits, 5);
        let (tokens, logprobs): (Vec<i32>, Vec<f32>) = right.iter().map(|entry| (entry.0 as i32, entry.1)).unzip();
        let of = |tokens: &[i32], logprobs: &[f32], tolerances| {
            compare_topk((tokens, logprobs), &right, (&softmax, &logits), tolerances)
        };
        let (here, elsewhere) = (Tolerances::for_arithmetic(true, "cpu"), Tolerances::other_machine());
        assert_eq!((of(&tokens, &logprobs, here), of(&tokens, &logprobs, elsewhere)), (None, None));
        let mut off = logprobs.clone();
        off[3] -= 1e-3;
        assert!(of(&tokens, &off, here).unwrap().starts_with(&format!("topk_logprob of {}", tokens[3])));
        assert_eq!(of(&tokens, &off, elsewhere), None, "as much may be the arithmetic's");
        off[3] -= 1e-2;
        assert!(of(&tokens, &off, elsewhere).is_some());
        // an unlikely entry with its correct ln p
        let least = (0..50).min_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        let (mut other, mut its) = (tokens.clone(), logprobs.clone());
        (other[4], its[4]) = (least as i32, softmax.logprob(logits[least]) as f32);
        for tolerances in [here, elsewhere] {
            assert!(of(&other, &its, tolerances).unwrap().starts_with("topk_index 4 is"));
        }
    }
}
