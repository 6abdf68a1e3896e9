//! Tests the service from the command line: watched submissions, jobs, tokens, and error messages.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::{Value, json};
use stillhouse_tests::service::{Service, eventually};
use stillhouse_tests::{CommandOutput, run_command, shards, with};

use crate::append::copy;
use crate::service_api::{ROWS, SPLITS, long_job, quick_job, start, undisturbed};

/// The lines of a summary that do not depend on time.
fn lasting(summary: &str) -> Vec<&str> {
    summary.lines().filter(|line| !["time", "extraction", "device"].iter().any(|name| line.starts_with(name))).collect()
}

fn id_of(ran: &CommandOutput) -> String {
    let id = ran.stdout.trim_end_matches('\n');
    assert!(id.len() == 12 && ran.stdout == format!("{id}\n"), "{:?}", ran.stdout);
    id.to_owned()
}

#[test]
fn submit_shows_what_run_shows_and_ends_as_run_ends() {
    let service = start(&json!({"capacity": {"cpu_slots": 1}}));
    let absolute = service.scratch.path("out").display().to_string();
    service.scratch.job("job.yaml", &long_job(&absolute));
    let submitted = service.stillhouse(&["submit", "job.yaml"]).expect(0);
    let expected = shards(&service.scratch.path("out"));
    fs::remove_dir_all(service.scratch.path("out")).unwrap();
    let run = service.stillhouse(&["run", "job.yaml"]).expect(0);
    assert_eq!(expected, shards(&service.scratch.path("out")));
    assert_eq!(lasting(&submitted.stdout), lasting(&run.stdout));
    assert_eq!(submitted.stdout.lines().count(), run.stdout.lines().count());
    // the lines about splits, without timestamps
    let splits = |said: &str| {
        let mut lines: Vec<String> = said.lines().filter_map(|l| Some(l.split_once("] data/")?.1.to_owned())).collect();
        lines.sort();
        lines
    };
    assert_eq!(splits(&submitted.stderr), splits(&run.stderr));
    assert_eq!(splits(&submitted.stderr).len(), SPLITS);
    assert!(submitted.stderr.ends_with("done\n") && !submitted.stderr.contains('\x1b'), "{}", submitted.stderr);

    // a second submission reports "complete already", like `run`
    let again = service.stillhouse(&["submit", "job.yaml"]).expect(0);
    assert!(again.stdout.contains("(was complete already)"), "{}", again.stdout);
    let quiet = service.stillhouse(&["submit", "job.yaml", "--quiet"]).expect(0);
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
    let events = service.stillhouse(&["submit", "job.yaml", "--json"]).expect(0);
    let names: Vec<Value> =
        events.stdout.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["event"].clone()).collect();
    assert_eq!(names.last(), Some(&json!("job_finished")));

    // A job file with problems exits with 2 and reports all at once, including those that a worker finds.
    service.scratch.job("bad.yaml", &with(quick_job("bad"), &json!({"name": "Bad Name", "pack": {"length": 1}})));
    service.stillhouse(&["submit", "bad.yaml"]).expect(2).says(&[
        "bad.yaml: the job file has 2 problems",
        "pack.length: got 1",
        "name: got",
    ]);
    service.scratch.job("gone.yaml", &with(quick_job("gone"), &json!({"input": {"paths": ["gone.jsonl"]}})));
    let gone = service.stillhouse(&["submit", "gone.yaml"]).expect(2);
    let gone = gone.says(&["1 problem", "input.paths[0]: got \"gone.jsonl\": "]);
    assert_eq!(gone.stdout, "");
    service.stillhouse(&["submit", "nothing.yaml"]).expect(2).says(&["nothing.yaml"]);
    // what `run` refuses as wrong usage also exits with 2
    service.scratch.job("other.yaml", &with(long_job(&absolute), &json!({"seed": 43})));
    for verb in ["run", "submit"] {
        service.stillhouse(&[verb, "other.yaml"]).expect(2).says(&["output.path: ", "holds the output of another job"]);
    }
    // Errors found by checking the first records count as errors of the job file, as in `run`; later ones exit with 1.
    service.scratch.write("broken.jsonl", "{broken\n");
    service.scratch.job("broken.yaml", &with(quick_job("broken"), &json!({"input": {"paths": ["broken.jsonl"]}})));
    for verb in ["run", "submit"] {
        service
            .stillhouse(&[verb, "broken.yaml"])
            .expect(2)
            .says(&["4:5: input.paths: broken.jsonl: line 1: broken JSON: neither a key in quotes nor } at column 2"]);
    }
    service.scratch.write("broken.jsonl", "{\"text\": \"a good one\"}\n{broken\n");
    service.scratch.job("broken.yaml", &with(quick_job("broken"), &json!({"input": {"paths": ["broken.jsonl"]}})));
    service.stillhouse(&["submit", "broken.yaml"]).expect(1).says(&["error: job ", "broken.jsonl"]);
    service.stillhouse(&["submit", "job.yaml", "--max-attempts", "1000"]).expect(2).says(&["max_attempts: got 1000"]);
}

