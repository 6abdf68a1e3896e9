//! How far what is stored of a teacher may be from what is recomputed.

/// Log-probabilities may differ by this much where the teacher runs on another kind of machine than the job did; those
/// beyond −16 by this share of 16 of their size, as logits that are larger are coarser.
pub(super) const LOGPROB_TOLERANCE: f64 = 2e-3;
const LOGPROB_SIZE: f64 = 16.0;
/// By how much logits of a GPU of the same kind may differ: in their last bits.
const LAST_BITS: f64 = 1e-4;
/// The total variation of softmax(ξ) that logits which differ in their last bits move at most; far below a tolerance.
const VARIATION_SLACK: f64 = 2e-5;
/// The same where they do not differ: what the order of a sum in f32 moves.
const SUM_SLACK: f64 = 1e-6;
/// One unit in the last place of a f32, as a share of it.
const UNIT: f64 = 1.0 / (1 << 23) as f64;

/// How far what is stored may be from what is recomputed, by where it is recomputed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Limits {
    /// δ: by how much logits may be off.
    off: f64,
}

impl Limits {
    /// `alike` says that the arithmetic is the job's. On a CPU a sequence has the same bits in any batch then.
    pub(super) fn of(alike: bool, device: &str) -> Self {
        match (alike, device) {
            (true, "cpu") => Self { off: 0.0 },
            (true, _) => Self { off: LAST_BITS },
            (false, _) => Self::elsewhere(),
        }
    }

    /// On another kind of machine.
    pub(super) fn elsewhere() -> Self {
        Self { off: LOGPROB_TOLERANCE }
    }

    /// Whether logits have the bits that the job saw.
    pub(super) fn has_the_bits(self) -> bool {
        self.off == 0.0
    }

    /// δ.
    pub(super) fn off(self) -> f64 {
        self.off
    }

    fn moved(self, logprob: f64) -> f64 {
        self.off * (logprob.abs() / LOGPROB_SIZE).max(1.0)
    }

    /// Of `logprob`, which is the nearest f32 or the next one down.
    pub(super) fn logprob(self, logprob: f64) -> f64 {
        self.moved(logprob) + UNIT * logprob.abs()
    }

    /// Of an entry that is listed with its ln p: candidates, top-k, top-p.
    pub(super) fn listed(self, logprob: f32) -> f64 {
        self.moved(logprob.into()) + (UNIT * f64::from(logprob.abs())).max(1e-6)
    }

    /// Of a log-partition.
    pub(super) fn logz(self, logz: f32) -> f64 {
        self.moved(logz.into()) + (UNIT * f64::from(logz.abs())).max(1e-5)
    }

    /// Of the entropy over so many entries.
    pub(super) fn entropy(self, vocab: usize) -> f64 {
        self.off * (1.0 + (vocab as f64).ln()) + 1e-5
    }

    /// Of ratios, and of ln of a tail, as a share.
    pub(super) fn share(self) -> f64 {
        5.0 * self.off + 1e-5
    }

    /// Draws out of N that may have fallen on other tokens.
    pub(super) fn moved_draws(self, draws: u32) -> u32 {
        match self.off {
            0.0 => 0,
            off if off < LOGPROB_TOLERANCE => 1 + draws / 64,
            _ => 1 + draws / 4,
        }
    }

    /// By how much the observed token may lose: two logits are off.
    pub(super) fn lead(self) -> f64 {
        if self.off < LOGPROB_TOLERANCE { self.off } else { 2.0 * self.off }
    }

    /// What is added to the total variation that the job promised.
    pub(super) fn variation(self) -> f64 {
        if self.has_the_bits() { SUM_SLACK } else { VARIATION_SLACK }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extreme_log_probabilities_are_compared_by_their_size() {
        let elsewhere = Limits::elsewhere();
        assert!((elsewhere.logprob(0.0) - 2e-3).abs() < 1e-12 && (elsewhere.logprob(-16.0) - 2e-3).abs() < 1e-5);
        assert!((elsewhere.logprob(-1600.0) - 0.2).abs() < 1e-3);
        // one unit in the last place of a logit of that size
        for logprob in [-1e4f32, -1e6, -1e8] {
            let next = f64::from(logprob.next_down());
            for limits in [elsewhere, Limits::of(true, "cpu")] {
                assert!((next - f64::from(logprob)).abs() <= limits.logprob(next));
            }
        }
        assert!(Limits::of(true, "cpu").logprob(-10.0) < 2e-6);
    }
}
