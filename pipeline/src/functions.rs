//! SQL functions that compute views of tokens, for `input.sql` and for any DataFusion session.
//!
//! | function | |
//! |---|---|
//! | `subtokens(id, vocab_size, length)` | the `length` base-b digits of a token id, most significant first: list of int32 (MDM-Prime) |
//! | `subtoken_base(vocab_size, length)` | b = ⌈vocab_size^(1/length)⌉ |
//! | `partition(sequence_id, length, seed, views, view)` | groups of `length` tokens in one view, linear schedule, stratified: list of bool (PGM) |
//! | `partition_t(sequence_id, seed, views, view)` | the t of that view |
//!
//! The results equal the columns of a job with the same seed and `eps` 0.001.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, Float32Array, Int32Array, Int64Array, ListArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use datafusion::common::cast::as_int64_array;
use datafusion::common::{Result, exec_err};
use datafusion::logical_expr::{ColumnarValue, ScalarUDF, Volatility, create_udf};
use datafusion::prelude::SessionContext;
use stillhouse_operators::partitions::{Partition, PartitionsConfig, PartitionsSection, partition_row};
use stillhouse_operators::subtokens;
use stillhouse_schemas::columns::RowLength;

/// Registers all functions.
pub fn register(context: &SessionContext) {
    for function in all() {
        context.register_udf(function);
    }
}

/// The functions.
pub fn all() -> Vec<ScalarUDF> {
    let int = || DataType::Int64;
    let udf =
        |name: &'static str, arguments: usize, returns: DataType, body: fn(&[&Int64Array]) -> Result<ArrayRef>| {
            let run = move |values: &[ColumnarValue]| {
                let arrays = ColumnarValue::values_to_arrays(values)?;
                let integers = arrays.iter().map(|a| as_int64_array(a)).collect::<Result<Vec<_>>>()?;
                if integers.iter().any(|a| a.null_count() > 0) {
                    return exec_err!("{name}: got null, valid: integers; filter with IS NOT NULL");
                }
                body(&integers).map(ColumnarValue::Array)
            };
            create_udf(name, vec![int(); arguments], returns, Volatility::Immutable, Arc::new(run))
        };
    vec![
        udf("subtokens", 3, list_type(DataType::Int32), subtoken_lists),
        udf("subtoken_base", 2, DataType::Int64, subtoken_bases),
        udf("partition", 5, list_type(DataType::Boolean), partition_lists),
        udf("partition_t", 4, DataType::Float32, partition_times),
    ]
}

fn item(data_type: DataType) -> Arc<Field> {
    Arc::new(Field::new_list_field(data_type, false))
}

fn list_type(data_type: DataType) -> DataType {
    DataType::List(item(data_type))
}

fn bounded(name: &str, value: i64, least: i64, most: i64) -> Result<i64> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    exec_err!("{name}: got {value}, valid: {least} to {most}")
}

fn base_of(vocab_size: i64, length: i64) -> Result<u32> {
    let vocab = bounded("vocab_size", vocab_size, 2, 1 << 32)?;
    let length = bounded("length", length, 1, 32)?;
    let base = subtokens::base(vocab.unsigned_abs(), length as u32);
    match u32::try_from(base) {
        Ok(base) if base <= 65_536 => Ok(base),
        _ => exec_err!("length: got {length}, which needs base {base}; valid: a length with a base of at most 65536"),
    }
}

fn subtoken_lists(arguments: &[&Int64Array]) -> Result<ArrayRef> {
    let [ids, vocab, lengths] = arguments else { return exec_err!("subtokens takes 3 arguments") };
    let (mut values, mut counts) = (Vec::new(), Vec::with_capacity(ids.len()));
    for row in 0..ids.len() {
        let base = base_of(vocab.value(row), lengths.value(row))?;
        let id = bounded("id", ids.value(row), 0, vocab.value(row) - 1)?;
        let mut digits = vec![0; lengths.value(row) as usize];
        subtokens::encode(id as u32, base, &mut digits);
        counts.push(digits.len());
        values.extend(digits.into_iter().map(i32::from));
    }
    let values = Arc::new(Int32Array::from(values));
    Ok(Arc::new(ListArray::try_new(item(DataType::Int32), OffsetBuffer::from_lengths(counts), values, None)?))
}

