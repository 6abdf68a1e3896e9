//! The working folder of Ballista's executor. It is removed with the executor; the next executor to start removes that
//! of a killed one.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use tempfile::TempDir;

const PREFIX: &str = "stillhouse-executor-";

/// A folder and the lock on it, which the operating system releases when the process dies.
#[derive(Debug)]
pub struct WorkFolder {
    folder: TempDir,
    #[expect(dead_code, reason = "held for its lock")]
    lock: File,
}

impl WorkFolder {
    /// Creates a new folder in `root` and removes the folders that dead executors of the same user left there.
    ///
    /// # Errors
    /// When no folder can be created. A dead executor's folder that cannot be removed stays.
    pub fn new(root: &Path) -> io::Result<Self> {
        let own = loop {
            let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(root)?;
            // until it is locked, another executor that starts now may remove it as a dead executor's folder
            match File::open(folder.path()) {
                Ok(lock) if lock.try_lock().is_ok() && folder.path().exists() => break Self { folder, lock },
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        };
        own.remove_stale_folders(root)?;
        Ok(own)
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    fn remove_stale_folders(&self, root: &Path) -> io::Result<()> {
        let user = fs::metadata(self.path())?.uid();
        for entry in fs::read_dir(root)?.flatten() {
            let is_folder = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes())
                && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user);
            if !is_folder {
                continue;
            }
            // keep the lock until the folder is gone
            if let Some(_lock) = File::open(entry.path()).ok().filter(|lock| lock.try_lock().is_ok())
                && let Err(e) = fs::remove_dir_all(entry.path())
            {
                tracing::debug!("{}: {e}", entry.path().display());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_the_dead_go_and_no_others() {
        let root = tempfile::tempdir().unwrap();
        let living = WorkFolder::new(root.path()).unwrap();
        fs::write(living.path().join("kept"), "").unwrap();
        let dead = root.path().join("stillhouse-executor-killed");
        fs::create_dir_all(dead.join("job/1")).unwrap();
        fs::write(dead.join("job/1/data"), "a shuffle").unwrap();
        let others = ["another-program", "stillhouse-executor"].map(|name| root.path().join(name));
        others.iter().for_each(|path| fs::create_dir(path).unwrap());
        let a_file = root.path().join("stillhouse-executor-file");
        fs::write(&a_file, "").unwrap();
        let target = root.path().join("target");
        fs::create_dir(&target).unwrap();
        std::os::unix::fs::symlink(&target, root.path().join("stillhouse-executor-link")).unwrap();

        let second = WorkFolder::new(root.path()).unwrap();
        assert!(!dead.exists());
        assert!(living.path().join("kept").exists() && second.path().exists() && a_file.exists() && target.exists());
        assert!(others.iter().all(|path| path.exists()));
        let gone = second.path().to_owned();
        drop(second);
        assert!(!gone.exists());
    }

    #[test]
    fn executors_that_start_at_once_have_a_folder_each() {
        let root = tempfile::tempdir().unwrap();
        let start = || WorkFolder::new(root.path()).unwrap();
        let folders: Vec<WorkFolder> = std::thread::scope(|scope| {
            let starting: Vec<_> = (0..32).map(|_| scope.spawn(start)).collect();
            starting.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(folders.iter().all(|folder| folder.path().exists()));
    }
}