/// Proves that a submission with `--append` makes only the splits of new files, like `run --append`, even if it is
/// stopped midway and retried.
#[test]
fn submit_appends_what_the_input_has_grown_by() {
    let service = start(&json!({"capacity": {"cpu_slots": 1}}));
    let corpus = fs::read_to_string(service.scratch.path("corpus.jsonl")).unwrap();
    let lines: Vec<&str> = corpus.split_inclusive('\n').collect();
    fs::create_dir_all(service.scratch.path("in")).unwrap();
    service.scratch.write("in/m.jsonl", &lines[..3].concat());
    let job = |output: &str| with(long_job(output), &json!({"input": {"paths": ["in/*.jsonl"]}}));
    service.scratch.job("job.yaml", &job("out"));
    service.stillhouse(&["submit", "job.yaml", "--quiet"]).expect(0);
    let (out, base) = (service.scratch.path("out"), service.scratch.path("base"));
    let before = shards(&out);
    copy(&out, &base);
    service.scratch.write("in/a.jsonl", &lines[3..15].concat());

    // without `--append` it is refused, like `run`
    service.stillhouse(&["submit", "job.yaml"]).expect(2).says(&["another job", "--append"]);
    service.stillhouse(&["submit", "job.yaml", "--append", "--overwrite"]).expect(2).says(&["--overwrite"]);
    let both = service.api.send_job("?append=true&overwrite=true", &[], &job("out")).problem(400);
    assert!(both["detail"].as_str().unwrap().starts_with("append: got true with overwrite true"), "{both}");
    assert_eq!(shards(&out), before);

    let id = id_of(&service.stillhouse(&["submit", "job.yaml", "--append", "--detach"]).expect(0));
    service.api.wait_for_split(&id, 1);
    service.stillhouse(&["jobs", "cancel", &id]).expect(0);
    let stopped = service.api.wait_for_state(&id, "cancelled");
    assert_eq!((&stopped["append"], &stopped["overwrite"]), (&json!(true), &json!(false)));
    service.stillhouse(&["jobs", "retry", &id]).expect(0);
    service.api.wait_for_state(&id, "succeeded");
    let now = shards(&out);
    for (name, sha256) in &before {
        assert_eq!(now.get(name), Some(sha256), "{name}");
    }
    let manifest: Value = serde_json::from_slice(&fs::read(out.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["appended"][0]["files"], json!(["a.jsonl"]));
    // the same shards as `run`
    service.scratch.job("base.yaml", &job("base"));
    service.stillhouse(&["run", "base.yaml", "--append", "--quiet"]).expect(0);
    assert_eq!(shards(&base), now);
    // the idempotency key covers the query parameters
    let key = [("idempotency-key", "grown")];
    let first = service.api.send_job("?append=true", &key, &job("out")).expect(201).json();
    assert_eq!(service.api.send_job("?append=true", &key, &job("out")).expect(200).json()["id"], first["id"]);
    service.api.send_job("", &key, &job("out")).problem(422);
    let again = service.api.wait_for_state(first["id"].as_str().unwrap(), "succeeded");
    assert_eq!(again["result"]["rows"], manifest["totals"]["train"]["rows"]);
}

#[test]
fn jobs_are_managed_by_the_beginning_of_their_ids() {
    let service = start(&json!({"capacity": {"cpu_slots": 1}}));
    let expected = undisturbed(&service, &long_job(""));
    service.scratch.job("long.json", &long_job("long"));
    service.scratch.job("quick.yaml", &with(quick_job("quick"), &json!({"name": "quick"})));
    let long = id_of(&service.stillhouse(&["submit", "long.json", "--detach"]).expect(0));
    let detached =
        service.stillhouse(&["submit", "quick.yaml", "--detach", "--json", "--priority", "-5"]).expect(0).json();
    let quick = detached["id"].as_str().unwrap().to_owned();
    assert_eq!((&detached["priority"], &detached["user"]), (&json!(-5), &json!("local")));
    service.api.wait_for_split(&long, 1);

    let listed = service.stillhouse(&["jobs", "list"]).expect(0).stdout;
    let rows: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["id", "state", "name", "user", "splits", "tokens/s", "age"]);
    assert_eq!((&rows[1][..4], rows.len()), (&[quick.as_str(), "queued", "quick", "local"][..], 3));
    assert_eq!(rows[2][..4], [long.as_str(), "running", "long", "local"]);
    let listed = service.stillhouse(&["jobs", "list", "--state", "queued", "--json"]).expect(0).json();
    assert_eq!((&listed["jobs"][0]["id"], listed["jobs"].as_array().unwrap().len()), (&json!(quick), 1));
    service.stillhouse(&["jobs", "list", "--state", "asleep"]).expect(2).says(&["asleep", "queued, running"]);
    let shown = service.stillhouse(&["jobs", "show", &quick]).expect(0).stdout;
    assert!(shown.contains("queued, number 1 in the queue"), "{shown}");

    // The shortest unambiguous prefix; two random ids may share a beginning.
    let same = long.bytes().zip(quick.bytes()).take_while(|(a, b)| a == b).count();
    let begins = |id: &str| id[..=same].to_owned();
    let shown = service.stillhouse(&["jobs", "show", &begins(&long), "--json"]).expect(0).json();
    assert_eq!(shown["id"], long.as_str());
    service.stillhouse(&["jobs", "show", "!"]).expect(2).says(&["no id of a job"]);
    let unknown = if long.starts_with("00000000000") { "1" } else { "00000000000" };
    service.stillhouse(&["jobs", "show", unknown]).expect(2).says(&["there is no job whose id begins with"]);
    service.stillhouse(&["jobs", "show", "zzzzzzzzzzzz"]).expect(2).says(&["there is no job zzzzzzzzzzzz"]);
    service
        .stillhouse(&["jobs", "retry", &begins(&long)])
        .expect(2)
        .says(&["the job is running; valid: failed or cancelled"]);
    service.stillhouse(&["jobs", "delete", &begins(&long)]).expect(2).says(&["the job is running"]);

    service.stillhouse(&["jobs", "cancel", &begins(&long)]).expect(0).says(&[&format!("job {long} is cancelling")]);
    // `watch` follows the job to its cancellation
    service
        .stillhouse(&["jobs", "watch", &begins(&long)])
        .expect(1)
        .says(&[&format!("job {long}: cancelled by local")]);
    let again = service.stillhouse(&["jobs", "retry", &begins(&long), "--json"]).expect(0).json();
    assert_eq!(again["state"], "retrying");
    let watched = service.stillhouse(&["jobs", "watch", &begins(&long)]).expect(0);
    assert!(watched.stdout.starts_with("data set ") && watched.stderr.contains("of them done before"), "{watched:?}");
    assert_eq!(shards(&service.scratch.path("long")), expected);
    service.stillhouse(&["jobs", "watch", &quick]).expect(0);

    let events = service.stillhouse(&["jobs", "events", &begins(&long), "--json"]).expect(0).stdout;
    let events: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events, service.api.events(&long));
    let followed = service.stillhouse(&["jobs", "events", &begins(&long), "--follow"]).expect(0).stdout;
    let reported = service.stillhouse(&["jobs", "events", &begins(&long)]).expect(0).stdout;
    assert_eq!((followed.lines().count(), &followed), (events.len(), &reported));
    assert!(followed.lines().last().unwrap().ends_with(&format!("{long} succeeded")), "{followed}");
    let file = service.stillhouse(&["jobs", "file", &long]).expect(0).json();
    assert_eq!(file, long_job("long"));
    let manifest = service.stillhouse(&["jobs", "manifest", &long]).expect(0).json();
    let on_disk = fs::read_to_string(service.scratch.path("long/manifest.json")).unwrap();
    assert_eq!(manifest, serde_json::from_str::<Value>(&on_disk).unwrap());
    assert_eq!(
        service.stillhouse(&["jobs", "report", &long, "--row", "3"]).expect(0).json()["totals"]["train"]["rows"],
        ROWS
    );
    service.stillhouse(&["jobs", "report", &long, "--row", "62"]).expect(2).says(&["62"]);

    service.stillhouse(&["jobs", "delete", &begins(&long)]).expect(0).says(&["is forgotten; its data set stays"]);
    service.stillhouse(&["jobs", "show", &long]).expect(2);
    assert_eq!(shards(&service.scratch.path("long")), expected);
}

