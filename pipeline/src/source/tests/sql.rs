use super::columnar::parquet_bytes;
use super::*;

fn with_sql(fields: Value, sql: &str) -> Input {
    let mut input = input(fields);
    input.sql = Some(sql.into());
    input
}

fn run(bench: &Bench, input: &Input) -> Result<(Staged, Vec<String>), SourceError> {
    let out = tempfile::tempdir().unwrap();
    let staged_now = stage_sql(&bench.store, &bench.files(input), input, 64 << 20, out.path(), |_| {})?;
    assert_eq!(staged(out.path(), &bench.files(&input)).as_ref(), Some(&staged_now));
    let mut as_parquet = input.clone();
    as_parquet.format = stillhouse_schemas::spec::InputFormat::Parquet;
    let splits = plan_splits(&bench.store, &staged_now.files, &as_parquet, 1 << 20, &|_| {})?;
    let documents = bench.read(&staged_now.files, &as_parquet, &splits)?.documents;
    Ok((staged_now, documents))
}

fn problems(bench: &Bench, input: &Input) -> String {
    let problems = check_sql(&bench.store, &bench.files(input), input, |_| {}).unwrap();
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn jsonl() -> Bench {
    let lang = |i: usize| if i.is_multiple_of(2) { "en" } else { "de" };
    let row = |i: usize| {
        json!({"id": i, "lang": lang(i), "text": format!("document {i}"), "next": (i + 1) % 300}).to_string() + "\n"
    };
    Bench::with(&[
        ("b.jsonl", (0..150).map(row).collect::<String>().as_bytes()),
        ("a.jsonl", (150..300).map(row).collect::<String>().as_bytes()),
    ])
}

#[test]
fn a_filter_keeps_the_order_of_the_files() {
    let input =
        with_sql(json!({"paths": ["b.jsonl", "a.jsonl"]}), "SELECT text FROM input WHERE lang = 'en' AND id >= 100");
    let (_, documents) = run(&jsonl(), &input).unwrap();
    let expected: Vec<String> = (100..300).step_by(2).map(|i| format!("document {i}")).collect();
    assert_eq!(documents, expected);
}

#[test]
fn a_join_with_order_is_the_same_twice() {
    let sql = "SELECT a.text || ' > ' || b.text AS text FROM input a JOIN input b ON a.next = b.id \
               WHERE b.lang = 'de' ORDER BY a.id DESC LIMIT 20";
    let bench = jsonl();
    let input = with_sql(json!({}), sql);
    assert_eq!(problems(&bench, &input), "");
    let (staged, documents) = run(&bench, &input).unwrap();
    assert_eq!(documents[0], "document 298 > document 299");
    assert_eq!((documents.len(), staged.rows), (20, 20));
    assert_eq!(run(&bench, &input).unwrap().1, documents);
    let grouped = with_sql(json!({}), "SELECT lang || count(*) AS text FROM input GROUP BY lang");
    assert_eq!(run(&bench, &grouped).unwrap().1, run(&bench, &grouped).unwrap().1);
}

#[test]
fn every_format_is_queried() {
    let text: arrow::array::ArrayRef = std::sync::Arc::new(arrow::array::StringArray::from(vec!["x", "007", "z"]));
    let batch = RecordBatch::try_from_iter([("text", text)]).unwrap();
    let mut arrow_file = arrow::ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow_file.write(&batch).unwrap();
    let mut stream = arrow::ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    stream.write(&batch).unwrap();
    let csv = b"text\n\"x\"\n007\nz\n";
    let lines = b"x\n007\nz\n";
    let cases: Vec<(&str, &str, Vec<u8>)> = vec![
        ("parquet", "a.parquet", parquet_bytes(&batch, 2)),
        ("arrow", "a.arrow", arrow_file.into_inner().unwrap()),
        ("arrow", "s.arrow", stream.into_inner().unwrap()),
        ("csv", "a.csv", csv.to_vec()),
        ("csv", "a.csv.gz", gzip(csv)),
        ("csv", "a.csv.zst", zstandard(csv)),
        ("text", "a.txt", lines.to_vec()),
        ("text", "a.txt.gz", gzip(lines)),
        ("jsonl", "a.jsonl.gz", gzip(b"{\"text\":\"x\"}\n{\"text\":\"007\"}\n{\"text\":\"z\"}\n")),
    ];
    for (format, name, bytes) in cases {
        let bench = Bench::with(&[(name, &bytes)]);
        let input = with_sql(json!({"format": format}), "SELECT text FROM input WHERE text <> 'z'");
        assert_eq!(problems(&bench, &input), "", "{name}");
        assert_eq!(run(&bench, &input).unwrap().1, ["x", "007"], "{name}");
    }
}

#[test]
fn only_queries_over_the_input_are_allowed() {
    let bench = jsonl();
    for (sql, what) in [
        ("SELEC text", "Expected: an SQL statement, found: SELEC"),
        ("SELECT text FROM nowhere", "nowhere"),
        ("SELECT txt AS text FROM input", "txt"),
        ("SELECT id FROM input", "the query has no column \"text\", which `input.text` names; its columns: id (Int64)"),
        ("SELECT id AS text FROM input", "is of type Int64; valid: a string, such as CAST(\"text\" AS VARCHAR)"),
        ("CREATE TABLE t AS SELECT * FROM input", "DDL not supported"),
        ("COPY input TO '/tmp/never.parquet'", "DML not supported"),
        ("INSERT INTO input SELECT * FROM input", "DML not supported"),
        ("SET datafusion.execution.batch_size = 1", "Statement not supported"),
        ("EXPLAIN SELECT text FROM input", "not a query"),
        ("SELECT text FROM input ORDER BY random()", "random() can give another result at every run"),
        ("SELECT text FROM input WHERE now() > '2020-01-01'", "now() can give another"),
        ("SELECT text FROM input; SELECT text FROM input", "only supports a single"),
    ] {
        let input = with_sql(json!({}), sql);
        let text = problems(&bench, &input);
        assert!(text.starts_with(&format!("input.sql: got {sql:?}: ")) && text.contains(what), "{sql}: {text}");
        let error = run(&bench, &input).unwrap_err();
        assert!(!error.retryable() && error.to_string().contains(what), "{sql}: {error}");
    }
}

#[test]
fn nulls_of_the_query_follow_on_error_and_no_rows_are_no_files() {
    let sql = "SELECT CASE WHEN id % 100 = 0 THEN NULL ELSE text END AS text FROM input WHERE id < 102 AND id > 98";
    let error = run(&jsonl(), &with_sql(json!({}), sql)).unwrap_err().to_string();
    assert!(error.starts_with("sql/part-00000.parquet: row 1 (from 0): null text"), "{error}");
    let (_, documents) = run(&jsonl(), &with_sql(json!({"on_error": "skip"}), sql)).unwrap();
    assert_eq!(documents, ["document 99", "document 101"]);
    let (staged, documents) = run(&jsonl(), &with_sql(json!({}), "SELECT text FROM input WHERE id < 0")).unwrap();
    assert!(documents.is_empty() && staged.files.is_empty());
}

#[test]
fn text_lines_that_are_skipped_are_counted() {
    let bench = Bench::with(&[("a.txt", b"one\n\xff\nthree\n")]);
    let sql = "SELECT upper(text) AS text FROM input";
    let (staged, documents) = run(&bench, &with_sql(json!({"format": "text", "on_error": "skip"}), sql)).unwrap();
    assert_eq!((documents, staged.skipped["invalid UTF-8"]), (vec!["ONE".to_string(), "THREE".to_string()], 1));
    let error = run(&bench, &with_sql(json!({"format": "text"}), sql)).unwrap_err().to_string();
    assert!(error.starts_with("a.txt: line 2: invalid UTF-8"), "{error}");
}

#[test]
fn a_sort_beyond_its_memory_spills() {
    let row = |i: u64| {
        json!({"id": i.wrapping_mul(0x9e37_79b9) % 100_003, "text": format!("{i} {}", "pad ".repeat(200))}).to_string()
            + "\n"
    };
    let bench = Bench::with(&[("a.jsonl", (0..40_000).map(row).collect::<String>().as_bytes())]);
    let input = with_sql(json!({}), "SELECT text FROM input ORDER BY id, text");
    let out = tempfile::tempdir().unwrap();
    let staged = stage_sql(&bench.store, &bench.files(&input), &input, 16 << 20, out.path(), |_| {}).unwrap();
    assert_eq!(staged.rows, 40_000);
}

#[test]
fn files_compressed_in_different_ways_are_refused() {
    let bench = Bench::with(&[("a.jsonl", b"{\"text\":\"x\"}\n"), ("b.jsonl.gz", &gzip(b"{\"text\":\"x\"}\n"))]);
    let text = problems(&bench, &with_sql(json!({}), "SELECT text FROM input"));
    assert!(text.contains("a.jsonl and b.jsonl.gz are compressed in different ways"), "{text}");
}

#[test]
fn a_query_reads_nothing_but_the_input() {
    let bench = jsonl();
    let other = tempfile::tempdir().unwrap();
    let secrets = [("s.csv", "text\nPLANTED\n"), ("s.json", "{\"text\": \"PLANTED\"}\n"), ("s", "PLANTED\n")];
    for (name, body) in secrets {
        std::fs::write(other.path().join(name), body).unwrap();
    }
    let at = |name: &str| other.path().join(name).display().to_string();
    let (csv, json) = (at("s.csv"), at("s.json"));
    for (sql, what) in [
        (format!("SELECT text FROM '{csv}'"), "not found"),
        (format!("SELECT text FROM \"{csv}\""), "not found"),
        (format!("SELECT text FROM 'file://{json}'"), "not found"),
        (format!("SELECT text FROM \"file://{json}\""), "not found"),
        ("SELECT text FROM 'https://example.com/x.csv'".into(), "not found"),
        ("SELECT text FROM 'stillhouse://input'".into(), "not found"),
        (format!("SELECT text FROM input WHERE text IN (SELECT text FROM '{csv}')"), "not found"),
        (format!("WITH s AS (SELECT text FROM '{csv}') SELECT text FROM s"), "not found"),
        (format!("SELECT text FROM read_csv('{csv}')"), "'read_csv' not found"),
        (format!("SELECT text FROM read_parquet('{csv}')"), "'read_parquet' not found"),
        (format!("SELECT text FROM parquet_metadata('{csv}')"), "'parquet_metadata' not found"),
        (format!("SELECT read_file('{csv}') AS text FROM input"), "Invalid function 'read_file'"),
        (format!("SELECT pg_read_file('{csv}') AS text FROM input"), "Invalid function"),
        (format!("CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '{csv}'"), "DDL not supported"),
        (format!("CREATE VIEW t AS SELECT * FROM '{csv}'"), "not found"),
        ("CREATE FUNCTION f(DOUBLE) RETURNS DOUBLE RETURN $1".into(), "DDL not supported"),
        ("DROP TABLE input".into(), "DDL not supported"),
        (format!("COPY (SELECT text FROM input) TO '{}' STORED AS CSV", at("never.csv")), "DML not supported"),
        ("DELETE FROM input".into(), "DML not supported"),
        ("UPDATE input SET text = 'x'".into(), "DML not supported"),
        ("SET datafusion.catalog.information_schema = true".into(), "Statement not supported"),
        ("SET datafusion.catalog.location = '/etc'".into(), "Statement not supported"),
        ("PREPARE p AS SELECT text FROM input".into(), "Statement not supported"),
        ("EXECUTE p".into(), "Statement not supported"),
        ("SHOW ALL".into(), "information_schema"),
        ("SHOW TABLES".into(), "information_schema"),
        ("SHOW COLUMNS FROM input".into(), "information_schema"),
        ("SELECT table_name AS text FROM information_schema.tables".into(), "not found"),
        ("SELECT name AS text FROM information_schema.df_settings".into(), "not found"),
        ("SELECT text FROM datafusion.information_schema.tables".into(), "not found"),
        ("EXPLAIN ANALYZE SELECT text FROM input".into(), "not a query"),
        ("EXPLAIN VERBOSE SELECT text FROM input".into(), "not a query"),
        ("DESCRIBE input".into(), "not a query"),
        (format!("DESCRIBE '{csv}'"), "not found"),
    ] {
        let input = with_sql(json!({}), &sql);
        let text = problems(&bench, &input);
        assert!(text.starts_with("input.sql: got ") && text.contains(what), "{sql}: {text}");
        let error = run(&bench, &input).unwrap_err().to_string();
        assert!(error.contains(what), "{sql}: {error}");
        for told in [text.replace(&sql, ""), error.replace(&sql, "")] {
            assert!(!told.contains("PLANTED"), "{sql}: {told}");
        }
    }
    assert!(!other.path().join("never.csv").exists());
}

#[test]
fn what_is_not_there_and_what_may_not_be_read_are_told_in_the_same_words() {
    let bench = jsonl();
    let told =
        |path: &str| problems(&bench, &with_sql(json!({}), &format!("SELECT text FROM '{path}'"))).replace(path, "");
    assert_eq!(told("/etc/passwd"), told("/etc/nobody_has_this"));
}
