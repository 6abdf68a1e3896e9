//! Checks whether the input is still what an earlier run read.
//!
//! ```text
//!   size, time, inode, ETag, version as in the plan ─► unchanged
//!   something differs ─► same splits, and same records in the committed ones? ─► unchanged; the plan stores the new state
//!                                                                           └► refused; the error names the files
//! ```
//!
//! So a file that was only touched, copied or moved is read once more, as far as it was read before. A file with other
//! content never mixes with the old one. Names and sizes are part of the job's hash: if they differ, it is another job.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use rayon::prelude::*;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::finish;
use crate::identity::JobHash;
use crate::job::{Prepared, blocking, staged_input};
use crate::job_diff::differences;
use crate::output::{Found, Output, PlanRecord};
use crate::plan;
use crate::source;
use crate::staged_rows;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::InputFile;

/// Maximum number of files that a refusal names.
const MAX_NAMED_FILES: usize = 5;

/// Finds the work of this job at the output, and checks that it was made from the current input.
pub(crate) async fn find_work(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    observer: &Arc<dyn Observer>,
) -> Result<Found> {
    let found = output.inspect_with(&hash.hash, &|plan| differences(plan, hash)).await?;
    let Some(touched) = find_touched(prepared, hash, output, &found).await? else { return Ok(found) };
    let (shown, of) = (output.to_string(), hash.clone());
    let touched = blocking(prepared, observer, move |p, o| touched.check(p, &of, &shown, o).map(|()| touched)).await?;
    let TouchedInputs { plan, sql_folder, .. } = touched;
    let splits = plan.splits_of(&hash.files);
    output.begin(&PlanRecord { files: hash.files.clone(), splits, ..plan }).await?;
    if let (Found::Complete, Some(folder)) = (&found, sql_folder) {
        staged_rows::remove_staged(&folder).await;
    }
    Ok(found)
}

/// Work of an earlier run whose input files were touched since.
pub(crate) struct TouchedInputs {
    pub plan: PlanRecord,
    files: BTreeSet<usize>,
    done: BTreeMap<SplitId, ShardRecord>,
    /// Folder of the staged rows.
    pub sql_folder: Option<PathBuf>,
}

/// Looks for files that were touched since an earlier run. Returns `None` if there are none or the output is empty.
/// Writes nothing.
///
/// # Errors
/// If the output cannot be read.
pub(crate) async fn find_touched(
    prepared: &Prepared,
    hash: &JobHash,
    output: &Output,
    found: &Found,
) -> Result<Option<TouchedInputs>> {
    let done: Vec<ShardRecord> = match found {
        Found::Nothing => return Ok(None),
        Found::Complete => finish::manifest_of(output).await?.shards,
        Found::Resumable { done, incomplete_uploads } => {
            done.values().cloned().chain(incomplete_uploads.iter().map(|record| record.shard.clone())).collect()
        }
    };
    let Some(plan) = output.plan().await? else { return Ok(None) };
    let files = plan.touched(&hash.files);
    if files.is_empty() {
        return Ok(None);
    }
    let sql_folder = prepared.spec.input.staged_by().map(|_| output.sql_folder(&hash.hash)).transpose()?;
    let done = done.into_iter().map(|shard| (shard.split, shard)).collect();
    Ok(Some(TouchedInputs { plan, files, done, sql_folder }))
}

impl TouchedInputs {
    /// Compares the touched files with what was read of them.
    ///
    /// # Errors
    /// If a file has other content now.
    pub(crate) fn check(
        &self,
        prepared: &Prepared,
        hash: &JobHash,
        output: &str,
        observer: &dyn Observer,
    ) -> Result<()> {
        let Self { plan, files, done, sql_folder } = self;
        Comparison { prepared, hash, plan, sql_folder: sql_folder.as_deref(), done, output }.check(files, observer)
    }
}

/// What to compare: a plan and its committed splits, against the job as it is now.
pub(crate) struct Comparison<'a> {
    pub prepared: &'a Prepared,
    pub hash: &'a JobHash,
    pub plan: &'a PlanRecord,
    /// Folder of the staged rows.
    pub sql_folder: Option<&'a std::path::Path>,
    pub done: &'a BTreeMap<SplitId, ShardRecord>,
    /// Name of the output for messages.
    pub output: &'a str,
}

