//! Checks that scripts fetch only what is pinned by version and hash, line by line: an installer rejects anything else,
//! and no other code installs.

use std::collections::BTreeMap;
use std::fs::read_to_string;

use stillhouse_tests::root;

/// Name and version of every requirement; fails on a line that is not a requirement with hashes.
fn pinned(list: &str) -> Result<BTreeMap<&str, &str>, String> {
    let mut pinned = BTreeMap::new();
    let mut lines = list.lines().peekable();
    while let Some(line) = lines.next() {
        let parts: Vec<&str> = line.strip_suffix(" \\").unwrap_or(line).splitn(2, " ; ").collect();
        let name =
            |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)) && !text.is_empty();
        let version =
            parts[0].split_once("==").filter(|(n, v)| name(n) && v.chars().all(|c| name(&c.to_string()) || c == '+'));
        let (package, version) = version.ok_or_else(|| format!("no requirement: {line}"))?;
        let mut hashes = 0;
        while let Some(hash) = lines.next_if(|line| line.starts_with(' ')) {
            let digits = hash.trim_end_matches(" \\").strip_prefix("    --hash=sha256:");
            let is_hash = |d: &&str| d.len() == 64 && d.chars().all(|c| c.is_ascii_hexdigit());
            digits.filter(is_hash).ok_or_else(|| format!("no hash: {hash}"))?;
            hashes += 1;
        }
        if hashes == 0 {
            return Err(format!("{package} has no hash"));
        }
        pinned.insert(package, version);
    }
    Ok(pinned)
}

#[test]
fn every_list_of_the_scripts_has_what_is_wanted_with_hashes() {
    let folder = root().join("scripts/pins");
    let mut lists = 0;
    for entry in folder.read_dir().unwrap() {
        let wanted = entry.unwrap().path();
        if wanted.extension().is_none_or(|e| e != "in") {
            continue;
        }
        let list = wanted.with_extension("txt");
        let text = read_to_string(&list).unwrap();
        let pinned = pinned(&text).unwrap_or_else(|e| panic!("{}: {e}", list.display()));
        for line in read_to_string(&wanted).unwrap().lines().filter(|line| !line.starts_with('#')) {
            let (name, version) = line.split_once("==").unwrap();
            let name = name.split('[').next().unwrap();
            assert_eq!(pinned.get(name), Some(&version), "{}: {line}", list.display());
        }
        lists += 1;
    }
    assert!(lists >= 7, "{lists} lists");
}

#[test]
fn a_line_that_is_none_is_seen() {
    let hash = "0".repeat(64);
    let good = format!("a==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:{hash} \\\n    --hash=sha256:{hash}\n");
    assert_eq!(pinned(&good).unwrap(), BTreeMap::from([("a", "1.0")]));
    for bad in ["a==1.0\n", "a>=1 \\\n    --hash=sha256:00\n", "a==1 \\\n    --hash=sha256:00\n", "a==1\" | tr -\n"] {
        assert!(pinned(bad).is_err(), "{bad}");
    }
}
