//! Expands the job's paths, with their globs and folders, to files in one fixed order.
//!
//! - Entries stay in the job's order. Within an entry, files are sorted by name, component by component.
//! - A file that two entries find is listed once, at its first place.
//! - An entry with `{a,b}` stands for several paths, in the order of the braces. Each of them must find files.
//! - A glob finds files. A folder stands for all files below it whose ending is one of the format's.
//! - Globs and folders skip names that begin with a dot; only a path finds them.
//!
//! Cost: one listing per folder that a pattern can reach.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::path::{Component, PathBuf};

use glob::{MatchOptions, Pattern};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use stillhouse_base::error::{ErrorKind, PipelineError};
use stillhouse_base::path_expansion::PathExpander;
use stillhouse_base::storage::{Location, StoreUrl, explain};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Input;
use stillhouse_schemas::storage::split_url;

use super::class_folders::{self, EmptyFolder};
use super::endings::FileEndings;
use super::folder::{self, FolderEntry};
use super::input_file::{AccessCheck, BeforeItem, InputFile};
use super::parallel::{available_threads, map_in_order};
use super::store::Store;

pub(crate) const MATCH_OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// Maximum number of path problems listed one by one. Nobody fixes more at once, and the service reports at most 100
/// problems, so some are left for others.
const MAX_PROBLEMS: usize = 90;

/// Why the files could not be listed.
#[derive(Debug)]
pub enum ListError {
    /// Problems of the job, such as a path that does not exist.
    Problems(Vec<Problem>),
    /// A store did not answer as expected.
    Store(PipelineError),
}

/// Why a path could not be listed.
enum ListingError {
    Problem(String),
    Store(PipelineError),
}

impl From<String> for ListingError {
    fn from(message: String) -> Self {
        Self::Problem(message)
    }
}

/// The paths of an input, and what their expansion needs.
#[derive(Clone, Copy)]
pub struct InputPaths<'a> {
    /// The input; its `paths` are expanded.
    pub input: &'a Input,
    /// Field of the job file that holds the input, for messages.
    pub field: &'a str,
    /// Folder from which relative paths start.
    pub base_dir: &'a std::path::Path,
    /// Expands variables and braces of the paths.
    pub names: &'a PathExpander,
    /// Endings of the files that a folder stands for.
    pub endings: FileEndings,
}

/// Finds the files of an input. The buckets of URLs must be open in `store`. If `check_access` refuses a file, the path
/// that found it becomes a problem in the input's field of the job file. Calls `before_item` before it examines each
/// path.
///
/// # Errors
/// One problem for each path that finds nothing, cannot be listed, is not a pattern, or finds something that is not a
/// file or not admitted (above 90 problems, the last one counts the rest); or the error of a store.
pub fn list_files(
    store: &Store,
    paths: InputPaths<'_>,
    check_access: AccessCheck<'_>,
    before_item: BeforeItem<'_>,
) -> Result<Vec<InputFile>, ListError> {
    let InputPaths { input, field, .. } = paths;
    let (mut files, mut empty_folders) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    // a single path finds each file once, unless it has braces or `**`
    let may_repeat = !matches!(input.paths.as_slice(), [path] if !path.contains('{') && !path.contains("**"));
    let mut problems = Vec::new();
    let mut more_problems = 0;
    let look = |given: &String| list_path(store, paths, given, check_access);
    let refused = |found: &Result<ListedFiles, ListingError>| matches!(found, Err(ListingError::Store(_)));
    let in_stores = input.paths.iter().any(|path| split_url(path).is_some());
    let threads = if in_stores { MAX_REQUESTS } else { available_threads() };
    for (block, written) in input.paths.chunks(PATHS_PER_BLOCK).enumerate() {
        for (i, (given, found)) in
            (block * PATHS_PER_BLOCK..).zip(written.iter().zip(map_in_order(written, threads, &look, &refused)))
        {
            before_item(i);
            match found {
                Some(Ok(ListedFiles { files: found, empty })) => {
                    files.extend(found.into_iter().filter(|f| !may_repeat || seen.insert(f.location.clone())));
                    empty_folders.extend(empty);
                }
                Some(Err(ListingError::Problem(message))) if problems.len() < MAX_PROBLEMS => {
                    problems.push(Problem::new(format!("{field}.paths[{i}]"), format!("{given:?}"), message));
                }
                Some(Err(ListingError::Problem(_))) => more_problems += 1,
                Some(Err(ListingError::Store(error))) => return Err(ListError::Store(error)),
                // skipped, because an earlier path got an error from a store
                None => {}
            }
        }
    }
    if more_problems > 0 {
        problems
            .push(Problem::missing(format!("{field}.paths"), format!("and {more_problems} more paths with problems")));
    }
    if problems.is_empty()
        && let Err(message) = class_folders::check_all(&files, &empty_folders, input)
    {
        problems.push(Problem::missing(format!("{field}.paths"), message));
    }
    if problems.is_empty() { Ok(files) } else { Err(ListError::Problems(problems)) }
}

