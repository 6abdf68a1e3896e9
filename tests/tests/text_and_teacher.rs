//! Proves that a data set's statements about its teacher and text are true: weights, tokenizer, special tokens in
//! documents, cleaned text.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, nano_job, nano_teacher, root, shards, with, with_manifest};

use crate::python::check;

/// Copies a folder's files and edits one JSON file among them.
fn edited(from: &Path, to: &Path, file: &str, edit: impl Fn(&mut Value)) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let mut json: Value = serde_json::from_slice(&fs::read(to.join(file)).unwrap()).unwrap();
    edit(&mut json);
    fs::write(to.join(file), json.to_string()).unwrap();
}

/// A tokenizer with the words `w4`, `w5`, … after the special tokens `<unk>`, `<s>`, `</s>`, `<pad>`.
fn words(count: usize) -> Value {
    let specials = ["<unk>", "<s>", "</s>", "<pad>"];
    let name = |id: usize| specials.get(id).map_or_else(|| format!("w{id}"), |s| (*s).to_owned());
    let vocabulary: serde_json::Map<String, Value> = (0..count).map(|id| (name(id), json!(id))).collect();
    let added: Vec<Value> = (0..4)
        .map(|id| {
            json!({"id": id, "content": name(id), "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    })
}

/// A scratch folder with `teacher`: three small layers, V = 199, and its own tokenizer of `count` words.
fn small_teacher(count: usize) -> Scratch {
    let scratch = Scratch::new();
    let config = |json: &mut Value| json["pad_token_id"] = json!(3);
    edited(&root().join("operators/teacher/testdata/llama-gqa"), &scratch.path("teacher"), "config.json", config);
    scratch.write("teacher/tokenizer.json", &words(count).to_string());
    let text: Vec<String> = (0..200).map(|i| format!("w{}", 4 + i * i % (count - 4))).collect();
    scratch.write("corpus.jsonl", &json!({"text": text.join(" ")}).to_string());
    scratch
}

fn small_job(patch: &Value) -> Value {
    let small = json!({"pack": {"length": 24}, "extract": {"teacher": {"path": "teacher"}, "topk": 199}, "subtokens": {"length": 3}});
    with(with(job(), &small), patch)
}

#[test]
fn weights_that_the_configuration_does_not_describe_are_refused_before_the_work() {
    let scratch = Scratch::with_corpus(1, 2000);
    let teacher = scratch.path("teacher");
    let layers = |said: u64| edited(&nano_teacher(), &teacher, "config.json", |json| json["n_layer"] = json!(said));
    scratch.job("job.yaml", &with(job(), &json!({"extract": {"teacher": {"path": "teacher"}}})));
    for (said, verb) in [(1, "plan"), (3, "plan"), (3, "run")] {
        layers(said);
        scratch.stillhouse(&[verb, "job.yaml"]).expect(2).says(&[
            "extract.teacher.path",
            "model.safetensors",
            "tensors are not part of the model that the configuration describes",
            &format!("n_layer {said}"),
            &format!("h.{said}.attn.c_attn.bias"),
        ]);
    }
    layers(5);
    scratch.stillhouse(&["plan", "job.yaml"]).expect(2).says(&[
        "extract.teacher.path",
        "h.4.ln_1.weight",
        "is missing",
    ]);
    assert!(!scratch.path("out").exists());
    layers(4);
    scratch.stillhouse(&["plan", "job.yaml"]).expect(0);
}

#[test]
fn a_tokenizer_is_the_teachers_own_or_the_job_says_that_it_is_not() {
    let scratch = small_teacher(199);
    scratch.write("same.json", &with(words(199), &json!({"normalizer": {"type": "NFC"}})).to_string());
    // of equal size, but with two words swapped
    let swapped = json!({"model": {"vocab": {"w17": 18, "w18": 17}}});
    scratch.write("other.json", &with(words(199), &swapped).to_string());
    scratch.write("longer.json", &words(200).to_string());
    scratch.write("shorter.json", &words(190).to_string());
    let named =
        |file: &str| small_job(&json!({"tokenizer": {"path": file}, "output": {"path": file.replace(".json", "")}}));

    scratch.make(&named("same.json"));
    scratch.job("job.yaml", &named("other.json"));
    for verb in ["plan", "run"] {
        scratch.stillhouse(&[verb, "job.yaml"]).expect(2).says(&[
            "tokenizer.path",
            r#"is not the teacher's own tokenizer: id 17 is "w18", the teacher's "w17"; id 18 is "w17""#,
            "tokenizer.differs_from_teacher: allow",
        ]);
    }
    let allowed = json!({"tokenizer": {"differs_from_teacher": "allow"}});
    let manifest = scratch.make(&with(named("other.json"), &allowed)).join("manifest.json");
    let manifest: Value = serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap();
    assert_eq!(manifest["job"]["tokenizer"]["differs_from_teacher"], "allow");
    // an id without a row in the vocabulary is refused even with `allow`
    scratch.job("job.yaml", &with(named("longer.json"), &allowed));
    scratch
        .stillhouse(&["plan", "job.yaml"])
        .expect(2)
        .says(&[r#"id 199 ("w199") has no row in the teacher's vocabulary of 199"#]);
    scratch.job("job.yaml", &named("shorter.json"));
    scratch
        .stillhouse(&["plan", "job.yaml"])
        .expect(2)
        .says(&[r#"id 190 is nothing, the teacher's "w190""#, "6 more ids"]);

    // Without the teacher's tokenizer, an equal size is accepted; another size needs `allow`.
    fs::remove_file(scratch.path("teacher/tokenizer.json")).unwrap();
    scratch.job("job.yaml", &named("same.json"));
    scratch.stillhouse(&["plan", "job.yaml"]).expect(0);
    scratch.job("job.yaml", &named("shorter.json"));
    scratch
        .stillhouse(&["plan", "job.yaml"])
        .expect(2)
        .says(&["has 190 tokens, the teacher's vocabulary 199", "allow"]);
    scratch.job("job.yaml", &with(named("shorter.json"), &allowed));
    scratch.stillhouse(&["plan", "job.yaml"]).expect(0);
}

#[test]
fn a_vocabulary_is_padded_by_any_amount() {
    // 199 rows, an amount of padding that follows no rule
    for count in [198, 131, 30] {
        let scratch = small_teacher(count);
        let dataset = scratch.make(&small_job(&json!({})));
        scratch.stillhouse(&["verify", "out", "--teacher"]).expect(0);
        let manifest: Value = serde_json::from_slice(&fs::read(dataset.join("manifest.json")).unwrap()).unwrap();
        assert_eq!((&manifest["vocab_size"], &manifest["tokenizer"]["vocab_size"]), (&json!(199), &json!(count)));
        check(&dataset, &["--tokens", "50"]);
    }
}

/// Proves that signals besides noise and top-k are made, verified against the teacher, shown, and reproducible.
#[test]
fn other_signals_of_a_teacher_are_columns() {
    let scratch = small_teacher(199);
    let signals = json!({
        "logz_temperatures": [1.0, 2.5], "entropy": true, "candidates": [5, 198], "samples": {"draws": 30, "power": 0.8},
        "top_p": {"mass": 0.5, "most": 60}, "hidden_states": {"layers": [3, 0]}
    });
    for (out, more) in [("out", json!({})), ("again", json!({})), ("alone", json!({"noise": null}))] {
        let patch = json!({"extract": with(signals.clone(), &more), "output": {"path": out}});
        let job = small_job(&patch);
        let dataset = scratch.make(&job);
        scratch.stillhouse(&["verify", out, "--teacher"]).expect(0);
        check(&dataset, &["--tokens", "50"]);
    }
    let shard = "data/train-00000-of-00001.parquet";
    let bytes = |out: &str| fs::read(scratch.path(out).join(shard)).unwrap();
    assert!(bytes("out") == bytes("again"), "two runs differ");
    let shown = scratch.stillhouse(&["inspect", "out", "--row", "0"]).expect(0).stdout;
    for part in [
        "mean entropy",
        "equally likely tokens",
        "ln Σ exp(l/2.5)",
        "candidate 198",
        "30 draws",
        "top-p",
        "state of layer 3",
    ] {
        assert!(shown.contains(part), "{part:?} is not in:\n{shown}");
    }
    let manifest: Value = serde_json::from_slice(&fs::read(scratch.path("out/manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["job"]["extract"]["samples"], json!({"draws": 30, "power": 0.8}));
}

/// Proves that hidden states alone are stored in both precisions, that a lost shard is repaired, and that derived data
/// sets keep them.
#[test]
fn hidden_states_are_kept_repaired_and_taken_along() {
    let scratch = small_teacher(199);
    let noise = json!({"tolerance": 1e-3, "precision": "f32"});
    let of = |precision: &str, out: &str| {
        let states = json!({"layers": [2, 3], "precision": precision});
        let job = small_job(&json!({"extract": {"hidden_states": states, "noise": noise}, "output": {"path": out}}));
        let dataset = scratch.make(&job);
        scratch.stillhouse(&["verify", out, "--teacher"]).expect(0);
        check(&dataset, &["--tokens", "50"]);
        shards(&dataset)
    };
    let (half, single) = (of("f16", "half"), of("f32", "out"));
    assert_ne!(half, single);
    let columns = scratch.stillhouse(&["inspect", "out", "--json"]).expect(0).json()["columns"].to_string();
    assert!(columns.contains("[24,2,48]"), "{columns}");
    let lost = scratch.path("out/data").join(single.keys().next().unwrap());
    fs::remove_file(&lost).unwrap();
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&scratch.path("out")), single);
    let looser = json!({"version": 1, "name": "looser", "extract": {"noise": {"tolerance": 1e-2}}, "output": {"path": "looser"}});
    scratch.job("looser.yaml", &looser);
    scratch.stillhouse(&["derive", "out", "looser.yaml"]).expect(0);
    scratch.stillhouse(&["verify", "looser", "--teacher"]).expect(0);
    let shown = scratch.stillhouse(&["inspect", "looser", "--row", "0"]).expect(0).stdout;
    assert!(shown.contains("hidden states") && shown.contains("2 of width 48"), "{shown}");
}

#[test]
fn signals_that_cannot_be_had_are_refused_when_planned() {
    let scratch = small_teacher(199);
    let refused = |patch: Value, says: &[&str]| {
        scratch.job("job.yaml", &small_job(&json!({"extract": patch})));
        scratch.stillhouse(&["plan", "job.yaml"]).expect(2).says(says);
    };
    refused(json!({"candidates": [5, 199]}), &["extract.candidates[1]", "199", "below 199"]);
    refused(json!({"candidates": [5, 5]}), &["extract.candidates[1]", "is a duplicate"]);
    refused(json!({"logz_temperatures": [0.0]}), &["extract.logz_temperatures[0]"]);
    refused(json!({"samples": {"draws": 0}}), &["extract.samples.draws"]);
    refused(json!({"samples": {"draws": 9, "power": 3}}), &["extract.samples.power"]);
    refused(json!({"top_p": {"mass": 0, "most": 4}}), &["extract.top_p.mass"]);
    refused(json!({"top_p": {"mass": 0.9, "most": 0}}), &["extract.top_p.most"]);
    refused(json!({"hidden_states": {"layers": [3, 4]}}), &["extract.hidden_states.layers[1]", "4", "0 to 3"]);
    refused(json!({"hidden_states": {"layers": [3, 3]}}), &["extract.hidden_states.layers[1]", "is a duplicate"]);
    refused(json!({"hidden_states": {"layers": []}}), &["extract.hidden_states.layers"]);
    refused(json!({"hidden_states": {"layers": [1], "precision": "bf16"}}), &["extract.hidden_states.precision"]);
}

/// The ids, and the documents' offsets and records, of the first row.
fn first_row(scratch: &Scratch, out: &str) -> (Vec<u64>, Vec<(u64, u64)>) {
    let row = scratch.stillhouse(&["inspect", out, "--row", "0", "--json"]).expect(0).json();
    let row = if row["row"].is_object() { row["row"].clone() } else { row };
    let ids = row["tokens"].as_array().unwrap().iter().map(|t| t["id"].as_u64().unwrap()).collect();
    let number = |d: &Value, key: &str| d[key].as_u64().unwrap();
    let documents = row["documents"].as_array().unwrap().iter();
    (ids, documents.map(|d| (number(d, "offset"), number(d, "record"))).collect())
}

#[test]
fn special_tokens_in_a_document_are_text_or_known_to_the_offsets() {
    let scratch = Scratch::new();
    let eos = "<|endoftext|>";
    let texts = [format!("One{eos}two {eos}"), eos.to_owned(), "three".into(), format!("{eos}four{eos}{eos}five")];
    let corpus: Vec<String> = texts.iter().map(|text| json!({"text": text}).to_string()).collect();
    scratch.write("corpus.jsonl", &corpus.join("\n"));
    let make = |mode: Option<&str>, out: &str| {
        let patch = json!({
            "tokenizer": {"special_tokens": mode}, "pack": {"length": 20, "boundary": "none", "remainder": "keep"},
            "extract": {"context": "document", "topk": 50_257}, "output": {"path": out}
        });
        let dataset = scratch.make(&with(nano_job(), &patch));
        scratch.stillhouse(&["verify", out, "--teacher"]).expect(0);
        check(&dataset, &["--tokens", "4"]);
        first_row(&scratch, out)
    };
    // 27 91 437 1659 5239 91 29 are < | end of text | >
    let (ids, documents) = make(None, "text");
    assert_eq!(ids[..9], [3198, 27, 91, 437, 1659, 5239, 91, 29, 11545]);
    assert_eq!(ids.iter().filter(|&&id| id == 50256).count(), 1, "{ids:?}");
    assert_eq!(documents, [(0, 0), (17, 1)]);
    let (ids, documents) = make(Some("parse"), "parse");
    let e = 50256;
    assert_eq!(ids, [3198, e, 11545, 220, e, e, e, e, 15542, e, e, 14337, e, e, 13261, e]);
    // The separator that `pack` adds belongs to the last segment. A document's segments have its record number.
    assert_eq!(documents, [(0, 0), (2, 0), (6, 1), (8, 2), (10, 3), (11, 3), (13, 3), (14, 3)]);
}

#[test]
fn a_token_that_a_model_makes_of_text_is_refused_with_the_document() {
    let scratch = small_teacher(199);
    scratch.write("corpus.jsonl", "{\"text\": \"w5 w6\"}\n{\"text\": \"w7 </s> w8\"}\n");
    scratch.job("job.yaml", &small_job(&json!({})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(1).says(&[
        "document 1",
        r#"special token "</s>" (id 2)"#,
        "special_tokens: parse",
    ]);
    let parse = json!({"tokenizer": {"special_tokens": "parse"}, "pack": {"remainder": "keep"}});
    let dataset = scratch.make(&small_job(&with(parse, &json!({"output": {"path": "parsed"}}))));
    scratch.stillhouse(&["verify", "parsed"]).expect(0);
    check(&dataset, &["--tokens", "50"]);
}

#[test]
fn the_size_of_a_piece_changes_no_byte_of_cleaned_text() {
    let scratch = Scratch::new();
    let line = "the \\\" quick \\\" brown ( fox ) \\n jumps , over N N N dogs ' s \\n ";
    let text = line.repeat(1_400_000 / line.len());
    scratch.write("corpus.jsonl", &format!("{{\"text\": \"{text}\"}}\n"));
    let tokenizer = nano_teacher().join("tokenizer.json");
    let made = [4, 1000, 65_536].map(|kilobytes| {
        let plain = json!({
            "version": 1, "name": "clean", "input": {"format": "jsonl", "paths": ["corpus.jsonl"], "piece_kilobytes": kilobytes},
            "clean": {"detokenizer": "ptb"}, "tokenizer": {"path": tokenizer}, "pack": {"length": 512},
            "output": {"path": format!("out-{kilobytes}")}
        });
        shards(&scratch.make(&plain))
    });
    assert!(!made[0].is_empty() && made.iter().all(|shards| *shards == made[0]), "{made:?}");
}

#[test]
fn texts_are_scored_alike_in_any_format() {
    let scratch = Scratch::with_corpus(2, 1500);
    let teacher = nano_teacher().display().to_string();
    let lines = fs::read_to_string(scratch.path("corpus.jsonl")).unwrap();
    let texts: Vec<String> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["text"].as_str().unwrap().replace(['\n', '"'], " "))
        .collect();
    scratch.write("corpus.txt", &texts.join("\n"));
    scratch.write("again.jsonl", &texts.iter().map(|t| json!({"text": t}).to_string()).collect::<Vec<_>>().join("\n"));
    scratch.write(
        "corpus.csv",
        &format!("text\n{}", texts.iter().map(|t| format!("\"{t}\"")).collect::<Vec<_>>().join("\n")),
    );
    let score = |file: &str| {
        let said = scratch.stillhouse(&["score", file, "--teacher", &teacher, "--per-text", "texts.json", "--json"]);
        (said.expect(0).json(), fs::read_to_string(scratch.path("texts.json")).unwrap())
    };
    let (scores, each) = score("again.jsonl");
    assert_eq!((scores["texts"].as_u64(), each.lines().count()), (Some(2), 2));
    assert!(scores["perplexity"].as_f64().unwrap() > 1.0 && scores["text_perplexity"]["standard_error"].is_number());
    for file in ["corpus.txt", "corpus.csv"] {
        assert_eq!(score(file), (scores.clone(), each.clone()), "{file}");
    }
    // scoring writes nothing: a file or folder of any name is no obstacle, and can be the input
    scratch.write("score", "no folder");
    assert_eq!(score("again.jsonl"), (scores.clone(), each.clone()));
    fs::remove_file(scratch.path("score")).unwrap();
    fs::create_dir(scratch.path("score")).unwrap();
    scratch.write("score/again.jsonl", &fs::read_to_string(scratch.path("again.jsonl")).unwrap());
    for file in ["score/again.jsonl", "score/**/*.jsonl"] {
        assert_eq!(score(file), (scores.clone(), each.clone()), "{file}");
    }
    let said =
        scratch.stillhouse(&["score", "corpus.txt", "--teacher", &teacher, "--reference", "again.jsonl"]).expect(0);
    // compared with the same texts: each cluster holds both copies
    assert!(said.stdout.contains("MAUVE") && said.stdout.contains("1.0000"), "{}", said.stdout);
    assert!(!said.stdout.contains('\u{1b}'), "colours in a pipe");
    scratch.stillhouse(&["score", "corpus.txt"]).expect(2).says(&["--teacher"]);
    scratch.stillhouse(&["score", "corpus.bin", "--teacher", &teacher]).expect(2).says(&["--format"]);
    // the default stride is half of the window
    let scored =
        scratch.stillhouse(&["score", "corpus.txt", "--teacher", &teacher, "--window-tokens", "128", "--json"]);
    let scored = scored.expect(0).json();
    assert_eq!((&scored["window_tokens"], &scored["stride_tokens"]), (&json!(128), &json!(64)));
    scratch
        .stillhouse(&["score", "corpus.txt", "--teacher", &teacher, "--stride-tokens", "4000"])
        .expect(2)
        .says(&["--stride-tokens"]);
}

#[test]
fn what_storing_costs_stands_beside_what_arithmetic_costs() {
    let scratch = Scratch::with_corpus(2, 1500);
    let dataset = scratch.make(&with(job(), &json!({"extract": {"noise": {"tolerance": 1e-3}}})));
    let verify = ["verify", dataset.to_str().unwrap(), "--teacher", "--report", "faithful"];
    scratch.stillhouse(&verify).expect(0).says(&[]);
    let report: Value = serde_json::from_slice(&fs::read(scratch.path("faithful.json")).unwrap()).unwrap();
    let [stored, batch, arithmetic] = report["comparisons"].as_array().unwrap().as_slice() else { panic!("{report}") };
    let of = |comparison: &Value, what: &str, value: &str| comparison[what][value].as_f64().unwrap();
    // On a CPU a sequence gives the same result in any batch. Stored values are within their tolerance. bf16 gives
    // other values.
    assert_eq!((of(batch, "total_variation", "max"), of(batch, "kl_nats", "max")), (0.0, 0.0));
    assert!(of(batch, "total_variation", "count") > 100.0);
    assert!(
        (1e-5..=1e-3).contains(&of(stored, "total_variation", "max"))
            && of(stored, "logprob_change_nats", "max") < 1e-5
    );
    assert!(of(arithmetic, "kl_nats", "mean") > 1e-9 && of(arithmetic, "logprob_change_nats", "max") > 1e-4);
    let page = fs::read_to_string(scratch.path("faithful.html")).unwrap();
    assert!(page.contains("<svg") && page.ends_with("</html>\n"));
    assert_eq!((&report["computed_alike"], &report["arithmetic"]), (&json!(true), &report["stored_arithmetic"]));
    // If another machine made it, stored values differ for two reasons, and the report names both.
    with_manifest(&dataset, |manifest| manifest["teacher"]["arithmetic"] = json!("bf16 of another machine"));
    scratch.stillhouse(&verify).expect(0);
    let elsewhere: Value = serde_json::from_slice(&fs::read(scratch.path("faithful.json")).unwrap()).unwrap();
    assert_eq!(elsewhere["computed_alike"], false);
    assert_eq!(elsewhere["stored_arithmetic"], "bf16 of another machine on cpu");
    assert_eq!(elsewhere["arithmetic"], report["arithmetic"]);
    assert_eq!(elsewhere["comparisons"][0]["what"], "stored, and this machine's arithmetic");
    let page = fs::read_to_string(scratch.path("faithful.html")).unwrap();
    let both = ["stored, and this machine", "bf16 of another machine on cpu", report["arithmetic"].as_str().unwrap()];
    both.iter().for_each(|part| assert!(page.contains(part), "{part}"));
    scratch.stillhouse(&["verify", dataset.to_str().unwrap(), "--report", "x"]).expect(2).says(&["--teacher"]);
}

/// Proves that data sets made with int8 on CPUs, which was removed, stay readable, and that computing in it is refused.
#[test]
fn a_data_set_of_a_type_that_is_gone_is_read_and_not_made() {
    let scratch = Scratch::with_corpus(2, 400);
    let job = with(job(), &json!({"output": {"path": "out"}}));
    scratch.make(&job);
    with_manifest(&scratch.path("out"), |manifest| {
        manifest["job"]["extract"]["teacher"]["dtype"] = json!("int8");
        manifest["teacher"]["dtype"] = json!("int8");
    });
    scratch.stillhouse(&["inspect", "out"]).expect(0);
    scratch.stillhouse(&["verify", "out"]).expect(0);
    scratch.stillhouse(&["export", "out", "copy"]).expect(0);
    let views =
        json!({"version": 1, "name": "views", "orders": {"kind": "random", "steps": 4}, "output": {"path": "views"}});
    scratch.job("views.yaml", &views);
    scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
    scratch.stillhouse(&["verify", "views"]).expect(0);
    let manifest: Value = serde_json::from_slice(&fs::read(scratch.path("views/manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["job"]["extract"]["teacher"]["dtype"], "int8");
    let gone = ["extract.teacher.dtype", "int8, which this version does not compute"];
    scratch.stillhouse(&["verify", "out", "--teacher"]).expect(1).says(&gone);
    scratch
        .job("int8.yaml", &with(job, &json!({"extract": {"teacher": {"dtype": "int8"}}, "output": {"path": "new"}})));
    let valid =
        ["extract.teacher.dtype: got \"int8\"", "valid: \"f32\", \"bf16\", \"f16\", \"bf16x3\", \"fp8\", \"auto\""];
    scratch.stillhouse(&["run", "int8.yaml"]).expect(2).says(&valid);
    scratch.stillhouse(&["repair", "out", "int8.yaml"]).expect(2).says(&valid);
    assert!(!scratch.path("new").exists());
    // nothing repairs it, so `verify` does not say that `repair` would
    let shard = fs::read_dir(scratch.path("out/data")).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(shard).unwrap();
    let verified = scratch.stillhouse(&["verify", "out"]).expect(1);
    let shown = verified.stdout;
    assert!(shown.contains("--overwrite, with another extract.teacher.dtype than int8"), "{shown}");
    assert!(!shown.contains("stillhouse repair"), "{shown}");
}
