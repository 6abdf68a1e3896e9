//! An S3 server without conditional writes: `rclone serve s3` over a temporary folder, which accepts `If-None-Match`
//! and overwrites.
//!
//! ```text
//!   Rclone::start ─► rclone serve s3 on 127.0.0.1 ─► folder/BUCKET/KEY, plain files
//! ```
//!
//! It starts in 0.1 s. Other differences from S3:
//! - It ignores `If-Match`, even on reads.
//! - It has only one user.
//! - It accepts parts of any size.
//! - **It answers a range request with status 200** and `Content-Range`, which object_store treats as an error.
//! - A key cannot be below another key, because keys are files.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use tempfile::TempDir;

use crate::s3::{ADMIN, S3, environment};
use crate::server::{Ports, Server, tool};

/// The server. All methods take `&self`, so that one thread can kill it while another uses it.
pub struct Rclone {
    /// `None` after a kill. Declared first, so that the process ends before its folder is removed.
    server: Mutex<Option<Server>>,
    folder: TempDir,
    _ports: Ports,
    address: String,
    endpoint: String,
    /// The folder that a plain web server serves; `None` for an S3 server.
    web: Option<PathBuf>,
}

impl Rclone {
    /// Starts a server and waits until it responds.
    pub fn start() -> Self {
        Self::start_as(None)
    }

    /// Starts a plain web server for a folder.
    pub fn start_web(shown: &Path) -> Self {
        Self::start_as(Some(shown.to_owned()))
    }

    fn start_as(web: Option<PathBuf>) -> Self {
        let folder = tempfile::Builder::new().prefix("rclone-").tempdir().unwrap();
        std::fs::create_dir(folder.path().join("data")).unwrap();
        let ports = Ports::reserve();
        let address = format!("127.0.0.1:{}", ports.port(0));
        let endpoint = format!("http://{address}");
        let this = Self { server: Mutex::new(None), folder, _ports: ports, address, endpoint, web };
        this.launch();
        this
    }

    fn launch(&self) {
        let mut command = Command::new(tool("rclone"));
        // Remove any rclone configuration of the user.
        for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("RCLONE_")) {
            command.env_remove(name);
        }
        let what = if self.web.is_some() { "http" } else { "s3" };
        command.args(["serve", what, "--config", "/dev/null", "--addr", &self.address]);
        // A longer directory cache would hide files that a test puts into the folder. With 0 rclone busy-loops.
        command.args(["--dir-cache-time", "1ms"]);
        match &self.web {
            Some(shown) => command.arg(shown),
            None => {
                let keys = format!("{},{}", ADMIN.access, ADMIN.secret);
                command.args(["--auth-key", &keys]).arg(self.folder.path().join("data"))
            }
        };
        let mut server = Server::start(command, &self.folder.path().join("log"));
        let s3 = self.s3();
        server.wait_until("rclone", || s3.request("GET", "/", &[], b"").is_ok_and(|a| a.status == 200));
        *self.server.lock().unwrap() = Some(server);
    }

    /// `http://127.0.0.1:port`.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// A client with all permissions.
    pub fn s3(&self) -> S3 {
        S3::new(&self.endpoint, ADMIN)
    }

    /// Creates a bucket.
    pub fn create_bucket(&self, name: &str) {
        self.s3().create_bucket(name);
    }

    /// The folder that holds the objects of a bucket.
    pub fn bucket(&self, name: &str) -> PathBuf {
        Path::new(self.folder.path()).join("data").join(name)
    }

    /// Sets the environment of a command that uses this server.
    pub fn environment(&self, command: &mut Command) {
        environment(command, &self.endpoint, ADMIN);
    }

    /// Kills the server with SIGKILL; nothing listens until [`Rclone::restart`]. Incomplete uploads are lost.
    pub fn kill(&self) {
        drop(self.server.lock().unwrap().take());
    }

    /// Restarts the server on the same port and folder.
    pub fn restart(&self) {
        self.kill();
        self.launch();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use object_store::ObjectStoreExt;

    use super::*;

    #[test]
    fn it_ignores_conditions() {
        let rclone = Rclone::start();
        rclone.create_bucket("corpora");
        let s3 = rclone.s3();
        assert!(s3.put_new("corpora", "a/b", b"one"));
        assert!(
            s3.put_new("corpora", "a/b", b"two"),
            "this rclone supports If-None-Match; the test needs a server that does not"
        );
        assert_eq!(s3.get("corpora", "a/b").unwrap(), b"two");
        assert_eq!(std::fs::read(rclone.bucket("corpora").join("a/b")).unwrap(), b"two");
        assert_eq!(s3.list("corpora", "").into_iter().collect::<Vec<_>>(), [("a/b".to_owned(), 3)]);
        let range = s3.request("GET", "/corpora/a/b", &[("range", "bytes=1-1")], b"").unwrap();
        assert_eq!((range.status, range.body.as_slice()), (200, b"w".as_slice()));
        let id = s3.create_multipart_upload("corpora", "c");
        assert_eq!(s3.list_multipart_uploads("corpora"), [("c".to_owned(), id)]);
        rclone.restart();
        assert_eq!(s3.get("corpora", "a/b").unwrap(), b"two");
        assert_eq!(s3.list_multipart_uploads("corpora"), []);
        store_refuses_its_ranges(&s3);
    }

    /// Shows why readers are tested with SeaweedFS: object_store rejects rclone's range responses.
    fn store_refuses_its_ranges(s3: &S3) {
        let store = s3.store("corpora");
        let error = s3.wait(store.get_range(&"a/b".into(), 1..2)).unwrap_err().to_string();
        assert!(error.contains("range"), "{error}");
    }

    const GRANDCHILD: &str = "STILLHOUSE_TESTS_SERVER_FOR";

    #[test]
    fn it_dies_with_a_test_that_is_killed() {
        if let Some(file) = std::env::var_os(GRANDCHILD) {
            // In the process to be killed: the server must survive the end of the thread that starts it.
            let rclone = std::thread::spawn(Rclone::start).join().unwrap();
            std::thread::sleep(Duration::from_millis(200));
            assert!(rclone.s3().request("GET", "/", &[], b"").is_ok());
            std::fs::write(file, rclone.endpoint()).unwrap();
            loop {
                std::thread::park();
            }
        }
        let scratch = crate::Scratch::new();
        let file = scratch.path("endpoint");
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", "rclone::tests::it_dies_with_a_test_that_is_killed"]).env(GRANDCHILD, &file);
        let mut test = test.stdout(Stdio::null()).env("TMPDIR", scratch.path("")).spawn().unwrap();
        let until = |what: &mut dyn FnMut() -> bool| {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !what() {
                assert!(Instant::now() < deadline);
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        until(&mut || std::fs::read_to_string(&file).is_ok_and(|e| !e.is_empty()));
        let s3 = S3::new(&std::fs::read_to_string(&file).unwrap(), ADMIN);
        let answers = || s3.request("GET", "/", &[], b"").is_ok();
        assert!(answers());
        test.kill().unwrap();
        test.wait().unwrap();
        until(&mut || !answers());
    }
}
