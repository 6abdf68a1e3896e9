//! Turns a job file into a job that can run: makes every check that needs files and reports all problems at once.
//!
//! Writes nothing. Order of the checks: the file itself, the input, the tokenizer, the teacher, then whether they fit
//! each other.

mod vocabularies;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use stillhouse_operators::config::{JobContext, SpecialIds};
use stillhouse_operators::extract::MAX_TOPK_ON_GPU;
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::registry;
use stillhouse_operators::vocabulary::{Role, TeacherSpecials, TeacherVocabulary, Vocabulary, VocabularyError};
use stillhouse_schemas::parse::Parsed;
use stillhouse_schemas::problems::{Problem, Problems};
use stillhouse_schemas::spec::{
    Boundary, INPUT_TABLE, Input, InputFormat, JobSpec, NoiseCodec, SOURCE_COLUMN, Separator, TokenizerDifference,
};
use stillhouse_signals::StoredSignal;
use stillhouse_teacher::{DeviceChoice, TeacherConfig, TeacherError};
use tokio::runtime::Handle;

use crate::access::{Access, Gate};
use crate::driver;
use crate::error::{ErrorKind, PipelineError, Result, with_causes};
use crate::events::{Event, Observer};
use crate::hub::{self, FetchPurpose, HubRef};
use crate::output::Output;
use crate::path_expansion::{PathExpander, local_path};
use crate::sequence_offsets;
use crate::source::{self, QueryTable};
use crate::storage::{Guard, Location, Storages, StoreUrl};
use stillhouse_input_files::{InputFile, InputPaths, ListError, Store, find_output_overlap, list_files};
pub(crate) use vocabularies::read_section_file;

/// A checked job with everything that its checks have opened.
pub struct Prepared {
    /// The job.
    pub spec: JobSpec,
    /// Folder of the job's relative paths.
    pub base: PathBuf,
    /// The output's path with `~` and variables expanded.
    output_path: String,
    /// Expansions of `~` and variables in the job's paths, by name. Private to the user: never written to a file.
    pub environment: BTreeMap<String, String>,
    /// Path of the job file, if there is one. The caller that reads the file sets it.
    pub file: Option<PathBuf>,
    /// Store of the input.
    pub store: Store,
    /// Open object stores.
    pub storages: Arc<Storages>,
    /// Input files in order, over all tables.
    pub files: Vec<InputFile>,
    /// Tables of `input.sql` or of a mixture, with their files.
    pub tables: Vec<QueryTable>,
    /// The tokenizer.
    pub vocabulary: Arc<Vocabulary>,
    /// The teacher's configuration and the path of its weights.
    pub teacher: Option<PreparedTeacher>,
    /// Vocabulary size of ids, log-probabilities and sub-tokens.
    pub vocab_size: usize,
    /// Operators in order.
    pub operators: Vec<OperatorSpec>,
}

/// A teacher that was found but not loaded.
pub struct PreparedTeacher {
    /// Folder, or GGUF file.
    pub path: PathBuf,
    /// Its configuration.
    pub config: TeacherConfig,
    /// Name of the teacher in the job, with the commit if it comes from a hub.
    pub source: String,
    /// Id of the token that is put before sequences that do not begin with it.
    pub bos: u32,
}

impl Prepared {
    /// Opens the output, without reading it.
    ///
    /// # Errors
    /// If it cannot be opened: invalid store options, or no credentials.
    pub fn output(&self) -> Result<Output> {
        output_at(&self.spec, &self.base, &self.output_path, &self.storages)
    }

    /// Makes the staged rows readable that a run keeps beside an output in a store. Ignores an output that
    /// cannot be opened; opening it later reports the error.
    fn with_staged_rows(mut self) -> Self {
        if !self.spec.input.is_staged() {
            return self;
        }
        if let (Ok(Location::Store(url)), Ok(output)) = (Location::parse(&self.base, &self.output_path), self.output())
        {
            self.store = self.store.with_staged_rows(&url, output.store());
        }
        self
    }
}

