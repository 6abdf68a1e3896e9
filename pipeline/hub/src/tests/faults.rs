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
    let setting = Setting::gpt2();
    for (status, headers, parts) in cases {
        setting.stand_in.fail("GET /api", Fault::Status(status, headers));
        let error = setting.refused("hf://org/name@v9", Wanted::Teacher, parts);
        assert_eq!((error.kind, error.retryable), (ErrorKind::Usage, false));
        assert_eq!(setting.stand_in.take_requests().len(), 1);
    }
    setting.stand_in.fail("GET /api", Fault::Status(401, ""));
    let without = setting.fetch_with(HubConfig { token: None, ..setting.config() }, "hf://org/name", Wanted::Teacher);
    assert!(without.unwrap_err().to_string().ends_with("and set HF_TOKEN to a token that may read it"));
    setting.stand_in.fail("HEAD /org/name", Fault::Status(404, "x-error-code: EntryNotFound\r\n"));
    setting.refused("hf://org/name", Wanted::Teacher, &["no file \"config.json\""]);
    setting.stand_in.fail("GET /api", Fault::Status(418, ""));
    let error = setting.refused("hf://org/name", Wanted::Teacher, &["answered 418"]);
    assert_eq!((error.kind, error.retryable), (ErrorKind::Model, false));
}

#[test]
fn what_passes_is_tried_again_and_not_for_ever() {
    let setting = Setting::gpt2();
    setting.stand_in.fail("GET /api", Fault::Status(500, ""));
    setting.stand_in.fail("GET /api", Fault::Reset);
    setting.stand_in.fail("GET /api", Fault::Status(429, "retry-after: 0\r\n"));
    setting.stand_in.fail("HEAD", Fault::Status(503, ""));
    setting.stand_in.fail("GET /bucket", Fault::Status(403, ""));
    setting.stand_in.fail("GET /bucket", Fault::Reset);
    setting.fetch("hf://org/name", Wanted::Teacher).unwrap();

    let setting = Setting::gpt2();
    for _ in 0..9 {
        setting.stand_in.fail("GET /api", Fault::Status(502, ""));
    }
    let error = setting.refused("hf://org/name", Wanted::Teacher, &["answered 502"]);
    assert_eq!((error.kind, error.retryable), (ErrorKind::Model, true));
    assert_eq!(setting.stand_in.take_requests().len(), 4);

    let mut nobody = setting.config();
    nobody.endpoint = "http://127.0.0.1:1/".parse().unwrap();
    let error = setting.fetch_with(nobody, "hf://org/name", Wanted::Teacher).unwrap_err();
    assert!(error.retryable && error.to_string().contains("cannot be reached: 127.0.0.1:1"), "{error}");
}

#[test]
fn a_download_that_broke_goes_on_where_it_was() {
    let setting = Setting::gpt2();
    setting.stand_in.fail("GET /bucket", Fault::Cut(100_000));
    setting.stand_in.fail("GET /bucket", Fault::Cut(50_000));
    let fetched = setting.fetch("hf://org/name", Wanted::Teacher).unwrap();
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));
    let requests = setting.stand_in.take_requests();
    let ranges: Vec<_> =
        requests.iter().filter(|r| r.server == "storage").map(|r| r.headers.get("range").map(String::as_str)).collect();
    assert_eq!(ranges, [None, Some("bytes=100000-"), Some("bytes=150000-")]);
}

#[test]
fn the_next_process_goes_on_where_the_last_one_was() {
    let setting = Setting::gpt2();
    setting.stand_in.fail("GET /bucket", Fault::Cut(100_000));
    let once = HubConfig { attempts: 1, ..setting.config() };
    let error = setting.fetch_with(once, "hf://org/name", Wanted::Teacher).unwrap_err();
    assert!(error.retryable && error.to_string().contains("model.safetensors"), "{error}");
    let part = setting.repo().join("blobs").join(format!("{}.incomplete", sha256(&weights(300_000))));
    assert_eq!(fs::metadata(&part).unwrap().len(), 100_000);
    assert!(!setting.snapshot().join("model.safetensors").exists(), "not visible before it is whole");
    assert!(!setting.repo().join("refs/main").exists());
    assert!(setting.offline("hf://org/name", Wanted::Teacher).is_err());

    // A server that ignores the range and sends the whole file.
    setting.stand_in.fail("GET /bucket", Fault::Whole);
    let fetched = setting.fetch("hf://org/name", Wanted::Teacher).unwrap();
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));
    assert!(!part.exists());
    let requests = setting.stand_in.take_requests();
    assert_eq!(requests.last().unwrap().headers["range"], "bytes=100000-");
}

