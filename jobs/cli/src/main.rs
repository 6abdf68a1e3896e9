//! The `stillhouse` binary: parses the command line, runs a verb and returns its exit code.

mod address_space;
mod cli;
mod failure;
mod job_file;
mod line;
mod page;
mod printer;
mod progress;
mod table;
mod verbs;

use std::process::ExitCode;

fn main() -> ExitCode {
    // for every verb and the workers that inherit it: a write beyond the limit becomes an error that names the file,
    // not a signal
    stillhouse_service::process::ignore_file_size_signal();
    #[cfg(feature = "distributed")]
    stillhouse_pipeline::driver::register_cluster(stillhouse_cluster::connect);
    cli::main()
}
