//! `stillhouse demo [DIR]`: makes a small data set from files that the program contains, checks it and shows it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::failure::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::verbs::{inspect, run, verify};

const EXAMPLES: &str = "\
Examples:
  stillhouse demo                 into the folder stillhouse-demo
  stillhouse demo ~/demo          into another folder
  stillhouse plan stillhouse-demo/demo.yaml      what the job of the demo does; change a copy of it and run that";

/// Files of the demo: a name in its folder, and the content.
const FILES: [(&str, &[u8]); 4] = [
    ("corpus.jsonl.gz", include_bytes!("../../../../assets/corpus/sotu-small.jsonl.gz")),
    ("teacher/config.json", include_bytes!("../../../../assets/teacher-nano-gpt2/config.json")),
    ("teacher/model.safetensors", include_bytes!("../../../../assets/teacher-nano-gpt2/model.safetensors")),
    ("teacher/tokenizer.json", include_bytes!("../../../../assets/teacher-nano-gpt2/tokenizer.json")),
];

/// The example job, whose paths lead out of its folder.
const EXAMPLE: &str = include_str!("../../../examples/demo.yaml");

/// Paths of the example, and those of the demo's folder.
const PATHS: [(&str, &str); 3] = [
    ("../../assets/corpus/sotu-small.jsonl.gz", "corpus.jsonl.gz"),
    ("../../assets/teacher-nano-gpt2", "teacher"),
    ("../../demo-out/demo", "data-set"),
];

/// Make a small data set from a corpus and a teacher that this program contains, and show it
///
/// Writes State of the Union speeches, a small GPT-2 and a job file into the folder, runs the job, checks the data set
/// with the teacher, and shows one row with the noise of one token. Needs no network.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder for the files and the data set
    #[arg(value_name = "DIR", default_value = "stillhouse-demo")]
    dir: PathBuf,
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let (job, job_text) = (args.dir.join("demo.yaml"), job_file());
    let mut missing = Vec::new();
    for (name, content) in FILES.into_iter().chain([("demo.yaml", job_text.as_bytes())]) {
        let path = args.dir.join(name);
        if !is_written(&path, content)? {
            missing.push((path, content));
        }
    }
    // only once no file of another content was found
    missing.iter().try_for_each(|(path, content)| write(path, content))?;
    let data_set = args.dir.join("data-set").display().to_string();
    step(printer, &format!("stillhouse run {}", job.display()))?;
    run::call(&run::Args::of(job.clone()), printer)?;
    step(printer, &format!("stillhouse verify {data_set} --teacher"))?;
    verify::call(&verify::Args::with_teacher(data_set.clone()), printer)?;
    step(printer, &format!("stillhouse inspect {data_set} --position {POSITION}"))?;
    inspect::call(&inspect::Args::of_position(data_set.clone(), POSITION), printer)?;
    printer.page(&next_steps(&job, &data_set))?;
    Ok(())
}

/// Position in the first row whose noise is shown.
const POSITION: usize = 8;

/// The job of the demo: the example, with paths of the demo's folder.
fn job_file() -> String {
    PATHS.iter().fold(EXAMPLE.to_owned(), |job, (from, to)| job.replace(from, to))
}

fn cannot(action: &str, path: &Path, e: &io::Error) -> Failure {
    Failure::System(format!("cannot {action} {}: {e}", path.display()))
}

/// Whether a file with this content exists. Reads only a regular file of the same size.
///
/// # Errors
/// If something else is there, or it cannot be read.
fn is_written(path: &Path, content: &[u8]) -> Result<bool, Failure> {
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(cannot("read", path, &e)),
    };
    let may_be_equal = found.is_file() && found.len() == content.len() as u64;
    if may_be_equal && fs::read(path).map_err(|e| cannot("read", path, &e))? == content {
        return Ok(true);
    }
    Err(Failure::Usage(format!(
        "DIR: {} exists and is not of this demo; valid: a new folder, as in `stillhouse demo DIR`",
        path.display()
    )))
}

/// Writes a file in one step, so that an interruption leaves no part of it.
fn write(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let part = path.with_extension("part");
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&part, content))
        .and_then(|()| fs::rename(&part, path))
        .map_err(|e| cannot("write", path, &e))
}

/// Prints the command that follows, as a user would type it.
fn step(printer: &Printer, command: &str) -> Result<(), Failure> {
    let mut page = Page::new();
    page.line(Line::new().with(Tone::Dim, "$ ").with(Tone::Strong, command));
    printer.page(&page)?;
    Ok(())
}

fn next_steps(job: &Path, data_set: &str) -> Page {
    let mut page = Page::new();
    page.heading("Load it in Python");
    for line in [
        "import stillhouse".to_owned(),
        format!("ds = stillhouse.open({data_set:?})"),
        "print(len(ds), ds[0][\"input_ids\"][:8], ds[0][\"logprob\"][:8])".to_owned(),
    ] {
        page.line(Line::plain(format!("  {line}")));
    }
    page.heading("Next");
    page.line(Line::plain("  ").with(Tone::Strong, format!("stillhouse plan {}", job.display())));
    page.line(Line::plain("    shows what this job does: change a copy of it for your own corpus and teacher"));
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_stays_in_its_folder_and_is_the_example_otherwise() {
        let job = job_file();
        assert!(!job.contains("../"), "{job}");
        for (from, to) in PATHS {
            assert!(EXAMPLE.contains(from) && job.contains(to), "{from}");
        }
        assert_eq!(job.lines().count(), EXAMPLE.lines().count());
    }

    #[test]
    fn files_are_written_once_and_others_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.json");
        assert!(!is_written(&path, b"content").unwrap());
        write(&path, b"content").unwrap();
        assert!(is_written(&path, b"content").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"content");
        assert_eq!(fs::read_dir(folder.path().join("a")).unwrap().count(), 1, "a part is left");
        for (path, content) in [(path.as_path(), b"other".as_slice()), (&path, b"CONTENT"), (folder.path(), b"content")]
        {
            let Err(Failure::Usage(message)) = is_written(path, content) else { panic!("{}", path.display()) };
            assert!(message.contains(" exists and is not of this demo"), "{message}");
        }
    }
}
