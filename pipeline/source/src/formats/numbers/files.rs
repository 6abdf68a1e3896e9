//! Images in one PNG or JPEG file each.

use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_input_files::{InputFile, Store, class_name};
use stillhouse_operators::images::{BadImage, reason as image};
use stillhouse_schemas::spec::{ImageLabels, Images};

use super::{Content, RawRecord, RawRecords, bad_record, class_label};

/// Returns the maximum stored bytes of an image of `max_pixels`: no sensible PNG or JPEG has more than four per pixel,
/// plus headers.
pub(super) fn max_stored_bytes(images: &Images) -> u64 {
    u64::from(images.max_pixels) * 4 + (1 << 20)
}

/// Reads the single record of an image file.
pub(super) struct ImageFile {
    store: Store,
    file: Option<InputFile>,
    max_bytes: u64,
    label: Result<Option<i32>, BadImage>,
}

impl ImageFile {
    pub fn new(store: &Store, file: &InputFile, images: &Images) -> Self {
        let label = match images.labels() {
            ImageLabels::Folder => class_label(class_name(&file.location), images),
            _ => Ok(None),
        };
        let max_bytes = max_stored_bytes(images);
        Self { store: store.clone(), file: Some(file.clone()), max_bytes, label }
    }
}

impl RawRecords for ImageFile {
    fn next(&mut self) -> Result<Option<RawRecord>, SourceError> {
        let Some(file) = self.file.take() else { return Ok(None) };
        let (stored, content) = match file.size {
            size if size > self.max_bytes => {
                let message =
                    format!("has {size} bytes; valid: at most {} with `input.images.max_pixels`", self.max_bytes);
                (Vec::new(), bad_record(image::LARGE, message))
            }
            size => {
                let bytes = self.store.get(&file.location, 0, size);
                (bytes.map_err(|e| SourceError::from_store(&file.path, e))?.to_vec(), Ok(Content::Encoded))
            }
        };
        Ok(Some(RawRecord { position: RecordPosition::Whole, stored, label: self.label.clone(), content }))
    }
}
