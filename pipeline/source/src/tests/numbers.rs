//! Images and codes: every layout gives the same rows for any size of split, and hostile files give one error or are
//! counted.

use std::collections::BTreeMap;

use arrow::array::AsArray;
use arrow::datatypes::{Int32Type, UInt32Type, UInt64Type};
use serde_json::{Value, json};
use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_schemas::spec::Input;

use super::super::*;
use super::cifar::planes;
use super::{Bench, gzip, read_split, zstandard};

/// A row: its numbers and its label.
pub(super) type Row = (Vec<u32>, Option<i32>);

pub(super) fn image(name: &str) -> Vec<u8> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../operators/testdata/images");
    std::fs::read(root.join(name)).unwrap()
}

pub(super) fn images(fields: Value, more: Value) -> Input {
    let mut section = json!({"size": 4, "fit": "stretch"});
    section.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let mut all = json!({"format": "images", "paths": ["*"], "images": section});
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(all).unwrap()
}

fn codes(fields: Value) -> Input {
    let mut section = json!({"size": 1000, "length": 3});
    section.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    serde_json::from_value(json!({"format": "codes", "paths": ["*"], "codes": section})).unwrap()
}

pub(super) struct Got {
    pub rows: Vec<Row>,
    skipped: BTreeMap<String, u64>,
    sums: Vec<String>,
}

fn read(bench: &Bench, input: &Input, splits: &[SplitRecord]) -> Result<Got, SourceError> {
    let files = bench.files(input);
    let input = with_class_names(input, &files).into_owned();
    let mut got = Got { rows: Vec::new(), skipped: BTreeMap::new(), sums: Vec::new() };
    for split in splits {
        let mut last = None;
        let summary = read_split(&bench.store, &files, split, &input, &mut |batch| {
            assert_eq!(batch.schema(), stillhouse_operators::grid::numbers_schema());
            let (ids, tokens) = (batch.column(0).as_primitive::<UInt64Type>(), batch.column(1).as_list::<i32>());
            let labels = batch.column(2).as_primitive::<Int32Type>();
            for row in 0..batch.num_rows() {
                assert!(last < Some(ids.value(row)));
                last = Some(ids.value(row));
                let numbers = tokens.value(row).as_primitive::<UInt32Type>().values().to_vec();
                got.rows.push((numbers, labels.iter().nth(row).flatten()));
            }
            Ok(())
        })?;
        summary.skipped.into_iter().for_each(|(reason, n)| *got.skipped.entry(reason).or_default() += n);
        got.sums.extend(summary.sha256);
    }
    Ok(got)
}

pub(super) fn all(bench: &Bench, input: &Input, target: u64) -> Result<Got, SourceError> {
    read(bench, input, &bench.plan(input, target)?)
}

/// Returns the rows, which must be the same for every size of split.
#[track_caller]
pub(super) fn rows(bench: &Bench, input: &Input) -> Vec<Row> {
    let whole = all(bench, input, u64::MAX).unwrap();
    for target in [1, 48, 49, 100, 1000] {
        let splits = bench.plan(input, target).unwrap();
        assert!(target > 1 || splits.len() >= whole.rows.len().min(2), "{target}: {} splits", splits.len());
        assert_eq!(read(bench, input, &splits).unwrap().rows, whole.rows, "target {target}");
    }
    whole.rows
}

#[track_caller]
pub(super) fn fails(bench: &Bench, input: &Input, says: &[&str]) {
    let error = all(bench, input, 1000).map(|got| got.rows).unwrap_err().to_string();
    assert!(says.iter().all(|part| error.contains(part)), "{error}");
}

fn labels(rows: &[Row]) -> Vec<i32> {
    rows.iter().map(|(_, label)| label.unwrap()).collect()
}

/// Returns a padded member of a `ustar` archive.
fn member(name: &str, content: &[u8]) -> Vec<u8> {
    typed_member(name, content, b'0')
}

fn typed_member(name: &str, content: &[u8], kind: u8) -> Vec<u8> {
    let mut header = vec![0u8; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000644\0");
    header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header.extend_from_slice(content);
    header.resize(header.len().next_multiple_of(512), 0);
    header
}

fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar: Vec<u8> = members.iter().flat_map(|(name, content)| member(name, content)).collect();
    tar.resize(tar.len() + 1024, 0);
    tar
}

