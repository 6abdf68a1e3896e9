//! Corpora as teams have them: filters and conversations, where every document is accounted for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, repetitions, root, with};

use crate::resume::uniform_draws;

pub(crate) fn manifest(scratch: &Scratch) -> Value {
    serde_json::from_slice(&fs::read(scratch.path("out/manifest.json")).unwrap()).unwrap()
}

fn sum(counts: &Value) -> u64 {
    counts.as_object().map_or(0, |counts| counts.values().map(|n| n.as_u64().unwrap()).sum())
}

/// The documents of all rows.
pub(crate) fn documents_in_rows(scratch: &Scratch, rows: u64) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    for row in 0..rows {
        let row = row.to_string();
        let arguments = ["inspect", "out", "--row", &row, "--column", "document_ids", "--json"];
        let shown = scratch.stillhouse(&arguments).expect(0).json();
        found.extend(shown["values"][0]["values"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()));
    }
    found
}

/// Random jobs: records = documents + skipped, documents = kept + dropped, and the kept ones with a token are in the rows.
#[test]
fn every_document_is_accounted_for() {
    for run in 0..repetitions(4, 60) {
        let scratch = Scratch::new();
        let mut draw = uniform_draws(90 + run as u64);
        let mut choose = |n: u64| (draw.next().unwrap() * n as f64) as u64;
        let mut text = String::new();
        let records = 20 + choose(40);
        let mut bad = 0;
        for i in 0..records {
            text += &match choose(6) {
                0 => {
                    bad += 1;
                    "{broken\n".to_owned()
                }
                1 => format!("{}\n", json!({"text": ""})),
                2 => format!("{}\n", json!({"text": format!("w{} ", choose(9)).repeat(3 + choose(40) as usize)})),
                3 => format!("{}\n", json!({"text": format!("Number {i} {{ is not prose }} and has no end")})),
                _ => format!(
                    "{}\n",
                    json!({"text": format!("This is sentence number {i} of the corpus. It is followed by {}. All of them end.", choose(1000))})
                ),
            };
        }
        scratch.write("in.jsonl", &text);
        let rules = [
            json!({"length": {"min_characters": 10}}),
            json!({"gopher_quality": {"min_words": 8, "min_stop_words": 0, "min_alphabetic_word_share": 0.5, "min_mean_word_characters": 1.0}}),
            json!({"c4": {"min_sentences": 2}}),
            json!({"pattern": {"drop_if_match": ["[13579]\\. All"]}}),
        ];
        let rules: Vec<&Value> = rules.iter().filter(|_| choose(3) > 0).collect();
        let mut job = with(
            stillhouse_tests::job(),
            &json!({
                "extract": null, "subtokens": null, "partitions": null,
                "input": {"paths": ["in.jsonl"], "on_error": "skip", "max_skipped": 1.0, "split_megabytes": 0.001},
                "tokenizer": {"path": stillhouse_tests::nano_teacher()}, "pack": {"mode": "pad", "length": 16}
            }),
        );
        if choose(2) > 0 {
            job = with(job, &json!({"input": {"holdout": {"validation": {"share": 0.3}}}}));
        }
        if !rules.is_empty() {
            job = with(job, &json!({"filter": {"rules": rules}}));
        }
        scratch.job("job.yaml", &job);
        let ran = scratch.stillhouse(&["run", "job.yaml", "--json"]).expect(0);
        let finished: Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
        let manifest = manifest(&scratch);
        let all = &manifest["statistics"];
        let count = |key: &str| all[key].as_u64().unwrap();
        assert_eq!((sum(&all["skipped"]), count("documents")), (bad, records - bad), "{job}");
        let kept = count("documents") - sum(&all["dropped"]);
        let rows =
            manifest["totals"].as_object().unwrap().values().map(|totals| totals["rows"].as_u64().unwrap()).sum();
        assert_eq!(documents_in_rows(&scratch, rows).len() as u64, kept - count("empty_documents"), "{job}");
        assert_eq!(finished["dropped"], all.get("dropped").cloned().unwrap_or(json!({})));
        let mut of_shards: BTreeMap<String, u64> = BTreeMap::new();
        for shard in manifest["shards"].as_array().unwrap() {
            for (reason, n) in shard["statistics"]["dropped"].as_object().into_iter().flatten() {
                *of_shards.entry(reason.clone()).or_default() += n.as_u64().unwrap();
            }
        }
        assert_eq!(json!(of_shards), finished["dropped"]);
        if sum(&finished["dropped"]) > 0 {
            let shown = scratch.stillhouse(&["inspect", "out", "--dropped", "--json"]).expect(0).json();
            let counted: BTreeMap<String, u64> = shown
                .as_array()
                .unwrap()
                .iter()
                .map(|reason| {
                    assert!(!reason["samples"].as_array().unwrap().is_empty(), "{reason}");
                    (reason["reason"].as_str().unwrap().to_owned(), reason["documents"].as_u64().unwrap())
                })
                .collect();
            assert_eq!(counted, of_shards);
        }
        scratch.stillhouse(&["verify", "out"]).expect(0);
    }
}

