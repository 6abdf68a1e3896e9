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
    let job = args.dir.join("demo.yaml");
    for (name, content) in FILES {
        write(&args.dir.join(name), content)?;
    }
    write(&job, job_file().as_bytes())?;
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

/// Writes a file, in one step so that an interruption leaves no part of it.
///
/// # Errors
/// If the file exists with another content, or cannot be written.
fn write(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let cannot = |e: &io::Error| Failure::System(format!("cannot write {}: {e}", path.display()));
    match fs::read(path) {
        Ok(found) if found == content => return Ok(()),
        Ok(_) => {
            return Err(Failure::Usage(format!(
                "DIR: {} exists and is not of this demo; valid: a new folder, as in `stillhouse demo DIR`",
                path.display()
            )));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return Err(cannot(&e)),
    }
    let part = path.with_extension("part");
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&part, content))
        .and_then(|()| fs::rename(&part, path))
        .map_err(|e| cannot(&e))
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
        write(&path, b"content").unwrap();
        write(&path, b"content").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"content");
        assert_eq!(fs::read_dir(folder.path().join("a")).unwrap().count(), 1, "a part is left");
        let Err(Failure::Usage(message)) = write(&path, b"other") else { panic!("replaced") };
        assert!(message.contains("b.json exists"), "{message}");
        assert_eq!(fs::read(&path).unwrap(), b"content");
    }
}
