//! Decodes PNG and JPEG to 8 bits per channel, or returns the reason why not. The bytes decide the file type, not the
//! name.
//!
//! | input | result |
//! |---|---|
//! | grey, also with 1, 2 or 4 bits; a palette | RGB or grey, as the job says; fewer bits are scaled to 0 … 255 |
//! | alpha that is 255 everywhere | dropped |
//! | other alpha | blended with `background` ((a·v + (255 − a)·b + 127) div 255); without one a bad record |
//! | an ICC profile | ignored, as in Pillow's `convert("RGB")`; with `profile: srgb`, other colour spaces are a bad record |
//! | gamma, chromaticities | ignored |
//! | EXIF orientation | applied, or ignored if the job says so; unreadable EXIF counts as none |
//! | a pixel with an index beyond its palette | a bad record |
//! | a JPEG whose scans are incomplete or missing | a bad record ([`super::scans`]) |
//! | 16 bits, CMYK, animation, anything truncated or damaged, other formats | a bad record |
//!
//! The size comes from the header and is checked against `max_pixels` before any allocation.

use std::io::Cursor;

use png::{BitDepth, ColorType, DecodingError, Limits, Transformations};
use stillhouse_schemas::spec::{Background, Channels, Images, Orientation, Profile};
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::resize::Image;
use super::{BadImage, bad, profile, reason, scans};

/// First bytes of files that hold images of other formats.
const OTHER_FORMATS: [(&[u8], &str); 9] = [
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"\0\0\x01\0", "ICO"),
    (b"8BPS", "Photoshop"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
];

/// Decodes an image to three channels, or to one if it is grey.
pub(super) fn decode(bytes: &[u8], images: &Images) -> Result<Image, BadImage> {
    if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        return decode_png(bytes, images);
    }
    if bytes.starts_with(b"\xff\xd8\xff") {
        return decode_jpeg(bytes, images);
    }
    let other = OTHER_FORMATS.iter().find(|(magic, _)| bytes.starts_with(magic)).map(|(_, name)| *name);
    let boxed = match (bytes.get(..4), bytes.get(4..12)) {
        (Some(b"RIFF"), Some(rest)) if rest.ends_with(b"WEBP") => Some("WebP"),
        (_, Some(rest)) if rest.starts_with(b"ftyp") => Some("AVIF or HEIF"),
        _ => None,
    };
    match (bytes, other.or(boxed)) {
        ([], _) => bad(reason::BROKEN, "is empty; valid: PNG or JPEG"),
        (_, Some(name)) => bad(reason::KIND, format!("is {name}; valid: PNG or JPEG")),
        _ => bad(reason::KIND, "is not an image in a supported format; valid: PNG or JPEG"),
    }
}

/// Refuses an image with more pixels than the job allows.
pub(super) fn check_size(width: u64, height: u64, images: &Images) -> Result<(), BadImage> {
    let max = u64::from(images.max_pixels);
    match width.saturating_mul(height) {
        0 => bad(reason::BROKEN, format!("has {width}×{height} pixels; valid: one or more")),
        pixels if pixels > max => bad(
            reason::LARGE,
            format!("has {width}×{height} = {pixels} pixels; valid: at most {max} (`input.images.max_pixels`)"),
        ),
        _ => Ok(()),
    }
}

fn decode_png(bytes: &[u8], images: &Images) -> Result<Image, BadImage> {
    let broken = |e: DecodingError| match e {
        DecodingError::LimitsExceeded => {
            BadImage { reason: reason::LARGE, message: "needs more memory than its pixels account for".into() }
        }
        e => BadImage { reason: reason::BROKEN, message: format!("cannot be decoded as PNG: {e}") },
    };
    // four bytes per pixel, and 1 MiB for chunks and filters
    let limit = images.max_pixels as usize * 4 + (1 << 20);
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), Limits { bytes: limit });
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let info = decoder.read_header_info().map_err(broken)?;
    let (width, height) = (info.width as usize, info.height as usize);
    let is_palette = info.color_type == ColorType::Indexed;
    check_size(width as u64, height as u64, images)?;
    if info.bit_depth == BitDepth::Sixteen {
        return bad(reason::DEPTH, "has 16 bits per channel; valid: up to 8");
    }
    // the decoder's expansion would turn a colour outside the palette into black, so expand here instead
    decoder.set_transformations(if is_palette { Transformations::IDENTITY } else { Transformations::EXPAND });
    let mut reader = decoder.read_info().map_err(broken)?;
    if reader.info().animation_control.is_some() {
        return bad(reason::ANIMATED, "is animated; valid: one image");
    }
    let orientation = reader.info().exif_metadata.as_deref().and_then(read_orientation);
    let mut channels = match reader.output_color_type().0 {
        ColorType::Grayscale | ColorType::Indexed => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
    };
    let bits = if is_palette { reader.info().bit_depth as usize } else { 8 };
    let mut values = vec![0; (width * channels * bits).div_ceil(8) * height];
    if reader.output_buffer_size() != Some(values.len()) {
        return bad(reason::BROKEN, "does not have the size in its header");
    }
    reader.next_frame(&mut values).map_err(broken)?;
    reader.finish().map_err(broken)?;
    if is_palette {
        (channels, values) = expand_palette(&values, (width, bits), reader.info())?;
    }
    let colours = channels - (channels + 1) % 2;
    let picture = remove_alpha(Image { width, height, channels, values }, images)?;
    check_colour_profile(bytes, colours, images)?;
    Ok(apply_orientation(picture, orientation, images))
}

