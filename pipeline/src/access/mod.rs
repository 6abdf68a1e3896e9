//! Access control: the folders, stores, endpoints and models that a server's configuration allows jobs to use.
//!
//! ```text
//!   job file ─► Access::problems ─► listing ─► Gate::admits, for every file found ─► model folder ─► Gate::outside_files, for every file opened
//!               (before opening anything)      (links that lead out)
//! ```
//!
//! A disk path is judged by its target: links are followed, and `..` applies to the link's target, as in the operating
//! system. URLs are compared by whole components. A refusal has the same words whether the target exists or not.
//! Someone with write access can change a path between the check and its use, so a server also runs its jobs in a
//! sandbox.

mod folders;
#[cfg(test)]
mod tests;
mod urls;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use stillhouse_operators::registry::job_format;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::JobSpec;
use stillhouse_schemas::storage::endpoint_problem;

use self::folders::{Roots, resolve, stripped};
use self::urls::{Prefix, is_url, same_endpoint};
use crate::hub::HubRef;
use crate::path_expansion::{PathExpander, local_path};
use crate::storage::{Location, StoreUrl, is_public};
use stillhouse_input_files::literal_prefix;

/// Wildcard that allows everything of a kind.
const ANY: &str = "*";

/// What a job may access. The default allows nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Access {
    /// Sources of inputs, teachers and tokenizers: absolute folders of this machine, and URL prefixes of stores
    /// (`s3://bucket/prefix`, `gs://`, `az://`, `http(s)://host/prefix`; `https://*`: any host), and data sets of the hub in
    /// all their revisions (`hf://datasets/org/name`, `hf://datasets/org/*`, `hf://*`), which are read with the server's
    /// token. `*`: anything. An allowed web server may redirect to another allowed one.
    pub read: Vec<String>,
    /// Places of outputs, from which inputs may also come: folders and prefixes, as in `read`.
    pub write: Vec<String>,
    /// Allowed values of `storage.endpoint`. A job sends requests there that are signed with the server's credentials.
    /// The prefixes of `read` and `write` apply at each endpoint. `*`: any.
    pub endpoints: Vec<String>,
    /// Hub repositories of models: `org/name`, `org/*`, `*`. Requests use the server's token.
    pub hub: Vec<String>,
    /// Allowed values of `engine.scheduler`, as `host:port` or `https://host:port`, compared literally. The scheduler
    /// can do whatever the cluster's token permits. `*`: any.
    pub schedulers: Vec<String>,
    /// Whether `http` and `https` inputs may have addresses outside the public internet, such as private, loopback or
    /// link-local ones. If false, `http` and `https` inputs are read without a proxy.
    pub private_networks: bool,
    /// Folders that are never accessible, even inside an allowed folder.
    pub deny: Vec<PathBuf>,
    /// Whether `~` and `${VAR}` in a job's paths expand to this user's home and this process's environment. Never true
    /// in a service, so neither a configuration nor a worker's request can set it.
    #[serde(skip)]
    pub environment: bool,
}

/// [`Access`] with its folders resolved at this moment.
#[derive(Debug)]
pub(crate) struct Gate<'a> {
    access: &'a Access,
    /// `None` if everything is allowed, so that a person's own job needs no checks.
    rules: Option<Rules>,
}

#[derive(Debug)]
struct Rules {
    read: Roots,
    write: Roots,
    deny: Vec<PathBuf>,
}

/// What a path is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Read,
    Write,
}

impl Access {
    /// How to expand `~` and variables in a job's paths.
    pub fn names(&self) -> PathExpander {
        if self.environment { PathExpander::from_environment() } else { PathExpander::none() }
    }

    /// Allows everything, for a person's own job.
    pub fn everything() -> Self {
        let any = || vec![ANY.to_owned()];
        Self {
            read: any(),
            write: any(),
            endpoints: any(),
            hub: any(),
            schedulers: any(),
            private_networks: true,
            deny: Vec::new(),
            environment: true,
        }
    }

    fn is_everything(&self) -> bool {
        let any = |list: &[String]| list.iter().any(|entry| entry == ANY);
        self.private_networks
            && self.deny.is_empty()
            && [&self.read, &self.write, &self.endpoints, &self.hub, &self.schedulers].into_iter().all(|list| any(list))
    }

