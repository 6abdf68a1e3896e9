//! Text that the teacher writes, end to end: from a job without a corpus, or with prompts, to shards, and what is found in them.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, nano_teacher, shards, with};

use crate::python::check;

/// 40 texts of at most 24 tokens, 6 of them held out.
fn job() -> Value {
    json!({
        "version": 1, "name": "written", "seed": 42,
        "input": {"format": "none", "documents": 40, "holdout": {"validation": {"last_documents": 6}}},
        "pack": {"mode": "pad", "length": 24},
        "extract": {"teacher": {"path": nano_teacher(), "device": "cpu"}, "mode": "sequential"},
        "output": {"path": "out"}
    })
}

/// Tokens of a row, padding left out.
fn tokens(scratch: &Scratch, row: usize) -> Vec<u64> {
    let shown = scratch.stillhouse(&["inspect", "out", "--row", &row.to_string(), "--json"]).expect(0).json();
    let tokens = shown["row"]["tokens"].as_array().unwrap().clone();
    tokens.iter().filter(|t| t["valid"] == true).map(|t| t["id"].as_u64().unwrap()).collect()
}

/// What stands beside a row of its noise, of its only shown position.
fn shown_noise(scratch: &Scratch, position: usize) -> Value {
    let arguments = ["inspect", "out", "--row", "3", "--position", &position.to_string(), "--json"];
    scratch.stillhouse(&arguments).expect(0).json()["row"]["blueprints"][0].clone()
}

#[test]
fn text_is_the_same_whatever_writes_it() {
    let scratch = Scratch::new();
    let dataset = scratch.make(&with(job(), &json!({"subtokens": {"length": 4}, "partitions": {"views": 2}})));
    let made = shards(&dataset);
    assert_eq!(made.len(), 2);
    let ran = scratch.stillhouse(&["verify", "out", "--teacher", "--json"]).expect(0).json();
    let [noises, won] = ["noises", "argmax_hits"].map(|count| ran["teacher"][count].as_u64().unwrap());
    assert!(noises > 500 && noises == won && ran["teacher"]["written"] == true, "{ran}");
    let said = scratch.stillhouse(&["verify", "out", "--teacher"]).expect(0).stdout;
    assert!(said.contains("written tokens, ξ replayed from the seed"), "{said}");
    // nothing of the noise is stored, and it is shown all the same
    assert!(shown_noise(&scratch, 5)["xi"].as_f64().is_some());
    let card = fs::read_to_string(dataset.join("README.md")).unwrap();
    assert!(card.contains("The text was written by the teacher after bos") && card.contains("| `given` |"), "{card}");
    let first: Vec<_> = (0..10).map(|row| tokens(&scratch, row)).collect();

    // other threads and slots: the same bytes, and the same job
    scratch.job(
        "job.yaml",
        &with(
            job(),
            &json!({"subtokens": {"length": 4}, "partitions": {"views": 2}, "extract": {"sequential": {"slots": 3}}}),
        ),
    );
    let again = scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert!((again.stdout + &again.stderr).contains("was complete already"), "slots are no part of the job's hash");
    for (threads, slots) in [("1", 1), ("2", 64)] {
        fs::remove_dir_all(&dataset).unwrap();
        let extract = json!({"subtokens": {"length": 4}, "partitions": {"views": 2}, "extract": {"sequential": {"slots": slots}}});
        scratch.job("job.yaml", &with(job(), &extract));
        let mut command = scratch.command(&["run", "job.yaml", "--quiet"]);
        stillhouse_tests::ran(command.env("RAYON_NUM_THREADS", threads)).expect(0);
        assert_eq!(shards(&dataset), made, "{threads} threads, {slots} slots");
    }
    // a shard that is lost is written again to the same bytes
    let name = made.keys().next().unwrap();
    fs::remove_file(dataset.join("data").join(name)).unwrap();
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&dataset), made);
    // other splits: where the sequence's number is the same, so is the text
    fs::remove_dir_all(&dataset).unwrap();
    scratch.make(&with(job(), &json!({"input": {"split_megabytes": 0.001}})));
    assert!(shards(&dataset).len() > 3, "{:?}", shards(&dataset));
    assert_eq!((0..5).map(|row| tokens(&scratch, row)).collect::<Vec<_>>(), first[..5]);
}

