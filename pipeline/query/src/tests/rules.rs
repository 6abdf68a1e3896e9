//! Which queries are allowed, and that their rows do not depend on the memory.

use super::*;

fn labelled() -> Bench {
    let row = |i: usize| {
        json!({"id": i, "lang": (if i.is_multiple_of(2) { "en" } else { "de" }), "text": format!("document {i}"), "parts": ["a", "b"]})
            .to_string()
            + "\n"
    };
    Bench::with(&[("a.jsonl", (0..40).map(row).collect::<String>().as_bytes())])
}

#[test]
fn a_clause_that_would_be_dropped_is_refused_by_name() {
    let bench = labelled();
    let cases = [
        ("SELECT text FROM input TABLESAMPLE (10 PERCENT)", "TABLESAMPLE (10 PERCENT)"),
        ("SELECT text FROM input TABLESAMPLE BERNOULLI (10)", "TABLESAMPLE BERNOULLI (10)"),
        ("SELECT text FROM input TABLESAMPLE SYSTEM (10) REPEATABLE (3)", "TABLESAMPLE SYSTEM (10) REPEATABLE (3)"),
        ("SELECT text FROM input TABLESAMPLE (BUCKET 1 OUT OF 4)", "TABLESAMPLE (BUCKET 1 OUT OF 4)"),
        ("SELECT text FROM input TABLESAMPLE (5 ROWS)", "TABLESAMPLE (5 ROWS)"),
        ("SELECT text FROM input SAMPLE (10)", "SAMPLE (10)"),
        ("SELECT text FROM (SELECT text FROM input) TABLESAMPLE (10 PERCENT)", "TABLESAMPLE (10 PERCENT)"),
        ("SELECT text FROM input PREWHERE id < 3", "PREWHERE"),
        ("SELECT text FROM input START WITH id = 1 CONNECT BY PRIOR id = id", "CONNECT BY"),
        ("SELECT text FROM input PARTITION (p0)", "PARTITION (…)"),
        ("SELECT text FROM input SETTINGS max_threads = 1", "SETTINGS"),
        ("SELECT lang AS text FROM input GROUP BY lang WITH ROLLUP", "GROUP BY … WITH ROLLUP"),
        ("SELECT lang AS text FROM input GROUP BY lang WITH CUBE", "GROUP BY … WITH CUBE"),
        ("SELECT lang AS text FROM input GROUP BY lang WITH TOTALS", "GROUP BY … WITH TOTALS"),
        ("SELECT text FROM input FOR UPDATE", "FOR UPDATE"),
        ("SELECT text FROM input FORMAT JSON", "FORMAT"),
        ("SELECT text FROM input WITH (NOLOCK)", "WITH (…) after a table"),
        ("SELECT text FROM input FOR SYSTEM_TIME AS OF '2020-01-01'", "FOR SYSTEM_TIME AS OF"),
        ("SELECT text FROM input DISTRIBUTE BY id", "DISTRIBUTE BY"),
        ("WITH a AS MATERIALIZED (SELECT text FROM input) SELECT text FROM a", "MATERIALIZED"),
        ("SELECT upper(DISTINCT text) AS text FROM input", "DISTINCT of upper(), which is no aggregate"),
        ("SELECT upper(text) FILTER (WHERE id < 3) AS text FROM input", "FILTER of upper(), which is no aggregate"),
        ("SELECT upper(text) OVER () AS text FROM input", "OVER of upper(), which is no aggregate"),
        (
            "SELECT text FROM (SELECT text, row_number() FILTER (WHERE id < 3) OVER () AS n FROM input)",
            "FILTER of the window function row_number()",
        ),
        (
            "SELECT text FROM input QUALIFY sum(id) OVER w > 3 WINDOW w AS (ORDER BY id)",
            "a named window outside of the columns",
        ),
        ("SELECT CAST(text AS VARCHAR(3)) AS text FROM input", "the length of the type VARCHAR(3)"),
        ("SELECT text FROM input |> AGGREGATE count(*) AS n GROUP BY text DESC", "ASC or DESC in |> AGGREGATE"),
        ("SELECT text FROM input WHERE id IN (SELECT id FROM input TABLESAMPLE (1 ROWS))", "TABLESAMPLE (1 ROWS)"),
    ];
    for (sql, clause) in cases {
        let told = problems(&bench, &with_sql(json!({}), sql));
        let refused = told.contains(clause) && told.contains("is not supported; valid: a query without it");
        // some of these are not valid in this dialect; then the parser reports it
        assert!(refused || told.contains("ParserError") || told.contains("Expected"), "{sql}\n{told}");
        assert!(!told.is_empty(), "{sql} is taken");
    }
}

