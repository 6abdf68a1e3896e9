//! Columns of the input that stay with their documents (`input.carry`).

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, byte_tokenizer, shards, with};

use crate::corpora::manifest;

const RECORDS: usize = 40;

/// A record: every fifth is too short for the filter, and every seventh has the text of record 1.
fn record(i: usize) -> Value {
    let text = match i {
        _ if i % 5 == 4 => format!("{i}"),
        _ if i % 7 == 6 => text(1),
        _ => text(i),
    };
    let lang = if i.is_multiple_of(3) { Value::Null } else { json!(["en", "de"][i % 2]) };
    json!({"text": text, "url": format!("https://example.org/{i}"), "id": i, "meta": {"lang": lang}})
}

fn text(i: usize) -> String {
    format!("Record {i}. ") + &format!("Its word is {i}. ").repeat(i % 6)
}

fn is_kept(i: usize) -> bool {
    i % 5 != 4 && i % 7 != 6
}

/// Two files, in several splits.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("in")).unwrap();
    for (file, records) in [("a", 0..25), ("b", 25..RECORDS)] {
        let lines: String = records.map(|i| record(i).to_string() + "\n").collect();
        scratch.write(&format!("in/{file}.jsonl"), &lines);
    }
    scratch
}

fn job() -> Value {
    json!({
        "version": 1,
        "name": "carried",
        "input": {
            "format": "jsonl", "paths": ["in/*.jsonl"], "carry": ["url", "_file", "id", "meta.lang"], "split_megabytes": 0.001
        },
        "filter": {"rules": [{"length": {"min_characters": 10}}]},
        "deduplicate": {"exact": {}},
        "tokenizer": {"path": byte_tokenizer()},
        "pack": {"length": 64, "remainder": "keep", "separator": "none", "boundary": "none"},
        "output": {"path": "out"}
    })
}

/// The values of every document of every row, by id of the document. All rows must agree.
fn carried(scratch: &Scratch) -> BTreeMap<u64, Value> {
    let manifest = manifest(scratch);
    let rows: u64 = manifest["shards"].as_array().unwrap().iter().map(|shard| shard["rows"].as_u64().unwrap()).sum();
    let mut found = BTreeMap::new();
    for row in 0..rows {
        let row = row.to_string();
        let columns = ["--column", "document_ids", "--column", "document_fields", "--json"];
        let shown = scratch.stillhouse(&[&["inspect", "out", "--row", &row][..], &columns].concat()).expect(0).json();
        let values = |i: usize| shown["values"][i]["values"].as_array().unwrap().clone();
        let (ids, fields) = (values(0), values(1));
        assert_eq!(ids.len(), fields.len());
        for (id, fields) in ids.iter().zip(fields) {
            let before = found.insert(id.as_u64().unwrap(), fields.clone());
            assert!(before.is_none_or(|before| before == fields));
        }
    }
    found
}

/// The values that documents have, in the order of the records.
fn expected(records: impl Iterator<Item = usize>) -> Vec<Value> {
    let file = |i: usize| if i < 25 { "in/a.jsonl" } else { "in/b.jsonl" };
    let values = |i: usize| json!({"url": record(i)["url"], "_file": file(i), "id": i.to_string(), "meta.lang": record(i)["meta"]["lang"]});
    records.map(values).collect()
}

#[test]
fn documents_keep_their_values_through_filters_and_packing() {
    for mode in ["wrap", "best_fit"] {
        let scratch = scratch();
        let pack = if mode == "wrap" { json!({}) } else { json!({"mode": mode, "remainder": null}) };
        let job = with(job(), &json!({ "pack": pack }));
        let made = shards(&scratch.make(&job));
        assert!(made.len() > 3, "{}", made.len());
        let found: Vec<Value> = carried(&scratch).into_values().collect();
        assert_eq!(found, expected((0..RECORDS).filter(|i| is_kept(*i))), "{mode}");
        scratch.stillhouse(&["verify", "out"]).expect(0);

        // one split after the other gives the same bytes, and so does a repair
        let again = with(job, &json!({"engine": {"parallel_splits": 1}, "output": {"path": "again"}}));
        scratch.job("again.yaml", &again);
        scratch.stillhouse(&["run", "again.yaml", "-q"]).expect(0);
        assert_eq!(shards(&scratch.path("again")), made);
        let shard = scratch.path("out").join(manifest(&scratch)["shards"][2]["path"].as_str().unwrap());
        fs::write(&shard, b"damaged").unwrap();
        scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
        assert_eq!(shards(&scratch.path("out")), made);
    }
}

