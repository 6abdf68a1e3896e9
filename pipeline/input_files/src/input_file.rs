//! Files of the input, as the listing found them.

use std::sync::Arc;

use object_store::ObjectMeta;
use object_store::path::Path;
use serde::{Deserialize, Serialize};
use stillhouse_base::file_state::FileState;
use stillhouse_base::storage::Location;

/// Path in the manifest of documents that have no file.
const NOTHING: &str = "none";

/// Returns, as the error, the reason why a file or folder may not be read.
pub type AccessCheck<'a> = &'a (dyn Fn(&Location) -> Result<(), String> + Sync);

/// Called with the index of each item before it is examined.
pub type BeforeItem<'a> = &'a mut dyn FnMut(usize);

/// A file of the input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Path for users and the manifest: as the job's path or glob yields it; a relative path stays relative.
    pub path: String,
    /// Location in the store.
    #[serde(with = "location")]
    pub location: Path,
    /// Size in bytes, as stored.
    pub size: u64,
    /// The file's state in the listing of the store.
    pub state: FileState,
}

/// Serializes a location as its text.
mod location {
    use object_store::path::Path;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(path.as_ref())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Path, D::Error> {
        Path::parse(String::deserialize(from)?).map_err(de::Error::custom)
    }
}

impl InputFile {
    pub(crate) fn listed(path: String, meta: ObjectMeta, is_on_disk: bool) -> Self {
        let state = FileState::of(&meta, is_on_disk);
        Self { path, size: meta.size, state, location: meta.location }
    }

    /// Returns the placeholder for the file of documents that have none (`input.format: none`).
    pub fn placeholder() -> Self {
        Self { path: NOTHING.into(), location: Path::default(), size: 0, state: FileState::default() }
    }

    /// Whether this is the placeholder for no file.
    pub fn is_placeholder(&self) -> bool {
        self.location == Path::default()
    }
}

/// The files of a job in its order, indexed by path. A clone shares them, so many splits can read from one listing.
#[derive(Debug, Clone)]
pub struct Listing {
    files: Arc<Vec<InputFile>>,
    /// Indexes into `files`, sorted by path.
    by_path: Arc<[usize]>,
}

impl Listing {
    /// Builds a listing. Cost: a sort of the paths.
    pub fn new(files: Arc<Vec<InputFile>>) -> Self {
        let mut by_path: Vec<usize> = (0..files.len()).collect();
        by_path.sort_by(|a, b| files[*a].path.cmp(&files[*b].path));
        Self { files, by_path: by_path.into() }
    }

    /// The files, in the job's order.
    pub fn files(&self) -> &Arc<Vec<InputFile>> {
        &self.files
    }

    /// Returns the file with this path. Cost: a binary search.
    pub fn get(&self, path: &str) -> Option<&InputFile> {
        let after = self.by_path.partition_point(|i| self.files[*i].path.as_str() <= path);
        let last = &self.files[self.by_path[after.checked_sub(1)?]];
        (last.path == path).then_some(last)
    }
}