    /// Adds a place of reading, and of writing where its store can be written to.
    pub fn allow(&mut self, place: String) {
        if !Prefix::parse(&place).is_ok_and(|prefix| prefix.is_read_only()) {
            self.write.push(place.clone());
        }
        self.read.push(place);
    }

    /// Checks the configuration itself, including that its folders exist.
    pub fn check(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (name, entries) in [("read", &self.read), ("write", &self.write)] {
            for (i, entry) in entries.iter().enumerate() {
                let field = format!("{name}[{i}]");
                if let Some(problem) = self.entry_problem(&field, entry, name == "write") {
                    problems.push(problem);
                }
            }
        }
        for (i, endpoint) in self.endpoints.iter().enumerate().filter(|(_, e)| *e != ANY) {
            if let Some(problem) = endpoint_problem(endpoint) {
                problems.push(Problem::missing(format!("endpoints[{i}]"), problem));
            }
        }
        for (i, pattern) in self.hub.iter().enumerate() {
            let named = pattern.strip_suffix("/*").map_or_else(|| pattern.clone(), |org| format!("{org}/name"));
            let good = pattern == ANY
                || matches!(HubRef::parse(&format!("hf://{named}")), Ok(Some(r)) if r.repo() == named.as_str());
            if !good {
                let message = "is not a repository of the hub; valid: org/name, org/*, *";
                problems.push(Problem::new(format!("hub[{i}]"), format!("{pattern:?}"), message));
            }
        }
        for (i, folder) in self.deny.iter().enumerate() {
            let got = format!("{:?}", folder.display().to_string());
            if !folder.is_absolute() {
                problems.push(Problem::new(format!("deny[{i}]"), got, "is not an absolute path"));
            } else if !folder.exists() {
                problems.push(Problem::new(format!("deny[{i}]"), got, "no such folder"));
            }
        }
        problems
    }

    fn entry_problem(&self, field: &str, entry: &str, write: bool) -> Option<Problem> {
        const VALID: &str = "an absolute folder, or a URL such as s3://bucket/prefix";
        if entry == ANY {
            return None;
        }
        if !is_url(entry) {
            let path = Path::new(stripped(entry));
            let got = format!("{entry:?}");
            return if !path.is_absolute() {
                Some(Problem::new(field, got, format!("is not an absolute path; valid: {VALID}")))
            } else if !path.exists() {
                Some(Problem::new(field, got, "no such folder"))
            } else {
                None
            };
        }
        // a string that is not a valid URL may contain a secret: report only its scheme
        let scheme = entry.split_once("://").map_or("", |(scheme, _)| scheme);
        let hidden = |message: String| Some(Problem::new(field, format!("{scheme}://…"), message));
        match Prefix::parse(entry) {
            Err(message) => hidden(format!("{message}; valid: {VALID}")),
            Ok(prefix) if prefix.is_read_only() && write => {
                hidden("web servers and the hub are only read from; valid in read".into())
            }
            Ok(prefix) if !self.private_networks && prefix.address().is_some_and(|a| !is_public(a)) => {
                let message = "is not an address of the public internet, and private_networks is false";
                Some(Problem::new(field, format!("{entry:?}"), message))
            }
            Ok(_) => None,
        }
    }

    /// Reports everything that a job names and may not use, by field. Relative paths are relative to `base`.
    ///
    /// Follows links on disk only for paths that are allowed.
    pub fn problems(&self, spec: &JobSpec, base: &Path) -> Vec<Problem> {
        self.problems_while(spec, base, &|| true).unwrap_or_default()
    }

    /// Like [`Self::problems`], but asks `should_continue` before each path and returns `None` if that returns false.
    /// Reports at most 90 unreadable paths one by one, and the rest as a count in one problem.
    pub fn problems_while(
        &self,
        spec: &JobSpec,
        base: &Path,
        should_continue: &dyn Fn() -> bool,
    ) -> Option<Vec<Problem>> {
        let names = self.names();
        let mut problems = names.problems(spec);
        for problem in Gate::new(self).problems(spec, base, &names, should_continue)? {
            if !problems.iter().any(|p| p.field == problem.field) {
                problems.push(problem);
            }
        }
        Some(problems)
    }