#[test]
fn filters_that_drop_everything_and_reasons_that_do_not_exist_are_errors() {
    let scratch = Scratch::with_corpus(3, 2000);
    let job = with(
        stillhouse_tests::job(),
        &json!({"extract": null, "subtokens": null, "partitions": null,
        "tokenizer": {"path": stillhouse_tests::nano_teacher()}, "filter": {"rules": [{"length": {"min_characters": 9000}}]}}),
    );
    scratch.job("job.yaml", &job);
    scratch.stillhouse(&["run", "job.yaml"]).expect(1).says(&[
        "this job produced no sequences: 3 documents read, 0 records skipped, 3 dropped (3 length.too_few_characters)",
        "the filters dropped every document",
    ]);
    assert!(!scratch.path("out/_SUCCESS").exists());
    scratch.job("job.yaml", &with(job, &json!({"filter": {"rules": [{"length": {"min_characters": 1}}]}})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    scratch.stillhouse(&["inspect", "out", "--dropped"]).expect(2).says(&["no document was dropped"]);
}

/// A model of operators/filters/tests/classifiers, which its `classifiers.py` made.
fn write_classifier(scratch: &Scratch, name: &str, file: &str) {
    let packed = root().join("operators/filters/tests/classifiers").join(format!("{name}.gz"));
    let mut reader = flate2::read::GzDecoder::new(fs::File::open(packed).unwrap());
    std::io::copy(&mut reader, &mut fs::File::create(scratch.path(file)).unwrap()).unwrap();
}

/// A classifier's file decides which documents are kept, so its content belongs to the job and its place does not.
#[test]
fn documents_are_dropped_by_the_scores_of_a_classifier() {
    let scratch = Scratch::with_corpus(30, 3000);
    write_classifier(&scratch, "softmax-bigrams.bin", "a.bin");
    let with_rules = |rules: Value| {
        let base = json!({"extract": null, "subtokens": null, "partitions": null,
            "tokenizer": {"path": stillhouse_tests::nano_teacher()}, "filter": {"rules": rules}});
        with(stillhouse_tests::job(), &base)
    };
    // the labels of this model are the older and the newer half of the speeches
    let old_ones = json!([{"fasttext": {"model": "a.bin", "keep": {"0": 0.6}}}]);
    scratch.job("job.yaml", &with_rules(old_ones.clone()));
    scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    let statistics = manifest(&scratch)["statistics"].clone();
    let dropped = statistics["dropped"]["fasttext.low_score"].as_u64().unwrap();
    assert!((1..30).contains(&dropped), "{statistics}");
    scratch.stillhouse(&["verify", "out"]).expect(0);
    assert!(!scratch.path("out/a.bin").exists());

    // the other side of the same test keeps the others
    let new_ones = json!([{"fasttext": {"model": "a.bin", "drop": {"0": 0.6}}}]);
    scratch.job("other.yaml", &with(with_rules(new_ones), &json!({"output": {"path": "other"}})));
    scratch.stillhouse(&["run", "other.yaml"]).expect(0);
    let other: Value = serde_json::from_slice(&fs::read(scratch.path("other/manifest.json")).unwrap()).unwrap();
    assert_eq!(other["statistics"]["dropped"], json!({"fasttext.high_score": 30 - dropped}));

    // moved: the same job, which has nothing to do
    fs::rename(scratch.path("a.bin"), scratch.path("moved.bin")).unwrap();
    let moved = json!([{"fasttext": {"model": "moved.bin", "keep": {"0": 0.6}}}]);
    scratch.job("job.yaml", &with_rules(moved));
    let before = stillhouse_tests::shards(&scratch.path("out"));
    scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert_eq!(stillhouse_tests::shards(&scratch.path("out")), before);
    // another model under the old name: another job
    write_classifier(&scratch, "quantized.ftz", "a.bin");
    scratch.job("job.yaml", &with_rules(old_ones));
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&["filter"]);
}

#[test]
fn a_classifier_that_does_not_fit_is_a_problem_of_the_job() {
    let scratch = Scratch::with_corpus(3, 500);
    write_classifier(&scratch, "softmax-bigrams.bin", "a.bin");
    scratch.write("text.bin", "no model");
    let bytes = fs::read(scratch.path("a.bin")).unwrap();
    fs::write(scratch.path("half.bin"), &bytes[..bytes.len() / 2]).unwrap();
    for (rule, message) in [
        (json!({"model": "none.bin", "keep": {"0": 0.5}}), "filter.rules[0].fasttext.model"),
        (json!({"model": "text.bin", "keep": {"0": 0.5}}), "is no fastText model"),
        (json!({"model": "half.bin", "keep": {"0": 0.5}}), "ends within"),
        (json!({"model": "a.bin", "keep": {"en": 0.5}}), "valid: labels of the model: "),
        (json!({"model": "a.bin", "keep": {"0": 1.5}}), "fasttext.keep.0"),
        (json!({"model": "a.bin"}), "labels and their least scores in either keep or drop"),
        (json!({"model": "a.bin", "keep": {"0": 0.5}, "drop": {"1": 0.5}}), "either keep or drop"),
    ] {
        let patch = json!({"extract": null, "subtokens": null, "partitions": null,
            "tokenizer": {"path": stillhouse_tests::nano_teacher()}, "filter": {"rules": [{"fasttext": rule}]}});
        scratch.job("job.yaml", &with(stillhouse_tests::job(), &patch));
        scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&[message]);
    }
}

