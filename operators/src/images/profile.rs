//! Checks from the ICC profile of a PNG or JPEG whether the image is in sRGB. Converts nothing.
//!
//! ```text
//!   JPEG  APP2 "ICC_PROFILE" 1 of 2, 2 of 2 ─┐
//!   PNG   iCCP (deflate)                    ─┴─► header, tags ─► primaries of RGB within 0.01 of sRGB's, curves within 0.03
//! ```
//!
//! Bounds: the parts in a JPEG lie within its bytes; at most 4 MB of a PNG's profile are inflated. A file without a
//! profile counts as sRGB by convention.

use std::io::Read;

use flate2::read::ZlibDecoder;

/// Largest profile in bytes that is read.
const MAX_PROFILE_BYTES: u64 = 4 << 20;
/// Largest number of tags in a profile.
const MAX_TAGS: usize = 1024;
/// Red, green and blue of sRGB, adapted to D50 as in profiles.
const SRGB: [(&[u8; 4], [f64; 3]); 3] =
    [(b"rXYZ", [0.4361, 0.2225, 0.0139]), (b"gXYZ", [0.3851, 0.7169, 0.0971]), (b"bXYZ", [0.1431, 0.0606, 0.7141])];
const CURVES: [&[u8; 4]; 3] = [b"rTRC", b"gTRC", b"bTRC"];
/// Largest difference of primaries from sRGB's: writers adapt the white point in different ways.
const MAX_PRIMARY_DIFFERENCE: f64 = 0.01;
/// Largest difference of curves from sRGB's. A gamma of 2.2 differs by at most 0.008.
const MAX_CURVE_DIFFERENCE: f64 = 0.03;

/// Checks that an image of `channels` channels is in sRGB according to its profile. `Ok` if it has none; else the
/// reason why not.
pub(super) fn check_profile(bytes: &[u8], channels: usize) -> Result<(), String> {
    let found = if bytes.starts_with(b"\xff\xd8") { jpeg_profile(bytes)? } else { png_profile(bytes)? };
    found.map_or(Ok(()), |profile| check_srgb(&profile, channels))
}

/// Returns the profile of a JPEG, joined from its numbered parts.
fn jpeg_profile(bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let mut parts: Vec<(u8, u8, &[u8])> = Vec::new();
    let mut at = 2;
    while let (Some(0xff), Some(&marker)) = (bytes.get(at).copied(), bytes.get(at + 1)) {
        match marker {
            // fill byte; then markers without a length
            0xff => at += 1,
            0x01 | 0xd0..=0xd7 => at += 2,
            // the scan; the end
            0xda | 0xd9 => break,
            _ => {
                let Some(length) = bytes.get(at + 2..at + 4).map(|two| usize::from(two[0]) << 8 | usize::from(two[1]))
                else {
                    break;
                };
                let Some(body) = bytes.get(at + 4..at + 2 + length) else { break };
                if let (0xe2, Some([number, count, part @ ..])) = (marker, body.strip_prefix(b"ICC_PROFILE\0")) {
                    parts.push((*number, *count, part));
                }
                at += 2 + length;
            }
        }
    }
    let Some(&(_, count, _)) = parts.first() else { return Ok(None) };
    parts.sort_by_key(|part| part.0);
    let whole = parts.len() == usize::from(count)
        && parts.iter().enumerate().all(|(n, part)| part.1 == count && usize::from(part.0) == n + 1);
    if !whole {
        return Err(format!("is damaged: it has {} of {count} parts, or parts with wrong numbers", parts.len()));
    }
    Ok(Some(parts.iter().flat_map(|part| part.2).copied().collect()))
}