#[test]
fn folders_are_classes() {
    let bench = Bench::new();
    for (path, name) in
        [("b/1.png", "rgb.png"), ("b/2.jpg", "444.jpg"), ("a/x.JPEG", "palette.png"), ("c/9.png", "grey.png")]
    {
        bench.put(path, &image(name));
    }
    bench.put("a/readme.txt", b"no image");
    let input = images(json!({}), json!({"paths": ["a", "b", "c"]}));
    let got = rows(&bench, &input);
    // the content decides the type: x.JPEG is a PNG
    assert_eq!(labels(&got), [0, 1, 1, 2]);
    assert!(got.iter().all(|(numbers, _)| numbers.len() == 48 && numbers.iter().all(|n| *n < 256)));
    assert_eq!(with_class_names(&input, &bench.files(&input)).into_owned().images.unwrap().classes, ["a", "b", "c"]);
    let named = images(json!({"classes": ["c", "b", "a"]}), json!({"paths": ["a", "b", "c"]}));
    assert_eq!(labels(&rows(&bench, &named)), [2, 1, 1, 0]);
    let none = images(json!({"labels": "none"}), json!({"paths": ["b"]}));
    assert!(rows(&bench, &none).iter().all(|(_, label)| label.is_none()));
    let short = images(json!({"classes": ["b"]}), json!({"paths": ["a", "b"]}));
    fails(&bench, &short, &["a/x.JPEG: the image: unknown class: is in the folder \"a\""]);
}

#[test]
fn samples_of_tar_files() {
    let (a, b, c) = (image("rgb.png"), image("444.jpg"), image("grey.png"));
    let long = format!("{}/deep.png", "d".repeat(120));
    let mut tar = Vec::new();
    tar.extend(typed_member("train/", b"", b'5'));
    tar.extend(member("train/0001.png", &a));
    tar.extend(member("train/0001.cls", b" 7\n"));
    tar.extend(member("train/._0001.png", b"a Mac's"));
    tar.extend(member("train/0002.cls", b"0"));
    tar.extend(member("train/0002.txt", b"what it shows"));
    tar.extend(member("train/0002.jpg", &b));
    // GNU's long name
    tar.extend(typed_member("././@LongLink", long.as_bytes(), b'L'));
    tar.extend(member("cut short", &c));
    tar.extend(typed_member("././@LongLink", long.replace(".png", ".cls").as_bytes(), b'L'));
    tar.extend(member("cut short", b"3"));
    // a pax header
    tar.extend(typed_member("pax", b"17 path=last.png\n", b'x'));
    tar.extend(member("p", &a));
    tar.extend(member("last.cls", b"2147483647"));
    tar.resize(tar.len() + 10_240, 0);
    let bench =
        Bench::with(&[("plain/a.tar", &tar), ("gz/a.tar.gz", &gzip(&tar)), ("zst/a.tar.zst", &zstandard(&tar))]);
    let of = |path: &str| rows(&bench, &images(json!({"layout": "tar"}), json!({"paths": [path]})));
    let got = of("plain");
    assert_eq!(labels(&got), [7, 0, 3, 2_147_483_647]);
    assert_eq!(got[0].0, got[3].0);
    assert_eq!(of("gz"), got);
    assert_eq!(of("zst/a.tar.zst"), got);
    // every wrong end is detected
    for end in (0..tar.len() - 10_240).step_by(256) {
        let cut = Bench::with(&[("a.tar", &tar[..end])]);
        let error =
            all(&cut, &images(json!({"layout": "tar"}), json!({})), 1000).map(|got| got.rows).unwrap_err().to_string();
        assert!(error.contains("cut off") || error.contains("checksum"), "{end}: {error}");
    }
    for (at, says) in [(1, "its checksum is"), (124, "its checksum is")] {
        let mut broken = tar.clone();
        broken[512 + at] ^= 1;
        fails(
            &Bench::with(&[("a.tar", &broken)]),
            &images(json!({"layout": "tar"}), json!({})),
            &["header at byte 512", says],
        );
    }
    let twice = [tar.clone(), tar.clone()].concat();
    fails(
        &Bench::with(&[("a.tar", &twice)]),
        &images(json!({"layout": "tar"}), json!({})),
        &["something behind its end"],
    );
}

