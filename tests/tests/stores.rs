//! Tests corpora in a bucket, shards in a bucket and copies between locations, with a real S3 server.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use stillhouse_tests::proxy::{FaultPlan, FaultProxy};
use stillhouse_tests::rclone::Rclone;
use stillhouse_tests::s3::{self, ADMIN, Keys, S3};
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::{CommandOutput, Scratch, byte_tokenizer, corpus, files, job, run_command, shards, with};

use crate::exports::{DISTILLKIT, MEGATRON};

/// A fast job without a teacher that uses all features that involve the store.
pub(crate) fn packing_job() -> Value {
    json!({
        "version": 1,
        "name": "packing",
        "input": {"format": "jsonl", "paths": ["corpus.jsonl"]},
        "tokenizer": {"path": byte_tokenizer()},
        "pack": {"length": 64},
        "subtokens": {"length": 4},
        "output": {"path": "out"}
    })
}

/// A user of a store. Every command gets the endpoint and the keys from the environment.
pub(crate) struct User<'a> {
    pub scratch: &'a Scratch,
    pub endpoint: String,
    pub keys: Keys,
}

impl User<'_> {
    pub fn run(&self, arguments: &[&str]) -> CommandOutput {
        let mut command = self.scratch.command(arguments);
        s3::environment(&mut command, &self.endpoint, self.keys);
        command.env("STILLHOUSE_LOG", "debug,hyper=info,h2=info");
        let ran = run_command(&mut command);
        // even at the most verbose log level, the output contains no secret and no signature
        for text in [&ran.stdout, &ran.stderr] {
            assert!(!text.contains(self.keys.secret) && !text.contains("Signature="), "{text}");
        }
        ran
    }

    /// Writes and runs a job.
    pub fn job(&self, job: &Value) -> CommandOutput {
        self.scratch.job("job.yaml", job);
        self.run(&["run", "job.yaml"])
    }
}

/// SHA-256 of every shard under a prefix of a bucket, by name.
pub(crate) fn shards_in(s3: &S3, bucket: &str, prefix: &str) -> BTreeMap<String, String> {
    let data = format!("{prefix}/data/");
    let files = s3.files(bucket, &data).into_iter();
    files.map(|(key, sha256)| (key.strip_prefix(&data).unwrap().to_owned(), sha256)).collect()
}

/// Asserts exit code 1 and exactly one error line on stderr.
#[track_caller]
fn assert_fails(ran: CommandOutput, parts: &[&str]) {
    let ran = ran.expect(1).says(parts);
    let errors: Vec<&str> = ran.stderr.lines().filter(|line| line.contains("error")).collect();
    assert!(errors.len() == 1 && !errors[0].contains('<') && errors[0].len() < 400, "{}", ran.stderr);
}

