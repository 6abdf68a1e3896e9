//! From the job's paths to files: globs and folders expanded in one fixed order.
//!
//! Entries stay in the job's order; within an entry files are sorted by name, component by component. A file that two entries find is
//! taken once, at its first place. An entry with `{a,b}` stands for several, in the order of the braces, each of which finds files. Names that begin with a dot are found by a path only, not by a glob or a folder.
//! A glob finds files; a folder stands for all files below it that have an ending of the format.
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

use super::classes::{self, EmptyFolder};
use super::folder::{self, Child};
use super::formats;
use super::input_file::{Admits, InputFile, LookedAt};
use super::parallel::{cores, looked};
use super::store::Store;

pub(super) const MATCH: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// Problems of paths that are told one by one: nobody mends more at once, and of the hundred that a service tells some are left for others.
const MOST_PROBLEMS: usize = 90;

/// Why there is no list.
#[derive(Debug)]
pub enum NotListed {
    /// The job names what is not there, or what makes no sense.
    Problems(Vec<Problem>),
    /// A store did not answer as it should.
    Store(PipelineError),
}

/// Why a path was not listed.
enum Trouble {
    Problem(String),
    Store(PipelineError),
}

impl From<String> for Trouble {
    fn from(message: String) -> Self {
        Self::Problem(message)
    }
}

/// Finds the files of the job, relative paths from `base_dir`. The buckets of URLs must be open in `store`. A file that `admits`
/// refuses makes a problem of the path that found it, in `field` of the job file. `looked_at` is told of every path, before it is looked at.
///
/// # Errors
/// One problem for each path that finds nothing, cannot be listed, is not a pattern, or finds what is no file or not admitted (of more
/// than 90 the rest is counted in one); or what a store said.
pub fn list(
    store: &Store,
    base_dir: &std::path::Path,
    input: &Input,
    field: &str,
    names: &PathExpander,
    admits: Admits<'_>,
    looked_at: LookedAt<'_>,
) -> Result<Vec<InputFile>, NotListed> {
    let (mut files, mut empty_folders) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    // one path finds a file once, unless it stands for several or goes down twice
    let may_repeat = !matches!(input.paths.as_slice(), [path] if !path.contains('{') && !path.contains("**"));
    let mut problems = Vec::new();
    let mut more_problems = 0;
    let look = |given: &String| named(store, base_dir, given, input, names, admits);
    let refused = |found: &Result<Listed, Trouble>| matches!(found, Err(Trouble::Store(_)));
    let in_stores = input.paths.iter().any(|path| split_url(path).is_some());
    let threads = if in_stores { REQUESTS } else { cores() };
    for (block, paths) in input.paths.chunks(BLOCK).enumerate() {
        for (i, (given, found)) in (block * BLOCK..).zip(paths.iter().zip(looked(paths, threads, &look, &refused))) {
            looked_at(i);
            match found {
                Some(Ok(Listed { files: found, empty })) => {
                    files.extend(found.into_iter().filter(|f| !may_repeat || seen.insert(f.location.clone())));
                    empty_folders.extend(empty);
                }
                Some(Err(Trouble::Problem(message))) if problems.len() < MOST_PROBLEMS => {
                    problems.push(Problem::new(format!("{field}.paths[{i}]"), format!("{given:?}"), message));
                }
                Some(Err(Trouble::Problem(_))) => more_problems += 1,
                Some(Err(Trouble::Store(error))) => return Err(NotListed::Store(error)),
                // what was not looked at comes after what a store has refused
                None => {}
            }
        }
    }
    if more_problems > 0 {
        problems
            .push(Problem::missing(format!("{field}.paths"), format!("and {more_problems} more paths with problems")));
    }
    if problems.is_empty()
        && let Err(message) = classes::of_all(&files, &empty_folders, input)
    {
        problems.push(Problem::missing(format!("{field}.paths"), message));
    }
    if problems.is_empty() { Ok(files) } else { Err(NotListed::Problems(problems)) }
}

/// What paths have found.
#[derive(Debug, Default)]
struct Listed {
    files: Vec<InputFile>,
    /// Class folders without an image, as they are shown.
    empty: Vec<EmptyFolder>,
}