#[test]
fn the_file_alone_proves_every_token_to_another_program() {
    let plain = json!({});
    let cut = json!({"temperature": 0.8, "top_k": 40, "top_p": 0.9, "stop": "length"});
    for (written, documents) in [(plain, 4), (cut, 3), (json!({"temperature": 0.0}), 1)] {
        let scratch = Scratch::new();
        let small = json!({
            "input": {"documents": documents, "holdout": null}, "pack": {"length": 16},
            "extract": {"sequential": written, "topk": 50_257}
        });
        let counted = check(&scratch.make(&with(job(), &small)), &["--tokens", "1000"]);
        assert!(counted["noises"].as_u64().unwrap() >= documents * 14, "{counted}");
    }
}

#[test]
fn prompts_come_from_the_corpus() {
    let scratch = Scratch::with_corpus(3, 500);
    let prompted = with(
        job(),
        &json!({"input": {"format": "jsonl", "paths": ["corpus.jsonl"], "documents": null, "holdout": null},
                "extract": {"sequential": {"prompt_tokens": 7, "temperature": 0.7, "top_p": 0.9}}}),
    );
    let plan = {
        scratch.job("job.yaml", &prompted);
        scratch.stillhouse(&["plan", "job.yaml", "--sample", "2", "--json"]).expect(0).json()
    };
    assert_eq!(plan["slots"]["slots"], 16);
    assert!(plan["slots"]["bytes"].as_u64().unwrap() > 16 * 24 * 4 * 64);
    let dataset = scratch.make(&prompted);
    let stored = scratch.stillhouse(&["inspect", "out", "--row", "1", "--json"]).expect(0).json();
    assert_eq!(plan["sample"]["rows"][1], stored["row"]);
    let facts = stored["row"]["operators"].as_array().unwrap().iter().find(|o| o["operator"] == "generate").unwrap();
    assert_eq!(facts["facts"][0], json!(["given", "8"]));
    // what was given is the document's
    let packed = Scratch::with_corpus(3, 500);
    packed.make(&with(
        job(),
        &json!({
            "input": {"format": "jsonl", "paths": ["corpus.jsonl"], "documents": null, "holdout": null},
            "extract": null, "tokenizer": {"path": nano_teacher()}
        }),
    ));
    assert_eq!(tokens(&scratch, 1)[..8], tokens(&packed, 1)[..8]);
    assert_ne!(tokens(&scratch, 1), tokens(&packed, 1));
    scratch.stillhouse(&["verify", "out", "--teacher"]).expect(0);
    let card = fs::read_to_string(dataset.join("README.md")).unwrap();
    assert!(card.contains("text of a truncated teacher") && card.contains("after the first 7 tokens"), "{card}");
}

/// All that a teacher says of a token beside its log-probability.
fn signals() -> Value {
    json!({
        "logz_temperatures": [1.0, 2.0], "entropy": true, "candidates": [11, 13], "samples": {"draws": 20, "power": 0.9},
        "top_p": {"mass": 0.6, "most": 40}, "hidden_states": {"layers": [4, 1]}
    })
}

