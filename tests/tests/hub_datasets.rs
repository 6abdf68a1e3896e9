//! Tests data sets of the Hugging Face hub as input and as finished data sets, against a hub on this machine that Python's
//! `huggingface_hub` also reads.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use stillhouse_tests::hub_datasets::{DatasetHub, TOKEN};
use stillhouse_tests::{CommandOutput, Scratch, byte_tokenizer, corpus, files, root, run_command, shards, with};

use crate::stores::packing_job;

/// Lists and reads the data set with `huggingface_hub`: path, size and hash of each file.
const READ_SCRIPT: &str = "
import hashlib, json, sys
from huggingface_hub import HfApi, HfFileSystem
system = HfFileSystem(endpoint=sys.argv[1], token=False)
found = {}
for path in sorted(system.glob('datasets/tests/corpus/**')):
    info = system.info(path)
    if info['type'] == 'file':
        data = system.open(path, 'rb', block_size=1000).read()
        found[path.removeprefix('datasets/tests/corpus/')] = [info['size'], hashlib.sha256(data).hexdigest()]
sha = HfApi(endpoint=sys.argv[1], token=False).dataset_info('tests/corpus', expand=['sha']).sha
print(json.dumps({'sha': sha, 'files': found}))
";

fn gzip(path: &Path, text: &str) {
    let mut encoder = GzEncoder::new(File::create(path).unwrap(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap();
}

/// A folder with the corpus in several files, compressed and not, and files that are no documents.
fn dataset_folder(scratch: &Scratch) -> PathBuf {
    let folder = scratch.path("dataset");
    fs::create_dir_all(folder.join("data/more of it")).unwrap();
    let lines: Vec<String> = corpus(12, 3000).lines().map(|line| format!("{line}\n")).collect();
    gzip(&folder.join("data/a.jsonl.gz"), &lines[..5].concat());
    fs::write(folder.join("data/b.jsonl"), lines[5..7].concat()).unwrap();
    gzip(&folder.join("data/c.jsonl.gz"), &lines[7..9].concat());
    gzip(&folder.join("data/more of it/d #1?.jsonl.gz"), &lines[9..].concat());
    fs::write(folder.join("README.md"), "# Speeches\n").unwrap();
    fs::write(folder.join(".gitattributes"), "*.gz filter=lfs\n").unwrap();
    folder
}

struct User {
    scratch: Scratch,
    hub: DatasetHub,
    folder: PathBuf,
    token: Option<&'static str>,
}

impl User {
    fn new() -> Self {
        let scratch = Scratch::new();
        let folder = dataset_folder(&scratch);
        let hub = DatasetHub::start(&folder);
        Self { scratch, hub, folder, token: None }
    }

    /// Runs the program. Its output has neither the token nor a signature, even at the most verbose level.
    fn run(&self, arguments: &[&str]) -> CommandOutput {
        let mut command = self.scratch.command(arguments);
        self.hub.environment(&mut command);
        command.env("STILLHOUSE_LOG", "debug,hyper=info");
        if let Some(token) = self.token {
            command.env("HF_TOKEN", token);
        }
        let ran = run_command(&mut command);
        for text in [&ran.stdout, &ran.stderr] {
            assert!(!text.contains(TOKEN) && !text.contains("Signature="), "{text}");
        }
        ran
    }

    fn job(&self, patch: &Value) -> CommandOutput {
        self.scratch.job("job.yaml", &with(packing_job(), patch));
        self.run(&["run", "job.yaml"])
    }
}

#[test]
fn the_hub_of_these_tests_is_one_that_its_own_library_reads() {
    let user = User::new();
    let mut command = Command::new(root().join(".venv/bin/python"));
    command.args(["-P", "-c", READ_SCRIPT, &user.hub.url]).env("HF_HOME", user.scratch.path("home"));
    user.hub.environment(&mut command);
    let found = run_command(&mut command).expect(0).json();
    let expected = files(&user.folder).into_iter().map(|(name, sha256)| {
        let size = fs::metadata(user.folder.join(&name)).unwrap().len();
        (name.to_str().unwrap().to_owned(), json!([size, sha256]))
    });
    // globs of that library skip no hidden files
    assert_eq!(found["files"], Value::Object(expected.collect()));
    assert_eq!(found["sha"], format!("{:040x}", 0xabc_0000));
}

#[test]
fn a_data_set_of_the_hub_is_read_as_files_are() {
    let mut user = User::new();
    user.hub.make_private();
    user.token = Some(TOKEN);
    let split = json!({"split_megabytes": 0.004});
    let local = with(json!({"input": {"paths": ["dataset"]}, "output": {"path": "local"}}), &json!({"input": split}));
    user.job(&local).expect(0);
    let expected = shards(&user.scratch.path("local"));
    assert!(expected.len() > 2, "{expected:?}");

    for (n, path) in ["", "@main/data/**/*.jsonl{,.gz}"].into_iter().enumerate() {
        let (path, out) = (format!("{}{path}", DatasetHub::DATASET), format!("of-hub-{n}"));
        let remote = json!({"input": {"paths": [path]}, "output": {"path": out}});
        user.hub.take_requests();
        user.job(&with(remote, &json!({"input": split}))).expect(0);
        if n == 0 {
            assert_eq!(shards(&user.scratch.path(&out)), expected);
        }
        let requests = user.hub.take_requests();
        assert!(requests.iter().all(|r| r.has_token != r.for_content), "{requests:#?}");
        // the branch is asked for once, and the URL of each content is used again
        let count = |part: &str| requests.iter().filter(|r| r.line.contains(part)).count();
        assert_eq!(count("/revision/main"), 1);
        let contents = requests.iter().filter(|r| r.for_content).count();
        assert!(count("/resolve/") < contents, "{contents} of {requests:#?}");
        user.run(&["verify", &out]).expect(0);
    }

    // a job for it is proposed, planned and run without a copy
    let data = format!("{}/data", DatasetHub::DATASET);
    let tokenizer = byte_tokenizer();
    let tokenizer = tokenizer.to_str().unwrap();
    user.run(&[
        "init",
        &data,
        "--yes",
        "--no-teacher",
        "--tokenizer",
        tokenizer,
        "--length",
        "64",
        "--job",
        "own.yaml",
    ])
    .expect(0);
    let job = fs::read_to_string(user.scratch.path("own.yaml")).unwrap();
    assert!(job.contains(&data), "{job}");
    user.run(&["plan", "own.yaml"]).expect(0);

    // the finished data set goes back to the hub, and is read from there
    user.hub.commit("main", &user.scratch.path("local"));
    let shown = user.run(&["inspect", DatasetHub::DATASET]).expect(0);
    let here = user.run(&["inspect", "local"]).expect(0);
    let rows = |text: &str| text.lines().filter(|line| line.contains("tokens")).map(str::to_owned).collect::<Vec<_>>();
    assert!(!rows(&here.stdout).is_empty() && rows(&shown.stdout) == rows(&here.stdout), "{}", shown.stdout);
    user.run(&["verify", DatasetHub::DATASET]).expect(0);
}

#[test]
fn an_ended_signature_and_a_busy_hub_are_no_end() {
    let user = User::new();
    user.hub.add_fault("/tree/", 429, "ratelimit: \"api\";r=0;t=1\r\n");
    user.hub.add_fault("/contents/", 403, "");
    user.hub.add_fault("/contents/", 503, "");
    let gz = format!("{}/data/*.gz", DatasetHub::DATASET);
    user.job(&json!({"input": {"paths": [gz]}})).expect(0);
    let lines: Vec<String> = user.hub.take_requests().into_iter().map(|r| r.line).collect();
    assert!(lines.iter().filter(|line| line.contains("/contents/")).count() >= 4, "{lines:#?}");
}

#[test]
fn a_branch_that_moves_is_noticed_where_files_changed() {
    let user = User::new();
    let job = json!({"input": {"paths": [format!("{}/data/*.gz", DatasetHub::DATASET)], "split_megabytes": 0.002}});
    user.job(&job).expect(0);
    // a commit that changes another file of the data set
    let was = shards(&user.scratch.path("out"));
    fs::remove_file(user.scratch.path("out/_SUCCESS")).unwrap();
    fs::remove_file(user.scratch.path("out/manifest.json")).unwrap();
    fs::write(user.folder.join("README.md"), "# Other speeches\n").unwrap();
    user.hub.commit("main", &user.folder);
    user.job(&job).expect(0);
    assert_eq!(shards(&user.scratch.path("out")), was);
    // a commit that changes a file of the job
    fs::remove_file(user.scratch.path("out/_SUCCESS")).unwrap();
    fs::remove_file(user.scratch.path("out/manifest.json")).unwrap();
    gzip(&user.folder.join("data/c.jsonl.gz"), &corpus(2, 2000));
    user.hub.commit("main", &user.folder);
    user.job(&job).expect(2).says(&["holds the output of another job", "input c.jsonl.gz: "]);
}

#[test]
fn what_cannot_be_read_of_the_hub_is_said() {
    let mut user = User::new();
    let run = |user: &User, path: &str, code: i32| user.job(&json!({"input": {"paths": [path]}})).expect(code);
    run(&user, "hf://datasets/tests/corpus@v9", 1).says(&["404 RevisionNotFound: the data set has no such revision"]);
    run(&user, "hf://datasets/tests/nothing", 1).says(&["401 RepoNotFound", "set HF_TOKEN to a valid token"]);
    run(&user, "hf://datasets/tests/corpus/nothing", 2).says(&["input.paths[0]", "no such file or folder"]);
    run(&user, "hf://datasets/tests/corpus/data/*.parquet", 2).says(&["matches no file"]);
    run(&user, "hf://tests/corpus/data", 2).says(&["hf://…", "names no data set of the hub", "valid: hf://datasets/"]);
    user.hub.make_private();
    run(&user, DatasetHub::DATASET, 1).says(&["the data set is private or gated, or does not exist"]);
    user.token = Some("hf_wrong");
    run(&user, DatasetHub::DATASET, 1).says(&["set HF_TOKEN to a valid token that may read it"]);
    let to = json!({"input": {"paths": ["dataset"]}, "output": {"path": "hf://datasets/tests/corpus/out"}});
    user.job(&to).expect(2).says(&["output.path", "the hub is only read from"]);
    user.hub.take_requests();
    let mut offline = user.scratch.command(&["inspect", DatasetHub::DATASET]);
    user.hub.environment(&mut offline);
    run_command(offline.env("HF_HUB_OFFLINE", "1")).expect(2).says(&["HF_HUB_OFFLINE forbids requests to the hub"]);
    assert!(user.hub.take_requests().is_empty());
}
