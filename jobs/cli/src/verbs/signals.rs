//! Requests to stop: Ctrl-C, and the signal that a system or a cluster sends before it kills.

use std::future::Future;
use std::io;
use std::time::Duration;

use stillhouse_pipeline::run::Stop;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::{Failure, StopSignal};
use crate::printer::Printer;

/// Time limit for work to end after a request to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs `work` until it is done, a signal arrives, or stdout is closed. After a signal, the error includes
/// `how_to_go_on`.
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

/// Like [`until_signalled`], for work that must cancel remote work or release its output. Requests the stop and waits up
/// to 5 s, or until the next signal.
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
    stop.request();
    let done = tokio::select! {
        biased;
        result = &mut work => result.ok(),
        _ = signals.received() => None,
        () = tokio::time::sleep(STOP_TIMEOUT) => None,
    };
    match (done, signal) {
        // the work finished in the meantime
        (Some(done), Some(_)) => Ok(done),
        (_, None) => Err(Failure::Reported),
        (None, Some(signal)) => Err(Failure::Interrupted(signal, how_to_go_on())),
    }
}

/// Handlers for both signals, active once this exists.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Installs the handlers; needs a tokio runtime.
    pub fn catch() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the first signal.
    pub async fn received(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.interrupt.recv() => StopSignal::Interrupt,
            _ = self.terminate.recv() => StopSignal::Terminate,
        }
    }
}
