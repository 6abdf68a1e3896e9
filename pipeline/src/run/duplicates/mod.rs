//! Finds the duplicates among all documents of a job, and among their parts, before its splits are made. Other processes that make splits read the
//! list beside the output.
//!
//! ```text
//!   every split ── read, clean, filter, … ──► keys on this machine's disk ──► duplicates ──► <output>/_stillhouse/duplicates.parquet
//!                                             (a resumed run goes on here)                       plan.json has its checksum
//! ```
//!
//! The list is found once, by the process of the run: splits that were made with different lists would lose documents, or have
//! them twice. A later run, a repair and workers read the same list. If it is gone or damaged, or the input was touched, it is
//! found again and must have the checksum of the plan.
//!
//! Cost: reads the input once more, see [`stillhouse_operators::deduplicate`]; on the disk, 24 bytes for each key of a document,
//! 28 for each key of a part, and as many while they are sorted.

mod find;
mod key_files;
mod list;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use datafusion::common::DataFusionError;
use futures::{StreamExt, TryStreamExt, stream};
use sha2::{Digest, Sha256};
use stillhouse_input_files::InputFile;
use stillhouse_operators::deduplicate::{self, DeduplicateConfig, DocumentKeys};
use stillhouse_operators::operator::{DuplicateList, OperatorError};
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_schemas::manifest::SplitRecord;

use self::find::find_duplicates;
use self::key_files::{SplitKeys, SplitKeysWriter, add_to_sum};
use self::list::{ListFile, ListWriter};
use super::splits::{max_concurrent_splits, resources, source_of};
use crate::engine::operator_plan;
use crate::engine::pool::Pool;
use crate::engine::session::Session;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::identity::JobHash;
use crate::job::Prepared;
use crate::output::{DUPLICATES, DuplicatesRecord, Output};
use crate::staged_rows::upload_part;
use crate::storage::blocking;

/// The list of a job, and what its plan has of it.
pub(super) type Duplicates = (DuplicatesRecord, Arc<dyn DuplicateList>);

/// What is read for a list.
pub(super) struct Documents<'a> {
    pub(super) splits: &'a [SplitRecord],
    pub(super) files: &'a [InputFile],
    /// SHA-256 of the files, if they are the rows of `input.sql`.
    pub(super) staged: &'a [String],
}

impl Documents<'_> {
    /// SHA-256 of the state of what is read, and of the version that reads it. A job's hash has names and sizes of files alone,
    /// and a file may get other content of the same size.
    fn sha256(&self, hash: &JobHash) -> Result<String> {
        let state = (&hash.hash, &hash.files, self.staged, self.splits, env!("CARGO_PKG_VERSION"));
        let state = serde_json::to_vec(&state).map_err(|e| PipelineError::caused(ErrorKind::Input, "the plan", e))?;
        Ok(hex::encode(Sha256::digest(state)))
    }
}

fn config(prepared: &Prepared) -> Option<&DeduplicateConfig> {
    prepared.operators.iter().find_map(|operator| operator.config())
}

/// The list of a job: that of an earlier run whose plan has `earlier`, or found now. `None` if the job has none. If the input was
/// touched since the earlier run, also in parts that have no split yet, the list is found again.
///
/// # Errors
/// If the input cannot be read or has other duplicates than in the earlier run, the keys do not fit into the job's memory, or
/// the list cannot be written.
pub(super) async fn find_or_load(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    documents: Documents<'_>,
    earlier: Option<&DuplicatesRecord>,
    observer: &Arc<dyn Observer>,
) -> Result<Option<Duplicates>> {
    let Some(config) = config(prepared) else { return Ok(None) };
    let input_sha256 = documents.sha256(hash)?;
    if let Some(record) = earlier
        && record.input_sha256 == input_sha256
        && let Some(list) = load(output, record).await?
    {
        return Ok(Some((record.clone(), list)));
    }
    // keys of an input in another state lie elsewhere
    let folder = output.sql_folder(&hash.hash)?.join("keys").join(&input_sha256);
    let sha256 = find(prepared, config, documents, &folder, observer.as_ref()).await?;
    let record = DuplicatesRecord { sha256, input_sha256 };
    if earlier.is_some_and(|earlier| earlier.sha256 != record.sha256) {
        let message = format!(
            "{output}: the input has other duplicates than when this job was begun; valid: the input as it was, or all of it anew with \
             --overwrite"
        );
        return Err(PipelineError::new(ErrorKind::Input, message));
    }
    store(output, &folder).await?;
    let list = load(output, &record).await?;
    remove_keys(&folder).await;
    let gone = || {
        PipelineError::new(ErrorKind::Output, format!("{}: was changed after it was written", output.shown(DUPLICATES)))
    };
    Ok(Some((record, list.ok_or_else(gone)?)))
}

