//! The state of a file as its store reports it without reading the file, and whether the file is still in that state.

use std::fmt;

use chrono::{DateTime, SecondsFormat, Utc};
use object_store::ObjectMeta;
use serde::{Deserialize, Serialize};

/// Identifies one state of a file. On disk: size, modification time and inode. In a store: the metadata that the store
/// keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Size in bytes.
    pub bytes: u64,
    /// Last modification, in nanoseconds since 1970. Absent for stores that have ETags, because they report the time in
    /// several precisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_ns: Option<i64>,
    /// The ETag, without quotes. On disk it is made of inode, time and size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub e_tag: Option<String>,
    /// The version id, if the store keeps versions and reports them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

impl FileState {
    /// The state that `meta` describes.
    pub fn of(meta: &ObjectMeta, on_disk: bool) -> Self {
        let nanos = match on_disk {
            true => meta.last_modified.timestamp_nanos_opt(),
            // headers give whole seconds, listings a finer time
            false => meta.last_modified.timestamp().checked_mul(1_000_000_000),
        };
        // listings and headers quote the ETag differently; a weak ETag is enough to tell whether it is the same file
        let e_tag = meta.e_tag.as_deref().map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_owned());
        let e_tag = e_tag.filter(|tag| !tag.is_empty());
        let modified_ns = if on_disk || e_tag.is_none() { nanos } else { None };
        Self { bytes: meta.size, modified_ns, e_tag, version: meta.version.clone() }
    }

    /// Whether `now` describes the same file. Compares only the fields that both states have.
    pub fn matches(&self, now: &Self) -> bool {
        self.matches_on_other_machine(now) && equal_or_absent(&self.e_tag, &now.e_tag)
    }

    /// Like [`matches`](Self::matches), but `machine` is the state seen on another machine. Inodes differ between
    /// machines, so the ETag of a file with a modification time is not compared.
    pub fn matches_on_other_machine(&self, machine: &Self) -> bool {
        let has_times = self.modified_ns.is_some() && machine.modified_ns.is_some();
        self.bytes == machine.bytes
            && equal_or_absent(&self.modified_ns, &machine.modified_ns)
            && equal_or_absent(&self.version, &machine.version)
            && (has_times || equal_or_absent(&self.e_tag, &machine.e_tag))
    }
}

/// Whether two values are equal, or one of them is absent.
fn equal_or_absent<T: PartialEq>(was: &Option<T>, now: &Option<T>) -> bool {
    was.is_none() || now.is_none() || was == now
}

impl fmt::Display for FileState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes)?;
        match (self.modified_ns.map(DateTime::<Utc>::from_timestamp_nanos), &self.e_tag) {
            (Some(time), _) => write!(f, " of {}", time.to_rfc3339_opts(SecondsFormat::Millis, true)),
            (None, Some(tag)) => write!(f, ", ETag {tag}"),
            (None, None) => Ok(()),
        }
    }
}

/// A file changed after it was listed. Travels inside errors of stores.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it had {was} when it was listed, and has {now} now")]
pub struct Changed {
    /// State in the listing.
    pub was: FileState,
    /// State now.
    pub now: FileState,
}

#[cfg(test)]
mod tests {
    use object_store::path::Path;

    use super::*;

    fn meta(nanos: i64, size: u64, e_tag: Option<&str>, version: Option<&str>) -> ObjectMeta {
        ObjectMeta {
            location: Path::from("f"),
            last_modified: DateTime::<Utc>::from_timestamp_nanos(nanos),
            size,
            e_tag: e_tag.map(Into::into),
            version: version.map(Into::into),
        }
    }

    #[test]
    fn states_of_one_file_agree_however_they_are_reported() {
        let same = |was: FileState, now: FileState| was.matches(&now) && now.matches(&was);
        let store = |nanos, e_tag, version| FileState::of(&meta(nanos, 5, e_tag, version), false);
        let disk = |nanos, e_tag| FileState::of(&meta(nanos, 5, Some(e_tag), None), true);
        // listings give milliseconds, unquoted ETags and no version; responses give seconds, quoted ETags and the
        // version
        assert!(same(store(1_000_000_123, Some("0x8D"), None), store(1_000_000_000, Some("\"0x8D\""), Some("v1"))));
        assert!(same(store(1_000_000_123, None, None), store(1_000_000_000, None, None)));
        assert!(same(disk(123, "1-0-5"), disk(123, "1-0-5")));
        // each of these is a change: a nanosecond, an inode, an ETag, a version, a second
        assert!(!same(disk(123, "1-0-5"), disk(124, "1-0-5")));
        assert!(!same(disk(123, "1-0-5"), disk(123, "2-0-5")));
        assert!(!same(store(0, Some("a"), None), store(0, Some("b"), None)));
        assert!(!same(store(0, Some("a"), Some("1")), store(0, Some("a"), Some("2"))));
        assert!(!same(store(0, None, None), store(1_000_000_000, None, None)));
        assert!(!same(FileState { bytes: 4, ..disk(1, "a") }, disk(1, "a")));
    }
}
