//! Server processes that end with the test that starts them, on ports that no other test uses.
//!
//! ```text
//!   Ports::reserve() ─► flock on a block of ports ─► command ─► keeper thread ─► fork, parent-death signal ─► exec
//! ```

use std::fs::{self, File};
use std::io;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Path of a tool in `.venv`, which `scripts/setup` installs.
pub fn tool(name: &str) -> PathBuf {
    let path = crate::root().join(".venv/bin").join(name);
    assert!(path.exists(), "{} is missing: run scripts/setup", path.display());
    path
}

/// Free ports of 127.0.0.1, reserved for this test while the value lives.
///
/// They are below the range that the kernel uses for outgoing connections, so that a killed server can reuse its port.
pub struct Ports {
    first: u16,
    _lock: File,
}

const PORTS_PER_BLOCK: u16 = 16;
const FIRST_PORT: u16 = 12_000;
const MAX_BLOCKS: u16 = 1_000;

impl Ports {
    /// Reserves a block of ports.
    pub fn reserve() -> Self {
        let folder = std::env::temp_dir().join("stillhouse-ports");
        fs::create_dir_all(&folder).unwrap();
        // Test processes start at different blocks, so that they rarely collide.
        let start = (std::process::id() % u32::from(MAX_BLOCKS)) as u16;
        for block in (0..MAX_BLOCKS).map(|i| (start + i) % MAX_BLOCKS) {
            let lock = File::create(folder.join(block.to_string())).unwrap();
            let first = FIRST_PORT + block * PORTS_PER_BLOCK;
            if lock.try_lock().is_ok()
                && (first..first + PORTS_PER_BLOCK).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok())
            {
                return Self { first, _lock: lock };
            }
        }
        panic!("no {PORTS_PER_BLOCK} free ports in a row from {FIRST_PORT}");
    }

    /// The n-th port.
    pub fn port(&self, n: u16) -> u16 {
        assert!(n < PORTS_PER_BLOCK);
        self.first + n
    }
}

/// A process that is killed when this value is dropped, and by the kernel if the test process dies.
pub struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Starts a process that writes its output to `log`.
    pub fn start(mut command: Command, log: &Path) -> Self {
        let file = File::options().create(true).append(true).open(log).unwrap();
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        let child = spawn_from_keeper(command).unwrap();
        Self { child, log: log.to_owned() }
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The process id.
    pub fn id(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Waits until the process ends by other means. Returns its exit code, or `None` if a signal ended it.
    pub fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the process does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until `ready`. Panics with the end of the log after 60 s, or if the process has ended.
    pub fn wait_until(&mut self, what: &str, mut ready: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !ready() {
            let ended = self.child.try_wait().unwrap();
            if ended.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                let tail = log.lines().rev().take(20).collect::<Vec<_>>();
                let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
                panic!("{what}: not ready (ended: {ended:?}), log:\n{tail}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

type SpawnRequest = (Command, Sender<io::Result<Child>>);

/// Spawns from a thread that never ends, because the kernel's parent-death signal refers to the *thread* that forked.
fn spawn_from_keeper(mut command: Command) -> io::Result<Child> {
    static KEEPER: OnceLock<Sender<SpawnRequest>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (requests, receiver) = channel::<SpawnRequest>();
        std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || {
                for (mut command, reply) in receiver {
                    let _ = reply.send(command.spawn());
                }
            })
            .unwrap();
        requests
    });
    let parent = std::process::id();
    // SAFETY: Between fork and exec, this makes two system calls and touches no memory of the parent.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the call to `prctl`.
            if libc::getppid() == parent as i32 { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
        });
    }
    let (reply, answer) = channel();
    keeper.send((command, reply)).unwrap();
    answer.recv().unwrap()
}