/// A chat job over `chat.jsonl` whose template is as simple as it can be.
fn chat_job(scratch: &Scratch) -> Value {
    let template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}\
                    {% if add_generation_prompt %}[assistant] {% endif %}";
    scratch.write("template.jinja", template);
    json!({
        "version": 1, "name": "chat",
        "input": {"format": "jsonl", "paths": ["chat.jsonl"], "messages": "messages"},
        "chat": {"template": "template.jinja"},
        "tokenizer": {"path": stillhouse_tests::nano_teacher(), "special_tokens": "parse"},
        "pack": {"mode": "best_fit", "length": 64, "separator": "none", "boundary": "none"},
        "output": {"path": "out"}
    })
}

fn conversation(i: usize) -> Value {
    json!({"messages": [{"role": "user", "content": format!("Say {i}.")}, {"role": "assistant", "content": format!("It is {i}.")}]})
}

#[test]
fn conversations_have_a_loss_mask_and_bad_ones_are_bounded() {
    let scratch = Scratch::new();
    let mut text: String = (0..40).map(|i| format!("{}\n", conversation(i))).collect();
    text += "{\"messages\": []}\n{\"messages\": [{\"role\": \"user\", \"content\": \"?\"}]}\n";
    scratch.write("chat.jsonl", &text);
    let job = chat_job(&scratch);
    scratch.job("job.yaml", &job);
    let says = ["chat: document 40 of split 0: `messages` is a list of 0; valid: a list of at least one message"];
    scratch.stillhouse(&["run", "job.yaml"]).expect(1).says(&says);
    let skip = with(job, &json!({"input": {"on_error": "skip"}}));
    scratch.job("job.yaml", &skip);
    scratch
        .stillhouse(&["run", "job.yaml", "--quiet"])
        .expect(1)
        .says(&["1 of 42 records were skipped", "input.max_skipped: 0.01"]);
    scratch.job("job.yaml", &with(skip, &json!({"input": {"max_skipped": 0.1}})));
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    let statistics = &manifest(&scratch)["statistics"];
    assert_eq!(statistics["dropped"], json!({"chat.bad_conversation": 1, "chat.nothing_to_train": 1}));
    // " It is 7.<|endoftext|>\n": the space belongs to the prompt `[assistant] ` and to the word after it
    let row = scratch.stillhouse(&["inspect", "out", "--row", "0", "--json"]).expect(0).json();
    let trained =
        scratch.stillhouse(&["inspect", "out", "--row", "0", "--column", "loss_mask", "--json"]).expect(0).json();
    let mask = trained["values"][0]["values"].as_array().unwrap();
    let tokens = row["row"]["tokens"].as_array().unwrap();
    let texts: String =
        tokens.iter().zip(mask).filter(|(_, m)| **m == json!(true)).map(|(t, _)| t["text"].as_str().unwrap()).collect();
    assert!(texts.starts_with(" It is 0.<|endoftext|>\\n It is 1.<|endoftext|>\\n"), "{texts}");
    let shown = scratch.stillhouse(&["inspect", "out", "--dropped", "chat.bad_conversation"]).expect(0);
    assert!(shown.stdout.contains("valid: a list of at least one message"), "{}", shown.stdout);
    // the template decides the tokens: a data set of another one is not continued
    let template = fs::read_to_string(scratch.path("template.jinja")).unwrap();
    assert_eq!(fs::read_to_string(scratch.path("out/chat_template.jinja")).unwrap(), template);
    scratch.stillhouse(&["verify", "out"]).expect(0);
    scratch.write("template.jinja", &template.replace("[{{", "<{{"));
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(2).says(&["chat.template"]);
}