    /// The configured entry that contains a folder of this machine. Ignores `*`, which an operator sets deliberately.
    pub fn entry_containing(&self, folder: &Path) -> Option<&str> {
        let at = resolve(folder, |_| true).unwrap_or_else(|| folder.to_owned());
        let entries = self.read.iter().chain(&self.write);
        entries
            .map(String::as_str)
            .filter(|e| *e != ANY)
            .find(|entry| Roots::new([&(*entry).to_owned()]).contains_folder(&at))
    }

    /// Whether a web server may redirect an input to this URL.
    pub(crate) fn allows_redirect(&self, target: &url::Url) -> bool {
        // the server itself adds the query, such as a signature; in a job's own URL a query is refused
        let mut plain = target.clone();
        plain.set_query(None);
        plain.set_fragment(None);
        let roots = Roots::new(self.read.iter().chain(&self.write));
        matches!(StoreUrl::parse(plain.as_str()), Some(Ok(url)) if roots.contains_url(&Prefix::from_url(&url)))
    }

    /// Whether a job may send requests to the hub.
    pub fn uses_hub(&self) -> bool {
        !self.hub.is_empty() || self.read.iter().any(|entry| entry == ANY || entry.starts_with("hf://"))
    }

    fn allows_hub(&self, repo: &str) -> bool {
        let org = repo.split_once('/').map(|(org, _)| org);
        self.hub.iter().any(|entry| match entry.strip_suffix("/*") {
            Some(allowed) => org == Some(allowed),
            None => entry == ANY || entry == repo,
        })
    }

    fn allows_endpoint(&self, endpoint: &str) -> bool {
        self.endpoints.iter().any(|allowed| allowed == ANY || same_endpoint(allowed, endpoint))
    }

    /// Lists the allowed entries for messages; they are not secret.
    fn allowed(&self, purpose: Purpose, with: impl Fn(&str) -> bool) -> String {
        let read = self.read.iter().filter(|_| purpose == Purpose::Read);
        list(read.chain(&self.write).map(String::as_str).filter(|entry| with(entry)))
    }
}

fn list<'a>(entries: impl Iterator<Item = &'a str>) -> String {
    let mut shown = Vec::new();
    for entry in entries {
        if !shown.contains(&entry) {
            shown.push(entry);
        }
    }
    if shown.is_empty() { "allowed: nothing".into() } else { format!("allowed: {}", shown.join(", ")) }
}

/// Maximum number of path problems reported one by one. A service reports 100 problems, so some remain for other
/// fields.
const MAX_PATH_PROBLEMS: usize = 90;
const NOT_ALLOWED: &str = "the server's configuration does not allow";

impl<'a> Gate<'a> {
    pub fn new(access: &'a Access) -> Self {
        let rules = (!access.is_everything()).then(|| {
            let write = Roots::new(&access.write);
            let read = Roots::new(access.read.iter().chain(&access.write));
            let deny = access.deny.iter().map(|folder| resolve(folder, |_| true).unwrap_or_else(|| folder.clone()));
            Rules { read, write, deny: deny.collect() }
        });
        Self { access, rules }
    }

    /// Whether anything is not allowed.
    pub fn is_restricted(&self) -> bool {
        self.rules.is_some()
    }

