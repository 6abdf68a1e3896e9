//! Prints the rate of one thread for signatures, exact keys and decontamination.
//!
//! ```text
//! cargo run --release -p stillhouse-dedup --example rates < DOCUMENTS.jsonl
//! python operators/dedup/tests/golden.py --time DOCUMENTS.jsonl     # datatrove's rate
//! ```
//!
//! A line of the input is a JSON string.

use std::io::BufRead;
use std::time::Instant;

use stillhouse_dedup::{
    ContaminationConfig, ContaminationIndex, ExactConfig, ExactKeys, MinHash, MinHashConfig, Normalization, Unit,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let read = |line: std::io::Result<String>| -> Result<String, Box<dyn std::error::Error>> {
        Ok(serde_json::from_str(&line?)?)
    };
    let texts = std::io::stdin().lock().lines().map(read).collect::<Result<Vec<_>, _>>()?;
    let bytes: usize = texts.iter().map(String::len).sum();
    let rate = |name: &str, each: &dyn Fn(&str) -> usize| {
        let start = Instant::now();
        let results: usize = texts.iter().map(|text| each(text)).sum();
        let seconds = start.elapsed().as_secs_f64();
        let (documents, megabytes) = (texts.len() as f64 / seconds, bytes as f64 / 1e6 / seconds);
        println!(
            "{name}: {documents:.0} documents/s, {megabytes:.2} MB/s, {} documents, {bytes} bytes, {seconds:.3} s, {results}",
            texts.len()
        );
    };
    let minhash = MinHash::new(&MinHashConfig::default())?;
    rate("normalization", &|text| Normalization::default().apply(text).len());
    rate("words", &|text| stillhouse_filters::words(text).len());
    rate("minhash", &|text| minhash.signature(text).map_or(0, |signature| minhash.band_keys(&signature).count()));
    for unit in [Unit::Document, Unit::Paragraph, Unit::Line, Unit::Sentences] {
        let exact = ExactKeys::new(&ExactConfig { unit, ..ExactConfig::default() })?;
        rate(&format!("exact {unit:?}"), &|text| exact.keys(text).map(|(_, key)| key as usize & 1).sum());
    }
    let mut index = ContaminationIndex::builder(&ContaminationConfig::default())?;
    if let [label, query, ..] = &*texts {
        index.add("task", Some(query), label);
    }
    let index = index.build();
    rate("contamination", &|text| index.find(text).map_or(0, |hit| hit.ngram.len()));
    Ok(())
}
