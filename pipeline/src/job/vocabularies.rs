//! Checks that tokenizer, teacher, special tokens, files of sections and operators fit each other.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use stillhouse_operators::chat::{ChatSection, TEMPLATE_FIELD};
use stillhouse_schemas::sections::{Section, SectionFile};

use super::*;

impl Checks<'_> {
    /// The teacher's own vocabulary, if the job names a tokenizer that must equal it.
    pub(super) fn own_vocabulary(&mut self, teacher: Option<&FoundTeacher>) -> Option<TeacherVocabulary> {
        let (path, source, config) = teacher?;
        let spec = &self.spec.tokenizer;
        if spec.path.is_none() || spec.differs_from_teacher == TokenizerDifference::Allow {
            return None;
        }
        match TeacherVocabulary::load(path, specials(config)) {
            Ok(own) => own,
            Err(e) => {
                self.push(Problem::new("extract.teacher.path", format!("{source:?}"), chain(&e)));
                None
            }
        }
    }

    pub(super) fn tokenizer(
        &mut self,
        teacher: Option<&FoundTeacher>,
        own: Option<&TeacherVocabulary>,
    ) -> Option<Vocabulary> {
        if let Some(values) = self.spec.input.row_values() {
            let made = Vocabulary::for_numbers(values, &format!("the numbers below {values}"));
            return made.map_err(|e| self.push(Problem::missing("input.format", chain(&e)))).ok();
        }
        let (field, path, source) = match (&self.spec.tokenizer.path, teacher) {
            (Some(named), _) => {
                let (path, source) = self.locate("tokenizer.path", named, FetchPurpose::Tokenizer)?;
                ("tokenizer.path", path, source)
            }
            (None, Some((path, source, _))) => ("extract.teacher.path", path.clone(), source.clone()),
            (None, None) => return None,
        };
        let specials = own.map(TeacherVocabulary::specials).or(teacher.map(|(_, _, config)| specials(config)));
        match Vocabulary::load(&path, &source, &self.spec.tokenizer, specials) {
            Ok(vocabulary) => Some(vocabulary),
            Err(e) => {
                let field = match &e {
                    VocabularyError::NotAToken { role, .. } => format!("tokenizer.{role}"),
                    _ => field.to_owned(),
                };
                let reported = chain(&e);
                let reported = reported.strip_prefix("tokenizer.path: ").unwrap_or(&reported);
                let message = reported.strip_prefix(&format!("{field}: ")).unwrap_or(reported);
                self.push(Problem::new(field, format!("{source:?}"), message));
                None
            }
        }
    }

    /// Reads the files that sections of operators name, each once.
    fn section_files(&mut self) -> Vec<NamedContent> {
        let mut read: Vec<NamedContent> = Vec::new();
        let mut by_path: BTreeMap<String, Arc<[u8]>> = BTreeMap::new();
        for file in registry::job_format().files(self.spec) {
            if file.path.is_empty() || self.problems.touches(&file.field) {
                continue;
            }
            if let Some(bytes) = by_path.get(&file.path) {
                read.push((file.field, Arc::clone(bytes)));
                continue;
            }
            // the expansion of the path was checked with the others
            let Ok(expanded) = self.names.expand(&file.path) else { continue };
            let path = local_path(self.base, &expanded);
            let content = match self.gate.outside_files([path.as_path()]) {
                Some(message) => Err(message),
                None => read_section_file(&path, &file),
            };
            match content {
                Ok(bytes) => {
                    by_path.insert(file.path, Arc::clone(&bytes));
                    read.push((file.field, bytes));
                }
                Err(message) => self.push(Problem::new(file.field, format!("{:?}", file.path), message)),
            }
        }
        read
    }

    /// Checks that the tokenizer has the special tokens that the job puts into sequences.
    pub(super) fn special_tokens(&mut self, vocabulary: &Vocabulary) {
        if self.spec.input.is_rows() {
            return;
        }
        let pack = &self.spec.pack;
        let bounded = pack.boundary == Boundary::BosEos;
        let padded = self.spec.has_padding();
        let separated = pack.separator == Separator::Eos;
        let needs = [
            (Role::Bos, bounded, "pack.boundary bos_eos"),
            (Role::Eos, bounded || separated, "pack.separator eos and pack.boundary bos_eos"),
            (Role::Pad, padded, "padding"),
        ];
        for (role, needed, by) in needs {
            if needed && let Err(e) = vocabulary.require(role) {
                self.push(Problem::missing(format!("tokenizer.{}", role.name()), format!("needed by {by}: {e}")));
            }
        }
        if self.spec.extract.is_some()
            && vocabulary.special(Role::Bos).is_none()
            && vocabulary.special(Role::Eos).is_none()
        {
            self.push(Problem::missing(
                "tokenizer.bos",
                "the teacher needs a token before the first one; name the tokenizer's",
            ));
        }
    }

    /// Checks that every id of the tokenizer has a row in the teacher's vocabulary and is the id of the same token
    /// there. Unused rows are allowed in any number; embeddings are often rounded up (Qwen3 has 151,936 rows for
    /// 151,669 tokens).
    fn check_token_ids(&mut self, vocabulary: &Vocabulary, rows: usize, own: Option<&TeacherVocabulary>) {
        let spec = &self.spec.tokenizer;
        let tokens = vocabulary.vocab_size();
        let beyond = vocabulary.tokens_from(rows);
        if let [(id, token), rest @ ..] = beyond.as_slice() {
            let field = if spec.path.is_some() { "tokenizer.path" } else { "extract.teacher.path" };
            let more = if rest.is_empty() { "has".into() } else { format!("and {} more ids have", rest.len()) };
            self.push(Problem::new(
                field,
                format!("{tokens} tokens"),
                format!("id {id} ({token:?}) {more} no row in the teacher's vocabulary of {rows}; valid: a tokenizer whose ids are all below {rows}"),
            ));
            return;
        }
        let Some(path) = spec.path.as_ref().filter(|_| spec.differs_from_teacher == TokenizerDifference::Refuse) else {
            return;
        };
        let problem = match own {
            Some(own) => own.differences(vocabulary, spec).map(|differences| {
                format!("is not the teacher's own tokenizer: {differences}; valid: the teacher's own (leave tokenizer.path out), or tokenizer.differs_from_teacher: allow")
            }),
            None => (tokens != rows).then(|| {
                format!("has {tokens} tokens, the teacher's vocabulary {rows}, and beside the teacher lies no tokenizer to compare with; valid: a tokenizer of {rows} tokens, or tokenizer.differs_from_teacher: allow where its ids are known to be the teacher's")
            }),
        };
        if let Some(problem) = problem {
            self.push(Problem::new("tokenizer.path", format!("{path:?}"), problem));
        }
    }

    /// Checks that tokenizer and teacher fit, and that every operator accepts the vocabulary.
    pub(super) fn vocabularies(
        &mut self,
        vocabulary: &Vocabulary,
        teacher: Option<&FoundTeacher>,
        own: Option<&TeacherVocabulary>,
    ) -> Vec<NamedContent> {
        let mut vocab = vocabulary.vocab_size() as u64;
        if let Some((_, _, config)) = teacher {
            vocab = config.vocab_size as u64;
            self.check_token_ids(vocabulary, config.vocab_size, own);
        }
        let mut files = self.section_files();
        let has_template = files.iter().any(|(field, _)| *field == TEMPLATE_FIELD);
        if let (Some(template), false) =
            (vocabulary.chat_template(), has_template || !self.spec.sections.contains(ChatSection::KEY))
        {
            files.push((TEMPLATE_FIELD.into(), template.as_bytes().into()));
        }
        let mut spec = self.spec.clone();
        // a missing teacher was already reported
        let width = teacher.map_or(0, |(_, _, config)| config.hidden_size);
        super::fill_in(&mut spec, files.clone(), Some(width));
        let context = JobContext {
            spec: &spec,
            vocab_size: vocab as usize,
            special_ids: SpecialIds::from_vocabulary(vocabulary),
        };
        if let Err(problems) = registry::operators_for_job(&context) {
            problems.into_iter().for_each(|problem| self.push(problem));
        }
        let dense = self.spec.extract.as_ref().and_then(|e| e.noise.as_ref()).filter(|n| n.codec == NoiseCodec::Dense);
        if let Some(noise) = dense {
            let values = u64::from(noise.draws) * u64::from(self.spec.pack.length) * vocab;
            if values > i32::MAX as u64 {
                self.push(Problem::new(
                    "extract.noise.codec",
                    "dense",
                    format!("{values} values per sequence do not fit a list; valid: replay, or draws × length × vocabulary below 2^31"),
                ));
            }
        }
        files
    }
}

