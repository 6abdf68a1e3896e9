//! Properties, hostile texts and errors. `tests/golden.rs` compares results with those of datatrove.

use std::collections::HashSet;

use proptest::prelude::*;

use crate::mt19937::Mt19937;
use crate::*;

fn minhash(config: MinHashConfig) -> MinHash {
    MinHash::new(&config).unwrap()
}

fn share_a_band(minhash: &MinHash, a: &str, b: &str) -> bool {
    let keys = |text| minhash.band_keys(&minhash.signature(text).unwrap()).collect::<HashSet<_>>();
    !keys(a).is_disjoint(&keys(b))
}

/// Writes numbers as words of eight letters.
fn words(numbers: impl Iterator<Item = u64>) -> String {
    let letters = |number: u64| (0..8).map(move |at| char::from(b'a' + (number >> (4 * at) & 15) as u8));
    numbers.flat_map(|number| letters(number).chain([' '])).collect()
}

/// The probability to share a band is 1 − (1 − sʳ)ᵇ. The bound is five standard deviations of the observed share.
#[test]
fn similar_documents_share_a_band_as_often_as_predicted() {
    let (pairs, size) = (800, 60);
    let mut random = Mt19937::new(7);
    // the permutations of one seed are the same for all pairs, so a third of the pairs has each seed
    let minhashes = [1, 2, 3].map(|seed| {
        let config = MinHashConfig { ngram_words: 1, bands: 9, band_hashes: 4, seed, ..MinHashConfig::default() };
        minhash(config)
    });
    for common in [12, 24, 36, 42, 48, 54] {
        let mut shared = 0;
        for pair in 0..pairs {
            let numbers: Vec<u64> = (0..2 * size - common).map(|_| random.between(0, 1 << 60)).collect();
            let a = words(numbers[..size].iter().copied());
            let b = words(numbers[size - common..].iter().copied());
            shared += usize::from(share_a_band(&minhashes[pair % 3], &a, &b));
        }
        let similarity = common as f64 / (2 * size - common) as f64;
        let expected = 1.0 - (1.0 - similarity.powi(4)).powi(9);
        let deviation = (expected * (1.0 - expected) / pairs as f64).sqrt();
        let observed = shared as f64 / pairs as f64;
        assert!((observed - expected).abs() < 5.0 * deviation + 1e-3, "s = {similarity}: {observed}, not {expected}");
    }
}

