//! Tests job files as people write them: errors with positions, variables and braces in paths, a job on stdin,
//! duplicate keys.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};
use stillhouse_tests::service::Service;
use stillhouse_tests::{CommandOutput, Scratch, job, root, run_command, shards, with};

/// A job without a teacher.
fn packing() -> Value {
    let tokenizer = root().join("assets/teacher-nano-gpt2");
    with(job(), &json!({"extract": null, "subtokens": null, "partitions": null, "tokenizer": {"path": tokenizer}}))
}

/// Runs a verb with the job on stdin.
fn run_with_stdin(scratch: &Scratch, arguments: &[&str], text: &str) -> CommandOutput {
    let mut command = scratch.command(arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    CommandOutput {
        code: out.status.code(),
        stdout: String::from_utf8(out.stdout).unwrap(),
        stderr: String::from_utf8(out.stderr).unwrap(),
    }
}

#[test]
fn mistakes_are_reported_with_their_places_and_what_was_meant() {
    let scratch = Scratch::with_corpus(1, 200);
    let text = "version: 1\nname: x\ninput:\n  format: json\n  path: nothing.jsonl\n  text: text\n  text: body\n\
        tokenizer: {path: missing.json}\npack: {length: 8}\noutput: {path: out}\n";
    scratch.write("job.yaml", text);
    let said = scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&[
        "error: job.yaml: the job file has ",
        "\n  job.yaml:4:3: input.format: got \"json\": not valid, did you mean `jsonl`?",
        "\n  job.yaml:5:3: input.path: got \"nothing.jsonl\": unknown key, did you mean `paths`?",
        "\n  job.yaml:7:3: input.text: is given twice, in line 6 and here",
        // found later, but with its position as well
        "\n  job.yaml:8:13: tokenizer.path: got \"missing.json\": no file or folder",
    ]);
    assert!(!scratch.path("out").exists(), "{}", said.stderr);
    let reported = scratch.stillhouse(&["plan", "job.yaml", "--json"]).expect(2).json();
    let path = reported["problems"].as_array().unwrap().iter().find(|p| p["field"] == "input.path").unwrap().clone();
    assert_eq!((&path["line"], &path["column"]), (&json!(5), &json!(3)));
}

#[test]
fn json_of_any_program_is_a_job_file() {
    let scratch = Scratch::new();
    // as Python's `json.dumps` writes it
    fs::create_dir(scratch.path("😀")).unwrap();
    fs::write(scratch.path("😀/a.jsonl"), stillhouse_tests::corpus(1, 400)).unwrap();
    let job = with(packing(), &json!({"input": {"paths": ["😀/a.jsonl"]}})).to_string().replace('😀', "\\ud83d\\ude00");
    for name in ["job.json", "job.yaml"] {
        scratch.write(name, &job);
        scratch.stillhouse(&["run", name, "--overwrite"]).expect(0);
        assert_eq!(shards(&scratch.path("out")).len(), 1);
    }
    scratch.write("yaml.json", "version: 1\n");
    scratch.stillhouse(&["plan", "yaml.json"]).expect(2).says(&["yaml.json:1:1: job file: is not JSON: "]);
    scratch.write("latin.yaml", "");
    fs::write(scratch.path("latin.yaml"), b"name: \xe9\n").unwrap();
    scratch.stillhouse(&["plan", "latin.yaml"]).expect(2).says(&["latin.yaml", "not UTF-8 (from byte 6 on)"]);
}

