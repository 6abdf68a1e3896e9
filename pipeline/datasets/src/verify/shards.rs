//! Checks that need no teacher: folder, checksums, schemas, rows.

use std::collections::BTreeMap;

use futures::TryStreamExt;
use sha2::{Digest, Sha256};
use stillhouse_base::error::{PipelineError, Result};
use stillhouse_base::events::{Event, Observer};
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::registry;
use stillhouse_operators::subtokens::SubtokensConfig;
use stillhouse_output::{CARD, MANIFEST, TOKENIZER};
use stillhouse_schemas::manifest::ColumnRecord;
use stillhouse_schemas::manifest::{Manifest, ShardRecord, Statistics, Totals};

use super::Verification;
use crate::card::{self, CardFault};
use crate::dataset::{Dataset, Selection};

/// Rows per batch.
const BATCH_ROWS: usize = 64;

/// Checks that required files exist and are intact, and that there are no unknown shards.
pub(super) async fn check_folder(dataset: &Dataset, found: &mut Verification) -> Result<()> {
    let manifest = dataset.manifest();
    let listed = if dataset.output().is_listed() { dataset.output().list("data").await? } else { BTreeMap::new() };
    for name in listed.into_keys() {
        if !manifest.shards.iter().any(|s| s.path == name) {
            found.fault(name, "is not in the manifest");
        }
    }
    if dataset.output().finished_manifest().await?.is_none() {
        found.damaged(
            dataset.output(),
            MANIFEST,
            "is not the one with which the data set was finished: _SUCCESS has another sha256",
        );
    }
    let beside = manifest.sidecar_files.iter().map(|(name, sha256)| (name.as_str(), sha256));
    for (name, sha256) in std::iter::once((TOKENIZER, &manifest.tokenizer.sha256)).chain(beside) {
        match dataset.output().size(name).await? {
            None => found.damaged(dataset.output(), name, "is missing"),
            Some(_) => {
                let digest = checksum(dataset, name).await?;
                if digest != *sha256 {
                    found.damaged(dataset.output(), name, format!("sha256 {digest}, the manifest has {sha256}"));
                }
            }
        }
    }
    match card::fault(&dataset.output().get(CARD).await?.unwrap_or_default()) {
        Some(CardFault::Damaged(message)) => found.damaged(dataset.output(), CARD, message),
        // a repair does not overwrite edits
        Some(CardFault::Changed(message)) => found.fault(CARD, message),
        None => {}
    }
    Ok(())
}

/// sha256 of a file, read in chunks.
async fn checksum(dataset: &Dataset, name: &str) -> Result<String> {
    Ok(dataset.output().read_whole(name, |_| {}).await?.0)
}

/// Checks the size, checksum, schema and every row of a shard.
pub(super) async fn check_shard(
    dataset: &Dataset,
    shard: &ShardRecord,
    found: &mut Verification,
    observer: &dyn Observer,
) -> Result<()> {
    observer.event(&Event::Preparing { what: format!("verifying {}", shard.path) });
    found.shards += 1;
    match dataset.output().size(&shard.path).await? {
        None => {
            found.damaged(dataset.output(), &shard.path, "is missing");
            return Ok(());
        }
        Some(bytes) if bytes != shard.bytes => {
            let message = format!("has {bytes} bytes, the manifest has {}", shard.bytes);
            found.damaged(dataset.output(), &shard.path, message);
            return Ok(());
        }
        Some(bytes) => found.bytes += bytes,
    }
    let digest = checksum(dataset, &shard.path).await?;
    if digest != shard.sha256 {
        let message = format!("sha256 {digest}, the manifest has {}", shard.sha256);
        found.damaged(dataset.output(), &shard.path, message);
        return Ok(());
    }
    if let Err(e) = check_rows(dataset, shard, found).await {
        found.fault(&shard.path, e.to_string());
    }
    Ok(())
}

