use std::io::Read;
use std::sync::OnceLock;

use arrow::array::AsArray;
use arrow::datatypes::UInt32Type;
use proptest::prelude::*;
use stillhouse_schemas::spec;

use super::*;
use crate::testing::{bert, context, cut, documents, drive, fetched, gpt2, repository, statistics};

/// Returns some hundred kilobytes of English prose.
fn prose() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let file = std::fs::File::open(repository("assets/corpus/sotu-small.jsonl.gz")).unwrap();
        let mut lines = String::new();
        flate2::read::GzDecoder::new(file).take(300_000).read_to_string(&mut lines).unwrap();
        lines.replace("\\n", "\n").replace(". The", ".\n\nThe")
    })
}

/// Returns the joined ids of every document, and the number of pieces.
fn tokens(batches: &[RecordBatch]) -> (Vec<(u64, Vec<u32>)>, usize) {
    let mut documents: Vec<(u64, Vec<u32>)> = Vec::new();
    let (mut open, mut pieces) = (false, 0);
    for batch in batches {
        assert_eq!(batch.schema(), tokens_schema());
        for i in 0..batch.num_rows() {
            let id = batch.column(0).as_primitive::<arrow::datatypes::UInt64Type>().value(i);
            let list = batch.column(1).as_list::<i32>().value(i);
            let ids = list.as_primitive::<UInt32Type>().values().to_vec();
            match documents.last_mut() {
                Some(last) if open => last.1.extend(ids),
                _ => documents.push((id, ids)),
            }
            open = !batch.column(2).as_boolean().value(i);
            pieces += 1;
        }
    }
    (documents, pieces)
}

fn tokenize(
    vocabulary: &Arc<Vocabulary>,
    piece_bytes: usize,
    batches: &[RecordBatch],
) -> Result<Vec<RecordBatch>, OperatorError> {
    drive(&mut TokenizeConfig { piece_bytes }.build(&context(vocabulary)).unwrap(), batches)
}

/// Checks that a text gives the same ids in pieces and as a whole; returns the number of output pieces.
fn same_in_pieces(vocabulary: &Arc<Vocabulary>, text: &str, sizes: &[usize], piece_bytes: usize) -> usize {
    let cuts = cut(text, sizes);
    let last = cuts.len() - 1;
    let rows: Vec<_> = cuts.iter().enumerate().map(|(i, piece)| (5, *piece, i == last)).collect();
    let batches: Vec<_> = rows.chunks(7).map(documents).collect();
    let (documents, pieces) = tokens(&tokenize(vocabulary, piece_bytes, &batches).unwrap());
    assert_eq!(documents, [(5, vocabulary.encode(text).unwrap())]);
    pieces
}

#[test]
fn a_long_document_is_tokenized_in_pieces() {
    let smollm2 = fetched("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    let smollm2 = Arc::new(Vocabulary::load(&smollm2, "smollm2", &spec::Tokenizer::default(), None).unwrap());
    for vocabulary in [gpt2(), bert(), smollm2, Arc::new(prefixing())] {
        let pieces = same_in_pieces(&vocabulary, prose(), &[4096, 100, 9000], 8192);
        assert!(pieces > 15, "{pieces} pieces");
    }
}

/// A tokenizer like Llama 2's: a prefix before every text, spaces inside words, no pre-tokenizer.
fn prefixing() -> Vocabulary {
    let mut vocab = serde_json::Map::new();
    for c in ["<unk>", "▁", "\n"].into_iter().map(str::to_owned).chain((' '..='~').map(String::from)) {
        let id = vocab.len();
        vocab.entry(c).or_insert(id.into());
    }
    let mut merges = Vec::new();
    for (a, b) in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("i", "n"), ("▁", "a"), ("e", "r"), (".", "▁")]
    {
        let id = vocab.len();
        vocab.insert(format!("{a}{b}"), id.into());
        merges.push(format!("{a} {b}"));
    }
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "pre_tokenizer": null,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": true},
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, json.to_string()).unwrap();
    Vocabulary::load(&path, "prefixing", &spec::Tokenizer::default(), None).unwrap()
}

#[test]
fn lines_and_edges_serve_where_there_are_no_spaces() {
    let lines: String = (0..4000).map(|i| format!("{{\"id\":{i},\"漢字\":\"x{i}\"}}\n")).collect();
    let dense = lines.replace('\n', "");
    for text in [&lines, &dense] {
        assert!(same_in_pieces(&gpt2(), text, &[3000], 8192) > 5);
    }
    assert!(same_in_pieces(&bert(), &lines, &[3000], 8192) > 5);
}

#[test]
fn text_without_a_safe_cut_is_refused_with_the_document() {
    let text = "a".repeat(200_000);
    let rows: Vec<_> = cut(&text, &[5000]).into_iter().map(|piece| (1 << 32 | 7, piece, false)).collect();
    let error = tokenize(&gpt2(), 5000, &[documents(&rows)]).unwrap_err().to_string();
    assert!(
        error.starts_with("tokenize: document 7 of split 1: got ") && error.contains("input.piece_kilobytes"),
        "{error}"
    );
    assert_eq!(same_in_pieces(&gpt2(), &text[..20_000], &[5000], 5000), 1);
}

#[test]
fn order_and_empty_documents_are_kept_for_any_number_of_threads() {
    let texts: Vec<String> =
        (0..300).map(|i| if i % 7 == 0 { String::new() } else { prose()[i * 50..i * 90].to_owned() }).collect();
    let rows: Vec<_> = (0..).zip(&texts).map(|(id, text)| (id, text.as_str(), true)).collect();
    let expected: Vec<_> = rows.iter().map(|row| (row.0, gpt2().encode(row.1).unwrap())).collect();
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let context = context(&gpt2());
        let mut operator = TokenizeConfig { piece_bytes: 1 << 20 }.build(&context).unwrap();
        let output = pool.install(|| drive(&mut operator, &[documents(&rows)]).unwrap());
        assert_eq!(tokens(&output).0, expected);
        assert_eq!(statistics(&context).text_tokens, expected.iter().map(|d| d.1.len() as u64).sum::<u64>());
    }
}

