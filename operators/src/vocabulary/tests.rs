use std::fs;

use super::*;
use crate::testing::{bert, fetched, gpt2, repository};

const BERT: &str = "operators/testdata/bert-base-uncased";

fn load(path: &Path, spec: &spec::Tokenizer, teacher: Option<TeacherSpecials>) -> Result<Vocabulary, VocabularyError> {
    Vocabulary::load(path, "tok", spec, teacher)
}

fn ids(vocabulary: &Vocabulary) -> Vec<Option<u32>> {
    Role::ALL.iter().map(|&role| vocabulary.special(role).map(|token| token.id)).collect()
}

#[test]
fn gpt2_has_its_ids() {
    let gpt2 = gpt2();
    assert_eq!(gpt2.vocab_size(), 50_257);
    assert_eq!(gpt2.encode("Hello world").unwrap(), [15496, 995]);
    assert!(gpt2.encode("").unwrap().is_empty());
    assert_eq!(gpt2.encode("a\n\nb<|endoftext|>").unwrap(), [64, 198, 198, 65, 27, 91, 437, 1659, 5239, 91, 29]);
    assert_eq!(ids(&gpt2), [Some(50256), Some(50256), Some(50256), None]);
    assert_eq!(gpt2.decode(&[15496, 995, 50256]), "Hello world<|endoftext|>");
    assert_eq!([995, 198, 50256].map(|id| gpt2.token_text(id)), [" world", "\\n", "<|endoftext|>"]);
    assert_eq!(gpt2.token_text(447), "\\xe2\\x80");
    assert_eq!(gpt2.token_text(60_000), "<id 60000>");
}

#[test]
fn bert_has_its_ids() {
    let bert = bert();
    assert_eq!(bert.vocab_size(), 30_522);
    assert_eq!(bert.encode("hello world").unwrap(), [7592, 2088]);
    assert_eq!(bert.encode("Hello, WORLD").unwrap(), [7592, 1010, 2088]);
    assert_eq!(ids(&bert), [Some(101), Some(102), Some(0), Some(103)]);
    assert_eq!(bert.special(Role::Eos).unwrap().token, "[SEP]");
    assert_eq!(bert.special_tokens()["mask"].token, "[MASK]");
}

#[test]
fn truncation_and_padding_are_switched_off() {
    let text = "word ".repeat(500);
    assert_eq!(bert().encode(&text).unwrap().len(), 500);
    assert_eq!(bert().encode("word").unwrap().len(), 1);
}

#[test]
fn well_known_names_are_found_without_a_folder() {
    let file = repository(BERT).join("tokenizer.json");
    let bare = load(&file, &spec::Tokenizer::default(), None).unwrap();
    assert_eq!(ids(&bare), [Some(101), Some(102), Some(0), Some(103)]);
    let teacher = Some(TeacherSpecials { bos: Some(2000), eos: Some(9_999_999) });
    let taught = load(&file, &spec::Tokenizer::default(), teacher).unwrap();
    assert_eq!(ids(&taught), [Some(2000), Some(102), Some(0), Some(103)]);
}

