//! Tests hostile job files against configurations, with real folders and links.

mod urls;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};
use stillhouse_operators::registry::job_format;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::JobSpec;

use super::*;
use crate::error::{ErrorKind, PipelineError};
use crate::events::NullObserver;
use crate::job::prepare;

/// Access to `data` and `out`, not to `secret`; `data/own` is denied.
struct World {
    dir: tempfile::TempDir,
    access: Access,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().canonicalize().unwrap().join(name).display().to_string();
        for folder in ["data/deep", "data/own", "data-more", "out", "secret/deep", "jobs"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        for file in ["data/a.jsonl", "data/own/a.jsonl", "data-more/a.jsonl", "secret/a.jsonl", "secret/deep/a.jsonl"] {
            fs::write(dir.path().join(file), "{\"text\": \"x\"}\n").unwrap();
        }
        symlink("../secret", dir.path().join("data/link")).unwrap();
        symlink("deep", dir.path().join("data/inner")).unwrap();
        symlink("../secret/a.jsonl", dir.path().join("data/file.jsonl")).unwrap();
        symlink("../secret/none", dir.path().join("data/dangling")).unwrap();
        symlink("../data", dir.path().join("secret/back")).unwrap();
        let access = Access {
            read: vec![at("data")],
            write: vec![at("out")],
            deny: vec![at("data/own").into()],
            ..Access::default()
        };
        Self { dir, access }
    }

