//! A disk of a few megabytes that a test can fill: a tmpfs that only the processes of this test see.
//!
//! ```text
//!   unshare --mount (and a user namespace unless root) ─► mount tmpfs ─► a process that keeps it
//!        └─ nsenter ─► the program, on that disk          └─ /proc/…/root ─► its files, seen by the test
//! ```

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// The disk; unmounted when dropped.
pub struct SmallDisk {
    holder: Child,
    folder: TempDir,
    nsenter_args: &'static [&'static str],
}

impl SmallDisk {
    /// Mounts a disk. Prints a message and returns `None` if this machine does not allow mounting.
    pub fn mount(megabytes: u32) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        // SAFETY: A plain system call that touches no memory of ours.
        let root = unsafe { libc::geteuid() } == 0;
        let script = format!("mount -t tmpfs -o size={megabytes}m tmpfs \"$0\" && echo mounted && exec cat");
        let mut command = Command::new("unshare");
        command.args(if root { [].as_slice() } else { &["--user", "--map-root-user"] });
        command.args(["--mount", "sh", "-c", &script]).arg(folder.path());
        // The holder ends when its standard input closes, which happens however this process ends.
        let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line != "mounted\n" {
            println!("cannot mount a disk: {:?}", holder.wait());
            return None;
        }
        let nsenter_args: &[&str] = if root { &[] } else { &["--user", "--preserve-credentials"] };
        Some(Self { holder, folder, nsenter_args })
    }

    /// Path of the disk for processes that see it.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The same command, with access to this disk.
    pub fn command_on(&self, command: &Command) -> Command {
        let mut entered = Command::new("nsenter");
        entered.args(["--target", &self.holder.id().to_string(), "--mount"]).args(self.nsenter_args).arg("--no-fork");
        // `nsenter` changes the working directory, so restore it.
        if let Some(folder) = command.get_current_dir() {
            entered.arg(format!("--wdns={}", folder.display()));
        }
        entered.arg("--").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => entered.env(name, value),
                None => entered.env_remove(name),
            };
        }
        entered
    }

    /// Path of a file on the disk for this process.
    pub fn file(&self, name: &str) -> PathBuf {
        let seen = format!("/proc/{}/root{}", self.holder.id(), self.path().display());
        Path::new(&seen).join(name)
    }

    /// Fills the disk. Only space freed by removing files becomes available afterwards.
    pub fn fill(&self) {
        let mut file = File::options().create(true).append(true).open(self.file("filler")).unwrap();
        let full = loop {
            if let Err(e) = file.write_all(&[1; 512]) {
                break e;
            }
        };
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    }

    /// Frees the space that [`SmallDisk::fill`] took.
    pub fn free_filled(&self) {
        fs::remove_file(self.file("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