/// The files that a path of the job found.
#[derive(Debug, Default)]
struct ListedFiles {
    files: Vec<InputFile>,
    /// Class folders without an image, by their displayed names.
    empty: Vec<EmptyFolder>,
}

/// What the expansion of a path found.
struct Expansion {
    files: Vec<InputFile>,
    /// Folders below which it found no file.
    empty: Vec<EmptyFolder>,
    /// The first pipe, device or socket: its displayed name and its location.
    special: Option<(String, Path)>,
}

/// Number of paths expanded before their files are added to the list.
const PATHS_PER_BLOCK: usize = 4096;
/// Maximum number of concurrent requests to stores.
const MAX_REQUESTS: usize = 16;

/// Returns a file as `store` listed it.
fn to_input_file(store: &Store, path: String, meta: ObjectMeta) -> InputFile {
    let is_on_disk = store.is_on_disk(&meta.location);
    InputFile::listed(path, meta, is_on_disk)
}

/// Returns the files of one path of the job. Each of the paths that it stands for must find some.
fn list_path(
    store: &Store,
    paths: InputPaths<'_>,
    given: &str,
    check_access: AccessCheck<'_>,
) -> Result<ListedFiles, ListingError> {
    let mut listed = ListedFiles::default();
    for named in paths.names.expand_all(given)? {
        let found = expand(store, paths, &named.expanded, check_access).and_then(|(found, root)| {
            // first, so that no message mentions a file that is not admitted
            found
                .files
                .iter()
                .try_for_each(|file| check_file_access(store, &file.path, &file.location, check_access))?;
            if let Some((shown, location)) = found.special {
                check_file_access(store, &shown, &location, check_access)?;
                return Err(format!("{shown:?} {NOT_A_FILE}").into());
            }
            let empty = class_folders::check_path(&found.files, found.empty, &root, paths.input)?;
            Ok(ListedFiles { files: found.files, empty })
        });
        let found = found.map_err(|trouble| match trouble {
            ListingError::Problem(message) if named.braces_expanded != given => {
                ListingError::Problem(format!("{:?}: {message}", named.braces_expanded))
            }
            other => other,
        })?;
        let shown = |file: InputFile| InputFile { path: named.as_written(file.path), ..file };
        listed.files.extend(found.files.into_iter().map(shown));
        listed.empty.extend(found.empty);
    }
    Ok(listed)
}

/// Checks that a folder may be read before it is listed, so that no message mentions the content of a folder behind a
/// forbidden link.
fn check_folder_access(
    store: &Store,
    display: &str,
    folder: &Path,
    check_access: AccessCheck<'_>,
) -> Result<(), ListingError> {
    store.location_of(folder).map_or(Ok(()), |named| {
        check_access(&named).map_err(|message| ListingError::Problem(format!("{display:?}: {message}")))
    })
}

fn check_file_access(store: &Store, shown: &str, location: &Path, check_access: AccessCheck<'_>) -> Result<(), String> {
    let Some(named) = store.location_of(location) else { return Err("is not a path of this machine".into()) };
    check_access(&named).map_err(|message| format!("{shown:?}: {message}"))
}

