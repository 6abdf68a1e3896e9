//! The section `subtokens` of a job: tokens as digits of a number, and the mapping from ids to numbers.
//!
//! ```text
//!   id ──► number, by `permutation` (without one, the id itself) ──► ℓ digits in base b
//! ```

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::sections::{Section, SectionFile};

use super::files::PERMUTATION;

/// Field that names the permutation.
pub(super) const PERMUTATION_FIELD: &str = "subtokens.permutation";

/// Maximum size of a permutation file, in bytes. Even 2^32 ids of 20 characters exceed it, and no vocabulary is that
/// large.
const MAX_PERMUTATION_BYTES: u64 = 1 << 30;

/// Value of `permutation` that selects the permutation shipped with the program.
pub const SHIPPED: &str = "shipped";

/// Base-b sub-tokens: b = ⌈V^(1/ℓ)⌉, most significant digit first (MDM-Prime).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Subtokens")]
pub struct SubtokensSection {
    /// Digits per token, ℓ.
    #[schemars(range(min = 1, max = 32))]
    pub length: u32,
    /// The number whose digits represent an id. Default: the id itself. `shipped` is a permutation that all jobs with this vocabulary share; or
    /// a `.npy` or `.json` file with V numbers, starting with that of id 0, each of 0 to V − 1 once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub permutation: Option<String>,
    /// Whether to write `filter_table.npy` beside the shards: the table of the tokens that have each digit.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub filter_table: bool,
}

impl SubtokensSection {
    /// The file that `permutation` names, if it names one.
    fn permutation_file(&self) -> Option<&str> {
        self.permutation.as_deref().filter(|named| *named != SHIPPED)
    }
}

impl Section for SubtokensSection {
    const KEY: &'static str = super::NAME;
    const IS_DERIVABLE: bool = true;

    fn files(&self) -> Vec<SectionFile> {
        let permutation = self.permutation_file().map(|path| SectionFile {
            field: PERMUTATION_FIELD.into(),
            path: path.to_owned(),
            valid: "a .npy or .json file",
            max_bytes: MAX_PERMUTATION_BYTES,
            stored_as: Some(PERMUTATION),
        });
        permutation.into_iter().collect()
    }
}
