//! Tests the service over a real socket: submissions, lists, events, logs, results, and refusals.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::service::{Api, Service};
use stillhouse_tests::{corpus, nano_job, shards, with};

use crate::stores::packing_job;

/// What a job makes of the corpus of [`start`].
pub(crate) const DOCUMENTS: usize = 18;
pub(crate) const SPLITS: usize = 17;
pub(crate) const ROWS: usize = 62;
/// Sequences of a job of [`packing_job`], whose tokens are bytes.
pub(crate) const PACKED_ROWS: usize = 361;

/// A job of several splits that takes a second or two.
pub(crate) fn quick_job(output: &str) -> Value {
    with(packing_job(), &json!({"input": {"split_megabytes": 0.0015}, "output": {"path": output}}))
}

/// A job with a teacher and the same number of splits; takes about 5 s of CPU time.
pub(crate) fn long_job(output: &str) -> Value {
    with(nano_job(), &json!({"name": "long", "input": {"split_megabytes": 0.0015}, "output": {"path": output}}))
}

/// A service with `corpus.jsonl`.
pub(crate) fn start(patch: &Value) -> Service {
    let service = Service::start(patch);
    service.scratch.write("corpus.jsonl", &corpus(DOCUMENTS, 1300));
    service
}

/// The shards that `stillhouse run` makes of the same job.
pub(crate) fn undisturbed(service: &Service, job: &Value) -> std::collections::BTreeMap<String, String> {
    let made = service.scratch.make(&with(job.clone(), &json!({"output": {"path": "undisturbed"}})));
    let expected = shards(&made);
    assert!(!expected.is_empty());
    fs::remove_dir_all(made).unwrap();
    expected
}