fn subtoken_bases(arguments: &[&Int64Array]) -> Result<ArrayRef> {
    let [vocab, lengths] = arguments else { return exec_err!("subtoken_base takes 2 arguments") };
    let bases = (0..vocab.len()).map(|row| base_of(vocab.value(row), lengths.value(row)).map(i64::from));
    Ok(Arc::new(Int64Array::from(bases.collect::<Result<Vec<_>>>()?)))
}

fn view_of(sequence_id: i64, length: i64, seed: i64, views: i64, view: i64) -> Result<Partition> {
    let views = bounded("views", views, 1, 1024)?;
    let view = bounded("view", view, 0, views - 1)?;
    let length = bounded("length", length, 0, 1 << 24)?;
    let section = PartitionsSection { views: views as u32, ..PartitionsSection::default() };
    let config = PartitionsConfig::new(&section, seed.cast_unsigned(), RowLength::UpTo(length as usize));
    let mut all = partition_row(&config, sequence_id.cast_unsigned(), &vec![true; length as usize]);
    Ok(all.swap_remove(view as usize))
}

fn partition_lists(arguments: &[&Int64Array]) -> Result<ArrayRef> {
    let [ids, lengths, seeds, views, view] = arguments else { return exec_err!("partition takes 5 arguments") };
    let (mut values, mut counts) = (Vec::new(), Vec::with_capacity(ids.len()));
    for row in 0..ids.len() {
        let groups =
            view_of(ids.value(row), lengths.value(row), seeds.value(row), views.value(row), view.value(row))?.groups;
        counts.push(groups.len());
        values.extend(groups);
    }
    let values = Arc::new(BooleanArray::from(values));
    Ok(Arc::new(ListArray::try_new(item(DataType::Boolean), OffsetBuffer::from_lengths(counts), values, None)?))
}

fn partition_times(arguments: &[&Int64Array]) -> Result<ArrayRef> {
    let [ids, seeds, views, view] = arguments else { return exec_err!("partition_t takes 4 arguments") };
    let times = (0..ids.len())
        .map(|row| Ok(view_of(ids.value(row), 0, seeds.value(row), views.value(row), view.value(row))?.t));
    Ok(Arc::new(Float32Array::from(times.collect::<Result<Vec<_>>>()?)))
}

#[cfg(test)]
mod tests {
    use datafusion::common::cast::{as_boolean_array, as_int32_array, as_list_array};

    use super::*;

    async fn one(sql: &str) -> Result<ArrayRef> {
        let context = SessionContext::new();
        register(&context);
        let batches = context.sql(sql).await?.collect().await?;
        Ok(Arc::clone(batches[0].column(0)))
    }

    #[tokio::test]
    async fn digits_of_a_token() {
        let column = one("SELECT subtokens(50256, 50257, 4)").await.unwrap();
        let digits = as_list_array(&column).unwrap().value(0);
        // 50256 = ((14·15 + 13)·15 + 5)·15 + 6
        assert_eq!(as_int32_array(&digits).unwrap().values(), &[14, 13, 5, 6]);
        let base = one("SELECT subtoken_base(50257, 4)").await.unwrap();
        assert_eq!(as_int64_array(&base).unwrap().value(0), 15);
    }

    #[tokio::test]
    async fn groups_are_those_of_the_column() {
        let column = one("SELECT partition(7, 16, 42, 2, 1)").await.unwrap();
        let groups = as_list_array(&column).unwrap().value(0);
        let section = PartitionsSection { views: 2, ..Default::default() };
        let expected = partition_row(&PartitionsConfig::new(&section, 42, RowLength::Fixed(16)), 7, &[true; 16]);
        let got: Vec<bool> = as_boolean_array(&groups).unwrap().values().iter().collect();
        assert_eq!(got, expected[1].groups);
    }

    #[tokio::test]
    async fn bad_arguments_are_named() {
        let error = one("SELECT subtokens(50257, 50257, 4)").await.unwrap_err().to_string();
        assert!(error.contains("id: got 50257, valid: 0 to 50256"), "{error}");
        let error = one("SELECT partition(0, 8, 1, 2, 2)").await.unwrap_err().to_string();
        assert!(error.contains("view: got 2, valid: 0 to 1"), "{error}");
    }
}
