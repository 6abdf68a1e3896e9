//! Compressed files: a reader begins at the last checkpoint before its offset and reads the same bytes as from the start.

use std::io::Read;
use std::io::Write;
use std::sync::atomic::Ordering;

use flate2::{Compression, GzBuilder};
use proptest::prelude::*;

use super::words::{lines, words};
use super::*;
use crate::checkpoints::Checkpoints;

const KB: u64 = 1 << 10;

/// A bench whose store has a small interval between checkpoints.
fn bench(name: &str, bytes: &[u8], interval: u64, most_bytes: usize) -> Bench {
    let mut bench = Bench::with(&[(name, bytes)]);
    bench.store = bench.store.with_checkpoints(Checkpoints::new(interval, most_bytes));
    bench
}

fn at_level(content: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn decompressed(bench: &Bench) -> u64 {
    bench.store.all_checkpoints().decompressed.swap(0, Ordering::SeqCst)
}

/// Returns the bytes of a file from an offset on, up to an error.
fn from(bench: &Bench, file: &InputFile, offset: u64, most: usize) -> Result<Vec<u8>, String> {
    let (store, input) = (bench.store.expecting([file]), input(json!({"format": "text"})));
    let mut cursor = Cursor::open(&store, file, &input, offset).map_err(|e| e.to_string())?;
    assert!(cursor.offset <= offset);
    let mut got = Vec::new();
    while got.len() < most {
        let n = cursor.fill().map_err(|e| SourceError::from_io(&file.path, e).to_string())?.len();
        if n == 0 {
            break;
        }
        got.extend_from_slice(cursor.fill().unwrap());
        cursor.consume(n);
    }
    Ok(got)
}

fn only_file(bench: &Bench) -> InputFile {
    bench.files(&input(json!({"format": "text"}))).remove(0)
}

/// Reads a file in parts of `part` bytes, in the given order, each with a cursor of its own, and checks them.
fn assert_parts(bench: &Bench, content: &[u8], part: usize, order: impl Iterator<Item = usize>) {
    let file = only_file(bench);
    for start in order {
        let got = from(bench, &file, start as u64, part).unwrap();
        assert!(got == content[start..][..got.len()], "{start}");
        assert!(got.len() >= part.min(content.len() - start), "{start}: {} bytes", got.len());
    }
}

#[test]
fn a_reader_in_the_middle_decompresses_little_of_what_is_before_it() {
    const PART: usize = 200_000;
    let content = lines(4_000_000);
    let (length, parts) = (content.len() as u64, content.len().div_ceil(PART) as u64);
    let frames: Vec<u8> = content.chunks(100_000).flat_map(zstandard).collect();
    // level 1 gives one very long block, level 6 many blocks
    let (quick, usual) = (gzip(&content), at_level(&content, 6));
    for (name, stored) in [("a.txt.gz", quick), ("a.txt.gz", usual), ("a.txt.zst", frames)] {
        let bench = bench(name, &stored, 64 * KB, 1 << 20);
        assert!(from(&bench, &only_file(&bench), 0, usize::MAX).unwrap() == content);
        assert_eq!(decompressed(&bench), length, "a scan decompresses once");
        // as planning does
        let (file, all) = (only_file(&bench), bench.store.all_checkpoints().count());
        let starts = (0..length).step_by(PART);
        bench.store.expecting([&file]).keep_checkpoints_before(&file, starts);
        assert!(bench.store.all_checkpoints().count() <= all.min(parts as usize));
        // per part: an interval, a block (or a frame), and the bytes that the reader decoded past the end
        let more = parts * 600 * KB;
        assert!(length * parts / 2 > 2 * (length + more), "the bound tells nothing");
        assert_parts(&bench, &content, PART, (0..content.len()).step_by(PART));
        let read = decompressed(&bench);
        assert!((length..length + more).contains(&read), "{read} of {length}, {name}");
        // like a resumed run: without a scan, and backwards, so that the first part records all checkpoints that the
        // others need
        let fresh = super::compressed::bench(name, &stored, 64 * KB, 1 << 20);
        assert_parts(&fresh, &content, PART, (0..content.len()).step_by(PART).rev());
        let read = decompressed(&fresh);
        assert!(read < 2 * length + more, "{read} of {length}, {name}");
    }
}

#[test]
fn readers_at_once_wait_for_the_checkpoints_of_one() {
    const PART: usize = 200_000;
    let content = lines(4_000_000);
    let bench = bench("a.txt.gz", &gzip(&content), 64 * KB, 1 << 20);
    std::thread::scope(|scope| {
        for start in (0..content.len()).step_by(PART) {
            let (bench, content) = (&bench, &content);
            scope.spawn(move || assert_parts(bench, content, PART, std::iter::once(start)));
        }
    });
    let (length, parts, read) = (content.len() as u64, content.len().div_ceil(PART) as u64, decompressed(&bench));
    assert!(read < 2 * length + parts * 600 * KB, "{read} of {length}");
}

#[test]
fn checkpoints_have_a_bound_and_stay_right_where_they_are_thinned() {
    let content = lines(3_000_000);
    let parts = || (0..content.len()).step_by(100_000);
    let bench = bench("a.txt.gz", &gzip(&content), 4 * KB, 60_000);
    assert_parts(&bench, &content, usize::MAX, std::iter::once(0));
    for i in 0..4 {
        let (name, other) = (format!("more/{i}.txt.gz"), lines(300_000));
        bench.put(&name, &gzip(&other));
        let file = bench.files(&input(json!({"format": "text", "paths": [name]}))).remove(0);
        assert!(from(&bench, &file, 0, usize::MAX).unwrap() == other);
    }
    let checkpoints = bench.store.all_checkpoints();
    assert!((1..=60_000).contains(&checkpoints.bytes()) && checkpoints.count() > 0, "{checkpoints:?}");
    assert_parts(&bench, &content, 100_000, parts());
    assert!(checkpoints.bytes() <= 60_000);
    // a bound that no checkpoint fits into
    let bench = super::compressed::bench("a.txt.gz", &gzip(&content), 4 * KB, 1);
    assert_parts(&bench, &content, 100_000, parts());
    assert_eq!(bench.store.all_checkpoints().bytes(), 0);
}

#[test]
fn checkpoints_are_of_one_state_of_a_file() {
    let content = lines(1_000_000);
    let parts = || (0..content.len()).step_by(50_000);
    let bench = bench("a.txt.gz", &gzip(&content), 4 * KB, 1 << 20);
    assert_parts(&bench, &content, 50_000, parts());
    let other = [b"another line\n".to_vec(), content.clone()].concat();
    std::fs::remove_file(bench.path().join("a.txt.gz")).unwrap();
    bench.put("a.txt.gz", &gzip(&other));
    assert_parts(&bench, &other, 50_000, parts());
}

#[test]
fn who_begins_inside_of_a_member_still_holds_all_of_it_against_its_checksum() {
    let content = words(600_000).into_bytes();
    let whole = at_level(&content, 0);
    let (half, most) = (content.len() as u64 / 2, content.len());
    let read = |stored: &[u8]| {
        let bench = bench("a.txt.gz", stored, 64 * KB, 1 << 20);
        let file = only_file(&bench);
        let before = from(&bench, &file, 0, most / 2).unwrap().len();
        decompressed(&bench);
        let after = from(&bench, &file, half, usize::MAX);
        assert!(before >= most / 2 && decompressed(&bench) < half + 330_000, "it begins at a checkpoint");
        after
    };
    assert_eq!(read(&whole).unwrap(), content[half as usize..]);
    // a byte of a stored block, which only the checksum can detect, before the checkpoint and after it
    for at in [1000, most - 1000] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        let error = read(&damaged).unwrap_err();
        assert_eq!(error, "a.txt.gz: cannot be decoded: corrupt gzip stream does not have a matching checksum");
    }
    for (missing, what) in [(1, "unexpected end of file"), (9, "unexpected end of file")] {
        assert_eq!(read(&whole[..whole.len() - missing]).unwrap_err(), format!("a.txt.gz: is cut off: {what}"));
    }
    let garbage = [&whole[..], b"more than ten bytes"].concat();
    assert_eq!(read(&garbage).unwrap_err(), "a.txt.gz: cannot be decoded: invalid gzip header");
    // zero padding, which gzip accepts
    assert_eq!(read(&[&whole[..], &[0; 3]].concat()).unwrap(), content[half as usize..]);
}

