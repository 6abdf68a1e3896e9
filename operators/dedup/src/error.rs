use std::fmt::Display;

/// An option with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {got}; valid: {valid}")]
pub struct OptionError {
    /// Option, such as `minhash.bands`.
    pub field: String,
    /// The value.
    pub got: String,
    /// What is valid.
    pub valid: String,
}

impl OptionError {
    pub(crate) fn new(field: impl Display, got: impl Display, valid: impl Display) -> Self {
        Self { field: field.to_string(), got: got.to_string(), valid: valid.to_string() }
    }

    /// Checks that a value is between two bounds, both included.
    pub(crate) fn check_range(field: impl Display, got: u32, least: u32, most: u32) -> Result<(), Self> {
        if (least..=most).contains(&got) {
            return Ok(());
        }
        Err(Self::new(field, got, format_args!("{least} to {most}")))
    }
}