#[test]
fn what_is_executed_is_taken() {
    let bench = labelled();
    let queries = [
        "SELECT DISTINCT ON (lang) text FROM input ORDER BY lang, id DESC",
        "SELECT lang AS text FROM input GROUP BY ROLLUP (lang)",
        "SELECT text FROM input ORDER BY id DESC LIMIT 3 OFFSET 1",
        "SELECT text FROM input QUALIFY row_number() OVER (PARTITION BY lang ORDER BY id) = 1",
        "SELECT text FROM (SELECT text, sum(id) OVER w AS n FROM input WINDOW w AS (PARTITION BY lang ORDER BY id)) WHERE n > 3",
        "SELECT string_agg(text, ' ' ORDER BY id) FILTER (WHERE id > 3) AS text FROM input GROUP BY lang",
        "SELECT text FROM (SELECT text, lag(id) IGNORE NULLS OVER (ORDER BY id) AS n FROM input) WHERE n > 1",
        "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 3) SELECT CAST(i AS VARCHAR) AS text FROM n",
        "SELECT a.text FROM input a LEFT SEMI JOIN input b ON a.id = b.id + 1",
        "SELECT text FROM input INTERSECT ALL SELECT text FROM input",
        "SELECT part AS text FROM (SELECT unnest(parts) AS part FROM input)",
        "SELECT t.v AS text FROM (VALUES ('a'), ('b')) AS t(v)",
        "SELECT * EXCLUDE (id, lang, parts) FROM input",
        "SELECT text, id FROM input |> WHERE id > 3 |> ORDER BY id DESC |> LIMIT 2",
        "SELECT CASE WHEN text ILIKE 'DOC%' THEN trim(BOTH 'd' FROM text) ELSE substring(text FROM 2 FOR 3) END AS text FROM input",
    ];
    for sql in queries {
        let told = problems(&bench, &with_sql(json!({}), sql));
        assert_eq!(told, "", "{sql}");
    }
}

/// Rows with many ties, wide enough to exceed a small memory bound.
fn with_ties() -> Bench {
    let row = |i: u64| {
        let key = i.wrapping_mul(0x9e37_79b9) % 7;
        json!({"id": i, "key": key, "group": i % 4_001, "x": (i as f64) / 7.0, "text": format!("{i} {}", "pad ".repeat(100))}).to_string()
            + "\n"
    };
    Bench::with(&[("a.jsonl", (0..24_000).map(row).collect::<String>().as_bytes())])
}

