//! The signal that stops a worker.

/// Why a worker has to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It does not have to.
    No,
    /// A user cancelled the job.
    Cancel,
    /// The service stops.
    Shutdown,
}
