//! The report: a table that is printed row by row, and the same rows as JSON.

use std::fs;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use stillhouse_gpu::Device;

use crate::Outcome;

/// The rows so far.
pub struct Report {
    header: Value,
    rows: Vec<Value>,
    passed: bool,
    checked: bool,
    file: Option<String>,
    /// The part that new rows belong to.
    pub part: &'static str,
}

impl Report {
    pub fn new(device: &Arc<dyn Device>, driver: &str, file: Option<String>) -> Self {
        let header = json!({ "device": device.model(), "arithmetic": device.arithmetic(), "driver": driver, "date": date(), "program": env!("CARGO_PKG_VERSION") });
        Self { header, rows: Vec::new(), passed: true, checked: true, file, part: "" }
    }

    /// Prints the head of the table.
    pub fn begin(&self) {
        let [device, driver, date] =
            ["device", "driver", "date"].map(|key| self.header[key].as_str().unwrap_or_default());
        println!("device {device} · driver {driver} · {date}");
        print_row("part", "what", "value", "unit", "");
    }

    /// Adds a measured value.
    pub fn figure(&mut self, what: impl Into<String>, value: f64, unit: &'static str, note: &str) {
        let what = what.into();
        print_row(self.part, &what, &format_value(value), unit, note);
        self.rows.push(json!({ "part": self.part, "what": what, "value": value, "unit": unit, "note": note }));
    }

    /// Adds the result of a check.
    pub fn verdict(&mut self, what: impl Into<String>, right: bool, note: &str) {
        let what = what.into();
        print_row(self.part, &what, if right { "right" } else { "WRONG" }, "", note);
        self.rows.push(json!({ "part": self.part, "what": what, "right": right, "note": note }));
        self.passed &= right;
    }

    /// Adds a skipped measurement with the reason.
    pub fn skipped(&mut self, what: impl Into<String>, why: &str) {
        let what = what.into();
        print_row(self.part, &what, "skipped", "", why);
        self.rows.push(json!({ "part": self.part, "what": what, "skipped": why }));
    }

    /// Adds a check that was skipped for lack of time.
    pub fn unchecked(&mut self, what: impl Into<String>) {
        self.checked = false;
        self.skipped(what, "out of time");
    }

    /// Whether no check failed.
    pub fn all_passed(&self) -> bool {
        self.passed
    }

    /// Whether no check was skipped for lack of time.
    pub fn all_checked(&self) -> bool {
        self.checked
    }

    /// Writes all rows to the file, if there is one.
    pub fn write(&self) -> Outcome<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let mut all = self.header.clone();
        all["right"] = json!(self.passed);
        all["checked"] = json!(self.checked);
        all["rows"] = json!(self.rows);
        fs::write(file, serde_json::to_string_pretty(&all)?).map_err(|error| format!("{file}: {error}").into())
    }
}

fn print_row(part: &str, what: &str, value: &str, unit: &str, note: &str) {
    println!("{}", format!("{part:<12} {what:<52} {value:>12} {unit:<9} {note}").trim_end());
}

/// Formats a number with four digits, or with all digits before the decimal point.
fn format_value(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if value == 0.0 => "0".into(),
        _ if size >= 1000.0 => format!("{value:.0}"),
        _ if size >= 100.0 => format!("{value:.1}"),
        _ if size >= 10.0 => format!("{value:.2}"),
        _ if size >= 0.01 => format!("{value:.4}"),
        _ => format!("{value:.2e}"),
    }
}

/// The current date in UTC.
fn date() -> String {
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400);
    // Converts days to a date of the proleptic Gregorian calendar, with years that begin in March.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    format!("{:04}-{month:02}-{of_month:02}", era * 400 + year + u64::from(month < 3))
}
