//! `stillhouse completions SHELL`: prints a completion script.

use clap::Command;
use clap_complete::Shell;

use crate::failure::Failure;
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

/// Runs the verb; `command` is the whole command line.
pub fn call(args: &Args, command: &mut Command, printer: &Printer) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "stillhouse", &mut script);
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
            let mut command = Command::new("stillhouse").subcommand(Command::new("inspect"));
            call(&Args { shell: *shell }, &mut command, &printer).unwrap();
            assert!(out.text().contains("inspect"), "{shell}");
        }
    }
}
