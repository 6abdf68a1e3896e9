//! Progress as bars: splits, documents, tokens, and the tokens that the teacher has processed, with rate and time left.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use stillhouse_pipeline::events::{Event, Progress, format_stall};

use super::copies::{Copied, Copies};
use super::lock;
use super::ticker::{SPINNER_DELAY, Ticker};
use crate::page::escaped;
use stillhouse_pipeline::progress_estimate::{Estimate, Estimator, RunStart};
use stillhouse_pipeline::units;

/// Steps of a bar that shows a fraction.
const BAR_STEPS: u64 = 1000;

/// Draws progress bars on stderr, limited to indicatif's draw rate.
pub struct Bars {
    state: Arc<Mutex<State>>,
    ticker: Ticker,
}

struct State {
    multi: MultiProgress,
    colour: bool,
    /// The current wait, and its start.
    preparing: Option<(String, Instant)>,
    spinner: Option<ProgressBar>,
    job: Option<Job>,
    copies: Option<(Copies, ProgressBar)>,
    /// Executors that were already shown.
    executors: BTreeSet<String>,
    closed: bool,
}

struct Job {
    estimator: Estimator,
    splits: ProgressBar,
    documents: ProgressBar,
    tokens: ProgressBar,
    teacher: Option<ProgressBar>,
}

impl Bars {
    pub fn new(multi: MultiProgress, colour: bool) -> Self {
        let executors = BTreeSet::new();
        let state =
            State { multi, colour, preparing: None, spinner: None, job: None, copies: None, executors, closed: false };
        let state = Arc::new(Mutex::new(state));
        let ticking = Arc::clone(&state);
        Self { ticker: Ticker::start(move || lock(&ticking).tick()), state }
    }

    pub fn event(&self, event: &Event) {
        lock(&self.state).event(event);
    }

    pub fn close(&self) {
        self.ticker.stop();
        let mut state = lock(&self.state);
        state.closed = true;
        state.clear();
    }
}

impl State {
    fn event(&mut self, event: &Event) {
        if self.closed {
            return;
        }
        match event {
            Event::Preparing { what } => {
                let what = escaped(what);
                if let Some(spinner) = &self.spinner {
                    spinner.set_message(what.clone());
                }
                let since = self.preparing.take().map_or_else(Instant::now, |(_, since)| since);
                self.preparing = Some((what, since));
            }
            Event::JobStarted { splits, splits_done, input_bytes, teacher, .. } => {
                self.clear();
                let start =
                    RunStart { splits_done: *splits_done, input_bytes: *input_bytes, teacher: teacher.is_some() };
                self.job = Some(Job::new(&self.multi, start, *splits, self.colour));
            }
            Event::Progress(progress) => {
                if let Some(job) = &mut self.job {
                    job.show(progress);
                }
            }
            Event::ExportStarted { bytes, .. } => {
                self.clear();
                let bar = ProgressBar::new(*bytes).with_style(style(BAR, self.colour)).with_prefix("export");
                self.copies = Some((Copies::new(), self.multi.add(bar)));
            }
            &Event::ExportProgress { files_done, files, bytes_done, bytes, bytes_there } => {
                if let Some((copies, bar)) = &self.copies {
                    bar.set_position(bytes_done);
                    bar.set_message(copies.text(&Copied { files_done, files, bytes_done, bytes, bytes_there }));
                }
            }
            Event::Warning { message } => {
                let _ = self.multi.println(format!("warning: {}", escaped(message)));
            }
            Event::Stalled { seconds, at_work, splits } => {
                let words = format_stall(*seconds, *at_work, splits);
                let _ = self.multi.println(format!("warning: {}", escaped(&words)));
            }
            Event::SplitStarted { split, executor: Some(executor), .. } => {
                // once per executor: a terminal has no space for each of many thousand splits
                if self.executors.insert(executor.clone()) {
                    let words = format!("executor {executor} is at work: split {}", split.0);
                    let _ = self.multi.println(escaped(&words));
                }
            }
            Event::SplitStarted { .. } | Event::SplitCommitted { .. } => {}
            Event::JobFinished { .. } => self.clear(),
        }
    }

    /// Shows a spinner if a wait lasts, and advances it.
    fn tick(&mut self) {
        if self.closed {
            return;
        }
        match (&self.spinner, &self.preparing) {
            (Some(spinner), _) => spinner.tick(),
            (None, Some((what, since))) if since.elapsed() >= SPINNER_DELAY => {
                let spinner = self.multi.add(ProgressBar::new_spinner().with_style(style(SPINNER, self.colour)));
                spinner.set_message(what.clone());
                self.spinner = Some(spinner);
            }
            _ => {}
        }
    }

