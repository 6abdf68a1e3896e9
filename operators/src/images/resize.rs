//! Resizes images with the same bits as Pillow, to the shapes of the papers' pipelines.
//!
//! ```text
//!   in [H, W, C] ─ horizontal pass ─► [H, w, C] u8 ─ vertical pass ─► out [h, w, C] u8
//! ```
//!
//! Output pixel x of a pass is Σ_i k_i · in_i over the input pixels within `support · max(1, in/out)` of its centre.
//! Weights are computed in f64, normalised, and rounded to 22 fractional bits (half away from zero). Sums are i32: ½ is
//! added, then they are shifted and clamped. The horizontal pass comes first, as in Pillow up to 12 (13 begins with the
//! vertical pass if an image grows wider and less high). Pixels use no floating point and weights no FMA, so every
//! machine gives the same bytes. `images/tests.rs` checks that they equal Pillow's.
//!
//! Cost: in·w·C + w·h·C products times the support. Memory: one image between the passes.

use stillhouse_schemas::spec::{Filter, Fit};

use super::{BadImage, bad, reason};

/// Fractional bits of a weight: 32 minus 8 for a pixel and 2 for the overshoot of Lanczos.
const FRACTION_BITS: u32 = 32 - 8 - 2;

/// An image with 8 bits per channel, channel last, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Pixels per row.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
    /// Numbers per pixel.
    pub channels: usize,
    /// The `height · width · channels` numbers.
    pub values: Vec<u8>,
}

impl Image {
    /// Returns a rectangle of the image.
    pub(super) fn crop(&self, left: usize, top: usize, width: usize, height: usize) -> Self {
        let row = |y: usize| {
            let start = ((top + y) * self.width + left) * self.channels;
            &self.values[start..start + width * self.channels]
        };
        let values = (0..height).flat_map(row).copied().collect();
        Self { width, height, channels: self.channels, values }
    }

    /// Returns an image of a new size; `from(x, y)` is the source position of pixel (x, y).
    pub(super) fn rearrange(&self, width: usize, height: usize, from: impl Fn(usize, usize) -> (usize, usize)) -> Self {
        let mut values = Vec::with_capacity(self.values.len());
        for y in 0..height {
            for x in 0..width {
                let (x, y) = from(x, y);
                let at = (y * self.width + x) * self.channels;
                values.extend_from_slice(&self.values[at..at + self.channels]);
            }
        }
        Self { width, height, channels: self.channels, values }
    }
}

/// Fits an image to the size of the rows. Returns `None` if `exact` requires that size and the image has another.
pub(super) fn fit_to_rows(picture: Image, fit: Fit, filter: Filter, (height, width): (usize, usize)) -> Option<Image> {
    let is = picture.height == height && picture.width == width;
    match fit {
        Fit::Exact => is.then_some(picture),
        Fit::Stretch => Some(resize(picture, filter, (height, width))),
        Fit::CenterCrop => Some(resize_and_center_crop(picture, filter, (height, width))),
        Fit::Adm => Some(adm_center_crop(picture, filter, height.min(width))),
    }
}

/// Refuses, before any allocation, an image so long and thin that it would become huge between the passes.
pub(super) fn check_intermediate_size(
    (w, h): (usize, usize),
    fit: Fit,
    to: (usize, usize),
    max: usize,
) -> Result<(), BadImage> {
    let (to_h, to_w) = match fit {
        Fit::Exact | Fit::Stretch => to,
        Fit::CenterCrop => shorter_side((h, w), to),
        // halving keeps the ratio of the sides, except for rounding of the shorter one
        Fit::Adm => (h.saturating_mul(2 * to.0) / h.min(w), w.saturating_mul(2 * to.0) / h.min(w)),
    };
    let pixels = to_w.saturating_mul(h.max(to_h));
    match pixels <= max.max(to.0 * to.1) {
        true => Ok(()),
        false => bad(
            reason::LARGE,
            format!(
                "has {w}×{h} pixels, {pixels} while it is resized; valid: at most {max} (`input.images.max_pixels`)"
            ),
        ),
    }
}

/// Returns the height and width to resize to before a centre crop. The limiting side gets the requested length and the
/// other one ⌊requested · long / short⌋, as in torchvision.
fn shorter_side((h, w): (usize, usize), (height, width): (usize, usize)) -> (usize, usize) {
    match w.saturating_mul(height) <= h.saturating_mul(width) {
        true => (width.saturating_mul(h).div_euclid(w).max(height), width),
        false => (height, height.saturating_mul(w).div_euclid(h).max(width)),
    }
}

/// Applies `Resize` to the shorter side so that the crop fits (for squares: to its side), then `CenterCrop`.
fn resize_and_center_crop(picture: Image, filter: Filter, (height, width): (usize, usize)) -> Image {
    let (to_h, to_w) = shorter_side((picture.height, picture.width), (height, width));
    let picture = resize(picture, filter, (to_h, to_w));
    picture.crop(half_even(to_w - width), half_even(to_h - height), width, height)
}

/// Returns n/2, with halves rounded to the even neighbour, as in Python.
fn half_even(n: usize) -> usize {
    n / 2 + usize::from(n % 4 == 3)
}

