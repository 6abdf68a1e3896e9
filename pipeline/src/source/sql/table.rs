//! The table `input`: the files in the job's order, in one partition.
//!
//! DataFusion's own listing table sorts files by path; this one keeps the order of the listing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use datafusion::arrow::array::{AsArray, LargeStringBuilder, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::config::CsvOptions;
use datafusion::datasource::TableType;
use datafusion::datasource::file_format::FileFormat;
use datafusion::datasource::file_format::arrow::ArrowFormat;
use datafusion::datasource::file_format::csv::CsvFormat;
use datafusion::datasource::file_format::file_compression_type::FileCompressionType;
use datafusion::datasource::file_format::json::JsonFormat;
use datafusion::datasource::file_format::parquet::ParquetFormat;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfigBuilder};
use datafusion::datasource::table_schema::TableSchemaBuilder;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::object_store::ObjectStoreUrl;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::prelude::SessionContext;
use object_store::{ObjectMeta, ObjectStoreExt};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Piece, Range, SplitRecord};
use stillhouse_schemas::spec::{Compression, Input, InputFormat};

use super::super::decode::compression;
use super::super::error::{SourceError, Stopped};
use super::super::ipc;
use super::super::list::InputFile;
use super::super::read::read_split;
use super::super::store::Store;
use super::{BATCH_ROWS, sql_error};

const STORE_URL: &str = "stillhouse://input";
const BATCH_BYTES: usize = 1 << 20;

/// Files that DataFusion parses itself.
#[derive(Debug)]
pub(super) struct FilesTable {
    format: Arc<dyn FileFormat>,
    compression: FileCompressionType,
    schema: SchemaRef,
    objects: Vec<ObjectMeta>,
}

fn one_compression(files: &[InputFile], input: &Input) -> std::result::Result<Compression, SourceError> {
    let mut all = files.iter().map(|f| (compression(f, input), f));
    let Some((first, one)) = all.next() else { return Ok(Compression::None) };
    match all.find(|(c, _)| *c != first) {
        None => Ok(first),
        Some((_, other)) => Err(SourceError::Sql {
            message: format!(
                "{} and {} are compressed in different ways; valid with a query: all files in one way",
                one.path, other.path
            ),
            retryable: false,
        }),
    }
}

fn file_format(input: &Input, compression: FileCompressionType) -> Arc<dyn FileFormat> {
    match input.format {
        InputFormat::Parquet => Arc::new(ParquetFormat::default()),
        InputFormat::Arrow => Arc::new(ArrowFormat),
        InputFormat::Csv => Arc::new(
            CsvFormat::default()
                .with_options(CsvOptions::default().with_double_quote(true))
                .with_has_header(true)
                .with_delimiter(input.csv_delimiter.bytes().next().unwrap_or(b','))
                .with_newlines_in_values(true)
                .with_file_compression_type(compression),
        ),
        _ => Arc::new(JsonFormat::default().with_file_compression_type(compression)),
    }
}

impl FilesTable {
    pub async fn open(
        context: &SessionContext,
        store: &Store,
        files: &[InputFile],
        input: &Input,
    ) -> std::result::Result<Self, SourceError> {
        let compression = match one_compression(files, input)? {
            Compression::Gzip => FileCompressionType::GZIP,
            Compression::Zstd => FileCompressionType::ZSTD,
            _ => FileCompressionType::UNCOMPRESSED,
        };
        if input.format == InputFormat::Arrow {
            same_arrow_format(store.clone(), files.to_vec()).await?;
        }
        let url = ObjectStoreUrl::parse(STORE_URL).map_err(sql_error)?;
        context.register_object_store(url.as_ref(), store.store.clone());
        let mut objects = Vec::new();
        for file in files {
            let meta = store.store.head(&file.location).await;
            let meta = meta.map_err(|e| SourceError::of_store(&file.path, e))?;
            // DataFusion takes a file without bytes for a broken one
            if meta.size > 0 {
                objects.push(meta);
            }
        }
        let format = file_format(input, compression);
        let schema = format.infer_schema(&context.state(), &store.store, &objects).await.map_err(sql_error)?;
        let schema = match input.format {
            InputFormat::Csv => text_is_string(&schema, &input.text),
            _ => schema,
        };
        Ok(Self { format, compression, schema, objects })
    }
}

/// Blocking reads of the first bytes; DataFusion chooses one reader for all files by the first.
async fn same_arrow_format(store: Store, files: Vec<InputFile>) -> std::result::Result<(), SourceError> {
    let check = move || {
        let mut first = None;
        for file in &files {
            let stream = ipc::is_stream(&store, file)?;
            if *first.get_or_insert(stream) != stream {
                return Err(SourceError::Sql {
                    message: format!(
                        "{} and {} differ in that one is an Arrow file and one an Arrow stream; valid with a query: all of one kind",
                        files[0].path, file.path
                    ),
                    retryable: false,
                });
            }
        }
        Ok(())
    };
    tokio::task::spawn_blocking(check)
        .await
        .unwrap_or_else(|e| Err(SourceError::Sql { message: e.to_string(), retryable: true }))
}

/// CSV types are guessed from the first records; the text is text even where it looks like numbers.
fn text_is_string(schema: &SchemaRef, text: &str) -> SchemaRef {
    let fields: Vec<_> = schema
        .fields()
        .iter()
        .map(|f| if f.name() == text { Arc::new(Field::new(text, DataType::Utf8, true)) } else { f.clone() })
        .collect();
    Arc::new(Schema::new(fields))
}

