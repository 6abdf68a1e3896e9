//! Class folders: a tree with ambiguous class numbers is refused, with the file or folder that makes it ambiguous.

use serde_json::{Value, json};
use stillhouse_schemas::spec::Input;

use super::super::*;
use super::Bench;
use super::numbers::{image, images};
use stillhouse_input_files::ListError;

fn of(paths: Value) -> Input {
    images(json!({}), json!({"paths": paths}))
}

/// Returns the classes of a tree, or why it is refused.
fn classes(bench: &Bench, input: &Input) -> Result<Vec<String>, String> {
    match bench.try_files(input) {
        Ok(files) => Ok(with_class_names(input, &files).into_owned().images.unwrap().classes),
        Err(ListError::Problems(problems)) => {
            Err(problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
        }
        Err(ListError::Store(error)) => panic!("{error}"),
    }
}

fn tree(files: &[&str]) -> Bench {
    let png = image("rgb.png");
    let bench = Bench::new();
    files.iter().for_each(|file| bench.put(file, &png));
    bench
}

#[track_caller]
fn refused(bench: &Bench, input: &Input, says: &[&str]) {
    let why = classes(bench, input).unwrap_err();
    let all = says.iter().all(|part| why.contains(part));
    assert!(all && why.contains("or all classes by name in `input.images.classes`"), "{why}");
}

#[test]
fn a_stray_image_shifts_no_label() {
    let good = ["data/fish/1.png", "data/fish/2.png", "data/goat/1.png"];
    let bench = tree(&good);
    assert_eq!(classes(&bench, &of(json!(["data"]))).unwrap(), ["fish", "goat"]);
    bench.put("data/readme.jpg", &image("444.jpg"));
    let stray =
        "\"data/readme.jpg\" is on another level than \"data/fish/1.png\": its folder \"data\" would be a class too";
    for paths in [json!(["data"]), json!(["data/**"]), json!(["./data/"])] {
        let why = classes(&bench, &of(paths.clone())).unwrap_err();
        assert!(
            why.contains("readme.jpg") && why.contains("its folder \"data\" would be a class too"),
            "{paths}: {why}"
        );
    }
    refused(&bench, &of(json!(["data"])), &["input.paths[0]: got \"data\": ", stray]);
    // found by another path than the rest
    refused(&bench, &of(json!(["data/*/*.png", "data/*.jpg"])), &["input.paths: ", stray]);
    // excluded files shift nothing, nor do files without an image ending or hidden files
    bench.put("data/notes.txt", b"");
    bench.put("data/.cache/x.png", &image("rgb.png"));
    assert_eq!(classes(&bench, &of(json!(["data/*/*.png"]))).unwrap(), ["fish", "goat"]);
    let named = images(json!({"classes": ["goat", "fish"]}), json!({"paths": ["data"]}));
    assert_eq!(classes(&bench, &named).unwrap(), ["goat", "fish"]);
    let none = images(json!({"labels": "none"}), json!({"paths": ["data"]}));
    assert!(classes(&bench, &none).unwrap().is_empty());
}

#[test]
fn class_folders_are_on_one_level() {
    // neither folder lies in the other
    let bench =
        tree(&["data/fish/1.png", "data/fish/2.png", "data/goat/1.png", "data/dog/2023/1.png", "data/dog/2023/2.png"]);
    let stray = "\"data/dog/2023/1.png\" (and 1 more on its level) is on another level than \"data/fish/1.png\": its folder \"2023\"";
    refused(&bench, &of(json!(["data"])), &[stray]);
    // one folder lies in the other
    let bench = tree(&["data/fish/1.png", "data/fish/old/1.png", "data/goat/1.png", "data/goat/2.png"]);
    refused(&bench, &of(json!(["data"])), &["\"data/fish/old/1.png\" is on another level", "its folder \"old\""]);
    // at a tie, the deeper level has the classes
    let bench = tree(&["data/1.png", "data/fish/1.png"]);
    refused(&bench, &of(json!(["data"])), &["\"data/1.png\" is on another level than \"data/fish/1.png\""]);
    // each path may have its own level; a repeated path and several roots give one list of classes
    let bench = tree(&["a/fish/1.png", "a/goat/1.png", "b/x/fish/1.png", "b/x/dog/1.png", "c/cow/1.png"]);
    let several = of(json!(["a", "b", "a", "c/cow", "a/{fish,goat}"]));
    assert_eq!(classes(&bench, &several).unwrap(), ["cow", "dog", "fish", "goat"]);
    assert_eq!(bench.files(&several).len(), 5);
}

#[test]
fn a_folder_without_an_image_is_no_class_that_is_left_out_silently() {
    let bench = tree(&["data/cat/1.png", "data/goat/1.png"]);
    bench.put("data/dog/notes.txt", b"");
    std::fs::create_dir(bench.path().join("data/elk")).unwrap();
    let says =
        "the folder \"data/dog\" beside class folders has no image (nor have 1 more): it would change the labels";
    refused(&bench, &of(json!(["data"])), &["input.paths: ", says]);
    refused(&bench, &of(json!(["data/*/*.png"])), &[says]);
    assert_eq!(classes(&bench, &of(json!(["data/[cg]*/*.png"]))).unwrap(), ["cat", "goat"], "is not asked for");
    let named = images(json!({"classes": ["cat", "dog", "elk", "goat"]}), json!({"paths": ["data"]}));
    assert_eq!(classes(&bench, &named).unwrap().len(), 4);
    // a class folder may contain an empty folder, or be empty in one of several roots
    let bench = tree(&["a/cat/1.png", "a/dog/1.png", "b/cat/1.png"]);
    std::fs::create_dir_all(bench.path().join("a/cat/old")).unwrap();
    std::fs::create_dir_all(bench.path().join("b/dog")).unwrap();
    assert_eq!(classes(&bench, &of(json!(["a", "b"]))).unwrap(), ["cat", "dog"]);
}
