//! Tests images and codes end to end: job file, shards, `verify`, `inspect`, repair, resume, and reading with
//! independent Python.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use stillhouse_tests::{CommandOutput, Scratch, root, run_command, shards, with};

/// Reads the stored rows with pyarrow: ids, labels and digits in order.
const READ_SCRIPT: &str = "
import json, sys, glob, pyarrow.parquet as pq
rows = [row for path in sorted(glob.glob(sys.argv[1] + '/data/*.parquet')) for row in pq.read_table(path).to_pylist()]
print(json.dumps([{k: row[k] for k in ('sequence_id', 'input_ids', 'label', 'subtokens', 'document_offsets', 'partition') if k in row} for row in rows]))
";

fn stored_rows(dataset: &Path) -> Vec<Value> {
    let mut command = Command::new(root().join(".venv/bin/python"));
    command.args(["-P", "-c", READ_SCRIPT]).arg(dataset);
    let rows = run_command(&mut command).expect(0).json();
    rows.as_array().unwrap().clone()
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(root().join("operators/testdata/images").join(name)).unwrap()
}

/// One folder per class, as in ImageNet.
fn classes(scratch: &Scratch) {
    for (class, names) in [("cat", ["rgb.png", "grey.png"]), ("dog", ["444.jpg", "palette.png"])] {
        fs::create_dir_all(scratch.path("photos").join(class)).unwrap();
        for name in names {
            fs::write(scratch.path("photos").join(class).join(name), fixture(name)).unwrap();
        }
    }
}

fn job() -> Value {
    json!({
        "version": 1, "name": "photos", "seed": 3,
        "input": {"format": "images", "paths": ["photos"], "images": {"size": 8, "fit": "adm"}},
        "pack": {"length": 192, "separator": "none", "boundary": "none"},
        "subtokens": {"length": 2}, "partitions": {"views": 2},
        "output": {"path": "out"}
    })
}

/// Binary records in CIFAR-10's format.
fn cifar(images: usize) -> Vec<u8> {
    let image = |n: usize| (0..3072).map(move |i| (n * 31 + i * 7 + i / 1024 * 50) as u8);
    (0..images).flat_map(|n| std::iter::once((n % 10) as u8).chain(image(n))).collect()
}