/// What a path finds, folder by folder.
struct Found {
    files: Vec<InputFile>,
    /// Folders below which nothing was found.
    empty: Vec<EmptyFolder>,
    /// The first pipe, device or socket, as it is shown and where it is.
    odd: Option<(String, Path)>,
}

/// Paths that are looked at before their files are taken into the list.
const BLOCK: usize = 4096;
/// Requests to stores under way at once.
const REQUESTS: usize = 16;

/// A file as `store` listed it.
fn listed(store: &Store, path: String, meta: ObjectMeta) -> InputFile {
    let is_on_disk = store.is_on_disk(&meta.location);
    InputFile::listed(path, meta, is_on_disk)
}

/// The files of one path of the job: each of the paths that it stands for finds some.
fn named(
    store: &Store,
    base_dir: &std::path::Path,
    given: &str,
    input: &Input,
    names: &PathExpander,
    admits: Admits<'_>,
) -> Result<Listed, Trouble> {
    let mut listed = Listed::default();
    for named in names.expand_all(given)? {
        let found = expand(store, base_dir, &named.expanded, input, admits).and_then(|(found, root)| {
            // first, so that nothing is told of what is not admitted
            found.files.iter().try_for_each(|file| admitted(store, &file.path, &file.location, admits))?;
            if let Some((shown, location)) = found.odd {
                admitted(store, &shown, &location, admits)?;
                return Err(format!("{shown:?} {ODD}").into());
            }
            let empty = classes::of_path(&found.files, found.empty, &root, input)?;
            Ok(Listed { files: found.files, empty })
        });
        let found = found.map_err(|trouble| match trouble {
            Trouble::Problem(message) if named.braces_expanded != given => {
                Trouble::Problem(format!("{:?}: {message}", named.braces_expanded))
            }
            other => other,
        })?;
        let shown = |file: InputFile| InputFile { path: named.as_written(file.path), ..file };
        listed.files.extend(found.files.into_iter().map(shown));
        listed.empty.extend(found.empty);
    }
    Ok(listed)
}

/// Folders are asked about before they are listed, so that nothing is told of what is in one that a link leads to.
fn enters(store: &Store, display: &str, folder: &Path, admits: Admits<'_>) -> Result<(), Trouble> {
    store
        .location_of(folder)
        .map_or(Ok(()), |named| admits(&named).map_err(|message| Trouble::Problem(format!("{display:?}: {message}"))))
}

fn admitted(store: &Store, shown: &str, location: &Path, admits: Admits<'_>) -> Result<(), String> {
    let Some(named) = store.location_of(location) else { return Err("is not a path of this machine".into()) };
    admits(&named).map_err(|message| format!("{shown:?}: {message}"))
}

/// Only files are read: a pipe or a device could give bytes for ever, or none.
const ODD: &str = "is a pipe, a device or a socket; valid: files and folders";

/// The components of a path or URL, and how many of them come before the first that is a glob; of a URL at least scheme and bucket.
fn components(given: &str) -> (Vec<Cow<'_, str>>, usize) {
    let mut components: Vec<_> = given.strip_prefix("file://").unwrap_or(given).split('/').map(Cow::Borrowed).collect();
    // the host of a web server may be [::1]
    let fixed = if split_url(given).is_some() { 3 } else { 0 };
    let mut literal = fixed.min(components.len());
    while let Some(name) = components.get(literal).and_then(|component| name(component)) {
        components[literal] = Cow::Owned(name);
        literal += 1;
    }
    (components, literal)
}