#[test]
fn rows_do_not_depend_on_the_memory() {
    let bench = with_ties();
    let queries = [
        "SELECT text FROM input ORDER BY key",
        "SELECT text FROM input ORDER BY key LIMIT 9000",
        "SELECT text FROM (SELECT text, row_number() OVER (PARTITION BY key ORDER BY key) AS n FROM input) WHERE n % 3 = 0",
        "SELECT first_value(text) AS text FROM input GROUP BY \"group\", key",
        "SELECT DISTINCT text FROM input",
        "SELECT CAST(sum(x) AS VARCHAR) || ' ' || max(text) AS text FROM input GROUP BY id % 9001",
        "SELECT text FROM input WHERE key < 2 UNION ALL SELECT text FROM input WHERE key > 4",
        "SELECT text FROM (SELECT text, key FROM input UNION ALL SELECT text, key FROM input) ORDER BY key LIMIT 30000",
        "SELECT DISTINCT ON (\"group\") text FROM input ORDER BY \"group\", key",
    ];
    for sql in queries {
        let input = with_sql(json!({}), sql);
        let mut sums = Vec::new();
        for megabytes in [3, 12, 512] {
            let out = tempfile::tempdir().unwrap();
            let staged = stage_sql(&bench.store, &tables(&bench, &input), &input, megabytes << 20, out.path(), |_| {});
            match staged {
                Ok(staged) => sums.push((megabytes, staged.rows, staged.sha256)),
                // too little memory may be an error, but must not change the rows
                Err(e) => assert!(megabytes == 3 && e.to_string().contains("sql_memory_megabytes"), "{sql}: {e}"),
            }
        }
        assert!(sums.len() > 1, "{sql}");
        assert!(sums.windows(2).all(|two| (two[0].1, &two[0].2) == (two[1].1, &two[1].2)), "{sql}: {sums:?}");
        assert!(sums[0].1 > 0);
    }
}

#[test]
fn rows_that_are_equal_keep_the_order_of_the_input() {
    let bench = labelled();
    let (_, documents) = run(&bench, &with_sql(json!({}), "SELECT text FROM input ORDER BY lang")).unwrap();
    let odd_then_even = (0..40).filter(|i| i % 2 == 1).chain((0..40).filter(|i| i % 2 == 0));
    assert_eq!(documents, odd_then_even.map(|i| format!("document {i}")).collect::<Vec<_>>());
    // groups are in the order of their first rows
    let grouped = with_sql(json!({}), "SELECT lang || count(*) AS text FROM input GROUP BY lang");
    assert_eq!(run(&bench, &grouped).unwrap().1, ["en20", "de20"]);
}

#[test]
fn staged_rows_that_are_damaged_are_made_again() {
    let bench = labelled();
    let input = with_sql(json!({}), "SELECT text FROM input");
    let out = tempfile::tempdir().unwrap();
    let files: Vec<InputFile> = tables(&bench, &input).into_iter().flat_map(|table| table.files).collect();
    let first = stage_sql(&bench.store, &tables(&bench, &input), &input, 64 << 20, out.path(), |_| {}).unwrap();
    assert_eq!(reuse_staged(out.path(), &files).as_ref(), Some(&first));
    let part = out.path().join("part-00000.parquet");
    let good = std::fs::read(&part).unwrap();
    for place in [4, good.len() / 3, good.len() / 2, good.len() - 20, good.len() - 1] {
        let mut bad = good.clone();
        bad[place] ^= 4;
        std::fs::write(&part, bad).unwrap();
        assert_eq!(reuse_staged(out.path(), &files), None, "byte {place}");
    }
    let again = stage_sql(&bench.store, &tables(&bench, &input), &input, 16 << 20, out.path(), |_| {}).unwrap();
    assert_eq!(again.sha256, first.sha256);
}

