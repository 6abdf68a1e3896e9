//! How far a run is, how fast, and how long it will take.

use stillhouse_pipeline::events::Progress;

/// What is known of a run when it starts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Start {
    /// Splits that an earlier run had committed.
    pub splits_done: u64,
    /// Bytes of input that this run reads; 0 where not known.
    pub input_bytes: u64,
    /// Whether a teacher goes over the tokens.
    pub teacher: bool,
}

/// A reading of the counters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// Part of this run's work that is done, 0 to 1.
    pub fraction: f64,
    /// Tokens per second: the teacher's, where there is one.
    pub tokens_per_second: Option<f64>,
    /// Seconds left.
    pub seconds_left: Option<f64>,
}

/// Reads counters against the moment when work began.
#[derive(Debug, Clone, Copy)]
pub struct Gauge {
    start: Start,
    began: Option<f64>,
}

/// Seconds of work before a rate says anything.
const SETTLED: f64 = 2.0;

impl Gauge {
    pub fn new(start: Start) -> Self {
        Self { start, began: None }
    }

    /// What the counters say. The first reading marks where work began, so that loading a teacher does not count.
    pub fn read(&mut self, now: &Progress) -> Reading {
        let worked = now.seconds - *self.began.get_or_insert(now.seconds);
        let fraction = fraction(&self.start, now);
        let tokens = if self.start.teacher { now.teacher_tokens } else { now.tokens };
        let settled = worked >= SETTLED;
        Reading {
            fraction,
            tokens_per_second: (settled && tokens > 0).then(|| tokens as f64 / worked),
            seconds_left: (settled && fraction > 0.0).then(|| worked * (1.0 - fraction) / fraction),
        }
    }
}

/// Part of this run's work that is done.
///
/// With a teacher its tokens count, against an estimate of all tokens from those of the text read so far. The size
/// of the input includes what is not text (the keys of JSON), so a fraction of splits that is further on is nearer
/// the truth; it is all there is where the size is not known.
fn fraction(start: &Start, now: &Progress) -> f64 {
    let splits = ratio(now.splits_done.saturating_sub(start.splits_done), now.splits.saturating_sub(start.splits_done));
    let text = ratio(now.text_bytes, start.input_bytes);
    let work = match start.teacher {
        true => text * ratio(now.teacher_tokens, now.tokens),
        false => text,
    };
    work.max(splits).min(1.0)
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
        let mut gauge = Gauge::new(Start { splits_done: 0, input_bytes: 1000, teacher: true });
        assert_eq!(gauge.read(&now(30.0)), Reading { fraction: 0.0, tokens_per_second: None, seconds_left: None });
        // 400 of 1000 bytes gave 100 tokens, so 250 are to come; the teacher has done 50
        let reading = gauge.read(&Progress { text_bytes: 400, tokens: 100, teacher_tokens: 50, ..now(40.0) });
        assert!((reading.fraction - 0.2).abs() < 1e-12);
        assert_eq!(reading.tokens_per_second, Some(5.0));
        assert!((reading.seconds_left.unwrap() - 40.0).abs() < 1e-9);
    }

    #[test]
    fn without_a_teacher_the_text_counts() {
        let mut gauge = Gauge::new(Start { splits_done: 0, input_bytes: 1000, teacher: false });
        gauge.read(&now(0.0));
        let reading = gauge.read(&Progress { text_bytes: 250, tokens: 100, ..now(10.0) });
        assert_eq!(reading, Reading { fraction: 0.25, tokens_per_second: Some(10.0), seconds_left: Some(30.0) });
    }

    #[test]
    fn splits_count_where_the_size_is_not_known_those_of_earlier_runs_left_out() {
        let mut gauge = Gauge::new(Start { splits_done: 6, input_bytes: 0, teacher: true });
        gauge.read(&Progress { splits_done: 6, ..now(0.0) });
        let reading =
            gauge.read(&Progress { splits_done: 7, tokens: 100, teacher_tokens: 70, text_bytes: 400, ..now(10.0) });
        assert_eq!(reading.fraction, 0.25);
        assert_eq!(reading.seconds_left, Some(30.0));
    }

    #[test]
    fn nothing_is_said_too_early_and_never_more_than_all() {
        let mut gauge = Gauge::new(Start { splits_done: 10, input_bytes: 10, teacher: false });
        gauge.read(&now(0.0));
        let early = gauge.read(&Progress { text_bytes: 5, tokens: 5, ..now(0.5) });
        assert_eq!((early.tokens_per_second, early.seconds_left), (None, None));
        let late = gauge.read(&Progress { text_bytes: 50, splits_done: 10, ..now(5.0) });
        assert_eq!((late.fraction, late.seconds_left), (1.0, Some(0.0)));
    }
}
