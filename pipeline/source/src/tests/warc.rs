//! WARC files of text, as Common Crawl writes them.

use super::carried::carried;
use super::*;

const NEXT: &str = "\r\n\r\n";

/// A record with its header and content, without the lines after it.
fn record(kind: &str, fields: &[(&str, &str)], content: &[u8]) -> Vec<u8> {
    let mut out = format!("WARC/1.0\r\nWARC-Type: {kind}\r\n");
    for (name, value) in fields {
        out += &format!("{name}: {value}\r\n");
    }
    out += &format!("Content-Type: text/plain\r\nContent-Length: {}\r\n\r\n", content.len());
    [out.as_bytes(), content].concat()
}

/// Texts that look like parts of the format, and the languages that the crawl found.
fn pages() -> Vec<(String, Option<&'static str>)> {
    let mut pages = vec![
        ("Ett.\nTvå.\n".to_owned(), Some("swe")),
        (String::new(), None),
        ("WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 5\r\n\r\nhello".to_owned(), Some("eng")),
        ("\r\n\r\n\r\n".to_owned(), Some("eng,swe")),
    ];
    pages.extend((0..40).map(|i| (format!("page {i} {}", "é\n".repeat(i * 97 % 900)), Some("fra"))));
    pages
}

fn uri(i: usize) -> String {
    format!("https://example.org/{i}?q=a:b")
}

/// The records of a file: the crawl's own first, and some between the texts.
fn records() -> Vec<Vec<u8>> {
    let mut records = vec![record("warcinfo", &[("WARC-Filename", "x.warc.wet.gz")], b"software: ours\r\n")];
    for (i, (text, language)) in pages().into_iter().enumerate() {
        let (uri, id) = (uri(i), format!("<urn:uuid:{i}>"));
        let mut fields = vec![("WARC-Target-URI", uri.as_str()), ("WARC-Record-ID", &id)];
        // names have no case
        fields.extend(language.map(|language| ("warc-identified-content-language", language)));
        records.push(record("conversion", &fields, text.as_bytes()));
        if i % 7 == 3 {
            records.push(record("metadata", &[("WARC-Target-URI", &uri)], b"fetchTimeMs: 17\r\n"));
        }
    }
    records
}

fn file() -> Vec<u8> {
    records().iter().flat_map(|record| [record.as_slice(), NEXT.as_bytes()].concat()).collect()
}

fn warc(patch: Value) -> Input {
    let mut fields = json!({"format": "warc"});
    fields.as_object_mut().unwrap().extend(patch.as_object().unwrap().clone());
    input(fields)
}

#[test]
fn the_text_of_pages_is_read_in_any_split() {
    // one member per record, as in a crawl
    let members: Vec<u8> = records().iter().flat_map(|r| gzip(&[r, NEXT.as_bytes()].concat())).collect();
    let bench = Bench::with(&[
        ("a.warc.wet", &file()),
        ("b.warc.wet.gz", &members),
        ("c.wet.zst", &zstandard(&file())),
        ("d.wet", b""),
    ]);
    let texts: Vec<String> = pages().into_iter().map(|(text, _)| text).collect();
    bench.assert_documents(&warc(json!({})), &[&texts[..], &texts, &texts].concat());
}

#[test]
fn fields_of_the_header_stay_with_their_page() {
    let bench = Bench::with(&[("a.warc.wet.gz", &gzip(&file()))]);
    let names = ["WARC-Target-URI", "_file", "WARC-Identified-Content-Language", "WARC-Date"];
    let expected: Vec<_> = pages()
        .into_iter()
        .enumerate()
        .map(|(i, (text, language))| {
            (text, vec![Some(uri(i)), Some("a.warc.wet.gz".into()), language.map(str::to_owned), None])
        })
        .collect();
    for target in [1, 500, 1 << 20] {
        let (found, skipped) = carried(&bench, &warc(json!({"carry": names})), target);
        assert_eq!((&found, skipped), (&expected, 0), "{target}");
    }
    let check = |fields: Value| {
        let input = warc(fields);
        check_columns(&bench.store, &bench.files(&input), &input, &mut |_| {}).unwrap()
    };
    assert_eq!(check(json!({"carry": names})), []);
    let reported = check(json!({"carry": ["WARC-Target-URL"]}))[0].to_string();
    assert!(
        reported.contains("input.carry[0]") && reported.contains("columns: text, WARC-Target-URI, WARC-Date"),
        "{reported}"
    );
}

#[test]
fn folded_lines_and_bare_newlines_are_read() {
    let text = "WARC/1.1\nWARC-Type: conversion\nWARC-Target-URI: http://a/\n  b\nContent-Length: 2\n\nok";
    let bench = Bench::with(&[("a.wet", text.as_bytes())]);
    let (found, _) = carried(&bench, &warc(json!({"carry": ["WARC-Target-URI"]})), 1);
    assert_eq!(found, [("ok".to_owned(), vec![Some("http://a/ b".to_owned())])]);
}

#[test]
fn a_text_that_is_not_utf_8_is_bad_and_the_next_is_read() {
    let latin = record("conversion", &[], b"one\ntwo \xe9\n");
    let cut = record("conversion", &[], "é".as_bytes().split_at(1).0);
    let good = record("conversion", &[], b"good");
    let bytes = [latin, cut, good].map(|record| [record, NEXT.into()].concat()).concat();
    let bench = Bench::with(&[("a.wet", &bytes)]);
    for target in [1, 1 << 20] {
        let got = bench.all(&warc(json!({"on_error": "skip"})), target);
        assert_eq!((got.documents, got.summary.skipped["invalid UTF-8"]), (vec!["good".to_owned()], 2));
    }
    let error = bench.try_all(&warc(json!({})), 1).unwrap_err().to_string();
    // the line of the fault: five of the header, the empty one, and the second of the text
    assert!(error.starts_with("a.wet: line 7: invalid UTF-8"), "{error}");
}

#[test]
fn what_is_no_warc_file_of_text_is_refused() {
    let whole = record("conversion", &[("WARC-Target-URI", "http://a/")], b"0123456789");
    let with_length = |length: &str| {
        String::from_utf8(whole.clone()).unwrap().replace("Content-Length: 10", &format!("Content-Length: {length}"))
    };
    let response = record("response", &[], b"HTTP/1.1 200 OK\r\n\r\n<html>");
    let long = record("conversion", &[("X", &"x".repeat(300 << 10))], b"a");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let cases: [(String, &str); 9] = [
        (
            text(&response),
            "is of the type \"response\", whose content is not text; valid: files of `conversion` records",
        ),
        (text(&record("continuation", &[], b"x")), "is of the type \"continuation\""),
        (
            "{\"text\": \"x\"}\n".into(),
            "at byte 0 is broken: it begins with \"{\\\"text\\\": \\\"x\\\"}\"; valid: WARC/1.0",
        ),
        (with_length("eleven"), "its Content-Length is \"eleven\"; valid: a number of bytes"),
        (with_length("-1"), "its Content-Length is \"-1\""),
        (with_length("12"), "the file ends 2 bytes before its content does"),
        (with_length("8"), "at byte 116 is broken: it begins with \"89\""),
        (text(&whole[..33]), "the file ends in its header"),
        (text(&long), "its header has more than 262144 bytes"),
    ];
    for (bytes, message) in cases {
        let bench = Bench::with(&[("a.wet", bytes.as_bytes())]);
        for on_error in ["fail", "skip"] {
            let error = bench.try_all(&warc(json!({"on_error": on_error})), 1 << 20).unwrap_err();
            assert!(error.to_string().contains(message) && !error.retryable(), "{message}: {error}");
        }
    }
}
