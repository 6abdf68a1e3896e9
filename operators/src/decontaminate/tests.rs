use std::collections::BTreeMap;

use stillhouse_schemas::manifest::{DROPPED_DOCUMENTS, DroppedDocument};

use super::*;
use crate::config::OperatorConfig;
use crate::testing::{context, documents, drive, gpt2, joined, statistics};

const EXAMPLES: &str = "{\"benchmark\": \"capitals\", \"query\": \"What is the capital of France?\", \"label\": \"It is Paris, of course.\"}\n\n\
                        {\"benchmark\": \"sums\", \"label\": \"Two and two make four in every book.\"}\n";

fn config(ngram_words: u32) -> DecontaminateConfig {
    let options = ContaminationConfig { ngram_words, ..ContaminationConfig::default() };
    DecontaminateConfig {
        options,
        benchmarks: EXAMPLES.as_bytes().into(),
        index: Arc::default(),
        max_document_bytes: 100,
        piece_bytes: 4000,
    }
}

#[test]
fn documents_with_text_of_a_benchmark_are_dropped_by_its_name() {
    let long = "word ".repeat(30);
    let texts = [
        (1, "The capital of France is Paris.", true),
        (2, "He asked: what is the CAPITAL of", false),
        (2, " France? It is Paris, he said.", true),
        (3, "two and TWO make four, in every other book", true),
        (4, long.as_str(), true),
    ];
    let context = context(&gpt2());
    // what an operator before this one dropped stays beside it
    context.footer.set(DROPPED_DOCUMENTS, "{\"length.too_few_characters\": []}".to_owned());
    let mut operator = config(5).operator(&context).unwrap();
    let kept = joined(&drive(operator.as_mut(), &[documents(&texts)]).unwrap());
    assert_eq!(kept, [(1, texts[0].1.to_owned())]);
    let counts = statistics(&context).dropped;
    let counts: Vec<(&str, u64)> = counts.iter().map(|(reason, n)| (reason.as_str(), *n)).collect();
    assert_eq!(counts, [("decontaminate.capitals", 1), ("decontaminate.sums", 1), ("decontaminate.too_large", 1)]);
    let footer: BTreeMap<String, Vec<DroppedDocument>> =
        serde_json::from_str(&context.footer.get()[DROPPED_DOCUMENTS]).unwrap();
    assert_eq!(footer.len(), 4);
    let problem = footer["decontaminate.capitals"][0].problem.as_deref();
    assert_eq!(problem, Some("shares \"the capital of france it\""));
}

#[test]
fn a_file_that_finds_nothing_is_refused() {
    let error = |text: &str, ngram_words| {
        let options = ContaminationConfig { ngram_words, ..ContaminationConfig::default() };
        check(text, &options).unwrap_err().to_string()
    };
    for (text, says) in [
        ("", "decontaminate.benchmarks: has no line"),
        ("\n \n", "has no line"),
        ("{\"benchmark\": \"a\", \"label\": \"b\"}\n{\"label\": \"b\"}", "line 2: missing field `benchmark`"),
        ("{\"benchmark\": \" \", \"label\": \"b\"}", "a line has the benchmark \" \"; valid: a name of 1 to 64 bytes"),
        ("{\"benchmark\": \"a\", \"query\": \"\", \"label\": \"\"}", "a line of a has neither a query nor a label"),
        ("[1]", "line 1: "),
        (EXAMPLES, "has no run of 50 words; valid: longer texts, a smaller ngram_words"),
    ] {
        let error = error(text, 50);
        assert!(error.contains(says), "{error}");
    }
    let many: String = (0..65).map(|i| format!("{{\"benchmark\": \"b{i}\", \"label\": \"a\"}}\n")).collect();
    assert!(error(&many, 5).contains("names more than 64 benchmarks"));
    assert_ne!(config(5), config(6));
    assert_eq!(config(5), config(5));
}
