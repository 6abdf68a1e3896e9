//! Encodes a text file with a tokenizer.json several times and prints the speed. Gives `perf stat` and callgrind a
//! fixed input.
//!
//! `encode TOKENIZER.json TEXT [TIMES] [check]`; `check` compares the ids with those of `tokenizers`, which it also
//! times.

#![allow(missing_docs, clippy::unwrap_used)]

use std::time::Instant;

use stillhouse_tokenizer::{FastTokenizer, Scratch};
use tokenizers::Tokenizer;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, tokenizer, text, rest @ ..] = arguments.as_slice() else {
        return Err("give a tokenizer.json and a text".into());
    };
    let mut tokenizer = Tokenizer::from_file(tokenizer)?;
    tokenizer.with_padding(None).with_truncation(None)?;
    let text = std::fs::read_to_string(text)?;
    let times = rest.first().map_or(Ok(1), |times| times.parse())?;
    let start = Instant::now();
    let fast = FastTokenizer::from_tokenizer(&tokenizer)?;
    println!("{}; made in {:.0} ms", fast.name(), start.elapsed().as_secs_f64() * 1e3);
    let speed = |start: Instant| text.len() as f64 / start.elapsed().as_secs_f64() / 1e6;
    let (mut scratch, mut ids) = (Scratch::default(), Vec::new());
    for _ in 0..times {
        ids.clear();
        let start = Instant::now();
        fast.encode(&text, &mut scratch, &mut ids)?;
        println!("{} ids, {:.1} MB/s", ids.len(), speed(start));
    }
    if rest.get(1).is_some_and(|word| word == "check") {
        // One line at a time, like documents: `tokenizers` is even slower on one long text.
        let (mut expected, start) = (Vec::new(), Instant::now());
        for line in text.split_inclusive('\n') {
            expected.extend_from_slice(tokenizer.encode_fast(line, false)?.get_ids());
        }
        println!("tokenizers: {:.1} MB/s", speed(start));
        ids.clear();
        let start = Instant::now();
        for line in text.split_inclusive('\n') {
            fast.encode(line, &mut scratch, &mut ids)?;
        }
        println!("fast, by the line: {:.1} MB/s", speed(start));
        if ids != expected {
            return Err("the ids differ".into());
        }
        println!("the ids are equal");
    }
    Ok(())
}
