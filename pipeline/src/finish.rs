//! The end of a job: manifest, data set card, tokenizer, `_SUCCESS`, in this order.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use arrow::datatypes::Schema;
use stillhouse_operators::operator::{OperatorSpec, documents_schema};
use stillhouse_schemas::columns::{FORMAT_VERSION, SHAPE};
use stillhouse_schemas::manifest::{
    ColumnRecord, Manifest, ShardRecord, SplitRecord, Statistics, SubtokenRecord, TeacherRecord, TokenizerRecord,
    Totals,
};
use stillhouse_teacher::TeacherInfo;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::job::Prepared;
use crate::output::{CARD, MANIFEST, Output, TOKENIZER};
use crate::plan::{self, JobHash};

/// Puts together the manifest.
///
/// # Errors
/// When a special token cannot be named.
pub fn manifest(
    prepared: &Prepared,
    hash: &JobHash,
    teacher: Option<&TeacherInfo>,
    splits: Vec<SplitRecord>,
    shards: Vec<ShardRecord>,
) -> Result<Manifest> {
    let mut statistics = Statistics::default();
    let mut totals: BTreeMap<String, Totals> = BTreeMap::new();
    for shard in &shards {
        statistics.add(&shard.statistics);
        let total = totals.entry(shard.dataset_split.clone()).or_default();
        total.shards += 1;
        total.rows += shard.rows;
        total.tokens += shard.tokens;
        total.bytes += shard.bytes;
    }
    let spec = &prepared.spec;
    let has_noise = spec.extract.as_ref().is_some_and(|e| e.noise.is_some());
    let subtokens = prepared.operators.iter().find_map(|o| match o {
        OperatorSpec::Subtokens(c) => Some(SubtokenRecord { base: c.base, length: c.length as u32 }),
        _ => None,
    });
    Ok(Manifest {
        format_version: FORMAT_VERSION,
        job: spec.clone(),
        job_hash: hash.hash.clone(),
        tokenizer: tokenizer_record(prepared, hash),
        teacher: teacher.zip(prepared.teacher.as_ref()).map(|(info, found)| TeacherRecord {
            source: found.source.clone(),
            architecture: info.architecture.name().to_owned(),
            parameters: info.parameters,
            arithmetic: info.arithmetic.clone(),
            device: info.device.clone(),
            files: hash.teacher.clone(),
            bos_token_id: found.bos,
        }),
        vocab_size: prepared.vocab_size as u64,
        noise_seed: has_noise.then(|| spec.noise_seed()),
        subtokens,
        columns: columns(&schema(&prepared.operators)),
        splits,
        shards,
        totals,
        statistics,
    })
}

fn tokenizer_record(prepared: &Prepared, hash: &JobHash) -> TokenizerRecord {
    let vocabulary = &prepared.vocabulary;
    TokenizerRecord {
        source: vocabulary.source().to_owned(),
        sha256: hash.tokenizer.clone(),
        vocab_size: vocabulary.vocab_size() as u64,
        special_tokens: vocabulary.special_tokens(),
    }
}

/// Schema of the shards that these operators give.
pub fn schema(operators: &[OperatorSpec]) -> Schema {
    let mut schema = documents_schema();
    for operator in operators {
        schema = operator.output_schema(&schema);
    }
    schema.as_ref().clone()
}

/// The columns of a schema, for the manifest.
pub fn columns(schema: &Schema) -> Vec<ColumnRecord> {
    schema
        .fields()
        .iter()
        .map(|field| ColumnRecord {
            name: field.name().clone(),
            data_type: type_name(field.data_type()),
            shape: field.metadata().get(SHAPE).cloned(),
        })
        .collect()
}

fn type_name(data_type: &arrow::datatypes::DataType) -> String {
    use arrow::datatypes::DataType as T;
    match data_type {
        T::FixedSizeList(item, n) => format!("fixed_size_list<{}>[{n}]", type_name(item.data_type())),
        T::List(item) => format!("list<{}>", type_name(item.data_type())),
        T::Boolean => "bool".into(),
        other => other.to_string().to_lowercase(),
    }
}

/// Writes what makes a folder of shards a data set; `_SUCCESS` last.
///
/// # Errors
/// When the store does not take it.
pub async fn write(prepared: &Prepared, output: &Output, manifest: &Manifest) -> Result<()> {
    output.put(TOKENIZER, plan::tokenizer_json(prepared)?).await?;
    output.put_json(MANIFEST, manifest).await?;
    output.put(CARD, card(manifest).into_bytes()).await?;
    output.finish().await
}