#[test]
fn a_job_from_bucket_to_bucket_and_copies_of_it() {
    let scratch = Scratch::with_corpus(6, 900);
    let local = with(job(), &json!({"input": {"split_megabytes": 0.0015}}));
    let expected = shards(&scratch.make(&local));
    assert!(expected.len() > 2);

    let weed = Seaweed::start();
    let s3 = weed.s3();
    weed.create_bucket("corpora");
    weed.create_bucket("shards");
    s3.put("corpora", "speeches/2024/corpus.jsonl", corpus(6, 900).as_bytes());
    let user = User { scratch: &scratch, endpoint: weed.endpoint().to_owned(), keys: ADMIN };
    let remote = with(
        local.clone(),
        &json!({
            "input": {"paths": ["s3://corpora/speeches/20??/*.jsonl"]},
            "output": {"path": "s3://shards/team a/small"},
            "storage": {"endpoint": weed.endpoint(), "path_style": true}
        }),
    );

    // the same bytes as on a disk, and no unfinished upload
    let plan = {
        scratch.job("job.yaml", &remote);
        user.run(&["plan", "job.yaml"]).expect(0)
    };
    assert!(plan.stdout.contains("s3://shards/team a/small"), "{}", plan.stdout);
    assert!(s3.list("shards", "").is_empty());
    let made = user.job(&remote).expect(0);
    assert!(made.stdout.contains("s3://shards/team a/small"), "{}", made.stdout);
    assert_eq!(shards_in(&s3, "shards", "team a/small"), expected);
    assert_eq!(s3.list_multipart_uploads("shards"), []);
    let left = s3.list("shards", "team a/small/_stillhouse/");
    assert!(left.keys().all(|k| k.ends_with("plan.json") || k.contains("/splits/")), "{left:?}");
    let manifest = String::from_utf8(s3.get("shards", "team a/small/manifest.json").unwrap()).unwrap();
    assert!(!manifest.contains(ADMIN.secret) && !manifest.contains(ADMIN.access), "{manifest}");

    // a second run does nothing; another job is refused, then overwrites when told to
    let before = s3.files("shards", "");
    let again = user.run(&["run", "job.yaml"]).expect(0);
    assert!(again.stdout.contains("complete already"), "{}", again.stdout);
    let other = with(remote.clone(), &json!({"seed": 43}));
    user.job(&other).expect(2).says(&["output.path", "s3://shards/team a/small", "another job", "--overwrite"]);
    assert_eq!(s3.files("shards", ""), before);
    user.run(&["run", "job.yaml", "--overwrite", "--quiet"]).expect(0);
    assert_ne!(shards_in(&s3, "shards", "team a/small"), expected);
    user.run(&["verify", "s3://shards/team a/small", "--teacher"]).expect(0);

    // a lost shard is made again with the same bytes
    user.job(&remote).expect(2);
    user.run(&["run", "job.yaml", "--overwrite", "--quiet"]).expect(0);
    let (lost, sha256) = expected.iter().next().unwrap();
    s3.delete("shards", "team a/small/_SUCCESS");
    s3.delete("shards", &format!("team a/small/data/{lost}"));
    user.run(&["inspect", "s3://shards/team a/small"]).expect(1).says(&["no _SUCCESS"]);
    user.run(&["run", "job.yaml", "--quiet"]).expect(0);
    assert_eq!(shards_in(&s3, "shards", "team a/small").get(lost), Some(sha256));

    what_is_damaged_in_a_bucket_is_made_again(&user, &s3, &expected);
    an_object_that_is_another_one_is_refused(&user, &s3);
    queries_read_buckets(&user, &s3);
    reading_is_ranged(&weed, &scratch);
    exports_are_checked(&user, &s3, &expected);
    abandoned_uploads_are_aborted(&user, &s3);
    failures_are_reported_in_a_line(&user, &s3, &remote);
}

/// Proves that lost or overwritten shards and records of a finished data set are reported and made again with the same
/// bytes.
fn what_is_damaged_in_a_bucket_is_made_again(user: &User<'_>, s3: &S3, expected: &BTreeMap<String, String>) {
    let place = "s3://shards/team a/small";
    let small = "team a/small";
    let whole = s3.files("shards", &format!("{small}/"));
    let name = expected.keys().next_back().unwrap();
    let key = format!("{small}/data/{name}");
    let bytes = s3.get("shards", &key).unwrap();
    let garbage: Vec<u8> = bytes.iter().map(|b| b ^ 1).collect();
    let ways: [&dyn Fn(); 3] =
        [&|| s3.delete("shards", &key), &|| s3.put("shards", &key, &bytes[1..]), &|| s3.put("shards", &key, &garbage)];
    for (i, harm) in ways.iter().enumerate() {
        harm();
        if i < 2 {
            let mend = format!("stillhouse repair '{place}' job.yaml");
            user.run(&["run", "job.yaml"]).expect(1).says(&[name, &mend]);
        } else {
            user.run(&["run", "job.yaml", "--check"]).expect(1).says(&[name, "sha256"]);
        }
        let found = user.run(&["verify", place]).expect(1);
        assert!(found.stdout.contains("stillhouse repair"), "{}", found.stdout);
        let repaired = user.run(&["repair", place, "job.yaml", "--json"]).expect(0);
        assert_eq!(repaired.json()["remade"], json!([format!("data/{name}")]));
        assert_eq!(shards_in(s3, "shards", small), *expected);
    }
    let record = format!("{small}/_stillhouse/splits/00000.json");
    for harm in [&b"{"[..], b""] {
        s3.put("shards", &record, harm);
        user.run(&["repair", place, "job.yaml"]).expect(0);
    }
    s3.delete("shards", &format!("{small}/manifest.json"));
    user.run(&["repair", place, "job.yaml"]).expect(0);
    // a record that was written again names no upload, because it is complete
    let known = |files: BTreeMap<String, String>| -> BTreeMap<String, String> {
        files.into_iter().filter(|(key, _)| !key.contains("/_stillhouse/")).collect()
    };
    assert_eq!(known(s3.files("shards", &format!("{small}/"))), known(whole));
    assert_eq!(s3.list_multipart_uploads("shards"), []);
    user.run(&["run", "job.yaml", "--quiet", "--check"]).expect(0);
}

