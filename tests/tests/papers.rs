//! Runs the job files of the papers' experiments (`jobs/papers`), each on a small input in the layout of the paper's
//! data set. Each is planned, run and verified. pyarrow and numpy check its columns and the paper's particular
//! properties.
//!
//! ```text
//!   jobs/papers/X.yaml ─► models of the assets, small sizes ─► run ─► verify ─► columns, first and last tokens, text
//! ```
//!
//! `images` tests the image data sets, because it creates their inputs.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, corpus, nano_teacher, root, run_command};

/// Creates small folders in the layouts of the papers' data sets. The first text of a zero-shot set shows the effect of
/// its detokenizer, if it has one.
const CREATE_SCRIPT: &str = r#"
import json, os, sys, pyarrow as pa, pyarrow.parquet as pq
texts = [json.loads(line)["text"] for line in open("corpus.jsonl")]
sentences = [s.strip() + " ." for text in texts for s in text.split(".") if s.strip()]
def put(folder, name, column, rows):
    os.makedirs(folder, exist_ok=True)
    pq.write_table(pa.table({column: rows}), f"{folder}/{name}")
put("owt", "train-00000.parquet", "text", texts[:3])
put("owt", "train-00001.parquet", "text", texts[3:])
put("lm1b", "train-00000.parquet", "text", sentences[:12])
put("lm1b", "test-00000.parquet", "text", ["The price ( 5 ) is $ 3 , he said ."] + sentences[:9])
put("ptb", "validation.parquet", "sentence", ["mr. vinken is n't paid $ N million"] + sentences[:9])
put("ptb", "train.parquet", "other", ["not read"])
put("wikitext", "validation.parquet", "text", ["", "3 @.@ 5 miles , ( about )"] + sentences[:9])
put("ag_news", "test.parquet", "text", ["Bears ( Reuters ) , again"] + sentences[:9])
for name in ("pubmed", "arxiv"):
    put(name, "validation.parquet", "article", ["x @.@ 5 ( a ) , said b ."] + sentences[:9])
os.makedirs("lambada")
with open("lambada/lambada_test.jsonl", "w") as out:
    for text in ["  “yes” she said"] + sentences[:9]:
        out.write(json.dumps({"text": text}) + "\n")
"#;

/// Reads each data set: its columns, number of rows, first and last ids, the number of ids 50256 between, and the first
/// row's values.
const READ_SCRIPT: &str = "
import glob, json, sys, numpy as np, pyarrow.parquet as pq, pyarrow as pa
found = {}
for name in sys.argv[1:]:
    tables = [pq.read_table(path) for path in sorted(glob.glob(name + '/data/train-*.parquet'))]
    table = pa.concat_tables(tables)
    ids = table['input_ids'].to_pylist()
    first = {key: table[key][0].as_py() for key in table.column_names if key in ('partition_t', 'partition', 'order', 'block', 'attention_mask', 'subtokens', 'given')}
    found[name] = {'columns': table.column_names, 'rows': len(ids), 'lengths': sorted({len(r) for r in ids}), 'ends': [[r[0], r[-1]] for r in ids],
                   'inside': sum(r[1:-1].count(50256) for r in ids), 'first': first, 'ids': ids[0],
                   'validation': bool(glob.glob(name + '/data/validation-*.parquet'))}
print(json.dumps(found))
";

/// Columns that every data set has.
const COMMON_COLUMNS: [&str; 4] = ["sequence_id", "input_ids", "document_offsets", "document_ids"];
const NOISE_COLUMNS: [&str; 4] = ["logprob", "noise_count", "noise_index", "noise_logprob"];

/// Every job file with the columns that it adds.
fn papers() -> Vec<(String, Vec<&'static str>)> {
    let mut papers: Vec<(String, Vec<&str>)> = vec![
        ("mdlm-table1-lm1b".into(), vec!["attention_mask"]),
        ("mdlm-table2-owt".into(), vec![]),
        ("gumbel-table1-owt-mdlm".into(), NOISE_COLUMNS.into()),
        ("gumbel-table1-owt-bd3lm4".into(), [&NOISE_COLUMNS[..], &["partition", "partition_t"]].concat()),
        ("gumbel-table1-owt-bd3lm16".into(), [&NOISE_COLUMNS[..], &["partition", "partition_t"]].concat()),
        ("gumbel-table1-lm1b".into(), NOISE_COLUMNS.into()),
        ("gumbel-table3-medusa".into(), NOISE_COLUMNS.into()),
        ("gumbel-table4-lm1b-token-kd".into(), vec!["logprob", "topk_index", "topk_logprob"]),
        ("gumbel-table5-lm1b-sequential".into(), vec!["attention_mask", "logprob", "given"]),
        ("prime-table2-owt".into(), vec!["subtokens", "partition", "partition_t"]),
        ("pgm-table1-owt".into(), vec!["partition", "partition_t"]),
        ("pgm-table1-lm1b".into(), vec!["attention_mask", "partition", "partition_t"]),
        ("armd-table1-owt-progressive".into(), vec!["order", "block"]),
        ("armd-table3-owt-strided".into(), vec!["order", "block"]),
        ("armd-table2-lm1b".into(), vec!["attention_mask", "order", "block"]),
    ];
    for set in ZERO_SHOT {
        papers.push((format!("mdlm-table3-{set}"), vec![]));
        papers.push((format!("gumbel-table8-{set}"), NOISE_COLUMNS.into()));
    }
    papers
}