#[test]
fn values_are_shown_and_described() {
    let scratch = scratch();
    scratch.make(&job());
    let row = scratch.stillhouse(&["inspect", "out", "--row", "0"]).expect(0).stdout;
    assert!(row.contains("document 0 of split 0: url https://example.org/0, _file in/a.jsonl, id 0\n"), "{row}");
    let document = ["inspect", "out", "--document", "0:0", "--job", "job.yaml"];
    let page = scratch.stillhouse(&document).expect(0).stdout;
    assert!(page.contains("Carried columns\n") && page.contains("  url  https://example.org/0\n"), "{page}");
    let shown = scratch.stillhouse(&[&document[..], &["--json"]].concat()).expect(0).json();
    assert_eq!((&shown["fields"], &shown["source"]), (&expected(0..1)[0], &record(0)["text"]));
    let columns = manifest(&scratch)["columns"].clone();
    let column = columns.as_array().unwrap().iter().find(|column| column["name"] == "document_fields").unwrap().clone();
    let fields = "list<struct<url: string, _file: string, id: string, meta.lang: string>>";
    assert_eq!(column, json!({"name": "document_fields", "data_type": fields, "shape": "[*]"}));
    let card = fs::read_to_string(scratch.path("out/README.md")).unwrap();
    assert!(card.contains("| `document_fields` | struct of strings |"), "{card}");

    // new columns for a finished data set leave it as it is
    let packed = with(job(), &json!({"filter": null, "deduplicate": null, "output": {"path": "packed"}}));
    scratch.job("packed.yaml", &packed);
    scratch.stillhouse(&["run", "packed.yaml", "-q"]).expect(0);
    scratch.job("views.yaml", &json!({"version": 1, "name": "views", "orders": {"kind": "strided", "streams": [2]}, "output": {"path": "views"}}));
    scratch.stillhouse(&["derive", "packed", "views.yaml"]).expect(0);
    let whole = with(packed, &json!({"orders": {"kind": "strided", "streams": [2]}, "output": {"path": "whole"}}));
    scratch.job("whole.yaml", &whole);
    scratch.stillhouse(&["run", "whole.yaml", "-q"]).expect(0);
    assert_eq!(shards(&scratch.path("views")), shards(&scratch.path("whole")));
}

#[test]
fn rows_of_a_query_carry_its_columns_and_the_names_of_files() {
    let scratch = scratch();
    let sql = r#"SELECT text, url, _file, id, id * 0.5 AS half, meta['lang'] AS "meta.lang" FROM input WHERE id % 2 = 1 ORDER BY id DESC"#;
    let input = json!({"sql": sql, "carry": ["url", "_file", "id", "meta.lang", "half"]});
    scratch.make(&with(job(), &json!({"input": input, "filter": null, "deduplicate": null})));
    let found: Vec<Value> = carried(&scratch).into_values().collect();
    let records = || (0..RECORDS).filter(|i| i % 2 == 1).rev();
    let halves = records().map(|i| json!({"half": format!("{:.1}", i as f64 / 2.0)}));
    let wanted: Vec<Value> =
        expected(records()).into_iter().zip(halves).map(|(value, half)| with(value, &half)).collect();
    assert_eq!(found, wanted);
    let refused = |input: Value, says: &[&str]| {
        scratch.job("refused.yaml", &with(job(), &json!({"input": input, "output": {"path": "refused"}})));
        scratch.stillhouse(&["run", "refused.yaml", "-q"]).expect(2).says(says);
    };
    refused(
        json!({"sql": "SELECT text, url FROM input"}),
        &["the query has no column \"_file\", which `input.carry` names"],
    );
    let nested = json!({"sql": "SELECT text, meta FROM input", "carry": ["meta"]});
    refused(
        nested,
        &["the query's column \"meta\", which `input.carry` names, is of type Struct", "valid: strings, numbers"],
    );
}

#[test]
fn names_that_cannot_be_carried_are_errors() {
    let scratch = scratch();
    let refused = |patch: Value, says: &[&str]| {
        scratch.job("job.yaml", &with(job(), &patch));
        scratch.stillhouse(&["run", "job.yaml", "-q"]).expect(2).says(says);
    };
    refused(
        json!({"input": {"carry": ["url", "uri"]}}),
        &[
            "input.carry[1]",
            "\"uri\"",
            "none of the first 40 records has a value of this key; their keys: ",
            "did you mean `url`?",
        ],
    );
    refused(json!({"input": {"carry": ["url", "url"]}}), &["input.carry[1]", "is there twice"]);
    refused(json!({"input": {"carry": [""]}}), &["input.carry[0]", "is empty; valid: the name of a column"]);
    refused(json!({"input": {"format": "text"}}), &["input.carry[0]", "files of text have no columns; valid: _file"]);
    let none = json!({"format": "none", "documents": 3, "paths": null});
    refused(json!({ "input": none }), &["input.carry", "`format: none` has none"]);
}

