//! Tests documents and checks against the configs of the operators.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, BooleanArray, FixedSizeListArray, Float16Array, Float32Array, Int32Array, ListArray,
    PrimitiveArray, RecordBatch, UInt16Array,
};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Field, Float32Type, Int32Type, Schema, SchemaRef, UInt8Type, UInt16Type, UInt64Type,
};
use serde_json::{Value, json};
use stillhouse_schemas::columns as names;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::spec::{JobSpec, SpecialTokens};

use super::*;
use crate::config::SpecialIds;
use crate::rows::list_column;
use crate::testing::{context, documents, drive, gpt2, job_with, repository};

const JOB: &str = r#"{
    "version": 1, "name": "small", "seed": 7, "input": {"format": "text", "paths": ["x"]}, "pack": {"length": 8, "remainder": "pad"},
    "extract": {"teacher": {"path": "t"}, "topk": 2, "noise": {"draws": 2}, "logz_temperatures": [1, 2],
        "entropy": true, "candidates": [0, 5], "samples": {"draws": 4, "power": 0.9}, "top_p": {"mass": 0.9, "most": 8}, "hidden_states": {"layers": [1, 0]}}, "subtokens": {"length": 4}, "partitions": {"views": 2},
    "orders": {"kind": "strided", "streams": [1, 2, 4]}, "output": {"path": "out"}
}"#;

fn job(patch: &str) -> Vec<OperatorSpec> {
    let mut value: Value = serde_json::from_str(JOB).unwrap();
    if patch == "packing" {
        value.as_object_mut().unwrap().retain(|key, _| key != "extract");
    }
    if patch == "writing" {
        value["pack"] = json!({"length": 8, "mode": "pad"});
        value["extract"] = json!({"teacher": {"path": "t"}, "mode": "sequential", "sequential": {"prompt_tokens": 3}});
    }
    let mut spec: JobSpec = serde_json::from_value(value).unwrap();
    if let Some(states) = spec.extract.as_mut().and_then(|e| e.hidden_states.as_mut()) {
        states.width = Some(3);
    }
    let token = |role: &str| (role.to_owned(), SpecialToken { token: "<|endoftext|>".into(), id: 50_256 });
    let special_ids = SpecialIds::from_manifest(&["bos", "eos", "pad"].map(token).into(), SpecialTokens::Text);
    operators_for_job(&JobContext { spec: &spec, vocab_size: 50_257, special_ids }).unwrap()
}

#[test]
fn a_job_has_its_operators_in_order() {
    let names = |specs: Vec<OperatorSpec>| specs.iter().map(OperatorSpec::name).collect::<Vec<_>>();
    assert_eq!(names(job("")), ["clean", "tokenize", "pack", "extract", "subtokens", "partitions", "orders"]);
    assert_eq!(names(job("packing")), ["clean", "tokenize", "pack", "subtokens", "partitions", "orders"]);
    assert_eq!(
        names(job("writing")),
        ["clean", "tokenize", "prompts", "generate", "subtokens", "partitions", "orders"]
    );
}

/// The schema has exactly the declared columns.
#[test]
fn the_columns_of_a_job_are_those_that_its_operators_declare() {
    let mut declared: BTreeSet<&str> = BTreeSet::new();
    for column in columns() {
        assert!(declared.insert(column.name), "{} is declared twice", column.name);
        assert!(!column.dtype.is_empty() && !column.when.is_empty() && !column.meaning.is_empty(), "{}", column.name);
    }
    let schema = |job: Vec<OperatorSpec>| {
        let empty: SchemaRef = Arc::new(Schema::empty());
        job.iter().fold(empty, |schema, spec| spec.output_schema(&schema))
    };
    let (schema, of_written) = (schema(job("")), schema(job("writing")));
    for field in schema.fields().iter().chain(of_written.fields()) {
        let column = columns().find(|c| c.name == field.name()).unwrap_or_else(|| panic!("{}", field.name()));
        let (list, item) = match field.data_type() {
            DataType::FixedSizeList(item, _) => ("fixed list ", item.data_type()),
            DataType::List(item) => ("list ", item.data_type()),
            single => ("", single),
        };
        let item = match item {
            DataType::Boolean => "bool".to_owned(),
            other => other.to_string().to_lowercase(),
        };
        let words = column.dtype.strip_prefix(list).unwrap_or_else(|| panic!("{}: {list}", column.dtype));
        assert!(words.split([' ', '/']).any(|word| word == item), "{}: {item} is not in {}", column.name, column.dtype);
        let dimensions = |shape: &str| shape.split(',').filter(|part| !part.is_empty()).count();
        let stored = field.metadata().get(names::SHAPE).map_or("", String::as_str);
        assert_eq!(dimensions(stored), dimensions(column.shape), "{}: {stored}", column.name);
    }
}

