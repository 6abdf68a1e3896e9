//! Proves that crashes, restarts and threads do not change any byte, and that foreign folders stay untouched.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, files, job, repetitions, shards, with};

/// A job of seven splits whose work takes about as long as its start.
fn small_job() -> Value {
    with(job(), &json!({"input": {"split_megabytes": 0.0015, "holdout": {"validation": {"last_documents": 1}}}}))
}

fn scratch() -> Scratch {
    Scratch::with_corpus(7, 1300)
}

/// Number of visible shards.
pub(crate) fn count_shards(dataset: &Path) -> usize {
    let Ok(entries) = fs::read_dir(dataset.join("data")) else { return 0 };
    entries.flatten().filter(|entry| entry.path().extension().is_some_and(|ending| ending == "parquet")).count()
}

/// A fixed sequence of numbers in [0, 1) (splitmix64).
pub(crate) fn uniform_draws(seed: u64) -> impl Iterator<Item = f64> {
    (1u64..).map(move |i| {
        let mut z = seed.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    })
}

/// Asserts that every visible shard has the bytes that an undisturbed run gives it.
fn assert_whole(dataset: &Path, undisturbed: &std::collections::BTreeMap<String, String>, when: &str) {
    for (name, sha256) in shards(dataset) {
        assert_eq!(Some(&sha256), undisturbed.get(&name), "data/{name} {when}");
    }
}

#[test]
fn kills_change_no_byte() {
    assert_kills_change_no_byte(&small_job(), repetitions(6, 20));
}

/// A run of a mixture is killed while it counts, sorts and stages, too.
#[test]
fn kills_change_no_byte_of_a_mixture() {
    let input = &job()["input"];
    let table = json!({"format": input["format"], "paths": input["paths"]});
    let tables = json!({"once": table, "often": with(table.clone(), &json!({"epochs": 1.5}))});
    let input = json!({"format": null, "paths": null, "tables": tables, "split_megabytes": 0.003});
    assert_kills_change_no_byte(&with(small_job(), &json!({ "input": input })), repetitions(4, 20));
}

