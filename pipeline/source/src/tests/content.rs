//! Files whose content does not match their name or the job.

use super::*;

fn utf16(text: &str, mark: bool, big: bool) -> Vec<u8> {
    let units = mark.then_some(0xfeff).into_iter().chain(text.encode_utf16());
    units.flat_map(|unit| if big { unit.to_be_bytes() } else { unit.to_le_bytes() }).collect()
}

/// File names, their bytes, and the expected messages.
fn impostors() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let text: arrow::array::ArrayRef = std::sync::Arc::new(arrow::array::StringArray::from(vec!["x"]));
    let batch = RecordBatch::try_from_iter([("text", text)]).unwrap();
    let mut arrow_file = arrow::ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow_file.write(&batch).unwrap();
    let line = b"{\"text\": \"a line\"}\n";
    let words = std::str::from_utf8(line).unwrap();
    let utf32: Vec<u8> =
        std::iter::once('\u{feff}').chain(words.chars()).flat_map(|c| (c as u32).to_le_bytes()).collect();
    vec![
        ("gzip", gzip(line), "these are gzip bytes; say `compression: gzip`"),
        ("zstd", zstandard(line), "these are Zstandard bytes; say `compression: zstd`"),
        ("xz", b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4\x46".to_vec(), "these are xz bytes, which are not read here"),
        ("bzip2", b"BZh91AY&SY\x12\x34".to_vec(), "these are bzip2 bytes, which are not read here"),
        ("zip", b"PK\x03\x04\x14\0\0\0".to_vec(), "these are zip bytes, which are not read here"),
        ("parquet", parquet_bytes(&batch, 1), "this is a Parquet file; say `format: parquet`"),
        ("arrow", arrow_file.into_inner().unwrap(), "this is an Arrow file; say `format: arrow`"),
        ("utf16", utf16(words, true, false), "this is text in UTF-16; valid: UTF-8"),
        ("utf16be", utf16(words, true, true), "this is text in UTF-16; valid: UTF-8"),
        ("bare16", utf16(words, false, false), "this is text in UTF-16; valid: UTF-8"),
        ("bare16be", utf16(words, false, true), "this is text in UTF-16; valid: UTF-8"),
        ("utf32", utf32, "this is text in UTF-32; valid: UTF-8"),
    ]
}

#[test]
fn what_a_file_is_instead_is_reported_whatever_on_error_says() {
    for (name, bytes, says) in impostors() {
        for format in ["jsonl", "text", "csv"] {
            for (ending, compress) in
                [("", None), (".gz", Some(gzip as fn(&[u8]) -> Vec<u8>)), (".zst", Some(zstandard))]
            {
                let name = format!("{name}{ending}");
                let stored = compress.map_or_else(|| bytes.clone(), |compress| compress(&bytes));
                let bench = Bench::with(&[(&name, &stored)]);
                let input = input(json!({"format": format, "on_error": "skip"}));
                let read = bench.try_all(&input, 1 << 20).unwrap_err();
                assert!(matches!(&read, SourceError::Corrupt { .. }) && !read.retryable(), "{read}");
                let reported = read.to_string();
                assert!(reported.starts_with(&format!("{name}: ")) && reported.contains(says), "{format}: {reported}");
                if ending.is_empty() {
                    let problems = check_columns(&bench.store, &bench.files(&input), &input, &mut |_| {}).unwrap();
                    let reported = problems[0].to_string();
                    assert!(
                        reported.starts_with(&format!("input.paths: {name}: ")) && reported.contains(says),
                        "{reported}"
                    );
                }
            }
        }
    }
}

#[test]
fn compression_that_is_not_there_is_reported() {
    let line: &[u8] = b"{\"text\": \"a line\"}\n";
    for (name, bytes, compression, says) in [
        ("a.jsonl.gz", line.to_vec(), "auto", "is read as gzip by its name, but these bytes are not compressed"),
        ("a.jsonl.zst", line.to_vec(), "auto", "is read as zstd by its name, but these bytes are not compressed"),
        (
            "a.jsonl.gz",
            zstandard(line),
            "auto",
            "is read as gzip by its name, but these are Zstandard bytes; say `compression: zstd`",
        ),
        (
            "a.jsonl",
            gzip(line),
            "zstd",
            "is read as zstd as `compression` says, but these are gzip bytes; say `compression: gzip`",
        ),
    ] {
        let bench = Bench::with(&[(name, &bytes)]);
        let input = input(json!({"compression": compression, "on_error": "skip"}));
        let reported = bench.try_all(&input, 100).unwrap_err().to_string();
        assert!(reported.starts_with(&format!("{name}: {says}")), "{reported}");
        let problems = check_columns(&bench.store, &bench.files(&input), &input, &mut |_| {}).unwrap();
        assert!(problems[0].to_string().contains(says), "{problems:?}");
    }
}

#[test]
fn columnar_formats_report_what_the_file_is_instead() {
    for (name, bytes, says) in impostors() {
        for format in ["parquet", "arrow"] {
            if name == format {
                continue;
            }
            let says = match name {
                "gzip" | "zstd" | "xz" | "bzip2" | "zip" => {
                    "these are compressed bytes; Parquet and Arrow files compress inside"
                }
                _ => says,
            };
            let bench = Bench::with(&[(name, &bytes)]);
            let input = input(json!({"format": format, "on_error": "skip"}));
            let problems = check_columns(&bench.store, &bench.files(&input), &input, &mut |_| {}).unwrap();
            assert!(problems[0].to_string().contains(says), "{name} as {format}: {problems:?}");
        }
    }
    let bench = Bench::with(&[("a", b"{\"text\": \"a line\"}\n{\"text\": \"and more of it\"}\n")]);
    for format in ["parquet", "arrow"] {
        let input = input(json!({"format": format}));
        let problems = check_columns(&bench.store, &bench.files(&input), &input, &mut |_| {}).unwrap();
        assert!(problems[0].to_string().contains("this begins like JSON"), "{format}: {problems:?}");
    }
}

#[test]
fn text_that_only_looks_like_something_else_is_text() {
    for text in ["PAR1 is a word", "BZh9 too", "PK", "ARROW1", "7z", "(\u{b5}", "7zXZ"] {
        let bench = Bench::with(&[("a.txt", text.as_bytes())]);
        assert_eq!(bench.all(&input(json!({"format": "text"})), 10).documents, [text]);
    }
}
