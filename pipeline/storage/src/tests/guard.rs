//! Tests the guard over real sockets: 127.0.0.2 stands for the public internet, 127.0.0.1 for the private network.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use object_store::ObjectStoreExt;
use stillhouse_schemas::storage::Storage;

use super::fake_store::{Answer, BODY, FakeStore};
use super::{key, url};
use crate::addresses::is_public;
use crate::guard::Guard;
use crate::{Environment, Opened, Storages, explain, is_retryable};

const INSIDE: [u8; 4] = [127, 0, 0, 1];
const OUTSIDE: [u8; 4] = [127, 0, 0, 2];
const NOT_ALLOWED: &str = "the server's configuration does not allow http input from private addresses";

fn permits(address: IpAddr) -> bool {
    address == IpAddr::from(OUTSIDE) || is_public(address)
}

/// A guard with test names: `moving.test` resolves to the outside at the first lookup, and to the inside afterwards.
fn guard() -> Guard {
    let asked = Arc::new(AtomicUsize::new(0));
    let lookup = move |name: String| -> futures::future::BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let addresses: Vec<[u8; 4]> = match name.as_str() {
            "outside.test" => vec![OUTSIDE],
            "inside.test" | "0x7f.1" => vec![INSIDE],
            "both.test" => vec![INSIDE, OUTSIDE],
            "metadata.test" => vec![[169, 254, 169, 254]],
            "moving.test" if asked.fetch_add(1, Ordering::Relaxed) == 0 => vec![OUTSIDE],
            "moving.test" => vec![INSIDE],
            _ => return Box::pin(async { Err(io::Error::other("failed to lookup address information")) }),
        };
        Box::pin(async move { Ok(addresses.into_iter().map(|a| (Ipv4Addr::from(a), 0).into()).collect()) })
    };
    Guard::for_test(Arc::new(lookup), permits)
}

fn open(text: &str) -> Opened {
    let storages = Storages::with_environment(Environment::from_iter([("HOME", "/nonexistent")])).with_guard(guard());
    storages.open(&url(text), &Storage::default()).unwrap()
}

fn port(server: &FakeStore) -> &str {
    server.url.rsplit(':').next().unwrap()
}

async fn get(opened: &Opened) -> object_store::Result<Bytes> {
    opened.store.get(&key()).await?.bytes().await
}

/// Asserts that a request is sent once, refused permanently, and explained.
async fn refused(text: &str, why: &str) {
    let opened = open(text);
    let error = get(&opened).await.unwrap_err();
    assert!(!is_retryable(&error), "{text}: {error}");
    assert_eq!((opened.statistics.requests(), opened.statistics.retries()), (1, 0), "{text}");
    let reported = explain(&error, "read", text);
    assert!(reported.starts_with(&format!("cannot read {text}: http")) && reported.ends_with(why), "{reported}");
    assert!(!reported.contains('\n'), "{reported}");
}

fn redirect(status: u16, to: &str) -> Answer {
    let header: &'static str = Box::leak(format!("location: {to}").into_boxed_str());
    Answer::Status(status, header, String::new())
}

#[tokio::test]
async fn addresses_are_refused_before_anybody_is_asked() {
    let inside = FakeStore::new([]);
    for host in
        ["127.0.0.1", "127.1", "0x7f.1", "0177.0.0.1", "2130706433", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "0"]
    {
        refused(&format!("http://{host}:{}", port(&inside)), NOT_ALLOWED).await;
    }
    refused("http://169.254.169.254:80", NOT_ALLOWED).await;
    refused("https://[fd00:ec2::254]", NOT_ALLOWED).await;
    assert_eq!(inside.count(), 0);
}

#[tokio::test]
async fn names_that_lead_inside_are_refused() {
    let inside = FakeStore::new([]);
    refused(&format!("http://inside.test:{}", port(&inside)), NOT_ALLOWED).await;
    refused("http://metadata.test", NOT_ALLOWED).await;
    assert_eq!(inside.count(), 0);
}

