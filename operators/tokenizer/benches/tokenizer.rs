//! Measures bytes per second on one core, compared with `tokenizers`: `cargo bench -p stillhouse-tokenizer`. The texts
//! are English speeches; the tokenizers are GPT-2's and BERT's.

use std::hint::black_box;
use std::io::Read;
use std::path::PathBuf;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use stillhouse_tokenizer::{FastTokenizer, Scratch};
use tokenizers::Tokenizer;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn speeches() -> Result<Vec<String>, AnyError> {
    let mut lines = String::new();
    let file = std::fs::File::open(repository("assets/corpus/sotu-small.jsonl.gz"))?;
    flate2::read::GzDecoder::new(file).read_to_string(&mut lines)?;
    let mut texts = Vec::new();
    for line in lines.lines() {
        let record: serde_json::Value = serde_json::from_str(line)?;
        texts.push(record["text"].as_str().ok_or("a record has no text")?.to_owned());
    }
    Ok(texts)
}

fn both(criterion: &mut Criterion, name: &str, path: &str) -> Result<(), AnyError> {
    let mut tokenizer = Tokenizer::from_file(repository(path))?;
    tokenizer.with_padding(None).with_truncation(None)?;
    let fast = FastTokenizer::from_tokenizer(&tokenizer)?;
    let texts = speeches()?;
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).throughput(Throughput::Bytes(texts.iter().map(|text| text.len() as u64).sum()));
    let (mut scratch, mut ids) = (Scratch::default(), Vec::new());
    group.bench_function("fast", |bencher| {
        bencher.iter(|| {
            ids.clear();
            texts.iter().all(|text| fast.encode(black_box(text), &mut scratch, &mut ids).is_ok())
        });
    });
    // An empty cache for each iteration.
    group.bench_function("fast_cold", |bencher| {
        bencher.iter(|| {
            ids.clear();
            let mut scratch = Scratch::default();
            texts.iter().all(|text| fast.encode(black_box(text), &mut scratch, &mut ids).is_ok())
        });
    });
    group.sample_size(10).bench_function("tokenizers", |bencher| {
        bencher.iter(|| {
            texts
                .iter()
                .map(|text| tokenizer.encode_fast(black_box(text.as_str()), false).map_or(0, |ids| ids.len()))
                .sum::<usize>()
        });
    });
    group.finish();
    Ok(())
}

#[expect(clippy::unwrap_used, reason = "a benchmark")]
fn benches(criterion: &mut Criterion) {
    both(criterion, "gpt2", "assets/teacher-nano-gpt2/tokenizer.json").unwrap();
    both(criterion, "bert", "operators/testdata/bert-base-uncased/tokenizer.json").unwrap();
}

criterion_group!(tokenizer, benches);
criterion_main!(tokenizer);
