//! Compares ids with those of `tokenizers`: GPT-2 and BERT unchanged, and vocabularies trained on prose with the other
//! patterns.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Read;
use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;
use stillhouse_tokenizer::{FastTokenizer, NeedsFallback, Scratch, UnsupportedComponent, WordSplitter};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::normalizers::{BertNormalizer, NFC, NFD, NormalizerWrapper};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The speeches of the repository, one per text.
fn speeches() -> &'static [String] {
    static TEXTS: LazyLock<Vec<String>> = LazyLock::new(|| {
        let (mut lines, path) = (String::new(), repository("assets/corpus/sotu-small.jsonl.gz"));
        flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut lines).unwrap();
        let text =
            |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["text"].as_str().unwrap().to_owned();
        lines.lines().map(text).collect()
    });
    &TEXTS
}

fn gpt2() -> Tokenizer {
    Tokenizer::from_file(repository("assets/teacher-nano-gpt2/tokenizer.json")).unwrap()
}

fn bert() -> Tokenizer {
    let path = repository("operators/testdata/bert-base-uncased/tokenizer.json");
    let mut tokenizer = Tokenizer::from_file(path).unwrap();
    tokenizer.with_padding(None).with_truncation(None).unwrap();
    tokenizer
}

fn split(splitter: WordSplitter) -> PreTokenizerWrapper {
    let pattern = SplitPattern::Regex(splitter.pattern().unwrap().into());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
    Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()]).into()
}

/// A byte-level vocabulary of 3,000 tokens, trained on some speeches.
fn trained(pre_tokenizer: PreTokenizerWrapper, ignore_merges: bool) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(BPE::builder().build().unwrap());
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    let trainer = BpeTrainer::builder()
        .vocab_size(3000)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect());
    let mut trainer = TrainerWrapper::BpeTrainer(trainer.build());
    tokenizer.train(&mut trainer, speeches().iter().take(8).map(String::as_str)).unwrap();
    if ignore_merges {
        // A token that no merge produces, as Llama 3 has.
        let mut json = serde_json::to_value(&tokenizer).unwrap();
        json["model"]["ignore_merges"] = true.into();
        let size = json["model"]["vocab"].as_object().unwrap().len();
        json["model"]["vocab"]["Ġwhereuponnothing"] = size.into();
        tokenizer = serde_json::from_value(json).unwrap();
    }
    tokenizer
}

/// Adds special tokens and others, with every flag.
fn with_added(mut tokenizer: Tokenizer) -> Tokenizer {
    let plain = |text: &str| AddedToken::from(text, false).normalized(false);
    tokenizer
        .add_special_tokens([AddedToken::from("<|end|>", true), AddedToken::from("<s>", true).lstrip(true)])
        .unwrap();
    let tokens = [
        plain("<|tool|>"),
        plain("<|end|>x"),
        plain("alone").single_word(true),
        plain("<l>").lstrip(true),
        plain("<r>").rstrip(true),
        plain("   "),
        plain("né"),
    ];
    tokenizer.add_tokens(tokens).unwrap();
    tokenizer
}

/// Adds tokens that are matched after the normalizer.
fn with_normalized(mut tokenizer: Tokenizer) -> Tokenizer {
    tokenizer.add_tokens([AddedToken::from("cafe\u{301}", false), AddedToken::from(" two words ", false)]).unwrap();
    tokenizer
}

fn text_is_text(mut tokenizer: Tokenizer) -> Tokenizer {
    tokenizer.set_encode_special_tokens(true);
    tokenizer
}

fn with_nfc(mut tokenizer: Tokenizer) -> Tokenizer {
    tokenizer.with_normalizer(Some(NFC)).unwrap();
    tokenizer
}

fn prefixed(mut tokenizer: Tokenizer, use_regex: bool) -> Tokenizer {
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(true, true, use_regex)));
    tokenizer
}

fn cased() -> Tokenizer {
    let mut tokenizer = bert();
    tokenizer.with_normalizer(Some(BertNormalizer::new(true, true, Some(false), false))).unwrap();
    tokenizer
}

