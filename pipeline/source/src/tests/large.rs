//! One document far larger than a piece: memory stays bounded because nothing holds more than a piece.

use super::*;
use crate::spool::Spool;

/// 30 MB in one JSON string with escapes, characters of every width, and no newline.
fn large_json() -> (Vec<u8>, u64) {
    let unit = "The quick brown fox — naïve 日本語 🎲 jumps. ";
    let escaped = format!("{unit}\\n\\\"");
    let n = 30_000_000 / escaped.len();
    let mut bytes = b"{\"before\": \"x\", \"text\": \"".to_vec();
    (0..n).for_each(|_| bytes.extend_from_slice(escaped.as_bytes()));
    bytes.extend_from_slice(b"\"}\n{\"text\": \"after\"}\n");
    (bytes, (n * (unit.len() + 2)) as u64)
}

#[test]
fn a_document_of_many_pieces_goes_through_a_temporary_file() {
    let (bytes, length) = large_json();
    let bench = Bench::with(&[("a.jsonl.zst", &zstandard(&bytes))]);
    let input = input(json!({"piece_kilobytes": 64}));
    let got = bench.all(&input, 1 << 20);
    assert_eq!(got.documents.len(), 2);
    assert_eq!(got.documents[0].len() as u64, length);
    assert!(got.documents[0].ends_with("🎲 jumps. \n\""));
    assert_eq!(got.summary.spooled_to_disk, 1);
    assert!(got.longest_piece <= 64_000, "{}", got.longest_piece);
}

#[test]
fn a_large_document_that_turns_out_bad_emits_nothing() {
    let (mut bytes, _) = large_json();
    let end = bytes.iter().position(|b| *b == b'\n').unwrap();
    bytes[end - 1] = b']';
    let bench = Bench::with(&[("a.jsonl", &bytes)]);
    let got = bench.all(&input(json!({"on_error": "skip"})), 1 << 40);
    assert_eq!(got.documents, ["after"]);
    assert_eq!(got.summary.skipped["broken JSON"], 1);
}

#[test]
fn the_spool_checks_characters_across_pushes() {
    let text = "aé日🎲";
    for cut in 0..=text.len() {
        let mut spool = Spool::new(4000);
        spool.push(&text.as_bytes()[..cut]).unwrap();
        assert_eq!(spool.is_whole(), text.is_char_boundary(cut));
        spool.push(&text.as_bytes()[cut..]).unwrap();
        assert!(spool.is_whole() && spool.length() == text.len() as u64);
        let mut got = String::new();
        spool
            .pieces(|e| e, &mut |piece, _| {
                got.push_str(piece);
                Ok(())
            })
            .unwrap();
        assert_eq!(got, text);
        spool.clear().unwrap();
        assert!(spool.push(b"\xe6\x97").is_ok());
        assert!(spool.push(b"x").is_err());
    }
}

/// Run by hand: `cargo nextest run -p stillhouse-source --run-ignored only large_document_by_hand --no-capture`.
#[test]
#[ignore = "200 MB; prints the resident memory for docs/benchmarks/input.md"]
fn large_document_by_hand() {
    use std::io::Write;
    let bench = Bench::new();
    let unit = "The quick brown fox jumps over the lazy dog, again. ".repeat(20);
    let mut file = std::io::BufWriter::new(std::fs::File::create(bench.path().join("a.jsonl")).unwrap());
    file.write_all(b"{\"text\": \"").unwrap();
    (0..200_000_000 / unit.len()).for_each(|_| file.write_all(unit.as_bytes()).unwrap());
    file.write_all(b"\"}\n").unwrap();
    drop(file);
    let peak = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|l| l.starts_with("VmHWM")).unwrap().to_string()
    };
    let input = input(json!({"piece_kilobytes": 1000}));
    let splits = bench.plan(&input, 1 << 40).unwrap();
    println!("before: {}", peak());
    let begin = std::time::Instant::now();
    let mut bytes = 0_u64;
    read_split(&bench.store, &bench.files(&input), &splits[0], &input, &mut |batch| {
        bytes += batch.column(1).as_string::<i32>().iter().flatten().map(|t| t.len() as u64).sum::<u64>();
        Ok(())
    })
    .unwrap();
    let seconds = begin.elapsed().as_secs_f64();
    println!("after {bytes} bytes in {seconds:.2} s ({:.0} MB/s): {}", bytes as f64 / 1e6 / seconds, peak());
}
