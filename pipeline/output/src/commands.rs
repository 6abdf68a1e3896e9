//! The commands that error messages suggest for repairing an output.

use super::Output;

fn quoted(text: &str) -> String {
    match text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/:~+=@%".contains(&b)) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// The command that repairs a data set. Uses a placeholder if the job file is unknown.
pub fn repair_command(output: &Output, job_file: Option<&str>) -> String {
    format!("stillhouse repair {} {}", quoted(&output.to_string()), quoted(job_file.unwrap_or("JOB.yaml")))
}

/// The command that makes a data set again that no `repair` can mend, because this version does not support a setting.
pub fn overwrite_command(job_file: Option<&str>, field: &str, unsupported: &str) -> String {
    let job_file = quoted(job_file.unwrap_or("JOB.yaml"));
    format!(
        "stillhouse run {job_file} --overwrite, with another {field} than {unsupported}, which this version does not compute"
    )
}

/// The command that makes a derived data set again.
pub fn derive_command(output: &Output) -> String {
    format!("stillhouse derive DATASET JOB.yaml, as {output} was made,")
}
