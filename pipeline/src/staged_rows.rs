//! Stages the rows of `input.sql` or of a mixture for all processes that build splits of a run. They are made once, in the
//! run's process.
//!
//! ```text
//!   output on a disk                   run ── make rows ──► <output>/_stillhouse/input ◄── workers read
//!   output in a store                  run ── make rows ──► a folder of this machine
//!   output in a store, remote splits        └── parts, then staged.json ──► <output>/_stillhouse/input ◄── workers and a resumed run read
//! ```
//!
//! They are made only once because another machine, or the same one later, may get other rows. Then two splits of a
//! job would come from different rows. Part names contain a checksum, so a run that was suspended and wakes up cannot
//! replace another run's parts. A run compares every part with its checksum before it reads it, and the checksums with
//! those in an earlier run's plan. Damaged rows are staged again; other rows end the run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stillhouse_query::{StagedRecord, StagedRows, read_staged_record, reuse_staged, stage_sql, staged_rows};
use stillhouse_schemas::spec::EngineKind;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::functions;
use crate::identity::JobHash;
use crate::job::{Prepared, blocking};
use crate::mixture;
use crate::output::{INPUT, Output, PlanRecord};
use crate::storage::blocking as blocking_call;
use stillhouse_input_files::Store;

/// Bytes read from a part at once.
const PIECE_BYTES: usize = 8 << 20;
/// Hexadecimal digits of the sha256 in the name of a part.
const NAME_DIGITS: usize = 16;

/// The staged rows beside the output, under their names there.
fn rows_at_output(staged: StagedRecord) -> StagedRows {
    let sums: BTreeMap<String, String> =
        staged.parts().map(|(name, _, sha256)| (name.to_owned(), sha256.to_owned())).collect();
    let place = |name: &str| {
        let sha256 = sums.get(name).map_or("", String::as_str);
        Ok::<_, std::convert::Infallible>(Store::staged_path(&part_name(name, sha256)))
    };
    match staged.with_locations(place) {
        Ok(staged) => staged,
        Err(never) => match never {},
    }
}

/// The record of the rows beside the output. Ignores a record without checksums, which an earlier version wrote.
async fn read_record(output: &Output) -> Result<Option<StagedRecord>> {
    let found: Option<StagedRecord> = output.get_json(&record_name()).await?;
    Ok(found.filter(|staged| staged.sha256.len() == staged.files.len()))
}

/// Whether a part beside the output has the recorded size and checksum. Reads it once.
async fn is_intact(output: &Output, stored: &str, bytes: u64, sha256: &str) -> Result<bool> {
    if output.size(stored).await? != Some(bytes) {
        return Ok(false);
    }
    let (now, _) = output.read_whole(stored, |_| ()).await?;
    if now != sha256 {
        tracing::warn!("{}: staged rows are not what was staged; they are made again", output.shown(stored));
    }
    Ok(now == sha256)
}

