//! Documents that are duplicates of earlier ones are dropped, in whatever way a job runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::{Scratch, byte_tokenizer, repetitions, run_command, shards, with};

use crate::cluster::{Cluster, command};
use crate::corpora::{documents_in_rows, manifest};
use crate::resume::uniform_draws;
use crate::stores::shards_in;

/// Records of the corpus: five originals, then copies and near-duplicates of them among new documents.
const RECORDS: u32 = 40;

/// Words that no two documents share, without digits: MinHash compares all numbers as equal.
fn original(number: u32) -> String {
    let letters = |n: u32| n.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect::<String>();
    (0..30).map(|word| format!("{}x{}", letters(number), letters(word))).collect::<Vec<_>>().join(" ")
}

/// What a record is: a new document, an exact copy of a record, a near-duplicate of one, or no document at all.
fn kind(record: u32) -> (&'static str, u32) {
    match record {
        0..5 => ("new", record),
        _ if record.is_multiple_of(7) => ("exact", record % 5),
        _ if record % 7 == 3 => ("near", record % 5),
        _ if record == 11 => ("bad", record),
        _ => ("new", record),
    }
}

fn corpus() -> String {
    let line = |record: u32| match kind(record) {
        ("near", of) => json!({"text": format!("{} and one more word", original(of))}).to_string(),
        ("bad", _) => "{".to_owned(),
        (_, of) => json!({ "text": original(of) }).to_string(),
    };
    (0..RECORDS).map(|record| line(record) + "\n").collect()
}

/// A job over the corpus, in several splits, with one row for each document.
fn job() -> Value {
    json!({
        "version": 1,
        "name": "deduplicated",
        "input": {"format": "jsonl", "paths": ["corpus.jsonl"], "split_megabytes": 0.002, "on_error": "skip", "max_skipped": 1},
        "filter": {"rules": [{"length": {"min_characters": 10}}]},
        "deduplicate": {"exact": {}, "minhash": {"ngram_words": 3}},
        "tokenizer": {"path": byte_tokenizer()},
        "pack": {"mode": "pad", "length": 400},
        "output": {"path": "out"}
    })
}

fn scratch() -> Scratch {
    let scratch = Scratch::new();
    scratch.write("corpus.jsonl", &corpus());
    scratch
}

/// Numbers of the records whose documents are in the rows, by the records of each split.
fn kept_records(scratch: &Scratch) -> Vec<u32> {
    let manifest = manifest(scratch);
    let rows = manifest["shards"].as_array().unwrap().iter().map(|shard| shard["rows"].as_u64().unwrap()).sum();
    let records_of = |shard: &Value| {
        let statistics = &shard["statistics"];
        let skipped: u64 =
            statistics["skipped"].as_object().map_or(0, |s| s.values().map(|n| n.as_u64().unwrap()).sum());
        (shard["split"].as_u64().unwrap(), statistics["documents"].as_u64().unwrap() + skipped)
    };
    let mut firsts = BTreeMap::new();
    let mut next = 0;
    for (split, records) in manifest["shards"].as_array().unwrap().iter().map(records_of) {
        firsts.insert(split, next);
        next += records;
    }
    assert_eq!(next, u64::from(RECORDS));
    assert!(firsts.len() > 3, "{} splits", firsts.len());
    documents_in_rows(scratch, rows).into_iter().map(|id| (firsts[&(id >> 32)] + (id & 0xffff_ffff)) as u32).collect()
}

#[test]
fn the_first_of_documents_with_one_text_stays() {
    let scratch = scratch();
    scratch.make(&job());
    let of = |wanted: &'static str| (0..RECORDS).filter(move |record| kind(*record).0 == wanted);
    assert_eq!(kept_records(&scratch), of("new").collect::<Vec<_>>());
    let dropped = json!({"deduplicate.exact": of("exact").count(), "deduplicate.minhash": of("near").count()});
    assert_eq!(manifest(&scratch)["statistics"]["dropped"], dropped);
    let shown = scratch.stillhouse(&["inspect", "out", "--dropped"]).expect(0).stdout;
    for says in ["deduplicate.exact", "deduplicate.minhash", "a duplicate of document 0 of split 0"] {
        assert!(shown.contains(says), "{says:?} is not in\n{shown}");
    }
    scratch.stillhouse(&["verify", "out"]).expect(0);
    // nothing of the comparison is left but the list
    assert!(!scratch.path("out/_stillhouse/input").exists());

    // the same bytes with one split at once, and another memory is no other job
    let expected = shards(&scratch.path("out"));
    let alone =
        json!({"engine": {"parallel_splits": 1}, "output": {"path": "alone"}, "deduplicate": {"memory_megabytes": 64}});
    assert_eq!(shards(&scratch.make(&with(job(), &alone))), expected);
    scratch.job("job.yaml", &with(job(), &json!({"deduplicate": {"memory_megabytes": 64}})));
    let again = scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert!(again.stdout.contains("complete already"), "{}", again.stdout);
}

