//! Tests of listing and decompression.

mod compressed;
mod folder;
mod paths;
mod words;

use serde_json::{Value, json};
use stillhouse_base::path_expansion::PathExpander;
use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::spec::Input;

use super::*;
use crate as input_files;
use folder::*;

/// Endings of text files.
const TEXT: FileEndings = FileEndings { endings: &[".txt"], may_be_compressed: true };

impl Bench {
    fn try_files(&self, input: &Input, names: &PathExpander) -> Result<Vec<InputFile>, ListError> {
        list_files(&self.store, self.paths(input, names), &|_| Ok(()), &mut |_| {})
    }

    fn paths<'a>(&'a self, input: &'a Input, names: &'a PathExpander) -> InputPaths<'a> {
        InputPaths { input, field: "input", base_dir: self.path(), names, endings: TEXT }
    }

    fn files(&self, input: &Input) -> Vec<InputFile> {
        self.try_files(input, &PathExpander::from_environment()).unwrap()
    }
}