#[test]
fn logs_are_followed_to_the_end() {
    let mut service = start(&json!({}));
    service.kill();
    service.set_env("STILLHOUSE_LOG", "info");
    service.launch();
    service.scratch.job("job.yaml", &long_job("out"));
    let id = id_of(&service.stillhouse(&["submit", "job.yaml", "--detach"]).expect(0));
    let followed = service.stillhouse(&["jobs", "logs", "-f", &id]).expect(0).stdout;
    assert_eq!(service.api.job(&id)["state"], "succeeded");
    let whole = service.stillhouse(&["jobs", "logs", &id]).expect(0).stdout;
    assert_eq!(followed, whole);
    let lines: Vec<&str> = whole.lines().collect();
    assert!(lines.len() > SPLITS, "{whole}");
    let tail = service.stillhouse(&["jobs", "logs", "--tail", "4", &id]).expect(0).stdout;
    assert_eq!(tail.lines().collect::<Vec<_>>(), &lines[lines.len() - 4..]);
}

#[test]
fn a_submission_goes_on_watching_when_the_server_was_killed() {
    let mut service = start(&json!({}));
    let expected = undisturbed(&service, &long_job(""));
    service.scratch.job("job.yaml", &long_job("out"));
    let mut submit =
        service.command(&["submit", "job.yaml"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = Vec::new();
    let mut lines = BufReader::new(submit.stderr.take().unwrap()).lines();
    for kill in 0..2 {
        for line in lines.by_ref() {
            said.push(line.unwrap());
            if said.last().unwrap().contains("] data/") {
                break;
            }
        }
        service.kill();
        for line in lines.by_ref() {
            said.push(line.unwrap());
            if said.last().unwrap().contains("trying again") {
                break;
            }
        }
        assert!(submit.try_wait().unwrap().is_none(), "kill {kill}: {said:?}");
        service.launch();
    }
    said.extend(lines.map(Result::unwrap));
    let out = submit.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{said:#?}");
    assert!(String::from_utf8(out.stdout).unwrap().starts_with("data set "));
    assert_eq!(said.iter().filter(|line| line.contains("the service is back")).count(), 2, "{said:#?}");
    // no split is reported twice
    let mut splits: Vec<&str> = said.iter().filter_map(|line| Some(line.split_once("] data/")?.1)).collect();
    let reported = splits.len();
    splits.sort_unstable();
    splits.dedup();
    assert_eq!(splits.len(), reported, "{said:#?}");
    assert_eq!(shards(&service.scratch.path("out")), expected);
}

#[test]
fn tokens_are_made_shown_once_and_revoked() {
    let mut service = Service::new(&json!({"auth": "token"}));
    let file = service.write_configuration();
    let config = file.to_str().unwrap().to_owned();
    let token = |service: &Service, arguments: &[&str]| {
        service.stillhouse(&[&["token", "--config", &config], arguments].concat())
    };
    let made = token(&service, &["create", "--user", "ada"]).expect(0).says(&["shown once"]);
    let ada = made.stdout.trim().to_owned();
    assert!(ada.starts_with("sh_") && made.stdout == format!("{ada}\n"), "{:?}", made.stdout);
    service.launch();
    // also while a server is running
    let over =
        token(&service, &["create", "--user", "bob", "--scope", "read", "--days", "1", "--json"]).expect(0).json();
    assert_eq!((&over["user"], &over["scopes"]), (&json!("bob"), &json!(["read"])));
    assert!(over["expires_at"].is_string());
    let bob = over["token"].as_str().unwrap().to_owned();
    for wrong in [
        &["create", "--user", "a b"][..],
        &["create", "--user", "x", "--scope", "all"],
        &["create", "--user", "x", "--days", "0"],
        &["create"],
    ] {
        token(&service, wrong).expect(2);
    }
    let listed = token(&service, &["list"]).expect(0).stdout;
    assert!(listed.lines().count() == 3 && listed.contains("ada") && listed.contains("read, submit"), "{listed}");
    let all = token(&service, &["list", "--json"]).expect(0);
    assert_eq!(all.json().as_array().unwrap().len(), 2);
    for secret in [&ada, &bob] {
        let secret = secret.rsplit('_').next().unwrap();
        assert!(!listed.contains(secret) && !all.stdout.contains(secret));
    }

    service.scratch.write("corpus.jsonl", &stillhouse_tests::corpus(4, 500));
    service.scratch.job("job.yaml", &quick_job("out"));
    let run = |token: &str, arguments: &[&str]| run_command(service.command(arguments).env("STILLHOUSE_TOKEN", token));
    service.stillhouse(&["jobs", "list"]).expect(1).says(&["needs a token", "STILLHOUSE_TOKEN"]);
    run("sh_nonsense_nonsense", &["jobs", "list"])
        .expect(1)
        .says(&["the service does not accept the token in STILLHOUSE_TOKEN"]);
    run("two words", &["jobs", "list"]).expect(2).says(&["STILLHOUSE_TOKEN: not a token; valid: sh_"]);
    run(&ada, &["submit", "job.yaml", "--quiet"]).expect(0);
    let jobs = run(&bob, &["jobs", "list", "--json"]).expect(0).json();
    assert_eq!(jobs["jobs"][0]["user"], "ada");
    run(&bob, &["submit", "job.yaml"]).expect(1).says(&["this request needs the scope submit; the token has read"]);
    run(&bob, &["jobs", "delete", jobs["jobs"][0]["id"].as_str().unwrap()]).expect(1).says(&["scope submit"]);

    let id = bob.split('_').nth(1).unwrap();
    token(&service, &["revoke", "nonsense"]).expect(2).says(&["there is no token \"nonsense\""]);
    token(&service, &["revoke", id]).expect(0);
    run(&bob, &["jobs", "list"]).expect(1).says(&["does not accept the token"]);
    assert!(token(&service, &["list"]).expect(0).stdout.contains("revoked 20"));
    run(&ada, &["jobs", "list"]).expect(0);
}

#[test]
fn where_there_is_no_server_that_is_said() {
    let mut service = start(&json!({}));
    service.kill();
    service.scratch.job("job.yaml", &quick_job("out"));
    for arguments in
        [&["submit", "job.yaml"][..], &["jobs", "list"], &["jobs", "watch"], &["jobs", "logs", "-f", "000000000000"]]
    {
        let said = service.stillhouse(arguments).expect(1);
        let said = said.says(&[service.api.url(), "no service listens there; `stillhouse serve` starts a service"]);
        assert_eq!((said.stdout.as_str(), said.stderr.lines().count()), ("", 1), "{}", said.stderr);
    }
    for (url, says) in [("ftp://h", "--url: valid: http"), ("http://u:SECRET@h", "a token goes into STILLHOUSE_TOKEN")]
    {
        let said = service.stillhouse(&["jobs", "list", "--url", url]).expect(2).says(&[says]);
        assert!(!said.stderr.contains("SECRET"), "{}", said.stderr);
    }
    // a server of another kind is not mistaken for a Stillhouse service
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = BufReader::new(stream.try_clone().unwrap()).lines();
        while head.next().is_some_and(|line| !line.unwrap().is_empty()) {}
        std::io::Write::write_all(
            &mut stream,
            b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello",
        )
        .unwrap();
    });
    let said = service.stillhouse(&["jobs", "list", "--url", &url]).expect(2);
    said.says(&["answered 404 Not Found, but not in the form of a Stillhouse service"]);
    other.join().unwrap();
}

#[test]
fn the_journey_of_the_readme() {
    // `stillhouse serve` in a folder without a configuration; jobs may access that folder
    let service = Service::new(&json!({}));
    let folder = service.scratch.path("");
    service.scratch.write("corpus.jsonl", &stillhouse_tests::corpus(12, 1000));
    let teacher = folder.join("teacher");
    fs::create_dir(&teacher).unwrap();
    for file in fs::read_dir(stillhouse_tests::byte_teacher()).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), teacher.join(file.file_name())).unwrap();
    }
    let data = service.data();
    let address = &service.api.url()["http://".len()..];
    let mut command = service.command(&["serve", "--listen", address, "--data", data.to_str().unwrap()]);
    command.env_remove("STILLHOUSE_URL");
    let mut server = stillhouse_tests::server::Server::start(command, &folder.join("serve.log"));
    server.wait_until("the service", || service.api.try_get("/ready").is_some_and(|a| a.status == 200));

    // the watcher of all jobs sees the job
    let mut watch = service.command(&["jobs", "watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut changes = BufReader::new(watch.stdout.take().unwrap()).lines();
    eventually("it watches", || service.api.get("/metrics").text.contains("stillhouse_watchers 1").then_some(()));
    let file = with(long_job("out/demo"), &json!({"name": "demo", "extract": {"teacher": {"path": "teacher"}}}));
    service.scratch.job("demo.yaml", &file);
    let done = service.stillhouse(&["submit", "demo.yaml"]).expect(0);
    assert!(done.stdout.starts_with("data set"), "{}", done.stdout);
    let mut seen = Vec::new();
    while seen.last().is_none_or(|line: &String| !line.contains("succeeded")) {
        seen.push(changes.next().unwrap().unwrap());
    }
    for state in ["queued", "running", "succeeded"] {
        assert!(seen.iter().any(|line| line.contains(state)), "{state}: {seen:#?}");
    }
    watch.kill().unwrap();
    watch.wait().unwrap();
    let listed = service.stillhouse(&["jobs", "list"]).expect(0).stdout;
    assert!(listed.contains("demo") && listed.contains("succeeded"), "{listed}");
    service.stillhouse(&["inspect", "out/demo"]).expect(0);
    service.stillhouse(&["verify", "out/demo", "--teacher"]).expect(0);
    // jobs may access nothing else: neither the parent folder nor the service's own
    for (output, says) in [("../elsewhere", "output.path"), (data.join("x").to_str().unwrap(), "output.path")] {
        service.scratch.job("other.yaml", &with(file.clone(), &json!({"output": {"path": output}})));
        service.stillhouse(&["submit", "other.yaml"]).expect(2).says(&["1 problem", says, "does not allow"]);
    }
}
