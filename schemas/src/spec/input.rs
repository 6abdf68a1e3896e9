//! `input`: the files, the format of their records, and the documents held out.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::images::{Codes, ImageLabels, Images};
use super::{PIXEL_VALUES, Remainder};
use crate::storage::Storage;

/// The input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// File format of `paths`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<InputFormat>,
    /// With `format: none`: number of documents, which have no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4_294_967_295_u64))]
    pub documents: Option<u64>,
    /// Paths, relative to the job file's folder, or s3://, gs://, az://, http(s)://, hf://datasets/ URLs; globs: `*`, `?`, `[..]`, `**`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub paths: Vec<String>,
    /// Files under names. Without `sql`, in place of `paths`: the sources of a mixture. With `sql`: more tables of the query.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(length(max = 64))]
    pub tables: BTreeMap<String, Table>,
    /// How much of each table is in the mixture, where the tables do not say all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mixture: Option<Mixture>,
    /// Column (or JSON key) of the text. `meta.text` is the key `text` of the object `meta`, unless a column has the whole name.
    #[serde(default = "default_text")]
    pub text: String,
    /// For conversations (`chat`), in place of `text`: column (or JSON key) of the messages, a list of objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages: Option<String>,
    /// With `messages`: column (or JSON key) of the tools that a conversation may call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<String>,
    /// Columns (or JSON keys) of the records that stay with their documents, in the column `document_fields`. Names as in `text`; `_file` is
    /// the name of the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub carry: Vec<String>,
    /// Compression of the files; `auto` decides by the ending (.gz, .zst). Parquet and Arrow files are compressed inside.
    #[serde(default)]
    pub compression: Compression,
    /// For `format: text`: the unit that is a document.
    #[serde(default)]
    pub document: TextDocument,
    /// For `format: csv`: the delimiter, one ASCII character.
    #[serde(default = "default_delimiter")]
    #[schemars(regex(pattern = r"^[\x01-\x7f]$"))]
    pub csv_delimiter: String,
    /// With `sql`, for `format: jsonl` and `csv`: types of columns, by name. The first 1000 records decide the types of the others, without loss.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(length(max = 1024))]
    pub schema: BTreeMap<String, ColumnType>,
    /// For `format: images`: the layout of the files, and how an image becomes a row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<Images>,
    /// For `format: codes`: the number of codes, and where they are in the files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codes: Option<Codes>,
    /// A DataFusion query over the tables: `input` (the files of `paths`) and those of `tables`. Its column named by `text` is the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sql: Option<String>,
    /// What happens at a bad record (invalid UTF-8, invalid JSON, missing column, null text).
    #[serde(default)]
    pub on_error: OnError,
    /// Largest share of the records of the whole input that `on_error: skip` may skip (0.01 is 1 %). A job that skips
    /// more fails. It keeps its prepared splits, so that a run with a larger share resumes.
    #[serde(default = "default_max_skipped")]
    #[schemars(range(min = 0.0, max = 1.0))]
    #[schemars(extend("x-identity" = false))]
    pub max_skipped: f64,
    /// Documents held out of `train`, by data set split: `validation: {share: 0.01}`. No document is in two data set splits.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub holdout: BTreeMap<String, Holdout>,
    /// Size of a split in megabytes (10^6 bytes) of uncompressed input text. A split becomes one shard, so this decides the size of
    /// shards in place of `output.shard_megabytes`. Default: an estimate of the text that fills a shard of that size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.001, max = 1e6))]
    pub split_megabytes: Option<f64>,
    /// Longest piece of a document in memory at once, in kilobytes (10^3 bytes).
    #[serde(default = "default_piece")]
    #[schemars(range(min = 4, max = 65_536))]
    pub piece_kilobytes: u32,
    /// Options of the input's stores, where they differ from `storage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-identity" = false))]
    pub storage: Option<Storage>,
}

/// Files that are one source of a mixture, or one table of `input.sql`.
///
/// In a mixture, either all tables have a `weight`, or none has. Without `weight`, `tokens` and `epochs`, a table is read once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// File format.
    pub format: InputFormat,
    /// As `input.paths`.
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub paths: Vec<String>,
    /// In a mixture: its part of the tokens, in relation to the weights of the other tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1e-9, max = 1e9))]
    pub weight: Option<f64>,
    /// In a mixture: number of its tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub tokens: Option<u64>,
    /// In a mixture: how often it is read. 0.5 is half of its tokens, 2 is every document twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1e-9, max = 1000))]
    pub epochs: Option<f64>,
    /// The column that is read as text, whatever its values look like; the only column of `format: text`.
    #[serde(default = "default_text")]
    pub text: String,
    /// As `input.document`.
    #[serde(default, skip_serializing_if = "is_line")]
    pub document: TextDocument,
    /// As `input.compression`.
    #[serde(default)]
    pub compression: Compression,
    /// As `input.csv_delimiter`.
    #[serde(default = "default_delimiter")]
    #[schemars(regex(pattern = r"^[\x01-\x7f]$"))]
    pub csv_delimiter: String,
    /// As `input.schema`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(length(max = 1024))]
    pub schema: BTreeMap<String, ColumnType>,
}

