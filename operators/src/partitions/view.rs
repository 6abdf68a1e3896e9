//! What `inspect` and the web page show of a row with block times or digit groups: facts in words, and charts.

use arrow::array::{BooleanArray, RecordBatch};
use arrow::error::ArrowError;
use stillhouse_schemas::columns;

use super::{NAME, PartitionsConfig};
use crate::config::{Chart, OperatorView};
use crate::invariants::float_column;
use crate::rows::ListRows;

/// Maximum block times listed per view.
const MAX_LISTED: usize = 16;
/// Maximum views drawn.
const MAX_CHARTS: usize = 4;

impl PartitionsConfig {
    pub(super) fn block_view(&self, row: &RecordBatch) -> Result<OperatorView, ArrowError> {
        let times = float_column(row, columns::PARTITION_T)?;
        let views: Vec<&[f32]> = times.row(0).chunks(self.blocks().max(1)).collect();
        let listed = |times: &[f32]| {
            let few: Vec<String> = times.iter().take(MAX_LISTED).map(|t| format!("{t:.3}")).collect();
            few.join(" ") + if times.len() > MAX_LISTED { " …" } else { "" }
        };
        let facts = views.iter().enumerate();
        let facts = facts.map(|(view, times)| (format!("t of the blocks in view {view}"), listed(times))).collect();
        let drawn = views.iter().enumerate().take(MAX_CHARTS).map(|(view, times)| Chart::Shares {
            title: format!("t of each block in view {view}"),
            length: self.block_length,
            values: times.to_vec(),
        });
        Ok(OperatorView { operator: NAME.into(), facts, pictures: drawn.collect(), ..OperatorView::default() })
    }

    pub(super) fn digit_view(&self, row: &RecordBatch) -> Result<OperatorView, ArrowError> {
        let groups = ListRows::from_batch(row, columns::PARTITION)?;
        let values = groups.values::<BooleanArray>(columns::PARTITION)?;
        let all: Vec<bool> = groups.range(0).map(|i| values.value(i)).collect();
        let views: Vec<&[bool]> = all.chunks((all.len() / self.views.max(1) as usize).max(1)).collect();
        let fact = |(n, view): (usize, &&[bool])| {
            let masked = view.iter().filter(|&&group| group).count();
            (format!("digits in group 1 of view {n}"), format!("{masked} of {}", view.len()))
        };
        let drawn = views.iter().enumerate().take(MAX_CHARTS).map(|(view, groups)| Chart::Grid {
            title: format!("digits in group 1 of view {view}"),
            height: self.digits,
            cells: groups.iter().map(|&group| if group { '1' } else { '0' }).collect(),
        });
        let (facts, pictures) = (views.iter().enumerate().map(fact).collect(), drawn.collect());
        Ok(OperatorView { operator: NAME.into(), facts, pictures, ..OperatorView::default() })
    }
}
