//! Provokes errors of every kind and checks each message: readable, said once, and without internals of the program.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, nano_teacher, root, run_command, with};

/// Text that no message may contain: type names, traces, and library phrases without meaning to a user.
const FORBIDDEN_TEXT: [&str; 20] = [
    "Some(",
    "None",
    "Ok(",
    "Err(",
    "Error {",
    "Generic ",
    "panicked",
    "backtrace",
    "Os {",
    "kind:",
    "::",
    "U32(",
    "I32(",
    "String(",
    "Array(",
    "unwrap",
    "src/",
    ".rs:",
    "untagged",
    "External:",
];

/// A GGUF file with this metadata and these tensors (name, dimensions, type, offset).
struct Gguf {
    version: u32,
    metadata: Vec<(&'static str, Vec<u8>)>,
    tensors: Vec<(&'static str, Vec<u64>, u32, u64)>,
    counts: Option<(u64, u64)>,
}

fn text(value: &str) -> Vec<u8> {
    [&8_u32.to_le_bytes()[..], &(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

fn number(value: u32) -> Vec<u8> {
    [4_u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn array(kind: u32, length: u64) -> Vec<u8> {
    [&9_u32.to_le_bytes()[..], &kind.to_le_bytes(), &length.to_le_bytes()].concat()
}

impl Gguf {
    /// A valid one-layer Llama without weights.
    fn llama() -> Self {
        Self {
            version: 3,
            metadata: vec![
                ("general.architecture", text("llama")),
                ("llama.context_length", number(128)),
                ("llama.embedding_length", number(8)),
                ("llama.block_count", number(1)),
            ],
            tensors: vec![("token_embd.weight", vec![8, 4], 0, 0)],
            counts: None,
        }
    }

    fn with(mut self, key: &'static str, value: Vec<u8>) -> Self {
        self.metadata.retain(|(name, _)| *name != key);
        self.metadata.push((key, value));
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let counts = self.counts.unwrap_or((self.tensors.len() as u64, self.metadata.len() as u64));
        let mut bytes = [&b"GGUF"[..], &self.version.to_le_bytes()].concat();
        bytes.extend([counts.0.to_le_bytes(), counts.1.to_le_bytes()].concat());
        for (key, value) in &self.metadata {
            bytes.extend(string(key));
            bytes.extend(value);
        }
        for (name, dimensions, kind, offset) in &self.tensors {
            bytes.extend(string(name));
            bytes.extend((dimensions.len() as u32).to_le_bytes());
            dimensions.iter().for_each(|d| bytes.extend(d.to_le_bytes()));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32) + 128, 0);
        bytes
    }
}

fn gguf_files() -> Vec<(&'static str, Vec<u8>)> {
    let good = Gguf::llama().bytes();
    let tensor = |dimensions: Vec<u64>, kind, offset| Gguf {
        tensors: vec![("token_embd.weight", dimensions, kind, offset)],
        ..Gguf::llama()
    };
    vec![
        ("nothing", Vec::new()),
        ("three bytes", good[..3].to_vec()),
        ("another magic", b"GGML then something".to_vec()),
        ("the magic alone", good[..4].to_vec()),
        ("cut in the counts", good[..20].to_vec()),
        ("cut in the metadata", good[..70].to_vec()),
        ("cut in the tensors", good[..good.len() - 160].to_vec()),
        ("cut in the data", good[..good.len() - 100].to_vec()),
        ("a version of the future", Gguf { version: 99, ..Gguf::llama() }.bytes()),
        ("more tensors than bytes", Gguf { counts: Some((1 << 29, 4)), ..Gguf::llama() }.bytes()),
        ("more metadata than numbers", Gguf { counts: Some((1, u64::MAX)), ..Gguf::llama() }.bytes()),
        (
            "a string without end",
            Gguf::llama().with("general.name", [&8_u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat()).bytes(),
        ),
        ("an array without end", Gguf::llama().with("general.tags", array(8, u64::MAX)).bytes()),
        (
            "arrays in arrays",
            Gguf::llama()
                .with("general.tags", (0..100).fold(array(9, 1), |b, _| [b, array(9, 1)[4..].to_vec()].concat()))
                .bytes(),
        ),
        ("a value of no type", Gguf::llama().with("general.tags", 77_u32.to_le_bytes().to_vec()).bytes()),
        ("an alignment of nothing", Gguf::llama().with("general.alignment", number(0)).bytes()),
        ("another architecture", Gguf::llama().with("general.architecture", text("mamba")).bytes()),
        ("a number for a name", Gguf::llama().with("general.architecture", number(5)).bytes()),
        ("a name for a number", Gguf::llama().with("llama.block_count", text("five")).bytes()),
        ("no layers", Gguf::llama().with("llama.block_count", number(0)).bytes()),
        ("no embedding", Gguf { tensors: Vec::new(), ..Gguf::llama() }.bytes()),
        ("a tensor past all numbers", tensor(vec![u64::MAX, 4], 0, 0).bytes()),
        ("a tensor past the end", tensor(vec![8, 4], 0, 1 << 40).bytes()),
        ("a tensor of no type", tensor(vec![8, 4], 999, 0).bytes()),
        ("a tensor of many dimensions", tensor(vec![1; 40], 0, 0).bytes()),
        ("a tokenizer of another kind", Gguf::llama().with("tokenizer.ggml.model", text("spm")).bytes()),
    ]
}

/// A safetensors file with this header.
fn safetensors(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat()
}

fn safetensors_files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("nothing", Vec::new()),
        ("a length alone", 8_u64.to_le_bytes().to_vec()),
        ("a length past all numbers", u64::MAX.to_le_bytes().to_vec()),
        ("no JSON", safetensors("not json")),
        ("a type that is none", safetensors(r#"{"a":{"dtype":"F99","shape":[4],"data_offsets":[0,16]}}"#)),
        ("offsets past the end", safetensors(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1600]}}"#)),
        ("a shape of another size", safetensors(r#"{"a":{"dtype":"F32","shape":[400],"data_offsets":[0,16]}}"#)),
        ("nothing that is needed", safetensors(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#)),
    ]
}

/// Collects the messages of all situations.
struct MessageLog {
    scratch: Scratch,
    text: String,
    /// Messages with text that a user should not see.
    wrong: Vec<String>,
}

impl MessageLog {
    fn new() -> Self {
        let scratch = Scratch::with_corpus(2, 300);
        fs::create_dir(scratch.path("folder")).unwrap();
        fs::create_dir(scratch.path("model")).unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            std::os::unix::fs::symlink(nano_teacher().join(file), scratch.path("model").join(file)).unwrap();
        }
        Self { scratch, text: String::new(), wrong: Vec::new() }
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.scratch.path(name);
        let _ = fs::remove_file(&path);
        fs::write(path, bytes).unwrap();
    }

    /// A job without a teacher and with a small tokenizer, so that only the provoked error can occur.
    fn plain(&self) -> Value {
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "the": 1, "of": 2}}
        });
        self.put("words.json", tokenizer.to_string().as_bytes());
        let tokenizer = json!({"path": "words.json", "bos": "?", "eos": "?"});
        with(job(), &json!({"extract": null, "tokenizer": tokenizer, "pack": {"length": 16}}))
    }

    fn job(&mut self, situation: &str, job: &Value) {
        self.scratch.job("job.yaml", job);
        self.call(situation, &["run", "job.yaml"]);
        let _ = fs::remove_dir_all(self.scratch.path("out"));
    }

    /// Runs a command, records its message, and checks it for forbidden text.
    fn call(&mut self, situation: &str, arguments: &[&str]) {
        let ran = run_command(self.scratch.command(arguments).env("RUST_BACKTRACE", "1"));
        let said = ran.stderr + if arguments[0] == "verify" { &ran.stdout } else { "" };
        let said: Vec<&str> = said.lines().filter(|line| !line.starts_with("[00:0")).collect();
        let said = said.join("\n").replace(self.scratch.path("").to_str().unwrap(), "$DIR/");
        let said =
            said.replace(nano_teacher().to_str().unwrap(), "$TEACHER").replace(root().to_str().unwrap(), "$ROOT");
        let code = ran.code.unwrap_or_default();
        let mut wrong = |what: String| self.wrong.push(format!("{situation}: {what}\n{said}\n"));
        if code == 0 || said.trim().is_empty() {
            wrong(format!("exit code {:?}", ran.code));
        }
        for inside in FORBIDDEN_TEXT.iter().filter(|inside| said.contains(**inside)) {
            wrong(format!("{inside:?}"));
        }
        for line in said.lines() {
            if line.chars().count() >= 1000 {
                wrong(format!("a line of {} characters", line.chars().count()));
            }
            let mut parts: Vec<&str> = line.split([':', ';']).map(str::trim).filter(|part| part.len() > 12).collect();
            let all = parts.len();
            parts.sort_unstable();
            parts.dedup();
            if parts.len() < all {
                wrong("something is said twice".into());
            }
        }
        let _ = writeln!(self.text, "{situation} ({code})\n{said}\n");
    }
}

impl MessageLog {
    /// Returns all messages, after asserting that none is wrong.
    fn finish(self) -> String {
        assert!(self.wrong.is_empty(), "{} messages:\n\n{}", self.wrong.len(), self.wrong.join("\n"));
        self.text
    }
}

/// Starts a server that answers every request with this text; returns its port.
fn server(answer: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 8192]);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    port
}

#[test]
fn models_that_cannot_be_read() {
    let mut log = MessageLog::new();
    for (name, bytes) in gguf_files() {
        log.put("m.gguf", &bytes);
        log.job(&format!("gguf, {name}"), &with(job(), &json!({"extract": {"teacher": {"path": "m.gguf"}}})));
    }
    let folder = with(job(), &json!({"extract": {"teacher": {"path": "model"}}}));
    for (name, bytes) in safetensors_files() {
        log.put("model/model.safetensors", &bytes);
        log.job(&format!("safetensors, {name}"), &folder);
    }
    fs::remove_file(log.scratch.path("model/model.safetensors")).unwrap();
    log.job("no weights", &folder);
    fs::create_dir(log.scratch.path("model/model.safetensors")).unwrap();
    log.job("a folder for weights", &folder);
    for (name, config) in [
        ("no JSON", "{"),
        ("no fields", "{}"),
        ("another model", r#"{"model_type": "bert"}"#),
        ("a null", r#"{"model_type": "gpt2", "vocab_size": null}"#),
    ] {
        log.put("model/config.json", config.as_bytes());
        log.job(&format!("config.json, {name}"), &folder);
    }
    for (name, tokenizer) in
        [("empty", ""), ("no JSON", "{"), ("an object", "{}"), ("another kind", r#"{"model": {"type": "Magic"}}"#)]
    {
        log.put("t.json", tokenizer.as_bytes());
        log.job(&format!("tokenizer.json, {name}"), &with(log.plain(), &json!({"tokenizer": {"path": "t.json"}})));
    }
    log.job("a folder without a tokenizer", &with(log.plain(), &json!({"tokenizer": {"path": "folder"}})));
    log.job("no such tokenizer", &with(log.plain(), &json!({"tokenizer": {"path": "nowhere.json"}})));
    insta::assert_snapshot!(log.finish());
}

#[test]
fn jobs_and_inputs_that_cannot_be_read() {
    let mut log = MessageLog::new();
    let plain = log.plain();
    log.call("no job", &["run", "nowhere.yaml"]);
    log.call("a folder for a job", &["run", "folder"]);
    for (name, bytes) in [
        ("empty", &b""[..]),
        ("a list", b"[1, 2]"),
        ("binary", &[0, 159, 146, 150]),
        ("no YAML", b"a: [b"),
        ("a word", b"job"),
    ] {
        log.put("job.yaml", bytes);
        log.call(&format!("a job file that is {name}"), &["plan", "job.yaml"]);
    }
    std::os::unix::fs::symlink("loop.jsonl", log.scratch.path("loop.jsonl")).unwrap();
    let long = format!("{}.jsonl", "x".repeat(300));
    for path in [
        "nowhere.jsonl",
        "folder",
        "corpus.jsonl/below",
        "nowhere/*.jsonl",
        "loop.jsonl",
        &long,
        "[",
        "s4://bucket/key",
        "/dev/null",
    ] {
        let shown = &path[..path.len().min(40)];
        log.job(&format!("input {shown}"), &with(plain.clone(), &json!({"input": {"paths": [path]}})));
    }
    let files: [(&str, &str, &[u8]); 12] = [
        ("a.parquet", "parquet", b""),
        ("b.parquet", "parquet", b"PAR1 is not all of it"),
        ("c.parquet", "parquet", b"PAR1\0\0\0\0\xff\xff\xff\x7fPAR1"),
        ("a.arrow", "arrow", b""),
        ("b.arrow", "arrow", b"ARROW1\0\0 and then nothing"),
        ("a.jsonl.gz", "jsonl", b"not gzip"),
        ("b.jsonl.zst", "jsonl", b"not zstd"),
        ("c.jsonl.gz", "jsonl", b""),
        ("a.jsonl", "jsonl", b"{\"text\": 3}\n"),
        ("b.jsonl", "jsonl", b"{\"text\": \"\xff\"}\n"),
        ("a.csv", "csv", b"a,b\n1,2\n"),
        ("b.csv", "csv", b"id,text\n1,\"never ends\n"),
    ];
    for (name, format, bytes) in files {
        log.put(name, bytes);
        log.job(&format!("input {name}"), &with(plain.clone(), &json!({"input": {"format": format, "paths": [name]}})));
    }
    let missing = server("HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\nConnection: close\r\n\r\nnot found");
    let bucket = server(
        "HTTP/1.1 404 Not Found\r\nContent-Type: application/xml\r\nContent-Length: 64\r\nConnection: close\r\n\r\n\
         <Error><Code>NoSuchBucket</Code><Message>none</Message></Error>\n",
    );
    let closed = { TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port() };
    let said = log.text.len();
    log.job("404", &with(plain.clone(), &json!({"input": {"paths": [format!("http://127.0.0.1:{missing}/a.jsonl")]}})));
    let quick = json!({"max_attempts": 1, "first_backoff_milliseconds": 1, "largest_backoff_milliseconds": 1});
    let at = |port: u16| json!({"endpoint": format!("http://127.0.0.1:{port}"), "anonymous": true, "retry": quick});
    log.job(
        "no such bucket",
        &with(plain.clone(), &json!({"input": {"paths": ["s3://gone/a.jsonl"]}, "storage": at(bucket)})),
    );
    log.job(
        "no such bucket for the output",
        &with(plain.clone(), &json!({"output": {"path": "s3://gone/out"}, "storage": at(bucket)})),
    );
    log.job("nobody listens", &with(plain, &json!({"input": {"paths": ["s3://gone/a.jsonl"]}, "storage": at(closed)})));
    let tail = log.text.split_off(said);
    let named = [(missing, "$MISSING"), (bucket, "$BUCKET"), (closed, "$CLOSED")];
    log.text += &named.into_iter().fold(tail, |text, (port, name)| text.replace(&port.to_string(), name));
    insta::assert_snapshot!(log.finish());
}

#[test]
fn outputs_and_data_sets_that_are_not_right() {
    let mut log = MessageLog::new();
    let plain = log.plain();
    log.put("file", b"");
    for path in ["file", "file/out", "/proc/nowhere/out", "corpus.jsonl", "https://web/out", "s3://"] {
        log.job(&format!("output {path}"), &with(plain.clone(), &json!({"output": {"path": path}})));
    }
    log.job("output of a long name", &with(plain.clone(), &json!({"output": {"path": "y".repeat(300)}})));
    // simulates a full disk by the system's file size limit
    log.scratch.job("job.yaml", &plain);
    let program = stillhouse_tests::binary().display().to_string();
    let script = format!("ulimit -f 2; exec {program} run job.yaml");
    let mut shell = std::process::Command::new("bash");
    let full = run_command(shell.args(["-c", &script]).current_dir(log.scratch.path("")).env_remove("RUST_BACKTRACE"));
    assert_eq!(full.code, Some(1), "{}", full.stderr);
    assert!(
        full.stderr.contains("File too large") && !FORBIDDEN_TEXT.iter().any(|i| full.stderr.contains(i)),
        "{}",
        full.stderr
    );
    let _ = fs::remove_dir_all(log.scratch.path("out"));
    // an address space too small for any job, and one just large enough for a small job
    for (kilobytes, code, says) in [(300_000, 1, "(ulimit -v); valid on this machine: "), (1_200_000, 0, "")] {
        let script = format!("ulimit -v {kilobytes}; exec {program} run job.yaml");
        let mut shell = std::process::Command::new("bash");
        let ended =
            run_command(shell.args(["-c", &script]).current_dir(log.scratch.path("")).env_remove("RUST_BACKTRACE"));
        assert!(
            ended.code == Some(code) && ended.stderr.contains(says),
            "{kilobytes}: {:?} {}",
            ended.code,
            ended.stderr
        );
    }
    let _ = fs::remove_dir_all(log.scratch.path("out"));

    for verb in ["inspect", "verify", "clean"] {
        log.call(&format!("{verb} of nothing"), &[verb, "nowhere"]);
        log.call(&format!("{verb} of a file"), &[verb, "corpus.jsonl"]);
    }
    log.call("export of nothing", &["export", "nowhere", "elsewhere"]);
    log.scratch.make(&job());
    log.call("a row that is not there", &["inspect", "out", "--row", "99999"]);
    log.call("a column that is not there", &["inspect", "out", "--column", "colour"]);
    log.call("a view that is not there", &["inspect", "out", "--view", "9"]);
    let shard = "out/data/train-00000-of-00001.parquet";
    let damages: [Damage<'_>; 6] = [
        ("a manifest with another seed", "out/manifest.json", &|path| edit(path, |m| m["noise_seed"] = 43.into())),
        ("a manifest without its seed", "out/manifest.json", &|path| edit(path, |m| m["noise_seed"] = Value::Null)),
        ("a manifest without columns", "out/manifest.json", &|path| edit(path, |m| m["columns"] = Value::Null)),
        // cut where its text is the same on every machine
        ("a manifest that is cut", "out/manifest.json", &|path| {
            fs::write(path, &fs::read(path).unwrap()[..20]).unwrap()
        }),
        ("a shard that is cut", shard, &|path| cut(path)),
        ("a shard that is none", shard, &|path| fs::write(path, "PAR1").unwrap()),
    ];
    for (name, file, damage) in damages {
        let path = log.scratch.path(file);
        let good = fs::read(&path).unwrap();
        damage(&path);
        for verb in ["verify", "inspect"] {
            if verb == "verify" || !name.contains("seed") {
                log.call(&format!("{name}: {verb}"), &[verb, "out"]);
            }
        }
        fs::write(&path, good).unwrap();
    }
    insta::assert_snapshot!(sizes_left_out(&log.finish()));
}

/// A name, the file, and the change to it.
type Damage<'a> = (&'a str, &'a str, &'a dyn Fn(&Path));

/// Replaces numbers of three or more digits, which are shard sizes that every change of the format alters.
fn sizes_left_out(text: &str) -> String {
    let mut out = String::new();
    let mut digits = String::new();
    for c in text.chars().chain(['\n']) {
        if c.is_ascii_digit() {
            digits.push(c);
            continue;
        }
        out += if digits.len() < 3 { &digits } else { "#" };
        digits.clear();
        out.push(c);
    }
    out
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut manifest: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut manifest);
    fs::write(path, serde_json::to_string_pretty(&manifest).unwrap()).unwrap();
}

fn cut(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
}