/// Opens the output of a job without its other checks.
///
/// # Errors
/// If `access` does not allow everything that the job names, or [`Prepared::output`] fails.
pub(crate) fn output_of(spec: &JobSpec, base: &Path, access: &Access) -> Result<Output> {
    let mut problems = Problems::default();
    access.problems(spec, base).into_iter().for_each(|problem| problems.push(problem));
    problems.into_result()?;
    let storages = Storages::new();
    let storages = if Gate::new(access).is_restricted() { storages.with_guard(guard(access)) } else { storages };
    let path = access.names().expand(&spec.output.path).unwrap_or_else(|_| spec.output.path.clone());
    output_at(spec, base, &path, &storages)
}

fn output_at(spec: &JobSpec, base: &Path, path: &str, storages: &Storages) -> Result<Output> {
    let named =
        Location::parse(base, path).map_err(|e| PipelineError::new(ErrorKind::Usage, format!("output.path: {e}")))?;
    let output = Output::at(&simplify_path(named), &spec.output_storage(), storages)?;
    Ok(output.for_shards_of(spec.output.shard_megabytes * 1e6))
}

/// Checks a parsed job file. Its relative paths are relative to `base`; `access` limits what it may use.
///
/// If `access` is restricted, this opens nothing that the job names until all of it is allowed and the file has no
/// other problem.
///
/// # Errors
/// [`ErrorKind::Usage`] with all problems, each with its field and position.
pub fn prepare(parsed: Parsed, base: &Path, access: &Access, observer: &dyn Observer) -> Result<Prepared> {
    let Parsed { spec, problems, positions } = parsed;
    let checked = match spec {
        Some(spec) => check_and_prepare(spec, problems, base, access, observer),
        None => Err(problems.into()),
    };
    checked.map_err(|e| e.with_positions(&positions))
}

fn check_and_prepare(
    mut spec: JobSpec,
    mut problems: Problems,
    base: &Path,
    access: &Access,
    observer: &dyn Observer,
) -> Result<Prepared> {
    let gate = Gate::new(access);
    if let Some(missing) = driver::unavailable_reason(&spec.engine) {
        problems.push(Problem::new("engine.kind", "ballista", missing));
    }
    for problem in access.problems(&spec, base) {
        if !problems.touches(&problem.field) {
            problems.push(problem);
        }
    }
    if gate.is_restricted() {
        std::mem::take(&mut problems).into_result()?;
    }
    let names = access.names();
    let storages = Storages::new();
    let storages = if gate.is_restricted() { storages.with_guard(guard(access)) } else { storages };
    let store = input_store(&spec, &names, &storages)?;
    let mut checks =
        Checks { spec: &spec, base, names: &names, gate: &gate, observer, problems: &mut problems, failure: None };
    let tables = checks.input(&store);
    let teacher = checks.teacher();
    let own = checks.own_vocabulary(teacher.as_ref());
    let vocabulary = checks.tokenizer(teacher.as_ref(), own.as_ref());
    let mut section_files = Vec::new();
    if let Some(vocabulary) = &vocabulary {
        checks.special_tokens(vocabulary);
        section_files = checks.vocabularies(vocabulary, teacher.as_ref(), own.as_ref());
    }
    if let Some(failure) = checks.failure {
        return Err(failure);
    }
    let bos = vocabulary.as_ref().and_then(|v| v.special(Role::Bos).or(v.special(Role::Eos))).map(|t| t.id);
    problems.into_result()?;
    let (Some(tables), Some(vocabulary)) = (tables, vocabulary) else {
        return Err(PipelineError::new(ErrorKind::Usage, "the job could not be prepared"));
    };
    let teacher = match (teacher, bos) {
        (Some((path, source, config)), Some(bos)) => Some(PreparedTeacher { path, config, source, bos }),
        _ => None,
    };
    if let [QueryTable { files, .. }] = tables.as_slice() {
        let named = match source::with_class_names(&spec.input, files) {
            Cow::Owned(named) => Some(named),
            Cow::Borrowed(_) => None,
        };
        spec.input = named.unwrap_or(spec.input);
    }
    if spec.input.is_mixture() && spec.input.carry.first().is_none_or(|first| first != SOURCE_COLUMN) {
        spec.input.carry.insert(0, SOURCE_COLUMN.into());
    }
    fill_in(&mut spec, section_files, teacher.as_ref().map(|t| t.config.hidden_size));
    let vocab_size = teacher.as_ref().map_or(vocabulary.vocab_size(), |t| t.config.vocab_size);
    let operators = {
        let context = JobContext { spec: &spec, vocab_size, special_ids: SpecialIds::from_vocabulary(&vocabulary) };
        registry::operators_for_job(&context).map_err(Problems)?
    };
    if let Some(problem) = sequence_offsets::check_schedule(&spec) {
        return Err(Problems(vec![problem]).into());
    }
    let prepared = Prepared {
        base: base.to_path_buf(),
        output_path: names.expand(&spec.output.path).unwrap_or_else(|_| spec.output.path.clone()),
        environment: names.used_variables(&spec),
        file: None,
        store,
        storages: Arc::new(storages),
        files: all_files(&tables).into_owned(),
        tables,
        vocabulary: Arc::new(vocabulary),
        teacher,
        vocab_size,
        operators,
        spec,
    };
    Ok(prepared.with_staged_rows())
}

