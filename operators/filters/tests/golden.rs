//! Compares words, sentences and decisions with those of datatrove in `golden.jsonl.gz`, which `golden.py` writes.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde_json::{Value, json};
use stillhouse_filters::{Filter, Models, Rule, Verdict, sentences, words};

#[derive(Deserialize)]
struct Header {
    rules: BTreeMap<String, Vec<Rule>>,
}

#[derive(Deserialize)]
struct Line {
    text: String,
    /// Lengths in characters.
    words: Vec<usize>,
    sentences: Option<Vec<usize>>,
    decisions: BTreeMap<String, Value>,
}

fn lengths(parts: &[&str]) -> Vec<usize> {
    parts.iter().map(|part| part.chars().count()).collect()
}

/// `null` keeps the text, a string keeps a changed text, a list drops it for a reason.
fn decision(filter: &Filter, text: &str) -> Value {
    match filter.judge(text) {
        Verdict::Keep(kept) if kept == text => Value::Null,
        Verdict::Keep(kept) => json!(kept),
        Verdict::Drop(reason) => json!([reason.reason]),
    }
}

#[test]
fn results_are_those_of_datatrove() {
    let golden = include_bytes!("golden.jsonl.gz");
    let mut lines = BufReader::new(GzDecoder::new(golden.as_slice())).lines().map(|line| line.unwrap());
    let header: Header = serde_json::from_str(&lines.next().unwrap()).unwrap();
    let filters: Vec<_> =
        header.rules.iter().map(|(name, rules)| (name, Filter::new(rules, &Models::new()).unwrap())).collect();
    let (mut documents, mut dropped, mut changed) = (0, 0, 0);
    for line in lines {
        let Line { text, words: word_lengths, sentences: sentence_lengths, decisions } =
            serde_json::from_str(&line).unwrap();
        assert_eq!(lengths(&words(&text)), word_lengths, "words {:?} of {text:?}", words(&text));
        if let Some(sentence_lengths) = sentence_lengths {
            assert_eq!(lengths(&sentences(&text)), sentence_lengths, "sentences of {text:?}");
        }
        for (name, filter) in &filters {
            let mut want = decisions.get(*name).cloned().unwrap_or_default();
            if want == json!(["error"]) {
                // a division by zero in datatrove
                want = json!(["gopher_short_doc"]);
            }
            assert_eq!(decision(filter, &text), want, "{name} of {text:?}");
            dropped += usize::from(want.is_array());
            changed += usize::from(want.is_string());
        }
        documents += 1;
    }
    assert!(documents > 700 && dropped > 1000 && changed > 1000, "{documents} documents, {dropped}, {changed}");
}