fn ids(page: &Value) -> Vec<String> {
    page["jobs"].as_array().unwrap().iter().map(|j| j["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn jobs_come_in_as_yaml_and_as_json_and_everything_wrong_is_reported_at_once() {
    let service = start(&json!({}));
    let api = &service.api;
    let yaml = format!("# by hand\n{}", serde_json::to_string_pretty(&quick_job("by-yaml")).unwrap());
    let sent =
        api.send("POST", "/jobs?priority=7&max_attempts=2", &[("content-type", "application/yaml")], Some(&yaml));
    let sent = sent.expect(201);
    let made = sent.json();
    let id = made["id"].as_str().unwrap();
    assert_eq!(sent.header("location"), format!("/api/v1/jobs/{id}"));
    assert_eq!((&made["state"], &made["priority"], &made["max_attempts"]), (&json!("queued"), &json!(7), &json!(2)));
    assert_eq!((&made["user"], &made["device"], &made["attempt"]), (&json!("local"), &json!("cpu"), &json!(0)));
    let file = api.get(&format!("/jobs/{id}/file")).expect(200);
    assert_eq!((file.text.as_str(), file.header("content-type")), (yaml.as_str(), "application/yaml"));
    let by_json = api.submit(&quick_job("by-json"));
    for (id, output) in [(id, "by-yaml"), (by_json.as_str(), "by-json")] {
        let done = api.wait_for_state(id, "succeeded");
        assert_eq!(done["result"]["rows"], PACKED_ROWS, "{done:#}");
        assert_eq!(shards(&service.scratch.path(output)).len(), SPLITS);
    }
    assert_eq!(shards(&service.scratch.path("by-yaml")), shards(&service.scratch.path("by-json")));

    let wrong = json!({
        "version": 1, "name": "Bad Name", "colour": "red",
        "input": {"format": "jsonl", "paths": ["corpus.jsonl", "/etc/passwd"]},
        "tokenizer": {"path": "https://evil.example/tokenizer"},
        "pack": {"length": 1},
        "extract": {"teacher": {"path": service.scratch.path(""), "device": "cuda"}},
        "output": {"path": "../outside"}
    });
    let problem = api.send_job("", &[], &wrong).problem(422);
    assert_eq!(problem["title"], "Unprocessable Entity");
    let reported: Vec<&str> =
        problem["problems"].as_array().unwrap().iter().map(|p| p["field"].as_str().unwrap()).collect();
    println!("{problem:#}");
    let expected = ["colour", "extract.teacher.device", "input.paths[1]", "name", "output.path", "pack.length"];
    for field in expected {
        assert!(reported.contains(&field), "{field} is not in {reported:?}");
    }
    assert_eq!(problem["detail"], format!("the job file has {} problems", reported.len()));
    let got =
        |field: &str| problem["problems"].as_array().unwrap().iter().find(|p| p["field"] == field).unwrap().clone();
    assert_eq!(got("pack.length")["got"], "1");
    assert_eq!(
        with(got("extract.teacher.device"), &json!({"column": null})),
        json!({"field": "extract.teacher.device", "got": "cuda", "message": "this server has no GPU; valid: auto, cpu", "line": 1})
    );
    // validation gives the same problems without a submission
    let checked = api.send("POST", "/validate", &[("content-type", "application/json")], Some(&wrong.to_string()));
    let checked = checked.expect(200).json();
    assert_eq!((&checked["valid"], &checked["problems"]), (&json!(false), &problem["problems"]));

    let ask = |path: &str, kind: &str, body: &str| api.send("POST", path, &[("content-type", kind)], Some(body));
    ask("/jobs", "text/plain", "version: 1").problem(415);
    ask("/jobs", "application/json", "version: 1").problem(422);
    ask("/jobs?priority=101", "application/yaml", &yaml).problem(400);
    ask("/jobs?colour=red", "application/yaml", &yaml).problem(400);
    ask("/jobs?max_attempts=0", "application/yaml", &yaml).problem(400);
    ask("/jobs?folder=relative", "application/yaml", &yaml).problem(400);
    ask("/jobs", "application/yaml", &"#".repeat(1_024_001)).problem(413);
    api.get("/jobs/000000000000").problem(404);
    api.get("/jobs/nonsense").problem(404);
    api.get("/nothing").problem(404);
    api.send("DELETE", "/jobs", &[], None).problem(405);
    // none of these requests created a job
    assert_eq!(ids(&api.get("/jobs").json()).len(), 2);
}

#[test]
fn a_key_makes_one_job_however_often_it_is_sent() {
    let service = start(&json!({"capacity": {"cpu_slots": 1}}));
    let api = &service.api;
    let first = api.send_job("", &[("idempotency-key", "k-1")], &quick_job("keyed")).expect(201).json();
    let again = api.send_job("", &[("idempotency-key", "k-1")], &quick_job("keyed")).expect(200).json();
    assert_eq!(first["id"], again["id"]);
    for (query, job) in [("", quick_job("other")), ("?priority=1", quick_job("keyed"))] {
        let problem = api.send_job(query, &[("idempotency-key", "k-1")], &job).problem(422);
        assert!(problem["detail"].as_str().unwrap().contains("idempotency key"), "{problem}");
    }
    let long = "x".repeat(201);
    for wrong in ["", "two words", &long] {
        api.send_job("", &[("idempotency-key", wrong)], &quick_job("keyed")).problem(400);
    }
    // of 20 concurrent requests one creates the job, and all return it
    let answers: Vec<(u16, String)> = std::thread::scope(|scope| {
        let sent: Vec<_> = (0..20)
            .map(|_| scope.spawn(|| api.send_job("", &[("idempotency-key", "k-2")], &quick_job("at-once"))))
            .collect();
        let answers = sent.into_iter().map(|thread| thread.join().unwrap());
        answers.map(|a| (a.status, a.json()["id"].as_str().unwrap().to_owned())).collect()
    });
    assert_eq!(answers.iter().filter(|(status, _)| *status == 201).count(), 1, "{answers:?}");
    assert!(answers.iter().all(|(status, id)| [200, 201].contains(status) && *id == answers[0].1), "{answers:?}");
    assert_eq!(ids(&api.get("/jobs?name=packing").json()).len(), 2);
    for id in [first["id"].as_str().unwrap(), &answers[0].1] {
        api.wait_for_state(id, "succeeded");
        assert_eq!(api.job(id)["attempt"], 1);
    }
}

#[test]
fn lists_are_filtered_and_paged_while_jobs_come_in() {
    // a blocker occupies the only slot, so nothing else runs
    let service = start(&json!({"capacity": {"cpu_slots": 1}, "auth": "token"}));
    let (ada, bob) = (service.token("ada", &["read", "submit"]), service.token("bob", &["read", "submit"]));
    let blocker = ada.submit_with("?priority=100", &long_job("blocker"));
    ada.wait_for_state(&blocker, "running");
    let mut all: Vec<String> = (0..23).map(|n| ada.submit(&quick_job(&format!("ada-{n}")))).collect();
    let of_bob: Vec<String> = (0..5)
        .map(|n| bob.submit_with("?priority=3", &with(quick_job(&format!("bob-{n}")), &json!({"name": "other"}))))
        .collect();
    all.extend(of_bob.iter().cloned());
    // the queue is ordered by priority, then by time
    for (n, id) in of_bob.iter().enumerate() {
        assert_eq!(ada.job(id)["queue_position"], n + 1);
    }
    assert_eq!(ada.job(&all[0])["queue_position"], 6);
    assert_eq!(ada.job(&blocker)["queue_position"], Value::Null);

    let newest_first: Vec<String> = all.iter().rev().cloned().chain([blocker.clone()]).collect();
    let (mut seen, mut cursor, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = bob.get(&format!("/jobs?limit=4{cursor}")).expect(200).json();
        seen.extend(ids(&page));
        pages += 1;
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
        // newer jobs do not shift the pages
        bob.submit(&quick_job(&format!("late-{pages}")));
    }
    assert_eq!((seen, pages), (newest_first, 8));

    let listed = |query: &str| ids(&ada.get(&format!("/jobs?limit=500&{query}")).expect(200).json());
    let reversed = |ids: &[String]| ids.iter().rev().cloned().collect::<Vec<_>>();
    assert_eq!(listed("name=other"), reversed(&of_bob));
    assert_eq!(listed("user=bob&name=other&state=queued"), reversed(&of_bob));
    assert_eq!(listed("user=ada").len(), 24);
    assert_eq!(listed("state=running,succeeded"), std::slice::from_ref(&blocker));
    assert_eq!(listed("user=nobody"), [""; 0]);
    for wrong in ["state=asleep", "limit=0", "limit=501", "cursor=xyz", "colour=red", "limit=1&limit=2"] {
        ada.get(&format!("/jobs?{wrong}")).problem(400);
    }

    // other users' jobs are visible but cannot be changed
    let mine = &all[0];
    bob.get(&format!("/jobs/{mine}")).expect(200);
    for (method, path) in [
        ("POST", format!("/jobs/{mine}/cancel")),
        ("POST", format!("/jobs/{mine}/retry")),
        ("DELETE", format!("/jobs/{mine}")),
    ] {
        bob.send(method, &path, &[], None).problem(403);
    }
    service.api.get("/jobs").problem(401);
    service.api.with_token("sh_nonsense_nonsense").get("/jobs").problem(401);
    service.token("reader", &["read"]).send_job("", &[], &quick_job("read")).problem(403);
    let admin = service.token("root", &["submit", "admin"]);
    admin.post(&format!("/jobs/{mine}/cancel")).expect(200);
    assert_eq!(ada.job(mine)["reason"], "cancelled by root");
}

#[test]
fn events_come_once_each_however_often_the_connection_is_lost() {
    let service = start(&json!({}));
    let api = &service.api;
    let id = api.submit(&long_job("out"));
    let path = format!("/jobs/{id}/events");
    // history, then live events; the stream is cut after every few events and resumed after the last one
    let (mut seen, mut cuts) = (Vec::<(i64, Value)>::new(), 0);
    let end = 'all: loop {
        let last = seen.last().map_or("0".to_owned(), |(seq, _)| seq.to_string());
        let mut left = 7;
        for sent in api.stream(&path, &[("last-event-id", &last)]) {
            match (sent.kind.as_str(), sent.id) {
                ("end", _) => break 'all sent.data,
                ("progress", id) => assert_eq!(id, None),
                (kind, seq) => {
                    assert_eq!((sent.data["type"].as_str(), sent.data["seq"].as_i64()), (Some(kind), seq));
                    seen.push((seq.unwrap(), sent.data));
                    left -= 1;
                }
            }
            if left == 0 {
                break;
            }
        }
        cuts += 1;
    };
    assert!(cuts > 3, "{cuts}");
    assert_eq!(end, json!({"state": "succeeded"}));
    let kept = api.events(&id);
    assert_eq!(seen.iter().map(|(_, e)| e.clone()).collect::<Vec<_>>(), kept);
    assert!(seen.windows(2).all(|w| w[0].0 < w[1].0));
    let count = |kind: &str| kept.iter().filter(|e| e["type"] == kind).count();
    assert_eq!(
        (count("started"), count("split_started"), count("split_committed"), count("finished")),
        (1, SPLITS, SPLITS, 1)
    );
    assert_eq!(api.states(&id), ["queued", "running", "succeeded"]);

    // the same history in pages of every size
    for limit in [1, 7, 1000] {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let page = api.get(&format!("{path}?limit={limit}&after={after}")).expect(200).json();
            all.extend(page["events"].as_array().unwrap().clone());
            match page["next_after"].as_i64() {
                Some(next) => after = next,
                None => break,
            }
        }
        assert_eq!(all, kept, "{limit}");
    }
    for wrong in ["limit=0", "limit=1001", "after=-1"] {
        api.get(&format!("{path}?{wrong}")).problem(400);
    }
    // the stream of an ended job has all events, then the end
    let whole: Vec<String> = api.stream(&path, &[]).map(|sent| sent.kind).collect();
    assert_eq!((whole.len(), whole.last().map(String::as_str)), (kept.len() + 1, Some("end")));
    let after = kept[kept.len() - 1]["seq"].to_string();
    let nothing: Vec<String> = api.stream(&path, &[("last-event-id", &after)]).map(|sent| sent.kind).collect();
    assert_eq!(nothing, ["end"]);
}

