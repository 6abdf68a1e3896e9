//! Limits on the address space of this process: `ulimit -v`, a batch system's, or `capacity.worker_gigabytes` of a service.
//!
//! Verbs that work on data refuse a limit below [`floor`]. Above it a job may still need more memory than there is: Rust's allocator aborts the
//! process then, and a line after its own says which limit was too low.

use std::io;
use std::num::NonZero;
use std::sync::OnceLock;

/// The program, its buffers and the stacks of its own threads. Measured on 2 processors: a job with a small teacher runs in 450,000 kB, not in 400,000.
const PROGRAM_BYTES: u64 = 512_000_000;
/// Stacks of the threads that compute and of those that wait.
const BYTES_PER_PROCESSOR: u64 = 4_000_000;
/// glibc's allocator reserves 64 MB of address space for each of its arenas, of which it makes eight a processor.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 2;

/// The line that an abort writes.
static SAYS: OnceLock<String> = OnceLock::new();

/// The lowest limit that a process works with on this machine.
fn floor() -> u64 {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get) as u64;
    PROGRAM_BYTES + BYTES_PER_PROCESSOR * processors
}

/// Adapts the allocator to the limit of this process, if it has one.
///
/// # Errors
/// When the limit is below [`floor`]: the limit, and what is valid.
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
    adapt(format!("the address space of this process is limited to {} kB (ulimit -v)", bytes / 1024));
    Ok(())
}

/// Limits the address space of this process.
///
/// # Errors
/// When the system refuses.
pub fn limit(bytes: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the struct lives through the call, which only reads it.
    if unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    adapt(format!("the address space of this process is limited to {bytes} bytes"));
    Ok(())
}

fn adapt(limited: String) {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes numbers of the allocator alone.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
    let advice = "make engine.memory_megabytes, engine.parallel_splits or extract.teacher.batch_tokens smaller, or raise the limit";
    if SAYS.set(format!("error: {limited}, which was not enough: {advice}\n")).is_ok() {
        let handler: extern "C" fn(libc::c_int) = say;
        // SAFETY: the handler does what a handler may: it writes, and gives the signal its own meaning back.
        unsafe { libc::signal(libc::SIGABRT, handler as libc::sighandler_t) };
    }
}

extern "C" fn say(signal: libc::c_int) {
    if let Some(text) = SAYS.get() {
        // SAFETY: the text is never freed, and neither call takes memory. `abort` goes on with the signal's own meaning.
        unsafe {
            libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}
