//! The commands that error messages suggest for repairing an output.

use super::Output;

/// The command that repairs a data set. Uses a placeholder if the job file is unknown.
pub fn repair_command(output: &Output, job_file: Option<&str>) -> String {
    let quoted = |text: &str| match text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/:~+=@%".contains(&b)) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    };
    format!("stillhouse repair {} {}", quoted(&output.to_string()), quoted(job_file.unwrap_or("JOB.yaml")))
}

/// The command that makes a derived data set again.
pub fn derive_command(output: &Output) -> String {
    format!("stillhouse derive DATASET JOB.yaml, as {output} was made,")
}
