//! Compares results with Pillow's (`testdata/images/goldens.py`) and tests hostile images.

use std::io::Read;

use serde_json::{Value, json};
use stillhouse_schemas::spec::Images;

use super::*;
use crate::testing::repository;

fn file(name: &str) -> Vec<u8> {
    std::fs::read(repository("operators/testdata/images").join(name)).unwrap()
}

fn images(fields: Value) -> Images {
    let mut all = json!({"size": 32});
    all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    serde_json::from_value(all).unwrap()
}

fn why(name: &str, fields: Value) -> (&'static str, String) {
    let bad = decode_pixels(&file(name), &images(fields)).unwrap_err();
    (bad.reason, bad.message)
}

/// Covers every file, fit, filter and size of the goldens: PNG is equal bit for bit, JPEG within the differences of
/// decoders.
#[test]
fn what_comes_out_is_what_pillow_makes() {
    let entries: Vec<Value> = serde_json::from_slice(&file("golden.json")).unwrap();
    let mut all = Vec::new();
    flate2::read::GzDecoder::new(&file("golden.bin.gz")[..]).read_to_end(&mut all).unwrap();
    let mut golden = all.as_slice();
    for entry in &entries {
        let shape: Vec<usize> =
            entry["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let name = entry["file"].as_str().unwrap();
        let mut fields = json!({"height": shape[0], "size": shape[1], "fit": entry["fit"]});
        if shape.len() == 2 {
            fields["channels"] = json!("grey");
        }
        for key in ["filter", "background"] {
            if !entry[key].is_null() {
                fields[key] = entry[key].clone();
            }
        }
        let got = decode_pixels(&file(name), &images(fields)).unwrap_or_else(|e| panic!("{entry}: {}", e.message));
        let (expected, rest) = golden.split_at(shape.iter().product());
        golden = rest;
        if name.ends_with(".jpg") {
            let apart = got.iter().zip(expected).map(|(a, b)| a.abs_diff(*b));
            let (most, sum) = apart.fold((0, 0u64), |(most, sum), d| (most.max(d), sum + u64::from(d)));
            let mean = sum as f64 / got.len() as f64;
            let bound = if name == "420.jpg" { (24, 1.0) } else { (4, 0.6) };
            assert!(most <= bound.0 && mean <= bound.1, "{entry}: {most} levels apart, {mean} in the mean");
        } else {
            assert!(got == expected, "{entry}");
        }
        assert_eq!(got.len(), expected.len());
    }
    assert!(golden.is_empty() && entries.len() > 80);
}

#[test]
fn hostile_images_end_as_one_reason_each() {
    let any = || json!({"fit": "stretch"});
    for (name, reason, says) in [
        ("bomb.png", reason::LARGE, "has 60000×60000 = 3600000000 pixels; valid: at most 33554432"),
        ("nothing.png", reason::BROKEN, ""),
        ("cmyk.jpg", reason::CMYK, "has four inks"),
        ("sixteen.png", reason::DEPTH, "has 16 bits per channel"),
        ("animated.png", reason::ANIMATED, "is animated"),
        ("alpha.png", reason::ALPHA, "has transparent pixels"),
        ("image.gif", reason::KIND, "is GIF; valid: PNG or JPEG"),
        ("image.webp", reason::KIND, "is WebP"),
        ("image.bmp", reason::KIND, "is BMP"),
        ("goldens.py", reason::KIND, "is not an image in a supported format"),
    ] {
        let (got, message) = why(name, any());
        assert!(got == reason && message.contains(says), "{name}: {got}: {message}");
    }
    assert_eq!(decode_pixels(b"", &images(any())).unwrap_err().message, "is empty; valid: PNG or JPEG");
    let (reason, message) = why("rgb.png", json!({}));
    assert!(reason == reason::SIZE && message.starts_with("has 75×53 pixels; valid: 32×32 (or say how"), "{message}");
    assert_eq!(why("rgb.png", json!({"fit": "stretch", "max_pixels": 3974})).0, reason::LARGE);
    assert!(decode_pixels(&file("rgb.png"), &images(json!({"fit": "stretch", "max_pixels": 3975}))).is_ok());
}

/// Profiles are ignored unless the job requires sRGB; then an image in another space is a bad record.
#[test]
fn profiles_that_are_not_srgb_are_refused_on_request() {
    use super::profile::tests::{adobe_rgb, in_jpeg, in_png, srgb_profile, with_chunk};
    let (png, jpeg, grey) = (file("rgb.png"), file("444.jpg"), file("grey.jpg"));
    let (ignored, srgb) = (images(json!({"fit": "stretch"})), images(json!({"fit": "stretch", "profile": "srgb"})));
    let good = srgb_profile();
    for (had, now) in [
        (&png, in_png(&png, &good)),
        (&jpeg, in_jpeg(&jpeg, &good, 60_000)),
        (&jpeg, in_jpeg(&jpeg, &good, 100)),
        (&png, png.clone()),
        (&grey, grey.clone()),
    ] {
        assert_eq!(decode_pixels(&now, &srgb).unwrap(), decode_pixels(had, &ignored).unwrap());
    }
    let mut swapped = in_jpeg(&jpeg, &good, 100);
    // the first part claims another part number
    swapped[2 + 4 + 12] = 9;
    let bomb = in_png(&png, &vec![0; 64 << 20]);
    assert!(bomb.len() < 200_000);
    for (bytes, says) in [
        (in_png(&png, &adobe_rgb()), "has other colours than sRGB"),
        (in_jpeg(&jpeg, &adobe_rgb(), 99), "has other colours than sRGB"),
        (in_jpeg(&grey, &good, 60_000), "is of RGB, and the image is GRAY"),
        (in_jpeg(&jpeg, &good[..40], 60_000), "is damaged: 40 bytes that are not an ICC profile"),
        (swapped, "or parts with wrong numbers"),
        (with_chunk(&png, b"name\0\0not deflate"), "is damaged"),
        (with_chunk(&png, b"name without an end"), "is damaged: not deflate data"),
        (bomb, "has more than 4194304 bytes"),
    ] {
        let bad = decode_pixels(&bytes, &srgb).unwrap_err();
        assert_eq!(bad.reason, reason::PROFILE, "{}", bad.message);
        assert!(bad.message.contains(says) && bad.message.contains("`input.images.profile`"), "{}", bad.message);
        assert!(decode_pixels(&bytes, &ignored).is_ok(), "{says}: as in Pillow");
    }
}

/// An image truncated anywhere, or with any byte changed, is a bad record or other pixels, never a panic. A truncated
/// one is always a bad record.
#[test]
fn damaged_images_are_seen_or_are_other_images() {
    let any = images(json!({"fit": "stretch", "size": 4}));
    for name in ["palette.png", "bits.png", "opaque.png", "grey.jpg", "420.jpg", "progressive.jpg"] {
        let good = file(name);
        for end in 0..good.len() {
            let cut = decode_pixels(&good[..end], &any);
            assert!(cut.is_err(), "{name} is taken when cut at {end} of {}", good.len());
        }
        for at in 0..good.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] ^= flip;
                let read = decode_pixels(&bytes, &any);
                // every chunk of a PNG has a checksum
                let is_seen = read.is_err() || !name.ends_with(".png") || read == decode_pixels(&good, &any);
                assert!(is_seen, "{name}: a flip at {at} gives other pixels");
            }
        }
    }
}

