//! What `stillhouse init` proposes for a corpus, with reasons, and the job file that says it.

use std::path::{Path, PathBuf};

use stillhouse_pipeline::input_summary::{InputSummary, TextColumn};
use stillhouse_pipeline::units;
use stillhouse_schemas::spec::InputFormat;
use stillhouse_teacher::TeacherConfig;

use super::first_names;
use crate::failure::Failure;

/// Names that columns with the text have, in corpora of the Hugging Face Hub.
const TEXT_NAMES: [&str; 7] = ["text", "content", "body", "document", "raw_content", "article", "story"];
/// Tokens per sequence, as in MDLM and most papers after it.
const LENGTH: u32 = 1024;
/// Bytes up to which a text file is taken for one document.
const SMALL_FILE: u64 = 1_000_000;
/// Mean bytes of lines that are no documents.
const SHORT_LINE: f64 = 200.0;
/// Documents from which on some are held out.
const HOLDOUT_FROM: f64 = 1000.0;

/// A teacher for a corpus whose user names none.
struct KnownTeacher {
    path: &'static str,
    positions: usize,
    why: &'static str,
}

const ENGLISH: KnownTeacher = KnownTeacher {
    path: "hf://HuggingFaceTB/SmolLM2-135M",
    positions: 8192,
    why: "a small teacher for English; name your own with --teacher",
};
const MULTILINGUAL: KnownTeacher = KnownTeacher {
    path: "hf://Qwen/Qwen3-0.6B-Base",
    positions: 32_768,
    why: "a small teacher for 119 languages; name your own with --teacher",
};

/// What the user gave on the command line.
pub struct Given<'a> {
    pub corpus: &'a [String],
    pub text: Option<String>,
    /// What one document of plain text is, as the job file says it.
    pub document: Option<&'static str>,
    pub teacher: Option<String>,
    pub no_teacher: bool,
    pub tokenizer: Option<String>,
    pub length: Option<u32>,
    pub output: Option<String>,
    /// Folder of the job file; `None` for stdout.
    pub folder: Option<PathBuf>,
}

/// A value and why it was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    pub value: String,
    pub reason: String,
    is_given: bool,
}

impl Choice {
    fn new(value: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { value: value.into(), reason: reason.into(), is_given: false }
    }

    fn given(value: impl Into<String>) -> Self {
        Self { value: value.into(), reason: "as you said".into(), is_given: true }
    }
}

/// A question for the user: its text and the proposal. Returns another value, if the user gives one.
pub type Ask<'a> = &'a mut dyn FnMut(&str, &Choice) -> Result<Option<String>, Failure>;

/// The job that is proposed.
pub struct Proposal<'a> {
    summary: &'a InputSummary,
    given: Given<'a>,
    text: Choice,
    teacher: Option<Choice>,
    length: Choice,
}

impl<'a> Proposal<'a> {
    /// Chooses what was not given.
    ///
    /// # Errors
    /// If no column has text, or what was given does not fit the corpus or the teacher.
    pub fn new(summary: &'a InputSummary, given: Given<'a>) -> Result<Self, Failure> {
        let text = match &given.text {
            Some(name) => given_column(summary, name)?,
            None => longest_column(summary)?,
        };
        let teacher = match (&given.teacher, given.no_teacher) {
            (_, true) => None,
            (Some(named), _) => Some(Choice::given(named)),
            (None, false) => {
                let known = known_teacher(summary, &text.value);
                Some(Choice::new(known.path, known.why))
            }
        };
        if let (Some(unit), format) = (given.document, summary.format)
            && format != InputFormat::Text
        {
            let format = format.name();
            return Err(Failure::Usage(format!("--document: got {unit}, valid: nothing, as the files are {format}")));
        }
        let mut made = Self { summary, text, teacher, length: Choice::new("", ""), given };
        made.length = made.fitting_length()?;
        Ok(made)
    }

