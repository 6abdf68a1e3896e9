//! A small piece of the second example: SmolLM2-135M, quantised, with its own tokenizer.

use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, root, with};

#[test]
fn smollm2_from_gguf() {
    let model = root().join(".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(model.exists(), "{} is not there: run `make setup`", model.display());
    let scratch = Scratch::with_corpus(2, 1300);
    let special = "<|endoftext|>";
    let dataset = scratch.make(&with(
        job(),
        &json!({
            "tokenizer": {"bos": special, "eos": special},
            "pack": {"length": 256},
            "extract": {"teacher": {"path": model}, "topk": 8}
        }),
    ));
    scratch.stillhouse(&["verify", "out", "--teacher", "--sample-batches", "1"]).expect(0);
    let manifest: Value = serde_json::from_str(&fs::read_to_string(dataset.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["vocab_size"], 49_152);
    let statistics = &manifest["statistics"];
    let predicted = statistics["predicted_tokens"].as_f64().unwrap();
    let perplexity = (-statistics["logprob_sum"].as_f64().unwrap() / predicted).exp();
    assert!(predicted > 300.0 && (2.0..60.0).contains(&perplexity), "perplexity {perplexity} of {predicted} tokens");
}