/// A vocabulary without some bytes, which are dropped from words.
fn without_bytes() -> Tokenizer {
    let mut json = serde_json::to_value(trained(ByteLevel::new(false, true, true).into(), false)).unwrap();
    let vocabulary = json["model"]["vocab"].as_object().unwrap();
    let kept =
        vocabulary.iter().filter(|(token, _)| !token.contains(['h', 'Ċ', 'Ã'])).map(|(t, id)| (t.clone(), id.clone()));
    let kept: serde_json::Map<_, _> = kept.collect();
    let merges = json["model"]["merges"].as_array().unwrap().iter();
    let merges: Vec<_> = merges.filter(|merge| !merge.to_string().contains(['h', 'Ċ', 'Ã'])).cloned().collect();
    json["model"]["vocab"] = kept.into();
    json["model"]["merges"] = merges.into();
    serde_json::from_value(json).unwrap()
}

/// A SentencePiece BPE: characters, spaces as U+2581, tokens for runs of spaces, byte tokens for characters without a
/// token. `spaces` holds the components that write the spaces.
fn sentencepiece(spaces: serde_json::Value) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(BPE::builder().build().unwrap());
    tokenizer.with_pre_tokenizer(Some(Metaspace::new('\u{2581}', PrependScheme::Always, true)));
    let mut trainer = TrainerWrapper::BpeTrainer(BpeTrainer::builder().vocab_size(2500).show_progress(false).build());
    tokenizer.train(&mut trainer, speeches().iter().take(8).map(String::as_str)).unwrap();
    let mut json = serde_json::to_value(&tokenizer).unwrap();
    let model = &mut json["model"];
    let mut add = |token: &str| {
        let vocabulary = model["vocab"].as_object_mut().unwrap();
        let size = vocabulary.len();
        vocabulary.entry(token).or_insert(size.into());
    };
    (0..=255u8).for_each(|byte| add(&format!("<{byte:#04X}>")));
    add("<unk>");
    [
        "\u{2581}\u{2581}",
        "\u{2581}\u{2581}\u{2581}",
        "\u{2581}\u{2581}\u{2581}\u{2581}",
        "\u{2581}\u{2581}a",
        "t\u{2581}",
    ]
    .into_iter()
    .for_each(&mut add);
    let merges = model["merges"].as_array_mut().unwrap();
    let more = [
        ["\u{2581}", "\u{2581}"],
        ["\u{2581}\u{2581}", "\u{2581}\u{2581}"],
        ["\u{2581}", "\u{2581}a"],
        ["\u{2581}\u{2581}", "\u{2581}"],
    ];
    more.into_iter().enumerate().for_each(|(i, merge)| merges.insert(7 * i, serde_json::json!(merge)));
    model["byte_fallback"] = true.into();
    model["fuse_unk"] = true.into();
    model["unk_token"] = "<unk>".into();
    json["normalizer"] = spaces["normalizer"].clone();
    json["pre_tokenizer"] = spaces["pre_tokenizer"].clone();
    serde_json::from_value(json).unwrap()
}

fn replace() -> serde_json::Value {
    serde_json::json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"})
}

/// The normalizer of Llama 2. `gemma` and `metaspace` build Gemma's, and the form that transformers writes today.
fn llama2() -> Tokenizer {
    let prepend = serde_json::json!({"type": "Prepend", "prepend": "\u{2581}"});
    sentencepiece(serde_json::json!({"normalizer": {"type": "Sequence", "normalizers": [prepend, replace()]}}))
}

fn gemma() -> Tokenizer {
    let split = serde_json::json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    sentencepiece(serde_json::json!({"normalizer": replace(), "pre_tokenizer": split}))
}

fn metaspace(scheme: &str) -> Tokenizer {
    let metaspace =
        serde_json::json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false});
    sentencepiece(serde_json::json!({ "pre_tokenizer": metaspace }))
}

