//! JSON lines have two parsers: if the fast one accepts a line, the other returns exactly the same.

use proptest::prelude::*;

use super::*;
use crate::formats::fast_json_parser;
use crate::spool::Spool;

const LONGEST_LINE: usize = 1 << 20;

/// Returns the text that the fast parser finds in a line.
fn fast(line: &[u8], name: &str) -> Option<String> {
    let mut spool = Spool::new(4000);
    let taken = fast_json_parser::read(line, name, &mut spool).unwrap();
    taken.then(|| {
        let mut text = String::new();
        spool
            .pieces(|e| e, &mut |piece, _| {
                text.push_str(piece);
                Ok(())
            })
            .unwrap();
        text
    })
}

/// Reads the only line of a file. The fast parser needs a newline, so without one the other parser reads it.
fn read(line: &[u8], name: &str, newline: bool) -> Got {
    let bytes = [line, if newline { b"\n" } else { b"" }].concat();
    let bench = Bench::with(&[("a.jsonl", &bytes)]);
    bench.all(&input(json!({"text": name, "on_error": "skip"})), u64::MAX)
}

fn both(line: &[u8], name: &str) {
    let slow = read(line, name, false);
    assert_eq!(read(line, name, true), slow, "{}", String::from_utf8_lossy(line));
    // the fast parser never gets longer lines
    if line.len() > LONGEST_LINE {
        return;
    }
    if let Some(text) = fast(line, name) {
        assert_eq!(slow.documents, [text], "{}", String::from_utf8_lossy(line));
    }
}

