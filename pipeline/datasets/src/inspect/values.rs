//! The raw values of a row in the requested columns. Reads only the pages that hold the row.

use arrow::array::{Array, AsArray};
use arrow::datatypes::{DataType, Float16Type, Float32Type, Int32Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type};
use futures::TryStreamExt;
use serde_json::{Value, json};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};

use super::ColumnValues;
use super::row::find;
use crate::dataset::{Dataset, Selection};

pub(super) async fn of_row(dataset: &Dataset, row: u64, columns: &[String]) -> Result<Vec<ColumnValues>> {
    let manifest = dataset.manifest();
    for name in columns {
        if !manifest.columns.iter().any(|c| c.name == *name) {
            let valid: Vec<&str> = manifest.columns.iter().map(|c| c.name.as_str()).collect();
            let message = format!("--column: got {name:?}, valid: {}", valid.join(", "));
            return Err(PipelineError::new(ErrorKind::Usage, message));
        }
    }
    let Some((shard, offset)) = find(manifest, row)? else { return Ok(Vec::new()) };
    let selection =
        Selection { columns: Some(columns.to_vec()), offset: offset as usize, limit: Some(1), batch_rows: 1 };
    let context = dataset.shown(&shard.path);
    let mut stream = dataset.read(shard, &selection).await?;
    let batch = stream.try_next().await.map_err(PipelineError::dataset(context.clone()))?;
    let Some(batch) = batch else { return Ok(Vec::new()) };
    columns
        .iter()
        .map(|name| {
            let column = batch.column_by_name(name).and_then(|c| values(c.as_ref()));
            let values = column.and_then(|mut rows| rows.pop()).ok_or_else(|| {
                PipelineError::new(
                    ErrorKind::DataSet,
                    format!("{context}: column {name} is of a type that is not known"),
                )
            })?;
            Ok(ColumnValues { name: name.clone(), shard: shard.path.clone(), row: offset, values })
        })
        .collect()
}

/// The values of an array as JSON; `None` for types that data sets do not use.
fn values(array: &dyn Array) -> Option<Vec<Value>> {
    macro_rules! numbers {
        ($t:ty) => {
            array.as_primitive::<$t>().values().iter().map(|v| json!(v)).collect()
        };
    }
    Some(match array.data_type() {
        DataType::UInt8 => numbers!(UInt8Type),
        DataType::UInt16 => numbers!(UInt16Type),
        DataType::UInt32 => numbers!(UInt32Type),
        DataType::UInt64 => numbers!(UInt64Type),
        DataType::Int32 => numbers!(Int32Type),
        DataType::Float32 => numbers!(Float32Type),
        DataType::Float16 => array.as_primitive::<Float16Type>().values().iter().map(|v| json!(v.to_f32())).collect(),
        DataType::Boolean => array.as_boolean().iter().map(|v| json!(v)).collect(),
        DataType::Utf8 => array.as_string::<i32>().iter().map(|v| json!(v)).collect(),
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns().iter().map(|column| values(column.as_ref()));
            let columns: Vec<Vec<Value>> = columns.collect::<Option<_>>()?;
            let object = |row: usize| {
                let named = fields.iter().zip(&columns);
                named.filter_map(|(field, column)| Some((field.name().clone(), column.get(row)?.clone()))).collect()
            };
            (0..array.len()).map(|row| Value::Object(object(row))).collect()
        }
        DataType::List(_) => {
            let lists = array.as_list::<i32>();
            (0..lists.len()).map(|i| values(lists.value(i).as_ref()).map(Value::Array)).collect::<Option<_>>()?
        }
        DataType::FixedSizeList(..) => {
            let lists = array.as_fixed_size_list();
            (0..lists.len()).map(|i| values(lists.value(i).as_ref()).map(Value::Array)).collect::<Option<_>>()?
        }
        _ => return None,
    })
}
