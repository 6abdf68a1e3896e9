//! Mixtures of several tables: shares, order, accounts, and what a person sees.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, byte_tokenizer, shards, with};

use crate::corpora::manifest;

/// Letters, so that a text has as many tokens as bytes: `wiki` has 60 documents, `code` 20, `notes` 30 lines.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("in/code")).unwrap();
    let wiki = |i: usize| {
        // every sixth is too short for the filter
        let text = if i % 6 == 5 { "short".to_owned() } else { format!("wiki {i:02} ") + &"w".repeat(92) };
        json!({"text": text, "url": format!("https://example.org/{i}")}).to_string() + "\n"
    };
    scratch.write("in/wiki.jsonl", &(0..60).map(wiki).collect::<String>());
    for i in 0..20 {
        scratch.write(&format!("in/code/{i:02}.txt"), &(format!("code {i:02}\n") + &"c".repeat(92)));
    }
    let notes: String = (0..30).map(|i| format!("{i},note {i:02} {}\n", "n".repeat(92))).collect();
    scratch.write("in/notes.csv", &format!("id,body\n{notes}"));
    scratch
}

fn tables() -> Value {
    json!({
        "wiki": {"format": "jsonl", "paths": ["in/wiki.jsonl"]},
        "code": {"format": "text", "paths": ["in/code/*.txt"], "document": "file"},
        "notes": {"format": "csv", "paths": ["in/notes.csv"], "text": "body"}
    })
}

fn weights(wiki: u32, code: u32, notes: u32) -> Value {
    with(tables(), &json!({"wiki": {"weight": wiki}, "code": {"weight": code}, "notes": {"weight": notes}}))
}

fn job(input: Value) -> Value {
    json!({
        "version": 1,
        "name": "mixed",
        "input": with(json!({"carry": ["url", "_file"], "split_megabytes": 0.002}), &input),
        "filter": {"rules": [{"length": {"min_characters": 10}}]},
        "tokenizer": {"path": byte_tokenizer()},
        "pack": {"length": 64, "remainder": "keep", "separator": "none", "boundary": "none"},
        "output": {"path": "out"}
    })
}

/// Documents of each table, as the rows have them: (name, documents, different files).
fn documents(scratch: &Scratch) -> BTreeMap<String, (usize, usize)> {
    let rows: u64 =
        manifest(scratch)["shards"].as_array().unwrap().iter().map(|shard| shard["rows"].as_u64().unwrap()).sum();
    let mut fields = BTreeMap::new();
    for row in 0..rows {
        let row = row.to_string();
        let columns = ["--column", "document_ids", "--column", "document_fields", "--json"];
        let shown = scratch.stillhouse(&[&["inspect", "out", "--row", &row][..], &columns].concat()).expect(0).json();
        let values = |i: usize| shown["values"][i]["values"].as_array().unwrap().clone();
        fields.extend(values(0).iter().map(|id| id.as_u64().unwrap()).zip(values(1)));
    }
    let mut counts: BTreeMap<String, (usize, Vec<Value>)> = BTreeMap::new();
    for value in fields.into_values() {
        let (n, files) = counts.entry(value["source"].as_str().unwrap().into()).or_default();
        *n += 1;
        files.push(value["_file"].clone());
    }
    let different = |mut files: Vec<Value>| {
        files.sort_by_key(Value::to_string);
        files.dedup();
        files.len()
    };
    counts.into_iter().map(|(name, (n, files))| (name, (n, different(files)))).collect()
}

#[test]
fn skipped_records_are_counted_by_table() {
    let scratch = scratch();
    let wiki = fs::read_to_string(scratch.path("in/wiki.jsonl")).unwrap();
    scratch.write("in/wiki.jsonl", &format!("{{broken\n{wiki}[1]\n{{\"text\": 7}}\n"));
    let input = json!({
        "tables": weights(2, 1, 1), "mixture": {"tokens": 8_000}, "on_error": "skip", "max_skipped": 0.1
    });
    scratch.make(&job(input));
    let statistics = manifest(&scratch)["statistics"].clone();
    let of_tables: BTreeMap<&str, u64> = statistics["sources"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, counts)| {
            let skipped = counts["skipped"].as_object();
            (name.as_str(), skipped.into_iter().flatten().map(|(_, n)| n.as_u64().unwrap()).sum())
        })
        .collect();
    assert_eq!(of_tables, [("code", 0), ("notes", 0), ("wiki", 3)].into(), "{statistics}");
    assert_eq!(statistics["sources"]["wiki"]["skipped"], statistics["skipped"]);
    let page = scratch.stillhouse(&["inspect", "out"]).expect(0).stdout;
    assert!(page.contains(" dropped, 3 skipped)"), "{page}");
    let card = fs::read_to_string(scratch.path("out/README.md")).unwrap();
    assert_eq!(
        card.matches("| Skipped of the table `wiki` |").count(),
        statistics["skipped"].as_object().unwrap().len()
    );
    scratch.stillhouse(&["verify", "out"]).expect(0);
}

