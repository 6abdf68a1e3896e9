//! Formats numbers for people.

/// With thousands separators: `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A count with its noun: `1 shard`, `3 shards`.
pub fn counted(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(n), if n == 1 { "" } else { "s" })
}

/// Bytes in decimal units: `12.3 MB` is 12.3·10^6 bytes.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1e3;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if value < 999.95 {
            break;
        }
        value /= 1e3;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

/// A fraction in per cent: `12.3 %`, with more digits for small values.
pub fn share(part: f64) -> String {
    let percent = part * 100.0;
    match percent {
        p if p != 0.0 && p.abs() < 0.001 => format!("{p:.0e} %"),
        p if p != 0.0 && p.abs() < 0.1 => format!("{p:.3} %"),
        p => format!("{p:.1} %"),
    }
}

/// A small quantity such as a total variation: `0`, `9.98e-4`, `0.0123`.
pub fn small(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v < 1e-2 => format!("{value:.2e}"),
        _ => format!("{value:.4}"),
    }
}

/// A duration in seconds as `00:35`, `1:02:03` or `2 d 03 h`.
pub fn clock(seconds: f64) -> String {
    let s = seconds.max(0.0).round() as u64;
    let (days, hours, minutes) = (s / 86_400, s / 3600 % 24, s / 60 % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes:02}:{:02}", s % 60),
        (0, _) => format!("{hours}:{minutes:02}:{:02}", s % 60),
        _ => format!("{days} d {hours:02} h"),
    }
}

/// A horizontal bar with a resolution of an eighth of a cell, not padded. Any value above zero shows at least an
/// eighth.
pub fn bar(part: f64, cells: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let part = if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.0 };
    let mut eighths = (part * cells as f64 * 8.0).round() as usize;
    if part > 0.0 {
        eighths = eighths.max(1);
    }
    let eighths = eighths.min(cells * 8);
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!([count(0), count(999), count(1000), count(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [bytes(999), bytes(1000), bytes(999_960), bytes(12_345_678)],
            ["999 B", "1.0 kB", "1.0 MB", "12.3 MB"]
        );
        assert_eq!(bytes(u64::MAX), "18446.7 PB");
        assert_eq!([clock(34.6), clock(3723.0), clock(183_600.0)], ["00:35", "1:02:03", "2 d 03 h"]);
        assert_eq!([share(0.1234), share(0.0005), share(1e-9), share(0.0)], ["12.3 %", "0.050 %", "1e-7 %", "0.0 %"]);
        assert_eq!([small(0.0), small(9.98e-4), small(0.0123)], ["0", "9.98e-4", "0.0123"]);
    }

    #[test]
    fn bars_fill_in_eighths() {
        assert_eq!([bar(0.0, 4), bar(1e-9, 4), bar(0.5, 4), bar(0.53, 4), bar(1.0, 4)], ["", "▏", "██", "██▏", "████"]);
        assert_eq!([bar(f64::NAN, 4), bar(7.0, 2)], ["", "██"]);
    }
}