/// Returns the inflated profile of a PNG.
fn png_profile(bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let mut at = 8;
    while let Some(head) = bytes.get(at..at + 8) {
        let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let Some(body) = bytes.get(at + 8..(at + 8).saturating_add(length)) else { break };
        match &head[4..] {
            b"iCCP" => {
                let name = body.iter().take(80).position(|b| *b == 0).unwrap_or(body.len());
                let Some([0, packed @ ..]) = body.get(name + 1..) else {
                    return Err("is damaged: not deflate data".into());
                };
                let mut profile = Vec::new();
                let read = ZlibDecoder::new(packed).take(MAX_PROFILE_BYTES + 1).read_to_end(&mut profile);
                read.map_err(|e| format!("is damaged: {e}"))?;
                return if profile.len() as u64 > MAX_PROFILE_BYTES {
                    Err(too_large_error())
                } else {
                    Ok(Some(profile))
                };
            }
            b"IDAT" => break,
            _ => at += 12 + length,
        }
    }
    Ok(None)
}

fn too_large_error() -> String {
    format!("has more than {MAX_PROFILE_BYTES} bytes")
}

/// A profile with bounds-checked access.
struct Profile<'a> {
    bytes: &'a [u8],
}

/// Name and content of a tag.
type Tag<'a> = (&'a [u8], &'a [u8]);

impl<'a> Profile<'a> {
    fn u32_at(&self, at: usize) -> Option<usize> {
        let four = self.bytes.get(at..at.checked_add(4)?)?;
        Some(u32::from_be_bytes([four[0], four[1], four[2], four[3]]) as usize)
    }

    fn tag_at(&self, at: usize) -> &'a [u8] {
        self.bytes.get(at..at + 4).unwrap_or_default()
    }

    fn tags(&self) -> Result<Vec<Tag<'a>>, String> {
        let count = self.u32_at(128).unwrap_or(0);
        let damaged = || "is damaged: its tags are outside the profile".to_owned();
        if count > MAX_TAGS {
            return Err(damaged());
        }
        let tag = |n: usize| {
            let at = 132 + 12 * n;
            let (start, length) = (self.u32_at(at + 4)?, self.u32_at(at + 8)?);
            Some((self.tag_at(at), self.bytes.get(start..start.checked_add(length)?)?))
        };
        (0..count).map(tag).collect::<Option<Vec<_>>>().ok_or_else(damaged)
    }
}

fn check_srgb(bytes: &[u8], channels: usize) -> Result<(), String> {
    let profile = Profile { bytes };
    let size = profile.u32_at(0).unwrap_or(0);
    if bytes.len() as u64 > MAX_PROFILE_BYTES {
        return Err(too_large_error());
    }
    if bytes.len() < 132 || profile.tag_at(36) != b"acsp" || size < 132 || size > bytes.len() {
        return Err(format!("is damaged: {} bytes that are not an ICC profile", bytes.len()));
    }
    let (space, expected) = (profile.tag_at(16), if channels == 1 { b"GRAY" } else { b"RGB " });
    if space != expected {
        return Err(format!("is of {}, and the image is {}", printable(space), printable(expected)));
    }
    let tags = profile.tags()?;
    let tag = |name: &[u8; 4]| tags.iter().find(|tag| tag.0 == name).map(|tag| tag.1);
    let curves: &[&[u8; 4]] = if channels == 1 { &[b"kTRC"] } else { &CURVES };
    for (name, expected) in SRGB.iter().filter(|_| channels != 1) {
        let missing = || format!("has no {}: it uses lookup tables, which are not supported", printable(*name));
        let found = tag(name).ok_or_else(missing)?;
        let found = xyz(found).ok_or_else(|| format!("is damaged: its {} is not a colour", printable(*name)))?;
        if found.iter().zip(expected).any(|(a, b)| (a - b).abs() > MAX_PRIMARY_DIFFERENCE) {
            let [x, y, z] = found;
            return Err(format!("has other colours than sRGB: {} at {x:.3} {y:.3} {z:.3}", printable(*name)));
        }
    }
    for name in curves {
        let found = tag(name).ok_or_else(|| format!("has no {}", printable(*name)))?;
        let apart = max_difference_from_srgb(found)
            .ok_or_else(|| format!("is damaged: its {} is not a curve", printable(*name)))?;
        if apart.is_nan() || apart > MAX_CURVE_DIFFERENCE {
            return Err(format!("has another curve than sRGB: {} is {apart:.3} from it", printable(*name)));
        }
    }
    Ok(())
}