/// Message for an entry that is not a file. Only files are read: a pipe or a device could yield endless bytes, or none.
const NOT_A_FILE: &str = "is a pipe, a device or a socket; valid: files and folders";

/// Splits a path or URL into components, and counts those before the first glob; of a URL, at least scheme and bucket.
fn components(given: &str) -> (Vec<Cow<'_, str>>, usize) {
    let mut components: Vec<_> = given.strip_prefix("file://").unwrap_or(given).split('/').map(Cow::Borrowed).collect();
    // the host of a web server may be an IPv6 address such as [::1]
    let fixed = match split_url(given) {
        // the scheme, nothing between the slashes, and the bucket, which has slashes itself on the hub
        Some(Ok(parts)) => 2 + parts.bucket.split('/').count(),
        Some(Err(_)) => 3,
        None => 0,
    };
    let mut literal = fixed.min(components.len());
    while let Some(name) = components.get(literal).and_then(|component| unescaped(component)) {
        components[literal] = Cow::Owned(name);
        literal += 1;
    }
    (components, literal)
}

/// Returns the unescaped name of a component that is not a pattern. If all its globs are escaped, as in `[*]`, it is
/// not a pattern.
fn unescaped(component: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = component;
    while let Some(c) = rest.chars().next() {
        let escaped = ["[[]", "[]]", "[*]", "[?]"].iter().find_map(|escape| rest.strip_prefix(escape));
        match (c, escaped) {
            ('[', Some(after)) => {
                name.push_str(&rest[1..2]);
                rest = after;
            }
            ('*' | '?' | '[', _) => return None,
            _ => {
                name.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    Some(name)
}

fn joined_prefix(components: &[Cow<'_, str>], literal: usize) -> String {
    let head = components[..literal.min(components.len())].join("/");
    if head.is_empty() && literal > 0 { "/".into() } else { head }
}

/// Returns a path or URL up to its first glob. The expansion reads nothing outside of it.
pub fn literal_prefix(given: &str) -> String {
    let (components, literal) = components(given);
    joined_prefix(&components, literal)
}

/// A path or URL of the job, with the position of its first glob.
pub(crate) struct JobPath<'a> {
    /// The path as in the job, without `file://`.
    plain: Cow<'a, str>,
    pub components: Vec<Cow<'a, str>>,
    /// Number of leading components without a glob; of a URL, at least scheme and bucket.
    pub literal: usize,
    /// Location of these components in the store.
    pub location: Path,
}

impl<'a> JobPath<'a> {
    pub fn parse(base_dir: &std::path::Path, given: &'a str) -> Result<Self, String> {
        let (components, literal) = components(given);
        let plain = match literal < components.len() {
            true => Cow::Borrowed(given.strip_prefix("file://").unwrap_or(given)),
            false => Cow::Owned(components.join("/")),
        };
        let url = StoreUrl::parse(&plain).transpose()?;
        let head = joined_prefix(&components, literal);
        let location = match url {
            Some(url) if literal < components.len() => match StoreUrl::parse(&head) {
                Some(head) => Store::location(&head?),
                None => Store::location(&url.root()),
            },
            Some(url) => Store::location(&url),
            None => resolve_path(base_dir, &head)?,
        };
        Ok(Self { plain, components, literal, location })
    }
}

fn expand(
    store: &Store,
    paths: InputPaths<'_>,
    given: &str,
    check_access: AccessCheck<'_>,
) -> Result<(Expansion, Path), ListingError> {
    let InputPaths { base_dir, endings, .. } = paths;
    let JobPath { plain, components, literal, location } = JobPath::parse(base_dir, given)?;
    let mut found = Expansion { files: Vec::new(), empty: Vec::new(), special: None };
    if literal == components.len() {
        if !plain.ends_with('/')
            && let Some(file) = find_file(store, &plain, &location)?
        {
            found.files.push(file);
            return Ok((found, location));
        }
        let name = plain.trim_end_matches('/');
        expand_folder(store, name, &location, endings, check_access, &mut found)?;
        if found.files.is_empty() && found.special.is_none() {
            let is_folder = matches!(store.location_of(&location), Some(Location::Disk(path)) if path.is_dir());
            let message = match !is_folder && list_entries(store, &location, "", &|_| true, &|_| Ok(()))?.is_empty() {
                true => format!("no such file or folder (looked for {})", store.display_name(&location).0),
                false => format!("the folder has no files with an ending of the format; valid: {endings}"),
            };
            return Err(message.into());
        }
        return Ok((found, location));
    }
    let patterns = components[literal..]
        .iter()
        .filter(|c| !c.is_empty())
        .map(|c| Pattern::new(c).map_err(|e| format!("not a glob: {e}; valid: *, ?, [..], and ** between slashes")))
        .collect::<Result<Vec<_>, _>>()?;
    let display = if literal == 0 { String::new() } else { components[..literal].join("/") + "/" };
    expand_pattern(store, &display, &location, &patterns, check_access, &mut found)?;
    if found.files.is_empty() && found.special.is_none() {
        return Err(format!("matches no file (looked in {})", store.display_name(&location).0).into());
    }
    Ok((found, location))
}

/// Converts an error: one of a disk is a problem of the job, one of a store is not.
fn listing_error(store: &Store, location: &Path, action: &str, error: &object_store::Error) -> ListingError {
    match store.display_name(location) {
        (shown, true) => ListingError::Problem(explain(error, action, &shown)),
        (shown, false) => ListingError::Store(PipelineError::store(ErrorKind::Input, error, action, &shown)),
    }
}

/// Converts a name to a path of the store. `..` is relative to the target of a link, as in the system.
fn resolve_path(base_dir: &std::path::Path, name: &str) -> Result<Path, String> {
    let joined = std::path::absolute(base_dir.join(name)).map_err(|e| e.to_string())?;
    let mut resolved = PathBuf::new();
    for component in joined.components() {
        if component == Component::ParentDir {
            resolved = std::fs::canonicalize(&resolved).unwrap_or(resolved);
            resolved.pop();
        } else {
            resolved.push(component);
        }
    }
    if name.chars().any(char::is_control) {
        return Err("has control characters, which no name of an input may have".into());
    }
    Path::from_absolute_path(&resolved).map_err(|e| e.to_string())
}

fn find_file(store: &Store, display: &str, location: &Path) -> Result<Option<InputFile>, ListingError> {
    if let Some(Location::Disk(path)) = store.location_of(location) {
        return match folder::file(&path, location)? {
            Some(FolderEntry::Special(_)) => Err(NOT_A_FILE.to_owned().into()),
            Some(FolderEntry::File(meta)) => Ok(Some(to_input_file(store, display.into(), meta))),
            _ => Ok(None),
        };
    }
    match store.wait(store.store.head(location)) {
        Ok(meta) => Ok(Some(to_input_file(store, display.into(), meta))),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(listing_error(store, location, "access", &e)),
    }
}

/// Returns the entries of a folder, sorted by name.
///
/// On a disk it examines only the wanted names, and reports each unreadable name on its own.
fn list_entries(
    store: &Store,
    location: &Path,
    display: &str,
    wanted: &dyn Fn(&str) -> bool,
    check_access: AccessCheck<'_>,
) -> Result<Vec<(String, FolderEntry)>, ListingError> {
    if let Some(Location::Disk(path)) = store.location_of(location) {
        return Ok(folder::list_entries(&path, location, display, wanted, check_access)?);
    }
    let listing = match store.wait(store.store.list_with_delimiter(Some(location))) {
        Ok(listing) => listing,
        Err(object_store::Error::NotFound { .. }) => return Ok(Vec::new()),
        Err(e) => return Err(listing_error(store, location, "list", &e)),
    };
    let name = |path: &Path| path.filename().unwrap_or_default().to_string();
    let folders = listing.common_prefixes.into_iter().map(|p| (name(&p), FolderEntry::Folder(p)));
    // consoles create an empty object for the folder itself
    let objects = listing.objects.into_iter().filter(|o| o.location != *location);
    let files = objects.map(|o| (name(&o.location), FolderEntry::File(o)));
    let named: BTreeMap<String, FolderEntry> =
        folders.chain(files).filter(|(name, _)| !name.is_empty() && wanted(name)).collect();
    Ok(named.into_iter().collect())
}

fn expand_pattern(
    store: &Store,
    display: &str,
    location: &Path,
    patterns: &[Pattern],
    check_access: AccessCheck<'_>,
    found: &mut Expansion,
) -> Result<(), ListingError> {
    let Some((pattern, rest)) = patterns.split_first() else { return Ok(()) };
    if pattern.as_str() == "**" {
        // `**` matches no folder or any number of them; at the end it matches every file
        if rest.is_empty() {
            expand_pattern(store, display, location, &[any_name()], check_access, found)?;
        } else {
            expand_pattern(store, display, location, rest, check_access, found)?;
        }
        for (name, entry) in list_entries(store, location, display, &|name| !name.starts_with('.'), check_access)? {
            if let FolderEntry::Folder(path) = entry {
                let display = format!("{display}{name}/");
                check_folder_access(store, &display, &path, check_access)?;
                expand_pattern(store, &display, &path, patterns, check_access, found)?;
            } else if let FolderEntry::Unreadable { message, folder: true } = entry {
                return Err(message.into());
            }
        }
        return Ok(());
    }
    // a name that is written literally, such as `a[1].jsonl`, is found whatever the pattern matches
    let wanted = |name: &str| name == pattern.as_str() || pattern.matches_with(name, MATCH_OPTIONS);
    for (name, entry) in list_entries(store, location, display, &wanted, check_access)? {
        match entry {
            FolderEntry::File(meta) if rest.is_empty() => {
                found.files.push(to_input_file(store, format!("{display}{name}"), meta));
            }
            FolderEntry::Special(location) if rest.is_empty() => {
                found.special.get_or_insert_with(|| (format!("{display}{name}"), location));
            }
            FolderEntry::Folder(path) if !rest.is_empty() => {
                let (display, before) = (format!("{display}{name}/"), found.files.len());
                check_folder_access(store, &display, &path, check_access)?;
                expand_pattern(store, &display, &path, rest, check_access, found)?;
                if found.files.len() == before {
                    found.empty.push(EmptyFolder { shown: display, location: path });
                }
            }
            FolderEntry::Unreadable { message, folder } if folder || rest.is_empty() => return Err(message.into()),
            _ => {}
        }
    }
    Ok(())
}

fn any_name() -> Pattern {
    Pattern::new("*").unwrap_or_default()
}

fn expand_folder(
    store: &Store,
    display: &str,
    location: &Path,
    endings: FileEndings,
    check_access: AccessCheck<'_>,
    found: &mut Expansion,
) -> Result<(), ListingError> {
    for (name, entry) in
        list_entries(store, location, &format!("{display}/"), &|name| !name.starts_with('.'), check_access)?
    {
        let path = format!("{display}/{name}");
        match entry {
            FolderEntry::Unreadable { message, folder } if folder || endings.match_name(&name) => {
                return Err(message.into());
            }
            FolderEntry::Folder(location) => {
                let before = found.files.len();
                check_folder_access(store, &path, &location, check_access)?;
                expand_folder(store, &path, &location, endings, check_access, found)?;
                if found.files.len() == before {
                    found.empty.push(EmptyFolder { shown: path, location });
                }
            }
            FolderEntry::File(meta) if endings.match_name(&name) => found.files.push(to_input_file(store, path, meta)),
            FolderEntry::Special(location) if endings.match_name(&name) => {
                found.special.get_or_insert((path, location));
            }
            FolderEntry::File(..) | FolderEntry::Special(_) | FolderEntry::Unreadable { .. } => {}
        }
    }
    Ok(())
}