/// The list of the run for which this process works. `None` if the job has none.
///
/// # Errors
/// If the list is not there.
pub(super) async fn of_run(
    prepared: &Prepared,
    output: &Output,
    record: Option<&DuplicatesRecord>,
) -> Result<Option<Arc<dyn DuplicateList>>> {
    if config(prepared).is_none() {
        return Ok(None);
    }
    let list = match record {
        Some(record) => load(output, record).await?,
        None => None,
    };
    let missing = || {
        let message = format!(
            "{}: the list of duplicates is not there as this machine sees it; valid: an output that all executors and the run share",
            output.shown(DUPLICATES)
        );
        PipelineError::new(ErrorKind::Output, message)
    };
    list.ok_or_else(missing).map(Some)
}

/// Opens the list beside an output, if it is that of the record. For an output in a store, fetches it.
async fn load(output: &Output, record: &DuplicatesRecord) -> Result<Option<Arc<dyn DuplicateList>>> {
    let (path, folder) = match output.folder() {
        Some(root) => (root.join(DUPLICATES), None),
        None => {
            let Some(bytes) = output.size(DUPLICATES).await? else { return Ok(None) };
            let folder =
                tempfile::tempdir().map_err(PipelineError::output("no temporary folder for the list of duplicates"))?;
            let path = folder.path().join("duplicates.parquet");
            fetch(output, bytes, &path).await?;
            (path, Some(folder))
        }
    };
    let sha256 = record.sha256.clone();
    let list = blocking(move || Ok::<_, PipelineError>(ListFile::open(&path, &sha256, folder))).await?;
    Ok(list.map(|list| Arc::new(list) as Arc<dyn DuplicateList>))
}

async fn fetch(output: &Output, bytes: u64, path: &Path) -> Result<()> {
    use tokio::io::AsyncWriteExt;
    let failed = || PipelineError::output(format!("{}: the list of duplicates", path.display()));
    let mut file = tokio::fs::File::create(path).await.map_err(failed())?;
    let mut pieces = std::pin::pin!(output.pieces(DUPLICATES, bytes));
    while let Some(piece) = pieces.try_next().await? {
        file.write_all(&piece).await.map_err(failed())?;
    }
    file.flush().await.map_err(failed())
}

/// Puts the list of a folder beside the output, where the processes that make splits read it.
async fn store(output: &Output, folder: &Path) -> Result<()> {
    let path = list_in(folder);
    let (path, bytes, sha256) = blocking(move || {
        let failed = || PipelineError::output(format!("{}: the list of duplicates", path.display()));
        #[expect(clippy::disallowed_methods, reason = "runs through `blocking`")]
        let mut file = std::fs::File::open(&path).map_err(failed())?;
        let mut sum = Sha256::new();
        let bytes = add_to_sum(&mut file, &mut sum).map_err(failed())?;
        Ok::<_, PipelineError>((path, bytes, hex::encode(sum.finalize())))
    })
    .await?;
    output.check_ownership().await?;
    // one that is damaged has the same name
    output.delete(DUPLICATES).await?;
    upload_part(output, path, DUPLICATES, bytes, &sha256).await
}

fn list_in(folder: &Path) -> PathBuf {
    folder.join("duplicates.parquet")
}

async fn remove_keys(folder: &Path) {
    let Some(keys) = folder.parent() else { return };
    if let Err(e) = tokio::fs::remove_dir_all(keys).await {
        tracing::warn!("the keys of documents could not be removed from {}: {e}", keys.display());
    }
    // of a job without input.sql, there is nothing else
    if let Some(parent) = keys.parent() {
        let _ = tokio::fs::remove_dir(parent).await;
    }
}

