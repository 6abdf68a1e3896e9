//! Tests the scheduling of jobs: priorities, fair turns of users, GPU slots.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use stillhouse_tests::service::{Api, signal};
use stillhouse_tests::with;

use crate::service_api::{long_job, order_of_starts, quick_job, start};

#[test]
fn higher_priorities_go_first_and_users_take_turns() {
    let mut service = start(&json!({"capacity": {"cpu_slots": 1}, "auth": "token"}));
    let user = |name: &str| service.token(name, &["read", "submit"]);
    let (ada, bob, eve) = (user("ada"), user("bob"), user("eve"));
    let blocker = eve.submit(&long_job("blocker"));
    eve.wait_for_state(&blocker, "running");
    let submit = |api: &Api, query: &str, name: &str| api.submit_with(query, &quick_job(name));
    // ada submits first, and more
    let mut ids: Vec<String> = (0..6).map(|n| submit(&ada, "", &format!("ada-{n}"))).collect();
    ids.extend((0..3).map(|n| submit(&bob, "", &format!("bob-{n}"))));
    let urgent = submit(&bob, "?priority=5", "urgent");
    let idle = submit(&ada, "?priority=-5", "idle");
    ids.extend([urgent.clone(), idle.clone()]);
    eve.post(&format!("/jobs/{blocker}/cancel")).expect(202);
    ids.iter().for_each(|id| drop(ada.wait_for_state(id, "succeeded")));
    let order = order_of_starts(&ada, &ids);
    assert_eq!((order.first(), order.last()), (Some(&urgent), Some(&idle)));
    // each user's jobs start in the order of submission
    for own in [&ids[..6], &ids[6..9]] {
        let started: Vec<&String> = order.iter().filter(|id| own.contains(id)).collect();
        assert_eq!(started, own.iter().collect::<Vec<_>>());
    }
    service.kill();

    // At every start the slot went to the user who had used it least. There is one slot, so attempts do not overlap.
    let database = rusqlite::Connection::open(service.data().join("service.sqlite")).unwrap();
    let sql = "SELECT j.id, a.user, a.started_at, a.ended_at FROM attempts a JOIN jobs j ON j.seq = a.job ORDER BY a.started_at, a.rowid";
    let mut statement = database.prepare(sql).unwrap();
    let rows = statement.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)));
    let attempts: Vec<(String, String, i64, i64)> = rows.unwrap().map(Result::unwrap).collect();
    assert!(attempts.windows(2).all(|w| w[0].3 <= w[1].2), "two at once: {attempts:?}");
    let mut used = BTreeMap::from([("ada", 0), ("bob", 0)]);
    let (mut turns, mut left) = (0, BTreeMap::from([("ada", 6), ("bob", 3)]));
    for (id, user, began, ended) in &attempts {
        if ids[..9].contains(id) {
            if left.values().all(|n| *n > 0) {
                let least = used.values().min().unwrap();
                assert_eq!(used[user.as_str()], *least, "{user} had more of it: {attempts:?}");
                turns += 1;
            }
            *left.get_mut(user.as_str()).unwrap() -= 1;
        }
        if let Some(used) = used.get_mut(user.as_str()) {
            *used += ended - began;
        }
    }
    assert!(turns >= 4, "{attempts:?}");
}

#[test]
fn a_gpu_is_one_jobs_at_a_time_and_keeps_nobody_waiting_who_needs_none() {
    // The program was built without CUDA: `auto` takes the GPU slot and computes on the CPU, `cuda` fails.
    let service = start(&json!({"capacity": {"running_jobs": 3, "cpu_slots": 1, "gpus": [0]}}));
    let api = &service.api;
    let on = |device: &str, output: &str| with(long_job(output), &json!({"extract": {"teacher": {"device": device}}}));
    let holder = api.submit(&on("auto", "holder"));
    // from the start of its worker, while that still checks its input
    let worker = service.wait_for_worker(&holder);
    signal(worker.process, libc::SIGSTOP);
    let running = api.wait_for(&holder, "on a GPU", |job| job["state"] == "running" && job["gpu"] == 0);
    signal(worker.process, libc::SIGCONT);
    assert_eq!(running["device"], "gpu");
    let waits = api.submit(&on("cuda", "waits"));
    let named = api.submit(&on("cuda:0", "named"));
    let passes = api.submit(&quick_job("passes"));
    let passed = api.wait_for_state(&passes, "succeeded");
    assert_eq!((&passed["device"], &passed["gpu"]), (&json!("cpu"), &Value::Null));
    for id in [&waits, &named] {
        let job = api.job(id);
        assert_eq!((&job["device"], &job["state"], &job["gpu"]), (&json!("gpu"), &json!("queued"), &Value::Null));
    }
    api.post(&format!("/jobs/{holder}/cancel")).expect(202);
    assert_eq!(api.wait_for_state(&holder, "cancelled")["gpu"], Value::Null);
    for id in [&waits, &named] {
        let failed = api.wait_for_state(id, "failed");
        assert_eq!((&failed["failure"]["kind"], &failed["attempt"]), (&json!("job"), &json!(1)), "{failed:#}");
        assert!(failed["failure"].to_string().to_lowercase().contains("cuda"), "{failed:#}");
    }
    let problem = api.send_job("", &[], &on("cuda:1", "other")).problem(422);
    assert_eq!(problem["problems"][0]["field"], "extract.teacher.device");
}
