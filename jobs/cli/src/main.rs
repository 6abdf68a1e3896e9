//! The `stillhouse` binary: reads the command line, runs a verb, gives its exit code.

mod address_space;
mod cli;
mod job_file;
mod page;
mod printer;
mod progress;
mod table;
mod verbs;

use std::process::ExitCode;

fn main() -> ExitCode {
    // of every verb, and of the workers that inherit it: an error names the file, a signal nothing
    stillhouse_service::process::survive_file_limits();
    #[cfg(feature = "distributed")]
    stillhouse_pipeline::driver::add_cluster(stillhouse_cluster::connect);
    cli::main()
}
