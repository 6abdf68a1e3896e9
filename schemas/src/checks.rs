//! Checks of a job that need no I/O; [`all`] runs them.
//!
//! The pipeline contains the checks that read files, tokenizers and teachers.

mod images;
mod mixture;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use crate::paths;
use crate::problems::Problem;
use crate::sections::SectionFile;
use crate::spec::{
    Boundary, ColumnType, Compression, Dtype, EngineKind, FILE_COLUMN, INPUT_TABLE, InputFormat, JobSpec, NoiseCodec,
    PackMode, Remainder, Separator, TeacherContext, TextDocument,
};
use crate::storage::{endpoint_problem, split_url};

/// Runs every check of the built-in keys. `files` are those that sections of operators name.
pub fn all(job: &JobSpec, files: Vec<SectionFile>) -> Vec<Problem> {
    let checks: [fn(&JobSpec, &mut Vec<Problem>); 14] = [
        engine_combinations,
        endpoints,
        input_combinations,
        conversations,
        carried_columns,
        input_tables,
        mixture::check,
        images::check,
        no_input,
        holdouts,
        pack_combinations,
        extract_combinations,
        generated_text,
        tokenizer_source,
    ];
    let mut problems = Vec::new();
    for check in checks {
        check(job, &mut problems);
    }
    let paths = job_paths(job, files);
    path_syntax(&paths, &mut problems);
    store_urls(&paths, &mut problems);
    problems
}

/// A cluster requires a scheduler address, and a local engine must not have one.
fn engine_combinations(job: &JobSpec, problems: &mut Vec<Problem>) {
    let problem = match (job.engine.kind, job.engine.scheduler.as_deref()) {
        (EngineKind::Ballista, None) => Problem::missing(
            "engine.scheduler",
            "is required for kind ballista and missing; valid: host:port or https://host:port",
        ),
        (EngineKind::Local, Some(_)) => {
            Problem::missing("engine.scheduler", "needs kind ballista, but engine.kind is local")
        }
        (EngineKind::Ballista, Some(address)) => match scheduler_problem(address) {
            Some(wrong) => Problem::new("engine.scheduler", format!("{address:?}"), wrong),
            None => return,
        },
        (EngineKind::Local, None) => return,
    };
    problems.push(problem);
}

/// Returns what is wrong with the address of a scheduler.
pub fn scheduler_problem(address: &str) -> Option<&'static str> {
    let host_and_port =
        ["https://", "http://"].iter().find_map(|scheme| address.strip_prefix(scheme)).unwrap_or(address);
    (!is_host_and_port(host_and_port)).then_some("valid: host:port or https://host:port, such as 127.0.0.1:50050")
}

fn is_host_and_port(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_host_char = |c: char| c.is_ascii_alphanumeric() || ".-:_".contains(c);
    !host.is_empty() && host.chars().all(is_host_char) && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Checks the syntax of `~`, `${VAR}` and `{a,b}` in paths. Their values are checked later, where they are known.
fn path_syntax(paths: &[JobPath<'_>], problems: &mut Vec<Problem>) {
    for JobPath { field, path, role } in paths {
        let wrong = paths::parts(path).err();
        let braces = || paths::alternatives(path).err().filter(|_| *role == PathRole::Input);
        if let Some(message) = wrong.or_else(braces) {
            problems.push(Problem::missing(field.clone(), message));
        }
    }
}

/// Maximum number of paths that all braces of a job may expand to.
const MAX_ALTERNATIVES: usize = 100_000;

/// Refuses braces that expand to an unreasonable number of paths, before expanding any.
pub fn too_many_alternatives(job: &JobSpec) -> Option<Problem> {
    let all = job.input.all_paths().map(|(_, path)| paths::count(path)).fold(0, usize::saturating_add);
    // paths written without braces may be any number
    (all > MAX_ALTERNATIVES.max(job.input.all_paths().count())).then(|| {
        let message = format!("its braces expand to more than {MAX_ALTERNATIVES} paths; name a folder or use *");
        Problem::missing("input.paths", message)
    })
}

/// The role of a path in a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathRole {
    /// A path in `input.paths`, or in the paths of a table.
    Input,
    /// `output.path`.
    Output,
    /// A teacher or a tokenizer.
    Model,
    /// A file on this machine.
    File,
}

/// A path that a job names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobPath<'a> {
    /// Field of the job file.
    pub field: String,
    /// The path as the job file has it.
    pub path: Cow<'a, str>,
    /// What it names.
    pub role: PathRole,
}

