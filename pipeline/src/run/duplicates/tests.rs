use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use stillhouse_operators::deduplicate::KeysOfDocument;
use stillhouse_operators::operator::{Duplicate, DuplicateKind};
use stillhouse_schemas::ids::SplitId;

use super::find::find_duplicates;
use super::key_files::{SplitKeys, SplitKeysWriter};

/// Documents of two splits; the second has an ordinal without keys.
fn written(folder: &Path) -> Vec<SplitKeys> {
    let document = |id: u64, exact: u128, bands: &[u128]| KeysOfDocument {
        id,
        exact: Some(exact),
        bands: bands.to_vec(),
        parts: Vec::new(),
    };
    // spread over all buckets
    let key = |n: u128| n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    let ids = |split: u32, ordinal: u32| SplitId(split).document(ordinal).0;
    let splits = [
        vec![document(ids(0, 0), key(1), &[key(10), key(11)]), document(ids(0, 1), key(2), &[key(20), key(21)])],
        Vec::new(),
        vec![
            document(ids(2, 0), key(3), &[key(30), key(21)]),
            // a gap: the record was bad
            document(ids(2, 2), key(1), &[key(10), key(11)]),
            document(ids(2, 3), key(4), &[key(30)]),
            document(ids(2, 4), key(5), &[]),
            // a key of one kind that is one of the other kind, too
            document(ids(2, 5), key(10), &[key(5)]),
        ],
    ];
    let write = |(split, documents): (u32, &Vec<KeysOfDocument>)| {
        let mut file = SplitKeysWriter::create(folder, SplitId(split), false).unwrap();
        documents.iter().for_each(|keys| file.push(keys).unwrap());
        file.finish().unwrap()
    };
    (0..).zip(&splits).map(write).collect()
}

fn found(files: &[SplitKeys], folder: &Path, memory_bytes: u64) -> BTreeMap<u64, (u64, DuplicateKind)> {
    let mut found = BTreeMap::new();
    find_duplicates(files, folder, memory_bytes, &mut |Duplicate { document, first, kind, part }| {
        assert_eq!(part, None);
        assert!(found.last_key_value().is_none_or(|(last, _)| *last < document));
        found.insert(document, (first, kind));
        Ok(())
    })
    .unwrap();
    found
}

#[test]
fn the_first_document_of_a_key_stays_whatever_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let files = written(folder.path());
    let ids = |split: u32, ordinal: u32| SplitId(split).document(ordinal).0;
    let expected = BTreeMap::from([
        (ids(2, 0), (ids(0, 1), DuplicateKind::MinHash)),
        (ids(2, 2), (ids(0, 0), DuplicateKind::Exact)),
        // by way of document 0 of its split
        (ids(2, 3), (ids(0, 1), DuplicateKind::MinHash)),
    ]);
    for memory_bytes in [1_000_000, 600, 100, 64] {
        assert_eq!(found(&files, folder.path(), memory_bytes), expected, "{memory_bytes}");
    }
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.iter().all(|path| path.extension().is_some_and(|end| end == "keys")), "{left:?}");
}

#[test]
fn too_little_memory_is_an_error_that_says_how_much_is_needed() {
    let folder = tempfile::tempdir().unwrap();
    let files = written(folder.path());
    let error = find_duplicates(&files, folder.path(), 1, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("deduplicate.memory_megabytes: got 0") && error.contains("valid: at least 1"), "{error}");
}

#[test]
fn keys_of_an_earlier_run_are_used_only_if_they_are_whole() {
    let folder = tempfile::tempdir().unwrap();
    let files = written(folder.path());
    let again = |split| SplitKeys::written_before(folder.path(), SplitId(split), false).unwrap();
    for file in &files {
        assert_eq!(again(file.split().0).as_ref(), Some(file));
    }
    assert_eq!(again(7), None);
    let path = &files[2].documents.records.path;
    let whole = fs::read(path).unwrap();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(path, damaged).unwrap();
        assert_eq!(again(2), None, "byte {at}");
        fs::write(path, &whole[..at]).unwrap();
        assert_eq!(again(2), None, "cut at {at}");
    }
    fs::write(path, &whole).unwrap();
    assert_eq!(again(2).as_ref(), Some(&files[2]));
}

#[test]
fn a_document_of_another_split_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = SplitKeysWriter::create(folder.path(), SplitId(1), false).unwrap();
    let keys = KeysOfDocument { id: SplitId(2).document(0).0, exact: None, bands: Vec::new(), parts: Vec::new() };
    assert!(file.push(&keys).unwrap_err().to_string().contains("document 0 of split 2 among those of split 1"));
}

/// Parts of random documents, some of which are dropped, against a map of all keys.
#[test]
fn the_first_part_of_a_key_in_a_document_that_stays_is_kept_whatever_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let key = |n: u128| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    let mut state = 7_u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut files, mut all) = (Vec::new(), Vec::new());
    for split in [0, 3, 4].map(SplitId) {
        let mut file = SplitKeysWriter::create(folder.path(), split, true).unwrap();
        for ordinal in 0..40 {
            let exact = Some(key(1000 + u128::from(draw(60))));
            let parts = (0..draw(9)).map(|_| key(u128::from(draw(50)))).collect();
            let keys = KeysOfDocument { id: split.document(ordinal).0, exact, bands: Vec::new(), parts };
            file.push(&keys).unwrap();
            all.push(keys);
        }
        files.push(file.finish().unwrap());
        assert_eq!(SplitKeys::written_before(folder.path(), split, true).unwrap().as_ref(), files.last());
    }
    let (mut documents, mut parts, mut expected) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    for keys in &all {
        let document = keys.id;
        let first = *documents.entry(keys.exact).or_insert(document);
        if first != document {
            expected.push(Duplicate { document, first, kind: DuplicateKind::Exact, part: None });
            continue;
        }
        for (part, key) in (0..).zip(&keys.parts) {
            if let Some(&first) = parts.get(key) {
                expected.push(Duplicate { document, first, kind: DuplicateKind::Parts, part: Some(part) });
            }
            parts.entry(key).or_insert(document);
        }
    }
    let count = |kind| expected.iter().filter(|duplicate| duplicate.kind == kind).count();
    assert!(count(DuplicateKind::Exact) > 20 && count(DuplicateKind::Parts) > 100, "{expected:?}");
    for memory_bytes in [1_000_000, 9_000, 500] {
        let mut found = Vec::new();
        let mut each = |duplicate| {
            found.push(duplicate);
            Ok(())
        };
        find_duplicates(&files, folder.path(), memory_bytes, &mut each).unwrap();
        assert_eq!(found, expected, "{memory_bytes}");
    }
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(left.len(), 6, "{left:?}");
}

#[test]
fn keys_of_parts_that_are_gone_or_damaged_are_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let again = || SplitKeys::written_before(folder.path(), SplitId(0), true).unwrap();
    let mut file = SplitKeysWriter::create(folder.path(), SplitId(0), true).unwrap();
    let keys = KeysOfDocument { id: SplitId(0).document(4).0, exact: None, bands: Vec::new(), parts: vec![1, 2, 3] };
    file.push(&keys).unwrap();
    let written = file.finish().unwrap();
    assert_eq!(again().as_ref(), Some(&written));
    let path = &written.parts.unwrap().records.path;
    let whole = fs::read(path).unwrap();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(path, damaged).unwrap();
        assert_eq!(again(), None, "byte {at}");
    }
    fs::remove_file(path).unwrap();
    assert_eq!(again(), None);
}
