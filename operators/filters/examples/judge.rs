//! Judges documents and prints the decisions, one JSON value a line, for comparison with datatrove. With `time`, prints
//! only the rate of one thread.
//!
//! ```text
//! cargo run --release -p stillhouse-filters --example judge -- RULES.json [time] < DOCUMENTS.jsonl
//! ```
//!
//! `RULES.json` maps names to lists of rules; models are read from the paths that they name. A line of the input is a JSON string or an object with the key `text`.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::Instant;

use serde_json::{Value, json};
use stillhouse_filters::{FasttextModel, Filter, Models, Rule, RuleError, Verdict, sentences, words};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rules = std::env::args().nth(1).ok_or("the first argument is the file of rules")?;
    let rules: BTreeMap<String, Vec<Rule>> = serde_json::from_str(&std::fs::read_to_string(rules)?)?;
    let mut models = Models::new();
    for path in rules.values().flatten().filter_map(Rule::model) {
        models.insert(path.to_owned(), FasttextModel::new(std::fs::read(path)?.into())?);
    }
    let compile = |(name, rules)| Ok::<_, RuleError>((name, Filter::new(rules, &models)?));
    let filters = rules
        .iter()
        .map(|(name, rules): (&String, &Vec<Rule>)| compile((name, rules)))
        .collect::<Result<Vec<_>, _>>()?;
    let read = |line: std::io::Result<String>| -> Result<String, Box<dyn std::error::Error>> {
        let value: Value = serde_json::from_str(&line?)?;
        let text = value.get("text").unwrap_or(&value).as_str().ok_or("a line is no text")?;
        Ok(text.to_owned())
    };
    let texts = std::io::stdin().lock().lines().map(read).collect::<Result<Vec<_>, _>>()?;
    if std::env::args().nth(2).is_some_and(|argument| argument == "time") {
        let bytes: usize = texts.iter().map(String::len).sum();
        for (name, filter) in filters {
            let start = Instant::now();
            let kept = texts.iter().filter(|text| matches!(filter.judge(text), Verdict::Keep(_))).count();
            let seconds = start.elapsed().as_secs_f64();
            let rate = bytes as f64 / 1e6 / seconds;
            println!("{name}: {rate:.1} MB/s, {bytes} bytes, {seconds:.3} s, {kept} of {} kept", texts.len());
        }
        return Ok(());
    }
    let mut output = std::io::BufWriter::new(std::io::stdout().lock());
    for text in &texts {
        let decisions: BTreeMap<_, _> = filters.iter().map(|(name, filter)| (name, decision(filter, text))).collect();
        let line = json!({"words": words(text), "sentences": sentences(text), "decisions": decisions});
        writeln!(output, "{line}")?;
    }
    Ok(())
}

/// `null` keeps the text, a string keeps a changed text, a list drops it for a reason.
fn decision(filter: &Filter, text: &str) -> Value {
    match filter.judge(text) {
        Verdict::Keep(kept) if kept == text => Value::Null,
        Verdict::Keep(kept) => json!(kept),
        Verdict::Drop(reason) => json!([reason.reason]),
    }
}
