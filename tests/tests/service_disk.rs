//! Tests ends that are hard to detect: a full disk, a cancellation that comes too late, a body that is too large.

use std::fs;
use std::io::{Read, Write};

use serde_json::{Value, json};
use stillhouse_tests::service::{Service, eventually, freeze, signal};
use stillhouse_tests::{repetitions, shards};

use crate::resume::uniform_draws;
use crate::service_api::{SPLITS, long_job, quick_job, start, undisturbed};

/// Size of the write-ahead log. Within it writes still succeed; beyond it they fail.
fn log_bytes(service: &Service) -> u64 {
    fs::metadata(service.data().join("service.sqlite-wal")).map_or(0, |m| m.len())
}

fn count(text: &str, what: &str) -> usize {
    text.lines().filter(|line| line.contains(what)).count()
}

#[test]
fn a_full_disk_is_reported_once_and_loses_no_event() {
    let mut service = Service::new(&json!({"capacity": {"cpu_slots": 1}}));
    service.scratch.write("corpus.jsonl", &stillhouse_tests::corpus(crate::service_api::DOCUMENTS, 1300));
    service.set_env("STILLHOUSE_LOG", "warn,stillhouse_service::disk_space=info");
    service.launch();
    let api = &service.api;
    let expected = undisturbed(&service, &long_job(""));
    let id = api.submit(&long_job("out"));
    let waiting = api.submit(&quick_job("waiting"));
    api.wait_for_split(&id, 2);
    assert_eq!(api.get("/ready").expect(200).json()["status"], "ready");
    service.limit_files(Some(log_bytes(&service).max(64 << 10)));

    // the next event of the job detects it, and every endpoint reports it
    eventually("it is found", || (api.get("/ready").status == 503).then_some(()));
    let problem = api.get("/ready").problem(503);
    assert!(problem["detail"].as_str().unwrap().contains("data folder is full"), "{problem}");
    assert_eq!(api.get("/health").expect(200).json()["status"], "ok");
    let full = |value: u8| api.get("/metrics").text.contains(&format!("stillhouse_data_folder_full {value}\n"));
    assert!(full(1));
    for _ in 0..3 {
        let refused = api.send_job("", &[], &quick_job("refused"));
        assert!(!refused.header("retry-after").is_empty());
        let problem = refused.problem(507);
        assert!(problem["detail"].as_str().unwrap().contains("submissions are refused"), "{problem}");
        // a cancellation needs no space; it is stored once there is some
        let cancelled = api.post(&format!("/jobs/{waiting}/cancel")).expect(202).json();
        assert_eq!((&cancelled["state"], &cancelled["reason"]), (&json!("cancelling"), &json!("cancelled by local")));
        assert_eq!(api.job(&waiting)["state"], "cancelling");
    }
    let listed = api.get("/jobs").json()["jobs"].as_array().unwrap().clone();
    assert_eq!(listed.iter().map(|j| j["state"].as_str().unwrap()).collect::<Vec<_>>(), ["cancelling", "running"]);
    let refused = {
        service.scratch.job("refused.yaml", &quick_job("refused"));
        service.stillhouse(&["submit", "refused.yaml"]).expect(1)
    };
    assert!(refused.stderr.contains("data folder is full"), "{}", refused.stderr);
    // the worker finishes, and its end cannot be stored
    eventually("the worker ends", || service.workers().is_empty().then_some(()));
    assert_eq!(shards(&service.scratch.path("out")), expected);
    assert_eq!(api.job(&id)["state"], "running");

    service.limit_files(None);
    let done = api.wait_for_state(&id, "succeeded");
    assert_eq!(
        (&done["attempt"], &done["failures"]),
        (&json!(1), &json!(0)),
        "{:#?} {}",
        api.events(&id),
        service.log_text()
    );
    api.wait_for_state(&waiting, "cancelled");
    assert_eq!(api.states(&waiting), ["queued", "cancelled"]);
    eventually("it is over", || (api.get("/ready").status == 200 && full(0)).then_some(()));
    let events = api.events(&id);
    let of = |kind: &str| events.iter().filter(|e| e["type"] == kind).count();
    assert_eq!(
        (of("started"), of("split_started"), of("split_committed"), of("finished")),
        (1, SPLITS, SPLITS, 1),
        "{events:#?}"
    );
    let mut splits: Vec<&Value> =
        events.iter().filter(|e| e["type"] == "split_committed").map(|e| &e["data"]["split"]).collect();
    splits.sort_by_key(|s| s.as_u64());
    splits.dedup();
    assert_eq!(splits.len(), SPLITS);
    assert_eq!(api.states(&id), ["queued", "running", "succeeded"]);
    assert!(done["result"]["rows"].as_u64() > Some(0) && done["progress"]["splits_done"] == SPLITS, "{done:#}");
    // the event has the time at which it happened, not that of storing it
    let at = |kind: &str| events.iter().find(|e| e["type"] == kind).unwrap()["time"].as_str().unwrap().to_owned();
    assert!(at("finished").as_str() < events.last().unwrap()["time"].as_str().unwrap());
    // nothing of the refused submissions exists
    assert_eq!(api.get("/jobs").json()["jobs"].as_array().unwrap().len(), 2);
    let said = service.log_text();
    assert_eq!(
        (
            count(&said, "data folder is full"),
            count(&said, "the disk of the data folder has free space again"),
            count(&said, "cannot store")
        ),
        (1, 1, 0),
        "{said}"
    );
    assert_eq!(count(&said, "\"level\":\"ERROR\""), 1, "{said}");
}