/// To update the table: run `cargo run -p stillhouse -- schema --columns` and paste the output between the marks.
#[test]
fn the_table_of_the_format_is_that_of_the_code() {
    let text = std::fs::read_to_string(repository("docs/FORMAT.md")).unwrap();
    let (_, rest) = text.split_once("<!-- columns").unwrap();
    let (_, rest) = rest.split_once("-->\n\n").unwrap();
    let (kept, _) = rest.split_once("\n<!-- end of columns -->").unwrap();
    assert!(
        kept == columns_table(),
        "docs/FORMAT.md is out of date; between its marks it should say:\n\n{}",
        columns_table()
    );
}

/// The Python package names the columns for type checkers; it reads every column of a manifest regardless.
#[test]
fn the_reader_of_trainers_names_the_same_columns() {
    let text = std::fs::read_to_string(repository("python/stillhouse/batch.py")).unwrap();
    for (list, ragged) in [("DenseColumn", false), ("RaggedColumn", true)] {
        let (_, rest) = text.split_once(&format!("{list} = Literal[")).unwrap();
        let (names, _) = rest.split_once(']').unwrap();
        for name in names.split(',').map(|name| name.trim().trim_matches('"')).filter(|name| !name.is_empty()) {
            let column = columns().find(|c| c.name == name).unwrap_or_else(|| panic!("{list}: no operator has {name}"));
            assert_eq!(column.shape == "[*]", ragged, "{list}: {name}");
        }
    }
}

/// `Batch.padded` pads the columns that it lists; one that it does not list would stay without padding, and no error says so.
#[test]
fn the_reader_of_trainers_pads_every_column_with_positions() {
    let text = std::fs::read_to_string(repository("python/stillhouse/batch.py")).unwrap();
    let listed = |list: &str| -> BTreeSet<String> {
        let (_, rest) = text.split_once(&format!("\n{list} = (")).unwrap();
        let (names, _) = rest.split_once(')').unwrap();
        names.split(',').map(|name| name.trim().trim_matches('"').to_owned()).filter(|name| !name.is_empty()).collect()
    };
    let with_positions = |is_in_list: fn(&str) -> bool| -> BTreeSet<String> {
        columns().filter(|c| c.name != names::NOISE && is_in_list(c.shape)).map(|c| c.name.to_owned()).collect()
    };
    assert_eq!(listed("_AFTER"), with_positions(|shape| shape.starts_with("[L")));
    assert_eq!(listed("_BEFORE"), with_positions(|shape| shape.contains(", L")));
}

fn row_checks(operators: Vec<OperatorSpec>) -> RowChecks {
    let context = CheckContext { vocab_size: 50_257, length: 8, split: SplitId(3), sequence_range: None };
    RowChecks { context, operators }
}