const ZERO_SHOT: [&str; 7] = ["ptb", "wikitext", "lm1b", "lambada", "ag-news", "pubmed", "arxiv"];

/// The expected beginning of a zero-shot set's first row: MDLM's detokenizer applied by hand to the first text of
/// `CREATE_SCRIPT`.
fn begins(set: &str) -> &'static str {
    match set {
        "ptb" => "mr. vinken isn't paid $1 million",
        "wikitext" => "3.5 miles, (about)",
        "lm1b" => "The price (5) is $3, he said.",
        // a line feed, as `inspect` shows it
        "lambada" => "\\n\"yes\" she said",
        "ag-news" => "Bears ( Reuters ) , again",
        _ => "x.5 (a), said b.",
    }
}

/// A WordPiece tokenizer whose pieces are single characters, so that it covers every word. Its special tokens have ids
/// 0 to 4.
fn word_pieces() -> String {
    let letters: Vec<String> = ('a'..='z').chain('0'..='9').chain(".,;:'\"()-$&".chars()).map(String::from).collect();
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned);
    let inner = letters.iter().map(|letter| format!("##{letter}"));
    let vocab: serde_json::Map<String, Value> =
        special.iter().cloned().chain(letters.iter().cloned()).chain(inner).zip((0..).map(Value::from)).collect();
    let added: Vec<Value> = (0..5)
        .map(|id| json!({"id": id, "content": special[id], "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}))
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocab}
    })
    .to_string()
}

/// The text of a job file with models and corpus sizes replaced by small ones. Every text to replace must be present.
fn small(name: &str, models: &str) -> String {
    let mut text = fs::read_to_string(root().join(format!("jobs/papers/{name}.yaml"))).unwrap();
    let first = text.lines().next().unwrap();
    assert!(first.starts_with("# ") && first.contains("Table "), "{name} begins with: {first}");
    assert!(text.contains(&format!("\nname: {name}\n")), "{name}");
    let nano = nano_teacher();
    for (from, to) in [
        ("hf://openai-community/gpt2-large", nano.to_str().unwrap()),
        ("hf://openai-community/gpt2", nano.to_str().unwrap()),
        ("hf://google-bert/bert-base-uncased", models),
        ("last_documents: 100000", "last_documents: 1"),
        ("documents: 30301028", "documents: 5"),
        ("length: 1024", "length: 64"),
        ("length: 128", "length: 32"),
        ("../../demo-out/", ""),
    ] {
        text = text.replace(from, to);
    }
    text
}

/// A single test, so that the data sets are made only once.
#[test]
fn the_papers_job_files_make_their_data_sets() {
    let scratch = Scratch::new();
    scratch.write("corpus.jsonl", &corpus(6, 900));
    fs::create_dir(scratch.path("bert")).unwrap();
    scratch.write("bert/tokenizer.json", &word_pieces());
    let python = |program: &str| {
        let mut command = Command::new(root().join(".venv/bin/python"));
        command.args(["-P", "-c", program]).current_dir(scratch.path(""));
        command
    };
    run_command(&mut python(CREATE_SCRIPT)).expect(0);
    let names: Vec<String> = papers().into_iter().map(|(name, _)| name).collect();
    for name in &names {
        scratch.write("paper.yaml", &small(name, scratch.path("bert").to_str().unwrap()));
        for verb in [&["run", "paper.yaml", "--quiet"][..], &["verify", name]] {
            let mut command = scratch.command(verb);
            for set in ["owt", "lm1b", "ptb", "wikitext", "lambada", "ag_news", "pubmed", "arxiv"] {
                command.env(set.to_uppercase(), scratch.path(set));
            }
            let done = run_command(&mut command);
            assert_eq!(done.code, Some(0), "{name}, {}:\n{}\n{}", verb[0], done.stdout, done.stderr);
        }
    }
    let found = run_command(python(READ_SCRIPT).args(&names)).expect(0).json();
    columns(&found);
    ends(&found);
    detokenized(&scratch);
    particulars(&found);
}

