//! From paths as a job file writes them to places: what `~` and `${VAR}` stand for on this machine.
//!
//! Only the places are looked at under their real names. The manifest, the hash of the job and the card keep what the job file says, so a
//! value never reaches a data set, and the same job is the same job on another machine. In a service nothing stands for anything: the
//! environment is the server's, and no business of those who submit jobs.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};

use glob::Pattern;
use stillhouse_schemas::checks::{Purpose, named_paths, place_problem};
use stillhouse_schemas::paths::{Part, alternatives, is_plain, parts};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::JobSpec;

/// What says what a variable stands for.
type Lookup = Box<dyn Fn(&str) -> Result<String, String> + Send + Sync>;

/// What `~` and variables stand for.
pub struct Names {
    /// Absent where nothing does.
    lookup: Option<Lookup>,
}

/// Stands for the home in a lookup.
const HOME: &str = "~";

/// One of the paths that an input path stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// With braces replaced only.
    pub written: String,
    /// With everything replaced. What a variable stands for is a name, not a pattern: globs in it are escaped.
    pub real: String,
    /// What comes before the first glob, as written and as it is, without a slash at the end; absent where both are the same.
    heads: Option<(String, String)>,
}

impl Named {
    /// The name of a file that was found under `real`, as the manifest has it: what was written stays written.
    pub fn shown(&self, found: String) -> String {
        let Some((written, real)) = &self.heads else { return found };
        match found.strip_prefix(real.as_str()) {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{written}{rest}"),
            _ => found,
        }
    }
}

impl Names {
    /// What they stand for in the environment of this process.
    pub fn of_this_process() -> Self {
        Self::with(of_this_process)
    }

    /// Nothing stands for anything.
    pub fn none() -> Self {
        Self { lookup: None }
    }

    /// What `lookup` gives for a variable's name; `~` asks it for the home.
    pub fn with(lookup: impl Fn(&str) -> Result<String, String> + Send + Sync + 'static) -> Self {
        Self { lookup: Some(Box::new(lookup)) }
    }

    /// The path with everything replaced but braces, which are part of a name here.
    ///
    /// # Errors
    /// What is not there, or may not be used.
    pub fn real(&self, path: &str) -> Result<String, String> {
        self.replaced(path, &str::to_owned)
    }

    /// The paths that an input path stands for.
    ///
    /// # Errors
    /// What is not there, or may not be used.
    pub fn all(&self, path: &str) -> Result<Vec<Named>, String> {
        alternatives(path)?.into_iter().map(|written| self.named(written)).collect()
    }

    fn named(&self, written: String) -> Result<Named, String> {
        if !written.contains("${") && !written.starts_with('~') {
            return Ok(Named { real: written.clone(), written, heads: None });
        }
        let real = self.replaced(&written, &escaped)?;
        let is_glob = |component: &&str| component.contains(['*', '?', '[']);
        let components: Vec<&str> = written.split('/').collect();
        let literal = components.iter().position(is_glob).unwrap_or(components.len());
        let head = components[..literal].join("/");
        let real_head = self.replaced(&head, &str::to_owned)?;
        let trimmed = |text: &str| text.trim_end_matches('/').to_owned();
        let heads = (head != real_head).then(|| (trimmed(&head), trimmed(real_head.trim_start_matches("file://"))));
        Ok(Named { written, real, heads })
    }

    fn replaced(&self, path: &str, value: &dyn Fn(&str) -> String) -> Result<String, String> {
        let mut real = String::new();
        for part in parts(path)? {
            match (part, &self.lookup) {
                (Part::Text(text), _) => real.push_str(text),
                (Part::Home, Some(lookup)) => real.push_str(&value(lookup(HOME)?.trim_end_matches('/'))),
                (Part::Variable(name), Some(lookup)) => real.push_str(&value(&lookup(name)?)),
                (Part::Home, None) => return Err(refused("begins with ~")),
                (Part::Variable(name), None) => return Err(refused(&format!("names ${{{name}}}"))),
            }
        }
        Ok(real)
    }

    /// What is wrong with the paths of a job because of what they stand for.
    pub fn problems(&self, spec: &JobSpec) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (field, path, purpose) in named_paths(spec) {
            let reals = match purpose {
                Purpose::Input => self.all(path).map(|all| all.into_iter().map(|named| named.real).collect()),
                _ => self.real(path).map(|real| vec![real]),
            };
            match reals {
                // not shown: what it stands for may be nobody's business
                Err(message) => problems.push(Problem::missing(field, message)),
                // told where the file was read
                Ok(_) if is_plain(path) => {}
                Ok(reals) => problems.extend(reals.iter().find_map(|real| place_problem(&field, real, purpose))),
            }
        }
        problems
    }

    /// What the paths of a job use and what it stands for, to show to the person whose environment it is; never to be written.
    pub fn used(&self, spec: &JobSpec) -> BTreeMap<String, String> {
        let Some(lookup) = &self.lookup else { return BTreeMap::new() };
        let named = named_paths(spec);
        let names =
            named.iter().flat_map(|(_, path, _)| parts(path).unwrap_or_default()).filter_map(|part| match part {
                Part::Text(_) => None,
                Part::Home => Some(HOME),
                Part::Variable(name) => Some(name),
            });
        names.filter_map(|name| Some((name.to_owned(), lookup(name).ok()?))).collect()
    }
}

