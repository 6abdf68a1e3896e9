//! The log of each job: the stderr of its workers, in two files of bounded size.
//!
//! ```text
//!   logs/<id>.log.1   older lines       each line: time, attempt, text
//!   logs/<id>.log     newer lines; replaces the older file when it is full
//! ```
//!
//! Reading blocks and needs a thread that may block. Adding lines and removing files is `async` and blocks other
//! threads only.

#![allow(clippy::disallowed_methods, reason = "called through `blocking`, here or by who reads")]

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use stillhouse_pipeline::storage::blocking;

use super::model::{JobId, Time};

/// Longest line in bytes that is not split.
pub const MAX_LINE_BYTES: usize = 16 << 10;

/// The folder of the logs.
#[derive(Debug, Clone)]
pub struct Logs {
    folder: PathBuf,
    /// Most bytes of both files of a job.
    max_bytes: u64,
}

impl Logs {
    /// The logs of a data folder.
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub fn new(data: &Path, max_bytes: u64) -> io::Result<Self> {
        let folder = data.join("logs");
        fs::create_dir_all(&folder)?;
        Ok(Self { folder, max_bytes })
    }

    fn newer(&self, id: &JobId) -> PathBuf {
        self.folder.join(format!("{id}.log"))
    }

    fn older(&self, id: &JobId) -> PathBuf {
        self.folder.join(format!("{id}.log.1"))
    }

    /// Opens a job's log to add lines.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub async fn open_writer(&self, id: &JobId, attempt: u32) -> io::Result<LogWriter> {
        let (newer, older, max_bytes) = (self.newer(id), self.older(id), self.max_bytes / 2);
        blocking(move || {
            let file = open_append(&newer)?;
            let size = file.metadata()?.len();
            Ok(LogWriter { newer, older, file, size, max_bytes, attempt, lost_lines: 0 })
        })
        .await
    }

    /// Reads a job's log from its oldest line, in pieces.
    pub fn read(&self, id: &JobId) -> LogReader {
        LogReader { newer: self.newer(id), older: self.older(id), open_file: None, has_started: false }
    }

    /// Removes a job's log.
    pub async fn remove(&self, id: &JobId) {
        for path in [self.newer(id), self.older(id)] {
            let shown = path.display().to_string();
            if let Err(e) = blocking(move || fs::remove_file(path)).await
                && e.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!("cannot remove {shown}: {e}");
            }
        }
    }
}

fn open_append(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).mode(0o600).open(path)
}

/// Adds lines to a log.
pub struct LogWriter {
    newer: PathBuf,
    older: PathBuf,
    file: File,
    size: u64,
    max_bytes: u64,
    attempt: u32,
    /// Lines lost since the last one that was written.
    lost_lines: u64,
}

impl LogWriter {
    /// Adds a line and returns the writer. Escapes control characters, so that no text can forge another line.
    ///
    /// # Errors
    /// The inner error: the line cannot be written; reported once per series of failures. The next line that can be
    /// written is preceded by the number of lost ones. The outer error: the writing thread failed and the writer is
    /// lost.
    pub async fn add(mut self, text: Vec<u8>, now: Time) -> io::Result<(Self, io::Result<()>)> {
        blocking(move || {
            let added = self.add_line(&text, now);
            Ok((self, added))
        })
        .await
    }

    fn add_line(&mut self, text: &[u8], now: Time) -> io::Result<()> {
        let missing =
            (self.lost_lines > 0).then(|| format!("{} lines are missing: they could not be written", self.lost_lines));
        let written = match missing {
            Some(missing) => self.write_line(missing.as_bytes(), now).and_then(|()| self.write_line(text, now)),
            None => self.write_line(text, now),
        };
        match written {
            Ok(()) => self.lost_lines = 0,
            Err(e) if self.lost_lines == 0 => {
                self.lost_lines = 1;
                return Err(e);
            }
            Err(_) => self.lost_lines += 1,
        }
        Ok(())
    }

    fn write_line(&mut self, text: &[u8], now: Time) -> io::Result<()> {
        let text = String::from_utf8_lossy(text.strip_suffix(b"\n").unwrap_or(text));
        let mut line = format!("{now} attempt {}: ", self.attempt);
        for c in text.chars() {
            match c {
                '\t' => line.push(' '),
                c if c.is_control()
                    || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
                {
                    line.extend(c.escape_unicode());
                }
                c => line.push(c),
            }
        }
        line.push('\n');
        if self.size > 0 && self.size + line.len() as u64 > self.max_bytes {
            fs::rename(&self.newer, &self.older)?;
            self.file = open_append(&self.newer)?;
            self.size = 0;
        }
        if let Err(e) = self.file.write_all(line.as_bytes()) {
            // remove a partial line, so that the next one begins a new line
            let _ = self.file.set_len(self.size);
            return Err(e);
        }
        self.size += line.len() as u64;
        Ok(())
    }
}

/// Reads a log that may grow meanwhile.
pub struct LogReader {
    newer: PathBuf,
    older: PathBuf,
    /// The open file and its inode.
    open_file: Option<(File, u64)>,
    has_started: bool,
}

