//! Tests live streams: their limits, their effect on other clients, their end, their resumption, and their visibility.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::Stdio;

use serde_json::{Value, json};
use stillhouse_tests::service::{Api, ApiResponse, Service, eventually};

use crate::service_api::{long_job, quick_job, start};

const SSE: (&str, &str) = ("accept", "text/event-stream");

#[track_caller]
fn assert_too_many(answer: ApiResponse, says: &str) {
    assert!(answer.header("retry-after").parse::<u32>().unwrap() >= 1);
    let problem = answer.problem(429);
    assert!(problem["detail"].as_str().unwrap().contains(says), "{problem}");
}

#[test]
fn a_flood_keeps_nobody_out_who_looks_after_the_service() {
    let service = start(&json!({"auth": "token", "limits": {
        "connections": 16, "connections_kept": 3, "connections_per_address": 100, "header_seconds": 3600,
        "watchers": 1000, "watchers_per_user": 4, "watchers_per_token": 2,
    }}));
    let reader = |user: &str| service.token(user, &["read", "submit"]);
    let (ada, again, third) = (reader("ada"), reader("ada"), reader("ada"));
    let (bob, more, eve) = (reader("bob"), reader("bob"), reader("eve"));
    let (admin, figures) = (service.token("root", &["admin"]), service.token("grafana", &["read"]));
    // four streams of ada, four of bob: half of the connections, independent of `watchers`
    let open = |of: &Api| (0..2).map(|_| of.stream("/events", &[])).collect::<Vec<_>>();
    let mut streams = open(&ada);
    assert_too_many(ada.send("GET", "/events", &[SSE], None), "2 live streams of this token are open");
    streams.extend(open(&again));
    assert_too_many(third.send("GET", "/events", &[SSE], None), "4 live streams of ada are open");
    streams.extend(open(&bob));
    streams.extend(open(&more));
    assert_too_many(
        eve.send("GET", "/events", &[SSE], None),
        "8 live streams are open, the maximum of this server (limits.watchers",
    );
    eve.get("/jobs").expect(200);

    // silent connections until all connections are taken
    let mut silent: Vec<TcpStream> = Vec::new();
    eventually("all connections are taken", || {
        silent.push(service.connect());
        (eve.get("/jobs").status == 429).then_some(())
    });
    silent.extend((0..20).map(|_| service.connect()));
    let refused = eve.get("/jobs");
    assert_eq!(refused.header("connection"), "close");
    assert_too_many(refused, "tokens with the scope admin");
    let anybody = &service.api;
    for _ in 0..5 {
        anybody.get("/health").expect(200);
        anybody.get("/ready").expect(200);
        assert!(figures.get("/metrics").expect(200).text.contains("stillhouse_watchers 8\n"));
        assert_eq!(admin.get("/jobs").expect(200).json()["jobs"], json!([]));
        assert_too_many(anybody.get("/version"), "/api/v1/health");
        assert_too_many(admin.send("GET", "/events", &[SSE], None), "do not accept live streams");
    }
    // an admin can end the flood
    service.revoke(&ada);
    drop(streams.drain(..2).map(Iterator::count).collect::<Vec<_>>());
    drop(silent);
    eventually("there is room again", || (eve.get("/jobs").status == 200).then_some(()));
    eve.stream("/events", &[]);
}

#[test]
fn requests_of_one_user_leave_others_theirs() {
    let service = start(&json!({"auth": "token", "limits": {"requests_per_minute": 30}}));
    let ada = service.token("ada", &["read"]);
    eventually("ada's are used up", || (ada.get("/jobs").status == 429).then_some(()));
    // the same person's administrator token and metrics still work
    let admin = service.token("ada", &["admin"]);
    admin.get("/jobs").expect(200);
    ada.get("/metrics").expect(200);
    let anybody = &service.api;
    eventually("those of the address are used up", || (anybody.get("/version").status == 429).then_some(()));
    anybody.get("/health").expect(200);
    anybody.get("/ready").expect(200);
}

