use std::io;

use arrow::array::UInt64Array;
use stillhouse_schemas::manifest::DROPPED_DOCUMENTS;

use super::*;
use crate::testing::{context, documents, gpt2, statistics};

/// Document 0 has no URL, and document n the host `site-n.example`.
#[derive(Debug)]
struct Sites;

impl CarriedValues for Sites {
    fn of_document(&self, document: u64) -> io::Result<Option<Arc<[Option<String>]>>> {
        let url = (document > 0).then(|| format!("https://www.site-{document}.example/"));
        Ok((document < 10).then(|| [None, url].into()))
    }
}

fn config(domains: &str) -> BlockUrlsConfig {
    let mut lists = [const { None }; 5];
    lists[0] = Some(domains.as_bytes().into());
    BlockUrlsConfig { column: 1, soft_banned_threshold: 2, lists, blocklist: Arc::default() }
}

#[test]
fn documents_on_the_list_are_dropped_however_they_are_cut() {
    let context = SplitContext { carried: Some(Arc::new(Sites)), ..context(&gpt2()) };
    let mut operator = config("site-2.example\nsite-4.example\n").operator(&context).unwrap();
    let (mut kept, long) = (Vec::new(), "é".repeat(1000));
    let mut emit = |batch: RecordBatch| {
        let ids = batch.column(0).as_any().downcast_ref::<UInt64Array>().unwrap();
        kept.push(ids.values().to_vec());
        Ok(())
    };
    for pieces in [
        &[(0, "no url", true), (1, "kept", true)][..],
        &[(2, "dropped ", false), (2, &long, false)],
        &[(2, "end", true), (3, "kept", false)],
        &[(3, "kept", true), (4, "short", true)],
    ] {
        operator.process(&documents(pieces), &mut emit).unwrap();
    }
    operator.finish(&mut emit).unwrap();
    assert_eq!(kept, [vec![0, 1], vec![3], vec![3]]);
    let statistics = statistics(&context);
    assert_eq!(statistics.dropped, [("block_urls.domain".to_owned(), 2)].into());
    assert_eq!(statistics.filtered_bytes, 8 + 2000 + 3 + 5);
    let samples = context.footer.get()[DROPPED_DOCUMENTS].clone();
    assert!(samples.contains(r#""text":"dropped éé"#) && samples.contains("https://www.site-4.example/"), "{samples}");
}

#[test]
fn a_document_without_values_is_an_error() {
    let context = SplitContext { carried: Some(Arc::new(Sites)), ..context(&gpt2()) };
    let mut operator = config("x").operator(&context).unwrap();
    let error = operator.process(&documents(&[(10, "text", true)]), &mut |_| Ok(())).unwrap_err().to_string();
    assert_eq!(error, "block_urls: document 10 of split 0: has no values of `input.carry`: a bug in this program");
    let without = SplitContext { carried: None, ..context };
    assert!(config("x").operator(&without).is_err());
}