/// The files of all tables; copies them only if there are several tables.
fn all_files(tables: &[QueryTable]) -> Cow<'_, [InputFile]> {
    match tables {
        [table] => Cow::Borrowed(&table.files),
        several => several.iter().flat_map(|table| table.files.iter().cloned()).collect(),
    }
}

/// Opens the disk and every bucket from which the job reads.
pub(crate) fn input_store(spec: &JobSpec, names: &PathExpander, storages: &Storages) -> Result<Store> {
    let mut buckets = BTreeMap::new();
    let named = spec.input.all_paths().flat_map(|(_, path)| names.expand_all(path).unwrap_or_default());
    for url in named.filter_map(|named| StoreUrl::parse(&named.expanded)?.ok()) {
        if let Entry::Vacant(entry) = buckets.entry(url.root()) {
            let opened = storages.open(&url, &spec.input_storage())?;
            entry.insert(opened);
        }
    }
    Ok(Store::with_buckets(Handle::current(), buckets))
}

/// Simplifies a folder that contains `..` (`jobs/../out`).
pub(crate) fn simplify_path(named: Location) -> Location {
    let Location::Disk(root) = &named else { return named };
    if !root.components().any(|c| c == Component::ParentDir) {
        return named;
    }
    let there = root.ancestors().find_map(|a| Some((a.canonicalize().ok()?, root.strip_prefix(a).ok()?)));
    match (there, std::env::current_dir()) {
        (Some((there, rest)), Ok(here)) if !rest.components().any(|c| c == Component::ParentDir) => {
            let whole = there.join(rest);
            Location::Disk(whole.strip_prefix(&here).map_or(whole.clone(), Path::to_path_buf))
        }
        _ => named,
    }
}

/// Guard of web inputs: restricts addresses and redirects as configured.
fn guard(access: &Access) -> Guard {
    let guard = if access.private_networks { Guard::new().with_private_networks() } else { Guard::new() };
    let access = access.clone();
    guard.with_redirect_filter(move |url| access.allows_redirect(url))
}

/// The files of a model or tokenizer that may be opened: the file itself, or the `.json`, `.safetensors` and `.jinja` files
/// of its folder.
fn model_files(path: &Path) -> Vec<PathBuf> {
    let wanted = |file: &Path| {
        file.extension().is_some_and(|ending| ending == "json" || ending == "safetensors" || ending == "jinja")
    };
    let Ok(entries) = fs::read_dir(path) else { return vec![path.to_owned()] };
    entries.flatten().map(|entry| entry.path()).filter(|file| wanted(file)).collect()
}

/// Below this number of items, a check reports no progress.
const MIN_REPORTED_STEPS: usize = 100;

/// Reports the progress of a check over many items, at most 100 times.
fn step_reporter<'o>(observer: &'o dyn Observer, things: String, all: usize) -> impl FnMut(usize) + 'o {
    let step = all.div_ceil(100).max(1);
    move |done| {
        if all >= MIN_REPORTED_STEPS && done > 0 && done.is_multiple_of(step) {
            observer.event(&Event::Preparing { what: format!("checking {things}: {done} of {all}") });
        }
    }
}

