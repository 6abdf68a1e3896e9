//! A real S3 server: SeaweedFS on this machine, with conditional writes, multipart uploads and permissions. Tests can
//! kill it.
//!
//! ```text
//!   Seaweed::start ─► weed server (master, volume, filer, s3) on 127.0.0.1, data in a temp folder
//!        │ kill, restart: same ports, same data            └► ends with the test, even if that is killed
//!        ├─ create_bucket ─► a bucket that is immediately writable
//!        └─ environment, read_only_environment ─► the AWS_* variables of a command
//! ```
//!
//! Costs: 3 to 4 s to start, 1 to 2 s for the first write to a bucket, 3 s to restart, 120 to 300 MB of memory. Under
//! nextest every test is a process and starts its own server. An object-store test is therefore one scenario with many
//! assertions instead of many tests. Tests that need neither conditional writes nor permissions start
//! [`Rclone`](crate::rclone::Rclone) instead, in 0.1 s.
//!
//! Differences from S3 (SeaweedFS 4.48):
//! - It does not compare the body with `x-amz-content-sha256`.
//! - A second `CompleteMultipartUpload` of a completed upload returns 200 while the object exists.
//! - A full disk returns 500 `InternalError`.

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

/// The server. All methods take `&self`, so that one thread can kill it while another uses it.
pub struct Seaweed {
    /// `None` after a kill. Declared first, so that the process ends before its folder is removed.
    server: Mutex<Option<Server>>,
    folder: TempDir,
    ports: Ports,
    buckets: Mutex<Vec<String>>,
    endpoint: String,
    /// The host that it runs on, or `None` for this machine's own network.
    host: Option<Host>,
}

impl Seaweed {
    /// Starts a server and waits until it responds.
    pub fn start() -> Self {
        Self::start_with(&std::env::temp_dir(), None)
    }

    /// Starts a server with its data in a folder below this one; on a small file system, to test a full disk.
    pub fn start_in(folder: &Path) -> Self {
        Self::start_with(folder, None)
    }

    /// Starts a server in its own host. [`Seaweed::s3`] connects from that host, even while it is cut off.
    pub fn start_on(host: &Host) -> Self {
        Self::start_with(&std::env::temp_dir(), Some(host.clone()))
    }

    fn start_with(folder: &Path, host: Option<Host>) -> Self {
        let folder = tempfile::Builder::new().prefix("seaweed-").tempdir_in(folder).unwrap();
        let ports = Ports::reserve();
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
            // As in S3, a missing bucket is an error.
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.iam=false",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=256",
            // A restarted master waits this long before it elects itself.
            "-master.electionTimeout=300ms",
            "-master.heartbeatInterval=100ms",
            // Every bucket has its own volumes. Their files grow on demand, so a high limit costs nothing.
            "-volume.max=200",
            "-volume.preStopSeconds=0",
            // Its default is 1 % of the disk, below which it takes no data and says so only in its log.
            "-volume.minFreeSpace=100MiB",
        ]);
        let names = ["s3", "master", "volume", "filer"];
        for (name, n) in names.into_iter().zip(0..) {
            command.arg(format!("-{name}.port={}", self.ports.port(n)));
            command.arg(format!("-{name}.port.grpc={}", self.ports.port(n + 4)));
        }
        // Create one new volume at a time instead of seven.
        command.env("WEED_MASTER_VOLUME_GROWTH_COPY_1", "1");
        if let Some(host) = &self.host {
            host.attach(&mut command);
        }
        command
    }

    fn launch(&self) {
        let mut server = Server::start(self.command(), &self.folder.path().join("log"));
        let s3 = self.s3();
        server.wait_until("SeaweedFS", || s3.request("GET", "/", &[], b"").is_ok_and(|a| a.status == 200));
        for bucket in self.buckets.lock().unwrap().iter() {
            wait_until_writable(&mut server, &s3, bucket);
        }
        *self.server() = Some(server);
    }

    fn server(&self) -> MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap()
    }

    /// `http://127.0.0.1:port`, or the address of its host.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// A client with all permissions.
    pub fn s3(&self) -> S3 {
        let s3 = S3::new(&self.endpoint, ADMIN);
        match &self.host {
            Some(host) => s3.from_host(host),
            None => s3,
        }
    }

    /// Creates a bucket and waits until it is writable; uses a temporary object `.ready`.
    pub fn create_bucket(&self, name: &str) {
        let s3 = self.s3();
        s3.create_bucket(name);
        wait_until_writable(self.server().as_mut().expect("it runs"), &s3, name);
        self.buckets.lock().unwrap().push(name.to_owned());
    }

    /// Sets the environment of a command for a user with all permissions. Tests may then set `AWS_ENDPOINT_URL` to a
    /// proxy.
    pub fn environment(&self, command: &mut Command) {
        environment(command, &self.endpoint, ADMIN);
    }

    /// Sets the environment of a command for a user who may only read and list.
    pub fn read_only_environment(&self, command: &mut Command) {
        environment(command, &self.endpoint, READER);
    }

    /// Kills the server with SIGKILL; nothing listens until [`Seaweed::restart`]. Acknowledged data is kept.
    pub fn kill(&self) {
        drop(self.server().take());
    }

    /// Restarts the server on the same ports and data, and waits until every bucket of [`Seaweed::create_bucket`] is
    /// writable.
    pub fn restart(&self) {
        self.kill();
        self.launch();
    }
}

impl Drop for Seaweed {
    fn drop(&mut self) {
        self.kill();
        // It leaves sockets in /tmp. The ports still belong to this fixture, so removing them is safe.
        for (name, n) in ["s3", "master", "volume", "filer"].into_iter().zip(0..) {
            let _ = fs::remove_file(format!("/tmp/seaweedfs-{name}-{}.sock", self.ports.port(n)));
            let _ = fs::remove_file(format!("/tmp/seaweedfs-{name}-grpc-{}.sock", self.ports.port(n + 4)));
        }
    }
}

/// Waits until an object can be written and read: the first write creates the bucket's volume.
fn wait_until_writable(server: &mut Server, s3: &S3, bucket: &str) {
    let target = format!("/{bucket}/.ready");
    let is = |method: &str, status: u16| s3.request(method, &target, &[], b"").is_ok_and(|a| a.status == status);
    let body = b"a body, for an empty object needs no volume";
    let put = || s3.request("PUT", &target, &[], body).is_ok_and(|a| a.status == 200);
    server.wait_until(bucket, || put() && is("GET", 200) && is("DELETE", 204));
}

#[cfg(test)]
mod tests;