async fn are_intact(output: &Output, staged: &StagedRecord) -> Result<bool> {
    for (name, bytes, sha256) in staged.parts() {
        if !is_intact(output, &part_name(name, sha256), bytes, sha256).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Checks that the rows are those from which the plan's splits were made.
///
/// # Errors
/// If the rows are others.
pub(crate) fn check(staged: &StagedRows, plan: &PlanRecord, output: &Output) -> Result<()> {
    // an earlier version wrote a plan without checksums
    if plan.staged.is_empty() || plan.staged == staged.sha256 {
        return Ok(());
    }
    Err(other_rows_error(output))
}

fn other_rows_error(output: &Output) -> PipelineError {
    let message = format!(
        "{output}: the input gives other rows than it gave when this job was begun; valid: the input as it was and a query whose rows \
         depend on nothing else, or all of it anew with --overwrite"
    );
    PipelineError::new(ErrorKind::Input, message)
}

fn record_name() -> String {
    format!("{INPUT}/staged.json")
}

fn part_name(name: &str, sha256: &str) -> String {
    format!("{INPUT}/{}-{name}", &sha256[..NAME_DIGITS.min(sha256.len())])
}

/// The rows of a job, staged now or earlier.
pub(crate) async fn rows_of_job(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    observer: &Arc<dyn Observer>,
) -> Result<StagedRows> {
    let is_shared =
        output.folder().is_none() && (output.is_joined() || prepared.spec.engine.kind == EngineKind::Ballista);
    let shared = if is_shared { read_record(output).await? } else { None };
    if output.is_joined() {
        return rows_of_run(output, shared).await;
    }
    if let Some(shared) = shared.clone().filter(|shared| shared.matches_inputs(&prepared.files))
        && are_intact(output, &shared).await?
    {
        return Ok(rows_at_output(shared));
    }
    let folder = output.sql_folder(&hash.hash)?;
    let staged = {
        let folder = folder.clone();
        blocking(prepared, observer, move |p, o| stage(p, &folder, o)).await?
    };
    if !is_shared {
        return Ok(staged);
    }
    let put = upload_rows(output, &folder, shared).await?;
    Ok(rows_at_output(put))
}

/// The rows that were staged by the run for which this process works.
async fn rows_of_run(output: &Output, shared: Option<StagedRecord>) -> Result<StagedRows> {
    let staged = match output.folder() {
        None => shared.map(rows_at_output),
        Some(root) => {
            let folder = root.join(INPUT);
            blocking_call(move || Ok::<_, PipelineError>(staged_rows(&folder))).await?
        }
    };
    staged.ok_or_else(|| {
        let message = format!(
            "{output}: the staged rows are not there as this machine sees it; valid: an output that all executors and the run share"
        );
        PipelineError::new(ErrorKind::Output, message)
    })
}

/// Uploads the staged parts of a folder to the output, where the processes that build the splits read them.
async fn upload_rows(output: &Output, folder: &Path, before: Option<StagedRecord>) -> Result<StagedRecord> {
    let of = folder.to_owned();
    let gone = || {
        let message = format!("{}: the staged rows are gone; run again", folder.display());
        PipelineError::new(ErrorKind::Input, message).retryable()
    };
    let made = blocking_call(move || Ok::<_, PipelineError>(read_staged_record(&of))).await?.ok_or_else(gone)?;
    if before.is_some_and(|before| before.sha256 != made.sha256) {
        return Err(other_rows_error(output));
    }
    for (name, bytes, sha256) in made.parts() {
        let stored = part_name(name, sha256);
        if is_intact(output, &stored, bytes, sha256).await? {
            continue;
        }
        output.check_ownership().await?;
        // a damaged part has the same name as its replacement
        output.delete(&stored).await?;
        upload_part(output, folder.join(name), &stored, bytes, sha256).await?;
    }
    output.put_json_if_owner(&record_name(), &made).await?;
    Ok(made)
}

pub(crate) async fn upload_part(output: &Output, file: PathBuf, stored: &str, bytes: u64, sha256: &str) -> Result<()> {
    let failed = |e| PipelineError::store(ErrorKind::Output, &e, "write", &output.shown(stored));
    let mut upload = output.upload_copy(stored, bytes, Some(sha256)).await?;
    let mut start = 0;
    while start < bytes {
        let file = file.clone();
        let piece = blocking_call(move || read(&file, start)).await?;
        start += piece.len() as u64;
        if let Err(e) = upload.put(piece.into()).await {
            upload.abort().await;
            return Err(failed(e));
        }
    }
    if upload.sha256() != sha256 {
        upload.abort().await;
        let message = format!("{}: was changed while it was sent; run again", file.display());
        return Err(PipelineError::new(ErrorKind::Input, message).retryable());
    }
    let staged = upload.finish().await.map_err(failed)?;
    output.place(staged, stored).await
}

#[expect(clippy::disallowed_methods, reason = "runs through `blocking`")]
fn read(file: &Path, start: u64) -> Result<Vec<u8>> {
    use std::io::{Read, Seek, SeekFrom};
    let mut piece = Vec::new();
    let mut take = || {
        let mut open = std::fs::File::open(file)?;
        open.seek(SeekFrom::Start(start))?;
        open.take(PIECE_BYTES as u64).read_to_end(&mut piece)
    };
    match take() {
        Ok(0) => {
            let message = format!("{}: ends before byte {start}", file.display());
            Err(PipelineError::new(ErrorKind::Input, message))
        }
        Ok(_) => Ok(piece),
        Err(e) => Err(PipelineError::output(format!("cannot read {}", file.display()))(e)),
    }
}

/// Makes the rows of a job once and stores them in `folder`, so that every split reads the same rows.
///
/// Reuses the rows that an earlier run of this job has staged.
pub(crate) fn stage(prepared: &Prepared, folder: &Path, observer: &dyn Observer) -> Result<StagedRows> {
    match reuse_staged(folder, &prepared.files) {
        Some(staged) => Ok(staged),
        None => make_rows(prepared, folder, observer),
    }
}

/// Makes the rows of a job in `folder`, whatever is there.
pub(crate) fn make_rows(prepared: &Prepared, folder: &Path, observer: &dyn Observer) -> Result<StagedRows> {
    let memory = u64::from(prepared.spec.engine.sql_memory_megabytes) * 1_000_000;
    if prepared.spec.input.is_mixture() {
        return mixture::stage(prepared, folder, memory, observer);
    }
    observer.event(&Event::Preparing { what: "running input.sql".into() });
    stage_sql(&prepared.store, &prepared.tables, &prepared.spec.input, memory, folder, functions::register)
        .map_err(|e| PipelineError::source("input.sql", e))
}

/// Removes the staged rows of a finished job.
pub(crate) async fn remove_staged(folder: &Path) {
    if let Err(e) = tokio::fs::remove_dir_all(folder).await
        && e.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!("the staged rows could not be removed from {}: {e}", folder.display());
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::events::NullObserver;

    /// A folder with one part, as a query leaves it.
    fn staged(folder: &Path, rows: &[u8]) -> StagedRecord {
        let files = vec![("part-00000.parquet".to_owned(), rows.len() as u64)];
        let sha256 = vec![hex::encode(Sha256::digest(rows))];
        let made =
            StagedRecord { rows: 1, files, skipped: BTreeMap::new(), tables: Vec::new(), inputs: Vec::new(), sha256 };
        fs::write(folder.join("part-00000.parquet"), rows).unwrap();
        fs::write(folder.join("staged.json"), serde_json::to_vec(&made).unwrap()).unwrap();
        made
    }

    #[tokio::test]
    async fn rows_beside_an_output_are_compared_before_a_run_reads_on() {
        let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let output = Output::on_disk(out.path()).unwrap().create(&NullObserver).await.unwrap().for_job("hash");
        let lock = output.lock(&NullObserver).await.unwrap();
        let rows: Vec<u8> = (0..5000_u32).flat_map(u32::to_le_bytes).collect();
        let made = staged(folder.path(), &rows);
        assert_eq!(upload_rows(&output, folder.path(), None).await.unwrap(), made);
        assert_eq!(read_record(&output).await.unwrap().as_ref(), Some(&made));
        assert!(are_intact(&output, &made).await.unwrap());

        let name = part_name("part-00000.parquet", &made.sha256[0]);
        let stored = out.path().join(name);
        for place in [0, rows.len() / 2, rows.len() - 1] {
            let mut damaged = rows.clone();
            damaged[place] ^= 1;
            fs::write(&stored, damaged).unwrap();
            assert!(!are_intact(&output, &made).await.unwrap(), "byte {place}");
            // the query gave the same rows again: they replace the damaged ones
            upload_rows(&output, folder.path(), Some(made.clone())).await.unwrap();
            assert_eq!(fs::read(&stored).unwrap(), rows);
        }
        fs::remove_file(&stored).unwrap();
        assert!(!are_intact(&output, &made).await.unwrap());

        // other rows cannot continue the job
        staged(folder.path(), b"something else");
        let refused = upload_rows(&output, folder.path(), Some(made)).await.unwrap_err().to_string();
        assert!(refused.contains("the input gives other rows than it gave when this job was begun"), "{refused}");
        lock.release().await;
    }
}