#[test]
fn a_job_may_come_on_stdin() {
    let scratch = Scratch::with_corpus(2, 400);
    let text = serde_json::to_string(&packing()).unwrap();
    let plan = run_with_stdin(&scratch, &["plan", "-", "--json"], &text).expect(0).json();
    assert_eq!(plan["name"], "small");
    run_with_stdin(&scratch, &["run", "-"], &text).expect(0);
    let made = shards(&scratch.path("out"));
    assert_eq!(made.len(), 1);
    scratch.job("job.yaml", &with(packing(), &json!({"output": {"path": "file"}})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert_eq!(shards(&scratch.path("file")), made);
    let wrong = text.replace("\"length\"", "\"lenght\"");
    run_with_stdin(&scratch, &["run", "-"], &wrong).expect(2).says(&[
        "stdin:1:",
        "pack.lenght",
        "did you mean `length`?",
    ]);
    run_with_stdin(&scratch, &["run", "-"], "").expect(2).says(&["stdin"]);
}

/// Proves that variables affect only where files are found, and never appear in the data set.
#[test]
fn variables_and_the_home_stand_in_paths_and_never_in_the_data_set() {
    let scratch = Scratch::with_corpus(4, 300);
    let text = fs::read_to_string(scratch.path("corpus.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for (folder, name, line) in [("home", "a", 0), ("home", "b", 1), ("sec[r]et", "c", 2), ("sec[r]et", "d", 3)] {
        fs::create_dir_all(scratch.path(folder)).unwrap();
        scratch.write(&format!("{folder}/{name}.jsonl"), lines[line]);
    }
    let tokenizer = root().join("assets/teacher-nano-gpt2");
    let patch = json!({
        "input": {"paths": ["~/{b,a}.jsonl", "${CORPUS}/*.jsonl"]}, "tokenizer": {"path": "${TOK}/tokenizer.json"},
        "output": {"path": "${RUN}/made"},
    });
    scratch.job("job.yaml", &with(packing(), &patch));
    let run = |verb: &[&str], corpus: &str| {
        let mut command = scratch.command(verb);
        command.env("HOME", scratch.path("home")).env("CORPUS", scratch.path(corpus)).env("TOK", &tokenizer);
        run_command(command.env("RUN", scratch.path("out")))
    };
    let plan = run(&["plan", "job.yaml"], "sec[r]et").expect(0).stdout;
    for shown in ["${CORPUS}", "sec[r]et", "~ ", "/home", "${RUN}"] {
        assert!(plan.contains(shown), "{shown} is not in\n{plan}");
    }
    run(&["run", "job.yaml"], "sec[r]et").expect(0);
    let dataset = scratch.path("out/made");
    let manifest: Value = serde_json::from_slice(&fs::read(dataset.join("manifest.json")).unwrap()).unwrap();
    let read: Vec<&str> =
        manifest["splits"][0]["pieces"].as_array().unwrap().iter().map(|p| p["file"].as_str().unwrap()).collect();
    assert_eq!(read, ["~/b.jsonl", "~/a.jsonl", "${CORPUS}/c.jsonl", "${CORPUS}/d.jsonl"]);
    assert_eq!(manifest["tokenizer"]["source"], "${TOK}/tokenizer.json");
    for name in ["manifest.json", "README.md"] {
        let text = fs::read_to_string(dataset.join(name)).unwrap();
        assert!(!text.contains("sec[r]et") && !text.contains("nano-gpt2/"), "{name}: {text}");
    }
    // a second run recognises its own files
    run(&["run", "job.yaml"], "sec[r]et").expect(0);
    // The order of the braces is the order of the documents: writing the paths out gives the same shards.
    let plain = ["home/b.jsonl", "home/a.jsonl", "sec[[]r]et/c.jsonl", "sec[[]r]et/d.jsonl"];
    let patch = json!({"input": {"paths": plain}, "tokenizer": {"path": tokenizer}, "output": {"path": "plain"}});
    scratch.make(&with(packing(), &patch));
    assert_eq!(shards(&scratch.path("plain")), shards(&dataset));

    scratch.job(
        "job.yaml",
        &with(
            packing(),
            &json!({"input": {"paths": "${NOT_SET_ANYWHERE}/x"}, "output": {"path": "${AWS_SECRET_ACCESS_KEY}"}}),
        ),
    );
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&[
        "input.paths[0]: names ${NOT_SET_ANYWHERE}, and the environment variable NOT_SET_ANYWHERE is not set",
        "output.path: names ${AWS_SECRET_ACCESS_KEY}, which looks like a secret",
    ]);
}

#[test]
fn a_service_refuses_keys_that_stand_twice_and_variables_of_its_own() {
    let service = Service::start(&json!({}));
    service.scratch.write("corpus.jsonl", &stillhouse_tests::corpus(2, 900));
    let good = with(packing(), &json!({"output": {"path": "first"}})).to_string();
    let twice = good.replace("\"path\":\"first\"", "\"path\":\"first\",\n\"path\":\"second\"");
    assert_ne!(good, twice);
    for kind in ["application/json", "application/yaml"] {
        for path in ["/jobs", "/validate"] {
            let answer = service.api.send("POST", path, &[("content-type", kind)], Some(&twice));
            let reported = if path == "/jobs" { answer.problem(422) } else { answer.expect(200).json() };
            let problem = &reported["problems"][0];
            assert_eq!(problem["field"], "output.path", "{reported}");
            assert_eq!((&problem["line"], &problem["column"]), (&json!(2), &json!(1)), "{reported}");
            assert!(problem["message"].as_str().unwrap().contains("is given twice, in line 1 and here"), "{reported}");
        }
    }
    for (patch, field) in [
        (json!({"input": {"paths": ["${HOME}/corpus.jsonl"]}}), "input.paths[0]"),
        (json!({"output": {"path": "${PATH}"}}), "output.path"),
        (json!({"tokenizer": {"path": "~/tokenizer.json"}}), "tokenizer.path"),
    ] {
        let reported = service.api.send_job("", &[], &with(packing(), &patch)).problem(422);
        let problem = reported["problems"].as_array().unwrap().iter().find(|p| p["field"] == field).unwrap();
        assert!(problem["message"].as_str().unwrap().contains("the server's own"), "{reported}");
    }
    assert!(!service.scratch.path("first").exists() && !service.scratch.path("second").exists());
    // the same through the program, from stdin
    let mut command = service.command(&["submit", "-"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(twice.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("stdin:2:1: output.path: is given twice"), "{out:?}");
    let mut command = service.command(&["submit", "-", "--quiet"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(good.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(shards(&service.scratch.path("first")).len(), 1);
}

/// Runs the card's numpy program beside the card, and compares it with the format's reference.
#[test]
fn the_card_reports_what_is_there_and_its_program_replays_the_noise() {
    let scratch = Scratch::with_corpus(2, 500);
    let card = json!({"output": {"card": {"license": "CC-BY-4.0"}}, "extract": {"noise": {"draws": 2}}, "pack": {"length": 32}});
    let dataset = scratch.make(&with(job(), &card));
    let read = || fs::read_to_string(dataset.join("README.md")).unwrap();
    let text = read();
    assert!(text.starts_with("---\nlicense: cc-by-4.0\n"), "{text}");
    for name in column_names(&dataset) {
        let row = text.lines().find(|line| line.starts_with(&format!("| `{name}` | ")));
        assert!(row.is_some_and(|row| row.trim_end_matches([' ', '|']).split(" | ").count() == 4), "{name}: {row:?}");
    }
    assert!(text.contains("| Documents read | 2 |"), "{text}");

    let program =
        text.split("```python\n").find(|block| block.contains("def philox")).unwrap().split("```").next().unwrap();
    let check = "
import sys
sys.path.insert(0, sys.argv[1])
import noise_reference as reference
worst = 0.0
for position in range(len(row['input_ids'])):
    for draw in range(2):
        e0, e = reference.exponentials(seed, draw, row['sequence_id'], position, V)
        count = np.array(row['noise_count']).reshape(2, -1)
        at = count[:draw].sum() + count[draw, :position].sum()
        mine = slice(at, at + count[draw, position])
        p = np.zeros(V)
        np.add.at(p, row['noise_index'][mine], np.exp(np.array(row['noise_logprob'][mine], np.float64)))
        E = e + p * e0
        E[row['input_ids'][position]] = np.exp(row['logprob'][position]) * e0
        worst = max(worst, np.abs(replay(row, position, draw) - reference.softmax(-np.log(E))).max())
print(worst < 1e-12)
";
    scratch.write("card.py", &format!("{program}\n{check}"));
    let mut python = std::process::Command::new(root().join(".venv/bin/python"));
    python.current_dir(&dataset).arg(scratch.path("card.py")).arg(root().join("tests/python"));
    let said = run_command(python.env("PYTHONDONTWRITEBYTECODE", "1")).expect(0).stdout;
    assert_eq!(said.lines().last(), Some("True"), "{said}");

    // another license is not another job, and the card shows it
    let before = shards(&dataset);
    scratch.make(&with(job(), &with(card, &json!({"output": {"card": {"license": "MIT"}}}))));
    assert!(read().starts_with("---\nlicense: mit\n"));
    assert_eq!(shards(&dataset), before);
    scratch.stillhouse(&["verify", "out"]).expect(0);
    scratch.job("job.yaml", &with(job(), &json!({"output": {"card": {"license": "a b: c"}}})));
    scratch
        .stillhouse(&["run", "job.yaml"])
        .expect(2)
        .says(&["output.card.license: got \"a b: c\": not valid; must match"]);
}

/// The columns in the manifest.
fn column_names(dataset: &std::path::Path) -> Vec<String> {
    let manifest: Value = serde_json::from_slice(&fs::read(dataset.join("manifest.json")).unwrap()).unwrap();
    manifest["columns"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap().to_owned()).collect()
}
