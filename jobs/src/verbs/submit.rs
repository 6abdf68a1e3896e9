//! stub
use crate::cli::Failure;
use crate::printer::Printer;
use std::sync::Arc;
/// Stub
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:")]
pub struct Args {
    /// j
    #[arg(long)]
    pub json: bool,
}
/// s
pub fn call(_: &Args, _: &Arc<Printer>) -> Result<(), Failure> {
    Ok(())
}