/// Rows of several conversations keep the values of each.
#[test]
fn conversations_keep_their_values() {
    let scratch = Scratch::new();
    let line = |i: usize| {
        let turn = |role: &str, content: String| json!({"role": role, "content": content});
        let messages = [turn("user", format!("Question {i}?")), turn("assistant", format!("Answer {i}."))];
        json!({"messages": messages, "source": format!("s{}", i % 3), "score": i as f64 / 4.0}).to_string() + "\n"
    };
    scratch.write("chat.jsonl", &(0..12).map(line).collect::<String>());
    let template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}\
                    {% if add_generation_prompt %}[assistant] {% endif %}";
    scratch.write("template.jinja", template);
    let job = json!({
        "version": 1, "name": "chat",
        "input": {"format": "jsonl", "paths": ["chat.jsonl"], "messages": "messages", "carry": ["source", "score"]},
        "chat": {"template": "template.jinja"},
        "tokenizer": {"path": byte_tokenizer(), "special_tokens": "parse"},
        "pack": {"mode": "best_fit", "length": 64, "separator": "none", "boundary": "none"},
        "output": {"path": "out"}
    });
    scratch.make(&job);
    let found: Vec<Value> = carried(&scratch).into_values().collect();
    let score = |i: usize| json!(i as f64 / 4.0).to_string();
    let wanted: Vec<Value> = (0..12).map(|i| json!({"source": format!("s{}", i % 3), "score": score(i)})).collect();
    assert_eq!(found, wanted);
}

/// Lists of URLs drop documents, with their counts, and belong to the job's hash.
#[test]
fn documents_whose_url_is_on_a_list_are_dropped() {
    let scratch = Scratch::new();
    let hosts = ["good.example", "www.spam.example", "spam.example", "good.example"];
    let line = |i: usize| {
        let url = (i % 5 != 4).then(|| format!("https://{}/page/{i}", hosts[i % 4]));
        json!({"text": format!("Page number {i}."), "url": url}).to_string() + "\n"
    };
    scratch.write("pages.jsonl", &(0..20).map(line).collect::<String>());
    scratch.write("domains.txt", "# domains\nspam.example\n");
    scratch.write("words.txt", "7\n");
    let job = json!({
        "version": 1, "name": "blocked",
        "input": {"format": "jsonl", "paths": ["pages.jsonl"], "carry": ["url"], "split_megabytes": 0.001},
        "block_urls": {"domains": "domains.txt", "banned_words": "words.txt"},
        "deduplicate": {"exact": {}},
        "tokenizer": {"path": byte_tokenizer()},
        "pack": {"mode": "pad", "length": 32},
        "output": {"path": "out"}
    });
    scratch.make(&job);
    let is_spam = |i: usize| i % 5 != 4 && matches!(i % 4, 1 | 2);
    let spam = (0..20).filter(|i| is_spam(*i)).count();
    assert_eq!(
        manifest(&scratch)["statistics"]["dropped"],
        json!({"block_urls.domain": spam, "block_urls.banned_word": 1})
    );
    let kept: Vec<Value> = carried(&scratch).into_values().collect();
    let url = |i: usize| json!({"url": serde_json::from_str::<Value>(&line(i)).unwrap()["url"]});
    assert_eq!(kept, (0..20).filter(|i| !is_spam(*i) && *i != 7).map(url).collect::<Vec<_>>());
    let samples = scratch.stillhouse(&["inspect", "out", "--dropped", "block_urls"]).expect(0).stdout;
    assert!(samples.contains("https://www.spam.example/page/1"), "{samples}");
    assert_eq!(fs::read_to_string(scratch.path("out/blocked_domains.txt")).unwrap(), "# domains\nspam.example\n");
    scratch.stillhouse(&["verify", "out"]).expect(0);

    // the content of a list belongs to the job, and its path does not
    fs::rename(scratch.path("domains.txt"), scratch.path("list.txt")).unwrap();
    scratch.job("job.yaml", &with(job.clone(), &json!({"block_urls": {"domains": "list.txt"}})));
    scratch.stillhouse(&["run", "job.yaml", "-q"]).expect(0);
    scratch.write("list.txt", "other.example\n");
    scratch.stillhouse(&["run", "job.yaml", "-q"]).expect(2).says(&["block_urls.domains"]);
    for (patch, says) in [
        (
            json!({"input": {"carry": null}}),
            "block_urls.column: got \"url\": nothing is carried; set input.carry to [url]",
        ),
        (
            json!({"block_urls": {"column": "uri"}}),
            "block_urls.column: got \"uri\": is not carried; valid: one of input.carry: url",
        ),
        (
            json!({"block_urls": {"domains": null, "banned_words": null}}),
            "block_urls: names no list; valid: one or more of domains, urls,",
        ),
        (json!({"block_urls": {"domains": "empty.txt"}}), "block_urls.domains: has no entry"),
    ] {
        scratch.write("empty.txt", "# nothing\n\n");
        scratch.job("job.yaml", &with(job.clone(), &with(patch, &json!({"output": {"path": "refused"}}))));
        scratch.stillhouse(&["run", "job.yaml", "-q"]).expect(2).says(&[says]);
    }
}
