//! The data set card, `README.md`: describes the data set to a reader who has only the folder.
//!
//! The Hugging Face hub reads the front matter; people read the rest. Everything comes from the manifest.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};
use stillhouse_operators::registry;
use stillhouse_operators::subtokens::{FILTER_TABLE, PERMUTATION};
use stillhouse_schemas::manifest::{Manifest, Statistic, Totals};
use stillhouse_schemas::spec::{Noise, NoiseCodec, Sequential};

/// Python code in the card that replays the noise of one token with numpy alone.
const REPLAY: &str = include_str!("card_replay.py");

/// Start of the last line: an HTML comment, invisible on the rendered page, with the checksum of all lines above it.
const SUM: &str = "<!-- sha256 of this card above this line: ";
const AFTER_SUM: &str = " (write below it; remove it after an edit above it) -->";

/// Renders the card of a data set.
pub fn card(manifest: &Manifest) -> String {
    let mut text = body(manifest);
    let sum = hex::encode(Sha256::digest(&text));
    let _ = writeln!(text, "{SUM}{sum}{AFTER_SUM}");
    text
}

/// A problem with a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CardFault {
    /// Empty or not text, which no edit can have intended.
    Damaged(&'static str),
    /// Differs from what was written: edited or damaged.
    Changed(String),
}

/// Checks a card. People may write below the checksum or remove it. Cards of older versions have no checksum, which is
/// no fault.
pub fn fault(card: &[u8]) -> Option<CardFault> {
    let text = match std::str::from_utf8(card) {
        Ok("") => return Some(CardFault::Damaged("is missing or empty")),
        Ok(text) if !text.contains('\0') => text,
        _ => return Some(CardFault::Damaged("is no text")),
    };
    let line = text.rfind(&format!("\n{SUM}")).map(|at| at + 1)?;
    let (above, rest) = text.split_at(line);
    let should = rest[SUM.len()..].split([' ', '\n']).next().unwrap_or_default();
    let sha256 = hex::encode(Sha256::digest(above));
    (sha256 != should).then(|| {
        CardFault::Changed(format!(
            "sha256 {sha256} above the line that has {should}: it is damaged, or somebody edited it; where the edit is meant remove that line, \
             else remove the file: `stillhouse repair` writes it again (`stillhouse derive` that of a derived data set)"
        ))
    })
}

fn body(manifest: &Manifest) -> String {
    let mut text = front_matter(manifest);
    summary(manifest, &mut text);
    preparation_steps(manifest, &mut text);
    input_statistics(manifest, &mut text);
    splits(manifest, &mut text);
    columns(manifest, &mut text);
    loading(manifest, &mut text);
    text
}

fn sum(manifest: &Manifest, f: fn(&Totals) -> u64) -> u64 {
    manifest.totals.values().map(f).sum()
}

fn noise(manifest: &Manifest) -> Option<&Noise> {
    manifest.job.extract.as_ref().and_then(|e| e.noise.as_ref())
}

fn license(manifest: &Manifest) -> Option<&str> {
    manifest.job.output.card.license.as_deref()
}

fn front_matter(manifest: &Manifest) -> String {
    let mut text = String::from("---\n");
    if let Some(license) = license(manifest) {
        // the hub expects SPDX identifiers in lower case
        let _ = writeln!(text, "license: {}", license.to_lowercase());
    }
    text += match manifest.job.input.is_rows() {
        true => "task_categories:\n- unconditional-image-generation\ntags:\n- stillhouse\n- discrete-diffusion\n",
        false => "task_categories:\n- text-generation\ntags:\n- stillhouse\n- diffusion-language-model\n",
    };
    let _ = writeln!(text, "size_categories:\n- {}", size_category(sum(manifest, |t| t.rows)));
    text += "configs:\n- config_name: default\n  data_files:\n";
    for split in manifest.totals.keys() {
        let _ = writeln!(text, "  - split: {split}\n    path: data/{split}-*.parquet");
    }
    text + "---\n\n"
}

