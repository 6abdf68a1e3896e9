//! Tests failing attempts: who is at fault, what is retried, and what the limits of a job stop.

use serde_json::{Value, json};
use stillhouse_tests::service::{eventually, signal};
use stillhouse_tests::{corpus, shards, with};

use crate::service_api::{SPLITS, long_job, quick_job, start, undisturbed};

#[test]
fn a_worker_that_is_killed_is_the_machines_fault_and_tried_again() {
    let service = start(&json!({"capacity": {"cpu_slots": 1}, "limits": {"max_attempts": 4}}));
    let api = &service.api;
    let expected = undisturbed(&service, &long_job(""));
    let id = api.submit_with("?max_attempts=4", &long_job("out"));
    for failures in 1..=2 {
        // in the middle of its work
        let before = shards(&service.scratch.path("out")).len();
        eventually("more splits", || (shards(&service.scratch.path("out")).len() >= before + 2).then_some(()));
        signal(service.wait_for_worker(&id).process, libc::SIGKILL);
        let job = api.wait_for(&id, "failed once more", |job| job["failures"] == failures);
        assert_eq!((&job["failure"]["kind"], &job["failure"]["problems"]), (&json!("machine"), &json!([])));
        let reported = job["failure"]["message"].as_str().unwrap();
        assert!(reported.contains("signal 9") && job["reason"].as_str().unwrap().starts_with(reported), "{job:#}");
        api.wait_for(&id, "runs again", |job| job["attempt"] == failures + 1);
    }
    let done = api.wait_for_state(&id, "succeeded");
    assert_eq!((&done["attempt"], &done["failures"], &done["failure"]), (&json!(3), &json!(2), &Value::Null));
    assert_eq!(shards(&service.scratch.path("out")), expected);
    let round = ["queued", "running", "retrying"];
    assert_eq!(api.states(&id), [&round[..], &round, &["queued", "running", "succeeded"]].concat());
    let waits: Vec<String> = api
        .events(&id)
        .into_iter()
        .filter(|e| e["data"]["to"] == "retrying")
        .map(|e| e["data"]["reason"].as_str().unwrap().rsplit_once(" (").unwrap().1.to_owned())
        .collect();
    assert_eq!(waits, ["attempt 1 of 4; the next in 1 s)", "attempt 2 of 4; the next in 2 s)"]);
    // No split was committed twice. Splits may lack an event if the worker was killed between the commit and the event.
    let events = api.events(&id);
    let mut splits: Vec<String> =
        events.iter().filter(|e| e["type"] == "split_committed").map(|e| e["data"]["split"].to_string()).collect();
    let committed = splits.len();
    splits.sort();
    splits.dedup();
    assert!(committed == splits.len() && (SPLITS - 2..=SPLITS).contains(&committed), "{committed} {splits:?}");
    assert_eq!((&done["progress"]["splits_done"], &done["progress"]["splits"]), (&json!(SPLITS), &json!(SPLITS)));
    // the metrics count the attempts
    let figures = api.get("/metrics").expect(200).text;
    for line in
        ["stillhouse_attempts_total{outcome=\"crashed\"} 2", "stillhouse_attempts_total{outcome=\"succeeded\"} 1"]
    {
        assert!(figures.lines().any(|l| l == line), "{line} is not in\n{figures}");
    }

    // with one attempt there is no retry
    let id = api.submit_with("?max_attempts=1", &long_job("once"));
    api.wait_for_split(&id, 1);
    signal(service.wait_for_worker(&id).process, libc::SIGKILL);
    let failed = api.wait_for_state(&id, "failed");
    assert_eq!(
        (&failed["failure"]["kind"], &failed["failures"], &failed["attempt"]),
        (&json!("machine"), &json!(1), &json!(1))
    );
    assert!(failed["reason"].as_str().unwrap().ends_with(" (attempt 1 of 1)"), "{failed:#}");
    // a manual retry resets the count of failures
    api.post(&format!("/jobs/{id}/retry")).expect(202);
    let done = api.wait_for_state(&id, "succeeded");
    assert_eq!((&done["failures"], &done["attempt"]), (&json!(0), &json!(2)));
    assert_eq!(shards(&service.scratch.path("once")), expected);
}

#[test]
fn a_worker_that_is_reported_to_stop_by_somebody_else_has_not_failed() {
    // as when a machine shuts down: every process gets SIGTERM, in any order
    let service = start(&json!({"limits": {"max_attempts": 1}}));
    let api = &service.api;
    let id = api.submit(&long_job("out"));
    api.wait_for_split(&id, 1);
    signal(service.wait_for_worker(&id).process, libc::SIGTERM);
    let done = api.wait_for_state(&id, "succeeded");
    assert_eq!((&done["attempt"], &done["failures"]), (&json!(2), &json!(0)));
    let events = api.events(&id);
    let back = events.iter().find(|e| e["data"]["from"] == "running").unwrap();
    assert_eq!(back["data"], json!({"from": "running", "to": "queued", "reason": "a signal stopped its worker"}));
}

