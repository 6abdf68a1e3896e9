//! Class folders of images: whether the tree says without doubt which folder is a class, where the job leaves that to the folders.
//!
//! ```text
//!   images/cat/1.jpg  images/fish/2.jpg                      cat 0, fish 1
//!   images/cat/1.jpg  images/fish/2.jpg  images/readme.jpg   refused: `images` would be a class
//!   images/cat/1.jpg  images/fish/2023/2.jpg                 refused: `2023` would be a class
//!   images/cat/1.jpg  images/dog/                            refused: `dog` would have no number
//! ```
//!
//! A label is the place of its folder's name among all names, so that one folder more or less moves the labels of the others. `input.images.classes`
//! names them all and ends the doubt.

use std::collections::{BTreeMap, HashMap, HashSet};

use object_store::path::Path;
use stillhouse_schemas::spec::{ImageLabels, Input, Layout};

use super::input_file::InputFile;

/// A folder below which no file was found.
#[derive(Debug)]
pub(super) struct EmptyFolder {
    pub shown: String,
    pub location: Path,
}

const VALID: &str =
    "valid: class folders on one level and nothing beside them, or all classes by name in `input.images.classes`";

/// Whether the names of the folders become the classes.
pub(super) fn are_folders(input: &Input) -> bool {
    input.images.as_ref().is_some_and(|images| {
        images.layout == Layout::Files && images.labels() == ImageLabels::Folder && images.classes.is_empty()
    })
}

/// The folder that a file lies in, as its store has it.
fn folder(location: &Path) -> &str {
    location.as_ref().rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The name of the folder that a file lies in.
pub(super) fn class(location: &Path) -> &str {
    name(folder(location))
}

fn name(folder: &str) -> &str {
    folder.rsplit('/').next().unwrap_or_default()
}

fn depth(folder: &str) -> usize {
    if folder.is_empty() { 0 } else { 1 + folder.bytes().filter(|byte| *byte == b'/').count() }
}

/// Looks at what one path of the job has found below a root: all images have to be equally deep. Gives the empty folders that are on the level of the
/// class folders.
///
/// # Errors
/// Names the file that lies on another level than the most.
pub(super) fn of_path(
    files: &[InputFile],
    mut empty: Vec<EmptyFolder>,
    root: &Path,
    input: &Input,
) -> Result<Vec<EmptyFolder>, String> {
    if !are_folders(input) {
        return Ok(Vec::new());
    }
    let mut levels: BTreeMap<usize, (usize, &InputFile)> = BTreeMap::new();
    for file in files {
        levels.entry(depth(folder(&file.location))).or_insert((0, file)).0 += 1;
    }
    // where two levels have as many, the upper one is not where the classes are
    let Some((level, (_, usual))) = levels.iter().max_by_key(|(level, (count, _))| (*count, **level)) else {
        return Ok(Vec::new());
    };
    let others = levels.iter().filter(|(other, _)| *other != level);
    if let Some((_, (count, stray))) = others.min_by_key(|(_, (count, _))| *count) {
        return Err(stray_file(stray, *count, usual));
    }
    empty.retain(|folder| depth(folder.location.as_ref()) == *level && folder.location != *root);
    Ok(empty)
}

fn stray_file(stray: &InputFile, count: usize, usual: &InputFile) -> String {
    let more = if count > 1 { format!(" (and {} more on its level)", count - 1) } else { String::new() };
    format!(
        "{:?}{more} is on another level than {:?}: its folder {:?} would be a class too and shift the labels of others; {VALID}",
        stray.path,
        usual.path,
        class(&stray.location)
    )
}

/// Looks at what all paths have found: no class folder lies in another one, and none is without an image.
///
/// # Errors
/// Names the folder.
pub(super) fn of_all(files: &[InputFile], empty: &[EmptyFolder], input: &Input) -> Result<(), String> {
    if !are_folders(input) {
        return Ok(());
    }
    let mut folders: HashMap<&str, &InputFile> = HashMap::new();
    for file in files {
        folders.entry(folder(&file.location)).or_insert(file);
    }
    let mut nested: Vec<(&InputFile, &InputFile)> = Vec::new();
    for (folder, inner) in &folders {
        let above = std::iter::successors(folder.rsplit_once('/'), |(above, _)| above.rsplit_once('/'));
        nested.extend(above.filter_map(|(above, _)| Some((*folders.get(above)?, *inner))));
    }
    nested.sort_by(|a, b| (&a.0.path, &a.1.path).cmp(&(&b.0.path, &b.1.path)));
    if let Some((outer, inner)) = nested.first() {
        return Err(stray_file(outer, 1, inner));
    }
    let names: HashSet<&str> = folders.keys().map(|folder| name(folder)).collect();
    let mut missing = empty.iter().filter(|folder| !names.contains(name(folder.location.as_ref())));
    let Some(first) = missing.next() else { return Ok(()) };
    let more = match missing.count() {
        0 => String::new(),
        n => format!(" (nor have {n} more)"),
    };
    Err(format!(
        "the folder {:?} beside class folders has no image{more}: without a label of its own it would shift those of others; {VALID}",
        first.shown.trim_end_matches('/')
    ))
}