fn summary(manifest: &Manifest, text: &mut String) {
    let (rows, tokens, bytes) = (sum(manifest, |t| t.rows), sum(manifest, |t| t.tokens), sum(manifest, |t| t.bytes));
    let _ = writeln!(text, "# {}\n", manifest.job.name);
    let models = if manifest.job.input.is_rows() { "models of images" } else { "language models" };
    let _ = writeln!(
        text,
        "Training data for parallel (discrete-diffusion) {models}, made by Stillhouse: {} sequences of up to {} tokens, {} tokens \
         in all, {:.1} MB ({:.2} bytes per token).\n",
        counted(rows),
        counted(manifest.job.pack.length.into()),
        counted(tokens),
        megabytes(bytes),
        bytes as f64 / tokens.max(1) as f64,
    );
    let _ = match license(manifest) {
        Some(license) => writeln!(text, "License: {license}.\n"),
        None if manifest.job.input.is_rows() => writeln!(
            text,
            "License: none was given. The images have the license of their source (`output.card.license` in the job file names it here).\n"
        ),
        None => writeln!(
            text,
            "License: none was given. The text has the license of its source (`output.card.license` in the job file names it here).\n"
        ),
    };
}

fn preparation_steps(manifest: &Manifest, text: &mut String) {
    *text += "## How it was made\n\n";
    if let Some(from) = &manifest.derived_from {
        let columns: Vec<String> = from.columns.iter().map(|column| code(column)).collect();
        let _ = writeln!(
            text,
            "- Rows and all columns but {} are those of the data set {}, which this was derived from; its job is in `manifest.json` under \
             `derived_from`",
            columns.join(", "),
            code(&from.job.name)
        );
    }
    let t = &manifest.tokenizer;
    let _ = writeln!(
        text,
        "- Tokenizer: {}, {} tokens; `tokenizer.json` is beside this file",
        code(&t.source),
        counted(t.vocab_size)
    );
    for (role, special) in &t.special_tokens {
        let _ = writeln!(text, "  - {role}: {}, id {}", code(&special.token), special.id);
    }
    if let Some(images) = &manifest.job.input.images {
        let (height, width) = images.height_width();
        let channels = images.channels.count();
        let _ = writeln!(
            text,
            "- Images: {height} × {width} pixels, {channels} channels last, row by row, 0 to 255; how they came to that size is in \
             `manifest.json` under `job.input.images`"
        );
    }
    if let Some(teacher) = &manifest.teacher {
        let _ = writeln!(
            text,
            "- Teacher: {} ({}, {} parameters), computed in {} on {}",
            code(&teacher.source),
            teacher.architecture,
            counted(teacher.parameters),
            teacher.arithmetic,
            teacher.device
        );
        if let Some(cost) = &teacher.cost {
            let _ = writeln!(text, "- What this arithmetic costs: {cost}");
        }
    }
    if let Some(perplexity) = manifest.statistics.perplexity() {
        let _ = writeln!(text, "- Perplexity of the text under the teacher: {perplexity:.2}");
    }
    if let (Some(seed), Some(written)) = (manifest.noise_seed, manifest.job.sequential()) {
        let prompts = match written.prompt_tokens {
            0 => "after bos".to_owned(),
            n => format!("after the first {n} tokens of each document"),
        };
        let _ = writeln!(text, "- The text was written by the teacher {prompts}: {}", sampled(&written, seed));
    }
    if let (Some(seed), Some(noise)) = (manifest.noise_seed, noise(manifest)) {
        let stored = match noise.codec {
            NoiseCodec::Replay => format!(
                "replayed from the seed {seed} and corrected, so that its softmax is within a total variation of {} of the exact one for \
                 every token",
                noise.tolerance
            ),
            NoiseCodec::Dense => format!("stored as it is, drawn with the seed {seed}"),
        };
        let draws = if noise.draws == 1 { "one draw".to_owned() } else { format!("{} draws", noise.draws) };
        let _ = writeln!(text, "- Posterior Gumbel noise: {draws} per token, {stored}");
    }
    if let Some(s) = manifest.subtokens {
        let of = if manifest.sidecar_files.contains_key(PERMUTATION) {
            " of each id's number in `permutation.npy`"
        } else {
            ""
        };
        let _ = writeln!(text, "- Sub-tokens: {} digits in base {}{of}, most significant first", s.length, s.base);
    }
    if manifest.sidecar_files.contains_key(FILTER_TABLE) {
        let _ = writeln!(
            text,
            "- `filter_table.npy`: bool [digits, base + 1, vocabulary], which tokens have which digit; the last row, of a masked digit, is all true"
        );
    }
    let _ = writeln!(text, "- Job: hash `{}`; every setting is in `manifest.json` under `job`\n", manifest.job_hash);
}