#[test]
fn the_job_decides_first_and_must_name_a_token() {
    let spec = spec::Tokenizer { bos: Some("[unused0]".into()), pad: Some("the".into()), ..Default::default() };
    let vocabulary = load(&repository(BERT), &spec, None).unwrap();
    assert_eq!(ids(&vocabulary), [Some(1), Some(102), Some(1996), Some(103)]);

    let spec = spec::Tokenizer { eos: Some("no such".into()), ..Default::default() };
    let error = load(&repository(BERT), &spec, None).unwrap_err().to_string();
    assert!(
        error.starts_with(r#"tokenizer.eos: got "no such", which is not one token of tok; valid: "[PAD]""#),
        "{error}"
    );
}

#[test]
fn configuration_files_are_read_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    fs::copy(repository(BERT).join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    write(
        "tokenizer_config.json",
        r#"{"bos_token": null, "eos_token": {"content": "the"}, "pad_token": "not in there"}"#,
    );
    write("special_tokens_map.json", r#"{"bos_token": "a", "eos_token": "b"}"#);
    write("generation_config.json", r#"{"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": 10}"#);
    let vocabulary = load(folder.path(), &spec::Tokenizer::default(), None).unwrap();
    assert_eq!(ids(&vocabulary), [Some(1037), Some(1996), Some(10), Some(103)]);

    write("special_tokens_map.json", "{");
    let error = load(folder.path(), &spec::Tokenizer::default(), None).unwrap_err().to_string();
    assert!(error.contains("special_tokens_map.json: is not JSON"), "{error}");
}

#[test]
fn a_missing_special_names_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(
        &path,
        r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,
        "post_processor":null,"decoder":null,"model":{"type":"WordLevel","vocab":{"up":0,"down":5},"unk_token":"up"}}"#,
    )
    .unwrap();
    let vocabulary = load(&path, &spec::Tokenizer::default(), None).unwrap();
    assert_eq!(vocabulary.vocab_size(), 6);
    let error = vocabulary.require(Role::Bos).unwrap_err().to_string();
    assert!(error.starts_with("tokenizer.bos: is required here: tok names no bos token; valid:"), "{error}");
    let spec = spec::Tokenizer { bos: Some("down".into()), ..Default::default() };
    assert_eq!(load(&path, &spec, None).unwrap().require(Role::Bos).unwrap(), 5);
}

#[test]
fn files_that_are_none_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = load(folder.path(), &spec::Tokenizer::default(), None).unwrap_err().to_string();
    assert!(error.contains("cannot read") && error.contains("tokenizer.json"), "{error}");
    let path = folder.path().join("tokenizer.json");
    for text in ["", "{}", "{\"model\": {\"type\": \"BPE\"}}", "[1]"] {
        fs::write(&path, text).unwrap();
        let error = load(&path, &spec::Tokenizer::default(), None).unwrap_err().to_string();
        assert!(error.contains("is not a tokenizer.json"), "{error}");
    }
}

fn reloads(vocabulary: &Vocabulary) {
    let json = vocabulary.to_json().unwrap();
    let value: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert!(value["truncation"].is_null() && value["padding"].is_null());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, &json).unwrap();
    let again = load(&path, &spec::Tokenizer::default(), None).unwrap();
    assert_eq!(again.to_json().unwrap(), json);
    assert_eq!(again.vocab_size(), vocabulary.vocab_size());
    let text = "It's 3.5 miles, naïve “quotes”\n\n\tand 漢字 \u{1f600}  end";
    assert_eq!(again.encode(text).unwrap(), vocabulary.encode(text).unwrap());
}

#[test]
fn the_written_tokenizer_reloads_equal() {
    reloads(&gpt2());
    reloads(&bert());
}

#[test]
fn the_tokenizer_of_a_gguf() {
    let path = fetched("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    let vocabulary = load(&path, &spec::Tokenizer::default(), None).unwrap();
    assert_eq!(vocabulary.vocab_size(), 49_152);
    let spec =
        spec::Tokenizer { bos: Some("<|endoftext|>".into()), eos: Some("<|endoftext|>".into()), ..Default::default() };
    let vocabulary = load(&path, &spec, None).unwrap();
    assert_eq!(ids(&vocabulary)[..2], [Some(0), Some(0)]);
    let text = "Year 1790: the naïve world";
    assert_eq!(vocabulary.decode(&vocabulary.encode(text).unwrap()), text);
    reloads(&vocabulary);
}

fn with_mode(special_tokens: SpecialTokens) -> spec::Tokenizer {
    spec::Tokenizer { special_tokens, ..Default::default() }
}

/// Loads GPT-2's tokenizer with other added tokens.
fn gpt2_with(added: &serde_json::Value, spec: &spec::Tokenizer) -> Vocabulary {
    let mut json: serde_json::Value =
        serde_json::from_slice(&fs::read(repository("assets/teacher-nano-gpt2/tokenizer.json")).unwrap()).unwrap();
    json["added_tokens"] = added.clone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, json.to_string()).unwrap();
    load(&path, spec, None).unwrap()
}

