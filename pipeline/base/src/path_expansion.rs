//! Expands the paths of a job file: replaces `~` and `${VAR}` with their values on this machine.
//!
//! Expanded paths serve only to open files. The manifest, the job hash and the data set card keep the paths as the job
//! file writes them. So values of variables never reach a data set, and a job has the same hash on every machine. A
//! service expands nothing: the environment is the server's, and submitted jobs must not read it.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};

use glob::Pattern;
use stillhouse_operators::registry::job_format;
use stillhouse_schemas::checks::{JobPath, PathRole, path_problem};
use stillhouse_schemas::paths::{Part, alternatives, is_plain, parts};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::JobSpec;

/// Returns the value of a variable.
type Lookup = Box<dyn Fn(&str) -> Result<String, String> + Send + Sync>;

/// Expands `~` and variables in paths.
pub struct PathExpander {
    /// `None` where `~` and variables are refused.
    lookup: Option<Lookup>,
}

/// The name under which a lookup is asked for the home folder.
const HOME: &str = "~";

/// One of the paths that an input path expands to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpandedPath {
    /// The path with only its braces expanded.
    pub braces_expanded: String,
    /// The path with everything expanded. The value of a variable is a literal name, so globs in it are escaped.
    pub expanded: String,
    /// The part before the first glob, as written and as expanded, without a trailing slash; `None` if the two are
    /// equal.
    prefixes: Option<(String, String)>,
}

impl ExpandedPath {
    /// The name of a file found under `expanded`, as the manifest records it: the expanded part is replaced by the
    /// written one.
    pub fn as_written(&self, found: String) -> String {
        let Some((written, real)) = &self.prefixes else { return found };
        match found.strip_prefix(real.as_str()) {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{written}{rest}"),
            _ => found,
        }
    }
}

impl PathExpander {
    /// Expands from the environment of this process.
    pub fn from_environment() -> Self {
        Self::with(process_variable)
    }

    /// Expands nothing: every `~` and every variable is an error.
    pub fn none() -> Self {
        Self { lookup: None }
    }

    /// Expands with `lookup`, which maps the name of a variable to its value, and `~` to the home folder.
    pub fn with(lookup: impl Fn(&str) -> Result<String, String> + Send + Sync + 'static) -> Self {
        Self { lookup: Some(Box::new(lookup)) }
    }

    /// Expands `~` and variables in a path. Braces are part of the name and stay.
    ///
    /// # Errors
    /// If a variable has no value, or if it may not be used.
    pub fn expand(&self, path: &str) -> Result<String, String> {
        self.substitute(path, &str::to_owned)
    }

    /// Expands an input path to all its alternatives.
    ///
    /// # Errors
    /// If a variable has no value, or if it may not be used.
    pub fn expand_all(&self, path: &str) -> Result<Vec<ExpandedPath>, String> {
        alternatives(path)?.into_iter().map(|written| self.expand_one(written)).collect()
    }

    fn expand_one(&self, written: String) -> Result<ExpandedPath, String> {
        if !written.contains("${") && !written.starts_with('~') {
            return Ok(ExpandedPath { expanded: written.clone(), braces_expanded: written, prefixes: None });
        }
        let real = self.substitute(&written, &escape_globs)?;
        let is_glob = |component: &&str| component.contains(['*', '?', '[']);
        let components: Vec<&str> = written.split('/').collect();
        let literal = components.iter().position(is_glob).unwrap_or(components.len());
        let prefix = components[..literal].join("/");
        let real_prefix = self.substitute(&prefix, &str::to_owned)?;
        let trimmed = |text: &str| text.trim_end_matches('/').to_owned();
        let prefixes =
            (prefix != real_prefix).then(|| (trimmed(&prefix), trimmed(real_prefix.trim_start_matches("file://"))));
        Ok(ExpandedPath { braces_expanded: written, expanded: real, prefixes })
    }

