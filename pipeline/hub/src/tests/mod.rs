//! Tests the hub client against a local fake hub. They use neither the environment nor the network.

mod fake_hub;
mod faults;
mod names;

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use stillhouse_base::error::{ErrorKind, PipelineError};
use tempfile::TempDir;

use self::fake_hub::{COMMIT, FakeHub, Fault, Request, sha256};
use super::{FetchPurpose, Fetched, Hub, HubConfig, HubRef, Token};

const SECRET: &str = "hf_secretsecret";
const CONFIG: &[u8] = br#"{"model_type": "gpt2"}"#;

/// Bytes that are not UTF-8, so that the fake hub serves them from its storage server.
fn weights(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 % 251) as u8 | 0x80).collect()
}

fn reference(text: &str) -> HubRef {
    HubRef::parse(text).unwrap().unwrap()
}

/// A fake hub and an empty cache.
struct Fixture {
    fake_hub: FakeHub,
    cache: TempDir,
}

impl Fixture {
    fn new(files: &[(&str, &[u8])]) -> Self {
        Self { fake_hub: FakeHub::new(files), cache: TempDir::new().unwrap() }
    }

    fn gpt2() -> Self {
        Self::new(&[
            ("config.json", CONFIG),
            ("tokenizer.json", b"{}"),
            ("tokenizer_config.json", b"{\"bos_token\": \"<s>\"}"),
            ("model.safetensors", &weights(300_000)),
            ("pytorch_model.bin", &weights(10)),
            ("README.md", b"read"),
        ])
    }

    fn config(&self) -> HubConfig {
        let mut config = HubConfig::new(&self.fake_hub.hub_url, self.cache.path()).unwrap();
        config.token = Token::new(SECRET, "HF_TOKEN").unwrap();
        config.use_proxy = false;
        config.attempts = 4;
        config.backoff = Duration::from_millis(1);
        config.timeout = Duration::from_secs(5);
        config
    }

    fn fetch_with(&self, config: HubConfig, name: &str, purpose: FetchPurpose) -> Result<Fetched, PipelineError> {
        Hub::new(config).fetch(&reference(name), purpose, &|_, _, _| {})
    }

    fn fetch(&self, name: &str, purpose: FetchPurpose) -> Result<Fetched, PipelineError> {
        self.fetch_with(self.config(), name, purpose)
    }

    fn offline(&self, name: &str, purpose: FetchPurpose) -> Result<Fetched, PipelineError> {
        let before = self.fake_hub.state().requests.len();
        let fetched = self.fetch_with(HubConfig { offline: true, ..self.config() }, name, purpose);
        assert_eq!(self.fake_hub.state().requests.len(), before, "offline");
        fetched
    }