/// Proves that an object of equal size is recognised as changed by its ETag and its documents.
fn an_object_that_is_another_one_is_refused(user: &User<'_>, s3: &S3) {
    let key = "speeches/2024/corpus.jsonl";
    let corpus = s3.get("corpora", key).unwrap();
    let before = s3.files("shards", "");
    let mut other = corpus.clone();
    let at = corpus.windows(8).position(|w| w == b"\"text\":\"").unwrap() + 8;
    other[at] ^= 1;
    s3.put("corpora", key, &other);
    user.run(&["run", "job.yaml"]).expect(2).says(&["corpus.jsonl", "ETag", "other input", "split 0"]);
    assert_eq!(s3.files("shards", ""), before);
    s3.put("corpora", key, &corpus);
    user.run(&["run", "job.yaml", "--quiet"]).expect(0);
    assert_eq!(s3.files("shards", ""), before);
}

/// Proves that `input.sql` reads buckets, and that this machine keeps the rows only while the job runs.
fn queries_read_buckets(user: &User, s3: &S3) {
    let sql = json!({"input": {"sql": "SELECT text FROM input WHERE length(text) > 10 ORDER BY text"}});
    let local = with(with(packing_job(), &sql), &json!({"output": {"path": "queried"}}));
    let expected = shards(&user.scratch.make(&local));
    let place =
        json!({"input": {"paths": ["s3://corpora/speeches/**/*.jsonl"]}, "output": {"path": "s3://shards/queried"}});
    user.scratch.job("job.yaml", &with(with(packing_job(), &sql), &place));
    let mut command = user.scratch.command(&["run", "job.yaml", "--quiet"]);
    s3::environment(&mut command, &user.endpoint, user.keys);
    let cache = user.scratch.path("cache");
    run_command(command.env("XDG_CACHE_HOME", &cache)).expect(0);
    assert_eq!(shards_in(s3, "shards", "queried"), expected);
    assert_eq!(fs::read_dir(cache.join("stillhouse/sql")).unwrap().count(), 0);
}

/// Proves that reading a column of a row fetches a few ranges, not a shard.
fn reading_is_ranged(weed: &Seaweed, scratch: &Scratch) {
    let proxy = FaultProxy::start(weed.endpoint(), FaultPlan { probability: 0.0, ..FaultPlan::default() });
    let user = User { scratch, endpoint: proxy.endpoint(), keys: ADMIN };
    // large enough to distinguish ranges from whole shards
    scratch.write("large.jsonl", &corpus(33, 200_000));
    let large =
        with(packing_job(), &json!({"input": {"paths": ["large.jsonl"]}, "output": {"path": "s3://shards/large"}}));
    user.job(&large).expect(0);
    let s3 = weed.s3();
    let shard = *s3.list("shards", "large/data/").values().max().unwrap();
    assert!(shard > 1_000_000, "{shard}");

    proxy.clear();
    let arguments = ["inspect", "s3://shards/large", "--row", "5000", "--column", "document_ids", "--json"];
    let inspected = user.run(&arguments).expect(0).json();
    assert!(inspected["values"][0]["values"].is_array(), "{inspected}");
    let requests = proxy.requests();
    let of_shards: Vec<_> = requests.iter().filter(|r| r.path.contains(".parquet") && r.method == "GET").collect();
    assert!(!of_shards.is_empty() && of_shards.iter().all(|r| r.range.is_some()), "{of_shards:#?}");
    let fetched: u64 = of_shards.iter().map(|r| r.response_bytes).sum();
    assert!(fetched * 5 < shard, "{fetched} of {shard} bytes were fetched: {of_shards:#?}");

    // the same values as in the file
    let whole = user.run(&["inspect", "s3://shards/large", "--row", "5000", "--json"]).expect(0).json();
    let ids: Vec<u64> = whole["row"]["tokens"].as_array().unwrap().iter().map(|t| t["id"].as_u64().unwrap()).collect();
    let column = ["inspect", "s3://shards/large", "--row", "5000", "--column", "input_ids", "--json"];
    let values = user.run(&column).expect(0).json()["values"][0]["values"].clone();
    assert_eq!(values, json!(ids));
    user.run(&["inspect", "s3://shards/large", "--column", "ids"]).expect(2).says(&["--column", "ids", "input_ids"]);
}

