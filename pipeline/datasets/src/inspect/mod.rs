//! What `inspect` shows of a data set: schema, statistics, and one decoded row with its noise blueprint.

mod document;
mod dropped;
mod row;
mod values;

pub use self::document::{DocumentPart, DocumentTrace, MAX_TEXT_BYTES, trace_document};
pub use self::dropped::{DroppedReason, dropped};
pub use self::row::decode;

use serde::Serialize;
use stillhouse_operators::registry;
use stillhouse_schemas::manifest::{Manifest, Statistic, Statistics, Totals};

pub use stillhouse_operators::config::OperatorView;

use crate::dataset::Dataset;
use stillhouse_base::error::Result;

/// Options of [`inspect`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InspectOptions {
    /// Row to decode, counted over all shards in the manifest's order; `None` decodes no row.
    pub row: Option<u64>,
    /// Index of the view whose groups are shown.
    pub view: usize,
    /// Index of the draw whose noise is shown.
    pub draw: u32,
    /// Positions whose blueprint is shown. If empty, a few positions with and without corrections.
    pub positions: Vec<usize>,
    /// Entries per blueprint.
    pub top: usize,
    /// Columns whose raw values are returned instead of the decoded row. Only these columns are read.
    pub columns: Vec<String>,
}

impl Default for InspectOptions {
    fn default() -> Self {
        Self { row: Some(0), view: 0, draw: 0, positions: Vec::new(), top: 5, columns: Vec::new() }
    }
}

/// What `inspect` found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// Name of the job.
    pub name: String,
    /// Hash of the job.
    pub job_hash: String,
    /// Source and size of the tokenizer.
    pub tokenizer: String,
    /// Source, architecture and arithmetic of the teacher, if there is one.
    pub teacher: Option<String>,
    /// V, the vocabulary size.
    pub vocab_size: u64,
    /// L, the row length in tokens.
    pub length: u32,
    /// Totals of each data set split.
    pub totals: std::collections::BTreeMap<String, Totals>,
    /// Statistics of the whole data set.
    pub statistics: Statistics,
    /// Statistics of the operators, with descriptions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operator_statistics: Vec<StatisticView>,
    /// Perplexity under the teacher.
    pub perplexity: Option<f64>,
    /// Mean corrections per predicted token and draw.
    pub corrections_mean: Option<f64>,
    /// Columns with their sizes.
    pub columns: Vec<ColumnSummary>,
    /// The decoded row.
    pub row: Option<RowView>,
    /// Values of the requested columns in the row.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<ColumnValues>,
}

/// A statistic that an operator declares.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatisticView {
    /// Key in the manifest.
    pub name: String,
    /// What it counts, with its unit; the key if this program does not know it.
    pub meaning: String,
    /// The sum or the maximum.
    #[serde(flatten)]
    pub value: Statistic,
}

/// The values of one row in one column.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColumnValues {
    /// Name of the column.
    pub name: String,
    /// Shard that holds the row.
    pub shard: String,
    /// Index of the row in the shard.
    pub row: u64,
    /// JSON value: a number, or a list of numbers or booleans.
    pub values: serde_json::Value,
}

/// A column and its size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ColumnSummary {
    /// Name.
    pub name: String,
    /// Arrow type.
    pub data_type: String,
    /// Shape per row.
    pub shape: Option<String>,
    /// Compressed bytes over all shards.
    pub bytes: u64,
    /// Compressed bytes per token.
    pub bytes_per_token: f64,
}

/// One decoded row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowView {
    /// Shard that holds the row.
    pub shard: String,
    /// Index of the row in the shard.
    pub row: u64,
    /// Id of the sequence, the key of its random numbers.
    pub sequence_id: u64,
    /// Documents of the row, with the offset of each.
    pub documents: Vec<DocumentView>,
    /// t of the shown view, by which its groups were drawn.
    pub partition_t: Option<f32>,
    /// Tokens, including padding.
    pub tokens: Vec<TokenView>,
    /// Base b of the sub-tokens.
    pub subtoken_base: Option<u32>,
    /// Noise blueprints of the chosen positions.
    pub blueprints: Vec<Blueprint>,
    /// What other operators show for the row.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<OperatorView>,
    /// Shape of the image whose pixels the ids are; `None` for text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub picture: Option<Shape>,
    /// Whether the tokens are numbers, so that joining them gives no text.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub numbers: bool,
}

/// Shape of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// Height in pixels.
    pub height: usize,
    /// Width in pixels.
    pub width: usize,
    /// Numbers per pixel: 1 or 3.
    pub channels: usize,
}

