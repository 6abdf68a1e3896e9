use super::*;

fn fails(bench: &Bench, input: &Input, target: u64) -> String {
    let error = bench.try_all(input, target).unwrap_err();
    assert!(!error.retryable(), "{error}");
    error.to_string()
}

const BAD_JSONL: &[u8] =
    b"{\"text\":\"ok\"}\n{\"text\":\"ok2\"\n{\"text\":null}\n{\"text\":3}\n{\"other\":1}\n[1]\n{\"text\":\"\xff\"}\n\
    {\"text\":\"a\"} x\n{\"text\":\"\\ud800\"}\n{\"a\":\"\xc3\x28\",\"text\":\"b\"}\n{\"text\":\"ok3\"}";

#[test]
fn bad_json_is_skipped_and_counted() {
    let bench = Bench::with(&[("a.jsonl", BAD_JSONL), ("b.jsonl.gz", &gzip(BAD_JSONL))]);
    for target in [1, 20, 1 << 20] {
        let got = bench.all(&input(json!({"on_error": "skip"})), target);
        assert_eq!(got.documents, ["ok", "ok3", "ok", "ok3"]);
        let counted: Vec<_> = got.summary.skipped.iter().map(|(k, n)| (k.as_str(), *n)).collect();
        assert_eq!(
            counted,
            [("broken JSON", 8), ("invalid UTF-8", 4), ("missing column", 2), ("not a string", 2), ("null text", 2)]
        );
    }
}

#[test]
fn bad_json_names_file_and_line_in_any_split() {
    let lines: Vec<&[u8]> = BAD_JSONL.split(|b| *b == b'\n').collect();
    let expected = [
        (1, "broken JSON"),
        (2, "null text: the value of \"text\" is null; valid: a string"),
        (3, "not a string: the value of \"text\" is a number"),
        (4, "missing column: the object has no key \"text\""),
        (5, "broken JSON: got an array"),
        (6, "invalid UTF-8"),
        (7, "broken JSON"),
        (8, "broken JSON"),
        (9, "invalid UTF-8"),
    ];
    for (line, what) in expected {
        let mut content = b"{\"text\":\"ok\"}\n\n\n".to_vec();
        content.extend_from_slice(lines[line]);
        content.extend_from_slice(b"\n{\"text\":\"ok\"}\n");
        let bench = Bench::with(&[("d/a.jsonl", &content), ("d/a.jsonl.zst", &zstandard(&content))]);
        for name in ["d/a.jsonl", "d/a.jsonl.zst"] {
            for target in [1, 10, 1 << 20] {
                let text = fails(&bench, &input(json!({"paths": [name]})), target);
                assert!(text.starts_with(&format!("{name}: line 4: {what}")), "{text}");
                assert!(text.ends_with("leaves such records out and counts them"), "{text}");
            }
        }
    }
}

#[test]
fn text_that_is_not_utf8_names_its_line() {
    let content = b"one\ntwo\n\nthr\xffee\nfour\n";
    for (more, bytes) in [("", content.to_vec()), (".gz", gzip(content))] {
        let name = format!("a.txt{more}");
        let bench = Bench::with(&[(&name, &bytes)]);
        for document in ["line", "blank_line", "file"] {
            for target in [1, 7, 1 << 20] {
                let text = fails(&bench, &input(json!({"format": "text", "document": document})), target);
                assert!(text.starts_with(&format!("{name}: line 4: invalid UTF-8: ")), "{document}: {text}");
            }
        }
        let skip = |document| bench.all(&input(json!({"format": "text", "document": document, "on_error": "skip"})), 3);
        assert_eq!(skip("line").documents, ["one", "two", "", "four"]);
        assert_eq!(skip("blank_line").documents, ["one\ntwo"]);
        assert_eq!(skip("file").documents, [] as [&str; 0]);
        assert_eq!(skip("file").summary.skipped["invalid UTF-8"], 1);
    }
}

#[test]
fn a_character_cut_off_at_the_end_is_not_utf8() {
    for document in ["line", "blank_line", "file"] {
        let bench = Bench::with(&[("a.txt", b"ok \xe2\x82")]);
        let text = fails(&bench, &input(json!({"format": "text", "document": document})), 100);
        assert!(text.starts_with("a.txt: line 1: invalid UTF-8"), "{text}");
    }
}