#[test]
fn a_folder_of_images_becomes_a_data_set() {
    let scratch = Scratch::new();
    classes(&scratch);
    let dataset = scratch.make(&job());
    scratch.stillhouse(&["verify", "out"]).expect(0);
    let rows = stored_rows(&dataset);
    let labels: Vec<i64> = rows.iter().map(|row| row["label"].as_i64().unwrap()).collect();
    assert_eq!(labels, [0, 0, 1, 1]);
    for row in &rows {
        let ids: Vec<u64> = row["input_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        let digits: Vec<u64> = row["subtokens"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
        assert!(ids.len() == 192 && ids.iter().zip(digits.chunks(2)).all(|(id, d)| *id == 16 * d[0] + d[1]));
        assert_eq!(row["document_offsets"], json!([0]));
    }
    // in a grey image all three colours are equal
    let grey: Vec<u64> = rows[0]["input_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert!(grey.chunks(3).all(|pixel| pixel[0] == pixel[1] && pixel[1] == pixel[2]));
    let manifest: Value = serde_json::from_str(&fs::read_to_string(dataset.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["vocab_size"], 256);
    assert_eq!(manifest["job"]["input"]["images"]["classes"], json!(["cat", "dog"]));
    let seen = scratch.stillhouse(&["inspect", "out", "--row", "3"]).expect(0).stdout;
    assert!(seen.contains("label: 1 (dog)"), "{seen}");
    // 8 lines of 8 pixels with 2 characters each
    let picture: Vec<&str> = seen.lines().filter(|line| line.starts_with("  │ ")).collect();
    assert_eq!(picture.len(), 8, "{seen}");
    let json = scratch.stillhouse(&["inspect", "out", "--json"]).expect(0).json();
    assert_eq!(json["row"]["picture"], json!({"height": 8, "width": 8, "channels": 3}));
    let card = fs::read_to_string(dataset.join("README.md")).unwrap();
    assert!(
        card.contains("- Images: 8 × 8 pixels, 3 channels last") && !card.contains("Text after cleaning"),
        "{card}"
    );
    let plan = scratch.stillhouse(&["plan", "job.yaml", "--overwrite", "--sample", "1"]).expect(0).stdout;
    assert!(plan.contains("none: a number is its own token"), "{plan}");
    let plan = scratch.stillhouse(&["plan", "job.yaml", "--overwrite", "--json"]).expect(0).json();
    assert_eq!(plan["estimated_tokens"], 4 * 192);
}

#[test]
fn hostile_images_fail_by_name_or_are_counted() {
    let scratch = Scratch::new();
    classes(&scratch);
    fs::write(scratch.path("photos/cat/a.png"), fixture("bomb.png")).unwrap();
    fs::write(scratch.path("photos/dog/z.jpg"), fixture("cmyk.jpg")).unwrap();
    scratch.job("job.yaml", &job());
    // found before any work is done
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&[
        "photos/cat/a.png: the image: too many pixels: has 60000×60000 = 3600000000 pixels; valid: at most 33554432",
        "photos/dog/z.jpg: the image: CMYK: has four inks",
    ]);
    let dataset = scratch.make(&with(job(), &json!({"input": {"on_error": "skip", "max_skipped": 0.5}})));
    let manifest: Value = serde_json::from_str(&fs::read_to_string(dataset.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["statistics"]["skipped"], json!({"CMYK": 1, "too many pixels": 1}));
    assert_eq!(stored_rows(&dataset).len(), 4);
    let refused = |patch: &Value, says: &str| -> CommandOutput {
        scratch.job("bad.yaml", &with(job(), patch));
        scratch.stillhouse(&["plan", "bad.yaml"]).expect(2).says(&[says])
    };
    refused(&json!({"extract": {"teacher": {"path": "x"}}}), "extract: needs a teacher");
    let said = refused(&json!({"input": {"images": null}}), "input.images: is required with `format: images`").stderr;
    assert!(said.contains("has 1 problem"), "{said}");
    refused(&json!({"pack": {"length": 193}}), "pack.length: got 193: a row is height · width · channels");
    refused(&json!({"input": {"paths": ["nothing"]}}), "no such file or folder");
    fs::create_dir(scratch.path("empty")).unwrap();
    refused(&json!({"input": {"paths": ["empty"]}}), "valid: .png, .jpg, .jpeg");
}

#[test]
fn splits_threads_repair_and_a_changed_input() {
    let scratch = Scratch::new();
    fs::write(scratch.path("data_batch_1.bin"), cifar(40)).unwrap();
    let job = with(
        job(),
        &json!({"input": {
            "paths": ["data_batch_1.bin"], "split_megabytes": 0.002,
            "images": {"layout": "cifar10_binary", "fit": "stretch"},
            "holdout": {"validation": {"share": 0.2}, "test": {"last_documents": 3}}
        }}),
    );
    let dataset = scratch.make(&job);
    let expected = shards(&dataset);
    assert!(expected.len() > 4, "{expected:?}");
    scratch.stillhouse(&["verify", "out"]).expect(0);
    for threads in ["1", "4"] {
        scratch.stillhouse(&["run", "job.yaml", "--overwrite", "--quiet", "--threads", threads]).expect(0);
        assert_eq!(shards(&dataset), expected, "{threads} threads");
    }
    let victim = dataset.join("data").join(expected.keys().next().unwrap());
    fs::remove_file(&victim).unwrap();
    scratch.stillhouse(&["verify", "out"]).expect(1);
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&dataset), expected);
    // A changed pixel is a changed input, so `repair` does not make the shard with other bytes.
    let mut other = cifar(40);
    let last = other.len() - 1;
    other[last] ^= 0xff;
    fs::write(scratch.path("data_batch_1.bin"), other).unwrap();
    fs::remove_file(&victim).unwrap();
    assert!(victim.ends_with("test-00000-of-00001.parquet"), "{}", victim.display());
    let said = scratch.stillhouse(&["repair", "out", "job.yaml"]);
    assert_ne!(said.code, Some(0), "{}", said.stderr);
    assert!(!victim.exists());
}

/// Runs the job files of the papers on a few records in the same layout.
#[test]
fn the_papers_job_files_run() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("cifar-10-batches-py")).unwrap();
    fs::create_dir_all(scratch.path("codes")).unwrap();
    classes(&scratch);
    let make = "
