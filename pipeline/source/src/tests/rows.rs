use proptest::prelude::*;

use super::*;

const TEXTS: [&str; 7] = ["first", "", "naïve — 日本語 🎲", "a \"quoted\" b, c", "two\nlines", "\\ back", "last one"];

fn jsonl(texts: &[&str], newline: &str) -> String {
    texts.iter().map(|t| format!("{}{newline}", json!({"id": 1, "text": t, "more": [{"text": 2}]}))).collect()
}

fn csv(texts: &[&str]) -> String {
    let rows = texts.iter().map(|t| format!("7,\"{}\",x\r\n", t.replace('"', "\"\"")));
    "id,text,tag\r\n".to_string() + &rows.collect::<String>()
}

type Compress = fn(&[u8]) -> Vec<u8>;
const COMPRESSIONS: [(&str, Compress); 3] = [("", |b| b.to_vec()), (".gz", gzip), (".zst", zstandard)];

fn every_compression(ending: &str, content: &str, fields: Value, expected: &[impl AsRef<str>]) {
    for (more, compress) in COMPRESSIONS {
        let bench = Bench::with(&[(&format!("a.{ending}{more}"), &compress(content.as_bytes()))]);
        bench.assert_documents(&input(fields.clone()), expected);
    }
}

#[test]
fn jsonl_round_trips() {
    every_compression("jsonl", &jsonl(&TEXTS, "\n"), json!({}), &TEXTS);
}

#[test]
fn jsonl_with_blank_lines_carriage_returns_and_mark() {
    let content = format!("\u{feff}{}\r\n  \t\r\n\n  {}", jsonl(&TEXTS, "\r\n"), jsonl(&["z"], ""));
    let expected: Vec<&str> = TEXTS.iter().copied().chain(["z"]).collect();
    every_compression("jsonl", &content, json!({}), &expected);
}

#[test]
fn jsonl_edge_values() {
    let content = concat!(
        "{\"text\": \"a\", \"text\": \"last wins\"}\n",
        "{\"n\": 1e999, \"m\": 123456789012345678901234567890, \"text\": \"\\u00e9\\ud83c\\udfb2\\n\"}\n",
        "{\"t\\u0065xt\": \"escaped key\"}  \n",
    );
    every_compression("jsonl", content, json!({}), &["last wins", "é🎲\n", "escaped key"]);
}

#[test]
fn text_lines() {
    let fields = json!({"format": "text"});
    every_compression("txt", "a\n\nb\r\n  c\n", fields.clone(), &["a", "", "b", "  c"]);
    every_compression("txt", "\u{feff}é\nno newline at the end", fields.clone(), &["é", "no newline at the end"]);
    every_compression("txt", "\u{feff}", fields.clone(), &[] as &[&str]);
    every_compression("txt", "\n\n", fields, &["", ""]);
}

#[test]
fn text_blocks() {
    let fields = json!({"format": "text", "document": "blank_line"});
    let content = "\u{feff}\n \n  indented\r\nsecond\n\t\n\nb\n\n\nc\nd";
    every_compression("txt", content, fields.clone(), &["  indented\nsecond", "b", "c\nd"]);
    every_compression("txt", "\n \n\n", fields, &[] as &[&str]);
}

#[test]
fn text_files() {
    for (more, compress) in COMPRESSIONS {
        let bench = Bench::new();
        bench.put(&format!("a.txt{more}"), &compress("\u{feff}one\r\n\ntwo".as_bytes()));
        bench.put(&format!("b.txt{more}"), &compress(b""));
        bench.put(&format!("c.txt{more}"), &compress("x".repeat(9999).as_bytes()));
        let input = input(json!({"format": "text", "document": "file"}));
        bench.assert_documents(&input, &["one\r\n\ntwo", "", &"x".repeat(9999)]);
    }
}

#[test]
fn csv_with_quoted_newlines_and_commas() {
    every_compression("csv", &csv(&TEXTS), json!({"format": "csv"}), &TEXTS);
    let content = "\u{feff}text;n\nplain;1\n\n\"semi;colon\";2\n\"\u{feff}mark\";3\n\"q\"\"\n\n\";4";
    let expected = ["plain", "semi;colon", "\u{feff}mark", "q\"\n\n"];
    every_compression("csv", content, json!({"format": "csv", "csv_delimiter": ";"}), &expected);
    every_compression("csv", "id,text\n", json!({"format": "csv"}), &[] as &[&str]);
}