/// Looks up the colours of palette indices of `bits` bits each: RGB, or RGBA if the palette has transparency.
fn expand_palette(
    rows: &[u8],
    (width, bits): (usize, usize),
    info: &png::Info<'_>,
) -> Result<(usize, Vec<u8>), BadImage> {
    let palette = info.palette.as_deref().unwrap_or_default();
    let all = palette.len() / 3;
    // ignore a tRNS chunk with more entries than colours
    let alpha = info.trns.as_deref().map(|alpha| if alpha.len() > all { &[][..] } else { alpha });
    let channels = if alpha.is_some() { 4 } else { 3 };
    let mask = u8::MAX >> (8 - bits);
    let mut values = Vec::with_capacity(rows.len() * (8 / bits) * channels);
    for row in rows.chunks_exact((width * bits).div_ceil(8).max(1)) {
        for x in 0..width {
            let byte = row[x * bits / 8];
            let place = usize::from(byte >> (8 - bits - x * bits % 8) & mask);
            let Some(colour) = palette.get(3 * place..3 * place + 3) else {
                return bad(
                    reason::BROKEN,
                    format!(
                        "has a pixel with palette index {place}, and the palette has {all} colours; valid: 0 to {}",
                        all.max(1) - 1
                    ),
                );
            };
            values.extend_from_slice(colour);
            if let Some(alpha) = alpha {
                values.push(alpha.get(place).copied().unwrap_or(255));
            }
        }
    }
    Ok((channels, values))
}

/// With `profile: srgb`, refuses an image whose profile is not sRGB.
fn check_colour_profile(bytes: &[u8], channels: usize, images: &Images) -> Result<(), BadImage> {
    let checked = if images.profile == Profile::Srgb { profile::check_profile(bytes, channels) } else { Ok(()) };
    checked.or_else(|why| {
        bad(reason::PROFILE, format!("has a colour profile that {why}; valid: sRGB, or none (`input.images.profile`)"))
    })
}

/// Removes alpha: drops it if every pixel is opaque, else blends with the background.
fn remove_alpha(picture: Image, images: &Images) -> Result<Image, BadImage> {
    let Image { width, height, channels, values } = picture;
    if channels % 2 == 1 {
        return Ok(Image { width, height, channels, values });
    }
    let colours = channels - 1;
    let opaque = values.chunks_exact(channels).all(|pixel| pixel[colours] == 255);
    let background = match (opaque, images.background) {
        (true, _) | (_, Some(Background::Black)) => 0,
        (_, Some(Background::White)) => 255,
        (false, None) => {
            return bad(
                reason::ALPHA,
                "has transparent pixels; valid: no transparent pixels, or a `background` for them",
            );
        }
    };
    let laid = |pixel: &[u8]| {
        let a = u32::from(pixel[colours]);
        let one = |v: &u8| ((a * u32::from(*v) + (255 - a) * background + 127) / 255) as u8;
        pixel[..colours].iter().map(one).collect::<Vec<u8>>()
    };
    let values = values.chunks_exact(channels).flat_map(laid).collect();
    Ok(Image { width, height, channels: colours, values })
}

