//! `stillhouse schema`: the JSON Schema of the job file.

use stillhouse_schemas::spec::JobSpec;

use crate::cli::Failure;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  stillhouse schema > job.schema.json
  # first line of a job file, for editors with the YAML language server:
  # yaml-language-server: $schema=job.schema.json";

/// Print the JSON Schema of the job file: every key with its type, bounds, default and meaning
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {}

/// Prints it.
pub fn call(_: &Args, printer: &Printer) -> Result<(), Failure> {
    Ok(printer.json(&JobSpec::json_schema())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::tests::captured;

    #[test]
    fn it_is_a_schema_with_the_sections_of_a_job() {
        let (printer, out, _) = captured();
        call(&Args {}, &printer).unwrap();
        let schema: serde_json::Value = serde_json::from_str(&out.text()).unwrap();
        for section in ["input", "tokenizer", "pack", "extract", "output"] {
            assert!(schema["properties"].get(section).is_some(), "{section}");
        }
    }
}
