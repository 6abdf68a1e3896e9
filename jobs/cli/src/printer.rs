//! All output to stdout and stderr.
//!
//! ```text
//!   results, JSON   ─► stdout      a closed pipe is an error that ends the program quietly
//!   errors, logs    ─► stderr      progress bars are drawn there too, and are hidden while anything is written
//! ```

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use clap::ValueEnum;
use indicatif::{MultiProgress, ProgressDrawTarget};
use serde::Serialize;
use tokio::sync::Notify;

use crate::page::{Line, Page, Tone, View};

/// When to use colours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Maximum width of a page: longer lines are hard to read.
const MAX_WIDTH: usize = 140;
/// Width without a terminal.
const DEFAULT_WIDTH: usize = 100;

/// Writes pages, JSON and errors, and keeps them from mixing with progress bars.
pub struct Printer {
    out: Mutex<Stream>,
    err: Mutex<Stream>,
    width: usize,
    terminal: bool,
    bars: Option<MultiProgress>,
    closed: Notify,
}

struct Stream {
    to: Box<dyn Write + Send>,
    colour: bool,
}

impl Printer {
    /// Creates the printer of this process.
    pub fn new(color: Color) -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        let dumb = variable("TERM").is_some_and(|t| t == "dumb");
        let plain = dumb || variable("NO_COLOR").is_some();
        let colour = |terminal: bool| match color {
            Color::Auto => terminal && !plain,
            Color::Always => true,
            Color::Never => false,
        };
        let (out, err) = (io::stdout(), io::stderr());
        let width = terminal_size::terminal_size_of(&out).map_or(DEFAULT_WIDTH, |(w, _)| usize::from(w.0));
        Self {
            width,
            terminal: out.is_terminal(),
            bars: (err.is_terminal() && !dumb).then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr())),
            closed: Notify::new(),
            out: Mutex::new(Stream { colour: colour(out.is_terminal()), to: Box::new(out) }),
            err: Mutex::new(Stream { colour: colour(err.is_terminal()), to: Box::new(err) }),
        }
    }

    /// Creates a printer that writes to memory.
    #[cfg(test)]
    pub fn into(out: Box<dyn Write + Send>, err: Box<dyn Write + Send>) -> Self {
        let stream = |to| Mutex::new(Stream { to, colour: false });
        Self {
            out: stream(out),
            err: stream(err),
            width: DEFAULT_WIDTH,
            terminal: false,
            bars: None,
            closed: Notify::new(),
        }
    }

    /// Size and capabilities of stdout for a page.
    pub fn view(&self) -> View {
        let colour = self.out.lock().unwrap_or_else(PoisonError::into_inner).colour;
        View { width: self.width.clamp(40, MAX_WIDTH), terminal: self.terminal, colour }
    }

    /// The progress bars; `None` if stderr is not a terminal.
    pub fn bars(&self) -> Option<&MultiProgress> {
        self.bars.as_ref()
    }

    /// Whether bars may have colours.
    pub fn colour_of_bars(&self) -> bool {
        self.err.lock().unwrap_or_else(PoisonError::into_inner).colour
    }

    /// Completes when stdout is found closed.
    pub async fn closed(&self) {
        self.closed.notified().await;
    }

    /// Writes a page to stdout.
    pub fn page(&self, page: &Page) -> io::Result<()> {
        self.write(&self.out, |colour| page.render(colour))
    }

    /// Writes our own text to stdout unescaped: help, completion scripts.
    pub fn text(&self, text: &str) -> io::Result<()> {
        self.write(&self.out, |_| text.to_owned())
    }

    /// Writes clap's help with or without colours.
    pub fn help(&self, error: &clap::Error) -> io::Result<()> {
        let to = if error.use_stderr() { &self.err } else { &self.out };
        self.write(to, |colour| match colour {
            true => error.render().ansi().to_string(),
            false => error.render().to_string(),
        })
    }

    /// Writes a value as one line of JSON to stdout.
    pub fn json_line(&self, value: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string(value)?;
        self.write(&self.out, |_| ascii_controls(&text) + "\n")
    }

    /// Writes a value as indented JSON to stdout.
    pub fn json(&self, value: &impl Serialize) -> io::Result<()> {
        let text = serde_json::to_string_pretty(value)?;
        self.write(&self.out, |_| ascii_controls(&text) + "\n")
    }

    /// Writes lines to stderr. Ignores a closed stderr, since no other place could report it.
    pub fn note(&self, page: &Page) {
        let _ = self.write(&self.err, |colour| page.render(colour));
    }

    /// Writes `error: …` to stderr, then further lines unchanged.
    pub fn error(&self, message: impl fmt::Display) {
        let message = message.to_string();
        let mut page = Page::new();
        for (i, text) in message.lines().enumerate() {
            let mut line = Line::new();
            if i == 0 {
                line.push(Tone::Bad, "error:");
                line.push(Tone::Plain, " ");
            }
            line.push(Tone::Plain, text);
            page.line(line);
        }
        self.note(&page);
    }

    fn write(&self, stream: &Mutex<Stream>, text: impl FnOnce(bool) -> String) -> io::Result<()> {
        let go = || {
            let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
            let text = text(stream.colour);
            stream.to.write_all(text.as_bytes())?;
            stream.to.flush()
        };
        let written = match &self.bars {
            Some(bars) => bars.suspend(go),
            None => go(),
        };
        if matches!(&written, Err(e) if e.kind() == io::ErrorKind::BrokenPipe) {
            self.closed.notify_one();
        }
        written
    }
}

/// Escapes the control characters that serde leaves in JSON (DEL, C1), and characters that change the direction of
/// text. xterm takes U+009B as the start of a command.
fn ascii_controls(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
pub mod tests {
    use std::sync::Arc;

    use super::*;

    /// The bytes that a printer wrote.
    #[derive(Clone, Default)]
    pub struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Captured {
        pub fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    pub fn captured() -> (Arc<Printer>, Captured, Captured) {
        let (out, err) = (Captured::default(), Captured::default());
        (Arc::new(Printer::into(Box::new(out.clone()), Box::new(err.clone()))), out, err)
    }

    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn errors_go_to_stderr_line_by_line() {
        let (printer, out, err) = captured();
        printer.error("the job file has 1 problem\n  name: got \x1b[2J: bad");
        assert_eq!(out.text(), "");
        assert_eq!(err.text(), "error: the job file has 1 problem\n  name: got \\u{1b}[2J: bad\n");
    }

    #[test]
    fn json_is_safe_to_show_and_still_the_same_value() {
        let (printer, out, _) = captured();
        printer.json_line(&"\x1b\u{9b}2J\u{202e}é").unwrap();
        assert_eq!(out.text(), "\"\\u001b\\u009b2J\\u202eé\"\n");
        assert_eq!(serde_json::from_str::<String>(&out.text()).unwrap(), "\x1b\u{9b}2J\u{202e}é");
    }

    #[tokio::test]
    async fn a_closed_stdout_is_reported() {
        let printer = Printer::into(Box::new(Gone), Box::new(Gone));
        assert_eq!(printer.text("x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        printer.closed().await;
    }
}