#[test]
fn a_job_that_waits_for_its_next_attempt_can_be_cancelled() {
    let service = start(&json!({"retry": {"first_backoff_seconds": 3600, "largest_backoff_seconds": 3600}}));
    let api = &service.api;
    let id = api.submit(&long_job("out"));
    api.wait_for_split(&id, 1);
    signal(service.wait_for_worker(&id).process, libc::SIGKILL);
    let waits = api.wait_for_state(&id, "retrying");
    assert!(waits["not_before"].as_str().unwrap() > waits["updated_at"].as_str().unwrap());
    api.post(&format!("/jobs/{id}/retry")).problem(409);
    let cancelled = api.post(&format!("/jobs/{id}/cancel")).expect(200).json();
    assert_eq!((&cancelled["state"], &cancelled["not_before"]), (&json!("cancelled"), &Value::Null));
    // a manual retry does not wait for the backoff
    api.post(&format!("/jobs/{id}/retry")).expect(202);
    api.wait_for_state(&id, "succeeded");
}

#[test]
fn a_job_that_is_wrong_fails_at_once_with_everything_that_is_wrong() {
    let service = start(&json!({}));
    let api = &service.api;
    let id = api.submit(&with(
        long_job("out"),
        &json!({"input": {"paths": ["corpus.jsonl", "missing-*.jsonl"]}, "pack": {"length": 2048}}),
    ));
    let failed = api.wait_for_state(&id, "failed");
    assert_eq!((&failed["attempt"], &failed["failures"]), (&json!(1), &json!(1)));
    assert_eq!(failed["failure"]["kind"], "job");
    let mut problems = failed["failure"]["problems"].as_array().unwrap().clone();
    problems.sort_by_key(|p| p["field"].to_string());
    let reported: Vec<(&Value, &Value)> = problems.iter().map(|p| (&p["field"], &p["got"])).collect();
    assert_eq!(
        reported,
        [(&json!("input.paths[1]"), &json!("\"missing-*.jsonl\"")), (&json!("pack.length"), &json!("2048")),]
    );
    assert_eq!(api.states(&id), ["queued", "running", "failed"]);
    // invalid JSON in a document is the job's fault too, but found later
    service.scratch.write("broken.jsonl", "{\"text\": \"a\"}\n{broken\n");
    let id = api.submit(&with(quick_job("broken"), &json!({"input": {"paths": ["broken.jsonl"]}})));
    let failed = api.wait_for_state(&id, "failed");
    assert_eq!((&failed["failure"]["kind"], &failed["attempt"]), (&json!("job"), &json!(1)), "{failed:#}");
    let log = api.get(&format!("/jobs/{id}/logs")).expect(200).text;
    assert!(log.contains("broken.jsonl"), "{log}");
}

#[test]
fn limits_stop_a_job_and_stay_with_it() {
    let service = start(&json!({"limits": {"time_limit_hours": 1, "output_limit_gigabytes": 1, "max_attempts": 2}}));
    let api = &service.api;
    for wrong in ["time_limit_seconds=3601", "time_limit_seconds=0", "output_limit_bytes=1000000001", "max_attempts=3"]
    {
        let problem = api.send_job(&format!("?{wrong}"), &[], &quick_job("out")).problem(400);
        let (key, most) = (wrong.split_once('=').unwrap().0, problem["detail"].as_str().unwrap());
        assert!(most.starts_with(&format!("{key}: got ")), "{most}");
    }
    // far more than two attempts of one second can do
    service.scratch.write("corpus.jsonl", &corpus(60, 1300));
    let late = api.submit_with("?time_limit_seconds=1", &long_job("late"));
    let large = api.submit_with("?output_limit_bytes=60000", &long_job("large"));
    for (id, says) in [(&late, "its time limit of 1 s"), (&large, "its limit of 60000 bytes")] {
        for attempt in 1..=2 {
            let failed = api.wait_for_state(id, "failed");
            let failure = &failed["failure"];
            assert_eq!((&failure["kind"], &failed["attempt"]), (&json!("limit"), &json!(attempt)), "{failed:#}");
            assert!(failure["message"].as_str().unwrap().contains(says), "{failed:#}");
            assert_eq!((&failed["reason"], &failed["failures"]), (&failure["message"], &json!(1)));
            if attempt == 1 {
                // the limits belong to the job and apply to a manual retry too
                api.post(&format!("/jobs/{id}/retry")).expect(202);
                api.wait_for(id, "runs again", |job| job["attempt"] == 2);
            }
        }
    }
    let kept = shards(&service.scratch.path("large")).len();
    assert!((2..20).contains(&kept), "{kept} splits were committed");
    assert!(service.workers().is_empty());
}

#[test]
fn a_job_that_needs_more_memory_than_it_may_have_is_not_tried_again() {
    let service = crate::service_api::start(&json!({"capacity": {"worker_gigabytes": 1}}));
    let api = &service.api;
    // a text of 100 MB, of which a query holds several copies
    let row = json!({"text": "many words of a long text ".repeat(5_000_000)}).to_string();
    service.scratch.write("long.jsonl", &row);
    let query = json!({"input": {"paths": ["long.jsonl"], "sql": "SELECT text || text || text || text || text AS text FROM input"}});
    let id = api.submit(&with(quick_job("out"), &query));
    let job = api.wait_for_state(&id, "failed");
    assert_eq!((&job["attempt"], &job["failure"]["kind"]), (&json!(1), &json!("limit")), "{job:#}");
    let reason = job["reason"].as_str().unwrap();
    assert!(reason.starts_with("its worker needs more than 1 GB of memory"), "{reason}");
    assert!(reason.contains("capacity.worker_gigabytes"), "{reason}");
    let log = api.get(&format!("/jobs/{id}/logs")).expect(200).text;
    assert!(
        log.contains("the address space of this process is limited to 1000000000 bytes, which was not enough"),
        "{log}"
    );
}
