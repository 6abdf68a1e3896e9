//! Checks before a run that the output is writable, without leaving a trace.

use std::fs::{self, File};
use std::io::ErrorKind as IoErrorKind;
use std::path::Path as FsPath;

use super::lease::describe_holder;
use super::{Backend, Output, STATE_FOLDER};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Event, Observer};
use stillhouse_base::storage::blocking;

impl Output {
    /// Checks that a run could write to this output now, and that no other run does.
    ///
    /// On a disk it creates an unnamed file in each folder that the run would write to, and tries `_stillhouse/lock` if
    /// it exists. In a store it puts and deletes the probe of [`Output::create`] and reads the lease.
    ///
    /// # Errors
    /// When the output is not writable, or when another run is working on it.
    pub async fn preflight(&self, observer: &dyn Observer) -> Result<()> {
        match &self.backend {
            Backend::Disk(root) => {
                self.refuse_links().await?;
                let root = root.clone();
                let free = blocking(move || check_folder(&root)).await?;
                if free { Ok(()) } else { Err(self.busy()) }
            }
            Backend::Web(_) => Err(self.read_only()),
            Backend::Store(_) => {
                self.clone().create(observer).await?;
                let held = describe_holder(&self.store).await.map_err(|e| self.failed(&e, "read the lease of", ""))?;
                if let Some(held) = held {
                    observer.event(&Event::Warning {
                        message: format!(
                            "{self}: {held} works on this output, or has died; a run waits till that is clear"
                        ),
                    });
                }
                Ok(())
            }
        }
    }
}

/// Checks that a folder is writable or can be created. Returns false if another run holds its lock.
#[expect(clippy::disallowed_methods, reason = "called through `blocking`")]
fn check_folder(root: &FsPath) -> Result<bool> {
    let wrong = |message: String| PipelineError::new(ErrorKind::Output, message);
    let here = FsPath::new(".");
    let named = |folder: &FsPath| if folder.as_os_str().is_empty() { here } else { folder }.to_owned();
    let mut existing = here.to_owned();
    for folder in root.ancestors().map(named) {
        match fs::symlink_metadata(&folder) {
            Ok(_) => {
                existing = folder;
                break;
            }
            Err(e) if matches!(e.kind(), IoErrorKind::NotFound | IoErrorKind::NotADirectory) => {}
            Err(e) => {
                let what = format!("output.path: {} cannot be made", folder.display());
                return Err(PipelineError::caused(ErrorKind::Output, what, e));
            }
        }
    }
    if !existing.is_dir() {
        return Err(wrong(format!("output.path: {} is a file; valid: a folder, or a path in one", existing.display())));
    }
    let mut folders = vec![existing.clone()];
    if existing == named(root) {
        folders.extend([root.join(STATE_FOLDER), root.join("data")].into_iter().filter(|folder| folder.exists()));
    }
    for folder in folders {
        tempfile::tempfile_in(&folder)
            .map_err(PipelineError::output(format!("cannot write to {}", folder.display())))?;
    }
    let lock = root.join(STATE_FOLDER).join("lock");
    let busy = File::open(&lock).is_ok_and(|file| matches!(file.try_lock_shared(), Err(fs::TryLockError::WouldBlock)));
    Ok(!busy)
}