    /// Asks about everything that was not given.
    pub fn ask(&mut self, ask: Ask<'_>) -> Result<(), Failure> {
        if !self.text.is_given
            && self.summary.text_columns.len() > 1
            && let Some(named) = ask("column of the text", &self.text)?
        {
            self.text = given_column(self.summary, &named)?;
        }
        if let Some(proposed) = self.teacher.as_ref().filter(|teacher| !teacher.is_given)
            && let Some(named) = ask("teacher", proposed)?
        {
            self.teacher = Some(Choice::given(named));
        }
        self.length = self.fitting_length()?;
        if !self.length.is_given
            && let Some(answer) = ask("tokens per sequence", &self.length)?
        {
            let wrong = || Failure::Usage(format!("tokens per sequence: got {answer:?}, valid: a number from 4 on"));
            self.given.length = Some(answer.parse().ok().filter(|length| *length >= 4).ok_or_else(wrong)?);
            self.length = self.fitting_length()?;
        }
        Ok(())
    }

    /// The length that was given, or the usual one, as far as the teacher reads.
    fn fitting_length(&self) -> Result<Choice, Failure> {
        let positions = match &self.teacher {
            Some(teacher) => positions_of(&teacher.value)?,
            None => None,
        };
        match (self.given.length, positions) {
            (Some(length), Some(most)) if length as usize > most => {
                Err(Failure::Usage(format!("--length: got {length}, valid: up to {most}, the context of the teacher")))
            }
            (Some(length), _) => Ok(Choice::given(length.to_string())),
            (None, Some(most)) if most < LENGTH as usize => {
                Ok(Choice::new(most.to_string(), format!("all that the teacher reads; papers have {LENGTH}")))
            }
            (None, Some(most)) => Ok(Choice::new(
                LENGTH.to_string(),
                format!("as most papers; the teacher reads up to {}", units::count(most as u64)),
            )),
            (None, None) => Ok(Choice::new(LENGTH.to_string(), "as most papers")),
        }
    }

    /// What was chosen, by name.
    pub fn choices(&self) -> Vec<(&'static str, Choice)> {
        let tokenizer = match (&self.given.tokenizer, &self.teacher) {
            (Some(named), _) => Choice::given(named),
            (None, _) => Choice::new("the teacher's", "ids that the teacher knows"),
        };
        let teacher = self.teacher.clone().unwrap_or_else(|| Choice::given("none"));
        let unit = match self.summary.format {
            InputFormat::Text => ("document", self.document()),
            _ => ("text", self.text.clone()),
        };
        vec![unit, ("teacher", teacher), ("tokenizer", tokenizer), ("length", self.length.clone())]
    }

