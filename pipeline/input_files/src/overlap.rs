//! Detects jobs that would read their own output: the output is below an input folder, or an input glob finds files of
//! it.
//!
//! It compares the names that a run gives to its files, not the existing files: after a kill, the same job would find
//! its own shards and states in its input.

use std::collections::HashSet;
use std::path::{Component, Path as DiskPath, PathBuf};

use glob::Pattern;
use object_store::path::Path;
use stillhouse_base::storage::Location;
use stillhouse_schemas::problems::Problem;

use super::input_file::InputFile;
use super::list::{InputPaths, JobPath, MATCH_OPTIONS};
use super::store::Store;

/// Example files of an output, one of each kind.
const OUTPUT_FILES: [&str; 12] = [
    "data/train-00000-of-00001.parquet",
    "manifest.json",
    "tokenizer.json",
    "README.md",
    "_SUCCESS",
    "permutation.npy",
    "filter_table.npy",
    "_stillhouse/plan.json",
    "_stillhouse/lock",
    "_stillhouse/splits/00000.json",
    "_stillhouse/staging/0.parquet",
    "_stillhouse/input/part-00000.parquet",
];

/// Returns the problems of paths that would find files of the output. `files` are those that they find now.
pub fn find_output_overlap(paths: InputPaths<'_>, files: &[InputFile], output: &Location) -> Vec<Problem> {
    let InputPaths { input, field, .. } = paths;
    let Some(output_parts) = location_components(output) else { return Vec::new() };
    let files: HashSet<&str> = files.iter().map(|file| file.path.as_str()).collect();
    let found = |given: &String| {
        // a path of a file finds only that file
        if files.contains(given.as_str()) {
            return None;
        }
        let named = paths.names.expand_all(given).ok()?;
        named.iter().find_map(|named| finds(paths, &named.expanded, &output_parts))
    };
    let problem = |(i, given): (usize, &String)| {
        let file = found(given)?;
        let message = format!(
            "would find the job's own output, {}, such as {file:?} in it; valid: an output outside of what is read, or a narrower path",
            shown(output)
        );
        Some(Problem::new(format!("{field}.paths[{i}]"), format!("{given:?}"), message))
    };
    input.paths.iter().enumerate().filter_map(problem).collect()
}

fn shown(output: &Location) -> String {
    match output {
        Location::Disk(path) => path.display().to_string(),
        Location::Store(url) => url.to_string(),
    }
}

/// Returns the components of a location as the input's stores name it, with links resolved as far as the path exists.
fn location_components(place: &Location) -> Option<Vec<String>> {
    let path = match place {
        Location::Store(url) => Store::location(url),
        Location::Disk(path) => Path::from_absolute_path(resolved(path)?).ok()?,
    };
    Some(parts(&path))
}

fn parts(path: &Path) -> Vec<String> {
    path.parts().map(|part| part.as_ref().to_owned()).collect()
}

fn resolved(path: &DiskPath) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    let there = absolute.ancestors().find_map(|folder| Some((folder, folder.canonicalize().ok()?)));
    let (folder, real) = there?;
    let rest = absolute.strip_prefix(folder).ok()?;
    Some(rest.components().fold(real, |path, part| match part {
        Component::ParentDir => path.parent().map_or(PathBuf::new(), DiskPath::to_owned),
        part => path.join(part),
    }))
}

