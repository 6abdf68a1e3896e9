//! `stillhouse schema`: prints the JSON Schema of the job file.

use stillhouse_operators::registry::{columns_table, job_format};

use crate::failure::Failure;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  stillhouse schema > job.schema.json
  # first line of a job file, for editors with the YAML language server:
  # yaml-language-server: $schema=job.schema.json";

/// Print the JSON Schema of the job file: every key with its type, bounds, default and meaning
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print the OpenAPI document of the service instead
    #[arg(long)]
    openapi: bool,
    /// Print the columns of a data set as a table instead: type, shape and meaning of each
    #[arg(long, conflicts_with = "openapi")]
    columns: bool,
}

/// Runs the command.
pub fn call(args: &Args, printer: &Printer) -> Result<(), Failure> {
    if args.columns {
        return Ok(printer.text(&columns_table())?);
    }
    let document = if args.openapi { stillhouse_service::openapi() } else { job_format().json_schema() };
    Ok(printer.json(&document)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::tests::captured;

    #[test]
    fn it_is_a_schema_with_the_sections_of_a_job() {
        let (printer, out, _) = captured();
        call(&Args { openapi: false, columns: false }, &printer).unwrap();
        let schema: serde_json::Value = serde_json::from_str(&out.text()).unwrap();
        for section in ["input", "tokenizer", "pack", "extract", "output"] {
            assert!(schema["properties"].get(section).is_some(), "{section}");
        }
    }
}
