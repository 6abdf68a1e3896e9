use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::error::OptionError;
use crate::ngrams::Words;
use crate::normalization::Normalization;

/// Options of [`ContaminationIndex`]; the defaults are those of datatrove's `NGramsDecontConfig`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ContaminationConfig {
    /// Words of an n-gram, 1 to 100. GPT-3 (Brown et al. 2020, appendix C) has 13 at most.
    #[schemars(range(min = 1, max = 100))]
    pub ngram_words: u32,
    /// Also finds n-grams of the query alone.
    pub find_query_ngrams: bool,
    /// Also finds n-grams that begin in the query and end in the label.
    pub find_overlap_ngrams: bool,
    /// What is made equal before texts are split into words.
    pub normalization: Normalization,
}

impl Default for ContaminationConfig {
    fn default() -> Self {
        Self {
            ngram_words: 12,
            find_query_ngrams: false,
            find_overlap_ngrams: true,
            normalization: Normalization::default(),
        }
    }
}

/// The n-grams of benchmarks, to find documents that contain them, as datatrove's `NGramsDecontFilter` does.
///
/// Memory: 18 to 20 bytes for each different n-gram. Two n-grams count as equal if 96 bits of their XXH3-128 are: a false
/// hit of one n-gram with an index of 10⁷ has a probability of about 10⁻²².
///
/// ```
/// use stillhouse_dedup::{ContaminationConfig, ContaminationIndex};
///
/// let config = ContaminationConfig { ngram_words: 4, ..ContaminationConfig::default() };
/// let mut index = ContaminationIndex::builder(&config)?;
/// index.add("capitals", Some("What is the capital of France?"), "It is Paris.");
/// let index = index.build();
/// let hit = index.find("Quiz: what is the capital of France? It is Paris!").unwrap();
/// assert_eq!((hit.benchmark, hit.ngram.as_str()), ("capitals", "capital of france it"));
/// assert!(index.find("The capital of France is Paris.").is_none());
/// # Ok::<(), stillhouse_dedup::OptionError>(())
/// ```
pub struct ContaminationIndex {
    config: ContaminationConfig,
    /// In the order in which datatrove reads its files.
    benchmarks: Vec<String>,
    /// In ascending order, one for each n-gram.
    entries: Vec<Entry>,
    /// For each value of the highest bits of `Entry::hash` the first entry, and at the end the number of entries.
    starts: Vec<usize>,
    /// How far a hash is shifted to leave these bits.
    shift: u32,
}

/// An n-gram of a benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    hash: u64,
    /// More bits of the hash.
    check: u32,
    benchmark: u32,
}

impl Entry {
    fn new(ngram: &str, benchmark: u32) -> Self {
        let hash = XxHash3_128::oneshot(ngram.as_bytes());
        Self { hash: hash as u64, check: (hash >> 64) as u32, benchmark }
    }

    fn is_same_ngram(&self, other: &Self) -> bool {
        (self.hash, self.check) == (other.hash, other.check)
    }
}

/// An n-gram of a benchmark in a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hit<'i> {
    /// The benchmark's name.
    pub benchmark: &'i str,
    /// The normalized n-gram, its words joined by spaces.
    pub ngram: String,
}

impl ContaminationIndex {
    /// Checks the options and starts an index.
    pub fn builder(config: &ContaminationConfig) -> Result<ContaminationIndexBuilder, OptionError> {
        OptionError::check_range("contamination.ngram_words", config.ngram_words, 1, 100)?;
        Ok(ContaminationIndexBuilder {
            config: config.clone(),
            benchmarks: BTreeMap::new(),
            entries: Vec::new(),
            limit: 0,
        })
    }

    /// Returns the number of different n-grams.
    pub fn ngrams(&self) -> usize {
        self.entries.len()
    }

    /// Returns the first n-gram of a text that is in the index. Of several benchmarks with this n-gram, it names the one
    /// whose file datatrove reads last.
    ///
    /// Time: the split into words, and one look-up for each word. Memory: up to 32 bytes for each
    /// byte of the text while it runs.
    pub fn find(&self, text: &str) -> Option<Hit<'_>> {
        if self.entries.is_empty() {
            return None;
        }
        let words = Words::new(text, &self.config.normalization);
        words.ngrams(self.config.ngram_words as usize).find_map(|ngram| {
            let entry = self.entry(&Entry::new(ngram, 0))?;
            let benchmark = self.benchmarks.get(entry.benchmark as usize)?;
            Some(Hit { benchmark, ngram: ngram.to_owned() })
        })
    }

    fn entry(&self, wanted: &Entry) -> Option<&Entry> {
        let bucket = bucket(wanted, self.shift);
        let entries = self.entries.get(*self.starts.get(bucket)?..*self.starts.get(bucket + 1)?)?;
        entries.iter().find(|entry| entry.is_same_ngram(wanted))
    }
}

