use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::operator::Counters;
use crate::registry::job_format;
use crate::testing::{context, cut, documents, drive, gpt2, job_with, joined, statistics};

pub(super) fn vectors(json: &str) -> Vec<(Detokenizer, String, String)> {
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
        // Python's \s and strip include the separators U+001C to U+001F; Python and Rust include the no-break space,
        // but not U+200B.
        (Wikitext, "(\u{1c}a\u{1f})", "(a)"),
        (Wikitext, "(\u{a0}a\u{85})", "(a)"),
        (Wikitext, "(\u{200b}a)", "(\u{200b}a)"),
        (Lambada, "\u{1e} a\u{3000}", "\na"),
        // Python's \w includes numeric characters but no combining marks.
        (Lm1b, "x ² . y", "x ². y"),
        (Lm1b, "x Ⅷ . y", "x Ⅷ. y"),
        (Lm1b, "x e\u{301} . y", "x e\u{301} . y"),
        // Python's $ also matches before a final newline, but only one.
        (Lm1b, "end .\n", "end .\n"),
        (Lm1b, "the end .\n", "the end.\n"),
        (Lm1b, "the end .\n\n", "the end .\n\n"),
        (Lm1b, "why ?\n", "why?\n"),
        (Lm1b, "oh !\r\n", "oh !\r\n"),
        // The replacement looks like a pattern but is literal text.
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
        let counters = Arc::new(Counters::default());
        let context = SplitContext { meter: counters.clone(), ..context(&gpt2()) };
        let mut operator = CleanConfig { detokenizer, piece_bytes: 100 }.build(&context);
        drive(&mut operator, &[documents(&[(1, "a , b", false), (1, " ", true), (2, "cd", true)])]).unwrap();
        let statistics = statistics(&context);
        assert_eq!((statistics.documents, statistics.text_bytes), (2, bytes), "{detokenizer:?}");
        assert_eq!(counters.get(Measure::TextBytes), 8);
    }
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
fn a_cut_after_a_newline_breaks_no_rule() {
    // regression: in a document of 1.3 MB, pieces ended between the parts of ` \n `
    let line = "the quick brown fox \n jumps over N N N dogs \n ";
    let text = line.repeat(1_300_000 / line.len());
    let pieces = cut(&text, &[line.find(" jumps").unwrap(), 1_000_000, 64 * 1024]);
    let last = pieces.len() - 1;
    let batches: Vec<_> = pieces.iter().enumerate().map(|(i, piece)| documents(&[(1, piece, i == last)])).collect();
    for detokenizer in [Detokenizer::Ptb, Detokenizer::Wikitext, Detokenizer::ScientificPapers] {
        let whole = clean(detokenizer, 2_000_000, &batches).unwrap();
        assert_eq!(joined(&whole)[0].1, detokenize(detokenizer, &text));
        for piece_bytes in [4000, 400_000, 1_000_000] {
            assert!(joined(&clean(detokenizer, piece_bytes, &batches).unwrap()) == joined(&whole), "{detokenizer:?}");
        }
    }
}

#[test]
fn a_bracket_that_does_not_close_is_refused_with_the_document() {
    let text = format!("( {}", "word ".repeat(1_000_000));
    let pieces = cut(&text, &[100_000]);
    let rows: Vec<_> = pieces.iter().map(|piece| (1 << 32 | 7, *piece, false)).collect();
    let error = clean(Detokenizer::Wikitext, 4000, &[documents(&rows)]).unwrap_err().to_string();
    let start = "clean: document 7 of split 1: got more than 4000000 bytes after a ( and white space with no ) yet";
    assert!(error.starts_with(start) && error.contains("input.piece_kilobytes"), "{error}");
    let output = clean(Detokenizer::Wikitext, 6_000_000, &[documents(&[(1, &text, true)])]).unwrap();
    assert!(joined(&output)[0].1 == text);
}

#[test]
fn broken_pieces_name_the_document() {
    let error = clean(Detokenizer::Ptb, 9, &[documents(&[(1, "a", false), (2, "b", true)])]).unwrap_err();
    assert!(error.to_string().contains("document 1 of split 0: got no last piece"), "{error}");
    assert!(clean(Detokenizer::Ptb, 9, &[documents(&[(1, "a", false)])]).is_err());
}

fn piece_of_text() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "é", " ", "\n", " , ", "( ", " )", "\"", "'", " . ", " ?", " N ", "word"])
        .prop_map(str::to_owned)
}

proptest! {
    #[test]
    fn no_size_of_a_piece_changes_a_byte(
        text in prop::collection::vec(piece_of_text(), 0..120).prop_map(|parts| parts.concat()),
        sizes in prop::collection::vec(1usize..60, 1..5),
        piece_bytes in 1usize..300,
    ) {
        let cuts = cut(&text, &sizes);
        let last = cuts.len() - 1;
        let batches: Vec<_> = cuts.iter().enumerate().map(|(i, piece)| documents(&[(9, piece, i == last)])).collect();
        for detokenizer in [Detokenizer::Wikitext, Detokenizer::Ptb, Detokenizer::Lm1b, Detokenizer::Lambada] {
            let output = clean(detokenizer, piece_bytes, &batches).unwrap();
            prop_assert_eq!(&joined(&output)[0].1, &detokenize(detokenizer, &text));
        }
    }
}

#[test]
fn numbers_are_not_cleaned() {
    let pixels = "version: 1\nname: a\ninput: {format: codes, codes: {size: 9, length: 4}, paths: [x.npy]}\n\
        pack: {length: 4, separator: none, boundary: none}\noutput: {path: out}\n";
    let problems = |extra: &str| job_format().parse(&format!("{pixels}{extra}")).problems;
    assert_eq!(problems("clean: {}\n").0, []);
    let wrong = problems("clean: {detokenizer: ptb}\n").to_string();
    assert!(wrong.contains("clean: cleans text; leave it out with `format: codes`"), "{wrong}");
    // the hash of every job has the section
    let job = serde_json::to_value(job_format().read(&job_with("")).unwrap()).unwrap();
    assert_eq!(job["clean"], serde_json::json!({"detokenizer": "none"}));
}