/// Amounts of the tables of a mixture. All are counted in tokens of the job's tokenizer, in documents that `filter` and
/// the other rules keep, before `deduplicate`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Mixture {
    /// With weights: tokens of all tables together. A table that has less is read several times. Default: the most for which none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub tokens: Option<u64>,
    /// Consecutive parts of the data set with weights of their own, in place of those of the tables (a curriculum).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    pub stages: Vec<MixtureStage>,
}

/// A part of the data set with its own weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MixtureStage {
    /// Part of the tokens of the mixture, in relation to the other stages.
    #[schemars(range(min = 1e-9, max = 1e9))]
    pub share: f64,
    /// Weights of tables, by name. A table without one is not in this stage.
    #[schemars(length(min = 1))]
    pub weights: BTreeMap<String, f64>,
}

/// The type of a column of a table. A value of another type makes a bad record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ColumnType {
    /// Text exactly as in the file: `007` stays `007`.
    String,
    /// `true` or `false`.
    Boolean,
    /// Whole numbers from -2^63 to 2^63-1.
    Int64,
    /// Whole numbers from 0 to 2^64-1.
    Uint64,
    /// Numbers as 64-bit floats.
    Float64,
    /// Dates: `2024-12-31`.
    Date,
    /// Times: `2024-12-31T23:59:59`.
    Timestamp,
}

/// Input formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InputFormat {
    /// One JSON object per line.
    Jsonl,
    /// Plain text; see `document`.
    Text,
    /// Comma-separated values with a header line (RFC 4180).
    Csv,
    /// WARC files of text, such as the WET files of Common Crawl.
    Warc,
    /// Apache Parquet.
    Parquet,
    /// Arrow IPC files.
    Arrow,
    /// Images, see `input.images`.
    Images,
    /// Rows of whole numbers, such as the codes of a VQGAN, see `input.codes`.
    Codes,
    /// No files: `documents` documents without text, for a teacher that writes the text (`extract.mode: sequential`).
    None,
}

impl InputFormat {
    /// All of them, in the order of the job file's documentation.
    pub const ALL: [Self; 9] = [
        Self::Jsonl,
        Self::Text,
        Self::Csv,
        Self::Warc,
        Self::Parquet,
        Self::Arrow,
        Self::Images,
        Self::Codes,
        Self::None,
    ];

    /// The formats whose files can be a table of `input.sql`.
    pub fn tables() -> impl Iterator<Item = Self> + Clone {
        Self::ALL.into_iter().filter(|format| format.is_table())
    }

    /// The word in the job file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Jsonl => "jsonl",
            Self::Text => "text",
            Self::Csv => "csv",
            Self::Warc => "warc",
            Self::Parquet => "parquet",
            Self::Arrow => "arrow",
            Self::Images => "images",
            Self::Codes => "codes",
            Self::None => "none",
        }
    }

    /// Whether files of this format compress inside, so that none is compressed as a whole.
    pub fn compresses_inside(self) -> bool {
        match self {
            Self::Parquet | Self::Arrow | Self::Codes => true,
            Self::Jsonl | Self::Text | Self::Csv | Self::Warc | Self::Images | Self::None => false,
        }
    }

    /// Whether its files can be a table of `input.sql`.
    pub fn is_table(self) -> bool {
        match self {
            Self::Jsonl | Self::Text | Self::Csv | Self::Warc | Self::Parquet | Self::Arrow => true,
            Self::Images | Self::Codes | Self::None => false,
        }
    }

    /// Whether a query has to find out the types of its columns, which `schema` may name.
    pub fn has_untyped_columns(self) -> bool {
        match self {
            Self::Jsonl | Self::Csv => true,
            Self::Text | Self::Warc | Self::Parquet | Self::Arrow | Self::Images | Self::Codes | Self::None => false,
        }
    }

    /// Whether a record is already a row of numbers.
    pub fn is_numbers(self) -> bool {
        match self {
            Self::Images | Self::Codes => true,
            Self::Jsonl | Self::Text | Self::Csv | Self::Warc | Self::Parquet | Self::Arrow | Self::None => false,
        }
    }
}

/// Compression of whole files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// By the ending of the file name.
    #[default]
    Auto,
    /// Not compressed.
    None,
    /// gzip, with one or more members.
    Gzip,
    /// Zstandard, with one or more frames.
    Zstd,
}

/// The unit of a text file that is a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TextDocument {
    /// Every line.
    #[default]
    Line,
    /// Every file.
    File,
    /// Every block of lines between blank lines.
    BlankLine,
}

/// What happens at a bad record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The job fails. The error names the file and the line.
    #[default]
    Fail,
    /// The record is skipped and counted; the manifest has the counts by reason.
    Skip,
}