struct Pair {
    name: &'static str,
    reference: Tokenizer,
    fast: FastTokenizer,
}

fn pairs() -> &'static [Pair] {
    static PAIRS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
        let digits: PreTokenizerWrapper =
            Sequence::new(vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()]).into();
        let qwen = with_nfc(trained(split(WordSplitter::Qwen2), false));
        let all = [
            ("GPT-2", gpt2()),
            ("GPT-2, special tokens are text", text_is_text(with_added(gpt2()))),
            ("GPT-2, added tokens", with_normalized(with_added(gpt2()))),
            ("GPT-2, a space before", prefixed(with_added(gpt2()), true)),
            ("GPT-2, no pattern", prefixed(gpt2(), false)),
            ("bytes left out", without_bytes()),
            ("SmolLM", trained(digits, false)),
            ("Llama 3", with_added(trained(split(WordSplitter::Cl100k), true))),
            ("Qwen 2", qwen.clone()),
            ("Qwen 2, added tokens", with_normalized(with_added(qwen))),
            ("GPT-4o", trained(split(WordSplitter::O200k), false)),
            ("Llama 2", with_added(llama2())),
            ("Llama 2, special tokens are text", text_is_text(with_added(llama2()))),
            ("Gemma", with_added(gemma())),
            ("Metaspace, first", with_normalized(with_added(metaspace("first")))),
            ("Metaspace, always", with_added(metaspace("always"))),
            ("Metaspace, never", metaspace("never")),
            ("BERT", bert()),
            ("BERT, added tokens", with_added(bert())),
            ("BERT, special tokens are text", text_is_text(with_added(bert()))),
            ("BERT, cased", cased()),
        ];
        all.map(|(name, reference)| Pair {
            fast: FastTokenizer::from_tokenizer(&reference).expect(name),
            name,
            reference,
        })
        .into()
    });
    &PAIRS
}

/// Encodes the text and compares the ids with those of `tokenizers`. Returns false if the fast tokenizer rejected it.
fn ids_match(pair: &Pair, text: &str, scratch: &mut Scratch) -> bool {
    let mut ids = vec![7];
    let fast = pair.fast.encode(text, scratch, &mut ids).is_ok();
    if fast {
        let reference = pair.reference.encode_fast(text, false).unwrap();
        assert!(ids[1..] == *reference.get_ids(), "{}: {:?}", pair.name, &text[..text.floor_char_boundary(300)]);
    } else {
        assert_eq!(ids, [7], "something is left of a text that is given back");
    }
    fast
}

#[test]
fn the_speeches() {
    let mut scratch = Scratch::default();
    for pair in pairs() {
        // The trained tokenizers differ only in their words.
        let texts = if ["GPT-2", "BERT"].contains(&pair.name) { speeches() } else { &speeches()[..12] };
        for text in texts {
            assert!(ids_match(pair, text, &mut scratch), "{}", pair.name);
        }
    }
}

#[test]
fn texts_of_their_own() {
    let mut scratch = Scratch::default();
    let long = [
        "a".repeat(5000),
        "ab".repeat(3000),
        " ".repeat(70_000),
        "é".repeat(999),
        "漢字".repeat(500),
        "1".repeat(3000),
    ];
    let texts = [
        "",
        " ",
        "\n",
        "a",
        "<|end|>",
        "<|end|>x",
        " <s> <s>",
        "a<l> <l>b <r> c<r>",
        "    <s>   ",
        "alone",
        "aloneness, alone",
        "lealone",
        "<|endoftext|>",
        "[SEP] [MASK]",
        "whereuponnothing whereuponnothing",
        "cafe\u{301} caf\u{e9} two words  two words ",
        "né ne\u{301}",
        "\u{212b}\u{2126} e\u{301}\u{323} \u{1100}\u{1161}\u{11a8}",
        "\0\u{fffd}\u{200b}a\u{ad}b",
        "Ⅷ½²٣ don't DON'T don’t 'ſ",
        "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}",
        "İstanbul ΑΣ ß ǅ",
        "\u{2028}\u{85}\u{3000}x",
        "the\u{301}\u{302}n",
        "\u{2581}",
        " \u{2581} a\u{2581} b  \u{2581}\u{2581}a   a é a",
        "<|end|> a<|end|>b <|tool|>  c",
    ];
    for pair in pairs() {
        for text in texts.iter().copied().chain(long.iter().map(String::as_str)) {
            assert!(ids_match(pair, text, &mut scratch), "{}: {text:?}", pair.name);
        }
    }
}