/// Makes a name of four characters printable.
fn printable(four: &[u8]) -> String {
    String::from_utf8_lossy(four).chars().filter(char::is_ascii_graphic).collect()
}

/// Reads a fixed-point number with 16 fractional bits.
fn read_fixed_point(bytes: &[u8], at: usize) -> Option<f64> {
    let four = bytes.get(at..at + 4)?;
    Some(f64::from(i32::from_be_bytes([four[0], four[1], four[2], four[3]])) / 65_536.0)
}

fn xyz(tag: &[u8]) -> Option<[f64; 3]> {
    tag.starts_with(b"XYZ ").then_some(())?;
    Some([read_fixed_point(tag, 8)?, read_fixed_point(tag, 12)?, read_fixed_point(tag, 16)?])
}

/// Returns the largest difference of a curve from sRGB's over 33 points; `None` if the tag is not a curve.
fn max_difference_from_srgb(tag: &[u8]) -> Option<f64> {
    let curve = parse_curve(tag)?;
    let difference = |n: u32| (curve(f64::from(n) / 32.0) - srgb_curve(f64::from(n) / 32.0)).abs();
    Some((0..=32).map(difference).fold(0.0, |max: f64, one| if one.is_nan() { f64::NAN } else { max.max(one) }))
}

fn srgb_curve(x: f64) -> f64 {
    if x <= 0.04045 { x / 12.92 } else { libm::pow((x + 0.055) / 1.055, 2.4) }
}

