//! The service's handle of a worker process: starts it with an order, reads its messages line by line, stops its
//! process group.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use tokio::sync::mpsc;

use super::logs::MAX_LINE_BYTES;
use super::process;
use super::worker_protocol::{Message, WorkerRequest};

/// Longest message of a worker in bytes: a report with a decoded sequence.
const MAX_MESSAGE_BYTES: u64 = 64 << 20;
/// Messages in the queue between a worker and the service.
const QUEUE_LENGTH: usize = 64;

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Its exit code.
    Code(i32),
    /// The signal that ended it.
    Signal(i32),
}

impl Exit {
    /// A description for users.
    pub fn describe(self) -> String {
        match self {
            Self::Code(code) => format!("the worker ended with exit code {code}"),
            Self::Signal(libc::SIGKILL) => {
                "the worker was killed (signal 9); the usual cause is that the machine ran out of memory".into()
            }
            Self::Signal(signal) => format!("the worker crashed (signal {signal})"),
        }
    }
}

/// Whether a log line is the message of Rust's allocator before it aborts, or reports a thread that got no stack.
pub fn reports_no_memory(line: &[u8]) -> bool {
    let has = |what: &[u8]| memchr::memmem::find(line, what).is_some();
    line.starts_with(b"memory allocation of ") && has(b" bytes failed")
        || has(b"thread") && has(b"Resource temporarily unavailable")
}

/// An item read from a worker.
#[derive(Debug)]
pub enum WorkerOutput {
    /// A message.
    Message(Box<Message>),
    /// A line of its log.
    Log(Vec<u8>),
    /// A line that is not a valid message; the error.
    Invalid(String),
}

/// A worker process. If dropped, it loses the pipe of its order and ends by itself.
pub struct Worker {
    child: Child,
    /// The worker's stdin. The worker ends when this closes, also when the whole service process dies.
    stdin: ChildStdin,
    /// Messages and log lines; closed when the worker closes its pipes.
    pub output: mpsc::Receiver<WorkerOutput>,
}

/// How to start a worker.
pub struct WorkerStart {
    pub program: PathBuf,
    pub request: WorkerRequest,
    /// Value of `CUDA_VISIBLE_DEVICES`; `None` leaves it unset.
    pub visible_gpus: Option<String>,
    /// The S3-compatible service for jobs that name none.
    pub endpoint: Option<String>,
}

impl Worker {
    /// Starts a worker. It does nothing until it has its order, so the caller can store the process id first.
    ///
    /// # Errors
    /// When the system cannot start the process or its reader threads.
    #[expect(clippy::disallowed_methods, reason = "called through `spawn_blocking`, as it starts a process")]
    pub fn start(start: &WorkerStart) -> io::Result<Self> {
        std::fs::create_dir_all(&start.request.scratch)?;
        let mut command = Command::new(&start.program);
        command
            .arg("--color=never")
            .arg("work")
            .current_dir(&start.request.scratch)
            .env("TMPDIR", &start.request.scratch)
            .env_remove("STILLHOUSE_TOKEN")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // the service stops its workers itself, so signals of a terminal must reach only the service
            .process_group(0);
        if std::env::var_os("STILLHOUSE_LOG").is_none() {
            command.env("STILLHOUSE_LOG", "warn");
        }
        if let Some(gpus) = &start.visible_gpus {
            command.env("CUDA_VISIBLE_DEVICES", gpus);
        }
        if let Some(endpoint) = &start.endpoint {
            command.env("AWS_ENDPOINT_URL_S3", endpoint);
        }
        let mut child = command.spawn()?;
        let (Some(stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(io::Error::other("a worker without pipes"));
        };
        let (sender, output) = mpsc::channel(QUEUE_LENGTH);
        let log_sender = sender.clone();
        spawn_thread("worker-messages", move || read_messages(stdout, &sender))?;
        spawn_thread("worker-log", move || read_log(stderr, &log_sender))?;
        Ok(Self { child, stdin, output })
    }

    /// Sends the order. If the worker has already ended, this succeeds and its exit tells why.
    ///
    /// # Errors
    /// When the order cannot be written as JSON, or the pipe fails for another reason.
    pub fn send_request(&mut self, request: &WorkerRequest) -> io::Result<()> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        match self.stdin.write_all(&line).and_then(|()| self.stdin.flush()) {
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(e),
            _ => Ok(()),
        }
    }

    /// Its process id, and the kernel's start time of the process.
    pub fn process_id_and_start(&self) -> (i32, u64) {
        let id = self.child.id().cast_signed();
        (id, process::start_time(id).unwrap_or_default())
    }

    /// Asks the worker and its children to stop.
    pub fn terminate(&self) {
        self.signal(process::TERMINATE);
    }

    /// Kills the worker and its children.
    pub fn kill(&self) {
        self.signal(process::KILL);
    }

    fn signal(&self, signal: i32) {
        // the process is not reaped before `wait`, so its id cannot belong to another process
        if let Err(e) = process::signal_group(self.child.id().cast_signed(), signal) {
            tracing::error!("cannot stop a worker: {e}");
        }
    }

    /// Waits until the worker has ended.
    ///
    /// # Errors
    /// When the system call fails.
    pub async fn wait(self) -> io::Result<Exit> {
        let Self { mut child, stdin, output } = self;
        drop(output);
        let ended = tokio::task::spawn_blocking(move || {
            let status = child.wait();
            drop(stdin);
            status
        });
        Ok(exit(ended.await.map_err(io::Error::other)??))
    }

    /// Whether the worker has ended. Does not reap it, so its process id and group stay reserved.
    pub fn has_ended(&self) -> bool {
        process::start_time(self.child.id().cast_signed()).is_none()
    }
}

fn exit(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, signal) => Exit::Signal(signal.unwrap_or_default()),
    }
}

fn spawn_thread(name: &str, f: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(f).map(drop)
}

fn read_messages(stdout: impl Read, sender: &mpsc::Sender<WorkerOutput>) {
    let mut reader = BufReader::new(stdout);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(MAX_MESSAGE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let output = match serde_json::from_slice(&line) {
            Ok(message) => WorkerOutput::Message(Box::new(message)),
            Err(e) => WorkerOutput::Invalid(e.to_string()),
        };
        if sender.blocking_send(output).is_err() {
            return;
        }
    }
}

/// Forwards the lines of the log; splits lines that are too long.
fn read_log(stderr: impl Read, sender: &mpsc::Sender<WorkerOutput>) {
    let mut reader = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        match (&mut reader).take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if sender.blocking_send(WorkerOutput::Log(line)).is_err() {
            return;
        }
    }
}

/// Kills a worker that an earlier service left, and waits until it has ended.
///
/// # Errors
/// When it cannot be killed, or does not end within 30 seconds.
pub fn kill_leftover(process: i32, start_time: u64) -> io::Result<()> {
    for _ in 0..600 {
        if process::start_time(process) != Some(start_time) {
            return Ok(());
        }
        process::signal_group(process, process::KILL)?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(io::Error::other(format!("process {process} of an earlier service does not end")))
}
