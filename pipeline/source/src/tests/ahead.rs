//! Read-ahead: which ranges are requested from a store, when, and whether unneeded requests are cancelled.

#![allow(clippy::single_range_in_vec_init, reason = "often one range is asked for")]

use std::fmt;
use std::io::{BufRead, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};

use super::*;
use stillhouse_input_files::ObjectReader;

const KB: u64 = 1 << 10;

/// A store that records the requested ranges. From some offset on it does not answer, or fails.
#[derive(Debug)]
struct Gate {
    store: InMemory,
    asked: Mutex<Vec<Range<u64>>>,
    silent_from: u64,
    fails_from: u64,
    /// Number of requests cancelled before they were answered.
    given_up: AtomicU64,
}

/// Counts a request that ends without an answer.
struct Unanswered<'a>(&'a AtomicU64);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gate")
    }
}

#[async_trait]
impl ObjectStore for Gate {
    async fn get_opts(&self, location: &Key, options: GetOptions) -> StoreResult<GetResult> {
        if let Some(GetRange::Bounded(range)) = &options.range {
            self.asked.lock().unwrap().push(range.clone());
            if range.start >= self.fails_from {
                return Err(Error::Generic { store: "Gate", source: "it is closed".into() });
            }
            if range.start >= self.silent_from {
                let _unanswered = Unanswered(&self.given_up);
                std::future::pending::<()>().await;
            }
        }
        self.store.get_opts(location, options).await
    }

    async fn put_opts(&self, location: &Key, payload: PutPayload, opts: PutOptions) -> StoreResult<PutResult> {
        self.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Key,
        opts: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(location, opts).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, StoreResult<Key>>) -> BoxStream<'static, StoreResult<Key>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Key>) -> StoreResult<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Key, to: &Key, options: CopyOptions) -> StoreResult<()> {
        self.store.copy_opts(from, to, options).await
    }
}

/// A bucket behind a gate with one object of JSON lines, and a store that reads it.
struct Bucket {
    gate: Arc<Gate>,
    store: Store,
    input: Input,
    files: Vec<InputFile>,
    content: Vec<u8>,
    runtime: tokio::runtime::Runtime,
}

impl Bucket {
    /// An object of at least `size` bytes; ranges from some offset on are not answered, or fail.
    fn new(size: u64, silent_from: u64, fails_from: u64) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let line = |i: u64| json!({"text": format!("document {i:08}")}).to_string() + "\n";
        let content = (0..size.div_ceil(line(0).len() as u64)).map(line).collect::<String>().into_bytes();
        let memory = InMemory::new();
        runtime.block_on(memory.put(&Key::from("a.jsonl"), PutPayload::from(content.clone()))).unwrap();
        let gate =
            Gate { store: memory, asked: Mutex::default(), silent_from, fails_from, given_up: AtomicU64::new(0) };
        let gate = Arc::new(gate);
        let store = with_corpora(runtime.handle(), gate.clone());
        let input = input(json!({"paths": ["s3://corpora/a.jsonl"]}));
        let files = list(&store, Path::new("/"), &input).unwrap();
        gate.asked.lock().unwrap().clear();
        Self { gate, store, input, files, content, runtime }
    }

    fn object(&self) -> ObjectReader {
        ObjectReader::new(&self.store, &self.files[0].location, self.files[0].size, 0)
    }

    fn split(&self, start: u64, end: u64) -> SplitReader {
        let piece = stillhouse_schemas::manifest::Piece {
            file: self.files[0].path.clone(),
            range: stillhouse_schemas::manifest::Range::Bytes { start, end, line: None },
        };
        let split = SplitRecord {
            split: stillhouse_schemas::ids::SplitId(0),
            dataset_split: TRAIN.into(),
            pieces: vec![piece],
            keys: None,
            appended: 0,
            place: None,
        };
        SplitReader::new(&self.store, &Listing::new(Arc::new(self.files.clone())), split, Arc::new(self.input.clone()))
    }

    fn asked(&self) -> Vec<Range<u64>> {
        self.gate.asked.lock().unwrap().clone()
    }

    /// Number of running tasks; with none, all requests have been recorded.
    fn under_way(&self) -> usize {
        self.runtime.metrics().num_alive_tasks()
    }
}