/// Every record of every split: its text in the input, and the same text over the rows that hold its tokens.
#[test]
fn a_document_is_found_in_the_input_and_in_the_rows() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("in")).unwrap();
    let text = |i: usize| format!("Document {i}. ") + &format!("Its word is {i}. ").repeat(i % 7 * 6);
    for file in 0..3 {
        let lines = (0..9).map(|i| json!({"text": text(file * 9 + i)}).to_string() + "\n");
        scratch.write(&format!("in/{file}.jsonl"), &lines.collect::<String>());
    }
    let job = with(
        stillhouse_tests::job(),
        &json!({
            "extract": null, "subtokens": null, "partitions": null, "tokenizer": {"path": stillhouse_tests::byte_tokenizer()},
            "input": {"paths": ["in/*.jsonl"], "split_megabytes": 0.002},
            "pack": {"separator": "none", "boundary": "none", "remainder": "keep"},
            "filter": {"rules": [{"length": {"min_characters": 20}}]}
        }),
    );
    scratch.make(&job);
    let mut found = 0;
    for (split, documents) in splits(&scratch) {
        for record in 0..documents {
            let id = format!("{split}:{record}");
            let arguments = ["inspect", "out", "--document", &id, "--job", "job.yaml", "--json"];
            let shown = scratch.stillhouse(&arguments).expect(0).json();
            assert_eq!(shown["source"], text(found), "{id}");
            let parts = shown["parts"].as_array().unwrap();
            let rows: String = parts.iter().map(|part| part["text"].as_str().unwrap()).collect();
            let is_dropped = text(found).len() < 20;
            assert_eq!(rows, if is_dropped { String::new() } else { text(found) }, "{id}");
            assert_eq!(shown["pieces"][0]["file"], format!("in/{}.jsonl", found / 9), "{id}");
            let number = shown["document_id"].to_string();
            let again = scratch.stillhouse(&["inspect", "out", "--document", &number, "--json"]).expect(0).json();
            assert_eq!(again["parts"], shown["parts"]);
            found += 1;
        }
    }
    assert_eq!(found, 27);
    let page = scratch.stillhouse(&["inspect", "out", "--document", "0:0"]).expect(0).stdout;
    assert!(page.contains("nothing: a filter dropped it (length.too_few_characters)"), "{page}");
    let page = scratch.stillhouse(&["inspect", "out", "--document", "0:3", "--job", "job.yaml"]).expect(0).stdout;
    for says in ["document 0:3", "record 4 of what split 0 reads:\n  in/0.jsonl  bytes 0 to ", "In the input", "row "] {
        assert!(page.contains(says), "{says:?} is not in\n{page}");
    }
    scratch
        .stillhouse(&["inspect", "out", "--document", "99:0"])
        .expect(2)
        .says(&["--document: got 99:0, valid: SPLIT:RECORD"]);
    scratch.stillhouse(&["inspect", "out", "--document", "one"]).expect(2).says(&["valid: SPLIT:RECORD, such as 3:17"]);
    let beyond = ["inspect", "out", "--document", "0:999", "--job", "job.yaml"];
    scratch.stillhouse(&beyond).expect(2).says(&["split 0 has no document 999"]);
    // other records in the place of the old ones
    scratch.write("in/0.jsonl", &fs::read_to_string(scratch.path("in/0.jsonl")).unwrap().replace("word", "name"));
    let changed = ["inspect", "out", "--document", "0:3", "--job", "job.yaml"];
    scratch.stillhouse(&changed).expect(1).says(&["the input of split 0 is not what the data set was made of"]);
}

