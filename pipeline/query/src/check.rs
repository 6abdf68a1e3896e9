//! Which queries are allowed: one deterministic SELECT whose clauses are all executed, with the text column as a
//! string.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::DataFusionError;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{Expr, LogicalPlan, Volatility};
use datafusion::prelude::SessionContext;
use datafusion::sql::parser::Statement;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::Store;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Input;
use stillhouse_source::{QueryTable, is_single};

use crate::bounds::{self, on_large_stack};
use crate::clauses::{self, FunctionKind};
use crate::error::sql_error;
use crate::session::session;
use crate::table::{FilesTable, SkippedCounts};

const CHECK_MEMORY_BYTES: u64 = 256 << 20;
/// Maximum characters of a query that a message shows.
const MAX_SHOWN_CHARS: usize = 1_000;

/// Plans the query and checks it: it must be a single query, deterministic, with the text column as a string.
pub(crate) async fn plan(context: &SessionContext, input: &Input) -> Result<LogicalPlan, SourceError> {
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
    let is_there = |name: &str| fields.iter().find(|f| f.name() == name);
    for name in input.carried_columns() {
        match is_there(name) {
            Some(field) if is_single(field.data_type()) => {}
            Some(field) => {
                return Err(invalid(format!(
                    "the query's column {name:?}, which `input.carry` names, is of type {}; valid: strings, numbers, booleans, dates and times",
                    field.data_type()
                )));
            }
            None => {
                return Err(invalid(format!(
                    "the query has no column {name:?}, which `input.carry` names; its columns: {}",
                    there()
                )));
            }
        }
    }
    match is_there(&input.text) {
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

/// Whether values of a type are strings.
pub(crate) fn is_string(kind: &DataType) -> bool {
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
        problems.extend(table.check(store)?);
        match FilesTable::open(store, table, &skipped) {
            Ok(table_opened) => opened.push((table.name.clone(), table_opened)),
            Err(e) if e.retryable() => return Err(e),
            Err(e) if problems.is_empty() => {
                problems.push(Problem::missing(format!("{}.paths", table.field), e.to_string()));
            }
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
