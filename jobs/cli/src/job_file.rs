//! The job file given to a verb: a path, or `-` for stdin.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use stillhouse_operators::registry::job_format;
use stillhouse_pipeline::access::Access;
use stillhouse_pipeline::error::PipelineError;
use stillhouse_pipeline::events::Observer;
use stillhouse_pipeline::job::{self, Prepared};
use stillhouse_schemas::spec::EngineKind;

use crate::failure::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;

/// Maximum size of a job file, in bytes, far above any real one. Keeps a device or data set named by mistake from
/// filling the memory.
const MAX_JOB_FILE_BYTES: u64 = 64 << 20;

/// Name that means stdin.
const STDIN: &str = "-";

/// A job file that was read but not parsed.
pub struct JobFile {
    /// Name in error messages.
    pub name: String,
    /// Content of the file.
    pub text: String,
    /// Whether the extension is `.json`.
    pub json: bool,
    /// Folder of its relative paths.
    pub folder: PathBuf,
    /// Path of the file; `None` for stdin.
    path: Option<PathBuf>,
    /// Scheduler from the command line, which replaces the job's engine.
    scheduler: Option<String>,
}

impl JobFile {
    /// Reads the file. Relative paths in a job from stdin are relative to the current folder.
    pub fn read(path: &Path, printer: &Printer) -> Result<Self, Failure> {
        let is_stdin = path == Path::new(STDIN);
        let name = if is_stdin { "stdin".to_owned() } else { path.display().to_string() };
        let usage = |what: &dyn std::fmt::Display| Failure::Usage(format!("cannot read job file {name}: {what}"));
        let bytes = match is_stdin {
            true => {
                let stdin = io::stdin();
                if stdin.is_terminal() {
                    let hint = "reading the job from the keyboard; end it with Ctrl-D on an empty line";
                    let mut page = Page::new();
                    page.line(Line::new().with(Tone::Dim, hint));
                    printer.note(&page);
                }
                whole(stdin.lock())
            }
            false if path.is_dir() => {
                return Err(usage(&format_args!(
                    "it is a folder; `stillhouse init {name}` writes a job file for a corpus"
                )));
            }
            false => File::open(path).and_then(whole),
        };
        let bytes = bytes.map_err(|e| usage(&e))?;
        if bytes.len() as u64 > MAX_JOB_FILE_BYTES {
            return Err(usage(&format_args!(
                "it is larger than {} MB, so it is no job file",
                MAX_JOB_FILE_BYTES >> 20
            )));
        }
        let text = String::from_utf8(bytes).map_err(|e| {
            usage(&format_args!("it is not UTF-8 (from byte {} on); save it as UTF-8", e.utf8_error().valid_up_to()))
        })?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !is_stdin);
        let json = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
        let path = (!is_stdin).then(|| path.to_owned());
        Ok(Self { text, json, folder: folder.unwrap_or(Path::new(".")).to_path_buf(), name, path, scheduler: None })
    }

    /// The same job, run on the cluster of this scheduler.
    pub fn on_cluster(self, scheduler: Option<&str>) -> Self {
        Self { scheduler: scheduler.map(str::to_owned).or(self.scheduler), ..self }
    }

    /// Checks the job and everything that it names, with the access of a person's own job.
    pub fn prepare(&self, observer: &dyn Observer) -> Result<Prepared, Failure> {
        let format = job_format();
        let mut parsed = if self.json { format.parse_json(&self.text) } else { format.parse(&self.text) };
        if let (Some(spec), Some(scheduler)) = (&mut parsed.spec, &self.scheduler) {
            spec.engine.kind = EngineKind::Ballista;
            spec.engine.scheduler = Some(scheduler.clone());
        }
        let prepared = job::prepare(parsed, &self.folder, &Access::everything(), observer);
        let mut prepared = prepared.map_err(|e| self.failure(e))?;
        prepared.file.clone_from(&self.path);
        Ok(prepared)
    }

    /// Turns an error of the job into a failure.
    pub fn failure(&self, error: PipelineError) -> Failure {
        Failure::of_job(error, &self.name)
    }
}

fn whole(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(MAX_JOB_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
