//! The section `block_urls` of a job: lists of URLs whose documents are dropped.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::{Section, SectionFile};
use stillhouse_schemas::spec::JobSpec;

use super::NAME;

/// Largest list, in bytes. The list of adult sites of the university of Toulouse has 70 MB.
const MAX_LIST_BYTES: u64 = 256 << 20;

/// Drops documents whose URL is on a list. Every list is a text file with an entry per line; lines that begin with `#` are no
/// entries. A copy of each lies beside the shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "BlockUrls")]
pub struct BlockUrlsSection {
    /// The column of the URLs, one of those in `input.carry`. Documents without a URL are kept.
    #[serde(default = "default_column")]
    #[schemars(length(min = 1))]
    pub column: String,
    /// Domains. A domain blocks its subdomains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub domains: Option<String>,
    /// URLs, as they are written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub urls: Option<String>,
    /// Words that no URL may have. Words are what is between characters that are no ASCII letters and digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub banned_words: Option<String>,
    /// Words of which no URL may have `soft_banned_threshold` different ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub soft_banned_words: Option<String>,
    /// Texts that no URL may contain, once all characters but ASCII letters and digits are removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub banned_subwords: Option<String>,
    /// Number of different soft banned words for which a URL is blocked.
    #[serde(default = "default_threshold")]
    #[schemars(range(min = 1, max = 1000))]
    pub soft_banned_threshold: u32,
}

fn default_column() -> String {
    "url".into()
}

fn default_threshold() -> u32 {
    2
}

/// A list: its field, and the name of its copy beside the shards.
pub(super) struct List {
    pub field: &'static str,
    pub stored_as: &'static str,
}

/// All lists, in the order of [`BlockUrlsSection::paths`].
pub(super) const LISTS: [List; 5] = [
    List { field: "block_urls.domains", stored_as: "blocked_domains.txt" },
    List { field: "block_urls.urls", stored_as: "blocked_urls.txt" },
    List { field: "block_urls.banned_words", stored_as: "banned_words.txt" },
    List { field: "block_urls.soft_banned_words", stored_as: "soft_banned_words.txt" },
    List { field: "block_urls.banned_subwords", stored_as: "banned_subwords.txt" },
];

impl BlockUrlsSection {
    /// The paths of the lists, in the order of [`LISTS`].
    pub(super) fn paths(&self) -> [Option<&String>; 5] {
        [
            self.domains.as_ref(),
            self.urls.as_ref(),
            self.banned_words.as_ref(),
            self.soft_banned_words.as_ref(),
            self.banned_subwords.as_ref(),
        ]
    }
}

impl Section for BlockUrlsSection {
    const KEY: &'static str = NAME;

    fn files(&self) -> Vec<SectionFile> {
        let file = |(list, path): (List, Option<&String>)| {
            Some(SectionFile {
                field: list.field.into(),
                path: path?.clone(),
                valid: "a text file with an entry per line",
                max_bytes: MAX_LIST_BYTES,
                stored_as: Some(list.stored_as),
            })
        };
        LISTS.into_iter().zip(self.paths()).filter_map(file).collect()
    }

    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        if !job.input.carry.contains(&self.column) {
            let valid = match job.input.carry.as_slice() {
                [] => format!("nothing is carried; set input.carry to [{}]", self.column),
                names => format!("is not carried; valid: one of input.carry: {}", names.join(", ")),
            };
            problems.push(Problem::new("block_urls.column", format!("{:?}", self.column), valid));
        }
        if self.paths().iter().all(Option::is_none) {
            let names: Vec<&str> = LISTS.iter().filter_map(|list| list.field.split('.').nth(1)).collect();
            problems.push(Problem::missing(NAME, format!("names no list; valid: one or more of {}", names.join(", "))));
        }
    }
}
