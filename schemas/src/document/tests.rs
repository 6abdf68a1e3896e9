//! Tests of the trees: the values equal those of the parser for the service's settings, and the positions are where a
//! user expects them.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn yaml_value(text: &str) -> Result<Value, Problem> {
    Document::read(text).map(|d| d.value())
}

#[test]
fn scalars_mean_what_they_meant() {
    let texts = "~|null|Null|NULL|nUll|true|True|TRUE|tRue|yes|no|on|off|y|n|0|-0|+0|1|-1|+1|00|007|-007|0123|0x10|-0x10|0X10|0o17|-0o17|0b11|\
        0x|1_000|1e3|1E3|1e-3|1.|.5|+.5|-.5|.|+|-|1.5e|1e|e3|--1|+-1|-+1|0x-1|1e999|-1e999|.inf|-.inf|.nan|.NaN|inf|nan|infinity|\
        18446744073709551615|18446744073709551616|-9223372036854775808|-9223372036854775809|123456789012345678901234567890|\
        0.1|3.14159265358979|2024-01-01|12:30|1:2:3|0.0|-0.0|1e-400|hf://a/b@main|s3://b/k|a#b|text with words|=|<<|!x|'yes'|'1'|\"1\"|\"\\u263a\"";
    for text in texts.split('|') {
        let whole = format!("[{text}]");
        let old = serde_yaml_ng::from_str::<Value>(&whole);
        match (yaml_value(&whole), old) {
            (Ok(new), Ok(old)) if old == json!([null]) && new != old => {
                // values that are not finite numbers were null, like a key without a value
                assert!([".", "-"].iter().any(|b| text.starts_with(b)) && new == json!([text]), "{text}: {new}");
            }
            (Ok(new), Ok(old)) => assert_eq!(new, old, "{text}"),
            (Err(_), Err(_)) => {}
            // invalid in YAML 1.2, but the other parser accepts it
            (Err(_), Ok(_)) if text == "-" => {}
            // larger than any integer: the other parser fails
            (Ok(new), Err(_)) => assert!(new[0].is_f64(), "{text}: {new}"),
            (new, old) => panic!("{text}: {new:?}, {old:?}"),
        }
    }
}