#[test]
fn a_service_with_a_full_disk_stops_and_goes_on() {
    let mut service = start(&json!({"capacity": {"cpu_slots": 1}, "shutdown_seconds": 1}));
    let id = service.api.submit(&long_job("out"));
    service.api.wait_for_split(&id, 2);
    service.limit_files(Some(log_bytes(&service).max(256 << 10)));
    let api = service.api.clone();
    eventually("it is found", || (api.get("/ready").status == 503).then_some(()));
    // the worker is stopped although nothing can be stored
    assert_eq!(service.terminate(), Some(0));
    eventually("the worker ends", || service.workers().is_empty().then_some(()));
    service.launch();
    api.wait_for_state(&id, "succeeded");
    service.stillhouse(&["verify", "out"]).expect(0);
}

#[test]
fn a_running_job_is_cancelled_while_the_disk_is_full() {
    let service = start(&json!({"capacity": {"cpu_slots": 1}}));
    let api = &service.api;
    let id = api.submit(&long_job("out"));
    api.wait_for_split(&id, 2);
    service.limit_files(Some(log_bytes(&service).max(64 << 10)));
    eventually("it is found", || (api.get("/ready").status == 503).then_some(()));
    for _ in 0..2 {
        let asked = api.post(&format!("/jobs/{id}/cancel")).expect(202).json();
        assert_eq!((&asked["state"], &asked["reason"]), (&json!("cancelling"), &json!("cancelled by local")));
    }
    eventually("its worker ends", || service.workers().is_empty().then_some(()));
    assert_eq!(api.job(&id)["state"], "cancelling");
    assert!(!service.scratch.path("out").join("_SUCCESS").exists());
    service.limit_files(None);
    let cancelled = api.wait_for_state(&id, "cancelled");
    assert_eq!((&cancelled["reason"], &cancelled["attempt"]), (&json!("cancelled by local"), &json!(1)));
    assert_eq!(api.states(&id), ["queued", "running", "cancelling", "cancelled"]);
    // the queue continues
    eventually("there is room again", || (api.get("/ready").status == 200).then_some(()));
    let next = api.submit(&quick_job("next"));
    api.wait_for_state(&next, "succeeded");
}