#[test]
fn labels_of_tar_files() {
    let a = image("rgb.png");
    let tar = archive(&[
        ("x/1.png", &a),
        ("x/1.json", br#"{"label": 4, "class": {"no": 5}}"#),
        ("y/2.json", br#"{"label": 9}"#),
        ("y/2.png", &a),
    ]);
    let bench = Bench::with(&[("a.tar", &tar)]);
    let of = |fields: Value| {
        let mut all = json!({"layout": "tar"});
        all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        images(all, json!({}))
    };
    assert_eq!(labels(&rows(&bench, &of(json!({"labels": "json"})))), [4, 9]);
    assert_eq!(labels(&rows(&bench, &of(json!({"labels": "folder", "classes": ["y", "x"]})))), [1, 0]);
    assert!(rows(&bench, &of(json!({"labels": "none"}))).iter().all(|(_, label)| label.is_none()));
    fails(&bench, &of(json!({})), &["a.tar: member \"x/1.png\": no label: has no member \"x/1.cls\""]);
    fails(
        &bench,
        &of(json!({"labels": "json", "label_key": "class"})),
        &["member \"x/1.png\": bad label: its .json says"],
    );
}

/// Hostile members give one clear error with file and member, or are counted by reason.
#[test]
fn hostile_members_are_skipped_and_counted() {
    let a = image("rgb.png");
    let mut members: Vec<(&str, Vec<u8>)> = vec![("good1.png", a.clone())];
    for (name, file) in [
        ("a.png", "bomb.png"),
        ("b.jpg", "cmyk.jpg"),
        ("c.png", "sixteen.png"),
        ("d.png", "animated.png"),
        ("e.png", "alpha.png"),
        ("f.png", "image.gif"),
        ("g.png", "nothing.png"),
    ] {
        members.push((name, image(file)));
    }
    members.push(("h.png", a[..a.len() / 2].to_vec()));
    members.push(("i.png", Vec::new()));
    members.push(("README.md", b"no image".to_vec()));
    members.push(("j.png", a.clone()));
    members.push(("j.jpg", a.clone()));
    members.push(("good2.png", a.clone()));
    let members: Vec<(&str, &[u8])> = members.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    let mut tar = archive(&members);
    let end = tar.len() - 1024;
    tar.splice(end..end, typed_member("k.png", b"", b'2'));
    let bench = Bench::with(&[("a.tar", &tar)]);
    let fields = json!({"layout": "tar", "labels": "none"});
    let input = images(fields.clone(), json!({"on_error": "skip", "max_skipped": 1.0}));
    for target in [1, 200, u64::MAX] {
        let got = all(&bench, &input, target).unwrap();
        assert_eq!(got.rows.len(), 2, "{:?}", got.skipped);
        let counts: Vec<(&str, u64)> = got.skipped.iter().map(|(reason, n)| (reason.as_str(), *n)).collect();
        assert_eq!(
            counts,
            [
                ("16 bits per channel", 1),
                ("CMYK", 1),
                ("animated", 1),
                ("broken image", 3),
                ("no image", 2),
                ("not PNG or JPEG", 1),
                ("several images", 1),
                ("too many pixels", 1),
                ("transparent pixels", 1),
            ]
        );
    }
    fails(&bench, &images(fields, json!({})), &["a.tar: member \"a.png\": too many pixels: has 60000×60000"]);
}

/// If a sample has two labels it is ambiguous which one is meant; the same holds for other members that occur twice.
#[test]
fn members_that_come_twice_are_bad_records() {
    let a = image("rgb.png");
    let tar = archive(&[
        ("1.png", &a),
        ("1.cls", b"4"),
        ("2.png", &a),
        ("2.cls", b"4"),
        ("2.CLS", b"5"),
        ("3.txt", b"one"),
        ("3.cls", b"4"),
        ("3.png", &a),
        ("3.txt", b"two"),
        ("4.cls", b"6"),
        ("4.png", &a),
    ]);
    let bench = Bench::with(&[("a.tar", &tar)]);
    let input = images(json!({"layout": "tar"}), json!({"on_error": "skip", "max_skipped": 1.0}));
    for target in [1, u64::MAX] {
        let got = all(&bench, &input, target).unwrap();
        assert_eq!(labels(&got.rows), [4, 6]);
        assert_eq!(got.skipped, BTreeMap::from([("member twice".to_owned(), 2)]));
    }
    let says = "a.tar: member \"2.png\": member twice: has two members \"2.CLS\"; valid: one of each ending";
    fails(&bench, &images(json!({"layout": "tar"}), json!({})), &[says]);
}

/// Truncated but closed images, images without their last scans, and images with invalid pixels count as broken; an
/// error names the file.
#[test]
fn images_that_only_look_whole_are_counted() {
    let (whole, coarse) = (image("grey.jpg"), image("grey-progressive.jpg"));
    let cut = [&whole[..whole.len() / 2], b"\xff\xd9"].concat();
    let scan = coarse.windows(2).rposition(|two| two == b"\xff\xda").unwrap();
    let table = coarse[..scan].windows(2).rposition(|two| two == b"\xff\xc4").unwrap();
    let coarse = [&coarse[..table], b"\xff\xd9"].concat();
    let bench = Bench::with(&[("c/cut.jpg", &cut), ("c/coarse.jpg", &coarse), ("c/good.jpg", &whole)]);
    let got =
        all(&bench, &images(json!({}), json!({"paths": ["c"], "on_error": "skip", "max_skipped": 1.0})), 1).unwrap();
    assert_eq!((got.rows.len(), got.skipped), (1, BTreeMap::from([("broken image".to_owned(), 2)])));
    let of = |path: &str| images(json!({}), json!({"paths": [path]}));
    fails(
        &bench,
        &of("c/cut.jpg"),
        &["c/cut.jpg: the image: broken image: is truncated but has an end marker: scan 1"],
    );
    fails(&bench, &of("c/coarse.jpg"), &["c/coarse.jpg: the image: broken image: lacks its last scans"]);
}

fn idx(lengths: &[u32], bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0, 0, 8, lengths.len() as u8];
    lengths.iter().for_each(|n| out.extend(n.to_be_bytes()));
    out.extend(bytes);
    out
}

#[test]
fn idx_with_its_labels() {
    let pixels: Vec<u8> = (0..5 * 6).map(|i| i * 8).collect();
    let (images3, labels1) = (idx(&[5, 2, 3], &pixels), idx(&[5], &[9, 8, 7, 6, 5]));
    let fields = json!({"layout": "idx", "size": 3, "height": 2, "fit": "exact", "channels": "grey"});
    let both = |a: &str, b: &str| images(fields.clone(), json!({"paths": [a, b]}));
    let bench = Bench::with(&[
        ("train-images-idx3-ubyte", &images3),
        ("train-labels-idx1-ubyte", &labels1),
        ("gz/train-images-idx3-ubyte.gz", &gzip(&images3)),
        ("gz/train-labels-idx1-ubyte.gz", &gzip(&labels1)),
    ]);
    let got = rows(&bench, &both("train-images-idx3-ubyte", "train-labels-idx1-ubyte"));
    assert_eq!(labels(&got), [9, 8, 7, 6, 5]);
    assert!(got.iter().flat_map(|(row, _)| row).copied().eq(pixels.iter().map(|p| u32::from(*p))));
    assert_eq!(rows(&bench, &both("gz/train-images-idx3-ubyte.gz", "gz/train-labels-idx1-ubyte.gz")), got);
    let alone = images(fields.clone(), json!({"paths": ["train-images-idx3-ubyte"]}));
    fails(&bench, &alone, &["looked for in train-labels-idx1-ubyte, which is none of `input.paths`"]);
    bench.put("train-labels-idx1-ubyte", &idx(&[4], &[1, 2, 3, 4]));
    fails(&bench, &both("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), &["has 4 labels for the 5 images of"]);
    for (name, path) in [("train-images-idx3-ubyte", "gz"), ("train-labels-idx1-ubyte", "gz")] {
        let good = if name.contains("labels") { &labels1 } else { &images3 };
        let both = both("gz/train-images-idx3-ubyte.gz", "gz/train-labels-idx1-ubyte.gz");
        let file = format!("{path}/{name}.gz");
        let size = good.len();
        bench.put(&file, &gzip(&[good.as_slice(), b"\0"].concat()));
        fails(&bench, &both, &[&file, &format!("has more than {size} bytes after decompression; its header says [5")]);
        bench.put(&file, &gzip(&good[..size - 1]));
        fails(&bench, &both, &[&file, &format!("has {} bytes after decompression", size - 1)]);
        bench.put(&file, &gzip(good));
    }
    bench.put("train-images-idx3-ubyte", &[images3.as_slice(), b"\0"].concat());
    fails(&bench, &alone, &["train-images-idx3-ubyte: has 47 bytes; its header says [5, 2, 3]"]);
    bench.put("train-images-idx3-ubyte", &images3[..40]);
    fails(&bench, &alone, &["train-images-idx3-ubyte: has 40 bytes; its header says [5, 2, 3]"]);
}

fn npy(descr: &str, fortran: &str, shape: &str, values: &[u8]) -> Vec<u8> {
    let text = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}");
    let text = format!("{text:<117}\n");
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((text.len() as u16).to_le_bytes());
    out.extend(text.as_bytes());
    out.extend(values);
    out
}

#[test]
fn codes_in_npy_and_parquet() {
    use arrow::array::{ArrayRef, Int16Array, Int64Builder, ListBuilder, RecordBatch};
    use parquet::arrow::ArrowWriter;
    let wanted: Vec<Vec<u32>> = (0..40u32).map(|n| vec![n, 999 - n, n * n % 1000]).collect();
    let le: Vec<u8> = wanted.iter().flatten().flat_map(|n| (*n as i32).to_le_bytes()).collect();
    let be: Vec<u8> = wanted.iter().flatten().flat_map(|n| (*n as u16).to_be_bytes()).collect();
    let of_labels: Vec<u8> = (0..40i64).flat_map(i64::to_le_bytes).collect();
    let mut lists = ListBuilder::new(Int64Builder::new());
    wanted.iter().for_each(|row| lists.append_value(row.iter().map(|n| Some(i64::from(*n)))));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("other", std::sync::Arc::new(Int16Array::from_iter_values(0..40))),
        ("codes", std::sync::Arc::new(lists.finish())),
        ("class", std::sync::Arc::new(Int16Array::from_iter_values(0..40))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut parquet = Vec::new();
    let properties =
        parquet::file::properties::WriterProperties::builder().set_max_row_group_row_count(Some(7)).build();
    let mut writer = ArrowWriter::try_new(&mut parquet, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let bench = Bench::with(&[
        ("le/a.npy", &npy("<i4", "False", "(40, 3)", &le)),
        ("le/a_labels.npy", &npy("<i8", "False", "(40,)", &of_labels)),
        ("be/a.npy", &npy(">u2", "False", "(40, 1, 3)", &be)),
        ("p/a.parquet", &parquet),
    ]);
    let of = |path: &str, fields: Value| {
        let mut input = codes(fields);
        input.paths = vec![path.into()];
        input
    };
    let plain: Vec<Row> = wanted.iter().map(|row| (row.clone(), None)).collect();
    let labelled: Vec<Row> = wanted.iter().zip(0..).map(|(row, label)| (row.clone(), Some(label))).collect();
    assert_eq!(rows(&bench, &of("be", json!({}))), plain);
    assert_eq!(rows(&bench, &of("le/a.npy", json!({}))), plain);
    assert_eq!(rows(&bench, &of("le", json!({"labels": "_labels"}))), labelled);
    assert_eq!(rows(&bench, &of("p", json!({}))), plain);
    assert_eq!(rows(&bench, &of("p", json!({"labels": "class"}))), labelled);
    fails(&bench, &of("le/a.npy", json!({"labels": "_labels"})), &["looked for in le/a_labels.npy"]);
    fails(
        &bench,
        &of("le/a.npy", json!({"size": 999})),
        &["a.npy: row 0 (from 0): code out of range: got code 999 at position 1; valid: 0 to 998"],
    );
    fails(&bench, &of("p", json!({"size": 999})), &["a.parquet: row 0 (from 0): code out of range: got code 999"]);
    fails(&bench, &of("le/a.npy", json!({"length": 4})), &["has shape [40, 3]; valid: [n, 4]"]);
    fails(
        &bench,
        &of("p", json!({"length": 4})),
        &["a.parquet: row 0 (from 0): another length: has 3 codes; valid: 4"],
    );
    fails(&bench, &of("p", json!({"column": "code"})), &["no column \"code\"; columns: other, codes, class"]);
    fails(
        &bench,
        &of("p", json!({"column": "other"})),
        &["column \"other\" has type Int16; valid: lists of whole numbers"],
    );
    for (name, file, says) in [
        ("floats", npy("<f4", "False", "(1, 3)", &[0; 12]), "its numbers are of type \"<f4\""),
        ("columns", npy("<i4", "True", "(1, 3)", &[0; 12]), "is stored column by column"),
        ("short", npy("<i4", "False", "(2, 3)", &[0; 12]), "its header says [2, 3] of <i4"),
        ("long", npy("<i4", "False", "(2, 3)", &[0; 25]), "its header says [2, 3] of <i4"),
        ("huge", npy("<i8", "False", "(4611686018427387904, 3)", &[]), "its header says"),
        ("scalar", npy("<i4", "False", "()", &[0; 4]), "its header names no shape"),
        ("text", b"1 2 3".to_vec(), "does not begin as such a file does"),
        ("objects", npy("|O", "False", "(1, 3)", &[0; 24]), "its numbers are of type \"|O\""),
    ] {
        let bench = Bench::with(&[("x.npy", &file)]);
        let error = all(&bench, &codes(json!({})), 10).map(|got| got.rows).unwrap_err().to_string();
        assert!(error.contains(says), "{name}: {error}");
    }
}

/// No image is in two data set splits, none is lost, copies are in the same one, and a bad image is counted once.
#[test]
fn holdouts_of_images() {
    let binary: Vec<u8> = (0..200usize).flat_map(|n| [vec![(n % 12) as u8], planes(n % 150)].concat()).collect();
    let bench = Bench::with(&[("a.bin", &binary)]);
    let layout = json!({"layout": "cifar10_binary", "size": 32});
    let skip = json!({"on_error": "skip", "max_skipped": 1.0});
    let plain = all(&bench, &images(layout.clone(), skip.clone()), u64::MAX).unwrap();
    let holdout = json!({"on_error": "skip", "max_skipped": 1.0, "holdout": {"a": {"share": 0.3}, "b": {"documents": 10}, "c": {"last_documents": 5}}});
    let input = images(layout, holdout);
    for target in [3072, 30_720, u64::MAX] {
        let splits = bench.plan(&input, target).unwrap();
        let mut found: BTreeMap<&str, Vec<Row>> = BTreeMap::new();
        let mut skipped = 0;
        for split in &splits {
            let got = read(&bench, &input, std::slice::from_ref(split)).unwrap();
            skipped += got.skipped.values().sum::<u64>();
            found.entry(&split.dataset_split).or_default().extend(got.rows);
        }
        assert_eq!(skipped, plain.skipped["bad label"]);
        let mut together: Vec<Row> = found.values().flatten().cloned().collect();
        let mut expected = plain.rows.clone();
        together.sort();
        expected.sort();
        assert_eq!(together, expected);
        let share = found["a"].len() as f64 / plain.rows.len() as f64;
        assert!((0.15..0.45).contains(&share), "{share}");
        let held: std::collections::BTreeSet<&Vec<u32>> = found["a"].iter().map(|(row, _)| row).collect();
        assert!(found["train"].iter().chain(&found["b"]).all(|(row, _)| !held.contains(row)));
        assert_eq!(found["b"].iter().map(|(row, _)| row).collect::<std::collections::BTreeSet<_>>().len(), 10);
    }
}

/// The checksum of a piece covers only the stored bytes and the label.
#[test]
fn sums_are_of_the_stored_bytes() {
    let bench = Bench::with(&[("a.bin", &[vec![3u8], planes(1), vec![11], planes(2)].concat())]);
    let skip = json!({"on_error": "skip", "max_skipped": 1.0});
    let got = all(&bench, &images(json!({"layout": "cifar10_binary", "size": 4}), skip), u64::MAX).unwrap();
    let length = 3072u64.to_le_bytes().to_vec();
    let expected = [length.clone(), planes(1), 3i32.to_le_bytes().to_vec(), length, planes(2), vec![0xff; 8]].concat();
    assert_eq!(got.sums, [stillhouse_tests::hex_sha256(&expected)]);
}

#[test]
fn codes_in_a_page_that_is_not_what_its_checksum_says_are_an_error() {
    let mut bytes = include_bytes!("../../testdata/page_checksums.parquet").to_vec();
    let of = |bytes: &[u8]| Bench::with(&[("a.parquet", bytes)]);
    let wanted: [Row; 3] = [[1, 2, 3], [4, 5, 6], [7, 8, 9]].map(|row| (row.to_vec(), None));
    assert_eq!(all(&of(&bytes), &codes(json!({})), 1000).unwrap().rows, wanted);
    let page = [4, 0, 0, 0, 5, 0, 0, 0];
    let at = bytes.windows(page.len()).position(|window| window == page).unwrap();
    bytes[at] ^= 1;
    fails(&of(&bytes), &codes(json!({})), &["a.parquet", "checksum"]);
}