/// A document in a row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DocumentView {
    /// Position of the document's first token in the row.
    pub offset: usize,
    /// Id of the document.
    pub document_id: u64,
    /// Index of the document's record in its split.
    pub record: u32,
    /// First file of the document's split.
    pub file: String,
}

/// A token in a row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenView {
    /// Token id.
    pub id: u32,
    /// Text of the token.
    pub text: String,
    /// False for padding.
    pub valid: bool,
    /// Group in the shown view; `true` means group 1.
    pub group: Option<bool>,
    /// ln p under the teacher.
    pub logprob: Option<f32>,
    /// Number of corrections in the shown draw.
    pub corrections: Option<u32>,
    /// Base-b digits of the token id.
    pub subtokens: Vec<u32>,
}

/// What a student sees of the noise at one position: the largest entries of softmax(ξ).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Blueprint {
    /// Position in the row.
    pub position: usize,
    /// The observed token.
    pub token: u32,
    /// Text of the observed token.
    pub text: String,
    /// ln p of the observed token under the teacher.
    pub logprob: f32,
    /// ξ of the observed token.
    pub xi: f32,
    /// Weight of the observed token in softmax(ξ).
    pub weight: f64,
    /// Rank of the observed token in softmax(ξ), from 1.
    pub rank: usize,
    /// The largest entries.
    pub top: Vec<BlueprintEntry>,
}

/// An entry of a blueprint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlueprintEntry {
    /// Token id.
    pub id: u32,
    /// Text of the token.
    pub text: String,
    /// Weight in softmax(ξ).
    pub weight: f64,
    /// ξ.
    pub xi: f32,
}

/// Inspects a data set. Cost: reads the manifest and, in one shard, the row group of the requested row.
///
/// # Errors
/// If the data set is damaged, or the row, view, draw or a position does not exist.
pub async fn inspect(dataset: &Dataset, options: &InspectOptions) -> Result<Inspection> {
    let manifest = dataset.manifest();
    let tokens: u64 = manifest.totals.values().map(|t| t.tokens).sum();
    let row = match options.row {
        Some(row) if options.columns.is_empty() => row::decode_row(dataset, row, options).await?,
        _ => None,
    };
    let values = match options.row {
        Some(row) if !options.columns.is_empty() => values::of_row(dataset, row, &options.columns).await?,
        _ => Vec::new(),
    };
    let draws = manifest.job.extract.as_ref().and_then(|e| e.noise.as_ref()).map_or(1, |n| n.draws);
    let statistics = manifest.statistics.clone();
    let drawn = statistics.predicted_tokens * u64::from(draws);
    Ok(Inspection {
        name: manifest.job.name.clone(),
        job_hash: manifest.job_hash.clone(),
        tokenizer: format!("{} ({} tokens)", manifest.tokenizer.source, manifest.tokenizer.vocab_size),
        teacher: manifest.teacher.as_ref().map(|t| {
            format!(
                "{} ({}, {:.1}M parameters, {}, {}){}",
                t.source,
                t.architecture,
                t.parameters as f64 / 1e6,
                t.arithmetic,
                t.device,
                t.cost.map(|cost| format!("; {cost}")).unwrap_or_default()
            )
        }),
        vocab_size: manifest.vocab_size,
        length: manifest.job.pack.length,
        totals: manifest.totals.clone(),
        perplexity: statistics.perplexity(),
        corrections_mean: (manifest.noise_seed.is_some() && drawn > 0 && !statistics.corrections_histogram.is_empty())
            .then(|| statistics.corrections as f64 / drawn as f64),
        operator_statistics: operator_statistics(&statistics),
        statistics,
        columns: columns(manifest, tokens),
        row,
        values,
    })
}

fn operator_statistics(statistics: &Statistics) -> Vec<StatisticView> {
    let view = |(name, value): (&String, &Statistic)| StatisticView {
        name: name.clone(),
        meaning: registry::statistic(name).map_or(name.as_str(), |kind| kind.meaning).to_owned(),
        value: *value,
    };
    statistics.operators.iter().map(view).collect()
}

fn columns(manifest: &Manifest, tokens: u64) -> Vec<ColumnSummary> {
    manifest
        .columns
        .iter()
        .map(|column| {
            let bytes = manifest.shards.iter().filter_map(|s| s.column_bytes.get(&column.name)).sum::<u64>();
            ColumnSummary {
                name: column.name.clone(),
                data_type: column.data_type.clone(),
                shape: column.shape.clone(),
                bytes,
                bytes_per_token: bytes as f64 / tokens.max(1) as f64,
            }
        })
        .collect()
}