fn reference_firsts(documents: u64, pairs: &[(u64, u64)]) -> Vec<u64> {
    let mut firsts: Vec<u64> = (0..documents).collect();
    for _ in 0..documents {
        for &(a, b) in pairs {
            let least = firsts[a as usize].min(firsts[b as usize]);
            (firsts[a as usize], firsts[b as usize]) = (least, least);
        }
    }
    firsts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn clusters_do_not_depend_on_the_order_of_pairs(
        (pairs, shuffled) in prop::collection::vec((0u64..40, 0u64..40), 0..50)
            .prop_flat_map(|pairs| (Just(pairs.clone()), Just(pairs).prop_shuffle())),
    ) {
        let firsts = reference_firsts(40, &pairs);
        for pairs in [&pairs, &shuffled, &pairs.iter().map(|&(a, b)| (b, a)).collect()] {
            let mut clusters = Clusters::new(40).unwrap();
            let merged = pairs.iter().filter(|&&(a, b)| clusters.union(a, b).unwrap()).count();
            let clusters = clusters.finish().unwrap();
            for document in 0..40 {
                prop_assert_eq!(clusters.first(document), Some(firsts[document as usize]));
                let size = firsts.iter().filter(|&&first| first == firsts[document as usize]).count();
                prop_assert_eq!(clusters.size(document), Some(size as u64));
            }
            prop_assert_eq!((0..40).filter(|&document| clusters.is_first(document)).count(), 40 - merged);
        }
    }

    #[test]
    fn texts_that_normalize_equally_have_one_signature(words in prop::collection::vec("[a-z]{1,7}", 5..40)) {
        let minhash = minhash(MinHashConfig::default());
        let signature = minhash.signature(&words.join(" ")).unwrap();
        prop_assert_eq!(minhash.signature(&format!("  {}.\n", words.join(",\t").to_uppercase())), Some(signature.clone()));
        let keys: HashSet<_> = minhash.band_keys(&signature).collect();
        prop_assert_eq!(keys.len(), 14);
    }

    #[test]
    fn any_text_is_processed(text in any::<String>(), repeated in "[ \\n\\r.a\u{301}Σ0-9,]{0,40}") {
        for text in [&text, &repeated] {
            let normalized = Normalization::default().apply(text);
            // a mark between spaces leaves two of them, as in datatrove
            prop_assert!(!normalized.contains("  ") || !text.is_ascii());
            minhash(MinHashConfig { ngram_words: 1, ..MinHashConfig::default() }).signature(text);
            for unit in [Unit::Document, Unit::Paragraph, Unit::Line, Unit::Sentences] {
                let config = ExactConfig { unit, min_characters: Some(0), sentences: 2, ..ExactConfig::default() };
                let exact = ExactKeys::new(&config).unwrap();
                let ranges: Vec<_> = exact.keys(text).map(|(range, _)| range).collect();
                prop_assert!(ranges.iter().all(|range| text.get(range.clone()).is_some()));
                prop_assert_eq!(exact.without(text, &[]), text.as_str());
                if !ranges.is_empty() {
                    prop_assert_eq!(exact.without(text, &ranges), "");
                }
            }
        }
    }

    #[test]
    fn lines_that_stay_are_joined_as_they_were(lines in prop::collection::vec("[ab ]{0,3}", 1..9), drop in any::<u16>(), ends in any::<bool>()) {
        let text = lines.join("\n") + if ends { "\n" } else { "" };
        let exact = ExactKeys::new(&ExactConfig { unit: Unit::Line, min_characters: Some(0), ..ExactConfig::default() }).unwrap();
        let keys: Vec<_> = exact.keys(&text).collect();
        let is_dropped = |index: usize| drop >> index & 1 == 1;
        let dropped: Vec<_> = (0..keys.len()).rev().filter(|&index| is_dropped(index)).map(|index| keys[index].0.clone()).collect();
        let kept: Vec<_> = (0..keys.len()).filter(|&index| !is_dropped(index)).map(|index| lines[index].as_str()).collect();
        let end = if !kept.is_empty() && text.ends_with('\n') { "\n" } else { "" };
        prop_assert_eq!(exact.without(&text, &dropped), kept.join("\n") + end);
    }
}

fn parts(config: ExactConfig, text: &str) -> Vec<&str> {
    ExactKeys::new(&config).unwrap().keys(text).map(|(range, _)| &text[range]).collect()
}

fn removed(unit: Unit, text: &str, drop: &[&str]) -> String {
    let exact = ExactKeys::new(&ExactConfig { unit, min_characters: Some(1), sentences: 1, ..ExactConfig::default() });
    let exact = exact.unwrap();
    let ranges: Vec<_> =
        exact.keys(text).map(|(range, _)| range).filter(|r| drop.contains(&&text[r.clone()])).collect();
    exact.without(text, &ranges).into_owned()
}

#[test]
fn a_part_goes_with_what_follows_it() {
    assert_eq!(removed(Unit::Line, "a\r\nb\r\nc", &["b"]), "a\r\nc");
    assert_eq!(removed(Unit::Line, "a\r\nb\r\nc", &["c"]), "a\r\nb");
    assert_eq!(removed(Unit::Line, "a\n\nb\na\n", &["a"]), "\nb\n");
    assert_eq!(removed(Unit::Paragraph, "a\nb\n\nc\n \n\nd\n", &["c"]), "a\nb\n\nd\n");
    assert_eq!(removed(Unit::Paragraph, "\n\na\n\nb", &["b"]), "\n\na");
    assert_eq!(removed(Unit::Paragraph, "\n\na\n\nb", &["a"]), "\n\nb");
    assert_eq!(removed(Unit::Sentences, "One. Two!  Three.", &["Two!"]), "One. Three.");
    assert_eq!(removed(Unit::Document, " a ", &[" a "]), "");
}

