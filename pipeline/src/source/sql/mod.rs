//! `input.sql`: a DataFusion query over the files, whose text is staged as Parquet files and then read like any other input.
//!
//! ```text
//!   files ─► table `input` ─► query (1 partition, fixed options, memory bound, spills) ─► dir/part-NNNNN.parquet ─► plan_splits
//! ```
//!
//! The query runs in one partition and nothing that depends on the time or on chance may be called, so the rows, their order and
//! the splits are the same every time. Without ORDER BY a filter keeps the order of the files. DataFusion parses the files here:
//! a broken line, record or file fails the query, whatever `on_error` says (text files excepted); a null in the query's
//! text column is a bad record of the staged files and follows `on_error`.
//!
//! Memory: sorts, aggregations and windows spill to disk past the bound; the smaller side of a join has to fit in it. So do 1024 rows
//! of the columns used, outside of the bound. Disk: the text, compressed, once more.

mod stage;
mod table;

use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::DataFusionError;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::logical_expr::{Expr, LogicalPlan, Volatility};
use datafusion::prelude::{SessionConfig, SessionContext};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{Input, InputFormat};

use super::error::SourceError;
use super::list::InputFile;
use super::store::Store;
pub use stage::{Staged, stage_sql, staged};
use table::{FilesTable, Skipped, text_table};

const BATCH_ROWS: usize = 1024;
const CHECK_MEMORY: u64 = 256 << 20;

/// The name under which the files are registered.
const TABLE: &str = "input";

fn sql_error(error: DataFusionError) -> SourceError {
    let message = error.strip_backtrace();
    match error {
        DataFusionError::Context(_, inner) => sql_error(*inner),
        DataFusionError::External(source) => match source.downcast::<SourceError>() {
            Ok(source) => *source,
            Err(_) => SourceError::Sql { message, retryable: false },
        },
        DataFusionError::ObjectStore(source) => {
            let told = SourceError::Store { file: TABLE.into(), error: source };
            SourceError::Sql { message: told.to_string(), retryable: told.retryable() }
        }
        DataFusionError::IoError(_) => SourceError::Sql { message, retryable: true },
        DataFusionError::ResourcesExhausted(_) => SourceError::Sql {
            message: format!("{message}; `engine.sql_memory_megabytes` sets the memory of the query"),
            retryable: false,
        },
        _ => SourceError::Sql { message, retryable: false },
    }
}

/// A session with the files registered, and what its text table skips.
async fn session(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    memory_bytes: u64,
    spill: Option<&Path>,
    extra_udfs: impl FnOnce(&SessionContext),
) -> Result<(SessionContext, Skipped), SourceError> {
    let mut config = SessionConfig::new()
        .with_target_partitions(1)
        .with_batch_size(BATCH_ROWS)
        .with_information_schema(false)
        .with_collect_statistics(false);
    let reserved = (memory_bytes / 8).min(10 << 20) as usize;
    config.options_mut().execution.sort_spill_reservation_bytes = reserved;
    let mut runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(FairSpillPool::new(memory_bytes as usize)));
    if let Some(spill) = spill {
        runtime = runtime.with_temp_file_path(spill);
    }
    let context = SessionContext::new_with_config_rt(config, Arc::new(runtime.build().map_err(sql_error)?));
    extra_udfs(&context);
    let skipped = Skipped::default();
    let table = if input.format == InputFormat::Text {
        text_table(store, files, input, &skipped)?
    } else {
        Arc::new(FilesTable::open(&context, store, files, input).await?)
    };
    context.register_table(TABLE, table).map_err(sql_error)?;
    Ok((context, skipped))
}

/// The plan of the query, checked: a query and nothing else, the same at every run, with the text column as a string.
async fn plan(context: &SessionContext, input: &Input) -> Result<LogicalPlan, SourceError> {
    let invalid = |message: String| SourceError::Sql { message, retryable: false };
    let sql = input.sql.as_deref().unwrap_or_default();
    let plan = context.state().create_logical_plan(sql).await.map_err(sql_error)?;
    let only_queries = SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
    let verified = only_queries.verify_plan(&plan);
    let explains = matches!(plan, LogicalPlan::Explain(_) | LogicalPlan::Analyze(_) | LogicalPlan::DescribeTable(_));
    if verified.is_err() || explains {
        let what = verified.err().map_or("not a query".to_string(), |e| e.strip_backtrace());
        return Err(invalid(format!("{what}; valid: one SELECT over the table `{TABLE}`")));
    }
    if let Some(name) = unstable_function(&plan).map_err(sql_error)? {
        return Err(invalid(format!(
            "{name}() can give another result at every run; valid: functions of their arguments alone"
        )));
    }
    let fields = plan.schema().fields();
    let there = || fields.iter().map(|f| format!("{} ({})", f.name(), f.data_type())).collect::<Vec<_>>().join(", ");
    match fields.iter().find(|f| *f.name() == input.text) {
        Some(field) if is_string(field.data_type()) => Ok(plan),
        Some(field) => Err(invalid(format!(
            "the query's column {:?} is of type {}; valid: a string, such as CAST({:?} AS VARCHAR)",
            input.text,
            field.data_type(),
            input.text
        ))),
        None => Err(invalid(format!(
            "the query has no column {:?}, which `input.text` names; its columns: {}",
            input.text,
            there()
        ))),
    }
}

fn is_string(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, value) => is_string(value),
        _ => false,
    }
}

/// The name of a function in the plan whose result depends on more than its arguments.
fn unstable_function(plan: &LogicalPlan) -> Result<Option<String>, DataFusionError> {
    let mut found = None;
    plan.apply_with_subqueries(|node| {
        node.apply_expressions(|expression| {
            expression.apply(|e| {
                if let Expr::ScalarFunction(call) = e
                    && call.func.signature().volatility != Volatility::Immutable
                {
                    found = Some(call.func.name().to_string());
                    return Ok(TreeNodeRecursion::Stop);
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })?;
    Ok(found)
}

/// Plans the query without running it and checks its text column. Reads what DataFusion needs to know the types: footers,
/// headers, the first 1000 records of each JSON or CSV file.
///
/// Functions that `extra_udfs` registers must be declared immutable.
///
/// # Errors
/// When a store does not answer: that is no problem of the job.
pub fn check_sql(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    extra_udfs: impl FnOnce(&SessionContext),
) -> Result<Vec<Problem>, SourceError> {
    let Some(sql) = input.sql.as_deref() else { return Ok(Vec::new()) };
    let checked = store.wait(async {
        let (context, _) = session(store, files, input, CHECK_MEMORY, None, extra_udfs).await?;
        let plan = plan(&context, input).await?;
        context.state().create_physical_plan(&plan).await.map_err(sql_error)?;
        Ok::<_, SourceError>(())
    });
    match checked {
        Ok(()) => Ok(Vec::new()),
        Err(e) if e.retryable() => Err(e),
        Err(SourceError::Sql { message, .. }) => Ok(vec![Problem::new("input.sql", format!("{sql:?}"), message)]),
        Err(other) => Ok(vec![Problem::missing("input.paths", other.to_string())]),
    }
}