#[test]
fn every_job_file_of_a_paper_is_run_by_a_test() {
    let entries = fs::read_dir(root().join("jobs/papers")).unwrap();
    let there: BTreeSet<String> =
        entries.map(|e| e.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    let images = ["prime-table3-cifar10", "prime-table4-imagenet32", "pgm-table8-imagenet256-codes"];
    let run: BTreeSet<String> = papers().into_iter().map(|(name, _)| name).chain(images.map(str::to_owned)).collect();
    assert_eq!(there, run);
    let page = fs::read_to_string(root().join("docs/papers.md")).unwrap();
    for name in there {
        // the seven zero-shot sets share a line
        let line = ZERO_SHOT.iter().find_map(|set| name.strip_suffix(set).filter(|rest| rest.ends_with('-')));
        let line = line.filter(|line| line.contains("table3") || line.contains("table8")).unwrap_or(&name);
        assert!(page.contains(line), "{line} is not in docs/papers.md");
    }
}

fn columns(found: &Value) {
    for (name, more) in papers() {
        let set = &found[&name];
        let columns: BTreeSet<&str> = set["columns"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
        assert_eq!(columns, COMMON_COLUMNS.into_iter().chain(more).collect(), "{name}");
        let length =
            if name.contains("lm1b") && !name.contains("table3-") && !name.contains("table8-") { 32 } else { 64 };
        assert_eq!(set["lengths"], json!([length]), "{name}");
        assert_eq!(set["validation"], name.contains("owt") || name.contains("medusa"), "{name}");
    }
}

fn ends(found: &Value) {
    for (name, _) in papers() {
        let set = &found[&name];
        let ends: BTreeSet<(u64, u64)> = set["ends"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair[0].as_u64().unwrap(), pair[1].as_u64().unwrap()))
            .collect();
        let inside = set["inside"].as_u64().unwrap();
        if name.starts_with("armd-table1") || name.starts_with("armd-table3") || name.contains("bd3lm") {
            assert!(ends.iter().any(|&(first, _)| first != 50256) && inside > 0, "{name}: {ends:?}");
        } else if name.contains("sequential") {
            assert!(ends.iter().all(|&(first, _)| first == 50256), "{name}: {ends:?}");
            assert_eq!(set["rows"], 5);
        } else if set["first"].get("attention_mask").is_some() {
            assert!(ends.iter().all(|&(first, last)| first == 2 && (last == 3 || last == 0)), "{name}: {ends:?}");
        } else {
            assert_eq!(ends, BTreeSet::from([(50256, 50256)]), "{name}");
            assert_eq!(inside == 0, name.starts_with("gumbel-table8"), "{name}: {inside} eos inside");
        }
    }
}

fn detokenized(scratch: &Scratch) {
    for name in ["mdlm-table3", "gumbel-table8"] {
        for set in ZERO_SHOT {
            let row = scratch.stillhouse(&["inspect", &format!("{name}-{set}"), "--json"]).expect(0).json();
            let texts = row["row"]["tokens"].as_array().unwrap().iter().skip(1).map(|t| t["text"].as_str().unwrap());
            let text: String = texts.collect();
            // in WikiText an empty text becomes a separate eos
            let text = text.strip_prefix("<|endoftext|>").unwrap_or(&text);
            assert!(text.starts_with(begins(set)), "{name}-{set}: {text:?}");
        }
    }
}

fn particulars(found: &Value) {
    let first = |name: &str, column: &str| -> Vec<f64> {
        let values = found[name]["first"][column].as_array().unwrap();
        values.iter().map(|v| v.as_f64().or_else(|| v.as_bool().map(f64::from)).unwrap()).collect()
    };
    // BD3-LM: one time per block in each of two views
    assert_eq!(first("gumbel-table1-owt-bd3lm4", "partition_t").len(), 2 * 64 / 4);
    assert_eq!(first("gumbel-table1-owt-bd3lm16", "partition_t").len(), 2 * 64 / 16);
    // Prime: four digits in base 15, each with a group
    let (ids, digits) = (&found["prime-table2-owt"]["ids"], first("prime-table2-owt", "subtokens"));
    assert_eq!(first("prime-table2-owt", "partition").len(), 4 * 64);
    for (id, d) in ids.as_array().unwrap().iter().zip(digits.chunks(4)) {
        assert_eq!(id.as_f64().unwrap(), d.iter().fold(0.0, |n, digit| 15.0 * n + digit));
    }
    assert_eq!(first("pgm-table1-owt", "partition").len(), 2 * 64);
    // ARMD: no shuffling before step 9,000; S is 1, 2 or 4; ρ = 8 moves at most 8 positions
    let order = first("armd-table1-owt-progressive", "order");
    assert!(order.iter().enumerate().all(|(n, &position)| position == n as f64), "{order:?}");
    let order = first("armd-table3-owt-strided", "order");
    assert!([1.0, 16.0, 32.0].contains(&order[1]), "{order:?}");
    let (order, mask) = (first("armd-table2-lm1b", "order"), first("armd-table2-lm1b", "attention_mask"));
    let moved = order.iter().enumerate().filter(|(n, position)| **position != *n as f64).count();
    assert!((2..=8).contains(&moved), "{order:?}");
    assert!(order.iter().enumerate().all(|(n, &position)| mask[n] == 1.0 || position == n as f64), "{order:?}");
}