/// Returns the operators of a job with a teacher, and packed rows with all of its columns at certain values.
fn rows() -> (Vec<OperatorSpec>, RecordBatch) {
    let context = context(&gpt2());
    let packing = job("packing");
    let mut batches = vec![documents(&[(3 << 32, "one two three four five six seven eight nine", true)])];
    for spec in &packing {
        batches = drive(spec.build(&context).unwrap().as_mut(), &batches).unwrap();
    }
    let batch = batches.remove(0);
    let n = batch.num_rows();
    let specs = job("");
    let extract = specs.iter().find(|spec| spec.name() == "extract").unwrap();
    let fields = extract.config::<crate::extract::ExtractConfig>().unwrap().fields();
    let arrays: Vec<ArrayRef> = fields
        .iter()
        .map(|field| match (field.name().as_str(), field.data_type()) {
            (names::NOISE_INDEX, _) => empty(field, Arc::new(UInt16Array::from(Vec::<u16>::new())), n),
            (names::NOISE_LOGPROB, _) => empty(field, Arc::new(Float16Array::from(Vec::<half::f16>::new())), n),
            (names::TOPK_INDEX, DataType::FixedSizeList(_, width)) => {
                let width = *width as usize;
                list_column(field, Arc::new(Int32Array::from(vec![0; n * width])), &vec![width; n]).unwrap()
            }
            (names::NOISE_COUNT, DataType::FixedSizeList(_, width)) => {
                let width = *width as usize;
                let counts = UInt16Array::from(vec![0; n * width]);
                list_column(field, Arc::new(counts), &vec![width; n]).unwrap()
            }
            (names::SAMPLED_COUNT | names::TOP_P_COUNT, _) => {
                repeat_over_rows(field, Arc::new(UInt16Array::from(vec![1; n * 8])), n)
            }
            (names::SAMPLED_INDEX | names::TOP_P_INDEX, _) => {
                repeat_over_rows(field, Arc::new(UInt16Array::from(vec![0; n * 8])), n)
            }
            (names::SAMPLED_TIMES, _) => repeat_over_rows(field, Arc::new(UInt16Array::from(vec![4; n * 8])), n),
            (names::SAMPLED_RATIO, _) => repeat_over_rows(field, Arc::new(Float32Array::from(vec![1.0; n * 8])), n),
            (names::TOP_P_LOGPROB, _) => repeat_over_rows(field, Arc::new(Float32Array::from(vec![0.0; n * 8])), n),
            (names::TOP_P_TAIL, _) => {
                repeat_over_rows(field, Arc::new(Float32Array::from(vec![f32::NEG_INFINITY; n * 8])), n)
            }
            (names::HIDDEN_STATES, DataType::FixedSizeList(_, width)) => {
                let width = *width as usize;
                list_column(field, Arc::new(Float16Array::from(vec![half::f16::ONE; n * width])), &vec![width; n])
                    .unwrap()
            }
            (_, DataType::FixedSizeList(_, width)) => {
                let width = *width as usize;
                list_column(field, Arc::new(Float32Array::from(vec![0.0; n * width])), &vec![width; n]).unwrap()
            }
            (name, other) => panic!("{name}: {other}"),
        })
        .collect();
    (specs, crate::config::with_columns(&batch, fields, arrays).unwrap())
}

fn empty(field: &Field, values: ArrayRef, rows: usize) -> ArrayRef {
    list_column(field, values, &vec![0; rows]).unwrap()
}

/// Builds a list of 8 values per row, one per position.
fn repeat_over_rows(field: &Field, values: ArrayRef, rows: usize) -> ArrayRef {
    list_column(field, values, &vec![8; rows]).unwrap()
}

/// Replaces the values of a column; keeps its lists.
fn with_values(batch: &RecordBatch, name: &str, change: impl Fn(&ArrayRef) -> ArrayRef) -> RecordBatch {
    let at = batch.schema().index_of(name).unwrap();
    let mut arrays = batch.columns().to_vec();
    arrays[at] = match batch.column(at).data_type() {
        DataType::FixedSizeList(item, width) => {
            let list = batch.column(at).as_any().downcast_ref::<FixedSizeListArray>().unwrap();
            Arc::new(FixedSizeListArray::try_new(item.clone(), *width, change(list.values()), None).unwrap())
        }
        DataType::List(item) => {
            let list = batch.column(at).as_any().downcast_ref::<ListArray>().unwrap();
            Arc::new(ListArray::try_new(item.clone(), list.offsets().clone(), change(list.values()), None).unwrap())
        }
        _ => change(batch.column(at)),
    };
    RecordBatch::try_new(batch.schema(), arrays).unwrap()
}

fn shifted<T: ArrowPrimitiveType>(array: &ArrayRef, by: T::Native) -> ArrayRef
where
    T::Native: std::ops::Add<Output = T::Native>,
{
    let values = array.as_primitive::<T>();
    Arc::new(PrimitiveArray::<T>::from_iter_values(values.values().iter().map(|v| *v + by)))
}

