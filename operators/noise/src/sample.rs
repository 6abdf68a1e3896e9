//! Samples the tokens of teacher-written text with the noise of the seed, optionally with temperature, top-k and top-p.
//!
//! ```text
//!   x = argmax over A of  l_k / T + ξ_k          ξ_k = −ln e_k for every k of the stream; e_0 is not used
//!   A = all of V  ─►  the top_k most likely  ─►  the smallest prefix whose mass under softmax(l / T) reaches top_p
//! ```
//!
//! At T = 1 over all of V, x is a sample of softmax(l) (Gumbel 1954; Maddison et al. 2014, "A* Sampling", section 2),
//! and ξ is the noise that Gumbel distillation conditions a student on. Otherwise x is a sample of softmax(l / T) over
//! A, and ξ carries no information about softmax(l). T = 0 selects the most likely entry. Scores are f64 sums of the
//! f32 logits and noises. Ties of scores and of logits go to the lower index.
//!
//! Shapes: logits `[V]` f32. Cost per token: one word and one logarithm per entry. top_p adds one exponential per entry
//! and a partial sort.

use crate::{NoiseError, NoiseStream, Softmax, sequential_noise, top_k_of_loaded};

/// Number of most likely entries to examine first if only top_p limits their number.
const FIRST_TOP_K: usize = 64;

/// Parameters of the choice of a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Temperature T, which divides the logits; 0 selects the most likely entry.
    pub temperature: f64,
    /// Number of most likely entries to keep; 0 for all.
    pub top_k: usize,
    /// Keeps the smallest set of these whose probability reaches `top_p`; 1 for all.
    pub top_p: f64,
}

impl Sampling {
    /// Samples the teacher's own distribution.
    pub const PLAIN: Self = Self { temperature: 1.0, top_k: 0, top_p: 1.0 };

    /// Whether tokens are samples of softmax(l), so that the noise is posterior noise.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        *self == Self::PLAIN
    }
}

/// Samples tokens. Holds scratch of 8·V bytes.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    softmax: Softmax,
    noise: Vec<f32>,
}

/// The set A: all entries, or these with their logits, in descending order.
enum CandidateSet {
    All,
    Subset(Vec<(u32, f32)>),
}

/// Which entries to count as members of A when the logits have errors.
#[derive(Debug, Clone, Copy)]
enum Membership {
    /// Entries that are in A under some errors.
    Possible,
    /// Entries that are in A under all errors.
    Certain,
}

impl Sampler {
    /// Creates a sampler for rows of `vocab` logits.
    ///
    /// # Errors
    /// If `vocab` is 0 or exceeds 2^32, the largest vocabulary that an index type of the format addresses.
    pub fn new(vocab: usize, sampling: Sampling) -> Result<Self, NoiseError> {
        Ok(Self { sampling, softmax: Softmax::new(vocab)?, noise: vec![0.0; vocab] })
    }

    /// Returns the token at a position, and the lead of its score over the next best one (∞ if there is none).
    ///
    /// # Errors
    /// If the length is wrong, or a logit is NaN or infinite.
    pub fn sample(&mut self, logits: &[f32], stream: &NoiseStream) -> Result<(u32, f64), NoiseError> {
        self.load(logits, stream)?;
        let (mut best, mut next) = ((0, f64::NEG_INFINITY), f64::NEG_INFINITY);
        // Entries come in index order, so ties go to the lower index.
        self.for_each_score(&self.candidate_set(logits, 0.0, Membership::Possible), logits, |k, score| {
            if score > best.1 {
                next = best.1;
                best = (k, score);
            } else if score > next {
                next = score;
            }
        });
        Ok((best.0, best.1 - next))
    }