#[test]
fn what_a_job_leaves_is_what_the_disk_and_the_program_say() {
    let mut service = start(&json!({}));
    service.set_env("STILLHOUSE_LOG", "info");
    service.kill();
    service.launch();
    let api = &service.api;
    let all_jobs = api.stream("/events", &[]);
    let id = api.submit(&long_job("out"));
    for path in ["manifest", "report"] {
        let problem = api.get(&format!("/jobs/{id}/{path}")).problem(409);
        assert!(problem["detail"].as_str().unwrap().ends_with("valid: succeeded"), "{problem}");
    }
    api.wait_for_state(&id, "running");
    // the followed log ends when the job does
    let followed = api.get(&format!("/jobs/{id}/logs?follow=true")).expect(200).text;
    let done = api.wait_for_state(&id, "succeeded");
    let log = api.get(&format!("/jobs/{id}/logs")).expect(200);
    assert_eq!(log.header("content-type"), "text/plain; charset=utf-8");
    assert_eq!(followed, log.text);
    let lines: Vec<&str> = log.text.lines().collect();
    assert!(lines.len() > SPLITS && lines.iter().all(|line| line.contains(" attempt 1: ")), "{}", log.text);
    for tail in [0, 1, 5, 10_000] {
        let text = api.get(&format!("/jobs/{id}/logs?tail={tail}")).expect(200).text;
        let expected = &lines[lines.len().saturating_sub(tail)..];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    }

    let manifest = api.get(&format!("/jobs/{id}/manifest")).expect(200).json();
    let on_disk = fs::read_to_string(service.scratch.path("out/manifest.json")).unwrap();
    assert_eq!(manifest, serde_json::from_str::<Value>(&on_disk).unwrap());
    for row in ["0", "61"] {
        let report = api.get(&format!("/jobs/{id}/report?row={row}")).expect(200).json();
        let inspected = service.stillhouse(&["inspect", "out", "--json", "--row", row]).expect(0).json();
        assert_eq!(without_place(report), without_place(inspected));
    }
    let problem = api.get(&format!("/jobs/{id}/report?row=62")).problem(404);
    assert!(problem["detail"].as_str().unwrap().contains("62"), "{problem}");
    let result = &done["result"];
    assert_eq!((&result["rows"], &result["tokens"]), (&json!(ROWS), &json!(ROWS * 64)));
    let bytes: u64 =
        fs::read_dir(service.scratch.path("out/data")).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
    assert_eq!((&result["bytes"], &done["progress"]["bytes"]), (&json!(bytes), &json!(bytes)));
    assert_eq!((&done["progress"]["splits_done"], &done["progress"]["splits"]), (&json!(SPLITS), &json!(SPLITS)));
    assert_eq!(done["progress"]["teacher_tokens"].as_u64(), Some(ROWS as u64 * 63));
    assert!(done["teacher"].as_str().unwrap().starts_with("gpt2, 3.5M parameters"), "{done:#}");

    let points = api.get(&format!("/jobs/{id}/rates")).expect(200).json()["points"].clone();
    let points = points.as_array().unwrap();
    assert!(points.len() > 1, "{points:?}");
    let tokens: Vec<u64> = points.iter().map(|p| p["tokens"].as_u64().unwrap()).collect();
    assert!(tokens.is_sorted() && *tokens.last().unwrap() <= ROWS as u64 * 63, "{tokens:?}");
    assert!(points.iter().any(|p| p["tokens_per_second"].as_f64().unwrap() > 0.0));

    // the stream of all jobs has seen it
    let mut states = Vec::new();
    for sent in all_jobs {
        if sent.kind == "state" && sent.data["job"] == id.as_str() {
            states.push(sent.data["data"]["to"].as_str().unwrap().to_owned());
            if states.last().unwrap() == "succeeded" {
                break;
            }
        }
    }
    assert_eq!(states, ["queued", "running", "succeeded"]);

    // deletion removes the job, its log and its events; the data set stays
    api.send("DELETE", &format!("/jobs/{id}"), &[], None).expect(204);
    for path in ["", "/logs", "/events", "/rates", "/file", "/manifest"] {
        api.get(&format!("/jobs/{id}{path}")).problem(404);
    }
    assert_eq!(fs::read_dir(service.data().join("logs")).unwrap().count(), 0);
    service.stillhouse(&["verify", "out"]).expect(0);
}