#[test]
fn a_rest_that_the_server_does_not_have_starts_afresh() {
    let setting = Setting::gpt2();
    let blobs = setting.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}.incomplete", sha256(&weights(300_000))));
    fs::write(&part, &weights(300_000)[..1000]).unwrap();
    setting.stand_in.fail("GET /bucket", Fault::Status(416, ""));
    setting.fetch("hf://org/name", Wanted::Teacher).unwrap();
    let requests = setting.stand_in.take_requests();
    let last = requests.iter().rfind(|r| r.server == "storage").unwrap();
    assert!(!last.headers.contains_key("range"));
}

#[test]
fn damaged_bytes_never_become_visible() {
    // Damaged once: by a bad kept part or by the connection.
    let setting = Setting::gpt2();
    setting.stand_in.fail("GET /bucket", Fault::Damage);
    let fetched = setting.fetch("hf://org/name", Wanted::Teacher).unwrap();
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));

    // Damaged twice: the server has a different file.
    for (what, size) in [("the sha256", true), ("the sha256", false)] {
        let setting = Setting::gpt2();
        setting.stand_in.state().with_size = size;
        setting.stand_in.fail("GET /bucket", Fault::Damage);
        setting.stand_in.fail("GET /bucket", Fault::Damage);
        let error = setting.refused("hf://org/name", Wanted::Teacher, &[what, "model.safetensors", "twice"]);
        assert_eq!((error.kind, error.retryable), (ErrorKind::Model, false));
        assert!(!setting.snapshot().join("model.safetensors").exists());
        assert!(names(&setting.repo().join("blobs")).iter().all(|blob| !blob.contains("incomplete")));
    }

    // Longer or shorter than announced, with an etag that is no hash of the bytes.
    for (size, said) in [("10", "10 that it promised"), ("999999", "ended after 300000 of 999999")] {
        let setting = Setting::gpt2();
        let storage = setting.stand_in.storage.clone();
        let headers = format!("location: {storage}/bucket/x\r\nx-linked-etag: \"abc\"\r\nx-linked-size: {size}\r\n");
        setting.stand_in.fail(HEAD_WEIGHTS, Fault::Status(302, Box::leak(headers.into_boxed_str())));
        setting.refused("hf://org/name", Wanted::Teacher, &[said]);
        assert!(!setting.snapshot().join("model.safetensors").exists());
    }
}

const HEAD_WEIGHTS: &str = "HEAD /org/name/resolve/0123456789abcdef0123456789abcdef01234567/model.safetensors";

#[test]
fn unknown_sizes_and_redirects_at_home_work() {
    let setting = Setting::gpt2();
    setting.stand_in.state().with_size = false;
    // A renamed repository redirects within the hub's origin, so the token is sent along.
    setting.stand_in.fail("GET /api", Fault::Redirect("/api/models/new/name/revision/main".into()));
    let fetched = setting.fetch("hf://org/name", Wanted::Teacher).unwrap();
    assert_eq!(fs::read(fetched.path.join("model.safetensors")).unwrap(), weights(300_000));
    let requests = setting.stand_in.take_requests();
    assert_eq!(requests[1].path, "/api/models/new/name/revision/main");
    assert!(requests[1].headers.contains_key("authorization"));
}

#[test]
fn the_token_does_not_come_back_by_way_of_another_server() {
    let setting = Setting::gpt2();
    let (hub, storage) = (setting.stand_in.hub.clone(), setting.stand_in.storage.clone());
    setting.stand_in.fail("GET /api", Fault::Redirect(format!("{storage}/away")));
    setting.stand_in.fail("GET /away", Fault::Redirect(format!("{hub}/api/models/org/name/revision/main")));
    setting.fetch("hf://org/name", Wanted::Tokenizer).unwrap();
    let requests = setting.stand_in.take_requests();
    let sent: Vec<_> = requests[..3].iter().map(|r| (r.server, r.headers.contains_key("authorization"))).collect();
    assert_eq!(sent, [("hub", true), ("storage", false), ("hub", false)]);

    for _ in 0..20 {
        setting.stand_in.fail("GET /api", Fault::Redirect("/api/models/org/name/revision/main".into()));
    }
    let config = HubConfig { cache: setting.cache.path().join("new"), ..setting.config() };
    let error = setting.fetch_with(config, "hf://org/name", Wanted::Tokenizer).unwrap_err();
    assert!(error.to_string().contains("more than 8 redirects"), "{error}");
}

