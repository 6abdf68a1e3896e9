//! Tests of the formats, and of the walk-through in CONTRIBUTING.md.

mod walkthrough;

use super::*;

#[test]
fn a_file_name_tells_its_format() {
    for (file, format) in [
        ("a.jsonl", Some(InputFormat::Jsonl)),
        ("s3://b/c.JSONL.gz", Some(InputFormat::Jsonl)),
        ("x/part-*.parquet", Some(InputFormat::Parquet)),
        ("x/a.feather", Some(InputFormat::Arrow)),
        ("t.txt.zst", Some(InputFormat::Text)),
        ("a.parquet.gz", None),
        ("a.png", None),
        ("t.gz", None),
        ("t", None),
    ] {
        assert_eq!(format_of_file_name(file), format, "{file}");
    }
}

#[test]
fn formats_agree_with_what_the_job_file_says_of_them() {
    for name in InputFormat::ALL {
        let format = for_name(name);
        assert_eq!(format.table().is_ok(), name.is_table(), "{name:?}");
        assert_eq!(matches!(format, Format::Numbers), name.is_numbers(), "{name:?}");
        if let Format::Bytes(_) = format {
            assert!(!name.compresses_inside(), "{name:?}");
        }
    }
}