/// Writes again what stands beside the shards and the manifest of a finished data set, where it is not there as it should be.
///
/// # Errors
/// When the tokenizer of the job is not the data set's, or the store does not take it.
pub async fn write_beside(prepared: &Prepared, output: &Output, manifest: &Manifest) -> Result<()> {
    let put = async |name: &str, bytes: Vec<u8>| match output.get(name).await? {
        Some(there) if there == bytes => Ok(()),
        _ => output.put(name, bytes).await,
    };
    put(TOKENIZER, plan::tokenizer_json(prepared)?).await?;
    if output.size(CARD).await?.is_none_or(|bytes| bytes == 0) {
        output.put(CARD, card(manifest).into_bytes()).await?;
    }
    output.finish().await
}

/// Tells that the data set is there.
pub fn report(output: &Output, manifest: &Manifest, seconds: f64, already_done: bool, observer: &dyn Observer) {
    let sum = |f: fn(&Totals) -> u64| manifest.totals.values().map(f).sum();
    observer.event(&Event::JobFinished {
        output: output.to_string(),
        rows: sum(|t| t.rows),
        tokens: sum(|t| t.tokens),
        bytes: sum(|t| t.bytes),
        seconds,
        already_done,
    });
}

/// The manifest of a finished data set.
///
/// # Errors
/// When it cannot be read.
pub async fn manifest_of(output: &Output) -> Result<Manifest> {
    let gone = || PipelineError::new(ErrorKind::DataSet, format!("{output}: _SUCCESS without manifest.json"));
    output.get_json(MANIFEST).await?.ok_or_else(gone)
}

/// A Hugging Face data set card.
pub fn card(manifest: &Manifest) -> String {
    let mut text = String::from("---\nconfigs:\n- config_name: default\n  data_files:\n");
    for split in manifest.totals.keys() {
        let _ = writeln!(text, "  - split: {split}\n    path: data/{split}-*.parquet");
    }
    let tokens: u64 = manifest.totals.values().map(|t| t.tokens).sum();
    let rows: u64 = manifest.totals.values().map(|t| t.rows).sum();
    let bytes: u64 = manifest.totals.values().map(|t| t.bytes).sum();
    let _ = writeln!(
        text,
        "tags:\n- stillhouse\nsize_categories:\n- {}\n---\n\n# {}\n",
        size_category(rows),
        manifest.job.name
    );
    let _ = writeln!(
        text,
        "Training shards for parallel language models, made by Stillhouse: {rows} sequences of up to {} tokens, {tokens} tokens, {:.1} MB ({:.2} bytes per token).\n",
        manifest.job.pack.length,
        bytes as f64 / 1e6,
        bytes as f64 / tokens.max(1) as f64,
    );
    let t = &manifest.tokenizer;
    let _ = writeln!(text, "- tokenizer: `{}`, {} tokens", t.source, t.vocab_size);
    if let Some(teacher) = &manifest.teacher {
        let _ = writeln!(
            text,
            "- teacher: `{}`, {}, {} parameters, {}, on {}",
            teacher.source, teacher.architecture, teacher.parameters, teacher.arithmetic, teacher.device
        );
    }
    if let Some(perplexity) = manifest.statistics.perplexity() {
        let _ = writeln!(text, "- perplexity of the text under the teacher: {perplexity:.2}");
    }
    if let (Some(seed), Some(noise)) =
        (manifest.noise_seed, manifest.job.extract.as_ref().and_then(|e| e.noise.as_ref()))
    {
        let _ = writeln!(
            text,
            "- posterior Gumbel noise: codec {:?}, {} draw(s), seed {seed}, total variation at most {}",
            noise.codec, noise.draws, noise.tolerance
        );
    }
    if let Some(s) = manifest.subtokens {
        let _ = writeln!(text, "- sub-tokens: {} digits in base {}, most significant first", s.length, s.base);
    }
    let _ = writeln!(text, "\n| split | shards | sequences | tokens | MB |\n|---|---|---|---|---|");
    for (split, t) in &manifest.totals {
        let _ = writeln!(text, "| {split} | {} | {} | {} | {:.1} |", t.shards, t.rows, t.tokens, t.bytes as f64 / 1e6);
    }
    let _ = writeln!(text, "\n| column | type | shape |\n|---|---|---|");
    for c in &manifest.columns {
        let _ = writeln!(text, "| `{}` | {} | {} |", c.name, c.data_type, c.shape.as_deref().unwrap_or(""));
    }
    let _ = writeln!(
        text,
        "\n```python\nfrom datasets import load_dataset\nds = load_dataset(\"path/to/this/folder\")\n```"
    );
    text
}

fn size_category(rows: u64) -> &'static str {
    match rows {
        0..1_000 => "n<1K",
        1_000..10_000 => "1K<n<10K",
        10_000..100_000 => "10K<n<100K",
        100_000..1_000_000 => "100K<n<1M",
        1_000_000..10_000_000 => "1M<n<10M",
        _ => "n>10M",
    }
}
