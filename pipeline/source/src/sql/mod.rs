//! `input.sql`: a DataFusion query over the tables. Its text column is staged as Parquet files and then read like any
//! other input.
//!
//! ```text
//!   files ─► tables ─► query (1 partition, fixed options, memory bound, spills) ─► dir/part-NNNNN.parquet ─► plan_splits
//! ```
//!
//! The query's rows, their order and the splits are the same every time, whatever the memory: it runs in one partition,
//! may not call functions that depend on the time or on chance, and every order is total ([`order`]). Without ORDER BY
//! a filter keeps the order of the files.
//!
//! Clauses that the parser accepts and DataFusion would drop are refused ([`clauses`]), and so are queries that are too
//! large ([`bounds`]). A broken record of a table follows `on_error`, and so does a null in the query's text column,
//! which is a bad record of the staged files.
//!
//! Memory: sorts, aggregations and windows spill to disk beyond the bound; the smaller side of a join must fit in it.
//! Outside of the bound: 1024 rows or 1 MB of the columns used, and a record of at most 256 MB. Disk: another copy of
//! the text, compressed.

mod bounds;
mod clauses;
mod nodes;
mod order;
mod stage;
mod table;

use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::arrow::error::ArrowError;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::DataFusionError;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
use datafusion::execution::memory_pool::{FairSpillPool, MemoryPool};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::execution::session_state::{SessionState, SessionStateBuilder};
use datafusion::logical_expr::{Expr, LogicalPlan, Volatility};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion::sql::parser::Statement;
use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Input;

use super::column_check::check_first_bytes;
use super::formats::{self, Format};
use super::store::Store;
use super::table_format::BATCH_ROWS;
use bounds::on_large_stack;
use clauses::FunctionKind;
pub use stage::{StagedRecord, read_staged_record, staged_rows};
pub use stage::{StagedRows, reuse_staged, stage_sql};
pub use table::QueryTable;
use table::{FilesTable, SkippedCounts};

const CHECK_MEMORY_BYTES: u64 = 256 << 20;
const MAX_PROBLEMS: usize = 5;
/// Maximum characters of a query that a message shows.
const MAX_SHOWN_CHARS: usize = 1_000;

/// Returns the message of an error without the names of the crates that report it.
fn plain_message(error: &ArrowError) -> String {
    match error {
        ArrowError::CastError(m) | ArrowError::ParseError(m) => {
            format!("a value cannot be converted: {m}; TRY_CAST gives NULL instead")
        }
        ArrowError::DivideByZero => "a number is divided by zero; NULLIF(divisor, 0) gives NULL instead".into(),
        ArrowError::ArithmeticOverflow(m) => format!("a number is too large for its type: {m}"),
        ArrowError::ComputeError(m) | ArrowError::InvalidArgumentError(m) | ArrowError::SchemaError(m) => m.clone(),
        other => other.to_string(),
    }
}

fn sql_error(error: DataFusionError) -> SourceError {
    let message = error.strip_backtrace();
    match error {
        DataFusionError::Context(_, inner) | DataFusionError::Diagnostic(_, inner) => sql_error(*inner),
        DataFusionError::Shared(inner) => {
            shared_error(&inner).unwrap_or(SourceError::Sql { message, retryable: false })
        }
        DataFusionError::ArrowError(inner, _) => match *inner {
            ArrowError::ExternalError(source) => sql_error(DataFusionError::External(source)),
            other => SourceError::Sql { message: plain_message(&other), retryable: false },
        },
        DataFusionError::Execution(message) => SourceError::Sql { message, retryable: false },
        DataFusionError::External(source) => match source.downcast::<SourceError>() {
            Ok(source) => *source,
            Err(other) => match other.downcast::<DataFusionError>() {
                Ok(inner) => sql_error(*inner),
                Err(_) => SourceError::Sql { message, retryable: false },
            },
        },
        DataFusionError::IoError(_) => SourceError::Sql { message, retryable: true },
        DataFusionError::ResourcesExhausted(_) => SourceError::Sql {
            message: format!("{message}; `engine.sql_memory_megabytes` sets the memory of the query"),
            retryable: false,
        },
        _ => SourceError::Sql { message, retryable: false },
    }
}

