//! The other signals of a teacher, each recomputed and held to its bound.
//!
//! | signal | may differ by |
//! |---|---|
//! | `logz` | what a log-probability may, and 1e-5 |
//! | `entropy` | 2e-3 · (1 + ln V): a logit that moves by 2e-3 moves it by as much at most |
//! | `candidate_logprob` | what a log-probability may |
//! | `sampled_…` | draws that fall elsewhere: one and 1 in 64 of N; 1 in 4 on another kind of machine. Ratios: 1 % |
//! | `top_p_…` | ln p of each as above; the tail by 1 % or 1e-6. Which are kept may change with ties |

use std::cmp::Ordering;
use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use stillhouse_noise::{RowSignals, Softmax, signals_of_loaded};
use stillhouse_operators::extract::{SignalsConfig, StoredSignals};
use stillhouse_schemas::spec::Extract;

use super::noise::{LOGPROB_TOLERANCE, logprob_limit};

/// The stored signals of a batch.
pub(super) struct Signals {
    stored: StoredSignals,
}

impl Signals {
    /// Those of a batch; `None` where the job asks for none. Rows whose lists do not fit are faults of the shard, which is checked before.
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

    /// Whether a position is stored as certain to be its token.
    pub(super) fn is_certain(&self, row: usize, position: usize, token: u32) -> bool {
        self.stored.at(row, position) == self.stored.asked().certain(token)
    }

    /// What is wrong at a predicted position, whose logits were recomputed.
    pub(super) fn wrong(
        &self,
        (row, position): (usize, usize),
        softmax: &Softmax,
        logits: &[f32],
        sequence_id: u64,
        alike: bool,
    ) -> Option<String> {
        let right = signals_of_loaded(self.stored.asked(), softmax, logits, sequence_id, position as u32);
        let draws = self.stored.asked().sampling.map_or(0, |s| s.draws);
        compare(&self.stored.at(row, position), &right, (softmax, logits), draws, alike)
    }
}

fn compare(
    got: &RowSignals,
    right: &RowSignals,
    (softmax, logits): (&Softmax, &[f32]),
    draws: u32,
    alike: bool,
) -> Option<String> {
    let apart = |got: f32, right: f32| (f64::from(got) - f64::from(right)).abs();
    // a NaN differs from everything
    let differs = |got: f32, right: f32, limit: f64| {
        got != right && apart(got, right).partial_cmp(&limit).is_none_or(Ordering::is_gt)
    };
    let said = |name: &str, got: f32, right: f32| Some(format!("{name} is {got}, recomputed it is {right}"));
    for (got, right) in got.logz.iter().zip(&right.logz) {
        if differs(*got, *right, logprob_limit(f64::from(*right)) + 1e-5) {
            return said("logz", *got, *right);
        }
    }
    if differs(got.entropy, right.entropy, LOGPROB_TOLERANCE * (1.0 + (logits.len() as f64).ln())) {
        return said("entropy", got.entropy, right.entropy);
    }
    for (got, right) in got.candidates.iter().zip(&right.candidates) {
        if differs(*got, *right, logprob_limit(f64::from(*right))) {
            return said("candidate_logprob", *got, *right);
        }
    }
    let times: BTreeMap<u32, u32> = right.sampled.iter().map(|s| (s.index, s.times)).collect();
    let kept: u32 = got.sampled.iter().map(|s| s.times.min(times.get(&s.index).copied().unwrap_or(0))).sum();
    let moved = draws.saturating_sub(kept);
    if moved > 1 + draws / if alike { 64 } else { 4 } {
        return Some(format!("{moved} of {draws} sampled tokens are not those of the seed"));
    }
    let ratios: BTreeMap<u32, f32> = right.sampled.iter().map(|s| (s.index, s.ratio)).collect();
    for s in &got.sampled {
        if let Some(right) = ratios.get(&s.index)
            && differs(s.ratio, *right, 0.01 * f64::from(*right))
        {
            return said("sampled_ratio", s.ratio, *right);
        }
    }
    for (token, logprob) in &got.top_p {
        let exact = logits.get(*token as usize).map_or(f32::NAN, |l| softmax.logprob(*l) as f32);
        if differs(*logprob, exact, logprob_limit(f64::from(exact))) {
            return said(&format!("top_p_logprob of {token}"), *logprob, exact);
        }
    }
    let (tail, exact) = (f64::from(got.tail).exp(), f64::from(right.tail).exp());
    if got.top_p.len() == right.top_p.len() && (tail - exact).abs() > 0.01 * exact + 1e-6 {
        return said("top_p_tail", got.tail, right.tail);
    }
    // what is kept holds the mass, and does so only just: the recomputed number of entries, but for close calls
    let held = |signals: &RowSignals| signals.top_p.iter().map(|entry| f64::from(entry.1).exp()).sum::<f64>();
    let close = (held(got) - held(right)).abs() <= got.top_p.len().abs_diff(right.top_p.len()) as f64 * 0.5;
    let one_off = got.top_p.len().abs_diff(right.top_p.len()) <= 1 + right.top_p.len() / 8;
    (!(close && one_off)).then(|| format!("top_p_count is {}, recomputed it is {}", got.top_p.len(), right.top_p.len()))
}

#[cfg(test)]
mod tests {
    use stillhouse_noise::{LogitSampling, TopP};

    use super::*;

    #[test]
    fn every_signal_that_is_not_the_teachers_is_found() {
        let logits: Vec<f32> = (0..50).map(|k| 3.0 * (k as f32 * 1.7).sin()).collect();
        let mut softmax = Softmax::new(50).unwrap();
        softmax.load(&logits).unwrap();
        let asked = stillhouse_noise::Signals {
            temperatures: vec![1.0, 3.0],
            entropy: true,
            candidates: vec![1],
            sampling: Some(LogitSampling { draws: 64, power: 0.9, seed: 1 }),
            top_p: Some(TopP { mass: 0.7, most: 40 }),
        };
        let right = signals_of_loaded(&asked, &softmax, &logits, 3, 2);
        let of = |got: &RowSignals| compare(got, &right, (&softmax, &logits), 64, true);
        assert_eq!(of(&right), None);
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
        let said = of(&RowSignals { sampled: elsewhere, ..right.clone() }).unwrap_or_default();
        assert!(said.contains("sampled tokens are not those of the seed"), "{said}");
        let mut short = right.clone();
        short.top_p.truncate(1);
        assert!(right.top_p.len() > 3 && of(&short).unwrap_or_default().starts_with("top_p_count is 1"));
    }
}
