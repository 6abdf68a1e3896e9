//! Types of the columns of a query are inferred without loss.

use super::*;

fn lines(rows: impl IntoIterator<Item = String>) -> Vec<u8> {
    rows.into_iter().map(|row| row + "\n").collect::<String>().into_bytes()
}

/// Joins six documents with six labels whose ids differ only in their last digits.
#[test]
fn ids_from_2_to_the_63_are_joined_one_by_one() {
    let ids = (0..6).map(|i| 18_446_744_073_709_551_600_u64 + i);
    let json = |i: u64| format!("{{\"id\":{i},\"text\":\"document {i}\"}}");
    let label = |i: u64| format!("{i},label {i}");
    let labels = std::iter::once("id,label".to_owned()).chain(ids.clone().map(label));
    let bench = Bench::with(&[("docs.jsonl", &lines(ids.clone().map(json))), ("labels.csv", &lines(labels))]);
    let tables = json!({"paths": [], "tables": {
        "docs": {"format": "jsonl", "paths": ["docs.jsonl"]},
        "labels": {"format": "csv", "paths": ["labels.csv"]},
    }});
    let sql = "SELECT d.text || ': ' || l.label AS text FROM docs d JOIN labels l ON d.id = l.id ORDER BY d.id";
    let (_, documents) = run(&bench, &with_sql(tables, sql)).unwrap();
    assert_eq!(documents, ids.map(|i| format!("document {i}: label {i}")).collect::<Vec<_>>());
}

#[test]
fn a_hash_of_64_bits_keeps_what_differs() {
    let hash = |i: u64| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 << 63;
    let near = |i: u64| (1_u64 << 63) + i;
    for of in [hash as fn(u64) -> u64, near] {
        let bench =
            Bench::with(&[("a.jsonl", &lines((0..20).map(|i| format!("{{\"hash\":{},\"text\":\"{i}\"}}", of(i)))))]);
        let sql = "SELECT min(text) AS text FROM input GROUP BY hash";
        assert_eq!(run(&bench, &with_sql(json!({}), sql)).unwrap().0.rows, 20);
    }
}

/// Ids between 2^53 and 2^60 stay exact beside one value of another kind, in JSON and in CSV.
#[test]
fn one_value_spoils_no_column_of_ids() {
    let first = (1_u64 << 53) + 1;
    for other in ["18446744073709551615", "0.5", "-3", "123456789012345678901234567890"] {
        let ids: Vec<String> = (0..10).map(|i| (first + 2 * i).to_string()).chain([other.to_owned()]).collect();
        let csv = std::iter::once("id,text".to_owned()).chain(ids.iter().map(|id| format!("{id},{id}")));
        let json = ids.iter().map(|id| format!("{{\"id\":{id},\"text\":\"{id}\"}}"));
        let bench = Bench::with(&[("a.jsonl", &lines(json)), ("b.csv", &lines(csv))]);
        let sql = "SELECT min(text) || '=' || CAST(id AS VARCHAR) AS text FROM input GROUP BY id";
        for (fields, is_json) in
            [(json!({"paths": ["a.jsonl"]}), true), (json!({"paths": ["b.csv"], "format": "csv"}), false)]
        {
            let got = run(&bench, &with_sql(fields, sql));
            if is_json && other.len() > 20 {
                // it does not fit in 64 bits, so it is refused with file and line
                let error = got.unwrap_err().to_string();
                assert!(error.starts_with("a.jsonl: line 11: ") && error.contains("-2^63 to 2^64-1"), "{error}");
                continue;
            }
            let expected: Vec<String> = ids.iter().map(|id| format!("{id}={id}")).collect();
            assert_eq!(got.unwrap().1, expected, "{other}");
        }
    }
}

#[test]
fn zeros_before_a_number_stay() {
    let csv = b"code,phone,zero,text\n007,+5,0,a\n12,+6,-1,b\n";
    let bench = Bench::with(&[("a.csv", csv)]);
    let sql = "SELECT code || ' ' || phone || ' ' || CAST(zero + 1 AS VARCHAR) AS text FROM input";
    let (_, documents) = run(&bench, &with_sql(json!({"format": "csv"}), sql)).unwrap();
    assert_eq!(documents, ["007 +5 1", "12 +6 0"]);
}

