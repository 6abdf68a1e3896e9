//! The host as a device that drops calls to wait, to simulate callers that forget them.

use std::sync::Mutex;

use stillhouse_gpu::{Arg, Device, Event, Launch, Result, Stream};
use stillhouse_gpu_host::Host;

/// The waits that are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forgets {
    Nothing,
    /// A stream's wait for the other stream.
    WaitIn,
    /// The host's wait for this stream.
    WaitFor(Stream),
    /// The host's wait for either stream.
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

/// The stream of an event of the host.
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