#[test]
fn a_hostile_hub_writes_nothing_outside_its_folder() {
    let outside = "../../../../evil.safetensors";
    let index = format!(r#"{{"weight_map": {{"a": "{outside}"}}}}"#);
    let setting = Setting::new(&[("config.json", CONFIG), ("model.safetensors.index.json", index.as_bytes())]);
    setting.stand_in.state().listed = vec![outside.into()];
    setting.refused("hf://org/name", Wanted::Teacher, &["is not the path of a file inside the repository"]);

    let setting = Setting::new(&[("config.json", CONFIG)]);
    setting.stand_in.state().listed = vec![outside.into(), "/etc/x.safetensors".into(), "\u{1b}[2J.safetensors".into()];
    let error = setting.refused("hf://org/name", Wanted::Teacher, &["no weights as safetensors"]);
    assert!(!error.to_string().contains('\u{1b}'), "control characters are escaped");

    for commit in ["../../evil", "main", "", "0123"] {
        let setting = Setting::gpt2();
        setting.stand_in.state().commit = commit.into();
        setting.refused("hf://org/name", Wanted::Teacher, &["its sha is not a commit"]);
        assert_eq!(names(setting.cache.path()), [""; 0]);
    }
    for etag in ["../../evil", "", "a/b", ".."] {
        let setting = Setting::gpt2();
        setting.stand_in.state().etag = Some(etag.into());
        setting.refused("hf://org/name", Wanted::Teacher, &["cannot name a file"]);
        assert_eq!(names(setting.cache.path()), [""; 0]);
    }
    let setting = Setting::gpt2();
    setting.stand_in.fail("GET /api", Fault::Redirect("file:///etc/passwd".into()));
    setting.refused("hf://org/name", Wanted::Teacher, &["redirects to nowhere"]);
}

#[test]
fn models_that_cannot_be_used_are_reported_by_what_they_have() {
    let setting = Setting::new(&[("config.json", CONFIG), ("pytorch_model.bin", b"pickle"), ("vocab.json", b"{}")]);
    let refused = ["no weights as safetensors, and pickled ones are not read", "\"pytorch_model.bin\""];
    let error = setting.refused("hf://org/name", Wanted::Teacher, &refused);
    assert_eq!((error.kind, error.retryable), (ErrorKind::Usage, false));
    setting.refused("hf://org/name", Wanted::Tokenizer, &["has no tokenizer.json", "\"vocab.json\""]);
    setting.stand_in.state().listed =
        ["config.json", "model.safetensors", "adapter_config.json"].map(str::to_owned).to_vec();
    setting.refused("hf://org/name", Wanted::Teacher, &["adapter_config.json beside the model", "merge it"]);
    setting.stand_in.state().files.remove("config.json");
    setting.stand_in.state().listed = (0..50).map(|i| format!("{i}.txt")).collect();
    setting.refused("hf://org/name", Wanted::Teacher, &["has no config.json", "and 40 more"]);
    assert_eq!(names(setting.cache.path()), [""; 0]);
}

#[test]
fn a_look_asks_once_and_fetches_nothing() {
    let setting = Setting::gpt2();
    let look = |config: HubConfig, name: &str, wanted| Hub::new(config).look(&reference(name), wanted);
    look(setting.config(), "hf://org/name", Wanted::Teacher).unwrap();
    assert_eq!(lines(&setting.stand_in.take_requests()), ["hub GET /api/models/org/name/revision/main"]);
    assert_eq!(names(setting.cache.path()), [""; 0]);
    // Problems that the user must fix have kind `Usage`, as for a fetch.
    for fault in [Fault::Status(404, "x-error-code: RepoNotFound\r\n"), Fault::Status(401, "")] {
        setting.stand_in.fail("GET /api", fault);
        assert_eq!(look(setting.config(), "hf://org/name", Wanted::Teacher).unwrap_err().kind, ErrorKind::Usage);
    }
    let error = look(setting.config(), "hf://org/name/none.gguf", Wanted::Teacher).unwrap_err();
    assert!(error.kind == ErrorKind::Usage && error.to_string().contains("has no file \"none.gguf\""), "{error}");
    let offline = || HubConfig { offline: true, ..setting.config() };
    assert_eq!(look(offline(), "hf://org/name", Wanted::Tokenizer).unwrap_err().kind, ErrorKind::Usage);
    setting.stand_in.take_requests();
    // A missing answer proves nothing about the model and is not retried.
    for fault in [Fault::Status(503, ""), Fault::Reset] {
        setting.stand_in.fail("GET /api", fault);
        let error = look(setting.config(), "hf://org/name", Wanted::Teacher).unwrap_err();
        assert!(error.kind == ErrorKind::Model && error.retryable, "{error}");
        assert_eq!(setting.stand_in.take_requests().len(), 1);
    }
    // A pinned commit in the cache needs no request.
    let pinned = format!("hf://org/name@{COMMIT}");
    setting.fetch(&pinned, Wanted::Tokenizer).unwrap();
    setting.stand_in.take_requests();
    look(setting.config(), &pinned, Wanted::Tokenizer).unwrap();
    look(offline(), &pinned, Wanted::Tokenizer).unwrap();
    assert_eq!(setting.stand_in.take_requests().len(), 0);
}
