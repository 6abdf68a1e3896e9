//! Tests that invalid combinations are refused, and with which message.

use crate::parse::JobFormat;

fn format() -> &'static JobFormat {
    static FORMAT: std::sync::LazyLock<JobFormat> = std::sync::LazyLock::new(|| JobFormat::new(Vec::new()));
    &FORMAT
}

fn problems(extra: &str, pack: &str) -> String {
    format()
        .parse(&format!(
            "version: 1\nname: a\ninput: {{format: jsonl, paths: [x.jsonl]}}\ntokenizer: {{path: t.json}}\n\
         pack: {pack}\noutput: {{path: out}}\n{extra}"
        ))
        .problems
        .to_string()
}

#[test]
fn eight_bits_need_a_bound() {
    let text = problems("extract: {teacher: {path: t, dtype: int8}}\n", "{length: 8}");
    assert!(text.contains("extract.teacher.dtype: got \"int8\": not valid; valid: \"f32\", \"bf16\""), "{text}");
    let text = problems("extract: {teacher: {path: t, dtype: fp8}}\n", "{length: 8}");
    assert!(text.contains("extract.teacher.max_mean_kl_nats: is required with dtype fp8"), "{text}");
    let signals = "logz_temperatures: [1, 2, 1], candidates: [5, 5]";
    let text = problems(&format!("extract: {{teacher: {{path: t}}, {signals}}}\n"), "{length: 8}");
    assert!(text.contains("extract.logz_temperatures[2]: got 1: is a duplicate"), "{text}");
    assert!(text.contains("extract.candidates[1]: got 5: is a duplicate"), "{text}");
    let signals = "logz_temperatures: [0], samples: {draws: 0, power: 3}, top_p: {mass: 1.5, most: 0}";
    let text = problems(&format!("extract: {{teacher: {{path: t}}, {signals}}}\n"), "{length: 8}");
    for field in ["logz_temperatures[0]", "samples.draws", "samples.power", "top_p.mass", "top_p.most"] {
        assert!(text.contains(&format!("extract.{field}: got ")), "{field}: {text}");
    }
    let good = problems("extract: {teacher: {path: t, dtype: fp8, max_mean_kl_nats: 0.01}}\n", "{length: 8}");
    assert!(good.contains("has 0 problems"), "{good}");
}

#[test]
fn wrap_needs_three_tokens() {
    assert!(problems("", "{length: 2}").contains("pack.length: got 2"));
    assert!(problems("", "{length: 2, boundary: none}").contains("has 0 problems"));
}

fn positions(input: &str, output: &str, more: &str) -> String {
    format()
        .parse(&format!(
            "version: 1\nname: a\ninput: {{format: jsonl, paths: ['{input}']}}\ntokenizer: {{path: t}}\n\
         pack: {{length: 8}}\noutput: {{path: '{output}'}}\n{more}"
        ))
        .problems
        .to_string()
}

#[test]
fn stores_are_read_from_and_written_to() {
    for (input, output) in [
        ("s3://b/year=202?/*.jsonl", "s3://b/out"),
        ("gs://b/x", "gs://b/y"),
        ("az://b/x", "az://b"),
        ("https://h:8443/x.jsonl", "out"),
        ("file:///x.jsonl", "file:///out"),
    ] {
        let text = positions(input, output, "storage: {endpoint: 'http://127.0.0.1:9000', retry: {max_attempts: 3}}\n");
        assert!(text.contains("has 0 problems"), "{text}");
    }
    let text = positions("x", "https://h/out", "");
    assert!(text.contains("output.path: got https://…: plain HTTP has no multipart upload"), "{text}");
    assert!(positions("x", "s3://", "").contains("output.path: got s3://…: names no bucket"));
    assert!(positions("x", "s3://b/*", "").contains("must be a single folder"));
    assert!(positions("ftp://h/x", "o", "").contains("input.paths[0]: got ftp://…: no store of this kind"));
}

#[test]
fn secrets_are_refused_without_being_repeated() {
    for (input, output, more) in [
        ("s3://KEY:SECRET@b/x", "o", ""),
        ("x", "gs://b/x?token=SECRET", ""),
        ("x", "o", "storage: {endpoint: 'http://k:SECRET@h'}\n"),
        ("x", "o", "storage: {secret_access_key: SECRET}\n"),
        ("x", "o", "storage: SECRET\n"),
        ("x", "o", "storage: {anonymous: SECRET, region: 'SECRET/'}\n"),
        ("x", "o", "storage: {retry: {token: SECRET}}\n"),
    ] {
        let text = positions(input, output, more);
        assert!(!text.contains("0 problems") && !text.contains("SECRET"), "{text}");
    }
    let text = positions("x", "o", "storage: {secret_access_key: SECRET}\n");
    assert!(text.contains("storage.secret_access_key: unknown key; valid keys here: anonymous, "), "{text}");
}

