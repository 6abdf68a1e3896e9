//! Renders the values of chosen columns, as many as fit.

use serde_json::Value;
use stillhouse_datasets::inspect::ColumnValues;
use stillhouse_pipeline::units;

use crate::page::{Line, Page, Tone, View};

/// Maximum number of a list's values to show; `--json` has all.
const MAX_SHOWN_VALUES: usize = 64;

pub(super) fn render(columns: &[ColumnValues], view: View, page: &mut Page) {
    for column in columns {
        page.heading(&format!("{} of row {} of {}", column.name, column.row, column.shard));
        let Value::Array(values) = &column.values else {
            page.line(Line::plain(format!("    {}", column.values)));
            continue;
        };
        for text in lines(values, view.width.saturating_sub(4).max(40)) {
            page.line(Line::plain(format!("    {text}")));
        }
        if values.len() > MAX_SHOWN_VALUES {
            let rest = units::count((values.len() - MAX_SHOWN_VALUES) as u64);
            page.line(Line::new().with(Tone::Dim, format!("    … and {rest} more; all of them with --json")));
        }
    }
}

fn lines(values: &[Value], width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for value in values.iter().take(MAX_SHOWN_VALUES) {
        let text = match value {
            Value::Number(n) if n.is_f64() => format!("{:.4}", n.as_f64().unwrap_or(f64::NAN)),
            other => other.to_string(),
        };
        if lines.last().is_some_and(|line| !line.is_empty() && line.len() + 1 + text.len() > width) {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(&text);
        }
    }
    lines
}