    fn with(read: &[&str]) -> Self {
        let mut world = Self::new();
        world.access.read.extend(read.iter().map(|&entry| entry.to_owned()));
        world
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn base(&self) -> std::path::PathBuf {
        self.dir.path().join("jobs")
    }

    fn problems(&self, fields: Value) -> Vec<Problem> {
        self.access.problems(&spec(fields), &self.base())
    }

    /// The problem reported for an input path.
    fn input(&self, path: &str) -> Option<Problem> {
        let output = self.path("out/x");
        let problems =
            self.problems(json!({"input": {"format": "jsonl", "paths": [path]}, "output": {"path": output}}));
        let mut of_input = problems.into_iter().filter(|p| p.field != "tokenizer.path");
        let first = of_input.next();
        assert_eq!(of_input.next(), None);
        first
    }

    fn output(&self, path: &str) -> Option<Problem> {
        let problems = self.problems(json!({"output": {"path": path}}));
        problems.into_iter().find(|p| p.field == "output.path")
    }

    fn prepared(&self, fields: Value) -> String {
        self.refused(fields).to_string()
    }

    fn refused(&self, fields: Value) -> PipelineError {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let _in = runtime.enter();
        let text = serde_json::to_string(&job(fields)).unwrap();
        prepare(job_format().parse(&text), &self.base(), &self.access, &NullObserver).err().unwrap()
    }
}

fn job(fields: Value) -> Value {
    let mut all = json!({
        "version": 1, "name": "a", "input": {"format": "jsonl", "paths": ["x"]}, "tokenizer": {"path": "t"},
        "pack": {"length": 8}, "output": {"path": "o"},
    });
    all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    all
}

fn spec(fields: Value) -> JobSpec {
    serde_json::from_value(job(fields)).unwrap()
}

#[test]
fn what_is_inside_may_be_read() {
    let world = World::new();
    for path in
        ["data/a.jsonl", "data", "data/", "data/*.jsonl", "data/**/*.jsonl", "data/inner/x", "data/not/there", "out/a"]
    {
        assert_eq!(world.input(&world.path(path)), None, "{path}");
        assert_eq!(world.input(&format!("file://{}", world.path(path))), None, "{path}");
    }
    for path in
        ["data/deep/../a.jsonl", "data/inner/../a.jsonl", "data/./a.jsonl", "data//a.jsonl", "out/../data/a.jsonl"]
    {
        assert_eq!(world.input(&world.path(path)), None, "{path}");
    }
    let job = spec(json!({"input": {"format": "jsonl", "paths": ["../a.jsonl", "../../out/x"]}}));
    let inside = world.access.problems(&job, &world.dir.path().join("data/deep"));
    assert!(inside.iter().all(|p| !p.field.starts_with("input")), "{inside:?}");
}

#[test]
fn a_cluster_is_one_that_the_server_names() {
    let mut world = World::new();
    let of = |world: &World, scheduler: &str| {
        let problems = world.problems(json!({"engine": {"kind": "ballista", "scheduler": scheduler}}));
        problems.into_iter().find(|p| p.field == "engine.scheduler").map(|p| p.to_string())
    };
    assert!(of(&world, "10.0.0.5:50050").unwrap().contains("does not allow this scheduler; allowed: nothing"));
    world.access.schedulers = vec!["10.0.0.5:50050".into()];
    assert_eq!(of(&world, "10.0.0.5:50050"), None);
    assert!(of(&world, "10.0.0.5:22").unwrap().contains("allowed: 10.0.0.5:50050"));
    world.access.schedulers = vec!["*".into()];
    assert_eq!(of(&world, "10.0.0.5:22"), None);
}

#[test]
fn a_folder_elsewhere_does_not_report_what_it_is() {
    let world = World::new();
    symlink("../data/deep", world.dir.path().join("secret/away")).unwrap();
    let job = spec(json!({"input": {"format": "jsonl", "paths": ["../../data/a.jsonl"]}}));
    // a folder, a link to a folder, a dangling link, and a missing folder give the same report
    let said = ["secret/deep", "secret/away", "data/dangling", "secret/none"].map(|folder| {
        let problems = world.access.problems(&job, &world.dir.path().join(folder));
        problems.into_iter().find(|p| p.field == "input.paths[0]")
    });
    assert!(said[0].is_some());
    assert!(said.iter().all(|s| *s == said[0]), "{said:?}");
}

#[test]
fn what_is_outside_may_not() {
    let world = World::new();
    for path in [
        "secret/a.jsonl",
        "secret",
        "secret/*.jsonl",
        "*/a.jsonl",
        "**/*.jsonl",
        "data-more/a.jsonl",
        "data/../secret/a.jsonl",
        "data/link/a.jsonl",
        "data/link",
        "data/link/*.jsonl",
        "data/link/deep/../a.jsonl",
        "data/file.jsonl",
        "data/dangling",
        "data/link/../data/a.jsonl",
        "data/link/../data/../data/a.jsonl",
        "data/own/a.jsonl",
        "data/own",
        "data/own/*",
        "data/deep/../own/a.jsonl",
        "secret/../data/a.jsonl",
        "secret/nobody/../../data/a.jsonl",
        "data/x\0y",
        "data/x\u{1b}[2J",
    ] {
        for given in [world.path(path), format!("../{path}"), format!("file://{}", world.path(path))] {
            assert_eq!(world.input(&given).unwrap().field, "input.paths[0]", "{given}");
        }
    }
    for given in [
        "/etc/passwd",
        "/etc/*",
        "/*",
        "/",
        "/proc/self/environ",
        "/s3:/b/x",
        "../../../../etc/passwd",
        "x.jsonl",
        "~/x",
    ] {
        assert!(world.input(given).is_some(), "{given}");
    }
}

#[test]
fn nothing_is_reported_of_what_is_there() {
    let world = World::new();
    let reported = |path: &str| world.input(&world.path(path)).unwrap().message;
    let allowed = format!("{}, {}", world.access.read[0], world.access.write[0]);
    let expected = format!("the server's configuration does not allow reading here; allowed: {allowed}");
    for path in [
        "secret/a.jsonl",
        "secret/none",
        "secret/a.jsonl/x",
        "secret/*",
        "data/link/a.jsonl",
        "data/link/none",
        "data/dangling",
        "secret/../data/a.jsonl",
        "none/../data/a.jsonl",
        "secret/deep/../../data/a.jsonl",
        "secret/none/../../data/a.jsonl",
    ] {
        assert_eq!(reported(path), expected, "{path}");
    }
    let output = |path: &str| world.output(&world.path(path)).unwrap().message;
    assert_eq!(output("secret/deep"), output("secret/none"));
    assert_eq!(
        output("data"),
        format!("the server's configuration does not allow writing here; allowed: {}", world.access.write[0])
    );
}

#[test]
fn outputs_stay_where_they_may_be() {
    let world = World::new();
    symlink(world.path("secret"), world.dir.path().join("out/link")).unwrap();
    symlink(world.path("secret/none"), world.dir.path().join("out/dangling")).unwrap();
    for path in ["out", "out/x", "out/x/y", "out/x/../y"] {
        assert_eq!(world.output(&world.path(path)), None, "{path}");
    }
    for path in
        ["data", "out/../secret", "out/link", "out/link/x", "out/dangling", "out/dangling/x", "secret", "outer", "."]
    {
        assert!(world.output(&world.path(path)).is_some(), "{path}");
    }
    for (i, inside) in ["data", "_stillhouse", "_stillhouse/lock", "data/t.parquet", "_SUCCESS", "_stillhouse/input"]
        .iter()
        .enumerate()
    {
        let root = world.dir.path().join(format!("out/{i}"));
        let link = root.join(inside);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(world.path("secret/new"), &link).unwrap();
        let problem = world.output(&root.display().to_string()).unwrap();
        assert!(
            problem.message.starts_with(&format!("{inside} is outside what the server's configuration allows")),
            "{problem}"
        );
        assert!(!problem.message.contains("secret"), "{problem}");
    }
    let mut world = World::new();
    world.access.deny = vec![world.path("out/data").into()];
    assert!(world.output(&world.path("out")).is_some());
}

#[test]
fn all_violations_are_reported_at_once_by_field() {
    let world = World::new();
    let problems = world.problems(json!({
        "input": {"format": "jsonl", "paths": [world.path("data/a.jsonl"), "/etc/passwd", "s3://b/k"],
                  "storage": {"endpoint": "http://10.0.0.1:9000"}},
        "tokenizer": {"path": "/etc/t.json"},
        "extract": {"teacher": {"path": "hf://org/name"}},
        "output": {"path": "/etc/out", "storage": {"endpoint": "http://evil"}},
        "storage": {"endpoint": "http://169.254.169.254"},
    }));
    let fields: Vec<&str> = problems.iter().map(|p| p.field.as_str()).collect();
    assert_eq!(
        fields,
        [
            "input.paths[1]",
            "input.paths[2]",
            "tokenizer.path",
            "extract.teacher.path",
            "output.path",
            "storage.endpoint",
            "input.storage.endpoint",
            "output.storage.endpoint"
        ]
    );
    assert!(problems.iter().all(|p| p.message.contains("the server's configuration does not allow")), "{problems:?}");
    assert_eq!(Access::everything().problems(&spec(json!({"output": {"path": "/etc/out"}})), Path::new("/")), []);
}

#[test]
fn outputs_are_not_in_what_is_only_read() {
    let mut world = World::with(&["s3://in"]);
    world.access.write.push("s3://out/sets".into());
    assert_eq!(world.output("s3://out/sets/one"), None);
    assert_eq!(world.input("s3://out/sets/one/data/*"), None);
    for url in ["s3://in/x", "s3://out", "s3://out/sets2", "gs://out/sets/one"] {
        assert!(world.output(url).is_some(), "{url}");
    }
}

#[test]
fn the_paths_of_tables_are_judged_like_all_others() {
    let world = World::new();
    let table = |path: &str| json!({"format": "jsonl", "paths": [world.path("data/a.jsonl"), path]});
    for bad in [
        world.path("secret/a.jsonl"),
        world.path("data/../secret/*"),
        "s3://elsewhere/x".into(),
        "http://169.254.169.254/x".into(),
    ] {
        let input = json!({"tables": {"labels": table(&bad)}, "sql": "SELECT text FROM labels"});
        let problems = world.problems(json!({"input": input}));
        assert!(problems.iter().any(|p| p.field == "input.tables.labels.paths[1]"), "{bad}: {problems:?}");
    }
    let reported = world.prepared(json!({
        "input": {"tables": {"labels": table(&world.path("data/*.jsonl"))}, "sql": "SELECT text FROM labels"},
        "tokenizer": {"path": world.path("data/t.json")},
        "output": {"path": world.path("out/x")},
    }));
    assert!(
        reported.contains("input.tables.labels.paths[1]: got ") && reported.contains("is outside what the server's"),
        "{reported}"
    );
    assert!(!reported.contains("secret"), "{reported}");
}

#[test]
fn a_listing_that_leads_out_is_a_problem_of_its_path() {
    let world = World::new();
    for path in ["data/*.jsonl", "data/**/*.jsonl", "data"] {
        let paths = json!([world.path("data/a.jsonl"), world.path(path)]);
        let reported = world.prepared(json!({
            "input": {"format": "jsonl", "paths": paths},
            "tokenizer": {"path": world.path("data/t.json")},
            "output": {"path": world.path("out/x")},
        }));
        assert!(
            reported.contains("input.paths[1]: got ")
                && reported.contains("what it finds is outside what the server's"),
            "{reported}"
        );
        assert!(!reported.contains("secret") && !reported.contains("input.paths[0]"), "{reported}");
        // the path reached through the link that leads out
        assert!(reported.contains("\" is a link: what it finds"), "{reported}");
    }
}

#[test]
fn files_of_a_model_folder_may_not_lead_out() {
    let world = World::new();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = world.dir.path().join("data/deep").join(name);
        fs::create_dir_all(&folder).unwrap();
        symlink(world.path("secret/a.jsonl"), folder.join(name)).unwrap();
        let reported = world.prepared(json!({
            "input": {"format": "jsonl", "paths": [world.path("data/a.jsonl")]},
            "tokenizer": {"path": folder.display().to_string()},
            "output": {"path": world.path("out/x")},
        }));
        assert!(reported.contains(&format!("{name} is outside what the server's configuration allows")), "{reported}");
        assert!(!reported.contains("secret"), "{reported}");
    }
    let folder = world.dir.path().join("data/deep/pipe");
    fs::create_dir_all(&folder).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(folder.join("config.json")).status().unwrap().success());
    let gate = Gate::new(&world.access);
    let reported = gate.outside_files([folder.join("config.json").as_path()]).unwrap();
    assert_eq!(reported, "config.json is a pipe, a device or a socket; valid: a file");
}

