//! Tests limits on worker reports, on the files that a job names, and on the duration of checks; and what is refused
//! before it enters the queue.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::Stdio;

use serde_json::{Value, json};
use stillhouse_tests::service::{Api, Service, signal};
use stillhouse_tests::{Scratch, with};

use crate::service_api::{quick_job, start};

/// A job that names `n` missing files.
fn missing(n: usize) -> Value {
    let paths: Vec<String> = (0..n).map(|i| format!("gone-{i}.jsonl")).collect();
    with(quick_job("out"), &json!({"input": {"paths": paths}}))
}

fn fields(problem: &Value) -> Vec<(&str, &str)> {
    let problems = problem["problems"].as_array().unwrap().iter();
    problems.map(|p| (p["field"].as_str().unwrap(), p["message"].as_str().unwrap())).collect()
}

#[test]
fn two_thousand_problems_are_a_hundred_and_a_number() {
    let service = start(&json!({}));
    let api = &service.api;
    // one path has the maximum length of the system
    let mut job = missing(2000);
    job["input"]["paths"][0] = format!("{}x.jsonl", format!("{}/", "x".repeat(100)).repeat(38)).into();
    let id = api.submit(&job);
    let failed = api.wait_for_state(&id, "failed");
    assert_eq!(failed["failure"]["kind"], "job");
    let reported = fields(&failed["failure"]);
    assert!((90..=101).contains(&reported.len()), "{}", reported.len());
    assert!(reported.contains(&("input.paths", "and 1910 more paths with problems")), "{reported:?}");
    assert_eq!((reported[0].0, reported[1].0), ("input.paths[0]", "input.paths[1]"));
    assert!(failed["failure"]["problems"][0]["got"].as_str().unwrap().chars().count() <= 1001);
    let shown = api.get(&format!("/jobs/{id}")).expect(200).text;
    assert!(shown.len() < 100_000, "{}", shown.len());

    // a list of such jobs is small, and still shows what went wrong
    let page = api.get("/jobs").expect(200);
    assert!(page.text.len() < 3000, "{}", page.text);
    let listed = &page.json()["jobs"][0];
    assert_eq!((&listed["failure"]["problems"], &listed["failure"]["kind"]), (&json!([]), &json!("job")));
    let message = listed["failure"]["message"].as_str().unwrap();
    assert!(message.starts_with("the job file has 91 problems") && !message.contains('\n'), "{message}");
    for (path, most) in [(format!("/jobs/{id}/events"), 20_000), (format!("/jobs/{id}/logs"), 200_000)] {
        let length = api.get(&path).expect(200).text.len();
        assert!(length < most, "{path}: {length}");
    }
    // the program's own report is as short
    service.scratch.job("job.yaml", &missing(2000));
    let said = service.stillhouse(&["run", "job.yaml"]).expect(2).says(&["and 1910 more paths with problems"]);
    assert!(said.stderr.lines().count() < 110);
}

#[test]
fn paths_are_counted_before_they_are_looked_at() {
    let service = start(&json!({"limits": {"paths_per_job": 3}}));
    let api = &service.api;
    let problem = api.send_job("", &[], &missing(4)).problem(422);
    let message = "more paths than this server accepts; valid: at most 3 (limits.paths_per_job); one glob or folder can match any number of files";
    assert_eq!(fields(&problem), [("input.paths", message)]);
    assert_eq!(problem["problems"][0]["got"], "4 paths");
    // reported together with all other problems
    let both = with(missing(4), &json!({"output": {"path": "../outside"}}));
    let problem = api.send_job("", &[], &both).problem(422);
    assert_eq!(fields(&problem).iter().map(|(field, _)| *field).collect::<Vec<_>>(), ["input.paths", "output.path"]);
    let checked = api.send("POST", "/validate", &[("content-type", "application/json")], Some(&both.to_string()));
    assert_eq!(checked.expect(200).json()["problems"], problem["problems"]);
    api.send_job("", &[], &missing(3)).expect(201);
    // Forbidden paths are limited too; a body of 1 MB holds this many.
    let service = start(&json!({"limits": {"paths_per_job": 100_000}}));
    let outside = with(missing(0), &json!({"input": {"paths": vec!["/x"; 95_000]}}));
    let refused = service.api.send_job("", &[], &outside);
    assert!(refused.text.len() < 100_000, "{}", refused.text.len());
    let problem = refused.problem(422);
    assert_eq!(fields(&problem).last(), Some(&("input.paths", "and 94910 more paths that may not be read")));
}

