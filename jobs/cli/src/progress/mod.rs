//! Progress of a job: bars on a terminal, log lines otherwise, JSON events for scripts; also the summary at the end.
//!
//! ```text
//!   pipeline ─Event─► Watch ─► Bars | LogLines | JSON | nothing
//!                       └─ stores the last counters and the end, for the summary
//! ```

mod bars;
mod copies;
mod lines;
mod ticker;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stillhouse_pipeline::events::{Event, InputCounts, Observer, Progress};

use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::table::Table;
use stillhouse_pipeline::units;
use stillhouse_schemas::manifest::SourceStatistics;

/// How to show progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Bars on a terminal, log lines otherwise, on stderr.
    Shown,
    /// One JSON event per line on stdout.
    Json,
    /// No output.
    Quiet,
}

/// Receives the events of a verb and shows them.
pub struct Watch {
    shown: Shown,
    kept: Mutex<Kept>,
}

enum Shown {
    Bars(bars::Bars),
    Lines(lines::LogLines),
    Json(Arc<Printer>),
    Nothing,
}

#[derive(Default)]
struct Kept {
    last: Progress,
    teacher: bool,
    /// Number of finished splits, and of all splits.
    splits: Option<(u64, u64)>,
    finished: Option<Finished>,
}

#[derive(Debug, Clone, PartialEq)]
struct Finished {
    output: String,
    rows: u64,
    tokens: u64,
    bytes: u64,
    seconds: f64,
    already_done: bool,
    input: InputCounts,
}

impl Watch {
    /// Creates a watch that shows events in this mode.
    pub fn new(printer: &Arc<Printer>, mode: Mode) -> Self {
        let shown = match (mode, printer.bars()) {
            (Mode::Shown, Some(multi)) => Shown::Bars(bars::Bars::new(multi.clone(), printer.colour_of_bars())),
            (Mode::Shown, None) => Shown::Lines(lines::LogLines::new(printer)),
            (Mode::Json, _) => Shown::Json(Arc::clone(printer)),
            (Mode::Quiet, _) => Shown::Nothing,
        };
        Self { shown, kept: Mutex::default() }
    }

    /// Removes the bars and stops the ticker. Later events are stored but not shown.
    pub fn close(&self) {
        match &self.shown {
            Shown::Bars(bars) => bars.close(),
            Shown::Lines(lines) => lines.close(),
            Shown::Json(_) | Shown::Nothing => {}
        }
    }

    /// Result and speed of a finished job.
    pub fn summary(&self) -> Option<Page> {
        let kept = self.kept();
        kept.finished.as_ref().map(|finished| summary(finished, &kept.last, kept.teacher))
    }