#[test]
fn overlapping_runs_of_sentences_are_removed() {
    let exact =
        ExactKeys::new(&ExactConfig { unit: Unit::Sentences, min_characters: Some(1), ..ExactConfig::default() });
    let (exact, text) = (exact.unwrap(), "One. Two. Three. Four. Five.");
    let ranges: Vec<_> = exact.keys(text).map(|(range, _)| range).collect();
    assert_eq!(ranges, [0..16, 5..22, 10..28]);
    assert_eq!(exact.without(text, &ranges[1..2]), "One. Five.");
    assert_eq!(exact.without(text, &[ranges[1].clone(), ranges[0].clone()]), "Five.");
}

#[test]
fn parts_have_keys_if_they_are_long_enough() {
    let line = |min_characters| ExactConfig { unit: Unit::Line, min_characters, ..ExactConfig::default() };
    assert_eq!(parts(line(Some(2)), "}\n\n é \néé\nab"), ["éé", "ab"]);
    assert_eq!(parts(line(None), "a short line\na line of twenty cha"), ["a line of twenty cha"]);
    assert_eq!(parts(line(Some(0)), "a\n\n"), ["a", ""]);
    assert_eq!(parts(ExactConfig::default(), ""), [""]);
    let paragraph = ExactConfig { unit: Unit::Paragraph, min_characters: Some(1), ..ExactConfig::default() };
    assert_eq!(parts(paragraph, " \n  a\nb \n\t\nc"), ["  a\nb ", "c"]);
}

#[test]
fn documents_are_compared_byte_by_byte_unless_normalized() {
    let key = |config: &ExactConfig, text: &str| ExactKeys::new(config).unwrap().keys(text).next().unwrap().1;
    let (bytes, loose) = (ExactConfig::default(), Normalization { lowercase: true, ..Normalization::NONE });
    let loose = ExactConfig { normalization: loose, ..ExactConfig::default() };
    assert_ne!(key(&bytes, "a"), key(&bytes, "a "));
    assert_ne!(key(&bytes, "a"), key(&bytes, "A"));
    assert_eq!(key(&loose, "a"), key(&loose, "A "));
    // XXH3-128 of an empty string
    assert_eq!(key(&bytes, ""), 0x99aa06d3014798d86001c324468d497f);
}

#[test]
fn a_document_of_too_few_words_has_no_signature() {
    let minhash = minhash(MinHashConfig::default());
    assert_eq!(minhash.signature(""), None);
    assert_eq!(minhash.signature("one, two, three, four."), None);
    assert_eq!(minhash.signature("... !!! ---").as_deref(), None);
    assert_eq!(minhash.signature("one two three four five").map(|signature| signature.len()), Some(112));
    assert_eq!(minhash.band_keys(&[]).count(), 0);
}

#[test]
fn hostile_texts_are_processed() {
    let texts = [
        "x".repeat(1 << 20),
        "a ".repeat(1 << 19),
        "\n".repeat(1 << 20),
        "\u{301}".repeat(1 << 18),
        "e\u{301}\u{323}\u{300}".repeat(1 << 16),
        "שָׁלוֹם עֲלֵיכֶם \u{202e}مرحبا\u{202c} ".repeat(1 << 13),
        "1,".repeat(1 << 18),
        "word, ".repeat(1 << 17),
    ];
    let minhash = minhash(MinHashConfig { ngram_words: 2, ..MinHashConfig::default() });
    let mut index = ContaminationIndex::builder(&ContaminationConfig::default()).unwrap();
    texts.iter().for_each(|text| index.add("task", Some(text), text));
    let index = index.build();
    let has_signature = texts.each_ref().map(|text| minhash.signature(text).is_some());
    assert_eq!(has_signature, [false, true, false, false, false, true, true, true]);
    for text in &texts {
        index.find(text);
        for unit in [Unit::Document, Unit::Paragraph, Unit::Line, Unit::Sentences] {
            let exact = ExactKeys::new(&ExactConfig { unit, ..ExactConfig::default() }).unwrap();
            exact.keys(text).for_each(drop);
        }
    }
}