#[test]
fn the_invariants_of_every_operator_fail_on_a_broken_row() {
    let (specs, good) = rows();
    let row_checks = row_checks(specs.clone());
    assert_eq!(row_checks.check(&good).unwrap(), []);
    let negated = |array: &ArrayRef| -> ArrayRef {
        let values: Vec<bool> = array.as_boolean().values().iter().map(|v| !v).collect();
        Arc::new(BooleanArray::from(values))
    };
    let broken: Vec<(&str, &str, RecordBatch)> = vec![
        ("pack", "sequence_id", with_values(&good, names::SEQUENCE_ID, |a| shifted::<UInt64Type>(a, 1 << 32))),
        ("pack", "token", with_values(&good, names::INPUT_IDS, |a| shifted::<Int32Type>(a, 50_257))),
        (
            "pack",
            "attention_mask is true after padding; valid: true for the tokens, then false",
            with_values(&good, names::ATTENTION_MASK, negated),
        ),
        ("pack", "document_offsets", with_values(&good, names::DOCUMENT_OFFSETS, |a| shifted::<Int32Type>(a, 1))),
        ("extract", "logprob", with_values(&good, names::LOGPROB, |a| shifted::<Float32Type>(a, 0.5))),
        ("extract", "counts", with_values(&good, names::NOISE_COUNT, |a| shifted::<UInt16Type>(a, 1))),
        ("extract", "top-k", with_values(&good, names::TOPK_LOGPROB, |a| shifted::<Float32Type>(a, 0.5))),
        ("extract", "logz", with_values(&good, names::LOGZ, |a| shifted::<Float32Type>(a, f32::INFINITY))),
        ("extract", "entropy", with_values(&good, names::ENTROPY, |a| shifted::<Float32Type>(a, 11.0))),
        (
            "extract",
            "candidate_logprob",
            with_values(&good, names::CANDIDATE_LOGPROB, |a| shifted::<Float32Type>(a, 0.5)),
        ),
        ("extract", "sampled_index has 8", with_values(&good, names::SAMPLED_COUNT, |a| shifted::<UInt16Type>(a, 1))),
        ("extract", "ascend", with_values(&good, names::SAMPLED_INDEX, |a| shifted::<UInt16Type>(a, 50_257))),
        ("extract", "add up to 5", with_values(&good, names::SAMPLED_TIMES, |a| shifted::<UInt16Type>(a, 1))),
        ("extract", "sampled_ratio", with_values(&good, names::SAMPLED_RATIO, |a| shifted::<Float32Type>(a, -1.0))),
        ("extract", "top_p_index has 8", with_values(&good, names::TOP_P_COUNT, |a| shifted::<UInt16Type>(a, 1))),
        ("extract", "do not descend", with_values(&good, names::TOP_P_INDEX, |a| shifted::<UInt16Type>(a, 50_257))),
        ("extract", "do not descend", with_values(&good, names::TOP_P_LOGPROB, |a| shifted::<Float32Type>(a, 0.5))),
        (
            "extract",
            "hold 2",
            with_values(&good, names::TOP_P_TAIL, |a| Arc::new(Float32Array::from(vec![0.0; a.len()]))),
        ),
        (
            "extract",
            "hidden_states at position 0: NaN",
            with_values(&good, names::HIDDEN_STATES, |a| Arc::new(Float16Array::from(vec![half::f16::NAN; a.len()]))),
        ),
        ("subtokens", "do not decode", with_values(&good, names::SUBTOKENS, |a| shifted::<UInt8Type>(a, 1))),
        ("partitions", "differ from those that the seed gives", with_values(&good, names::PARTITION, negated)),
        (
            "partitions",
            "differ from those that the seed gives",
            with_values(&good, names::PARTITION_T, |a| shifted::<Float32Type>(a, 0.1)),
        ),
        (
            "orders",
            "differ from those that the seed gives",
            with_values(&good, names::ORDER, |a| shifted::<UInt16Type>(a, 1)),
        ),
        (
            "orders",
            "differ from those that the seed gives",
            with_values(&good, names::BLOCK, |a| shifted::<UInt16Type>(a, 1)),
        ),
    ];
    for (operator, says, batch) in &broken {
        let spec = specs.iter().find(|spec| spec.name() == *operator).unwrap();
        let mut reported = Vec::new();
        spec.check(batch, &row_checks.context, &mut reported).unwrap();
        assert!(reported.iter().any(|b| b.message.contains(says)), "{operator}: {says}: {reported:?}");
    }
    let mut checked: BTreeSet<&str> = broken.iter().map(|(operator, ..)| *operator).collect();
    checked.extend(a_broken_image());
    let with_columns = operators().iter().filter(|kind| !kind.columns().is_empty()).map(|kind| kind.name());
    // tested elsewhere: `generate::tests::rows_that_no_teacher_writes_are_found`,
    // `carry::tests::values_that_are_missing_or_differ_are_found`
    let with_columns = with_columns.filter(|name| !matches!(*name, "generate" | "carry"));
    assert_eq!(checked, with_columns.collect(), "an operator with columns and no broken row in this test");
}