#[test]
fn good_lines_are_read_in_the_fast_way() {
    let lines = [
        (r#"{"text": "a"}"#, "a"),
        (
            "{\"text\":\"\\u00e9 \\ud83c\\udfb2 \\\" \\\\ \\/ \\b\\f\\n\\r\\t é\"} \t\r",
            "é 🎲 \" \\ / \u{8}\u{c}\n\r\t é",
        ),
        (r#"{"a": [1, -2.5e3, {"b": [true, false, null, "x"]}], "text": "b", "c": {}}"#, "b"),
        (r#"{"text": "first", "text": "last"}"#, "last"),
        (r#"{"text": ""}"#, ""),
    ];
    for (line, text) in lines {
        assert_eq!(fast(line.as_bytes(), "text").as_deref(), Some(text));
        both(line.as_bytes(), "text");
    }
    let nested = [
        (r#"{"m": {"t": "a"}}"#, Some("a")),
        (r#"{"m": {"t": "a"}, "m.t": "b"}"#, Some("b")),
        (r#"{"m.t": "b", "m": {"t": "a"}}"#, Some("b")),
        (r#"{"m": {"t": "a"}, "m": {}}"#, None),
        (r#"{"m": {"t": "a"}, "m": {"t": "c"}}"#, Some("c")),
        (r#"{"m": {}, "m.t": "b"}"#, Some("b")),
    ];
    for (line, text) in nested {
        assert_eq!(fast(line.as_bytes(), "m.t").as_deref(), text, "{line}");
        both(line.as_bytes(), "m.t");
    }
}

#[test]
fn whatever_is_odd_is_left_to_the_other_way() {
    let deep = |n| format!("{{\"a\": {}{}, \"text\": \"x\"}}", "[".repeat(n), "]".repeat(n));
    let odd = [
        r#"{"text": "a"} x"#,
        r#"{"text": "a""#,
        r#"{"text": 1}"#,
        r#"{"text": null}"#,
        r#"{"texts": "a"}"#,
        "[]",
        "1",
        "",
        r#"{"text": "a", "text": 1}"#,
        r#"{"text": 1, "text": "a"}"#,
        r#"{"text": "\ud800"}"#,
        r#"{"b": "\ud800", "text": "a"}"#,
        r#"{"b": "\udc00\ud800", "text": "a"}"#,
        r#"{"b": "\q", "text": "a"}"#,
        r#"{"b": 01, "text": "a"}"#,
        r#"{"b": 1., "text": "a"}"#,
        r#"{"b": +1, "text": "a"}"#,
        r#"{"b": NaN, "text": "a"}"#,
        r#"{"b": tru, "text": "a"}"#,
        r#"{"b": 1,, "text": "a"}"#,
        r#"{"b": [1,], "text": "a"}"#,
        r#"{"text": "a",}"#,
        r#"{"b": {"c"}, "text": "a"}"#,
        "{\"b\": \"\t\", \"text\": \"a\"}",
        r#"{"b": [}], "text": "a"}"#,
        "{\"text\": \"a\"}\0",
        "\u{feff}{\"text\": \"a\"}",
        r#"{'text': 'a'}"#,
        r#"{"\ud800": 1, "text": "a"}"#,
    ];
    for line in odd {
        assert_eq!(fast(line.as_bytes(), "text"), None, "{line}");
        both(line.as_bytes(), "text");
    }
    for bytes in [
        &b"{\"b\": \"\xff\", \"text\": \"a\"}"[..],
        b"{\"\xc3\x28\": 1, \"text\": \"a\"}",
        b"{\"text\": \"\xed\xa0\x80\"}",
    ] {
        assert_eq!(fast(bytes, "text"), None);
        both(bytes, "text");
    }
    for depth in [1, 100, 124, 125, 126, 127, 128, 129, 130, 1000] {
        both(deep(depth).as_bytes(), "text");
    }
    // numbers of any size are valid; the fast parser does not accept them
    for number in ["1e999", "123456789012345678901234567890", "-0", "0.1e-999", "1E+5"] {
        let line = format!("{{\"n\": {number}, \"text\": \"a\"}}");
        assert_eq!(read(line.as_bytes(), "text", true).documents, ["a"], "{number}");
        both(line.as_bytes(), "text");
    }
}

#[test]
fn a_key_of_more_than_a_megabyte_is_refused_in_both_ways() {
    for (length, good) in [(1 << 19, 1), (1 << 21, 0)] {
        let line = format!("{{\"{}\": 1, \"text\": \"a\"}}", "k".repeat(length));
        both(line.as_bytes(), "text");
        assert_eq!(read(line.as_bytes(), "text", true).documents.len(), good);
    }
}

/// Generates valid and broken tokens of JSON, which often form an object.
fn token() -> impl Strategy<Value = String> {
    let string = prop_oneof![
        3 => "[a-z ]{0,6}",
        1 => any::<String>().prop_map(|s| { let quoted = json!(s).to_string(); quoted[1..quoted.len() - 1].to_owned() }),
        1 => prop::sample::select(vec!["\\n", "\\u00e9", "\\ud83c\\udfb2", "\\ud800", "\\udc00", "\\x", "\\u12", "\t", "text", "m", "t"]).prop_map(str::to_owned),
    ];
    let value = prop_oneof![
        4 => string.prop_map(|s| format!("\"{s}\"")),
        2 => prop::sample::select(vec!["1", "-1.5e7", "01", "1.", ".5", "1e400", "true", "null", "false", "tru", "NaN"]).prop_map(str::to_owned),
    ];
    value.prop_recursive(3, 12, 4, |inner| {
        let key = prop::sample::select(vec!["text", "m", "t", "m.t", "a", "\\u0074ext", "te\\u0078t"]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|v| format!("[{}]", v.join(","))),
            prop::collection::vec((key, inner), 0..4).prop_map(|v| {
                let entries: Vec<String> = v.iter().map(|(k, v)| format!("\"{k}\": {v}")).collect();
                format!("{{{}}}", entries.join(", "))
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var("STILLHOUSE_SOAK").is_ok() { 20_000 } else { 500 },
        failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_line_is_read_the_same_in_both_ways(
        entries in prop::collection::vec((prop::sample::select(vec!["text", "m", "m.t", "a", "te\\u0078t"]), token()), 0..5),
        change in prop::option::weighted(0.5, (any::<prop::sample::Index>(), any::<u8>(), 0..3_u8)),
        nested: bool,
    ) {
        let entries: Vec<String> = entries.iter().map(|(k, v)| format!("\"{k}\": {v}")).collect();
        let mut line = format!("{{{}}}", entries.join(", ")).into_bytes();
        if let Some((at, byte, how)) = change {
            let at = at.index(line.len());
            match how {
                0 => line[at] = byte,
                1 => line.insert(at, byte),
                _ => { line.remove(at); }
            }
        }
        prop_assume!(!line.contains(&b'\n') && !line.contains(&0));
        both(&line, if nested { "m.t" } else { "text" });
    }
}