/// Returns the source error inside an error that several parts of the query share.
fn shared_error(error: &DataFusionError) -> Option<SourceError> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        match cause.downcast_ref::<SourceError>() {
            // the error is shared and cannot be moved out, so it is rebuilt
            Some(SourceError::Record { file, position, reason, message }) => {
                return Some(SourceError::Record {
                    file: file.clone(),
                    position: position.clone(),
                    reason,
                    message: message.clone(),
                });
            }
            Some(SourceError::Corrupt { file, message }) => {
                return Some(SourceError::Corrupt { file: file.clone(), message: message.clone() });
            }
            Some(other) => return Some(SourceError::Sql { message: other.to_string(), retryable: other.retryable() }),
            None => source = cause.source(),
        }
    }
    None
}

/// Opens the tables, which determines their columns.
fn open(
    store: &Store,
    tables: &[QueryTable],
    skipped: &SkippedCounts,
) -> Result<Vec<(String, FilesTable)>, SourceError> {
    tables.iter().map(|table| Ok((table.name.clone(), FilesTable::open(store, table, skipped)?))).collect()
}

/// Creates a session with the tables registered.
fn session(
    tables: Vec<(String, FilesTable)>,
    memory_bytes: u64,
    spill: Option<&Path>,
    extra_udfs: impl FnOnce(&SessionContext),
) -> Result<SessionContext, SourceError> {
    let mut config = SessionConfig::new()
        .with_target_partitions(1)
        .with_batch_size(BATCH_ROWS)
        .with_information_schema(false)
        .with_collect_statistics(false);
    let options = config.options_mut();
    options.execution.sort_spill_reservation_bytes = (memory_bytes / 8).min(10 << 20) as usize;
    // shortcuts that choose arbitrarily among equal rows: see `order`
    options.optimizer.enable_topk_aggregation = false;
    options.optimizer.enable_distinct_aggregation_soft_limit = false;
    options.optimizer.enable_window_topn = false;
    options.optimizer.enable_topk_dynamic_filter_pushdown = false;
    options.optimizer.enable_join_dynamic_filter_pushdown = false;
    options.optimizer.enable_aggregate_dynamic_filter_pushdown = false;
    let memory: Arc<dyn MemoryPool> = Arc::new(FairSpillPool::new(memory_bytes as usize));
    let runtime = || RuntimeEnvBuilder::new().with_memory_pool(memory.clone());
    let spilling = match spill {
        Some(folder) => runtime().with_temp_file_path(folder),
        None => runtime(),
    };
    let no_files = DiskManagerBuilder::default().with_mode(DiskManagerMode::Disabled);
    let in_memory = runtime().with_disk_manager_builder(no_files).build().map_err(sql_error)?;
    let spilling = Arc::new(spilling.build().map_err(sql_error)?);
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_runtime_env(spilling.clone())
        .with_default_features()
        .with_physical_optimizer_rules(order::rules(spilling, Arc::new(in_memory)))
        .build();
    let context = SessionContext::new_with_state(state);
    bounds::bounded_functions(&context);
    extra_udfs(&context);
    for (name, table) in tables {
        context.register_table(name.as_str(), Arc::new(table)).map_err(sql_error)?;
    }
    Ok(context)
}

