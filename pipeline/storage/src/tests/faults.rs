//! Which failures are retried, and how often.

use bytes::Bytes;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use stillhouse_schemas::storage::Storage;

use super::fake_store::{Answer, BODY, FakeStore, xml};
use super::{key, open, options, url};
use crate::{Opened, Storages, explain, explain_cause, find_transport_error, is_retryable};

fn status(status: u16, code: &str) -> Answer {
    Answer::Status(status, "", if code.is_empty() { String::new() } else { xml(code) })
}

/// A 503 response with a `Retry-After` header.
fn slow_down(header: &'static str) -> Answer {
    Answer::Status(503, header, xml("SlowDown"))
}

async fn get(opened: &Opened) -> object_store::Result<Bytes> {
    opened.store.get(&key()).await?.bytes().await
}

async fn create(opened: &Opened) -> object_store::Result<()> {
    opened.store.put_opts(&key(), PutPayload::from("body"), PutMode::Create.into()).await.map(|_| ())
}

#[tokio::test]
async fn what_passes_is_tried_again() {
    let faults = [
        status(500, "InternalError"),
        status(503, "SlowDown"),
        status(502, ""),
        status(429, ""),
        status(408, ""),
        status(400, "RequestTimeout"),
        status(409, "OperationAborted"),
        Answer::Reset,
        Answer::Truncated,
        slow_down("retry-after: 0"),
        slow_down("retry-after: Fri, 31 Dec 1999 23:59:59 GMT"),
    ];
    for fault in faults {
        let server = FakeStore::new([fault.clone()]);
        let opened = open(&server);
        assert_eq!(get(&opened).await.unwrap(), BODY, "{fault:?}");
        assert_eq!((server.count(), opened.statistics.retries()), (2, 1), "{fault:?}");
    }
}

#[tokio::test]
async fn writes_are_sent_again_with_the_same_body() {
    let server = FakeStore::new([status(503, "SlowDown"), Answer::Reset, status(409, "ConditionalRequestConflict")]);
    let opened = open(&server);
    create(&opened).await.unwrap();
    let requests = server.requests();
    assert_eq!(requests.len(), 4);
    assert!(requests.iter().all(|r| r.method == "PUT" && r.body == b"body" && r.headers["if-none-match"] == "*"));
    assert_eq!((opened.statistics.requests(), opened.statistics.bytes_up()), (4, 16));
}

#[tokio::test]
async fn a_timeout_is_tried_again() {
    let server = FakeStore::new([Answer::Silence]);
    let mut options = options(&server.url);
    options.retry.as_mut().unwrap().request_timeout_seconds = Some(1);
    let opened = Storages::with_environment(super::environment()).open(&url("s3://b"), &options).unwrap();
    assert_eq!(get(&opened).await.unwrap(), BODY);
    assert_eq!(server.count(), 2);
}

#[tokio::test]
async fn what_stays_ends_after_one_request() {
    for (answer, text) in [
        (
            status(403, "AccessDenied"),
            "403 AccessDenied: the credentials may not do this; check that the policy allows s3:GetObject on b",
        ),
        (status(403, "InvalidAccessKeyId"), "has no such access key"),
        (status(403, "SignatureDoesNotMatch"), "AWS_SECRET_ACCESS_KEY"),
        (status(403, "RequestTimeTooSkewed"), "clock"),
        (status(400, "ExpiredToken"), "expired"),
        (status(404, "NoSuchBucket"), "bucket b does not exist at http://127.0.0.1:"),
        (status(400, "InvalidRequest"), "400 InvalidRequest: m"),
        (status(401, ""), "401 Unauthorized"),
        (status(501, "NotImplemented"), "the store cannot do this"),
        (status(507, ""), "full"),
        (Answer::Status(301, "x-amz-bucket-region: eu-x", xml("PermanentRedirect")), "AWS_REGION=eu-x"),
    ] {
        let server = FakeStore::new([answer]);
        let error = get(&open(&server)).await.unwrap_err();
        let said = explain(&error, "read", "s3://b/folder/k");
        assert!(said.starts_with("cannot read s3://b/folder/k: ") && said.contains(text), "{said}");
        assert_eq!(said, format!("cannot read s3://b/folder/k: {}", explain_cause(&error, "s3://b/folder/k")));
        assert!(!said.contains('<') && !is_retryable(&error), "{said}");
        assert_eq!(server.count(), 1, "{said}");
    }
}

#[tokio::test]
async fn answers_about_the_object_are_passed_on() {
    let one = |answer| async move {
        let server = FakeStore::new([answer]);
        let opened = open(&server);
        let result = (create(&opened).await, server.count());
        assert_eq!(result.1, 1);
        result.0.unwrap_err()
    };
    assert!(matches!(one(status(412, "PreconditionFailed")).await, Error::AlreadyExists { .. }));
    assert!(matches!(one(status(409, "BucketNotEmpty")).await, Error::AlreadyExists { .. }));
    let server = FakeStore::new([status(404, "NoSuchKey"), status(404, "")]);
    let opened = open(&server);
    let error = get(&opened).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }) && !error.to_string().contains('<'), "{error}");
    assert!(matches!(opened.store.head(&key()).await, Err(Error::NotFound { .. })));
}