#[test]
fn an_index_finds_all_its_ngrams() {
    let config = ContaminationConfig { ngram_words: 2, ..ContaminationConfig::default() };
    let mut index = ContaminationIndex::builder(&config).unwrap();
    assert!(ContaminationIndex::builder(&config).unwrap().build().find("a b").is_none());
    let mut random = Mt19937::new(5);
    let numbers: Vec<u64> = (0..100_000).map(|_| random.between(0, 1 << 40)).collect();
    let text = words(numbers.iter().copied());
    // the second time adds nothing, and the limit of entries is passed
    index.add("b", None, &text);
    index.add("b", None, &text);
    let index = index.build();
    let unique: HashSet<_> = numbers.windows(2).map(|pair| (pair[0] as u32, pair[1] as u32)).collect();
    assert_eq!(index.ngrams(), unique.len());
    for pair in numbers.windows(2).step_by(97) {
        assert!(index.find(&words(pair.iter().copied())).is_some());
        assert!(index.find(&words([pair[0], pair[1] ^ 1].into_iter())).is_none());
    }
}

#[test]
fn errors_state_what_is_valid() {
    let error = |json: &str| MinHash::new(&serde_json::from_str(json).unwrap()).err().unwrap().to_string();
    assert_eq!(error(r#"{"ngram_words": 0}"#), "minhash.ngram_words is 0; valid: 1 to 100");
    assert_eq!(error(r#"{"bands": 65537}"#), "minhash.bands is 65537; valid: 1 to 65536");
    assert_eq!(error(r#"{"bands": 0}"#), "minhash.bands is 0; valid: 1 to 65536");
    assert_eq!(
        error(r#"{"bands": 10, "band_hashes": 6554}"#),
        "minhash.band_hashes is 6554; valid: 1 to 6553, for 10 bands"
    );
    let config: ExactConfig = serde_json::from_str(r#"{"unit": "sentences", "sentences": 0}"#).unwrap();
    assert_eq!(ExactKeys::new(&config).err().unwrap().to_string(), "exact.sentences is 0; valid: 1 to 100");
    let config: ContaminationConfig = serde_json::from_str(r#"{"ngram_words": 101}"#).unwrap();
    let error = ContaminationIndex::builder(&config).err().unwrap();
    assert_eq!(error.to_string(), "contamination.ngram_words is 101; valid: 1 to 100");
}

#[test]
fn configs_refuse_unknown_keys_and_have_defaults() {
    assert_eq!(serde_json::from_str::<MinHashConfig>("{}").unwrap(), MinHashConfig::default());
    assert_eq!(serde_json::from_str::<ExactConfig>("{}").unwrap(), ExactConfig::default());
    assert_eq!(serde_json::from_str::<ContaminationConfig>("{}").unwrap(), ContaminationConfig::default());
    assert!(serde_json::from_str::<MinHashConfig>(r#"{"band": 1}"#).is_err());
    assert!(serde_json::from_str::<ExactConfig>(r#"{"normalization": {"case": true}}"#).is_err());
    let hash: MinHashConfig = serde_json::from_str(r#"{"hash": "sha1_32"}"#).unwrap();
    assert_eq!(hash.hash, NgramHash::Sha1Bits32);
    let schema = serde_json::to_string(&schemars::schema_for!(MinHashConfig)).unwrap();
    assert!(schema.contains("sha1_64") && schema.contains("DedupNormalization"), "{schema}");
}
