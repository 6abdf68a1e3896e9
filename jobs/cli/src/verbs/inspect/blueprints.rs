//! Renders noise blueprints: the top entries of softmax(ξ) at a position, and the rank of the observed token.

use stillhouse_datasets::inspect::{Blueprint, BlueprintEntry};
use stillhouse_pipeline::units;

use crate::page::{Line, Page, Tone, View, quoted};
use crate::table::Table;

/// Width of the longest bar, in cells.
const BAR: usize = 24;

pub(super) fn render(blueprints: &[Blueprint], draw: u32, vocab_size: u64, view: View, page: &mut Page) {
    if blueprints.is_empty() {
        return;
    }
    page.heading(&format!("Noise blueprints, draw {draw}: top of softmax(ξ), ► observed"));
    for (i, blueprint) in blueprints.iter().enumerate() {
        if i > 0 {
            page.blank();
        }
        one(blueprint, vocab_size, view, page);
    }
}

fn one(blueprint: &Blueprint, vocab_size: u64, view: View, page: &mut Page) {
    let head = Line::plain("  ")
        .with(Tone::Dim, "position ")
        .with(Tone::Strong, units::count(blueprint.position as u64))
        .with(Tone::Dim, ", observed ")
        .with(Tone::Accent, quoted(&blueprint.text));
    let standing = format!(
        "rank {} of {}, weight {}, ξ {:.3}, ln p {:.3}",
        units::count(blueprint.rank as u64),
        units::count(vocab_size),
        units::share(blueprint.weight),
        blueprint.xi,
        blueprint.logprob
    );
    let joined = head.clone().with(Tone::Dim, ": ").with(Tone::Dim, &standing);
    if joined.width() <= view.width {
        page.line(joined);
    } else {
        page.line(head.cut(view.width));
        page.line(Line::plain("    ").with(Tone::Dim, standing));
    }
    let largest = blueprint.top.iter().map(|e| e.weight).fold(blueprint.weight, f64::max);
    let mut table = Table::new("rllrlrr").indent(4).header(&["rank", "", "token", "id", "", "weight", "ξ"]);
    for (i, entry) in blueprint.top.iter().enumerate() {
        table.row(entry_row(i + 1, entry, entry.id == blueprint.token, largest));
    }
    if blueprint.rank > blueprint.top.len() {
        if blueprint.rank > blueprint.top.len() + 1 {
            table.texts(["…"]);
        }
        let observed = BlueprintEntry {
            id: blueprint.token,
            text: blueprint.text.clone(),
            weight: blueprint.weight,
            xi: blueprint.xi,
        };
        table.row(entry_row(blueprint.rank, &observed, true, largest));
    }
    page.table(table, view);
}

fn entry_row(rank: usize, entry: &BlueprintEntry, observed: bool, largest: f64) -> [Line; 7] {
    let tone = if observed { Tone::Accent } else { Tone::Plain };
    let text = |text: String| Line::new().with(tone, text);
    [
        text(units::count(rank as u64)),
        text(if observed { "►" } else { "" }.into()),
        text(quoted(&entry.text)),
        text(entry.id.to_string()),
        Line::new().with(if observed { Tone::Accent } else { Tone::Bar }, units::bar(entry.weight / largest, BAR)),
        text(units::share(entry.weight)),
        text(format!("{:.3}", entry.xi)),
    ]
}
