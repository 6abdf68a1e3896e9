//! What `stillhouse export --format` shows of its result.

use stillhouse_datasets::export::Converted;
use stillhouse_pipeline::units;

use crate::page::{Line, Page, Tone, View};
use crate::table::Table;

/// Renders the result as a page.
pub(super) fn render(done: &Converted, view: View) -> Page {
    let mut page = Page::new();
    if done.dry_run {
        let mut table = Table::new("lrl").indent(0).header(&["file", "before compression", ""]);
        for file in &done.files {
            let what = if file.there { "is there" } else { "would be made" };
            table.texts([file.name.clone(), format!("about {}", units::bytes(file.bytes)), what.to_owned()]);
        }
        page.table(table, view);
        page.blank();
    }
    let total = |there: bool| {
        let files = done.files.iter().filter(move |file| file.there == there);
        let (count, bytes) = files.fold((0, 0), |(count, bytes), file| (count + 1, bytes + file.bytes));
        let about = if done.dry_run { "about " } else { "" };
        format!("{}, {about}{}", units::counted(count, "file"), units::bytes(bytes))
    };
    let mut facts = Table::new("ll").indent(0);
    let mut fact = |name: &str, value: String| facts.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    fact(if done.dry_run { "to make" } else { "made" }, total(false));
    fact("there already", total(true));
    fact("entries", format!("{} of each position, from {}", done.entries, done.signal.name()));
    for (count, what) in [
        (done.left_out.incomplete_batch_rows, "rows that fill no global batch"),
        (done.left_out.rows_of_one_token, "rows of one token"),
        (done.left_out.entries_without_token, "entries whose id has no token"),
    ] {
        if count > 0 {
            fact("left out", format!("{count} {what}"));
        }
    }
    fact("place", done.destination.clone());
    if !done.dry_run {
        fact("took", format!("{:.1} s", done.seconds));
    }
    page.facts(facts);
    page
}