import sys, numpy as np
codes = (np.arange(60 * 256, dtype=np.int32) * 7919 % 16384).reshape(60, 256)
np.save('codes/train.npy', codes)
np.save('codes/train_labels.npy', np.arange(60) % 1000)
# as cPickle of Python 2 wrote it
import struct
n, labels = 5, [3, 1, 4, 1, 5]
data = (np.arange(n * 3072) * 31 % 256).astype(np.uint8)
out = b'\\x80\\x02}q\\x01(U\\x0bbatch_labelq\\x02U\\x15training batch 1 of 5q\\x03U\\x06labelsq\\x04]q\\x05('
out += b''.join(b'K' + bytes([x]) for x in labels) + b'eU\\x04dataq\\x06cnumpy.core.multiarray\\n_reconstruct\\nq\\x07cnumpy\\nndarray\\nq\\x08K\\x00\\x85U\\x01b\\x87Rq\\x09(K\\x01K\\x05M\\x00\\x0c\\x86cnumpy\\ndtype\\nq\\x0aU\\x02u1K\\x00K\\x01\\x87Rq\\x0b(K\\x03U\\x01|NNNJ\\xff\\xff\\xff\\xffJ\\xff\\xff\\xff\\xffK\\x00tb\\x89T'
out += struct.pack('<I', data.size) + data.tobytes() + b'tbU\\tfilenamesq\\x0c]q\\x0d(' + b'U\\x05x.png' * n + b'eu.'
open('cifar-10-batches-py/data_batch_1', 'wb').write(out)
# and as Python reads it
import pickle, warnings
warnings.simplefilter('ignore')
read = pickle.loads(out, encoding='bytes')
assert read[b'labels'] == labels and (read[b'data'] == data.reshape(n, 3072)).all()
";
    let mut command = Command::new(root().join(".venv/bin/python"));
    command.args(["-P", "-c", make]).current_dir(scratch.path(""));
    run_command(&mut command).expect(0);
    for (name, changes, rows) in [
        ("prime-table3-cifar10", &[][..], 5),
        ("prime-table4-imagenet32", &[], 4),
        ("pgm-table8-imagenet256-codes", &[("documents: 50000", "documents: 7")], 60),
    ] {
        let mut text = fs::read_to_string(root().join(format!("jobs/papers/{name}.yaml"))).unwrap();
        for (from, to) in changes {
            assert!(text.contains(from), "{name}: {from}");
            text = text.replace(from, to);
        }
        let text = text.replace("../../demo-out/", "");
        scratch.write("paper.yaml", &text);
        let mut run = scratch.command(&["run", "paper.yaml", "--quiet"]);
        for (variable, folder) in [("CIFAR10", "cifar-10-batches-py"), ("IMAGENET", "photos"), ("CODES", "codes")] {
            run.env(variable, scratch.path(folder));
        }
        run_command(&mut run).expect(0);
        scratch.stillhouse(&["verify", name]).expect(0);
        let stored = stored_rows(&scratch.path(name));
        assert_eq!(stored.len(), rows, "{name}");
        if name.starts_with("prime") {
            let mut plan = scratch.command(&["plan", "paper.yaml", "--json"]);
            for (variable, folder) in [("CIFAR10", "cifar-10-batches-py"), ("IMAGENET", "photos")] {
                plan.env(variable, scratch.path(folder));
            }
            // the paper's choice for its schedule (1 − t)^3
            let plan = run_command(&mut plan).expect(0).json();
            let steps = plan["idle_steps"].as_array().unwrap();
            let elbow: Vec<&Value> = steps.iter().filter(|at| at["elbow"] == true).collect();
            assert!(elbow.len() == 1 && elbow[0]["length"] == 2 && elbow[0]["base"] == 16, "{steps:?}");
            assert!((elbow[0]["ratio"].as_f64().unwrap() - 0.3616).abs() < 1e-4, "{steps:?}");
            assert_eq!(stored[0]["partition"].as_array().unwrap().len(), 2 * 3072, "{name}");
        }
        if name == "prime-table3-cifar10" {
            let labels: Vec<i64> = stored.iter().map(|row| row["label"].as_i64().unwrap()).collect();
            assert_eq!(labels, [3, 1, 4, 1, 5]);
            // channels last: the first three values come from the three planes
            assert_eq!(
                stored[0]["input_ids"].as_array().unwrap()[..3],
                [0, 1024 * 31 % 256, 2048 * 31 % 256].map(Value::from)
            );
        }
    }
    let of = |split: &str| {
        shards(&scratch.path("pgm-table8-imagenet256-codes")).keys().filter(|name| name.starts_with(split)).count()
    };
    assert!(of("train") > 0 && of("validation") > 0);
}