#[test]
fn models_are_not_in_stores_yet() {
    let text = problems("extract: {teacher: {path: 's3://b/m'}}\n", "{length: 8}");
    assert!(
        text.contains("extract.teacher.path: got s3://…: this version of stillhouse does not support store URLs"),
        "{text}"
    );
}

fn inputs(input: &str) -> String {
    format()
        .parse(&format!(
            "version: 1\nname: a\ninput: {input}\ntokenizer: {{path: t}}\npack: {{length: 8}}\noutput: {{path: o}}\n"
        ))
        .problems
        .to_string()
}

#[test]
fn holdouts_name_one_rule_each_and_leave_something() {
    let held = |holdout: &str| inputs(&format!("{{format: jsonl, paths: [x], holdout: {holdout}}}"));
    let good = "{a: {last_documents: 3}, b: {share: 0.5}, c: {share: 0.25}, d: {documents: 9, remainder: pad}}";
    assert!(held(good).contains("has 0 problems"), "{}", held(good));
    for (holdout, says) in [
        ("{a: {}}", "input.holdout.a: got none: valid: exactly one of last_documents, share, documents"),
        ("{a: {share: 0.1, documents: 3}}", "input.holdout.a: got share and documents: valid: exactly one"),
        ("{a: {share: 0.5}, b: {share: 0.5}}", "input.holdout: got 1: the shares add up to 1 or more"),
        ("{a: {share: 0}}", "input.holdout.a.share: got 0: too small"),
        ("{a: {share: 1}}", "input.holdout.a.share: got 1: too large"),
        ("{train: {share: 0.1}}", "input.holdout.train: got \"train\": not a valid split name"),
        ("{A: {share: 0.1}}", "input.holdout.A: got \"A\": not a valid split name"),
    ] {
        let text = held(holdout);
        assert!(text.contains(says) && text.contains("has 1 problem\n"), "{holdout}: {text}");
    }
}

#[test]
fn tables_need_names_and_files() {
    let good =
        "{tables: {docs: {format: jsonl, paths: [x]}, labels: {format: csv, paths: [y]}}, sql: SELECT 1 AS text}";
    assert!(inputs(good).contains("has 0 problems"), "{}", inputs(good));
    for (input, says) in [
        ("{format: jsonl}", "input.paths: is required and missing"),
        ("{paths: [x]}", "input.format: is required and missing"),
        ("{tables: {a: {format: jsonl, paths: [x]}}, paths: [x], sql: q}", "input.format: is required and missing"),
        ("{tables: {a: {format: jsonl, paths: ['']}}, sql: q}", "input.tables.a.paths[0]: got \"\": is empty"),
        ("{tables: {a: {format: jsonl, paths: ['ftp://x']}}, sql: q}", "input.tables.a.paths[0]: got ftp://…"),
        ("{tables: {1a: {format: jsonl, paths: [x]}}, sql: q}", "input.tables.1a: got \"1a\": not a valid name"),
        (
            "{tables: {input: {format: jsonl, paths: [x]}}, format: jsonl, paths: [x], sql: q}",
            "input.tables.input: got \"input\": is the table of `input.paths`",
        ),
    ] {
        let text = inputs(input);
        assert!(text.contains(says) && text.contains("has 1 problem\n"), "{input}: {text}");
    }
}

