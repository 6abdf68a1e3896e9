//! Renders the header, totals, statistics and columns of a data set.

use stillhouse_datasets::inspect::Inspection;
use stillhouse_pipeline::units;
use stillhouse_schemas::manifest::{Statistic, Totals};

use crate::page::{Line, Page, Tone, View};
use crate::progress::sources_summary;
use crate::table::Table;

/// Width of the histogram's longest bar, in cells.
const BAR: usize = 30;

pub(super) fn render(inspection: &Inspection, view: View, page: &mut Page) {
    header(inspection, page);
    totals(inspection, view, page);
    statistics(inspection, page);
    histogram(&inspection.statistics.corrections_histogram, view, page);
    columns(inspection, view, page);
}

fn header(inspection: &Inspection, page: &mut Page) {
    let hash = format!("  job {:.12}", inspection.job_hash);
    page.line(Line::new().with(Tone::Strong, &inspection.name).with(Tone::Dim, hash));
    let mut table = Table::new("ll");
    table.row(fact("tokenizer", inspection.tokenizer.clone()));
    if let Some(teacher) = &inspection.teacher {
        table.row(fact("teacher", teacher.clone()));
    }
    let vocabulary = units::count(inspection.vocab_size);
    table.row(fact(
        "shape",
        format!("L = {} tokens per sequence, V = {vocabulary}", units::count(inspection.length.into())),
    ));
    page.facts(table);
}

fn totals(inspection: &Inspection, view: View, page: &mut Page) {
    page.blank();
    let mut table = Table::new("lrrrr").header(&["data set", "shards", "sequences", "tokens", "size"]);
    let mut sum = Totals::default();
    for (name, totals) in &inspection.totals {
        table.texts(totals_row(name, totals));
        sum.shards += totals.shards;
        sum.rows += totals.rows;
        sum.tokens += totals.tokens;
        sum.bytes += totals.bytes;
    }
    if inspection.totals.len() > 1 {
        table.row(totals_row("all", &sum).map(|text| Line::new().with(Tone::Strong, text)));
    }
    page.table(table, view);
}

fn totals_row(name: &str, totals: &Totals) -> [String; 5] {
    [
        name.to_owned(),
        units::count(totals.shards),
        units::count(totals.rows),
        units::count(totals.tokens),
        units::bytes(totals.bytes),
    ]
}

fn statistics(inspection: &Inspection, page: &mut Page) {
    let s = &inspection.statistics;
    page.heading("Statistics");
    let mut table = Table::new("ll");
    let skipped: u64 = s.skipped.values().sum();
    table.row(fact("documents", format!("{} read, {} skipped", units::count(s.documents), units::count(skipped))));
    for (reason, n) in &s.skipped {
        table.row(fact("", format!("{} {reason}", units::count(*n))));
    }
    if !s.dropped.is_empty() {
        let (dropped, share) = (s.documents_dropped(), s.documents_dropped() as f64 / s.documents.max(1) as f64);
        let dropped = format!("{} dropped ({})", units::count(dropped), units::share(share));
        table.row(fact("", format!("{} kept, {dropped}", units::count(s.documents_kept()))));
        for (reason, n) in &s.dropped {
            table.row(fact("", format!("{} {reason}", units::count(*n))));
        }
    }
    let kept_bytes = s.text_bytes.saturating_sub(s.filtered_bytes);
    let per_token = match s.text_tokens {
        0 => String::new(),
        n => format!(", {:.2} bytes per token", kept_bytes as f64 / n as f64),
    };
    let (bytes, tokens) = (units::bytes(kept_bytes), units::counted(s.text_tokens, "token"));
    table.row(fact("text", format!("{bytes}, {tokens}{per_token}")));
    if let Some(sources) = sources_summary(&s.sources) {
        table.row(fact("sources", sources));
    }
    if s.empty_documents > 0 {
        table.row(fact("", format!("{} without a token", units::counted(s.empty_documents, "document"))));
    }
    table.row(fact("remainders", format!("{} dropped", units::counted(s.dropped_tokens, "token"))));
    if let Some(perplexity) = inspection.perplexity {
        let over = units::counted(s.predicted_tokens, "predicted token");
        table.row(fact("perplexity", format!("{perplexity:.2} under the teacher, over {over}")));
    }
    if let Some(mean) = inspection.corrections_mean {
        table.row(fact("noise", format!("largest total variation {}", units::small(s.total_variation_max))));
        let most = units::count(s.corrections_max);
        table.row(fact("corrections", format!("{mean:.2} per token on average, {most} at most")));
    }
    for statistic in &inspection.operator_statistics {
        let value = match statistic.value {
            Statistic::Sum(n) => units::count(n),
            Statistic::Max(n) => format!("{} at most", units::small(n)),
        };
        table.row(fact(&statistic.meaning, value));
    }
    page.facts(table);
}

/// Renders the corrections per token, in bins 0, 1, 2–3, 4–7, …
fn histogram(bins: &[u64], view: View, page: &mut Page) {
    let all: u64 = bins.iter().sum();
    let largest = bins.iter().copied().max().unwrap_or_default();
    if largest == 0 {
        return;
    }
    let mut table = Table::new("rrrl").indent(4).header(&["corrections", "tokens", "share", ""]);
    for (i, &n) in bins.iter().enumerate() {
        let bar = units::bar(n as f64 / largest as f64, BAR);
        let share = units::share(n as f64 / all as f64);
        table.row([
            Line::plain(bin_name(i)),
            Line::plain(units::count(n)),
            Line::plain(share),
            Line::new().with(Tone::Bar, bar),
        ]);
    }
    page.table(table, view);
}

fn bin_name(bin: usize) -> String {
    match bin {
        0 | 1 => bin.to_string(),
        _ => {
            let low = 1_u64.checked_shl(bin as u32 - 1).unwrap_or(u64::MAX);
            format!("{low}–{}", low.saturating_mul(2) - 1)
        }
    }
}

fn columns(inspection: &Inspection, view: View, page: &mut Page) {
    if inspection.columns.is_empty() {
        return;
    }
    page.heading("Columns");
    let all: u64 = inspection.columns.iter().map(|c| c.bytes).sum();
    let mut table = Table::new("lllrr").header(&["name", "type", "shape", "bytes/token", "share"]);
    for column in &inspection.columns {
        table.texts([
            column.name.clone(),
            column.data_type.clone(),
            column.shape.clone().unwrap_or_default(),
            format!("{:.3}", column.bytes_per_token),
            units::share(column.bytes as f64 / all.max(1) as f64),
        ]);
    }
    page.table(table, view);
}

fn fact(name: &str, value: String) -> [Line; 2] {
    [Line::new().with(Tone::Dim, name), Line::plain(value)]
}