/// A report without its path fields, which repeat the path as it was requested.
fn without_place(mut report: Value) -> Value {
    for key in ["path", "dataset", "output"] {
        report.as_object_mut().unwrap().remove(key);
    }
    report
}

#[test]
fn jobs_are_cancelled_retried_and_forgotten_only_when_that_makes_sense() {
    let service = start(&json!({"capacity": {"cpu_slots": 1}}));
    let api = &service.api;
    let expected = undisturbed(&service, &long_job(""));
    let running = api.submit(&long_job("running"));
    api.wait_for_split(&running, 2);
    let waiting = api.submit(&quick_job("waiting"));
    assert_eq!(api.job(&waiting)["queue_position"], 1);
    for id in [&running, &waiting] {
        api.post(&format!("/jobs/{id}/retry")).problem(409);
        api.send("DELETE", &format!("/jobs/{id}"), &[], None).problem(409);
    }
    let cancelled = api.post(&format!("/jobs/{waiting}/cancel")).expect(200).json();
    assert_eq!((&cancelled["state"], &cancelled["reason"]), (&json!("cancelled"), &json!("cancelled by local")));
    assert!(!service.scratch.path("waiting").exists());

    let worker = service.wait_for_worker(&running);
    let stopping = api.post(&format!("/jobs/{running}/cancel")).expect(202).json();
    assert_eq!(stopping["state"], "cancelling");
    let cancelled = api.wait_for_state(&running, "cancelled");
    assert_eq!((&cancelled["reason"], &cancelled["failures"]), (&json!("cancelled by local"), &json!(0)));
    assert!(!service.workers().contains(&worker));
    for id in [&running, &waiting] {
        let problem = api.post(&format!("/jobs/{id}/cancel")).problem(409);
        assert_eq!(problem["detail"], "the job is cancelled; valid: queued, running or retrying");
    }
    // committed shards equal those of an undisturbed run, and a retry continues after them
    let left = shards(&service.scratch.path("running"));
    assert!((2..SPLITS).contains(&left.len()), "{}", left.len());
    assert!(left.iter().all(|(name, sha256)| expected.get(name) == Some(sha256)));
    assert!(!service.scratch.path("running/manifest.json").exists());
    let again = api.post(&format!("/jobs/{running}/retry")).expect(202).json();
    assert_eq!(again["state"], "retrying");
    api.wait_for_state(&running, "succeeded");
    assert_eq!(shards(&service.scratch.path("running")), expected);
    let events = api.events(&running);
    let started: Vec<&Value> = events.iter().filter(|e| e["type"] == "started").collect();
    assert_eq!(started[1]["data"]["splits_done"], left.len());
    // one split may be committed without an event
    let committed = events.iter().filter(|e| e["type"] == "split_committed").count();
    assert!((SPLITS - 1..=SPLITS).contains(&committed), "{committed}");
    let states = ["queued", "running", "cancelling", "cancelled", "retrying", "queued", "running", "succeeded"];
    assert_eq!(api.states(&running), states);

    api.post(&format!("/jobs/{running}/retry")).problem(409);
    api.post(&format!("/jobs/{running}/cancel")).problem(409);
    for id in [&running, &waiting] {
        api.send("DELETE", &format!("/jobs/{id}"), &[], None).expect(204);
        api.send("DELETE", &format!("/jobs/{id}"), &[], None).problem(404);
    }
}