/// Documents held out of `train` before packing, by exactly one of `last_documents`, `share`, `documents`.
///
/// `last_documents` is applied first, then `share`, then `documents`. For `share` and `documents`, copies of a text are in the same data set split.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Holdout {
    /// Number of records at the end of the input, in the order of the files. Of several such entries, the last by name has the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4_294_967_295_u64))]
    pub last_documents: Option<u64>,
    /// Share of all documents, by a hash of `seed` and text. A document keeps its data set split when others are added or moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1e-9, max = 0.999_999))]
    pub share: Option<f64>,
    /// Number of different documents: those with the smallest hash of `seed` and text. Needs one more pass over the input when planning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000_000))]
    pub documents: Option<u64>,
    /// What happens to the last tokens that do not fill a sequence; default: as `pack.remainder`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remainder: Option<Remainder>,
}

fn default_text() -> String {
    "text".into()
}
fn is_line(document: &TextDocument) -> bool {
    *document == TextDocument::Line
}
fn default_delimiter() -> String {
    ",".into()
}
fn default_max_skipped() -> f64 {
    0.01
}
fn default_piece() -> u32 {
    1000
}

/// Name of the table that consists of the files in `input.paths`.
pub const INPUT_TABLE: &str = "input";

/// Name in `input.carry`, and of a column of every table, of the file of a record.
pub const FILE_COLUMN: &str = "_file";

/// The first name in `input.carry` of a mixture: the table of a document. The program puts it there.
pub const SOURCE_COLUMN: &str = "source";

impl Input {
    /// Whether documents of several tables are mixed.
    pub fn is_mixture(&self) -> bool {
        self.sql.is_none() && !self.tables.is_empty()
    }

    /// Whether splits read rows that a run makes from the files, and stages: those of a query or of a mixture.
    pub fn is_staged(&self) -> bool {
        self.sql.is_some() || self.is_mixture()
    }

    /// What makes the staged rows, for messages; `None` if splits read the files.
    pub fn staged_by(&self) -> Option<&'static str> {
        match (&self.sql, self.is_mixture()) {
            (Some(_), _) => Some("input.sql"),
            (None, true) => Some("the mixture"),
            (None, false) => None,
        }
    }

    /// Returns the names in `carry` that are columns of the files. Staged rows have a column for every name.
    pub fn carried_columns(&self) -> impl Iterator<Item = &str> {
        self.carry.iter().map(String::as_str).filter(|name| self.is_staged() || *name != FILE_COLUMN)
    }

    /// Format of `paths`.
    pub fn format(&self) -> InputFormat {
        self.format.unwrap_or(InputFormat::Jsonl)
    }

    /// Whether a record is already a row of numbers, so that there is no text, no tokenizer and nothing to pack.
    pub fn is_rows(&self) -> bool {
        self.format().is_numbers()
    }

    /// Number of values that a number of a row can take, C; `None` for text.
    pub fn row_values(&self) -> Option<usize> {
        match self.format() {
            InputFormat::Images => Some(PIXEL_VALUES as usize),
            InputFormat::Codes => self.codes.as_ref().map(|codes| codes.size as usize),
            _ => None,
        }
    }

    /// Numbers per row, L; `None` for text.
    pub fn row_length(&self) -> Option<u64> {
        match self.format() {
            InputFormat::Images => self.images.as_ref().map(Images::length),
            InputFormat::Codes => self.codes.as_ref().map(|codes| codes.length.into()),
            _ => None,
        }
    }

    /// Whether rows have labels.
    pub fn has_labels(&self) -> bool {
        match self.format() {
            InputFormat::Images => self.images.as_ref().is_some_and(|images| images.labels() != ImageLabels::None),
            InputFormat::Codes => self.codes.as_ref().is_some_and(|codes| codes.labels.is_some()),
            _ => false,
        }
    }

    /// Returns one input per table, with its name and its field in the job file; that of `paths` comes first.
    pub fn sources(&self) -> Vec<Source> {
        let own = Source { name: INPUT_TABLE.into(), field: "input".into(), input: self.clone() };
        let tables = self.tables.iter().map(|(name, table)| Source {
            name: name.clone(),
            field: format!("input.tables.{name}"),
            input: Self {
                format: Some(table.format),
                paths: table.paths.clone(),
                text: table.text.clone(),
                compression: table.compression,
                csv_delimiter: table.csv_delimiter.clone(),
                schema: table.schema.clone(),
                document: table.document,
                ..self.clone()
            },
        });
        let mut sources: Vec<Source> = (!self.paths.is_empty()).then_some(own).into_iter().chain(tables).collect();
        for source in &mut sources {
            source.input.tables.clear();
        }
        sources
    }

    /// Returns all input paths, with their fields in the job file.
    pub fn all_paths(&self) -> impl Iterator<Item = (String, &String)> {
        let of =
            |field: String, paths: &[String]| (0..paths.len()).map(move |i| format!("{field}.paths[{i}]")).collect();
        let own: Vec<String> = of("input".into(), &self.paths);
        let tables = self.tables.iter().flat_map(move |(name, table)| {
            let fields: Vec<String> = of(format!("input.tables.{name}"), &table.paths);
            fields.into_iter().zip(&table.paths)
        });
        own.into_iter().zip(&self.paths).chain(tables)
    }
}

/// Files that are read in the same way: those of `input.paths`, or of one table.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// Name of the table.
    pub name: String,
    /// Field of the job file, such as `input.tables.labels`.
    pub field: String,
    /// How the files are read.
    pub input: Input,
}