const CHUNK_BYTES: usize = 64 << 10;

impl LogReader {
    /// The next piece; empty if there is nothing more for now.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn next(&mut self) -> io::Result<Vec<u8>> {
        loop {
            if self.open_file.is_none() && !self.open_next()? {
                return Ok(Vec::new());
            }
            let Some((file, inode)) = &mut self.open_file else { return Ok(Vec::new()) };
            let mut chunk = vec![0; CHUNK_BYTES];
            let n = file.read(&mut chunk)?;
            chunk.truncate(n);
            if n > 0 {
                return Ok(chunk);
            }
            // at the end of this file: is it still the newer one?
            match fs::metadata(&self.newer) {
                Ok(now) if now.ino() != *inode => {
                    // lines that were added between the last read and the rotation
                    let mut rest = vec![0; CHUNK_BYTES];
                    let n = file.read(&mut rest)?;
                    rest.truncate(n);
                    if n > 0 {
                        return Ok(rest);
                    }
                    self.open_file = None;
                }
                _ => return Ok(chunk),
            }
        }
    }

    /// Skips all but the last `lines` lines of the log as it is now.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn skip_to_tail(&mut self, lines: usize) -> io::Result<()> {
        let mut needed = lines;
        for path in [self.newer.clone(), self.older.clone()] {
            let mut file = match File::open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(e),
            };
            let mut text = Vec::new();
            file.read_to_end(&mut text)?;
            let ends: Vec<usize> = memchr::memchr_iter(b'\n', &text).collect();
            let from = match ends.len().checked_sub(needed) {
                Some(0) | None => 0,
                Some(before) => ends.get(before - 1).map_or(0, |end| end + 1),
            };
            file.seek(SeekFrom::Start(from as u64))?;
            self.has_started = true;
            let inode = file.metadata()?.ino();
            self.open_file = Some((file, inode));
            if ends.len() >= needed {
                return Ok(());
            }
            needed -= ends.len();
        }
        Ok(())
    }

    fn open_next(&mut self) -> io::Result<bool> {
        let first = !std::mem::replace(&mut self.has_started, true);
        let candidates = [first.then_some(&self.older), Some(&self.newer)];
        for path in candidates.into_iter().flatten() {
            match File::open(path) {
                Ok(file) => {
                    let inode = file.metadata()?.ino();
                    self.open_file = Some((file, inode));
                    return Ok(true);
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(reader: &mut LogReader) -> String {
        let mut text = Vec::new();
        loop {
            let chunk = reader.next().unwrap();
            if chunk.is_empty() {
                return String::from_utf8(text).unwrap();
            }
            text.extend(chunk);
        }
    }

    #[tokio::test]
    async fn lines_are_lines_and_old_ones_go() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path(), 4000).unwrap();
        let id = JobId::new().unwrap();
        let mut reader = logs.read(&id);
        assert_eq!(all(&mut reader), "");
        let mut writer = logs.open_writer(&id, 2).await.unwrap();
        writer.add_line(b"first\nforged\x1b[2J\n", Time(0)).unwrap();
        assert_eq!(all(&mut reader), "1970-01-01T00:00:00.000Z attempt 2: first\\u{a}forged\\u{1b}[2J\n");
        for n in 0..200 {
            writer.add_line(format!("line {n}").as_bytes(), Time(0)).unwrap();
            // a reader that follows sees every line, even across a rotation
            let seen = all(&mut reader);
            assert!(seen.ends_with(&format!(": line {n}\n")) && seen.lines().count() == 1, "{n}: {seen:?}");
        }
        let kept = all(&mut logs.read(&id));
        assert!(kept.len() as u64 <= 4000 && kept.ends_with("line 199\n") && !kept.contains("first"), "{kept}");
        let count = kept.lines().count();
        for lines in [0, 1, 7, count - 1, count, count + 1] {
            let mut reader = logs.read(&id);
            reader.skip_to_tail(lines).unwrap();
            let tail = all(&mut reader);
            let expected: Vec<&str> = kept.lines().skip(count.saturating_sub(lines)).collect();
            assert_eq!(tail.lines().collect::<Vec<_>>(), expected, "{lines}");
        }
        logs.remove(&id).await;
        assert_eq!(all(&mut logs.read(&id)), "");
    }

    #[tokio::test]
    async fn lines_that_could_not_be_written_are_counted_in_their_place() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path(), 4000).unwrap();
        let id = JobId::new().unwrap();
        let mut writer = logs.open_writer(&id, 1).await.unwrap();
        writer.add_line(b"first", Time(0)).unwrap();
        let whole = std::mem::replace(&mut writer.file, File::options().write(true).open("/dev/full").unwrap());
        assert!(writer.add_line(b"lost", Time(0)).is_err());
        // an error is reported once
        writer.add_line(b"lost too", Time(0)).unwrap();
        writer.file = whole;
        writer.add_line(b"last", Time(0)).unwrap();
        let text = all(&mut logs.read(&id));
        let lines: Vec<&str> = text.lines().map(|line| line.split_once(": ").unwrap().1).collect();
        assert_eq!(lines, ["first", "2 lines are missing: they could not be written", "last"]);
    }
}
