//! A thread that looks at something ten times a second until it is closed.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

const PERIOD: Duration = Duration::from_millis(100);

/// Time after which a wait is worth telling.
pub const PATIENCE: Duration = Duration::from_millis(500);

pub struct Ticker(Mutex<Option<Sender<()>>>);

impl Ticker {
    /// Starts it; without a thread to be had nothing ticks.
    pub fn start(tick: impl Fn() + Send + 'static) -> Self {
        let (stop, stopped) = channel::<()>();
        let run = move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                tick();
            }
        };
        let started = thread::Builder::new().name("progress".into()).spawn(run);
        Self(Mutex::new(started.is_ok().then_some(stop)))
    }

    /// Ends it. A tick that is under way may still end after this.
    pub fn stop(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
