//! Estimates the progress, the rate and the remaining time of a run.

use crate::events::Progress;

/// What is known about a run at its start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RunStart {
    /// Number of splits that earlier runs committed.
    pub splits_done: u64,
    /// Bytes of input that this run reads; 0 if unknown.
    pub input_bytes: u64,
    /// Whether a teacher processes the tokens.
    pub teacher: bool,
}

/// An estimate from one reading of the counters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Finished fraction of this run's work, from 0 to 1.
    pub fraction: f64,
    /// Tokens per second: those of the teacher, if there is one.
    pub tokens_per_second: Option<f64>,
    /// Remaining seconds.
    pub seconds_left: Option<f64>,
}

/// Estimates rate and remaining time from the counters of a run: the work done so far, and the recent rate.
#[derive(Debug, Clone)]
pub struct Estimator {
    start: RunStart,
    recent_rate: DecayingRate,
    /// Tokens and finished fraction of the splits at the last commit. Between commits only the tokens advance.
    commit: Option<(u64, f64)>,
}

/// Seconds of work before the rate is meaningful.
const MIN_WORK_SECONDS: f64 = 2.0;

impl Estimator {
    /// Creates an estimator for a run that starts now.
    pub fn new(start: RunStart) -> Self {
        Self { start, recent_rate: DecayingRate::default(), commit: None }
    }

    /// Estimates from the counters. The first call marks the start of work, so loading a teacher does not count.
    pub fn update(&mut self, now: &Progress) -> Estimate {
        let tokens = if self.start.teacher { now.teacher_tokens } else { now.tokens };
        self.recent_rate.read(now.seconds, tokens);
        let Fractions { text, splits } = fractions(&self.start, now);
        if self.commit.is_none_or(|(_, at)| splits > at) {
            self.commit = Some((tokens, splits));
        }
        let total_tokens = match self.commit {
            Some((then, part)) if part > text => then as f64 / part,
            _ if text > 0.0 => tokens as f64 / text,
            _ => 0.0,
        };
        let has_worked = self.recent_rate.elapsed() >= MIN_WORK_SECONDS;
        let rate = self.recent_rate.rate();
        let is_moving = rate > 0.0 && total_tokens > 0.0 && !self.recent_rate.is_stalled();
        Estimate {
            fraction: text.max(splits),
            tokens_per_second: (has_worked && tokens > 0).then_some(rate),
            seconds_left: (has_worked && is_moving).then(|| (total_tokens - tokens as f64).max(0.0) / rate),
        }
    }
}

/// Tokens per second over recent time, with exponentially decaying weights.
#[derive(Debug, Clone, Default)]
struct DecayingRate {
    started_at: f64,
    last: Option<(f64, u64)>,
    /// Tokens, and the seconds in which they came, both weighted.
    tokens: f64,
    seconds: f64,
    /// Time of the last token, and the longest wait for one.
    last_token_at: f64,
    longest_wait: f64,
}

/// Minimum time constant of the decay, in seconds. The time constant is at least a tenth of the run so far, and three
/// times the longest wait, for teachers that emit tokens in bursts.
const MIN_DECAY_SECONDS: f64 = 20.0;
/// Seconds without a token after which no remaining time is given. Three times the longest wait counts if it is longer.
const STALL_SECONDS: f64 = 60.0;

impl DecayingRate {
    fn read(&mut self, seconds: f64, tokens: u64) {
        let Some((then, previous_tokens)) = self.last.replace((seconds, tokens)) else {
            (self.started_at, self.last_token_at) = (seconds, seconds);
            return;
        };
        let new_tokens = tokens.saturating_sub(previous_tokens);
        if new_tokens > 0 {
            self.longest_wait = self.longest_wait.max(seconds - self.last_token_at);
            self.last_token_at = seconds;
        }
        let decay_seconds = MIN_DECAY_SECONDS.max(self.elapsed() / 10.0).max(3.0 * self.longest_wait);
        let passed = (seconds - then).max(0.0);
        let decay = (-passed / decay_seconds).exp();
        self.tokens = self.tokens * decay + new_tokens as f64;
        self.seconds = self.seconds * decay + passed;
    }