/// A long, thin image would become huge during resizing.
#[test]
fn a_long_thin_image_is_refused_before_it_grows() {
    let thin = |width, height| Image { width, height, channels: 1, values: vec![0; width * height] };
    for fit in ["center_crop", "adm"] {
        let images = images(json!({"size": 256, "fit": fit, "max_pixels": 1_000_000, "channels": "grey"}));
        for (width, height) in [(1, 900_000), (900_000, 1)] {
            let bad = to_row_pixels(thin(width, height), &images).unwrap_err();
            assert!(
                bad.reason == reason::LARGE && bad.message.contains("while it is resized"),
                "{fit}: {}",
                bad.message
            );
        }
        assert_eq!(to_row_pixels(thin(300, 400), &images).unwrap().len(), 256 * 256);
    }
}

#[test]
fn an_image_may_be_left_as_it_lies() {
    let lying = images(json!({"size": 4, "height": 6, "orientation": "ignore"}));
    assert_eq!(decode_pixels(&file("exif6.png"), &lying).unwrap(), decode_pixels(&file("exif1.png"), &lying).unwrap());
    // after applying the orientation it is wider than high
    assert_eq!(
        decode_pixels(&file("exif6.png"), &images(json!({"size": 4, "height": 6}))).unwrap_err().reason,
        reason::SIZE
    );
}

#[test]
fn one_channel_is_all_three_and_three_are_one() {
    let grey = Image { width: 2, height: 1, channels: 1, values: vec![3, 250] };
    assert_eq!(to_row_pixels(grey, &images(json!({"size": 2, "height": 1}))).unwrap(), [3, 3, 3, 250, 250, 250]);
    // Pillow: Image.new("RGB", (1, 1), (255, 0, 0)).convert("L") is 76, green 150, blue 29
    let colours = Image { width: 3, height: 1, channels: 3, values: vec![255, 0, 0, 0, 255, 0, 0, 0, 255] };
    let luminance = to_row_pixels(colours, &images(json!({"size": 3, "height": 1, "channels": "grey"}))).unwrap();
    assert_eq!(luminance, [76, 150, 29]);
}

/// Returns where the bits of each scan begin and end.
fn scans_of(jpeg: &[u8]) -> Vec<(usize, usize)> {
    let mut scans = Vec::new();
    let mut at = 2;
    while jpeg[at + 1] != 0xd9 {
        let length = usize::from(u16::from_be_bytes([jpeg[at + 2], jpeg[at + 3]]));
        let (is_scan, begin) = (jpeg[at + 1] == 0xda, at + 2 + length);
        at = begin;
        if is_scan {
            while jpeg[at] != 0xff || jpeg[at + 1] == 0 || (0xd0..=0xd7).contains(&jpeg[at + 1]) {
                at += 1;
            }
            scans.push((begin, at));
        }
    }
    scans
}