#[test]
fn a_mark_at_the_start_of_a_later_csv_record_is_text() {
    every_compression("csv", "text\na\n\u{feff}b\n", json!({"format": "csv"}), &["a", "\u{feff}b"]);
}

#[test]
fn several_members_and_frames() {
    for compress in [gzip as Compress, zstandard] {
        let mut bytes = compress(b"a\nb");
        bytes.extend(compress(b"b\n"));
        bytes.extend(compress(b""));
        bytes.extend(compress(b"c"));
        let bench = Bench::with(&[("x", &bytes)]);
        let name = if bytes[0] == 0x1f { "gzip" } else { "zstd" };
        bench.assert_documents(&input(json!({"format": "text", "compression": name})), &["a", "bb", "c"]);
    }
}

#[test]
fn empty_files_hold_no_records() {
    for (format, name) in [("jsonl", "a.jsonl"), ("text", "a.txt"), ("csv", "a.csv")] {
        let bench = Bench::with(&[(name, b"")]);
        bench.assert_documents(&input(json!({"format": format})), &[] as &[&str]);
    }
}

#[test]
fn several_files_keep_the_order_of_the_job() {
    let bench = Bench::with(&[("a.txt", b"1\n2"), ("b.txt", b""), ("c.txt", b"3\n"), ("d/e.txt", b"4\n5\n")]);
    let input = input(json!({"format": "text", "paths": ["d/*", "*.txt"]}));
    bench.assert_documents(&input, &["4", "5", "1", "2", "3"]);
}

#[test]
fn documents_longer_than_a_piece_are_cut_between_characters() {
    let long: String = "日本🎲é".repeat(3000);
    let bench = Bench::with(&[("a.jsonl", jsonl(&["s", &long, "t"], "\n").as_bytes())]);
    let got = bench.all(&input(json!({})), 1 << 30);
    assert_eq!(got.documents, ["s", &long, "t"]);
    assert_eq!(got.summary.spooled_to_disk, 1);
    assert!((3990..=4000).contains(&got.longest_piece), "{}", got.longest_piece);
}

#[test]
fn ordinals_count_bad_records() {
    let bench = Bench::with(&[("a.jsonl", b"{\"text\":\"a\"}\n{\n\n{\"text\":\"b\"}\n")]);
    let got = bench.all(&input(json!({"on_error": "skip"})), 1 << 20);
    assert_eq!(got.ids, [DocumentId(0), DocumentId(2)]);
}

#[test]
fn a_stopped_consumer_stops_the_reader() {
    let bench = Bench::with(&[("a.txt", &b"line\n".repeat(5000))]);
    let input = input(json!({"format": "text"}));
    let splits = bench.plan(&input, 1 << 20).unwrap();
    let mut batches = 0;
    let result = read_split(&bench.store, &bench.files(&input), &splits[0], &input, &mut |_| {
        batches += 1;
        Err(Stopped)
    });
    assert!(matches!(result, Err(SourceError::Stopped(_))));
    assert_eq!(batches, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// For random texts and targets, the splits contain every record once, in order.
    #[test]
    fn splits_partition_the_records(
        texts in prop::collection::vec("[a-z\"\\\\,é🎲 \n\r]{0,30}", 1..12),
        target in 1_u64..200,
        ending in 0_usize..3,
    ) {
        let (more, compress) = COMPRESSIONS[ending];
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let bench = Bench::with(&[(&format!("a.jsonl{more}"), &compress(jsonl(&texts, "\n").as_bytes()))]);
        prop_assert_eq!(bench.all(&input(json!({})), target).documents, texts.clone());
        let bench = Bench::with(&[(&format!("a.csv{more}"), &compress(csv(&texts).as_bytes()))]);
        prop_assert_eq!(bench.all(&input(json!({"format": "csv"})), target).documents, texts.clone());
        let whole = texts.join("\n") + "\n";
        let bench = Bench::with(&[(&format!("a.txt{more}"), &compress(whole.as_bytes()))]);
        let lines: Vec<String> = whole.split_terminator('\n')
            .map(|l| l.strip_suffix('\r').unwrap_or(l).to_string()).collect();
        prop_assert_eq!(bench.all(&input(json!({"format": "text"})), target).documents, lines);
        let blocks = input(json!({"format": "text", "document": "blank_line"}));
        prop_assert_eq!(bench.all(&blocks, target).documents, bench.all(&blocks, u64::MAX).documents);
    }
}
