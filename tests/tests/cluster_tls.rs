//! Tests TLS to the scheduler: clients that trust its issuer are served, and clients reject every other certificate.

use std::path::{Path, PathBuf};
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use serde_json::{Value, json};
use stillhouse_tests::server::{Ports, Server};
use stillhouse_tests::{Scratch, ran, with};

use crate::cluster::{alone, assert_finished, command, said, scratch, small_job};
use crate::stores::packing_job;

const CA_FILE: &str = "STILLHOUSE_CLUSTER_CA_FILE";

/// A certificate authority.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// The authority's own certificate.
    file: PathBuf,
}

/// Certificate and key files of a scheduler.
struct Signed {
    certificate: PathBuf,
    key: PathBuf,
}

impl Authority {
    fn new(scratch: &Scratch, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let file = scratch.write(&format!("{name}.pem"), &params.self_signed(&key).unwrap().pem());
        Self { issuer: Issuer::new(params, key), file }
    }

    fn signs(&self, scratch: &Scratch, host: &str, until_year: i32) -> Signed {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.not_after = date_time_ymd(until_year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let signed = params.signed_by(&key, &self.issuer).unwrap();
        let name = format!("{host}-{until_year}");
        Signed {
            certificate: scratch.write(&format!("{name}.pem"), &signed.pem()),
            key: scratch.write(&format!("{name}.key"), &key.serialize_pem()),
        }
    }
}

const LONG: i32 = 2200;

fn scheduler(scratch: &Scratch, listen: &str, shows: Option<&Signed>) -> Command {
    let mut command = command(scratch, &["scheduler", "--listen", listen, "--dead-after", "8"]);
    if let Some(Signed { certificate, key }) = shows {
        command.arg("--tls-certificate").arg(certificate).arg("--tls-key").arg(key);
    }
    command
}

fn listening(scratch: &Scratch, listen: &str, shows: Option<&Signed>) -> Server {
    let log = scratch.path("scheduler.log");
    let _ = std::fs::remove_file(&log);
    let mut server = Server::start(scheduler(scratch, listen, shows), &log);
    let scheme = if shows.is_some() { "https://" } else { "" };
    let says = format!("the scheduler listens on {scheme}{listen}");
    server.wait_until("scheduler", || said(&log).contains(&says));
    server
}

fn believing(mut command: Command, file: Option<&Path>) -> Command {
    match file {
        Some(file) => command.env(CA_FILE, file),
        None => command.env_remove(CA_FILE),
    };
    command
}

fn on(job: &Value, scheduler: &str, output: &str) -> Value {
    with(job.clone(), &json!({"engine": {"kind": "ballista", "scheduler": scheduler}, "output": {"path": output}}))
}

#[test]
fn a_cluster_that_speaks_tls_makes_the_bytes_of_one_machine() {
    let scratch = scratch();
    let expected = alone(&scratch, &small_job());
    let authority = Authority::new(&scratch, "authority");
    let ports = Ports::take();
    // listens on a public address without `--trusted-network`
    let listen = format!("0.0.0.0:{}", ports.port(0));
    let _scheduler = listening(&scratch, &listen, Some(&authority.signs(&scratch, "localhost", LONG)));
    let address = format!("https://localhost:{}", ports.port(0));
    let log = scratch.path("executor.log");
    let executor = command(&scratch, &["executor", "--scheduler", &address, "--slots", "2", "--threads", "2"]);
    let mut executor = Server::start(believing(executor, Some(&authority.file)), &log);
    executor.wait_until("executor", || said(&log).contains("for splits"));
    scratch.job("cluster.yaml", &on(&small_job(), &address, "on"));
    ran(&mut believing(command(&scratch, &["run", "cluster.yaml"]), Some(&authority.file))).expect(0);
    assert_finished(&scratch.path("on"), &expected);
}

#[test]
fn a_scheduler_that_cannot_be_believed_is_not_told_who_calls() {
    let scratch = Scratch::with_corpus(3, 600);
    let (authority, other) = (Authority::new(&scratch, "authority"), Authority::new(&scratch, "other"));
    let ports = Ports::take();
    let at = |port: u16| format!("127.0.0.1:{}", ports.port(port));
    let calls = |address: &str, believes: Option<&Path>, code: i32, says: &[&str]| {
        scratch.job("cluster.yaml", &on(&packing_job(), address, "out"));
        for arguments in [&["run", "cluster.yaml"][..], &["executor", "--wait", "1", "--scheduler", address]] {
            ran(&mut believing(command(&scratch, arguments), believes)).expect(code).says(says);
        }
        assert!(!scratch.path("out").exists());
    };
    let good = authority.signs(&scratch, "127.0.0.1", LONG);
    let believed = Some(authority.file.as_path());
    let https = |port: u16| format!("https://{}", at(port));
    let distrusted = ["is not to be believed", "--tls-certificate", CA_FILE];

    let _good = listening(&scratch, &at(0), Some(&good));
    // neither the system's authorities nor another authority has signed the certificate
    calls(&https(0), None, 2, &[&distrusted[..], &["UnknownIssuer"]].concat());
    calls(&https(0), Some(&other.file), 2, &[&distrusted[..], &["BadSignature"]].concat());
    calls(&at(0), believed, 1, &["valid: https://host:port where it speaks TLS"]);
    let named = listening(&scratch, &at(1), Some(&authority.signs(&scratch, "elsewhere.example", LONG)));
    calls(&https(1), believed, 2, &[&distrusted[..], &["127.0.0.1", "elsewhere.example"]].concat());
    drop(named);
    let _expired = listening(&scratch, &at(2), Some(&authority.signs(&scratch, "127.0.0.1", 2000)));
    calls(&https(2), believed, 2, &[&distrusted[..], &["expired"]].concat());
    let _plain = listening(&scratch, &at(3), None);
    calls(&https(3), believed, 2, &[&distrusted[..], &["InvalidContentType"]].concat());

    // Errors name the variable, not the CA file's path, because a service's users read them.
    let empty = scratch.write("empty.pem", "");
    for file in [&empty, &scratch.path("none.pem")] {
        scratch.job("cluster.yaml", &on(&packing_job(), &https(0), "out"));
        let ended = ran(&mut believing(command(&scratch, &["run", "cluster.yaml"]), Some(file)));
        let told = ended.expect(2).says(&["the file of STILLHOUSE_CLUSTER_CA_FILE"]).stderr;
        assert!(!told.contains(&*file.to_string_lossy()), "{told}");
    }
}

#[test]
fn a_scheduler_is_started_with_a_certificate_and_its_own_key_or_not_at_all() {
    let scratch = Scratch::with_corpus(1, 100);
    let authority = Authority::new(&scratch, "authority");
    let (one, another) = (authority.signs(&scratch, "a.example", LONG), authority.signs(&scratch, "b.example", LONG));
    let mixed = Signed { certificate: one.certificate.clone(), key: another.key };
    let missing = Signed { certificate: scratch.path("none.pem"), key: one.key.clone() };
    for (files, says) in [(&mixed, "valid: a certificate and its own key"), (&missing, "none.pem: cannot be read")] {
        let refused = ran(&mut scheduler(&scratch, "127.0.0.1:0", Some(files)));
        refused.expect(2).says(&["--tls-certificate ", says]);
    }
    let mut half = command(&scratch, &["scheduler", "--tls-certificate"]);
    ran(half.arg(&one.certificate)).expect(2).says(&["--tls-key"]);
}