/// Parses `curv` (a gamma, or values joined by lines) and `para` (one of five formulas).
fn parse_curve(tag: &[u8]) -> Option<Box<dyn Fn(f64) -> f64 + '_>> {
    if let Some(rest) = tag.strip_prefix(b"curv\0\0\0\0") {
        let count = Profile { bytes: rest }.u32_at(0)?;
        let values = rest.get(4..)?;
        let value = move |n: usize| values.get(2 * n..2 * n + 2).map(|two| u16::from_be_bytes([two[0], two[1]]));
        return match count {
            0 => Some(Box::new(|x| x)),
            1 => {
                let gamma = f64::from(value(0)?) / 256.0;
                Some(Box::new(move |x| libm::pow(x, gamma)))
            }
            _ => {
                value(count - 1)?;
                let at = move |n: usize| f64::from(value(n.min(count - 1)).unwrap_or(0)) / 65_535.0;
                Some(Box::new(move |x| {
                    let place = x * (count - 1) as f64;
                    let (whole, part) = (place.floor(), place.fract());
                    at(whole as usize) * (1.0 - part) + at(whole as usize + 1) * part
                }))
            }
        };
    }
    let rest = tag.strip_prefix(b"para\0\0\0\0")?;
    let kind = rest.get(..2).map(|two| u16::from_be_bytes([two[0], two[1]]))?;
    let count = *[1, 3, 4, 5, 7].get(usize::from(kind))?;
    let p: Vec<f64> = (0..count).map(|n| read_fixed_point(rest, 4 + 4 * n)).collect::<Option<_>>()?;
    let of = move |n: usize| p.get(n).copied().unwrap_or(0.0);
    Some(Box::new(move |x| {
        let (gamma, a, b, c, d, e, f) = (of(0), of(1), of(2), of(3), of(4), of(5), of(6));
        let power = || libm::pow((a * x + b).max(0.0), gamma);
        match kind {
            0 => libm::pow(x, gamma),
            1 if x >= -b / a => power(),
            1 => 0.0,
            2 if x >= -b / a => power() + c,
            2 => c,
            3 if x >= d => power(),
            3 => c * x,
            _ if x >= d => power() + e,
            _ => c * x + f,
        }
    }))
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use super::*;

    /// Builds a profile with these tags.
    fn build_profile(space: &[u8; 4], tags: &[(&[u8; 4], Vec<u8>)]) -> Vec<u8> {
        let mut bytes = vec![0; 128];
        bytes[12..16].copy_from_slice(b"mntr");
        bytes[16..20].copy_from_slice(space);
        bytes[20..24].copy_from_slice(b"XYZ ");
        bytes[36..40].copy_from_slice(b"acsp");
        bytes.extend((tags.len() as u32).to_be_bytes());
        let mut at = 132 + 12 * tags.len();
        for (name, tag) in tags {
            bytes.extend_from_slice(*name);
            bytes.extend((at as u32).to_be_bytes());
            bytes.extend((tag.len() as u32).to_be_bytes());
            at += tag.len();
        }
        tags.iter().for_each(|(_, tag)| bytes.extend(tag));
        let size = bytes.len() as u32;
        bytes[..4].copy_from_slice(&size.to_be_bytes());
        bytes
    }

    fn fixed_of(values: &[f64]) -> Vec<u8> {
        values.iter().flat_map(|v| ((v * 65_536.0).round() as i32).to_be_bytes()).collect()
    }

    fn point(values: [f64; 3]) -> Vec<u8> {
        [b"XYZ \0\0\0\0".to_vec(), fixed_of(&values)].concat()
    }

    fn gamma(gamma: f64) -> Vec<u8> {
        [b"curv\0\0\0\0\0\0\0\x01".to_vec(), ((gamma * 256.0) as u16).to_be_bytes().to_vec()].concat()
    }

    fn formula(kind: u16, values: &[f64]) -> Vec<u8> {
        [b"para\0\0\0\0".to_vec(), kind.to_be_bytes().to_vec(), vec![0, 0], fixed_of(values)].concat()
    }

    fn table(count: u32, of: impl Fn(f64) -> f64) -> Vec<u8> {
        let values =
            (0..count).flat_map(|n| ((of(f64::from(n) / f64::from(count - 1)) * 65_535.0) as u16).to_be_bytes());
        [b"curv\0\0\0\0".to_vec(), count.to_be_bytes().to_vec(), values.collect()].concat()
    }

    fn rgb(red: [f64; 3], curve: &[u8]) -> Vec<u8> {
        let [(_, _), (_, green), (_, blue)] = SRGB;
        let colours = [(b"rXYZ", point(red)), (b"gXYZ", point(green)), (b"bXYZ", point(blue))];
        let curves = CURVES.map(|name| (name, curve.to_vec()));
        build_profile(b"RGB ", &[&colours[..], &curves[..]].concat())
    }

    /// sRGB as Little CMS writes it (a formula with five parameters), as in HP's profile (a table), and as cameras
    /// write it (a gamma).
    fn good() -> Vec<Vec<u8>> {
        let red = SRGB[0].1;
        let five = formula(3, &[2.4, 1.0 / 1.055, 0.055 / 1.055, 1.0 / 12.92, 0.04045]);
        vec![rgb(red, &five), rgb(red, &table(1024, srgb_curve)), rgb(red, &gamma(2.2)), rgb(red, &formula(0, &[2.2]))]
    }

    /// Puts this profile into a JPEG, in parts of `part` bytes.
    pub(in super::super) fn in_jpeg(jpeg: &[u8], profile: &[u8], part: usize) -> Vec<u8> {
        let count = profile.chunks(part).count() as u8;
        let mut bytes = jpeg[..2].to_vec();
        for (n, part) in (1u8..).zip(profile.chunks(part)) {
            bytes.extend([0xff, 0xe2]);
            bytes.extend(((part.len() + 16) as u16).to_be_bytes());
            bytes.extend(b"ICC_PROFILE\0");
            bytes.extend([n, count]);
            bytes.extend(part);
        }
        bytes.extend(&jpeg[2..]);
        bytes
    }

    /// Puts this profile into a PNG, after its header.
    pub(in super::super) fn in_png(png: &[u8], profile: &[u8]) -> Vec<u8> {
        let mut packed = flate2::write::ZlibEncoder::new(b"a profile\0\0".to_vec(), flate2::Compression::default());
        packed.write_all(profile).unwrap();
        with_chunk(png, &packed.finish().unwrap())
    }

    pub(in super::super) fn with_chunk(png: &[u8], body: &[u8]) -> Vec<u8> {
        let mut sum = flate2::Crc::new();
        sum.update(b"iCCP");
        sum.update(body);
        let chunk = [&(body.len() as u32).to_be_bytes()[..], b"iCCP", body, &sum.sum().to_be_bytes()].concat();
        [&png[..33], &chunk, &png[33..]].concat()
    }

    pub(in super::super) fn srgb_profile() -> Vec<u8> {
        good().remove(0)
    }

    pub(in super::super) fn adobe_rgb() -> Vec<u8> {
        rgb([0.6097, 0.3111, 0.0195], &gamma(2.2))
    }

    #[test]
    fn srgb_is_known_however_it_is_written() {
        for (n, profile) in good().iter().enumerate() {
            assert_eq!(check_srgb(profile, 3), Ok(()), "{n}");
        }
        for curve in [gamma(2.2), formula(4, &[2.4, 1.0 / 1.055, 0.055 / 1.055, 1.0 / 12.92, 0.04045, 0.0, 0.0])] {
            assert_eq!(check_srgb(&build_profile(b"GRAY", &[(b"kTRC", curve)]), 1), Ok(()));
        }
    }

    #[test]
    fn what_is_not_srgb_says_what_it_is() {
        let red = SRGB[0].1;
        let mut cmyk = good().remove(0);
        cmyk[16..20].copy_from_slice(b"CMYK");
        let mut outside = good().remove(0);
        outside[136..140].copy_from_slice(&u32::MAX.to_be_bytes());
        let mut many = good().remove(0);
        many[128..132].copy_from_slice(&u32::MAX.to_be_bytes());
        let mut bigger = good().remove(0);
        bigger[..4].copy_from_slice(&9999u32.to_be_bytes());
        for (profile, channels, says) in [
            (adobe_rgb(), 3, "has other colours than sRGB: rXYZ at 0.610 0.311 0.020"),
            (rgb(red, &gamma(1.8)), 3, "has another curve than sRGB: rTRC is 0.0"),
            (rgb(red, &table(2, |x| x)), 3, "has another curve than sRGB"),
            (rgb(red, b"curv\0\0\0\0\0\0\0\0"), 3, "has another curve than sRGB"),
            (rgb(red, &formula(1, &[2.4, 0.0, 0.0])), 3, "has another curve than sRGB: rTRC is "),
            (rgb(red, b"curv\0\0\0\0\xff\xff\xff\xff\0\0"), 3, "is damaged: its rTRC is not a curve"),
            (rgb(red, &formula(9, &[2.4])), 3, "is damaged: its rTRC is not a curve"),
            (rgb(red, b"para"), 3, "is damaged: its rTRC is not a curve"),
            (build_profile(b"RGB ", &[(b"A2B0", vec![0; 64])]), 3, "has no rXYZ: it uses lookup tables"),
            (build_profile(b"RGB ", &[(b"rXYZ", b"XYZ".to_vec())]), 3, "is damaged: its rXYZ is not a colour"),
            (build_profile(b"GRAY", &[]), 1, "has no kTRC"),
            (build_profile(b"GRAY", &[(b"kTRC", gamma(2.2))]), 3, "is of GRAY, and the image is RGB"),
            (good().remove(0), 1, "is of RGB, and the image is GRAY"),
            (cmyk, 3, "is of CMYK, and the image is RGB"),
            (outside, 3, "is damaged: its tags are outside the profile"),
            (many, 3, "is damaged: its tags are outside the profile"),
            (bigger, 3, "is damaged: "),
            (b"none".to_vec(), 3, "is damaged: 4 bytes that are not an ICC profile"),
        ] {
            let why = check_srgb(&profile, channels).unwrap_err();
            assert!(why.starts_with(says), "{why}, expected: {says}");
        }
    }

    /// Truncating a profile anywhere or changing any byte gives a result, never a panic.
    #[test]
    fn damaged_profiles_have_an_answer() {
        for good in good() {
            for end in 0..good.len() {
                assert!(check_srgb(&good[..end], 3).is_err(), "{end}");
            }
            for at in 0..good.len() {
                for flip in [0x01, 0x80, 0xff] {
                    let mut bytes = good.clone();
                    bytes[at] ^= flip;
                    let _ = (check_srgb(&bytes, 3), check_srgb(&bytes, 1));
                }
            }
        }
    }
}
