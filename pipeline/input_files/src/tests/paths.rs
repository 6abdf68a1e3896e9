use super::*;

fn names(bench: &Bench, paths: Value) -> Vec<String> {
    bench.files(&input(json!({"format": "text", "paths": paths}))).into_iter().map(|f| f.path).collect()
}

fn problem(bench: &Bench, paths: Value) -> String {
    let input = input(json!({"format": "text", "paths": paths}));
    let names = PathExpander::from_environment();
    let listed = bench.try_files(&input, &names);
    let Err(ListError::Problems(problems)) = listed else { panic!("{listed:?}") };
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
}

#[test]
fn every_path_without_a_file_is_reported() {
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

#[test]
fn braces_find_files_for_each_of_their_alternatives() {
    let bench = tree();
    assert_eq!(names(&bench, json!(["{b,a}.txt"])), ["b.txt", "a.txt"]);
    assert_eq!(names(&bench, json!(["{[ab],10}.txt"])), ["a.txt", "b.txt", "10.txt"]);
    assert_eq!(names(&bench, json!(["d/{e/*.gz,x.txt,e/y*}"])), ["d/e/y.txt.gz", "d/x.txt"]);
}

#[test]
fn an_alternative_without_files_is_a_problem_that_names_it() {
    let bench = tree();
    let text = problem(&bench, json!(["*.{txt,jsonl}", "{a,none}.txt"]));
    assert!(text.contains("input.paths[0]: got \"*.{txt,jsonl}\": \"*.jsonl\": matches no file"), "{text}");
    assert!(text.contains("input.paths[1]: got \"{a,none}.txt\": \"none.txt\": no such file or folder"), "{text}");
}

#[test]
fn variables_are_not_patterns_and_stay_out_of_names() {
    let all = ["[x]/a.txt", "[x]/b.txt", "x/a.txt", "e*/c.txt", "ee/c.txt"];
    let bench = Bench::with(&all.map(|n| (n, b"t\n" as &[u8])));
    let found = |paths: Value| -> Vec<String> {
        let names = PathExpander::with(|name| match name {
            "X" => Ok("[x]".into()),
            "E" => Ok("e*".into()),
            "NONE" => Ok("none".into()),
            _ => Err(format!("{name} is not set")),
        });
        let input = input(json!({"format": "text", "paths": paths}));
        let files = bench.try_files(&input, &names);
        files.unwrap().into_iter().map(|file| file.path).collect()
    };
    assert_eq!(found(json!(["${X}/*.txt"])), ["${X}/a.txt", "${X}/b.txt"]);
    assert_eq!(found(json!(["${X}/a.txt", "${X}"])), ["${X}/a.txt", "${X}/b.txt"]);
    assert_eq!(found(json!(["${E}/*.txt"])), ["${E}/c.txt"]);
    assert_eq!(found(json!(["${X}/{b,a}.txt", "x/a.txt"])), ["${X}/b.txt", "${X}/a.txt", "x/a.txt"]);
}

#[test]
fn of_many_paths_that_find_nothing_the_first_are_reported_and_the_rest_counted() {
    let bench = tree();
    let paths: Vec<String> =
        (0..2000).map(|n| if n == 1000 { "a.txt".into() } else { format!("gone-{n}.txt") }).collect();
    let mut before_item = Vec::new();
    let given = input(json!({"format": "text", "paths": paths}));
    let names = PathExpander::from_environment();
    let listed = list_files(&bench.store, bench.paths(&given, &names), &|_| Ok(()), &mut |n| before_item.push(n));
    let Err(ListError::Problems(problems)) = listed else { panic!("{listed:?}") };
    assert_eq!(problems.len(), 91);
    assert_eq!(problems[89].field, "input.paths[89]");
    assert_eq!(problems[90].to_string(), "input.paths: and 1909 more paths with problems");
    assert_eq!(before_item, (0..2000).collect::<Vec<_>>());
}

/// Error messages of a listing: names of a folder that are not UTF-8, and dangling links.
#[cfg(unix)]
mod names {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    use super::*;

    fn put_bytes(bench: &Bench, name: &[u8]) {
        std::fs::write(bench.path().join(OsStr::from_bytes(name)), b"t\n").unwrap();
    }

    #[test]
    fn a_name_that_cannot_be_reported_harms_nothing_but_itself() {
        for odd in [b"caf\xe9.txt".as_slice(), b"two\nlines.txt", b"bell\x07.txt"] {
            let bench = Bench::with(&[("a.txt", b"a\n"), ("d/b.txt", b"b\n"), ("x.csv", b"")]);
            put_bytes(&bench, odd);
            put_bytes(&bench, &[b"d/", odd].concat());
            // the patterns do not match the unreadable name
            assert_eq!(names(&bench, json!(["a.txt", "a*.txt", "*/b.*"])), ["a.txt", "d/b.txt"]);
            for (path, folder) in [("*.txt", ""), ("**/*.txt", ""), ("d", "d/"), ("d/*", "d/"), ("d/**", "d/")] {
                let text = problem(&bench, json!([path]));
                let escaped = format!("\"{folder}{}\"", format!("{:?}", OsStr::from_bytes(odd)).trim_matches('"'));
                let says =
                    format!(": {escaped} has a name that is not UTF-8 or has control characters; valid: rename it");
                assert!(text.starts_with("input.paths[0]: got ") && text.contains(&says), "{text}");
                assert_eq!(text.lines().count(), 1, "{text}");
            }
        }
        let bench = tree();
        let text = problem(&bench, json!(["a\nb.txt"]));
        assert!(text.contains("has control characters, which no name of an input may have"), "{text}");
    }

    #[test]
    fn links_in_circles_and_to_nowhere_are_reported_by_their_name() {
        let bench = Bench::with(&[("a.txt", b"a\n"), ("d/e/b.txt", b"b\n")]);
        let link = |to: &str, name: &str| symlink(to, bench.path().join(name)).unwrap();
        link("self.txt", "self.txt");
        link("nowhere", "gone.txt");
        link("..", "d/e/up");
        link("a.txt", "link.txt");
        // the patterns match neither name
        assert_eq!(names(&bench, json!(["[al]*.txt", "d/e/*.txt"])), ["a.txt", "link.txt", "d/e/b.txt"]);
        assert_eq!(names(&bench, json!(["d/*/*.txt"])), ["d/e/b.txt"]);
        for (path, says) in [
            ("s*.txt", "\"self.txt\" is a link that cannot be followed: too many levels of symbolic links"),
            ("g*.txt", "\"gone.txt\" is a link to what is not there"),
            ("d", "\"d/e/up\" is a link to a folder that contains it"),
            ("d/**/*.txt", "\"d/e/up\" is a link to a folder that contains it"),
        ] {
            let text = problem(&bench, json!([path]));
            assert!(text.contains(says) && text.matches("link").count() <= 2, "{path}: {text}");
        }
        let text = problem(&bench, json!(["self.txt"]));
        assert!(text.contains("too many levels of symbolic links") && !text.contains("Generic"), "{text}");
    }

    #[test]
    fn folders_that_lead_to_each_other_end() {
        let bench = Bench::with(&[("a/x.txt", b"x\n"), ("b/y.txt", b"y\n")]);
        symlink("../b", bench.path().join("a/to_b")).unwrap();
        symlink("../a", bench.path().join("b/to_a")).unwrap();
        let text = problem(&bench, json!(["a"]));
        assert!(text.contains("\"a/to_b/to_a\" is a link to a folder that contains it"), "{text}");
    }

    #[test]
    fn what_is_not_admitted_is_named() {
        let bench = Bench::with(&[("d/a.txt", b"a\n"), ("other.txt", b"o\n")]);
        symlink("../other.txt", bench.path().join("d/out.txt")).unwrap();
        let input = input(json!({"format": "text", "paths": ["d/*.txt"]}));
        let check_access = |named: &stillhouse_base::storage::Location| match named {
            stillhouse_base::storage::Location::Disk(path)
                if path.canonicalize().is_ok_and(|at| at.ends_with("other.txt")) =>
            {
                Err("is outside".to_owned())
            }
            _ => Ok(()),
        };
        let own = PathExpander::from_environment();
        let listed = list_files(&bench.store, bench.paths(&input, &own), &check_access, &mut |_| {});
        let Err(ListError::Problems(problems)) = listed else {
            panic!("listed");
        };
        assert!(problems[0].message.contains("\"d/out.txt\" is a link: is outside"), "{problems:?}");
    }
}