/// Signals and hidden states while the teacher writes after prompts: the same bytes in any number of slots, found again by the pass of
/// `verify`, shown, and missed where they are not the teacher's.
#[test]
fn signals_are_kept_while_the_teacher_writes() {
    let scratch = Scratch::with_corpus(3, 500);
    let of = |slots: u32| {
        let written = json!({"prompt_tokens": 7, "temperature": 0.7, "top_k": 50, "slots": slots});
        let input = json!({"format": "jsonl", "paths": ["corpus.jsonl"], "documents": null, "holdout": null});
        with(job(), &json!({"input": input, "extract": with(signals(), &json!({"sequential": written}))}))
    };
    scratch.job("job.yaml", &of(16));
    let plan = scratch.stillhouse(&["plan", "job.yaml", "--sample", "2", "--json"]).expect(0).json();
    let dataset = scratch.make(&of(16));
    let stored = scratch.stillhouse(&["inspect", "out", "--row", "1", "--json"]).expect(0).json();
    assert_eq!(plan["sample"]["rows"][1], stored["row"]);
    scratch.stillhouse(&["verify", "out"]).expect(0);
    scratch.stillhouse(&["verify", "out", "--teacher"]).expect(0);
    let shown = scratch.stillhouse(&["inspect", "out", "--row", "0"]).expect(0).stdout;
    for part in ["given", "mean entropy", "ln Σ exp(l/2)", "candidate 13", "20 draws", "top-p", "state of layer 4"] {
        assert!(shown.contains(part), "{part:?} is not in:\n{shown}");
    }
    let card = fs::read_to_string(dataset.join("README.md")).unwrap();
    for part in ["`top_p_tail`", "`hidden_states`", "which `logprob` and all other columns of the teacher are of"] {
        assert!(card.contains(part), "{part:?} is not in:\n{card}");
    }
    let made = shards(&dataset);
    fs::remove_dir_all(&dataset).unwrap();
    scratch.make(&of(3));
    assert_eq!(shards(&dataset), made);
    fs::remove_file(dataset.join("data").join(made.keys().next().unwrap())).unwrap();
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&dataset), made);

    let path = dataset.join("manifest.json");
    let manifest: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    fs::write(dataset.join("_SUCCESS"), "").unwrap();
    let edits: BTreeMap<&str, fn(&mut Value)> = BTreeMap::from([
        ("logz is", (|e| e["logz_temperatures"][1] = 3.0.into()) as fn(&mut Value)),
        ("candidate_logprob is", |e| e["candidates"][0] = 12.into()),
        ("sampled tokens are not those of the seed", |e| e["samples"]["power"] = 0.5.into()),
        ("top_p_count is", |e| e["top_p"]["mass"] = 0.2.into()),
        ("hidden_states: component", |e| e["hidden_states"]["layers"][1] = 2.into()),
    ]);
    for (says, edit) in edits {
        let mut other = manifest.clone();
        edit(&mut other["job"]["extract"]);
        fs::write(&path, other.to_string()).unwrap();
        let ran = scratch.stillhouse(&["verify", "out", "--teacher"]).expect(1);
        let said = ran.stdout + &ran.stderr;
        assert!(said.contains(says), "{says}: {said}");
    }
}

/// Another program finds the signals in the whole distribution that is stored beside them, of truncated text too.
#[test]
fn the_file_alone_proves_the_signals_of_written_text() {
    for written in [json!({}), json!({"temperature": 0.8, "top_k": 40, "top_p": 0.9, "stop": "length"})] {
        let scratch = Scratch::new();
        let extract = with(signals(), &json!({"sequential": written, "topk": 50_257}));
        let small = json!({"input": {"documents": 3, "holdout": null}, "pack": {"length": 16}, "extract": extract});
        let counted = check(&scratch.make(&with(job(), &small)), &["--tokens", "1000"]);
        assert!(counted["noises"].as_u64().unwrap() >= 20, "{counted}");
    }
}

/// A token that the seed's noise does not give is found: by another seed, another temperature, another cut.
#[test]
fn verify_finds_text_that_was_written_otherwise() {
    let scratch = Scratch::new();
    let dataset = scratch.make(&with(job(), &json!({"extract": {"sequential": {"temperature": 0.9}}})));
    scratch.stillhouse(&["verify", "out", "--teacher"]).expect(0);
    let path = dataset.join("manifest.json");
    let manifest: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    fs::write(dataset.join("_SUCCESS"), "").unwrap();
    let edits: BTreeMap<&str, fn(&mut Value)> = BTreeMap::from([
        ("loses by", (|m| (m["noise_seed"], m["job"]["seed"]) = (41.into(), 41.into())) as fn(&mut Value)),
        ("it loses by", |m| m["job"]["extract"]["sequential"]["temperature"] = 1.1.into()),
        ("is not among those that may be written", |m| m["job"]["extract"]["sequential"]["top_k"] = 1.into()),
    ]);
    for (says, edit) in edits {
        let mut other = manifest.clone();
        edit(&mut other);
        fs::write(&path, other.to_string()).unwrap();
        let ran = scratch.stillhouse(&["verify", "out", "--teacher"]).expect(1);
        let said = ran.stdout + &ran.stderr;
        assert!(said.contains("the teacher did not write this token") && said.contains(says), "{says}: {said}");
    }
}
