use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::testing::{context, cut, documents, drive, gpt2, joined, statistics};

fn vectors(json: &str) -> Vec<(Detokenizer, String, String)> {
    let all: Vec<BTreeMap<String, Value>> = serde_json::from_str(json).unwrap();
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    all.iter()
        .map(|v| (serde_json::from_value(v["detokenizer"].clone()).unwrap(), text(&v["raw"]), text(&v["expected"])))
        .collect()
}

fn clean(
    detokenizer: Detokenizer,
    piece_bytes: usize,
    batches: &[RecordBatch],
) -> Result<Vec<RecordBatch>, OperatorError> {
    drive(&mut CleanConfig { detokenizer, piece_bytes }.build(&context(&gpt2())), batches)
}

#[test]
fn equals_the_official_code() {
    let vectors = vectors(include_str!("../../testdata/detokenizer_vectors.json"));
    assert_eq!(vectors.len(), 28);
    for (detokenizer, raw, expected) in vectors {
        assert_eq!(detokenize(detokenizer, &raw), expected, "{detokenizer:?} of {raw:?}");
    }
}

#[test]
fn equals_pythons_re_on_troublesome_characters() {
    let vectors = vectors(include_str!("../../testdata/detokenizer_fuzz.json"));
    assert!(vectors.len() >= 300);
    for (detokenizer, raw, expected) in vectors {
        assert_eq!(detokenize(detokenizer, &raw), expected, "{detokenizer:?} of {raw:?}");
    }
}

#[test]
fn python_and_rust_differ_here() {
    use Detokenizer::{Lambada, Lm1b, Wikitext};
    let cases = [
        // Python's \s and strip count the separators U+001C to U+001F; both count the no-break space, neither U+200B.
        (Wikitext, "(\u{1c}a\u{1f})", "(a)"),
        (Wikitext, "(\u{a0}a\u{85})", "(a)"),
        (Wikitext, "(\u{200b}a)", "(\u{200b}a)"),
        (Lambada, "\u{1e} a\u{3000}", "\na"),
        // Python's \w counts numeric characters and no combining marks.
        (Lm1b, "x ² . y", "x ². y"),
        (Lm1b, "x Ⅷ . y", "x Ⅷ. y"),
        (Lm1b, "x e\u{301} . y", "x e\u{301} . y"),
        // Python's $ also matches before a last newline, and only the last one.
        (Lm1b, "end .\n", "end .\n"),
        (Lm1b, "the end .\n", "the end.\n"),
        (Lm1b, "the end .\n\n", "the end .\n\n"),
        (Lm1b, "why ?\n", "why?\n"),
        (Lm1b, "oh !\r\n", "oh !\r\n"),
        // A replacement that looks like a pattern is text.
        (Wikitext, "/' 7/", "/'[0-9]/"),
        // Matches do not overlap.
        (Lm1b, "a b . c . d", "a b. c . d"),
    ];
    for (detokenizer, raw, expected) in cases {
        assert_eq!(detokenize(detokenizer, raw), expected, "{detokenizer:?} of {raw:?}");
    }
}

#[test]
fn unchanged_text_is_not_copied() {
    assert!(matches!(detokenize(Detokenizer::Wikitext, "plain text"), Cow::Borrowed(_)));
    let batch = documents(&[(1, "a , b", true)]);
    let output = clean(Detokenizer::None, 10, std::slice::from_ref(&batch)).unwrap();
    let data = |batch: &RecordBatch| batch.column(1).to_data().buffers()[1].as_ptr();
    assert_eq!(data(&output[0]), data(&batch));
}

#[test]
fn statistics_count_the_text_after_cleaning() {
    for (detokenizer, bytes) in [(Detokenizer::None, 6 + 2), (Detokenizer::Wikitext, 5 + 2)] {
        let context = context(&gpt2());
        let mut operator = CleanConfig { detokenizer, piece_bytes: 100 }.build(&context);
        drive(&mut operator, &[documents(&[(1, "a , b", false), (1, " ", true), (2, "cd", true)])]).unwrap();
        let statistics = statistics(&context);
        assert_eq!((statistics.documents, statistics.text_bytes), (2, bytes), "{detokenizer:?}");
        assert_eq!(context.counters.text_bytes.load(std::sync::atomic::Ordering::Relaxed), 8);
    }
}

#[test]
fn a_long_document_is_cut_after_lines() {
    let text = "( a )\n( b\n)\n( c ) ( d )";
    let output = clean(Detokenizer::Wikitext, 12, &[documents(&[(1, text, true)])]).unwrap();
    let pieces: Vec<_> =
        output.iter().flat_map(|b| pieces(b, "test").unwrap().map(|p| p.text.to_owned()).collect::<Vec<_>>()).collect();
    assert_eq!(pieces, ["(a)\n(b)\n", "(c) (d)"]);
}

#[test]
fn the_ends_of_a_piece_are_not_the_ends_of_the_document() {
    let text = "\n a ?\nb ?\n";
    let output = clean(Detokenizer::Lm1b, 6, &[documents(&[(1, text, true)])]).unwrap();
    assert_eq!(joined(&output)[0].1, "\n a ?\nb?\n");
    let output = clean(Detokenizer::Lambada, 6, &[documents(&[(1, text, true)])]).unwrap();
    assert_eq!(joined(&output)[0].1, "\na ?\nb ?");
}

#[test]
fn broken_pieces_name_the_document() {
    let error = clean(Detokenizer::Ptb, 9, &[documents(&[(1, "a", false), (2, "b", true)])]).unwrap_err();
    assert!(error.to_string().contains("document 1 of split 0: got no last piece"), "{error}");
    assert!(clean(Detokenizer::Ptb, 9, &[documents(&[(1, "a", false)])]).is_err());
}

proptest! {
    #[test]
    fn pieces_that_fit_give_the_whole(text in "[a-z ,.?!()'\"é\n]{0,200}", sizes in prop::collection::vec(1usize..40, 1..5)) {
        let cuts = cut(&text, &sizes);
        let last = cuts.len() - 1;
        let batches: Vec<_> = cuts.iter().enumerate().map(|(i, piece)| documents(&[(9, piece, i == last)])).collect();
        for detokenizer in [Detokenizer::Wikitext, Detokenizer::Lm1b, Detokenizer::Lambada] {
            let output = clean(detokenizer, 300, &batches).unwrap();
            prop_assert_eq!(&joined(&output)[0].1, &detokenize(detokenizer, &text));
        }
    }

    #[test]
    fn cuts_depend_on_the_text_alone(text in "[a-c ,é\n]{0,300}", sizes in prop::collection::vec(1usize..60, 1..5)) {
        let cuts = cut(&text, &sizes);
        let last = cuts.len() - 1;
        let batches: Vec<_> = cuts.iter().enumerate().map(|(i, piece)| documents(&[(9, piece, i == last)])).collect();
        let whole = clean(Detokenizer::Wikitext, 25, &[documents(&[(9, &text, true)])]).unwrap();
        prop_assert_eq!(joined(&clean(Detokenizer::Wikitext, 25, &batches).unwrap()), joined(&whole));
    }
}
