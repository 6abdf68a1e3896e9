//! `stillhouse jobs …`: lists, shows and controls the jobs of a service.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::Arc;

use clap::Subcommand;
use serde_json::Value;
use stillhouse_pipeline::events::InputCounts;
use stillhouse_pipeline::storage::classify_no_response;

use crate::failure::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::progress::{Mode, dropped_summary, input_summary};
use crate::table::Table;
use crate::verbs::submit;
use stillhouse_pipeline::units;
use stillhouse_service::client::{ApiRequest, Client, ServiceOptions, StreamItem, render_problem};
use stillhouse_service::model::{EventType, EventView, Job, JobId, JobState, ProgressView, ResultView, Time};

const EXAMPLES: &str = "\
Examples:
  stillhouse jobs list --state running,queued
  stillhouse jobs show k3v9                        the beginning of an id is enough
  stillhouse jobs watch k3v9                       progress, as `submit` shows it
  stillhouse jobs watch                            every change of every job
  stillhouse jobs logs -f k3v9
  stillhouse jobs cancel k3v9
  stillhouse jobs list --json | jq -r '.jobs[] | select(.state == \"failed\") | .id'";

/// List, show, watch, cancel, retry and delete the jobs of a service
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
    /// Write JSON to stdout
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    service: ServiceOptions,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List jobs, newest first
    List {
        /// States, separated by commas: queued, running, cancelling, retrying, succeeded, failed, cancelled
        #[arg(long, value_name = "STATES")]
        state: Option<String>,
        /// Jobs of this user
        #[arg(long, value_name = "NAME")]
        user: Option<String>,
        /// Jobs of this name
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Number of jobs to list
        #[arg(long, value_name = "N", default_value_t = 50)]
        limit: u32,
        /// `next_cursor` of an earlier list
        #[arg(long, value_name = "TEXT")]
        cursor: Option<String>,
    },
    /// Show one job: state, progress, failure, result
    Show(One),
    /// Watch one job until it ends, or every change of all jobs
    Watch {
        /// Id of the job, or the beginning of it
        #[arg(value_name = "ID")]
        id: Option<String>,
    },
    /// Print the log of a job
    Logs {
        #[command(flatten)]
        one: One,
        /// Continue until the job ends
        #[arg(long, short)]
        follow: bool,
        /// Print only this number of the last lines
        #[arg(long, value_name = "LINES")]
        tail: Option<u32>,
    },
    /// Print the events of a job
    Events {
        #[command(flatten)]
        one: One,
        /// Continue until the job ends
        #[arg(long, short)]
        follow: bool,
    },
    /// Print the job file exactly as submitted
    File(One),
    /// Print the manifest of a job's data set
    Manifest(One),
    /// Print a report of a job's data set as JSON: totals, statistics, one decoded row
    Report {
        #[command(flatten)]
        one: One,
        /// The row to decode
        #[arg(long, value_name = "N", default_value_t = 0)]
        row: u64,
    },
    /// Stop a job; committed shards stay
    Cancel(One),
    /// Queue a failed or cancelled job again; it resumes
    Retry(One),
    /// Delete a job that has ended; its data set stays
    Delete(One),
}

#[derive(Debug, clap::Args)]
struct One {
    /// Id of the job, or the beginning of it
    #[arg(value_name = "ID")]
    id: String,
}

impl Args {
    pub fn json(&self) -> bool {
        self.json
    }
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let client = args.service.client()?;
    let find = |one: &One| find(&client, &one.id);
    match &args.verb {
        Verb::List { state, user, name, limit, cursor } => {
            let request = ApiRequest::new("GET", "/jobs")
                .with("state", state.as_ref())
                .with("user", user.as_ref())
                .with("name", name.as_ref())
                .with("limit", Some(limit))
                .with("cursor", cursor.as_ref());
            list(&client, &request, args.json, printer)
        }
        Verb::Show(one) => {
            show(&client.json(&ApiRequest::new("GET", format!("/jobs/{}", find(one)?)))?, args.json, printer)
        }
        Verb::Watch { id: Some(id) } => {
            let mode = if args.json { Mode::Json } else { Mode::Shown };
            submit::watch(&client, &self::find(&client, id)?, mode, printer)
        }
        Verb::Watch { id: None } => watch_all(&client, args.json, printer),
        Verb::Logs { one, follow, tail } => {
            let request = ApiRequest::new("GET", format!("/jobs/{}/logs", find(one)?))
                .with("follow", Some(true).filter(|_| *follow))
                .with("tail", tail.as_ref());
            logs(&client, request, *follow)
        }
        Verb::Events { one, follow } => events(&client, &find(one)?, *follow, args.json, printer),
        Verb::File(one) => {
            Ok(printer
                .text(&with_newline(client.text(&ApiRequest::new("GET", format!("/jobs/{}/file", find(one)?)))?))?)
        }
        Verb::Manifest(one) => {
            document(&client, ApiRequest::new("GET", format!("/jobs/{}/manifest", find(one)?)), printer)
        }
        Verb::Report { one, row } => document(
            &client,
            ApiRequest::new("GET", format!("/jobs/{}/report", find(one)?)).with("row", Some(row)),
            printer,
        ),
        Verb::Cancel(one) => change(&client, "cancel", &find(one)?, args.json, printer),
        Verb::Retry(one) => change(&client, "retry", &find(one)?, args.json, printer),
        Verb::Delete(one) => {
            let id = find(one)?;
            client.text(&ApiRequest::new("DELETE", format!("/jobs/{id}")))?;
            print_note(printer, &format!("job {id} is forgotten; its data set stays"));
            Ok(())
        }
    }
}

