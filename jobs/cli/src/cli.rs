//! The command line: the verbs.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use crate::address_space;
use crate::failure::Failure;
use crate::printer::{Color, Printer};
use crate::verbs::{
    clean, completions, demo, derive, export, init, inspect, jobs, plan, repair, run, schema, score, serve, submit,
    token, verify, work,
};
#[cfg(feature = "distributed")]
use crate::verbs::{executor, scheduler};
use clap::{CommandFactory, Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  stillhouse demo                                a small data set from files in this program
  stillhouse init corpus/                        look at your files and write a job for them
  stillhouse plan jobs/examples/demo.yaml        what would run
  stillhouse run jobs/examples/demo.yaml         run it; run it again to go on after an interruption
  stillhouse inspect out/demo                    look at what came out
  stillhouse verify out/demo --teacher           check it, the noise included
  stillhouse export out/demo s3://shards/demo    copy it to a store; a job can also write there itself

  stillhouse serve                               a queue of jobs for a team, with a web page
  stillhouse submit job.yaml                     send it a job and watch it
  stillhouse jobs list                           what runs, what waits, what failed

Exit codes: 0 done, 1 failed, 2 wrong usage or job file, 130 interrupted (Ctrl-C),
143 terminated (SIGTERM); after the last two the same command goes on.
Environment: NO_COLOR switches colours off; STILLHOUSE_LOG=debug (or a tracing filter) logs to stderr.";

/// Turns raw corpora into training shards for parallel (discrete-diffusion) language models.
#[derive(Debug, Parser)]
#[command(name = "stillhouse", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub struct Cli {
    /// When to use colours
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t)]
    pub color: Color,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Demo(demo::Args),
    Init(init::Args),
    Run(run::Args),
    Plan(plan::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Repair(repair::Args),
    Export(export::Args),
    Derive(derive::Args),
    Clean(clean::Args),
    Score(score::Args),
    Serve(serve::Args),
    Submit(submit::Args),
    Jobs(jobs::Args),
    Token(token::Args),
    Work(work::Args),
    #[cfg(feature = "distributed")]
    Scheduler(scheduler::Args),
    #[cfg(feature = "distributed")]
    Executor(executor::Args),
    Schema(schema::Args),
    Completions(completions::Args),
}

impl Verb {
    fn json(&self) -> bool {
        match self {
            Self::Run(args) => args.json,
            Self::Plan(args) => args.json,
            Self::Inspect(args) => args.json,
            Self::Verify(args) => args.json,
            Self::Repair(args) => args.json,
            Self::Export(args) => args.json,
            Self::Derive(args) => args.json,
            Self::Clean(args) => args.json,
            Self::Score(args) => args.json,
            Self::Serve(args) => args.json,
            Self::Submit(args) => args.json,
            Self::Jobs(args) => args.json(),
            Self::Token(args) => args.json,
            Self::Demo(_) | Self::Init(_) | Self::Work(_) | Self::Schema(_) | Self::Completions(_) => false,
            #[cfg(feature = "distributed")]
            Self::Scheduler(_) | Self::Executor(_) => false,
        }
    }

    /// Format of log lines, and the default log level.
    fn log(&self, terminal: bool) -> (serve::LogFormat, &'static str) {
        match self {
            Self::Serve(args) if !args.check => {
                let usual = if terminal { serve::LogFormat::Text } else { serve::LogFormat::Json };
                (args.log_format.unwrap_or(usual), "info")
            }
            Self::Work(_) => (serve::LogFormat::Bare, "warn"),
            #[cfg(feature = "distributed")]
            Self::Scheduler(_) | Self::Executor(_) => (serve::LogFormat::Text, "warn,stillhouse_cluster=info"),
            _ => (serve::LogFormat::Text, "error"),
        }
    }

    /// Whether the verb needs little memory, because it neither reads data sets nor starts workers.
    fn is_light(&self) -> bool {
        matches!(self, Self::Submit(_) | Self::Jobs(_) | Self::Token(_) | Self::Schema(_) | Self::Completions(_))
    }

    fn call(self, printer: &Arc<Printer>) -> Result<(), Failure> {
        match self {
            Self::Demo(args) => demo::call(&args, printer),
            Self::Init(args) => init::call(&args, printer),
            Self::Run(args) => run::call(&args, printer),
            Self::Plan(args) => plan::call(&args, printer),
            Self::Inspect(args) => inspect::call(&args, printer),
            Self::Verify(args) => verify::call(&args, printer),
            Self::Repair(args) => repair::call(&args, printer),
            Self::Export(args) => export::call(&args, printer),
            Self::Derive(args) => derive::call(&args, printer),
            Self::Clean(args) => clean::call(&args, printer),
            Self::Score(args) => score::call(&args, printer),
            Self::Serve(args) => serve::call(&args, printer),
            Self::Submit(args) => submit::call(&args, printer),
            Self::Jobs(args) => jobs::call(&args, printer),
            Self::Token(args) => token::call(&args, printer),
            Self::Work(args) => work::call(&args, printer),
            #[cfg(feature = "distributed")]
            Self::Scheduler(args) => scheduler::call(&args, printer),
            #[cfg(feature = "distributed")]
            Self::Executor(args) => executor::call(&args, printer),
            Self::Schema(args) => schema::call(&args, printer),
            Self::Completions(args) => completions::call(&args, &mut Cli::command(), printer),
        }
    }
}

/// Parses the command line and runs the verb.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = Printer::new(Color::Auto).help(&e);
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    let printer = Arc::new(Printer::new(cli.color));
    let (format, level) = cli.verb.log(std::io::stderr().is_terminal());
    crate::verbs::log_to(&printer, format, level);
    let json = cli.verb.json();
    let enough = if cli.verb.is_light() { Ok(()) } else { address_space::check().map_err(Failure::System) };
    match enough.and_then(|()| cli.verb.call(&printer)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print(json, &printer);
            ExitCode::from(failure.code())
        }
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn the_command_line_is_sound_and_every_verb_has_examples() {
        Cli::command().debug_assert();
        for verb in Cli::command().get_subcommands() {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.starts_with("Examples:"), "{} has no examples", verb.get_name());
        }
    }

    #[test]
    fn teacher_options_need_the_teacher() {
        assert!(Cli::try_parse_from(["stillhouse", "verify", "out", "--device", "cpu"]).is_err());
        assert!(Cli::try_parse_from(["stillhouse", "verify", "out", "--teacher", "--device", "cpu"]).is_ok());
        assert!(Cli::try_parse_from(["stillhouse", "run", "job.yaml", "--threads", "0"]).is_err());
    }
}