/// Describes how the teacher sampled the tokens of written text, and what distribution they have.
fn sampled(written: &Sequential, seed: u64) -> String {
    let noise = format!("ξ = −ln e of the seed {seed}, of which nothing is stored");
    if written.is_plain() {
        return format!("each token is argmax(l + ξ), {noise}, and so a sample of the teacher's own distribution");
    }
    let Sequential { temperature, top_k, top_p, .. } = written;
    if *temperature == 0.0 {
        return "each token is the teacher's likeliest: no sample of its distribution, and no noise belongs to it"
            .into();
    }
    let mut cut = format!("T = {temperature}");
    if *top_k > 0 {
        let _ = write!(cut, ", the {top_k} likeliest tokens");
    }
    if *top_p < 1.0 {
        let _ = write!(cut, ", of these the fewest that reach a probability of {top_p}");
    }
    format!(
        "each token is argmax(l/T + ξ) over what is left ({cut}), {noise}. This is text of a truncated teacher: ξ is no posterior noise of the \
         teacher's own distribution, which `logprob` and all other columns of the teacher are of"
    )
}

fn input_statistics(manifest: &Manifest, text: &mut String) {
    let s = &manifest.statistics;
    *text += "## What went in\n\n| | |\n|---|---|\n";
    let mut line = |what: &str, value: String| {
        let _ = writeln!(text, "| {what} | {value} |");
    };
    line("Documents read", counted(s.documents));
    if s.empty_documents > 0 {
        line("Documents without a token", counted(s.empty_documents));
    }
    for (reason, n) in &s.skipped {
        line("Records skipped", format!("{} {}", counted(*n), cell(reason)));
    }
    for (reason, n) in &s.dropped {
        line("Documents dropped", format!("{} {}", counted(*n), cell(reason)));
    }
    for (table, counts) in &s.sources {
        let share = 100.0 * counts.text_tokens as f64 / s.text_tokens.max(1) as f64;
        let (documents, tokens) = (counted(counts.kept_documents), counted(counts.text_tokens));
        line(
            &format!("Of the table {}", code(table)),
            format!("{documents} documents, {tokens} tokens ({share:.2} %)"),
        );
        for (reason, n) in &counts.dropped {
            line(&format!("Dropped of the table {}", code(table)), format!("{} {}", counted(*n), cell(reason)));
        }
        for (reason, n) in &counts.skipped {
            line(&format!("Skipped of the table {}", code(table)), format!("{} {}", counted(*n), cell(reason)));
        }
    }
    if !s.dropped.is_empty() {
        line("Documents kept", counted(s.documents_kept()));
    }
    if s.filtered_bytes > 0 {
        line("Text after filters", format!("{:.1} MB", megabytes(s.text_bytes.saturating_sub(s.filtered_bytes))));
    }
    if !manifest.job.input.is_rows() {
        line("Text after cleaning", format!("{:.1} MB", megabytes(s.text_bytes)));
        line("Tokens of text", counted(s.text_tokens));
        line("Tokens dropped at the ends of splits", counted(s.dropped_tokens));
    }
    if s.predicted_tokens > 0 {
        line("Tokens that the teacher predicted", counted(s.predicted_tokens));
    }
    for (name, statistic) in &s.operators {
        let value = match statistic {
            Statistic::Sum(n) => counted(*n),
            Statistic::Max(n) => format!("{n} at most"),
        };
        line(registry::statistic(name).map_or(&cell(name), |kind| kind.meaning), value);
    }
    text.push('\n');
}

fn splits(manifest: &Manifest, text: &mut String) {
    *text += "## Splits\n\n| split | shards | sequences | tokens | MB |\n|---|---|---|---|---|\n";
    for (split, t) in &manifest.totals {
        let (shards, rows, tokens) = (counted(t.shards), counted(t.rows), counted(t.tokens));
        let _ = writeln!(text, "| {split} | {shards} | {rows} | {tokens} | {:.1} |", megabytes(t.bytes));
    }
    text.push('\n');
}

fn columns(manifest: &Manifest, text: &mut String) {
    *text += "## Columns\n\nOne row is one sequence; L is its number of positions. `*` is a length that differs from row to row.\n\n\
        | column | dtype | shape | meaning |\n|---|---|---|---|\n";
    for c in &manifest.columns {
        let shape = c.shape.as_deref().unwrap_or("");
        let _ = writeln!(text, "| `{}` | {} | {} | {} |", c.name, dtype(&c.data_type), cell(shape), meaning(&c.name));
    }
    text.push('\n');
}

