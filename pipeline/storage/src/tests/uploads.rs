//! Tests of unfinished uploads, conditional completions, and signatures.

use object_store::ObjectStoreExt;
use object_store::multipart::PartId;
use object_store::path::Path;
use stillhouse_schemas::storage::Storage;

use super::fake_store::{Answer, FakeStore, xml};
use super::{environment, key, open, options, url};
use crate::{Environment, Storages, explain};

fn page(uploads: &[(&str, &str)], next: Option<(&str, &str)>) -> Answer {
    let uploads: String = uploads
        .iter()
        .map(|(key, id)| {
            format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId><Initiated>2026-01-02T03:04:05.000Z</Initiated></Upload>")
        })
        .collect();
    let next = next.map_or("<IsTruncated>false</IsTruncated>".into(), |(key, id)| {
        format!("<IsTruncated>true</IsTruncated><NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>{id}</NextUploadIdMarker>")
    });
    Answer::Status(
        200,
        "",
        format!("<ListMultipartUploadsResult><Bucket>b</Bucket>{uploads}{next}</ListMultipartUploadsResult>"),
    )
}

#[tokio::test]
async fn uploads_are_listed_page_by_page() {
    let server = FakeStore::new([
        Answer::Status(503, "", xml("SlowDown")),
        page(&[("a b/x&amp;y", "1"), ("a bc/z", "2")], Some(("a b/x&amp;y", "1"))),
        page(&[("/a b/z", "3")], None),
    ]);
    let found = open(&server).uploads.unwrap().list(&Path::from("a b")).await.unwrap();
    let found: Vec<_> = found.iter().map(|u| (u.path.as_ref(), u.id.as_str())).collect();
    assert_eq!(found, [("a b/x&y", "1"), ("a b/z", "3")], "and not what only begins alike");
    let requests = server.requests();
    assert_eq!(requests[1].path, "/b?uploads&prefix=a%20b%2F&max-uploads=1000");
    assert!(requests[2].path.ends_with("&key-marker=a%20b%2Fx%26y&upload-id-marker=1"), "{}", requests[2].path);
    assert!(requests[0].headers["authorization"].starts_with("AWS4-HMAC-SHA256 Credential=AKPLANTED"));
}

#[tokio::test]
async fn a_completion_can_be_conditional() {
    let begun = "<InitiateMultipartUploadResult><UploadId>u/1</UploadId></InitiateMultipartUploadResult>";
    let done = "<CompleteMultipartUploadResult><ETag>&quot;e-2&quot;</ETag></CompleteMultipartUploadResult>";
    let server = FakeStore::new([Answer::Status(200, "", begun.into()), Answer::Status(200, "", done.into())]);
    let uploads = open(&server).uploads.unwrap();
    let id = uploads.create(&key(), &[("sha256", "abc")]).await.unwrap();
    let parts = ["\"1\"", "\"2\""].map(|tag| PartId { content_id: tag.into() });
    assert_eq!(uploads.complete_if_absent(&key(), &id, &parts).await.unwrap().as_deref(), Some("\"e-2\""));
    let [first, second] = &server.requests()[..] else { panic!() };
    assert_eq!((first.path.as_str(), first.headers["x-amz-meta-sha256"].as_str()), ("/b/folder/k?uploads", "abc"));
    assert_eq!((second.path.as_str(), second.headers["if-none-match"].as_str()), ("/b/folder/k?uploadId=u%2F1", "*"));
    let body = String::from_utf8_lossy(&second.body);
    // encoded as strictly as the signature requires
    let _ = uploads.create(&Path::from("a+b c"), &[]).await;
    assert_eq!(server.requests()[2].path, "/b/a%2Bb%20c?uploads");
    assert!(body.contains("<Part><PartNumber>2</PartNumber><ETag>&quot;2&quot;</ETag></Part>"), "{body}");
}

#[tokio::test]
async fn anonymous_requests_are_not_signed() {
    let server = FakeStore::new([page(&[], None)]);
    let options = Storage { anonymous: Some(true), ..options(&server.url) };
    let opened = Storages::with_environment(environment()).open(&url("s3://b"), &options).unwrap();
    opened.uploads.unwrap().list(&Path::default()).await.unwrap();
    opened.store.get(&key()).await.unwrap();
    assert!(server.requests().iter().all(|r| !r.headers.contains_key("authorization")));
}