#[test]
fn amounts_of_a_mixture_are_all_of_one_kind() {
    let of = |a: &str, b: &str, more: &str| {
        inputs(&format!(
            "{{tables: {{a: {{format: jsonl, paths: [x]{a}}}, b: {{format: text, paths: [y]{b}}}}}{more}}}"
        ))
    };
    let stages = ", mixture: {stages: [{share: 1, weights: {a: 1}}, {share: 2, weights: {a: 1, b: 3}}]}";
    for (a, b, more) in [
        ("", "", ""),
        ("", ", document: file", ", carry: [url, _file]"),
        // as executors get it
        ("", "", ", carry: [source, url]"),
        (", weight: 2", ", weight: 0.5", ", mixture: {tokens: 1e6}"),
        (", tokens: 100", ", epochs: 2.5", ""),
        ("", "", stages),
        (", schema: {id: string}", "", ", holdout: {validation: {share: 0.1}}"),
    ] {
        let text = of(a, b, more);
        assert!(text.contains("has 0 problems"), "{a} {b} {more}: {text}");
    }
    for (a, b, more, says) in [
        (", weight: 2", "", "", "input.tables.b.weight: is required where other tables have a weight"),
        (", weight: 2", ", tokens: 5", "", "input.tables.b.tokens: other tables have a weight; valid: a weight"),
        (
            ", weight: 2, epochs: 1",
            ", weight: 1",
            "",
            "input.tables.a.epochs: a table has one of weight, tokens and epochs",
        ),
        (", weight: 0", ", weight: 1", "", "input.tables.a.weight: got 0: too small"),
        (", epochs: 1001", "", "", "input.tables.a.epochs: got 1001: too large"),
        ("", "", ", mixture: {tokens: 5}", "input.mixture.tokens: got 5: applies to weights"),
        (", epochs: 1", "", stages, "input.tables.a.epochs: the stages of the mixture have the weights; remove it"),
        ("", "", ", mixture: {stages: [{share: 1, weights: {a: 1}}]}", "input.tables.b: is in no stage of the mixture"),
        (
            "",
            "",
            ", mixture: {stages: [{share: 1, weights: {a: 1, b: 1, c: 1}}]}",
            "input.mixture.stages[0].weights.c: got \"c\": is not a table; valid: a, b",
        ),
        (
            "",
            "",
            ", mixture: {stages: [{share: 1, weights: {a: 1, b: 0}}]}",
            "input.mixture.stages[0].weights.b: got 0: valid: ",
        ),
        ("", "", ", paths: [z], format: jsonl", "input.paths: is a table of its own beside `tables` only in a query"),
        ("", "", ", format: jsonl", "input.format: got jsonl: applies to `paths`"),
        ("", "", ", carry: [url, source]", "input.carry[1]: got \"source\": is the name of the table in a mixture"),
        ("", "", ", sql: q, mixture: {tokens: 5}", "input.mixture: a query chooses its rows itself"),
        (", weight: 1", "", ", sql: q", "input.tables.a.weight: applies to mixtures"),
        (", document: file", "", "", "input.tables.a.document: applies only to `format: text`"),
    ] {
        let text = of(a, b, more);
        assert!(text.contains(says) && text.contains("has 1 problem\n"), "{a} {b} {more}: {text}");
    }
    let text = inputs("{format: jsonl, paths: [x], mixture: {tokens: 5}}");
    assert!(text.contains("input.mixture: mixes tables; set input.tables, too"), "{text}");
}

#[test]
fn a_cluster_is_named_by_its_scheduler_and_nothing_else_is() {
    let engine = |engine: &str| {
        let job = "version: 1\nname: a\ninput: {format: jsonl, paths: [x]}\ntokenizer: {path: t}\npack: {length: 8}\noutput: {path: o}\n";
        format().parse(&format!("{job}engine: {engine}\n")).problems.to_string()
    };
    for good in ["here:1", "10.0.0.5:50050", "a.b-c.example.org:65535", "[::1]:50050", "https://a:1", "http://a:1"] {
        let text = engine(&format!("{{kind: ballista, scheduler: \"{good}\"}}"));
        assert!(text.contains("has 0 problems"), "{good}: {text}");
    }
    for (written, says) in [
        ("{kind: ballista}", "engine.scheduler: is required for kind ballista and missing; valid: host:port"),
        ("{scheduler: 'a:1'}", "engine.scheduler: needs kind ballista, but engine.kind is local"),
        ("{kind: ballista, scheduler: a}", "engine.scheduler: got \"a\": valid: host:port"),
        ("{kind: ballista, scheduler: ''}", "engine.scheduler: got \"\": valid: host:port"),
        ("{kind: ballista, scheduler: ':1'}", "engine.scheduler: got \":1\": valid: host:port"),
        ("{kind: ballista, scheduler: 'a:0'}", "engine.scheduler: got \"a:0\": valid: host:port"),
        ("{kind: ballista, scheduler: 'a:65536'}", "valid: host:port"),
        ("{kind: ballista, scheduler: 'https://a'}", "valid: host:port"),
        ("{kind: ballista, scheduler: 'https://a:1/'}", "valid: host:port"),
        ("{kind: ballista, scheduler: 'grpc://a:1'}", "valid: host:port"),
        ("{kind: ballista, scheduler: 'a b:1'}", "valid: host:port"),
        ("{kind: ballista, scheduler: 'u@a:1'}", "valid: host:port"),
    ] {
        let text = engine(written);
        assert!(text.contains(says) && text.contains("has 1 problem\n"), "{written}: {text}");
    }
}