#[test]
fn a_disk_that_a_job_fills_keeps_room_for_a_cancel_and_for_a_start() {
    let limits = json!({"capacity": {"cpu_slots": 1}, "limits": {"disk_reserve_megabytes": 0}});
    let Some(mut service) = Service::on_small_disk(16, &limits) else { return };
    service.scratch.write("corpus.jsonl", &stillhouse_tests::corpus(crate::service_api::DOCUMENTS, 1300));
    service.launch();
    let api = service.api.clone();
    let outputs = service.disk().path().join("out");
    let output = |name: &str| outputs.join(name).to_str().unwrap().to_owned();
    eventually("room is kept", || service.disk().file("data/reserve").exists().then_some(()));

    let id = api.submit(&long_job(&output("cut")));
    api.wait_for_split(&id, 2);
    service.disk().fill();
    eventually("it is found", || (api.get("/ready").status == 503).then_some(()));
    api.post(&format!("/jobs/{id}/cancel")).expect(202);
    // the cancellation is stored in the reserved space
    assert!(!service.disk().file("data/reserve").exists());
    service.kill();
    service.disk().fill();
    service.launch_until(503);
    assert!(["cancelling", "cancelled"].contains(&api.job(&id)["state"].as_str().unwrap()));
    service.disk().free_filled();
    api.wait_for_state(&id, "cancelled");

    // A job that runs when the service is killed exists after the restart, and resumes once there is space.
    eventually("room is kept again", || service.disk().file("data/reserve").exists().then_some(()));
    let id = api.submit(&long_job(&output("whole")));
    api.wait_for_split(&id, 2);
    service.disk().fill();
    service.kill();
    service.launch_until(503);
    assert!(["running", "queued"].contains(&api.job(&id)["state"].as_str().unwrap()));
    service.disk().free_filled();
    assert_eq!(api.wait_for_state(&id, "succeeded")["failures"], 0);

    // A restored copy consists of the database alone; the shared-memory file of its connections needs space.
    eventually("room is kept once more", || service.disk().file("data/reserve").exists().then_some(()));
    assert_eq!(service.terminate(), Some(0));
    for beside in ["data/service.sqlite-wal", "data/service.sqlite-shm"] {
        fs::remove_file(service.disk().file(beside)).unwrap();
    }
    service.disk().fill();
    service.launch();
    assert_eq!(api.job(&id)["state"], "succeeded");
    assert!(!service.disk().file("data/reserve").exists());
}

#[test]
fn a_disk_that_is_nearly_full_takes_no_new_jobs_and_runs_the_old_ones() {
    let mut service = start(&json!({}));
    let id = service.api.submit(&quick_job("out"));
    service.api.wait_for_state(&id, "succeeded");
    service.kill();
    // a larger reserve than any disk
    service.configure(&json!({"limits": {"disk_reserve_megabytes": 4_000_000_000_u32}}));
    let file = service.write_configuration();
    assert!(file.exists());
    let mut command = service.serve(&[]);
    let log = service.scratch.path("serve.log");
    command.env("STILLHOUSE_LOG", "info");
    let mut server = stillhouse_tests::server::Server::start(command, &log);
    let api = &service.api;
    server.wait_until("it answers", || api.try_get("/ready").is_some_and(|a| a.status == 503));
    api.send_job("", &[], &quick_job("new")).problem(507);
    assert_eq!(api.job(&id)["state"], "succeeded");
    server.kill();
    assert_eq!(count(&fs::read_to_string(&log).unwrap(), "limits.disk_reserve_megabytes"), 1);
}

#[test]
fn a_cancel_that_comes_after_the_data_set_is_whole_is_a_success() {
    let mut service = Service::new(&json!({"capacity": {"cpu_slots": 1}}));
    service.scratch.write("corpus.jsonl", &stillhouse_tests::corpus(crate::service_api::DOCUMENTS, 1300));
    // the worker pauses between writing `_SUCCESS` and reporting it
    let (hold, reached) = (service.scratch.path("finished.hold"), service.scratch.path("finished.reached"));
    service.set_env("STILLHOUSE_TEST_HOLD_FINISHED", hold.to_str().unwrap());
    service.launch();
    let api = &service.api;
    for (output, query) in [("cancelled", ""), ("killed", "?max_attempts=1")] {
        fs::write(&hold, "").unwrap();
        let id = api.submit_with(query, &quick_job(output));
        eventually("the data set is whole", || reached.exists().then_some(()));
        assert!(service.scratch.path(output).join("_SUCCESS").exists());
        if output == "killed" {
            signal(service.wait_for_worker(&id).process, libc::SIGKILL);
        } else {
            let asked = api.post(&format!("/jobs/{id}/cancel")).expect(202).json();
            assert_eq!(asked["state"], "cancelling");
        }
        let done = api.wait_for_state(&id, "succeeded");
        assert_eq!((&done["attempt"], &done["failure"]), (&json!(1), &Value::Null));
        assert!(done["result"]["rows"].as_u64() > Some(0) && done["result"]["already_done"] == false, "{done:#}");
        assert_eq!(api.events(&id).iter().filter(|e| e["type"] == "finished").count(), 1);
        api.post(&format!("/jobs/{id}/cancel")).problem(409);
        fs::remove_file(&reached).unwrap();
    }
}

