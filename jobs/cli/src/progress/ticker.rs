//! A thread that calls a function ten times a second until it is stopped.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

const TICK_INTERVAL: Duration = Duration::from_millis(100);

/// Waits shorter than this are not shown.
pub const SPINNER_DELAY: Duration = Duration::from_millis(500);

pub struct Ticker(Mutex<Option<Sender<()>>>);

impl Ticker {
    /// Starts the thread. If no thread can be created, nothing ticks.
    pub fn start(tick: impl Fn() + Send + 'static) -> Self {
        let (stop, stopped) = channel::<()>();
        let run = move || {
            while stopped.recv_timeout(TICK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                tick();
            }
        };
        let started = thread::Builder::new().name("progress".into()).spawn(run);
        Self(Mutex::new(started.is_ok().then_some(stop)))
    }

    /// Stops the thread. A running tick may end after this returns.
    pub fn stop(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