/// Finds the duplicates of a job and writes the list into the folder. Returns the SHA-256 of its values.
async fn find(
    prepared: &Arc<Prepared>,
    config: &DeduplicateConfig,
    documents: Documents<'_>,
    folder: &Path,
    observer: &dyn Observer,
) -> Result<String> {
    let before: Vec<OperatorSpec> =
        prepared.operators.iter().take_while(|operator| operator.name() != deduplicate::NAME).cloned().collect();
    let (splits, files) = (Arc::new(documents.splits.to_vec()), Arc::new(documents.files.to_vec()));
    let pool = Pool::of_this_process()?;
    let plan = operator_plan(source_of(prepared, &files, &splits), &before);
    let session = Session::new(plan, resources(prepared, None, &[], &splits, pool.spawner()?), &prepared.spec.engine)?;
    let failed = PipelineError::output(format!("cannot create {}", folder.display()));
    tokio::fs::create_dir_all(folder).await.map_err(failed)?;
    let total = splits.len();
    let done = AtomicUsize::new(0);
    let say = |done: usize| {
        // a job may have a hundred thousand splits
        if done > 0 && done * 100 / total == (done - 1) * 100 / total {
            return;
        }
        observer.event(&Event::Preparing { what: format!("comparing documents: {done} of {total} splits are read") });
    };
    say(0);
    let (session, done, say) = (&session, &done, &say);
    let keys = (0..total).map(|partition| async move {
        let keys = keys_of_split(session, partition, config, folder).await?;
        say(done.fetch_add(1, Ordering::Relaxed) + 1);
        Ok::<_, PipelineError>(keys)
    });
    let at_once = max_concurrent_splits(&prepared.spec, rayon::current_num_threads());
    let mut keys: Vec<SplitKeys> = stream::iter(keys).buffer_unordered(at_once).try_collect().await?;
    keys.sort_by_key(SplitKeys::split);
    observer.event(&Event::Preparing { what: "comparing documents: looking for duplicates".into() });
    let (folder, memory_bytes, with_parts) = (folder.to_owned(), config.memory_bytes, config.parts.is_some());
    blocking(move || {
        let mut list = ListWriter::create(&list_in(&folder), with_parts)?;
        find_duplicates(&keys, &folder, memory_bytes, &mut |duplicate| list.push(duplicate))?;
        list.finish()
    })
    .await
}

/// The keys of a split, from an earlier run or made now.
async fn keys_of_split(
    session: &Session,
    partition: usize,
    config: &DeduplicateConfig,
    folder: &Path,
) -> Result<SplitKeys> {
    let split = session.resources.split(partition).map_err(PipelineError::from_plan)?;
    let (of, place, with_parts) = (folder.to_owned(), format!("split {}", split.split.0), config.parts.is_some());
    let (earlier, mut file) = blocking(move || {
        let earlier = SplitKeys::written_before(&of, split.split, with_parts)?;
        let file = match &earlier {
            None => Some(SplitKeysWriter::create(&of, split.split, with_parts)?),
            Some(_) => None,
        };
        Ok::<_, PipelineError>((earlier, file))
    })
    .await?;
    if let Some(earlier) = earlier {
        return Ok(earlier);
    }
    let of_stage = |e: DataFusionError| PipelineError::from_stage(place.clone(), e);
    let of_operator = |e: OperatorError| of_stage(DataFusionError::External(Box::new(e)));
    let mut keys = DocumentKeys::new(config).map_err(of_operator)?;
    let mut documents = session.rows(partition).map_err(of_stage)?;
    while let Some(batch) = documents.try_next().await.map_err(of_stage)? {
        let made;
        (keys, file, made) = blocking(move || {
            let made = keys.add(&batch).map(|documents| match &mut file {
                Some(file) => documents.iter().try_for_each(|document| file.push(document)),
                None => Ok(()),
            });
            Ok::<_, PipelineError>((keys, file, made))
        })
        .await?;
        made.map_err(of_operator)??;
    }
    keys.finish().map_err(of_operator)?;
    let written = blocking(move || file.map(SplitKeysWriter::finish).transpose()).await?;
    written.ok_or_else(|| {
        PipelineError::new(ErrorKind::Output, format!("{place}: no keys were written: a bug in this program"))
    })
}
