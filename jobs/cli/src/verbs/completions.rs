//! `stillhouse completions SHELL`: prints a completion script.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::{Cli, Failure};
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  stillhouse completions bash > ~/.local/share/bash-completion/completions/stillhouse
  stillhouse completions zsh > ~/.zfunc/_stillhouse
  stillhouse completions fish > ~/.config/fish/completions/stillhouse.fish";

/// Print a script that completes commands and options in a shell
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command.
pub fn call(args: &Args, printer: &Printer) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "stillhouse", &mut script);
    Ok(printer.text(&String::from_utf8_lossy(&script))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::tests::captured;

    #[test]
    fn every_shell_gets_a_script_that_knows_the_verbs() {
        use clap::ValueEnum;
        for shell in Shell::value_variants() {
            let (printer, out, _) = captured();
            call(&Args { shell: *shell }, &printer).unwrap();
            assert!(out.text().contains("inspect"), "{shell}");
        }
    }
}
