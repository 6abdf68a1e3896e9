use std::collections::BTreeMap;
use std::fs;

use datafusion::arrow::array::{Array, AsArray, RecordBatch};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use super::*;
use crate::tests::bench::{Bench, input};
use crate::tests::tables;

const SEED: u64 = 7;

/// A row of the mixture: its text and its carried values.
type Row = (String, Vec<Option<String>>);

/// A job over tables, with the name of the table as its first carried value.
fn mixture(tables: Value, fields: Value) -> Input {
    let mut input = input(json!({"tables": tables}));
    let fields: BTreeMap<String, Value> = serde_json::from_value(fields).unwrap();
    input.format = None;
    input.paths.clear();
    if let Some(mixture) = fields.get("mixture") {
        input.mixture = Some(serde_json::from_value(mixture.clone()).unwrap());
    }
    input.carry = vec!["source".into()];
    if let Some(carry) = fields.get("carry") {
        input.carry.extend(serde_json::from_value::<Vec<String>>(carry.clone()).unwrap());
    }
    input
}

/// Words are tokens.
fn words(batch: &RecordBatch) -> Result<Vec<u64>, SourceError> {
    let texts = batch.column(0).as_string::<i64>();
    Ok(texts.iter().map(|text| text.map_or(0, |text| text.split_whitespace().count() as u64)).collect())
}

fn staged(bench: &Bench, input: &Input, memory: u64) -> Result<(StagedRows, Vec<Row>, Vec<MixedTable>), SourceError> {
    let out = tempfile::tempdir().unwrap();
    let tables = tables(bench, input);
    let staged = stage_mixture(
        &bench.store,
        &tables,
        MixtureJob { input, seed: SEED, may_repeat: true },
        memory,
        out.path(),
        &mut words,
        &mut |_| {},
    )?;
    let mut rows = Vec::new();
    for part in 0..staged.files.len() {
        let file = fs::File::open(out.path().join(format!("part-{part:05}.parquet"))).unwrap();
        for batch in ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap() {
            let batch = batch.unwrap();
            let value = |column: usize, row: usize| {
                let column = batch.column(column).as_string::<i64>();
                column.is_valid(row).then(|| column.value(row).to_owned())
            };
            rows.extend((0..batch.num_rows()).map(|row| {
                (value(0, row).unwrap_or_default(), (1..batch.num_columns()).map(|c| value(c, row)).collect())
            }));
        }
    }
    assert_eq!(staged.rows, rows.len() as u64);
    let tables = staged.tables.clone();
    Ok((staged, rows, tables))
}

/// Documents of `words` words as JSON lines.
fn lines(name: &str, documents: usize, words: usize) -> String {
    let line = |i: usize| {
        let text = format!("{name}{i}") + &" word".repeat(words - 1);
        json!({"text": text, "url": format!("https://{name}.org/{i}"), "meta": {"lang": "en", "n": i}}).to_string()
            + "\n"
    };
    (0..documents).map(line).collect()
}

fn bench() -> Bench {
    let bench = Bench::new();
    bench.put("wiki.jsonl", lines("wiki", 3000, 10).as_bytes());
    bench.put("code.jsonl", lines("code", 1000, 10).as_bytes());
    bench
}

fn weighted() -> Value {
    json!({
        "wiki": {"format": "jsonl", "paths": ["wiki.jsonl"], "weight": 1},
        "code": {"format": "jsonl", "paths": ["code.jsonl"], "weight": 1}
    })
}

fn sources(rows: &[Row]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    rows.iter().for_each(|(_, carried)| *counts.entry(carried[0].as_deref().unwrap()).or_default() += 1);
    counts
}