const ID_LENGTH: usize = 12;

/// Finds a job by its id or the start of one.
fn find(client: &Client, text: &str) -> Result<JobId, Failure> {
    if text.len() == ID_LENGTH
        && let Ok(id) = text.parse()
    {
        return Ok(id);
    }
    let valid =
        (1..ID_LENGTH).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if !valid {
        return Err(Failure::Usage(format!("{text:?} is no id of a job; `stillhouse jobs list` lists them")));
    }
    let mut found: Vec<JobId> = Vec::new();
    let mut cursor: Option<String> = None;
    loop {
        let request = ApiRequest::new("GET", "/jobs").with("limit", Some(500)).with("cursor", cursor.as_ref());
        let page: Jobs = client.json(&request)?;
        found.extend(page.jobs.into_iter().map(|j| j.id).filter(|id| id.as_str().starts_with(text)));
        cursor = page.next_cursor;
        if cursor.is_none() || found.len() > 1 {
            break;
        }
    }
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Failure::Usage(format!("there is no job whose id begins with {text}"))),
        [first, second, ..] => {
            Err(Failure::Usage(format!("{text} begins the ids of more than one job: {first}, {second}, …")))
        }
    }
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Jobs {
    jobs: Vec<Job>,
    next_cursor: Option<String>,
}

fn tone(state: JobState) -> Tone {
    match state {
        JobState::Succeeded => Tone::Good,
        JobState::Failed => Tone::Bad,
        JobState::Running | JobState::Cancelling | JobState::Retrying => Tone::Accent,
        JobState::Queued | JobState::Cancelled => Tone::Dim,
    }
}

fn list(client: &Client, request: &ApiRequest<'_>, json: bool, printer: &Printer) -> Result<(), Failure> {
    let page: Jobs = client.json(request)?;
    if json {
        return Ok(printer.json(&page)?);
    }
    if page.jobs.is_empty() {
        print_note(printer, "no jobs");
        return Ok(());
    }
    let mut table =
        Table::new("llllrrr").header(&["id", "state", "name", "user", "splits", "tokens/s", "age"]).indent(0);
    for job in &page.jobs {
        let progress = job.progress.as_ref();
        let running = job.state == JobState::Running;
        table.row([
            Line::plain(job.id.as_str()),
            Line::new().with(tone(job.state), job.state.name()),
            Line::plain(&job.name),
            Line::plain(&job.user),
            Line::plain(progress.map_or(String::new(), |p| format!("{}/{}", p.splits_done, p.splits))),
            Line::plain(
                progress.filter(|_| running).map_or(String::new(), |p| units::count(p.tokens_per_second as u64)),
            ),
            Line::plain(units::clock(Time::now().seconds_since(job.created_at))),
        ]);
    }
    let mut shown = Page::new();
    shown.table(table, printer.view());
    printer.page(&shown)?;
    if let Some(cursor) = page.next_cursor {
        print_note(printer, &format!("there are older ones: --cursor {cursor}"));
    }
    Ok(())
}

fn show(job: &Job, json: bool, printer: &Printer) -> Result<(), Failure> {
    if json {
        return Ok(printer.json(job)?);
    }
    printer.page(&view(job))?;
    Ok(())
}

