//! A real S3: SeaweedFS on this machine, with conditional writes, multipart uploads and rights, that can be killed.
//!
//! ```text
//!   Seaweed::start ─► weed server (master, volume, filer, s3) on 127.0.0.1, data in a temp folder
//!        │ kill, restart: same ports, same data            └► dies with the test, however that ends
//!        ├─ create_bucket ─► a bucket that takes writes at once
//!        └─ environment, read_only_environment ─► the AWS_* variables of a command
//! ```
//!
//! What it costs: 3 to 4 s to start, 1 to 2 s for the first write to a bucket, 3 s to restart, 120 to 300 MB of memory.
//! Under nextest every test is a process and starts its own, so an object-store test is one journey with many
//! assertions rather than many tests. Tests that need no conditional writes and no rights start
//! [`Rclone`](crate::rclone::Rclone) instead, in a tenth of a second.
//!
//! What it does not do as S3 does (4.48): it does not compare the body with `x-amz-content-sha256`; a second
//! `CompleteMultipartUpload` of an upload that is complete answers 200 as long as the object is there; a full disk is
//! 500 `InternalError`.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard};

use serde_json::json;
use tempfile::TempDir;

use crate::network::Host;
use crate::s3::{ADMIN, Keys, READER, S3, environment};
use crate::server::{Ports, Server, tool};

/// The server. Everything takes `&self`, so that one thread can kill it under another.
pub struct Seaweed {
    /// `None` after a kill. Declared first: the process goes before its folder does.
    server: Mutex<Option<Server>>,
    folder: TempDir,
    ports: Ports,
    buckets: Mutex<Vec<String>>,
    endpoint: String,
    /// Where it runs, if not on this machine's own network.
    host: Option<Host>,
}

impl Seaweed {
    /// Starts one and waits until it answers.
    pub fn start() -> Self {
        Self::begin(&std::env::temp_dir(), None)
    }

    /// The same, with its data in a folder below this one: on a small file system, to see a full disk.
    pub fn start_in(folder: &Path) -> Self {
        Self::begin(folder, None)
    }

    /// The same, in a host of its own. [`Seaweed::s3`] asks it from there, also while that one is cut off.
    pub fn start_on(host: &Host) -> Self {
        Self::begin(&std::env::temp_dir(), Some(host.clone()))
    }

    fn begin(folder: &Path, host: Option<Host>) -> Self {
        let folder = tempfile::Builder::new().prefix("seaweed-").tempdir_in(folder).unwrap();
        let ports = Ports::take();
        let identity = |name: &str, keys: Keys, actions: &[&str]| {
            let credentials = [json!({"accessKey": keys.access, "secretKey": keys.secret})];
            json!({"name": name, "credentials": credentials, "actions": actions})
        };
        let identities = json!({"identities": [
            identity("admin", ADMIN, &["Admin", "Read", "Write", "List", "Tagging"]),
            identity("reader", READER, &["Read", "List"]),
        ]});
        fs::write(folder.path().join("s3.json"), identities.to_string()).unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        let address = host.as_ref().map_or(Ipv4Addr::LOCALHOST, Host::address);
        let endpoint = format!("http://{address}:{}", ports.port(0));
        let server = Mutex::new(None);
        let this = Self { server, folder, ports, buckets: Mutex::default(), endpoint, host };
        this.launch();
        this
    }

    fn command(&self) -> Command {
        let mut command = Command::new(tool("weed"));
        let address = self.host.as_ref().map_or(Ipv4Addr::LOCALHOST, Host::address);
        command.current_dir(self.folder.path()).arg("server");
        command.arg(format!("-ip={address}")).arg(format!("-ip.bind={address}"));
        command.args([
            "-dir=data",
            "-s3",
            "-s3.config=s3.json",
            // As S3: a bucket that is not there is an error.
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.iam=false",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=256",
            // A master that finds its old state waits for that long before it elects itself.
            "-master.electionTimeout=300ms",
            "-master.heartbeatInterval=100ms",
            // Every bucket has volumes of its own; files that grow, so many cost nothing.
            "-volume.max=200",
            "-volume.preStopSeconds=0",
        ]);
        let names = ["s3", "master", "volume", "filer"];
        for (name, n) in names.into_iter().zip(0..) {
            command.arg(format!("-{name}.port={}", self.ports.port(n)));
            command.arg(format!("-{name}.port.grpc={}", self.ports.port(n + 4)));
        }
        // One new volume at a time rather than seven.
        command.env("WEED_MASTER_VOLUME_GROWTH_COPY_1", "1");
        if let Some(host) = &self.host {
            host.puts(&mut command);
        }
        command
    }

    fn launch(&self) {
        let mut server = Server::start(self.command(), &self.folder.path().join("log"));
        let s3 = self.s3();
        server.wait_until("SeaweedFS", || s3.request("GET", "/", &[], b"").is_ok_and(|a| a.status == 200));
        for bucket in self.buckets.lock().unwrap().iter() {
            warm(&mut server, &s3, bucket);
        }
        *self.server() = Some(server);
    }

    fn server(&self) -> MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap()
    }

    /// `http://127.0.0.1:port`, or with the address of its host.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// A client that may do everything.
    pub fn s3(&self) -> S3 {
        let s3 = S3::new(&self.endpoint, ADMIN);
        match &self.host {
            Some(host) => s3.from_host(host),
            None => s3,
        }
    }

    /// Makes a bucket and waits until it takes writes (with an object `.ready`, gone again).
    pub fn create_bucket(&self, name: &str) {
        let s3 = self.s3();
        s3.create_bucket(name);
        warm(self.server().as_mut().expect("it runs"), &s3, name);
        self.buckets.lock().unwrap().push(name.to_owned());
    }

    /// What a user who may do everything sets; `AWS_ENDPOINT_URL` may be set to a proxy's afterwards.
    pub fn environment(&self, command: &mut Command) {
        environment(command, &self.endpoint, ADMIN);
    }

    /// What a user sets who may read and list only.
    pub fn read_only_environment(&self, command: &mut Command) {
        environment(command, &self.endpoint, READER);
    }

    /// SIGKILL; nothing listens until [`Seaweed::restart`]. What it had acknowledged is kept.
    pub fn kill(&self) {
        drop(self.server().take());
    }

    /// Starts it again, on the same ports and data, and waits until every bucket of
    /// [`Seaweed::create_bucket`] takes writes.
    pub fn restart(&self) {
        self.kill();
        self.launch();
    }
}

impl Drop for Seaweed {
    fn drop(&mut self) {
        self.kill();
        // Sockets that it leaves behind, whatever its folder is; the ports are ours until this is over.
        for (name, n) in ["s3", "master", "volume", "filer"].into_iter().zip(0..) {
            let _ = fs::remove_file(format!("/tmp/seaweedfs-{name}-{}.sock", self.ports.port(n)));
            let _ = fs::remove_file(format!("/tmp/seaweedfs-{name}-grpc-{}.sock", self.ports.port(n + 4)));
        }
    }
}

/// Waits until a bucket takes writes and gives them back: the first one makes it a volume.
fn warm(server: &mut Server, s3: &S3, bucket: &str) {
    let target = format!("/{bucket}/.ready");
    let is = |method: &str, status: u16| s3.request(method, &target, &[], b"").is_ok_and(|a| a.status == status);
    let body = b"a body, for an empty object needs no volume";
    let put = || s3.request("PUT", &target, &[], body).is_ok_and(|a| a.status == 200);
    server.wait_until(bucket, || put() && is("GET", 200) && is("DELETE", 204));
}

#[cfg(test)]
mod tests;