#[test]
fn special_tokens_in_a_text_are_those_of_pythons_tokenizers_both_ways() {
    let cases: Vec<serde_json::Value> =
        serde_json::from_str(include_str!("../../testdata/special_tokens.json")).unwrap();
    let added = serde_json::from_str(include_str!("../../testdata/gpt2-added.json")).unwrap();
    let mut differ = 0;
    for (key, mode) in [("text", SpecialTokens::Text), ("parse", SpecialTokens::Parse)] {
        let spec = with_mode(mode);
        let tokenizers = BTreeMap::from([
            ("gpt2", load(&repository("assets/teacher-nano-gpt2/tokenizer.json"), &spec, None).unwrap()),
            ("bert", load(&repository(BERT), &spec, None).unwrap()),
            ("gpt2-added", gpt2_with(&added, &spec)),
        ]);
        for case in &cases {
            let (raw, name) = (case["raw"].as_str().unwrap(), case["tokenizer"].as_str().unwrap());
            let expected: Vec<u32> = serde_json::from_value(case[key].clone()).unwrap();
            assert_eq!(tokenizers[name].encode(raw).unwrap(), expected, "{name}, {key}: {raw:?}");
            differ += usize::from(case["text"] != case["parse"]);
        }
    }
    assert!(cases.len() > 400 && differ > 200, "{differ} of {}", cases.len());
}