    /// Checks the fields of a job. Paths that cannot be expanded are reported by the caller.
    fn problems(
        &self,
        spec: &JobSpec,
        base: &Path,
        names: &PathExpander,
        should_continue: &dyn Fn() -> bool,
    ) -> Option<Vec<Problem>> {
        let mut problems = Vec::new();
        if self.rules.is_none() {
            return Some(problems);
        }
        let mut more = 0;
        for (field, path) in spec.input.all_paths() {
            let mut refusal = None;
            for named in names.expand_all(path).unwrap_or_default() {
                if !should_continue() {
                    return None;
                }
                refusal = refusal.or_else(|| self.path_refusal(base, &named.expanded, Purpose::Read));
            }
            match refusal {
                Some(message) if problems.len() < MAX_PATH_PROBLEMS => {
                    problems.push(Problem::new(field, shown(path), message));
                }
                Some(_) => more += 1,
                None => {}
            }
        }
        if more > 0 {
            problems.push(Problem::missing("input.paths", format!("and {more} more paths that may not be read")));
        }
        let models = [
            ("tokenizer.path", spec.tokenizer.path.as_ref()),
            ("extract.teacher.path", spec.extract.as_ref().map(|e| &e.teacher.path)),
        ];
        for (field, path) in models {
            let Some(path) = path.filter(|path| !path.is_empty()) else { continue };
            let refusal = names.expand(path).ok().and_then(|real| self.model_refusal(base, &real));
            problems.extend(refusal.map(|m| Problem::new(field, shown(path), m)));
        }
        for file in job_format().files(spec).into_iter().filter(|file| !file.path.is_empty()) {
            let refusal = names.expand(&file.path).ok().and_then(|real| self.path_refusal(base, &real, Purpose::Read));
            problems.extend(refusal.map(|m| Problem::new(file.field, shown(&file.path), m)));
        }
        let output = &spec.output.path;
        let refusal = names
            .expand(output)
            .ok()
            .and_then(|real| self.path_refusal(base, &real, Purpose::Write).or_else(|| self.output_links(base, &real)));
        problems.extend(refusal.map(|m| Problem::new("output.path", shown(output), m)));
        let storages = [
            ("storage", Some(&spec.storage)),
            ("input.storage", spec.input.storage.as_ref()),
            ("output.storage", spec.output.storage.as_ref()),
        ];
        for (field, storage) in storages {
            let Some(endpoint) = storage.and_then(|s| s.endpoint.as_ref()) else { continue };
            if !self.access.allows_endpoint(endpoint) {
                problems.push(self.endpoint_refused(format!("{field}.endpoint"), endpoint));
            }
        }
        if let Some(scheduler) = &spec.engine.scheduler
            && !self.access.schedulers.iter().any(|allowed| allowed == ANY || allowed == scheduler)
        {
            let allowed = list(self.access.schedulers.iter().map(String::as_str));
            let message = format!("{NOT_ALLOWED} this scheduler; {allowed}");
            problems.push(Problem::new("engine.scheduler", format!("{scheduler:?}"), message));
        }
        Some(problems)
    }

    /// The problem of a refused endpoint, with the configuration that would allow it.
    fn endpoint_refused(&self, field: String, endpoint: &str) -> Problem {
        let allowed = list(self.access.endpoints.iter().map(String::as_str));
        let message = format!("{NOT_ALLOWED} this endpoint; {allowed}");
        // an invalid endpoint may contain a secret, so do not repeat it
        if endpoint_problem(endpoint).is_some() {
            return Problem::missing(field, message);
        }
        let all = self.access.endpoints.iter().map(String::as_str).chain([endpoint]);
        let line = all.map(|e| format!("{e:?}")).collect::<Vec<_>>().join(", ");
        let how =
            format!("the server's operator allows it with `access: {{endpoints: [{line}]}}` in its configuration");
        let flag = format!("or with `stillhouse serve --endpoint {endpoint}`");
        Problem::new(field, format!("{endpoint:?}"), format!("{message}; {how}, {flag}"))
    }

    /// Why a path or URL may not be used; `None` if it may.
    fn path_refusal(&self, base: &Path, given: &str, purpose: Purpose) -> Option<String> {
        let act = if purpose == Purpose::Read { "reading" } else { "writing" };
        let refused = || {
            let kind = is_url(given);
            let allowed = self.access.allowed(purpose, |entry| entry == ANY || is_url(entry) == kind);
            Some(format!("{NOT_ALLOWED} {act} here; {allowed}"))
        };
        if given.chars().any(char::is_control) {
            return Some("has control characters, which no name may have here".into());
        }
        let head = if purpose == Purpose::Read { literal_prefix(given) } else { given.to_owned() };
        match StoreUrl::parse(&head) {
            // the parser has reported what is wrong with it
            Some(Err(_)) => refused(),
            Some(Ok(url)) => {
                let address = Prefix::from_url(&url).address();
                if !self.access.private_networks && address.is_some_and(|a: IpAddr| !is_public(a)) {
                    return Some(format!("{NOT_ALLOWED} http input from private addresses"));
                }
                if self.allows_url(&url, purpose) { None } else { refused() }
            }
            None => match self.folder(&base.join(stripped(&head)), purpose) {
                Some(_) => None,
                None => refused(),
            },
        }
    }

