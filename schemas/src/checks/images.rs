//! Checks of jobs whose records are rows of numbers: images and codes.

use crate::problems::Problem;
use crate::spec::{
    Boundary, Compression, Fit, ImageLabels, Images, InputFormat, JobSpec, Layout, PackMode, Remainder, Separator,
    Tokenizer,
};

/// Checks that the sections of the format are present, and that the job has no keys that do not apply to it.
pub(super) fn check(job: &JobSpec, problems: &mut Vec<Problem>) {
    let format = job.input.format;
    let sections = [
        (InputFormat::Images, "input.images", job.input.images.is_some()),
        (InputFormat::Codes, "input.codes", job.input.codes.is_some()),
    ];
    for (of, field, is_present) in sections {
        match (format == Some(of), is_present) {
            (true, false) => {
                problems.push(Problem::missing(field, format!("is required with `format: {}`", of.name())));
            }
            (false, true) => problems.push(Problem::missing(field, format!("applies only to `format: {}`", of.name()))),
            _ => {}
        }
    }
    if job.input.is_rows() {
        no_text(job, problems);
        packing(job, problems);
    }
    if let (Some(InputFormat::Images), Some(images)) = (format, &job.input.images) {
        image_keys(job, images, problems);
    }
    if format == Some(InputFormat::Codes) && is_compressed(job.input.compression) {
        let message = "compressed .npy and Parquet files are not supported; valid: auto, none";
        problems.push(Problem::missing("input.compression", message));
    }
}

fn is_compressed(compression: Compression) -> bool {
    matches!(compression, Compression::Gzip | Compression::Zstd)
}

/// Refuses keys that apply to text only.
fn no_text(job: &JobSpec, problems: &mut Vec<Problem>) {
    let format_name = job.input.format().name();
    let mut refuse = |field: &str, is_present: bool, why: &str| {
        if is_present {
            problems.push(Problem::missing(field, format!("{why}; leave it out with `format: {format_name}`")));
        }
    };
    refuse(
        "tokenizer",
        job.tokenizer != Tokenizer::default(),
        "makes tokens from text, but here each number is a token",
    );
    refuse("input.sql", job.input.sql.is_some(), "selects rows of text");
    refuse("extract", job.extract.is_some(), "needs a teacher, but no supported family predicts pixels or codes");
}

/// Checks that packing makes each image one row, without separators, boundaries or padding.
fn packing(job: &JobSpec, problems: &mut Vec<Problem>) {
    let pack = &job.pack;
    if pack.separator != Separator::None {
        problems.push(Problem::new("pack.separator", "eos", "a row is an image without a separator; valid: none"));
    }
    if pack.boundary != Boundary::None {
        problems.push(Problem::new(
            "pack.boundary",
            "bos_eos",
            "a row is an image without boundary tokens; valid: none",
        ));
    }
    if pack.mode != PackMode::Wrap || job.remainders().iter().any(|remainder| *remainder != Remainder::Drop) {
        problems.push(Problem::missing(
            "pack.mode",
            "a row is an image, which is neither padded nor cut; leave mode and remainder out",
        ));
    }
    if let Some(needed) = job.input.row_length().filter(|needed| *needed != u64::from(pack.length)) {
        let of = if job.input.images.is_some() {
            "height · width · channels of `input.images`"
        } else {
            "`input.codes.length`"
        };
        let message = format!("a row is {of}; valid: {needed}");
        problems.push(Problem::new("pack.length", pack.length, message));
    }
}

fn image_keys(job: &JobSpec, images: &Images, problems: &mut Vec<Problem>) {
    let (layout, labels) = (images.layout, images.labels());
    let valid: &[ImageLabels] = match layout {
        Layout::Files => &[ImageLabels::None, ImageLabels::Folder],
        Layout::Tar => &[ImageLabels::None, ImageLabels::Folder, ImageLabels::Cls, ImageLabels::Json],
        _ => &[ImageLabels::None, ImageLabels::Stored],
    };
    if !valid.contains(&labels) {
        let words: Vec<&str> = valid.iter().map(|labels| labels_name(*labels)).collect();
        let message = format!("files of this layout do not have such labels; valid: {}", words.join(", "));
        problems.push(Problem::new("input.images.labels", labels_name(labels), message));
    }
    if labels != ImageLabels::Folder && !images.classes.is_empty() {
        problems.push(Problem::missing("input.images.classes", "applies only to `labels: folder`"));
    }
    if layout == Layout::Tar && labels == ImageLabels::Folder && images.classes.is_empty() {
        let message = "is required with folders in tar files: the names of the folders; the first has label 0";
        problems.push(Problem::missing("input.images.classes", message));
    }
    let mut sorted: Vec<&String> = images.classes.iter().collect();
    sorted.sort_unstable();
    if let Some(duplicate) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        problems.push(Problem::new("input.images.classes", format!("{:?}", duplicate[0]), "is a duplicate"));
    }
    if images.fit == Fit::Adm && images.height.is_some_and(|height| height != images.size) {
        problems.push(Problem::missing("input.images.height", "`fit: adm` gives square images; leave it out"));
    }
    if is_compressed(job.input.compression) && !matches!(layout, Layout::Tar | Layout::Idx) {
        let message = "compressed files of this layout are not supported; valid: auto, none";
        problems.push(Problem::missing("input.compression", message));
    }
}