#[test]
fn clients_behind_a_trusted_proxy_are_distinguished() {
    let limits = json!({"requests_per_minute": 30, "connections_per_address": 1});
    let mut service = Service::new(&json!({"auth": "token", "trusted_proxies": ["127.0.0.0/8"], "limits": limits}));
    service.set_env("STILLHOUSE_LOG", "info");
    service.launch();
    let api = &service.api;
    let version = |said: &str| api.send("GET", "/version", &[("x-forwarded-for", said)], None).status;
    eventually("one address has used up its requests", || (version("192.0.2.1") == 429).then_some(()));
    // addresses that a client adds itself do not count; only the one that the proxy appended does
    assert_eq!(version("192.0.2.2, 192.0.2.1"), 429);
    assert_eq!(version("192.0.2.2, 192.0.2.1, 127.0.0.9"), 429);
    assert_eq!((version("192.0.2.2"), version("192.0.2.1, 192.0.2.3")), (200, 200));

    // an address may have as many concurrent requests as connections
    let ada = service.token("ada", &["read"]);
    let stream = ada.stream("/events", &[("x-forwarded-for", "192.0.2.7")]);
    let jobs = |said: &str| ada.send("GET", "/jobs", &[("x-forwarded-for", said)], None);
    assert_too_many(jobs("192.0.2.7"), "1 requests from 192.0.2.7");
    jobs("192.0.2.8").expect(200);
    drop(stream);
    eventually("the stream is counted off", || (jobs("192.0.2.7").status == 200).then_some(()));
    let said = service.log_text();
    assert!(said.contains("192.0.2.7") && said.contains("192.0.2.3"), "{said}");

    // from clients that are not trusted proxies the header is ignored
    let mut service = Service::new(&json!({"auth": "token", "limits": {"requests_per_minute": 30}}));
    service.set_env("STILLHOUSE_LOG", "info");
    service.launch();
    let version = |said: &str| service.api.send("GET", "/version", &[("x-forwarded-for", said)], None).status;
    let mut n = 0;
    eventually("they are all one address", || {
        n += 1;
        (version(&format!("192.0.2.{}", n % 250)) == 429).then_some(())
    });
    assert!(!service.log_text().contains("192.0.2."));
}

#[test]
fn the_streams_of_a_token_end_with_it() {
    let service = start(&json!({"auth": "token", "capacity": {"running_jobs": 1, "cpu_slots": 1}}));
    let token = |user: &str| service.token(user, &["read", "submit"]);
    let (ada, bob, eve) = (token("ada"), token("bob"), token("eve"));
    let busy = bob.submit(&long_job("busy"));
    bob.wait_for_state(&busy, "running");
    let waiting = bob.submit(&quick_job("waiting"));
    let streams = |of: &Api| {
        let path = format!("/jobs/{waiting}/events");
        (
            of.stream("/events", &[]),
            of.stream(&path, &[]),
            of.send_raw("GET", &format!("/jobs/{waiting}/logs?follow=true"), &[], None),
        )
    };
    let (all, of_job, log) = streams(&ada);
    let mut stays = bob.stream("/events", &[]);
    let (over, ..) = streams(&eve);
    service.revoke(&ada);
    // revocation ends the streams, without an `end` event of the job
    assert_ne!(of_job.last().map(|sent| sent.kind), Some("end".into()));
    all.for_each(drop);
    assert!(log.unwrap().into_body().read_to_string().is_err(), "cut off, so that it is not taken for the whole");
    ada.get("/jobs").problem(401);
    // so does expiry of a token
    let database = rusqlite::Connection::open(service.data().join("service.sqlite")).unwrap();
    database.busy_timeout(stillhouse_tests::service::TIMEOUT).unwrap();
    let id = eve.secret().split('_').nth(1).unwrap();
    assert_eq!(database.execute("UPDATE tokens SET expires_at = 1 WHERE id = ?", [id]).unwrap(), 1);
    over.for_each(drop);
    // other users' streams continue
    bob.post(&format!("/jobs/{waiting}/cancel"));
    assert!(stays.any(|sent| sent.kind == "state" && sent.data["job"] == waiting.as_str()));
}

