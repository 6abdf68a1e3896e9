//! Tests remote names in jobs: stores, web servers, endpoints, model hubs.

use super::*;

#[test]
fn prefixes_of_stores_are_whole_components() {
    let world = World::with(&["s3://b/a/c", "gs://whole", "https://h/x%20y/", "https://p:8443", "http://*"]);
    let good = [
        "s3://b/a/c",
        "s3://b/a/c/",
        "s3://b/a/c/k.jsonl",
        "s3a://b/a/c/*/k.jsonl",
        "s3://b/a/c/**",
        "gs://whole/x",
        "gs://whole",
        "https://h/x%20y/k",
        "https://H:443/x%20y/k",
        "https://h/x y/k",
        "https://p:8443/k",
        "http://any.example/k",
        "http://any.example:8080/**/k",
    ];
    for url in good {
        assert_eq!(world.input(url), None, "{url}");
    }
    let bad = [
        "s3://b/a/cd",
        "s3://b/a",
        "s3://b",
        "s3://b/a/*",
        "s3://b/*/c/k",
        "s3://b/a/c*/k",
        "s3://b/A/c/k",
        "s3://B/a/c/k",
        "s3://bb/a/c/k",
        "s3://b/a/c/../../z",
        "s3://b/a/c//k",
        "s3://b/%61/c/k",
        "gs://b/a/c/k",
        "gs://whole2/x",
        "az://whole/x",
        "https://h/x%20yz",
        "https://h/X%20y/k",
        "https://h/x%20y/../k",
        "https://h/x%20y/%2e%2e/k",
        "https://h/x%20y%2f..%2fk",
        "https://h/k",
        "https://h:8443/x%20y/k",
        "https://h.evil/x%20y/k",
        "https://evil.h/x%20y/k",
        "https://p/k",
        "https://any.example/k",
        "https://h@evil/x%20y/k",
        "ftp://h/k",
    ];
    for url in bad {
        assert_eq!(world.input(url).map(|p| p.field).as_deref(), Some("input.paths[0]"), "{url}");
    }
    let secret = world.input("https://u:SECRET@h/k").unwrap().to_string();
    assert!(!secret.contains("SECRET"), "{secret}");
    let reported = world.input("s3://c/k").unwrap().message;
    assert!(
        reported.ends_with("allowed: s3://b/a/c, gs://whole, https://h/x%20y/, https://p:8443, http://*"),
        "{reported}"
    );
}

#[test]
fn private_addresses_in_urls_are_reported_early() {
    let mut world = World::with(&["http://*", "https://*"]);
    let urls = [
        "http://127.0.0.1/x",
        "http://0x7f.1/x",
        "http://2130706433/x",
        "https://[::ffff:10.0.0.1]:8/x",
        "http://169.254.169.254/*",
    ];
    for url in urls {
        let reported = world.input(url).unwrap().message;
        assert_eq!(reported, "the server's configuration does not allow http input from private addresses", "{url}");
    }
    assert_eq!(world.input("http://8.8.8.8/x"), None);
    world.access.private_networks = true;
    assert!(urls.iter().all(|url| world.input(url).is_none()));
}

#[test]
fn endpoints_are_compared_as_services() {
    let mut world = World::new();
    world.access.endpoints = vec!["http://minio.corp".into(), "https://s3.corp:8443/base".into()];
    let refused = |endpoint: &str| {
        world.problems(json!({"storage": {"endpoint": endpoint}})).iter().any(|p| p.field == "storage.endpoint")
    };
    for endpoint in ["http://minio.corp", "http://minio.corp/", "http://MINIO.corp:80", "https://s3.corp:8443/base/"] {
        assert!(!refused(endpoint), "{endpoint}");
    }
    for endpoint in [
        "https://minio.corp",
        "http://minio.corp:9000",
        "http://minio.corp.evil",
        "http://minio.corp/x",
        "http://minio.corp@evil",
        "https://s3.corp:8443",
        "https://s3.corp/base",
        "http://10.0.0.1",
        "nonsense",
    ] {
        assert!(refused(endpoint), "{endpoint}");
    }
}

#[test]
fn models_come_from_allowed_repositories() {
    let mut world = World::new();
    let reported = |world: &World, path: &str| {
        let problems = world.problems(json!({"tokenizer": {"path": path}}));
        problems.into_iter().find(|p| p.field == "tokenizer.path").map(|p| p.message)
    };
    let none = "the server's configuration does not allow this repository of the hub; allowed: nothing";
    assert_eq!(reported(&world, "hf://org/name").as_deref(), Some(none));
    world.access.hub = vec!["org/*".into(), "one/model".into(), "gpt2".into()];
    for good in ["hf://org/name", "hf://org/other@main", "hf://one/model/x.gguf", "hf://gpt2"] {
        assert_eq!(reported(&world, good), None, "{good}");
    }
    for bad in ["hf://org2/name", "hf://or/name", "hf://one/model2", "hf://one", "hf://gpt2/x", "hf://two/gpt2"] {
        assert!(reported(&world, bad).is_some(), "{bad}");
    }
    world.access.hub = vec!["*".into()];
    assert_eq!(reported(&world, "hf://gpt2"), None);
    assert_eq!(reported(&world, &world.path("data/t.json")), None);
    for bad in ["secret/t.json", "data/link/t.json", "data/link", "data/own"] {
        let message = reported(&world, &world.path(bad)).unwrap();
        assert!(message.starts_with("the server's configuration does not allow reading here"), "{bad}: {message}");
    }
}

#[test]
fn http_inputs_are_guarded_when_they_are_asked() {
    let mut world = World::with(&["http://*"]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let job = json!({
        "input": {"format": "jsonl", "paths": [format!("http://localhost:{}/x.jsonl", listener.local_addr().unwrap().port())]},
        "tokenizer": {"path": world.path("data/t.json")},
        "output": {"path": world.path("out/x")},
    });
    let guarded = world.refused(job.clone());
    let reported = guarded.to_string();
    assert!(
        reported.ends_with("the server's configuration does not allow http input from private addresses"),
        "{reported}"
    );
    assert_eq!((guarded.kind, guarded.retryable), (ErrorKind::Input, false));
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    world.access.private_networks = true;
    drop(listener);
    let lost = world.refused(job.clone());
    assert!(lost.to_string().contains("no service listens"), "{lost}");
    assert_eq!((lost.kind.name(), lost.retryable), ("input", true));
    world.access = Access { private_networks: true, ..Access::default() };
    let wrong = world.refused(job);
    assert_eq!((wrong.kind.name(), wrong.retryable, wrong.problems.unwrap().0.len()), ("usage", false, 3));
}

#[test]
fn an_endpoint_that_is_not_allowed_is_reported_with_what_allows_it() {
    let mut world = World::new();
    world.access.endpoints = vec!["https://s3.corp".into()];
    let reported = |endpoint: &str| {
        let problems =
            world.problems(json!({"output": {"path": world.path("out/x"), "storage": {"endpoint": endpoint}}}));
        problems.into_iter().find(|p| p.field == "output.storage.endpoint").unwrap().to_string()
    };
    let said = reported("http://minio:9000");
    for part in [
        "got \"http://minio:9000\"",
        "allowed: https://s3.corp;",
        "access: {endpoints: [\"https://s3.corp\", \"http://minio:9000\"]}",
        "`stillhouse serve --endpoint http://minio:9000`",
    ] {
        assert!(said.contains(part), "{part} is not in {said}");
    }
    assert!(!reported("http://key:SECRET@minio:9000").contains("SECRET"));
}
