//! The DataFusion session of a query: one partition, fixed options, a bound on memory, and the tables.

use std::path::Path;
use std::sync::Arc;

use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
use datafusion::execution::memory_pool::{FairSpillPool, MemoryPool};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::execution::session_state::SessionStateBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use stillhouse_base::source_error::SourceError;
use stillhouse_source::BATCH_ROWS;

use crate::error::sql_error;
use crate::table::FilesTable;
use crate::{bounds, order};

/// Creates a session with the tables registered.
pub(crate) fn session(
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
