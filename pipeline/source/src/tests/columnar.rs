use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, DictionaryArray, Int32Array, LargeStringArray, StringArray, StringViewArray,
};
use arrow::datatypes::{DataType, Field, Int32Type, Schema};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use stillhouse_schemas::manifest::Range;

use super::*;

fn texts(n: usize) -> Vec<String> {
    (0..n).map(|i| format!("row {i} é {}", "z".repeat(i * 31 % 83))).collect()
}

/// Returns the texts in every Arrow type that a string column may have.
fn arrays(texts: &[String]) -> Vec<ArrayRef> {
    let all = || texts.iter().map(String::as_str);
    vec![
        Arc::new(StringArray::from_iter_values(all())),
        Arc::new(LargeStringArray::from_iter_values(all())),
        Arc::new(StringViewArray::from_iter_values(all())),
        Arc::new(all().collect::<DictionaryArray<Int32Type>>()),
    ]
}

fn batch(text: ArrayRef) -> RecordBatch {
    let n = text.len() as i32;
    let fields = vec![Field::new("n", DataType::Int32, false), Field::new("text", text.data_type().clone(), true)];
    RecordBatch::try_new(Arc::new(Schema::new(fields)), vec![Arc::new(Int32Array::from_iter_values(0..n)), text])
        .unwrap()
}

fn arrow_bytes(batch: &RecordBatch, rows: usize, compression: Option<CompressionType>, stream: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let parts: Vec<RecordBatch> =
        (0..batch.num_rows()).step_by(rows).map(|i| batch.slice(i, rows.min(batch.num_rows() - i))).collect();
    if stream {
        let mut writer = StreamWriter::try_new_with_options(&mut out, &batch.schema(), options).unwrap();
        parts.iter().for_each(|b| writer.write(b).unwrap());
        writer.finish().unwrap();
    } else {
        let mut writer = FileWriter::try_new_with_options(&mut out, &batch.schema(), options).unwrap();
        parts.iter().for_each(|b| writer.write(b).unwrap());
        writer.finish().unwrap();
    }
    out
}

#[test]
fn parquet_of_several_row_groups() {
    let texts = texts(50);
    for array in arrays(&texts) {
        for group in [7, 50] {
            let bench = Bench::with(&[("a.parquet", &parquet_bytes(&batch(array.clone()), group))]);
            bench.assert_documents(&input(json!({"format": "parquet"})), &texts);
        }
    }
}

#[test]
fn arrow_of_several_batches_as_file_and_stream() {
    let texts = texts(50);
    for array in arrays(&texts) {
        for compression in [None, Some(CompressionType::ZSTD), Some(CompressionType::LZ4_FRAME)] {
            for stream in [false, true] {
                let bytes = arrow_bytes(&batch(array.clone()), 7, compression, stream);
                let bench = Bench::with(&[("a.arrow", &bytes)]);
                for target in [1, 100, 1000, 1 << 20] {
                    assert_eq!(bench.all(&input(json!({"format": "arrow"})), target).documents, texts);
                }
            }
        }
    }
}

#[test]
fn rows_are_split_by_size_and_held_out_exactly() {
    let texts = texts(50);
    let bench = Bench::with(&[
        ("a.parquet", &parquet_bytes(&batch(arrays(&texts[..30])[0].clone()), 8)),
        ("b.parquet", &parquet_bytes(&batch(arrays(&texts[30..])[0].clone()), 8)),
    ]);
    let input = input(json!({"format": "parquet", "holdout": {"validation": {"last_documents": 23}}}));
    let splits = bench.plan(&input, 400).unwrap();
    let (train, held): (Vec<_>, Vec<_>) = splits.into_iter().partition(|s| s.dataset_split == "train");
    let files = bench.files(&input);
    assert_eq!(bench.read(&files, &input, &train).unwrap().documents, texts[..27]);
    assert_eq!(bench.read(&files, &input, &held).unwrap().documents, texts[27..]);
    assert!(train.len() > 2 && held.len() > 1);
    assert!(matches!(held[0].pieces[0].range, Range::Rows { start: 27, .. }), "{held:?}");
}

#[test]
fn nulls_and_bytes_that_are_not_text_follow_on_error() {
    let nulls: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("b")]));
    let cases =
        [("parquet", parquet_bytes(&batch(nulls.clone()), 2)), ("arrow", arrow_bytes(&batch(nulls), 2, None, false))];
    for (format, bytes) in cases {
        let bench = Bench::with(&[("x", &bytes)]);
        for target in [1, 1 << 20] {
            let text = bench.try_all(&input(json!({"format": format})), target).unwrap_err().to_string();
            assert!(text.starts_with("x: row 1 (from 0): null text: the value of \"text\" is null"), "{text}");
            let got = bench.all(&input(json!({"format": format, "on_error": "skip"})), target);
            assert_eq!((got.documents, got.summary.skipped["null text"]), (vec!["a".into(), "b".into()], 1));
        }
    }
}

/// A Parquet file whose string column holds bytes that are not UTF-8, written through the column writer, which does not
/// validate.
fn broken_strings() -> Vec<u8> {
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::writer::SerializedFileWriter;
    let schema = parquet::schema::parser::parse_message_type("message m { required binary text (STRING); }").unwrap();
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, Arc::new(schema), Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values = [ByteArray::from("good"), ByteArray::from(vec![0xff, 0xfe]), ByteArray::from("too")];
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    out
}

