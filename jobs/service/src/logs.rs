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
pub const LONGEST_LINE: usize = 16 << 10;

/// The folder of the logs.
#[derive(Debug, Clone)]
pub struct Logs {
    folder: PathBuf,
    /// Most bytes of both files of a job.
    most: u64,
}

impl Logs {
    /// The logs of a data folder.
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub fn new(data: &Path, most: u64) -> io::Result<Self> {
        let folder = data.join("logs");
        fs::create_dir_all(&folder)?;
        Ok(Self { folder, most })
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
    pub async fn write_to(&self, id: &JobId, attempt: u32) -> io::Result<LogWriter> {
        let (newer, older, most) = (self.newer(id), self.older(id), self.most / 2);
        blocking(move || {
            let file = append(&newer)?;
            let size = file.metadata()?.len();
            Ok(LogWriter { newer, older, file, size, most, attempt, lost: 0 })
        })
        .await
    }

    /// Reads a job's log from its oldest line, in pieces.
    pub fn read(&self, id: &JobId) -> LogReader {
        LogReader { newer: self.newer(id), older: self.older(id), at: None, began: false }
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

fn append(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).mode(0o600).open(path)
}

/// Adds lines to a log.
pub struct LogWriter {
    newer: PathBuf,
    older: PathBuf,
    file: File,
    size: u64,
    most: u64,
    attempt: u32,
    /// Lines lost since the last one that was written.
    lost: u64,
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
            let added = self.line(&text, now);
            Ok((self, added))
        })
        .await
    }

    fn line(&mut self, text: &[u8], now: Time) -> io::Result<()> {
        let missing = (self.lost > 0).then(|| format!("{} lines are missing: they could not be written", self.lost));
        let written = match missing {
            Some(missing) => self.write(missing.as_bytes(), now).and_then(|()| self.write(text, now)),
            None => self.write(text, now),
        };
        match written {
            Ok(()) => self.lost = 0,
            Err(e) if self.lost == 0 => {
                self.lost = 1;
                return Err(e);
            }
            Err(_) => self.lost += 1,
        }
        Ok(())
    }

    fn write(&mut self, text: &[u8], now: Time) -> io::Result<()> {
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
        if self.size > 0 && self.size + line.len() as u64 > self.most {
            fs::rename(&self.newer, &self.older)?;
            self.file = append(&self.newer)?;
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
    at: Option<(File, u64)>,
    began: bool,
}

const PIECE: usize = 64 << 10;

impl LogReader {
    /// The next piece; empty if there is nothing more for now.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn next(&mut self) -> io::Result<Vec<u8>> {
        loop {
            if self.at.is_none() && !self.open()? {
                return Ok(Vec::new());
            }
            let Some((file, inode)) = &mut self.at else { return Ok(Vec::new()) };
            let mut piece = vec![0; PIECE];
            let n = file.read(&mut piece)?;
            piece.truncate(n);
            if n > 0 {
                return Ok(piece);
            }
            // at the end of this file: is it still the newer one?
            match fs::metadata(&self.newer) {
                Ok(now) if now.ino() != *inode => {
                    // lines that were added between the last read and the rotation
                    let mut rest = vec![0; PIECE];
                    let n = file.read(&mut rest)?;
                    rest.truncate(n);
                    if n > 0 {
                        return Ok(rest);
                    }
                    self.at = None;
                }
                _ => return Ok(piece),
            }
        }
    }

    /// Skips all but the last `lines` lines of the log as it is now.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn tail(&mut self, lines: usize) -> io::Result<()> {
        let mut wanted = lines;
        for path in [self.newer.clone(), self.older.clone()] {
            let mut file = match File::open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(e),
            };
            let mut text = Vec::new();
            file.read_to_end(&mut text)?;
            let ends: Vec<usize> = memchr::memchr_iter(b'\n', &text).collect();
            let from = match ends.len().checked_sub(wanted) {
                Some(0) | None => 0,
                Some(before) => ends.get(before - 1).map_or(0, |end| end + 1),
            };
            file.seek(SeekFrom::Start(from as u64))?;
            self.began = true;
            let inode = file.metadata()?.ino();
            self.at = Some((file, inode));
            if ends.len() >= wanted {
                return Ok(());
            }
            wanted -= ends.len();
        }
        Ok(())
    }

    fn open(&mut self) -> io::Result<bool> {
        let first = !std::mem::replace(&mut self.began, true);
        let candidates = [first.then_some(&self.older), Some(&self.newer)];
        for path in candidates.into_iter().flatten() {
            match File::open(path) {
                Ok(file) => {
                    let inode = file.metadata()?.ino();
                    self.at = Some((file, inode));
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
            let piece = reader.next().unwrap();
            if piece.is_empty() {
                return String::from_utf8(text).unwrap();
            }
            text.extend(piece);
        }
    }

    #[tokio::test]
    async fn lines_are_lines_and_old_ones_go() {
        let folder = tempfile::tempdir().unwrap();
        let logs = Logs::new(folder.path(), 4000).unwrap();
        let id = JobId::new().unwrap();
        let mut reader = logs.read(&id);
        assert_eq!(all(&mut reader), "");
        let mut writer = logs.write_to(&id, 2).await.unwrap();
        writer.line(b"first\nforged\x1b[2J\n", Time(0)).unwrap();
        assert_eq!(all(&mut reader), "1970-01-01T00:00:00.000Z attempt 2: first\\u{a}forged\\u{1b}[2J\n");
        for n in 0..200 {
            writer.line(format!("line {n}").as_bytes(), Time(0)).unwrap();
            // a reader that follows sees every line, even across a rotation
            let seen = all(&mut reader);
            assert!(seen.ends_with(&format!(": line {n}\n")) && seen.lines().count() == 1, "{n}: {seen:?}");
        }
        let kept = all(&mut logs.read(&id));
        assert!(kept.len() as u64 <= 4000 && kept.ends_with("line 199\n") && !kept.contains("first"), "{kept}");
        let count = kept.lines().count();
        for lines in [0, 1, 7, count - 1, count, count + 1] {
            let mut reader = logs.read(&id);
            reader.tail(lines).unwrap();
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
        let mut writer = logs.write_to(&id, 1).await.unwrap();
        writer.line(b"first", Time(0)).unwrap();
        let whole = std::mem::replace(&mut writer.file, File::options().write(true).open("/dev/full").unwrap());
        assert!(writer.line(b"lost", Time(0)).is_err());
        // an error is reported once
        writer.line(b"lost too", Time(0)).unwrap();
        writer.file = whole;
        writer.line(b"last", Time(0)).unwrap();
        let text = all(&mut logs.read(&id));
        let lines: Vec<&str> = text.lines().map(|line| line.split_once(": ").unwrap().1).collect();
        assert_eq!(lines, ["first", "2 lines are missing: they could not be written", "last"]);
    }
}