/// What a component names if it is no pattern: one whose globs are all escaped, such as `[*]`, is none.
fn name(component: &str) -> Option<String> {
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

fn head(components: &[Cow<'_, str>], literal: usize) -> String {
    let head = components[..literal.min(components.len())].join("/");
    if head.is_empty() && literal > 0 { "/".into() } else { head }
}

/// A path or URL without its first glob and what comes after: nothing outside of it is looked at.
pub fn literal(given: &str) -> String {
    let (components, literal) = components(given);
    head(&components, literal)
}

/// A path or URL of the job, cut where its first glob begins.
pub(super) struct Given<'a> {
    /// As it stands in the job, without `file://`.
    plain: Cow<'a, str>,
    pub components: Vec<Cow<'a, str>>,
    /// How many components are no globs; of a URL at least scheme and bucket.
    pub literal: usize,
    /// Where the store has them.
    pub location: Path,
}

impl<'a> Given<'a> {
    pub fn parse(base_dir: &std::path::Path, given: &'a str) -> Result<Self, String> {
        let (components, literal) = components(given);
        let plain = match literal < components.len() {
            true => Cow::Borrowed(given.strip_prefix("file://").unwrap_or(given)),
            false => Cow::Owned(components.join("/")),
        };
        let url = StoreUrl::parse(&plain).transpose()?;
        let head = head(&components, literal);
        let location = match url {
            Some(url) if literal < components.len() => match StoreUrl::parse(&head) {
                Some(head) => Store::location(&head?),
                None => Store::location(&url.root()),
            },
            Some(url) => Store::location(&url),
            None => locate(base_dir, &head)?,
        };
        Ok(Self { plain, components, literal, location })
    }
}

fn expand(
    store: &Store,
    base_dir: &std::path::Path,
    given: &str,
    input: &Input,
    admits: Admits<'_>,
) -> Result<(Found, Path), Trouble> {
    let Given { plain, components, literal, location } = Given::parse(base_dir, given)?;
    let mut found = Found { files: Vec::new(), empty: Vec::new(), odd: None };
    if literal == components.len() {
        if !plain.ends_with('/')
            && let Some(file) = head_file(store, &plain, &location)?
        {
            found.files.push(file);
            return Ok((found, location));
        }
        let name = plain.trim_end_matches('/');
        below(store, name, &location, input, admits, &mut found)?;
        if found.files.is_empty() && found.odd.is_none() {
            let is_folder = matches!(store.location_of(&location), Some(Location::Disk(path)) if path.is_dir());
            let message = match !is_folder && children(store, &location, "", &|_| true, &|_| Ok(()))?.is_empty() {
                true => format!("no such file or folder (looked for {})", store.shown(&location).0),
                false => {
                    format!("the folder has no files with an ending of the format; valid: {}", endings(input))
                }
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
    matching(store, &display, &location, &patterns, admits, &mut found)?;
    if found.files.is_empty() && found.odd.is_none() {
        return Err(format!("matches no file (looked in {})", store.shown(&location).0).into());
    }
    Ok((found, location))
}

/// What a disk says is a problem of the job; what a store says is not.
fn trouble(store: &Store, location: &Path, action: &str, error: &object_store::Error) -> Trouble {
    match store.shown(location) {
        (shown, true) => Trouble::Problem(explain(error, action, &shown)),
        (shown, false) => Trouble::Store(PipelineError::store(ErrorKind::Input, error, action, &shown)),
    }
}

/// The store's path of a name; `..` is taken from where links lead, as the system does.
fn locate(base_dir: &std::path::Path, name: &str) -> Result<Path, String> {
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

fn head_file(store: &Store, display: &str, location: &Path) -> Result<Option<InputFile>, Trouble> {
    if let Some(Location::Disk(path)) = store.location_of(location) {
        return match folder::file(&path, location)? {
            Some(Child::Odd(_)) => Err(ODD.to_owned().into()),
            Some(Child::File(meta)) => Ok(Some(listed(store, display.into(), meta))),
            _ => Ok(None),
        };
    }
    match store.wait(store.store.head(location)) {
        Ok(meta) => Ok(Some(listed(store, display.into(), meta))),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(trouble(store, location, "look at", &e)),
    }
}

/// What is in a folder, by name.
///
/// On a disk only the names that are wanted are looked at, and a name that cannot be read is a problem of its own.
fn children(
    store: &Store,
    location: &Path,
    display: &str,
    wanted: &dyn Fn(&str) -> bool,
    admits: Admits<'_>,
) -> Result<Vec<(String, Child)>, Trouble> {
    if let Some(Location::Disk(path)) = store.location_of(location) {
        return Ok(folder::children(&path, location, display, wanted, admits)?);
    }
    let listing = match store.wait(store.store.list_with_delimiter(Some(location))) {
        Ok(listing) => listing,
        Err(object_store::Error::NotFound { .. }) => return Ok(Vec::new()),
        Err(e) => return Err(trouble(store, location, "list", &e)),
    };
    let name = |path: &Path| path.filename().unwrap_or_default().to_string();
    let folders = listing.common_prefixes.into_iter().map(|p| (name(&p), Child::Folder(p)));
    // consoles put an empty object for a folder itself
    let objects = listing.objects.into_iter().filter(|o| o.location != *location);
    let files = objects.map(|o| (name(&o.location), Child::File(o)));
    let named: BTreeMap<String, Child> =
        folders.chain(files).filter(|(name, _)| !name.is_empty() && wanted(name)).collect();
    Ok(named.into_iter().collect())
}

fn matching(
    store: &Store,
    display: &str,
    location: &Path,
    patterns: &[Pattern],
    admits: Admits<'_>,
    found: &mut Found,
) -> Result<(), Trouble> {
    let Some((pattern, rest)) = patterns.split_first() else { return Ok(()) };
    if pattern.as_str() == "**" {
        // no folder between, or any number of them; `**` at the end finds every file
        if rest.is_empty() {
            matching(store, display, location, &[any()], admits, found)?;
        } else {
            matching(store, display, location, rest, admits, found)?;
        }
        for (name, child) in children(store, location, display, &|name| !name.starts_with('.'), admits)? {
            if let Child::Folder(path) = child {
                let display = format!("{display}{name}/");
                enters(store, &display, &path, admits)?;
                matching(store, &display, &path, patterns, admits, found)?;
            } else if let Child::Unreadable { message, folder: true } = child {
                return Err(message.into());
            }
        }
        return Ok(());
    }
    // a name that is written as it is, `a[1].jsonl`, is found whatever the pattern makes of it
    let wanted = |name: &str| name == pattern.as_str() || pattern.matches_with(name, MATCH);
    for (name, child) in children(store, location, display, &wanted, admits)? {
        match child {
            Child::File(meta) if rest.is_empty() => {
                found.files.push(listed(store, format!("{display}{name}"), meta));
            }
            Child::Odd(location) if rest.is_empty() => {
                found.odd.get_or_insert_with(|| (format!("{display}{name}"), location));
            }
            Child::Folder(path) if !rest.is_empty() => {
                let (display, before) = (format!("{display}{name}/"), found.files.len());
                enters(store, &display, &path, admits)?;
                matching(store, &display, &path, rest, admits, found)?;
                if found.files.len() == before {
                    found.empty.push(EmptyFolder { shown: display, location: path });
                }
            }
            Child::Unreadable { message, folder } if folder || rest.is_empty() => return Err(message.into()),
            _ => {}
        }
    }
    Ok(())
}

fn any() -> Pattern {
    Pattern::new("*").unwrap_or_default()
}

fn below(
    store: &Store,
    display: &str,
    location: &Path,
    input: &Input,
    admits: Admits<'_>,
    found: &mut Found,
) -> Result<(), Trouble> {
    for (name, child) in children(store, location, &format!("{display}/"), &|name| !name.starts_with('.'), admits)? {
        let path = format!("{display}/{name}");
        match child {
            Child::Unreadable { message, folder } if folder || has_ending(&name, input) => return Err(message.into()),
            Child::Folder(location) => {
                let before = found.files.len();
                enters(store, &path, &location, admits)?;
                below(store, &path, &location, input, admits, found)?;
                if found.files.len() == before {
                    found.empty.push(EmptyFolder { shown: path, location });
                }
            }
            Child::File(meta) if has_ending(&name, input) => found.files.push(listed(store, path, meta)),
            Child::Odd(location) if has_ending(&name, input) => {
                found.odd.get_or_insert((path, location));
            }
            Child::File(..) | Child::Odd(_) | Child::Unreadable { .. } => {}
        }
    }
    Ok(())
}

pub(super) fn has_ending(name: &str, input: &Input) -> bool {
    let (name, format) = (name.to_ascii_lowercase(), formats::of(input));
    let bare = if format.is_compressible(input) { formats::without_compression(&name) } else { &name };
    format.endings(input).iter().any(|e| bare.ends_with(e))
}

fn endings(input: &Input) -> String {
    let format = formats::of(input);
    let known = format.endings(input);
    if known.is_empty() {
        return "the files themselves, as this layout has files without one".into();
    }
    let more = if format.is_compressible(input) { ", each also with .gz or .zst" } else { "" };
    known.join(", ") + more
}
