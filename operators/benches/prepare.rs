//! Tokens per second of `clean`, `tokenize` and `pack` on English prose: `cargo bench -p stillhouse-operators --bench prepare`.
//!
//! GPT-2 with length 1,024 and BERT with length 128, on all cores; and `pack` alone.

use std::hint::black_box;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{BooleanArray, RecordBatch, StringArray, UInt64Array};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use stillhouse_operators::clean::{CleanConfig, Detokenizer};
use stillhouse_operators::config::SpecialIds;
use stillhouse_operators::operator::{
    Counters, FooterEntries, Operator, SharedStatistics, SplitContext, documents_schema,
};
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::pack::PackConfig;
use stillhouse_operators::tokenize::TokenizeConfig;
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_schemas::columns::RowLength;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::spec::{self, Boundary, PackMode, Remainder, Separator};

type AnyError = Box<dyn std::error::Error>;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn corpus() -> Result<RecordBatch, AnyError> {
    let mut lines = String::new();
    let file = std::fs::File::open(repository("assets/corpus/sotu-small.jsonl.gz"))?;
    flate2::read::GzDecoder::new(file).read_to_string(&mut lines)?;
    let mut texts = Vec::new();
    for line in lines.lines() {
        let record: serde_json::Value = serde_json::from_str(line)?;
        texts.push(record["text"].as_str().ok_or("a record has no text")?.to_owned());
    }
    Ok(RecordBatch::try_new(
        documents_schema(),
        vec![
            Arc::new(UInt64Array::from_iter_values(0..texts.len() as u64)),
            Arc::new(StringArray::from_iter_values(&texts)),
            Arc::new(BooleanArray::from(vec![true; texts.len()])),
        ],
    )?)
}

fn context(tokenizer: &str) -> Result<SplitContext, AnyError> {
    let vocabulary = Vocabulary::load(&repository(tokenizer), tokenizer, &spec::Tokenizer::default(), None)?;
    Ok(SplitContext {
        duplicates: None,
        carried: None,
        split: SplitId(0),
        dataset_split: "train".into(),
        sequence_range: None,
        vocabulary: Arc::new(vocabulary),
        teacher: None,
        statistics: SharedStatistics::default(),
        footer: FooterEntries::default(),
        meter: Arc::new(Counters::default()),
    })
}

/// Runs operators one after the other over whole lists of batches.
fn run(specs: &[OperatorSpec], context: &SplitContext, input: &[RecordBatch]) -> Result<Vec<RecordBatch>, AnyError> {
    let mut batches = input.to_vec();
    for spec in specs {
        let mut operator: Box<dyn Operator> = spec.build(context)?;
        let mut output = Vec::new();
        let mut emit = |batch| {
            output.push(batch);
            Ok(())
        };
        for batch in &batches {
            operator.process(batch, &mut emit)?;
        }
        operator.finish(&mut emit)?;
        batches = output;
    }
    Ok(batches)
}

fn bench(c: &mut Criterion) -> Result<(), AnyError> {
    let documents = [corpus()?];
    let mut group = c.benchmark_group("prepare");
    group.sample_size(10);
    for (name, tokenizer, length) in [
        ("gpt2", "assets/teacher-nano-gpt2/tokenizer.json", 1024),
        ("bert", "operators/testdata/bert-base-uncased", 128),
    ] {
        let context = context(tokenizer)?;
        let pack = spec::Pack {
            mode: PackMode::Wrap,
            length,
            separator: Separator::Eos,
            boundary: Boundary::BosEos,
            remainder: Remainder::Drop,
        };
        let rows = RowLength::Fixed(length as usize);
        let pack = OperatorSpec::from(PackConfig::new(
            &pack,
            [],
            rows,
            false,
            64,
            &SpecialIds::from_vocabulary(&context.vocabulary),
        )?);
        let clean = |detokenizer| OperatorSpec::from(CleanConfig { detokenizer, piece_bytes: 1_000_000 });
        let tokenize = OperatorSpec::from(TokenizeConfig { piece_bytes: 1_000_000 });

        let tokens = run(std::slice::from_ref(&tokenize), &context, &documents)?;
        let count = context.statistics.lock().text_tokens;
        group.throughput(Throughput::Elements(count));
        let whole = [clean(Detokenizer::None), tokenize.clone(), pack.clone()];
        group.bench_function(format!("{name}/tokenize+pack"), |b| {
            b.iter(|| black_box(run(&whole, &context, &documents)));
        });
        group.bench_function(format!("{name}/pack"), |b| {
            b.iter(|| black_box(run(std::slice::from_ref(&pack), &context, &tokens)));
        });
        if name == "gpt2" {
            let cleaned = [clean(Detokenizer::ScientificPapers)];
            group.bench_function("clean scientific_papers", |b| {
                b.iter(|| black_box(run(&cleaned, &context, &documents)));
            });
        }
    }
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    if let Err(error) = bench(c) {
        eprintln!("prepare: {error}");
        std::process::exit(1);
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
