//! Tests of job files: valid, wrong and hostile ones.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::*;
use crate::sections::Section;

fn format() -> &'static JobFormat {
    static FORMAT: std::sync::LazyLock<JobFormat> = std::sync::LazyLock::new(|| JobFormat::new(Vec::new()));
    &FORMAT
}

#[test]
fn hostile_files_are_refused_before_they_cost_anything() {
    let n = 100_000;
    let keys: String = (0..n).map(|i| format!("k{i}: 1\n")).collect();
    let twice: String = (0..n).map(|i| format!("k{}: 1\n", i / 2)).collect();
    let anchors: String = (0..n).map(|i| format!("k{i}: &a{i} 1\n")).collect();
    let bomb: String = (1..40).map(|i| format!("k{i}: &a{i} [*a{0}, *a{0}]\n", i - 1)).collect();
    let long = format!("a: &a \"{}\"\nb: [{}]\n", "x".repeat(n), "*a,".repeat(n));
    for (text, says) in [
        ("[".repeat(n), "recursion limit exceeded"),
        ("{\"a\":".repeat(n), "recursion limit exceeded"),
        ("{a: ".repeat(n), "recursion limit exceeded"),
        ("- ".repeat(n), "has more than 64 levels"),
        (format!("a: 1\n{}b: 1", "? ".repeat(n)), "list or a mapping for a key"),
        ((0..n).map(|i| format!("{}k:\n", " ".repeat(i % 500))).collect(), "has more than 64 levels"),
        (format!("k0: &a0 1\n{bomb}"), "aliases that stand for more than"),
        (long, "aliases that stand for more than"),
        ("a: &a [*a]\n".into(), "alias inside of what it stands for"),
        (anchors, "more than these 100 problems"),
        (keys, "more than these 100 problems"),
        (twice, "more than these 100 problems"),
        (format!("input: {{paths: [{}]}}", "1,".repeat(n)), "more than these 100 problems"),
        (format!("{{\"input\": {{\"paths\": [{}1]}}}}", "1,".repeat(n)), "more than these 100 problems"),
    ] {
        let parsed = format().parse(&text);
        assert!(parsed.problems.0.len() <= 2 * MAX_PROBLEMS + 40, "{says}: {}", parsed.problems.0.len());
        assert!(parsed.problems.0.iter().any(|p| p.message.contains(says)), "{says}: {:?}", parsed.problems.0.first());
    }
}

const GOOD: &str = "version: 1\nname: a\ninput: {format: jsonl, paths: [x.jsonl]}\n\
    tokenizer: {path: t.json}\npack: {length: 16}\noutput: {path: out}\n";

#[test]
fn a_short_job_takes_defaults() {
    let job = format().read(GOOD).unwrap();
    assert_eq!(job.output.shard_megabytes, 500.0);
    assert_eq!(job.input.text, "text");
    assert_eq!(job.noise_seed(), 0);
}

#[test]
fn every_problem_is_reported_at_once() {
    let text = "version: 2\nname: A b\nfrob: 1\ninput: {format: xml, paths: [], sql: 3, holdout: {validation: {}, b: {share: 2}}}\n\
        pack: {length: two, mode: wrap}\nextract: {teacher: {device: gpu}, topk: -1, noise: {tolerance: 2, drawz: 3}}\n\
        marks: {count: 99}\nengine: {kind: ballista}\n";
    let format = JobFormat::new(vec![SectionKind::of::<Marks>()]);
    let problems = format.parse(text).into_result().unwrap_err();
    let shown = problems.to_string();
    for field in [
        "version: got 2",
        "name: got \"A b\"",
        "frob: got 1: unknown key",
        "input.format: got \"xml\"",
        "input.paths: got []",
        "input.sql: got 3",
        "input.holdout.validation: got none: valid: exactly one of",
        "input.holdout.b.share: got 2",
        "pack.length: got \"two\"",
        "extract.teacher.path: is required",
        "extract.teacher.device: got \"gpu\"",
        "extract.topk: got -1",
        "extract.noise.tolerance: got 2",
        "extract.noise.drawz: got 3: unknown key",
        "marks.count: got 99",
        "engine.scheduler: is required for kind ballista and missing",
        "output: is required",
    ] {
        assert!(shown.contains(field), "{field} not in:\n{shown}");
    }
}

#[test]
fn unknown_keys_name_the_valid_ones() {
    let problems = format().parse(&GOOD.replace("length: 16", "length: 16, lenght: 3")).problems;
    let text = problems.to_string();
    let says = "5:20: pack.lenght: got 3: unknown key, did you mean `length`?; valid keys here: boundary, length, mode";
    assert!(text.contains(says), "{text}");
}

#[test]
fn yaml_errors_give_the_line() {
    let text = format().parse("version: 1\nname: [\n").problems.to_string();
    assert!(text.contains("\n  3:1: job file: is not YAML: "), "{text}");
}

#[test]
fn an_explicit_null_is_no_key() {
    let format = JobFormat::new(vec![SectionKind::of::<Marks>()]);
    assert_eq!(format.read(&format!("{GOOD}extract:\nmarks: ~\n")).unwrap(), format.read(GOOD).unwrap());
}