/// The lines of a record: one of its own, one of five that are in many records, and one that is too short to be compared.
fn lines_of(record: u32) -> Vec<String> {
    let own = format!("{} ends here", original(record).chars().take(60).collect::<String>());
    let shared = format!("This line is in many pages, version {}.", char::from(b'a' + (record % 5) as u8));
    match record % 4 {
        0 => vec![shared, "short".to_owned(), own],
        1 => vec![own, shared.clone(), shared],
        2 => vec![shared],
        _ => vec![own],
    }
}

/// Lines that occurred before are removed, whether in the same document or in an earlier one that stays.
#[test]
fn repeated_lines_are_removed() {
    let scratch = Scratch::new();
    // every seventh document is a copy of the one before it
    let text_of = |record: u32| lines_of(if record % 7 == 6 { record - 1 } else { record }).join("\n");
    let corpus: String = (0..RECORDS).map(|record| json!({"text": text_of(record)}).to_string() + "\n").collect();
    scratch.write("corpus.jsonl", &corpus);
    let deduplicate = json!({"exact": {}, "minhash": null, "parts": {"unit": "line"}});
    let job = with(job(), &json!({"deduplicate": deduplicate, "input": {"split_megabytes": 0.001}}));
    scratch.make(&job);

    let (mut texts, mut lines, mut expected) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    let (mut copies, mut emptied) = (0, 0);
    for record in 0..RECORDS {
        let text = text_of(record);
        if !texts.insert(text.clone()) {
            copies += 1;
            continue;
        }
        let new = |line: &&str| line.len() < 20 || lines.insert((*line).to_owned());
        let left: Vec<&str> = text.lines().filter(new).collect();
        if left.is_empty() { emptied += 1 } else { expected.push(left.join("\\n")) }
    }
    let statistics = manifest(&scratch)["statistics"].clone();
    assert_eq!(statistics["dropped"], json!({"deduplicate.exact": copies, "deduplicate.parts": emptied}));
    let rows = u64::from(RECORDS) - copies - emptied;
    let text_of_row = |row: u64| {
        let shown = scratch.stillhouse(&["inspect", "out", "--row", &row.to_string(), "--json"]).expect(0).json();
        let tokens = shown["row"]["tokens"].as_array().unwrap().clone();
        let texts = tokens.iter().map(|token| token["text"].as_str().unwrap());
        texts.filter(|text| !text.starts_with('<')).collect::<String>()
    };
    assert_eq!((0..rows).map(text_of_row).collect::<Vec<_>>(), expected);
    scratch.stillhouse(&["verify", "out"]).expect(0);

    // a list that is gone is made again, with the same bytes
    let made = shards(&scratch.path("out"));
    fs::remove_file(scratch.path("out/_stillhouse/duplicates.parquet")).unwrap();
    let first = manifest(&scratch)["shards"][0]["path"].as_str().unwrap().to_owned();
    fs::write(scratch.path("out").join(first), b"damaged").unwrap();
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&scratch.path("out")), made);
}

#[test]
fn one_kind_alone_drops_only_its_duplicates() {
    let scratch = scratch();
    let count = |wanted: &'static str| (0..RECORDS).filter(|record| kind(*record).0 == wanted).count();
    scratch.make(&with(job(), &json!({"deduplicate": {"minhash": null}})));
    assert_eq!(manifest(&scratch)["statistics"]["dropped"], json!({"deduplicate.exact": count("exact")}));
    // equal texts are near-duplicates, too
    fs::remove_dir_all(scratch.path("out")).unwrap();
    scratch.make(&with(job(), &json!({"deduplicate": {"exact": null}})));
    let both = count("exact") + count("near");
    assert_eq!(manifest(&scratch)["statistics"]["dropped"], json!({"deduplicate.minhash": both}));
}

