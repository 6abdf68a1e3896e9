//! Measures prefill on this machine in tokens per second: hidden states alone, and hidden states with logits.
//!
//! ```text
//! cargo run --release -p stillhouse-teacher --example prefill -- MODEL [DTYPE] [--shape BATCHxLENGTH] [--untied yes]
//! ```
//!
//! Next to each rate is its share of the threads' peak, which is measured after each pass. The share counts 2 flops per
//! weight of the layers and 4 · H per key in view. Logits add 2 per weight of the head. A head with weights of its own
//! (`--untied yes`) leaves fewer of the parameters to the layers.
//!
//! With `--text FILE` (plain text) and a tokenizer in the model, prints the perplexity of the text, and of its words in
//! shuffled order. A wrongly implemented teacher gives both the same perplexity.

#[path = "../../cpu/benches/peak/mod.rs"]
mod peak;

use std::path::{Path, PathBuf};
use std::time::Instant;

use stillhouse_cpu::Arithmetic;

use stillhouse_teacher::{HostTeacher, gguf_tokenizer, load_on_host};
use tokenizers::Tokenizer;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const ROWS: usize = 64;

fn main() -> Result<(), Failure> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut option = |name: &str| match arguments.iter().position(|argument| argument == name) {
        Some(at) if at + 1 < arguments.len() => arguments.drain(at..at + 2).nth(1),
        _ => None,
    };
    let (text, shape, untied) = (option("--text"), option("--shape"), option("--untied").is_some());
    let [model, rest @ ..] = arguments.as_slice() else {
        return Err("usage: prefill MODEL [DTYPE] [--shape BATCHxLENGTH] [--untied yes] | [--text FILE]".into());
    };
    let dtype = rest.first().map_or("f32", String::as_str).parse()?;
    let (model, start) = (PathBuf::from(model), Instant::now());
    let teacher = load_on_host(&model, dtype)?;
    let info = teacher.info();
    println!(
        "{}: {} parameters, V = {}, {} on {}, loaded in {:.2?}",
        info.architecture.name(),
        info.parameters,
        info.vocab_size,
        info.arithmetic,
        info.device,
        start.elapsed()
    );
    match text {
        Some(text) => perplexities(teacher.as_ref(), &model, &std::fs::read_to_string(text)?),
        None => match shape.as_deref().and_then(|shape| shape.split_once('x')) {
            Some((batch, length)) => speeds(teacher.as_ref(), untied, &[(length.parse()?, batch.parse()?)]),
            None => speeds(teacher.as_ref(), untied, &[(256, 1), (256, 4), (1024, 1), (1024, 4)]),
        },
    }
}

/// Returns the peak loop for products in this dtype.
fn limit(dtype: &str) -> Option<peak::PeakLoop> {
    let arithmetic = Arithmetic::ALL.into_iter().find(|arithmetic| arithmetic.name() == dtype)?;
    // Machines without such products use f32 instead.
    let arithmetic = if arithmetic.is_available() { arithmetic } else { Arithmetic::F32 };
    peak::peak_loops(arithmetic).first().map(|(_, work)| *work)
}

fn speeds(teacher: &dyn HostTeacher, untied: bool, shapes: &[(usize, usize)]) -> Result<(), Failure> {
    let (info, threads) = (teacher.info(), rayon::current_num_threads());
    let work = limit(&info.dtype.to_string());
    let head = (info.vocab_size * info.hidden_size) as f64;
    let layers = info.parameters as f64 - if untied { 2.0 * head } else { head };
    println!(
        "{:>6} {:>6} {:>14} {:>7} {:>14} {:>7} {:>20}",
        "length", "batch", "hidden tok/s", "share", "+ logits tok/s", "share", "peak GFLOP/s"
    );
    let mut logits = Vec::new();
    for &(length, batch) in shapes {
        if length > info.max_positions {
            continue;
        }
        let vocab = info.vocab_size as u32;
        let tokens: Vec<u32> = (0..(batch * length) as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect();
        teacher.hidden(&tokens, batch, length)?;
        let (mut hidden_s, mut all_s, mut peak) = (f64::INFINITY, f64::INFINITY, 0f64);
        for _ in 0..3 {
            let start = Instant::now();
            let hidden = teacher.hidden(&tokens, batch, length)?.flatten(0, 1)?;
            hidden.device().synchronize()?;
            hidden_s = hidden_s.min(start.elapsed().as_secs_f64());
            for first in (0..tokens.len()).step_by(ROWS) {
                teacher.logits_into(&hidden.narrow(0, first, ROWS.min(tokens.len() - first))?, &mut logits)?;
            }
            all_s = all_s.min(start.elapsed().as_secs_f64());
            peak = work.map_or(f64::NAN, |work| peak.max(peak::gflops(work, threads, 0.02)));
        }
        let count = tokens.len() as f64;
        let keys = (length + 1) as f64 / 2.0 * info.layers as f64;
        let flops = 2.0 * layers + 4.0 * info.hidden_size as f64 * keys;
        let share = |flops: f64, seconds: f64| 100.0 * flops * count / seconds / (peak * 1e9);
        println!(
            "{length:>6} {batch:>6} {:>14.0} {:>6.0}% {:>14.0} {:>6.0}% {peak:>9.0} ({threads} thr.)",
            count / hidden_s,
            share(flops, hidden_s),
            count / all_s,
            share(flops + 2.0 * head, all_s),
        );
    }
    Ok(())
}

fn perplexities(teacher: &dyn HostTeacher, model: &Path, text: &str) -> Result<(), Failure> {
    let tokenizer = if model.is_dir() {
        Tokenizer::from_file(model.join("tokenizer.json"))?
    } else {
        gguf_tokenizer(model)?.tokenizer
    };
    let mut words: Vec<&str> = text.split_whitespace().collect();
    println!("perplexity {:.2}", perplexity(teacher, &tokenizer, text)?);
    let mut state = 88_172_645_463_325_252u64;
    for i in (1..words.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        words.swap(i, (state % (i as u64 + 1)) as usize);
    }
    println!("perplexity {:.2} with the words shuffled", perplexity(teacher, &tokenizer, &words.join(" "))?);
    Ok(())
}

/// Perplexity over whole windows of up to 1,024 tokens; the first token of each is given, not predicted.
fn perplexity(teacher: &dyn HostTeacher, tokenizer: &Tokenizer, text: &str) -> Result<f64, Failure> {
    let length = teacher.info().max_positions.min(1024);
    let encoding = tokenizer.encode_fast(text, false)?;
    let (mut logits, mut nats, mut count) = (Vec::new(), 0.0, 0usize);
    for window in encoding.get_ids().chunks_exact(length) {
        let hidden = teacher.hidden(window, 1, length)?.flatten(0, 1)?;
        for first in (0..length - 1).step_by(ROWS) {
            let rows = ROWS.min(length - 1 - first);
            teacher.logits_into(&hidden.narrow(0, first, rows)?, &mut logits)?;
            for (row, next) in logits.chunks_exact(teacher.info().vocab_size).zip(&window[first + 1..]) {
                let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
                nats += sum.ln() + f64::from(max - row[*next as usize]);
                count += 1;
            }
        }
    }
    println!("{count} tokens predicted");
    Ok((nats / count.max(1) as f64).exp())
}
