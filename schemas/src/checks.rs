//! Checks of a job that need no I/O, each with a name; see [`all`].
//!
//! Checks that look at files, tokenizers and teachers live in the pipeline.

use crate::paths;
use crate::problems::Problem;
use crate::spec::{
    Boundary, Compression, Dtype, EngineKind, ExtractMode, INPUT_TABLE, InputFormat, JobSpec, NoiseCodec, OrderKind,
    PackMode, Remainder, Separator, TextDocument,
};
use crate::storage::{endpoint_problem, split_url};

/// Runs every check.
pub fn all(job: &JobSpec) -> Vec<Problem> {
    let checks: [fn(&JobSpec, &mut Vec<Problem>); 10] = [
        later_capabilities,
        written_paths,
        store_urls,
        endpoints,
        input_combinations,
        input_tables,
        holdouts,
        pack_combinations,
        extract_combinations,
        tokenizer_source,
    ];
    let mut problems = Vec::new();
    for check in checks {
        check(job, &mut problems);
    }
    problems
}

fn later_capabilities(job: &JobSpec, problems: &mut Vec<Problem>) {
    let mut later = |field: &str, got: &str, valid: &str| {
        problems.push(Problem::new(field, got, format!("not in this version of stillhouse yet; valid now: {valid}")));
    };
    if job.input.format == Some(InputFormat::Images) {
        later("input.format", "images", "jsonl, text, csv, parquet, arrow");
    }
    for (name, table) in &job.input.tables {
        if table.format == InputFormat::Images {
            later(&format!("input.tables.{name}.format"), "images", "jsonl, text, csv, parquet, arrow");
        }
    }
    if job.extract.as_ref().is_some_and(|e| e.mode == ExtractMode::Sequential) {
        later("extract.mode", "sequential", "parallel");
    }
    match job.orders.kind {
        OrderKind::None => {}
        OrderKind::Progressive => later("orders.kind", "progressive", "none"),
        OrderKind::Strided => later("orders.kind", "strided", "none"),
    }
    if job.engine.kind == EngineKind::Ballista {
        later("engine.kind", "ballista", "local");
    }
}

/// `~`, `${VAR}` and `{a,b}` as such; what they stand for is looked at where it is known.
fn written_paths(job: &JobSpec, problems: &mut Vec<Problem>) {
    for (field, path, purpose) in named_paths(job) {
        let wrong = paths::parts(path).err();
        let braces = || paths::alternatives(path).err().filter(|_| purpose == Purpose::Input);
        if let Some(message) = wrong.or_else(braces) {
            problems.push(Problem::missing(field, message));
        }
    }
}

/// Paths that all braces of a job may stand for.
const MOST_ALTERNATIVES: usize = 100_000;

/// Refuses braces that stand for more paths than anybody means, before any of them is made.
pub fn too_many_alternatives(job: &JobSpec) -> Option<Problem> {
    let all = job.input.all_paths().map(|(_, path)| paths::count(path)).fold(0, usize::saturating_add);
    // written out, any number is the reader's own matter
    (all > MOST_ALTERNATIVES.max(job.input.all_paths().count())).then(|| {
        let message = format!("its braces stand for more than {MOST_ALTERNATIVES} paths; name a folder or use *");
        Problem::missing("input.paths", message)
    })
}

/// What a path of a job is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// `input.paths` and those of the tables.
    Input,
    /// `output.path`.
    Output,
    /// A teacher or a tokenizer.
    Model,
}

/// The paths of a job, with their fields.
pub fn named_paths(job: &JobSpec) -> Vec<(String, &str, Purpose)> {
    let inputs = job.input.all_paths().map(|(field, path)| (field, path.as_str(), Purpose::Input));
    let mut named: Vec<_> = inputs.collect();
    named.push(("output.path".into(), &job.output.path, Purpose::Output));
    named.extend(job.tokenizer.path.as_deref().map(|path| ("tokenizer.path".into(), path, Purpose::Model)));
    let teacher = job.extract.as_ref().map(|e| e.teacher.path.as_str());
    named.extend(teacher.map(|path| ("extract.teacher.path".into(), path, Purpose::Model)));
    named
}

/// Which places may be named where.
fn store_urls(job: &JobSpec, problems: &mut Vec<Problem>) {
    for (field, path, purpose) in named_paths(job) {
        // with variables it is looked at when these are known
        if !paths::is_plain(path) {
            continue;
        }
        let alternatives = match purpose {
            Purpose::Input => paths::alternatives(path).unwrap_or_default(),
            _ => vec![path.to_owned()],
        };
        problems.extend(alternatives.iter().find_map(|path| place_problem(&field, path, purpose)));
    }
}