fn view(job: &Job) -> Page {
    let mut table = Table::new("ll").indent(0);
    let mut fact = |name: &str, value: Line| table.row([Line::new().with(Tone::Dim, name), value]);
    fact("job", Line::plain(format!("{} ({})", job.id, job.name)));
    let reason = job.reason.as_ref().map_or(String::new(), |r| format!(": {r}"));
    let place = job.queue_position.map_or(String::new(), |n| format!(", number {n} in the queue"));
    fact("state", Line::new().with(tone(job.state), job.state.name()).with(Tone::Plain, format!("{reason}{place}")));
    fact("user", Line::plain(format!("{}, priority {}", job.user, job.priority)));
    fact("attempt", Line::plain(format!("{}, {} of {} failed", job.attempt, job.failures, job.max_attempts)));
    for (name, time) in [
        ("submitted", Some(job.created_at)),
        ("started", job.started_at),
        ("finished", job.finished_at),
        ("next attempt", job.not_before),
    ] {
        if let Some(time) = time {
            fact(name, Line::plain(time.to_string()));
        }
    }
    fact("output", Line::plain(&job.output));
    if let Some(teacher) = &job.teacher {
        fact("teacher", Line::plain(teacher));
    }
    let of_progress = job.progress.as_ref().map(progress_facts).unwrap_or_default();
    let of_result = job.result.as_ref().map(result_facts).unwrap_or_default();
    for (name, text) in of_progress.into_iter().chain(of_result) {
        fact(name, Line::plain(text));
    }
    let mut page = Page::new();
    page.facts(table);
    if let Some(failure) = &job.failure {
        page.heading("failure");
        let lines = if failure.problems.is_empty() {
            failure.message.lines().map(str::to_owned).collect()
        } else {
            failure.problems.iter().map(render_problem).collect::<Vec<_>>()
        };
        lines.iter().for_each(|line| page.line(Line::plain(format!("  {line}"))));
    }
    page
}

/// Progress of a job, as names and values.
fn progress_facts(p: &ProgressView) -> Vec<(&'static str, String)> {
    let left = p.seconds_left.map_or(String::new(), |s| format!(", {} left", units::clock(s)));
    let (tokens, rate) = (units::count(p.tokens), units::count(p.tokens_per_second as u64));
    vec![
        ("splits", format!("{} of {}", units::count(p.splits_done), units::count(p.splits))),
        ("tokens", format!("{tokens} in this attempt, {rate} tokens/s{left}")),
    ]
}

/// Result and input of a finished job, as names and values.
fn result_facts(result: &ResultView) -> Vec<(&'static str, String)> {
    let each = result.bytes as f64 / result.tokens.max(1) as f64;
    let (rows, tokens) = (units::counted(result.rows, "sequence"), units::counted(result.tokens, "token"));
    let counts = InputCounts {
        documents: result.documents,
        dropped: result.dropped.clone(),
        sources: BTreeMap::new(),
        empty_documents: result.empty_documents,
        skipped: result.skipped.clone(),
        text_tokens: result.text_tokens,
        dropped_tokens: result.dropped_tokens,
    };
    let (read, skipped) = input_summary(&counts);
    let made = format!("{rows}, {tokens}, {}, {each:.2} bytes per token", units::bytes(result.bytes));
    let mut facts = vec![("result", made), ("input", read), ("skipped", skipped)];
    facts.extend(dropped_summary(&counts).map(|dropped| ("dropped", dropped)));
    facts
}

fn change(client: &Client, what: &str, id: &JobId, json: bool, printer: &Printer) -> Result<(), Failure> {
    let job: Job = client.json(&ApiRequest::new("POST", format!("/jobs/{id}/{what}")))?;
    if json {
        return Ok(printer.json(&job)?);
    }
    print_note(printer, &format!("job {id} is {}", job.state));
    Ok(())
}

fn document(client: &Client, request: ApiRequest<'_>, printer: &Printer) -> Result<(), Failure> {
    let value: Value = client.json(&request)?;
    Ok(printer.json(&value)?)
}

fn print_note(printer: &Printer, text: &str) {
    let mut page = Page::new();
    page.line(Line::plain(text));
    printer.note(&page);
}

fn with_newline(text: String) -> String {
    if text.ends_with('\n') { text } else { text + "\n" }
}

/// Copies the log as it arrives. The service has escaped control characters.
fn logs(client: &Client, request: ApiRequest<'_>, follow: bool) -> Result<(), Failure> {
    let request = if follow { request.header("accept", "text/plain, text/event-stream") } else { request };
    let mut body = client.stream(&request)?;
    let mut out = std::io::stdout().lock();
    let mut piece = vec![0; 64 << 10];
    loop {
        let n = body
            .read(&mut piece)
            .map_err(|e| Failure::System(format!("the log broke off: {}", classify_no_response(&e).1)))?;
        if n == 0 {
            return Ok(());
        }
        out.write_all(&piece[..n])?;
        out.flush()?;
    }
}