#[test]
fn a_cancel_that_came_too_late_is_one_also_when_the_service_was_killed() {
    let mut service = start(&json!({"capacity": {"cpu_slots": 1}, "limits": {"cancel_seconds": 3600}}));
    let (hold, reached) = (service.scratch.path("finished.hold"), service.scratch.path("finished.reached"));
    service.set_env("STILLHOUSE_TEST_HOLD_FINISHED", hold.to_str().unwrap());
    service.kill();
    service.launch();
    fs::write(&hold, "").unwrap();
    let api = service.api.clone();
    let id = api.submit(&quick_job("out"));
    eventually("the data set is whole", || reached.exists().then_some(()));
    // a frozen worker cannot react, so the cancellation stays pending
    freeze(service.wait_for_worker(&id).process);
    api.post(&format!("/jobs/{id}/cancel")).expect(202);
    service.kill();
    service.launch();
    assert_eq!(api.job(&id)["state"], "succeeded");
    assert_eq!(api.states(&id), ["queued", "running", "cancelling", "succeeded"]);
    assert!(api.job(&id)["result"]["rows"].as_u64() > Some(0));
    // a job whose data set is incomplete is cancelled
    let id = api.submit(&long_job("cut"));
    api.wait_for_split(&id, 1);
    freeze(service.wait_for_worker(&id).process);
    api.post(&format!("/jobs/{id}/cancel")).expect(202);
    service.kill();
    service.launch();
    assert_eq!(api.job(&id)["state"], "cancelled");
}

#[test]
fn what_became_of_a_cancelled_job_is_what_its_data_set_says() {
    let service = start(&json!({"capacity": {"cpu_slots": 1}}));
    let api = &service.api;
    let races = repetitions(6, 30);
    let mut ends = Vec::new();
    for (race, moment) in uniform_draws(30).take(races).enumerate() {
        let output = format!("race-{race}");
        let id = api.submit(&quick_job(&output));
        // wait until the last splits, around the time the manifest is written
        eventually("it is nearly done", || {
            let job = api.job(&id);
            (job["state"] != "queued" && shards(&service.scratch.path(&output)).len() >= SPLITS - 1).then_some(())
        });
        std::thread::sleep(std::time::Duration::from_secs_f64(moment * 0.05));
        let asked = api.post(&format!("/jobs/{id}/cancel"));
        assert!([200, 202, 409].contains(&asked.status), "{}", asked.text);
        let over = |job: &Value| ["succeeded", "cancelled"].contains(&job["state"].as_str().unwrap());
        let state = api.wait_for(&id, "over", over)["state"].as_str().unwrap().to_owned();
        let whole = service.scratch.path(&output).join("_SUCCESS").exists();
        assert_eq!(state, if whole { "succeeded" } else { "cancelled" }, "race {race}");
        ends.push(state);
    }
    println!("{ends:?}");
}

#[test]
fn a_body_that_is_announced_too_large_is_refused_before_it_comes() {
    // a long timeout, so that only the size limit can refuse
    let service = start(&json!({"limits": {"body_kilobytes": 64, "body_seconds": 3600}}));
    let host = &service.api.url()["http://".len()..];
    let chunk = format!("{:x}\r\n{}", 65_000, "#".repeat(65_000));
    for path in ["/api/v1/jobs", "/api/v1/validate"] {
        for (header, begin) in [
            ("Content-Length: 9000000000", ""),
            ("Content-Length: 64001", ""),
            ("Expect: 100-continue\r\nContent-Length: 64001", ""),
            // without an announced length: refused as soon as the limit is exceeded
            ("Transfer-Encoding: chunked", chunk.as_str()),
        ] {
            let mut connection = service.connect();
            let head =
                format!("POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/yaml\r\n{header}\r\n\r\n");
            connection.write_all(head.as_bytes()).unwrap();
            connection.write_all(begin.as_bytes()).unwrap();
            let mut first = [0; 12];
            connection.read_exact(&mut first).unwrap();
            assert_eq!(String::from_utf8_lossy(&first), "HTTP/1.1 413", "{path} {header}");
        }
    }
    // a body of exactly the limit is processed
    let fits = format!("version: 1 {}", "#".repeat(64_000 - 11));
    service.api.send("POST", "/jobs", &[("content-type", "application/yaml")], Some(&fits)).problem(422);
}
