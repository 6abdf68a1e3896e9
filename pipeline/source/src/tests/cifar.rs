//! Images of CIFAR-10 and CIFAR-100, in both of their formats.

use serde_json::json;

use super::Bench;
use super::numbers::{Row, all, fails, images, rows};

/// Value of pixel (y, x), channel c of image n in CIFAR's planes.
fn pixel(n: usize, c: usize, y: usize, x: usize) -> u8 {
    (n * 31 + c * 97 + y * 7 + x * 3) as u8
}

pub(super) fn planes(n: usize) -> Vec<u8> {
    let at = |i: usize| pixel(n, i / 1024, i % 1024 / 32, i % 32);
    (0..3072).map(at).collect()
}

fn expected(n: usize) -> Vec<u32> {
    (0..3072).map(|i| u32::from(pixel(n, i % 3, i / 3 / 32, i / 3 % 32))).collect()
}

/// A batch in the format of Python 2's cPickle: protocol 2, texts as `U` and `T`.
fn pickled(n: usize, labels: &str) -> Vec<u8> {
    let mut out = b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03".to_vec();
    out.push(b'U');
    out.push(labels.len() as u8);
    out.extend(labels.as_bytes());
    out.extend(b"q\x04]q\x05(");
    (0..n).for_each(|i| out.extend([b'K', (i % 10) as u8]));
    out.extend(b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01J");
    out.extend((n as u32).to_le_bytes());
    out.extend(b"M\x00\x0c\x86cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T");
    out.extend((n as u32 * 3072).to_le_bytes());
    (0..n).for_each(|i| out.extend(planes(i)));
    out.extend(b"tbU\tfilenamesq\x0c]q\x0d(");
    (0..n).for_each(|_| out.extend(b"U\x05x.png"));
    out.extend(b"eu.");
    out
}

#[test]
fn cifar_in_both_versions() {
    let binary: Vec<u8> = (0..7).flat_map(|n| [vec![n as u8], planes(n)].concat()).collect();
    let hundred: Vec<u8> = (0..7).flat_map(|n| [vec![19, 90 + n as u8], planes(n)].concat()).collect();
    let bench = Bench::with(&[
        ("data_batch_1.bin", &binary),
        ("train.bin", &hundred),
        ("data_batch_1", &pickled(7, "labels")),
        ("train", &pickled(7, "fine_labels")),
    ]);
    let of = |layout: &str, path: &str| {
        images(json!({"layout": layout, "size": 32, "fit": "exact"}), json!({"paths": [path]}))
    };
    let wanted: Vec<Row> = (0..7).map(|n| (expected(n), Some(n as i32))).collect();
    assert_eq!(rows(&bench, &of("cifar10_binary", "data_batch_1.bin")), wanted);
    assert_eq!(rows(&bench, &of("cifar10_python", "data_batch_1")), wanted);
    assert_eq!(rows(&bench, &of("cifar100_python", "train")), wanted);
    let fine: Vec<Row> = wanted.iter().map(|(row, label)| (row.clone(), label.map(|l| l + 90))).collect();
    assert_eq!(rows(&bench, &of("cifar100_binary", "train.bin")), fine);
    // a version other than the job's
    fails(&bench, &of("cifar10_binary", "data_batch_1"), &["bytes, which is 7 records of 3073 bytes and"]);
    fails(&bench, &of("cifar10_python", "data_batch_1.bin"), &["is no batch of CIFAR-10's Python version"]);
    fails(&bench, &of("cifar10_python", "train"), &["has no list `labels`"]);
    let wrong = Bench::with(&[("x.bin", &[vec![10u8], planes(0)].concat())]);
    fails(&wrong, &of("cifar10_binary", "x.bin"), &["x.bin: row 0 (from 0): bad label: got label 10; valid: 0 to 9"]);
}

/// The reader never runs what a pickle names, and does not need to.
#[test]
fn pickles_that_are_no_cifar() {
    let of = |bytes: &[u8]| {
        let bench = Bench::with(&[("data_batch_1", bytes)]);
        let input = images(json!({"layout": "cifar10_python", "size": 32}), json!({"paths": ["data_batch_1"]}));
        all(&bench, &input, 1000).map(|got| got.rows.len()).map_err(|e| e.to_string())
    };
    let good = pickled(2, "labels");
    assert_eq!(of(&good), Ok(2));
    let longer = of(&[good.as_slice(), b"."].concat()).unwrap_err();
    assert!(longer.contains("has 1 bytes behind its end at byte"), "{longer}");
    let evil = of(b"cos\nsystem\n(S'touch /tmp/x'\ntR.").unwrap_err();
    assert!(evil.contains("names \"os system\", which is not of an array of numpy; nothing of it was run"), "{evil}");
    for bytes in [
        &b""[..],
        b".",
        b"\x80\x02.",
        b"\x80\x02}.",
        b"(((((",
        b"u",
        b"e",
        b"h\x00.",
        b"\x80\xff",
        b"R",
        b"b",
        b"\x85.",
        b"X\xff\xff\xff\xff",
    ] {
        let error = of(bytes).unwrap_err();
        assert!(error.contains("is no batch of CIFAR-10's Python version: "), "{bytes:?}: {error}");
    }
    for end in (0..good.len()).filter(|end| *end < 300 || good.len() - end < 60 || end % 997 == 0) {
        assert!(of(&good[..end]).unwrap_err().contains("is no batch of CIFAR-10"), "{end}");
    }
    let other = String::from_utf8_lossy(&good[..200]).contains("u1");
    assert!(other);
    let at = good.windows(2).position(|two| two == b"u1").unwrap();
    let mut floats = good.clone();
    floats[at..at + 2].copy_from_slice(b"f4");
    assert!(of(&floats).unwrap_err().contains("array of type \"f4\"; valid: u1"));
}
