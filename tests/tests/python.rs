//! Checks the content of data sets with independent Python: `tests/python/check_dataset.py`.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, nano_job, root, run_command, with};

/// Runs the check and returns its counts.
pub(crate) fn check(dataset: &Path, arguments: &[&str]) -> Value {
    let python = root().join(".venv/bin/python");
    assert!(python.exists(), "{} is not there: run `make setup`", python.display());
    let mut command = Command::new(python);
    command.arg(root().join("tests/python/check_dataset.py")).arg(dataset).args(arguments);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    run_command(&mut command).expect(0).json()
}

#[test]
fn replayed_noise_of_the_real_vocabulary() {
    let scratch = Scratch::with_corpus(2, 500);
    let dataset = scratch.make(&with(
        nano_job(),
        &json!({"pack": {"length": 32}, "extract": {"topk": 50_257, "noise": {"draws": 2}}, "partitions": {"views": 3}}),
    ));
    let counted = check(&dataset, &["--tokens", "100"]);
    assert!(counted["noises"].as_u64().unwrap() >= 200, "{counted}");
    assert!(counted["tv"].as_f64().unwrap() > 1e-5, "{counted}");
}

/// Vocabulary size of `llama-gqa`, a three-layer teacher with random weights.
const WORDS: usize = 199;

/// Writes a tokenizer in which the word `w17` is token 17, and documents of such words; the last one exceeds a row.
fn words(scratch: &Scratch) {
    let name = |id: usize| match id {
        0 => "<unk>".to_owned(),
        1 => "<s>".to_owned(),
        2 => "</s>".to_owned(),
        3 => "<pad>".to_owned(),
        id => format!("w{id}"),
    };
    let vocabulary: serde_json::Map<String, Value> = (0..WORDS).map(|id| (name(id), json!(id))).collect();
    let special: Vec<Value> = (0..4)
        .map(|id| {
            json!({"id": id, "content": name(id), "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": special, "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    });
    scratch.write("tokenizer.json", &tokenizer.to_string());
    let mut corpus = String::new();
    for (document, length) in [5, 17, 1, 30, 3, 9, 24, 40].into_iter().enumerate() {
        let words: Vec<String> =
            (0..length).map(|i| format!("w{}", 4 + (document * 31 + i * i * 7) % (WORDS - 4))).collect();
        corpus += &json!({"text": words.join(" ")}).to_string();
        corpus.push('\n');
    }
    scratch.write("corpus.jsonl", &corpus);
}

/// Runs a job over these words and checks every token.
fn check_words(patch: &Value) -> Value {
    let scratch = Scratch::new();
    words(&scratch);
    let teacher = root().join("operators/teacher/testdata/llama-gqa");
    let small = with(
        job(),
        &json!({
            "tokenizer": {"path": "tokenizer.json", "bos": "<s>", "eos": "</s>", "pad": "<pad>"},
            "pack": {"length": 24},
            "extract": {"teacher": {"path": teacher}, "topk": WORDS},
            "subtokens": {"length": 3}
        }),
    );
    let dataset = scratch.make(&with(small, patch));
    let corpus = scratch.path("corpus.jsonl");
    let counted = check(&dataset, &["--tokens", "1000000", "--words", corpus.to_str().unwrap()]);
    let verified = scratch.stillhouse(&["verify", "out", "--teacher", "--json"]).expect(0).json();
    let noises = ["noises", "within_tolerance", "argmax_hits"].map(|n| verified["teacher"][n].as_u64().unwrap());
    assert!(noises[0] > 0 && noises == [noises[0]; 3], "{verified}");
    assert!(fs::metadata(dataset.join("_SUCCESS")).is_ok());
    counted
}

#[test]
fn dense_noise_in_single_precision() {
    let counted = check_words(&json!({"extract": {"noise": {"codec": "dense", "precision": "f32", "draws": 2}}}));
    assert!(counted["difference"].as_f64().unwrap() < 2e-5, "{counted}");
}

#[test]
fn dense_noise_in_half_precision() {
    check_words(&json!({"extract": {"noise": {"codec": "dense", "precision": "f16"}}, "pack": {"boundary": "none"}}));
}

#[test]
fn padded_rows() {
    let counted = check_words(&json!({
        "pack": {"mode": "pad"}, "extract": {"noise": {"draws": 2}}, "partitions": {"schedule": "polynomial", "sampling": "independent"}
    }));
    // one BOS per row, and the padding
    assert!(counted["certain"].as_u64().unwrap() > 8, "{counted}");
    assert!(counted["repaired"].as_u64().is_some_and(|n| n > 0), "{counted}");
}

#[test]
fn whole_documents_in_every_row() {
    for boundary in ["bos_eos", "none"] {
        let patch = json!({"pack": {"mode": "best_fit", "boundary": boundary}, "extract": {"context": "document"}});
        check_words(&patch);
    }
}

#[test]
fn a_remainder_that_is_padded() {
    check_words(&json!({"pack": {"remainder": "pad", "boundary": "none"}, "extract": {"context": "document"}}));
}

#[test]
fn a_remainder_that_is_kept() {
    check_words(
        &json!({"pack": {"remainder": "keep", "separator": "none"}, "extract": {"noise": {"tolerance": 1e-2}}}),
    );
}

#[test]
fn a_teacher_that_is_reset_at_each_document() {
    let counted = check_words(&json!({"extract": {"context": "document", "noise": {"tolerance": 2e-4}}}));
    assert!(counted["tv"].as_f64().unwrap() <= 2.1e-4, "{counted}");
}