#[test]
fn two_jobs_with_one_output_never_mix() {
    let service = start(&json!({}));
    let api = &service.api;
    let expected = undisturbed(&service, &long_job(""));
    // The same job twice: the second waits for the first despite free slots, and finds its result.
    let ids: Vec<String> = (0..2).map(|_| api.submit(&long_job("shared"))).collect();
    api.wait_for_state(&ids[0], "running");
    // a later job with another output overtakes it
    let free = api.submit(&quick_job("free"));
    api.wait_for_state(&free, "succeeded");
    assert!(["running", "succeeded"].contains(&api.job(&ids[0])["state"].as_str().unwrap()));
    let ends: Vec<Value> = ids.iter().map(|id| api.wait_for_state(id, "succeeded")).collect();
    assert!(ends.iter().all(|job| job["attempt"] == 1), "{ends:#?}");
    assert_eq!((&ends[0]["result"]["already_done"], &ends[1]["result"]["already_done"]), (&json!(false), &json!(true)));
    assert_eq!(shards(&service.scratch.path("shared")), expected);
    service.stillhouse(&["verify", "shared", "--teacher"]).expect(0);
    let other = api.submit(&with(long_job("shared"), &json!({"seed": 43})));
    let refused = api.wait_for_state(&other, "failed");
    assert_eq!(refused["failure"]["kind"], "job");
    assert_eq!(refused["failure"]["problems"][0]["field"], "output.path");
    assert_eq!(shards(&service.scratch.path("shared")), expected);
}