/// A decoder reads zeros after the end of a scan, so the image decodes, but is grey from the cut on.
#[test]
fn a_jpeg_that_is_cut_and_closed_is_broken() {
    let any = images(json!({"fit": "stretch", "size": 4}));
    for name in [
        "420.jpg",
        "444.jpg",
        "grey.jpg",
        "progressive.jpg",
        "exif6.jpg",
        "restarts.jpg",
        "420-progressive.jpg",
        "grey-progressive.jpg",
    ] {
        let good = file(name);
        assert!(decode_pixels(&good, &any).is_ok(), "{name}");
        let scans = scans_of(&good);
        for (i, (begin, end)) in scans.iter().enumerate() {
            for cut in (*begin..*end - 1).step_by(1 + (end - begin) / 40) {
                // half a marker is not a marker
                let cut = if good[cut - 1] == 0xff { cut - 1 } else { cut };
                let closed = [&good[..cut], b"\xff\xd9"].concat();
                let bad = decode_pixels(&closed, &any).expect_err(&format!("{name}: scan {i} cut at {cut} of {end}"));
                assert_eq!(bad.reason, reason::BROKEN, "{name}: {}", bad.message);
            }
        }
    }
    let good = file("grey.jpg");
    let (begin, end) = scans_of(&good)[0];
    let bad = decode_pixels(&[&good[..begin + (end - begin) / 2], b"\xff\xd9"].concat(), &any).unwrap_err();
    assert!(bad.message.contains("is truncated but has an end marker: scan 1 has "), "{}", bad.message);
}

/// A progressive file without its last scans decodes to a coarser image.
#[test]
fn a_jpeg_without_its_last_scans_is_broken() {
    let any = images(json!({"fit": "stretch", "size": 4}));
    for (name, least) in [("progressive.jpg", 6), ("420-progressive.jpg", 6), ("grey-progressive.jpg", 4)] {
        let good = file(name);
        let scans = scans_of(&good);
        assert!(scans.len() >= least, "{name}: {} scans", scans.len());
        for (i, (_, end)) in scans[..scans.len() - 1].iter().enumerate() {
            let closed = [&good[..*end], b"\xff\xd9"].concat();
            let bad = decode_pixels(&closed, &any).expect_err(&format!("{name} with {} scans", i + 1));
            assert_eq!(bad.reason, reason::BROKEN);
            assert!(bad.message.contains("lacks its last scans: component"), "{name}: {}", bad.message);
        }
    }
}

/// A restart marker is removed from the middle of a scan, together with its blocks.
#[test]
fn a_jpeg_that_lost_an_interval_is_broken() {
    let any = images(json!({"fit": "stretch", "size": 4}));
    let good = file("restarts.jpg");
    let restarts: Vec<usize> =
        (0..good.len() - 1).filter(|at| good[*at] == 0xff && (0xd0..=0xd7).contains(&good[at + 1])).collect();
    assert!(restarts.len() >= 3);
    let without = [&good[..restarts[1]], &good[restarts[2]..]].concat();
    assert_eq!(decode_pixels(&without, &any).unwrap_err().reason, reason::BROKEN);
}

/// Builds a PNG with a palette of `colours` colours and rows of indices, also packed and interlaced.
fn palette_png(colours: usize, bits: u8, size: (u32, u32), row: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, size.0, size.1);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::from_u8(bits).unwrap());
    encoder.set_palette((0..colours * 3).map(|n| n as u8).collect::<Vec<u8>>());
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&row.repeat(size.1 as usize)).unwrap();
    writer.finish().unwrap();
    out
}

#[test]
fn a_pixel_that_its_palette_does_not_have_is_a_bad_record() {
    let of = |colours, bits, row: &[u8], width| {
        let fields = json!({"size": width, "height": 2});
        decode_pixels(&palette_png(colours, bits, (width, 2), row), &images(fields)).map_err(|bad| {
            assert_eq!(bad.reason, reason::BROKEN);
            bad.message
        })
    };
    assert_eq!(of(3, 8, &[0, 2], 2).unwrap(), [0, 1, 2, 6, 7, 8].repeat(2));
    let says = "has a pixel with palette index 3, and the palette has 3 colours; valid: 0 to 2";
    assert_eq!(of(3, 8, &[0, 3], 2).unwrap_err(), says);
    // 2 bits per index: 0, 1, 2, and padding bits of the byte, which are not a pixel
    assert_eq!(of(3, 2, &[0b00_01_10_11], 3).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7, 8].repeat(2));
    assert_eq!(of(3, 2, &[0b00_01_10_11], 4).unwrap_err(), says);
    assert_eq!(of(1, 1, &[0b0010_0000], 2).unwrap(), [0, 1, 2, 0, 1, 2].repeat(2));
    assert!(of(1, 1, &[0b0010_0000], 3).unwrap_err().contains("palette index 1, and the palette has 1 colours"));
}
