//! Checks of a job that need no I/O, each with a name; see [`all`].
//!
//! Checks that look at files, tokenizers and teachers live in the pipeline.

use crate::problems::Problem;
use crate::spec::{
    Boundary, Compression, EngineKind, ExtractMode, InputFormat, JobSpec, NoiseCodec, OrderKind, PackMode, Remainder,
    Separator, TextDocument,
};

/// Runs every check.
pub fn all(job: &JobSpec) -> Vec<Problem> {
    let checks: [fn(&JobSpec, &mut Vec<Problem>); 7] = [
        later_capabilities,
        store_urls,
        input_combinations,
        holdout_names,
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
    if job.input.format == InputFormat::Images {
        later("input.format", "images", "jsonl, text, csv, parquet, arrow");
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

/// Stores other than the local disk are a later capability; credentials in a URL are never shown back.
fn store_urls(job: &JobSpec, problems: &mut Vec<Problem>) {
    let mut check = |field: String, value: &str, hub: bool| {
        let Some((scheme, _)) = value.split_once("://") else { return };
        if scheme == "file" || (hub && scheme == "hf") {
            return;
        }
        let valid = if hub { "a local path or hf://org/name[@revision]" } else { "a local path" };
        problems.push(Problem::new(
            field,
            format!("{scheme}://…"),
            format!("store URLs are not in this version of stillhouse yet; valid now: {valid}"),
        ));
    };
    for (i, path) in job.input.paths.iter().enumerate() {
        check(format!("input.paths[{i}]"), path, false);
    }
    check("output.path".into(), &job.output.path, false);
    if let Some(path) = &job.tokenizer.path {
        check("tokenizer.path".into(), path, true);
    }
    if let Some(extract) = &job.extract {
        check("extract.teacher.path".into(), &extract.teacher.path, true);
    }
}

fn input_combinations(job: &JobSpec, problems: &mut Vec<Problem>) {
    let input = &job.input;
    if input.document != TextDocument::Line && input.format != InputFormat::Text {
        problems.push(Problem::missing("input.document", "is for `format: text` only"));
    }
    if input.csv_delimiter != "," && input.format != InputFormat::Csv {
        problems.push(Problem::missing("input.csv_delimiter", "is for `format: csv` only"));
    }
    if matches!(input.format, InputFormat::Parquet | InputFormat::Arrow)
        && matches!(input.compression, Compression::Gzip | Compression::Zstd)
    {
        problems
            .push(Problem::missing("input.compression", "Parquet and Arrow files compress inside; valid: auto, none"));
    }
    if input.sql.is_some() && input.format == InputFormat::Text && input.document != TextDocument::Line {
        problems.push(Problem::missing("input.sql", "reads text files line by line; valid document: line"));
    }
    for (i, path) in input.paths.iter().enumerate() {
        if path.is_empty() {
            problems.push(Problem::new(format!("input.paths[{i}]"), "\"\"", "is empty"));
        }
    }
    if job.output.path.is_empty() {
        problems.push(Problem::new("output.path", "\"\"", "is empty"));
    }
}

fn holdout_names(job: &JobSpec, problems: &mut Vec<Problem>) {
    for name in job.input.holdout.keys() {
        let good = !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        if !good || name == "train" {
            problems.push(Problem::new(
                format!("input.holdout.{name}"),
                format!("{name:?}"),
                "not a valid split name; valid: lower-case letters, digits and _, other than train",
            ));
        }
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
    let Some(noise) = job.extract.as_ref().and_then(|e| e.noise.as_ref()) else { return };
    if noise.codec == NoiseCodec::Dense && noise.draws > 1 && job.has_short_rows() {
        problems.push(Problem::missing(
            "extract.noise.draws",
            "dense noise of several draws needs rows of one length; valid: 1, or pack.remainder drop or pad",
        ));
    }
}

fn tokenizer_source(job: &JobSpec, problems: &mut Vec<Problem>) {
    if job.tokenizer.path.is_none() && job.extract.is_none() {
        problems.push(Problem::missing("tokenizer.path", "is required in a job without a teacher"));
    }
}

#[cfg(test)]
mod tests {
    use crate::parse::Parsed;

    fn problems(extra: &str, pack: &str) -> String {
        Parsed::from_yaml(&format!(
            "version: 1\nname: a\ninput: {{format: jsonl, paths: [x.jsonl]}}\ntokenizer: {{path: t.json}}\n\
             pack: {pack}\noutput: {{path: out}}\n{extra}"
        ))
        .problems
        .to_string()
    }

    #[test]
    fn wrap_needs_three_tokens() {
        assert!(problems("", "{length: 2}").contains("pack.length: got 2"));
        assert!(problems("", "{length: 2, boundary: none}").contains("has 0 problems"));
    }

    #[test]
    fn store_urls_are_refused_without_being_repeated() {
        let text = Parsed::from_yaml(
            "version: 1\nname: a\ninput: {format: jsonl, paths: ['s3://KEY:SECRET@b/x']}\ntokenizer: {path: t}\n\
             pack: {length: 8}\noutput: {path: 'gs://b/x'}\n",
        )
        .problems
        .to_string();
        assert!(text.contains("input.paths[0]: got s3://…") && text.contains("output.path"), "{text}");
        assert!(!text.contains("SECRET"));
    }

    #[test]
    fn later_capabilities_are_named() {
        let text = problems("extract: {teacher: {path: t}, mode: sequential}\n", "{length: 8}");
        assert!(text.contains("extract.mode: got sequential: not in this version of stillhouse yet"), "{text}");
    }
}