#[tokio::test]
async fn answers_without_a_body_are_whole() {
    let server =
        FakeStore::new([Answer::Status(200, "etag: \"e\"", BODY.into()), Answer::Status(204, "", String::new())]);
    let opened = open(&server);
    assert_eq!(opened.store.head(&key()).await.unwrap().size, BODY.len() as u64);
    opened.multipart.as_ref().unwrap().abort_multipart(&key(), &"id".into()).await.unwrap();
    assert_eq!(server.count(), 2);
}

#[tokio::test]
async fn errors_inside_a_good_answer_are_errors() {
    let done = "<CompleteMultipartUploadResult><ETag>\"e\"</ETag></CompleteMultipartUploadResult>";
    let parts = || vec![object_store::multipart::PartId { content_id: "\"e\"".into() }];
    let server =
        FakeStore::new([status(200, "InternalError"), status(200, "SlowDown"), Answer::Status(200, "", done.into())]);
    let multipart = open(&server).multipart.unwrap();
    multipart.complete_multipart(&key(), &"id".into(), parts()).await.unwrap();
    assert_eq!(server.count(), 3);

    let server = FakeStore::new([status(200, "AccessDenied"), status(200, "NoSuchUpload")]);
    let multipart = open(&server).multipart.unwrap();
    let denied = multipart.complete_multipart(&key(), &"id".into(), parts()).await.unwrap_err();
    assert!(explain(&denied, "write", "s3://b").contains("s3:PutObject and s3:AbortMultipartUpload on b"));
    let gone = multipart.complete_multipart(&key(), &"id".into(), parts()).await.unwrap_err();
    assert!(matches!(gone, Error::NotFound { .. }), "{gone}");
    assert_eq!(server.count(), 2);
}

#[tokio::test]
async fn a_conflicting_completion_ends_at_once_but_can_begin_anew() {
    let server = FakeStore::new([status(409, "ConditionalRequestConflict")]);
    let uploads = open(&server).uploads.unwrap();
    let error = uploads.complete_if_absent(&key(), "id", &[]).await.unwrap_err();
    assert!(is_retryable(&error) && !matches!(error, Error::AlreadyExists { .. }), "{error}");
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn truncated_bodies_never_arrive() {
    let server = FakeStore::new(vec![Answer::Truncated; 10]);
    let opened = open(&server);
    let error = get(&opened).await.unwrap_err();
    assert_eq!((server.count(), opened.statistics.bytes_down()), (5, 0));
    assert!(is_retryable(&error));
    assert!(explain(&error, "read", "s3://b/folder/k").ends_with(" s)"), "{error}");
}

#[tokio::test]
async fn the_limits_hold() {
    let server = FakeStore::new(vec![status(503, "SlowDown"); 20]);
    let error = get(&open(&server)).await.unwrap_err();
    let text = find_transport_error(&error).unwrap().to_string();
    assert!(text.starts_with("GET s3://b/folder/k: 503 SlowDown: m (gave up after 5 attempts in "), "{text}");
    assert_eq!(server.count(), 5);

    // longer than the limit of 30 seconds, so waiting would be pointless
    for header in ["retry-after: 3600", "retry-after: 18446744073709551615"] {
        let server = FakeStore::new([slow_down(header)]);
        assert!(is_retryable(&get(&open(&server)).await.unwrap_err()));
        assert_eq!(server.count(), 1);
    }
}

#[tokio::test]
async fn a_wrong_host_ends_soon_and_a_lost_one_does_not() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let storages = Storages::with_environment(super::environment());
    let opened = storages.open(&url("s3://b"), &options(&format!("http://{nobody}"))).unwrap();
    let error = get(&opened).await.unwrap_err();
    assert_eq!(opened.statistics.requests(), 3);
    assert!(explain(&error, "read", "s3://b/k").contains(&format!("no service listens at http://{nobody}; check")));

    let server = FakeStore::new([Answer::Last]);
    let opened = open(&server);
    get(&opened).await.unwrap();
    while std::net::TcpStream::connect(server.url.trim_start_matches("http://")).is_ok() {}
    assert!(is_retryable(&get(&opened).await.unwrap_err()));
    assert_eq!(opened.statistics.requests(), 1 + 5);
}

#[tokio::test]
async fn a_store_is_opened_once() {
    let storages = Storages::with_environment(super::environment());
    let options = options("http://127.0.0.1:1");
    let same = |a: &Opened, b: &Opened| std::sync::Arc::ptr_eq(&a.store, &b.store);
    let first = storages.open(&url("s3://b/x"), &options).unwrap();
    assert!(same(&first, &storages.open(&url("s3://b/y"), &options).unwrap()));
    assert!(!same(&first, &storages.open(&url("s3://c"), &options).unwrap()));
    assert!(!same(&first, &storages.open(&url("s3://b"), &Storage { anonymous: Some(true), ..options }).unwrap()));
}

#[tokio::test]
async fn a_web_server_is_read() {
    let server = FakeStore::new([status(503, "")]);
    let opened = Storages::with_environment(super::environment());
    let opened = opened.open(&url(&server.url), &options("http://unused")).unwrap();
    assert_eq!(get(&opened).await.unwrap(), BODY);
    let [first, _] = &server.requests()[..] else { panic!() };
    assert_eq!(first.path, "/folder/k");
    assert!(opened.multipart.is_none() && !first.headers.contains_key("authorization"));
}
