//! `stillhouse serve` on this machine. Tests start it, send requests, kill it with SIGKILL and restart it on the same
//! data.
//!
//! ```text
//!   Service::start(configuration) ─► stillhouse serve on 127.0.0.1 ─► workers (found in /proc by their folder)
//!        │ kill, launch, terminate: same port, same data               └► killed when the fixture is dropped
//!        ├─ api ─► Api: submit, job, wait_for, events, stream
//!        └─ stillhouse(["jobs", "list"]) ─► the program as a user starts it
//! ```
//!
//! Jobs, corpora and data sets are in `scratch`. The queue is in a separate folder, which jobs may not access. A server
//! is ready in about 1 s; a worker needs 0.5 s of CPU time until its first split.

mod api;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

pub use self::api::{Api, ApiResponse, EventStream, SseEvent};
use crate::server::{Ports, Server};
use crate::small_disk::SmallDisk;
use crate::{CommandOutput, Scratch, byte_teacher, root, run_command, with};

/// Timeout for anything that must happen. An idle machine needs a hundredth of it.
pub const TIMEOUT: Duration = Duration::from_secs(180);

/// Polls until `poll` returns a value.
#[track_caller]
pub fn eventually<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "timeout after {} s: {what}", TIMEOUT.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal to a process.
pub fn signal(process: i32, signal: i32) {
    assert!(process > 1);
    // SAFETY: A plain system call that touches no memory of ours.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0, "{process}: {}", std::io::Error::last_os_error());
}

/// Stops every thread of a process while the calling thread lives, so that only SIGKILL can end the process.
///
/// SIGSTOP does not work for a worker whose server is then killed: the kernel ends a stopped process group without a
/// parent by SIGHUP and SIGCONT.
pub fn freeze(process: i32) {
    let mut frozen = BTreeSet::new();
    loop {
        let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap().map(Result::unwrap);
        let threads: Vec<i32> = threads.map(|t| t.file_name().to_str().unwrap().parse().unwrap()).collect();
        let new: Vec<i32> = threads.into_iter().filter(|thread| frozen.insert(*thread)).collect();
        if new.is_empty() {
            return;
        }
        for thread in new {
            let none = std::ptr::null_mut::<libc::c_void>();
            // SAFETY: Neither request accesses our memory; `waitpid` accepts null for the status.
            let stopped = unsafe {
                libc::ptrace(libc::PTRACE_SEIZE, thread, none, none) == 0
                    && libc::ptrace(libc::PTRACE_INTERRUPT, thread, none, none) == 0
                    && libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) == thread
            };
            assert!(stopped, "thread {thread} of {process}: {}", std::io::Error::last_os_error());
        }
    }
}

/// A live worker.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkerProcess {
    /// The job that it runs.
    pub job: String,
    /// The process id.
    pub process: i32,
}

/// The server.
pub struct Service {
    /// `None` after a kill. Declared first, so that the process ends before its folders are removed.
    server: Option<Server>,
    /// The folder where jobs read and write.
    pub scratch: Scratch,
    /// Holds the queue, the logs and the configuration.
    state_folder: TempDir,
    configuration: Value,
    environment: Vec<(String, String)>,
    disk: Option<SmallDisk>,
    /// A client without a token.
    pub api: Api,
    _ports: Ports,
}

impl Service {
    /// Starts a service with this patch merged into the fixture's configuration, and waits until it is ready.
    pub fn start(patch: &Value) -> Self {
        let mut service = Self::new(patch);
        service.launch();
        service
    }

    /// Prepares a service without starting it.
    pub fn new(patch: &Value) -> Self {
        let (scratch, state_folder, ports) = (Scratch::new(), tempfile::tempdir().unwrap(), Ports::reserve());
        let folder = scratch.path("");
        let listen = format!("127.0.0.1:{}", ports.port(0));
        let configuration = json!({
            "listen": listen,
            "data": state_folder.path().join("data"),
            "folder": folder,
            "access": {"read": [folder, root().join("assets"), byte_teacher()], "write": [folder]},
            "capacity": {"running_jobs": 2, "cpu_slots": 2, "threads_per_job": 1},
            "retry": {"first_backoff_seconds": 1, "largest_backoff_seconds": 2},
        });
        let configuration = with(configuration, patch);
        let api = Api::new(&format!("http://{listen}"));
        let environment = Vec::new();
        Self { server: None, scratch, state_folder, configuration, environment, disk: None, api, _ports: ports }
    }

    /// Changes the configuration of the next launch.
    pub fn configure(&mut self, patch: &Value) {
        self.configuration = with(self.configuration.take(), patch);
    }

    /// Sets an environment variable for the next launch.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Prepares a service with its queue on a small disk, and `out` on that disk for its jobs' data sets. `None` if the
    /// disk cannot be mounted. Its workers are not found in /proc.
    pub fn on_small_disk(megabytes: u32, patch: &Value) -> Option<Self> {
        let disk = SmallDisk::mount(megabytes)?;
        let mut service = Self::new(patch);
        let (data, out) = (disk.path().join("data"), disk.path().join("out"));
        fs::create_dir(disk.file("out")).unwrap();
        let folders = [service.scratch.path(""), out];
        let reads = [folders[0].clone(), folders[1].clone(), root().join("assets"), byte_teacher().to_owned()];
        service.configure(&json!({"data": data, "access": {"read": reads, "write": folders}}));
        service.disk = Some(disk);
        Some(service)
    }

    /// The small disk of the service.
    pub fn disk(&self) -> &SmallDisk {
        self.disk.as_ref().expect("it is on one")
    }