    /// What `plan` does beyond its checks.
    pub fn what_plan_does(&self) -> &'static str {
        match &self.teacher {
            Some(teacher) if teacher.value.starts_with("hf://") => {
                "downloads the teacher, checks everything, shows what would run"
            }
            _ => "checks everything and shows what would run",
        }
    }

    fn column(&self) -> Option<&TextColumn> {
        self.summary.text_columns.iter().find(|column| column.name == self.text.value)
    }

    /// The name of the job: that of the first file or folder.
    fn name(&self) -> String {
        let first = self.given.corpus.first().map_or("", String::as_str).trim_end_matches('/');
        let absolute = std::path::absolute(first).unwrap_or_default();
        let whole = if first == "." { absolute.to_string_lossy().into_owned() } else { first.to_owned() };
        let last =
            whole.rsplit('/').find(|part| !part.contains(['*', '?', '[', '{']) && !part.is_empty()).unwrap_or_default();
        let stem = last.split('.').next().unwrap_or_default().to_ascii_lowercase();
        let safe: String =
            stem.chars().map(|c| if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '-' }).collect();
        let safe: String = safe.trim_start_matches(['-', '_']).chars().take(60).collect();
        if safe.is_empty() { "corpus".to_owned() } else { safe }
    }

    /// The job file.
    pub fn job_file(&self) -> String {
        let name = self.name();
        let from_folder = |path: &str| relative_to(path, self.given.folder.as_deref());
        let paths: Vec<String> = self.given.corpus.iter().map(|path| quoted(&from_folder(path))).collect();
        let (files, bytes) = (units::counted(self.summary.files as u64, "file"), units::bytes(self.summary.bytes));
        let mut lines = vec![
            "# Made by `stillhouse init`. `stillhouse plan` checks it and shows what would run.".to_owned(),
            "version: 1".to_owned(),
            format!("name: {}", quoted(&name)),
            "seed: 42                # of every random choice".to_owned(),
            "input:".to_owned(),
            format!("  format: {}", self.summary.format.name()),
            format!("  paths: [{}]  # {files}, {bytes}", paths.join(", ")),
        ];
        if self.summary.format == InputFormat::Text {
            let unit = self.document();
            lines.push(format!("  document: {}  # {}", unit.value, unit.reason));
        } else {
            lines.push(format!("  text: {}  # {}", quoted(&self.text.value), self.text.reason));
        }
        if self.documents() >= HOLDOUT_FROM {
            lines.push("  holdout: {validation: {share: 0.01}}".to_owned());
        }
        if let Some(tokenizer) = &self.given.tokenizer {
            lines.push(format!("tokenizer: {{path: {}}}", quoted(&from_folder(tokenizer))));
        }
        lines.push(format!("pack: {{mode: wrap, length: {}}}  # {}", self.length.value, self.length.reason));
        if let Some(teacher) = &self.teacher {
            lines.extend([
                "extract:".to_owned(),
                format!("  teacher: {{path: {}}}  # {}", quoted(&from_folder(&teacher.value)), teacher.reason),
                "  noise: {tolerance: 1e-3}  # largest total variation of replayed noise; 1e-2 takes less space"
                    .to_owned(),
            ]);
        }
        let output = self.given.output.clone().map_or_else(|| format!("{name}-data"), |output| from_folder(&output));
        lines.push(format!("output: {{path: {}}}", quoted(&output)));
        lines.push("# More columns: subtokens, partitions, orders. docs/job-file.md has every key.".to_owned());
        lines.join("\n") + "\n"
    }

    /// The unit of plain text that is a document.
    fn document(&self) -> Choice {
        if let Some(unit) = self.given.document {
            return Choice::given(unit);
        }
        let mean = self.column().map_or(0.0, |column| column.mean_bytes);
        let per_file = self.summary.bytes / self.summary.files.max(1) as u64;
        match self.summary.files {
            0 | 1 => Choice::new("line", "one file; or file, or blank_line"),
            _ if per_file < SMALL_FILE => Choice::new("file", "several small files; or line, or blank_line"),
            _ if mean < SHORT_LINE => Choice::new("file", "the lines are short; or line, or blank_line"),
            _ => Choice::new("line", "several large files of long lines; or file, or blank_line"),
        }
    }

    /// Documents of the corpus, roughly.
    fn documents(&self) -> f64 {
        let ratio = if self.summary.compression.keys().any(|name| name != "none") { 3.0 } else { 1.0 };
        if self.summary.format == InputFormat::Text && self.document().value == "file" {
            return self.summary.files as f64;
        }
        let mean = self.column().map_or(f64::INFINITY, |column| column.mean_bytes.max(1.0));
        self.summary.bytes as f64 * ratio / mean
    }
}

fn given_column(summary: &InputSummary, name: &str) -> Result<Choice, Failure> {
    let names: Vec<String> = summary.text_columns.iter().map(|column| column.name.clone()).collect();
    match names.iter().any(|column| column == name) {
        true => Ok(Choice::given(name)),
        false => Err(Failure::Usage(format!("--text: no column {name:?} has text; valid: {}", first_names(&names)))),
    }
}