    fn elapsed(&self) -> f64 {
        self.last.map_or(0.0, |(now, _)| now - self.started_at)
    }

    fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens / self.seconds } else { 0.0 }
    }

    fn is_stalled(&self) -> bool {
        let waits = self.last.map_or(0.0, |(now, _)| now - self.last_token_at);
        waits > STALL_SECONDS.max(3.0 * self.longest_wait)
    }
}

/// Finished fractions of this run's work, by text and by splits.
struct Fractions {
    text: f64,
    splits: f64,
}

/// With a teacher, its tokens count, relative to a total that is extrapolated from the text read so far. The size of
/// the input includes bytes that are not text, such as JSON keys. So a larger fraction of splits is closer to the
/// truth, and it is the only measure if the size is unknown.
fn fractions(start: &RunStart, now: &Progress) -> Fractions {
    let splits = ratio(now.splits_done.saturating_sub(start.splits_done), now.splits.saturating_sub(start.splits_done));
    let text = ratio(now.text_bytes, start.input_bytes);
    let text = match start.teacher {
        true => text * ratio(now.teacher_tokens, now.tokens),
        false => text,
    };
    Fractions { text: text.min(1.0), splits: splits.min(1.0) }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(seconds: f64) -> Progress {
        Progress { seconds, splits: 10, ..Progress::default() }
    }

    #[test]
    fn with_a_teacher_its_tokens_count() {
        let mut estimator = Estimator::new(RunStart { splits_done: 0, input_bytes: 1000, teacher: true });
        assert_eq!(
            estimator.update(&now(30.0)),
            Estimate { fraction: 0.0, tokens_per_second: None, seconds_left: None }
        );
        // 400 of 1,000 bytes gave 100 tokens, so 250 are expected; the teacher has processed 50
        let estimate = estimator.update(&Progress { text_bytes: 400, tokens: 100, teacher_tokens: 50, ..now(40.0) });
        assert!((estimate.fraction - 0.2).abs() < 1e-12);
        assert_eq!(estimate.tokens_per_second, Some(5.0));
        assert!((estimate.seconds_left.unwrap() - 40.0).abs() < 1e-9);
    }

    #[test]
    fn without_a_teacher_the_text_counts() {
        let mut estimator = Estimator::new(RunStart { splits_done: 0, input_bytes: 1000, teacher: false });
        estimator.update(&now(0.0));
        let estimate = estimator.update(&Progress { text_bytes: 250, tokens: 100, ..now(10.0) });
        assert_eq!(estimate, Estimate { fraction: 0.25, tokens_per_second: Some(10.0), seconds_left: Some(30.0) });
    }

    #[test]
    fn splits_count_where_the_size_is_not_known_those_of_earlier_runs_left_out() {
        let mut estimator = Estimator::new(RunStart { splits_done: 6, input_bytes: 0, teacher: true });
        estimator.update(&Progress { splits_done: 6, ..now(0.0) });
        let estimate = estimator.update(&Progress {
            splits_done: 7,
            tokens: 100,
            teacher_tokens: 70,
            text_bytes: 400,
            ..now(10.0)
        });
        assert_eq!(estimate.fraction, 0.25);
        assert_eq!(estimate.seconds_left, Some(30.0));
    }

    #[test]
    fn nothing_is_said_too_early_and_never_more_than_all() {
        let mut estimator = Estimator::new(RunStart { splits_done: 10, input_bytes: 10, teacher: false });
        estimator.update(&now(0.0));
        let early = estimator.update(&Progress { text_bytes: 5, tokens: 5, ..now(0.5) });
        assert_eq!((early.tokens_per_second, early.seconds_left), (None, None));
        let late = estimator.update(&Progress { text_bytes: 50, tokens: 50, splits_done: 10, ..now(5.0) });
        assert_eq!((late.fraction, late.seconds_left), (1.0, Some(0.0)));
    }

    /// Runs from `from` to `to` seconds at a constant rate, with four readings a second.
    fn run(estimator: &mut Estimator, from: f64, to: f64, tokens: &mut f64, per_second: f64) -> Estimate {
        let mut estimate = None;
        for tick in 1..=((to - from) * 4.0) as u32 {
            *tokens += per_second / 4.0;
            let n = *tokens as u64;
            let now = now(from + f64::from(tick) / 4.0);
            estimate = Some(estimator.update(&Progress { tokens: n, text_bytes: n, ..now }));
        }
        estimate.unwrap()
    }

    #[test]
    fn the_time_left_follows_the_rate_of_late() {
        let mut estimator = Estimator::new(RunStart { splits_done: 0, input_bytes: 1_000_000, teacher: false });
        estimator.update(&now(500.0));
        let mut tokens = 0.0;
        // slow start: 100 tokens a second for five minutes, so 970,000 are left
        let slow = run(&mut estimator, 500.0, 800.0, &mut tokens, 100.0);
        assert!((slow.seconds_left.unwrap() - 9700.0).abs() < 10.0, "{slow:?}");
        // then ten times as fast: after two minutes 850,000 tokens are left, so 850 seconds; the mean rate since the
        // start, 357 a second, would give 2,380 seconds
        let fast = run(&mut estimator, 800.0, 920.0, &mut tokens, 1000.0);
        assert!((fast.tokens_per_second.unwrap() - 1000.0).abs() < 60.0, "{fast:?}");
        assert!((fast.seconds_left.unwrap() - 850.0).abs() < 60.0, "{fast:?}");
    }

    #[test]
    fn nothing_is_promised_while_nothing_moves() {
        let mut estimator = Estimator::new(RunStart { splits_done: 0, input_bytes: 1_000_000, teacher: false });
        estimator.update(&now(0.0));
        let mut tokens = 0.0;
        run(&mut estimator, 0.0, 30.0, &mut tokens, 1000.0);
        let waits = run(&mut estimator, 30.0, 60.0, &mut tokens, 0.0);
        assert!(waits.seconds_left.unwrap() > 2.0 * 970.0, "{waits:?}");
        let stands = run(&mut estimator, 60.0, 120.0, &mut tokens, 0.0);
        assert_eq!(stands.seconds_left, None);
        assert!(stands.tokens_per_second.unwrap() < 50.0, "{stands:?}");
        let again = run(&mut estimator, 120.0, 240.0, &mut tokens, 1000.0);
        assert!(again.seconds_left.is_some_and(|left| left < 1500.0), "{again:?}");
    }

    #[test]
    fn a_teacher_that_gives_in_bursts_has_a_steady_rate() {
        let mut estimator = Estimator::new(RunStart { splits_done: 0, input_bytes: 1_000_000, teacher: false });
        estimator.update(&now(0.0));
        let mut tokens = 0.0;
        for burst in 0..20 {
            let from = f64::from(burst) * 30.0;
            let last = run(&mut estimator, from, from + 29.75, &mut tokens, 0.0);
            let first = run(&mut estimator, from + 29.75, from + 30.0, &mut tokens, 12_000.0 * 4.0);
            if burst > 4 {
                // 12,000 tokens per half minute: 400 a second, before and after a burst
                for estimate in [last, first] {
                    let rate = estimate.tokens_per_second.unwrap();
                    assert!((300.0..530.0).contains(&rate), "{rate}");
                }
            }
        }
    }

    #[test]
    fn between_commits_the_time_left_goes_down() {
        let mut estimator = Estimator::new(RunStart { splits_done: 0, input_bytes: 0, teacher: false });
        estimator.update(&now(0.0));
        let at = |estimator: &mut Estimator, seconds: f64, splits_done: u64| {
            let tokens = (seconds * 100.0) as u64;
            estimator.update(&Progress { tokens, splits_done, ..now(seconds) }).seconds_left.unwrap_or(f64::NAN)
        };
        assert!((at(&mut estimator, 100.0, 1) - 900.0).abs() < 1e-6);
        assert!((at(&mut estimator, 150.0, 1) - 850.0).abs() < 1e-6);
        assert!((at(&mut estimator, 200.0, 2) - 800.0).abs() < 1e-6);
    }
}
