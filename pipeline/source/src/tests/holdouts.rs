//! Compares holdouts with a reference that holds all documents in memory.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::*;

const SEED: u64 = 0;

/// Computes a key as docs/FORMAT.md defines it.
fn key(text: &str) -> u64 {
    let hash = Sha256::digest([b"holdout".as_slice(), &SEED.to_le_bytes(), text.as_bytes()].concat());
    u64::from_le_bytes(hash[..8].try_into().unwrap())
}

#[derive(Debug, Clone, Copy)]
enum Rule {
    Last(usize),
    Share(f64),
    Documents(usize),
}

/// Returns the documents of each data set split; `None` is a bad record.
fn reference(records: &[Option<String>], rules: &BTreeMap<String, Rule>) -> BTreeMap<String, Vec<String>> {
    let mut parts = BTreeMap::new();
    let mut rest = records;
    for (name, rule) in rules.iter().rev() {
        if let Rule::Last(n) = rule {
            let (left, tail) = rest.split_at(rest.len() - n);
            parts.insert(name.clone(), tail.iter().flatten().cloned().collect::<Vec<String>>());
            rest = left;
        }
    }
    let rest: Vec<&String> = rest.iter().flatten().collect();
    let mut take = |name: &str, from: u64, below: u128| {
        let held = |text: &&&String| (u128::from(from)..below).contains(&u128::from(key(text)));
        parts.insert(name.to_owned(), rest.iter().filter(held).map(|text| (*text).clone()).collect::<Vec<String>>());
    };
    let (mut bound, mut sum) = (0_u64, 0.0);
    for (name, rule) in rules {
        if let Rule::Share(share) = rule {
            sum += share;
            let end = (sum * 2_f64.powi(64)) as u64;
            take(name, bound, u128::from(end));
            bound = end;
        }
    }
    let mut keys = rest.iter().map(|text| key(text)).filter(|key| *key >= bound).collect::<BTreeSet<_>>().into_iter();
    for (name, rule) in rules {
        if let Rule::Documents(n) = rule {
            let end = keys.by_ref().nth(n - 1).unwrap() + 1;
            take(name, bound, u128::from(end));
            bound = end;
        }
    }
    take("train", bound, 1 << 64);
    parts
}

fn with_rules(rules: &BTreeMap<String, Rule>) -> Value {
    let entry = |rule: &Rule| match rule {
        Rule::Last(n) => json!({"last_documents": n}),
        Rule::Share(share) => json!({"share": share}),
        Rule::Documents(n) => json!({"documents": n}),
    };
    rules.iter().map(|(name, rule)| (name.clone(), entry(rule))).collect::<serde_json::Map<_, _>>().into()
}

/// Returns the documents of each data set split and the number of bad records, for a size of splits.
fn parts(bench: &Bench, input: &Input, target: u64) -> (BTreeMap<String, Vec<String>>, u64) {
    let splits = bench.plan(input, target).unwrap();
    let files = bench.files(input);
    let mut parts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut ids = BTreeSet::new();
    let mut skipped = 0;
    for (i, split) in splits.iter().enumerate() {
        assert_eq!(split.split.0 as usize, i);
        let got = bench.read(&files, input, std::slice::from_ref(split)).unwrap();
        assert!(got.ids.iter().all(|id| ids.insert(*id)), "an id twice");
        skipped += got.summary.skipped.values().sum::<u64>();
        parts.entry(split.dataset_split.clone()).or_default().extend(got.documents);
    }
    (parts, skipped)
}

/// Writes the records to files of one, two, … records.
fn bench(records: &[Option<String>], compressed: bool) -> Bench {
    let bench = Bench::new();
    let mut rest = records;
    for i in 0.. {
        if rest.is_empty() && i > 0 {
            return bench;
        }
        let (now, then) = rest.split_at(rest.len().min(i + 1));
        let line = |r: &Option<String>| r.as_ref().map_or("{\n".into(), |t| json!({"text": t}).to_string() + "\n");
        let bytes = now.iter().map(line).collect::<String>().into_bytes();
        match compressed {
            true => bench.put(&format!("{i:05}.jsonl.gz"), &gzip(&bytes)),
            false => bench.put(&format!("{i:05}.jsonl"), &bytes),
        }
        rest = then;
    }
    bench
}

