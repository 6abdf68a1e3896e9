//! Errors of a device.

use stillhouse_noise::NoiseError;

/// An error of a device. Every device error names its device.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GpuError {
    /// A call to the driver or a library failed.
    #[error("{device}: {call}: {message}")]
    Failed {
        /// The device.
        device: String,
        /// The function that was called.
        call: String,
        /// The driver's message.
        message: String,
        /// Whether the device itself is lost (uncorrectable memory errors, fallen off the bus), and not only this call.
        lost: bool,
    },
    /// The device has too little free memory.
    #[error("{device}: out of memory: {bytes} bytes requested, {free} of {total} are free")]
    Memory {
        /// The device.
        device: String,
        /// Bytes requested.
        bytes: u64,
        /// Bytes free.
        free: u64,
        /// Bytes in total.
        total: u64,
    },
    /// The device cannot be opened.
    #[error("{device}: {message}")]
    Unavailable {
        /// The device.
        device: String,
        /// The reason, and what is valid.
        message: String,
    },
    /// A shape, type or length is invalid.
    #[error("{what}: got {got}, valid: {valid}")]
    Input {
        /// The name of the value.
        what: &'static str,
        /// The value received.
        got: String,
        /// What is valid.
        valid: String,
    },
    /// An error of the noise codec, for example on a logit that is not finite.
    #[error(transparent)]
    Noise(#[from] NoiseError),
}
