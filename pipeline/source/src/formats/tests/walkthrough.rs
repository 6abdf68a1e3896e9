//! Tests the walk-through of CONTRIBUTING.md that adds an input format: compiles its file, and cuts and reads files.

use serde_json::json;
use stillhouse_base::source_error::reason;
use stillhouse_schemas::manifest::Range;

use super::super::nul::Nul;
use super::super::{BytesFormat, Format};
use crate::spool::Spool;
use crate::tests::{Bench, gzip, input};

const PAGE: &str = include_str!("../../../../../CONTRIBUTING.md");
const FILE: &str = include_str!("nul.rs");

#[test]
fn the_page_quotes_the_file() {
    assert!(PAGE.contains(FILE), "CONTRIBUTING.md does not quote pipeline/source/src/formats/tests/nul.rs as it is");
}

#[test]
fn every_record_is_read_once_for_every_size_of_segment() {
    let bytes = b"one\0two\nlines\0\xff\xfe\0\0after an empty one";
    let bench = Bench::with(&[("a.nul", bytes), ("b.nul.gz", &gzip(bytes))]);
    let input = input(json!({"format": "text", "paths": ["*.nul", "*.gz"]}));
    let expected = [Ok("one"), Ok("two\nlines"), Err((reason::UTF8, 1)), Ok(""), Ok("after an empty one")];
    for file in bench.files(&input) {
        for target in [1, 4, 10, 30, 1000] {
            let segments = Format::Bytes(&Nul).segments(&bench.store, 0, &file, &input, target).unwrap();
            let mut got = Vec::new();
            for segment in &segments {
                let Range::Bytes { start, end, line } = segment.range else { panic!("{segment:?}") };
                let (mut records, _) = Nul.open(&bench.store, &file, &input, (start, end)).unwrap();
                while let Some(at) = records.next().unwrap().filter(|at| at.offset < end) {
                    let mut text = Spool::new(1000);
                    let outcome = records.read(&mut text).unwrap_or_else(|fault| panic!("{at:?}: {fault:?}"));
                    text.rewind().unwrap();
                    let line = line.unwrap() - 1;
                    got.push(match outcome {
                        Ok(()) => Ok(text.next_piece().unwrap().0.to_owned()),
                        Err(bad) => Err((bad.reason, line + bad.newlines)),
                    });
                }
            }
            let got: Vec<_> = got.iter().map(|record| record.as_deref().map_err(|e| *e)).collect();
            assert_eq!(got, expected, "{}, target {target}", file.path);
            assert_eq!(segments.iter().filter_map(|segment| segment.records).sum::<u64>(), 5);
        }
    }
}
