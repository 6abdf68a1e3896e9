//! Data sets of the hub: what is asked, with which secret, and how failures are handled and explained.

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{Error, GetOptions, ObjectStore, ObjectStoreExt, PutPayload};
use stillhouse_schemas::storage::Storage;

use super::fake_store::{Answer, FakeStore, Request};
use super::{options, url};
use crate::{Environment, Opened, Storages, explain_cause, is_retryable};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const HF_TOKEN: &str = "hf_PLANTEDSECRET0123456789";

fn status(status: u16, headers: &'static str) -> Answer {
    Answer::Status(status, headers, String::new())
}

fn json(body: impl ToString) -> Answer {
    Answer::Status(200, "content-type: application/json", body.to_string())
}

fn revision() -> Answer {
    json(serde_json::json!({"id": "org/name", "sha": COMMIT}))
}

/// The answer about the file `data/k.parquet` of ten bytes.
fn info() -> Answer {
    let lfs = serde_json::json!({"oid": "e".repeat(64), "size": 10, "pointerSize": 130});
    json(serde_json::json!([{"type": "file", "path": "data/k.parquet", "oid": "g", "size": 10, "lfs": lfs}]))
}

fn redirect(to: &str) -> Answer {
    let location: &'static str = format!("location: {to}").leak();
    status(302, location)
}

fn part(text: &str, range: &str) -> Answer {
    let header: &'static str = format!("content-range: bytes {range}").leak();
    Answer::Status(206, header, text.to_owned())
}

fn environment(hub: &FakeStore) -> Environment {
    Environment::from_iter([
        ("HF_ENDPOINT", hub.url.as_str()),
        ("HF_TOKEN", HF_TOKEN),
        ("HF_HOME", "/nonexistent"),
        ("HOME", "/nonexistent"),
    ])
}

fn open_at(hub: &FakeStore, text: &str) -> Opened {
    let retry = options("http://unused").retry;
    let options = Storage { retry, ..Storage::default() };
    Storages::with_environment(environment(hub)).open(&url(text), &options).unwrap()
}

fn open(hub: &FakeStore) -> Opened {
    open_at(hub, "hf://datasets/org/name@v1")
}

fn file() -> Path {
    Path::from("data/k.parquet")
}

async fn get(opened: &Opened, range: std::ops::Range<u64>) -> object_store::Result<String> {
    let options = GetOptions { range: Some(range.into()), ..GetOptions::default() };
    let bytes = opened.store.get_opts(&file(), options).await?.bytes().await?;
    Ok(String::from_utf8(bytes.to_vec()).unwrap())
}

fn lines(requests: &[Request]) -> Vec<String> {
    requests.iter().map(|r| format!("{} {}", r.method, r.path)).collect()
}