#[test]
fn every_field_of_a_gzip_header_is_passed() {
    let body = gzip(b"text\n").split_off(10);
    let mut header = vec![0x1f, 0x8b, 8, 2 | 4 | 8 | 16, 1, 2, 3, 4, 0, 255, 3, 0, b'a', 0, b'b'];
    header.extend_from_slice(b"name\0a comment\0");
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header);
    let sum = (hasher.finalize() as u16).to_le_bytes();
    let file = |sum: [u8; 2]| [&header[..], &sum, &body].concat();
    let read = |stored: Vec<u8>| {
        let bench = Bench::with(&[("a.txt.gz", &stored)]);
        from(&bench, &only_file(&bench), 0, usize::MAX)
    };
    assert_eq!(read(file(sum)).unwrap(), b"text\n");
    assert!(read(file([sum[0] ^ 1, sum[1]])).unwrap_err().contains("matching checksum"));
    for cut in 2..header.len() + 2 {
        assert!(read(file(sum)[..cut].to_vec()).unwrap_err().contains("is cut off"), "{cut}");
    }
    let mut long = header[..10].to_vec();
    long[3] = 8;
    long.extend(std::iter::repeat_n(b'n', 70_000));
    assert!(read([long, vec![0], body.clone()].concat()).unwrap_err().contains("gzip header field too long"));
    let mut reserved = file(sum);
    reserved[3] |= 0x80;
    assert!(read(reserved).unwrap_err().contains("invalid gzip header"));
}

