//! From the bytes of an image to the numbers of a row: decoded, turned, coloured, resized, cropped.
//!
//! ```text
//!   PNG, JPEG ─ decode ─► [H, W, 1 or 3] ─ colours ─► [H, W, C] ─ fit ─► [h, w, C] u8, channel last, row by row
//! ```
//!
//! It is called where images are read, not by an operator: an image that cannot be decoded is a bad record, and records are judged, counted
//! and left out where they are read, before anything of them is handed on.
//!
//! Memory: the decoded image (3 bytes per pixel, 4 with alpha) and one more of it while a step runs, bounded by `max_pixels`.

mod decode;
mod profile;
mod resize;
mod scans;
#[cfg(test)]
mod tests;

use stillhouse_schemas::spec::{Fit, Images};

pub use self::resize::Picture;

/// Why an image is no row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bad {
    /// Under which it is counted.
    pub reason: &'static str,
    /// What was got and what is valid.
    pub message: String,
}

fn bad<T>(reason: &'static str, message: impl Into<String>) -> Result<T, Bad> {
    Err(Bad { reason, message: message.into() })
}

/// Why an image is no row. The texts are in manifests: they stay as they are.
pub mod reason {
    /// Cut off or damaged.
    pub const BROKEN: &str = "broken image";
    /// Neither PNG nor JPEG.
    pub const KIND: &str = "not PNG or JPEG";
    /// More pixels than allowed.
    pub const LARGE: &str = "too many pixels";
    /// 16 bits per channel.
    pub const DEPTH: &str = "16 bits per channel";
    /// Four inks.
    pub const CMYK: &str = "CMYK";
    /// Alpha that says something.
    pub const ALPHA: &str = "transparent pixels";
    /// More than one image.
    pub const ANIMATED: &str = "animated";
    /// A colour profile that is damaged, of other colours than the image, or not sRGB's.
    pub const PROFILE: &str = "colour profile";
    /// Not the size of the rows.
    pub const SIZE: &str = "another size";
}

/// The numbers of a row from the bytes of a PNG or JPEG.
///
/// # Errors
/// Why the image is a bad record.
pub fn pixels_of(bytes: &[u8], images: &Images) -> Result<Vec<u8>, Bad> {
    pixels(decode::decoded(bytes, images)?, images)
}

/// The numbers of a row from an image that is decoded: one or three channels.
///
/// # Errors
/// Why the image is a bad record.
pub fn pixels(picture: Picture, images: &Images) -> Result<Vec<u8>, Bad> {
    decode::within(picture.width as u64, picture.height as u64, images)?;
    let (had, to) = ((picture.width, picture.height), images.height_width());
    if images.fit != Fit::Exact {
        resize::bounded(had, images.fit, to, images.max_pixels as usize)?;
    }
    let picture = decode::coloured(picture, images.channels);
    match resize::fitted(picture, images.fit, images.filter, to) {
        Some(picture) => Ok(picture.values),
        None => bad(
            reason::SIZE,
            format!(
                "has {}×{} pixels; valid: {}×{} (or say how it gets there: `input.images.fit`)",
                had.0, had.1, to.1, to.0
            ),
        ),
    }
}
