//! Being told to stop: Ctrl-C, and what a system or a cluster sends before it kills.

use std::future::Future;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::Failure;
use crate::printer::Printer;

/// Which signal told the program to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGINT, Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
}

impl StopSignal {
    /// The exit code that a shell would give for a program that the signal ended.
    pub fn code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// Works until it is done, the program is told to stop, or nobody reads its output any more. `how_to_go_on` is said after a signal.
pub async fn until_signalled<T>(
    printer: &Printer,
    how_to_go_on: impl FnOnce() -> String,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut signals = Signals::catch().map_err(|e| Failure::System(format!("no signals: {e}")))?;
    tokio::select! {
        biased;
        result = work => result,
        signal = signals.received() => Err(Failure::Interrupted(signal, how_to_go_on())),
        () = printer.closed() => Err(Failure::Reported),
    }
}

/// Both signals, caught from the moment that this is made.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Catches them; needs a runtime.
    pub fn catch() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Ends with the first that comes.
    pub async fn received(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.interrupt.recv() => StopSignal::Interrupt,
            _ = self.terminate.recv() => StopSignal::Terminate,
        }
    }
}