fn bucket(entry: &Entry, shift: u32) -> usize {
    entry.hash.checked_shr(shift).unwrap_or(0) as usize
}

/// Collects the n-grams of benchmarks; see [`ContaminationIndex::builder`].
///
/// Memory: up to 64 bytes for each different n-gram of a benchmark, while the list of n-grams grows.
pub struct ContaminationIndexBuilder {
    config: ContaminationConfig,
    /// The numbers of the benchmarks in the order of their first examples.
    benchmarks: BTreeMap<String, u32>,
    entries: Vec<Entry>,
    /// The number of entries from which repeated ones are removed.
    limit: usize,
}

const FIRST_LIMIT: usize = 1 << 16;

impl ContaminationIndexBuilder {
    /// Adds the n-grams of one example of a benchmark: those of the label (the correct answer), and those of the query (the
    /// prompt) as the options have it.
    pub fn add(&mut self, benchmark: &str, query: Option<&str>, label: &str) {
        let number = match self.benchmarks.get(benchmark) {
            Some(&number) => number,
            None => {
                let number = self.benchmarks.len() as u32;
                self.benchmarks.insert(benchmark.to_owned(), number);
                number
            }
        };
        let n = self.config.ngram_words as usize;
        let label = Words::new(label, &self.config.normalization);
        self.entries.extend(label.ngrams(n).map(|ngram| Entry::new(ngram, number)));
        if let Some(query) = query
            && (self.config.find_query_ngrams || self.config.find_overlap_ngrams)
        {
            let query = Words::new(query, &self.config.normalization);
            if self.config.find_query_ngrams {
                self.entries.extend(query.ngrams(n).map(|ngram| Entry::new(ngram, number)));
            }
            if self.config.find_overlap_ngrams {
                for of_label in 1..=(n - 1).min(label.len()) {
                    let of_query = n - of_label;
                    if let Some(first) = query.len().checked_sub(of_query) {
                        let ngram = [query.range(first, of_query), label.range(0, of_label)].join(" ");
                        self.entries.push(Entry::new(&ngram, number));
                    }
                }
            }
        }
        if self.entries.len() >= self.limit.max(FIRST_LIMIT) {
            self.entries.sort_unstable();
            self.entries.dedup();
            self.limit = 2 * self.entries.len();
        }
    }

    /// Builds the index.
    pub fn build(self) -> ContaminationIndex {
        let Self { config, benchmarks, mut entries, .. } = self;
        let mut benchmarks: Vec<_> = benchmarks.into_iter().collect();
        benchmarks.sort_by_cached_key(|(name, _)| file_name(name));
        let mut ranks = vec![0; benchmarks.len()];
        for (rank, &(_, number)) in (0u32..).zip(&benchmarks) {
            ranks.get_mut(number as usize).into_iter().for_each(|slot| *slot = rank);
        }
        for entry in &mut entries {
            entry.benchmark = ranks.get(entry.benchmark as usize).copied().unwrap_or_default();
        }
        entries.sort_unstable();
        // of equal n-grams, the last benchmark stays
        entries.dedup_by(|next, kept| {
            let is_same = next.is_same_ngram(kept);
            if is_same {
                *kept = *next;
            }
            is_same
        });
        entries.shrink_to_fit();
        // 2 to 4 entries a bucket
        let bits = (entries.len().next_power_of_two() / 4).max(1).trailing_zeros();
        let shift = u64::BITS - bits;
        let mut starts = Vec::with_capacity((1 << bits) + 1);
        for (number, entry) in entries.iter().enumerate() {
            starts.resize(starts.len().max(bucket(entry, shift) + 1), number);
        }
        starts.resize((1 << bits) + 1, entries.len());
        let benchmarks = benchmarks.into_iter().map(|(name, _)| name).collect();
        ContaminationIndex { config, benchmarks, entries, starts, shift }
    }
}

/// Returns the name of datatrove's file of a benchmark. It reads these files in the order of their names.
fn file_name(benchmark: &str) -> String {
    benchmark.replace(' ', "_") + ".index.hashes"
}
