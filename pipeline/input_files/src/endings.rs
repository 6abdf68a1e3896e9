//! The endings of the files that a folder of the input stands for.

use std::fmt;

/// The endings by which a folder's files are found: those of the input's format.
#[derive(Debug, Clone, Copy)]
pub struct FileEndings {
    /// The endings, in lower case, without compression endings. Empty if the job must name every file.
    pub endings: &'static [&'static str],
    /// Whether a compression ending may follow, as in `.jsonl.gz`.
    pub may_be_compressed: bool,
}

impl FileEndings {
    /// Whether a name has one of the endings, in any case of its letters.
    pub fn match_name(&self, name: &str) -> bool {
        let name = name.to_ascii_lowercase();
        let bare = if self.may_be_compressed { without_compression(&name) } else { &name };
        self.endings.iter().any(|ending| bare.ends_with(ending))
    }
}

impl fmt::Display for FileEndings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.endings.is_empty() {
            return f.write_str("the files themselves, as this layout has files without one");
        }
        let more = if self.may_be_compressed { ", each also with .gz or .zst" } else { "" };
        write!(f, "{}{more}", self.endings.join(", "))
    }
}

/// Returns a name in lower case without its compression ending.
fn without_compression(name: &str) -> &str {
    [".gz", ".gzip", ".zst", ".zstd"].iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name)
}