type FoundTeacher = (PathBuf, String, TeacherConfig);

struct Checks<'a> {
    spec: &'a JobSpec,
    base: &'a Path,
    names: &'a PathExpander,
    gate: &'a Gate<'a>,
    observer: &'a dyn Observer,
    problems: &'a mut Problems,
    /// Failure that is not a problem of the job, such as a lost connection.
    failure: Option<PipelineError>,
}

impl Checks<'_> {
    fn push(&mut self, problem: Problem) {
        if !self.problems.touches(&problem.field) {
            self.problems.push(problem);
        }
    }

    fn input(&mut self, store: &Store) -> Option<Vec<QueryTable>> {
        let input = &self.spec.input;
        if input.format == Some(InputFormat::None) && !self.problems.touches("input.format") {
            let (name, files) = (INPUT_TABLE.to_owned(), vec![InputFile::placeholder()]);
            return Some(vec![QueryTable { name, field: "input".into(), input: input.clone(), files }]);
        }
        let sources = input.sources();
        let unknown = ["input.format", "input.tables", "input.images", "input.codes"];
        if unknown.iter().any(|field| self.problems.touches(field)) || sources.is_empty() {
            return None;
        }
        let (observer, gate, names) = (self.observer, self.gate, self.names);
        let mut tables = Vec::new();
        let mut listed = true;
        let output = names.expand(&self.spec.output.path).ok().and_then(|path| Location::parse(self.base, &path).ok());
        for source in sources {
            let mut looked_at = step_reporter(observer, format!("{}.paths", source.field), source.input.paths.len());
            let admits = |named: &Location| gate.admits(named);
            let paths = InputPaths {
                input: &source.input,
                field: &source.field,
                base_dir: self.base,
                names,
                endings: source::file_endings(&source.input),
            };
            let found = list_files(store, paths, &admits, &mut looked_at);
            if let Some(output) = &output {
                let files = found.as_deref().unwrap_or_default();
                let problems = find_output_overlap(paths, files, output);
                listed &= problems.is_empty();
                problems.into_iter().for_each(|p| self.push(p));
            }
            match found {
                Ok(files) => {
                    tables.push(QueryTable { name: source.name, field: source.field, input: source.input, files })
                }
                Err(ListError::Problems(problems)) => {
                    problems.into_iter().for_each(|p| self.push(p));
                    listed = false;
                }
                Err(ListError::Store(error)) => {
                    self.failure = Some(error);
                    return None;
                }
            }
        }
        if !listed {
            return None;
        }
        let found = match &input.sql {
            Some(_) => stillhouse_query::check_sql(store, &tables, input, crate::functions::register),
            None if input.is_mixture() => stillhouse_query::check_mixture(store, &tables, input),
            None => {
                let files = all_files(&tables);
                source::check_columns(store, &files, input, &mut step_reporter(observer, "files".into(), files.len()))
            }
        };
        match found {
            Ok(found) => found.into_iter().for_each(|p| self.push(p)),
            Err(error) => {
                self.failure = Some(PipelineError::source("input", error));
                return None;
            }
        }
        if !input.is_staged() && !["input", "input.paths", "input.text"].iter().any(|f| self.problems.touches(f)) {
            let files = all_files(&tables);
            self.check_first_records(store, &files, &source::with_class_names(input, &files))?;
        }
        Some(tables)
    }

    /// Reads the first record of every file, so that a bad file fails before a run starts.
    fn check_first_records(&mut self, store: &Store, files: &[InputFile], input: &Input) -> Option<()> {
        let observer = self.observer;
        let report =
            |done: usize, all: usize| step_reporter(observer, "the first records of the files".into(), all)(done);
        let found = match source::check_first_records(store, files, input, &report) {
            Ok(found) => found,
            Err(error) => {
                self.failure = Some(PipelineError::source("input", error));
                return None;
            }
        };
        // each file may have a problem of its own
        found.problems.into_iter().for_each(|p| self.problems.push(p));
        if let Some((file, reason)) = found.skipped.first() {
            let message = match found.skipped.len() {
                1 => format!("{file}: its first records are all bad and would be skipped ({reason})"),
                n => format!(
                    "{n} of {} files begin with records that are all bad and would be skipped; the first is {file} ({reason})",
                    found.files
                ),
            };
            observer.event(&Event::Warning { message });
        }
        Some(())
    }

    /// Finds a model or tokenizer on this machine, or fetches it from a hub.
    fn locate(&mut self, field: &str, path: &str, purpose: FetchPurpose) -> Option<(PathBuf, String)> {
        if path.is_empty() || self.problems.touches(field) {
            return None;
        }
        let real = self.names.expand(path).ok()?;
        match HubRef::parse(&real) {
            Ok(None) => {
                let local = local_path(self.base, &real);
                if local.exists() {
                    let files = model_files(&local);
                    return match self.gate.outside_files(files.iter().map(PathBuf::as_path)) {
                        None => Some((local, path.to_owned())),
                        Some(message) => {
                            self.push(Problem::new(field, format!("{path:?}"), message));
                            None
                        }
                    };
                }
                self.push(Problem::new(field, format!("{path:?}"), format!("no file or folder {}", local.display())));
            }
            Ok(Some(reference)) => {
                let observer = self.observer;
                let reported = std::cell::Cell::new(u64::MAX);
                let progress = |file: &str, done: u64, total: u64| {
                    let percent = (done * 100).checked_div(total).unwrap_or(0);
                    if reported.replace(percent) != percent {
                        observer.event(&Event::Preparing { what: format!("fetching {path}: {file}, {percent} %") });
                    }
                };
                match hub::fetch(&reference, purpose, &progress) {
                    Ok(fetched) => return Some((fetched.path, format!("{path} ({})", fetched.commit))),
                    Err(e) if e.retryable => self.failure = Some(e.at(field)),
                    Err(e) => self.push(Problem::new(field, format!("{path:?}"), e.to_string())),
                }
            }
            Err(message) => self.push(Problem::new(field, format!("{path:?}"), message)),
        }
        None
    }

    fn teacher(&mut self) -> Option<FoundTeacher> {
        const FIELD: &str = "extract.teacher.path";
        let spec = &self.spec.extract.as_ref()?.teacher;
        let (path, source) = self.locate(FIELD, &spec.path, FetchPurpose::Teacher)?;
        let config = match TeacherConfig::read(&path) {
            Ok(config) => config,
            Err(e) => {
                self.push(Problem::new(FIELD, format!("{:?}", spec.path), chain(&e)));
                return None;
            }
        };
        // an index may name weights in subfolders; files from a hub are in its own cache and need no check
        let of_hub = self.names.expand(&spec.path).is_ok_and(|real| matches!(HubRef::parse(&real), Ok(Some(_))));
        let weights = config.weights.iter().map(PathBuf::as_path).filter(|_| !of_hub);
        if let Some(message) = self.gate.outside_files(weights) {
            self.push(Problem::new(FIELD, format!("{:?}", spec.path), message));
            return None;
        }
        match stillhouse_teacher::check_weights(&path, &spec.ignore_tensors) {
            Ok(warning) => {
                if let Some(warning) = warning {
                    self.observer.event(&Event::Warning { message: format!("extract.teacher.path: {warning}") });
                }
            }
            Err(e @ TeacherError::IgnorePattern { .. }) => {
                let got = format!("{:?}", spec.ignore_tensors);
                self.push(Problem::new("extract.teacher.ignore_tensors", got, chain(&e)));
            }
            Err(e) => self.push(Problem::new(FIELD, format!("{:?}", spec.path), chain(&e))),
        }
        let open = |devices: Vec<DeviceChoice>| -> stillhouse_teacher::Result<bool> {
            devices.into_iter().try_fold(true, |all, device| Ok(all & device.open()?.is_cpu()))
        };
        match stillhouse_teacher::parse_devices(&spec.device).and_then(open) {
            Err(e) => self.push(Problem::new("extract.teacher.device", &spec.device, chain(&e))),
            Ok(false) if self.spec.sequential().is_some() => {
                let message =
                    "a teacher writes text (extract.mode: sequential) on a CPU only in this version; valid: cpu";
                self.push(Problem::new("extract.teacher.device", &spec.device, message));
            }
            Ok(false) => self.check_topk_on_gpu(),
            Ok(true) => {}
        }
        let length = self.spec.pack.length;
        if self.spec.sequential().is_some()
            && !self.problems.touches(FIELD)
            && !self.problems.touches("extract.teacher.ignore_tensors")
            && let Err(e) = stillhouse_teacher::decoding_bytes(&path, length as usize, &spec.ignore_tensors)
        {
            self.push(Problem::new("pack.length", length, chain(&e)));
        }
        if length as usize > config.max_positions {
            self.push(Problem::new(
                "pack.length",
                length,
                format!("longer than the teacher's context; valid: at most {}", config.max_positions),
            ));
        }
        if config.vocab_size as u64 > 1 << 32 {
            self.push(Problem::new(FIELD, config.vocab_size, "vocabulary too large; valid: at most 2^32 entries"));
        }
        for signal in self.signals() {
            signal.vocabulary_problems(config.vocab_size).into_iter().for_each(|problem| self.push(problem));
        }
        let states = self.spec.extract.as_ref().and_then(|e| e.hidden_states.clone());
        let layers = states.map(|states| states.layers).unwrap_or_default();
        for (i, layer) in layers.into_iter().enumerate().filter(|(_, layer)| *layer as usize > config.layers) {
            let message = format!("the teacher has no such layer; valid: 0 to {}", config.layers);
            self.push(Problem::new(format!("extract.hidden_states.layers[{i}]"), layer, message));
        }
        Some((path, source, config))
    }

    /// Returns the signals that the job asks for.
    fn signals(&self) -> Vec<Arc<dyn StoredSignal>> {
        let extract = self.spec.extract.as_ref();
        extract.map_or_else(Vec::new, |extract| stillhouse_signals::from_job(extract, self.spec.seed))
    }

    /// Checks that a GPU can list as many of the most likely tokens as the job asks for.
    fn check_topk_on_gpu(&mut self) {
        for (field, most) in self.signals().iter().filter_map(|signal| signal.top_entries_setting()) {
            if most > MAX_TOPK_ON_GPU {
                let message =
                    format!("more entries than a GPU lists per token; valid: at most {MAX_TOPK_ON_GPU}, or device cpu");
                self.problems.push(Problem::new(field, most, message));
            }
        }
    }
}