#[tokio::test]
async fn google_is_asked_with_a_bearer_token() {
    let server = FakeStore::new([page(&[("a/x", "1")], None)]);
    let key = format!(
        r#"{{"gcs_base_url": "{}", "disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}}"#,
        server.url
    );
    let variables = [("GOOGLE_SERVICE_ACCOUNT_KEY", key.as_str()), ("GOOGLE_BASE_URL", &server.url)];
    let opened =
        Storages::with_environment(Environment::from_iter(variables)).open(&url("gs://b"), &options("http://x"));
    let found = opened.unwrap().uploads.unwrap().list(&Path::from("a")).await.unwrap();
    assert_eq!((found.len(), server.requests()[0].path.as_str()), (1, "/b?uploads&prefix=a%2F&max-uploads=1000"));
}

#[tokio::test]
async fn options_go_before_the_environment_and_that_before_the_profile() {
    let home = tempfile::tempdir().unwrap();
    let server = FakeStore::new([]);
    std::fs::create_dir(home.path().join(".aws")).unwrap();
    let config = format!("[default]\nregion = profile\nendpoint_url = {}\n", server.url);
    std::fs::write(home.path().join(".aws/config"), config).unwrap();
    let keys = "[default]\naws_access_key_id = PROFILEKEY\naws_secret_access_key = s\n";
    std::fs::write(home.path().join(".aws/credentials"), keys).unwrap();
    let home = home.path().to_str().unwrap();
    let scope = |variables: Vec<(&'static str, String)>, storage: Storage| {
        let server = server.clone();
        async move {
            let environment = Environment::from_iter(variables.into_iter().chain([("HOME", home.to_owned())]));
            let opened = Storages::with_environment(environment).open(&url("s3://b"), &storage).unwrap();
            opened.store.get(&key()).await.unwrap();
            let authorization = server.requests().pop().unwrap().headers["authorization"].clone();
            let parts: Vec<_> = authorization.split(['=', '/']).map(str::to_owned).collect();
            (parts[1].clone(), parts[3].clone())
        }
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(scope(vec![], Storage::default()).await, pair("PROFILEKEY", "profile"));
    let variables = vec![
        ("AWS_ACCESS_KEY_ID", "ENVKEY".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "s".to_owned()),
        ("AWS_REGION", "env".to_owned()),
    ];
    assert_eq!(scope(variables.clone(), Storage::default()).await, pair("ENVKEY", "env"));
    let mut wrong = variables;
    wrong.push(("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1".to_owned()));
    let storage = Storage { endpoint: Some(server.url.clone()), region: Some("job".into()), ..Storage::default() };
    assert_eq!(scope(wrong, storage).await, pair("ENVKEY", "job"));
}

#[tokio::test]
async fn no_credentials_at_all_says_where_they_could_be() {
    let variables = [("AWS_EC2_METADATA_DISABLED", "true"), ("HOME", "/nonexistent")];
    let storages = Storages::with_environment(Environment::from_iter(variables));
    let opened = storages.open(&url("s3://b"), &options("http://127.0.0.1:1")).unwrap();
    let error = opened.store.get(&key()).await.unwrap_err();
    let said = explain(&error, "read", "s3://b");
    assert!(
        said.contains("AWS_ACCESS_KEY_ID") && said.contains("~/.aws") && said.contains("anonymous: true"),
        "{said}"
    );
    assert_eq!(opened.statistics.requests(), 0);

    // a cloud machine has a metadata service at this address; this machine has none
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let service = format!("http://{nobody}");
    let variables = [("AWS_METADATA_ENDPOINT", service.as_str()), ("HOME", "/nonexistent")];
    let storages = Storages::with_environment(Environment::from_iter(variables));
    let opened = storages.open(&url("s3://b"), &options("http://127.0.0.1:1")).unwrap();
    let said = explain(&opened.store.get(&key()).await.unwrap_err(), "read", "s3://b");
    assert!(said.contains("gave no credentials: the connection is refused"), "{said}");
    assert_eq!(opened.statistics.requests(), 3);
}
