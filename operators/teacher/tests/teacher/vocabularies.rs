//! Tokenizers in real GGUF files return the same ids as the models' own `tokenizer.json`. Uses llama.cpp's files
//! `ggml-vocab-*.gguf` with texts (`.inp`) and the ids that transformers gave for them (`.out`). `make setup` fetches
//! them.

use std::fs;
use std::path::PathBuf;

use stillhouse_teacher::gguf_tokenizer;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.cache/vocabularies")
}

/// Returns the texts of a vocabulary with their ids.
fn cases(name: &str) -> Vec<(String, Vec<u32>)> {
    let read = |ending| fs::read_to_string(folder().join(format!("ggml-vocab-{name}.gguf.{ending}"))).unwrap();
    let (texts, ids) = (read("inp"), read("out"));
    // The separator ends each text.
    let texts: Vec<&str> = texts.split_terminator("\n__ggml_vocab_test__\n").collect();
    let ids: Vec<&str> = ids.lines().collect();
    assert!(texts.len() > 40 && texts.len() == ids.len(), "{name}: {} texts, {} lines", texts.len(), ids.len());
    let ids = ids.into_iter().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect());
    texts.into_iter().map(str::to_owned).zip(ids).collect()
}

#[test]
fn tokenizers_of_real_files_give_the_ids_of_transformers() {
    for name in ["gpt-2", "llama-bpe", "qwen2", "mpt", "llama-spm", "phi-3"] {
        let file = folder().join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = gguf_tokenizer(&file).unwrap().tokenizer;
        for (text, expected) in cases(name) {
            let got = tokenizer.encode_fast(text.as_str(), false).unwrap();
            assert_eq!(got.get_ids(), expected, "{name}: {text:?}: {:?}", got.get_tokens());
        }
    }
}
