//! Proves that a job ends with the same bytes, within its limits on threads and memory, for any number of splits and
//! threads.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use stillhouse_tests::process_stats::{ProcessStats, run_measured, run_measured_with};
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::service::signal;
use stillhouse_tests::{Scratch, byte_teacher, byte_tokenizer, job, nano_job, s3, shards, with};

use crate::stores::shards_in;

/// Timeout of a run; it takes seconds on an idle machine.
const DEADLINE: Duration = Duration::from_secs(150);
/// Timeout of a run that was told to stop.
const STOP_DEADLINE: Duration = Duration::from_secs(60);
/// Threads per compute thread: one pulls splits, one reads, one computes products.
const THREADS_PER_COMPUTE_THREAD: u64 = 3;
/// Threads of the request runtime (8 and 24), and single threads.
const IO_THREADS: u64 = 40;
/// Owner and helper thread of the one device.
const DEVICE_THREADS: u64 = 2;
/// Maximum memory of a run over tiny splits, in bytes: tokenizer, program and libraries…
const BASE_MEMORY_BYTES: u64 = 300_000_000;
/// … plus this per thread, for a split in progress: stack, batches, and encoders of a row group.
const MEMORY_BYTES_PER_THREAD: u64 = 3_000_000;

/// Lines of 1 kB, which each become a split with a split size of 1 kB.
fn lines(count: usize) -> Vec<String> {
    (0..count).map(|i| json!({"text": format!("word{i:04} and some more text, ").repeat(40)}).to_string()).collect()
}

/// A scratch folder whose `corpus.jsonl` has this many splits.
fn scratch(splits: usize) -> Scratch {
    let scratch = Scratch::new();
    scratch.write("corpus.jsonl", &(lines(splits).join("\n") + "\n"));
    scratch
}

/// A job with one split per line and no teacher.
fn plain() -> Value {
    let more = json!({"input": {"split_megabytes": 0.001}, "tokenizer": {"path": byte_tokenizer()}, "extract": null});
    with(job(), &more)
}

/// The same job with a teacher, which sees the beginning of every line.
fn with_teacher(length: u32) -> Value {
    with(plain(), &json!({"extract": job()["extract"], "pack": {"mode": "pad", "length": length}}))
}

/// Writes the job as `NAME.yaml` with the output `NAME`, and runs it under observation.
#[track_caller]
fn run(scratch: &Scratch, job: &Value, name: &str, splits: Option<u64>, threads: u64) -> ProcessStats {
    let patch = json!({"engine": {"parallel_splits": splits}, "output": {"path": name}});
    let file = format!("{name}.yaml");
    scratch.job(&file, &with(job.clone(), &patch));
    run_measured(&mut scratch.command(&["run", &file, "--json", "--threads", &threads.to_string()]), DEADLINE)
}

/// Asserts success and returns the shards.
#[track_caller]
fn expect_shards(scratch: &Scratch, stats: ProcessStats, name: &str) -> BTreeMap<String, String> {
    stats.output.expect(0);
    shards(&scratch.path(name))
}

/// Asserts that the run succeeded within its limits on threads and memory.
#[track_caller]
fn assert_bounds(stats: &ProcessStats, threads: u64, what: &str) {
    assert_eq!(stats.output.code, Some(0), "{what}: {}", stats.output.stderr);
    let most = THREADS_PER_COMPUTE_THREAD * threads + DEVICE_THREADS + IO_THREADS;
    assert!(stats.threads <= most, "{what}: {} threads; at most {most}", stats.threads);
    let most = BASE_MEMORY_BYTES + MEMORY_BYTES_PER_THREAD * threads;
    assert!(stats.memory <= most, "{what}: {} bytes of memory; at most {most}", stats.memory);
    // guards against samples that saw nothing
    assert!(
        stats.threads > 1 && stats.memory > 10_000_000,
        "{what}: {} threads, {} bytes",
        stats.threads,
        stats.memory
    );
}