#[test]
fn a_job_waits_for_whoever_works_on_its_output() {
    let service = start(&json!({}));
    let api = &service.api;
    // a run outside the service holds the output
    let lock = service.scratch.path("out/_stillhouse/lock");
    fs::create_dir_all(lock.parent().unwrap()).unwrap();
    let lock = fs::File::create(&lock).unwrap();
    lock.try_lock().unwrap();
    let id = api.submit_with("?max_attempts=1", &quick_job("out"));
    let waits = api.wait_for(&id, "it has looked twice", |job| job["state"] == "retrying" && job["attempt"] == 2);
    let reason = waits["reason"].as_str().unwrap();
    assert!(
        reason.ends_with("another run is working on this output; wait for it or stop it (next check in 2 s)"),
        "{reason}"
    );
    assert_eq!((&waits["failures"], &waits["failure"]), (&json!(0), &Value::Null));
    drop(lock);
    assert_eq!(api.wait_for_state(&id, "succeeded")["result"]["already_done"], false);
    // the same output by another path
    std::os::unix::fs::symlink(service.scratch.path("shared"), service.scratch.path("link")).unwrap();
    fs::create_dir(service.scratch.path("shared")).unwrap();
    let ids = ["shared", "link"].map(|output| api.submit_with("?max_attempts=1", &long_job(output)));
    let ends = ids.map(|id| api.wait_for_state(&id, "succeeded"));
    assert!(ends.iter().all(|job| job["failures"] == 0), "{ends:#?}");
    service.stillhouse(&["verify", "link"]).expect(0);
}

#[test]
fn a_job_whose_data_set_was_overwritten_shows_nothing_of_the_other_ones() {
    let service = start(&json!({}));
    let (mine, yours) = (service.token("ann", &["submit", "read"]), service.token("bob", &["submit", "read"]));
    let first = mine.submit(&quick_job("shared"));
    mine.wait_for_state(&first, "succeeded");
    assert_eq!(mine.get(&format!("/jobs/{first}/manifest")).expect(200).json()["job"]["seed"], 0);
    mine.get(&format!("/jobs/{first}/report")).expect(200);
    // the same job finds the finished data set
    let again = mine.submit(&quick_job("shared"));
    mine.wait_for_state(&again, "succeeded");
    mine.get(&format!("/jobs/{again}/report")).expect(200);
    let other = with(quick_job("shared"), &json!({"seed": 43, "name": "other"}));
    let second = yours.send_job("?overwrite=true", &[], &other).expect(201).json();
    let second = second["id"].as_str().unwrap();
    yours.wait_for_state(second, "succeeded");
    for id in [&first, &again] {
        for path in ["manifest", "report", "report?row=1"] {
            let problem = mine.get(&format!("/jobs/{id}/{path}")).problem(409);
            let detail = problem["detail"].as_str().unwrap();
            assert!(detail.starts_with("the job's output now holds a different data set"), "{detail}");
            assert!(!problem.to_string().contains("other\""), "{problem}");
        }
    }
    assert_eq!(yours.get(&format!("/jobs/{second}/manifest")).expect(200).json()["job"]["seed"], 43);
}

/// Ids of jobs in the order in which they started.
pub(crate) fn order_of_starts(api: &Api, ids: &[String]) -> Vec<String> {
    let starts = ids.iter().map(|id| (api.job(id)["started_at"].as_str().unwrap().to_owned(), id.clone()));
    let sorted: BTreeSet<(String, String)> = starts.collect();
    sorted.into_iter().map(|(_, id)| id).collect()
}
