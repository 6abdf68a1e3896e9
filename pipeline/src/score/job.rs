//! Expresses the options of `score` as a job, so that its files, tokenizer and teacher are found, checked and opened
//! like those of any job.

use std::path::Path;

use serde_json::{Value, json};
use stillhouse_operators::registry;
use stillhouse_schemas::parse::Positions;
use stillhouse_schemas::problems::Problems;

use super::ScoreOptions;
use crate::access::Access;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::Observer;
use crate::job::{self, Prepared};
use crate::source;

/// `score` writes no data set, but a job names an output. No path of the input can find anything below a device.
const NO_OUTPUT: &str = "/dev/null/score";

/// Checks the options of `score`. Problems name the options.
pub(super) fn prepare(options: &ScoreOptions, file: &str, named: &str, observer: &dyn Observer) -> Result<Prepared> {
    let Some(format) = options.format.or_else(|| source::format_of_file_name(file)) else {
        let message = format!(
            "{named}: got {file}, whose ending says no format; valid: --format jsonl, text, csv, parquet or arrow"
        );
        return Err(PipelineError::new(ErrorKind::Usage, message));
    };
    let job = json!({
        "version": 1,
        "name": "score",
        "input": {
            "format": format, "paths": [file], "text": options.text, "document": options.document, "on_error": "fail",
        },
        "tokenizer": tokenizer(options),
        "pack": { "length": options.window_tokens },
        "extract": {
            "teacher": {
                "path": options.teacher, "device": options.device, "dtype": options.dtype,
                "batch_tokens": options.batch_tokens.max(options.window_tokens),
            },
        },
        "output": { "path": NO_OUTPUT },
    });
    let mut parsed = registry::job_format().parse(&job.to_string());
    parsed.positions = Positions::default();
    for problem in &mut parsed.problems.0 {
        problem.position = None;
    }
    let here = Path::new("");
    job::prepare(parsed, here, &Access::everything(), observer).map_err(|e| as_options(e, named))
}

fn tokenizer(options: &ScoreOptions) -> Value {
    let mut tokenizer = json!({ "special_tokens": options.special_tokens });
    if let Some(path) = &options.tokenizer {
        tokenizer["path"] = json!(path);
    }
    tokenizer
}

/// Renames the fields of problems to the options that they come from.
fn as_options(mut error: PipelineError, file: &str) -> PipelineError {
    let Some(Problems(problems)) = error.problems.take() else { return error };
    let option = |field: &str| match field {
        f if f.starts_with("input.text") => "--text".to_owned(),
        f if f.starts_with("input.document") => "--document".into(),
        f if f.starts_with("input") => file.to_owned(),
        f if f.starts_with("tokenizer") => "--tokenizer".into(),
        f if f.starts_with("pack") => "--window-tokens".into(),
        f if f.starts_with("extract.teacher.batch_tokens") => "--batch-tokens".into(),
        f if f.starts_with("extract.teacher.device") => "--device".into(),
        f if f.starts_with("extract.teacher.dtype") => "--dtype".into(),
        f if f.starts_with("extract") => "--teacher".into(),
        other => other.to_owned(),
    };
    let lines: Vec<String> = problems
        .into_iter()
        .map(|mut problem| {
            problem.field = option(&problem.field);
            problem.to_string()
        })
        .collect();
    PipelineError::new(error.kind, lines.join("\n"))
}
