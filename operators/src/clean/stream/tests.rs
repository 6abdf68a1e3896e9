use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::super::detokenize;
use super::super::tests::vectors;
use super::*;

const ALL: [Detokenizer; 5] =
    [Detokenizer::Wikitext, Detokenizer::Ptb, Detokenizer::Lm1b, Detokenizer::Lambada, Detokenizer::ScientificPapers];
const LIMIT: usize = 1 << 20;

/// Texts that the rules match, and near misses.
const PARTS: [&str; 62] = [
    "s '",
    "/' 7/",
    "/' ",
    " @-@ ",
    " @,@ ",
    " @.@ ",
    "@",
    " : ",
    " ; ",
    " . ",
    " ! ",
    " ? ",
    " , ",
    "( ",
    " )",
    "(",
    ")",
    "[ ",
    " ]",
    "{ ",
    " }",
    "\" ",
    " \"",
    "\"",
    "' ",
    " '",
    "'",
    "= = = =",
    "= =",
    " = ",
    " ° ",
    " \n",
    "\n ",
    "\n",
    " N N N ",
    " N ",
    " 's",
    " n't",
    "\\/",
    "$ 1",
    "# 1",
    "$ ",
    "£ ",
    "<unk>",
    "<un",
    "http : / / ",
    "https : / / ",
    " / ",
    "“",
    "”",
    " a ",
    "word",
    "é",
    "漢字",
    "²",
    "e\u{301}",
    " ",
    "  ",
    "\t",
    "\u{1c}",
    "\u{a0}",
    "x .",
];

fn in_pieces(detokenizer: Detokenizer, pieces: &[&str]) -> Result<String, TooLong> {
    let mut stream = Stream::new(detokenizer, LIMIT).unwrap();
    let mut text = String::new();
    for piece in pieces {
        text += &stream.feed(piece)?;
    }
    Ok(text + &stream.finish()?)
}

/// Cuts a text at these places, moved to the next character boundary.
fn cut_at<'a>(text: &'a str, places: &[usize]) -> Vec<&'a str> {
    let mut places: Vec<usize> = places.iter().map(|&at| text.ceil_char_boundary(at.min(text.len()))).collect();
    places.extend([0, text.len()]);
    places.sort_unstable();
    places.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

#[track_caller]
fn same(detokenizer: Detokenizer, text: &str, places: &[usize]) {
    let pieces = cut_at(text, places);
    let got = in_pieces(detokenizer, &pieces).unwrap();
    assert_eq!(got, detokenize(detokenizer, text), "{detokenizer:?} of {pieces:?}");
}

fn text_of(parts: &[usize]) -> String {
    parts.iter().map(|&i| PARTS[i % PARTS.len()]).collect()
}

fn cases(quick: u32) -> ProptestConfig {
    let soak = std::env::var_os("STILLHOUSE_SOAK").is_some();
    ProptestConfig::with_cases(if soak { 50 * quick } else { quick })
}

/// Builds a document in which every part is next to every other one.
fn full_of_patterns() -> String {
    let pairs = (0..PARTS.len()).flat_map(|a| (0..PARTS.len()).flat_map(move |b| [a, b]));
    text_of(&pairs.collect::<Vec<_>>())
}

#[test]
fn every_cut_of_a_document_full_of_patterns() {
    // with brackets that close and some that never do
    for text in
        ["( a \" b ' c ".to_owned() + &"x , y ( z ) \" q \" ' r ' .\n".repeat(3), full_of_patterns()[..2500].into()]
    {
        for detokenizer in ALL {
            let whole = detokenize(detokenizer, &text).into_owned();
            for at in (0..=text.len()).filter(|&at| text.is_char_boundary(at)) {
                assert_eq!(
                    in_pieces(detokenizer, &[&text[..at], &text[at..]]).unwrap(),
                    whole,
                    "{detokenizer:?} at {at}"
                );
            }
        }
    }
}

#[test]
fn a_piece_for_every_character() {
    let text = full_of_patterns();
    let every: Vec<usize> = (0..text.len()).collect();
    ALL.iter().for_each(|&detokenizer| same(detokenizer, &text, &every));
}

#[test]
fn the_golden_vectors_in_every_two_and_three_pieces() {
    let golden = include_str!("../../../testdata/detokenizer_vectors.json");
    let fuzz = include_str!("../../../testdata/detokenizer_fuzz.json");
    for (detokenizer, raw, expected) in vectors(golden).into_iter().chain(vectors(fuzz)) {
        if detokenizer == Detokenizer::None {
            continue;
        }
        for a in 0..=raw.len() {
            for places in [vec![a], vec![a, a + 1], vec![a, a + 3, a + 4]] {
                let pieces = cut_at(&raw, &places);
                assert_eq!(in_pieces(detokenizer, &pieces).unwrap(), expected, "{detokenizer:?} of {pieces:?}");
            }
        }
    }
}

#[test]
fn any_text_in_any_pieces() {
    let parts = prop::collection::vec(0..PARTS.len(), 0..60);
    let places = prop::collection::vec(0usize..300, 0..12);
    let mut runner = TestRunner::new(cases(1500));
    runner
        .run(&(parts, places), |(parts, places)| {
            let text = text_of(&parts);
            ALL.iter().for_each(|&detokenizer| same(detokenizer, &text, &places));
            Ok(())
        })
        .unwrap();
}

#[test]
fn what_a_rule_waits_for_has_a_bound_that_no_cut_moves() {
    let far = 1000;
    let limit = 100;
    let waits = [
        (Detokenizer::Wikitext, format!("( {} )", "a".repeat(far)), "after a ( and white space with no ) yet"),
        (Detokenizer::Wikitext, format!("\" {}", "a".repeat(far)), "after a \" and white space with no \" yet"),
        (Detokenizer::Lm1b, format!("[ {} ]", "a".repeat(far)), "after a [ and a space with no ] yet"),
        (Detokenizer::Lambada, format!("a{}b", " \n".repeat(far)), "of white space with no text yet"),
    ];
    for (detokenizer, text, what) in waits {
        for size in [1, 7, 100, 5000] {
            let mut stream = Stream::new(detokenizer, limit).unwrap();
            let pieces = text.as_bytes().chunks(size).map(|piece| std::str::from_utf8(piece).unwrap());
            let error = pieces.map(|piece| stream.feed(piece)).find_map(Result::err).unwrap();
            assert_eq!(error.to_string(), format!("got more than 100 bytes {what}"));
        }
    }
}

#[test]
fn what_need_not_wait_does_not() {
    // these may have any length: words, brackets without white space, text after a closed pair, leading white space
    let long = "a".repeat(100_000);
    for text in [
        format!("x {long} . y"),
        format!("({long} [{long} \"{long} '{long}"),
        format!("( a ) {long} ( b ) {long}"),
        format!("{}{long}", " ".repeat(100_000)),
    ] {
        for detokenizer in ALL {
            let mut stream = Stream::new(detokenizer, 1000).unwrap();
            let mut got = String::new();
            for piece in text.as_bytes().chunks(997) {
                got += &stream.feed(std::str::from_utf8(piece).unwrap()).unwrap();
            }
            assert_eq!(got + &stream.finish().unwrap(), detokenize(detokenizer, &text), "{detokenizer:?}");
        }
    }
}