/// Word boundaries of SentencePiece BPE depend on spaces, U+2581 and the merges with them: tests every short text over
/// these characters.
#[test]
fn every_short_text_of_spaces_and_letters() {
    let (mut scratch, mut text) = (Scratch::default(), String::new());
    let alphabet = [' ', '\u{2581}', 'a', 't', 'é', '漢'];
    for pair in
        pairs().iter().filter(|pair| ["Llama 2", "Gemma", "Metaspace, first", "Metaspace, always"].contains(&pair.name))
    {
        for length in 0..=6u32 {
            for mut number in 0..alphabet.len().pow(length) {
                text.clear();
                for _ in 0..length {
                    text.push(alphabet[number % alphabet.len()]);
                    number /= alphabet.len();
                }
                assert!(ids_match(pair, &text, &mut scratch), "{}: {text:?}", pair.name);
            }
        }
    }
}

#[test]
fn every_character() {
    let mut scratch = Scratch::default();
    for pair in pairs().iter().filter(|pair| ["GPT-2", "Qwen 2", "Llama 2", "BERT", "BERT, cased"].contains(&pair.name))
    {
        let (mut text, mut rejected) = (String::new(), 0);
        // Higher code points are tags or unassigned; `every_code_point` and the tests of the tables cover them.
        for c in '\0'..'\u{32000}' {
            text.extend(['a', c, ' ', c, c]);
            if text.len() > 2000 || c == '\u{31fff}' {
                rejected += usize::from(!ids_match(pair, &text, &mut scratch));
                text.clear();
            }
        }
        assert!(rejected < 60, "{}: {rejected} texts are given back", pair.name);
    }
}

/// The fast tokenizer rejects white space on which a regular expression gives up.
#[test]
fn endless_white_space_is_given_back() {
    let (pair, mut scratch) = (&pairs()[0], Scratch::default());
    for text in [" ".repeat(200_000), format!("a{}b", "\n ".repeat(1_100_000))] {
        assert_eq!(pair.fast.encode(&text, &mut scratch, &mut Vec::new()), Err(NeedsFallback::LongWhitespace));
    }
    assert!(ids_match(pair, &format!(" {}", "x".repeat(150_000)), &mut scratch));
}

#[test]
fn a_mark_that_is_sorted_is_given_back() {
    let (pair, mut scratch) = (pairs().iter().find(|pair| pair.name == "BERT").unwrap(), Scratch::default());
    let mut ids = vec![1];
    // A tone mark of Hangul is a spacing mark and combines.
    assert_eq!(
        pair.fast.encode("x [SEP] a\u{302e}\u{301}", &mut scratch, &mut ids),
        Err(NeedsFallback::UnsupportedCharacter)
    );
    assert_eq!(ids, [1]);
}

#[test]
fn one_cache_serves_several_tokenizers() {
    let mut scratch = Scratch::default();
    for _ in 0..3 {
        for pair in pairs() {
            assert!(ids_match(pair, "Fellow citizens of the Senate", &mut scratch));
        }
    }
}