/// An error and its causes on one line, without repeated text.
pub fn chain(error: &dyn std::error::Error) -> String {
    with_causes(error.to_string(), error.source())
}

/// The content of a file that a section names, and the field that names it.
pub(crate) type NamedContent = (Cow<'static, str>, Arc<[u8]>);

/// Fills in what operators need beyond the job file: the content of the files that sections name, and the width of the
/// teacher's hidden states.
pub(crate) fn fill_in(spec: &mut JobSpec, files: Vec<NamedContent>, hidden_size: Option<usize>) {
    for (field, bytes) in files {
        spec.sections.set_file(&field, bytes);
    }
    if let Some(states) = spec.extract.as_mut().and_then(|extract| extract.hidden_states.as_mut()) {
        states.width = hidden_size.and_then(|size| u32::try_from(size).ok());
    }
}

/// The input as splits read it: staged rows are Parquet, whatever the formats of the files.
pub(crate) fn staged_input(prepared: &Prepared) -> stillhouse_schemas::spec::Input {
    let mut input = prepared.spec.input.clone();
    if input.is_staged() {
        input.format = Some(stillhouse_schemas::spec::InputFormat::Parquet);
        input.compression = stillhouse_schemas::spec::Compression::Auto;
    }
    input
}

/// Runs blocking work with the job and its observer on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    prepared: &Arc<Prepared>,
    observer: &Arc<dyn Observer>,
    f: impl FnOnce(&Prepared, &dyn Observer) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (prepared, observer) = (Arc::clone(prepared), Arc::clone(observer));
    tokio::task::spawn_blocking(move || f(&prepared, observer.as_ref()))
        .await
        .map_err(PipelineError::worker_stopped(ErrorKind::Input))?
}