#[test]
fn a_query_is_bounded() {
    let bench = labelled();
    let told = |sql: &str| problems(&bench, &with_sql(json!({}), sql));
    let chain = |n: usize, one: &str, joined: &str| vec![one; n].join(joined);
    // at the maximum depth, in each direction in which a tree can grow
    for condition in [
        chain(490, "id > 1", " AND "),
        chain(490, "id > 1", " OR "),
        format!("{} > 1", chain(190, "id", " + ")),
        format!("{} = 'a'", chain(990, "text", " || ")),
        format!("id IN ({})", chain(20_000, "1", ", ")),
        format!("id{} > 1", "::BIGINT".repeat(990)),
    ] {
        let sql = format!("SELECT text FROM input WHERE {condition}");
        assert_eq!(told(&sql), "", "{}", &sql[..80]);
        assert!(
            stage_sql(
                &bench.store,
                &tables(&bench, &with_sql(json!({}), &sql)),
                &with_sql(json!({}), &sql),
                64 << 20,
                tempfile::tempdir().unwrap().path(),
                |_| {}
            )
            .is_ok()
        );
    }
    assert_eq!(told(&chain(90, "SELECT text FROM input", " UNION ALL ")), "");
    // one more than allowed
    let many = format!("SELECT text FROM input WHERE {} > 1", chain(300, "id", " + "));
    assert!(told(&many).contains("299 times + - * / %; valid: at most 200 in all"), "{}", told(&many));
    let many = format!("SELECT text FROM input WHERE {}", chain(20_000, "id > 1", " AND "));
    assert!(told(&many).contains("operators; valid: at most 1000"), "{}", told(&many));
    let many = chain(300, "SELECT text FROM input", " UNION ALL ");
    assert!(told(&many).contains("300 times FROM and JOIN; valid: at most 200 in all"), "{}", told(&many));
    let nested = format!("SELECT text FROM input WHERE {}id > 1{}", "(".repeat(20_000), ")".repeat(20_000));
    let refused = told(&nested);
    assert!(
        refused.contains("RecursionLimitExceeded") || refused.contains("recursion limit"),
        "{}",
        &refused[refused.len() - 200..]
    );
    let long = format!("SELECT text FROM input WHERE id IN ({})", chain(600_000, "1", ","));
    assert!(told(&long).contains("bytes; valid: at most 1000000"), "{}", told(&long));
}

#[test]
fn values_whose_size_an_argument_decides_are_bounded() {
    let bench = labelled();
    let cases = [
        ("repeat(text, 2000000000)", "repeat(): would make"),
        ("lpad(text, 2000000000, 'x')", "lpad(): would make"),
        ("rpad(text, 2000000000)", "rpad(): would make"),
        ("replace(text, '', repeat('b', 1000000))", "replace(): would make"),
        ("regexp_replace(text, '.', repeat('b', 1000000), 'g')", "got a replacement of 1000000 bytes"),
        ("array_to_string(array_repeat(text, 2000000000), '')", "array_repeat(): would make"),
        ("array_to_string(range(0, 200000000000, 2), '')", "range(): would make"),
        ("array_to_string(generate_series(1, 200000000000), '')", "generate_series(): would make"),
    ];
    for (expression, wanted) in cases {
        let input = with_sql(json!({}), &format!("SELECT {expression} AS text FROM input"));
        let out = tempfile::tempdir().unwrap();
        let error = stage_sql(&bench.store, &tables(&bench, &input), &input, 64 << 20, out.path(), |_| {}).unwrap_err();
        assert!(error.to_string().contains(wanted), "{expression}: {error}");
    }
    let taken = "SELECT repeat(text, 3) || lpad('7', 3, '0') || replace(text, 'doc', 'Doc') || array_to_string(range(0, 3), ',') AS text FROM input LIMIT 1";
    let (_, documents) = run(&bench, &with_sql(json!({}), taken)).unwrap();
    assert_eq!(documents, ["document 0document 0document 0007Document 00,1,2"]);
}

#[test]
fn rows_of_a_query_over_files_that_changed_are_not_used_again() {
    let bench = Bench::with(&[("a.jsonl", b"{\"text\":\"one\"}\n")]);
    let mut input = input(json!({}));
    input.sql = Some("SELECT text FROM input".into());
    let (files, tables) = (bench.files(&input), tables(&bench, &input));
    let out = tempfile::tempdir().unwrap();
    let rows = stage_sql(&bench.store, &tables, &input, 64 << 20, out.path(), |_| {}).unwrap();
    assert_eq!(reuse_staged(out.path(), &files), Some(rows));
    std::fs::remove_file(bench.path().join("a.jsonl")).unwrap();
    bench.put("a.jsonl", b"{\"text\":\"two\"}\n");
    assert_eq!(reuse_staged(out.path(), &bench.files(&input)), None);
    // a change while the query reads is an error
    let refused = stage_sql(&bench.store, &tables, &input, 64 << 20, out.path(), |_| {}).unwrap_err();
    assert!(matches!(refused, SourceError::Changed { .. }), "{refused}");
}