#[test]
fn nothing_is_asked_for_a_job_with_problems() {
    // a region like this would send the server's signature to an arbitrary host
    let mut world = World::with(&["s3://b"]);
    world.access.endpoints = vec!["*".into()];
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let reported = world.prepared(json!({
        "input": {"format": "jsonl", "paths": ["s3://b/k"]},
        "storage": {"endpoint": format!("http://{}", listener.local_addr().unwrap()), "region": "x.evil.com/"},
        "tokenizer": {"path": world.path("data/t.json")},
        "output": {"path": world.path("out/x")},
    }));
    assert!(reported.contains("storage.region"), "{reported}");
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn data_sets_of_the_hub_are_allowed_in_all_their_revisions() {
    let mut world = World::with(&["hf://datasets/org/name", "hf://datasets/all/*"]);
    let refused = |world: &World, path: &str| {
        let reported = world.prepared(json!({
            "input": {"format": "jsonl", "paths": [path]},
            "tokenizer": {"path": world.path("data/t.json")},
            "output": {"path": world.path("out/x")},
        }));
        reported.contains("does not allow reading here; allowed: ")
    };
    // the names, before any request: the hub of this test does not exist
    let refused_paths = [
        "hf://datasets/org/name2/x.jsonl",
        "hf://datasets/org2/name/x.jsonl",
        "hf://datasets/al/l/x.jsonl",
        "hf://datasets/allx/name/x.jsonl",
    ];
    for path in refused_paths {
        assert!(refused(&world, path), "{path}");
    }
    let allows = |access: &Access, path: &str| {
        let url = StoreUrl::parse(path).unwrap().unwrap();
        Gate::new(access).admits(&Location::Store(url)).is_ok()
    };
    for path in [
        "hf://datasets/org/name/x.jsonl",
        "hf://datasets/org/name@v1/x.jsonl",
        "hf://datasets/org/name@refs/convert/parquet/a/x.jsonl",
        "hf://datasets/all/name@~parquet/x.jsonl",
    ] {
        assert!(allows(&world.access, path), "{path}");
    }
    assert!(refused_paths.iter().all(|path| !allows(&world.access, path)));
    assert!(world.access.uses_hub() && world.access.check().is_empty(), "{:?}", world.access.check());
    world.access.read = vec!["hf://*".into()];
    assert!(allows(&world.access, "hf://datasets/org/name2/x.jsonl") && !allows(&world.access, "s3://b/k"));
    for entry in ["hf://datasets/*", "hf://datasets/org/name@v1", "hf://org/name", "hf://datasets/or/g*/x"] {
        world.access.read = vec![entry.into()];
        assert_eq!(world.access.check().len(), 1, "{entry}");
    }
    let mut access = Access::default();
    ["hf://datasets/all/*", "https://*", "s3://b"].into_iter().for_each(|place| access.allow(place.into()));
    assert_eq!((access.read.len(), access.write), (3, vec!["s3://b".to_owned()]));
}

#[test]
fn configurations_are_checked() {
    let world = World::with(&["s3://b/p", "https://*", "http://h:80/x", "hf://*", "*"]);
    assert_eq!(world.access.check(), []);
    assert_eq!(Access::everything().check(), []);
    let access = Access {
        read: ["data", "/nobody/has/this", "s3://k:SECRET@b", "ftp://h", "s3://b/*", "http://10.0.0.1/x"]
            .map(String::from)
            .to_vec(),
        write: vec!["https://h/x".into()],
        endpoints: vec!["http://k:SECRET@h".into(), "h:9000".into(), "http://h".into()],
        hub: ["org", "org/", "a/b/c", "org/*", "../x", "*/x"].map(String::from).to_vec(),
        schedulers: Vec::new(),
        private_networks: false,
        deny: vec!["relative".into(), "/nobody/has/this".into()],
        environment: false,
    };
    let reported: Vec<String> = access.check().iter().map(ToString::to_string).collect();
    let fields: Vec<&str> = reported.iter().map(|t| t.split(':').next().unwrap()).collect();
    assert_eq!(
        fields,
        [
            "read[0]",
            "read[1]",
            "read[2]",
            "read[3]",
            "read[4]",
            "read[5]",
            "write[0]",
            "endpoints[0]",
            "endpoints[1]",
            "hub[1]",
            "hub[2]",
            "hub[4]",
            "hub[5]",
            "deny[0]",
            "deny[1]"
        ]
    );
    assert!(!reported.concat().contains("SECRET"), "{reported:?}");
}

#[test]
fn the_servers_environment_is_no_jobs_business() {
    let open = Access { environment: false, ..Access::everything() };
    for access in [&World::new().access, &open] {
        for (fields, field) in [
            (json!({"input": {"format": "jsonl", "paths": ["x", "~/a.jsonl"]}}), "input.paths[1]"),
            (json!({"input": {"format": "jsonl", "paths": ["{/srv,${HOME}}/a"]}}), "input.paths[0]"),
            (json!({"output": {"path": "${PATH}/x"}}), "output.path"),
            (json!({"tokenizer": {"path": "~/t"}}), "tokenizer.path"),
            (json!({"extract": {"teacher": {"path": "hf://org/${USER}"}}}), "extract.teacher.path"),
        ] {
            let problems = access.problems(&spec(fields.clone()), Path::new("/"));
            let reported = problems.iter().find(|p| p.field == field).unwrap();
            assert!(reported.message.contains("the server's own"), "{reported}");
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let _in = runtime.enter();
            let text = serde_json::to_string(&job(fields)).unwrap();
            let error = prepare(job_format().parse(&text), Path::new("/"), access, &NullObserver).err().unwrap();
            assert!(error.to_string().contains("the server's own"), "{error}");
        }
    }
    // each alternative of the braces is checked
    let world = World::new();
    for path in [
        "{data,secret}/a.jsonl",
        "data/{a.jsonl,../../secret/a.jsonl}",
        "{data/a.jsonl,s3://b/k}",
        "data/{link,.}/a.jsonl",
    ] {
        assert!(world.input(&world.path(path)).is_some(), "{path}");
    }
    assert_eq!(world.input(&world.path("data/{a,b}.jsonl")), None);
}

#[test]
fn configurations_are_read_strictly() {
    let access: Access = serde_json::from_value(json!({"read": ["/srv"]})).unwrap();
    assert_eq!(access, Access { read: vec!["/srv".into()], ..Access::default() });
    assert!(serde_json::from_value::<Access>(json!({"reed": []})).is_err());
    let all = Access::everything();
    // `environment` is for a person's own process: it is neither written nor read
    let read_back = serde_json::from_value::<Access>(serde_json::to_value(&all).unwrap()).unwrap();
    assert_eq!(read_back, Access { environment: false, ..all });
    assert!(serde_json::from_value::<Access>(json!({"environment": true})).is_err());
}

#[test]
fn of_many_paths_the_first_are_reported_and_the_rest_counted_until_nobody_waits() {
    let world = World::new();
    let paths: Vec<String> = (0..2000).map(|n| format!("/forbidden/{n}")).collect();
    let job = json!({"input": {"format": "jsonl", "paths": paths}, "output": {"path": world.path("out/x")}});
    let problems = world.problems(job.clone());
    let of_paths: Vec<&Problem> = problems.iter().filter(|p| p.field.starts_with("input")).collect();
    assert_eq!(of_paths.len(), 91);
    assert_eq!((of_paths[89].field.as_str(), of_paths[90].field.as_str()), ("input.paths[89]", "input.paths"));
    assert_eq!(of_paths[90].message, "and 1910 more paths that may not be read");
    for until in [0, 1, 1500] {
        let asked = std::cell::Cell::new(0);
        let should_continue = || asked.replace(asked.get() + 1) < until;
        assert_eq!(world.access.problems_while(&spec(job.clone()), &world.base(), &should_continue), None);
        assert_eq!(asked.get(), until + 1);
    }
}