/// State, job and event number of the next `n` state changes.
fn changes(api: &Api, last: Option<i64>, n: usize) -> Vec<(String, String, i64)> {
    let last = last.map(|n| n.to_string());
    let headers: Vec<(&str, &str)> = last.iter().map(|last| ("last-event-id", last.as_str())).collect();
    let states = api.stream("/events", &headers).filter(|sent| sent.kind == "state").take(n);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    states.map(|s| (text(&s.data["data"]["to"]), text(&s.data["job"]), s.id.unwrap())).collect()
}

#[test]
fn a_stream_of_all_jobs_goes_on_where_it_was_lost_or_says_what_to_do() {
    let service = start(&json!({"capacity": {"running_jobs": 1, "cpu_slots": 1}}));
    let api = &service.api;
    let first = api.submit(&quick_job("first"));
    api.wait_for_state(&first, "succeeded");
    let kept: Vec<(String, String, i64)> = api
        .events(&first)
        .iter()
        .filter(|e| e["type"] == "state")
        .map(|e| (e["data"]["to"].as_str().unwrap().to_owned(), first.clone(), e["seq"].as_i64().unwrap()))
        .collect();
    assert_eq!(kept.iter().map(|k| k.0.as_str()).collect::<Vec<_>>(), ["queued", "running", "succeeded"]);
    assert_eq!(changes(api, Some(0), 3), kept);
    // resumed after any event, even one that only the job's own stream contains
    for at in kept[0].2..kept[2].2 {
        let expected: Vec<_> = kept.iter().filter(|k| k.2 > at).cloned().collect();
        assert_eq!(changes(api, Some(at), expected.len()), expected, "{at}");
    }
    // earlier changes, then new ones, each exactly once
    let last = kept[1].2;
    let second = api.submit(&quick_job("second"));
    let went_on = changes(api, Some(last), 4);
    assert_eq!(went_on[0], kept[2]);
    assert!(went_on[1..].iter().all(|(_, job, _)| *job == second), "{went_on:?}");
    assert_eq!(
        went_on.iter().map(|k| k.0.as_str()).collect::<Vec<_>>(),
        ["succeeded", "queued", "running", "succeeded"]
    );
    // without a number the stream starts now, and its first message has that position
    let third = api.submit(&quick_job("third"));
    assert!(changes(api, None, 1).iter().all(|(_, job, _)| *job == third));

    let ask = |path: &str, last: &str| api.send("GET", path, &[SSE, ("last-event-id", last)], None);
    let paths = ["/events".to_owned(), format!("/jobs/{second}/events")];
    for path in &paths {
        for wrong in ["x", "-1", "1.5", "99999999999999999999", "1 2"] {
            ask(path, wrong).problem(400);
        }
        let problem = ask(path, "9000000").problem(409);
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains("has no event") && detail.contains("without"), "{detail}");
    }
    // a reconnecting client's header overrides the URL's `after`
    let header = ("last-event-id", kept[2].2.to_string());
    let sent = api.stream(&format!("/jobs/{first}/events?after=0"), &[(header.0, header.1.as_str())]);
    assert_eq!(sent.map(|s| s.kind).collect::<Vec<_>>(), ["end"]);
    // If events were deleted meanwhile, the stream is refused instead of silently skipping them.
    api.wait_for_state(&third, "succeeded");
    api.send("DELETE", &format!("/jobs/{second}"), &[], None).expect(204);
    let problem = ask("/events", &kept[2].2.to_string()).problem(409);
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("deleted") && detail.contains("list the jobs"), "{detail}");
    let newest = api.events(&third).last().unwrap()["seq"].as_i64().unwrap();
    assert_eq!(changes(api, Some(newest), 0), []);
}

