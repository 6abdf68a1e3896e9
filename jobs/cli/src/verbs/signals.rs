//! Being told to stop: Ctrl-C, and what a system or a cluster sends before it kills.

use std::future::Future;
use std::io;
use std::time::Duration;

use stillhouse_pipeline::run::Stop;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::Failure;
use crate::printer::Printer;

/// How long work is waited for that was told to stop.
const PATIENCE: Duration = Duration::from_secs(5);

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

/// The same for work that has something to call back or to give free when it is told to stop: it is told, and waited for a while, or until
/// the next signal.
pub async fn until_stopped<T>(
    printer: &Printer,
    how_to_go_on: impl FnOnce() -> String,
    stop: &Stop,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut signals = Signals::catch().map_err(|e| Failure::System(format!("no signals: {e}")))?;
    tokio::pin!(work);
    let signal = tokio::select! {
        biased;
        result = &mut work => return result,
        signal = signals.received() => Some(signal),
        () = printer.closed() => None,
    };
    stop.ask();
    let done = tokio::select! {
        biased;
        result = &mut work => result.ok(),
        _ = signals.received() => None,
        () = tokio::time::sleep(PATIENCE) => None,
    };
    match (done, signal) {
        // it was at its end
        (Some(done), Some(_)) => Ok(done),
        (_, None) => Err(Failure::Reported),
        (None, Some(signal)) => Err(Failure::Interrupted(signal, how_to_go_on())),
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