fn assert_kills_change_no_byte(job: &Value, wanted: usize) {
    let scratch = scratch();
    let file = scratch.job("job.yaml", &with(job.clone(), &json!({"output": {"path": "undisturbed"}})));
    let start = Instant::now();
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    let duration = start.elapsed();
    let expected = shards(&scratch.path("undisturbed"));
    assert!(expected.len() >= 6, "{expected:?}");
    let manifest = fs::read_to_string(scratch.path("undisturbed/manifest.json")).unwrap();
    fs::remove_file(file).unwrap();

    let (mut kills, mut finished, mut midway) = (0, 0, 0);
    let mut moments = uniform_draws(2);
    while kills < wanted {
        // Resume each output until its run ends, then begin another output.
        let name = format!("killed-{finished}");
        let dataset = scratch.path(&name);
        scratch.job("job.yaml", &with(job.clone(), &json!({"output": {"path": name}})));
        let delay = duration.mul_f64(moments.next().unwrap());
        let mut run = scratch.command(&["run", "job.yaml", "--quiet"]).stdin(Stdio::null()).spawn().unwrap();
        // Every second kill comes at a random moment, the others right after a commit, however slow the machine is.
        let (deadline, before) = (Instant::now() + delay, count_shards(&dataset));
        let is_due = || match kills % 2 {
            0 => Instant::now() >= deadline,
            _ => (before + 1..expected.len()).contains(&count_shards(&dataset)),
        };
        let status = loop {
            if let Some(status) = run.try_wait().unwrap() {
                break Some(status);
            }
            if is_due() {
                // SIGKILL
                run.kill().unwrap();
                break run.wait().unwrap().code().map(|_| run.wait().unwrap());
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        assert_whole(&dataset, &expected, &format!("after kill {kills}, {delay:?} of {duration:?}"));
        match status {
            Some(status) => {
                assert!(status.success(), "a resumed run failed: {status}");
                assert_eq!(shards(&dataset), expected);
                finished += 1;
            }
            None => {
                kills += 1;
                midway += usize::from((1..expected.len()).contains(&shards(&dataset).len()));
            }
        }
    }
    let name = format!("killed-{finished}");
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    assert_eq!(shards(&scratch.path(&name)), expected);
    let resumed = fs::read_to_string(scratch.path(&name).join("manifest.json")).unwrap();
    assert_eq!(resumed.replace(&name, "undisturbed"), manifest);
    scratch.stillhouse(&["verify", &name]).expect(0);
    assert!(midway >= wanted / 4, "only {midway} of {kills} kills fell between the first and the last commit");
}

/// Proves that a run ended by Ctrl-C or a cluster's SIGTERM has its own exit code, explains how to resume, and keeps
/// its commits.
#[test]
fn a_run_that_is_reported_to_stop_says_how_to_go_on() {
    let scratch = scratch();
    let job = scratch.job("job.yaml", &small_job());
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    let expected = shards(&scratch.path("out"));
    fs::remove_dir_all(scratch.path("out")).unwrap();
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let mut run = scratch.command(&["run", "job.yaml", "--json"]);
        let mut run = run.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(run.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("split_committed")), "{}", job.display());
        let kill = format!("kill -{signal} {}", run.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        let last = lines.last().unwrap();
        let mut said = String::new();
        run.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(run.wait().unwrap().code(), Some(code), "{said}");
        let splits = expected.len();
        for part in ["interrupted; ", &format!(" of {splits} splits are done and stay: run the same command again")] {
            assert!(said.contains(part), "{part:?} is not in {said:?}");
        }
        assert!(last.contains("\"error\":\"interrupted"), "{last}");
        assert_whole(&scratch.path("out"), &expected, signal);
    }
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    assert_eq!(shards(&scratch.path("out")), expected);
}

#[test]
fn threads_and_parallel_splits_change_no_byte() {
    let scratch = scratch();
    scratch.make(&small_job());
    let expected = shards(&scratch.path("out"));
    for (threads, splits) in [("1", 1), ("2", 3), ("4", 2)] {
        let name = format!("out-{threads}-{splits}");
        let job = with(small_job(), &json!({"output": {"path": name}, "engine": {"parallel_splits": splits}}));
        scratch.job("job.yaml", &job);
        scratch.stillhouse(&["run", "job.yaml", "--quiet", "--threads", threads]).expect(0);
        assert_eq!(shards(&scratch.path(&name)), expected, "{threads} threads, {splits} splits at once");
    }
}

#[test]
fn finished_and_foreign_outputs_are_left_alone() {
    let scratch = Scratch::with_corpus(2, 600);
    let out = scratch.make(&job());
    let before = files(&out);
    let again = scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert!(again.stdout.contains("complete already"), "{}", again.stdout);
    assert_eq!(files(&out), before);

    // Another job's output is refused without `--overwrite`.
    scratch.job("job.yaml", &with(job(), &json!({"seed": 43})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&["output.path", "out", "another job", "--overwrite"]);
    assert_eq!(files(&out), before);
    scratch.stillhouse(&["run", "job.yaml", "--quiet", "--overwrite"]).expect(0);
    assert_ne!(shards(&out), shards_of(&before));
    scratch.stillhouse(&["verify", "out"]).expect(0);

    // Foreign files are refused even with `--overwrite`.
    let foreign = scratch.path("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("thesis.tex"), "precious").unwrap();
    scratch.job("job.yaml", &with(job(), &json!({"output": {"path": "foreign"}})));
    for arguments in [&["run", "job.yaml"][..], &["run", "job.yaml", "--overwrite"]] {
        scratch.stillhouse(arguments).expect(2).says(&["output.path", "not of a Stillhouse job"]);
        assert_eq!(fs::read_dir(&foreign).unwrap().count(), 1);
    }
}

fn shards_of(
    files: &std::collections::BTreeMap<std::path::PathBuf, String>,
) -> std::collections::BTreeMap<String, String> {
    files
        .iter()
        .filter_map(|(path, sha256)| Some((path.strip_prefix("data").ok()?.to_str()?.to_owned(), sha256.clone())))
        .collect()
}