#[derive(Debug, Clone)]
struct Part {
    bytes: usize,
    level: u32,
    /// Number of bytes after which a block ends.
    flush: usize,
    named: bool,
    noise: bool,
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let part = (0..60_000_usize, 0..10_u32, prop_oneof![1..40_usize, 1000..20_000_usize], any::<bool>(), any::<bool>());
    let part = part.prop_map(|(bytes, level, flush, named, noise)| Part { bytes, level, flush, named, noise });
    prop::collection::vec(prop_oneof![5 => part.clone(), 1 => part.prop_map(|p| Part { bytes: 0, ..p })], 1..6)
}

/// Returns gzip members (or Zstandard frames) and their text.
fn store(parts: &[Part], as_gzip: bool) -> (Vec<u8>, Vec<u8>) {
    let (mut stored, mut content) = (Vec::new(), Vec::new());
    for (i, part) in parts.iter().enumerate() {
        let mut text = words(part.bytes).into_bytes();
        if part.noise {
            // incompressible data makes stored blocks
            let mut state = i as u64 + 1;
            text.iter_mut().for_each(|byte| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *byte = (state >> 40) as u8;
            });
        }
        // a limited number of blocks, some of them tiny
        let flush = part.flush.max(part.bytes / 400 + 1);
        if as_gzip {
            let mut builder = GzBuilder::new();
            if part.named {
                builder = builder.filename("name").comment("words").extra(vec![1, 2, 3]);
            }
            let mut encoder = builder.write(&mut stored, Compression::new(part.level));
            for chunk in text.chunks(flush) {
                encoder.write_all(chunk).unwrap();
                encoder.flush().unwrap();
            }
            encoder.finish().unwrap();
        } else {
            stored.extend(zstd::encode_all(&text[..], part.level as i32).unwrap());
        }
        content.extend(text);
    }
    (stored, content)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var("STILLHOUSE_SOAK").is_ok() { 300 } else { 24 },
        failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_place_of_any_file_is_read_as_from_the_start(
        parts in parts(),
        as_gzip in any::<bool>(),
        interval in prop_oneof![Just(1_u64), 100..5000_u64],
        places in prop::collection::vec(0..1000_u64, 1..12),
    ) {
        let (stored, mut content) = store(&parts, as_gzip);
        // the first bytes of a random file could look like another file type, so begin with text
        let start = Part { bytes: 100, level: 6, flush: 10, named: false, noise: false };
        let (first, text) = store(&[start], as_gzip);
        let stored = [first, stored].concat();
        content.splice(0..0, text);
        if as_gzip {
            let mut reference = Vec::new();
            flate2::read::MultiGzDecoder::new(&stored[..]).read_to_end(&mut reference).unwrap();
            prop_assert!(reference == content);
        }
        let name = if as_gzip { "a.txt.gz" } else { "a.txt.zst" };
        let bench = bench(name, &stored, interval, 1 << 20);
        let file = only_file(&bench);
        for place in places {
            let offset = content.len() as u64 * place / 999;
            let got = from(&bench, &file, offset, usize::MAX).unwrap();
            prop_assert!(got == content[offset as usize..], "{offset} of {}", content.len());
        }
        // one step of the decompressor yields up to 256 KB
        prop_assert!(!as_gzip || content.len() < 300_000 || bench.store.all_checkpoints().count() > 0);
    }

    #[test]
    fn damage_is_told_as_one_who_reads_from_the_start_tells_it(
        parts in parts(),
        at in 0..1_000_000_usize,
        cut in any::<bool>(),
        places in prop::collection::vec(0..1000_u64, 1..8),
    ) {
        let (first, _) = store(&[Part { bytes: 2000, level: 6, flush: 400, named: false, noise: false }], true);
        let (rest, _) = store(&parts, true);
        let mut stored = [&first[..], &rest].concat();
        let at = first.len() + at % rest.len();
        if cut {
            stored.truncate(at);
        } else {
            stored[at] ^= 0x10;
        }
        let bench = bench("a.txt.gz", &stored, 500, 1 << 20);
        let file = only_file(&bench);
        let mut reference = Vec::new();
        let failed = flate2::read::MultiGzDecoder::new(&stored[..]).read_to_end(&mut reference);
        let length = reference.len() as u64;
        for place in places {
            let offset = length * place / 999;
            let got = from(&bench, &file, offset, usize::MAX);
            match &failed {
                Ok(_) => prop_assert!(got.unwrap() == reference[offset as usize..]),
                Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                    let error = got.unwrap_err();
                    prop_assert!(error.starts_with("a.txt.gz: is cut off: "), "{error}");
                }
                Err(e) => prop_assert_eq!(got.unwrap_err(), format!("a.txt.gz: cannot be decoded: {e}")),
            }
        }
    }
}