#[test]
fn what_is_not_known_is_named() {
    let rejection = |change: &dyn Fn(&mut serde_json::Value), from: Tokenizer| {
        let mut json = serde_json::to_value(from).unwrap();
        change(&mut json);
        FastTokenizer::from_tokenizer(&serde_json::from_value(json).unwrap()).unwrap_err()
    };
    let model = |error| matches!(error, UnsupportedComponent::Model(_));
    assert!(model(rejection(&|json| json["model"]["dropout"] = 0.5.into(), gpt2())));
    assert!(model(rejection(&|json| json["model"]["end_of_word_suffix"] = "</w>".into(), gpt2())));
    let metaspace =
        serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    assert!(matches!(
        rejection(&|json| json["pre_tokenizer"] = metaspace.clone(), gpt2()),
        UnsupportedComponent::PreTokenizer(_)
    ));
    assert!(matches!(
        rejection(&|json| json["pre_tokenizer"] = serde_json::Value::Null, gpt2()),
        UnsupportedComponent::PreTokenizer(_)
    ));
    assert!(matches!(
        rejection(&|json| json["pre_tokenizer"] = serde_json::Value::Null, bert()),
        UnsupportedComponent::PreTokenizer(_)
    ));
    let llama = |change: &dyn Fn(&mut serde_json::Value)| rejection(change, llama2()).to_string();
    let over_words = |json: &mut serde_json::Value| {
        json["model"]["merges"].as_array_mut().unwrap().push(serde_json::json!(["t", "\u{2581}"]));
    };
    assert!(llama(&over_words).contains("whose merges cross words"));
    assert!(llama(&|json| json["model"]["byte_fallback"] = false.into()).contains("without a token for each byte"));
    assert!(llama(&|json| json["model"]["ignore_merges"] = true.into()).contains("takes a whole text"));
    let template = serde_json::json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {}});
    assert!(matches!(
        rejection(&|json| json["post_processor"] = template.clone(), gpt2()),
        UnsupportedComponent::PostProcessor(_)
    ));
    let mut other = gpt2();
    other.with_normalizer(Some(NFD)).unwrap();
    assert!(matches!(FastTokenizer::from_tokenizer(&other).unwrap_err(), UnsupportedComponent::Normalizer(_)));
    other.with_normalizer(None::<NormalizerWrapper>).unwrap();
    other.with_padding(Some(Default::default()));
    assert_eq!(FastTokenizer::from_tokenizer(&other).unwrap_err(), UnsupportedComponent::Length);
    // A pattern that differs by a single space is not recognised.
    for splitter in [WordSplitter::Gpt2, WordSplitter::Cl100k, WordSplitter::Qwen2, WordSplitter::O200k] {
        let pattern = splitter.pattern().unwrap();
        assert_eq!(WordSplitter::from_pattern(pattern), Some(splitter));
        assert_eq!(WordSplitter::from_pattern(&format!("{pattern} ")), None);
    }
    let mut normalized = bert();
    normalized.add_tokens([AddedToken::from("Word", false)]).unwrap();
    assert!(matches!(FastTokenizer::from_tokenizer(&normalized).unwrap_err(), UnsupportedComponent::AddedTokens(_)));
}

fn text() -> impl Strategy<Value = String> {
    let unit = prop_oneof![
        6 => "[a-z]{1,9}", 2 => "[A-Z][a-z]{0,6}", 1 => "[0-9]{1,6}", 1 => "['’,.;:!?(\"-]{1,3}", 1 => "[à-ÿ]{1,4}", 1 => "[一-十]{1,4}",
        4 => Just(" ".to_owned()), 1 => "[ \n\t\r\u{a0}]{1,5}", 1 => "[\u{300}-\u{345}]{1,3}", 1 => any::<char>().prop_map(String::from),
        2 => "(<\\|end\\|>|<\\|end\\|>x|<s>|<l>|<r>|alone|<\\|tool\\|>|café|two words| two words |né|\\[SEP\\]|<\\|endoftext\\|>|don't|E\u{301})",
        1 => ("[a-zé]{1,4}", 10usize..120).prop_map(|(unit, n)| unit.repeat(n)),
    ];
    prop::collection::vec(unit, 0..60).prop_map(|units| units.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn any_text(texts in prop::collection::vec(text(), 1..4)) {
        let mut scratch = Scratch::default();
        for pair in pairs() {
            for text in &texts {
                ids_match(pair, text, &mut scratch);
            }
        }
    }
}
