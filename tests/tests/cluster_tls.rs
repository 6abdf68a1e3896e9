//! Tests TLS to the scheduler: clients that trust its issuer are served, and clients reject every other certificate.

use std::path::{Path, PathBuf};
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use serde_json::{Value, json};
use stillhouse_tests::server::{Ports, Server};
use stillhouse_tests::{Scratch, run_command, with};

use crate::cluster::{assert_finished, command, read_log, scratch, single_machine_shards, small_job};
use crate::stores::packing_job;

const CA_FILE: &str = "STILLHOUSE_CLUSTER_CA_FILE";

/// A certificate authority.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// The authority's own certificate.
    file: PathBuf,
}

/// Certificate and key files of a scheduler.
struct CertificateFiles {
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

    fn signs(&self, scratch: &Scratch, host: &str, until_year: i32) -> CertificateFiles {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.not_after = date_time_ymd(until_year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let signed = params.signed_by(&key, &self.issuer).unwrap();
        let name = format!("{host}-{until_year}");
        CertificateFiles {
            certificate: scratch.write(&format!("{name}.pem"), &signed.pem()),
            key: scratch.write(&format!("{name}.key"), &key.serialize_pem()),
        }
    }
}

const FAR_YEAR: i32 = 2200;

fn scheduler(scratch: &Scratch, listen: &str, shows: Option<&CertificateFiles>) -> Command {
    let mut command = command(scratch, &["scheduler", "--listen", listen, "--dead-after", "8"]);
    if let Some(CertificateFiles { certificate, key }) = shows {
        command.arg("--tls-certificate").arg(certificate).arg("--tls-key").arg(key);
    }
    command
}

fn start_scheduler(scratch: &Scratch, listen: &str, shows: Option<&CertificateFiles>) -> Server {
    let log = scratch.path("scheduler.log");
    let _ = std::fs::remove_file(&log);
    let mut server = Server::start(scheduler(scratch, listen, shows), &log);
    let scheme = if shows.is_some() { "https://" } else { "" };
    let says = format!("the scheduler listens on {scheme}{listen}");
    server.wait_until("scheduler", || read_log(&log).contains(&says));
    server
}

fn with_ca_file(mut command: Command, file: Option<&Path>) -> Command {
    match file {
        Some(file) => command.env(CA_FILE, file),
        None => command.env_remove(CA_FILE),
    };
    command
}

fn on_cluster(job: &Value, scheduler: &str, output: &str) -> Value {
    with(job.clone(), &json!({"engine": {"kind": "ballista", "scheduler": scheduler}, "output": {"path": output}}))
}

#[test]
fn a_cluster_that_speaks_tls_makes_the_bytes_of_one_machine() {
    let scratch = scratch();
    let expected = single_machine_shards(&scratch, &small_job());
    let authority = Authority::new(&scratch, "authority");
    let ports = Ports::reserve();
    // listens on a public address without `--trusted-network`
    let listen = format!("0.0.0.0:{}", ports.port(0));
    let _scheduler = start_scheduler(&scratch, &listen, Some(&authority.signs(&scratch, "localhost", FAR_YEAR)));
    let address = format!("https://localhost:{}", ports.port(0));
    let log = scratch.path("executor.log");
    let executor = command(&scratch, &["executor", "--scheduler", &address, "--slots", "2", "--threads", "2"]);
    let mut executor = Server::start(with_ca_file(executor, Some(&authority.file)), &log);
    executor.wait_until("executor", || read_log(&log).contains("for splits"));
    scratch.job("cluster.yaml", &on_cluster(&small_job(), &address, "on"));
    run_command(&mut with_ca_file(command(&scratch, &["run", "cluster.yaml"]), Some(&authority.file))).expect(0);
    assert_finished(&scratch.path("on"), &expected);
}

#[test]
fn a_scheduler_that_cannot_be_believed_is_not_told_who_calls() {
    let scratch = Scratch::with_corpus(3, 600);
    let (authority, other) = (Authority::new(&scratch, "authority"), Authority::new(&scratch, "other"));
    let ports = Ports::reserve();
    let at = |port: u16| format!("127.0.0.1:{}", ports.port(port));
    let calls = |address: &str, believes: Option<&Path>, code: i32, says: &[&str]| {
        scratch.job("cluster.yaml", &on_cluster(&packing_job(), address, "out"));
        for arguments in [&["run", "cluster.yaml"][..], &["executor", "--wait", "1", "--scheduler", address]] {
            run_command(&mut with_ca_file(command(&scratch, arguments), believes)).expect(code).says(says);
        }
        assert!(!scratch.path("out").exists());
    };
    let good = authority.signs(&scratch, "127.0.0.1", FAR_YEAR);
    let believed = Some(authority.file.as_path());
    let https = |port: u16| format!("https://{}", at(port));
    let distrusted = ["is not to be believed", "--tls-certificate", CA_FILE];

    let _good = start_scheduler(&scratch, &at(0), Some(&good));
    // neither the system's authorities nor another authority has signed the certificate
    calls(&https(0), None, 2, &[&distrusted[..], &["UnknownIssuer"]].concat());
    calls(&https(0), Some(&other.file), 2, &[&distrusted[..], &["BadSignature"]].concat());
    calls(&at(0), believed, 1, &["valid: https://host:port where it speaks TLS"]);
    let named = start_scheduler(&scratch, &at(1), Some(&authority.signs(&scratch, "elsewhere.example", FAR_YEAR)));
    calls(&https(1), believed, 2, &[&distrusted[..], &["127.0.0.1", "elsewhere.example"]].concat());
    drop(named);
    let _expired = start_scheduler(&scratch, &at(2), Some(&authority.signs(&scratch, "127.0.0.1", 2000)));
    calls(&https(2), believed, 2, &[&distrusted[..], &["expired"]].concat());
    let _plain = start_scheduler(&scratch, &at(3), None);
    calls(&https(3), believed, 2, &[&distrusted[..], &["InvalidContentType"]].concat());

    // Errors name the variable, not the CA file's path, because a service's users read them.
    let empty = scratch.write("empty.pem", "");
    for file in [&empty, &scratch.path("none.pem")] {
        scratch.job("cluster.yaml", &on_cluster(&packing_job(), &https(0), "out"));
        let ended = run_command(&mut with_ca_file(command(&scratch, &["run", "cluster.yaml"]), Some(file)));
        let told = ended.expect(2).says(&["the file of STILLHOUSE_CLUSTER_CA_FILE"]).stderr;
        assert!(!told.contains(&*file.to_string_lossy()), "{told}");
    }
}

#[test]
fn a_scheduler_is_started_with_a_certificate_and_its_own_key_or_not_at_all() {
    let scratch = Scratch::with_corpus(1, 100);
    let authority = Authority::new(&scratch, "authority");
    let (one, another) =
        (authority.signs(&scratch, "a.example", FAR_YEAR), authority.signs(&scratch, "b.example", FAR_YEAR));
    let mixed = CertificateFiles { certificate: one.certificate.clone(), key: another.key };
    let missing = CertificateFiles { certificate: scratch.path("none.pem"), key: one.key.clone() };
    for (files, says) in [(&mixed, "valid: a certificate and its own key"), (&missing, "none.pem: cannot be read")] {
        let refused = run_command(&mut scheduler(&scratch, "127.0.0.1:0", Some(files)));
        refused.expect(2).says(&["--tls-certificate ", says]);
    }
    let mut half = command(&scratch, &["scheduler", "--tls-certificate"]);
    run_command(half.arg(&one.certificate)).expect(2).says(&["--tls-key"]);
}
