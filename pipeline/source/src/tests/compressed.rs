//! Compressed files: a split begins at the last checkpoint before it and reads the same bytes as from the start.

use std::io::Read;
use std::io::Write;
use std::sync::atomic::Ordering;

use flate2::{Compression, GzBuilder};
use proptest::prelude::*;

use super::*;
use crate::checkpoints::Checkpoints;
use crate::decode::Cursor;

const KB: u64 = 1 << 10;

/// Words that compress about as well as text.
fn words(bytes: usize) -> String {
    let mut state = 7_u64;
    let mut text = String::with_capacity(bytes + 10);
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(
            ["the ", "of ", "light ", "river ", "seven ", "quick ", "mountain ", "é"][(state >> 61) as usize],
        );
        text.push_str(&(state >> 50).to_string());
    }
    text
}

/// JSON lines of about 2 KB each.
fn lines(bytes: usize) -> Vec<u8> {
    let text = words(bytes);
    let mut rest = text.as_str();
    let mut out = String::new();
    while !rest.is_empty() {
        let mut cut = rest.len().min(2000);
        while !rest.is_char_boundary(cut) {
            cut += 1;
        }
        out.push_str(&(json!({"id": out.len(), "text": &rest[..cut]}).to_string() + "\n"));
        rest = &rest[cut..];
    }
    out.into_bytes()
}

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

#[test]
fn a_split_decompresses_little_of_what_is_before_it() {
    let content = lines(4_000_000);
    let length = content.len() as u64;
    let frames: Vec<u8> = content.chunks(100_000).flat_map(zstandard).collect();
    // level 1 gives one very long block, level 6 many blocks
    let (quick, usual) = (gzip(&content), at_level(&content, 6));
    for (name, stored) in [("a.jsonl.gz", quick), ("a.jsonl.gz", usual), ("a.jsonl.zst", frames)] {
        let input = input(json!({}));
        let expected = Bench::with(&[("a.jsonl", &content)]).all(&input, u64::MAX).documents;
        let bench = bench(name, &stored, 64 * KB, 1 << 20);
        let (files, splits) = (bench.files(&input), bench.plan(&input, 200_000).unwrap());
        assert!(splits.len() > 15, "{}", splits.len());
        assert_eq!(decompressed(&bench), length, "planning decompresses once");
        // per split: an interval, a block (or a frame), and the bytes that the reader decoded past the end
        let more = splits.len() as u64 * 600 * KB;
        assert!(length * splits.len() as u64 / 2 > 2 * (length + more), "the bound tells nothing");
        let got = bench.read(&files, &input, &splits).unwrap();
        let read = decompressed(&bench);
        assert_eq!(got.documents, expected);
        assert!((length..length + more).contains(&read), "{read} of {length}, {name}");
        // like a resumed run: without planning, and backwards, so that the first split records all checkpoints that the
        // others need
        let fresh = super::compressed::bench(name, &stored, 64 * KB, 1 << 20);
        let files = fresh.files(&input);
        for split in splits.iter().rev() {
            fresh.read(&files, &input, std::slice::from_ref(split)).unwrap();
        }
        let read = decompressed(&fresh);
        assert!(read < 2 * length + more, "{read} of {length}, {name}");
    }
}

