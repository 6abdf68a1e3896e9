//! `stillhouse inspect DATASET --document ID`: a record of the input, and where its tokens lie.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use stillhouse_datasets::dataset::Dataset;
use stillhouse_datasets::inspect::{DocumentTrace, trace_document};
use stillhouse_pipeline::output::Output;
use stillhouse_pipeline::source_record::source_record;
use stillhouse_pipeline::units;
use stillhouse_schemas::ids::{DocumentId, SplitId};
use stillhouse_schemas::manifest::Range;

use crate::failure::Failure;
use crate::job_file::JobFile;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::verbs::Threads;

/// Parses `SPLIT:RECORD` or the number that `document_ids` has.
pub(super) fn parse(text: &str) -> Result<DocumentId, String> {
    let id = match text.split_once(':') {
        Some((split, record)) => split.parse().ok().zip(record.parse().ok()).map(|(s, r)| SplitId(s).document(r)),
        None => text.parse().ok().map(DocumentId),
    };
    id.ok_or_else(|| "valid: SPLIT:RECORD, such as 3:17, or a number of the column document_ids".to_owned())
}

pub(super) fn call(
    output: Output,
    id: DocumentId,
    job: Option<&Path>,
    json: bool,
    printer: &Arc<Printer>,
) -> Result<(), Failure> {
    let runtime = Threads::default().runtime()?;
    let (dataset, trace) = runtime.block_on(async {
        let dataset = Dataset::open(output).await?;
        let trace = trace_document(&dataset, id).await?;
        Ok::<_, Failure>((dataset, trace))
    })?;
    let record = match job {
        None => None,
        Some(path) => {
            let file = JobFile::read(path, printer)?;
            let watch = Watch::new(printer, if json { Mode::Quiet } else { Mode::Shown });
            let _blocking_calls_wait_on = runtime.enter();
            let prepared = file.prepare(&watch);
            watch.close();
            Some(source_record(&prepared?, dataset.manifest(), id).map_err(|e| file.failure(e))?)
        }
    };
    if json {
        let mut shown = json!(trace);
        if let (Some(record), Some(shown)) = (&record, shown.as_object_mut()) {
            shown.insert("source".into(), json!(record));
        }
        printer.json(&shown)?;
    } else {
        printer.page(&render(&trace, record.as_deref()))?;
    }
    Ok(())
}

fn range(range: Range) -> String {
    match range {
        Range::Bytes { start, end, .. } => format!("bytes {} to {}", units::count(start), units::count(end)),
        Range::Rows { start, end } => format!("rows {} to {}", units::count(start), units::count(end)),
    }
}

pub(super) fn render(trace: &DocumentTrace, record: Option<&str>) -> Page {
    let mut page = Page::new();
    let name = format!("document {}:{}", trace.split, trace.record);
    let id = format!("  {} in document_ids, of {}", trace.document_id, trace.dataset_split);
    page.line(Line::new().with(Tone::Strong, name).with(Tone::Dim, id));
    let ordinal = units::count(u64::from(trace.record) + 1);
    page.line(Line::new().with(Tone::Dim, format!("record {ordinal} of what split {} reads:", trace.split)));
    for piece in &trace.pieces {
        page.line(Line::plain(format!("  {}", piece.file)).with(Tone::Dim, format!("  {}", range(piece.range))));
    }
    if let Some(record) = record {
        page.heading("In the input");
        record.lines().for_each(|line| page.line(Line::plain(format!("  {line}"))));
    }
    if let Some(fields) = trace.fields.as_ref().and_then(Value::as_object) {
        page.heading("Carried columns");
        for (name, value) in fields {
            let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            page.line(Line::new().with(Tone::Dim, format!("  {name}  ")).with(Tone::Plain, shown));
        }
    }
    page.heading("In the data set");
    for part in &trace.parts {
        let tokens = format!("tokens {} to {}", units::count(part.start as u64), units::count(part.end as u64));
        let place = format!("row {}, {tokens}  sequence_id {}", part.row, part.sequence_id);
        page.line(Line::new().with(Tone::Dim, place));
        part.text.iter().flat_map(|text| text.lines()).for_each(|line| page.line(Line::plain(format!("  {line}"))));
    }
    if trace.parts.is_empty() {
        let reason = match (&trace.dropped, trace.dropped_in_split) {
            (Some(reason), _) => format!("nothing: a filter dropped it ({reason})"),
            (None, 0) => "nothing: there is no such record, it is bad, or packing dropped its tokens".to_owned(),
            (None, n) => format!(
                "nothing: it is one of {} that filters dropped in this split, there is no such record, it is bad, or packing \
                 dropped its tokens",
                units::counted(n, "document")
            ),
        };
        page.line(Line::plain(reason));
    }
    page
}