/// Plans the query and checks it: it must be a single query, deterministic, with the text column as a string.
async fn plan(context: &SessionContext, input: &Input) -> Result<LogicalPlan, SourceError> {
    let tables = input.sources().into_iter().map(|source| format!("`{}`", source.name)).collect::<Vec<_>>().join(", ");
    let invalid = |message: String| SourceError::Sql { message, retryable: false };
    let sql = input.sql.as_deref().unwrap_or_default();
    let state = context.state();
    let dialect = state.config().options().sql_parser.dialect;
    if let Some(too_large) = bounds::check_size(sql) {
        return Err(invalid(too_large));
    }
    let statement = state.sql_to_statement(sql, &dialect).map_err(sql_error)?;
    if matches!(statement, Statement::CopyTo(_)) {
        // the target and the format of the COPY do not matter for the message
        return Err(invalid(format!("DML not supported: COPY; valid: one SELECT over the tables {tables}")));
    }
    if let Statement::Statement(statement) = &statement
        && let Some(clause) =
            clauses::ignored_clause(statement, &|name, is_window| function_kind(&state, name, is_window))
    {
        return Err(invalid(format!("{clause} is not supported; valid: a query without it")));
    }
    let plan = state.statement_to_plan(statement).await.map_err(sql_error)?;
    let only_queries = SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
    let verified = only_queries.verify_plan(&plan);
    let explains = matches!(plan, LogicalPlan::Explain(_) | LogicalPlan::Analyze(_) | LogicalPlan::DescribeTable(_));
    if verified.is_err() || explains {
        let what = verified.err().map_or("not a query".to_string(), |e| e.strip_backtrace());
        return Err(invalid(format!("{what}; valid: one SELECT over the tables {tables}")));
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

/// Returns the kind of function that DataFusion finds under this name.
fn function_kind(state: &SessionState, name: &str, is_window: bool) -> Option<FunctionKind> {
    let name = name.to_lowercase();
    match () {
        () if state.scalar_functions().contains_key(&name) => Some(FunctionKind::Scalar),
        () if is_window && state.window_functions().contains_key(&name) => Some(FunctionKind::Window),
        () if state.aggregate_functions().contains_key(&name) => Some(FunctionKind::Aggregate),
        () => None,
    }
}

fn is_string(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, value) => is_string(value),
        _ => false,
    }
}

/// Returns the name of a function in the plan whose result depends on more than its arguments.
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

/// Plans the query without running it and checks its text column. Reads what determines the types: footers, headers,
/// and the first 1000 records of each JSON or CSV table; also the first bytes of its files.
///
/// Functions that `extra_udfs` registers must be declared immutable.
///
/// # Errors
/// When a store does not answer, which is not a problem of the job.
pub fn check_sql(
    store: &Store,
    tables: &[QueryTable],
    input: &Input,
    extra_udfs: impl FnOnce(&SessionContext) + Send,
) -> Result<Vec<Problem>, SourceError> {
    let Some(sql) = input.sql.as_deref() else { return Ok(Vec::new()) };
    let skipped = SkippedCounts::default();
    let (mut opened, mut problems) = (Vec::new(), Vec::new());
    for table in tables {
        let field = format!("{}.paths", table.field);
        if matches!(formats::for_input(&table.input), Format::Bytes(_)) {
            problems.extend(check_first_bytes(store, &table.files, &table.input, &field, MAX_PROBLEMS, &mut |_| {})?);
        }
        match FilesTable::open(store, table, &skipped) {
            Ok(table_opened) => opened.push((table.name.clone(), table_opened)),
            Err(e) if e.retryable() => return Err(e),
            Err(e) if problems.is_empty() => problems.push(Problem::missing(field, e.to_string())),
            Err(_) => {}
        }
    }
    if !problems.is_empty() {
        return Ok(problems);
    }
    let checked = on_large_stack(|| {
        let context = session(opened, CHECK_MEMORY_BYTES, None, extra_udfs)?;
        store.wait(async {
            let plan = plan(&context, input).await?;
            context.state().create_physical_plan(&plan).await.map_err(sql_error)?;
            Ok(())
        })
    });
    match checked {
        Ok(()) => Ok(Vec::new()),
        Err(e) if e.retryable() => Err(e),
        Err(SourceError::Sql { message, .. }) => {
            let shown: String = sql.chars().take(MAX_SHOWN_CHARS).collect();
            let more = if shown.len() < sql.len() { "…" } else { "" };
            Ok(vec![Problem::new("input.sql", format!("{shown:?}{more}"), message)])
        }
        Err(other) => Ok(vec![Problem::missing("input.sql", other.to_string())]),
    }
}