fn decode_jpeg(bytes: &[u8], images: &Images) -> Result<Image, BadImage> {
    let broken =
        |e: DecodeErrors| BadImage { reason: reason::BROKEN, message: format!("cannot be decoded as JPEG: {e}") };
    let side = 1 << 16;
    let options = DecoderOptions::new_safe().set_strict_mode(true).set_max_width(side).set_max_height(side);
    if !bytes.trim_ascii_end().ends_with(b"\xff\xd9") && !has_end_marker(bytes) {
        return bad(reason::BROKEN, "is truncated: its end marker is missing");
    }
    let mut decoder = JpegDecoder::new_with_options(Cursor::new(bytes), options);
    decoder.decode_headers().map_err(broken)?;
    let Some(info) = decoder.info() else { return bad(reason::BROKEN, "has no header") };
    let (width, height) = (usize::from(info.width), usize::from(info.height));
    check_size(width as u64, height as u64, images)?;
    let wanted = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => ColorSpace::Luma,
        Some(ColorSpace::YCbCr | ColorSpace::RGB) => ColorSpace::RGB,
        Some(ColorSpace::CMYK | ColorSpace::YCCK) => {
            return bad(reason::CMYK, "has four inks (CMYK), whose colours a profile decides; valid: RGB or grey");
        }
        other => return bad(reason::KIND, format!("has colours of kind {other:?}; valid: RGB or grey")),
    };
    let orientation = decoder.exif().and_then(|exif| read_orientation(exif));
    decoder.set_options(options.jpeg_set_out_colorspace(wanted));
    let channels = wanted.num_components();
    let values = decoder.decode().map_err(broken)?;
    if values.len() != width * height * channels {
        return bad(reason::BROKEN, "does not have the size in its header");
    }
    if let Some(missing) = scans::find_missing(bytes) {
        return bad(reason::BROKEN, missing.to_string());
    }
    check_colour_profile(bytes, channels, images)?;
    Ok(apply_orientation(Image { width, height, channels, values }, orientation, images))
}

/// Whether the last 64 KiB contain the end marker: cameras and web servers append data after it.
fn has_end_marker(bytes: &[u8]) -> bool {
    let tail = &bytes[bytes.len().saturating_sub(1 << 16)..];
    tail.windows(2).any(|pair| pair == b"\xff\xd9")
}

/// Converts to the channels that the job wants.
pub(super) fn convert_channels(picture: Image, channels: Channels) -> Image {
    let Image { width, height, channels: source_channels, values } = picture;
    let values = match (source_channels, channels) {
        (1, Channels::Rgb) => values.iter().flat_map(|v| [*v; 3]).collect(),
        (3, Channels::Grey) => values.chunks_exact(3).map(luminance).collect(),
        _ => values,
    };
    Image { width, height, channels: channels.count(), values }
}

fn luminance(pixel: &[u8]) -> u8 {
    let sum: u32 = pixel.iter().zip([19595, 38470, 7471]).map(|(v, w)| u32::from(*v) * w).sum();
    ((sum + 0x8000) >> 16) as u8
}

/// Turns the image as its EXIF orientation says: values 2 to 8 of TIFF's tag 274.
fn apply_orientation(picture: Image, orientation: Option<u16>, images: &Images) -> Image {
    let orientation = orientation.filter(|_| images.orientation == Orientation::Apply).unwrap_or(1);
    let (w, h) = (picture.width, picture.height);
    match orientation {
        2 => picture.rearrange(w, h, |x, y| (w - 1 - x, y)),
        3 => picture.rearrange(w, h, |x, y| (w - 1 - x, h - 1 - y)),
        4 => picture.rearrange(w, h, |x, y| (x, h - 1 - y)),
        5 => picture.rearrange(h, w, |x, y| (y, x)),
        6 => picture.rearrange(h, w, |x, y| (y, h - 1 - x)),
        7 => picture.rearrange(h, w, |x, y| (w - 1 - y, h - 1 - x)),
        8 => picture.rearrange(h, w, |x, y| (w - 1 - y, x)),
        _ => picture,
    }
}

/// Reads tag 274 in the first directory of a TIFF, the format of EXIF; `None` if it is missing or unreadable.
fn read_orientation(exif: &[u8]) -> Option<u16> {
    let little = match exif.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let u16_at = |at: usize| -> Option<u16> {
        let two = exif.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if little { u16::from_le_bytes(two) } else { u16::from_be_bytes(two) })
    };
    let u32_at = |at: usize| -> Option<usize> {
        let four = exif.get(at..at.checked_add(4)?)?.try_into().ok()?;
        Some(if little { u32::from_le_bytes(four) } else { u32::from_be_bytes(four) } as usize)
    };
    let first = u32_at(4)?;
    let entries = usize::from(u16_at(first)?);
    let entry = (0..entries).map(|i| first + 2 + 12 * i).find(|at| u16_at(*at) == Some(274))?;
    u16_at(entry + 8).filter(|orientation| (1..=8).contains(orientation))
}