impl Comparison<'_> {
    /// Checks that the committed splits were read from the files as they are now.
    ///
    /// Cost: nothing if the stores report no change; else the touched files are read as far as they were read before.
    ///
    /// # Errors
    /// If a file has other content or cannot be read.
    pub fn check(&self, touched: &BTreeSet<usize>, observer: &dyn Observer) -> Result<()> {
        let names = self.describe_files(touched);
        let files = match self.sql_folder {
            // the query reads all files
            Some(folder) => staged_rows::stage(self.prepared, folder, observer)?.files,
            None => plan::in_order(self.hash, &self.prepared.files),
        };
        let splits = self.plan.splits_of(&self.hash.files);
        if plan::all_splits(self.prepared, self.hash, &files, observer)? != splits {
            return Err(self.refusal(&names, "it makes other splits"));
        }
        observer
            .event(&Event::Preparing { what: format!("input was touched; comparing what was read of it: {names}") });
        let paths: BTreeSet<&str> = touched.iter().map(|i| self.hash.files[*i].path.as_str()).collect();
        let all = self.sql_folder.is_some();
        let wanted: Vec<(SplitRecord, Vec<Option<&String>>)> = splits
            .iter()
            .filter_map(|split| {
                let read = self.done.get(&split.split)?;
                let pieces = split.pieces.iter().enumerate().filter(|(_, p)| all || paths.contains(p.file.as_str()));
                let (pieces, sums): (Vec<_>, Vec<_>) =
                    pieces.map(|(i, p)| (p.clone(), read.input_sha256.get(i))).unzip();
                (!pieces.is_empty()).then(|| (SplitRecord { pieces, ..split.clone() }, sums))
            })
            .collect();
        let other =
            wanted.par_iter().map(|(split, sums)| self.find_difference(&files, split, sums)).collect::<Vec<_>>();
        for other in other {
            if let Some((file, what)) = other? {
                let name = self.hash.files.iter().position(|f| f.path == file);
                let named = name.map_or(names.clone(), |i| self.describe_files(&BTreeSet::from([i])));
                return Err(self.refusal(&named, &what));
            }
        }
        Ok(())
    }

    /// The first piece of a split whose records changed: its file and the reason.
    fn find_difference(
        &self,
        files: &[InputFile],
        split: &SplitRecord,
        sums: &[Option<&String>],
    ) -> Result<Option<(String, String)>> {
        let file = |i: usize| split.pieces.get(i).map(|p| p.file.clone()).unwrap_or_default();
        let input = staged_input(self.prepared);
        match source::piece_checksums(&self.prepared.store, files, split, &input) {
            Ok(now) => {
                let other = now.iter().zip(sums).position(|(now, was)| Some(now) != *was);
                Ok(other.map(|i| (file(i), format!("split {} was made of other records", split.split.0))))
            }
            // a file that was readable and is not now has other content
            Err(e @ (SourceError::Record { .. } | SourceError::Corrupt { .. })) => {
                Ok(Some((file(0), format!("split {} was made of other records: {e}", split.split.0))))
            }
            Err(e) => Err(PipelineError::source("input", e)),
        }
    }

    fn describe_files(&self, touched: &BTreeSet<usize>) -> String {
        let one = |i: &usize| {
            let (was, is) = (&self.plan.files[*i], &self.hash.files[*i]);
            format!("{} ({} when it was read, {} now)", is.path, was.state, is.state)
        };
        let mut text = touched.iter().take(MAX_NAMED_FILES).map(one).collect::<Vec<_>>().join(", ");
        let more = touched.len().saturating_sub(MAX_NAMED_FILES);
        if more > 0 {
            text += &format!(" and {more} more files");
        }
        text
    }

    fn refusal(&self, names: &str, what: &str) -> PipelineError {
        let message = format!(
            "output.path: {} was made of other input: {names}: {what}; put the file back as it was, choose another folder, or \
             `--overwrite` to make everything again",
            self.output
        );
        PipelineError::new(ErrorKind::Usage, message)
    }
}