#[test]
fn a_key_that_stands_twice_is_reported_with_both_lines() {
    let yaml = GOOD.replace("output: {path: out}", "output:\n  path: out\n  path: elsewhere");
    let json = "{\"version\": 1, \"name\": \"a\", \"input\": {\"format\": \"jsonl\", \"paths\": [\"x\"]},\n\
        \"tokenizer\": {\"path\": \"t\"}, \"pack\": {\"length\": 16}, \"output\": {\"path\": \"out\",\n\"path\": \"elsewhere\"}}";
    for (text, says) in [
        (yaml.as_str(), "8:3: output.path: is given twice, in line 7 and here; leave one out"),
        (json, "3:1: output.path: is given twice, in line 2 and here; leave one out"),
        (&format!("{GOOD}name: b\n"), "7:1: name: is given twice, in line 2 and here; leave one out"),
        (
            &GOOD.replace("length: 16", "length: 16, length: 32"),
            "5:20: pack.length: is given twice in line 5; leave one out",
        ),
    ] {
        let problems = format().read(text).unwrap_err();
        assert_eq!(problems.0.len(), 1, "{problems}");
        assert!(problems.to_string().ends_with(says), "{problems}");
    }
}

#[test]
fn one_text_is_a_list_of_one() {
    let job = format().read(&GOOD.replace("[x.jsonl]", "x.jsonl")).unwrap();
    assert_eq!(job.input.paths, ["x.jsonl"]);
    let job = format().read(&format!("{GOOD}extract: {{teacher: {{path: t}}, candidates: 4}}\n")).unwrap();
    assert_eq!(job.extract.unwrap().candidates, [4]);
    let wrong = format().parse(&GOOD.replace("[x.jsonl]", "ftp://h/x")).problems;
    assert!(wrong.to_string().contains("3:24: input.paths[0]: got ftp://"), "{wrong}");
    let schema = format().json_schema();
    let paths = schema.pointer("/$defs/Input/properties/paths/anyOf").unwrap();
    assert_eq!(paths, &json!([{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]));
}

#[test]
fn what_was_meant_is_guessed() {
    let reported = |from: &str, to: &str| format().parse(&GOOD.replace(from, to)).problems.render(Some("job.yaml"));
    let text = reported("paths: [x.jsonl]", "path: x.jsonl");
    assert!(text.contains("job.yaml:3:24: input.path: got \"x.jsonl\": unknown key, did you mean `paths`?;"), "{text}");
    let text = reported("jsonl,", "json,");
    assert!(
        text.contains("job.yaml:3:9: input.format: got \"json\": not valid, did you mean `jsonl`?; valid: \"jsonl\""),
        "{text}"
    );
    // a key that belongs to another section
    let text = reported("pack: {length: 16}", "pack: {length: 16}\ntolerance: 1e-3");
    assert!(text.contains("tolerance: got 0.001: unknown key, did you mean `extract.noise.tolerance`?"), "{text}");
    let text = reported("pack: {length: 16}", "pack: {length: 16}\nfrobnicate: 1");
    assert!(text.contains("frobnicate: got 1: unknown key; valid keys here"), "{text}");
}

#[test]
fn what_is_no_number_is_no_default() {
    for number in [".nan", ".inf", "-.inf", "1e999"] {
        let text = format!("{GOOD}extract: {{teacher: {{path: t}}, noise: {{tolerance: {number}}}}}\n");
        let problems = format().parse(&text).problems.to_string();
        assert!(problems.contains("extract.noise.tolerance: got"), "{number}: {problems}");
    }
}

/// A section of an operator, as `operators` declare them.
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Marks {
    /// How many.
    #[schemars(range(min = 1, max = 9))]
    count: u32,
}

impl Default for Marks {
    fn default() -> Self {
        Self { count: 2 }
    }
}

impl Section for Marks {
    const KEY: &'static str = "marks";

    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        if self.count >= job.pack.length {
            problems.push(Problem::new("marks.count", self.count, "as many as tokens"));
        }
    }
}

#[test]
fn contributing_quotes_a_section_as_it_is() {
    let (page, tests) = (include_str!("../../../CONTRIBUTING.md"), include_str!("tests.rs"));
    let begin = tests.find("/// A section of an operator").unwrap();
    let section = &tests[begin..begin + tests[begin..].find("\n\n#[test]").unwrap()];
    assert!(section.contains("fn check") && page.contains(section), "CONTRIBUTING.md does not quote {section}");
}

/// A section that has no keys.
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Plain {}

impl Section for Plain {
    const KEY: &'static str = "plain";
}