#[tokio::test]
async fn the_token_goes_to_the_hub_and_ranges_to_the_server_of_the_content() {
    let contents = FakeStore::new([part("012", "0-2/10"), part("345", "3-5/10")]);
    let hub = FakeStore::new([revision(), info(), redirect(&format!("{}/c?Signature=SIGNED", contents.url))]);
    let opened = open(&hub);
    let meta = opened.store.head(&file()).await.unwrap();
    assert_eq!((meta.size, meta.e_tag.as_deref()), (10, Some("e".repeat(64).as_str())));
    assert_eq!(get(&opened, 0..3).await.unwrap(), "012");
    assert_eq!(get(&opened, 3..6).await.unwrap(), "345");
    assert_eq!(
        lines(&hub.requests()),
        [
            "GET /api/datasets/org/name/revision/v1?expand=sha".to_owned(),
            format!("POST /api/datasets/org/name/paths-info/{COMMIT}"),
            format!("GET /datasets/org/name/resolve/{COMMIT}/data/k.parquet"),
        ]
    );
    assert_eq!(hub.requests()[1].body, br#"{"expand":false,"paths":["data/k.parquet"]}"#);
    assert!(hub.requests().iter().all(|r| r.headers["authorization"] == format!("Bearer {HF_TOKEN}")));
    let ranges: Vec<_> = contents.requests().iter().map(|r| r.headers["range"].clone()).collect();
    assert_eq!(ranges, ["bytes=0-2", "bytes=3-5"]);
    assert!(contents.requests().iter().all(|r| !r.headers.contains_key("authorization")));
    assert!(!format!("{:?} {}", opened.store, opened.store).contains("PLANTED"));
}

#[tokio::test]
async fn a_commit_is_asked_for_nothing_and_an_anonymous_job_sends_no_token() {
    let hub = FakeStore::new([info(), Answer::Status(200, "", "0123456789".into())]);
    let options = Storage { anonymous: Some(true), ..Storage::default() };
    let dataset = url(&format!("hf://datasets/org/name@{COMMIT}"));
    let opened = Storages::with_environment(environment(&hub)).open(&dataset, &options).unwrap();
    // the hub answers small files itself, and may send the whole of them
    assert_eq!(get(&opened, 7..9).await.unwrap(), "78");
    assert_eq!(hub.count(), 2);
    assert!(hub.requests().iter().all(|r| !r.headers.contains_key("authorization")));
}

#[tokio::test]
async fn a_file_that_is_whole_in_the_cache_is_read_there() {
    let cache = tempfile::tempdir().unwrap();
    let blobs = cache.path().join("datasets--org--name/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let hub = FakeStore::new([revision(), info(), part("34", "3-4/10")]);
    let variables = environment(&hub);
    let variables = variables.iter().chain([("HF_HUB_CACHE", cache.path().to_str().unwrap())]);
    let storages = Storages::with_environment(Environment::from_iter(variables));
    let opened = storages.open(&url("hf://datasets/org/name"), &Storage::default()).unwrap();
    // a part of it, as an ended download leaves one
    std::fs::write(blobs.join("e".repeat(64)), "cache").unwrap();
    assert_eq!(get(&opened, 3..5).await.unwrap(), "34");
    std::fs::write(blobs.join("e".repeat(64)), "abcdefghij").unwrap();
    assert_eq!(get(&opened, 3..5).await.unwrap(), "de");
    assert_eq!(hub.count(), 3);
}

#[tokio::test]
async fn an_expired_url_of_a_content_is_replaced() {
    let contents = FakeStore::new([part("0", "0-0/10"), status(403, ""), part("1", "1-1/10")]);
    let to = redirect(&format!("{}/c", contents.url));
    let hub = FakeStore::new([revision(), info(), to.clone(), to]);
    let opened = open(&hub);
    assert_eq!(get(&opened, 0..1).await.unwrap(), "0");
    assert_eq!(get(&opened, 1..2).await.unwrap(), "1");
    assert_eq!((hub.count(), contents.count()), (4, 3));
}

#[tokio::test]
async fn bytes_that_are_not_the_range_are_an_error() {
    let cases = [
        (part("345", "3-5/11"), "\"bytes 3-5/11\" came with 3 bytes"),
        (part("34", "3-4/10"), "bytes 3-5/10 are expected, and \"bytes 3-4/10\" came with 2 bytes"),
        (Answer::Status(206, "", "345".into()), "\"\" came with 3 bytes"),
        (Answer::Status(200, "", "01234".into()), "the file has 10 bytes, and 5 came"),
        (redirect("ftp://elsewhere/SECRET"), "a redirect: it leads nowhere"),
        (status(302, ""), "a redirect: it leads nowhere"),
    ];
    for (answer, text) in cases {
        let hub = FakeStore::new([revision(), info(), answer]);
        let error = get(&open(&hub), 3..6).await.unwrap_err();
        let said = explain_cause(&error, "p");
        assert!(said.contains(text) && !said.contains("SECRET") && !is_retryable(&error), "{said}");
    }
    let around = (0..9).map(|_| redirect("/x"));
    let hub = FakeStore::new([revision(), info()].into_iter().chain(around));
    let said = explain_cause(&get(&open(&hub), 3..6).await.unwrap_err(), "p");
    assert!(said.contains("a redirect: there are more than 8"), "{said}");
}

#[tokio::test]
async fn listings_have_pages_and_end() {
    let page = |names: &[&str]| {
        let entries = names.iter().map(|n| match n.strip_suffix('/') {
            Some(folder) => serde_json::json!({"type": "directory", "path": folder, "oid": "t", "size": 0}),
            None => serde_json::json!({"type": "file", "path": n, "oid": "g", "size": 3}),
        });
        serde_json::Value::from_iter(entries).to_string()
    };
    // the host of the next page is not taken: the token goes to the hub only
    let next = "link: <http://elsewhere/api?cursor=2&recursive=false>; rel=\"next\"";
    let hub =
        FakeStore::new([revision(), Answer::Status(200, next, page(&["data/a", "data/b/"])), json(page(&["data/c"]))]);
    let opened = open(&hub);
    let found = opened.store.list_with_delimiter(Some(&Path::from("data"))).await.unwrap();
    let files: Vec<_> = found.objects.iter().map(|o| (o.location.as_ref(), o.size)).collect();
    assert_eq!(files, [("data/a", 3), ("data/c", 3)]);
    assert_eq!(found.common_prefixes, [Path::from("data/b")]);
    let tree = format!("GET /api/datasets/org/name/tree/{COMMIT}/data?");
    assert_eq!(
        lines(&hub.requests())[1..],
        [format!("{tree}recursive=false&expand=false"), format!("{tree}cursor=2&recursive=false")]
    );
    // the listing has told the size
    opened.store.head(&Path::from("data/c")).await.unwrap();
    assert_eq!(hub.count(), 3);

    let endless = Answer::Status(200, next, page(&["data/a"]));
    let hub = FakeStore::new([revision(), endless.clone(), endless]);
    let error = open(&hub).store.list(None).try_collect::<Vec<_>>().await.unwrap_err();
    assert!(explain_cause(&error, "p").contains("its pages do not end"), "{error}");
    // a page that is missing would cut the list short
    let missing = status(404, "x-error-code: EntryNotFound");
    let hub = FakeStore::new([revision(), Answer::Status(200, next, page(&["data/a"])), missing.clone()]);
    let error = open(&hub).store.list(None).try_collect::<Vec<_>>().await.unwrap_err();
    assert!(explain_cause(&error, "p").contains("the list of the folder \"\": status 404"), "{error}");
    // no folder, no files
    let hub = FakeStore::new([revision(), missing.clone(), missing]);
    let opened = open(&hub);
    assert!(opened.store.list_with_delimiter(None).await.unwrap().objects.is_empty());
    assert_eq!(opened.store.list(None).try_collect::<Vec<_>>().await.unwrap(), []);
}

#[tokio::test]
async fn what_the_hub_refuses_is_explained() {
    let cases = [
        (status(401, "x-error-code: RepoNotFound"), "401 RepoNotFound: the data set is private or gated, or does not"),
        (status(404, "x-error-code: RepoNotFound"), "404 RepoNotFound: the hub has no such data set; check the name"),
        (status(404, "x-error-code: RevisionNotFound"), "404 RevisionNotFound: the data set has no such revision"),
        (status(403, "x-error-code: GatedRepo"), "403 GatedRepo: the data set is gated; accept its terms"),
        (status(401, ""), "set HF_TOKEN to a valid token that may read it"),
        (status(404, ""), "the commit of the revision: status 404; check the name, and HF_ENDPOINT"),
        (json("{}"), "the hub's answer makes no sense: the commit of the revision: not JSON with a commit"),
        (json("{\"sha\": \"main\"}"), "\"main\" is not a commit"),
    ];
    for (answer, text) in cases {
        let hub = FakeStore::new([answer]);
        let error = open(&hub).store.head(&file()).await.unwrap_err();
        let said = explain_cause(&error, "p");
        assert!(said.contains(text) && !said.contains("PLANTED"), "{said}");
        assert!(!is_retryable(&error) && !matches!(error, Error::NotFound { .. }), "{error:?}");
        assert_eq!(hub.count(), 1);
    }
    let hub = FakeStore::new([revision(), json("[]")]);
    assert!(matches!(open(&hub).store.head(&file()).await, Err(Error::NotFound { .. })));
    assert!(matches!(open(&hub).store.head(&Path::default()).await, Err(Error::NotFound { .. })));
    // limits of requests pass
    let busy = status(429, "ratelimit: \"api\";r=0;t=0");
    let hub = FakeStore::new([busy.clone(), revision(), busy, info()]);
    let opened = open(&hub);
    opened.store.head(&file()).await.unwrap();
    assert_eq!(opened.statistics.retries(), 2);
    let hub = FakeStore::new((0..5).map(|_| status(429, "")));
    let error = open(&hub).store.head(&file()).await.unwrap_err();
    assert!(is_retryable(&error) && explain_cause(&error, "p").contains("set HF_TOKEN, which allows more"), "{error}");
}

#[tokio::test]
async fn what_cannot_be_asked_is_said_at_once() {
    let hub = FakeStore::new([]);
    let open = |name: &str, value: &str| {
        let variables = environment(&hub);
        let others = variables.iter().filter(|(n, _)| *n != name);
        let environment = Environment::from_iter(others.chain([(name, value)]));
        let opened = Storages::with_environment(environment).open(&url("hf://datasets/org/name"), &Storage::default());
        opened.unwrap_err().to_string()
    };
    let offline = open("HF_HUB_OFFLINE", "1");
    assert!(offline.starts_with("cannot open hf://datasets/org/name: HF_HUB_OFFLINE forbids"), "{offline}");
    assert!(offline.contains("hf download --repo-type dataset --local-dir FOLDER org/name"), "{offline}");
    assert!(open("HF_ENDPOINT", "https://me:SECRET@h").contains("HF_ENDPOINT: must not hold a user"));
    assert!(open("SSL_CERT_FILE", "/nonexistent.pem").contains("/nonexistent.pem cannot be used"));
    let opened = open_at(&hub, "hf://datasets/org/name");
    let error = opened.store.put(&file(), PutPayload::from("x")).await.unwrap_err();
    assert_eq!(explain_cause(&error, "p"), "the store cannot do this");
    assert_eq!(hub.count(), 0);
}