/// Waits until a condition holds; if it never does, the test hangs.
fn until(what: impl Fn() -> bool) {
    while !what() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn the_next_chunk_is_fetched_while_one_is_read_and_given_up_with_the_reader() {
    let bucket = Bucket::new(1 << 20, 192 * KB, u64::MAX);
    let mut reader = bucket.object();
    assert_eq!(reader.fill_buf().unwrap().len() as u64, 64 * KB);
    assert_eq!((bucket.asked(), bucket.under_way()), (vec![0..64 * KB], 0), "the first chunk is fetched alone");
    reader.consume(64 << 10);
    // no byte was consumed, and yet the reader requests the third chunk, which is never answered
    assert_eq!(reader.fill_buf().unwrap().len() as u64, 128 * KB);
    until(|| bucket.asked().len() == 3);
    assert_eq!(bucket.asked(), [0..64 * KB, 64 * KB..192 * KB, 192 * KB..448 * KB]);
    reader.consume(100);
    assert_eq!(reader.fill_buf().unwrap().len() as u64, 128 * KB - 100);
    assert_eq!(bucket.gate.given_up.load(Ordering::SeqCst), 0);
    drop(reader);
    until(|| bucket.gate.given_up.load(Ordering::SeqCst) == 1);
    until(|| bucket.under_way() == 0);
    assert_eq!(bucket.asked().len(), 3);
}

#[test]
fn all_of_an_object_is_read_once_in_chunks_of_at_most_two_megabytes() {
    let bucket = Bucket::new(9 << 20, u64::MAX, u64::MAX);
    let mut got = Vec::new();
    bucket.object().read_to_end(&mut got).unwrap();
    assert!(got == bucket.content);
    let asked = bucket.asked();
    assert!(asked.windows(2).all(|w| w[0].end == w[1].start), "{asked:?}");
    assert_eq!((asked[0].start, asked.last().unwrap().end), (0, bucket.content.len() as u64));
    assert_eq!(asked.iter().map(|range| range.end - range.start).max(), Some(2 << 20));
}

#[test]
fn a_chunk_ahead_that_fails_is_reported_where_it_is_needed() {
    let bucket = Bucket::new(1 << 20, u64::MAX, 192 * KB);
    let mut reader = bucket.object();
    let mut before = vec![0; 192 << 10];
    reader.read_exact(&mut before).unwrap();
    assert!(before == bucket.content[..192 << 10]);
    until(|| bucket.asked().len() == 3 && bucket.under_way() == 0);
    let error = reader.fill_buf().unwrap_err();
    assert!(error.to_string().contains("it is closed"), "{error}");

    let mut split = bucket.split(0, u64::MAX);
    let rows = split.next().unwrap().unwrap().num_rows();
    assert_eq!(rows, 1024, "what was read before is given");
    let failed = std::iter::from_fn(|| split.next()).find_map(Result::err).unwrap();
    let SourceError::Store { file, .. } = &failed else { panic!("{failed}") };
    assert_eq!(file, "s3://corpora/a.jsonl");
    assert!(split.next().is_none());
}

#[test]
fn nothing_is_fetched_ahead_past_the_end_of_a_split() {
    let bucket = Bucket::new(4 << 20, u64::MAX, u64::MAX);
    for (start, end, asked) in [
        (0, 60_000, vec![0..64 * KB]),
        (0, 100_000, vec![0..64 * KB, 64 * KB..192 * KB]),
        (0, 200_000, vec![0..64 * KB, 64 * KB..192 * KB, 192 * KB..448 * KB]),
        (100_000, 101_000, vec![99_999..99_999 + 64 * KB]),
    ] {
        bucket.gate.asked.lock().unwrap().clear();
        let mut split = bucket.split(start, end);
        assert!(split.by_ref().all(|batch| batch.is_ok()));
        until(|| bucket.under_way() == 0);
        assert_eq!(bucket.asked(), asked, "{start} to {end}");
        assert!(split.summary().documents > 0);
    }
}

#[test]
fn a_look_at_the_first_records_fetches_one_chunk() {
    let bucket = Bucket::new(4 << 20, u64::MAX, u64::MAX);
    let found = check_first_records(&bucket.store, &bucket.files, &bucket.input, &|_, _| {}).unwrap();
    assert_eq!((found.files, found.problems.len(), found.skipped.len()), (1, 0, 0));
    assert_eq!((bucket.asked(), bucket.under_way()), (vec![0..64 * KB], 0));
}

/// A reader that is dropped between two batches leaves no fetch running.
#[test]
fn a_split_that_is_given_up_fetches_no_further() {
    let bucket = Bucket::new(4 << 20, 448 * KB, u64::MAX);
    let mut split = bucket.split(0, u64::MAX);
    // 8 * 1024 lines end inside the third chunk
    let line = bucket.content.iter().position(|b| *b == b'\n').unwrap() as u64 + 1;
    assert!((192 * KB..448 * KB).contains(&(8 * 1024 * line)));
    for _ in 0..8 {
        assert_eq!(split.next().unwrap().unwrap().num_rows(), 1024);
    }
    until(|| bucket.asked().len() == 4);
    drop(split);
    until(|| bucket.gate.given_up.load(Ordering::SeqCst) == 1 && bucket.under_way() == 0);
}