/// The special ids in a teacher's configuration.
fn specials(config: &TeacherConfig) -> TeacherSpecials {
    TeacherSpecials { bos: config.bos_token_id, eos: config.eos_token_id }
}

/// Reads a file that a section names, into memory that is allocated once: some have gigabytes.
pub(crate) fn read_section_file(path: &Path, file: &SectionFile) -> std::result::Result<Arc<[u8]>, String> {
    let unreadable = |e: std::io::Error| format!("cannot read {}: {e}", path.display());
    let found = fs::metadata(path).map_err(unreadable)?;
    if !found.is_file() {
        return Err(format!("{} is no file; valid: {}", path.display(), file.valid));
    }
    if found.len() > file.max_bytes {
        return Err(format!("has {} bytes; valid: up to {}", found.len(), file.max_bytes));
    }
    let size = usize::try_from(found.len()).map_err(|e| format!("has {} bytes: {e}", found.len()))?;
    let mut content: Arc<[u8]> = std::iter::repeat_n(0, size).collect();
    let mut opened = fs::File::open(path).map_err(unreadable)?;
    if let Some(bytes) = Arc::get_mut(&mut content) {
        opened.read_exact(bytes).map_err(unreadable)?;
    }
    if opened.read(&mut [0]).map_err(unreadable)? > 0 {
        return Err(format!("{} grew while it was read", path.display()));
    }
    Ok(content)
}