fn exports_are_checked(user: &User, s3: &S3, expected: &BTreeMap<String, String>) {
    let scratch = user.scratch;
    let out = scratch.path("out");
    assert_eq!(&shards(&out), expected);

    // a dry run, then the copy
    let dry = user.run(&["export", "out", "s3://shards/copy", "--dry-run"]).expect(0);
    assert!(dry.stdout.contains("would be copied") && dry.stdout.contains("_SUCCESS"), "{}", dry.stdout);
    assert!(s3.list("shards", "copy/").is_empty());
    user.run(&["export", "out", "s3://shards/copy"]).expect(0);
    assert_eq!(&shards_in(s3, "shards", "copy"), expected);
    for (name, sha256) in expected {
        let head = s3.head("shards", &format!("copy/data/{name}")).unwrap();
        assert_eq!(head.get("x-amz-meta-sha256"), Some(sha256), "{head:?}");
    }
    let plan = String::from_utf8(s3.get("shards", "copy/_stillhouse/plan.json").unwrap()).unwrap();
    assert!(plan.contains("\"job_folder\": \"\""), "{plan}");
    user.run(&["verify", "s3://shards/copy"]).expect(0);

    // a second export copies nothing; after an interruption it copies what is missing
    let copied = |ran: CommandOutput| -> Vec<String> {
        let last: Value = serde_json::from_str(ran.expect(0).stdout.lines().last().unwrap()).unwrap();
        let files = last["export"]["files"].as_array().unwrap().clone();
        let new = files.iter().filter(|f| f["there"] == false);
        new.map(|f| f["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(copied(user.run(&["export", "out", "s3://shards/copy", "--json"])), [""; 0]);
    let lost = expected.keys().next_back().unwrap();
    s3.delete("shards", &format!("copy/data/{lost}"));
    s3.delete("shards", "copy/_SUCCESS");
    assert_eq!(
        copied(user.run(&["export", "out", "s3://shards/copy", "--json"])),
        [format!("data/{lost}"), "_SUCCESS".into()]
    );

    // from store to store, and from store to disk
    user.run(&["export", "s3://shards/copy", "s3://corpora/second", "--quiet"]).expect(0);
    assert_eq!(&shards_in(s3, "corpora", "second"), expected);
    user.run(&["export", "s3://corpora/second", "back", "--parallel", "1"]).expect(0);
    assert_eq!(&shards(&scratch.path("back")), expected);
    user.run(&["verify", "back"]).expect(0);
    let manifest = |path: &str| fs::read(scratch.path(path).join("manifest.json")).unwrap();
    assert_eq!(manifest("back"), manifest("out"));

    // exports for other readers have the same files in a bucket as on a disk
    for how in [DISTILLKIT.as_slice(), MEGATRON.as_slice()] {
        user.run(&[["export", "out", "kd", "-q"].as_slice(), how].concat()).expect(0);
        user.run(&[["export", "s3://shards/copy", "s3://shards/kd", "-q"].as_slice(), how].concat()).expect(0);
        let there = s3.files("shards", "kd/").into_iter().filter(|(key, _)| !key.contains("/_stillhouse/"));
        let there: BTreeMap<_, _> = there.map(|(key, sum)| (key.strip_prefix("kd/").unwrap().into(), sum)).collect();
        let mut here = files(&scratch.path("kd"));
        here.retain(|name, _| !name.starts_with("_stillhouse"));
        assert_eq!(there, here);
        assert_eq!(s3.list_multipart_uploads("shards"), []);
        fs::remove_dir_all(scratch.path("kd")).unwrap();
        s3.files("shards", "kd/").keys().for_each(|key| s3.delete("shards", key));
    }

    // a damaged shard is not copied, and another data set is not overwritten
    let damaged = scratch.path("back/data").join(lost);
    let mut bytes = fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&damaged, &bytes).unwrap();
    assert_fails(
        user.run(&["export", "back", "s3://shards/damaged"]),
        &[lost.as_str(), "has sha256", "the manifest has"],
    );
    assert!(!s3.list("shards", "damaged/").keys().any(|k| k.contains(lost) || k.contains("_SUCCESS")));
    user.run(&["export", "out", "s3://shards/large"]).expect(2).says(&["another data set"]);
    s3.put("shards", "notes/mine.txt", b"mine");
    user.run(&["export", "out", "s3://shards/notes"]).expect(2).says(&["not of this data set"]);
    // a file with a shard's name but other content is not accepted as the shard
    s3.delete("shards", "copy/_SUCCESS");
    s3.put("shards", &format!("copy/data/{lost}"), &bytes);
    assert_fails(user.run(&["export", "out", "s3://shards/copy"]), &[lost.as_str(), "other content"]);
}

fn abandoned_uploads_are_aborted(user: &User, s3: &S3) {
    let ours = "corpora/second/data/train-00000-of-00009.parquet";
    s3.create_multipart_upload("corpora", "second/data/train-00000-of-00009.parquet");
    s3.create_multipart_upload("corpora", "second/data/notes.txt");
    s3.create_multipart_upload("corpora", "secondary/data/train-00000-of-00009.parquet");
    let dry = user.run(&["clean", "s3://corpora/second", "--dry-run"]).expect(0);
    assert!(dry.stdout.contains("data/train-00000-of-00009.parquet") && dry.stdout.contains("1 unfinished upload"));
    assert_eq!(s3.list_multipart_uploads("corpora").len(), 3);
    user.run(&["clean", "s3://corpora/second"]).expect(0);
    let left: Vec<String> = s3.list_multipart_uploads("corpora").into_iter().map(|(key, _)| key).collect();
    assert_eq!(left, ["second/data/notes.txt", "secondary/data/train-00000-of-00009.parquet"], "{ours}");
    assert_fails(user.run(&["clean", "s3://corpora/speeches"]), &["s3://corpora/speeches", "no Stillhouse job"]);
}

fn failures_are_reported_in_a_line(user: &User, s3: &S3, remote: &Value) {
    let before = s3.files("shards", "");
    let elsewhere = with(remote.clone(), &json!({"output": {"path": "s3://shards/failures"}}));
    let nobody = User { keys: s3::NOBODY, endpoint: user.endpoint.clone(), ..*user };
    assert_fails(nobody.job(&elsewhere), &["s3://corpora/speeches", "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"]);
    let wrong = Keys { access: ADMIN.access, secret: "wrong-secret-of-nobody" };
    let wrong = User { keys: wrong, endpoint: user.endpoint.clone(), ..*user };
    assert_fails(wrong.job(&elsewhere), &["SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"]);
    let reader = User { keys: s3::READER, endpoint: user.endpoint.clone(), ..*user };
    assert_fails(reader.job(&elsewhere), &["s3://shards/failures", "403", "s3:PutObject"]);
    let missing = with(elsewhere.clone(), &json!({"output": {"path": "s3://no-such-bucket/x"}}));
    assert_fails(user.job(&missing), &["no-such-bucket", "does not exist"]);
    let missing = with(elsewhere.clone(), &json!({"input": {"paths": ["s3://no-such-bucket/*.jsonl"]}}));
    assert_fails(user.job(&missing), &["no-such-bucket", "does not exist"]);
    let missing = with(elsewhere.clone(), &json!({"input": {"paths": ["s3://corpora/speeches/1999/*.jsonl"]}}));
    user.job(&missing).expect(2).says(&["input.paths[0]", "matches no file", "s3://corpora/speeches"]);
    assert_fails(
        user.run(&["inspect", "s3://shards/failures"]),
        &["s3://shards/failures", "not a Stillhouse data set"],
    );
    assert_fails(user.run(&["inspect", "s3://no-such-bucket/x"]), &["no-such-bucket", "does not exist"]);
    let deaf = User { endpoint: "http://127.0.0.1:9".into(), ..*user };
    let job = with(elsewhere.clone(), &json!({"storage": {"endpoint": null}}));
    assert_fails(deaf.job(&job), &["no service listens at http://127.0.0.1:9"]);
    user.run(&["inspect", "s3://KEY:hunter2@shards/x"]).expect(2).says(&["never from a URL"]);
    assert_eq!(s3.files("shards", ""), before, "something was left behind");
    assert_eq!(s3.list_multipart_uploads("shards"), []);
}

/// Proves that a store which ignores the condition of a conditional PUT is detected before the job starts.
#[test]
fn a_store_that_ignores_conditions_is_refused_unless_trusted() {
    let scratch = Scratch::with_corpus(2, 3000);
    let rclone = Rclone::start();
    rclone.create_bucket("shards");
    let user = User { scratch: &scratch, endpoint: rclone.endpoint().to_owned(), keys: ADMIN };
    let job = with(packing_job(), &json!({"output": {"path": "s3://shards/out"}}));
    assert_fails(user.job(&job), &["s3://shards/out", "If-None-Match", "trust_single_writer"]);
    assert_eq!(fs::read_dir(rclone.bucket("shards")).unwrap().count(), 0, "something was left behind");
    let trusting = with(job, &json!({"output": {"storage": {"conditional_put": "trust_single_writer"}}}));
    let ran = user.job(&trusting).expect(0).says(&["warning", "nothing may write here but this run"]);
    assert!(ran.stdout.contains("s3://shards/out"), "{}", ran.stdout);
    let expected = shards(&scratch.make(&with(packing_job(), &json!({}))));
    // rclone's range responses differ from S3's, so read the copy from its folder
    assert_eq!(shards(&rclone.bucket("shards").join("out")), expected);
}

/// Proves that files are read by name over plain HTTP, from any web server.
#[test]
fn files_of_a_web_server_are_read() {
    let scratch = Scratch::with_corpus(2, 3000);
    let expected = shards(&scratch.make(&packing_job()));
    let rclone = Rclone::start_web(&scratch.path(""));
    let url = format!("{}/corpus.jsonl", rclone.endpoint());
    scratch.job("job.yaml", &with(packing_job(), &json!({"input": {"paths": [url]}, "output": {"path": "web"}})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert_eq!(shards(&scratch.path("web")), expected);
    // data sets on a web server can be read, but not written
    let made = format!("{}/web", rclone.endpoint());
    scratch.stillhouse(&["verify", &made]).expect(0);
    let inspected = scratch.stillhouse(&["inspect", &made, "--column", "sequence_id", "--json"]).expect(0).json();
    assert_eq!(inspected["values"][0]["values"], 0, "{inspected}");
    scratch.stillhouse(&["export", "web", &format!("{made}-copy")]).expect(2).says(&["only read from"]);
    scratch.stillhouse(&["export", &made, "fetched", "--quiet"]).expect(0);
    assert_eq!(shards(&scratch.path("fetched")), expected);
    let absent = format!("{}/absent.jsonl", rclone.endpoint());
    scratch.job("job.yaml", &with(packing_job(), &json!({"input": {"paths": [absent]}, "output": {"path": "none"}})));
    let ran = scratch.stillhouse(&["run", "job.yaml"]);
    assert!(matches!(ran.code, Some(1 | 2)), "{}", ran.stderr);
    assert!(ran.stderr.contains("absent.jsonl") && !scratch.path("none").exists(), "{}", ran.stderr);
}

/// Proves that a full disk gives one error line and leaves no partial files.
#[test]
fn a_full_disk_leaves_nothing() {
    let scratch = Scratch::with_corpus(33, 200_000);
    scratch.job("job.yaml", &packing_job());
    let mut command = scratch.command(&["run", "job.yaml", "--quiet"]);
    limit_files_to(&mut command, 1_000_000);
    let ran = run_command(&mut command);
    assert_fails(ran, &["data/train-00000-of-00001.parquet", "out"]);
    assert!(!scratch.path("out").exists(), "{:?}", left(&scratch.path("out")));
}

/// Makes writes beyond this file size fail with EFBIG, which simulates a full disk.
fn limit_files_to(command: &mut std::process::Command, bytes: u64) {
    use std::os::unix::process::CommandExt;
    // SAFETY: Makes only calls that are allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            match libc::setrlimit(libc::RLIMIT_FSIZE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
}

fn left(folder: &Path) -> Vec<std::path::PathBuf> {
    stillhouse_tests::files(folder).into_keys().collect()
}