#[test]
fn a_token_with_a_role_is_special_whatever_its_file_says() {
    let added = serde_json::json!([{"id": 50256, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": false}]);
    let text = gpt2_with(&added, &spec::Tokenizer::default());
    assert_eq!(text.encode("<|endoftext|>").unwrap(), [27, 91, 437, 1659, 5239, 91, 29]);
    let written: serde_json::Value = serde_json::from_slice(&text.to_json().unwrap()).unwrap();
    assert_eq!(written["added_tokens"][0]["special"], false, "the tokenizer is written as it was");
    let parsed = gpt2_with(&added, &with_mode(SpecialTokens::Parse));
    assert_eq!(parsed.encode("<|endoftext|>").unwrap(), [50256]);
    assert_eq!((text.parsed(Role::Eos), parsed.parsed(Role::Eos)), (None, Some(50256)));
}

#[test]
fn a_model_that_makes_special_tokens_of_text_is_not_believed() {
    let added = |content: &str, id: u32| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    let unigram = serde_json::json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
        "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["<", -5.0], ["/", -5.0], ["s", -5.0], [">", -5.0], ["a", -5.0]]});
    let words =
        serde_json::json!({"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "</s>": 1, "a": 2}});
    for model in [unigram, words] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let json = serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null, "model": model,
            "added_tokens": [added("<unk>", 0), added("</s>", 1)]});
        fs::write(&path, json.to_string()).unwrap();
        let text = load(&path, &spec::Tokenizer::default(), None).unwrap();
        assert_eq!(text.encode("a 漢").unwrap().last(), Some(&0), "the unknown token is no mistake");
        let error = text.encode("a </s> a").unwrap_err().to_string();
        assert!(error.contains(r#"special token "</s>" (id 1)"#) && error.contains("special_tokens: parse"), "{error}");
        let parsed = load(&path, &with_mode(SpecialTokens::Parse), None).unwrap();
        assert!(parsed.encode("a </s> a").unwrap().contains(&1));
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(200))]
    /// No text becomes a special token, and no part of the text is lost.
    #[test]
    fn no_text_becomes_a_special_token(parts in proptest::collection::vec("(<\\|endoftext\\|>|<\\|im_start\\|>|<\\|im_end\\|>|\\[SEP\\]|<|\\|| |\n|[a-z]{1,5}|[à-ÿ])", 0..30)) {
        static SMOLLM2: std::sync::OnceLock<Vocabulary> = std::sync::OnceLock::new();
        let smollm2 = SMOLLM2.get_or_init(|| {
            load(&fetched("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"), &spec::Tokenizer::default(), None).unwrap()
        });
        let text = parts.concat();
        for (vocabulary, specials) in [(&*gpt2(), 50256..50257), (smollm2, 0..17)] {
            let ids = vocabulary.encode(&text).unwrap();
            proptest::prop_assert!(!ids.iter().any(|id| specials.contains(id)), "{ids:?} of {text:?}");
            proptest::prop_assert_eq!(vocabulary.decode(&ids), &*text);
        }
        proptest::prop_assert!(!bert().encode(&text).unwrap().iter().any(|id| [101, 102].contains(id)));
    }
}

#[test]
fn added_tokens_keep_the_ids_of_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let write = |id: u32| {
        let json = serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": null,
            "added_tokens": [{"id": id, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true}],
            "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 1}}});
        fs::write(&path, json.to_string()).unwrap();
        load(&path, &spec::Tokenizer::default(), None)
    };
    assert_eq!(write(2).unwrap().special(Role::Bos).unwrap().id, 2);
    let error = write(7).unwrap_err().to_string();
    assert!(error.contains(r#"tokenizer.json: the added token "<s>" has the id 7, and 2 when"#), "{error}");
}

const CODE_AND_PROSE: &str = include_str!("../../../ARCHITECTURE.md");

/// Tests vocabularies of real models on llama.cpp's tokenizer texts, against the ids that transformers returns.
#[test]
fn real_vocabularies_go_the_fast_way_and_give_the_ids_of_transformers() {
    let folder = fetched("vocabularies");
    let ways = [
        ("gpt-2", "GPT-2 pattern, byte-level BPE (fast)"),
        ("llama-bpe", "cl100k pattern, byte-level BPE (fast)"),
        ("qwen2", "Qwen 2 pattern, byte-level BPE, NFC (fast)"),
        ("mpt", "GPT-2 pattern, byte-level BPE, NFC (fast)"),
        ("llama-spm", "words after spaces, SentencePiece's BPE (fast)"),
        ("phi-3", "words after spaces, SentencePiece's BPE (fast)"),
    ];
    let corpus = [CODE_AND_PROSE, include_str!("tests.rs")].concat();
    for (name, way) in ways {
        let file = folder.join(format!("ggml-vocab-{name}.gguf"));
        let vocabulary = load(&file, &spec::Tokenizer::default(), None).unwrap();
        assert!(vocabulary.encoder_description().starts_with(way), "{name}: {}", vocabulary.encoder_description());
        let read = |ending: &str| fs::read_to_string(file.with_extension(format!("gguf.{ending}"))).unwrap();
        let (texts, ids) = (read("inp"), read("out"));
        let texts: Vec<&str> = texts.split_terminator("\n__ggml_vocab_test__\n").collect();
        assert_eq!(texts.len(), ids.lines().count());
        for (text, ids) in texts.iter().zip(ids.lines()) {
            let ids: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(vocabulary.encode(text).unwrap(), ids, "{name}: {text:?}");
        }
        let expected = vocabulary.encoder().encode_fast(corpus.as_str(), false).unwrap();
        assert_eq!(vocabulary.encode(&corpus).unwrap(), expected.get_ids(), "{name}");
    }
}

/// No key of a tokenizer.json is accepted and then ignored, or makes ids random.
#[test]
fn keys_that_nothing_honours_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    let of = |source: &str, change: &dyn Fn(&mut serde_json::Value)| {
        let bytes = fs::read(repository(source).join("tokenizer.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        change(&mut json);
        fs::write(&file, json.to_string()).unwrap();
        load(&file, &spec::Tokenizer::default(), None).map_err(|e| e.to_string())
    };
    const GPT2: &str = "assets/teacher-nano-gpt2";
    type Case<'a> = (&'a str, &'a str, &'a dyn Fn(&mut serde_json::Value));
    let refused: [Case<'_>; 9] = [
        (GPT2, "model.dropout: got 0.1", &|json| json["model"]["dropout"] = 0.1.into()),
        (GPT2, "model.alpha: got 0.2", &|json| json["model"]["alpha"] = 0.2.into()),
        (BERT, "model.byte_fallback: got true", &|json| json["model"]["byte_fallback"] = true.into()),
        (BERT, "model.nbest_size: got 3", &|json| json["model"]["nbest_size"] = 3.into()),
        (BERT, "added_tokens[0].strip: got true", &|json| json["added_tokens"][0]["strip"] = true.into()),
        (BERT, "normalizer.fold: got \"é\"", &|json| json["normalizer"]["fold"] = "é".into()),
        (GPT2, "pre_tokenizer.split: got true", &|json| json["pre_tokenizer"]["split"] = true.into()),
        (BERT, "post_processor.pad: got 1", &|json| json["post_processor"]["pad"] = 1.into()),
        (BERT, "decoder.width: got 4", &|json| json["decoder"]["width"] = 4.into()),
    ];
    for (source, place, change) in refused {
        let error = of(source, change).unwrap_err();
        assert!(
            error.contains(place) && error.contains("valid: ") && error.contains("tokenizer.json"),
            "{place}: {error}"
        );
    }
    // 0 and null have no effect, and truncation is not applied
    let plain = of(GPT2, &|json| {
        json["model"]["dropout"] = 0.0.into();
        json["model"]["alpha"] = serde_json::Value::Null;
        json["truncation"] =
            serde_json::json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0});
    });
    assert_eq!(plain.unwrap().encode("Hello world").unwrap(), [15496, 995]);
}