#[test]
fn texts_mean_what_they_meant() {
    for text in [
        "",
        "# nothing\n",
        "---\na: 1\n",
        "a: 1\n...\n",
        "%YAML 1.2\n---\na: 1\n",
        "a:\n- 1\n- {b: c}\n-\n  d: e\n",
        "a: |\n  two\n  lines\nb: >-\n  one\n  line\n",
        "a: &x {b: 1}\nc: *x\nd: [*x, *x]\n",
        "&k a: 1\nb: *k\n",
        "base: &b {x: 1}\nuse:\n  <<: *b\n  y: 2\n",
        "? a\n: 1\n",
        "1: a\ntrue: b\n~: c\n",
        "a: !!str 1\nb: !!int 2\nc: !!float 3\nd: !!bool true\ne: !!map {x: 1}\nf: !!seq [1]\ng: !!str\n",
        "a: !local 1\n",
        "a: !!int x\n",
        "a: 1\n---\nb: 2\n",
        "a: *nothing\n",
        "a: [1, 2\n",
        "a: b: c\n",
        "a:\n\t- 1\n",
        "\u{feff}a: 1\n",
        "'a b': \"c\\td\"\n",
        "{a: 1, b: [x, 'y', \"z\"], }\n",
        "{\"a\": \"\\u00e9\\/\", \"b\":1}\n",
        "a: s3://b/k # why\nb: 'it''s'\n",
        "paths: [a/**/*.gz, \"b?.txt\", c[0-9].txt]\n",
        "a: \"x\u{1}y\"\n",
    ] {
        let (new, old) = (yaml_value(text), serde_yaml_ng::from_str::<Value>(text));
        match (&new, &old) {
            (Ok(new), Ok(old)) => assert_eq!(new, old, "{text}"),
            (Err(_), Err(_)) => {}
            _ => panic!("{text:?}: {new:?}, {old:?}"),
        }
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let text = prop_oneof![
        "[ -~]{0,12}",
        "\\PC{0,6}",
        "(yes|no|null|~|0x1|1e3|- |: |#|\\[|\\{|\\*a|&b|!c|%d|'|\"|,|\n| x|x )"
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        prop::num::f64::NORMAL.prop_map(Value::from),
        text.clone().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map(text.clone(), inner, 0..6).prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

/// YAML 1.1 treats Unicode's line and paragraph separators as line breaks, and the library that writes the YAML of
/// these tests still indents what follows one. In YAML 1.2 they are ordinary characters, and so are the spaces after
/// them.
#[test]
fn a_line_separator_is_a_character() {
    for text in ["\u{2028}  ", "x\u{2028}  y", "\u{2029} "] {
        assert_eq!(yaml_value(&format!("a: '{text}'\n")).unwrap(), json!({"a": text}));
        assert_eq!(yaml_value(&format!("'{text}': 1\n")).unwrap(), json!({text: 1}));
    }
    let indented = serde_yaml_ng::to_string(&json!({"\u{2028}": null})).unwrap();
    assert_ne!(yaml_value(&indented).unwrap(), json!({"\u{2028}": null}), "{indented}");
}

proptest! {
    #[test]
    fn what_is_written_is_read(value in any_value()) {
        let yaml = serde_yaml_ng::to_string(&value).unwrap();
        prop_assume!(!yaml.contains(['\u{2028}', '\u{2029}']));
        prop_assert_eq!(yaml_value(&yaml).unwrap(), value.clone(), "{}", yaml);
        for json in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
            prop_assert_eq!(Document::read_json(&json).unwrap().value(), value.clone());
        }
    }

    /// Any text parses into a tree, or yields one problem with its position.
    #[test]
    fn no_text_breaks_the_readers(text in "([ -~\n\t]|\\PC|- |: |\\? |&a |\\*a|\\[|\\{|\\}|\\]|,|\"|'|\\|\n|>\n|!!str |%|\\\\u[dD][89ab]){0,60}") {
        for read in [Document::read(&text), Document::read_json(&text)] {
            if let Err(problem) = read {
                prop_assert!(problem.position.is_some() && problem.field.is_empty(), "{:?}", problem);
            }
        }
    }

    /// A duplicate key, inserted anywhere in YAML or JSON, is found with both lines.
    #[test]
    fn every_key_that_stands_twice_is_found(value in any_value(), which in any::<prop::sample::Index>(), json in any::<bool>()) {
        let mut keys = Vec::new();
        pointers(&value, String::new(), &mut keys);
        prop_assume!(!keys.is_empty());
        let pointer = which.get(&keys);
        let text = doubled(&value, pointer, String::new());
        let document = if json { Document::read_json(&text) } else { Document::read(&text) };
        let found = document.unwrap().duplicate_keys(10);
        prop_assert_eq!(found.len(), 1, "{}", text);
        let first = text.lines().position(|line| line.contains("\"FIRST")).unwrap() + 1;
        let second = text.lines().position(|line| line.contains("\"SECOND")).unwrap() + 1;
        prop_assert!(found[0].message.contains(&format!("in line {first} and here")), "{} {}", found[0], text);
        prop_assert_eq!(found[0].position.unwrap().line as usize, second);
    }
}

/// JSON pointers of all mappings.
fn pointers(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Array(items) => items.iter().enumerate().for_each(|(i, v)| pointers(v, format!("{at}/{i}"), found)),
        Value::Object(map) => {
            map.iter().for_each(|(k, v)| pointers(v, format!("{at}/{k:?}"), found));
            found.push(at);
        }
        _ => {}
    }
}

/// Formats a value as JSON (which is also YAML), one line per entry, with a duplicate key in the mapping at `pointer`.
fn doubled(value: &Value, pointer: &str, at: String) -> String {
    match value {
        Value::Array(items) => {
            let inside = items.iter().enumerate().map(|(i, v)| doubled(v, pointer, format!("{at}/{i}")));
            format!("[\n{}\n]", inside.collect::<Vec<_>>().join(",\n"))
        }
        Value::Object(map) => {
            let mut inside: Vec<String> = map
                .iter()
                .map(|(k, v)| format!("{}: {}", json!(k), doubled(v, pointer, format!("{at}/{k:?}"))))
                .collect();
            if at == pointer {
                inside.insert(0, "\"twice\": \"FIRST\"".into());
                inside.push("\"twice\": \"SECOND\"".into());
            }
            // YAML has no surrogate escapes, but accepts the characters themselves
            format!("{{\n{}\n}}", inside.join(",\n"))
        }
        other => other.to_string(),
    }
}

#[test]
fn fields_have_places() {
    let block = "version: 1\ninput:\n  paths:\n  - a\n  -   b\n  holdout: {a.b: {x: 1}, a: {y: 2}}\n";
    let document = Document::read(block).unwrap();
    let at = |field: &str| {
        let Position { line, column } = document.position(field);
        (line, column)
    };
    assert_eq!(at(""), (1, 1));
    assert_eq!(at("input"), (2, 1));
    assert_eq!(at("input.paths"), (3, 3));
    assert_eq!(at("input.paths[1]"), (5, 7));
    assert_eq!(at("input.paths[7]"), (3, 3));
    assert_eq!(at("input.holdout.a.b.x"), (6, 19));
    assert_eq!(at("input.holdout.a.y"), (6, 30));
    assert_eq!(at("input.holdout.c"), (6, 3));
    assert_eq!(at("output.path"), (1, 1));
    let json = Document::read("\u{feff}{\"é\": 1,\n  \"a\" : [ 1,\n 2 ]}").unwrap();
    assert_eq!(json.position("a[1]"), Position { line: 3, column: 2 });
    assert_eq!(json.position("a"), Position { line: 2, column: 3 });
    assert_eq!(json.position("é"), Position { line: 1, column: 2 });
}

#[test]
fn json_is_read_as_json() {
    let smile = "{\"a\": \"\\ud83d\\ude00\"}";
    assert_eq!(Document::read(smile).unwrap().value(), json!({"a": "😀"}));
    let reported = |text: &str| Document::read(text).unwrap_err().render(Some("f"));
    assert_eq!(reported("{\"a\": \"\\ud83d\\ude00\",\n \"b\": }"), "f:2:7: job file: is not JSON: expected value");
    assert!(reported("{\"a\": \"\\ud83d\"}").contains("is not JSON: "), "{}", reported("{\"a\": \"\\ud83d\"}"));
    assert!(reported("{a: [}").contains("is not YAML: "), "{}", reported("{a: [}"));
    // YAML with braces
    assert_eq!(Document::read("{\"a\": 1, # one\n}").unwrap().value(), json!({"a": 1}));
    assert!(Document::read_json("a: 1").is_err());
}
