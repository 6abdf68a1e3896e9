//! Process functions that the standard library lacks.

use std::ffi::CString;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// SIGTERM: asks a process to end.
pub const TERMINATE: i32 = libc::SIGTERM;
/// SIGKILL: ends a process.
pub const KILL: i32 = libc::SIGKILL;

/// Sends a signal to a process group. A group that no longer exists is not an error.
///
/// # Errors
/// When the group belongs to another user.
pub fn signal_group(group: i32, signal: i32) -> io::Result<()> {
    if group <= 1 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{group} is not a process group of this service"),
        ));
    }
    // SAFETY: a system call that touches no memory of ours.
    match unsafe { libc::kill(-group, signal) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            e => Err(e),
        },
    }
}

/// The kernel's start time of a process, in ticks since boot; `None` if the process does not exist or is a zombie.
/// Together with the process id it identifies a process: the kernel reuses ids alone.
#[expect(clippy::disallowed_methods, reason = "the kernel answers for /proc out of memory")]
pub fn start_time(process: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // the name may contain any character, including brackets and spaces
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Raises this process's limit of open files to the maximum that the system allows; returns the new limit.
///
/// # Errors
/// When the system call fails.
pub fn raise_open_file_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct lives through the calls; the first only writes it and the second only reads it.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return Err(io::Error::last_os_error());
        }
        limit.rlim_cur = limit.rlim_max;
        if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(limit.rlim_cur)
}

/// Makes the kernel close a connection whose peer acknowledges no data for `timeout` (`TCP_USER_TIMEOUT`).
///
/// # Errors
/// When the system refuses.
pub fn set_user_timeout(connection: &impl AsRawFd, timeout: Duration) -> io::Result<()> {
    let milliseconds = libc::c_uint::try_from(timeout.as_millis()).unwrap_or(libc::c_uint::MAX);
    let length = size_of_val(&milliseconds) as libc::socklen_t;
    // SAFETY: the borrow keeps the descriptor open; the number lives through the call, which only reads it.
    let set = unsafe {
        libc::setsockopt(
            connection.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_USER_TIMEOUT,
            (&raw const milliseconds).cast(),
            length,
        )
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes that this user may still write on the disk of a path. Blocks on that disk.
///
/// # Errors
/// When the system call fails.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path and the struct live through the call, which reads the path and writes the struct; all zeros are
    // a valid struct.
    let found = unsafe {
        if libc::statvfs(path.as_ptr(), found.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        found.assume_init()
    };
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Turns a write beyond the file size limit into an error instead of a signal that ends the process (SIGXFSZ).
pub fn ignore_file_size_signal() {
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Succeeds if this user may create files in a folder.
pub fn check_writable(folder: &Path) -> io::Result<()> {
    let folder = CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: the path lives through the call, which only reads it.
    match unsafe { libc::faccessat(libc::AT_FDCWD, folder.as_ptr(), libc::W_OK | libc::X_OK, libc::AT_EACCESS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

    use super::*;

    #[test]
    fn what_a_disk_has_left_and_what_a_folder_takes() {
        let folder = tempfile::tempdir().unwrap();
        assert!(free_bytes(folder.path()).unwrap() > 0);
        assert!(free_bytes(&folder.path().join("none")).is_err());
        check_writable(folder.path()).unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let closed = folder.path().join("closed");
        std::fs::DirBuilder::new().mode(0o555).create(&closed).unwrap();
        // root may write anywhere; nextest runs each test in its own process
        // SAFETY: a system call that touches no memory of ours.
        unsafe { libc::seteuid(65534) };
        assert_eq!(check_writable(&closed).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        // SAFETY: as above; it fails without effect if this process never was root.
        unsafe { libc::seteuid(0) };
    }

    #[test]
    fn a_process_is_known_by_when_it_began() {
        let own = start_time(std::process::id().cast_signed()).unwrap();
        assert!(own > 0);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = child.id().cast_signed();
        assert!(start_time(id).unwrap() >= own);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(start_time(id), None);
        assert!(signal_group(0, KILL).is_err() && signal_group(1, KILL).is_err() && signal_group(-1, KILL).is_err());
    }
}
