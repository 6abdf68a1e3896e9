//! Runs a command and observes its process: number of threads, memory, and whether it ends.
//!
//! ```text
//!   command ─► process, stdout and stderr to files ─► every few ms: /proc/PID/status ─► end, or SIGKILL at the
//!   deadline
//! ```

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::CommandOutput;

/// Interval between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(3);

/// The result of a command and its peak resource use.
#[derive(Debug)]
pub struct ProcessStats {
    /// Exit code and output.
    pub output: CommandOutput,
    /// Maximum number of threads in any sample.
    pub threads: u64,
    /// Peak resident memory in bytes (`VmHWM`).
    pub memory: u64,
}

impl ProcessStats {
    /// The events of one kind in the output of `--json`, in order.
    pub fn events(&self, kind: &str) -> Vec<Value> {
        let lines = self.output.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|event| event["event"] == kind).collect()
    }
}

/// A process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command, which must end before the deadline.
#[track_caller]
pub fn run_measured(command: &mut Command, deadline: Duration) -> ProcessStats {
    run_measured_with(command, deadline, |_, _| {})
}

/// Like [`run_measured`]; calls `act` at every sample with the process id and the standard output so far.
///
/// # Panics
/// If the process has not ended by the deadline. The message has its output and the state of its threads.
#[track_caller]
pub fn run_measured_with(command: &mut Command, deadline: Duration, mut act: impl FnMut(i32, &str)) -> ProcessStats {
    let folder = tempfile::tempdir().unwrap();
    let (out, err) = (folder.path().join("stdout"), folder.path().join("stderr"));
    command.stdin(Stdio::null()).stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
    let began = Instant::now();
    let mut child = Running(command.spawn().unwrap());
    let process = child.0.id().cast_signed();
    let (mut threads, mut memory) = (0, 0);
    let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
    let status = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status;
        }
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        threads = threads.max(field(&status, "Threads:"));
        memory = memory.max(field(&status, "VmHWM:") * 1024);
        act(process, &read(&out));
        if began.elapsed() > deadline {
            let (out, err) = (read(&out), read(&err));
            let last = out.lines().last().unwrap_or_default();
            panic!("not ended after {deadline:?}: {threads} threads, {}\n{last}\n{err}", describe_threads(process));
        }
        sleep(SAMPLE_INTERVAL);
    };
    ProcessStats {
        output: CommandOutput { code: status.code(), stdout: read(&out), stderr: read(&err) },
        threads,
        memory,
    }
}

fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.split_whitespace().next().map_or(0, |number| number.parse().unwrap())
}

/// Counts the threads by name and state, for example `73 × write S`.
fn describe_threads(process: i32) -> String {
    let mut states = std::collections::BTreeMap::<String, u64>::new();
    for task in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        let Some((name, rest)) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(") ")) else { continue };
        *states.entry(format!("{name} {}", &rest[..1])).or_default() += 1;
    }
    let states: Vec<String> = states.iter().map(|(state, count)| format!("{count} × {state}")).collect();
    states.join(", ")
}
