use super::*;

fn names(bench: &Bench, paths: Value) -> Vec<String> {
    bench.files(&input(json!({"format": "text", "paths": paths}))).into_iter().map(|f| f.path).collect()
}

fn problem(bench: &Bench, paths: Value) -> String {
    let listed =
        list(&bench.store, bench.path(), &input(json!({"format": "text", "paths": paths})), &|_| Ok(()), &mut |_| {});
    let Err(NotListed::Problems(problems)) = listed else { panic!("{listed:?}") };
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn tree() -> Bench {
    let all = [
        "b.txt",
        "a.txt",
        "a.csv",
        ".hidden.txt",
        "d/x.txt",
        "d/e/y.txt.gz",
        "d/e/z.md",
        ".git/t.txt",
        "sp ace/ü%41#1.txt",
        "10.txt",
        "9.txt",
    ];
    Bench::with(&all.map(|n| (n, b"t\n" as &[u8])))
}

#[test]
fn globs_are_sorted_and_hidden_files_left_out() {
    let bench = tree();
    assert_eq!(names(&bench, json!(["*.txt"])), ["10.txt", "9.txt", "a.txt", "b.txt"]);
    assert_eq!(names(&bench, json!(["[ab].txt", "?.txt"])), ["a.txt", "b.txt", "9.txt"]);
    assert_eq!(
        names(&bench, json!(["**/*.txt"])),
        ["10.txt", "9.txt", "a.txt", "b.txt", "d/x.txt", "sp ace/ü%41#1.txt"]
    );
    assert_eq!(names(&bench, json!(["d/**"])), ["d/x.txt", "d/e/y.txt.gz", "d/e/z.md"]);
    assert_eq!(names(&bench, json!(["*/e/*.gz"])), ["d/e/y.txt.gz"]);
    assert_eq!(names(&bench, json!([".hidden.txt"])), [".hidden.txt"]);
}

#[test]
fn folders_stand_for_the_files_of_the_format() {
    let bench = tree();
    assert_eq!(names(&bench, json!(["d"])), ["d/e/y.txt.gz", "d/x.txt"]);
    assert_eq!(names(&bench, json!(["./d/"])), ["./d/e/y.txt.gz", "./d/x.txt"]);
}

#[test]
fn order_of_the_job_without_duplicates() {
    let bench = tree();
    assert_eq!(names(&bench, json!(["b.txt", "*.txt", "d/../a.txt"])), ["b.txt", "10.txt", "9.txt", "a.txt"]);
    let absolute = bench.path().join("a.txt").display().to_string();
    assert_eq!(names(&bench, json!([absolute])), std::slice::from_ref(&absolute));
    assert_eq!(names(&bench, json!([format!("file://{absolute}")])), [absolute]);
    assert_eq!(names(&bench, json!(["sp ace/ü%41#1.txt"])), ["sp ace/ü%41#1.txt"]);
    bench.assert_documents(&input(json!({"format": "text", "paths": ["sp ace/*"]})), &["t"]);
}

#[test]
fn every_path_without_a_file_is_told() {
    let bench = tree();
    bench.put("only/x.bin", b"");
    let text = problem(&bench, json!(["none.txt", "a.txt", "*.nope", "only", "[", "none/**/x"]));
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("input.paths[0]: got \"none.txt\": no such file or folder"), "{text}");
    assert!(lines[1].starts_with("input.paths[2]: got \"*.nope\": matches no file"), "{text}");
    assert!(
        lines[2].starts_with(
            "input.paths[3]: got \"only\": the folder has no files with an ending of the format; valid: .txt"
        ),
        "{text}"
    );
    assert!(lines[3].starts_with("input.paths[4]: got \"[\": not a glob"), "{text}");
    assert!(lines[4].starts_with("input.paths[5]"), "{text}");
    assert_eq!(lines.len(), 5);
}

#[test]
fn only_files_are_read() {
    let bench = tree();
    let pipe = bench.path().join("pipe.txt");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let _socket = std::os::unix::net::UnixListener::bind(bench.path().join("d/socket.txt")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", bench.path().join("zero.txt")).unwrap();
    for path in ["pipe.txt", "p*.txt", "d", "d/socket.txt", "zero.txt", "/dev/zero", "**/s*.txt"] {
        let text = problem(&bench, json!([path]));
        assert!(text.starts_with("input.paths[0]: got ") && text.contains("a pipe, a device or a socket"), "{text}");
    }
}