/// The column with the longest texts; one with a usual name, if its texts are half as long.
fn longest_column(summary: &InputSummary) -> Result<Choice, Failure> {
    let columns = &summary.text_columns;
    let Some(longest) = columns.first() else {
        let others = first_names(&summary.other_columns);
        return Err(Failure::Usage(format!(
            "CORPUS: no column of the {} files has text; their columns: {}",
            summary.format.name(),
            if others.is_empty() { "none" } else { &others }
        )));
    };
    let last_part = |column: &TextColumn| column.name.rsplit('.').next().map(str::to_owned).unwrap_or_default();
    let is_usual = |column: &&TextColumn| {
        TEXT_NAMES.contains(&last_part(column).as_str()) && 2.0 * column.mean_bytes >= longest.mean_bytes
    };
    let chosen = columns.iter().find(is_usual).unwrap_or(longest);
    let why = match columns.len() {
        1 => "the only column with text",
        _ if chosen.name == longest.name => "the longest texts",
        _ => "the usual name, and long texts",
    };
    Ok(Choice::new(&chosen.name, format!("{why}, {} on average", units::bytes(chosen.mean_bytes as u64))))
}

fn known_teacher(summary: &InputSummary, text: &str) -> KnownTeacher {
    let column = summary.text_columns.iter().find(|column| column.name == text);
    match column.and_then(TextColumn::language) {
        Some((language, _)) if language != "English" => MULTILINGUAL,
        _ => ENGLISH,
    }
}

/// The context of a teacher, if it is known without a download.
fn positions_of(teacher: &str) -> Result<Option<usize>, Failure> {
    if let Some(known) = [ENGLISH, MULTILINGUAL].into_iter().find(|known| known.path == teacher) {
        return Ok(Some(known.positions));
    }
    if teacher.contains("://") || teacher.starts_with(['~', '$']) {
        return Ok(None);
    }
    if !Path::new(teacher).exists() {
        let hint = "no such file or folder; a model of the hub is hf://org/name";
        return Err(Failure::Usage(format!("--teacher: {teacher}: {hint}")));
    }
    let read = TeacherConfig::read(Path::new(teacher));
    read.map(|config| Some(config.max_positions)).map_err(|e| Failure::Usage(format!("--teacher: {teacher}: {e}")))
}

/// A path of the command line in a job file, whose relative paths are relative to its own folder.
fn relative_to(path: &str, folder: Option<&Path>) -> String {
    let is_here = folder.is_none_or(|folder| folder.as_os_str().is_empty() || folder == Path::new("."));
    if is_here || path.contains("://") || path.starts_with('~') || path.starts_with("${") {
        return path.to_owned();
    }
    std::path::absolute(path).map_or_else(|_| path.to_owned(), |path| path.to_string_lossy().into_owned())
}

/// A string as YAML reads it back: as it is if that is plain, else as JSON.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    match text.chars().all(is_plain)
        && text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && !is_word(text)
    {
        true => text.to_owned(),
        false => serde_json::Value::from(text).to_string(),
    }
}