/// Runs the job with these numbers of splits and threads, and asserts the same bytes each time.
#[track_caller]
fn assert_same(scratch: &Scratch, job: &Value, expected: &BTreeMap<String, String>, runs: &[(Option<u64>, u64)]) {
    for &(splits, threads) in runs {
        let what = format!("{splits:?} splits at once, {threads} threads");
        let stats = run(scratch, job, "at-once", splits, threads);
        assert_eq!(stats.output.code, Some(0), "{what}: {}", stats.output.stderr);
        assert!(shards(&scratch.path("at-once")) == *expected, "{what}: other bytes");
        fs::remove_dir_all(scratch.path("at-once")).unwrap();
        assert_bounds(&stats, threads, &what);
        assert_eq!(stats.events("stalled"), [Value::Null; 0], "{what}");
    }
}

/// The shards of a run with one split at a time.
#[track_caller]
fn one_at_a_time(scratch: &Scratch, job: &Value) -> BTreeMap<String, String> {
    let stats = run(scratch, job, "one-at-a-time", Some(1), 1);
    assert_bounds(&stats, 1, "one split at a time, one thread");
    shards(&scratch.path("one-at-a-time"))
}

/// Asserts that an unfinished output has only complete, correct shards; returns their number.
#[track_caller]
fn assert_whole(dataset: &Path, expected: &BTreeMap<String, String>) -> usize {
    let made = shards(dataset);
    for (name, sha256) in &made {
        assert_eq!(Some(sha256), expected.get(name), "data/{name}");
    }
    for name in ["_SUCCESS", "manifest.json"] {
        assert!(!dataset.join(name).exists(), "{name}");
    }
    made.len()
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

/// Asserts that a run that ended by itself has removed partial files.
#[track_caller]
fn assert_tidy(dataset: &Path, shards: usize) {
    let staging = fs::read_dir(dataset.join("_stillhouse/staging"));
    let staged: Vec<_> = staging.into_iter().flatten().map(|entry| entry.unwrap().file_name()).collect();
    assert!(staged.is_empty(), "half made: {staged:?}");
    let records = fs::read_dir(dataset.join("_stillhouse/splits")).unwrap().count();
    assert_eq!(records, shards, "each shard has its record");
}

#[test]
fn splits_at_once_and_threads_end_within_their_bounds() {
    let scratch = scratch(221);
    let expected = one_at_a_time(&scratch, &plain());
    assert!(expected.len() > 200, "{}", expected.len());
    // `None` means as many splits as threads: the default on a machine with 128 cores.
    let runs = [(Some(1), 128), (Some(120), 1), (Some(120), 128), (None, 128), (Some(1024), 2)];
    assert_same(&scratch, &plain(), &expected, &runs);
}

#[test]
fn splits_at_once_with_a_teacher_end_within_their_bounds() {
    let scratch = scratch(130);
    let expected = one_at_a_time(&scratch, &with_teacher(32));
    assert!(expected.len() > 120, "{}", expected.len());
    assert_same(&scratch, &with_teacher(32), &expected, &[(Some(120), 1), (Some(1024), 128)]);
}

#[test]
fn a_thousand_splits_at_once_end_within_their_bounds() {
    let scratch = scratch(1060);
    // four at a time give the same bytes as one (see above) in less time
    let stats = run(&scratch, &plain(), "four-at-a-time", Some(4), 2);
    assert_bounds(&stats, 2, "four splits at a time");
    let expected = shards(&scratch.path("four-at-a-time"));
    assert!(expected.len() >= 1024, "{}", expected.len());
    assert_same(&scratch, &plain(), &expected, &[(Some(1024), 1), (Some(1024), 128)]);
}

/// Proves that waiting for a query's rows or a store's uploads never depends on another split.
#[test]
fn splits_at_once_from_a_query_into_a_store_end() {
    let scratch = scratch(221);
    let job = with(plain(), &json!({"input": {"sql": "SELECT text FROM input"}}));
    let expected = one_at_a_time(&scratch, &job);
    assert!(expected.len() > 120, "{}", expected.len());
    let weed = Seaweed::start();
    weed.create_bucket("shards");
    for (splits, threads) in [(120, 1), (1024, 128)] {
        let folder = format!("{splits}-{threads}");
        let patch = json!({"engine": {"parallel_splits": splits}, "output": {"path": format!("s3://shards/{folder}")}});
        scratch.job("store.yaml", &with(job.clone(), &patch));
        let mut command = scratch.command(&["run", "store.yaml", "--json", "--threads", &threads.to_string()]);
        s3::environment(&mut command, weed.endpoint(), s3::ADMIN);
        let stats = run_measured(&mut command, DEADLINE);
        assert_bounds(&stats, threads, &format!("{splits} splits at once into a store, {threads} threads"));
        assert!(shards_in(&weed.s3(), "shards", &folder) == expected, "{folder}: other bytes");
        assert_eq!(weed.s3().list_multipart_uploads("shards"), []);
    }
}

#[test]
fn a_stop_with_many_splits_in_flight_is_heard_and_the_run_goes_on() {
    let scratch = scratch(221);
    let expected = expect_shards(&scratch, run(&scratch, &with_teacher(32), "whole", Some(2), 2), "whole");
    for (signal_number, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let patch = json!({"engine": {"parallel_splits": 120}, "output": {"path": "stopped"}});
        scratch.job("job.yaml", &with(with_teacher(32), &patch));
        let mut reported = false;
        let stats =
            run_measured_with(&mut scratch.command(&["run", "job.yaml", "--json"]), STOP_DEADLINE, |process, said| {
                if !reported && said.contains("split_committed") {
                    signal(process, signal_number);
                    reported = true;
                }
            });
        assert_eq!(stats.output.code, Some(code), "{}", stats.output.stderr);
        let last: Value = serde_json::from_str(stats.output.stdout.lines().last().unwrap()).unwrap();
        assert!(last["error"].as_str().unwrap().starts_with("interrupted"), "{last}");
        let made = assert_whole(&scratch.path("stopped"), &expected);
        assert!((1..expected.len()).contains(&made), "{made} of {}: it was not stopped in mid-run", expected.len());
        let says = format!(" of {} splits are done and stay: run the same command again to resume", expected.len());
        assert!(stats.output.stderr.contains(&says), "{}", stats.output.stderr);
        // A shard without a record is made again. A record being written has a temporary name (`X#N`).
        let state = scratch.path("stopped/_stillhouse/splits");
        let records = fs::read_dir(&state).unwrap().filter(|entry| is_json(&entry.as_ref().unwrap().path())).count();

        let resumed = run_measured(&mut scratch.command(&["run", "job.yaml", "--json"]), DEADLINE);
        assert_eq!(resumed.output.code, Some(0), "{}", resumed.output.stderr);
        assert_eq!(resumed.events("job_started")[0]["splits_done"], records);
        assert!(shards(&scratch.path("stopped")) == expected, "other bytes after a resume");
        assert!(fs::read_dir(&state).unwrap().all(|entry| is_json(&entry.unwrap().path())), "half a record stays");
        fs::remove_dir_all(scratch.path("stopped")).unwrap();
    }
}

#[test]
fn a_split_that_fails_among_a_thousand_ends_the_run() {
    const BROKEN: usize = 5;
    let scratch = scratch(1060);
    let expected = expect_shards(&scratch, run(&scratch, &plain(), "whole", Some(4), 2), "whole");

    let mended = lines(1060);
    let mut broken = mended.clone();
    // keep the length, so that split boundaries stay
    broken[BROKEN] = broken[BROKEN].replace("{\"text\":", "{\"text\",");
    scratch.write("corpus.jsonl", &(broken.join("\n") + "\n"));
    for (splits, threads) in [(120, 1), (1024, 128)] {
        let stats = run(&scratch, &plain(), "failed", Some(splits), threads);
        assert_eq!(stats.output.code, Some(1), "{}", stats.output.stderr);
        let said = &stats.output.stderr;
        for part in ["error: split ", "corpus.jsonl", &format!("line {}: broken JSON", BROKEN + 1)] {
            assert!(said.contains(part), "{part:?} is not in {said:?}");
        }
        assert_eq!(said.lines().filter(|line| line.contains("error")).count(), 1, "{said}");
        // the first failure is the reported error, on the last line
        let last: Value = serde_json::from_str(stats.output.stdout.lines().last().unwrap()).unwrap();
        assert!(last["error"].as_str().unwrap().contains("broken JSON"), "{last}");
        let made = assert_whole(&scratch.path("failed"), &expected);
        assert_tidy(&scratch.path("failed"), made);
        assert_eq!(stats.events("split_committed").len(), made);
        let started = stats.events("split_started").len();
        assert!(started < expected.len(), "{started} splits began, though an early one failed");

        // With the line mended the same job resumes, because no committed split had read that line.
        scratch.write("corpus.jsonl", &(mended.join("\n") + "\n"));
        let resumed = run(&scratch, &plain(), "failed", Some(splits), threads);
        assert!(expect_shards(&scratch, resumed, "failed") == expected, "other bytes after a resume");
        fs::remove_dir_all(scratch.path("failed")).unwrap();
        scratch.write("corpus.jsonl", &(broken.join("\n") + "\n"));
    }
}

/// Proves that `engine.memory_megabytes` is a limit: splits wait for each other, and a row group that does not fit is
/// an error.
#[test]
fn the_memory_of_a_job_is_a_limit() {
    let scratch = Scratch::new();
    scratch.write("corpus.jsonl", &(lines(2).join("\n") + "\n"));
    // dense noise, which does not compress: 200 kB for each of 128 tokens
    let patch = json!({
        "pack": {"length": 128, "mode": "pad"},
        "tokenizer": null, "extract": {"teacher": nano_job()["extract"]["teacher"], "noise": {"codec": "dense"}}
    });
    let job = with(plain(), &patch);
    let expected = expect_shards(&scratch, run(&scratch, &job, "without", Some(4), 2), "without");
    assert!(expected.len() >= 2, "{}", expected.len());

    let small = with(job.clone(), &json!({"engine": {"memory_megabytes": 16}}));
    let stats = run(&scratch, &small, "small", Some(4), 2);
    assert_eq!(stats.output.code, Some(2), "{}", stats.output.stderr);
    for part in
        ["error: split ", "corpus.jsonl", "no memory for the ", " MB of a row group: raise `engine.memory_megabytes`"]
    {
        assert!(stats.output.stderr.contains(part), "{part:?} is not in {}", stats.output.stderr);
    }
    assert!(!scratch.path("small/_SUCCESS").exists());

    let enough = with(job, &json!({"engine": {"memory_megabytes": 100}}));
    assert!(expect_shards(&scratch, run(&scratch, &enough, "enough", Some(4), 2), "enough") == expected, "other bytes");

    // `derive` obeys the same limit and reports its stages like `run`
    let derived = |name: &str, megabytes: u32| {
        let views = json!({
            "version": 1, "name": name, "subtokens": {"length": 2}, "output": {"path": name}, "engine": {"memory_megabytes": megabytes}
        });
        scratch.job("views.yaml", &views);
        scratch.stillhouse(&["derive", "without", "views.yaml", "--json"])
    };
    let too_little = derived("little", 16).expect(2);
    too_little.says(&[
        "error: split ",
        "without/data/train-0",
        "no memory for the ",
        "raise `engine.memory_megabytes`",
    ]);
    assert!(!scratch.path("little").exists());
    let made = derived("views", 100).expect(0);
    for stage in ["read", "subtokens", "write"] {
        assert!(made.stdout.contains(&format!(r#""name":"{stage}""#)), "{stage} is not in {}", made.stdout);
    }
}

/// A copy of the small teacher that a test may modify.
fn teacher_copy(scratch: &Scratch) -> std::path::PathBuf {
    let copy = scratch.path("teacher");
    fs::create_dir(&copy).unwrap();
    for file in fs::read_dir(byte_teacher()).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    copy
}

/// The job of [`taught`] with another teacher.
fn taught_by(teacher: &Path) -> Value {
    with(with_teacher(32), &json!({"extract": {"teacher": {"path": teacher}}, "tokenizer": {"path": teacher}}))
}

#[test]
fn a_teacher_that_changes_while_the_job_runs_makes_no_data_set() {
    let scratch = scratch(60);
    let config = teacher_copy(&scratch).join("config.json");
    let job = taught_by(&scratch.path("teacher"));
    let expected = expect_shards(&scratch, run(&scratch, &job, "whole", Some(2), 2), "whole");
    let was = fs::read(&config).unwrap();

    scratch.job("job.yaml", &with(job, &json!({"engine": {"parallel_splits": 2}, "output": {"path": "changed"}})));
    let mut command = scratch.command(&["run", "job.yaml", "--json"]);
    let stats = run_measured_with(&mut command, DEADLINE, |_, said| {
        if said.contains("split_committed") && fs::read(&config).unwrap() == was {
            fs::write(&config, [&was[..], b"\n"].concat()).unwrap();
        }
    });
    assert_eq!(stats.output.code, Some(1), "{}", stats.output.stderr);
    assert!(stats.output.stderr.contains("config.json has changed since the job began"), "{}", stats.output.stderr);
    assert_whole(&scratch.path("changed"), &expected);

    // with the original file the same job resumes
    fs::write(&config, was).unwrap();
    let resumed = run_measured(&mut scratch.command(&["run", "job.yaml", "--json"]), DEADLINE);
    assert!(expect_shards(&scratch, resumed, "changed") == expected, "other bytes after a resume");
}

#[test]
fn a_teacher_whose_logits_are_no_numbers_is_an_error_with_its_first_place() {
    let scratch = scratch(3);
    let weights = teacher_copy(&scratch).join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let norm = tensors.as_object().unwrap().iter().find(|(name, _)| name.ends_with("ln_f.weight")).unwrap().1;
    let width = if norm["dtype"] == "F32" { 4 } else { 2 };
    let first = 8 + header + norm["data_offsets"][0].as_u64().unwrap() as usize;
    // all bits set is NaN in each of the types
    bytes[first..first + width].fill(0xff);
    fs::write(&weights, bytes).unwrap();
    let stats = run(&scratch, &taught_by(&scratch.path("teacher")), "out", Some(1), 2);
    assert_eq!(stats.output.code, Some(1), "{}", stats.output.stderr);
    for part in
        ["error: split 0 (corpus.jsonl): ", "extract: sequence 0, position 1: the teacher's logit of token 0 is NaN"]
    {
        assert!(stats.output.stderr.contains(part), "{part:?} is not in {}", stats.output.stderr);
    }
    assert!(!scratch.path("out").exists(), "nothing was committed");
}

#[test]
fn what_a_query_skipped_is_counted_once_over_a_stop_and_a_resume() {
    let scratch = scratch(221);
    let mut corpus = lines(221);
    (0..221).step_by(20).for_each(|i| corpus[i] = corpus[i].replace("{\"text\":", "{\"text\","));
    scratch.write("corpus.jsonl", &(corpus.join("\n") + "\n"));
    let input = json!({"sql": "SELECT text FROM input", "on_error": "skip", "max_skipped": 0.5});
    let job = with(with_teacher(32), &json!({"input": input}));
    let expected = expect_shards(&scratch, run(&scratch, &job, "whole", Some(2), 2), "whole");
    let statistics = |name: &str| {
        let manifest = fs::read(scratch.path(name).join("manifest.json")).unwrap();
        serde_json::from_slice::<Value>(&manifest).unwrap()["statistics"].clone()
    };
    let whole = statistics("whole");
    assert_eq!(whole["skipped"], json!({"broken JSON": 12}));

    scratch.job("job.yaml", &with(job, &json!({"engine": {"parallel_splits": 2}, "output": {"path": "stopped"}})));
    let mut stopped = false;
    let stats =
        run_measured_with(&mut scratch.command(&["run", "job.yaml", "--json"]), STOP_DEADLINE, |process, said| {
            if !stopped && said.contains("split_committed") {
                signal(process, libc::SIGINT);
                stopped = true;
            }
        });
    assert_eq!(stats.output.code, Some(130), "{}", stats.output.stderr);
    assert!(assert_whole(&scratch.path("stopped"), &expected) < expected.len());
    let resumed = run_measured(&mut scratch.command(&["run", "job.yaml", "--json"]), DEADLINE);
    assert!(expect_shards(&scratch, resumed, "stopped") == expected, "other bytes after a resume");
    assert_eq!(statistics("stopped"), whole);
}