    /// Returns the lead of the score of `token` over all other entries, for logits with an error of at most
    /// `max_error`. A negative lead means that the token loses.
    ///
    /// Only entries that are in A under all such errors count as rivals. The result is −∞ if the token is in A under
    /// none of them. A token that was sampled from logits l′ with |l′ − l| ≤ max_error therefore has a lead of at least
    /// −2·max_error/T: its own score and the rival's each move by at most max_error/T.
    ///
    /// # Errors
    /// As [`Self::sample`], or if the token is outside the vocabulary.
    pub fn lead(
        &mut self,
        logits: &[f32],
        token: u32,
        stream: &NoiseStream,
        max_error: f64,
    ) -> Result<f64, NoiseError> {
        self.load(logits, stream)?;
        crate::posterior::check_token(token, logits.len(), stream)?;
        let mut rival = f64::NEG_INFINITY;
        self.for_each_score(&self.candidate_set(logits, max_error, Membership::Certain), logits, |k, score| {
            if k != token && score > rival {
                rival = score;
            }
        });
        let may_be_member = match self.candidate_set(logits, max_error, Membership::Possible) {
            CandidateSet::All => true,
            CandidateSet::Subset(entries) => entries.iter().any(|(k, _)| *k == token),
        };
        let own = self.score(token, logits[token as usize]);
        Ok(if may_be_member { own - rival } else { f64::NEG_INFINITY })
    }

    fn load(&mut self, logits: &[f32], stream: &NoiseStream) -> Result<(), NoiseError> {
        self.softmax.load(logits).map_err(|e| e.at(stream))?;
        if self.sampling.temperature > 0.0 {
            sequential_noise(stream, &mut self.noise);
        }
        Ok(())
    }

    fn score(&self, k: u32, logit: f32) -> f64 {
        match self.sampling.temperature > 0.0 {
            true => f64::from(logit) / self.sampling.temperature + f64::from(self.noise[k as usize]),
            false => f64::from(logit),
        }
    }

    /// Calls `visit` with the score of every entry of A, by ascending index.
    fn for_each_score(&self, set: &CandidateSet, logits: &[f32], mut visit: impl FnMut(u32, f64)) {
        match set {
            CandidateSet::All => logits.iter().zip(0..).for_each(|(l, k)| visit(k, self.score(k, *l))),
            CandidateSet::Subset(entries) => {
                let mut entries = entries.clone();
                entries.sort_unstable_by_key(|(k, _)| *k);
                entries.into_iter().for_each(|(k, l)| visit(k, self.score(k, l)));
            }
        }
    }