#[test]
fn splits_that_are_read_at_once_wait_for_the_checkpoints_of_one() {
    let content = lines(4_000_000);
    let input = input(json!({}));
    let bench = bench("a.jsonl.gz", &gzip(&content), 64 * KB, 1 << 20);
    let splits = Bench::with(&[("a.jsonl.gz", &gzip(&content))]).plan(&input, 200_000).unwrap();
    let files = bench.files(&input);
    let expected = Bench::with(&[("a.jsonl", &content)]).all(&input, u64::MAX).documents;
    let got: Vec<String> = std::thread::scope(|scope| {
        let read = |split| bench.read(&files, &input, std::slice::from_ref(split)).unwrap().documents;
        let threads: Vec<_> = splits.iter().map(|split| scope.spawn(move || read(split))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(got, expected);
    let (length, read) = (content.len() as u64, decompressed(&bench));
    assert!(read < 2 * length + splits.len() as u64 * 600 * KB, "{read} of {length}");
}

#[test]
fn checkpoints_have_a_bound_and_stay_right_where_they_are_thinned() {
    let content = lines(3_000_000);
    let input = input(json!({}));
    let expected = Bench::with(&[("a.jsonl", &content)]).all(&input, u64::MAX).documents;
    let bench = bench("a.jsonl.gz", &gzip(&content), 4 * KB, 60_000);
    (0..4).for_each(|i| bench.put(&format!("more/{i}.jsonl.gz"), &gzip(&lines(300_000))));
    let splits = bench.plan(&input, 100_000).unwrap();
    let checkpoints = bench.store.all_checkpoints();
    assert!((1..=60_000).contains(&checkpoints.bytes()) && checkpoints.count() > 0, "{checkpoints:?}");
    let got = bench.read(&bench.files(&input), &input, &splits).unwrap();
    assert_eq!(got.documents[..expected.len()], expected);
    assert!(checkpoints.bytes() <= 60_000);
    // a bound that no checkpoint fits into
    let bench = super::compressed::bench("a.jsonl.gz", &gzip(&content), 4 * KB, 1);
    assert_eq!(bench.all(&input, 100_000).documents, expected);
    assert_eq!(bench.store.all_checkpoints().bytes(), 0);
}

#[test]
fn checkpoints_are_of_one_state_of_a_file() {
    let input = input(json!({}));
    let bench = bench("a.jsonl.gz", &gzip(&lines(1_000_000)), 4 * KB, 1 << 20);
    bench.all(&input, 50_000);
    let other = [b"{\"text\": \"another\"}\n".to_vec(), lines(1_000_000)].concat();
    std::fs::remove_file(bench.path().join("a.jsonl.gz")).unwrap();
    bench.put("a.jsonl.gz", &gzip(&other));
    let expected = Bench::with(&[("a.jsonl", &other)]).all(&input, u64::MAX).documents;
    assert_eq!(bench.all(&input, 50_000).documents, expected);
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

/// Run by hand: `cargo nextest run -p stillhouse-source --run-ignored only readers_by_hand --no-capture`.
#[test]
#[ignore = "200 MB of each format; prints the figures for BENCHMARKS.md"]
fn readers_by_hand() {
    let wanted = std::env::var("READER").ok();
    let is_wanted = |name: &str| wanted.as_deref().is_none_or(|wanted| wanted == name);
    let content = lines(20_000_000);
    let times = 10;
    let repeated = |stored: &[u8]| stored.repeat(times);
    let all = repeated(&content);
    let texts: Vec<String> = content
        .split(|b| *b == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice::<Value>(line).unwrap()["text"].as_str().unwrap().to_owned())
        .collect();
    let text = repeated(texts.iter().map(|t| format!("{t}\n")).collect::<String>().as_bytes());
    let csv = ["text,n\n".to_owned(), texts.iter().map(|t| format!("\"{t}\",1\n")).collect::<String>().repeat(times)];
    let column = arrow::array::LargeStringArray::from_iter_values(texts.iter().cycle().take(texts.len() * times));
    let batch = RecordBatch::try_from_iter([("text", Arc::new(column) as arrow::array::ArrayRef)]).unwrap();
    type Case<'a> = (&'a str, &'a str, Box<dyn Fn() -> Vec<u8> + 'a>, u64);
    let cases: [Case<'_>; 8] = [
        ("jsonl", "jsonl", Box::new(|| all.clone()), u64::MAX),
        ("jsonl.gz", "jsonl", Box::new(|| at_level(&all, 6)), 64_000_000),
        ("jsonl.gz", "jsonl", Box::new(|| at_level(&all, 6)), 8_000_000),
        ("jsonl.zst", "jsonl", Box::new(|| zstd::encode_all(&all[..], 3).unwrap()), 64_000_000),
        ("txt", "text", Box::new(|| text.clone()), u64::MAX),
        ("csv", "csv", Box::new(|| csv.concat().into_bytes()), u64::MAX),
        ("csv.gz", "csv", Box::new(|| gzip(csv.concat().as_bytes())), 64_000_000),
        ("parquet", "parquet", Box::new(|| parquet_bytes(&batch, 10_000)), u64::MAX),
    ];
    for (ending, format, stored, target) in cases {
        if !is_wanted(ending) {
            continue;
        }
        let bench = Bench::with(&[(&format!("a.{ending}"), &stored())]);
        let input = input(json!({"format": format, "piece_kilobytes": 1000}));
        let begin = std::time::Instant::now();
        let splits = bench.plan(&input, target).unwrap();
        let planned = begin.elapsed().as_secs_f64();
        let files = bench.files(&input);
        let mut bytes = 0;
        let begin = std::time::Instant::now();
        for split in &splits {
            bytes += read_split(&bench.store, &files, split, &input, &mut |_| Ok(())).unwrap().text_bytes;
        }
        let seconds = begin.elapsed().as_secs_f64();
        let speed = |seconds: f64| bytes as f64 / 1e6 / seconds;
        println!(
            "{ending}, {} splits: read {:.0} MB/s, planned {:.0} MB/s",
            splits.len(),
            speed(seconds),
            speed(planned)
        );
    }
}