#[test]
fn kills_change_no_byte() {
    let scratch = scratch();
    let began = Instant::now();
    let expected = shards(&scratch.make(&with(job(), &json!({"output": {"path": "undisturbed"}}))));
    let duration = began.elapsed();
    let mut moments = uniform_draws(7);
    let (mut kills, mut finished) = (0, 0);
    while kills < repetitions(5, 40) {
        let name = format!("killed-{finished}");
        scratch.job("job.yaml", &with(job(), &json!({"output": {"path": name}})));
        let mut run = scratch.command(&["run", "job.yaml", "--quiet"]).stdin(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + duration.mul_f64(moments.next().unwrap());
        let ended = loop {
            if let Some(status) = run.try_wait().unwrap() {
                break Some(status);
            }
            if Instant::now() >= deadline {
                run.kill().unwrap();
                run.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        match ended {
            None => kills += 1,
            Some(status) => {
                assert!(status.success(), "{status}");
                assert_eq!(shards(&scratch.path(&name)), expected);
                finished += 1;
            }
        }
    }
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    assert_eq!(shards(&scratch.path(&format!("killed-{finished}"))), expected);
}

#[test]
fn a_list_that_is_gone_or_damaged_is_made_again() {
    let scratch = scratch();
    scratch.make(&job());
    let expected = shards(&scratch.path("out"));
    let (list, shard) = (
        scratch.path("out/_stillhouse/duplicates.parquet"),
        scratch.path("out/data").join(expected.keys().last().unwrap()),
    );
    let whole = fs::read(&list).unwrap();
    for damage in [&[][..], &whole[..whole.len() / 2], b"something else"] {
        fs::write(&list, damage).unwrap();
        fs::remove_file(&shard).unwrap();
        scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
        assert_eq!(shards(&scratch.path("out")), expected);
        assert_eq!(fs::read(&list).unwrap(), whole);
    }
    fs::remove_file(&list).unwrap();
    fs::remove_file(&shard).unwrap();
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&scratch.path("out")), expected);
}

/// Files of the same size and name are the same job, and splits that are not committed may be read from a file that was
/// touched. Their list must not be that of the old content.
#[test]
fn a_run_goes_on_only_with_an_input_that_has_the_same_duplicates() {
    let scratch = scratch();
    scratch.make(&job());
    let expected = shards(&scratch.path("out"));
    let unfinished = || {
        let last = format!("_stillhouse/splits/{:05}.json", expected.len() - 1);
        for name in ["_SUCCESS", "manifest.json", &last] {
            fs::remove_file(scratch.path("out").join(name)).unwrap();
        }
    };
    unfinished();
    // record 38, in the last split, is no near-duplicate any more
    assert_eq!(kind(38).0, "near");
    let old = corpus();
    let changed = |(record, line): (usize, &str)| match record {
        38 => line.replace("x", "q").replace("teqt", "text") + "\n",
        _ => line.to_owned() + "\n",
    };
    scratch.write("corpus.jsonl", &old.lines().enumerate().map(changed).collect::<String>());
    scratch
        .stillhouse(&["run", "job.yaml"])
        .expect(1)
        .says(&["the input has other duplicates than when this job was begun"]);
    // touched, and otherwise as it was
    scratch.write("corpus.jsonl", &old);
    scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert_eq!(shards(&scratch.path("out")), expected);
}

#[test]
fn what_cannot_be_compared_is_an_error() {
    let scratch = scratch();
    scratch.job("job.yaml", &with(job(), &json!({"deduplicate": {"exact": null, "minhash": null}})));
    scratch
        .stillhouse(&["run", "job.yaml"])
        .expect(2)
        .says(&["deduplicate", "has none of `exact`, `minhash` and `parts`"]);
    scratch.job("job.yaml", &with(job(), &json!({"deduplicate": {"minhash": {"bands": 0}}})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&["deduplicate.minhash.bands"]);
    scratch.make(&job());
    scratch.write("more.jsonl", &corpus());
    scratch.job("job.yaml", &with(job(), &json!({"input": {"paths": ["corpus.jsonl", "more.jsonl"]}})));
    let refused = scratch.stillhouse(&["run", "job.yaml", "--append"]).expect(2);
    refused.says(&["--append: deduplicate compares all documents of the input"]);
    // all documents are duplicates but one
    scratch
        .write("corpus.jsonl", &corpus().lines().take(1).flat_map(|line| [line, "\n"].repeat(9)).collect::<String>());
    let same = with(job(), &json!({"output": {"path": "same"}}));
    scratch.job("job.yaml", &same);
    let ran = scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert!(ran.stdout.contains("8 deduplicate.exact"), "{}", ran.stdout);
}

#[test]
fn executors_use_the_list_of_the_run() {
    let scratch = scratch();
    let weed = Seaweed::start();
    weed.create_bucket("shards");
    let expected = shards(&scratch.make(&job()));
    let mut cluster = Cluster::start(&scratch);
    let _executors: Vec<_> = (0..2).map(|_| cluster.executor(&|command| weed.environment(command))).collect();
    scratch.job("there.yaml", &cluster.job(&job(), "s3://shards/there"));
    let mut run = command(&scratch, &["run", "there.yaml"]);
    weed.environment(&mut run);
    run_command(&mut run).expect(0);
    let s3 = weed.s3();
    assert_eq!(shards_in(&s3, "shards", "there"), expected);
    let state = s3.list("shards", "there/_stillhouse/");
    assert_eq!(state.len(), expected.len() + 2, "{state:?}");
    assert!(state.keys().any(|name| name.ends_with("duplicates.parquet")), "{state:?}");
}