    /// Returns the possible or the certain members of A, for logits with an error of at most `max_error`.
    fn candidate_set(&self, logits: &[f32], max_error: f64, membership: Membership) -> CandidateSet {
        let Sampling { temperature, top_k, top_p } = self.sampling;
        let top_k = if top_k == 0 { logits.len() } else { top_k.min(logits.len()) };
        if temperature <= 0.0 || (top_k == logits.len() && top_p >= 1.0) {
            return CandidateSet::All;
        }
        let top =
            |n: usize| top_k_of_loaded(&self.softmax, logits, n).into_iter().map(|(k, _)| (k, logits[k as usize]));
        let max = top(1).next().map_or(0.0, |(_, l)| f64::from(l));
        let weight = |l: f32| libm::exp((f64::from(l) - max) / temperature);
        let mut examined = if top_p >= 1.0 { top_k } else { top_k.min(FIRST_TOP_K) };
        let total: f64 = match top_p >= 1.0 {
            true => 1.0,
            false if top_k < logits.len() => top(top_k).map(|(_, l)| weight(l)).sum(),
            false => logits.iter().map(|l| weight(*l)).sum(),
        };
        // Bound for shares: a weight and the sum of weights each change by a factor of at most e^(max_error/T).
        let (factor, margin) = (libm::exp(2.0 * max_error / temperature), 2.0 * max_error);
        loop {
            // With errors, entries near the last one may swap places with it.
            let first: Vec<(u32, f32)> = top((examined + 1).min(logits.len())).collect();
            let entries = if max_error > 0.0 { top(logits.len().min(4 * examined + 64)).collect() } else { first };
            let mut shares = vec![0.0];
            entries.iter().for_each(|(_, l)| shares.push(shares[shares.len() - 1] + weight(*l) / total));
            // Count and total share of the entries before entry i: those certainly above it (`Possible`), else all
            // possibly above it.
            let before = |i: usize| {
                let (own, count_at_least) =
                    (f64::from(entries[i].1), |bound: f64| entries.partition_point(|(_, l)| f64::from(*l) >= bound));
                match (max_error > 0.0, membership) {
                    (false, _) => (i, shares[i]),
                    (true, Membership::Possible) => {
                        let n = count_at_least(own + margin).min(i);
                        (n, shares[n] / factor)
                    }
                    (true, Membership::Certain) => {
                        let n = count_at_least(own - margin) - 1;
                        (n, (shares[n + 1] - weight(entries[i].1) / total) * factor)
                    }
                }
            };
            let is_in = |i: &usize| {
                let (n, share) = before(*i);
                n < top_k && (top_p >= 1.0 || share < top_p)
            };
            let members: Vec<(u32, f32)> = (0..entries.len()).filter(is_in).map(|i| entries[i]).collect();
            let below = |(a, b): (&(u32, f32), &(u32, f32))| f64::from(a.1) - margin > f64::from(b.1);
            let all_found = members.len() < entries.len()
                && (max_error <= 0.0 || members.last().zip(entries.last()).is_none_or(below));
            if all_found || entries.len() == logits.len() {
                return CandidateSet::Subset(members);
            }
            examined = (examined * 8).min(logits.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DrawKey, keyed_uniforms, sample_sequential};

    fn row(vocab: usize, seed: u64, spread: f64) -> Vec<f32> {
        let mut uniforms = keyed_uniforms(seed, "row", 0, 0);
        (0..vocab).map(|_| (spread * (uniforms.next_f64() - 0.5)) as f32).collect()
    }

    /// The definition, implemented directly: sort everything, cut, take the best.
    fn by_definition(logits: &[f32], sampling: Sampling, stream: &NoiseStream) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        if sampling.temperature == 0.0 {
            return order[0] as u32;
        }
        let scaled = |k: usize| f64::from(logits[k]) / sampling.temperature;
        order.truncate(if sampling.top_k == 0 { logits.len() } else { sampling.top_k });
        let largest = scaled(order[0]);
        let total: f64 = order.iter().map(|k| (scaled(*k) - largest).exp()).sum();
        let mut reached = 0.0;
        if sampling.top_p < 1.0 {
            order.retain(|k| {
                let is_in = reached < sampling.top_p;
                reached += (scaled(*k) - largest).exp() / total;
                is_in
            });
        }
        let score = |k: usize| scaled(k) - f64::from(stream.exponential(k as u32)).ln();
        order.into_iter().max_by(|a, b| score(*a).total_cmp(&score(*b))).unwrap() as u32
    }

    #[test]
    fn tokens_are_those_of_the_definition_and_lead() {
        for (vocab, spread) in [(7, 6.0), (300, 12.0), (2500, 4.0), (2500, 25.0)] {
            for (temperature, top_k, top_p) in [
                (1.0, 0, 1.0),
                (0.7, 0, 1.0),
                (1.0, 5, 1.0),
                (1.3, 0, 0.9),
                (1.0, 40, 0.5),
                (0.0, 0, 1.0),
                (0.0, 3, 0.4),
                (2.0, 1, 0.9),
                (1.0, 0, 0.999),
                (1.0, 100_000, 1e-9),
            ] {
                let sampling = Sampling { temperature, top_k, top_p };
                let mut sampler = Sampler::new(vocab, sampling).unwrap();
                for position in 0..40 {
                    let logits = row(vocab, u64::from(position) + 1, spread);
                    let stream = NoiseStream::new(DrawKey::new(9, 0), 3, position);
                    let (token, lead) = sampler.sample(&logits, &stream).unwrap();
                    assert_eq!(token, by_definition(&logits, sampling, &stream), "{sampling:?} of {vocab}");
                    let again = sampler.lead(&logits, token, &stream, 0.0).unwrap();
                    assert!(again == lead || (again - lead).abs() < 1e-12, "{sampling:?}: {again}, {lead}");
                    // Any other token loses by at least the same lead, or is not in A.
                    let other = (token + 1) % vocab as u32;
                    assert!(sampler.lead(&logits, other, &stream, 0.0).unwrap() <= -lead.min(1e300), "{sampling:?}");
                    if sampling.is_plain() {
                        let plain = sample_sequential(&logits, &stream, &mut vec![0.0; vocab]).unwrap();
                        assert_eq!(token, plain);
                    }
                }
            }
        }
    }

    /// Proves the bound of [`Sampler::lead`]: a token sampled with errors of at most `max_error` leads by at least
    /// −2·max_error/T without them.
    #[test]
    fn errors_of_logits_cost_a_lead_no_more_than_is_said() {
        let mut close = 0;
        for (temperature, top_k, top_p) in [(1.0, 0, 1.0), (0.5, 0, 0.8), (1.0, 12, 1.0), (1.5, 30, 0.7), (0.0, 0, 1.0)]
        {
            let sampling = Sampling { temperature, top_k, top_p };
            let mut sampler = Sampler::new(200, sampling).unwrap();
            for position in 0..300 {
                let (logits, errors) = (row(200, u64::from(position), 8.0), row(200, 1000 + u64::from(position), 2.0));
                let max_error = 0.02f64;
                let wrong: Vec<f32> = logits.iter().zip(errors).map(|(l, e)| l + e * max_error as f32).collect();
                let stream = NoiseStream::new(DrawKey::new(5, 0), 8, position);
                let (token, _) = sampler.sample(&wrong, &stream).unwrap();
                let lead = sampler.lead(&logits, token, &stream, max_error + 1e-6).unwrap();
                let scale = if temperature > 0.0 { temperature } else { 1.0 };
                assert!(lead >= -2.0 * (max_error + 1e-6) / scale, "{sampling:?} at {position}: {lead}");
                close += u32::from(sampler.sample(&logits, &stream).unwrap().0 != token);
            }
        }
        assert!(close > 5, "errors that change nothing show nothing: {close}");
    }

    /// Among 20,000 samples, each token occurs as often as softmax(l / T) over A predicts, within four standard
    /// deviations.
    #[test]
    fn samples_are_of_the_distribution_that_is_left() {
        let logits = [1.0f32, 0.2, -0.5, 2.0, -3.0];
        for (temperature, top_k, top_p, members) in
            [(1.0, 0, 1.0, &[0, 1, 2, 3, 4][..]), (0.8, 3, 1.0, &[3, 0, 1]), (2.0, 0, 0.6, &[3, 0])]
        {
            let mut sampler = Sampler::new(5, Sampling { temperature, top_k, top_p }).unwrap();
            let n = 20_000;
            let mut counts = [0.0; 5];
            for i in 0..n {
                let stream = NoiseStream::new(DrawKey::new(77, 0), u64::from(i / 64), i % 64);
                counts[sampler.sample(&logits, &stream).unwrap().0 as usize] += 1.0;
            }
            let total: f64 = members.iter().map(|k: &usize| (f64::from(logits[*k]) / temperature).exp()).sum();
            for k in 0..5 {
                let p = if members.contains(&k) { (f64::from(logits[k]) / temperature).exp() / total } else { 0.0 };
                let deviation = (f64::from(n) * p * (1.0 - p)).sqrt();
                assert!((counts[k] - f64::from(n) * p).abs() <= 4.0 * deviation, "{k}: {counts:?}");
            }
        }
    }

    #[test]
    fn logits_that_are_none_are_named() {
        let mut sampler = Sampler::new(3, Sampling::PLAIN).unwrap();
        let stream = NoiseStream::new(DrawKey::new(1, 0), 4, 2);
        let wrong = sampler.sample(&[0.0, f32::NAN, 1.0], &stream);
        assert!(
            matches!(wrong, Err(NoiseError::NonFiniteLogit { sequence_id: 4, position: 2, index: 1, .. })),
            "{wrong:?}"
        );
        assert!(sampler.sample(&[0.0; 2], &stream).is_err());
        assert!(sampler.lead(&[0.0; 3], 3, &stream, 0.0).is_err());
    }
}
