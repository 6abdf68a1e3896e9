//! What queries return, and what they report.

use super::*;

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
    let staged = stage_sql(&bench.store, &tables(&bench, &input), &input, 16 << 20, out.path(), |_| {}).unwrap();
    assert_eq!(staged.rows, 40_000);
}

#[test]
fn files_of_a_table_may_be_compressed_in_different_ways() {
    let line = |text: &str| format!("{{\"text\":\"{text}\"}}\n").into_bytes();
    let bench = Bench::with(&[
        ("a.jsonl", &line("a")),
        ("b.jsonl.gz", &gzip(&line("b"))),
        ("c.jsonl", b""),
        ("d.jsonl.zst", &zstandard(&line("d"))),
    ]);
    let input = with_sql(json!({}), "SELECT text FROM input");
    assert_eq!(problems(&bench, &input), "");
    assert_eq!(run(&bench, &input).unwrap().1, ["a", "b", "d"]);
}

#[test]
fn tables_are_joined() {
    let rows = |r: std::ops::Range<usize>| -> String {
        r.map(|i| json!({"id": i, "meta": {"lang": "en"}, "text": format!("document {i}")}).to_string() + "\n")
            .collect()
    };
    let labels: String = (0..40).map(|i| format!("{i},{}\n", if i % 3 == 0 { "good" } else { "bad" })).collect();
    let ids: arrow::array::ArrayRef = std::sync::Arc::new(arrow::array::Int64Array::from_iter_values(0..40));
    let weights = (0..40).map(|i| f64::from(i) / 40.0);
    let weights: arrow::array::ArrayRef = std::sync::Arc::new(arrow::array::Float64Array::from_iter_values(weights));
    let scores = RecordBatch::try_from_iter([("id", ids), ("score", weights)]).unwrap();
    let bench = Bench::with(&[
        ("docs/0.jsonl", rows(0..20).as_bytes()),
        ("docs/1.jsonl.gz", &gzip(rows(20..40).as_bytes())),
        ("labels.csv", format!("\u{feff}id,label\n{labels}").as_bytes()),
        ("scores.parquet", &parquet_bytes(&scores, 7)),
    ]);
    let fields = json!({"format": "parquet", "paths": ["scores.parquet"], "tables": {
        "docs": {"format": "jsonl", "paths": ["docs/*"]},
        "labels": {"format": "csv", "paths": ["labels.csv"]},
    }});
    let sql = "SELECT d.text || ', ' || d.meta['lang'] AS text FROM docs d JOIN labels l ON d.id = l.id \
               JOIN input s ON s.id = d.id WHERE l.label = 'good' AND s.score >= 0.5 ORDER BY d.id";
    let input = with_sql(fields.clone(), sql);
    assert_eq!(problems(&bench, &input), "");
    let expected: Vec<String> = (20..40).filter(|i| i % 3 == 0).map(|i| format!("document {i}, en")).collect();
    assert_eq!(run(&bench, &input).unwrap().1, expected);
    let reported = problems(&bench, &with_sql(fields.clone(), "SELECT text FROM nowhere"));
    assert!(reported.contains("nowhere"), "{reported}");
    // a problem of a table names its field
    bench.put("labels.csv", &gzip(b"id,label\n"));
    let reported = problems(&bench, &with_sql(fields, sql));
    assert!(
        reported.starts_with("input.tables.labels.paths: labels.csv: these are gzip bytes; say `compression: gzip`"),
        "{reported}"
    );
}

