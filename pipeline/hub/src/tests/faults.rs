//! Tests failures during a fetch and their error messages.

use super::*;

#[test]
fn refusals_say_what_to_do_and_are_not_repeated() {
    let cases: [(u16, &str, &[&str]); 7] = [
        (401, "", &["gated or private", "set HF_TOKEN", "the one from HF_TOKEN may not"]),
        (401, "x-error-code: RepoNotFound\r\n", &["does not exist or is private", "HF_TOKEN"]),
        (403, "x-error-code: GatedRepo\r\n", &["is gated", "accept its terms", "HF_TOKEN"]),
        (404, "x-error-code: RepoNotFound\r\n", &["no repository \"org/name\""]),
        (404, "x-error-code: RevisionNotFound\r\n", &["no revision \"v9\""]),
        (404, "", &["no repository \"org/name\"", "no revision \"v9\""]),
        (404, "x-error-code: EntryNotFound\r\n", &["answered 404"]),
    ];
    let fixture = Fixture::gpt2();
    for (status, headers, parts) in cases {
        fixture.fake_hub.add_fault("GET /api", Fault::Status(status, headers));
        let error = fixture.expect_error("hf://org/name@v9", FetchPurpose::Teacher, parts);
        assert_eq!((error.kind, error.retryable), (ErrorKind::Usage, false));
        assert_eq!(fixture.fake_hub.take_requests().len(), 1);
    }
    fixture.fake_hub.add_fault("GET /api", Fault::Status(401, ""));
    let without =
        fixture.fetch_with(HubConfig { token: None, ..fixture.config() }, "hf://org/name", FetchPurpose::Teacher);
    assert!(without.unwrap_err().to_string().ends_with("and set HF_TOKEN to a token that may read it"));
    fixture.fake_hub.add_fault("HEAD /org/name", Fault::Status(404, "x-error-code: EntryNotFound\r\n"));
    fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["no file \"config.json\""]);
    fixture.fake_hub.add_fault("GET /api", Fault::Status(418, ""));
    let error = fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["answered 418"]);
    assert_eq!((error.kind, error.retryable), (ErrorKind::Model, false));
}

#[test]
fn what_passes_is_tried_again_and_not_for_ever() {
    let fixture = Fixture::gpt2();
    fixture.fake_hub.add_fault("GET /api", Fault::Status(500, ""));
    fixture.fake_hub.add_fault("GET /api", Fault::Reset);
    fixture.fake_hub.add_fault("GET /api", Fault::Status(429, "retry-after: 0\r\n"));
    fixture.fake_hub.add_fault("HEAD", Fault::Status(503, ""));
    fixture.fake_hub.add_fault("GET /bucket", Fault::Status(403, ""));
    fixture.fake_hub.add_fault("GET /bucket", Fault::Reset);
    fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();

    let fixture = Fixture::gpt2();
    for _ in 0..9 {
        fixture.fake_hub.add_fault("GET /api", Fault::Status(502, ""));
    }
    let error = fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["answered 502"]);
    assert_eq!((error.kind, error.retryable), (ErrorKind::Model, true));
    assert_eq!(fixture.fake_hub.take_requests().len(), 4);

    let mut unreachable_hub = fixture.config();
    unreachable_hub.endpoint = "http://127.0.0.1:1/".parse().unwrap();
    let error = fixture.fetch_with(unreachable_hub, "hf://org/name", FetchPurpose::Teacher).unwrap_err();
    assert!(error.retryable && error.to_string().contains("cannot be reached: 127.0.0.1:1"), "{error}");
}

