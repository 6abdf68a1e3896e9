//! The points of a job's rate plot: a bounded number over any length of time.

use serde::{Deserialize, Serialize};

use super::model::{RatePoint, Time};

/// Most points to store; twice as many as a plot of a few hundred pixels can show.
pub const MAX_POINTS: usize = 600;
const FIRST_GAP_MILLISECONDS: i64 = 1000;

/// Points over all attempts of a job. When there are too many, every second one is dropped and the gap between new ones
/// doubles.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rates {
    gap: i64,
    points: Vec<RatePoint>,
}

impl Default for Rates {
    fn default() -> Self {
        Self { gap: FIRST_GAP_MILLISECONDS, points: Vec::new() }
    }
}

impl Rates {
    pub fn into_points(self) -> Vec<RatePoint> {
        self.points
    }

    /// Adds a reading, if the last point is at least one gap older.
    pub fn record(&mut self, time: Time, attempt: u32, tokens: u64, splits_done: u64) {
        let last = self.points.last().filter(|p| p.attempt == attempt);
        if last.is_some_and(|p| time.0 - p.time.0 < self.gap) {
            return;
        }
        let tokens_per_second =
            last.map_or(0.0, |p| tokens.saturating_sub(p.tokens) as f64 / time.seconds_since(p.time).max(1e-3));
        self.points.push(RatePoint { time, attempt, tokens_per_second, tokens, splits_done });
        if self.points.len() > MAX_POINTS {
            self.thin();
        }
    }

    /// Merges each pair of points of one attempt. Tokens are cumulative, so the later point represents both.
    fn thin(&mut self) {
        self.gap *= 2;
        let mut kept: Vec<RatePoint> = Vec::with_capacity(MAX_POINTS);
        for pair in self.points.chunks(2) {
            match pair {
                [first, second] if first.attempt == second.attempt => {
                    let mut point = second.clone();
                    if let Some(before) = kept.last().filter(|p| p.attempt == point.attempt) {
                        let seconds = point.time.seconds_since(before.time).max(1e-3);
                        point.tokens_per_second = point.tokens.saturating_sub(before.tokens) as f64 / seconds;
                    }
                    kept.push(point);
                }
                others => kept.extend_from_slice(others),
            }
        }
        self.points = kept;
    }
}

/// Tokens per second over the last seconds.
#[derive(Debug, Clone, Default)]
pub struct CurrentRate {
    readings: std::collections::VecDeque<(f64, u64)>,
}

const WINDOW_SECONDS: f64 = 10.0;

impl CurrentRate {
    pub fn record(&mut self, seconds: f64, tokens: u64) -> f64 {
        self.readings.push_back((seconds, tokens));
        while self.readings.len() > 2
            && self.readings.front().is_some_and(|(earlier_seconds, _)| seconds - earlier_seconds > WINDOW_SECONDS)
        {
            self.readings.pop_front();
        }
        match self.readings.front() {
            Some((earlier_seconds, earlier_tokens)) if seconds - earlier_seconds > 0.5 => {
                tokens.saturating_sub(*earlier_tokens) as f64 / (seconds - earlier_seconds)
            }
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_stay_few_and_keep_the_count() {
        let mut rates = Rates::default();
        for second in 0..10_000_i64 {
            rates.record(Time(second * 1000), 1 + u32::from(second >= 5000), (second as u64 % 5000) * 100, 0);
        }
        let points = rates.into_points();
        assert!(points.len() <= MAX_POINTS && points.len() > MAX_POINTS / 4, "{}", points.len());
        let steady = points.windows(2).filter(|p| p[0].attempt == p[1].attempt);
        for pair in steady {
            assert!((pair[1].tokens_per_second - 100.0).abs() < 1e-6, "{pair:?}");
        }
        assert_eq!(points.iter().filter(|p| p.attempt == 2 && p.tokens_per_second == 0.0).count(), 1);
    }

    #[test]
    fn speed_is_of_the_last_seconds() {
        let mut current_rate = CurrentRate::default();
        assert_eq!(current_rate.record(0.0, 0), 0.0);
        for tick in 1..400 {
            current_rate.record(f64::from(tick) * 0.25, 1000 * tick as u64);
        }
        // no more tokens arrive
        let mut last = f64::NAN;
        for tick in 400..500 {
            last = current_rate.record(f64::from(tick) * 0.25, 399_000);
        }
        assert_eq!(last, 0.0);
    }
}