/// Images need a test of their own, because their rows belong to another job than rows of text.
fn a_broken_image() -> Option<&'static str> {
    let (spec, good) = crate::grid::tests::images();
    let context = CheckContext { vocab_size: 256, length: 12, split: SplitId(3), sequence_range: None };
    let row_checks = RowChecks { context, operators: vec![spec.clone()] };
    assert_eq!(row_checks.check(&good).unwrap(), []);
    for (says, batch) in [
        ("sequence_id", with_values(&good, names::SEQUENCE_ID, |a| shifted::<UInt64Type>(a, 1 << 32))),
        ("token 256", with_values(&good, names::INPUT_IDS, |a| shifted::<Int32Type>(a, 1))),
        ("not those of one image", with_values(&good, names::DOCUMENT_OFFSETS, |a| shifted::<Int32Type>(a, 1))),
        ("label 2, valid: 0 to 1", with_values(&good, names::LABEL, |a| shifted::<Int32Type>(a, 1))),
        ("label -1, valid: 0 to 1", with_values(&good, names::LABEL, |a| shifted::<Int32Type>(a, -1))),
    ] {
        let mut reported = Vec::new();
        spec.check(&batch, &row_checks.context, &mut reported).unwrap();
        assert!(reported.iter().any(|b| b.message.contains(says)), "grid: {says}: {reported:?}");
    }
    Some(spec.name())
}

#[test]
fn an_estimate_grows_with_every_operator() {
    let (all, packing) = (job(""), job("packing"));
    let estimate = |specs: &[OperatorSpec]| bytes_per_token(specs, 50_257);
    let of_ids = 50_257f64.log2() / 8.0;
    assert_eq!(estimate(&packing[..3]), of_ids);
    assert_eq!(estimate(&packing), of_ids + of_ids + 2.0 / 8.0 + 1.5);
    assert!(estimate(&all) > estimate(&packing) + 2.0 * 0.5);
    assert_eq!(estimate(&[]), 0.0);
}

/// The hash of a job has the content of the file in place of its name.
#[test]
fn the_name_of_a_file_is_not_in_the_identity_of_a_job() {
    let job = job_with(
        "subtokens: {length: 2, permutation: numbers.npy}\npartitions: {views: 2}\norders: {kind: random, steps: 3}",
    );
    let mut job = serde_json::to_value(job_format().read(&job).unwrap()).unwrap();
    let whole = job.clone();
    job_format().retain_identity(&mut job);
    assert_eq!(job["subtokens"], json!({"length": 2}));
    for section in ["partitions", "orders"] {
        assert_eq!(job[section], whole[section]);
    }
}

/// Names of types and keys of sections appear in schemas that editors and clients have.
#[test]
fn sections_of_shipped_operators_are_in_the_schema() {
    let schema = job_format().json_schema();
    for (key, name) in [("subtokens", "Subtokens"), ("partitions", "Partitions"), ("orders", "Orders")] {
        assert_eq!(schema["properties"][key]["$ref"], format!("#/$defs/{name}"));
        assert!(schema["$defs"][name]["description"].is_string());
    }
    let derivable: Vec<&str> =
        operators().iter().filter_map(|o| o.section()).filter(|s| s.is_derivable).map(|s| s.key).collect();
    assert_eq!(derivable, ["subtokens", "partitions", "orders"]);
}

/// The keys that the hash of a derivation leaves out. Leaving out another one would change the hashes of data sets that
/// were derived before.
#[test]
fn the_identity_of_a_derivation_keeps_what_the_data_set_was_made_from() {
    let sections = "subtokens: {length: 2, permutation: numbers.npy}\nextract: {teacher: {path: t, device: cpu}}\n\
        storage: {region: x}\nengine: {parallel_splits: 2}\n";
    let text = job_with(sections).replace("{path: out}", "{path: out, card: {license: MIT}, storage: {region: y}}");
    let mut job = serde_json::to_value(job_format().read(&text).unwrap()).unwrap();
    let mut expected = job.clone();
    for (section, key) in [
        ("", "name"),
        ("", "engine"),
        ("", "storage"),
        ("/subtokens", "permutation"),
        ("/output", "card"),
        ("/output", "path"),
        ("/output", "storage"),
    ] {
        expected.pointer_mut(section).unwrap().as_object_mut().unwrap().remove(key).unwrap();
    }
    job_format().retain_derived_identity(&mut job);
    assert_eq!(job, expected);
    assert!(job.pointer("/input/paths").is_some() && job.pointer("/extract/teacher/path").is_some());
}
