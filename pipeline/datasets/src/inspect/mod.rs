//! What a person sees of a data set: schema, statistics, and one sequence decoded with its noise blueprint.

mod row;
mod values;

pub use self::row::decode;

use serde::Serialize;
use stillhouse_operators::registry;
use stillhouse_schemas::manifest::{Manifest, Statistic, Statistics, Totals};

pub use stillhouse_operators::config::OperatorView;

use crate::dataset::Dataset;
use stillhouse_base::error::Result;

/// What to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InspectOptions {
    /// Row to decode, counted over the whole data set in the order of the manifest's shards; `None` for no row.
    pub row: Option<u64>,
    /// View whose groups are shown.
    pub view: usize,
    /// Draw whose noise is shown.
    pub draw: u32,
    /// Positions whose blueprint is shown; empty for a few with and without corrections.
    pub positions: Vec<usize>,
    /// Entries of each blueprint.
    pub top: usize,
    /// Columns whose values in the row are given instead of the decoded row; only they are read.
    pub columns: Vec<String>,
}

impl Default for InspectOptions {
    fn default() -> Self {
        Self { row: Some(0), view: 0, draw: 0, positions: Vec::new(), top: 5, columns: Vec::new() }
    }
}

/// A data set, looked at.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// Name of the job.
    pub name: String,
    /// Hash of the job.
    pub job_hash: String,
    /// Tokenizer: source and size.
    pub tokenizer: String,
    /// Teacher: source, architecture, arithmetic; where there is one.
    pub teacher: Option<String>,
    /// V.
    pub vocab_size: u64,
    /// L.
    pub length: u32,
    /// Sums by data set split.
    pub totals: std::collections::BTreeMap<String, Totals>,
    /// Statistics over the data set.
    pub statistics: Statistics,
    /// The statistics of operators, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operator_statistics: Vec<StatisticView>,
    /// Perplexity under the teacher.
    pub perplexity: Option<f64>,
    /// Mean corrections per predicted token and draw.
    pub corrections_mean: Option<f64>,
    /// The columns with their share of the bytes.
    pub columns: Vec<ColumnSummary>,
    /// The decoded row.
    pub row: Option<RowView>,
    /// Values of the row in the columns that were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<ColumnValues>,
}

/// A statistic of an operator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatisticView {
    /// Its key in the manifest.
    pub name: String,
    /// What it counts, with its unit; its key where this program does not know it.
    pub meaning: String,
    /// The sum, or the largest value.
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
    /// Row in the shard.
    pub row: u64,
    /// As JSON: a number, or a list of numbers or truth values.
    pub values: serde_json::Value,
}

/// A column with what it costs.
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

/// One sequence, decoded.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowView {
    /// Shard that holds it.
    pub shard: String,
    /// Row in the shard.
    pub row: u64,
    /// Key of its randomness.
    pub sequence_id: u64,
    /// Where documents begin, and which.
    pub documents: Vec<DocumentView>,
    /// t of the shown view.
    pub partition_t: Option<f32>,
    /// The tokens, padding included.
    pub tokens: Vec<TokenView>,
    /// Base of the sub-tokens.
    pub subtoken_base: Option<u32>,
    /// Noise blueprints of some positions.
    pub blueprints: Vec<Blueprint>,
    /// What other operators show of the row.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<OperatorView>,
    /// Of an image: its shape, in which the ids are its pixels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub picture: Option<Shape>,
    /// Whether tokens are numbers, which are no text when put together.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub numbers: bool,
}

/// Shape of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// Rows of pixels.
    pub height: usize,
    /// Pixels of a row.
    pub width: usize,
    /// Numbers of a pixel: 1 or 3.
    pub channels: usize,
}

/// A document of a row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DocumentView {
    /// Position of its first token in the row.
    pub offset: usize,
    /// Its id.
    pub document_id: u64,
    /// Ordinal of its record in its split.
    pub record: u32,
    /// File that its split begins with.
    pub file: String,
}

/// A token of a row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenView {
    /// Id.
    pub id: u32,
    /// As text.
    pub text: String,
    /// False on padding.
    pub valid: bool,
    /// Group in the shown view (true = group 1).
    pub group: Option<bool>,
    /// ln p under the teacher.
    pub logprob: Option<f32>,
    /// Corrections in the shown draw.
    pub corrections: Option<u32>,
    /// Base-b digits.
    pub subtokens: Vec<u32>,
}

/// What a student sees of the noise at one position: the top entries of softmax(ξ).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Blueprint {
    /// Position in the row.
    pub position: usize,
    /// The observed token.
    pub token: u32,
    /// As text.
    pub text: String,
    /// ln p under the teacher.
    pub logprob: f32,
    /// Its ξ.
    pub xi: f32,
    /// Its weight in softmax(ξ).
    pub weight: f64,
    /// Where it stands in softmax(ξ), from 1.
    pub rank: usize,
    /// The top entries.
    pub top: Vec<BlueprintEntry>,
}

/// An entry of a blueprint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlueprintEntry {
    /// Token.
    pub id: u32,
    /// As text.
    pub text: String,
    /// Weight in softmax(ξ).
    pub weight: f64,
    /// ξ.
    pub xi: f32,
}

/// Looks at a data set. Reads the manifest, and of one shard the row group that holds the asked row.
///
/// # Errors
/// When the data set is damaged or the row, view, draw or a position is not there.
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