    fn substitute(&self, path: &str, value: &dyn Fn(&str) -> String) -> Result<String, String> {
        let mut real = String::new();
        for part in parts(path)? {
            match (part, &self.lookup) {
                (Part::Text(text), _) => real.push_str(text),
                (Part::Home, Some(lookup)) => real.push_str(&value(lookup(HOME)?.trim_end_matches('/'))),
                (Part::Variable(name), Some(lookup)) => real.push_str(&value(&lookup(name)?)),
                (Part::Home, None) => return Err(not_allowed("begins with ~")),
                (Part::Variable(name), None) => return Err(not_allowed(&format!("names ${{{name}}}"))),
            }
        }
        Ok(real)
    }

    /// Returns the problems that the paths of a job have because of their expansion.
    pub fn problems(&self, spec: &JobSpec) -> Vec<Problem> {
        let mut problems = Vec::new();
        for JobPath { field, path, role } in job_format().paths(spec) {
            let expanded = match role {
                PathRole::Input => {
                    self.expand_all(&path).map(|all| all.into_iter().map(|named| named.expanded).collect())
                }
                _ => self.expand(&path).map(|real| vec![real]),
            };
            match expanded {
                // the message leaves out the value, which may be private
                Err(message) => problems.push(Problem::missing(field, message)),
                // the parser of the job file has already reported its problems
                Ok(_) if is_plain(&path) => {}
                Ok(expanded) => problems.extend(expanded.iter().find_map(|real| path_problem(&field, real, role))),
            }
        }
        problems
    }

    /// The variables that the paths of a job use, with their values. Show them only to the owner of the environment;
    /// never write them to a file.
    pub fn used_variables(&self, spec: &JobSpec) -> BTreeMap<String, String> {
        let Some(lookup) = &self.lookup else { return BTreeMap::new() };
        let paths = job_format().paths(spec);
        let names =
            paths.iter().flat_map(|named| parts(&named.path).unwrap_or_default()).filter_map(|part| match part {
                Part::Text(_) => None,
                Part::Home => Some(HOME),
                Part::Variable(name) => Some(name),
            });
        names.filter_map(|name| Some((name.to_owned(), lookup(name).ok()?))).collect()
    }
}

fn not_allowed(what: &str) -> String {
    format!("{what}, which would be the server's own; valid in a job that is submitted: the path itself")
}

fn process_variable(name: &str) -> Result<String, String> {
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

/// Turns a name into a glob pattern that matches only this name.
fn escape_globs(value: &str) -> String {
    if value.contains(['*', '?', '[', ']']) { Pattern::escape(value) } else { value.to_owned() }
}

/// Resolves a path of the job file on this machine, relative to `base`.
pub fn local_path(base: &Path, path: &str) -> PathBuf {
    base.join(path.strip_prefix("file://").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of a process with these variables and the home folder `/home/ann/`.
    fn names(variables: &'static [(&'static str, &'static str)]) -> PathExpander {
        PathExpander::with(move |name| {
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
            let named = names.expand_all(path).unwrap();
            let [named] = named.as_slice() else { panic!("{path}: {named:?}") };
            assert_eq!((named.expanded.as_str(), named.as_written(found.into()).as_str()), (real, shown), "{path}");
        }
        assert_eq!(names.expand("${C}/{a,b}").unwrap(), "/data/[x]/{a,b}");
        let both: Vec<String> =
            names.expand_all("${C}/{b,a}").unwrap().into_iter().map(|n| n.braces_expanded).collect();
        assert_eq!(both, ["${C}/b", "${C}/a"]);
        assert_eq!(names.expand("${NOT}").unwrap_err(), "NOT is not set");
    }

    #[test]
    fn a_server_gives_nothing_of_its_own() {
        let names = PathExpander::none();
        for path in ["~/x", "~", "${HOME}/x", "a/${L}", "{a,${L}}"] {
            let reported = [names.expand_all(path).unwrap_err(), names.expand(path).unwrap_err()];
            assert!(reported.iter().all(|t| t.contains("the server's own")), "{reported:?}");
        }
        assert_eq!(names.expand("$${HOME}/~").unwrap(), "${HOME}/~");
    }
}
