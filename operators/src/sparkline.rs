//! Draws a value per token as a strip of bars: numbers for the web page, characters for a terminal.
//!
//! ```text
//!   mean entropy: 3.214 nat, as of 24.9 equally likely tokens
//!     ·▇▆▄▁▂▅▇▃▁▁▂   entropy, 0 to 10.82        · a token without a value
//! ```

use crate::config::Chart;

/// Maximum bars per line; each bar is the mean of a part of the row. 64 fits a terminal.
const MAX_BARS: usize = 64;
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Returns the strip of these values (`None` for a token without one) and the same as a line for a terminal. A full bar
/// is `high`, an empty one `low`.
pub(crate) fn strip_chart(title: &str, values: Vec<Option<f64>>, (low, high): (f64, f64)) -> (Chart, (String, String)) {
    let line = format!("{}   {title}, {} to {}", bars(&values, (low, high)), format_bound(low), format_bound(high));
    let values = values.into_iter().map(|value| value.filter(|v| v.is_finite()).map(|v| v as f32)).collect();
    // the line of a chart has no name
    (Chart::Strip { title: title.into(), low: low as f32, high: high as f32, values }, (String::new(), line))
}

/// Returns the smallest and the largest finite value. If they are equal, the upper bound is one more, so that the
/// interval is not empty.
pub(crate) fn value_range<'v>(values: impl Iterator<Item = &'v Option<f64>>) -> (f64, f64) {
    let finite = values.flatten().copied().filter(|value| value.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    if low > high { (0.0, 1.0) } else { (low, if high > low { high } else { low + 1.0 }) }
}

fn format_bound(bound: f64) -> String {
    let digits = if bound.abs() >= 100.0 { 0 } else { 2 };
    let text = format!("{bound:.digits$}");
    if digits > 0 { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn bars(values: &[Option<f64>], (low, high): (f64, f64)) -> String {
    let width = MAX_BARS.min(values.len());
    let part = |bar: usize| bar * values.len() / width;
    let bar = |n: usize| {
        let values_of_bar: Vec<f64> =
            values[part(n)..part(n + 1)].iter().flatten().copied().filter(|v| v.is_finite()).collect();
        if values_of_bar.is_empty() {
            return '·';
        }
        let mean = values_of_bar.iter().sum::<f64>() / values_of_bar.len() as f64;
        let share = if high > low { (mean - low) / (high - low) } else { 0.0 };
        LEVELS[((share * LEVELS.len() as f64) as usize).min(LEVELS.len() - 1)]
    };
    (0..width).map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_bars_between_their_bounds() {
        let values = vec![None, Some(0.0), Some(1.0), Some(3.9), Some(4.0), Some(9.0), Some(f64::NEG_INFINITY)];
        let (chart, (name, line)) = strip_chart("entropy", values, (0.0, 4.0));
        assert_eq!((name.as_str(), line.as_str()), ("", "·▁▃███·   entropy, 0 to 4"));
        let text = serde_json::to_string(&chart).unwrap();
        assert_eq!(
            text,
            r#"{"kind":"strip","title":"entropy","low":0.0,"high":4.0,"values":[null,0.0,1.0,3.9,4.0,9.0,null]}"#
        );
    }

    #[test]
    fn long_rows_are_means_of_their_parts() {
        let values = (0..1024).map(|n| (n >= 16).then_some(f64::from(n / 128))).collect();
        let (_, (_, line)) = strip_chart("x", values, (0.0, 8.0));
        let eights: String = LEVELS.iter().flat_map(|level| [*level; 8]).skip(1).collect();
        assert_eq!(line, format!("·{eights}   x, 0 to 8"));
        assert_eq!(strip_chart("x", Vec::new(), (0.0, 1.5)).1.1, "   x, 0 to 1.5");
    }

    #[test]
    fn a_span_has_room() {
        assert_eq!(value_range([None, Some(2.0), Some(f64::NEG_INFINITY), Some(-1.0)].iter()), (-1.0, 2.0));
        assert_eq!(value_range([Some(2.0)].iter()), (2.0, 3.0));
        assert_eq!(value_range([None].iter()), (0.0, 1.0));
        assert_eq!([0.0, 10.825, 150.4, -3.1].map(format_bound), ["0", "10.82", "150", "-3.1"]);
    }
}
