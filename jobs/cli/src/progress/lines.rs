//! Progress as log lines: every change of state, and the counters about every 5 s.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use stillhouse_pipeline::events::{Event, Progress, format_stall};

use super::copies::{Copied, Copies};
use super::lock;
use super::ticker::{SPINNER_DELAY, Ticker};
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use stillhouse_pipeline::progress_estimate::{Estimate, Estimator, RunStart};
use stillhouse_pipeline::units;

const COUNTER_INTERVAL: Duration = Duration::from_secs(5);

/// Writes log lines to stderr.
pub struct LogLines {
    state: Arc<Mutex<State>>,
    ticker: Ticker,
}

struct State {
    printer: Arc<Printer>,
    began: Instant,
    /// The current wait, and its start.
    preparing: Option<(String, Instant)>,
    last_printed: Option<Instant>,
    job: Option<(Estimator, bool, f64)>,
    /// The current export, and the time of its last line.
    copies: Option<(Copies, Instant)>,
    closed: bool,
}

impl LogLines {
    pub fn new(printer: &Arc<Printer>) -> Self {
        let state = Arc::new(Mutex::new(State {
            printer: Arc::clone(printer),
            began: Instant::now(),
            preparing: None,
            last_printed: None,
            job: None,
            copies: None,
            closed: false,
        }));
        let ticking = Arc::clone(&state);
        Self { ticker: Ticker::start(move || lock(&ticking).tick()), state }
    }

    pub fn event(&self, event: &Event) {
        lock(&self.state).event(event);
    }

    pub fn close(&self) {
        self.ticker.stop();
        lock(&self.state).closed = true;
    }
}

impl State {
    fn event(&mut self, event: &Event) {
        if self.closed {
            return;
        }
        match event {
            Event::Preparing { what } => {
                let since = self.preparing.take().map_or_else(Instant::now, |(_, since)| since);
                self.preparing = Some((what.clone(), since));
            }
            Event::JobStarted { name, output, splits, splits_done, input_bytes, teacher, .. } => {
                self.preparing = None;
                let start =
                    RunStart { splits_done: *splits_done, input_bytes: *input_bytes, teacher: teacher.is_some() };
                self.job = Some((Estimator::new(start), start.teacher, 0.0));
                let resumed = match splits_done {
                    0 => String::new(),
                    n => format!(", {} of them done before", units::count(*n)),
                };
                let with = teacher.as_ref().map_or(String::new(), |t| format!(", teacher {t}"));
                self.print_line(&format!("{name}: {}{resumed}{with}, to {output}", units::counted(*splits, "split")));
            }
            Event::Warning { message } => self.print_line(&format!("warning: {message}")),
            Event::Stalled { seconds, at_work, splits } => {
                self.print_line(&format!("warning: {}", format_stall(*seconds, *at_work, splits)));
            }
            Event::SplitStarted { split, executor: Some(executor), .. } => {
                self.print_line(&format!("split {} is made by {executor}", split.0));
            }
            Event::SplitStarted { .. } => {}
            Event::SplitCommitted { shard, rows, tokens, bytes, .. } => self.print_line(&format!(
                "{shard}: {}, {}, {}",
                units::counted(*rows, "sequence"),
                units::counted(*tokens, "token"),
                units::bytes(*bytes)
            )),
            Event::Progress(progress) => self.counters(progress),
            Event::ExportStarted { destination, files, bytes } => {
                self.preparing = None;
                self.copies = Some((Copies::new(), Instant::now()));
                let (files, bytes) = (units::counted(*files, "file"), units::bytes(*bytes));
                self.print_line(&format!("export: {files}, {bytes}, to {destination}"));
            }
            &Event::ExportProgress { files_done, files, bytes_done, bytes, bytes_there } => {
                let Some((copies, last_printed)) = &mut self.copies else { return };
                if last_printed.elapsed() >= COUNTER_INTERVAL {
                    *last_printed = Instant::now();
                    let text = copies.text(&Copied { files_done, files, bytes_done, bytes, bytes_there });
                    self.print_line(&text);
                }
            }
            Event::JobFinished { .. } => self.print_line("done"),
        }
    }

    fn counters(&mut self, now: &Progress) {
        let Some((estimator, teacher, last_printed)) = &mut self.job else {
            return;
        };
        let estimate = estimator.update(now);
        if now.seconds - *last_printed < COUNTER_INTERVAL.as_secs_f64() {
            return;
        }
        *last_printed = now.seconds;
        let text = counters(now, &estimate, *teacher);
        self.print_line(&text);
    }

    fn tick(&mut self) {
        let quiet = self.last_printed.is_none_or(|t| t.elapsed() >= COUNTER_INTERVAL);
        if let Some((what, _)) = self.preparing.take_if(|(_, since)| quiet && since.elapsed() >= SPINNER_DELAY) {
            self.print_line(&what);
        }
    }

    fn print_line(&mut self, text: &str) {
        if self.closed {
            return;
        }
        self.last_printed = Some(Instant::now());
        let clock = units::clock(self.began.elapsed().as_secs_f64());
        let mut page = Page::new();
        page.line(Line::new().with(Tone::Dim, format!("[{clock}]")).with(Tone::Plain, format!(" {text}")));
        self.printer.note(&page);
    }
}

fn counters(now: &Progress, estimate: &Estimate, teacher: bool) -> String {
    let mut text = format!(
        "{} of {}, {}, {}",
        units::count(now.splits_done),
        units::counted(now.splits, "split"),
        units::counted(now.documents, "document"),
        units::counted(now.tokens, "token"),
    );
    if teacher {
        text += &format!(", {} by the teacher", units::count(now.teacher_tokens));
    }
    if let Some(rate) = estimate.tokens_per_second {
        text += &format!(", {} tokens/s", units::count(rate.round() as u64));
    }
    if let Some(left) = estimate.seconds_left {
        text += &format!(", {} left", units::clock(left));
    }
    text
}