/// The statuses that `storage` does not retry either: from the hub, and from the storage to which it redirects.
#[test]
fn permanent_server_errors_are_not_retried() {
    for status in [501, 505, 507] {
        for path in ["GET /api", "GET /bucket"] {
            let fixture = Fixture::gpt2();
            fixture.fake_hub.add_fault(path, Fault::Status(status, ""));
            let error = fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &[&format!("answered {status}")]);
            assert_eq!((error.kind, error.retryable), (ErrorKind::Model, false));
            let requests = fixture.fake_hub.take_requests();
            let sent = requests.iter().filter(|r| format!("{} {}", r.method, r.path).contains(path)).count();
            assert_eq!(sent, 1, "{path}, {status}");
        }
    }
}

#[test]
fn a_download_that_broke_goes_on_where_it_was() {
    let fixture = Fixture::gpt2();
    fixture.fake_hub.add_fault("GET /bucket", Fault::Truncate(100_000));
    fixture.fake_hub.add_fault("GET /bucket", Fault::Truncate(50_000));
    let fetched = fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));
    let requests = fixture.fake_hub.take_requests();
    let ranges: Vec<_> =
        requests.iter().filter(|r| r.server == "storage").map(|r| r.headers.get("range").map(String::as_str)).collect();
    assert_eq!(ranges, [None, Some("bytes=100000-"), Some("bytes=150000-")]);
}

#[test]
fn the_next_process_goes_on_where_the_last_one_was() {
    let fixture = Fixture::gpt2();
    fixture.fake_hub.add_fault("GET /bucket", Fault::Truncate(100_000));
    let once = HubConfig { attempts: 1, ..fixture.config() };
    let error = fixture.fetch_with(once, "hf://org/name", FetchPurpose::Teacher).unwrap_err();
    assert!(error.retryable && error.to_string().contains("model.safetensors"), "{error}");
    let part = fixture.repo().join("blobs").join(format!("{}.incomplete", sha256(&weights(300_000))));
    assert_eq!(fs::metadata(&part).unwrap().len(), 100_000);
    assert!(!fixture.snapshot().join("model.safetensors").exists(), "not visible before it is whole");
    assert!(!fixture.repo().join("refs/main").exists());
    assert!(fixture.offline("hf://org/name", FetchPurpose::Teacher).is_err());

    // A server that ignores the range and sends the whole file.
    fixture.fake_hub.add_fault("GET /bucket", Fault::IgnoreRange);
    let fetched = fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));
    assert!(!part.exists());
    let requests = fixture.fake_hub.take_requests();
    assert_eq!(requests.last().unwrap().headers["range"], "bytes=100000-");
}

#[test]
fn a_rest_that_the_server_does_not_have_starts_afresh() {
    let fixture = Fixture::gpt2();
    let blobs = fixture.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}.incomplete", sha256(&weights(300_000))));
    fs::write(&part, &weights(300_000)[..1000]).unwrap();
    fixture.fake_hub.add_fault("GET /bucket", Fault::Status(416, ""));
    fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    let requests = fixture.fake_hub.take_requests();
    let last = requests.iter().rfind(|r| r.server == "storage").unwrap();
    assert!(!last.headers.contains_key("range"));
}

#[test]
fn damaged_bytes_never_become_visible() {
    // Damaged once: by a bad kept part or by the connection.
    let fixture = Fixture::gpt2();
    fixture.fake_hub.add_fault("GET /bucket", Fault::Corrupt);
    let fetched = fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));

    // Damaged twice: the server has a different file.
    for (what, size) in [("the sha256", true), ("the sha256", false)] {
        let fixture = Fixture::gpt2();
        fixture.fake_hub.state().with_size = size;
        fixture.fake_hub.add_fault("GET /bucket", Fault::Corrupt);
        fixture.fake_hub.add_fault("GET /bucket", Fault::Corrupt);
        let error = fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &[what, "model.safetensors", "twice"]);
        assert_eq!((error.kind, error.retryable), (ErrorKind::Model, false));
        assert!(!fixture.snapshot().join("model.safetensors").exists());
        assert!(names(&fixture.repo().join("blobs")).iter().all(|blob| !blob.contains("incomplete")));
    }

    // Longer or shorter than announced, with an etag that is no hash of the bytes.
    for (size, message) in [("10", "10 that it promised"), ("999999", "ended after 300000 of 999999")] {
        let fixture = Fixture::gpt2();
        let storage = fixture.fake_hub.storage_url.clone();
        let headers = format!("location: {storage}/bucket/x\r\nx-linked-etag: \"abc\"\r\nx-linked-size: {size}\r\n");
        fixture.fake_hub.add_fault(HEAD_WEIGHTS, Fault::Status(302, Box::leak(headers.into_boxed_str())));
        fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &[message]);
        assert!(!fixture.snapshot().join("model.safetensors").exists());
    }
}