/// Words that YAML does not read as strings.
fn is_word(text: &str) -> bool {
    ["null", "true", "false", "yes", "no", "on", "off", "y", "n"].contains(&text.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn column(name: &str, mean_bytes: f64, language: &str) -> TextColumn {
        TextColumn { name: name.into(), texts: 9, mean_bytes, languages: BTreeMap::from([(language.to_owned(), 9)]) }
    }

    fn summary(text_columns: Vec<TextColumn>) -> InputSummary {
        InputSummary {
            format: InputFormat::Parquet,
            files: 3,
            bytes: 9_000_000,
            compression: BTreeMap::from([("none".to_owned(), 3)]),
            other_files: BTreeMap::new(),
            rows: 9,
            text_columns,
            other_columns: vec!["n".into()],
        }
    }

    fn given(corpus: &[String]) -> Given<'_> {
        Given {
            corpus,
            text: None,
            document: None,
            teacher: None,
            no_teacher: false,
            tokenizer: None,
            length: None,
            output: None,
            folder: Some("".into()),
        }
    }

    #[test]
    fn the_usual_name_wins_unless_its_texts_are_short() {
        let choose = |columns| longest_column(&summary(columns)).unwrap();
        let chosen = choose(vec![column("markup", 900.0, "English"), column("text", 800.0, "English")]);
        assert_eq!(
            (chosen.value.as_str(), chosen.reason.as_str()),
            ("text", "the usual name, and long texts, 800 B on average")
        );
        let chosen = choose(vec![column("page", 900.0, "English"), column("text", 30.0, "English")]);
        assert_eq!((chosen.value.as_str(), chosen.reason.as_str()), ("page", "the longest texts, 900 B on average"));
        let chosen = choose(vec![column("meta.x", 5.0, "English")]);
        assert_eq!(chosen.reason, "the only column with text, 5 B on average");
        assert!(longest_column(&summary(Vec::new())).is_err());
    }

    #[test]
    fn answers_replace_proposals_and_wrong_ones_are_named() {
        let of_corpus = summary(vec![column("body", 900.0, "French"), column("title", 80.0, "French")]);
        let corpus = ["data/My Corpus (2).parquet".to_owned()];
        let mut asked = Vec::new();
        let mut proposal = Proposal::new(&of_corpus, given(&corpus)).unwrap();
        let answers = ["title", "", "512"];
        proposal
            .ask(&mut |question, choice| {
                asked.push((question.to_owned(), choice.value.clone()));
                Ok(Some(answers[asked.len() - 1].to_owned()).filter(|answer| !answer.is_empty()))
            })
            .unwrap();
        let expected =
            [("column of the text", "body"), ("teacher", MULTILINGUAL.path), ("tokens per sequence", "1024")];
        assert_eq!(asked, expected.map(|(question, value)| (question.to_owned(), value.to_owned())));
        let job = proposal.job_file();
        for line in [
            "name: my-corpus--2-\n",
            "paths: [\"data/My Corpus (2).parquet\"]",
            "text: title",
            "length: 512",
            "hf://Qwen",
        ] {
            assert!(job.contains(line), "{line}: {job}");
        }
        stillhouse_operators::registry::job_format().read(&job).unwrap();
        for (answers, says) in [
            (["titel", "", ""], "--text: no column \"titel\" has text; valid: body, title"),
            (["", "", "many"], "tokens per sequence: got \"many\""),
            (["", "", "3"], "tokens per sequence: got \"3\""),
            (["", "", "99999"], "--length: got 99999, valid: up to 32768"),
            (["", "/nowhere", ""], "--teacher: /nowhere: "),
        ] {
            let mut n = 0;
            let mut proposal = Proposal::new(&of_corpus, given(&corpus)).unwrap();
            let refused = proposal.ask(&mut |_, _| {
                n += 1;
                Ok(Some(answers[n - 1].to_owned()).filter(|answer| !answer.is_empty()))
            });
            let Err(Failure::Usage(message)) = refused else { panic!("{answers:?} was not refused") };
            assert!(message.contains(says), "{message}");
        }
    }

    #[test]
    fn a_document_of_plain_text_is_a_small_file_or_a_long_line() {
        for (files, bytes, line, unit) in [
            (1, 9_000_000, 900.0, "line"),
            (12, 200_000, 900.0, "file"),
            (3, 90_000_000, 80.0, "file"),
            (3, 90_000_000, 900.0, "line"),
        ] {
            let of_text = InputSummary {
                format: InputFormat::Text,
                files,
                bytes,
                ..summary(vec![column("text", line, "English")])
            };
            let corpus = ["texts".to_owned()];
            let job = Proposal::new(&of_text, given(&corpus)).unwrap().job_file();
            assert!(job.contains(&format!("  document: {unit}  # ")), "{files} files of {bytes}: {job}");
        }
    }

    #[test]
    fn what_yaml_would_read_as_something_else_is_quoted() {
        for (text, written) in [
            ("corpus/a-b.jsonl", "corpus/a-b.jsonl"),
            ("*.jsonl", "\"*.jsonl\""),
            ("true", "\"true\""),
            ("No", "\"No\""),
            ("1e3", "\"1e3\""),
            ("a: b", "\"a: b\""),
            ("a\"b", "\"a\\\"b\""),
            ("~/x", "\"~/x\""),
        ] {
            assert_eq!(quoted(text), written);
        }
    }
}
