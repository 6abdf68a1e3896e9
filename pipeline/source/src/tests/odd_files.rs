//! Almost valid files: each is read completely, or gives one error that names it.

use super::*;

fn refused(bench: &Bench, fields: Value) -> String {
    let input = input(fields);
    let listed = bench.try_files(&input);
    match listed {
        Err(ListError::Problems(problems)) => problems.iter().map(ToString::to_string).collect(),
        Err(ListError::Store(e)) => panic!("{e}"),
        Ok(_) => bench.try_all(&input, 1 << 20).unwrap_err().to_string(),
    }
}

#[test]
fn zeros_behind_a_gzip_member_are_passed_and_other_bytes_are_not() {
    let lines = |text: &str| gzip(format!("{text}\n").as_bytes());
    let padded = |zeros: usize| [lines("a"), lines("b"), vec![0; zeros]].concat();
    for zeros in [1, 7, 512, 200_000] {
        let bench = Bench::with(&[("a.txt.gz", &padded(zeros))]);
        bench.assert_documents(&input(json!({"format": "text"})), &["a", "b"]);
    }
    for bytes in [[padded(9), lines("c")].concat(), [padded(9), b"x".to_vec()].concat()] {
        let bench = Bench::with(&[("a.txt.gz", &bytes)]);
        let error = refused(&bench, json!({"format": "text"}));
        assert!(error.starts_with("a.txt.gz: ") && error.contains("zeros and then other bytes"), "{error}");
    }
    let bench = Bench::with(&[("a.txt.gz", &vec![0; 512])]);
    assert!(refused(&bench, json!({"format": "text"})).starts_with("a.txt.gz: "));
}

#[test]
fn several_arrow_streams_in_one_file_are_refused() {
    let stream = |text: &str| {
        let column: arrow::array::ArrayRef = Arc::new(arrow::array::StringArray::from(vec![text]));
        let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
        let mut writer = arrow::ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
        writer.write(&batch).unwrap();
        writer.into_inner().unwrap()
    };
    let arrow = json!({"format": "arrow"});
    let bench = Bench::with(&[("a.arrow", &[stream("a"), vec![0; 24]].concat())]);
    assert_eq!(bench.all(&input(arrow.clone()), 1 << 20).documents, ["a"]);
    for after in [stream("b"), b"x".to_vec(), [vec![0; 8], b"x".to_vec()].concat()] {
        let bench = Bench::with(&[("a.arrow", &[stream("a"), after].concat())]);
        let error = refused(&bench, arrow.clone());
        assert!(error.starts_with("a.arrow: ") && error.contains("one stream in a file"), "{error}");
    }
}

#[test]
fn a_name_with_brackets_is_found_as_it_is_written() {
    let bench = Bench::with(&[("br[a].jsonl", b"{\"text\":\"brackets\"}\n"), ("br[b].jsonl", b"{\"text\":\"b\"}\n")]);
    assert_eq!(bench.all(&input(json!({"paths": ["br[a].jsonl"]})), 1 << 20).documents, ["brackets"]);
    // the pattern also matches another file
    bench.put("bra.jsonl", b"{\"text\":\"pattern\"}\n");
    assert_eq!(bench.all(&input(json!({"paths": ["br[a].jsonl"]})), 1 << 20).documents, ["brackets", "pattern"]);
}

#[test]
fn a_file_whose_size_hides_its_bytes_is_refused() {
    let bench = Bench::new();
    for path in ["/proc/cpuinfo", "/proc/cpuinf?"] {
        let error = refused(&bench, json!({"format": "text", "paths": [path]}));
        assert!(error.contains("but is not empty"), "{error}");
    }
}

#[test]
fn a_misspelt_text_column_is_told_with_the_one_that_was_meant() {
    let bench = Bench::with(&[("a.jsonl", b"{\"id\":1,\"text\":\"a\"}\n"), ("b.csv", b"id,text\n1,a\n")]);
    let error = refused(&bench, json!({"paths": ["a.jsonl"], "text": "txt"}));
    assert!(error.contains("which `input.text` names; its keys: id, text; did you mean `text`?"), "{error}");
    let error = refused(&bench, json!({"paths": ["b.csv"], "format": "csv", "text": "test"}));
    assert!(error.contains("columns: id, text; did you mean `text`?"), "{error}");
    let error = refused(&bench, json!({"paths": ["b.csv"], "format": "csv", "text": "body"}));
    assert!(error.ends_with("columns: id, text"), "{error}");
}