/// `center_crop_arr` of guided-diffusion (Dhariwal & Nichol), which DiT and others use.
fn adm_center_crop(mut picture: Image, filter: Filter, size: usize) -> Image {
    while picture.width.min(picture.height) >= 2 * size {
        let half = (picture.height / 2, picture.width / 2);
        picture = resize(picture, Filter::Box, half);
    }
    let scale = size as f64 / picture.width.min(picture.height) as f64;
    let scaled = |n: usize| ((n as f64 * scale).round_ties_even() as usize).max(size);
    let to = (scaled(picture.height), scaled(picture.width));
    let picture = resize(picture, filter, to);
    let (left, top) = ((picture.width - size) / 2, (picture.height - size) / 2);
    picture.crop(left, top, size, size)
}

/// Equals Pillow's `Image.resize((width, height), filter)`.
pub(super) fn resize(picture: Image, filter: Filter, (height, width): (usize, usize)) -> Image {
    let picture = if picture.width == width { picture } else { resize_horizontally(&picture, filter, width) };
    if picture.height == height { picture } else { resize_vertically(&picture, filter, height) }
}

/// Inputs of an output pixel: pixels from `first` on, each with its weight.
struct Window {
    first: usize,
    weights: Vec<i32>,
}

fn support(filter: Filter) -> f64 {
    match filter {
        Filter::Box => 0.5,
        Filter::Bilinear => 1.0,
        Filter::Bicubic => 2.0,
        Filter::Lanczos => 3.0,
    }
}

fn weight(filter: Filter, x: f64) -> f64 {
    match filter {
        Filter::Box if x > -0.5 && x <= 0.5 => 1.0,
        Filter::Box => 0.0,
        Filter::Bilinear => (1.0 - x.abs()).max(0.0),
        Filter::Bicubic => {
            const A: f64 = -0.5;
            let x = x.abs();
            if x < 1.0 {
                ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
            } else if x < 2.0 {
                (((x - 5.0) * x + 8.0) * x - 4.0) * A
            } else {
                0.0
            }
        }
        Filter::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
        Filter::Lanczos => 0.0,
    }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * std::f64::consts::PI;
    // the system's sine may differ between processors, libm's does not
    libm::sin(x) / x
}

/// Returns the windows of all output pixels of a side.
fn windows(filter: Filter, from: usize, to: usize) -> Vec<Window> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let (reach, step) = (support(filter) * stretch, 1.0 / stretch);
    let window = |out: usize| {
        let center = (out as f64 + 0.5) * scale;
        let first = (center - reach + 0.5).max(0.0) as usize;
        let last = ((center + reach + 0.5) as usize).min(from);
        let raw: Vec<f64> =
            (first..last).map(|i| weight(filter, ((i - first) as f64 + first as f64 - center + 0.5) * step)).collect();
        let sum: f64 = raw.iter().fold(0.0, |sum, w| sum + w);
        let weights = raw.iter().map(|w| to_fixed_point(if sum == 0.0 { *w } else { w / sum })).collect();
        Window { first, weights }
    };
    (0..to).map(window).collect()
}

/// Converts a weight to fixed point with [`FRACTION_BITS`] fractional bits, rounding half away from zero.
fn to_fixed_point(weight: f64) -> i32 {
    let scaled = weight * f64::from(1u32 << FRACTION_BITS);
    (if scaled < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i32
}

fn to_u8(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (FRACTION_BITS - 1);

fn resize_horizontally(picture: &Image, filter: Filter, width: usize) -> Image {
    let windows = windows(filter, picture.width, width);
    let values = match picture.channels {
        3 => resize_rows::<3>(picture, &windows),
        _ => resize_rows::<1>(picture, &windows),
    };
    Image { width, height: picture.height, channels: picture.channels, values }
}

/// Resizes each row of an image with `CHANNELS` channels.
fn resize_rows<const CHANNELS: usize>(picture: &Image, windows: &[Window]) -> Vec<u8> {
    let mut values = Vec::with_capacity(picture.height * windows.len() * CHANNELS);
    for row in picture.values.chunks_exact(picture.width * CHANNELS) {
        for window in windows {
            let mut sums = [HALF; CHANNELS];
            let pixels = row[window.first * CHANNELS..].chunks_exact(CHANNELS);
            for (w, pixel) in window.weights.iter().zip(pixels) {
                sums.iter_mut().zip(pixel).for_each(|(sum, v)| *sum += w * i32::from(*v));
            }
            values.extend(sums.map(to_u8));
        }
    }
    values
}

fn resize_vertically(picture: &Image, filter: Filter, height: usize) -> Image {
    let row = picture.width * picture.channels;
    let mut values = Vec::with_capacity(height * row);
    let mut sums = vec![0i32; row];
    for window in windows(filter, picture.height, height) {
        sums.fill(HALF);
        let rows = picture.values[window.first * row..].chunks_exact(row);
        for (w, from) in window.weights.iter().zip(rows) {
            sums.iter_mut().zip(from).for_each(|(sum, v)| *sum += w * i32::from(*v));
        }
        values.extend(sums.iter().copied().map(to_u8));
    }
    Image { width: picture.width, height, channels: picture.channels, values }
}
