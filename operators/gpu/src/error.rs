//! What can go wrong on a device.

use stillhouse_noise::NoiseError;

/// An error of a device; every one names it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GpuError {
    /// A call failed.
    #[error("{device}: {call}: {message}")]
    Failed {
        /// The device.
        device: String,
        /// What was called.
        call: String,
        /// What the driver says.
        message: String,
        /// Whether the device itself is lost (uncorrectable memory errors, fallen off the bus), not only this call.
        lost: bool,
    },
    /// There is not enough memory.
    #[error("{device}: out of memory: {bytes} bytes asked for, {free} of {total} are free")]
    Memory {
        /// The device.
        device: String,
        /// Asked for.
        bytes: u64,
        /// Free.
        free: u64,
        /// In all.
        total: u64,
    },
    /// The device cannot be had.
    #[error("{device}: {message}")]
    Unavailable {
        /// The device.
        device: String,
        /// Why, and what is valid.
        message: String,
    },
    /// A shape, a type or a length that does not fit.
    #[error("{what}: got {got}, valid: {valid}")]
    Input {
        /// Of what.
        what: &'static str,
        /// What was got.
        got: String,
        /// What is valid.
        valid: String,
    },
    /// What the teacher's numbers do not allow.
    #[error(transparent)]
    Noise(#[from] NoiseError),
}