#[tokio::test]
async fn public_names_are_asked_at_their_public_addresses() {
    let outside = FakeStore::at("127.0.0.2", []);
    for name in ["outside.test", "both.test"] {
        assert_eq!(get(&open(&format!("http://{name}:{}", port(&outside)))).await.unwrap(), BODY, "{name}");
    }
    assert_eq!(outside.count(), 2);
    let request = &outside.requests()[0];
    assert!(
        request.headers["user-agent"].starts_with("stillhouse/") && !request.headers.contains_key("accept-encoding")
    );
}

#[tokio::test]
async fn a_name_that_moves_inside_is_refused_then() {
    let outside = FakeStore::at("127.0.0.2", []);
    let opened = open(&format!("http://moving.test:{}", port(&outside)));
    assert_eq!(get(&opened).await.unwrap(), BODY);
    let error = get(&opened).await.unwrap_err();
    assert!(explain(&error, "read", "x").ends_with(NOT_ALLOWED), "{error}");
    assert_eq!(outside.count(), 1);
}

#[tokio::test]
async fn redirects_are_judged_as_well() {
    let inside = FakeStore::new([]);
    let at = port(&inside);
    for target in [
        format!("http://127.0.0.1:{at}/x"),
        format!("http://0x7f.1:{at}/x"),
        format!("http://2130706433:{at}/x"),
        format!("http://[::ffff:127.0.0.1]:{at}/x"),
        format!("http://inside.test:{at}/x"),
        format!("//127.0.0.1:{at}/x"),
        "http://169.254.169.254/latest/meta-data/".into(),
    ] {
        for status in [301, 302, 307, 308] {
            let outside = FakeStore::at("127.0.0.2", [redirect(status, &target)]);
            refused(&format!("http://outside.test:{}", port(&outside)), NOT_ALLOWED).await;
            assert_eq!(outside.count(), 1, "{target}");
        }
    }
    assert_eq!(inside.count(), 0);
}

#[tokio::test]
async fn redirects_within_the_public_internet_are_followed_ten_times() {
    let other = FakeStore::at("127.0.0.2", []);
    let there = format!("http://both.test:{}/there", port(&other));
    let outside = FakeStore::at("127.0.0.2", [redirect(302, &there)]);
    assert_eq!(get(&open(&format!("http://outside.test:{}", port(&outside)))).await.unwrap(), BODY);
    assert_eq!(other.requests()[0].path, "/there");

    let round = FakeStore::at("127.0.0.2", std::iter::repeat_n(redirect(302, "/folder/k"), 50));
    refused(&format!("http://outside.test:{}", port(&round)), "more than 10 redirects").await;
    assert_eq!(round.count(), 11);
}

#[test]
fn tls_is_not_left() {
    let guard = guard();
    // a redirect from https would need a server with a trusted certificate, so this calls the policy directly
    let https = ::url::Url::parse("https://outside.test/").unwrap();
    let http = ::url::Url::parse("http://outside.test/").unwrap();
    assert_eq!(guard.check_redirect(&http, std::slice::from_ref(&https)), Err(crate::guard::GuardError::Downgrade));
    assert_eq!(guard.check_redirect(&https, std::slice::from_ref(&http)), Ok(()));
    assert_eq!(guard.check_redirect(&http, &[https, http.clone()]), Ok(()));
}

#[tokio::test]
async fn a_name_that_nobody_knows_is_no_matter_of_the_guard() {
    let error = get(&open("http://nowhere.test")).await.unwrap_err();
    assert!(explain(&error, "read", "x").contains("no such host: http://nowhere.test"), "{error}");
}

#[tokio::test]
async fn without_a_guard_anybody_is_asked() {
    let inside = FakeStore::new([]);
    let storages = Storages::with_environment(Environment::from_iter([("HOME", "/nonexistent")]));
    let opened = storages.open(&url(&inside.url), &Storage::default()).unwrap();
    assert_eq!(get(&opened).await.unwrap(), BODY);
    assert_eq!((storages.requests().sent, storages.requests().retries), (1, 0));
}
