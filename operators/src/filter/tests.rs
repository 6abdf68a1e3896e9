use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use proptest::prelude::*;
use stillhouse_schemas::manifest::{DROPPED_DOCUMENTS, DroppedDocument};

use super::*;
use crate::document_pieces::document_pieces;
use crate::registry::job_format;
use crate::testing::{context, cut, documents, drive, gpt2, job_with, joined, statistics};

/// The config of a job with this list of rules, without a bound that matters.
fn config(rules: &str) -> FilterConfig {
    let section: FilterSection = serde_json::from_str(&format!("{{\"rules\": {rules}}}")).unwrap();
    FilterConfig { rules: section.rules, models: Models::new(), max_document_bytes: 1_000_000, piece_bytes: 4000 }
}

fn run(config: &FilterConfig, pieces: &[(u64, &str, bool)]) -> (Vec<(u64, String)>, SplitContext) {
    let context = context(&gpt2());
    let mut operator = config.operator(&context).unwrap();
    let output = drive(operator.as_mut(), &[documents(pieces)]).unwrap();
    (joined(&output), context)
}

#[test]
fn documents_are_kept_changed_or_counted_by_reason() {
    let rules = r#"[{"length": {"min_characters": 10}}, {"pattern": {"drop_if_match": ["secret"]}}, {"pii": {}}]"#;
    let texts = [
        (7, "short", true),
        (8, "a secret text", true),
        (9, "write to a.b@mail.org today", true),
        (10, "quite ordinary", true),
    ];
    let (kept, context) = run(&config(rules), &texts);
    assert_eq!(kept, [(9, "write to email@example.com today".to_owned()), (10, "quite ordinary".to_owned())]);
    let counted = statistics(&context);
    let dropped: Vec<(&str, u64)> = counted.dropped.iter().map(|(reason, n)| (reason.as_str(), *n)).collect();
    assert_eq!(dropped, [("length.too_few_characters", 1), ("pattern.match", 1)]);
    assert_eq!(counted.filtered_bytes, 5 + 13);
    let footer: BTreeMap<String, Vec<DroppedDocument>> =
        serde_json::from_str(&context.footer.get()[DROPPED_DOCUMENTS]).unwrap();
    let sample = |id, text: &str| {
        vec![DroppedDocument { document_id: id, bytes: text.len() as u64, text: text.into(), problem: None }]
    };
    let expected = [("length.too_few_characters", sample(7, "short")), ("pattern.match", sample(8, "a secret text"))];
    assert_eq!(footer, expected.map(|(reason, samples)| (reason.to_owned(), samples)).into());
}

#[test]
fn samples_are_few_and_short() {
    let long = "é".repeat(10_000);
    let texts: Vec<(u64, &str, bool)> = (0..100).map(|id| (id, long.as_str(), true)).collect();
    let (kept, context) = run(&config(r#"[{"length": {"max_characters": 9}}]"#), &texts);
    assert_eq!((kept.len(), statistics(&context).documents_dropped()), (0, 100));
    let footer = &context.footer.get()[DROPPED_DOCUMENTS];
    assert!(footer.len() < 2000, "{} bytes", footer.len());
}

#[test]
fn a_document_beyond_the_bound_is_dropped_and_the_others_are_judged() {
    let config = FilterConfig { max_document_bytes: 10, ..config(r#"[{"length": {"min_characters": 1}}]"#) };
    let pieces =
        [(1, "0123456789", true), (2, "01234", false), (2, "56789x", false), (2, "more", true), (3, "abc", true)];
    let (kept, context) = run(&config, &pieces);
    assert_eq!(kept, [(1, "0123456789".to_owned()), (3, "abc".to_owned())]);
    let counted = statistics(&context);
    assert_eq!((counted.dropped["filter.too_large"], counted.filtered_bytes), (1, 15));
}

#[test]
fn a_document_without_its_end_is_an_error() {
    let config = config(r#"[{"pii": {}}]"#);
    let mut operator = config.operator(&context(&gpt2())).unwrap();
    assert!(drive(operator.as_mut(), &[documents(&[(1, "a", false)])]).is_err());
    let mut operator = config.operator(&context(&gpt2())).unwrap();
    assert!(drive(operator.as_mut(), &[documents(&[(1, "a", false), (2, "b", true)])]).is_err());
}

#[test]
fn a_job_names_one_valid_rule_per_entry() {
    for (section, problem) in [
        ("filter: {rules: []}", "filter.rules: got []: too few items"),
        ("filter: {}", "filter.rules: is required"),
        ("filter: {rules: [{}]}", "filter.rules[0]: got {}: has no entry; valid: one of c4, "),
        ("filter: {rules: [{pii: {}, c4: {}}]}", "too many entries; valid: at most 1"),
        ("filter: {rules: [{gopher: {}}]}", "unknown key; valid keys here: c4, "),
        ("filter: {rules: [{gopher_quality: {min_word: 5}}]}", "unknown key, did you mean `min_words`?"),
        (
            "filter: {rules: [{language: {keep: [english]}}]}",
            "filter.rules[0].language.keep: got english: not valid; valid: at least one of ",
        ),
        ("filter: {rules: [{pii: {}}], max_document_megabytes: 0}", "too small"),
    ] {
        let error = job_format().parse(&job_with(section)).problems.to_string();
        assert!(error.contains(problem), "{section}: {error}");
    }
    let good = job_with("filter: {rules: [{gopher_quality: {min_words: 5}}, {pii: {}}]}");
    assert_eq!(job_format().parse(&good).problems.0, []);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever pieces and batches a split has, each document is kept with its text or counted, and the verdict is that on
    /// the whole text.
    #[test]
    fn every_document_is_kept_or_counted(
        texts in prop::collection::vec("[a-z #.•\n]{0,60}|[äé…\u{2028}a-z]{0,30}", 0..20),
        sizes in prop::collection::vec(1_usize..20, 1..5),
        per_batch in 1_usize..7,
    ) {
        let config = FilterConfig {
            piece_bytes: 16,
            ..config(r#"[{"length": {"min_characters": 12}}, {"fineweb": {"max_short_line_share": 1.0}}]"#)
        };
        let filter = Filter::new(&config.rules, &config.models).unwrap();
        let mut pieces: Vec<(u64, &str, bool)> = Vec::new();
        for (id, text) in (0..).zip(&texts) {
            let parts = cut(text, &sizes);
            let last = parts.len() - 1;
            pieces.extend(parts.into_iter().enumerate().map(|(i, part)| (id, part, i == last)));
        }
        let batches: Vec<RecordBatch> = pieces.chunks(per_batch).map(documents).collect();
        let context = context(&gpt2());
        let mut operator = config.operator(&context).unwrap();
        let output = drive(operator.as_mut(), &batches).unwrap();
        for batch in &output {
            prop_assert!(document_pieces(batch, "test").unwrap().all(|piece| piece.text.len() <= 16));
        }
        let mut expected = Vec::new();
        let mut dropped: BTreeMap<String, u64> = BTreeMap::new();
        for (id, text) in (0..).zip(&texts) {
            match filter.judge(text) {
                Verdict::Keep(text) => expected.push((id, text.into_owned())),
                Verdict::Drop(reason) => *dropped.entry(reason.to_string()).or_default() += 1,
            }
        }
        prop_assert_eq!(joined(&output), expected);
        prop_assert_eq!(statistics(&context).dropped, dropped);
    }
}
