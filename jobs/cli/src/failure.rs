//! Why a verb failed: its exit code, and the error as text or JSON.

use std::io;

use serde_json::json;
use stillhouse_pipeline::error::{ErrorKind, PipelineError};
use stillhouse_schemas::problems::Problems;

use crate::printer::Printer;

/// The signal that requested the stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGINT, Ctrl-C.
    Interrupt,
    /// SIGTERM.
    Terminate,
}

impl StopSignal {
    /// The exit code that a shell reports for a program ended by this signal.
    pub fn code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// Why a verb ended with another exit code than 0.
#[derive(Debug)]
pub enum Failure {
    /// The pipeline failed; the file to name, if any.
    Pipeline(PipelineError, Option<String>),
    /// Wrong usage of the program.
    Usage(String),
    /// A job file in which a service found problems.
    JobFile(String, Problems),
    /// A service configuration with problems.
    Configuration(String, Problems),
    /// A configuration with problems that were already reported.
    WrongConfiguration,
    /// A failure that was already reported, or that nobody can read.
    Reported,
    /// Writing to stdout failed.
    Stdout(io::Error),
    /// The system denied a resource that the program needs.
    System(String),
    /// Ctrl-C or SIGTERM, and how to resume.
    Interrupted(StopSignal, String),
}

impl From<PipelineError> for Failure {
    fn from(e: PipelineError) -> Self {
        Self::Pipeline(e, None)
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Self::Stdout(e)
    }
}

impl Failure {
    /// An error of a job. Names the file if the problems are in the file.
    pub fn of_job(error: PipelineError, file: &str) -> Self {
        let about = error.problems.is_some().then(|| file.to_owned());
        Self::Pipeline(error, about)
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Pipeline(e, _) if e.kind == ErrorKind::Usage => 2,
            Self::Usage(_) | Self::JobFile(..) | Self::Configuration(..) | Self::WrongConfiguration => 2,
            Self::Stdout(e) if e.kind() == io::ErrorKind::BrokenPipe => 0,
            Self::Interrupted(signal, _) => signal.code(),
            _ => 1,
        }
    }

    /// Prints the error, as a line of JSON as well if `json` is set.
    pub fn print(&self, json: bool, printer: &Printer) {
        match self {
            Self::Reported | Self::WrongConfiguration => {}
            Self::Usage(message) => print(message, &json!([]), json, printer),
            Self::JobFile(file, problems) => {
                print(&format!("{file}: {}", problems.render(Some(file))), &json!(problems.0), json, printer);
            }
            Self::Configuration(about, problems) => {
                let lines: Vec<String> = problems.0.iter().map(|p| format!("\n  {}", p.render(None))).collect();
                let n = problems.0.len();
                let message = format!("{about}: {n} problem{}{}", if n == 1 { "" } else { "s" }, lines.concat());
                print(&message, &json!(problems.0), json, printer);
            }
            Self::Stdout(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
            Self::Stdout(e) => printer.error(format!("cannot write to stdout: {e}")),
            Self::System(message) => print(message, &json!([]), json, printer),
            Self::Interrupted(_, message) => print(message, &json!([]), json, printer),
            Self::Pipeline(e, about) => {
                let message = match (about, &e.problems) {
                    (Some(file), Some(problems)) => format!("{file}: {}", problems.render(Some(file))),
                    (Some(about), None) => format!("{about}: {e}"),
                    (None, _) => e.to_string(),
                };
                print(&message, &json!(e.problems.as_ref().map_or(&[][..], |p| &p.0)), json, printer);
            }
        }
    }
}

fn print(message: &str, problems: &serde_json::Value, json: bool, printer: &Printer) {
    if json {
        let first = message.lines().next().unwrap_or_default();
        // ignore a failure: a script that closed its end does not read the error either
        let _ = printer.json_line(&json!({ "error": first, "problems": problems }));
    }
    printer.error(message);
}

#[cfg(test)]
mod tests {
    use stillhouse_schemas::problems::{Position, Problem};

    use super::*;
    use crate::printer::tests::captured;

    #[test]
    fn a_wrong_job_file_is_2_and_reports_every_problem() {
        let problems = Problems(vec![
            Problem::new("pack.length", 0, "too small; valid: 2 or more").at(Position { line: 12, column: 3 }),
            Problem::missing("output.path", "is required and missing"),
        ]);
        let failure = Failure::Pipeline(problems.into(), Some("job.yaml".into()));
        assert_eq!(failure.code(), 2);
        let (printer, out, err) = captured();
        failure.print(true, &printer);
        insta::assert_snapshot!(err.text(), @r"
        error: job.yaml: the job file has 2 problems
          job.yaml:12:3: pack.length: got 0: too small; valid: 2 or more
          output.path: is required and missing
        ");
        insta::assert_snapshot!(out.text(), @r#"
        {"error":"job.yaml: the job file has 2 problems","problems":[{"column":3,"field":"pack.length","got":"0","line":12,"message":"too small; valid: 2 or more"},{"field":"output.path","message":"is required and missing"}]}
        "#);
    }

    #[test]
    fn exit_codes() {
        let pipeline = |kind| Failure::from(PipelineError::new(kind, "x"));
        assert_eq!(pipeline(ErrorKind::Usage).code(), 2);
        assert_eq!(pipeline(ErrorKind::Input).code(), 1);
        assert_eq!(Failure::Reported.code(), 1);
        assert_eq!(Failure::Interrupted(StopSignal::Interrupt, String::new()).code(), 130);
        assert_eq!(Failure::Interrupted(StopSignal::Terminate, String::new()).code(), 143);
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).code(), 0);
        assert_eq!(Failure::from(io::Error::other("full")).code(), 1);
    }
}
