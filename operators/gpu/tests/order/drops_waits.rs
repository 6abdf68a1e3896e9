//! The host as a device that drops calls to wait, to simulate callers that forget them.

use std::sync::Mutex;

use stillhouse_gpu::{Arg, Device, Event, Launch, Result, Stream};
use stillhouse_gpu_host::Host;

/// The waits that are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DroppedWait {
    Nothing,
    /// A stream's wait for the other stream.
    WaitIn,
    /// The host's wait for this stream.
    WaitFor(Stream),
    /// The host's wait for either stream.
    AnyWait,
}

#[derive(Debug)]
pub struct DropsWaits {
    pub host: Host,
    dropped: Mutex<DroppedWait>,
}

impl DropsWaits {
    pub fn new(seed: u64, dropped: DroppedWait) -> Self {
        Self { host: Host::new(seed), dropped: Mutex::new(dropped) }
    }

    pub fn set_dropped(&self, dropped: DroppedWait) {
        *self.dropped.lock().unwrap() = dropped;
    }

    fn dropped(&self) -> DroppedWait {
        *self.dropped.lock().unwrap()
    }
}

/// The stream of an event of the host.
fn stream(event: Event) -> Stream {
    if event.number().is_multiple_of(2) { Stream::Pass } else { Stream::Extract }
}

impl Device for DropsWaits {
    forward_to_host!();

    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        unsafe { self.host.launch(stream, launch, args) }
    }
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        if self.dropped() == DroppedWait::WaitIn { Ok(()) } else { self.host.stream_wait_event(stream, event) }
    }
    fn wait(&self, event: Event) -> Result<()> {
        let is_dropped = [DroppedWait::WaitFor(stream(event)), DroppedWait::AnyWait].contains(&self.dropped());
        if is_dropped { Ok(()) } else { self.host.wait(event) }
    }
}
