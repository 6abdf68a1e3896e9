//! Tests that the modules of each crate import each other without cycles.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Folders of the workspace's crates with code.
fn crates(root: &Path) -> Vec<String> {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let (_, members) = manifest.split_once("members = [").unwrap();
    let (members, _) = members.split_once(']').unwrap();
    let folders = members.split(',').map(|member| member.trim().trim_matches('"').to_owned());
    folders.filter(|folder| root_file(&root.join(folder).join("src")).is_some()).collect()
}

/// The file that declares the modules of a crate.
fn root_file(source: &Path) -> Option<PathBuf> {
    ["lib.rs", "main.rs"].map(|name| source.join(name)).into_iter().find(|file| file.exists())
}

/// The top-level modules of a crate, each with the others that its product code imports by `crate::`, or in its own
/// file by `super::`.
fn imports(source: &Path) -> Graph {
    let root = fs::read_to_string(root_file(source).unwrap()).unwrap();
    let declared = root.lines().filter_map(|line| {
        let (before, name) = line.split_once("mod ")?;
        ["", "pub ", "pub(crate) "].contains(&before).then(|| name.trim_end_matches(';').to_owned())
    });
    let modules: BTreeSet<String> = declared.collect();
    let files_of = |module: &str| {
        let mut files = vec![source.join(format!("{module}.rs"))];
        files.retain(|file| file.exists());
        collect(&source.join(module), &mut files);
        files
    };
    let named = |module: &str| {
        let own = [source.join(format!("{module}.rs")), source.join(module).join("mod.rs")];
        let code = |file: &PathBuf| {
            let code = product_code(file);
            if own.contains(file) { code.replace("super::", "crate::") } else { code }
        };
        let text: String = files_of(module).iter().map(code).collect();
        let mut named = named_by(&text, &modules);
        named.remove(module);
        named
    };
    modules.iter().map(|module| (module.clone(), named(module))).collect()
}

/// Collects the files below a folder that are not tests.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.map(Result::unwrap).filter(|e| !e.file_name().to_string_lossy().starts_with("tests")) {
        match entry.file_type().unwrap().is_dir() {
            true => collect(&entry.path(), files),
            false if entry.path().extension().is_some_and(|e| e == "rs") => files.push(entry.path()),
            false => {}
        }
    }
}

/// Text of a file without comments and without the unit tests at its end.
fn product_code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code = code.split("\n#[cfg(test)]\npub(crate) mod tests {").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

/// The modules that follow `crate::`, alone or in braces.
fn named_by(code: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for after in code.split("crate::").skip(1) {
        let names: Vec<String> = match after.strip_prefix('{') {
            // a name in inner braces belongs to the module before them
            Some(group) => {
                let (mut depth, mut names, mut name) = (0, Vec::new(), String::new());
                for c in group.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => names.push(std::mem::take(&mut name)),
                        c if depth == 0 => name.push(c),
                        _ => {}
                    }
                }
                names.push(name);
                names.iter().map(|n| first_word(n.trim())).collect()
            }
            None => vec![first_word(after)],
        };
        named.extend(names.into_iter().filter(|name| modules.contains(name)));
    }
    named
}

fn first_word(text: &str) -> String {
    text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
}

/// A cycle of imports, if there is one.
fn cycle(graph: &Graph) -> Option<Vec<String>> {
    fn visit<'a>(graph: &'a Graph, module: &'a str, path: &mut Vec<&'a str>, done: &mut BTreeSet<&'a str>) -> bool {
        if path.contains(&module) {
            path.push(module);
            return true;
        }
        if done.contains(module) {
            return false;
        }
        path.push(module);
        if graph[module].iter().any(|next| visit(graph, next, path, done)) {
            return true;
        }
        path.pop();
        done.insert(module);
        false
    }
    let (mut path, mut done) = (Vec::new(), BTreeSet::new());
    let found = graph.keys().any(|module| visit(graph, module, &mut path, &mut done));
    found.then(|| {
        let last = *path.last().unwrap();
        let begin = path.iter().position(|module| *module == last).unwrap();
        path[begin..].iter().map(ToString::to_string).collect()
    })
}

#[test]
fn no_module_imports_one_that_imports_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let graph = imports(&root.join("pipeline/src"));
    assert!(graph.len() > 12 && graph["run"].contains("job") && graph["repair"].contains("append"), "{graph:#?}");
    let crates = crates(root);
    assert!(crates.len() > 20 && crates.contains(&"jobs/cli".to_owned()), "{crates:?}");
    for folder in crates {
        if let Some(cycle) = cycle(&imports(&root.join(&folder).join("src"))) {
            panic!("{folder}: {}; move what both need into a module below them", cycle.join(" imports "))
        }
    }
}

#[test]
fn a_cycle_is_found() {
    let modules: BTreeSet<String> = ["a", "b", "c"].map(str::to_owned).into();
    let code = "use crate::a;\nuse crate::{b::{self, c}, other};\n";
    assert_eq!(named_by(code, &modules), ["a", "b"].map(str::to_owned).into());
    let graph = |edges: [(&str, &[&str]); 3]| -> Graph {
        edges.into_iter().map(|(from, to)| (from.to_owned(), to.iter().map(ToString::to_string).collect())).collect()
    };
    assert_eq!(cycle(&graph([("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])), None);
    let found = cycle(&graph([("a", &["b"]), ("b", &["c"]), ("c", &["b"])]));
    assert_eq!(found, Some(["b", "c", "b"].map(str::to_owned).into()));
}