#[async_trait]
impl TableProvider for FilesTable {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        if self.objects.is_empty() {
            let schema = match projection {
                Some(columns) => Arc::new(self.schema.project(columns)?),
                None => self.schema.clone(),
            };
            return Ok(Arc::new(EmptyExec::new(schema)));
        }
        let source = self.format.file_source(TableSchemaBuilder::from(&self.schema).build());
        let files = self.objects.iter().cloned().map(PartitionedFile::from).collect::<Vec<_>>();
        let config = FileScanConfigBuilder::new(ObjectStoreUrl::parse(STORE_URL)?, source)
            .with_file_groups(vec![FileGroup::new(files)])
            .with_file_compression_type(self.compression)
            .with_projection_indices(projection.cloned())?
            .with_limit(limit)
            .with_preserve_order(true)
            .build();
        self.format.create_physical_plan(state, config).await
    }
}

/// Bad records that the first complete scan of a text table has skipped, by reason.
#[derive(Debug, Clone, Default)]
pub(super) struct Skipped(Arc<Mutex<Option<BTreeMap<String, u64>>>>);

impl Skipped {
    fn record(&self, skipped: BTreeMap<String, u64>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(skipped);
    }

    pub fn take(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    }
}

/// Lines of text files, through our own reader: one column, named by `input.text`.
#[derive(Debug)]
struct TextPartition {
    store: Store,
    files: Vec<InputFile>,
    input: Input,
    schema: SchemaRef,
    skipped: Skipped,
}

pub(super) fn text_table(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    skipped: &Skipped,
) -> std::result::Result<Arc<dyn TableProvider>, SourceError> {
    let schema = Arc::new(Schema::new(vec![Field::new(&input.text, DataType::LargeUtf8, false)]));
    let partition = TextPartition {
        store: store.clone(),
        files: files.to_vec(),
        input: input.clone(),
        schema: schema.clone(),
        skipped: skipped.clone(),
    };
    Ok(Arc::new(StreamingTable::try_new(schema, vec![Arc::new(partition)]).map_err(sql_error)?))
}

/// Joins pieces back to lines, in batches.
struct Lines<'a> {
    schema: SchemaRef,
    texts: LargeStringBuilder,
    line: String,
    rows: usize,
    bytes: usize,
    send: &'a mut dyn FnMut(RecordBatch) -> std::result::Result<(), Stopped>,
}

impl Lines<'_> {
    fn take(&mut self, batch: &RecordBatch) -> std::result::Result<(), Stopped> {
        let ends = batch.column(2).as_boolean();
        for (text, end) in batch.column(1).as_string::<i32>().iter().zip(ends.iter()) {
            self.line.push_str(text.unwrap_or_default());
            if end == Some(true) {
                self.bytes += self.line.len();
                self.rows += 1;
                self.texts.append_value(&self.line);
                self.line.clear();
                if self.rows >= BATCH_ROWS || self.bytes >= BATCH_BYTES {
                    self.flush()?;
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> std::result::Result<(), Stopped> {
        (self.rows, self.bytes) = (0, 0);
        let batch = RecordBatch::try_new(self.schema.clone(), vec![Arc::new(self.texts.finish())]);
        (self.send)(batch.map_err(|_| Stopped)?)
    }
}

impl TextPartition {
    fn read(
        &self,
        send: &mut dyn FnMut(RecordBatch) -> std::result::Result<(), Stopped>,
    ) -> std::result::Result<(), SourceError> {
        let mut lines = Lines {
            schema: self.schema.clone(),
            texts: LargeStringBuilder::new(),
            line: String::new(),
            rows: 0,
            bytes: 0,
            send,
        };
        let mut skipped = BTreeMap::<String, u64>::new();
        for file in &self.files {
            let range = Range::Bytes { start: 0, end: u64::MAX, line: Some(1) };
            let split = SplitRecord {
                split: SplitId(0),
                dataset_split: String::new(),
                pieces: vec![Piece { file: file.path.clone(), range }],
            };
            let files = std::slice::from_ref(file);
            let summary = read_split(&self.store, files, &split, &self.input, &mut |batch| lines.take(&batch))?;
            for (reason, n) in summary.skipped {
                *skipped.entry(reason).or_default() += n;
            }
        }
        lines.flush()?;
        self.skipped.record(skipped);
        Ok(())
    }
}

impl PartitionStream for TextPartition {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _context: Arc<TaskContext>) -> SendableRecordBatchStream {
        let mut builder = RecordBatchReceiverStream::builder(self.schema.clone(), 2);
        let tx = builder.tx();
        let partition = Self {
            store: self.store.clone(),
            files: self.files.clone(),
            input: self.input.clone(),
            schema: self.schema.clone(),
            skipped: self.skipped.clone(),
        };
        builder.spawn_blocking(move || {
            let sent = partition.read(&mut |batch| tx.blocking_send(Ok(batch)).map_err(|_| Stopped));
            match sent {
                Ok(()) | Err(SourceError::Stopped(_)) => Ok(()),
                Err(e) => Err(DataFusionError::External(Box::new(e))),
            }
        });
        builder.build()
    }
}