/// The element type of a column, inside any lists.
fn dtype(data_type: &str) -> &str {
    if data_type.contains("struct<") {
        return "struct of strings";
    }
    let item = data_type.rsplit_once('<').map_or(data_type, |(_, item)| item);
    item.split_once('>').map_or(item, |(item, _)| item)
}

/// Description of a column; empty if no operator of this program declares it.
fn meaning(column: &str) -> &'static str {
    registry::columns().find(|c| c.name == column).map_or("", |c| c.meaning)
}

fn loading(manifest: &Manifest, text: &mut String) {
    *text += "## How to load it\n\n```python\nfrom datasets import load_dataset\n\nds = load_dataset(\"path/to/this/folder\")\n```\n\n\
        With the Python package of Stillhouse, which also shuffles and resumes for training:\n\n\
        ```python\nimport stillhouse\n\nds = stillhouse.open(\"path/to/this/folder\")\n";
    let replayed = noise(manifest).filter(|noise| noise.codec == NoiseCodec::Replay);
    if replayed.is_some() || manifest.job.sequential().is_some() {
        *text += "batch = ds[:4]\nprobabilities = stillhouse.noise.replay(batch, [[0, 1]] * 4, out=\"softmax\")  # softmax(ξ) [4, 2, V]: \
            four rows, two positions\n";
    }
    *text += "```\n";
    if replayed.is_some() {
        let _ = write!(
            text,
            "\n## How to replay the noise with numpy alone\n\nRun it in this folder.\n\n```python\n{REPLAY}```\n"
        );
    }
    *text += "\n`docs/FORMAT.md` of Stillhouse describes every column and the noise to the bit.\n";
}

