//! `stillhouse inspect DATASET --dropped`: the documents that filters dropped.

use stillhouse_datasets::dataset::Dataset;
use stillhouse_datasets::inspect::{DroppedReason, dropped};
use stillhouse_pipeline::output::Output;
use stillhouse_pipeline::units;
use stillhouse_schemas::ids::DocumentId;

use crate::failure::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::verbs::Threads;

/// Samples of a reason that the caller names.
const SAMPLES_OF_ONE: usize = 20;
/// Samples of each reason of a rule or a data set.
const SAMPLES_OF_EACH: usize = 3;

pub(super) fn call(output: Output, reason: Option<&str>, json: bool, printer: &Printer) -> Result<(), Failure> {
    let max_samples = if reason.is_some_and(|reason| reason.contains('.')) { SAMPLES_OF_ONE } else { SAMPLES_OF_EACH };
    let found = Threads::default().runtime()?.block_on(async {
        let dataset = Dataset::open(output).await?;
        dropped(&dataset, reason, max_samples).await
    })?;
    if json {
        printer.json(&found)?;
    } else {
        printer.page(&render(&found))?;
    }
    Ok(())
}

pub(super) fn render(reasons: &[DroppedReason]) -> Page {
    let mut page = Page::new();
    for reason in reasons {
        let documents = format!("  {}", units::counted(reason.documents, "document"));
        page.line(Line::new().with(Tone::Strong, &reason.reason).with(Tone::Dim, documents));
        if reason.samples.is_empty() {
            page.line(Line::new().with(Tone::Dim, "  no samples in these shards"));
        }
        for sample in &reason.samples {
            let (split, ordinal) = DocumentId(sample.document_id).parts();
            let head = format!("  document {ordinal} of split {}, {}", split.0, units::bytes(sample.bytes));
            page.line(Line::new().with(Tone::Dim, head));
            if let Some(problem) = &sample.problem {
                page.line(Line::plain(format!("  {problem}")));
            }
            let is_cut = (sample.text.len() as u64) < sample.bytes;
            let text = format!("    {}{}", sample.text, if is_cut { "…" } else { "" });
            page.line(Line::plain(text));
        }
        page.blank();
    }
    page
}
