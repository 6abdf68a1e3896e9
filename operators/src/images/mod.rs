//! Converts the bytes of an image to the numbers of a row: decodes, rotates, converts colours, resizes, crops.
//!
//! ```text
//!   PNG, JPEG ─ decode ─► [H, W, 1 or 3] ─ colours ─► [H, W, C] ─ fit ─► [h, w, C] u8, channel last, row by row
//! ```
//!
//! The reader of images calls this, not an operator: an image that cannot be decoded is a bad record, and bad records
//! are detected, counted and skipped where they are read.
//!
//! Memory: the decoded image (3 bytes per pixel, 4 with alpha) and one copy while a step runs; `max_pixels` bounds
//! both.

mod decode;
mod profile;
mod resize;
mod scans;
#[cfg(test)]
mod tests;

use stillhouse_schemas::spec::{Fit, Images};

pub use self::resize::Image;

/// The error for an image that cannot become a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadImage {
    /// Reason, under which the image is counted.
    pub reason: &'static str,
    /// The value it got and what is valid.
    pub message: String,
}

fn bad<T>(reason: &'static str, message: impl Into<String>) -> Result<T, BadImage> {
    Err(BadImage { reason, message: message.into() })
}

/// Reasons why an image cannot become a row. Manifests contain these texts, so they must not change.
pub mod reason {
    /// The file is truncated or damaged.
    pub const BROKEN: &str = "broken image";
    /// Neither PNG nor JPEG.
    pub const KIND: &str = "not PNG or JPEG";
    /// More pixels than allowed.
    pub const LARGE: &str = "too many pixels";
    /// 16 bits per channel.
    pub const DEPTH: &str = "16 bits per channel";
    /// Four inks: CMYK or YCCK.
    pub const CMYK: &str = "CMYK";
    /// Some pixel is not opaque.
    pub const ALPHA: &str = "transparent pixels";
    /// The file holds more than one image.
    pub const ANIMATED: &str = "animated";
    /// The colour profile is damaged, has other channels than the image, or is not sRGB.
    pub const PROFILE: &str = "colour profile";
    /// The image does not have the size of the rows.
    pub const SIZE: &str = "another size";
}

/// Converts the bytes of a PNG or JPEG to the numbers of a row.
///
/// # Errors
/// Fails if the image is a bad record; says why.
pub fn decode_pixels(bytes: &[u8], images: &Images) -> Result<Vec<u8>, BadImage> {
    to_row_pixels(decode::decode(bytes, images)?, images)
}

/// Converts a decoded image of one or three channels to the numbers of a row.
///
/// # Errors
/// Fails if the image is a bad record; says why.
pub fn to_row_pixels(picture: Image, images: &Images) -> Result<Vec<u8>, BadImage> {
    decode::check_size(picture.width as u64, picture.height as u64, images)?;
    let (size, to) = ((picture.width, picture.height), images.height_width());
    if images.fit != Fit::Exact {
        resize::check_intermediate_size(size, images.fit, to, images.max_pixels as usize)?;
    }
    let picture = decode::convert_channels(picture, images.channels);
    match resize::fit_to_rows(picture, images.fit, images.filter, to) {
        Some(picture) => Ok(picture.values),
        None => bad(
            reason::SIZE,
            format!(
                "has {}×{} pixels; valid: {}×{} (or say how it gets there: `input.images.fit`)",
                size.0, size.1, to.1, to.0
            ),
        ),
    }
}