fn size_category(rows: u64) -> &'static str {
    match rows {
        0..1_000 => "n<1K",
        1_000..10_000 => "1K<n<10K",
        10_000..100_000 => "10K<n<100K",
        100_000..1_000_000 => "100K<n<1M",
        1_000_000..10_000_000 => "1M<n<10M",
        10_000_000..100_000_000 => "10M<n<100M",
        100_000_000..1_000_000_000 => "100M<n<1B",
        _ => "n>1B",
    }
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// Formats a number with thousands separators.
fn counted(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a name from a job or a tokenizer as inline code. Replaces characters that could end the line or the code.
fn code(name: &str) -> String {
    let plain: String = name.chars().map(|c| if c.is_control() || c == '`' { '\u{fffd}' } else { c }).collect();
    format!("`{plain}`")
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().replace('|', "\\|")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    pub fn manifest(extract: &serde_json::Value, card: &serde_json::Value) -> Manifest {
        let column = |name: &str, data_type: &str, shape: Option<&str>| json!({"name": name, "data_type": data_type, "shape": shape});
        let has_noise = !extract.is_null();
        let mut manifest = json!({
            "format_version": 1,
            "job": {
                "version": 1, "name": "demo", "input": {"format": "jsonl", "paths": ["corpus/*.jsonl"]}, "pack": {"length": 256},
                "tokenizer": {"path": "hf://org/name"}, "output": {"path": "out", "card": card}
            },
            "job_hash": "0123abcd",
            "tokenizer": {
                "source": "hf://org/`name`\n(commit)", "sha256": "ff", "vocab_size": 50257,
                "special_tokens": {"eos": {"token": "<|endoftext|>", "id": 50256}}
            },
            "vocab_size": 50257,
            "columns": [column("sequence_id", "uint64", None), column("input_ids", "fixed_size_list<int32>[256]", Some("[256]"))],
            "splits": [], "shards": [],
            "totals": {
                "train": {"shards": 1200, "rows": 1_234_567, "tokens": 316_049_152, "bytes": 2_900_000_000_u64},
                "validation": {"shards": 1, "rows": 10, "tokens": 2560, "bytes": 23_000}
            },
            "statistics": {
                "documents": 100_003, "skipped": {"broken JSON": 12, "null text | odd": 1}, "text_bytes": 1_300_000_000_u64,
                "text_tokens": 316_100_000_u64, "dropped_tokens": 48_288
            }
        });
        if has_noise {
            let job = manifest["job"].as_object_mut().unwrap();
            job.insert("extract".into(), extract.clone());
            manifest["teacher"] = json!({
                "source": "${MODELS}/gpt2", "architecture": "gpt2", "parameters": 124_439_808, "arithmetic": "f32", "device": "cpu",
                "files": {}, "bos_token_id": 50256
            });
            manifest["noise_seed"] = json!(42);
            manifest["statistics"]["predicted_tokens"] = json!(1000);
            manifest["statistics"]["logprob_sum"] = json!(-3000.0);
            manifest["subtokens"] = json!({"base": 15, "length": 4});
            manifest["columns"].as_array_mut().unwrap().extend([
                column("logprob", "fixed_size_list<float32>[256]", Some("[256]")),
                column("noise_count", "fixed_size_list<uint16>[512]", Some("[2,256]")),
                column("noise_index", "list<uint16>", Some("[*]")),
            ]);
        }
        serde_json::from_value(manifest).unwrap()
    }

    #[test]
    fn a_card_with_noise() {
        let extract =
            json!({"teacher": {"path": "${MODELS}/gpt2"}, "noise": {"codec": "replay", "tolerance": 1e-3, "draws": 2}});
        let card = body(&manifest(&extract, &json!({"license": "CC-BY-4.0"})));
        insta::assert_snapshot!(card.replace(REPLAY, "(card_replay.py)\n"));
    }

    /// The card of text by a truncated teacher states the truncation.
    #[test]
    fn a_card_says_how_text_was_written() {
        let line = |written: serde_json::Value| {
            let extract = json!({"teacher": {"path": "t"}, "mode": "sequential", "sequential": written});
            let card = card(&manifest(&extract, &json!({})));
            assert!(card.contains("stillhouse.noise.replay(batch"), "{card}");
            card.lines().find(|line| line.contains("written by the teacher")).unwrap().to_owned()
        };
        let plain = line(json!({}));
        assert!(plain.contains("after bos: each token is argmax(l + ξ), ξ = −ln e of the seed 42"), "{plain}");
        assert!(plain.ends_with("and so a sample of the teacher's own distribution"), "{plain}");
        let cut = line(json!({"prompt_tokens": 8, "temperature": 0.7, "top_k": 50, "top_p": 0.9}));
        assert!(cut.contains("after the first 8 tokens of each document"), "{cut}");
        assert!(
            cut.contains("T = 0.7, the 50 likeliest tokens, of these the fewest that reach a probability of 0.9"),
            "{cut}"
        );
        assert!(cut.contains("text of a truncated teacher: ξ is no posterior noise"), "{cut}");
        assert!(line(json!({"temperature": 0.0})).contains("the teacher's likeliest"));
    }

    #[test]
    fn a_card_of_a_job_that_only_packs() {
        insta::assert_snapshot!(body(&manifest(&serde_json::Value::Null, &json!({}))));
    }

    #[test]
    fn a_card_is_held_to_its_own_checksum() {
        let card = card(&manifest(&serde_json::Value::Null, &json!({})));
        let of = |card: &str| fault(card.as_bytes());
        assert_eq!(of(&card), None);
        assert_eq!(of(&format!("{card}\nMore of it.\n")), None, "below it people write what they like");
        let line = card.rfind(SUM).unwrap();
        assert_eq!(of(&card[..line].replace("sequences", "rows")), None, "an edit that is meant has no checksum");
        for at in [0, line / 3, line - 2] {
            let mut bytes = card.clone().into_bytes();
            bytes[at] ^= 0x10;
            assert!(matches!(fault(&bytes), Some(CardFault::Changed(_))), "{at}");
            bytes[at] = 0xff;
            assert_eq!(fault(&bytes), Some(CardFault::Damaged("is no text")));
        }
        assert_eq!(of(""), Some(CardFault::Damaged("is missing or empty")));
    }

    #[test]
    fn every_column_has_its_meaning() {
        let meanings: BTreeMap<&str, &str> = registry::columns().map(|c| (meaning(c.name), c.name)).collect();
        assert_eq!(meanings.len(), registry::columns().count());
        assert!(!meanings.contains_key(""));
    }

    #[test]
    fn types_and_sizes() {
        assert_eq!(
            ["uint64", "list<uint16>", "fixed_size_list<float32>[512]"].map(dtype),
            ["uint64", "uint16", "float32"]
        );
        assert_eq!([0, 999, 1000, 1_234_567].map(counted), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [999, 1000, 10_000_000, 5_000_000_000].map(size_category),
            ["n<1K", "1K<n<10K", "10M<n<100M", "n>1B"]
        );
    }
}
