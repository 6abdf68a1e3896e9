//! Helpers that the tests of several operators share: batches of documents, contexts, and running an operator.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use arrow::array::{BooleanArray, RecordBatch, StringArray, UInt64Array};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::Statistics;
use stillhouse_schemas::spec;

use crate::operator::{
    Counters, FooterEntries, Operator, OperatorError, SharedStatistics, SplitContext, documents_schema,
};
use crate::vocabulary::Vocabulary;

/// Returns a path in the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Returns the path of a file that `scripts/fetch-assets` downloads.
pub fn fetched(path: &str) -> PathBuf {
    let path = repository(".cache").join(path);
    assert!(path.exists(), "{} is missing: run `make setup` or scripts/fetch-assets", path.display());
    path
}

fn load(path: &str) -> Arc<Vocabulary> {
    Arc::new(Vocabulary::load(&repository(path), path, &spec::Tokenizer::default(), None).unwrap())
}

/// GPT-2's vocabulary.
pub fn gpt2() -> Arc<Vocabulary> {
    static LOADED: OnceLock<Arc<Vocabulary>> = OnceLock::new();
    LOADED.get_or_init(|| load("assets/teacher-nano-gpt2/tokenizer.json")).clone()
}

/// BERT's vocabulary.
pub fn bert() -> Arc<Vocabulary> {
    static LOADED: OnceLock<Arc<Vocabulary>> = OnceLock::new();
    LOADED.get_or_init(|| load("operators/testdata/bert-base-uncased")).clone()
}

/// Creates a context with fresh statistics.
pub fn context(vocabulary: &Arc<Vocabulary>) -> SplitContext {
    SplitContext {
        split: SplitId(3),
        dataset_split: "train".into(),
        sequence_range: None,
        vocabulary: vocabulary.clone(),
        duplicates: None,
        carried: None,
        teacher: None,
        statistics: SharedStatistics::default(),
        footer: FooterEntries::default(),
        meter: Arc::new(Counters::default()),
    }
}

/// Returns the statistics that operators added to a context.
pub fn statistics(context: &SplitContext) -> Statistics {
    context.statistics.lock().clone()
}

/// Creates a batch of document pieces: (id, text, end).
pub fn documents(pieces: &[(u64, &str, bool)]) -> RecordBatch {
    RecordBatch::try_new(
        documents_schema(),
        vec![
            Arc::new(UInt64Array::from_iter_values(pieces.iter().map(|p| p.0))),
            Arc::new(StringArray::from_iter_values(pieces.iter().map(|p| p.1))),
            Arc::new(pieces.iter().map(|p| Some(p.2)).collect::<BooleanArray>()),
        ],
    )
    .unwrap()
}

/// Cuts a text at the nearest character boundaries after steps of these sizes, in rotation.
pub fn cut<'a>(text: &'a str, sizes: &[usize]) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    for &size in sizes.iter().cycle() {
        let (piece, later) = rest.split_at(rest.ceil_char_boundary(size.max(1).min(rest.len())));
        pieces.push(piece);
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    pieces
}

/// Runs an operator over these batches and returns its output.
pub fn drive(operator: &mut dyn Operator, batches: &[RecordBatch]) -> Result<Vec<RecordBatch>, OperatorError> {
    let mut output = Vec::new();
    let mut emit = |batch| {
        output.push(batch);
        Ok(())
    };
    for batch in batches {
        operator.process(batch, &mut emit)?;
    }
    operator.finish(&mut emit)?;
    Ok(output)
}

/// Joins pieces to documents: (id, text), in order.
pub fn joined(batches: &[RecordBatch]) -> Vec<(u64, String)> {
    let mut documents: Vec<(u64, String)> = Vec::new();
    let mut open = false;
    for batch in batches {
        for piece in crate::document_pieces::document_pieces(batch, "test").unwrap() {
            match documents.last_mut() {
                Some(last) if open => {
                    assert_eq!(last.0, piece.id);
                    last.1.push_str(piece.text);
                }
                _ => documents.push((piece.id, piece.text.to_owned())),
            }
            open = !piece.end;
        }
    }
    assert!(!open);
    documents
}

/// A small job file with these sections.
pub(crate) fn job_with(sections: &str) -> String {
    format!(
        "version: 1\nname: a\ninput: {{format: jsonl, paths: [x.jsonl]}}\ntokenizer: {{path: t.json}}\npack: {{length: 16}}\noutput: {{path: out}}\n{sections}\n"
    )
}
