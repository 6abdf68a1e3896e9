//! The verbs, one file each: options, the call into the pipeline, and what is shown.

pub mod completions;
pub mod inspect;
pub mod plan;
pub mod run;
pub mod schema;
pub mod verify;

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::cli::Failure;
use crate::page::{Line, Page};
use crate::printer::Printer;

/// How much of the machine to use.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Threads {
    /// Threads to compute with [default: one per processor]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
}

impl Threads {
    /// Sets the size of rayon's pool (tokenizer, noise, teacher) and gives a runtime of as many workers.
    pub fn runtime(self) -> Result<Runtime, Failure> {
        let system = |e: &dyn std::fmt::Display| Failure::System(format!("cannot start threads: {e}"));
        let mut runtime = Builder::new_multi_thread();
        if let Some(n) = self.threads {
            rayon::ThreadPoolBuilder::new().num_threads(n.get()).build_global().map_err(|e| system(&e))?;
            runtime.worker_threads(n.get());
        }
        runtime.enable_all().build().map_err(|e| system(&e))
    }
}

/// Sends log records to stderr, past the progress bars.
pub fn log_to(printer: &Arc<Printer>) {
    let filter = EnvFilter::try_from_env("STILLHOUSE_LOG").unwrap_or_else(|_| EnvFilter::new("error"));
    // Fails only where a subscriber is set already, which is as good.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(LogWriter(Arc::clone(printer)))
        .try_init();
}

struct LogWriter(Arc<Printer>);

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = LogLine<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        LogLine(&self.0)
    }
}

struct LogLine<'a>(&'a Printer);

impl io::Write for LogLine<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut page = Page::new();
        for text in String::from_utf8_lossy(bytes).lines() {
            page.line(Line::plain(text));
        }
        self.0.note(&page);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