    fn model_refusal(&self, base: &Path, path: &str) -> Option<String> {
        match HubRef::parse(path) {
            Ok(Some(reference)) if self.access.allows_hub(reference.repo()) => None,
            Ok(Some(_)) => {
                let allowed = list(self.access.hub.iter().map(String::as_str));
                Some(format!("{NOT_ALLOWED} this repository of the hub; {allowed}"))
            }
            // the loader of the model reports what is wrong with it
            Err(_) => None,
            Ok(None) => {
                let place = local_path(base, path);
                if !path.chars().any(char::is_control) && self.folder(&place, Purpose::Read).is_some() {
                    return None;
                }
                let allowed = self.access.allowed(Purpose::Read, |entry| !is_url(entry));
                Some(format!("{NOT_ALLOWED} reading here; {allowed}"))
            }
        }
    }

    fn roots(&self, purpose: Purpose) -> Option<&Roots> {
        let rules = self.rules.as_ref()?;
        Some(if purpose == Purpose::Read { &rules.read } else { &rules.write })
    }

    fn allows_url(&self, url: &StoreUrl, purpose: Purpose) -> bool {
        self.roots(purpose).is_none_or(|roots| roots.contains_url(&Prefix::from_url(url)))
    }

    /// The target of a path, if it is allowed.
    fn folder(&self, path: &Path, purpose: Purpose) -> Option<PathBuf> {
        let Some(rules) = &self.rules else { return Some(path.to_owned()) };
        // resolving `..` anywhere else would reveal whether a forbidden folder exists and where its links lead
        let resolved = resolve(path, |at| rules.read.are_near(at))?;
        self.allows_resolved(&resolved, purpose).then_some(resolved)
    }

    fn allows_resolved(&self, resolved: &Path, purpose: Purpose) -> bool {
        let denied = |rules: &Rules| rules.deny.iter().any(|folder| resolved.starts_with(folder));
        self.rules.as_ref().is_none_or(|rules| !denied(rules))
            && self.roots(purpose).is_none_or(|roots| roots.contains_folder(resolved))
    }

    /// Whether a file or folder from a listing may be read.
    pub fn admits(&self, location: &Location) -> Result<(), String> {
        if self.rules.is_none() {
            return Ok(());
        }
        let admitted = match location {
            Location::Store(url) => self.allows_url(url, Purpose::Read),
            Location::Disk(path) => path.canonicalize().is_ok_and(|at| self.allows_resolved(&at, Purpose::Read)),
        };
        if admitted { Ok(()) } else { Err(self.leads_out_message("what it finds", Purpose::Read)) }
    }

    fn leads_out_message(&self, what: &str, purpose: Purpose) -> String {
        let allowed = self.access.allowed(purpose, |entry| entry == ANY || !is_url(entry));
        format!("{what} is outside what the server's configuration allows; {allowed}")
    }

    /// Why files of a local model may not be opened: one leads out of the allowed folders, or is not a regular file.
    pub fn outside_files<'f>(&self, files: impl IntoIterator<Item = &'f Path>) -> Option<String> {
        self.rules.as_ref()?;
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().escape_debug().to_string();
        files.into_iter().find_map(|file| {
            // another check reports a missing file
            std::fs::symlink_metadata(file).ok()?;
            let Some(at) = file.canonicalize().ok().filter(|at| self.allows_resolved(at, Purpose::Read)) else {
                return Some(self.leads_out_message(&name(file), Purpose::Read));
            };
            let kind = at.metadata().ok()?;
            let odd = !kind.is_file() && !kind.is_dir();
            odd.then(|| format!("{} is a pipe, a device or a socket; valid: a file", name(file)))
        })
    }

    /// Finds links inside an existing output that lead out of the allowed folders.
    fn output_links(&self, base: &Path, output: &str) -> Option<String> {
        if is_url(output) {
            return None;
        }
        let root = self.folder(&base.join(stripped(output)), Purpose::Write)?;
        folders::written(&root).into_iter().find_map(|path| {
            let inside = path.strip_prefix(&root).unwrap_or(&path).display().to_string().escape_debug().to_string();
            let good = resolve(&path, |_| true).is_some_and(|at| {
                let odd = at.metadata().is_ok_and(|m| !m.is_file() && !m.is_dir());
                !odd && self.allows_resolved(&at, Purpose::Write)
            });
            (!good).then(|| self.leads_out_message(&inside, Purpose::Write))
        })
    }
}

/// A value of the job for messages, without possible secrets.
fn shown(value: &str) -> String {
    match StoreUrl::parse(value) {
        Some(Err(_)) => format!("{}://…", value.split_once("://").map_or("", |(scheme, _)| scheme)),
        _ => format!("{value:?}"),
    }
}
