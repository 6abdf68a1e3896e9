//! Tests the server from the operator's side: stopping, starting twice, wrong configuration, a store, metrics.

use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::s3::ADMIN;
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::service::{Api, Service, eventually};
use stillhouse_tests::{corpus, run_command, shards, with};

use crate::service_api::{DOCUMENTS, PACKED_ROWS, ROWS, SPLITS, long_job, quick_job, start, undisturbed};
use crate::stores::shards_in;

#[test]
fn a_server_that_is_reported_to_stop_loses_nothing() {
    let mut service = start(&json!({"shutdown_seconds": 60}));
    let expected = undisturbed(&service, &long_job(""));
    let running: Vec<String> = ["a", "b"].map(|name| service.api.submit(&long_job(name))).to_vec();
    running.iter().for_each(|id| service.api.wait_for_split(id, 2));
    let waiting = service.api.submit(&quick_job("waiting"));
    let mut stream = service.api.stream(&format!("/jobs/{waiting}/events"), &[]);
    assert_eq!(stream.next().unwrap().data["data"]["to"], "queued");
    assert_eq!(service.terminate(), Some(0));
    // no worker and no stream remains
    assert_eq!(service.workers(), []);
    assert_eq!(stream.count(), 0);
    service.launch();
    let api = &service.api;
    for id in &running {
        let done = api.wait_for_state(id, "succeeded");
        assert_eq!((&done["attempt"], &done["failures"]), (&json!(2), &json!(0)));
        assert_eq!(api.states(id), ["queued", "running", "queued", "running", "succeeded"]);
        let events = api.events(id);
        let back = events.iter().find(|e| e["data"]["from"] == "running").unwrap();
        assert_eq!(back["data"]["reason"], "the service stopped");
        assert!(
            events.iter().filter(|e| e["type"] == "started").nth(1).unwrap()["data"]["splits_done"].as_u64() >= Some(2)
        );
    }
    for name in ["a", "b"] {
        assert_eq!(shards(&service.scratch.path(name)), expected);
    }
    // jobs that ran before the stop resume before the one that was waiting
    let last_start = |id: &str| {
        let events = api.events(id);
        events.iter().rfind(|e| e["data"]["to"] == "running").unwrap()["seq"].as_i64()
    };
    api.wait_for_state(&waiting, "succeeded");
    assert!(running.iter().all(|id| last_start(id) < last_start(&waiting)));
    assert_eq!(api.wait_for_state(&waiting, "succeeded")["attempt"], 1);

    // one server per data folder; a second one does not disturb it
    let other = service.serve(&["--listen", "127.0.0.1:0"]).output().unwrap();
    let said = String::from_utf8(other.stderr).unwrap();
    assert_eq!(other.status.code(), Some(1), "{said}");
    assert!(said.contains("another server is using the data folder"), "{said}");
    let elsewhere = tempfile::tempdir().unwrap();
    let taken = service.serve(&["--data", elsewhere.path().to_str().unwrap()]).output().unwrap();
    let said = String::from_utf8(taken.stderr).unwrap();
    assert!(taken.status.code() == Some(1) && said.contains("cannot listen on 127.0.0.1:"), "{said}");
    assert_eq!(service.api.job(&waiting)["state"], "succeeded");

    // a database of a newer program is not modified
    assert_eq!(service.terminate(), Some(0));
    let path = service.data().join("service.sqlite");
    let database = rusqlite::Connection::open(&path).unwrap();
    let version: u32 = database.query_row("PRAGMA user_version", [], |r| r.get(0)).unwrap();
    database.pragma_update(None, "user_version", version + 1).unwrap();
    drop(database);
    let before = fs::read(&path).unwrap();
    let refused = run_command(&mut service.serve(&[])).expect(1);
    let parts = [
        format!("has version {}, but this program reads versions up to {version}", version + 1),
        "newer program".into(),
    ];
    refused.says(&parts.each_ref().map(String::as_str));
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn a_configuration_is_checked_and_said_in_words() {
    let service = Service::new(&json!({
        "access": {"hub": ["openai-community/*"], "endpoints": ["https://s3.example.org"]},
        "capacity": {"gpus": [0, 2], "jobs_per_gpu": 2},
    }));
    let reported = run_command(&mut service.serve(&["--check"])).expect(0).stdout;
    let shown = reported
        .replace(service.data().to_str().unwrap(), "DATA")
        .replace(service.scratch.path("").to_str().unwrap(), "JOBS")
        .replace(stillhouse_tests::byte_teacher().to_str().unwrap(), "TEACHER")
        .replace(stillhouse_tests::root().to_str().unwrap(), "REPOSITORY")
        .replace(&service.api.url()["http://".len()..], "ADDRESS");
    assert_eq!(
        shown,
        "\
listens on              ADDRESS
tokens                  not needed: loopback
data                    DATA
jobs may read           JOBS, REPOSITORY/assets, TEACHER
jobs may write          JOBS
hub                     openai-community/*
private networks        refused
endpoints in job files  https://s3.example.org
runs at once            2 jobs, 2 on the processor
GPUs                    0, 2, 2 jobs each
confined by             the kernel (Landlock)
"
    );
    let reported = run_command(&mut service.serve(&["--check", "--json"])).expect(0).json();
    assert_eq!((&reported["valid"], &reported["configuration"]["capacity"]["gpus"]), (&json!(true), &json!([0, 2])));
    // nothing was started or created
    assert!(!service.data().exists());

    let mut wrong = Service::new(&json!({
        "data": "relative", "hosts": ["a/b"],
        "access": {"read": ["relative", "/nonexistent/folder"], "hub": ["a/b/c"]},
        "capacity": {"running_jobs": 0, "cpu_slots": 0}, "limits": {"queued_jobs": 0},
    }));
    let fields = [
        "access.read[0]",
        "access.read[1]",
        "access.hub[0]",
        "capacity.running_jobs",
        "capacity.cpu_slots",
        "limits.queued_jobs",
        "data",
        "hosts[0]",
    ];
    for arguments in [&["--check"][..], &[]] {
        let said = run_command(&mut wrong.serve(arguments)).expect(2).says(&["8 problems"]).stderr;
        let lines: Vec<&str> = said.lines().skip(1).map(|line| line.trim().split(": ").next().unwrap()).collect();
        assert_eq!(lines, fields, "{said}");
    }
    let reported = run_command(&mut wrong.serve(&["--check", "--json"])).expect(2).json();
    let reported: Vec<&Value> = reported["problems"].as_array().unwrap().iter().map(|p| &p["field"]).collect();
    assert_eq!(reported, fields);
    wrong.configure(&json!({"limits": {"queued_job": 5}}));
    run_command(&mut wrong.serve(&["--check"])).expect(2).says(&["queued_job"]);
}

#[test]
fn figures_move_with_the_work() {
    let service = start(&json!({}));
    let api = &service.api;
    let figure = |name: &str| -> Option<f64> {
        let answer = api.get("/metrics").expect(200);
        assert_eq!(answer.header("content-type"), "text/plain; version=0.0.4");
        for line in answer.text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
            assert!(name.starts_with("stillhouse_") && value.parse::<f64>().is_ok(), "{line:?}");
        }
        answer.text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    assert_eq!(figure("stillhouse_jobs{state=\"succeeded\"}"), Some(0.0));
    assert_eq!(figure("stillhouse_splits_committed_total"), Some(0.0));
    let id = api.submit(&long_job("out"));
    api.wait_for_split(&id, 1);
    assert_eq!(figure("stillhouse_jobs{state=\"running\"}"), Some(1.0));
    for kind in ["all", "cpu"] {
        for (name, value) in [("", 2.0), ("_used", 1.0), ("_free", 1.0)] {
            assert_eq!(figure(&format!("stillhouse_slots{name}{{kind=\"{kind}\"}}")), Some(value), "{kind} {name}");
        }
    }
    assert!(figure("stillhouse_data_free_bytes") > Some(0.0));
    // the same metrics under the API's path, as its OpenAPI document says; none is a summary
    let text = Api::new(&format!("{}/api/v1", api.url())).get("/metrics").expect(200).text;
    assert!(text.contains("# TYPE stillhouse_http_seconds histogram") && !text.contains(" summary\n"), "{text}");
    let stream = api.stream(&format!("/jobs/{id}/events"), &[]);
    assert_eq!(figure("stillhouse_watchers"), Some(1.0));
    assert_eq!(stream.last().unwrap().kind, "end");
    eventually("the stream is counted off", || (figure("stillhouse_watchers") == Some(0.0)).then_some(()));
    let job = api.job(&id);
    for (name, value) in [
        ("stillhouse_jobs{state=\"running\"}", 0.0),
        ("stillhouse_jobs{state=\"succeeded\"}", 1.0),
        ("stillhouse_attempts_total{outcome=\"succeeded\"}", 1.0),
        ("stillhouse_splits_committed_total", SPLITS as f64),
        ("stillhouse_shard_bytes_total", job["result"]["bytes"].as_f64().unwrap()),
        ("stillhouse_split_retries_total", 0.0),
        ("stillhouse_sequences_total", ROWS as f64),
        ("stillhouse_teacher_tokens_total", ROWS as f64 * 63.0),
        ("stillhouse_documents_total", DOCUMENTS as f64),
        ("stillhouse_stage_rows_total{stage=\"extract\"}", ROWS as f64),
        ("stillhouse_queue_wait_seconds_count", 1.0),
        ("stillhouse_queue_wait_seconds_bucket{le=\"+Inf\"}", 1.0),
        ("stillhouse_attempt_seconds_count{outcome=\"succeeded\"}", 1.0),
        ("stillhouse_attempt_seconds_bucket{outcome=\"succeeded\",le=\"1209600\"}", 1.0),
        ("stillhouse_job_seconds_count{state=\"succeeded\"}", 1.0),
        ("stillhouse_job_seconds_bucket{state=\"succeeded\",le=\"3600\"}", 1.0),
        ("stillhouse_http_seconds_count{route=\"/api/v1/jobs\",status=\"2xx\"}", 1.0),
        ("stillhouse_http_seconds_bucket{route=\"/api/v1/jobs\",status=\"2xx\",le=\"30\"}", 1.0),
        ("stillhouse_queue_length{kind=\"cpu\"}", 0.0),
        ("stillhouse_slots_used{kind=\"cpu\"}", 0.0),
        ("stillhouse_slots_free{kind=\"cpu\"}", 2.0),
        ("stillhouse_tokens_per_second", 0.0),
        ("stillhouse_http_requests_total{method=\"POST\",route=\"/api/v1/jobs\",status=\"201\"}", 1.0),
    ] {
        assert_eq!(figure(name), Some(value), "{name}");
    }
    assert!(figure("stillhouse_stage_milliseconds_total{stage=\"extract\"}") > Some(0.0));
}

#[test]
fn a_job_on_a_store_needs_no_credentials_and_reports_none() {
    let weed = Seaweed::start();
    ["corpora", "shards"].iter().for_each(|bucket| weed.create_bucket(bucket));
    weed.s3().put("corpora", "team/corpus.jsonl", corpus(DOCUMENTS, 1300).as_bytes());
    let mut service = Service::new(&json!({
        "access": {"endpoints": [weed.endpoint()]},
        // the store client retries for less time than the store is away, so the job needs many attempts
        "limits": {"max_attempts": 100},
    }));
    let assets = stillhouse_tests::root().join("assets");
    service.configure(&json!({"access": {
        "read": ["s3://corpora/team", service.scratch.path(""), assets, stillhouse_tests::byte_teacher()],
        "write": ["s3://shards/team", service.scratch.path("")],
    }}));
    service.scratch.write("corpus.jsonl", &corpus(DOCUMENTS, 1300));
    for (name, value) in [
        ("AWS_ACCESS_KEY_ID", ADMIN.access),
        ("AWS_SECRET_ACCESS_KEY", ADMIN.secret),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ALLOW_HTTP", "true"),
        ("STILLHOUSE_LOG", "debug,hyper=info,h2=info"),
    ] {
        service.set_env(name, value);
    }
    service.launch();
    let api = &service.api;
    let stored = with(
        quick_job("s3://shards/team/out"),
        &json!({
            "input": {"paths": ["s3://corpora/team/corpus.jsonl"]}, "storage": {"endpoint": weed.endpoint()},
        }),
    );
    let id = api.submit(&stored);
    let done = api.wait_for_state(&id, "succeeded");
    assert_eq!((&done["output"], &done["result"]["rows"]), (&json!("s3://shards/team/out"), &json!(PACKED_ROWS)));
    let expected = undisturbed(&service, &quick_job(""));
    let uploaded = shards_in(&weed.s3(), "shards", "team/out");
    assert_eq!(uploaded, expected);
    assert_eq!(api.get(&format!("/jobs/{id}/manifest")).expect(200).json()["job"]["name"], "packing");
    assert_eq!(api.get(&format!("/jobs/{id}/report")).expect(200).json()["totals"]["train"]["rows"], PACKED_ROWS);

    // other prefixes, buckets and endpoints are refused
    for (patch, field) in [
        (json!({"input": {"paths": ["s3://corpora/teams/corpus.jsonl"]}}), "input.paths[0]"),
        (json!({"input": {"paths": ["s3://corpora/team/../corpus.jsonl"]}}), "input.paths[0]"),
        (json!({"output": {"path": "s3://corpora/team/out"}}), "output.path"),
        (json!({"storage": {"endpoint": "http://127.0.0.1:1"}}), "storage.endpoint"),
    ] {
        let problem = api.send_job("", &[], &with(stored.clone(), &patch)).problem(422);
        let fields: Vec<&str> =
            problem["problems"].as_array().unwrap().iter().map(|p| p["field"].as_str().unwrap()).collect();
        assert_eq!(fields, [field], "{problem:#}");
    }
    // An unavailable store counts as the machine's failure, and the job resumes once it is back.
    let other = with(stored, &json!({"output": {"path": "s3://shards/team/again"}}));
    weed.kill();
    let other = api.submit(&other);
    let waits = api.wait_for_state(&other, "retrying");
    assert_eq!(waits["failure"]["kind"], "machine", "{waits:#}");
    weed.restart();
    api.wait_for_state(&other, "succeeded");
    assert_eq!(shards_in(&weed.s3(), "shards", "team/again"), expected);

    let answers = [
        format!("/jobs/{id}"),
        format!("/jobs/{id}/logs"),
        format!("/jobs/{id}/events"),
        "/jobs".into(),
        "/metrics".into(),
    ];
    let mut texts: Vec<String> = answers.iter().map(|path| api.get(path).expect(200).text).collect();
    assert!(texts[1].lines().count() > SPLITS, "{}", texts[1]);
    texts.push(service.log_text());
    for text in texts {
        assert!(!text.contains(ADMIN.secret) && !text.contains("Signature="), "{text}");
    }
}
