//! What is done and said where the address space of this process is limited: by `ulimit -v`, by a batch system, or by
//! `capacity.worker_gigabytes` of a service.
//!
//! A limit below [`floor`] is refused at once. Above it a job may still need more than there is: Rust's allocator ends the process then, and
//! what stands behind its line says why.

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

/// What the end of the process says.
static SAYS: OnceLock<String> = OnceLock::new();

/// The least that a process of this machine works with.
fn floor() -> u64 {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get) as u64;
    PROGRAM_BYTES + BYTES_PER_PROCESSOR * processors
}

/// Makes do with what this process may have, and refuses what is too little.
///
/// # Errors
/// What it has, and what it needs.
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
    make_do(format!("the address space of this process is limited to {} kB (ulimit -v)", bytes / 1024));
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
    make_do(format!("the address space of this process is limited to {bytes} bytes"));
    Ok(())
}

fn make_do(limited: String) {
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