#[test]
fn bad_csv_names_line_and_header() {
    let content = b"id,text\n1,\"a\nb\"\n2\n3,\xff\n4,d,e\n5,f\n";
    let bench = Bench::with(&[("a.csv", content)]);
    let csv = |more: Value| {
        let mut fields = json!({"format": "csv"});
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        input(fields)
    };
    for target in [1, 1 << 20] {
        let text = fails(&bench, &csv(json!({})), target);
        assert!(
            text.starts_with(
                "a.csv: line 4: wrong number of fields: got 1 fields; valid: 2, as in the header (id, text)"
            ),
            "{text}"
        );
        let got = bench.all(&csv(json!({"on_error": "skip"})), target);
        assert_eq!(got.documents, ["a\nb", "f"]);
        let counted: Vec<_> = got.summary.skipped.iter().map(|(k, n)| (k.as_str(), *n)).collect();
        assert_eq!(counted, [("invalid UTF-8", 1), ("wrong number of fields", 2)]);
    }
    let text = fails(&bench, &csv(json!({"text": "body"})), 10);
    assert_eq!(text, "a.csv: line 1: no column \"body\", which `input.text` names; columns: id, text");
}

#[test]
fn files_that_are_cut_off_are_named() {
    let content: Vec<u8> = (0..5000).flat_map(|i| format!("line {i} {}\n", i * 7919).into_bytes()).collect();
    for (name, whole) in [("a.txt.gz", gzip(&content)), ("a.txt.zst", zstandard(&content))] {
        let bench = Bench::with(&[(name, &whole[..whole.len() / 2])]);
        for document in ["line", "blank_line", "file"] {
            let text = fails(&bench, &input(json!({"format": "text", "document": document})), 1 << 20);
            assert!(text.starts_with(&format!("{name}: is cut off: ")), "{text}");
        }
        let bench = Bench::with(&[(name, b"")]);
        assert!(fails(&bench, &input(json!({"format": "text"})), 1).contains("is cut off: got 0 bytes"));
        let bench = Bench::with(&[(name, b"this is not compressed at all")]);
        let text = fails(&bench, &input(json!({"format": "text"})), 1);
        assert!(text.starts_with(&format!("{name}: is read as ")) && text.contains("not compressed"), "{text}");
        let mut broken = whole.clone();
        broken[12..40].fill(0xa5);
        let text = fails(&Bench::with(&[(name, &broken)]), &input(json!({"format": "text"})), 1);
        assert!(text.starts_with(&format!("{name}: cannot be decoded: ")), "{text}");
    }
}

#[test]
fn a_file_that_went_away_is_a_store_error() {
    let bench = Bench::with(&[("a.txt", b"a\n")]);
    let input = input(json!({"format": "text"}));
    let (files, splits) = (bench.files(&input), bench.plan(&input, 10).unwrap());
    std::fs::remove_file(bench.path().join("a.txt")).unwrap();
    let error = bench.read(&files, &input, &splits).unwrap_err();
    assert!(matches!(error, SourceError::Store { .. }) && !error.retryable(), "{error}");
    let error = bench.read(&[], &input, &splits).unwrap_err();
    assert!(error.to_string().contains("is in the plan but not in the listing"), "{error}");
}

#[test]
fn a_key_without_end_is_not_held() {
    let mut content = b"{\"".to_vec();
    content.extend(std::iter::repeat_n(b'k', 3 << 20));
    content.extend_from_slice(b"\n{\"text\":\"ok\"}\n");
    let bench = Bench::with(&[("a.jsonl", &content)]);
    let got = bench.all(&input(json!({"on_error": "skip"})), 1 << 30);
    assert_eq!((got.documents, got.summary.skipped["broken JSON"]), (vec!["ok".to_string()], 1));
}

#[test]
fn broken_json_is_reported_in_words_with_its_column() {
    let lines: [(&str, &str); 12] = [
        ("{broken", "neither a key in quotes nor } at column 2"),
        ("{\"text\" \"a\"}", "no colon after a key at column 9"),
        ("{\"text\": \"a\" \"b\": 1}", "no comma between two entries at column 14"),
        ("{\"text\": \"a\",}", "a comma after the last entry at column 13"),
        ("{\"text\": \"a\"", "the line ends before the value does"),
        ("{\"text\": \"a", "the line ends before the value does"),
        ("{\"text\": tru}", "a word that is none of true, false and null"),
        ("{\"n\": 01, \"text\": \"a\"}", "a number that is not JSON"),
        ("{\"text\": \"\\q\"}", "a backslash in a string that escapes nothing"),
        ("{\"text\": \"\\ud83d\"}", "half of a surrogate pair in a string"),
        ("{\"text\": \"a\tb\"}", "a control character in a string; JSON has it escaped"),
        ("// {\"text\": \"a\"}", "a comment, which JSON does not have at column 1"),
    ];
    for (line, words) in lines {
        let bench = Bench::with(&[("a.jsonl", line.as_bytes())]);
        let text = fails(&bench, &input(json!({})), 1 << 20);
        assert!(text.starts_with(&format!("a.jsonl: line 1: broken JSON: {words}")), "{line}: {text}");
        assert!(!text.contains("syntax error") && !text.contains("data pos"), "{text}");
    }
}