fn labels_name(labels: ImageLabels) -> &'static str {
    match labels {
        ImageLabels::None => "none",
        ImageLabels::Folder => "folder",
        ImageLabels::Cls => "cls",
        ImageLabels::Json => "json",
        ImageLabels::Stored => "stored",
    }
}

#[cfg(test)]
mod tests {
    use crate::parse::JobFormat;

    fn problems(input: &str, pack: &str, more: &str) -> String {
        JobFormat::new(Vec::new())
            .parse(&format!("version: 1\nname: a\ninput: {input}\npack: {pack}\noutput: {{path: out}}\n{more}"))
            .problems
            .to_string()
    }

    const GOOD: &str = "{length: 3072, separator: none, boundary: none}";

    #[test]
    fn an_image_is_a_row() {
        let images = "{format: images, paths: [x], images: {size: 32}}";
        assert!(problems(images, GOOD, "").contains("has 0 problems"), "{}", problems(images, GOOD, ""));
        let grey = "{format: images, paths: [x], images: {size: 28, height: 14, channels: grey}}";
        assert!(problems(grey, "{length: 392, separator: none, boundary: none}", "").contains("has 0 problems"));
        let codes = "{format: codes, paths: [x.npy], codes: {size: 16384, length: 256}}";
        assert!(problems(codes, "{length: 256, separator: none, boundary: none}", "").contains("has 0 problems"));
    }

    #[test]
    fn what_an_image_has_no_use_for_is_refused() {
        let images = |more: &str| format!("{{format: images, paths: [x], images: {{size: 32{more}}}}}");
        let plain = images("");
        for (input, pack, more, says) in [
            ("{format: images, paths: [x]}", GOOD, "", "input.images: is required with `format: images`"),
            ("{format: codes, paths: [x]}", GOOD, "", "input.codes: is required with `format: codes`"),
            (
                "{format: text, paths: [x], codes: {size: 9, length: 8}}",
                "{length: 8}",
                "tokenizer: {path: t}",
                "input.codes: applies only to `format: codes`",
            ),
            (&plain, "{length: 3072, separator: none}", "", "pack.boundary: got bos_eos: a row is an image"),
            (&plain, "{length: 3072, boundary: none}", "", "pack.separator: got eos: a row is an image"),
            (
                &plain,
                "{length: 1024, separator: none, boundary: none}",
                "",
                "pack.length: got 1024: a row is height · width · channels of `input.images`; valid: 3072",
            ),
            (
                &plain,
                "{length: 3072, separator: none, boundary: none, remainder: pad}",
                "",
                "pack.mode: a row is an image, which is neither padded",
            ),
            (&plain, GOOD, "tokenizer: {path: t}", "tokenizer: makes tokens from text"),
            (&plain, GOOD, "extract: {teacher: {path: t}}", "extract: needs a teacher"),
            (
                &images(", labels: cls"),
                GOOD,
                "",
                "input.images.labels: got cls: files of this layout do not have such labels; valid: none, folder",
            ),
            (
                &images(", layout: tar, labels: folder"),
                GOOD,
                "",
                "input.images.classes: is required with folders in tar",
            ),
            (&images(", classes: [a, b, a]"), GOOD, "", "input.images.classes: got \"a\": is a duplicate"),
            (
                &images(", labels: none, classes: [a]"),
                GOOD,
                "",
                "input.images.classes: applies only to `labels: folder`",
            ),
            ("{format: images, paths: [x], images: {size: 0}}", GOOD, "", "input.images.size: got 0: too small"),
            (
                "{format: images, compression: gzip, paths: [x], images: {size: 32}}",
                GOOD,
                "",
                "input.compression: compressed files of this layout",
            ),
        ] {
            let text = problems(input, pack, more);
            assert!(text.contains(says), "{input}: {text}");
        }
        let table = "{tables: {t: {format: images, paths: [x]}}, sql: q}";
        let text = problems(table, "{length: 8}", "tokenizer: {path: t}");
        assert!(text.contains("input.tables.t.format: got images: is not a format for tables"), "{text}");
    }
}