    /// Number of finished splits and of all splits, once the plan is made.
    pub fn splits(&self) -> Option<(u64, u64)> {
        self.kept().splits
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

/// Locks the state, even after a panic in another thread: progress display can continue.
fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Observer for Watch {
    fn event(&self, event: &Event) {
        match event {
            Event::Progress(progress) => self.kept().last = progress.clone(),
            Event::JobStarted { teacher, splits, splits_done, .. } => {
                let mut kept = self.kept();
                kept.teacher = teacher.is_some();
                kept.splits = Some((*splits_done, *splits));
            }
            Event::SplitCommitted { .. } => {
                if let Some((done, _)) = &mut self.kept().splits {
                    *done += 1;
                }
            }
            Event::JobFinished { output, job_hash: _, rows, tokens, bytes, seconds, already_done, went_in } => {
                self.kept().finished = Some(Finished {
                    output: output.clone(),
                    rows: *rows,
                    tokens: *tokens,
                    bytes: *bytes,
                    seconds: *seconds,
                    already_done: *already_done,
                    input: went_in.clone(),
                });
            }
            _ => {}
        }
        match &self.shown {
            Shown::Bars(bars) => bars.event(event),
            Shown::Lines(lines) => lines.event(event),
            // the printer itself reports a closed stdout
            Shown::Json(printer) => drop(printer.json_line(event)),
            Shown::Nothing => {}
        }
    }
}

/// Describes what was read and what of it packing dropped, and what was skipped, by reason.
pub fn input_summary(from: &InputCounts) -> (String, String) {
    let mut read = units::counted(from.documents, "document");
    if from.empty_documents > 0 {
        read += &format!(" ({} without a token)", units::count(from.empty_documents));
    }
    read += &format!(", {}", units::counted(from.text_tokens, "token"));
    read += &format!(", {} of them dropped by packing", units::count(from.dropped_tokens));
    (read, by_reason("record", &from.skipped))
}

/// Describes the documents that were dropped, by reason; `None` if there are none.
pub fn dropped_summary(from: &InputCounts) -> Option<String> {
    (!from.dropped.is_empty()).then(|| by_reason("document", &from.dropped))
}

/// Describes what each table of a mixture gave; `None` for other inputs.
pub fn sources_summary(sources: &BTreeMap<String, SourceStatistics>) -> Option<String> {
    let all: u64 = sources.values().map(|counts| counts.text_tokens).sum();
    let of_table = |(name, counts): (&String, &SourceStatistics)| {
        let share = units::share(counts.text_tokens as f64 / all.max(1) as f64);
        let kept = units::counted(counts.kept_documents, "document");
        let more = |counts: &BTreeMap<String, u64>, what: &str| match counts.values().sum() {
            0 => String::new(),
            n => format!(", {} {what}", units::count(n)),
        };
        let (dropped, skipped) = (more(&counts.dropped, "dropped"), more(&counts.skipped, "skipped"));
        format!("{name} {share} ({kept}{dropped}{skipped})")
    };
    (!sources.is_empty()).then(|| sources.iter().map(of_table).collect::<Vec<_>>().join(", "))
}

fn by_reason(unit: &str, counts: &BTreeMap<String, u64>) -> String {
    let mut text = units::counted(counts.values().sum(), unit);
    if !counts.is_empty() {
        let reasons: Vec<String> = counts.iter().map(|(r, n)| format!("{} {r}", units::count(*n))).collect();
        text += &format!(": {}", reasons.join(", "));
    }
    text
}

fn summary(finished: &Finished, run: &Progress, teacher: bool) -> Page {
    let mut table = Table::new("ll").indent(0);
    let mut fact = |name: &str, value: String| table.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    let path = &finished.output;
    fact("data set", if finished.already_done { format!("{path} (was complete already)") } else { path.clone() });
    let (read, skipped) = input_summary(&finished.input);
    fact("input", read);
    if let Some(sources) = sources_summary(&finished.input.sources) {
        fact("sources", sources);
    }
    fact("skipped", skipped);
    if let Some(dropped) = dropped_summary(&finished.input) {
        fact("dropped", dropped);
    }
    fact("sequences", units::count(finished.rows));
    fact("tokens", units::count(finished.tokens));
    let size = units::bytes(finished.bytes);
    match finished.tokens {
        0 => fact("size", size),
        tokens => fact("size", format!("{size}, {:.2} bytes per token", finished.bytes as f64 / tokens as f64)),
    }
    let tokens = if teacher { run.teacher_tokens } else { run.tokens };
    if !finished.already_done {
        let time = match finished.seconds {
            short if short < 60.0 => format!("{short:.1} s"),
            long => units::clock(long),
        };
        match tokens as f64 / finished.seconds {
            speed if tokens > 0 && speed.is_finite() => {
                fact("time", format!("{time}, {} tokens/s in this run", units::count(speed as u64)));
            }
            _ => fact("time", time),
        }
    }
    let extraction = run.teacher_seconds + run.extract_seconds;
    if extraction > 0.0 {
        let share = units::share(run.extract_seconds / extraction);
        fact(
            "extraction",
            format!("{share} of it for log-probabilities, noise and top-k, the rest is the teacher's pass"),
        );
    }
    if run.devices > 0 && run.teacher_tokens > 0 && run.seconds > 0.0 {
        let share = |seconds: f64| units::share((seconds / (run.seconds * run.devices as f64)).min(1.0));
        let mut waited = format!("waited {} of the time for splits", share(run.device_idle_seconds));
        if let Some(stage) = run.most_awaited().filter(|_| run.device_idle_seconds > 0.0) {
            waited += &format!(" (most of all for {stage})");
        }
        if run.device_blocked_seconds > 0.0 {
            waited += &format!(", {} for the extraction", share(run.device_blocked_seconds));
        }
        fact(if run.devices == 1 { "device" } else { "devices" }, waited);
    }
    let mut page = Page::new();
    page.facts(table);
    page
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stillhouse_pipeline::events::StageProgress;

    use super::*;
    use crate::printer::tests::captured;

    fn finished() -> Event {
        Event::JobFinished {
            output: "out/demo".into(),
            job_hash: "0123456789abcdef".into(),
            rows: 1234,
            tokens: 1_263_616,
            bytes: 11_549_450,
            seconds: 125.0,
            already_done: false,
            went_in: InputCounts {
                sources: BTreeMap::new(),
                documents: 1502,
                dropped: [("gopher_quality.gopher_short_doc".to_owned(), 1_200), ("c4.curly_bracket".to_owned(), 7)]
                    .into(),
                empty_documents: 2,
                skipped: [("broken JSON".to_owned(), 3), ("null text".to_owned(), 1)].into(),
                text_tokens: 1_263_700,
                dropped_tokens: 84,
            },
        }
    }

    fn started() -> Event {
        Event::JobStarted {
            name: "demo".into(),
            output: "out/demo".into(),
            splits: 3,
            splits_done: 1,
            bytes_done: 3_000_000,
            input_bytes: 5_000_000,
            teacher: Some("gpt2, 124.4M parameters, f32 on cpu".into()),
            job_hash: "0123456789abcdef".into(),
        }
    }

    fn stage((name, awaited_seconds): (&str, f64)) -> StageProgress {
        StageProgress { name: name.into(), awaited_seconds, ..StageProgress::default() }
    }

    fn progress(seconds: f64) -> Event {
        let so_far = |per_second: f64| (seconds * per_second) as u64;
        Event::Progress(Progress {
            seconds,
            splits_done: 1,
            splits: 3,
            documents: so_far(15.0),
            text_bytes: so_far(25_000.0),
            tokens: so_far(6000.0),
            sequences: so_far(5.8),
            teacher_tokens: so_far(3000.0),
            teacher_seconds: 90.0,
            extract_seconds: 10.0,
            devices: 1,
            device_idle_seconds: 2.5,
            device_blocked_seconds: 8.0,
            stages: [("read", 0.3), ("tokenize", 1.9), ("extract", 0.0)].map(stage).to_vec(),
            ..Progress::default()
        })
    }

    #[test]
    fn the_summary_reports_what_was_made_and_how_fast() {
        let (printer, _, _) = captured();
        let watch = Watch::new(&printer, Mode::Quiet);
        assert!(watch.summary().is_none());
        for event in [started(), progress(100.0), finished()] {
            watch.event(&event);
        }
        insta::assert_snapshot!(watch.summary().unwrap().render(false), @r"
        data set    out/demo
        input       1,502 documents (2 without a token), 1,263,700 tokens, 84 of them dropped by packing
        skipped     4 records: 3 broken JSON, 1 null text
        dropped     1,207 documents: 7 c4.curly_bracket, 1,200 gopher_quality.gopher_short_doc
        sequences   1,234
        tokens      1,263,616
        size        11.5 MB, 9.14 bytes per token
        time        02:05, 2,400 tokens/s in this run
        extraction  10.0 % of it for log-probabilities, noise and top-k, the rest is the teacher's pass
        device      waited 2.5 % of the time for splits (most of all for tokenize), 8.0 % for the extraction
        ");
    }

    #[test]
    fn json_is_one_event_per_line() {
        let (printer, out, err) = captured();
        let watch = Watch::new(&printer, Mode::Json);
        for event in [started(), progress(1.0), finished()] {
            watch.event(&event);
        }
        let events: Vec<serde_json::Value> = out.text().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let names: Vec<&str> = events.iter().filter_map(|e| e["event"].as_str()).collect();
        assert_eq!(names, ["job_started", "progress", "job_finished"]);
        assert_eq!(events[1]["teacher_tokens"], 3000);
        assert_eq!(events[1]["device_blocked_seconds"], 8.0);
        assert_eq!(
            events[1]["stages"][1],
            json!({"name": "tokenize", "rows": 0, "busy_seconds": 0.0, "awaited_seconds": 1.9})
        );
        assert_eq!(err.text(), "");
    }

    #[test]
    fn a_stall_is_reported_with_where_each_split_stands() {
        use stillhouse_pipeline::events::{StageStatus, StalledSplit};
        let stage = |name: &str, rows, doing: &str| StageStatus { name: name.into(), rows, doing: doing.into() };
        let split = |split| StalledSplit {
            split: stillhouse_schemas::ids::SplitId(split),
            reads: "corpus.jsonl".into(),
            seconds: 130.0,
            stages: vec![stage("read", 2048, "waits for the stage after it"), stage("tokenize", 12, "is at work")],
        };
        let event = Event::Stalled { seconds: 125.0, at_work: 9, splits: vec![split(3), split(7)] };
        let (printer, _, err) = captured();
        let watch = Watch::new(&printer, Mode::Shown);
        watch.event(&event);
        watch.close();
        insta::assert_snapshot!(err.text(), @"[00:00] warning: nothing has moved for 2 minutes; split 3 (corpus.jsonl): read waits for the stage after it (2048 rows), tokenize is at work (12 rows); split 7 (corpus.jsonl): read waits for the stage after it (2048 rows), tokenize is at work (12 rows); and 7 more splits");
        let (printer, out, _) = captured();
        Watch::new(&printer, Mode::Json).event(&event);
        let reported: serde_json::Value = serde_json::from_str(&out.text()).unwrap();
        assert_eq!(
            (reported["event"].as_str(), reported["splits"][1]["stages"][0]["rows"].as_u64()),
            (Some("stalled"), Some(2048))
        );
    }

    #[test]
    fn log_lines_report_changes_and_counters_now_and_then() {
        let (printer, out, err) = captured();
        let watch = Watch::new(&printer, Mode::Shown);
        watch.event(&started());
        for tick in 0..80 {
            watch.event(&progress(f64::from(tick) * 0.25));
        }
        watch.event(&finished());
        watch.close();
        assert_eq!(out.text(), "");
        insta::assert_snapshot!(err.text(), @r"
        [00:00] demo: 3 splits, 1 of them done before, teacher gpt2, 124.4M parameters, f32 on cpu, to out/demo
        [00:00] 1 of 3 splits, 75 documents, 30,000 tokens, 15,000 by the teacher, 3,000 tokens/s, 06:35 left
        [00:00] 1 of 3 splits, 150 documents, 60,000 tokens, 30,000 by the teacher, 3,000 tokens/s, 06:30 left
        [00:00] 1 of 3 splits, 225 documents, 90,000 tokens, 45,000 by the teacher, 3,000 tokens/s, 06:25 left
        [00:00] done
        ");
    }
}
