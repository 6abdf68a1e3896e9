use std::io::Read;

use flate2::read::GzDecoder;
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

const MODELS: &[(&str, &[u8])] = &[
    ("softmax-bigrams.bin", include_bytes!("../../tests/classifiers/softmax-bigrams.bin.gz")),
    ("hierarchical-parts.bin", include_bytes!("../../tests/classifiers/hierarchical-parts.bin.gz")),
    ("one-vs-all.bin", include_bytes!("../../tests/classifiers/one-vs-all.bin.gz")),
    ("negative-sampling.bin", include_bytes!("../../tests/classifiers/negative-sampling.bin.gz")),
    ("quantized.ftz", include_bytes!("../../tests/classifiers/quantized.ftz.gz")),
    ("quantized-pruned.ftz", include_bytes!("../../tests/classifiers/quantized-pruned.ftz.gz")),
    ("quantized-output.ftz", include_bytes!("../../tests/classifiers/quantized-output.ftz.gz")),
];

fn unpacked(gz: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    GzDecoder::new(gz).read_to_end(&mut bytes).unwrap();
    bytes
}

/// The smallest models, for tests that change their bytes.
fn small() -> Vec<Vec<u8>> {
    let small = ["quantized.ftz", "quantized-pruned.ftz", "hierarchical-parts.bin"];
    MODELS.iter().filter(|(name, _)| small.contains(name)).map(|(_, gz)| unpacked(gz)).collect()
}

fn read(bytes: Vec<u8>) -> Result<FasttextModel, FasttextError> {
    FasttextModel::new(bytes.into())
}

/// What `tests/classifiers.py` writes.
#[derive(Deserialize)]
struct Golden {
    texts: Vec<String>,
    /// For each model and text, scores by label; none if the text has no feature.
    scores: std::collections::BTreeMap<String, Vec<Option<std::collections::BTreeMap<String, f64>>>>,
}

#[test]
fn scores_are_those_of_fasttext() {
    let golden = unpacked(include_bytes!("../../tests/classifiers/scores.json.gz"));
    let golden: Golden = serde_json::from_slice(&golden).unwrap();
    let mut compared = 0;
    for (name, gz) in MODELS {
        let model = read(unpacked(gz)).unwrap();
        for (text, expected) in golden.texts.iter().zip(&golden.scores[*name]) {
            let expected = expected.clone().unwrap_or_default();
            let labels: Vec<usize> =
                expected.keys().map(|label| model.labels().iter().position(|known| known == label).unwrap()).collect();
            let scores = model.scores(crate::python::strip(text), &labels);
            assert_eq!(scores.is_some(), !expected.is_empty(), "{name}: {text:?}");
            for ((label, &expected), score) in expected.iter().zip(scores.unwrap_or_default()) {
                let is_equal = (f64::from(score) - expected).abs() <= 2e-6;
                assert!(is_equal, "{name}, label {label}: {score} instead of {expected} for {text:?}");
                compared += 1;
            }
        }
    }
    assert!(compared > 2000, "{compared}");
}

#[test]
fn another_file_is_refused() {
    let text = |bytes: &[u8]| read(bytes.to_vec()).unwrap_err().to_string();
    let no_model =
        "is no fastText model; valid: a file that `fasttext supervised` or `fasttext quantize` wrote (.bin, .ftz)";
    assert_eq!(text(b""), no_model);
    assert_eq!(text(b"__label__1 some text\n"), no_model);
    let model = unpacked(MODELS[0].1);
    let changed = |at: usize, value: i32| {
        let mut changed = model.clone();
        changed[at..at + 4].copy_from_slice(&value.to_le_bytes());
        text(&changed)
    };
    assert_eq!(changed(4, 13), "is damaged: version is 13; valid: 11 to 12");
    // the options follow the header: dim is the first, loss the seventh, model the eighth
    assert_eq!(changed(8, 7), "is damaged: input is 6; valid: 7 columns");
    assert_eq!(changed(8, 0), "is damaged: dim is 0; valid: 1 to 65536");
    assert_eq!(changed(8 + 6 * 4, 5), "is damaged: loss is 5; valid: 1 to 4");
    assert_eq!(
        changed(8 + 7 * 4, 2),
        "has word vectors and no labels; valid: a classifier, as `fasttext supervised` writes it"
    );
    let more = [model.as_slice(), b"more"].concat();
    assert_eq!(text(&more), "is damaged: bytes after the output matrix is 4; valid: 0");
}

/// A model that ends early is refused wherever it ends.
#[test]
fn a_truncated_model_is_refused() {
    for model in small() {
        for length in (0..model.len()).rev().step_by(37).chain(0..200) {
            let error = read(model[..length].to_vec()).unwrap_err();
            let is_truncated = matches!(error, FasttextError::Truncated { bytes, .. } if bytes == length);
            assert!(is_truncated || (length < 4 && error == FasttextError::NotAModel), "{length}: {error}");
        }
    }
}

#[test]
fn the_text_is_one_line() {
    let model = read(unpacked(MODELS[0].1)).unwrap();
    let scores = |text: &str| model.scores(text, &[0, 1]).unwrap();
    assert_eq!(scores("of the people\nof the States\r\n"), scores("of the people of the States"));
    assert_eq!(scores("of the </s> people"), scores("of the"), "fastText ends the line at its sign for the end");
    assert_ne!(scores("of the people"), scores("of the States"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever a file says: an error, or scores.
    #[test]
    fn damaged_models_make_no_panic(
        which in 0..3_usize,
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..6),
        text in "[a-z</>_ \\n\u{e9}\u{4e2d}]{0,60}",
    ) {
        let mut model = small().swap_remove(which);
        for (place, byte, in_head) in places {
            let range = if in_head { 200 } else { model.len() };
            model[place.index(range)] = byte;
        }
        if let Ok(model) = read(model) {
            let labels: Vec<usize> = (0..model.labels().len()).collect();
            prop_assert!(model.scores(&text, &labels).is_none_or(|scores| scores.len() == labels.len()));
        }
    }
}
