//! Checks class folders of images: if the job takes the classes from the folders, the tree must show unambiguously
//! which folders are classes.
//!
//! ```text
//!   images/cat/1.jpg  images/fish/2.jpg                      cat 0, fish 1
//!   images/cat/1.jpg  images/fish/2.jpg  images/readme.jpg   refused: `images` would be a class
//!   images/cat/1.jpg  images/fish/2023/2.jpg                 refused: `2023` would be a class
//!   images/cat/1.jpg  images/dog/                            refused: `dog` would have no number
//! ```
//!
//! A label is the index of its folder's name among all names in order, so one folder more or less shifts the labels of
//! the others. `input.images.classes` names all classes and removes the ambiguity.

use std::collections::{BTreeMap, HashMap, HashSet};

use object_store::path::Path;
use stillhouse_schemas::spec::{ImageLabels, Input, Layout};

use super::input_file::InputFile;

/// A folder below which the listing found no file.
#[derive(Debug)]
pub(crate) struct EmptyFolder {
    pub shown: String,
    pub location: Path,
}

const VALID: &str =
    "valid: class folders on one level and nothing beside them, or all classes by name in `input.images.classes`";

/// Whether the names of the folders are the classes.
pub fn defines_classes(input: &Input) -> bool {
    input.images.as_ref().is_some_and(|images| {
        images.layout == Layout::Files && images.labels() == ImageLabels::Folder && images.classes.is_empty()
    })
}

/// Returns the folder of a file, as a path in its store.
fn folder(location: &Path) -> &str {
    location.as_ref().rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Returns the name of the folder of a file.
pub fn class_name(location: &Path) -> &str {
    name(folder(location))
}

fn name(folder: &str) -> &str {
    folder.rsplit('/').next().unwrap_or_default()
}

fn depth(folder: &str) -> usize {
    if folder.is_empty() { 0 } else { 1 + folder.bytes().filter(|byte| *byte == b'/').count() }
}

/// Checks the files that one path of the job found below a root: all images must be at the same depth. Returns the
/// empty folders at the depth of the class folders.
///
/// # Errors
/// Names a file whose depth differs from that of the majority.
pub(crate) fn check_path(
    files: &[InputFile],
    mut empty: Vec<EmptyFolder>,
    root: &Path,
    input: &Input,
) -> Result<Vec<EmptyFolder>, String> {
    if !defines_classes(input) {
        return Ok(Vec::new());
    }
    let mut levels: BTreeMap<usize, (usize, &InputFile)> = BTreeMap::new();
    for file in files {
        levels.entry(depth(folder(&file.location))).or_insert((0, file)).0 += 1;
    }
    // at a tie the deeper level is taken as that of the class folders
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
        class_name(&stray.location)
    )
}

/// Checks the files that all paths found: no class folder lies inside another one, and each has an image.
///
/// # Errors
/// Names the file or folder.
pub(crate) fn check_all(files: &[InputFile], empty: &[EmptyFolder], input: &Input) -> Result<(), String> {
    if !defines_classes(input) {
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
        "the folder {:?} beside class folders has no image{more}: it would change the labels of the other folders; {VALID}",
        first.shown.trim_end_matches('/')
    ))
}