async fn check_rows(dataset: &Dataset, shard: &ShardRecord, found: &mut Verification) -> Result<()> {
    let manifest = dataset.manifest();
    let selection = Selection { batch_rows: BATCH_ROWS, ..Selection::default() };
    let mut batches = dataset.read(shard, &selection).await?;
    let columns = ColumnRecord::of_schema(batches.schema());
    if columns != manifest.columns {
        found.fault(&shard.path, "its schema is not the manifest's");
    }
    let specials = &manifest.tokenizer.special_tokens;
    let place = manifest.splits.iter().find(|split| split.split == shard.split).and_then(|split| split.place);
    let row_checks = registry::row_checks(&manifest.job, manifest.vocab_size as usize, specials, (shard.split, place));
    let mut rows = 0;
    let mut tokens = 0;
    while let Some(batch) = batches.try_next().await.map_err(PipelineError::dataset(dataset.shown(&shard.path)))? {
        let context = || dataset.shown(&shard.path);
        for violation in row_checks.check(&batch).map_err(PipelineError::dataset(context()))? {
            found.fault(format!("{} row {}", shard.path, rows + violation.row as u64), violation.message);
        }
        rows += batch.num_rows() as u64;
        tokens += stillhouse_operators::extract::sequences(&batch)
            .map_err(PipelineError::dataset(context()))?
            .iter()
            .map(|s| s.valid as u64)
            .sum::<u64>();
    }
    if (rows, tokens) != (shard.rows, shard.tokens) {
        found.fault(
            &shard.path,
            format!("{rows} rows and {tokens} tokens, the manifest has {} and {}", shard.rows, shard.tokens),
        );
    }
    found.rows += rows;
    found.tokens += tokens;
    Ok(())
}

fn shown(value: Option<&impl ToString>) -> String {
    value.map_or_else(|| "nothing".into(), ToString::to_string)
}

/// Checks that duplicate values in the manifest agree and that its totals are the sums over its shards.
pub(super) fn check_manifest(manifest: &Manifest, found: &mut Verification) {
    let job = &manifest.job;
    let seed = job.has_noise().then(|| job.noise_seed());
    if manifest.noise_seed != seed {
        found.fault(
            "manifest.json",
            format!("noise_seed is {}, the job's is {}", shown(manifest.noise_seed.as_ref()), shown(seed.as_ref())),
        );
    }
    let (made_by, problems) = registry::operators_from_manifest(manifest);
    let known = problems.is_empty();
    for problem in problems {
        found.fault("manifest.json", problem.to_string());
    }
    let expected = made_by.iter().find_map(|o| o.config::<SubtokensConfig>()).map(|s| (s.base, s.length));
    let stored = manifest.subtokens.map(|s| (s.base, s.length as usize));
    if known && stored != expected {
        let pair =
            |s: Option<(u32, usize)>| s.map_or("nothing".into(), |(base, length)| format!("{length} in base {base}"));
        found.fault("manifest.json", format!("subtokens are {}, the job's are {}", pair(stored), pair(expected)));
    }
    let expected = made_by.iter().flat_map(OperatorSpec::sidecar_files);
    let expected: BTreeMap<_, _> =
        expected.map(|(name, bytes)| (name.to_owned(), hex::encode(Sha256::digest(&bytes)))).collect();
    if known && manifest.sidecar_files != expected {
        found.fault("manifest.json", format!("beside is {:?}, the job's is {expected:?}", manifest.sidecar_files));
    }
    if manifest.teacher.is_none() && manifest.vocab_size != manifest.tokenizer.vocab_size {
        let (vocab, tokens) = (manifest.vocab_size, manifest.tokenizer.vocab_size);
        found.fault("manifest.json", format!("vocab_size {vocab}, the tokenizer has {tokens}"));
    }
    let mut statistics = Statistics::default();
    for shard in &manifest.shards {
        statistics.add(&shard.statistics);
    }
    if statistics != manifest.statistics {
        found.fault("manifest.json", "statistics are not the sums over the shards");
    }
    for (split, totals) in &manifest.totals {
        let mut sum = Totals::default();
        for shard in manifest.shards.iter().filter(|s| s.dataset_split == *split) {
            sum.shards += 1;
            sum.rows += shard.rows;
            sum.tokens += shard.tokens;
            sum.bytes += shard.bytes;
        }
        if sum != *totals {
            found.fault("manifest.json", format!("totals of {split} are not the sums over its shards"));
        }
    }
}
