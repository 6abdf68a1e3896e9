//! Tests `stillhouse init`: what it finds in a corpus, what it proposes, and that `plan` accepts the job.

use std::fs;

use stillhouse_tests::{Scratch, nano_teacher, root};

/// French speeches, so that another teacher is proposed.
const FRENCH: &str = "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de \
    conscience et doivent agir les uns envers les autres dans un esprit de fraternité.";

#[track_caller]
fn assert_shows(shown: &str, parts: &[&str]) {
    for part in parts {
        assert!(shown.contains(part), "{part:?} is missing in:\n{shown}");
    }
}

fn speeches(scratch: &Scratch) {
    fs::create_dir(scratch.path("speeches")).unwrap();
    fs::copy(root().join("assets/corpus/sotu-small.jsonl.gz"), scratch.path("speeches/a.jsonl.gz")).unwrap();
    scratch.write("speeches/notes.csv", "a,b\n1,2\n");
}

#[test]
fn a_corpus_becomes_a_job_that_plan_accepts() {
    let scratch = Scratch::new();
    speeches(&scratch);
    let teacher = nano_teacher();
    // stdin is no terminal, so nothing is asked
    let made = scratch.stillhouse(&["init", "speeches", "--teacher", teacher.to_str().unwrap()]).expect(0);
    assert_shows(
        &made.stdout,
        &[
            "1 file,",
            "gzip",
            "jsonl",
            "text: text,",
            "English",
            "1 file of format csv: a job reads one format",
            "job.yaml is written",
            "stillhouse plan job.yaml",
        ],
    );
    let job = fs::read_to_string(scratch.path("job.yaml")).unwrap();
    for line in [
        "name: speeches\n",
        "  format: jsonl\n",
        "  paths: [speeches]",
        "  text: text  # ",
        "length: 1024}  # as most papers; the teacher reads up to 1,024",
    ] {
        assert!(job.contains(line), "{line}: {job}");
    }
    let plan = scratch.stillhouse(&["plan", "job.yaml"]).expect(0);
    assert_shows(&plan.stdout, &["speeches-data", "extract"]);
    let again = scratch.stillhouse(&["init", "speeches", "--teacher", teacher.to_str().unwrap()]).expect(2);
    assert!(again.stderr.contains("--job: job.yaml exists; valid: the name of a new file"), "{}", again.stderr);
    assert_eq!(fs::read_to_string(scratch.path("job.yaml")).unwrap(), job);
}

#[test]
fn the_text_and_the_language_of_tables_are_found() {
    let scratch = Scratch::new();
    let rows: String = (0..60)
        .map(|n| format!("{{\"id\": {n}, \"title\": \"Article {n}\", \"meta\": {{\"body\": \"{FRENCH} {n}\", \"lang\": \"fr\"}}}}\n"))
        .collect();
    scratch.write("rows.jsonl", &rows);
    let made = scratch.stillhouse(&["init", "rows.jsonl", "--job", "-"]).expect(0);
    for line in ["  text: meta.body  # ", "name: rows\n", "hf://Qwen/Qwen3-0.6B-Base", "length: 1024"] {
        assert!(made.stdout.contains(line), "{line}: {}", made.stdout);
    }
    assert!(!scratch.path("job.yaml").exists());
    let wrong = scratch.stillhouse(&["init", "rows.jsonl", "--text", "titel"]).expect(2);
    assert!(
        wrong.stderr.contains("--text: no column \"titel\" has text; valid: meta.body, title, meta.lang"),
        "{}",
        wrong.stderr
    );
    let packed = scratch
        .stillhouse(&[
            "init",
            "rows.jsonl",
            "--no-teacher",
            "--tokenizer",
            nano_teacher().to_str().unwrap(),
            "--length",
            "64",
        ])
        .expect(0);
    assert_shows(&packed.stdout, &["none"]);
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    scratch.stillhouse(&["verify", "rows-data"]).expect(0);
}

#[test]
fn a_job_file_elsewhere_finds_the_corpus() {
    let scratch = Scratch::new();
    speeches(&scratch);
    fs::create_dir(scratch.path("jobs")).unwrap();
    let teacher = nano_teacher();
    scratch
        .stillhouse(&[
            "init",
            "speeches",
            "--teacher",
            teacher.to_str().unwrap(),
            "--length",
            "128",
            "--job",
            "jobs/a.yaml",
            "--output",
            "made",
        ])
        .expect(0);
    assert_shows(&scratch.stillhouse(&["plan", "jobs/a.yaml"]).expect(0).stdout, &["made"]);
}

#[test]
fn a_corpus_that_is_none_is_one_error() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("empty")).unwrap();
    scratch.write("numbers.csv", "a,b\n1,2\n3,4\n");
    scratch.write("picture.png", "no picture");
    scratch.write("zero.jsonl", "");
    scratch.write("broken.parquet", "PAR1 and nothing else");
    for (corpus, says) in [
        ("nowhere", "CORPUS"),
        ("empty", ".parquet"),
        ("numbers.csv", "no column of the csv files has text; their columns: a, b"),
        ("picture.png", "none of the files has an ending of a format with text; valid: .jsonl, "),
        ("zero.jsonl", "no column of the jsonl files has text; their columns: none"),
        ("broken.parquet", "broken.parquet"),
    ] {
        let refused = scratch.stillhouse(&["init", corpus]);
        assert_ne!(refused.code, Some(0), "{corpus}");
        assert!(refused.stderr.contains(says), "{corpus}: {}", refused.stderr);
        assert!(!scratch.path("job.yaml").exists(), "{corpus}");
    }
    for (options, says) in [
        (["--teacher", "tinny"], "--teacher: tinny: no such file or folder; a model of the hub is hf://org/name"),
        (["--document", "file"], "--document: got file, valid: nothing, as the files are jsonl"),
    ] {
        scratch.write("texts.jsonl", "{\"text\": \"a text\"}\n");
        let refused = scratch.stillhouse(&[&["init", "texts.jsonl"][..], &options].concat()).expect(2);
        assert!(refused.stderr.contains(says), "{}", refused.stderr);
    }
}

#[test]
fn the_unit_of_plain_text_is_as_given() {
    let scratch = Scratch::new();
    scratch.write("texts.txt", "one line\nanother\n\nand a third\n");
    let made = scratch.stillhouse(&["init", "texts.txt", "--document", "blank_line", "--job", "-"]).expect(0);
    assert_shows(&made.stdout, &["  document: blank_line  # as you said\n"]);
}