    /// The folder of the queue.
    pub fn data(&self) -> PathBuf {
        self.state_folder.path().join("data")
    }

    /// Writes the current configuration to a file; returns its path.
    pub fn write_configuration(&self) -> PathBuf {
        let path = self.state_folder.path().join("service.yaml");
        fs::write(&path, self.configuration.to_string()).unwrap();
        path
    }

    /// The server's log of all launches so far.
    pub fn log_text(&self) -> String {
        fs::read_to_string(self.state_folder.path().join("log")).unwrap_or_default()
    }

    /// The command `stillhouse serve`, for tests that run it themselves.
    pub fn serve(&self, more: &[&str]) -> Command {
        let mut command = self.command(&["serve", "--config", self.write_configuration().to_str().unwrap()]);
        command.args(more).envs(self.environment.iter().map(|(n, v)| (n, v)));
        match &self.disk {
            Some(disk) => disk.command_on(&command),
            None => command,
        }
    }

    /// Starts it and waits until it is ready.
    pub fn launch(&mut self) {
        self.launch_until(200);
    }

    /// Starts it and waits until its readiness endpoint returns this status.
    pub fn launch_until(&mut self, status: u16) {
        let mut server = Server::start(self.serve(&[]), &self.state_folder.path().join("log"));
        server.wait_until("the service", || self.api.try_get("/ready").is_some_and(|answer| answer.status == status));
        self.server = Some(server);
    }

    /// Limits the file size of the server to `bytes`, or removes the limit. Writes beyond it fail, as on a full disk.
    /// Workers that already run are not affected.
    pub fn limit_files(&self, bytes: Option<u64>) {
        let process = self.server.as_ref().expect("it runs").id();
        let limit = libc::rlimit { rlim_cur: bytes.unwrap_or(libc::RLIM_INFINITY), rlim_max: libc::RLIM_INFINITY };
        // SAFETY: The call only reads the struct, which outlives it. Null: the old limit is not requested.
        let set = unsafe { libc::prlimit(process, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut()) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        drop(self.server.take());
    }

    /// Sends SIGTERM and waits; returns the exit code.
    pub fn terminate(&mut self) -> Option<i32> {
        let mut server = self.server.take().expect("it runs");
        signal(server.id(), libc::SIGTERM);
        server.wait()
    }

    /// A command for the program as a user of this service starts it.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.scratch.command(arguments);
        for name in ["STILLHOUSE_CONFIG", "STILLHOUSE_TOKEN"] {
            command.env_remove(name);
        }
        command.env("STILLHOUSE_URL", self.api.url());
        command
    }

    /// Runs the program as a user of this service and waits for its end.
    pub fn stillhouse(&self, arguments: &[&str]) -> CommandOutput {
        run_command(&mut self.command(arguments))
    }

    /// Creates a token with `stillhouse token create`; returns a client that uses it.
    #[track_caller]
    pub fn token(&self, user: &str, scopes: &[&str]) -> Api {
        let (file, mut arguments) = (self.write_configuration(), vec!["token", "create", "--user", user, "--json"]);
        scopes.iter().for_each(|scope| arguments.extend(["--scope", scope]));
        arguments.extend(["--config", file.to_str().unwrap()]);
        self.api.with_token(self.stillhouse(&arguments).expect(0).json()["token"].as_str().unwrap())
    }

    /// Revokes a token, as the operator does.
    #[track_caller]
    pub fn revoke(&self, token: &Api) {
        let (file, id) = (self.write_configuration(), token.secret().split('_').nth(1).unwrap());
        self.stillhouse(&["token", "revoke", id, "--config", file.to_str().unwrap()]).expect(0);
    }

    /// Opens a raw connection to the server, for requests that no client would send.
    pub fn connect(&self) -> std::net::TcpStream {
        std::net::TcpStream::connect(&self.api.url()["http://".len()..]).unwrap()
    }

    /// The live workers of all launches.
    pub fn workers(&self) -> Vec<WorkerProcess> {
        let scratch = self.data().join("scratch");
        workers_in(&scratch)
    }

    /// Waits for the worker of a job.
    #[track_caller]
    pub fn wait_for_worker(&self, job: &str) -> WorkerProcess {
        eventually("a worker", || self.workers().into_iter().find(|w| w.job == job))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.kill();
        // Workers end by themselves unless the test has frozen them. A folder that they still write to could not be
        // removed.
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let left = self.workers();
            if left.is_empty() || Instant::now() > deadline {
                return;
            }
            for worker in left {
                // SAFETY: A plain system call that touches no memory of ours. The process may have just ended.
                unsafe { libc::kill(worker.process, libc::SIGKILL) };
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Finds workers whose working directory is below this folder, even if the directory has been removed.
pub fn workers_in(scratch: &Path) -> Vec<WorkerProcess> {
    processes()
        .filter_map(|(process, folder)| {
            let name = folder.strip_prefix(scratch).ok()?.to_str()?.to_owned();
            Some(WorkerProcess { job: name.trim_end_matches(" (deleted)").to_owned(), process })
        })
        // excludes workers that read a data set to answer a request
        .filter(|worker| !worker.job.is_empty() && !worker.job.starts_with("ask-"))
        .collect()
}

/// Every process and its working directory; processes that have ended have none.
fn processes() -> impl Iterator<Item = (i32, PathBuf)> {
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    entries.filter_map(|entry| {
        let process = entry.file_name().to_str()?.parse().ok()?;
        Some((process, fs::read_link(entry.path().join("cwd")).ok()?))
    })
}