#[test]
fn broken_records_are_skipped_and_counted_or_reported_with_their_place() {
    let mut lines: Vec<String> = (0..1200).map(|i| json!({"id": i, "text": format!("{i}")}).to_string()).collect();
    lines[3] = "{\"id\": 3, \"text\":".into();
    lines[1100] = "{\"id\": \"eleven\", \"text\": \"1100\"}".into();
    lines[1150] = "{\"id\": 1.5, \"text\": \"1150\"}".into();
    let mut rows: Vec<String> = (0..1200).map(|i| format!("{i},\"{i}\"")).collect();
    rows[3] = "3".into();
    rows[1100] = "eleven,1100".into();
    rows[1150] = "1.5,1150".into();
    let bench = Bench::with(&[
        ("a.jsonl", lines.join("\n").as_bytes()),
        ("a.csv", format!("id,text\n{}\n", rows.join("\n")).as_bytes()),
    ]);
    let expected: Vec<String> = (0..1200).filter(|i| ![3, 1100, 1150].contains(i)).map(|i| i.to_string()).collect();
    for (format, structure, line) in [("jsonl", "broken JSON", 4), ("csv", "wrong number of fields", 5)] {
        let name = format!("a.{format}");
        let fields = |on_error: &str| json!({"format": format, "paths": [name], "on_error": on_error});
        let sql = "SELECT text FROM input WHERE id >= 0";
        let (staged, documents) = run(&bench, &with_sql(fields("skip"), sql)).unwrap();
        assert_eq!(documents, expected, "{format}");
        let counts = [(structure.to_owned(), 1), ("value of another type".to_owned(), 2)];
        assert_eq!(staged.skipped, counts.into(), "{format}");
        // an unused column is not checked; two scans of a table count its bad records once
        let (staged, documents) = run(&bench, &with_sql(fields("skip"), "SELECT text FROM input")).unwrap();
        assert_eq!((documents.len(), staged.skipped), (1199, [(structure.to_owned(), 1)].into()), "{format}");
        let both = "SELECT a.text FROM input a JOIN input b ON a.id = b.id ORDER BY a.id";
        let (staged, documents) = run(&bench, &with_sql(fields("skip"), both)).unwrap();
        assert_eq!((documents, staged.skipped), (expected.clone(), counts_of(structure)), "{format}");
        let error = run(&bench, &with_sql(fields("fail"), sql)).unwrap_err();
        assert!(error.to_string().starts_with(&format!("{name}: line {line}: {structure}: ")), "{error}");
        let reported = error.to_string();
        assert!(!reported.contains("Arrow") && reported.contains("input.on_error: skip"), "{reported}");
    }
    bench.put("a.jsonl", lines.join("\n").replace("{\"id\": 3, \"text\":", "{\"id\": 3}").as_bytes());
    let error =
        run(&bench, &with_sql(json!({"paths": ["a.jsonl"]}), "SELECT text FROM input WHERE id > 2000")).unwrap_err();
    assert!(
        error.to_string().starts_with(
            "a.jsonl: line 1101: value of another type: the value of \"id\" is or holds \"eleven\"; valid: a whole number"
        ),
        "{error}"
    );
}

fn counts_of(structure: &str) -> std::collections::BTreeMap<String, u64> {
    [(structure.to_owned(), 1), ("value of another type".to_owned(), 2)].into()
}

#[test]
fn what_a_limit_leaves_unread_is_not_counted() {
    let line =
        |i: usize| if i % 10 == 9 { "{\n".to_owned() } else { json!({"text": format!("{i}")}).to_string() + "\n" };
    let bench = Bench::with(&[("a.jsonl", (0..50_000).map(line).collect::<String>().as_bytes())]);
    let input = with_sql(json!({"on_error": "skip"}), "SELECT text FROM input LIMIT 20");
    let once = run(&bench, &input).unwrap();
    assert_eq!(once.1.len(), 20);
    for _ in 0..5 {
        assert_eq!(run(&bench, &input).unwrap().0.skipped, once.0.skipped);
    }
}

#[test]
fn columns_have_the_types_that_their_values_say() {
    let kinds = |bench: &Bench, format: &str| {
        let text = problems(bench, &with_sql(json!({"format": format, "text": "absent"}), "SELECT * FROM input"));
        text.split("its columns: ").nth(1).unwrap_or(&text).to_owned()
    };
    let json = "{\"i\": 1, \"f\": 1, \"b\": true, \"s\": \"x\", \"m\": 1, \"z\": null, \"l\": [1, 2.5], \"o\": {\"a\": null, \"b\": 1}}\n\
                {\"f\": 0.5, \"m\": {\"x\": 1}, \"l\": [], \"late\": \"y\"}\n";
    assert_eq!(
        kinds(&Bench::with(&[("a", json.as_bytes())]), "jsonl").replace("field: ", ""),
        "b (Boolean), f (Float64), i (Int64), l (List(Float64)), m (LargeUtf8), \
         o (Struct(\"a\": LargeUtf8, \"b\": Int64)), s (LargeUtf8), z (LargeUtf8), late (LargeUtf8)"
    );
    let csv = "i,f,b,d,t,s,lang,none\n1,1,true,2024-12-31,2024-12-31T23:59:59,x,nan,\n-2,1e3,FALSE,2025-01-01,2025-01-01 00:00:00,7,nan,\n";
    assert_eq!(
        kinds(&Bench::with(&[("a", csv.as_bytes())]), "csv"),
        "i (Int64), f (Float64), b (Boolean), d (Date32), t (Timestamp(µs)), s (LargeUtf8), lang (LargeUtf8), none (LargeUtf8)"
    );
    let int: arrow::array::ArrayRef = std::sync::Arc::new(arrow::array::Int32Array::from(vec![1]));
    let string: arrow::array::ArrayRef = std::sync::Arc::new(arrow::array::StringArray::from(vec!["x"]));
    let file = |column: &arrow::array::ArrayRef| {
        parquet_bytes(&RecordBatch::try_from_iter([("id", column.clone()), ("text", string.clone())]).unwrap(), 1)
    };
    let bench = Bench::with(&[("a.parquet", &file(&int)), ("b.parquet", &file(&string))]);
    assert_eq!(
        problems(&bench, &with_sql(json!({"format": "parquet"}), "SELECT text FROM input")),
        "input.paths: b.parquet: the column \"id\" is of type LargeUtf8, in a.parquet of type Int32; valid: one type in all \
         files of a table"
    );
}