/// Returns the paths of a job. `files` are those that sections of operators name.
pub(crate) fn job_paths(job: &JobSpec, files: Vec<SectionFile>) -> Vec<JobPath<'_>> {
    let named = |field: String, path, role| JobPath { field, path: Cow::Borrowed(path), role };
    let inputs = job.input.all_paths().map(|(field, path)| named(field, path.as_str(), PathRole::Input));
    let mut paths: Vec<_> = inputs.collect();
    paths.push(named("output.path".into(), &job.output.path, PathRole::Output));
    paths.extend(job.tokenizer.path.as_deref().map(|path| named("tokenizer.path".into(), path, PathRole::Model)));
    let teacher = job.extract.as_ref().map(|e| e.teacher.path.as_str());
    paths.extend(teacher.map(|path| named("extract.teacher.path".into(), path, PathRole::Model)));
    let file =
        |file: SectionFile| JobPath { field: file.field.into_owned(), path: file.path.into(), role: PathRole::File };
    paths.extend(files.into_iter().map(file));
    paths
}

/// Checks that each path is of a kind that its field allows.
fn store_urls(paths: &[JobPath<'_>], problems: &mut Vec<Problem>) {
    for JobPath { field, path, role } in paths {
        // paths with variables are checked once their values are known
        if !paths::is_plain(path) {
            continue;
        }
        let alternatives = match role {
            PathRole::Input => paths::alternatives(path).unwrap_or_default(),
            _ => vec![path.to_string()],
        };
        problems.extend(alternatives.iter().find_map(|path| path_problem(field, path, *role)));
    }
}

/// Returns why a path, after expansion of variables and braces, is invalid for its role. The problem shows only the
/// scheme, since the rest may contain a credential.
pub fn path_problem(field: &str, path: &str, role: PathRole) -> Option<Problem> {
    let message = match (role, split_url(path)) {
        (PathRole::Model, _) => {
            let (scheme, _) = path.split_once("://")?;
            if matches!(scheme, "file" | "hf") {
                return None;
            }
            let valid = "a local path or hf://org/name[@revision]";
            format!("this version of stillhouse does not support store URLs here; valid: {valid}")
        }
        (PathRole::File, _) => {
            let (scheme, _) = path.split_once("://")?;
            if scheme == "file" {
                return None;
            }
            "this version of stillhouse supports only local files here; valid: a local path".into()
        }
        (_, Some(Err(message))) => message,
        (PathRole::Output, Some(Ok(parts))) if parts.scheme.is_web() => {
            "plain HTTP has no multipart upload and no conditional commit; valid: s3://, gs://, az:// or a path".into()
        }
        (PathRole::Output, Some(Ok(parts))) if parts.scheme.is_read_only() => {
            "the hub is only read from; valid: s3://, gs://, az:// or a path".into()
        }
        (PathRole::Output, Some(Ok(parts))) if parts.key.contains(['*', '?', '[']) => {
            "must be a single folder; valid: a key without *, ? and [".into()
        }
        _ => return None,
    };
    let scheme = path.split_once("://").map_or("", |(scheme, _)| scheme);
    Some(Problem::new(field, format!("{scheme}://…"), message))
}

fn endpoints(job: &JobSpec, problems: &mut Vec<Problem>) {
    let positions = [
        ("storage", Some(&job.storage)),
        ("input.storage", job.input.storage.as_ref()),
        ("output.storage", job.output.storage.as_ref()),
    ];
    for (field, storage) in positions {
        if let Some(problem) = storage.and_then(|s| s.endpoint.as_ref()).and_then(|e| endpoint_problem(e)) {
            problems.push(Problem::missing(format!("{field}.endpoint"), problem));
        }
    }
}

fn input_combinations(job: &JobSpec, problems: &mut Vec<Problem>) {
    let input = &job.input;
    if input.document != TextDocument::Line && input.format() != InputFormat::Text {
        problems.push(Problem::missing("input.document", "applies only to `format: text`"));
    }
    for (name, table) in &input.tables {
        if table.document != TextDocument::Line && table.format != InputFormat::Text {
            let message = "applies only to `format: text`";
            problems.push(Problem::missing(format!("input.tables.{name}.document"), message));
        }
    }
    for source in input.sources() {
        let (field, input) = (source.field, source.input);
        if input.csv_delimiter != "," && input.format() != InputFormat::Csv {
            problems.push(Problem::missing(format!("{field}.csv_delimiter"), "applies only to `format: csv`"));
        }
        if !input.schema.is_empty() && !input.format().has_untyped_columns() {
            problems.push(Problem::missing(
                format!("{field}.schema"),
                "applies only to `format: jsonl` and `csv`; other formats store types",
            ));
        }
        if !input.schema.is_empty() && !job.input.is_staged() {
            problems.push(Problem::missing(
                format!("{field}.schema"),
                "applies to the columns of tables; set input.sql or input.tables, too",
            ));
        }
        if input.schema.get(&input.text).is_some_and(|kind| *kind != ColumnType::String) {
            problems
                .push(Problem::missing(format!("{field}.schema.{}", input.text), "is the text column; valid: string"));
        }
        if input.format().is_table()
            && input.format().compresses_inside()
            && matches!(input.compression, Compression::Gzip | Compression::Zstd)
        {
            let message = "Parquet and Arrow files compress inside; valid: auto, none";
            problems.push(Problem::missing(format!("{field}.compression"), message));
        }
    }
    for (field, path) in input.all_paths() {
        if path.is_empty() {
            problems.push(Problem::new(field, "\"\"", "is empty"));
        }
    }
    if job.output.path.is_empty() {
        problems.push(Problem::new("output.path", "\"\"", "is empty"));
    }
}

/// Checks the keys of conversations. The section `chat` checks the other sections.
fn conversations(job: &JobSpec, problems: &mut Vec<Problem>) {
    let input = &job.input;
    let has_section = job.sections.contains("chat");
    match (&input.messages, has_section) {
        (Some(_), false) => {
            problems.push(Problem::missing("chat", "is required with `input.messages`, such as `chat: {}`"));
        }
        (None, true) => {
            let message = "is required with `chat`: the column of the messages, such as `messages: messages`";
            problems.push(Problem::missing("input.messages", message));
        }
        _ => {}
    }
    if input.tools.is_some() && input.messages.is_none() {
        problems.push(Problem::missing("input.tools", "applies only to conversations; set input.messages, too"));
    }
    if input.messages.is_some() {
        let format = input.format();
        if !matches!(format, InputFormat::Jsonl | InputFormat::Parquet) {
            let message = "has no lists of messages that this version reads; valid: jsonl, parquet";
            problems.push(Problem::new("input.format", format.name(), message));
        }
        if input.sql.is_some() {
            problems.push(Problem::missing(
                "input.sql",
                "makes text, and conversations are lists; remove it or `messages`",
            ));
        }
    }
}

/// Checks the names of columns that stay with documents.
fn carried_columns(job: &JobSpec, problems: &mut Vec<Problem>) {
    let input = &job.input;
    if input.carry.is_empty() {
        return;
    }
    let format = input.format();
    if !format.is_table() && !input.is_staged() {
        let message = format!("applies to documents of text, and `format: {}` has none; remove it", format.name());
        problems.push(Problem::missing("input.carry", message));
        return;
    }
    if job.sequential().is_some() {
        let message = "applies to documents of the input, and here the teacher writes the text; remove it";
        problems.push(Problem::missing("input.carry", message));
        return;
    }
    for (i, name) in input.carry.iter().enumerate() {
        let wrong = if name.is_empty() {
            Some("is empty; valid: the name of a column".to_owned())
        } else if input.carry.iter().take(i).any(|earlier| earlier == name) {
            Some("is there twice; valid: each name once".to_owned())
        } else if format == InputFormat::Text && !input.is_staged() && name != FILE_COLUMN {
            Some(format!("files of text have no columns; valid: {FILE_COLUMN}"))
        } else {
            None
        };
        problems.extend(wrong.map(|message| Problem::new(format!("input.carry[{i}]"), format!("{name:?}"), message)));
    }
}

/// Checks that there is input, and the names of tables.
fn input_tables(job: &JobSpec, problems: &mut Vec<Problem>) {
    const REQUIRED: &str = "is required and missing";
    let input = &job.input;
    if input.format == Some(InputFormat::None) {
        return;
    }
    if input.tables.is_empty() && input.paths.is_empty() {
        problems.push(Problem::missing("input.paths", REQUIRED));
    }
    if input.format.is_none() && (input.tables.is_empty() || !input.paths.is_empty()) {
        problems.push(Problem::missing("input.format", REQUIRED));
    }
    for name in input.tables.keys() {
        let is_word = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        let is_taken = name == INPUT_TABLE && !input.paths.is_empty();
        if !is_word || !name.starts_with(|c: char| c.is_ascii_lowercase()) || is_taken {
            let message = match is_taken {
                true => "is the table of `input.paths`; valid: another name",
                false => {
                    "not a valid name of a table; valid: lower-case letters, digits and _, beginning with a letter"
                }
            };
            problems.push(Problem::new(format!("input.tables.{name}"), format!("{name:?}"), message));
        }
    }
}

/// Checks `input.format: none` and the keys that go with it.
fn no_input(job: &JobSpec, problems: &mut Vec<Problem>) {
    let input = &job.input;
    for (name, table) in &input.tables {
        if !table.format.is_table() {
            let valid: Vec<_> = InputFormat::tables().map(InputFormat::name).collect();
            let message = format!("is not a format for tables; valid: {}", valid.join(", "));
            problems.push(Problem::new(format!("input.tables.{name}.format"), table.format.name(), message));
        }
    }
    if input.format != Some(InputFormat::None) {
        if let Some(documents) = input.documents {
            let message = "applies only to `format: none`; with files, the files decide the number of documents";
            problems.push(Problem::new("input.documents", documents, message));
        }
        return;
    }
    if input.documents.is_none() {
        problems.push(Problem::missing(
            "input.documents",
            "is required with `format: none`: the number of texts that the teacher writes",
        ));
    }
    let given = [
        ("input.paths", !input.paths.is_empty()),
        ("input.tables", !input.tables.is_empty()),
        ("input.sql", input.sql.is_some()),
    ];
    for (field, _) in given.into_iter().filter(|(_, given)| *given) {
        problems.push(Problem::missing(field, "`format: none` reads nothing; leave it out"));
    }
    if job.sequential().is_none() {
        let message = "documents without text need a teacher that writes it; valid: jsonl, text, csv, parquet, arrow, or extract.mode sequential";
        problems.push(Problem::new("input.format", "none", message));
    }
    for (name, holdout) in &input.holdout {
        let by_text = [("share", holdout.share.is_some()), ("documents", holdout.documents.is_some())];
        for (rule, _) in by_text.into_iter().filter(|(_, given)| *given) {
            let message =
                "depends on the text of documents, which is always empty with `format: none`; valid: last_documents";
            problems.push(Problem::missing(format!("input.holdout.{name}.{rule}"), message));
        }
    }
}

/// Checks a job whose text the teacher writes.
fn generated_text(job: &JobSpec, problems: &mut Vec<Problem>) {
    let Some(extract) = &job.extract else { return };
    let Some(generated) = job.sequential() else {
        if extract.sequential.is_some() {
            problems.push(Problem::missing("extract.sequential", "applies only to `mode: sequential`"));
        }
        return;
    };
    let mut wrong = |field: &str, got: &str, valid: &str| {
        problems.push(Problem::new(
            field,
            got,
            format!("not supported if the teacher writes the text; valid: {valid}"),
        ));
    };
    if job.pack.mode != PackMode::Pad {
        let got = if job.pack.mode == PackMode::Wrap { "wrap" } else { "best_fit" };
        wrong("pack.mode", got, "pad, because every text has its own row");
    }
    if job.pack.boundary != Boundary::BosEos {
        wrong("pack.boundary", "none", "bos_eos, because a text begins after bos");
    }
    if extract.context != TeacherContext::Sequence {
        wrong("extract.context", "document", "sequence, because a row is one text");
    }
    if extract.noise.is_some() {
        let message = "the seed gives the noise of text that the teacher writes, so none is stored; leave it out";
        problems.push(Problem::missing("extract.noise", message));
    }
    let (prompt, field) = (generated.prompt_tokens, "extract.sequential.prompt_tokens");
    let max_prompt_tokens = job.pack.length.saturating_sub(2);
    if job.input.format == Some(InputFormat::None) {
        if prompt > 0 {
            problems.push(Problem::new(field, prompt, "input.format none has no prompts; valid: 0"));
        }
    } else if prompt == 0 {
        let valid = format!(
            "1 to {max_prompt_tokens}, the number of tokens of each document that begin its text; or input.format none, for texts that begin after bos"
        );
        problems.push(Problem::new(field, prompt, format!("the input would not be used; valid: {valid}")));
    } else if prompt > max_prompt_tokens {
        let message = format!(
            "leaves no position after bos for a token that the teacher writes; valid: 1 to {max_prompt_tokens}"
        );
        problems.push(Problem::new(field, prompt, message));
    }
}

fn holdouts(job: &JobSpec, problems: &mut Vec<Problem>) {
    let mut sum = 0.0;
    for (name, holdout) in &job.input.holdout {
        let field = format!("input.holdout.{name}");
        let is_valid_name =
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        if !is_valid_name || name == "train" {
            problems.push(Problem::new(
                field.clone(),
                format!("{name:?}"),
                "not a valid split name; valid: lower-case letters, digits and _, other than train",
            ));
        }
        let given = [
            ("last_documents", holdout.last_documents.is_some()),
            ("share", holdout.share.is_some()),
            ("documents", holdout.documents.is_some()),
        ];
        let given: Vec<&str> = given.into_iter().filter(|(_, is)| *is).map(|(name, _)| name).collect();
        if given.len() != 1 {
            let got = if given.is_empty() { "none".to_owned() } else { given.join(" and ") };
            problems.push(Problem::new(field, got, "valid: exactly one of last_documents, share, documents"));
        }
        sum += holdout.share.unwrap_or(0.0);
    }
    if sum >= 1.0 {
        let message = "the shares add up to 1 or more; valid: less than 1, so that documents remain for train";
        problems.push(Problem::new("input.holdout", sum, message));
    }
}

fn pack_combinations(job: &JobSpec, problems: &mut Vec<Problem>) {
    let pack = &job.pack;
    if pack.boundary == Boundary::BosEos && pack.length < 3 {
        problems.push(Problem::new(
            "pack.length",
            pack.length,
            "boundary bos_eos needs one token between bos and eos; valid: 3 or more",
        ));
    }
    if pack.mode == PackMode::Pad && pack.separator == Separator::None && pack.boundary == Boundary::BosEos {
        problems.push(Problem::missing(
            "pack.separator",
            "has no effect with mode pad and boundary bos_eos (the row ends with eos); leave it out",
        ));
    }
    let why = match pack.mode {
        PackMode::Wrap => return,
        PackMode::Pad => "applies only to mode wrap; with mode pad every document is a row; leave it out",
        PackMode::BestFit => "applies only to mode wrap; with mode best_fit every row is padded; leave it out",
    };
    let others = job.remainders().into_iter().filter(|remainder| *remainder != Remainder::Drop);
    problems.extend(others.map(|_| Problem::missing("pack.remainder", why)));
}

fn extract_combinations(job: &JobSpec, problems: &mut Vec<Problem>) {
    let teacher = job.extract.as_ref().map(|e| &e.teacher);
    if teacher.is_some_and(|t| t.dtype == Dtype::Fp8 && t.max_mean_kl_nats.is_none()) {
        let message = "is required with dtype fp8: the largest mean KL from f32 that you accept, in nat, such as 0.01";
        problems.push(Problem::missing("extract.teacher.max_mean_kl_nats", message));
    }
    if let Some(extract) = &job.extract {
        let temperatures = extract.logz_temperatures.iter().map(f64::to_string);
        let candidates = extract.candidates.iter().map(u32::to_string);
        no_duplicates("extract.logz_temperatures", temperatures.collect(), problems);
        no_duplicates("extract.candidates", candidates.collect(), problems);
        let layers = extract.hidden_states.iter().flat_map(|states| states.layers.iter().map(u32::to_string));
        no_duplicates("extract.hidden_states.layers", layers.collect(), problems);
    }
    let Some(noise) = job.extract.as_ref().and_then(|e| e.noise.as_ref()) else { return };
    if noise.codec == NoiseCodec::Dense && noise.draws > 1 && job.has_short_rows() {
        problems.push(Problem::missing(
            "extract.noise.draws",
            "dense noise with several draws needs rows of equal length; valid: 1, or pack.remainder drop or pad",
        ));
    }
}

/// Checks that a list, each value of which becomes a column, has no duplicates.
fn no_duplicates(field: &str, values: Vec<String>, problems: &mut Vec<Problem>) {
    let mut seen = std::collections::BTreeSet::new();
    for (i, value) in values.into_iter().enumerate() {
        if !seen.insert(value.clone()) {
            problems.push(Problem::new(format!("{field}[{i}]"), value, "is a duplicate; valid: each value once"));
        }
    }
}

fn tokenizer_source(job: &JobSpec, problems: &mut Vec<Problem>) {
    if job.tokenizer.path.is_none() && job.extract.is_none() && !job.input.is_rows() {
        problems.push(Problem::missing("tokenizer.path", "is required in a job without a teacher"));
    }
}