    /// Expects an error whose text contains all parts and no secret.
    fn expect_error(&self, name: &str, purpose: FetchPurpose, parts: &[&str]) -> PipelineError {
        let error = self.fetch(name, purpose).unwrap_err();
        let text = format!("{error} {error:?}");
        for part in parts {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(!text.contains("secret") && !text.contains("SIGNATURE"), "{text}");
        error
    }

    fn repo(&self) -> PathBuf {
        self.cache.path().join("models--org--name")
    }

    fn snapshot(&self) -> PathBuf {
        self.repo().join("snapshots").join(COMMIT)
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn lines(requests: &[Request]) -> Vec<String> {
    requests.iter().map(|r| format!("{} {} {}", r.server, r.method, r.path)).collect()
}

#[test]
fn a_teacher_comes_whole_in_the_layout_of_python_and_the_token_stays_at_the_hub() {
    let fixture = Fixture::gpt2();
    let reported = RefCell::new(Vec::new());
    let fetched = Hub::new(fixture.config())
        .fetch(&reference("hf://org/name"), FetchPurpose::Teacher, &|what, done, total| {
            reported.borrow_mut().push((what.to_owned(), done, total));
        })
        .unwrap();

    assert_eq!(fetched, Fetched { path: fixture.snapshot(), commit: COMMIT.into() });
    assert_eq!(names(&fetched.path), ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);
    assert_eq!(fs::read(fetched.path.join("config.json")).unwrap(), CONFIG);
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));
    assert_eq!(fs::read_to_string(fixture.repo().join("refs/main")).unwrap(), COMMIT);
    #[cfg(unix)]
    assert_eq!(
        fs::read_link(fetched.path.join("model.safetensors")).unwrap(),
        Path::new("../../blobs").join(sha256(&weights(300_000)))
    );
    assert_eq!(names(&fixture.repo().join("blobs")).len(), 4, "no .incomplete is left");
    assert!(fixture.repo().join(".no_exist").join(COMMIT).join("generation_config.json").is_file());
    let reported = reported.into_inner();
    assert!(reported.contains(&("model.safetensors".into(), 0, 300_000)));
    assert_eq!(reported.last(), Some(&("model.safetensors".into(), 300_000, 300_000)));

    let requests = fixture.fake_hub.take_requests();
    let (at_hub, away): (Vec<_>, Vec<_>) = requests.into_iter().partition(|r| r.server == "hub");
    assert_eq!(lines(&away), ["storage GET /bucket/model.safetensors?sig=SIGNATURE"]);
    assert!(away.iter().all(|r| !r.headers.contains_key("authorization")), "the token left the hub");
    assert!(at_hub.iter().all(|r| r.headers["authorization"] == format!("Bearer {SECRET}")));
    assert!(at_hub.iter().all(|r| !r.path.contains("secret")));
    assert_eq!(at_hub[0].path, "/api/models/org/name/revision/main");
}

#[test]
fn what_the_cache_has_is_not_asked_for() {
    let fixture = Fixture::gpt2();
    let first = fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    fixture.fake_hub.take_requests();

    let pinned = fixture.fetch(&format!("hf://org/name@{COMMIT}"), FetchPurpose::Teacher).unwrap();
    assert_eq!(lines(&fixture.fake_hub.take_requests()), [""; 0]);
    assert_eq!(fixture.fetch("hf://org/name", FetchPurpose::Tokenizer).unwrap(), first);
    assert_eq!(lines(&fixture.fake_hub.take_requests()), ["hub GET /api/models/org/name/revision/main"]);
    assert_eq!(fixture.offline("hf://org/name", FetchPurpose::Teacher).unwrap(), first);
    assert_eq!(pinned, first);

    // A file whose blob was deleted counts as missing.
    fs::remove_file(fs::canonicalize(first.path.join("model.safetensors")).unwrap()).unwrap();
    assert!(fixture.offline("hf://org/name", FetchPurpose::Teacher).is_err());
    assert_eq!(fixture.offline("hf://org/name", FetchPurpose::Tokenizer).unwrap(), first);
    fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    assert_eq!(fs::read(first.path.join("model.safetensors")).unwrap(), weights(300_000));
}

#[test]
fn a_branch_that_moved_is_seen_and_a_hub_that_is_down_is_not_waited_for() {
    let fixture = Fixture::gpt2();
    let old = fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    let commit = COMMIT.replace('0', "f");
    fixture.fake_hub.state().commit = commit.clone();
    fixture.fake_hub.state().files.insert("config.json".into(), b"{}".to_vec());

    fixture.fake_hub.take_requests();
    fixture.fake_hub.add_fault("GET /api", Fault::Reset);
    assert_eq!(fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap(), old, "from the cache");
    assert_eq!(fixture.fake_hub.take_requests().len(), 1);

    let new = fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    assert_eq!(new.commit, commit);
    assert_eq!(fs::read(new.path.join("config.json")).unwrap(), b"{}");
    assert_eq!(fs::read(old.path.join("config.json")).unwrap(), CONFIG);
    let requests = fixture.fake_hub.take_requests();
    assert!(!requests.iter().any(|r| r.server == "storage"), "the weights are the same blob: {:?}", lines(&requests));
}

#[test]
fn revisions_are_one_segment_of_the_address_and_files_are_asked_for_by_commit() {
    let fixture = Fixture::gpt2();
    fixture.fetch("hf://org/name@refs/pr/1", FetchPurpose::Tokenizer).unwrap();
    let requests = fixture.fake_hub.take_requests();
    assert_eq!(requests[0].path, "/api/models/org/name/revision/refs%2Fpr%2F1");
    assert!(requests[1..].iter().all(|r| r.path.starts_with(&format!("/org/name/resolve/{COMMIT}/"))));
    assert_eq!(fs::read_to_string(fixture.repo().join("refs/refs/pr/1")).unwrap(), COMMIT);
    assert!(fixture.offline("hf://org/name@refs/pr/1", FetchPurpose::Tokenizer).is_ok());
    assert!(fixture.offline("hf://org/name", FetchPurpose::Tokenizer).is_err(), "main was never asked for");
}

#[test]
fn a_cache_made_by_python_works_offline() {
    let fixture = Fixture::new(&[]);
    let error = fixture.offline("hf://org/name", FetchPurpose::Teacher).unwrap_err();
    assert_eq!((error.kind, error.retryable), (ErrorKind::Usage, false));
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");

    let write_file = |name: &str, bytes: &[u8]| {
        fs::create_dir_all(fixture.snapshot()).unwrap();
        fs::write(fixture.snapshot().join(name), bytes).unwrap();
    };
    fs::create_dir_all(fixture.repo().join("refs")).unwrap();
    fs::write(fixture.repo().join("refs/main"), COMMIT).unwrap();
    write_file("config.json", CONFIG);
    write_file(
        "model.safetensors.index.json",
        br#"{"weight_map": {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}}"#,
    );
    write_file("m-1-of-2.safetensors", b"1");
    assert!(fixture.offline("hf://org/name", FetchPurpose::Teacher).is_err(), "a shard is missing");
    write_file("m-2-of-2.safetensors", b"2");
    assert_eq!(fixture.offline("hf://org/name", FetchPurpose::Teacher).unwrap().path, fixture.snapshot());
    assert!(fixture.offline("hf://org/name", FetchPurpose::Tokenizer).is_err(), "no tokenizer.json");
    // A ref that does not contain a commit is ignored.
    fs::write(fixture.repo().join("refs/main"), "../../elsewhere").unwrap();
    assert!(fixture.offline("hf://org/name", FetchPurpose::Teacher).is_err());
}

#[test]
fn shards_are_those_of_the_index() {
    let index =
        br#"{"weight_map": {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors", "c": "m-1-of-2.safetensors"}}"#;
    let fixture = Fixture::new(&[
        ("config.json", CONFIG),
        ("model.safetensors.index.json", index),
        ("m-1-of-2.safetensors", &weights(100)),
        ("m-2-of-2.safetensors", &weights(200)),
        ("other.safetensors", &weights(300)),
    ]);
    let fetched = fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    let expected = ["config.json", "m-1-of-2.safetensors", "m-2-of-2.safetensors", "model.safetensors.index.json"];
    assert_eq!(names(&fetched.path), expected);

    fixture.fake_hub.state().files.remove("m-2-of-2.safetensors");
    let fixture = Fixture { cache: TempDir::new().unwrap(), ..fixture };
    fixture.expect_error(
        "hf://org/name",
        FetchPurpose::Teacher,
        &["names \"m-2-of-2.safetensors\", which is not there"],
    );
}

#[test]
fn one_gguf_is_fetched_alone() {
    let fixture = Fixture::new(&[("config.json", CONFIG), ("q/m.gguf", &weights(9)), ("other.gguf", &weights(8))]);
    for purpose in [FetchPurpose::Teacher, FetchPurpose::Tokenizer] {
        let fetched = fixture.fetch("hf://org/name/q/m.gguf", purpose).unwrap();
        assert_eq!(fetched.path, fixture.snapshot().join("q/m.gguf"));
        assert_eq!(fs::read(&fetched.path).unwrap(), weights(9));
    }
    assert_eq!(names(&fixture.snapshot()), ["q"]);
    assert!(fixture.offline("hf://org/name/q/m.gguf", FetchPurpose::Teacher).is_ok());
    fixture.expect_error("hf://org/name/no.gguf", FetchPurpose::Teacher, &["no file \"no.gguf\"", "\"other.gguf\""]);
    fixture.expect_error(
        "hf://org/name",
        FetchPurpose::Teacher,
        &["no weights as safetensors", "a .gguf is used when named"],
    );
}

#[test]
fn many_at_once_download_each_file_once() {
    let fixture = Fixture::gpt2();
    let fetched: Vec<_> = thread::scope(|scope| {
        let all: Vec<_> =
            (0..8).map(|_| scope.spawn(|| fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap())).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(fetched.iter().all(|one| *one == fetched[0]));
    let requests = fixture.fake_hub.take_requests();
    assert_eq!(requests.iter().filter(|r| r.server == "storage").count(), 1);
    assert_eq!(
        requests.iter().filter(|r| r.method == "GET" && r.path.contains("/resolve/")).count(),
        4,
        "3 and a redirect"
    );
    assert_eq!(fs::read(fetched[0].path.join("model.safetensors")).unwrap(), weights(300_000));
}
