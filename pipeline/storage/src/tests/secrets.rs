//! A planted secret never appears in errors, logs or `Debug` output.

use std::io::Write;
use std::sync::{Arc, Mutex};

use object_store::{ObjectStoreExt, PutPayload};

use super::fake_store::{Answer, FakeStore};
use super::{SECRET, TOKEN, environment, key, options, url};
use crate::{Environment, Storages, explain};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A response that repeats the credentials of the request, as real stores do.
fn repeating(status: u16, code: &str) -> Answer {
    let body = format!(
        "<Error><Code>{code}</Code><Message>the token {TOKEN} of AKPLANTED0123456789 is no good</Message>\
         <Token-0>{TOKEN}</Token-0><StringToSign>{SECRET}</StringToSign></Error>"
    );
    Answer::Status(status, "", body)
}

#[tokio::test]
async fn a_planted_secret_shows_up_nowhere() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);

    let answers = [
        repeating(503, "SlowDown"),
        Answer::Reset,
        repeating(400, "ExpiredToken"),
        repeating(403, "AccessDenied"),
        repeating(404, "NoSuchKey"),
        repeating(412, "PreconditionFailed"),
    ];
    let server = FakeStore::new(answers);
    let storages = Storages::with_environment(environment());
    let options = options(&server.url);
    let opened = storages.open(&url("s3://b"), &options).unwrap();
    let mut printed = format!("{storages:?} {opened:?} {:?} {:?} {:?}", opened.store, opened.uploads, environment());
    for _ in 0..4 {
        let error = opened.store.put(&key(), PutPayload::from("x")).await.unwrap_err();
        printed += &format!("{error} {error:?} {}", explain(&error, "write", "s3://b/folder/k"));
    }
    assert_eq!(server.count(), 6);
    drop(guard);
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("trying again") && log.contains("SlowDown"), "{log}");
    for secret in [SECRET, TOKEN, "AKPLANTED", "Signature="] {
        assert!(!printed.contains(secret), "{secret} is printed: {printed}");
        assert!(!log.contains(secret), "{secret} is logged: {log}");
    }
}

#[test]
fn stores_that_print_their_keys_are_sealed() {
    let key = "UExBTlRFRFNFQ1JFVDAxMjM0NTY3ODk=";
    let bearer =
        format!(r#"{{"client_email": "e", "private_key": "{SECRET}", "private_key_id": "", "disable_oauth": true}}"#);
    let variables = [
        ("AZURE_STORAGE_ACCOUNT_NAME", "a"),
        ("AZURE_STORAGE_ACCOUNT_KEY", key),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", bearer.as_str()),
    ];
    let storages = Storages::with_environment(Environment::from_iter(variables));
    let printed = ["az://b", "gs://b"].map(|text| {
        let opened = storages.open(&url(text), &options("http://unused")).unwrap();
        format!("{opened:?} {:?}", opened.store)
    });
    assert_eq!(printed, ["Opened(az://b) az://b", "Opened(gs://b) gs://b"]);
}