fn line(event: &EventView) -> Line {
    let mut line = Line::new().with(Tone::Dim, format!("{} {} ", event.time, event.job));
    let text = |key: &str| event.data.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    match event.kind {
        EventType::State => {
            let state: Option<JobState> = text("to").parse().ok();
            line.push(state.map_or(Tone::Plain, tone), text("to"));
            if !text("reason").is_empty() {
                line.push(Tone::Plain, format!(": {}", text("reason")));
            }
        }
        kind => {
            let fields = event.data.as_object().into_iter().flatten().filter(|(_, v)| !v.is_null());
            let fields: Vec<String> =
                fields.map(|(k, v)| format!("{k} {}", stillhouse_service::client::display_text(v))).collect();
            line.push(Tone::Plain, format!("{}: {}", kind.name(), fields.join(", ")));
        }
    }
    line
}

fn print_event(event: &EventView, json: bool, printer: &Printer) -> Result<(), Failure> {
    if json {
        return Ok(printer.json_line(event)?);
    }
    let mut page = Page::new();
    page.line(line(event));
    Ok(printer.page(&page)?)
}

fn events(client: &Client, id: &JobId, follow: bool, json: bool, printer: &Printer) -> Result<(), Failure> {
    #[derive(serde::Deserialize)]
    struct List {
        events: Vec<EventView>,
        next_after: Option<i64>,
    }
    let path = format!("/jobs/{id}/events");
    if follow {
        return client.follow(&path, false, |followed| match followed {
            StreamItem::Open => Ok(()),
            StreamItem::Event(event) if event.kind == EventType::Progress => Ok(()),
            StreamItem::Event(event) => print_event(event, json, printer),
            StreamItem::Note(text) => {
                print_note(printer, text);
                Ok(())
            }
        });
    }
    let mut after = None;
    loop {
        let list: List = client.json(&ApiRequest::new("GET", path.clone()).with("after", after))?;
        list.events.iter().try_for_each(|event| print_event(event, json, printer))?;
        after = list.next_after;
        if after.is_none() {
            return Ok(());
        }
    }
}

fn watch_all(client: &Client, json: bool, printer: &Printer) -> Result<(), Failure> {
    client.follow("/events", false, |followed| match followed {
        StreamItem::Event(event) if event.kind == EventType::State => print_event(event, json, printer),
        StreamItem::Event(_) => Ok(()),
        StreamItem::Open => {
            print_note(printer, "every change of state, until Ctrl-C");
            Ok(())
        }
        StreamItem::Note(text) => {
            print_note(printer, text);
            Ok(())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::tests::captured;

    #[test]
    fn a_failed_job_is_shown_with_every_problem() {
        let job: Job = serde_json::from_value(serde_json::json!({
            "id": "k3v9x0m2t8qa", "name": "demo", "state": "failed", "user": "ada", "priority": 5, "device": "cpu", "gpu": null,
            "created_at": "2026-01-01T00:00:00.000Z", "updated_at": "2026-01-01T00:00:09.000Z", "started_at": "2026-01-01T00:00:01.000Z",
            "finished_at": "2026-01-01T00:00:09.000Z", "not_before": null, "queue_position": null, "attempt": 1, "failures": 1,
            "max_attempts": 3, "time_limit_seconds": 60, "output_limit_bytes": 1000, "overwrite": false, "output": "/out",
            "reason": "the job file has 1 problem", "teacher": null, "progress": null, "result": null,
            "failure": {"kind": "job", "message": "the job file has 1 problem", "problems": [
                {"field": "input.paths[0]", "got": "\"a\u{1b}[2J\"", "message": "no such file or folder"}]}
        })).unwrap();
        let (printer, out, _) = captured();
        show(&job, false, &printer).unwrap();
        insta::assert_snapshot!(out.text(), @r#"
        job        k3v9x0m2t8qa (demo)
        state      failed: the job file has 1 problem
        user       ada, priority 5
        attempt    1, 1 of 3 failed
        submitted  2026-01-01T00:00:00.000Z
        started    2026-01-01T00:00:01.000Z
        finished   2026-01-01T00:00:09.000Z
        output     /out

        failure
          input.paths[0]: got "a\u{1b}[2J": no such file or folder
        "#);
    }
}