#[test]
fn a_check_of_many_paths_reports_how_far_it_is_and_is_cancelled() {
    const PATHS: usize = 95_000;
    let service = start(&json!({"limits": {"paths_per_job": PATHS, "body_kilobytes": 10_000}}));
    let api = &service.api;
    let id = api.submit(&missing(PATHS));
    let mut stream = api.stream(&format!("/jobs/{id}/events"), &[]);
    let preparing = stream.find(|sent| sent.kind == "preparing").unwrap();
    assert_eq!(preparing.data["data"]["what"], format!("checking input.paths: {} of {PATHS}", PATHS / 100));
    let worker = service.wait_for_worker(&id);
    api.post(&format!("/jobs/{id}/cancel")).expect(202);
    let cancelled = api.wait_for_state(&id, "cancelled");
    assert_eq!((&cancelled["reason"], &cancelled["failure"]), (&json!("cancelled by local"), &Value::Null));
    assert!(!service.workers().contains(&worker));

    // so does a run without the service
    let scratch = Scratch::new();
    scratch.job("job.yaml", &missing(PATHS));
    let mut run =
        scratch.command(&["run", "job.yaml", "--json"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let first: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(first["what"], preparing.data["data"]["what"], "{first}");
    signal(run.id().cast_signed(), libc::SIGINT);
    let ended = run.wait().unwrap();
    assert!(matches!(ended.code(), None | Some(130)), "{ended}");
}

/// A hub on this machine with one tokenizer, which reports the requests it gets.
fn hub() -> (String, std::sync::mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (asked, questions) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let (mut head, mut byte) = (Vec::new(), [0]);
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
                head.push(byte[0]);
            }
            let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
            let files =
                json!({"sha": "0123456789".repeat(4), "siblings": [{"rfilename": "tokenizer.json"}]}).to_string();
            let (status, more, body) = match line.contains("/org/there/") {
                true => ("200 OK", "", files.as_str()),
                false => ("404 Not Found", "x-error-code: RepoNotFound\r\n", ""),
            };
            let answer =
                format!("HTTP/1.1 {status}\r\n{more}content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
            // recorded before the answer, so that a client with the answer finds it recorded
            if asked.send(line).is_err() {
                return;
            }
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, questions)
}

#[test]
fn what_cannot_work_is_refused_before_it_waits() {
    let mut service = Service::new(&json!({"access": {"hub": ["*"]}, "capacity": {"running_jobs": 1, "cpu_slots": 1}}));
    let (address, questions) = hub();
    let cache = service.scratch.path("cache").display().to_string();
    for (name, value) in [("HF_ENDPOINT", address.as_str()), ("HF_HUB_CACHE", &cache), ("HF_HUB_OFFLINE", "")] {
        service.set_env(name, value);
    }
    service.launch();
    let api = service.api.clone();
    service.scratch.write("a-file", "");
    let refused = |api: &Api, patch: Value| {
        let problem = api.send_job("", &[], &with(quick_job("out"), &patch)).problem(422);
        let reported: Vec<(String, String)> =
            fields(&problem).into_iter().map(|(f, m)| (f.to_owned(), m.to_owned())).collect();
        assert_eq!(reported.len(), 1, "{problem:#}");
        reported.into_iter().next().unwrap()
    };
    let tokenizer = |path: &str| json!({"tokenizer": {"path": path}});
    // invalid names cause no request to the hub
    for wrong in ["hf://", "hf://org/name/tokenizer.json", "hf://a/../b", "hf://org/na me"] {
        let (field, message) = refused(&api, tokenizer(wrong));
        assert_eq!(field, "tokenizer.path");
        assert!(message.contains("valid: hf://org/name[@revision][/file.gguf]"), "{message}");
    }
    assert!(questions.try_recv().is_err());
    // names that the hub does not know
    let (field, message) = refused(&api, tokenizer("hf://org/gone"));
    assert_eq!(field, "tokenizer.path");
    assert!(message.contains("there is no repository \"org/gone\""), "{message}");
    assert!(questions.try_recv().unwrap().contains("/api/models/org/gone/revision/main"));
    let teacher = json!({"extract": {"teacher": {"path": "hf://org/there"}, "noise": {}}});
    let (field, message) = refused(&api, teacher);
    assert_eq!(field, "extract.teacher.path");
    assert!(message.contains("has no config.json"), "{message}");
    questions.try_recv().unwrap();
    // outputs where no folder can be created
    for (output, says) in [
        ("a-file", "is a file; valid: a folder"),
        ("a-file/out", "is a file, so it cannot contain a folder"),
        ("ftp://host/out", "valid"),
        ("https://host/out", "valid: s3://, gs://, az:// or a path"),
    ] {
        let (field, message) = refused(&api, json!({"output": {"path": output}}));
        assert_eq!(field, "output.path");
        assert!(message.contains(says), "{output}: {message}");
    }
    // none of this created a job or a file
    assert_eq!(api.get("/jobs").json()["jobs"], json!([]));
    assert!(!service.scratch.path("out").exists() && !service.scratch.path("cache").exists());

    // names that the hub knows are accepted, and so are all names if it does not answer
    let taken = |service: &Service| {
        let id = service.api.submit(&with(quick_job("out"), &tokenizer("hf://org/there")));
        service.api.post(&format!("/jobs/{id}/cancel"));
        service.api.wait_for_state(&id, "cancelled");
    };
    taken(&service);
    service.kill();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    service.set_env("HF_ENDPOINT", &format!("http://{nobody}"));
    service.launch();
    taken(&service);
    assert!(service.log_text().contains("the hub did not answer about hf://org/there"), "{}", service.log_text());
}

#[test]
fn who_has_much_checked_does_not_keep_others_waiting() {
    let mut service = Service::new(
        &json!({"access": {"hub": ["*"]}, "auth": "token", "limits": {"hub_seconds": 3600, "check_seconds": 3600}}),
    );
    // a hub that accepts connections and never answers
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    for (name, value) in
        [("HF_ENDPOINT", format!("http://{}", hub.local_addr().unwrap())), ("HF_HUB_OFFLINE", String::new())]
    {
        service.set_env(name, &value);
    }
    let (greedy, other) = (service.token("greedy", &["submit"]), service.token("other", &["submit"]));
    service.launch();
    let job = |tokenizer: &str| with(quick_job("out"), &json!({"tokenizer": {"path": tokenizer}})).to_string();
    let check =
        |api: &Api, job: &str| api.send("POST", "/validate", &[("content-type", "application/json")], Some(job));
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| check(&greedy, &job("hf://org/name")));
        }
        // A token's share of the checks is waiting for the hub; other users still get answers.
        let held: Vec<_> = (0..2).map(|_| hub.accept().unwrap()).collect();
        for _ in 0..3 {
            assert_eq!(check(&other, &quick_job("out").to_string()).expect(200).json()["valid"], true);
        }
        hub.set_nonblocking(true).unwrap();
        assert_eq!(hub.accept().err().map(|e| e.kind()), Some(std::io::ErrorKind::WouldBlock));
        // after a broken connection the hub is not asked again for a while
        drop((hub, held));
    });
}