    fn clear(&mut self) {
        self.preparing = None;
        if let Some(spinner) = self.spinner.take() {
            spinner.finish_and_clear();
        }
        if let Some((_, bar)) = self.copies.take() {
            bar.finish_and_clear();
        }
        if let Some(job) = self.job.take() {
            for bar in [Some(job.splits), Some(job.documents), Some(job.tokens), job.teacher].into_iter().flatten() {
                bar.finish_and_clear();
            }
        }
        // if this fails, the terminal is gone and a stale bar does no harm
        let _ = self.multi.clear();
    }
}

const SPINNER: &str = "{spinner:.cyan} {wide_msg} {elapsed:.dim}";
const BAR: &str = "{prefix:>9.dim} {bar:24.cyan/dim} {wide_msg}";
const COUNTER: &str = "{prefix:>9.dim} {wide_msg}";

impl Job {
    fn new(multi: &MultiProgress, start: RunStart, splits: u64, colour: bool) -> Self {
        let add = |template: &str, name: &'static str, length: u64| {
            let bar = ProgressBar::new(length).with_style(style(template, colour)).with_prefix(name);
            multi.add(bar)
        };
        let tokens = if start.teacher { COUNTER } else { BAR };
        let job = Self {
            estimator: Estimator::new(start),
            splits: add(BAR, "splits", splits),
            documents: add(COUNTER, "documents", 0),
            tokens: add(tokens, "tokens", BAR_STEPS),
            teacher: start.teacher.then(|| add(BAR, "teacher", BAR_STEPS)),
        };
        job.splits.set_position(start.splits_done);
        job
    }

    fn show(&mut self, now: &Progress) {
        let estimate = self.estimator.update(now);
        self.splits.set_position(now.splits_done);
        self.splits.set_message(format!("{} of {}", units::count(now.splits_done), units::count(now.splits)));
        self.documents.set_message(format!(
            "{}, {} of text",
            units::count(now.documents),
            units::bytes(now.text_bytes)
        ));
        let pace = pace(&estimate);
        let position = (estimate.fraction * BAR_STEPS as f64) as u64;
        let tokens = format!("{} in {}", units::count(now.tokens), units::counted(now.sequences, "sequence"));
        match &self.teacher {
            Some(teacher) => {
                self.tokens.set_message(tokens);
                teacher.set_position(position);
                teacher.set_message(format!("{} tokens{pace}", units::count(now.teacher_tokens)));
            }
            None => {
                self.tokens.set_position(position);
                self.tokens.set_message(tokens + &pace);
            }
        }
    }
}

/// ` · 1,234 tokens/s · 00:35 left`, without the parts that are unknown.
fn pace(estimate: &Estimate) -> String {
    let mut text = String::new();
    if let Some(rate) = estimate.tokens_per_second {
        text += &format!(" · {} tokens/s", units::count(rate.round() as u64));
    }
    if let Some(left) = estimate.seconds_left {
        text += &format!(" · {} left", units::clock(left));
    }
    text
}

fn style(template: &str, colour: bool) -> ProgressStyle {
    let plain = template.replace(".cyan/dim", "").replace(".cyan", "").replace(".dim", "");
    let template = if colour { template } else { &plain };
    // the templates are constants of this file, and a test parses each
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("━╸─")
}

#[cfg(test)]
mod tests {
    use indicatif::ProgressDrawTarget;

    use super::*;

    #[test]
    fn bars_show_counters_rate_and_time_left() {
        let start = RunStart { splits_done: 1, input_bytes: 4_000_000, teacher: true };
        let multi = MultiProgress::with_draw_target(ProgressDrawTarget::hidden());
        let mut job = Job::new(&multi, start, 4, true);
        for seconds in [0.0, 100.0] {
            let done = (seconds * 3000.0) as u64;
            job.show(&Progress {
                seconds,
                splits_done: 1,
                splits: 4,
                documents: done / 400,
                text_bytes: done * 8,
                tokens: done * 2,
                sequences: done / 512,
                teacher_tokens: done,
                ..Progress::default()
            });
        }
        let teacher = job.teacher.unwrap();
        assert_eq!(job.splits.message(), "1 of 4");
        assert_eq!(job.documents.message(), "750, 2.4 MB of text");
        assert_eq!(job.tokens.message(), "600,000 in 585 sequences");
        assert_eq!(teacher.message(), "300,000 tokens · 3,000 tokens/s · 03:53 left");
        assert_eq!((job.splits.position(), teacher.position()), (1, 300));
    }

    #[test]
    fn templates_are_sound() {
        for template in [BAR, COUNTER, SPINNER] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }

    #[test]
    fn a_wait_becomes_a_spinner_until_the_job_starts() {
        let bars = Bars::new(MultiProgress::with_draw_target(ProgressDrawTarget::hidden()), true);
        bars.event(&Event::Preparing { what: "loading\x1b[2J".into() });
        assert!(lock(&bars.state).spinner.is_none());
        std::thread::sleep(SPINNER_DELAY * 2);
        assert_eq!(lock(&bars.state).spinner.as_ref().unwrap().message(), "loading\\u{1b}[2J");
        bars.close();
        assert!(lock(&bars.state).spinner.is_none());
    }
}