/// Returns a file of the output that a path of the input would find.
fn finds(paths: InputPaths<'_>, given: &str, output: &[String]) -> Option<&'static str> {
    let JobPath { components, literal, location: head, .. } = JobPath::parse(paths.base_dir, given).ok()?;
    let is_on_disk = head.parts().next().is_none_or(|first| !first.as_ref().ends_with(':'));
    if is_on_disk && literal == components.len() && DiskPath::new("/").join(head.as_ref()).is_file() {
        return None;
    }
    let head = match is_on_disk {
        true => location_components(&Location::Disk(DiskPath::new("/").join(head.as_ref())))?,
        false => parts(&head),
    };
    let patterns: Option<Vec<Pattern>> =
        components[literal..].iter().filter(|c| !c.is_empty()).map(|c| Pattern::new(c).ok()).collect();
    let patterns = patterns?;
    OUTPUT_FILES.into_iter().find(|output_file| {
        let whole: Vec<&str> = output.iter().map(String::as_str).chain(output_file.split('/')).collect();
        let Some(rest) = whole.strip_prefix(head.iter().map(String::as_str).collect::<Vec<_>>().as_slice()) else {
            return false;
        };
        match patterns.is_empty() {
            true => {
                rest.last().is_some_and(|name| paths.endings.match_name(name))
                    && !rest.iter().any(|name| name.starts_with('.'))
            }
            false => matches(&patterns, rest),
        }
    })
}

fn matches(patterns: &[Pattern], names: &[&str]) -> bool {
    match (patterns.split_first(), names.split_first()) {
        (None, None) => true,
        (Some((pattern, rest)), _) if pattern.as_str() == "**" => {
            let here = if rest.is_empty() { names.len() == 1 } else { matches(rest, names) };
            here || names.split_first().is_some_and(|(name, below)| !name.starts_with('.') && matches(patterns, below))
        }
        (Some((pattern, rest)), Some((name, below))) => {
            pattern.matches_with(name, MATCH_OPTIONS) && matches(rest, below)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stillhouse_base::path_expansion::PathExpander;
    use stillhouse_schemas::spec::Input;

    use super::*;
    use crate::endings::FileEndings;

    #[test]
    fn an_output_where_the_input_is_read_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("data/in")).unwrap();
        std::os::unix::fs::symlink(folder.path().join("data"), folder.path().join("link")).unwrap();
        let names = PathExpander::from_environment();
        let read = |format: &str, paths: &[&str], output: &str| {
            let input: Input = serde_json::from_value(json!({"format": format, "paths": paths})).unwrap();
            let output = Location::parse(folder.path(), output).unwrap();
            let endings: &[&str] = match format {
                "parquet" => &[".parquet", ".pq"],
                "jsonl" => &[".jsonl", ".ndjson", ".json"],
                _ => &[".txt"],
            };
            let endings = FileEndings { endings, may_be_compressed: format != "parquet" };
            let paths = InputPaths { input: &input, field: "input", base_dir: folder.path(), names: &names, endings };
            !find_output_overlap(paths, &[], &output).is_empty()
        };
        for (format, path, output) in [
            ("parquet", "data", "data/out"),
            ("parquet", "data/**/*.parquet", "data/out"),
            ("parquet", "data/*/data/*.parquet", "data/out"),
            ("parquet", "link/**/*.parquet", "data/out"),
            ("parquet", "data", "link/out"),
            ("parquet", "data/../data/{in,out/data}/*", "data/out"),
            ("parquet", "data/**", "data/out"),
            ("jsonl", "data/out/*.json", "data/out"),
            ("text", "data/**/README.*", "data/out"),
            ("parquet", "s3://corpora/a", "s3://corpora/a/out"),
            ("parquet", "s3://corpora/*/data/*.parquet", "s3://corpora/out"),
        ] {
            assert!(read(format, &[path], output), "{format} {path} {output}");
        }
        for (format, path, output) in [
            ("parquet", "data/*.parquet", "data/out"),
            ("parquet", "data/in", "data/out"),
            ("text", "data", "data/out"),
            ("parquet", "data/**/*.parquet", "out"),
            ("parquet", "s3://corpora/a", "s3://other/a/out"),
            ("parquet", "s3://corpora/a", "s3://corpora/ab/out"),
            ("parquet", "data", ".hidden/out"),
        ] {
            assert!(!read(format, &[path], output), "{format} {path} {output}");
        }
    }
}