#[test]
fn tables_are_mixed_by_tokens_in_a_random_order() {
    let bench = bench();
    let (_, rows, amounts) = staged(&bench, &mixture(weighted(), json!({})), 64 << 20).unwrap();
    // the largest mixture in which no document is twice
    assert_eq!(sources(&rows), BTreeMap::from([("code", 1000), ("wiki", 1000)]));
    let told: Vec<_> = amounts.iter().map(|t| (t.name.as_str(), t.documents, t.tokens, t.mixed_tokens)).collect();
    assert_eq!(told, [("code", 1000, 10_000, 10_000), ("wiki", 3000, 30_000, 10_000)]);
    let mut texts: Vec<&str> = rows.iter().map(|(text, _)| text.as_str()).collect();
    texts.sort_unstable();
    texts.dedup();
    assert_eq!(texts.len(), 2000);
    // each tenth has about half of either: 5 standard deviations are 35
    for tenth in rows.chunks(200) {
        let wiki = sources(tenth)["wiki"];
        assert!((65..=135).contains(&wiki), "{wiki}");
    }
    // documents of one table are in no order of their own: a random order has about half of its pairs ascending
    let number = |(text, _): &Row| text.strip_prefix("wiki")?.split(' ').next()?.parse::<u32>().ok();
    let numbers: Vec<u32> = rows.iter().filter_map(number).collect();
    let ascending = numbers.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!((420..=580).contains(&ascending), "{ascending}");
    // and they are a sample of all of it
    let late = numbers.iter().filter(|n| **n >= 1500).count();
    assert!((420..=580).contains(&late), "{late}");
}

#[test]
fn rows_do_not_depend_on_memory_and_other_tables_keep_their_documents() {
    let bench = Bench::new();
    bench.put("wiki.jsonl", lines("wiki", 2000, 1000).as_bytes());
    bench.put("code.jsonl", lines("code", 1000, 1000).as_bytes());
    let input = mixture(weighted(), json!({"carry": ["url"]}));
    let (large, rows, _) = staged(&bench, &input, 256 << 20).unwrap();
    // 10 MB of rows are sorted with 6 MB
    let (small, of_small, _) = staged(&bench, &input, 6 << 20).unwrap();
    assert!(of_small == rows);
    assert_eq!(small.sha256, large.sha256);
    assert_eq!(staged(&bench, &input, 256 << 20).unwrap().0.sha256, large.sha256);

    let mut more = weighted();
    more["news"] = json!({"format": "jsonl", "paths": ["code.jsonl"], "weight": 1});
    let (_, with_news, _) = staged(&bench, &mixture(more, json!({"carry": ["url"]})), 64 << 20).unwrap();
    let of_wiki =
        |rows: &[Row]| rows.iter().filter(|row| row.1[0].as_deref() == Some("wiki")).cloned().collect::<Vec<_>>();
    assert_eq!(of_wiki(&with_news), of_wiki(&rows));
}

#[test]
fn a_table_that_is_asked_for_more_than_it_has_is_repeated() {
    let bench = bench();
    let (_, rows, amounts) =
        staged(&bench, &mixture(weighted(), json!({"mixture": {"tokens": 50_000}})), 64 << 20).unwrap();
    assert_eq!(sources(&rows), BTreeMap::from([("code", 2500), ("wiki", 2500)]));
    assert_eq!(amounts[0].epochs, 2.5);
    let mut copies: BTreeMap<&str, usize> = BTreeMap::new();
    rows.iter()
        .filter(|row| row.1[0].as_deref() == Some("code"))
        .for_each(|row| *copies.entry(&row.0).or_default() += 1);
    assert_eq!(
        (copies.values().filter(|n| **n == 2).count(), copies.values().filter(|n| **n == 3).count()),
        (500, 500)
    );
}

#[test]
fn stages_follow_each_other() {
    let bench = bench();
    let tables = json!({
        "wiki": {"format": "jsonl", "paths": ["wiki.jsonl"]},
        "code": {"format": "jsonl", "paths": ["code.jsonl"]}
    });
    let stages = json!({"mixture": {"tokens": 20_000, "stages": [
        {"share": 1, "weights": {"wiki": 1}},
        {"share": 1, "weights": {"wiki": 1, "code": 4}}
    ]}});
    let (_, rows, _) = staged(&bench, &mixture(tables, stages), 64 << 20).unwrap();
    assert_eq!(sources(&rows[..1000]), BTreeMap::from([("wiki", 1000)]));
    assert_eq!(sources(&rows[1000..]), BTreeMap::from([("wiki", 200), ("code", 800)]));
}

