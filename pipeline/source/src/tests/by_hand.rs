//! The speed of the readers, for docs/benchmarks/input.md.

#[path = "../../../input_files/src/tests/words.rs"]
mod words;

use std::io::Write;

use flate2::Compression;

use super::*;
use words::lines;

fn at_level(content: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

/// Run by hand: `cargo nextest run -p stillhouse-source --run-ignored only readers_by_hand --no-capture`.
#[test]
#[ignore = "200 MB of each format; prints the figures for docs/benchmarks/input.md"]
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