#[test]
fn columns_of_several_files_are_put_together_by_name() {
    let int = |v: Vec<i32>| -> arrow::array::ArrayRef { std::sync::Arc::new(arrow::array::Int32Array::from(v)) };
    let long = |v: Vec<i64>| -> arrow::array::ArrayRef { std::sync::Arc::new(arrow::array::Int64Array::from(v)) };
    let text = |v: Vec<&str>| -> arrow::array::ArrayRef { std::sync::Arc::new(arrow::array::StringViewArray::from(v)) };
    let a = RecordBatch::try_from_iter([("id", int(vec![1, 2])), ("text", text(vec!["a", "b"]))]).unwrap();
    let b =
        RecordBatch::try_from_iter([("text", text(vec!["c"])), ("more", int(vec![7])), ("id", long(vec![3]))]).unwrap();
    let bench = Bench::with(&[("a", &parquet_bytes(&a, 1)), ("b", &parquet_bytes(&b, 1))]);
    let sql = "SELECT text || id || coalesce(CAST(more AS VARCHAR), '-') AS text FROM input WHERE id <> 2";
    assert_eq!(run(&bench, &with_sql(json!({"format": "parquet"}), sql)).unwrap().1, ["a1-", "c37"]);
    let count = "SELECT CAST(count(*) AS VARCHAR) AS text FROM input";
    assert_eq!(run(&bench, &with_sql(json!({"format": "parquet"}), count)).unwrap().1, ["3"]);
    let csv = Bench::with(&[("a", b"id,text\n1,a\n"), ("b", b"text,more,id\nc,x,3\n"), ("c", b"")]);
    let sql = "SELECT text || id || coalesce(more, '-') AS text FROM input";
    assert_eq!(run(&csv, &with_sql(json!({"format": "csv"}), sql)).unwrap().1, ["a1-", "c3x"]);
    assert_eq!(run(&csv, &with_sql(json!({"format": "csv"}), count)).unwrap().1, ["2"]);
}

#[test]
fn what_a_query_cannot_compute_is_reported_in_plain_words() {
    let bench = jsonl();
    for (sql, says) in [
        (
            "SELECT CAST(CAST(text AS INT) AS VARCHAR) AS text FROM input",
            "input.sql: a value cannot be converted: Cannot cast string 'document ",
        ),
        ("SELECT CAST(id / (id - 3) AS VARCHAR) AS text FROM input", "input.sql: a number is divided by zero; NULLIF"),
    ] {
        let error = run(&bench, &with_sql(json!({}), sql)).unwrap_err().to_string();
        assert!(error.starts_with(says) && !error.contains("Arrow error"), "{error}");
    }
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
        for reported in [text.replace(&sql, ""), error.replace(&sql, "")] {
            assert!(!reported.contains("PLANTED"), "{sql}: {reported}");
        }
    }
    assert!(!other.path().join("never.csv").exists());
}

#[test]
fn what_is_not_there_and_what_may_not_be_read_are_reported_in_the_same_words() {
    let bench = jsonl();
    let reported =
        |path: &str| problems(&bench, &with_sql(json!({}), &format!("SELECT text FROM '{path}'"))).replace(path, "");
    assert_eq!(reported("/etc/passwd"), reported("/etc/nobody_has_this"));
}

#[test]
fn a_page_that_is_not_what_its_checksum_says_is_an_error() {
    let whole = include_bytes!("../../../source/testdata/page_checksums.parquet");
    let sql = with_sql(json!({"format": "parquet", "paths": ["a.parquet"]}), "SELECT text FROM input");
    let sound = Bench::with(&[("a.parquet", whole)]);
    assert_eq!(run(&sound, &sql).unwrap().1.len(), 3);

    let flipped = |of: &[u8]| {
        let at = whole.windows(of.len()).position(|window| window == of).unwrap();
        let mut bytes = whole.to_vec();
        bytes[at] ^= 1;
        Bench::with(&[("a.parquet", &bytes)])
    };
    let says = |error: String| assert!(error.contains("a.parquet") && error.contains("checksum"), "{error}");
    let of_text = flipped(b"spreads");
    says(run(&of_text, &sql).unwrap_err().to_string());
}