#[test]
fn a_watcher_of_all_jobs_goes_on_over_a_restart() {
    let mut service = start(&json!({}));
    let mut watch = service.command(&["jobs", "watch"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut changes = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut notes = BufReader::new(watch.stderr.take().unwrap()).lines();
    assert!(notes.next().unwrap().unwrap().contains("every change of state"));
    service.kill();
    assert!(notes.next().unwrap().unwrap().contains("trying again"));
    service.launch();
    let id = service.api.submit(&quick_job("out"));
    let mut seen = Vec::new();
    while seen.last().is_none_or(|line: &String| !line.contains("succeeded")) {
        seen.push(changes.next().unwrap().unwrap());
    }
    let states: Vec<bool> = ["queued", "running", "succeeded"]
        .iter()
        .zip(&seen)
        .map(|(s, line)| line.contains(s) && line.contains(&id))
        .collect();
    assert_eq!((states, seen.len()), (vec![true; 3], 3), "{seen:#?}");
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn a_token_that_may_submit_follows_its_own_jobs_and_no_others() {
    let service = start(&json!({"auth": "token", "capacity": {"cpu_slots": 1}}));
    let (wes, ada) = (service.token("wes", &["submit"]), service.token("ada", &["read", "submit"]));
    let all = wes.stream("/events", &[]);
    let other = ada.submit(&quick_job("other"));
    ada.wait_for_state(&other, "succeeded");
    let own = wes.submit(&quick_job("own"));
    let followed: Vec<String> = wes.stream(&format!("/jobs/{own}/events"), &[]).map(|sent| sent.kind).collect();
    assert_eq!(followed.last().map(String::as_str), Some("end"));
    wes.get(&format!("/jobs/{own}/logs?follow=true")).expect(200);
    assert_eq!(wes.job(&own)["progress"]["splits_done"], wes.job(&own)["progress"]["splits"]);
    for path in ["/events", "/logs", "/rates", "/file", "/manifest", "/report"] {
        wes.get(&format!("/jobs/{own}{path}")).expect(200);
        let refused = wes.get(&format!("/jobs/{other}{path}")).problem(403)["detail"].clone();
        // a missing job is refused in the same words, and no user is named
        assert_eq!(wes.get(&format!("/jobs/000000000000{path}")).problem(403)["detail"], refused);
        assert!(!refused.as_str().unwrap().contains("ada"), "{refused}");
    }
    for (method, rest) in [("GET", ""), ("POST", "/cancel"), ("POST", "/retry"), ("DELETE", "")] {
        let problem = wes.send(method, &format!("/jobs/{other}{rest}"), &[], None).problem(403);
        assert!(!problem.to_string().contains("ada"), "{problem}");
    }
    let ids = |page: Value| page["jobs"].as_array().unwrap().iter().map(|j| j["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(wes.get("/jobs").expect(200).json()), [json!(own)]);
    assert_eq!(ids(wes.get("/jobs?user=wes").expect(200).json()), [json!(own)]);
    wes.get("/jobs?user=ada").problem(403);
    wes.get("/metrics").problem(403);
    // the stream of all jobs contains only their own, even for replayed events
    let mine = |sent: &stillhouse_tests::service::SseEvent| sent.data["job"] == own.as_str();
    let states = |stream: stillhouse_tests::service::EventStream| {
        let states = stream.inspect(|sent| assert!(mine(sent), "{sent:?}")).filter(|sent| sent.kind == "state");
        states.take(3).map(|sent| sent.data["data"]["to"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(states(all), ["queued", "running", "succeeded"]);
    assert_eq!(states(wes.stream("/events", &[("last-event-id", "0")])), ["queued", "running", "succeeded"]);

    // from the command line, to the end of the job
    service.scratch.job("job.yaml", &quick_job("by-hand"));
    let done =
        stillhouse_tests::run_command(service.command(&["submit", "job.yaml"]).env("STILLHOUSE_TOKEN", wes.secret()));
    assert!(done.expect(0).stdout.starts_with("data set"));
}