const HEAD_WEIGHTS: &str = "HEAD /org/name/resolve/0123456789abcdef0123456789abcdef01234567/model.safetensors";

#[test]
fn unknown_sizes_and_redirects_at_home_work() {
    let fixture = Fixture::gpt2();
    fixture.fake_hub.state().with_size = false;
    // A renamed repository redirects within the hub's origin, so the token is sent along.
    fixture.fake_hub.add_fault("GET /api", Fault::Redirect("/api/models/new/name/revision/main".into()));
    let fetched = fixture.fetch("hf://org/name", FetchPurpose::Teacher).unwrap();
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));
    let requests = fixture.fake_hub.take_requests();
    assert_eq!(requests[1].path, "/api/models/new/name/revision/main");
    assert!(requests[1].headers.contains_key("authorization"));
}

#[test]
fn the_token_does_not_come_back_by_way_of_another_server() {
    let fixture = Fixture::gpt2();
    let (hub, storage) = (fixture.fake_hub.hub_url.clone(), fixture.fake_hub.storage_url.clone());
    fixture.fake_hub.add_fault("GET /api", Fault::Redirect(format!("{storage}/away")));
    fixture.fake_hub.add_fault("GET /away", Fault::Redirect(format!("{hub}/api/models/org/name/revision/main")));
    fixture.fetch("hf://org/name", FetchPurpose::Tokenizer).unwrap();
    let requests = fixture.fake_hub.take_requests();
    let sent: Vec<_> = requests[..3].iter().map(|r| (r.server, r.headers.contains_key("authorization"))).collect();
    assert_eq!(sent, [("hub", true), ("storage", false), ("hub", false)]);

    for _ in 0..20 {
        fixture.fake_hub.add_fault("GET /api", Fault::Redirect("/api/models/org/name/revision/main".into()));
    }
    let config = HubConfig { cache: fixture.cache.path().join("new"), ..fixture.config() };
    let error = fixture.fetch_with(config, "hf://org/name", FetchPurpose::Tokenizer).unwrap_err();
    assert!(error.to_string().contains("more than 8 redirects"), "{error}");
}

#[test]
fn a_hostile_hub_writes_nothing_outside_its_folder() {
    let outside = "../../../../evil.safetensors";
    let index = format!(r#"{{"weight_map": {{"a": "{outside}"}}}}"#);
    let fixture = Fixture::new(&[("config.json", CONFIG), ("model.safetensors.index.json", index.as_bytes())]);
    fixture.fake_hub.state().listed = vec![outside.into()];
    fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["is not the path of a file inside the repository"]);

    let fixture = Fixture::new(&[("config.json", CONFIG)]);
    fixture.fake_hub.state().listed = vec![outside.into(), "/etc/x.safetensors".into(), "\u{1b}[2J.safetensors".into()];
    let error = fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["no weights as safetensors"]);
    assert!(!error.to_string().contains('\u{1b}'), "control characters are escaped");

    for commit in ["../../evil", "main", "", "0123"] {
        let fixture = Fixture::gpt2();
        fixture.fake_hub.state().commit = commit.into();
        fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["its sha is not a commit"]);
        assert_eq!(names(fixture.cache.path()), [""; 0]);
    }
    for etag in ["../../evil", "", "a/b", ".."] {
        let fixture = Fixture::gpt2();
        fixture.fake_hub.state().etag = Some(etag.into());
        fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["cannot name a file"]);
        assert_eq!(names(fixture.cache.path()), [""; 0]);
    }
    let fixture = Fixture::gpt2();
    fixture.fake_hub.add_fault("GET /api", Fault::Redirect("file:///etc/passwd".into()));
    fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["redirects to nowhere"]);
}

