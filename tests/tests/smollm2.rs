//! A small part of the second example: quantised SmolLM2-135M with its own tokenizer, on modern speeches.

use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, root, with};

#[test]
fn smollm2_from_gguf() {
    let model = root().join(".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(model.exists(), "{} is not there: run `make setup`", model.display());
    let scratch = Scratch::new();
    let special = "<|endoftext|>";
    let dataset = scratch.make(&with(
        job(),
        &json!({
            "input": {
                "paths": [root().join("assets/corpus/sotu-small.jsonl.gz")],
                "sql": "SELECT substr(text, 1, 4500) AS text FROM input WHERE year >= 2009 ORDER BY year"
            },
            "tokenizer": {"bos": special, "eos": special},
            "pack": {"length": 512},
            "extract": {"teacher": {"path": model, "batch_tokens": 2048}, "topk": 8}
        }),
    ));
    scratch.stillhouse(&["verify", "out", "--teacher", "--sample-batches", "1"]).expect(0);
    let manifest: Value = serde_json::from_str(&fs::read_to_string(dataset.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["vocab_size"], 49_152);
    let statistics = &manifest["statistics"];
    let predicted = statistics["predicted_tokens"].as_f64().unwrap();
    let perplexity = (-statistics["logprob_sum"].as_f64().unwrap() / predicted).exp();
    // English prose of thousands of tokens gives 18 to 28; a wrong rope, norm or tokenizer gives hundreds.
    assert!(predicted > 1500.0 && (18.0..32.0).contains(&perplexity), "perplexity {perplexity} of {predicted} tokens");
    let corrections = statistics["corrections"].as_f64().unwrap() / predicted;
    assert!((0.3..3.0).contains(&corrections), "{corrections} corrections per token at tolerance 1e-3");
}
