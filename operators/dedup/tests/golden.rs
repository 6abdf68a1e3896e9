//! Compares normalized texts, signatures, pairs and hits with those of datatrove in `golden.jsonl.gz`, which `golden.py`
//! writes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Read};

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use stillhouse_dedup::{Clusters, ContaminationConfig, ContaminationIndex, MinHash, MinHashConfig, Normalization};
use twox_hash::XxHash64;

const GOLDEN: &[u8] = include_bytes!("golden.jsonl.gz");
const CORPUS: &[u8] = include_bytes!("../../../assets/corpus/sotu-small.jsonl.gz");

#[derive(Deserialize)]
struct Header {
    normalizations: BTreeMap<String, Normalization>,
    minhashes: BTreeMap<String, MinHashConfig>,
    contaminations: BTreeMap<String, ContaminationConfig>,
}

/// The digests of one document.
#[derive(Deserialize)]
struct Line {
    document: Value,
    normalized: BTreeMap<String, String>,
    signatures: BTreeMap<String, String>,
    /// With the default options.
    signature: Option<Option<Vec<u64>>>,
}

#[derive(Deserialize)]
struct EveryCharacter {
    /// The digests of the normalized text of all of them.
    every_character: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Pairs {
    options: MinHashConfig,
    documents: Vec<Value>,
    pairs: BTreeSet<(u64, u64)>,
    /// The documents that datatrove removes.
    removed: Vec<u64>,
    /// The documents with a duplicate, and their clusters.
    clusters: Vec<(u64, u64)>,
}

#[derive(Deserialize)]
struct Hits {
    contamination: String,
    benchmarks: Vec<(String, String, String)>,
    documents: Vec<String>,
    hits: Vec<Option<(String, String)>>,
}

/// Returns the header and the lines with a key.
fn golden<T: DeserializeOwned>(key: &str) -> (Header, Vec<T>) {
    let mut lines = BufReader::new(GzDecoder::new(GOLDEN)).lines().map(|line| line.unwrap());
    let header = serde_json::from_str(&lines.next().unwrap()).unwrap();
    let lines = lines.filter(|line| serde_json::from_str::<Value>(line).unwrap().get(key).is_some());
    (header, lines.map(|line| serde_json::from_str(&line).unwrap()).collect())
}

fn corpus() -> Vec<Vec<char>> {
    let mut lines = String::new();
    GzDecoder::new(CORPUS).read_to_string(&mut lines).unwrap();
    let text = |line| serde_json::from_str::<Value>(line).unwrap()["text"].as_str().unwrap().chars().collect();
    lines.lines().map(text).collect()
}

/// Returns the text of a document: a string, or a part of the corpus that is edited as `edited` of `golden.py` does.
fn text(corpus: &[Vec<char>], document: &Value) -> String {
    if let Some(text) = document.as_str() {
        return text.to_owned();
    }
    let (line, start, length, edit, parameter): (usize, usize, usize, String, usize) =
        serde_json::from_value(document.clone()).unwrap();
    let text: String = corpus[line].iter().skip(start).take(length).collect();
    let is_nth = |index: usize| index % parameter == parameter - 1;
    match edit.as_str() {
        "none" => text,
        "words" => {
            let other =
                |(index, word): (usize, &str)| if is_nth(index) { format!("other{index}") } else { word.into() };
            text.split(' ').enumerate().map(other).collect::<Vec<_>>().join(" ")
        }
        "sentences" => {
            let sentences = text.split(". ").enumerate().filter(|(index, _)| !is_nth(*index));
            sentences.map(|(_, sentence)| sentence).collect::<Vec<_>>().join(". ")
        }
        "case" => text.to_uppercase(),
        "punctuation" => text.replace(',', ";").replace('.', " ! ").replace('-', ""),
        "prefix" => "home about contact ".repeat(parameter) + &text,
        _ => panic!("{edit}"),
    }
}

fn digest(signature: Option<&[u64]>) -> String {
    let Some(signature) = signature else { return "none".into() };
    let bytes: Vec<u8> = signature.iter().flat_map(|value| value.to_le_bytes()).collect();
    short(&bytes)
}

fn text_digest(text: &str) -> String {
    short(text.as_bytes())
}

/// Returns 32 bits of XXH64.
fn short(bytes: &[u8]) -> String {
    format!("{:08x}", XxHash64::oneshot(0, bytes) as u32)
}

#[test]
fn normalized_texts_and_signatures_are_those_of_datatrove() {
    let (header, lines) = golden::<Line>("normalized");
    let minhashes: Vec<_> =
        header.minhashes.iter().map(|(name, config)| (name, MinHash::new(config).unwrap())).collect();
    let (corpus, mut signed) = (corpus(), 0);
    for line in &lines {
        let text = text(&corpus, &line.document);
        for (name, normalization) in &header.normalizations {
            let got = normalization.apply(&text);
            assert_eq!(text_digest(&got), line.normalized[name], "{name} of {text:?} is {got:?}");
        }
        for (name, minhash) in &minhashes {
            let got = minhash.signature(&text);
            if let (Some(want), "default") = (&line.signature, name.as_str()) {
                assert_eq!(got, *want, "{text:?}");
            }
            assert_eq!(digest(got.as_deref()), line.signatures[*name], "{name} of {text:?}");
            signed += usize::from(got.is_some());
        }
    }
    assert!(lines.len() > 300 && signed > 2000, "{} documents, {signed} signatures", lines.len());
}

/// Every character between letters, and around a capital sigma, whose lower case depends on the characters beside it.
#[test]
fn every_character_is_normalized_as_by_datatrove() {
    let (header, lines) = golden::<EveryCharacter>("every_character");
    let [EveryCharacter { every_character }] = &*lines else { panic!("{} lines", lines.len()) };
    let mut text = String::new();
    for c in (0..0x33480).chain(0xe0000..0xe0200).filter_map(char::from_u32) {
        text.push_str(&format!("a{c}Σ{c}b{c}{c} 1{c}2 "));
    }
    for (name, normalization) in &header.normalizations {
        assert_eq!(text_digest(&normalization.apply(&text)), every_character[name], "{name}");
    }
}

#[test]
fn pairs_and_clusters_are_those_of_datatrove() {
    let (_, all) = golden::<Pairs>("pairs");
    let corpus = corpus();
    for want in &all {
        let minhash = MinHash::new(&want.options).unwrap();
        let mut last_with = HashMap::new();
        let mut pairs = BTreeSet::new();
        let mut clusters = Clusters::new(want.documents.len() as u64).unwrap();
        for (number, document) in (0..).zip(&want.documents) {
            let Some(signature) = minhash.signature(&text(&corpus, document)) else { continue };
            for key in minhash.band_keys(&signature) {
                if let Some(last) = last_with.insert(key, number) {
                    pairs.insert((last, number));
                    clusters.union(last, number).unwrap();
                }
            }
        }
        assert_eq!(pairs, want.pairs);
        let clusters = clusters.finish().unwrap();
        let mut firsts = HashMap::new();
        for &(document, cluster) in &want.clusters {
            let first = clusters.first(document).unwrap();
            assert_eq!(*firsts.entry(cluster).or_insert(first), first);
            assert!(clusters.size(document).unwrap() > 1);
        }
        let duplicates = (0..clusters.documents()).filter(|&document| clusters.size(document).unwrap() > 1).count();
        assert_eq!(duplicates, want.clusters.len());
        let dropped = (0..clusters.documents()).filter(|&document| !clusters.is_first(document)).count();
        assert_eq!(dropped, want.removed.len());
        assert!(dropped > 500, "{dropped}");
    }
    assert_eq!(all.len(), 2);
}

#[test]
fn hits_are_those_of_datatrove() {
    let (header, all) = golden::<Hits>("contamination");
    let (mut found, mut missed) = (0, 0);
    for case in &all {
        let mut index = ContaminationIndex::builder(&header.contaminations[&case.contamination]).unwrap();
        for (benchmark, query, label) in &case.benchmarks {
            index.add(benchmark, Some(query), label);
        }
        let index = index.build();
        for (text, want) in case.documents.iter().zip(&case.hits) {
            // datatrove names a benchmark by its file
            let got = index.find(text).map(|hit| (hit.benchmark.replace(' ', "_"), hit.ngram));
            assert_eq!(got, *want, "{} of {text:?}", case.contamination);
            found += usize::from(want.is_some());
            missed += usize::from(want.is_none());
        }
    }
    assert!(all.len() == header.contaminations.len() && found > 100 && missed > 100, "{found} found, {missed} missed");
}
