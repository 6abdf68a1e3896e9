//! Determines how a whole file is compressed: from the job, or from the ending of its name.

use stillhouse_schemas::spec::{Compression, Input};

use super::input_file::InputFile;

/// Returns the compression of a file; never `Auto`.
pub fn compression(file: &InputFile, input: &Input) -> Compression {
    if input.format().compresses_inside() {
        return Compression::None;
    }
    match input.compression {
        Compression::Auto => match file.path.rsplit_once('.').map(|(_, e)| e.to_ascii_lowercase()).as_deref() {
            Some("gz" | "gzip" | "tgz") => Compression::Gzip,
            Some("zst" | "zstd") => Compression::Zstd,
            _ => Compression::None,
        },
        given => given,
    }
}
