use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde_json::Value;

use super::{ADMIN, READER, S3, Seaweed, fs};
use crate::proxy::{FaultKind, FaultPlan, FaultProxy};
use crate::s3::NOBODY;
use crate::{Scratch, run_command};

fn python(arguments: &[&str]) -> Command {
    let mut command = Command::new(crate::root().join(".venv/bin/python"));
    command.arg(crate::root().join("tests/python/watch.py")).args(arguments);
    command
}

/// Checks everything that the object store tests rely on, with one server because starting it is slow.
#[test]
fn it_is_the_s3_that_the_tests_want() {
    let seaweed = Seaweed::start();
    seaweed.create_bucket("corpora");
    let s3 = seaweed.s3();
    assert_eq!(s3.list("corpora", ""), BTreeMap::new());

    // conditional writes
    assert!(s3.put_new("corpora", "data/a b&c.txt", b"one"));
    assert!(!s3.put_new("corpora", "data/a b&c.txt", b"two"));
    assert_eq!(s3.get("corpora", "data/a b&c.txt").unwrap(), b"one");
    assert_eq!(s3.list("corpora", "data/"), [("data/a b&c.txt".to_owned(), 3)].into());
    assert_eq!(s3.get("corpora", "data/none"), None);
    let put = |headers: &[(&'static str, &str)], key: &str| s3.request("PUT", key, headers, b"new").unwrap();
    let etag = s3.head("corpora", "data/a b&c.txt").unwrap()["etag"].clone();
    let key = "/corpora/data/a%20b%26c.txt";
    assert_eq!(put(&[("if-match", &etag)], key).status, 200);
    assert_eq!(put(&[("if-match", &etag)], key).expect(412).code(), "PreconditionFailed");
    assert_eq!(put(&[], "/no-such-bucket/a").expect(404).code(), "NoSuchBucket");
    s3.delete("corpora", "data/a b&c.txt");

    // permissions
    let reader = S3::new(seaweed.endpoint(), READER);
    assert_eq!(reader.request("PUT", "/corpora/a", &[], b"x").unwrap().expect(403).code(), "AccessDenied");
    assert_eq!(reader.request("POST", "/corpora/a?uploads", &[], b"").unwrap().expect(403).code(), "AccessDenied");
    assert_eq!(reader.list("corpora", ""), BTreeMap::new());
    let nobody = S3::new(seaweed.endpoint(), NOBODY).request("GET", "/corpora/a", &[], b"").unwrap();
    assert_eq!(nobody.expect(403).code(), "InvalidAccessKeyId");

    // multipart uploads, across a kill
    let id = s3.create_multipart_upload("corpora", "data/b");
    assert_eq!(s3.list_multipart_uploads("corpora"), [("data/b".to_owned(), id.clone())]);
    s3.put("corpora", "c", b"kept");
    seaweed.kill();
    assert!(s3.request("GET", "/", &[], b"").is_err());
    seaweed.restart();
    assert_eq!(s3.get("corpora", "c").unwrap(), b"kept");
    assert_eq!(s3.list_multipart_uploads("corpora"), [("data/b".to_owned(), id)]);

    through_a_proxy(&seaweed);
    watched(&seaweed);
}

/// Requests keep valid signatures, and retries succeed without repeating their effect.
fn through_a_proxy(seaweed: &Seaweed) {
    let kinds = FaultKind::ALL.into_iter().filter(|&kind| kind != FaultKind::Latency).collect::<Vec<_>>();
    let plan = FaultPlan { seed: 3, probability: 0.5, kinds: kinds.clone(), ..FaultPlan::default() };
    let proxy = FaultProxy::start(seaweed.endpoint(), plan);
    let s3 = S3::new(&proxy.endpoint(), ADMIN);
    for n in 0..20 {
        let target = format!("/corpora/proxied/{n}");
        let tries = |method: &str, headers: &[(&'static str, &str)], body: &[u8]| {
            let answers = (0..5).filter_map(|_| s3.request(method, &target, headers, body).ok());
            answers.map(|answer| (answer.status, answer.body)).find(|(status, _)| *status < 500).unwrap()
        };
        let body = vec![n; 100_000];
        // 412 if the response to the first attempt was lost
        assert!([200, 412].contains(&tries("PUT", &[("if-none-match", "*")], &body).0));
        assert_eq!(tries("GET", &[("range", "bytes=5-8")], b""), (206, vec![n; 4]));
        assert_eq!(tries("GET", &[], b""), (200, body));
    }
    let fired = proxy.fired();
    assert!(kinds.iter().all(|kind| fired.contains_key(kind)), "{fired:?}");
    assert!(proxy.requests().iter().filter(|r| r.status == 206).all(|r| r.response_bytes == 4));

    // object_store's own client retries too, with valid signatures. It does not retry a POST whose response breaks off;
    // its callers must.
    let only = |method: &str, _: &str| method != "POST";
    proxy.set_plan(FaultPlan { seed: 4, probability: 0.4, only, ..FaultPlan::default() });
    proxy.clear();
    let store = s3.store("corpora");
    let content = (0..6_000_000u32).map(|i| (i % 251) as u8).collect::<Vec<_>>();
    s3.wait(async {
        for n in 0..3 {
            let path = Path::from(format!("multipart/{n}"));
            let mut upload = store.put_multipart(&path).await.unwrap();
            for part in content.chunks(5 << 20) {
                upload.put_part(part.to_vec().into()).await.unwrap();
            }
            upload.complete().await.unwrap();
            assert!(store.get(&path).await.unwrap().bytes().await.unwrap() == content, "{path}");
        }
    });
    assert!(proxy.fired().len() >= 2, "{:?}", proxy.fired());
    assert_eq!(seaweed.s3().files("corpora", "multipart/").len(), 3);
    assert_eq!(seaweed.s3().list("corpora", "proxied/").len(), 20);
}

/// The watcher sees only complete shards, and reports problems if there are any.
fn watched(seaweed: &Seaweed) {
    let scratch = Scratch::new();
    let s3 = seaweed.s3();
    let stop = scratch.path("stop");
    let shard = scratch.path("shard.parquet");
    let script =
        "import sys, pyarrow as pa, pyarrow.parquet as pq; pq.write_table(pa.table({'a': [1, 2]}), sys.argv[1])";
    run_command(Command::new(crate::root().join(".venv/bin/python")).args(["-c", script]).arg(&shard)).expect(0);
    let shard = fs::read(shard).unwrap();

    s3.put("corpora", "set/data/0.parquet", &shard);
    let look = |endpoint: &str, set: &str, until: &mut dyn FnMut()| -> Value {
        let mut command = python(&[set, "--until", stop.to_str().unwrap()]);
        seaweed.read_only_environment(&mut command);
        command.env("AWS_ENDPOINT_URL", endpoint);
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        until();
        fs::write(&stop, "").unwrap();
        let out = child.wait_with_output().unwrap();
        fs::remove_file(&stop).unwrap();
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let plan = FaultPlan {
        probability: 0.5,
        kinds: vec![FaultKind::ResetResponse, FaultKind::SlowDown503],
        ..FaultPlan::default()
    };
    let proxy = FaultProxy::start(seaweed.endpoint(), plan);
    let seen = look(&proxy.endpoint(), "s3://corpora/set", &mut || {
        let begin = proxy.requests().len();
        seaweed.kill();
        while proxy.requests().len() < begin + 5 {
            std::thread::sleep(Duration::from_millis(50));
        }
        seaweed.restart();
    });
    assert!(seen["looks"].as_u64() >= Some(1) && seen["shards_seen"] == 1, "{seen}");
    assert!(seen["retried"].as_u64() >= Some(5) && proxy.traffic().unanswered > 0, "{seen}");
    assert_eq!(seen["problems"], serde_json::json!([]), "{seen}");

    // The response that breaks off may itself be an error.
    let only = |_: &str, target: &str| target.ends_with(".parquet");
    let plan = |kind| FaultPlan { probability: 1.0, kinds: vec![kind], only, ..FaultPlan::default() };
    let failing = FaultProxy::start(seaweed.endpoint(), plan(FaultKind::SlowDown503));
    let breaking = FaultProxy::start(&failing.endpoint(), plan(FaultKind::ResetResponse));
    let seen = look(&breaking.endpoint(), "s3://corpora/set", &mut || {
        while breaking.fired().is_empty() {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    assert!(seen["retried"].as_u64() >= Some(1) && seen["shards_seen"] == 1, "{seen}");
    assert_eq!(seen["problems"], serde_json::json!([]), "{seen}");

    s3.put("corpora", "set/data/1.parquet", &shard[..shard.len() - 3]);
    s3.put("corpora", "set/data/0.parquet.tmp", b"");
    s3.put("corpora", "set/_SUCCESS", b"");
    s3.put("corpora", "set/manifest.json", br#"{"shards": [{"path": "data/2.parquet", "bytes": 3, "sha256": "00"}]}"#);
    let problems = look(seaweed.endpoint(), "s3://corpora/set", &mut || ())["problems"].to_string();
    for part in ["data/1.parquet", "0.parquet.tmp", "data/2.parquet"] {
        assert!(problems.contains(part), "{part} in {problems}");
    }
}