#[test]
fn columns_are_found_whatever_the_format_and_may_be_missing_in_a_table() {
    let bench = Bench::new();
    bench.put(
        "web.jsonl",
        b"{\"body\": \"from the web\", \"url\": \"u\", \"id\": 7, \"meta\": {\"lang\": \"de\", \"tags\": [1]}}\n",
    );
    // a value of another type, and none
    bench.put("more.jsonl", b"{\"body\": \"more\", \"id\": \"x7\", \"meta\": {\"lang\": 5}}\n{\"body\": \"most\"}\n");
    bench.put("notes.csv", b"id,text\n007,a note\n");
    bench.put("books/one.txt", b"a book\nof two lines\n");
    let tables = json!({
        "web": {"format": "jsonl", "paths": ["web.jsonl", "more.jsonl"], "text": "body"},
        "notes": {"format": "csv", "paths": ["notes.csv"]},
        "books": {"format": "text", "paths": ["books/*.txt"], "document": "file"}
    });
    let input = mixture(tables, json!({"carry": ["url", "id", "meta.lang", "_file"]}));
    let (_, mut rows, _) = staged(&bench, &input, 64 << 20).unwrap();
    rows.sort();
    let row = |text: &str, carried: [&str; 5]| {
        (text.to_owned(), carried.iter().map(|value| (*value != "-").then(|| (*value).to_owned())).collect())
    };
    let wanted: Vec<Row> = vec![
        row("a book\nof two lines\n", ["books", "-", "-", "-", "books/one.txt"]),
        row("a note", ["notes", "-", "007", "-", "notes.csv"]),
        row("from the web", ["web", "u", "7", "de", "web.jsonl"]),
        row("more", ["web", "-", "x7", "5", "more.jsonl"]),
        row("most", ["web", "-", "-", "-", "more.jsonl"]),
    ];
    assert_eq!(rows, wanted);
}

#[test]
fn wrong_columns_are_problems_before_anything_is_read() {
    let bench = bench();
    let of = |tables: Value, carry: Value| {
        let input = mixture(tables, json!({"carry": carry}));
        let problems = check_mixture(&bench.store, &crate::tests::tables(&bench, &input), &input).unwrap();
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(of(weighted(), json!(["url", "meta.lang", "_file"])), "");
    let mut wrong = weighted();
    wrong["code"]["text"] = json!("texts");
    let got = of(wrong, json!([]));
    assert!(got.starts_with("input.tables.code: code: no column \"texts\", which `text` names; its columns: meta, text, url; did you mean `text`?"), "{got}");
    let got = of(weighted(), json!(["urls"]));
    assert!(got.starts_with("input.carry[0]: got \"urls\": no table has a column of this name"), "{got}");
    let got = of(weighted(), json!(["url", "meta"]));
    assert!(got.contains("the column \"meta\", which `input.carry` names, is of type Struct"), "{got}");
    let got = of(weighted(), json!(["meta.language"]));
    assert!(got.starts_with("input.carry[0]: got \"meta.language\": no table"), "{got}");
}

#[test]
fn a_bad_record_ends_the_mixture_or_is_counted_once() {
    let bench = bench();
    let broken = lines("code", 500, 10) + "{broken\n" + &lines("more", 500, 10);
    bench.put("code.jsonl", broken.as_bytes());
    let mut input = mixture(weighted(), json!({}));
    let error = staged(&bench, &input, 64 << 20).unwrap_err().to_string();
    assert!(error.starts_with("code.jsonl: line 501: broken JSON"), "{error}");
    input.on_error = stillhouse_schemas::spec::OnError::Skip;
    let (skipping, rows, _) = staged(&bench, &input, 64 << 20).unwrap();
    assert_eq!((skipping.skipped, rows.len()), (BTreeMap::from([("broken JSON".to_owned(), 1)]), 2000));
    let mut counting_fails = |_: &RecordBatch| Err(SourceError::Mixture { message: "no".into(), retryable: false });
    let out = tempfile::tempdir().unwrap();
    let failed = stage_mixture(
        &bench.store,
        &tables(&bench, &input),
        MixtureJob { input: &input, seed: SEED, may_repeat: true },
        64 << 20,
        out.path(),
        &mut counting_fails,
        &mut |_| {},
    );
    assert_eq!(failed.unwrap_err().to_string(), "input.tables: no");
}