fn refused(what: &str) -> String {
    format!("{what}, which would be the server's own; valid in a job that is submitted: the path itself")
}

fn of_this_process(name: &str) -> Result<String, String> {
    if name == HOME {
        let home = env::home_dir().filter(|home| !home.as_os_str().is_empty());
        let home = home.ok_or("begins with ~, and this user has no home folder; write the folder out")?;
        return home
            .into_os_string()
            .into_string()
            .map_err(|_| "begins with ~, and the home folder's name is not UTF-8".into());
    }
    match env::var(name) {
        Ok(value) if value.is_empty() => {
            Err(format!("names ${{{name}}}, and the environment variable {name} is empty"))
        }
        Ok(value) => Ok(value),
        Err(env::VarError::NotPresent) => {
            Err(format!("names ${{{name}}}, and the environment variable {name} is not set"))
        }
        Err(env::VarError::NotUnicode(_)) => {
            Err(format!("names ${{{name}}}, and the environment variable {name} is not UTF-8"))
        }
    }
}

/// A name as a pattern that finds it alone.
fn escaped(value: &str) -> String {
    if value.contains(['*', '?', '[', ']']) { Pattern::escape(value) } else { value.to_owned() }
}

/// A path of the job file on this machine.
pub fn local_path(base: &Path, path: &str) -> PathBuf {
    base.join(path.strip_prefix("file://").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As of a process with these variables and the home `/home/ann/`.
    fn names(variables: &'static [(&'static str, &'static str)]) -> Names {
        Names::with(move |name| {
            let all = [(HOME, "/home/ann/")].into_iter().chain(variables.iter().copied());
            all.into_iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_owned()).ok_or(format!("{name} is not set"))
        })
    }

    const VARIABLES: &[(&str, &str)] = &[("C", "/data/[x]"), ("L", "en"), ("B", "s3://bucket/pre"), ("ROOT", "/")];

    #[test]
    fn paths_are_looked_for_under_real_names_and_shown_as_written() {
        let names = names(VARIABLES);
        for (path, real, found, shown) in [
            ("~/a.txt", "/home/ann/a.txt", "/home/ann/a.txt", "~/a.txt"),
            ("~", "/home/ann", "/home/ann/a/b.txt", "~/a/b.txt"),
            ("~/*.txt", "/home/ann/*.txt", "/home/ann/b.txt", "~/b.txt"),
            ("${C}/*.txt", "/data/[[]x[]]/*.txt", "/data/[x]/b.txt", "${C}/b.txt"),
            ("${C}", "/data/[[]x[]]", "/data/[x]", "${C}"),
            ("${B}/${L}-*/x", "s3://bucket/pre/en-*/x", "s3://bucket/pre/en-1/x", "${B}/en-1/x"),
            ("file://${C}/a", "file:///data/[[]x[]]/a", "/data/[x]/a", "file://${C}/a"),
            ("${ROOT}a/*", "/a/*", "/a/b", "${ROOT}a/b"),
            ("${ROOT}", "/", "/b", "${ROOT}/b"),
            ("data/*.txt", "data/*.txt", "data/a.txt", "data/a.txt"),
            ("$${L}/a", "${L}/a", "${L}/a", "$${L}/a"),
            ("*/${L}", "*/en", "x/en", "x/en"),
        ] {
            let named = names.all(path).unwrap();
            let [named] = named.as_slice() else { panic!("{path}: {named:?}") };
            assert_eq!((named.real.as_str(), named.shown(found.into()).as_str()), (real, shown), "{path}");
        }
        assert_eq!(names.real("${C}/{a,b}").unwrap(), "/data/[x]/{a,b}");
        let both: Vec<String> = names.all("${C}/{b,a}").unwrap().into_iter().map(|n| n.written).collect();
        assert_eq!(both, ["${C}/b", "${C}/a"]);
        assert_eq!(names.real("${NOT}").unwrap_err(), "NOT is not set");
    }

    #[test]
    fn a_server_gives_nothing_of_its_own() {
        let names = Names::none();
        for path in ["~/x", "~", "${HOME}/x", "a/${L}", "{a,${L}}"] {
            let reported = [names.all(path).unwrap_err(), names.real(path).unwrap_err()];
            assert!(reported.iter().all(|t| t.contains("the server's own")), "{reported:?}");
        }
        assert_eq!(names.real("$${HOME}/~").unwrap(), "${HOME}/~");
    }
}