/// Why a place, as it is once variables and braces are replaced, cannot be what it is named for. What may hold a credential is never
/// shown back.
pub fn place_problem(field: &str, path: &str, purpose: Purpose) -> Option<Problem> {
    let message = match (purpose, split_url(path)) {
        (Purpose::Model, _) => {
            let (scheme, _) = path.split_once("://")?;
            if matches!(scheme, "file" | "hf") {
                return None;
            }
            let valid = "a local path or hf://org/name[@revision]";
            format!("store URLs are not in this version of stillhouse yet; valid now: {valid}")
        }
        (_, Some(Err(message))) => message,
        (Purpose::Output, Some(Ok(parts))) if parts.scheme.is_web() => {
            "plain HTTP has no multipart upload and no conditional commit; valid: s3://, gs://, az:// or a path".into()
        }
        (Purpose::Output, Some(Ok(parts))) if parts.key.contains(['*', '?', '[']) => {
            "is one folder; valid: a key without *, ? and [".into()
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
        problems.push(Problem::missing("input.document", "is for `format: text` only"));
    }
    for source in input.sources() {
        let (field, input) = (source.field, source.input);
        if input.csv_delimiter != "," && input.format() != InputFormat::Csv {
            problems.push(Problem::missing(format!("{field}.csv_delimiter"), "is for `format: csv` only"));
        }
        if matches!(input.format(), InputFormat::Parquet | InputFormat::Arrow)
            && matches!(input.compression, Compression::Gzip | Compression::Zstd)
        {
            let message = "Parquet and Arrow files compress inside; valid: auto, none";
            problems.push(Problem::missing(format!("{field}.compression"), message));
        }
    }
    if input.sql.is_some() && input.format() == InputFormat::Text && input.document != TextDocument::Line {
        problems.push(Problem::missing("input.sql", "reads text files line by line; valid document: line"));
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

/// There is something to read, and what reads several tables is a query.
fn input_tables(job: &JobSpec, problems: &mut Vec<Problem>) {
    const REQUIRED: &str = "is required and missing";
    let input = &job.input;
    if input.tables.is_empty() && input.paths.is_empty() {
        problems.push(Problem::missing("input.paths", REQUIRED));
    }
    if input.format.is_none() && (input.tables.is_empty() || !input.paths.is_empty()) {
        problems.push(Problem::missing("input.format", REQUIRED));
    }
    if !input.tables.is_empty() && input.sql.is_none() {
        problems.push(Problem::missing("input.sql", "is required with `tables`: a query that makes documents of them"));
    }
    for name in input.tables.keys() {
        let word = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        let taken = name == INPUT_TABLE && !input.paths.is_empty();
        if !word || !name.starts_with(|c: char| c.is_ascii_lowercase()) || taken {
            let message = match taken {
                true => "is the table of `input.paths`; valid: another name",
                false => "not a valid name of a table; valid: lower-case letters, digits and _, a letter first",
            };
            problems.push(Problem::new(format!("input.tables.{name}"), format!("{name:?}"), message));
        }
    }
}

fn holdouts(job: &JobSpec, problems: &mut Vec<Problem>) {
    let mut sum = 0.0;
    for (name, holdout) in &job.input.holdout {
        let field = format!("input.holdout.{name}");
        let good = !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        if !good || name == "train" {
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
        let message = "the shares add up to 1 or more; valid: less, so that something is left for train";
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
    if pack.mode == PackMode::Pad {
        if pack.separator == Separator::None && pack.boundary == Boundary::BosEos {
            problems.push(Problem::missing(
                "pack.separator",
                "has no meaning with mode pad and boundary bos_eos (the row ends with eos); leave it out",
            ));
        }
        for remainder in job.remainders() {
            if remainder != Remainder::Drop {
                problems.push(Problem::missing(
                    "pack.remainder",
                    "is for mode wrap; with mode pad every document is a row; leave it out",
                ));
            }
        }
    }
}

fn extract_combinations(job: &JobSpec, problems: &mut Vec<Problem>) {
    let teacher = job.extract.as_ref().map(|e| &e.teacher);
    if teacher.is_some_and(|t| t.dtype == Dtype::Int8 && t.max_mean_kl_nats.is_none()) {
        let message = "is required with dtype int8: the largest mean KL from f32 that you accept, in nat, such as 0.01";
        problems.push(Problem::missing("extract.teacher.max_mean_kl_nats", message));
    }
    if let Some(extract) = &job.extract {
        let temperatures = extract.logz_temperatures.iter().map(f64::to_string);
        let candidates = extract.candidates.iter().map(u32::to_string);
        unlike("extract.logz_temperatures", temperatures.collect(), problems);
        unlike("extract.candidates", candidates.collect(), problems);
    }
    let Some(noise) = job.extract.as_ref().and_then(|e| e.noise.as_ref()) else { return };
    if noise.codec == NoiseCodec::Dense && noise.draws > 1 && job.has_short_rows() {
        problems.push(Problem::missing(
            "extract.noise.draws",
            "dense noise of several draws needs rows of one length; valid: 1, or pack.remainder drop or pad",
        ));
    }
}

/// A list of columns' values has each of them once.
fn unlike(field: &str, values: Vec<String>, problems: &mut Vec<Problem>) {
    let mut seen = std::collections::BTreeSet::new();
    for (i, value) in values.into_iter().enumerate() {
        if !seen.insert(value.clone()) {
            problems.push(Problem::new(format!("{field}[{i}]"), value, "stands there twice; valid: each once"));
        }
    }
}

fn tokenizer_source(job: &JobSpec, problems: &mut Vec<Problem>) {
    if job.tokenizer.path.is_none() && job.extract.is_none() {
        problems.push(Problem::missing("tokenizer.path", "is required in a job without a teacher"));
    }
}

#[cfg(test)]
mod tests {
    use crate::parse::JobFormat;

    fn format() -> &'static JobFormat {
        static FORMAT: std::sync::LazyLock<JobFormat> = std::sync::LazyLock::new(|| JobFormat::new(Vec::new()));
        &FORMAT
    }

    fn problems(extra: &str, pack: &str) -> String {
        format()
            .parse(&format!(
                "version: 1\nname: a\ninput: {{format: jsonl, paths: [x.jsonl]}}\ntokenizer: {{path: t.json}}\n\
             pack: {pack}\noutput: {{path: out}}\n{extra}"
            ))
            .problems
            .to_string()
    }

    #[test]
    fn eight_bits_need_a_bound() {
        let text = problems("extract: {teacher: {path: t, dtype: int8}}\n", "{length: 8}");
        assert!(text.contains("extract.teacher.max_mean_kl_nats: is required with dtype int8"), "{text}");
        let signals = "logz_temperatures: [1, 2, 1], candidates: [5, 5]";
        let text = problems(&format!("extract: {{teacher: {{path: t}}, {signals}}}\n"), "{length: 8}");
        assert!(text.contains("extract.logz_temperatures[2]: got 1: stands there twice"), "{text}");
        assert!(text.contains("extract.candidates[1]: got 5: stands there twice"), "{text}");
        let signals = "logz_temperatures: [0], samples: {draws: 0, power: 3}, top_p: {mass: 1.5, most: 0}";
        let text = problems(&format!("extract: {{teacher: {{path: t}}, {signals}}}\n"), "{length: 8}");
        for field in ["logz_temperatures[0]", "samples.draws", "samples.power", "top_p.mass", "top_p.most"] {
            assert!(text.contains(&format!("extract.{field}: got ")), "{field}: {text}");
        }
        let good = problems("extract: {teacher: {path: t, dtype: int8, max_mean_kl_nats: 0.01}}\n", "{length: 8}");
        assert!(good.contains("has 0 problems"), "{good}");
    }

    #[test]
    fn wrap_needs_three_tokens() {
        assert!(problems("", "{length: 2}").contains("pack.length: got 2"));
        assert!(problems("", "{length: 2, boundary: none}").contains("has 0 problems"));
    }

    fn positions(input: &str, output: &str, more: &str) -> String {
        format()
            .parse(&format!(
                "version: 1\nname: a\ninput: {{format: jsonl, paths: ['{input}']}}\ntokenizer: {{path: t}}\n\
             pack: {{length: 8}}\noutput: {{path: '{output}'}}\n{more}"
            ))
            .problems
            .to_string()
    }

    #[test]
    fn stores_are_read_from_and_written_to() {
        for (input, output) in [
            ("s3://b/year=202?/*.jsonl", "s3://b/out"),
            ("gs://b/x", "gs://b/y"),
            ("az://b/x", "az://b"),
            ("https://h:8443/x.jsonl", "out"),
            ("file:///x.jsonl", "file:///out"),
        ] {
            let text =
                positions(input, output, "storage: {endpoint: 'http://127.0.0.1:9000', retry: {max_attempts: 3}}\n");
            assert!(text.contains("has 0 problems"), "{text}");
        }
        let text = positions("x", "https://h/out", "");
        assert!(text.contains("output.path: got https://…: plain HTTP has no multipart upload"), "{text}");
        assert!(positions("x", "s3://", "").contains("output.path: got s3://…: names no bucket"));
        assert!(positions("x", "s3://b/*", "").contains("is one folder"));
        assert!(positions("ftp://h/x", "o", "").contains("input.paths[0]: got ftp://…: no store of this kind"));
    }

    #[test]
    fn secrets_are_refused_without_being_repeated() {
        for (input, output, more) in [
            ("s3://KEY:SECRET@b/x", "o", ""),
            ("x", "gs://b/x?token=SECRET", ""),
            ("x", "o", "storage: {endpoint: 'http://k:SECRET@h'}\n"),
            ("x", "o", "storage: {secret_access_key: SECRET}\n"),
            ("x", "o", "storage: SECRET\n"),
            ("x", "o", "storage: {anonymous: SECRET, region: 'SECRET/'}\n"),
            ("x", "o", "storage: {retry: {token: SECRET}}\n"),
        ] {
            let text = positions(input, output, more);
            assert!(!text.contains("0 problems") && !text.contains("SECRET"), "{text}");
        }
        let text = positions("x", "o", "storage: {secret_access_key: SECRET}\n");
        assert!(text.contains("storage.secret_access_key: unknown key; valid keys here: anonymous, "), "{text}");
    }

    #[test]
    fn models_are_not_in_stores_yet() {
        let text = problems("extract: {teacher: {path: 's3://b/m'}}\n", "{length: 8}");
        assert!(text.contains("extract.teacher.path: got s3://…: store URLs are not in this version"), "{text}");
    }

    fn inputs(input: &str) -> String {
        format().parse(&format!(
            "version: 1\nname: a\ninput: {input}\ntokenizer: {{path: t}}\npack: {{length: 8}}\noutput: {{path: o}}\n"
        ))
        .problems
        .to_string()
    }

    #[test]
    fn holdouts_name_one_rule_each_and_leave_something() {
        let held = |holdout: &str| inputs(&format!("{{format: jsonl, paths: [x], holdout: {holdout}}}"));
        let good = "{a: {last_documents: 3}, b: {share: 0.5}, c: {share: 0.25}, d: {documents: 9, remainder: pad}}";
        assert!(held(good).contains("has 0 problems"), "{}", held(good));
        for (holdout, says) in [
            ("{a: {}}", "input.holdout.a: got none: valid: exactly one of last_documents, share, documents"),
            ("{a: {share: 0.1, documents: 3}}", "input.holdout.a: got share and documents: valid: exactly one"),
            ("{a: {share: 0.5}, b: {share: 0.5}}", "input.holdout: got 1: the shares add up to 1 or more"),
            ("{a: {share: 0}}", "input.holdout.a.share: got 0: too small"),
            ("{a: {share: 1}}", "input.holdout.a.share: got 1: too large"),
            ("{train: {share: 0.1}}", "input.holdout.train: got \"train\": not a valid split name"),
            ("{A: {share: 0.1}}", "input.holdout.A: got \"A\": not a valid split name"),
        ] {
            let text = held(holdout);
            assert!(text.contains(says) && text.contains("has 1 problem\n"), "{holdout}: {text}");
        }
    }

    #[test]
    fn tables_need_a_query_and_names() {
        let good =
            "{tables: {docs: {format: jsonl, paths: [x]}, labels: {format: csv, paths: [y]}}, sql: SELECT 1 AS text}";
        assert!(inputs(good).contains("has 0 problems"), "{}", inputs(good));
        for (input, says) in [
            ("{format: jsonl}", "input.paths: is required and missing"),
            ("{paths: [x]}", "input.format: is required and missing"),
            ("{tables: {a: {format: jsonl, paths: [x]}}}", "input.sql: is required with `tables`"),
            ("{tables: {a: {format: jsonl, paths: [x]}}, paths: [x], sql: q}", "input.format: is required and missing"),
            ("{tables: {a: {format: jsonl, paths: ['']}}, sql: q}", "input.tables.a.paths[0]: got \"\": is empty"),
            ("{tables: {a: {format: jsonl, paths: ['ftp://x']}}, sql: q}", "input.tables.a.paths[0]: got ftp://…"),
            ("{tables: {1a: {format: jsonl, paths: [x]}}, sql: q}", "input.tables.1a: got \"1a\": not a valid name"),
            (
                "{tables: {input: {format: jsonl, paths: [x]}}, format: jsonl, paths: [x], sql: q}",
                "input.tables.input: got \"input\": is the table of `input.paths`",
            ),
        ] {
            let text = inputs(input);
            assert!(text.contains(says) && text.contains("has 1 problem\n"), "{input}: {text}");
        }
    }

    #[test]
    fn later_capabilities_are_named() {
        let text = problems("extract: {teacher: {path: t}, mode: sequential}\n", "{length: 8}");
        assert!(text.contains("extract.mode: got sequential: not in this version of stillhouse yet"), "{text}");
    }
}