#[test]
fn shares_hold_for_what_the_filter_keeps_and_every_document_is_accounted_for() {
    let scratch = scratch();
    let job = job(json!({"tables": weights(2, 1, 1), "mixture": {"tokens": 8_000}}));
    let made = shards(&scratch.make(&job));
    assert!(made.len() >= 4, "{}", made.len());
    // 100 tokens each; `code` has 20 documents and `notes` 30, so none is twice
    let found = documents(&scratch);
    let wanted = [("code", (20, 20)), ("notes", (20, 1)), ("wiki", (40, 1))];
    assert_eq!(found, wanted.map(|(name, counts)| (name.to_owned(), counts)).into());

    let totals = manifest(&scratch);
    let shards_of = totals["shards"].as_array().unwrap();
    let mut sums: BTreeMap<String, [u64; 4]> = BTreeMap::new();
    let (mut read, mut dropped, mut tokens) = (0, 0, 0);
    for statistics in shards_of.iter().map(|shard| &shard["statistics"]) {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        read += number(&statistics["documents"]);
        dropped += number(&statistics["dropped"]["length.too_few_characters"]);
        tokens += number(&statistics["text_tokens"]);
        for (name, counts) in statistics["sources"].as_object().unwrap() {
            let sum = sums.entry(name.clone()).or_default();
            let reasons = &counts["dropped"]["length.too_few_characters"];
            let counts = ["documents", "kept_documents", "text_tokens"].map(|key| &counts[key]);
            sum.iter_mut().zip(counts.into_iter().chain([reasons])).for_each(|(sum, count)| *sum += number(count));
        }
    }
    assert!(dropped > 0, "{totals}");
    let add = |i: usize| sums.values().map(|counts| counts[i]).sum::<u64>();
    assert_eq!([add(0), add(1), add(2)], [read, read - dropped, tokens]);
    assert_eq!(sums.values().map(|counts| counts[2]).collect::<Vec<_>>(), [2000, 2000, 4000]);
    // of every table, the documents that were read are those that were kept and those with a reason
    assert!(sums.values().all(|counts| counts[0] == counts[1] + counts[3]), "{sums:?}");
    assert_eq!(sums["wiki"][3], dropped);
    scratch.stillhouse(&["verify", "out"]).expect(0);

    let page = scratch.stillhouse(&["inspect", "out"]).expect(0).stdout;
    assert!(page.contains(&format!("wiki 50.0 % (40 documents, {dropped} dropped)")), "{page}");
    let card = fs::read_to_string(scratch.path("out/README.md")).unwrap();
    assert!(card.contains("| Of the table `wiki` | 40 documents, 4,000 tokens (50.00 %) |"), "{card}");
    let row = format!("| Dropped of the table `wiki` | {dropped} length.too_few_characters |");
    assert!(card.contains(&row), "{card}");

    // one split after the other gives the same bytes, and so does a repair
    scratch.job(
        "again.yaml",
        &with(job, &json!({"engine": {"parallel_splits": 1, "sql_memory_megabytes": 16}, "output": {"path": "again"}})),
    );
    scratch.stillhouse(&["run", "again.yaml", "-q"]).expect(0);
    assert_eq!(shards(&scratch.path("again")), made);
    let shard = scratch.path("out").join(manifest(&scratch)["shards"][1]["path"].as_str().unwrap());
    fs::write(&shard, b"damaged").unwrap();
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&scratch.path("out")), made);
    scratch.stillhouse(&["run", "job.yaml", "--append"]).expect(2).says(&["the mixture is made of all files at once"]);
}

#[test]
fn copies_of_a_document_have_ids_of_their_own_and_are_held_out_together() {
    let scratch = scratch();
    let tables = with(tables(), &json!({"code": {"epochs": 3}, "notes": {"tokens": 1500}}));
    let input = json!({"tables": tables, "holdout": {"validation": {"share": 0.3}}, "split_megabytes": 1});
    scratch.job("job.yaml", &with(job(input), &json!({"filter": null})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(0).says(&["code is read 3.00 times: it has 2,000 tokens"]);
    let found = documents(&scratch);
    let wanted = [("code", (60, 20)), ("notes", (15, 1)), ("wiki", (60, 1))];
    assert_eq!(found, wanted.map(|(name, counts)| (name.to_owned(), counts)).into());
    let splits = manifest(&scratch)["shards"].as_array().unwrap().len();
    assert_eq!(splits, 2);
    scratch.stillhouse(&["verify", "out"]).expect(0);
}

#[test]
fn a_mixture_that_cannot_be_is_refused_before_anything_is_written() {
    let scratch = scratch();
    let refused = |name: &str, input: Value, says: &str| {
        scratch.job(name, &job(input));
        scratch.stillhouse(&["run", name]).expect(2).says(&[says]);
        assert!(!scratch.path("out").exists(), "{name}");
    };
    refused(
        "a.yaml",
        json!({"tables": with(tables(), &json!({"wiki": {"weight": 1}}))}),
        "input.tables.code.weight: is required where other tables have a weight",
    );
    refused(
        "b.yaml",
        json!({"tables": tables(), "carry": ["urls"]}),
        "input.carry[0]: got \"urls\": no table has a column",
    );
    refused(
        "c.yaml",
        json!({"tables": with(tables(), &json!({"notes": {"text": "text"}}))}),
        "notes: no column \"text\", which `text` names; its columns: id, body",
    );
    // known once the tokens are counted
    scratch.job("d.yaml", &job(json!({"tables": weights(1, 1, 1), "mixture": {"tokens": 90_000_000}})));
    scratch.stillhouse(&["run", "d.yaml"]).expect(1).says(&["would be read"]);
}

#[test]
fn plan_shows_the_tables_and_a_sample_is_of_the_mixture() {
    let scratch = scratch();
    scratch.job("job.yaml", &job(json!({"tables": weights(1, 1, 1)})));
    let plan = scratch.stillhouse(&["plan", "job.yaml"]).expect(0).stdout;
    assert!(plan.contains("known once the rows of the input are staged"), "{plan}");
    let sample = scratch.stillhouse(&["plan", "job.yaml", "--sample", "3"]).expect(0).stdout;
    assert!(sample.contains("source "), "{sample}");
    assert!(sample.contains("code   33.3 %, 2,000 tokens: 1.00 epochs of 2,000 tokens in 20 documents"), "{sample}");
}
