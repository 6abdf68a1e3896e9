use std::collections::HashMap;
use std::sync::Arc;

use stillhouse_schemas::ids::SplitId;

use super::*;
use crate::operator::{DuplicateKind, DuplicateList, NoDuplicates};
use crate::testing::{context, documents, gpt2, statistics};
use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::UInt64Type;

const NEAR: [&str; 3] = [
    "The committee will meet on 3 May at noon in the large hall of the town.",
    "A completely different text, which has nothing to do with the others.",
    "The Committee will meet on 17 May, at noon, in the large hall of the town (sic).",
];

fn config(exact: bool, minhash: bool) -> DeduplicateConfig {
    DeduplicateConfig {
        exact: exact.then(ExactDocuments::default),
        minhash: minhash.then(|| MinHashConfig { ngram_words: 3, ..MinHashConfig::default() }),
        parts: None,
        max_document_bytes: 100,
        memory_bytes: 64_000_000,
        piece_bytes: 40,
    }
}

#[test]
fn documents_of_equal_or_nearly_equal_text_share_keys_however_they_are_cut() {
    let mut keys = DocumentKeys::new(&config(true, true)).unwrap();
    let (head, tail) = NEAR[0].split_at(30);
    let made = keys.add(&documents(&[(0, head, false), (0, tail, true), (1, NEAR[1], true)])).unwrap();
    let later = keys.add(&documents(&[(2, NEAR[2], true), (3, NEAR[0], true), (4, "two words", true)])).unwrap();
    keys.finish().unwrap();
    let all: Vec<KeysOfDocument> = made.into_iter().chain(later).collect();
    assert_eq!(all.iter().map(|keys| keys.id).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(all[0].exact, all[3].exact);
    assert!(all[0].exact != all[2].exact && all[0].exact != all[1].exact);
    assert_eq!((all[0].bands.len(), all[4].bands.len()), (14, 0));
    let shared = |a: usize, b: usize| all[a].bands.iter().filter(|key| all[b].bands.contains(key)).count();
    assert_eq!((shared(0, 3), shared(0, 1)), (14, 0));
    assert!(shared(0, 2) > 0);
}

#[test]
fn exact_keys_differ_by_case_unless_it_is_normalized() {
    let keys = |normalization| {
        let exact = Some(ExactDocuments { normalization });
        let mut keys = DocumentKeys::new(&DeduplicateConfig { exact, ..config(true, false) }).unwrap();
        keys.add(&documents(&[(0, "Same", true), (1, "same ", true)])).unwrap()
    };
    let [plain, lowercase] =
        [ExactDocuments::default().normalization, stillhouse_dedup::Normalization::default()].map(keys);
    assert_ne!(plain[0].exact, plain[1].exact);
    assert_eq!(lowercase[0].exact, lowercase[1].exact);
    assert!(plain[0].bands.is_empty());
}

#[test]
fn a_document_that_is_too_large_has_no_keys_and_is_dropped() {
    let long = "word ".repeat(21);
    let mut keys = DocumentKeys::new(&config(true, true)).unwrap();
    let made = keys.add(&documents(&[(0, &long, true)])).unwrap();
    assert_eq!(made, [KeysOfDocument { id: 0, exact: None, bands: Vec::new(), parts: Vec::new() }]);
    let (kept, context) = run(NoDuplicates, &[(0, &long, true), (1, "short", true)]);
    assert_eq!(kept, HashMap::from([(1, "short".to_owned())]));
    assert_eq!(statistics(&context).dropped, [("deduplicate.too_large".to_owned(), 1)].into());
}

/// A list of duplicates as it is.
#[derive(Debug)]
struct Given(Vec<Duplicate>);

impl DuplicateList for Given {
    fn of_split(&self, split: SplitId) -> Result<Vec<Duplicate>, OperatorError> {
        assert_eq!(split, SplitId(3));
        Ok(self.0.clone())
    }
}

fn run(list: impl DuplicateList + 'static, pieces: &[(u64, &str, bool)]) -> (HashMap<u64, String>, SplitContext) {
    let context = SplitContext { duplicates: Some(Arc::new(list)), ..context(&gpt2()) };
    let lines = RepeatedParts { min_characters: 5, ..serde_json::from_str(r#"{"unit": "line"}"#).unwrap() };
    let config = DeduplicateConfig { parts: Some(lines), ..config(true, true) };
    let mut operator = config.operator(&context).unwrap();
    let mut kept: HashMap<u64, String> = HashMap::new();
    let mut emit = |batch: RecordBatch| {
        let (ids, texts) = (batch.column(0).as_primitive::<UInt64Type>(), batch.column(1).as_string::<i32>());
        (0..batch.num_rows()).for_each(|i| kept.entry(ids.value(i)).or_default().push_str(texts.value(i)));
        Ok(())
    };
    operator.process(&documents(pieces), &mut emit).unwrap();
    operator.finish(&mut emit).unwrap();
    (kept, context)
}

#[test]
fn listed_documents_are_dropped_by_kind_and_the_others_keep_their_text() {
    let duplicate = |document, kind| Duplicate { document, first: SplitId(1).document(7).0, kind, part: None };
    let [a, b, c, d] = [0, 1, 2, 4].map(|ordinal| SplitId(3).document(ordinal).0);
    let list = Given(vec![duplicate(b, DuplicateKind::Exact), duplicate(d, DuplicateKind::MinHash)]);
    let text = "a text that is longer than forty bytes, so that it leaves in pieces";
    let pieces = [(a, text, true), (b, "copy", true), (c, "the ", false), (c, "other", true), (d, "near", true)];
    let (kept, context) = run(list, &pieces);
    assert_eq!(kept, HashMap::from([(a, text.to_owned()), (c, "the other".to_owned())]));
    let statistics = statistics(&context);
    assert_eq!(statistics.dropped, [("deduplicate.exact".to_owned(), 1), ("deduplicate.minhash".to_owned(), 1)].into());
    assert_eq!(statistics.filtered_bytes, 8);
    let footer = context.footer.get();
    assert!(footer.values().any(|samples| samples.contains("a duplicate of document 7 of split 1")), "{footer:?}");
}

#[test]
fn listed_parts_are_removed_and_a_document_without_others_is_dropped() {
    let part = |ordinal: u32, part: u32| Duplicate {
        document: SplitId(3).document(ordinal).0,
        first: SplitId(1).document(7).0,
        kind: DuplicateKind::Parts,
        part: Some(part),
    };
    let [a, b, c] = [0, 1, 2].map(|ordinal| SplitId(3).document(ordinal).0);
    // the short line has no number
    let list = Given(vec![part(1, 0), part(1, 2), part(2, 0)]);
    let pieces = [(a, "a line\n", true), (b, "line one\n}\nline two\nline three\n", true), (c, "line four\n\n", true)];
    let (kept, context) = run(list, &pieces);
    assert_eq!(kept, HashMap::from([(a, "a line\n".to_owned()), (b, "}\nline two\n".to_owned())]));
    let statistics = statistics(&context);
    assert_eq!(statistics.dropped, [("deduplicate.parts".to_owned(), 1)].into());
    assert_eq!(statistics.filtered_bytes, 9 + 11 + 11);
    let footer = context.footer.get();
    assert!(footer.values().any(|samples| samples.contains("is in document 7 of split 1")), "{footer:?}");
}

#[test]
fn parts_have_keys_unless_they_are_short() {
    let parts = |json| {
        let parts = Some(serde_json::from_str(json).unwrap());
        let mut keys = DocumentKeys::new(&DeduplicateConfig { parts, ..config(false, false) }).unwrap();
        let text = "The first line here.\nshort\nThe second line.\n\nThe first line here.\n";
        keys.add(&documents(&[(0, text, true)])).unwrap().remove(0).parts
    };
    let lines = parts(r#"{"unit": "line", "min_characters": 10}"#);
    assert_eq!((lines.len(), lines[0]), (3, lines[2]));
    assert_eq!(parts(r#"{"unit": "line", "min_characters": 1}"#).len(), 4);
    assert_eq!(parts(r#"{"unit": "paragraph"}"#).len(), 2);
    assert_eq!(parts(r#"{"unit": "sentences", "sentences": 2, "min_characters": 1}"#).len(), 2);
}

#[test]
fn a_split_without_a_list_is_an_error() {
    let error = config(true, false).operator(&context(&gpt2())).err().unwrap().to_string();
    assert!(error.contains("got no list of duplicates"), "{error}");
}
