//! Tests the exit status of `scripts/gpu-check` with stub programs: it is 0 if and only if every part has checked and
//! passed.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// The shell code of the stub programs.
#[derive(Clone, Copy)]
struct Parts {
    /// Whether `$PYTHON` names the Python; otherwise `PATH` finds it.
    named: bool,
    /// `gpu_check`; `$json` is its output file.
    check: &'static str,
    /// `stillhouse run`, and `stillhouse verify` below.
    run: &'static str,
    verify: &'static str,
    /// Importing torch.
    torch: &'static str,
    /// `gpu_check.py`.
    python: &'static str,
}

const WHOLE: &str = r#"echo '{"right": true, "rows": []}' >"$json""#;
const GOOD: Parts =
    Parts { named: true, check: WHOLE, run: "exit 0", verify: "exit 0", torch: "exit 0", python: "exit 0" };

fn script(path: &Path, body: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/usr/bin/env bash\n{body}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs the script. Returns its exit status, its stderr, and the folder of the stubs' output.
fn ends_with(parts: Parts) -> (i32, String, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let release = folder.path().join("target/release");
    let Parts { named, check, run, verify, torch, python } = parts;
    let check = format!(
        "echo \"$VIRTUAL_ENV\" >\"{}/environment\"\nwhile (($#)); do [[ $1 != --json ]] || json=$2; shift; done\n{check}",
        folder.path().display()
    );
    script(&release.join("examples/gpu_check"), &check);
    script(&release.join("stillhouse"), &format!("case $1 in run) {run} ;; verify) {verify} ;; esac"));
    let python = format!(
        "case \"$*\" in *gpu_check.py*) {python} ;; *'import torch'*) {torch} ;; *zipfile*) exit 0 ;; *sys.prefix*) echo /an/environment ;; \
         *) exit 99 ;; esac"
    );
    script(&folder.path().join("bin/python3"), &python);
    let bin = folder.path().join("bin");
    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new(repository().join("scripts/gpu-check"));
    command.args(["--json", "found.json"]).current_dir(folder.path());
    command.env("CARGO_TARGET_DIR", folder.path().join("target")).env_remove("VIRTUAL_ENV");
    match named {
        true => command.env("PYTHON", bin.join("python3")),
        false => command.env_remove("PYTHON").env("PATH", format!("{}:{path}", bin.display())),
    };
    let out = command.output().unwrap();
    (out.status.code().unwrap(), String::from_utf8(out.stderr).unwrap(), folder)
}

#[test]
fn it_ends_with_0_only_where_every_part_has_checked() {
    let cases: [(&str, Parts, i32, &str); 16] = [
        ("all is right", GOOD, 0, "gpu-check: right"),
        (
            "no torch",
            Parts { named: false, torch: "exit 1", python: "exit 9", ..GOOD },
            0,
            "no comparison with PyTorch",
        ),
        ("no torch, where it was named", Parts { torch: "exit 1", ..GOOD }, 2, "importing torch"),
        ("wrong", Parts { check: "echo '{\"right\": false}' >\"$json\"; exit 1", ..GOOD }, 1, "WRONG"),
        ("wrong, and says 0", Parts { check: "echo '{\"right\": false}' >\"$json\"", ..GOOD }, 1, "WRONG"),
        (
            "out of time",
            Parts { check: "echo '{\"right\": true}' >\"$json\"; exit 3", ..GOOD },
            3,
            "NOT CHECKED: out of time",
        ),
        ("no file", Parts { check: "exit 0", ..GOOD }, 2, "NOT CHECKED"),
        ("no device", Parts { check: "exit 2", ..GOOD }, 2, "NOT CHECKED"),
        ("a crash", Parts { check: "echo '{\"right\": true}' >\"$json\"; kill -SEGV $$", ..GOOD }, 2, "NOT CHECKED"),
        ("no job", Parts { run: "exit 1", ..GOOD }, 2, "a job, verified on the CPU: ended with 2"),
        ("a job that is not as promised", Parts { verify: "exit 1", ..GOOD }, 1, "WRONG"),
        ("torch does not load", Parts { torch: "kill -SEGV $$", ..GOOD }, 2, "importing torch"),
        ("the replay is wrong", Parts { python: "exit 1", ..GOOD }, 1, "WRONG"),
        ("the replay was not checked", Parts { python: "exit 3", ..GOOD }, 3, "NOT CHECKED: out of time"),
        ("gpu_check.py crashes", Parts { python: "kill -ABRT $$", ..GOOD }, 2, "gpu_check.py: ended with 134"),
        (
            "wrong and out of time",
            Parts { check: "echo '{\"right\": true}' >\"$json\"; exit 3", python: "exit 1", ..GOOD },
            1,
            "WRONG",
        ),
    ];
    for (what, parts, code, expected_stderr) in cases {
        let (got, stderr, _) = ends_with(parts);
        assert_eq!(got, code, "{what}: {stderr}");
        assert!(stderr.contains(expected_stderr), "{what}: {stderr}");
        assert_eq!(stderr.trim_end().ends_with("gpu-check: right"), code == 0, "{what}: {stderr}");
    }
}

#[test]
fn the_environment_of_the_named_python_is_where_libraries_are_looked_for() {
    for named in [true, false] {
        let (code, stderr, folder) = ends_with(Parts { named, ..GOOD });
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(fs::read_to_string(folder.path().join("environment")).unwrap(), "/an/environment\n");
    }
}