/// Number and documents of each split.
fn splits(scratch: &Scratch) -> Vec<(u64, u64)> {
    let manifest = manifest(scratch);
    let shards = manifest["shards"].as_array().unwrap();
    assert!(shards.len() > 3, "{}", shards.len());
    let of = |shard: &Value| (shard["split"].as_u64().unwrap(), shard["statistics"]["documents"].as_u64().unwrap());
    shards.iter().map(of).collect()
}

/// A document with an answer of a benchmark is dropped, after the filter, and its reason says by which one.
#[test]
fn text_of_benchmarks_is_dropped_and_says_where_it_is_from() {
    let scratch = Scratch::new();
    let answer = "There were forty eight clips in April and half as many in May, which makes seventy two.";
    let texts =
        ["An ordinary document.", &format!("Homework: {}", answer.to_uppercase()), "tiny", "Another document, kept."];
    scratch.write("in.jsonl", &texts.map(|text| json!({"text": text}).to_string() + "\n").concat());
    scratch
        .write("clips.jsonl", &json!({"benchmark": "gsm8k", "query": "How many clips?", "label": answer}).to_string());
    let job = with(
        stillhouse_tests::job(),
        &json!({
            "extract": null, "subtokens": null, "partitions": null, "tokenizer": {"path": stillhouse_tests::byte_tokenizer()},
            "input": {"paths": ["in.jsonl"]}, "pack": {"mode": "pad", "length": 32},
            "filter": {"rules": [{"length": {"min_characters": 10}}]}, "decontaminate": {"benchmarks": "clips.jsonl"}
        }),
    );
    scratch.make(&job);
    let manifest = manifest(&scratch);
    let dropped = json!({"decontaminate.gsm8k": 1, "length.too_few_characters": 1});
    assert_eq!(manifest["statistics"]["dropped"], dropped);
    let shown = scratch.stillhouse(&["inspect", "out", "--dropped"]).expect(0).stdout;
    for says in ["decontaminate.gsm8k", "shares \"there were forty eight clips", "length.too_few_characters"] {
        assert!(shown.contains(says), "{says:?} is not in\n{shown}");
    }
    // what was removed lies beside the shards, and repairs itself; the path of the file is not the job's identity
    let benchmarks = fs::read(scratch.path("clips.jsonl")).unwrap();
    assert_eq!(fs::read(scratch.path("out/benchmarks.jsonl")).unwrap(), benchmarks);
    scratch.stillhouse(&["verify", "out"]).expect(0);
    fs::remove_file(scratch.path("out/benchmarks.jsonl")).unwrap();
    let verified = scratch.stillhouse(&["verify", "out"]).expect(1);
    assert!(verified.stdout.contains("benchmarks.jsonl"), "{}", verified.stdout);
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    fs::rename(scratch.path("clips.jsonl"), scratch.path("moved.jsonl")).unwrap();
    let moved = with(job.clone(), &json!({"decontaminate": {"benchmarks": "moved.jsonl"}}));
    scratch.job("job.yaml", &moved);
    let again = scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert!(again.stdout.contains("complete already"), "{}", again.stdout);
    // another file is another job
    scratch.write("moved.jsonl", &json!({"benchmark": "gsm8k", "label": answer.replace("clips", "chips")}).to_string());
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&["another job"]);
    scratch.write("moved.jsonl", "{\"benchmark\": \"gsm8k\"}\n");
    scratch
        .stillhouse(&["run", "job.yaml"])
        .expect(2)
        .says(&["decontaminate.benchmarks", "line 1: missing field `label`"]);
    scratch.job("job.yaml", &with(job, &json!({"decontaminate": {"benchmarks": "nowhere.jsonl"}})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&["decontaminate.benchmarks", "nowhere.jsonl"]);
}