#[test]
fn broken_pieces_name_the_document() {
    let error = tokenize(&gpt2(), 9, &[documents(&[(1, "a", false), (2, "b", true)])]).unwrap_err();
    assert!(error.to_string().contains("document 1 of split 0"), "{error}");
    assert!(tokenize(&gpt2(), 9, &[documents(&[(1, "a", false)])]).is_err());
}

/// GPT-2 and BERT with `special_tokens: parse`.
fn parsing() -> &'static [Arc<Vocabulary>; 2] {
    static LOADED: OnceLock<[Arc<Vocabulary>; 2]> = OnceLock::new();
    LOADED.get_or_init(|| {
        let spec = spec::Tokenizer { special_tokens: spec::SpecialTokens::Parse, ..Default::default() };
        ["assets/teacher-nano-gpt2/tokenizer.json", "operators/testdata/bert-base-uncased"]
            .map(|path| Arc::new(Vocabulary::load(&repository(path), path, &spec, None).unwrap()))
    })
}

#[test]
fn special_tokens_near_cuts_change_nothing() {
    // with spaces and line breaks on all sides, whole and broken
    let text = " <|endoftext|>\nword <|endoftext|> [SEP]word [MASK]\n\n<|endof text|>  [SE P] ".repeat(300);
    for vocabulary in [&gpt2(), &bert(), &parsing()[0], &parsing()[1]] {
        for piece_bytes in [64, 1500, 6000] {
            assert!(same_in_pieces(vocabulary, &text, &[777, 13], piece_bytes) > 2);
        }
    }
    assert!(parsing()[0].encode(&text).unwrap().contains(&50256) && !gpt2().encode(&text).unwrap().contains(&50256));
}

fn text() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        6 => "[a-z]{1,9}", 2 => "[A-Z][a-z]{1,6}", 1 => "[0-9]{1,6}", 1 => "['’,.;:!?(\"-]{1,3}", 1 => "[à-ÿ]{1,4}",
        1 => "[一-十]{1,4}", 1 => "(don't|it's|<\\|endoftext\\|>|\\[SEP\\]|e\u{301}|\u{1f600})",
    ];
    let gap = prop_oneof![8 => Just(" "), 2 => Just(""), 1 => Just("  "), 1 => Just("\n"), 1 => Just("\n\n"), 1 => Just("\t "), 1 => Just("\u{a0}")];
    prop::collection::vec((word, gap), 200..900)
        .prop_map(|all| all.into_iter().flat_map(|(w, g)| [w, g.to_owned()]).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn pieces_give_the_ids_of_the_whole(text in text(), sizes in prop::collection::vec(1usize..900, 1..6), piece_bytes in 1usize..600) {
        for vocabulary in [&gpt2(), &bert(), &parsing()[0], &parsing()[1]] {
            same_in_pieces(vocabulary, &text, &sizes, piece_bytes);
        }
    }
}

/// Generates long runs of text that tokenizers treat specially, longer than the context of a cut, between a few words.
fn runs() -> impl Strategy<Value = String> {
    let unit = prop_oneof![
        Just("0"),
        Just("12"),
        Just(" "),
        Just("\t"),
        Just("\n"),
        Just("\u{a0}"),
        Just("\u{3000}"),
        Just("a"),
        Just("ab"),
        Just("Ü"),
        Just("漢"),
        Just("字か"),
        Just("한"),
        Just("\u{e01}\u{e33}"),
        Just("e\u{301}"),
        Just("\u{323}\u{307}"),
        Just("\u{1f600}"),
        Just("\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}"),
        Just("\u{200b}"),
        Just("."),
        Just("'s"),
        Just("_-"),
        Just("▁"),
        Just("ß1"),
    ];
    let long = (unit, prop_oneof![3 => 1usize..40, 1 => 1000usize..6000])
        .prop_map(|(unit, n)| unit.repeat(n.min(9000 / unit.len())));
    let words = prop::collection::vec("[a-zA-Z]{1,9}[,.]?", 1..30).prop_map(|words| format!(" {} ", words.join(" ")));
    prop::collection::vec(prop_oneof![2 => long, 1 => words], 4..14).prop_map(|parts| {
        let mut text = parts.concat();
        // below the size at which a text without places to cut is refused
        text.truncate(text.floor_char_boundary(60_000));
        text
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn long_runs_in_pieces_give_the_ids_of_the_whole(text in runs(), sizes in prop::collection::vec(1usize..3000, 1..6), piece_bytes in 200usize..3000) {
        for vocabulary in tokenizers() {
            same_in_pieces(vocabulary, &text, &sizes, piece_bytes);
        }
    }
}

/// Returns all tokenizers that these tests use.
fn tokenizers() -> &'static [Arc<Vocabulary>] {
    static LOADED: OnceLock<Vec<Arc<Vocabulary>>> = OnceLock::new();
    LOADED.get_or_init(|| {
        let smollm2 = fetched("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
        let smollm2 = Vocabulary::load(&smollm2, "smollm2", &spec::Tokenizer::default(), None).unwrap();
        let [gpt2_parsing, bert_parsing] = parsing().clone();
        vec![gpt2(), bert(), gpt2_parsing, bert_parsing, Arc::new(smollm2), Arc::new(prefixing())]
    })
}
