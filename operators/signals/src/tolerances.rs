//! Tolerances between the teacher's stored values and recomputed ones.

/// Tolerance of log-probabilities if the teacher runs on another kind of machine than the job did, in nat. Below −16
/// the tolerance grows in proportion to
/// |ln p| / 16, because larger logits are coarser.
pub const LOGPROB_TOLERANCE: f64 = 2e-3;
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
pub struct Tolerances {
    /// δ, the tolerance of logits.
    logit_error: f64,
}

impl Tolerances {
    /// `alike` means that the arithmetic equals the job's. Then a CPU gives a sequence the same bits in any batch.
    #[must_use]
    pub fn for_arithmetic(alike: bool, device: &str) -> Self {
        match (alike, device) {
            (true, "cpu") => Self { logit_error: 0.0 },
            (true, _) => Self { logit_error: LAST_BITS },
            (false, _) => Self::other_machine(),
        }
    }

    /// Tolerances on another kind of machine.
    #[must_use]
    pub fn other_machine() -> Self {
        Self { logit_error: LOGPROB_TOLERANCE }
    }

    /// Whether logits differ at most in their last bits: on the same CPU arithmetic, or a GPU of the same kind.
    #[must_use]
    pub fn is_same_device(self) -> bool {
        self.logit_error < LOGPROB_TOLERANCE
    }

    /// Whether logits must equal the job's bit for bit.
    #[must_use]
    pub fn is_exact(self) -> bool {
        self.logit_error == 0.0
    }

    /// δ.
    #[must_use]
    pub fn logit_error(self) -> f64 {
        self.logit_error
    }

    fn scaled(self, logprob: f64) -> f64 {
        self.logit_error * (logprob.abs() / LOGPROB_SIZE).max(1.0)
    }

    /// Tolerance of `logprob`, which is the nearest f32 or the one below it.
    #[must_use]
    pub fn logprob(self, logprob: f64) -> f64 {
        self.scaled(logprob) + UNIT * logprob.abs()
    }

    /// Tolerance of a value that changes as much as a logit: δ, scaled, and half a unit in the last place, at least
    /// `rounding`.
    #[must_use]
    pub fn logit(self, value: f32, rounding: f64) -> f64 {
        self.scaled(value.into()) + (UNIT * f64::from(value.abs())).max(rounding)
    }

    /// Tolerance of an entry that is stored with its ln p: candidates, top-k, top-p.
    #[must_use]
    pub fn listed(self, logprob: f32) -> f64 {
        self.logit(logprob, 1e-6)
    }

    /// Relative tolerance of ratios and of the tail mass.
    #[must_use]
    pub fn relative(self) -> f64 {
        5.0 * self.logit_error + 1e-5
    }

    /// By how much the observed token may lose. Two logits are compared, each with its own error.
    #[must_use]
    pub fn lead(self) -> f64 {
        if self.is_same_device() { self.logit_error } else { 2.0 * self.logit_error }
    }

    /// Slack added to the total variation that the job promises.
    #[must_use]
    pub fn variation(self) -> f64 {
        if self.is_exact() { SUM_SLACK } else { VARIATION_SLACK }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extreme_log_probabilities_are_compared_by_their_size() {
        let elsewhere = Tolerances::other_machine();
        assert!((elsewhere.logprob(0.0) - 2e-3).abs() < 1e-12 && (elsewhere.logprob(-16.0) - 2e-3).abs() < 1e-5);
        assert!((elsewhere.logprob(-1600.0) - 0.2).abs() < 1e-3);
        // the next f32 at this magnitude is within the tolerance
        for logprob in [-1e4f32, -1e6, -1e8] {
            let next = f64::from(logprob.next_down());
            for tolerances in [elsewhere, Tolerances::for_arithmetic(true, "cpu")] {
                assert!((next - f64::from(logprob)).abs() <= tolerances.logprob(next));
            }
        }
        assert!(Tolerances::for_arithmetic(true, "cpu").logprob(-10.0) < 2e-6);
    }
}
