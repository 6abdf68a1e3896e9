//! Limits on the address space of this process: `ulimit -v`, a batch system's limit, or a service's
//! `capacity.worker_gigabytes`.
//!
//! Verbs that process data refuse a limit below [`floor`]. Above it a job may still run out of memory. Then Rust's
//! allocator aborts the process, and a line after its own message names the limit that was too low.

use std::io;
use std::num::NonZero;
use std::sync::OnceLock;

/// Address space of the program, its buffers and the stacks of its own threads. Measured on 2 processors: a job with a
/// small teacher runs in 450,000 kB, not in 400,000.
const PROGRAM_BYTES: u64 = 512_000_000;
/// Stacks of the threads that compute and of those that wait, per processor.
const BYTES_PER_PROCESSOR: u64 = 4_000_000;
/// Number of malloc arenas. glibc's allocator reserves 64 MB of address space per arena, and by default creates eight
/// per processor.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 2;

/// The line that the abort handler writes.
static ABORT_MESSAGE: OnceLock<String> = OnceLock::new();

/// The lowest limit with which a process works on this machine.
fn floor() -> u64 {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get) as u64;
    PROGRAM_BYTES + BYTES_PER_PROCESSOR * processors
}

/// Adapts the allocator to the limit of this process, if it has one.
///
/// # Errors
/// If the limit is below [`floor`]; the message has the limit and the valid range.
pub fn check() -> Result<(), String> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct lives through the call, which only writes it.
    if unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) } != 0 || limit.rlim_cur == libc::RLIM_INFINITY {
        return Ok(());
    }
    let (bytes, floor) = (limit.rlim_cur, floor());
    if bytes < floor {
        return Err(format!(
            "the address space of this process is limited to {} kB (ulimit -v); valid on this machine: {} kB or more. What a job itself \
             takes is bounded by engine.memory_megabytes",
            bytes / 1024,
            floor.div_ceil(1024)
        ));
    }
    adapt_allocator(format!("the address space of this process is limited to {} kB (ulimit -v)", bytes / 1024));
    Ok(())
}

/// Limits the address space of this process.
///
/// # Errors
/// If the system refuses.
pub fn limit(bytes: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the struct lives through the call, which only reads it.
    if unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    adapt_allocator(format!("the address space of this process is limited to {bytes} bytes"));
    Ok(())
}

fn adapt_allocator(limited: String) {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes only settings of the allocator.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
    let advice = "make engine.memory_megabytes, engine.parallel_splits or extract.teacher.batch_tokens smaller, or raise the limit";
    if ABORT_MESSAGE.set(format!("error: {limited}, which was not enough: {advice}\n")).is_ok() {
        let handler: extern "C" fn(libc::c_int) = on_abort;
        // SAFETY: the handler calls only async-signal-safe functions: it writes, and restores the signal's default
        // action.
        unsafe { libc::signal(libc::SIGABRT, handler as libc::sighandler_t) };
    }
}

extern "C" fn on_abort(signal: libc::c_int) {
    if let Some(text) = ABORT_MESSAGE.get() {
        // SAFETY: the text is never freed, and neither call allocates. `abort` then continues with the signal's default
        // action.
        unsafe {
            libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}
