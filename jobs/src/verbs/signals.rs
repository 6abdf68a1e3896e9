//! Being told to stop: Ctrl-C, and what a system or a cluster sends before it kills.

use std::future::Future;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::Failure;
use crate::printer::Printer;

/// Which signal told the program to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// SIGINT, Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
}

impl Told {
    /// The exit code that a shell would give for a program that the signal ended.
    pub fn code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// Works until it is done, the program is told to stop, or nobody reads its output any more. `how_to_go_on` is said after a signal.
pub async fn until_told<T>(
    printer: &Printer,
    how_to_go_on: impl FnOnce() -> String,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut signals = Signals::catch().map_err(|e| Failure::System(format!("no signals: {e}")))?;
    tokio::select! {
        biased;
        result = work => result,
        told = signals.told() => Err(Failure::Interrupted(told, how_to_go_on())),
        () = printer.closed() => Err(Failure::Told),
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
    pub async fn told(&mut self) -> Told {
        tokio::select! {
            _ = self.interrupt.recv() => Told::Interrupt,
            _ = self.terminate.recv() => Told::Terminate,
        }
    }
}
