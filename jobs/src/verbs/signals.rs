//! Being told to stop: Ctrl-C, and what a system or a cluster sends before it kills.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

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