#[test]
fn a_parquet_cell_that_is_not_utf8_is_one_bad_record() {
    let bench = Bench::with(&[("x.parquet", &broken_strings())]);
    let text = bench.try_all(&input(json!({"format": "parquet"})), 100).unwrap_err().to_string();
    assert!(text.starts_with("x.parquet: row 1 (from 0): invalid UTF-8"), "{text}");
    let got = bench.all(&input(json!({"format": "parquet", "on_error": "skip"})), 100);
    assert_eq!(got.documents, ["good", "too"]);
    assert_eq!(got.ids, [DocumentId(0), DocumentId(2)]);
}

#[test]
fn long_cells_are_cut_into_pieces() {
    let long = "é🎲".repeat(5000);
    let bench =
        Bench::with(&[("x.parquet", &parquet_bytes(&batch(arrays(std::slice::from_ref(&long))[0].clone()), 9))]);
    let got = bench.all(&input(json!({"format": "parquet"})), 100);
    assert_eq!(got.documents, [long]);
    assert!(got.longest_piece <= 4000 && got.longest_piece > 3990);
}

#[test]
fn columnar_files_that_are_cut_off_are_named() {
    let whole = batch(arrays(&texts(500))[0].clone());
    for (format, bytes) in [
        ("parquet", parquet_bytes(&whole, 100)),
        ("arrow", arrow_bytes(&whole, 100, None, false)),
        ("arrow", arrow_bytes(&whole, 100, None, true)),
    ] {
        for length in [3, 9, bytes.len() / 2, bytes.len() - 20] {
            let bench = Bench::with(&[("x", &bytes[..length])]);
            if let Err(error) = bench.try_all(&input(json!({"format": format})), 1 << 20) {
                assert!(matches!(error, SourceError::Corrupt { .. }), "{error}");
                assert!(error.to_string().starts_with("x: ") && !error.retryable());
            } else {
                // a stream may end after any message
                assert_eq!((format, length), ("arrow", bytes.len() - 20));
            }
        }
    }
}

#[test]
fn missing_and_mistyped_columns_are_problems_of_the_job() {
    let text: ArrayRef = Arc::new(StringArray::from(vec!["a"]));
    let blob: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"a"]));
    let bench = Bench::with(&[
        ("a.parquet", &parquet_bytes(&batch(text.clone()), 9)),
        ("b.parquet", &parquet_bytes(&batch(blob), 9)),
        ("c.arrow", &arrow_bytes(&batch(text), 9, None, true)),
        ("d.csv", b"id,body\n1,2\n"),
        ("e.parquet", b"not parquet"),
    ]);
    let problems = |format: &str, path: &str, text: &str| {
        let input = input(json!({"format": format, "paths": [path], "text": text}));
        let problems = check_columns(&bench.store, &bench.files(&input), &input, &mut |_| {}).unwrap();
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(problems("parquet", "a.parquet", "text"), "");
    assert_eq!(problems("arrow", "c.arrow", "text"), "");
    assert_eq!(problems("csv", "d.csv", "body"), "");
    assert_eq!(
        problems("parquet", "a.parquet", "body"),
        "input.text: got \"body\": no such column in a.parquet; columns: n (int32), text (string)"
    );
    // a binary column may be the text
    assert_eq!(problems("parquet", "b.parquet", "text"), "");
    assert!(problems("parquet", "b.parquet", "n").contains("is of type int32 in b.parquet; valid: a string column"));
    assert!(problems("arrow", "c.arrow", "n").contains("the column is of type Int32 in c.arrow"));
    assert_eq!(
        problems("csv", "d.csv", "text"),
        "input.text: got \"text\": no such column in d.csv; columns: id (text), body (text)"
    );
    assert!(problems("parquet", "e.parquet", "text").starts_with("input.paths: e.parquet: cannot be read as Parquet"));
}

/// Pages have checksums if the writer was configured so (pyarrow: `write_page_checksum=True`, no compression, no
/// dictionaries).
#[test]
fn a_page_that_is_not_what_its_checksum_says_is_an_error() {
    let whole = include_bytes!("../../testdata/page_checksums.parquet");
    let text = input(json!({"format": "parquet", "paths": ["a.parquet"]}));
    let sound = Bench::with(&[("a.parquet", whole)]);
    sound.assert_documents(&text, &["The owl of Minerva", "spreads its wings", "with the falling of the dusk"]);

    let flipped = |of: &[u8]| {
        let at = whole.windows(of.len()).position(|window| window == of).unwrap();
        let mut bytes = whole.to_vec();
        bytes[at] ^= 1;
        Bench::with(&[("a.parquet", &bytes)])
    };
    let says = |error: String| assert!(error.contains("a.parquet") && error.contains("checksum"), "{error}");
    let of_text = flipped(b"spreads");
    says(of_text.try_all(&text, 1 << 20).unwrap_err().to_string());
    // a holdout uses the same readers
    let mut held = text.clone();
    held.holdout = serde_json::from_value(json!({"validation": {"last_documents": 1}})).unwrap();
    says(of_text.try_all(&held, 1 << 20).unwrap_err().to_string());
}