fn cases() -> u32 {
    if std::env::var("STILLHOUSE_SOAK").is_ok() { 500 } else { 10 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_document_is_in_the_split_that_the_rules_say(
        // a few different texts, so that copies occur; a long one, which goes through a temporary file
        records in prop::collection::vec(prop_oneof![
            1 => Just(None),
            8 => (0..60_u32).prop_map(|i| Some(if i == 7 { "long ".repeat(2000) } else { format!("document {i}") })),
        ], 30..70),
        rules in prop::collection::btree_map("[a-d]", prop_oneof![
            (1..6_usize).prop_map(Rule::Last),
            (0.001..0.24_f64).prop_map(Rule::Share),
            (1..4_usize).prop_map(Rule::Documents),
        ], 1..5),
        target in prop_oneof![Just(1), Just(300), Just(1 << 20)],
        compressed: bool,
    ) {
        let input = input(json!({"on_error": "skip", "holdout": with_rules(&rules)}));
        let bench = bench(&records, compressed);
        let mut expected = reference(&records, &rules);
        prop_assume!(!expected["train"].is_empty());
        let (mut got, skipped) = parts(&bench, &input, target);
        expected.retain(|_, documents| !documents.is_empty());
        got.retain(|_, documents| !documents.is_empty());
        prop_assert_eq!(got, expected);
        prop_assert_eq!(skipped, records.iter().filter(|r| r.is_none()).count() as u64);
    }
}

#[test]
fn a_key_is_what_the_format_says() {
    // computed with Python: hashlib.sha256(b"holdout" + bytes(8) + "naïve 🎲".encode()).digest()[:8], little-endian
    assert_eq!(key("naïve 🎲"), KNOWN_KEY);
    assert_eq!(super::super::spool::DocumentKey::new(0).with("naïve 🎲").get(), KNOWN_KEY);
}

const KNOWN_KEY: u64 = 0xcc1cbb087f28a510;

#[test]
fn a_share_stays_what_it_is_when_files_are_added_and_moved() {
    let texts = |r: std::ops::Range<usize>| r.map(|i| Some(format!("document {i}"))).collect::<Vec<_>>();
    let shares = json!({"test": {"share": 0.1}, "validation": {"share": 0.05}});
    let input = input(json!({"holdout": shares}));
    let (before, _) = parts(&bench(&texts(0..2000), false), &input, 500);
    let moved = texts(1000..3000).into_iter().chain(texts(0..1000)).collect::<Vec<_>>();
    let (after, _) = parts(&bench(&moved, true), &input, 20_000);
    for (name, documents) in before {
        let after: BTreeSet<_> = after[&name].iter().collect();
        assert!(documents.iter().all(|d| after.contains(d)), "{name}");
        let share = match name.as_str() {
            "test" => 0.1,
            "validation" => 0.05,
            _ => 0.85,
        };
        // five standard deviations
        let away = (documents.len() as f64 - 2000.0 * share).abs();
        assert!(away < 5.0 * (2000.0 * share * (1.0 - share)).sqrt(), "{name}: {}", documents.len());
    }
}

#[test]
fn an_input_that_is_too_small_for_its_holdouts_is_refused() {
    let records: Vec<_> = (0..12).map(|i| Some(format!("document {}", i % 6))).collect();
    let refused = |holdout: Value| {
        let error = bench(&records, false).plan(&input(json!({"holdout": holdout})), 100).unwrap_err();
        assert!(matches!(error, SourceError::Plan { .. }));
        error.to_string()
    };
    assert_eq!(
        refused(json!({"a": {"documents": 2}, "b": {"documents": 4}})),
        "input.holdout.a.documents and input.holdout.b.documents: got 6, but the input has 6 different documents that no \
         other holdout takes; valid: fewer than that, so that something is left for train"
    );
    assert_eq!(
        refused(json!({"a": {"last_documents": 7}, "b": {"last_documents": 5}})),
        "input.holdout.a.last_documents: got 7, but the input has 12 records, 5 of them held out by others; valid: fewer \
         than that, so that something is left for train"
    );
}

#[test]
fn rows_and_a_broken_record_are_reported_when_documents_are_counted() {
    let bench = Bench::with(&[("a.jsonl", b"{\"text\":\"a\"}\n{\n{\"text\":\"c\"}\n")]);
    let error = bench.plan(&input(json!({"holdout": {"a": {"documents": 1}}})), 100).unwrap_err().to_string();
    assert!(error.starts_with("a.jsonl: line 2: broken JSON"), "{error}");
}
