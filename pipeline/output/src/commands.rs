//! The commands that an error message names to repair an output.

use super::Output;

/// The command that repairs a data set, as far as the job file is known.
pub fn repair_command(output: &Output, job_file: Option<&str>) -> String {
    let quoted = |text: &str| match text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/:~+=@%".contains(&b)) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    };
    format!("stillhouse repair {} {}", quoted(&output.to_string()), quoted(job_file.unwrap_or("JOB.yaml")))
}

/// The command that repairs a data set that was derived from another one.
pub fn derive_command(output: &Output) -> String {
    format!("stillhouse derive DATASET JOB.yaml, as {output} was made,")
}