#[test]
fn models_that_cannot_be_used_are_reported_by_what_they_have() {
    let fixture = Fixture::new(&[("config.json", CONFIG), ("pytorch_model.bin", b"pickle"), ("vocab.json", b"{}")]);
    let refused = ["no weights as safetensors, and pickled ones are not read", "\"pytorch_model.bin\""];
    let error = fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &refused);
    assert_eq!((error.kind, error.retryable), (ErrorKind::Usage, false));
    fixture.expect_error("hf://org/name", FetchPurpose::Tokenizer, &["has no tokenizer.json", "\"vocab.json\""]);
    fixture.fake_hub.state().listed =
        ["config.json", "model.safetensors", "adapter_config.json"].map(str::to_owned).to_vec();
    fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["adapter_config.json beside the model", "merge it"]);
    fixture.fake_hub.state().files.remove("config.json");
    fixture.fake_hub.state().listed = (0..50).map(|i| format!("{i}.txt")).collect();
    fixture.expect_error("hf://org/name", FetchPurpose::Teacher, &["has no config.json", "and 40 more"]);
    assert_eq!(names(fixture.cache.path()), [""; 0]);
}

#[test]
fn a_look_asks_once_and_fetches_nothing() {
    let fixture = Fixture::gpt2();
    let check = |config: HubConfig, name: &str, purpose| Hub::new(config).check(&reference(name), purpose);
    check(fixture.config(), "hf://org/name", FetchPurpose::Teacher).unwrap();
    assert_eq!(lines(&fixture.fake_hub.take_requests()), ["hub GET /api/models/org/name/revision/main"]);
    assert_eq!(names(fixture.cache.path()), [""; 0]);
    // Problems that the user must fix have kind `Usage`, as for a fetch.
    for fault in [Fault::Status(404, "x-error-code: RepoNotFound\r\n"), Fault::Status(401, "")] {
        fixture.fake_hub.add_fault("GET /api", fault);
        assert_eq!(check(fixture.config(), "hf://org/name", FetchPurpose::Teacher).unwrap_err().kind, ErrorKind::Usage);
    }
    let error = check(fixture.config(), "hf://org/name/none.gguf", FetchPurpose::Teacher).unwrap_err();
    assert!(error.kind == ErrorKind::Usage && error.to_string().contains("has no file \"none.gguf\""), "{error}");
    let offline = || HubConfig { offline: true, ..fixture.config() };
    assert_eq!(check(offline(), "hf://org/name", FetchPurpose::Tokenizer).unwrap_err().kind, ErrorKind::Usage);
    fixture.fake_hub.take_requests();
    // A missing answer proves nothing about the model and is not retried.
    for fault in [Fault::Status(503, ""), Fault::Reset] {
        fixture.fake_hub.add_fault("GET /api", fault);
        let error = check(fixture.config(), "hf://org/name", FetchPurpose::Teacher).unwrap_err();
        assert!(error.kind == ErrorKind::Model && error.retryable, "{error}");
        assert_eq!(fixture.fake_hub.take_requests().len(), 1);
    }
    // A pinned commit in the cache needs no request.
    let pinned = format!("hf://org/name@{COMMIT}");
    fixture.fetch(&pinned, FetchPurpose::Tokenizer).unwrap();
    fixture.fake_hub.take_requests();
    check(fixture.config(), &pinned, FetchPurpose::Tokenizer).unwrap();
    check(offline(), &pinned, FetchPurpose::Tokenizer).unwrap();
    assert_eq!(fixture.fake_hub.take_requests().len(), 0);
}