#[test]
fn sections_of_operators_are_read_as_the_others() {
    let format = JobFormat::new(vec![SectionKind::of::<Marks>(), SectionKind::of::<Plain>()]);
    let job = format.read(&format!("{GOOD}marks: {{}}\nplain: {{}}\n")).unwrap();
    assert_eq!((job.sections.get(), job.sections.get()), (Ok(Some(Marks { count: 2 })), Ok(Some(Plain {}))));
    let value = serde_json::to_value(&job).unwrap();
    assert_eq!((&value["marks"], &value["plain"]), (&json!({"count": 2}), &json!({})));
    assert_eq!(serde_json::from_value::<JobSpec>(value).unwrap(), job);
    let without = format.read(GOOD).unwrap();
    assert_eq!(without.sections.get::<Marks>(), Ok(None));
    assert_eq!(without, super::tests::format().read(GOOD).unwrap());
    assert_eq!(serde_json::to_value(&without).unwrap().get("sections"), None);
    for (section, says) in [
        ("marks: {count: 10}", "7:9: marks.count: got 10: too large; valid: 9 or less"),
        ("marks: {cuont: 1}", "7:9: marks.cuont: got 1: unknown key, did you mean `count`?; valid keys here: count"),
        ("marks: {count: x}", "7:9: marks.count: got \"x\": has type string; valid: integer"),
        ("marks: 3", "7:1: marks: got 3: has type integer; valid: object"),
        ("plain: {x: 1}", "7:9: plain.x: got 1: unknown key; valid keys here: none"),
        ("mark: {}", "7:1: mark: got {}: unknown key, did you mean `marks`?; valid keys here: engine, "),
    ] {
        let problems = format.parse(&format!("{GOOD}{section}\n")).problems;
        assert!(problems.0.len() == 1 && problems.to_string().contains(says), "{section}: {problems}");
    }
    let text = format.parse(&format!("{GOOD}marks: {{count: 8}}\n").replace("length: 16", "length: 8")).problems;
    assert!(text.to_string().contains("marks.count: got 8: as many as tokens"), "{text}");
    let schema = format.json_schema();
    assert_eq!(schema["properties"]["marks"]["$ref"], "#/$defs/Marks");
    assert_eq!(schema["$defs"]["Marks"]["properties"]["count"]["maximum"], 9);
    assert!(super::tests::format().parse(&format!("{GOOD}plain: {{}}\n")).problems.to_string().contains("unknown key"));
}

#[test]
fn whole_numbers_may_be_written_as_floats() {
    let job = |length: &str| {
        format!(
            "version: 1\nname: x\ninput: {{format: text, paths: [a]}}\ntokenizer: {{path: t}}\npack: {{length: {length}}}\noutput: {{path: o}}\n"
        )
    };
    let format = JobFormat::new(Vec::new());
    for (written, length) in [("16.0", 16), ("1e2", 100), ("64", 64)] {
        assert_eq!(format.read(&job(written)).unwrap().pack.length, length);
    }
    for written in ["16.5", "1e300", "-16.0"] {
        let problems = format.read(&job(written)).unwrap_err().to_string();
        assert!(problems.contains("5:8: pack.length: got "), "{problems}");
    }
}

/// Declaring another key would change no byte, and drop it from the hash of every job: existing data sets would no
/// longer be found.
#[test]
fn these_keys_change_no_byte_of_the_shards() {
    fn collect(schema: &Value, at: &str, root: &Value, found: &mut Vec<String>) {
        let resolve = |schema: &Value| {
            let reference = schema.get("$ref").and_then(Value::as_str);
            reference.and_then(|r| root.pointer(r.trim_start_matches('#'))).cloned().unwrap_or_else(|| schema.clone())
        };
        for (key, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let field = format!("{at}{key}");
            match property.get("x-identity") {
                Some(_) => found.push(field),
                None => collect(&resolve(property), &format!("{field}."), root, found),
            }
        }
        if let Some(each) = schema.get("additionalProperties").filter(|each| each.is_object()) {
            collect(&resolve(each), &format!("{at}*."), root, found);
        }
    }
    let schema = schema::plain_schema(&[]);
    let mut found = Vec::new();
    collect(&schema, "", &schema, &mut found);
    found.sort();
    let expected = [
        "engine",
        "extract.sequential.slots",
        "extract.teacher.device",
        "extract.teacher.path",
        "input.max_skipped",
        "input.paths",
        "input.storage",
        "input.tables.*.paths",
        "name",
        "output.card",
        "output.path",
        "output.storage",
        "storage",
        "tokenizer.path",
    ];
    assert_eq!(found, expected);
    let mut job = serde_json::to_value(format().read(GOOD).unwrap()).unwrap();
    format().retain_identity(&mut job);
    assert_eq!((job.get("name"), job.pointer("/input/paths"), job.pointer("/output/path")), (None, None, None));
    assert!(job.pointer("/pack/length").is_some() && job.pointer("/input/format").is_some());
    assert!(!format().json_schema().to_string().contains("x-identity"));
}

#[test]
fn all_input_formats_are_in_the_list_of_them() {
    let schema = schema::plain_schema(&[]);
    let named = schema.pointer("/$defs/InputFormat/enum").and_then(Value::as_array).unwrap();
    let listed: Vec<Value> = crate::spec::InputFormat::ALL.iter().map(|format| json!(format.name())).collect();
    assert_eq!(*named, listed);
}
