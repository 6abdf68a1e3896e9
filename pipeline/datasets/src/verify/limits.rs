//! Tolerances between the teacher's stored values and recomputed ones.

/// Tolerance of log-probabilities if the teacher runs on another kind of machine than the job did, in nat. Below −16
/// the tolerance grows in proportion to
/// |ln p| / 16, because larger logits are coarser.
pub(super) const LOGPROB_TOLERANCE: f64 = 2e-3;
const LOGPROB_SIZE: f64 = 16.0;
/// Tolerance of logits on a GPU of the same kind, which may differ in their last bits.
const LAST_BITS: f64 = 1e-4;
/// Upper bound of the change in total variation of softmax(ξ) if logits differ in their last bits. Far below any job's
/// tolerance.
const VARIATION_SLACK: f64 = 2e-5;
/// The same bound if logits do not differ: the effect of the summation order in f32.
const SUM_SLACK: f64 = 1e-6;
/// Relative size of one unit in the last place of an f32.
const UNIT: f64 = 1.0 / (1 << 23) as f64;

/// Tolerances, depending on the machine that recomputes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Limits {
    /// δ, the tolerance of logits.
    off: f64,
}

impl Limits {
    /// `alike` means that the arithmetic equals the job's. Then a CPU gives a sequence the same bits in any batch.
    pub(super) fn of(alike: bool, device: &str) -> Self {
        match (alike, device) {
            (true, "cpu") => Self { off: 0.0 },
            (true, _) => Self { off: LAST_BITS },
            (false, _) => Self::elsewhere(),
        }
    }

    /// Tolerances on another kind of machine.
    pub(super) fn elsewhere() -> Self {
        Self { off: LOGPROB_TOLERANCE }
    }

    /// Whether logits must equal the job's bit for bit.
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

    /// Tolerance of `logprob`, which is the nearest f32 or the one below it.
    pub(super) fn logprob(self, logprob: f64) -> f64 {
        self.moved(logprob) + UNIT * logprob.abs()
    }

    /// Tolerance of an entry that is stored with its ln p: candidates, top-k, top-p.
    pub(super) fn listed(self, logprob: f32) -> f64 {
        self.moved(logprob.into()) + (UNIT * f64::from(logprob.abs())).max(1e-6)
    }

    /// Tolerance of a log-partition.
    pub(super) fn logz(self, logz: f32) -> f64 {
        self.moved(logz.into()) + (UNIT * f64::from(logz.abs())).max(1e-5)
    }

    /// Tolerance of the entropy over `vocab` entries.
    pub(super) fn entropy(self, vocab: usize) -> f64 {
        self.off * (1.0 + (vocab as f64).ln()) + 1e-5
    }

    /// Relative tolerance of ratios and of the tail mass.
    pub(super) fn share(self) -> f64 {
        5.0 * self.off + 1e-5
    }

    /// Number of N draws that may fall on other tokens.
    pub(super) fn moved_draws(self, draws: u32) -> u32 {
        match self.off {
            0.0 => 0,
            off if off < LOGPROB_TOLERANCE => 1 + draws / 64,
            _ => 1 + draws / 4,
        }
    }

    /// By how much the observed token may lose. Two logits are compared, each with its own error.
    pub(super) fn lead(self) -> f64 {
        if self.off < LOGPROB_TOLERANCE { self.off } else { 2.0 * self.off }
    }

    /// Slack added to the total variation that the job promises.
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
        // the next f32 at this magnitude is within the tolerance
        for logprob in [-1e4f32, -1e6, -1e8] {
            let next = f64::from(logprob.next_down());
            for limits in [elsewhere, Limits::of(true, "cpu")] {
                assert!((next - f64::from(logprob)).abs() <= limits.logprob(next));
            }
        }
        assert!(Limits::of(true, "cpu").logprob(-10.0) < 2e-6);
    }
}