#[test]
fn a_later_value_that_would_lose_digits_is_refused_by_line() {
    let rows = (0..1000).map(|i| format!("{{\"id\":{i},\"x\":{i}.5,\"text\":\"{i}\"}}"));
    let sql = "SELECT text FROM input WHERE id > 1 AND x > 1";
    for (last, wanted) in [
        (
            "{\"id\":18446744073709551615,\"x\":1,\"text\":\"z\"}",
            "valid: a whole number from -2^63 to 2^63-1, as in the first 1000 records",
        ),
        (
            "{\"id\":1,\"x\":9007199254740993,\"text\":\"z\"}",
            "valid: a number; of whole numbers those from -2^53 to 2^53",
        ),
    ] {
        let bench = Bench::with(&[("a.jsonl", &lines(rows.clone().chain([last.to_owned()])))]);
        let error = run(&bench, &with_sql(json!({}), sql)).unwrap_err().to_string();
        assert!(error.starts_with("a.jsonl: line 1001: ") && error.contains(wanted), "{error}");
    }
}

#[test]
fn a_job_names_the_types_of_columns() {
    let rows = (0..1000).map(|i| format!("{{\"id\":{i},\"text\":\"{i}\"}}"));
    let last = "{\"id\":18446744073709551615,\"when\":\"2024-12-31\",\"text\":\"z\"}".to_owned();
    let bench = Bench::with(&[("a.jsonl", &lines(rows.chain([last]))), ("b.csv", b"id,n,text\n1,2,a\n007,3,b\n")]);
    let schema = json!({"paths": ["a.jsonl"], "schema": {"id": "uint64", "when": "date"}});
    let sql = "SELECT text FROM input WHERE id > 9223372036854775807 AND \"when\" = DATE '2024-12-31'";
    assert_eq!(problems(&bench, &with_sql(schema.clone(), sql)), "");
    assert_eq!(run(&bench, &with_sql(schema, sql)).unwrap().1, ["z"]);
    let csv = |schema: Value| {
        with_sql(
            json!({"paths": ["b.csv"], "format": "csv", "schema": schema}),
            "SELECT CAST(id AS VARCHAR) || CAST(n AS VARCHAR) AS text FROM input",
        )
    };
    assert_eq!(run(&bench, &csv(json!({"id": "string", "n": "string"}))).unwrap().1, ["12", "0073"]);
    let error = run(&bench, &csv(json!({"id": "int64"}))).unwrap_err().to_string();
    assert!(error.starts_with("b.csv: line 3: ") && error.contains("as `schema` says of this column"), "{error}");
    let told = problems(&bench, &csv(json!({"identity": "int64"})));
    assert!(
        told.contains("schema names a column \"identity\", which is not there; the columns: id, n, text"),
        "{told}"
    );
}

#[test]
fn a_quote_that_is_not_closed_ends_the_job_and_one_in_a_field_does_not() {
    type Wanted<'a> = Result<&'a [&'a str], &'a str>;
    let cases: [(&[u8], Wanted<'_>); 6] = [
        (b"id,text\n1,a\n2,\"b\n3,c\n4,d\n", Err("line 3: a quoted field begins in this record")),
        (b"id,text\n1,a\n2,\"b", Err("line 3: a quoted field begins in this record")),
        (b"id,text\n1,a\n3,tall 6\"", Ok(&["a", "tall 6\""])),
        (b"id,text\n1,a\n3,tall 6\"\n", Ok(&["a", "tall 6\""])),
        (b"id,text\n1,\"a \"\"b\"\"\"", Ok(&["a \"b\""])),
        (b"id,text\n1,a\n2,\"b\"", Ok(&["a", "b"])),
    ];
    for (bytes, wanted) in cases {
        let bench = Bench::with(&[("a.csv", bytes)]);
        for on_error in ["fail", "skip"] {
            let fields = json!({"format": "csv", "on_error": on_error, "max_skipped": 1});
            let plain =
                bench.try_all(&input(fields.clone()), 1 << 20).map(|got| got.documents).map_err(|e| e.to_string());
            let query =
                run(&bench, &with_sql(fields, "SELECT text FROM input")).map(|(_, d)| d).map_err(|e| e.to_string());
            for got in [plain, query] {
                match (&wanted, got) {
                    (Ok(wanted), got) => assert_eq!(&got.unwrap(), wanted),
                    // everything after it would be skipped with it
                    (Err(wanted), got) => assert!(got.clone().unwrap_err().contains(wanted), "{got:?}"),
                }
            }
        }
    }
}

#[test]
fn columns_of_one_name_are_refused() {
    let bench = Bench::with(&[("a.csv", b"text,id,text\na,1,b\n"), ("b.csv", b"id,text,id\n1,a,2\n")]);
    let error = bench.try_all(&input(json!({"paths": ["a.csv"], "format": "csv"})), 1 << 20).unwrap_err().to_string();
    assert!(error.contains("line 1: two columns are named \"text\"; valid: each name once"), "{error}");
    let told = problems(&bench, &with_sql(json!({"paths": ["b.csv"], "format": "csv"}), "SELECT text FROM input"));
    assert!(told.contains("line 1: two columns are named \"id\""), "{told}");
}
