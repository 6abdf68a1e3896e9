//! The job file that a verb is given: a path, or `-` for what comes on stdin.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use stillhouse_operators::registry::job_format;
use stillhouse_pipeline::access::Access;
use stillhouse_pipeline::error::PipelineError;
use stillhouse_pipeline::events::Observer;
use stillhouse_pipeline::job::{self, Prepared};
use stillhouse_schemas::spec::EngineKind;

use crate::cli::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;

/// Largest job file, far above what one can hold: a device or a data set named by mistake does not fill the memory.
const LARGEST: u64 = 64 << 20;

/// Name of the job file that comes on stdin.
const STDIN: &str = "-";

/// A job file that was read and not looked into.
pub struct JobFile {
    /// As it is told in errors.
    pub name: String,
    /// Its text.
    pub text: String,
    /// Whether its name says that it is JSON.
    pub json: bool,
    /// What its relative paths are relative to.
    pub folder: PathBuf,
    /// Where it lies, where it has not come on stdin.
    path: Option<PathBuf>,
    /// The scheduler of a cluster, where the command line names one: in place of the job's own engine.
    scheduler: Option<String>,
}

impl JobFile {
    /// Reads it. Relative paths in what comes on stdin are relative to the current folder.
    pub fn read(path: &Path, printer: &Printer) -> Result<Self, Failure> {
        let is_stdin = path == Path::new(STDIN);
        let name = if is_stdin { "stdin".to_owned() } else { path.display().to_string() };
        let usage = |what: &dyn std::fmt::Display| Failure::Usage(format!("cannot read job file {name}: {what}"));
        let bytes = match is_stdin {
            true => {
                let stdin = io::stdin();
                if stdin.is_terminal() {
                    let hint = "reading the job from the keyboard; end it with Ctrl-D in a line of its own";
                    let mut page = Page::new();
                    page.line(Line::new().with(Tone::Dim, hint));
                    printer.note(&page);
                }
                whole(stdin.lock())
            }
            false => File::open(path).and_then(whole),
        };
        let bytes = bytes.map_err(|e| usage(&e))?;
        if bytes.len() as u64 > LARGEST {
            return Err(usage(&format_args!("it is larger than {} MB, so it is no job file", LARGEST >> 20)));
        }
        let text = String::from_utf8(bytes).map_err(|e| {
            usage(&format_args!("it is not UTF-8 (from byte {} on); save it as UTF-8", e.utf8_error().valid_up_to()))
        })?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !is_stdin);
        let json = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
        let path = (!is_stdin).then(|| path.to_owned());
        Ok(Self { text, json, folder: folder.unwrap_or(Path::new(".")).to_path_buf(), name, path, scheduler: None })
    }

    /// The same job, made on this cluster.
    pub fn on_cluster(self, scheduler: Option<&str>) -> Self {
        Self { scheduler: scheduler.map(str::to_owned).or(self.scheduler), ..self }
    }

    /// Checks it with everything that it names, as a person's own job.
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

    /// An error of the job.
    pub fn failure(&self, error: PipelineError) -> Failure {
        Failure::of_job(error, &self.name)
    }
}

fn whole(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(LARGEST + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