fn written(input: &str, pack: &str, extract: &str) -> String {
    format()
        .parse(&format!("version: 1\nname: a\ninput: {input}\npack: {pack}\nextract: {extract}\noutput: {{path: o}}\n"))
        .problems
        .to_string()
}

#[test]
fn a_teacher_that_writes_needs_rows_of_its_own_and_nothing_to_store() {
    const NONE: &str = "{format: none, documents: 10, holdout: {validation: {last_documents: 2}}}";
    const CORPUS: &str = "{format: jsonl, paths: [x]}";
    const PAD: &str = "{mode: pad, length: 8}";
    const WRITES: &str = "{teacher: {path: t}, mode: sequential, topk: 4}";
    let prompts = |n: u32| format!("{{teacher: {{path: t}}, mode: sequential, sequential: {{prompt_tokens: {n}}}}}");
    assert!(written(NONE, PAD, WRITES).contains("has 0 problems"), "{}", written(NONE, PAD, WRITES));
    assert!(written(CORPUS, PAD, &prompts(6)).contains("has 0 problems"));
    let with = |more: &str| format!("{{teacher: {{path: t}}, mode: sequential, {more}}}");
    let signals = "logz_temperatures: [1, 2], entropy: true, candidates: [5], samples: {draws: 9}, top_p: {mass: 0.9, most: 50}, \
                   hidden_states: {layers: [1]}";
    assert!(written(NONE, PAD, &with(signals)).contains("has 0 problems"), "{}", written(NONE, PAD, &with(signals)));
    for (input, pack, extract, says) in [
        (NONE, "{length: 8}", WRITES.to_owned(), "pack.mode: got wrap: not supported if the teacher writes"),
        (NONE, "{mode: pad, length: 8, boundary: none}", WRITES.into(), "pack.boundary: got none: not supported"),
        (NONE, PAD, with("context: document"), "extract.context: got document: not supported"),
        (NONE, PAD, with("noise: {}"), "extract.noise: the seed gives the noise of text that the teacher writes"),
        (NONE, PAD, prompts(1), "extract.sequential.prompt_tokens: got 1: input.format none has no prompts"),
        (NONE, PAD, with("sequential: {temperature: -1}"), "extract.sequential.temperature: got -1"),
        (NONE, PAD, with("sequential: {top_p: 0}"), "extract.sequential.top_p: got 0"),
        (NONE, PAD, with("sequential: {slots: 0}"), "extract.sequential.slots: got 0"),
        (NONE, PAD, with("sequential: {stop: never}"), "extract.sequential.stop: got"),
        (
            CORPUS,
            PAD,
            WRITES.into(),
            "extract.sequential.prompt_tokens: got 0: the input would not be used; valid: 1 to 6",
        ),
        (CORPUS, PAD, prompts(7), "extract.sequential.prompt_tokens: got 7: leaves no position"),
        (
            CORPUS,
            PAD,
            "{teacher: {path: t}, sequential: {}}".into(),
            "extract.sequential: applies only to `mode: sequential`",
        ),
        (NONE, PAD, "{teacher: {path: t}}".into(), "input.format: got none: documents without text"),
        ("{format: none}", PAD, WRITES.into(), "input.documents: is required with `format: none`"),
        ("{format: none, documents: 0}", PAD, WRITES.into(), "input.documents: got 0"),
        ("{format: none, documents: 1, paths: [x]}", PAD, WRITES.into(), "input.paths: `format: none` reads nothing"),
        (
            "{format: none, documents: 9, holdout: {a: {share: 0.5}}}",
            PAD,
            WRITES.into(),
            "input.holdout.a.share: depends on the text",
        ),
        (
            "{format: jsonl, documents: 9, paths: [x]}",
            PAD,
            prompts(3),
            "input.documents: got 9: applies only to `format: none`",
        ),
    ] {
        let text = written(input, pack, &extract);
        assert!(text.contains(says) && text.contains("has 1 problem\n"), "{says}: {text}");
    }
}
