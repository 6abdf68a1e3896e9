//! The host with callers that forget to wait: what they ask for is not passed on.

use std::sync::Mutex;

use stillhouse_gpu::{Arg, Device, Event, Launch, Result, Stream};
use stillhouse_gpu_host::Host;

/// What callers forget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forgets {
    Nothing,
    /// That one stream waits for the other.
    WaitIn,
    /// To wait for what this stream does.
    WaitFor(Stream),
    /// To wait for either.
    AnyWait,
}

#[derive(Debug)]
pub struct Careless {
    pub host: Host,
    forgets: Mutex<Forgets>,
}

impl Careless {
    pub fn new(seed: u64, forgets: Forgets) -> Self {
        Self { host: Host::new(seed), forgets: Mutex::new(forgets) }
    }

    pub fn forget_from_now_on(&self, forgets: Forgets) {
        *self.forgets.lock().unwrap() = forgets;
    }

    fn forgets(&self) -> Forgets {
        *self.forgets.lock().unwrap()
    }
}

/// The stream that an event of the host is of.
fn stream(event: Event) -> Stream {
    if event.number().is_multiple_of(2) { Stream::Pass } else { Stream::Extract }
}

impl Device for Careless {
    as_the_host!();

    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        unsafe { self.host.launch(stream, launch, args) }
    }
    fn wait_in(&self, stream: Stream, event: Event) -> Result<()> {
        if self.forgets() == Forgets::WaitIn { Ok(()) } else { self.host.wait_in(stream, event) }
    }
    fn wait(&self, event: Event) -> Result<()> {
        let forgotten = [Forgets::WaitFor(stream(event)), Forgets::AnyWait].contains(&self.forgets());
        if forgotten { Ok(()) } else { self.host.wait(event) }
    }
}
