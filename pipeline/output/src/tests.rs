//! One test suite for outputs on every backend: memory, disk, and a real S3 server.

mod links;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use stillhouse_base::events::NullObserver;
use stillhouse_base::storage::Environment;
use stillhouse_schemas::manifest::Statistics;
use stillhouse_tests::s3::ADMIN;
use stillhouse_tests::seaweed::Seaweed;
use tempfile::TempDir;

use super::*;

const SHARD: &str = "train-00000-of-00001.parquet";

/// Opens outputs by name. Each call returns an independent instance, as in another process.
pub struct Backends {
    pub(crate) open: Box<dyn Fn(&str) -> Output + Send + Sync>,
}

impl Backends {
    async fn made(&self, name: &str) -> Output {
        (self.open)(name).create(&NullObserver).await.unwrap().for_job("hash")
    }
}

fn memory() -> Backends {
    let store = Arc::new(InMemory::new());
    Backends { open: Box::new(move |name| in_store(Arc::clone(&store) as _, Arc::clone(&store) as _, None, name)) }
}

pub fn in_store(
    store: Arc<dyn ObjectStore>,
    multipart: Arc<dyn MultipartStore>,
    uploads: Option<Arc<dyn Uploads>>,
    name: &str,
) -> Output {
    let prefix = Path::from(format!("some folder/{name}"));
    let rooted = Arc::new(PrefixStore::new(Arc::clone(&store), prefix.clone()));
    let bucket = Bucket { multipart, uploads, prefix, shown: format!("s3://bucket/some folder/{name}") };
    // S3's minimum part size, so that these tests' shards have several parts
    let upload_options = UploadOptions { part_bytes: 5 << 20, parts_at_once: 2 };
    Output { upload_options, ..Output::new(rooted, Backend::Store(bucket)) }.for_job("hash")
}

fn disk(folder: &TempDir) -> Backends {
    let root = folder.path().to_owned();
    Backends { open: Box::new(move |name| Output::on_disk(root.join(name)).unwrap().for_job("hash")) }
}

#[tokio::test]
async fn memory_conforms() {
    conforms(&memory()).await;
}

#[tokio::test]
async fn disk_conforms() {
    let folder = tempfile::tempdir().unwrap();
    conforms(&disk(&folder)).await;
}

/// Runs the suite on a real server with the program's transport, conditional completion and upload listing.
#[tokio::test(flavor = "multi_thread")]
async fn seaweedfs_conforms() {
    let weed = tokio::task::spawn_blocking(|| {
        let weed = Seaweed::start();
        weed.create_bucket("conformance");
        weed
    })
    .await
    .unwrap();
    let options = Storage { endpoint: Some(weed.endpoint().to_owned()), ..Storage::default() };
    let keys = [("AWS_ACCESS_KEY_ID", ADMIN.access), ("AWS_SECRET_ACCESS_KEY", ADMIN.secret)];
    let storages = Storages::with_environment(Environment::from_iter(keys));
    let url = StoreUrl::parse("s3://conformance").unwrap().unwrap();
    let Opened { store, multipart, uploads, .. } = storages.open(&url, &options).unwrap();
    let multipart = multipart.unwrap();
    let open = move |name: &str| in_store(Arc::clone(&store), Arc::clone(&multipart), uploads.clone(), name);
    conforms(&Backends { open: Box::new(open) }).await;
    tokio::task::spawn_blocking(move || drop(weed)).await.unwrap();
}

#[test]
fn parts_suit_the_shard() {
    let upload_options = UploadOptions::default();
    assert_eq!(upload_options.for_shard_size(5e8), upload_options);
    assert_eq!(upload_options.for_shard_size(1e11).part_bytes, 40_000_000);
}

type Body = for<'a> fn(&'a Backends) -> BoxFuture<'a, ()>;

macro_rules! bodies {
    ($($name:ident),* $(,)?) => { [$((stringify!($name), (|g| Box::pin($name(g))) as Body)),*] };
}

/// Runs every test body on fresh outputs of a backend. The panic names the body that failed.
pub async fn conforms(backends: &Backends) {
    let bodies = bodies![
        a_shard_is_seen_when_it_is_committed_and_not_before,
        of_two_workers_the_second_loses,
        a_worker_that_wakes_up_after_the_end_loses,
        an_aborted_shard_leaves_nothing,
        a_crash_in_the_middle_of_a_commit_is_settled,
        a_commit_without_its_shard_is_void,
        unfinished_work_is_taken_away,
        outputs_of_others_are_refused,
        one_run_at_a_time,
        files_beside_the_shards_are_of_the_run_that_holds_the_output,
        a_worker_commits_as_long_as_its_run_holds_the_output,
        a_sleeper_of_another_job_harms_nobody,
        removing_leaves_what_is_not_ours,
        a_failed_first_run_leaves_nothing,
        small_files_come_back,
    ];
    for (name, body) in bodies {
        println!("{name}");
        body(backends).await;
    }
}

fn plan(hash: &str) -> PlanRecord {
    PlanRecord {
        job_hash: hash.into(),
        name: "job".into(),
        job_folder: String::new(),
        job_file: String::new(),
        teacher: None,
        identity: serde_json::Value::Null,
        files: Vec::new(),
        splits: Vec::new(),
        appended: Vec::new(),
        staged: Vec::new(),
        duplicates: None,
    }
}

fn content(seed: u8, megabytes: usize) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    let step = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..megabytes * 1_000_000 + usize::from(seed)).map(step).collect()
}

async fn staged(output: &Output, content: &[u8]) -> (Staged, ShardRecord) {
    let mut upload = output.upload(SHARD).await.unwrap();
    for piece in content.chunks(700_001) {
        upload.put(Bytes::copy_from_slice(piece)).await.unwrap();
    }
    let staged = upload.finish().await.unwrap();
    assert_eq!(staged.bytes, content.len() as u64);
    let record = ShardRecord {
        path: format!("data/{SHARD}"),
        dataset_split: "train".into(),
        split: SplitId(0),
        rows: 1,
        tokens: 1,
        bytes: staged.bytes,
        sha256: staged.sha256.clone(),
        footer: None,
        column_bytes: BTreeMap::new(),
        input_sha256: Vec::new(),
        statistics: Statistics::default(),
    };
    (staged, record)
}

async fn read(output: &Output) -> Vec<u8> {
    let mut all = Vec::new();
    output.read_whole(&format!("data/{SHARD}"), |piece| all.extend_from_slice(piece)).await.unwrap();
    all
}

async fn nothing_unfinished(output: &Output) {
    assert_eq!(output.abort_uploads(true).await.unwrap(), Vec::<String>::new());
    assert_eq!(output.list("_stillhouse/staging").await.unwrap(), BTreeMap::new());
}

async fn a_shard_is_seen_when_it_is_committed_and_not_before(backends: &Backends) {
    let output = backends.made("seen").await;
    let whole = content(1, 12);
    let (staged, record) = staged(&output, &whole).await;
    assert_eq!(output.list("data").await.unwrap(), BTreeMap::new());
    assert_eq!(output.commit(staged, record.clone()).await.unwrap(), record);
    assert_eq!(read(&output).await, whole);
    let (sha256, bytes) = output.read_whole(&record.path, |_| {}).await.unwrap();
    assert_eq!((sha256, bytes), (record.sha256.clone(), record.bytes));
    let records: Vec<_> = output.records().await.unwrap().into_iter().map(|r| r.shard).collect();
    assert_eq!(records, [record]);
    nothing_unfinished(&output).await;
}

async fn of_two_workers_the_second_loses(backends: &Backends) {
    let (one, two) = (backends.made("race").await, (backends.open)("race"));
    let (first, second) = (content(2, 6), content(3, 7));
    let (staged_two, record_two) = {
        // On a disk two shards of one name are staged under one name, so they are committed one after the other.
        if one.folder().is_some() {
            let (staged_one, record_one) = staged(&one, &first).await;
            one.commit(staged_one, record_one).await.unwrap();
            staged(&two, &second).await
        } else {
            let slow = staged(&two, &second).await;
            let (staged_one, record_one) = staged(&one, &first).await;
            one.commit(staged_one, record_one).await.unwrap();
            slow
        }
    };
    let holds = two.commit(staged_two, record_two).await.unwrap();
    assert_eq!(holds.bytes, first.len() as u64);
    assert_eq!(read(&two).await, first);
    nothing_unfinished(&two).await;
}

async fn a_worker_that_wakes_up_after_the_end_loses(backends: &Backends) {
    let output = backends.made("end").await;
    output.begin(&plan("hash")).await.unwrap();
    let first = content(4, 1);
    let (shard, record) = staged(&output, &first).await;
    output.commit(shard, record).await.unwrap();
    output.put_json(MANIFEST, &serde_json::json!({"job_hash": "hash"})).await.unwrap();
    output.finish().await.unwrap();
    let late = (backends.open)("end");
    let (shard, record) = staged(&late, &content(5, 1)).await;
    assert_eq!(late.commit(shard, record).await.unwrap().bytes, first.len() as u64);
    assert_eq!(read(&output).await, first);
    assert!(matches!(output.inspect("hash").await.unwrap(), Found::Complete));
    nothing_unfinished(&output).await;
}

async fn an_aborted_shard_leaves_nothing(backends: &Backends) {
    let output = backends.made("abort").await;
    for megabytes in [0, 1, 12] {
        let mut upload = output.upload(SHARD).await.unwrap();
        upload.put(Bytes::from(content(6, megabytes))).await.unwrap();
        upload.abort().await;
        nothing_unfinished(&output).await;
        assert_eq!(output.list("data").await.unwrap(), BTreeMap::new());
    }
}

async fn a_crash_in_the_middle_of_a_commit_is_settled(backends: &Backends) {
    let output = backends.made("crash").await;
    output.begin(&plan("hash")).await.unwrap();
    let whole = content(7, 6);
    let (staged, record) = staged(&output, &whole).await;
    match staged.kind {
        // the shard exists without its record, so the split is made again
        upload::StagedKind::Disk(path) => {
            object_store::ObjectStoreExt::rename(&output.store, &path, &Path::from(record.path.as_str()))
                .await
                .unwrap();
            let Found::Resumable { done, incomplete_uploads } = output.inspect("hash").await.unwrap() else { panic!() };
            assert!(done.is_empty() && incomplete_uploads.is_empty());
            assert!(output.recover(incomplete_uploads).await.unwrap().is_empty());
            assert_eq!(output.list("data").await.unwrap(), BTreeMap::new());
        }
        // the record exists before the shard
        upload::StagedKind::Store { upload, .. } => {
            let commit = CommitRecord { job_hash: "hash".into(), shard: record.clone(), upload: Some(upload) };
            output.create_json(&commit::split_record(SplitId(0)), &commit).await.unwrap();
            let Found::Resumable { done, incomplete_uploads } = output.inspect("hash").await.unwrap() else { panic!() };
            assert!(done.is_empty());
            assert_eq!(incomplete_uploads.len(), 1);
            // `clean` in between must not treat the upload as abandoned
            nothing_unfinished(&output).await;
            let settled = output.recover(incomplete_uploads).await.unwrap();
            assert_eq!(settled.into_values().collect::<Vec<_>>(), [record]);
            assert_eq!(read(&output).await, whole);
            // a second time: the upload no longer exists, the shard does
            assert!(output.complete_upload(&commit).await.unwrap());
        }
    }
    nothing_unfinished(&output).await;
}

async fn a_commit_without_its_shard_is_void(backends: &Backends) {
    let output = backends.made("void").await;
    output.begin(&plan("hash")).await.unwrap();
    let (shard, record) = staged(&output, &content(8, 1)).await;
    output.commit(shard, record.clone()).await.unwrap();
    output.delete(&record.path).await.unwrap();
    let Found::Resumable { done, incomplete_uploads } = output.inspect("hash").await.unwrap() else { panic!() };
    assert!(done.is_empty());
    assert!(output.recover(incomplete_uploads).await.unwrap().is_empty());
    assert!(output.records().await.unwrap().is_empty());
    let again = content(9, 1);
    let (shard, record) = staged(&output, &again).await;
    output.commit(shard, record).await.unwrap();
    assert_eq!(read(&output).await, again);
}

async fn unfinished_work_is_taken_away(backends: &Backends) {
    let output = backends.made("unfinished").await;
    output.begin(&plan("hash")).await.unwrap();
    // like a killed process: no cleanup runs
    std::mem::forget(staged(&output, &content(10, 6)).await);
    // temporary names that listings hide: unfinished puts, and similar files of others
    let put =
        ["_SUCCESS#70000000001", "_stillhouse/plan.json#70000000003", "_stillhouse/splits/00003.json#70000000002"];
    let theirs = ["notes#70000000001", "manifest.json#1", "_stillhouse/splits/a#b.json"];
    if let Some(root) = output.folder() {
        std::fs::create_dir_all(root.join("_stillhouse/splits")).unwrap();
        put.iter().chain(&theirs).for_each(|name| std::fs::write(root.join(name), "half").unwrap());
        let leftovers = output.leftovers().await.unwrap();
        assert!(put.iter().all(|name| leftovers.contains(&(*name).to_owned())), "{leftovers:?}");
    }
    output.recover(Vec::new()).await.unwrap();
    nothing_unfinished(&output).await;
    if let Some(root) = output.folder() {
        assert!(!put.iter().any(|name| root.join(name).exists()) && theirs.iter().all(|name| root.join(name).exists()));
    }
}

async fn outputs_of_others_are_refused(backends: &Backends) {
    let output = backends.made("mine").await;
    assert!(matches!(output.inspect("mine").await.unwrap(), Found::Nothing));
    output.begin(&plan("mine")).await.unwrap();
    assert!(matches!(output.inspect("mine").await.unwrap(), Found::Resumable { .. }));
    let refused = output.inspect("other").await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Usage);
    assert!(
        refused.to_string().contains("another job") && refused.to_string().contains(&output.shown("")),
        "{refused}"
    );
    output.put_json(MANIFEST, &serde_json::json!({"job_hash": "other"})).await.unwrap();
    output.finish().await.unwrap();
    assert!(!matches!(output.inspect("mine").await.unwrap(), Found::Complete), "the manifest is another job's");
    output.put_json(MANIFEST, &serde_json::json!({"job_hash": "mine"})).await.unwrap();
    assert!(!matches!(output.inspect("mine").await.unwrap(), Found::Complete), "it is not the one that was finished");
    output.finish().await.unwrap();
    assert!(matches!(output.inspect("mine").await.unwrap(), Found::Complete));

    let theirs = backends.made("theirs").await;
    theirs.put("data/precious.txt", b"precious".to_vec()).await.unwrap();
    let refused = theirs.inspect("mine").await.unwrap_err().to_string();
    assert!(refused.contains("not of a Stillhouse job"), "{refused}");
}

async fn one_run_at_a_time(backends: &Backends) {
    let (one, two) = (backends.made("lock").await, (backends.open)("lock"));
    let lock = one.lock(&NullObserver).await.unwrap();
    let refused = two.lock(&NullObserver).await.err().unwrap().to_string();
    assert!(refused.contains("another run is working"), "{refused}");
    lock.release().await;
    two.lock(&NullObserver).await.unwrap().release().await;
}

async fn files_beside_the_shards_are_of_the_run_that_holds_the_output(backends: &Backends) {
    let run = backends.made("own").await.for_job("hash");
    let lock = run.lock(&NullObserver).await.unwrap();
    for content in [b"first", b"again"] {
        run.put_if_owner(MANIFEST, content.to_vec()).await.unwrap();
        assert_eq!(run.get(MANIFEST).await.unwrap().unwrap().as_ref(), content);
    }
    // like a put of its own whose response was lost
    run.put(MANIFEST, b"third".to_vec()).await.unwrap();
    run.put_if_owner(MANIFEST, b"fourth".to_vec()).await.unwrap();
    if run.folder().is_none() {
        // another run takes the lease
        run.delete(&format!("{STATE_FOLDER}/lease.json")).await.unwrap();
        let next = (backends.open)("own").for_job("hash");
        let taken = next.lock(&NullObserver).await.unwrap();
        let refused = run.put_if_owner(MANIFEST, b"late".to_vec()).await.unwrap_err().to_string();
        assert!(refused.ends_with("this one stops"), "{refused}");
        next.put_if_owner(MANIFEST, b"next".to_vec()).await.unwrap();
        assert_eq!(run.get(MANIFEST).await.unwrap().unwrap().as_ref(), b"next");
        taken.release().await;
    }
    lock.release().await;
}

/// A worker in another process commits for the run that holds the output.
async fn a_worker_commits_as_long_as_its_run_holds_the_output(backends: &Backends) {
    let run = backends.made("worker").await.for_job("hash");
    let lock = run.lock(&NullObserver).await.unwrap();
    run.begin(&plan("hash")).await.unwrap();
    let sent = serde_json::to_string(&run.ticket()).unwrap();
    let worker = (backends.open)("worker").joined(&serde_json::from_str(&sent).unwrap());
    let whole = content(15, 6);
    let (shard, record) = staged(&worker, &whole).await;
    worker.commit(shard, record.clone()).await.unwrap();
    assert_eq!(read(&run).await, whole);
    let Found::Resumable { done, .. } = run.inspect("hash").await.unwrap() else { panic!() };
    assert_eq!(done.into_values().collect::<Vec<_>>(), [record]);
    // meanwhile another run is refused, even of the same job, and a worker does not count as the holder
    let timing = Duration::from_secs(60);
    let other = (backends.open)("worker").for_job("hash");
    let refused = tokio::time::timeout(timing, other.lock(&NullObserver)).await.unwrap().err().unwrap().to_string();
    assert!(refused.contains("another run is working"), "{refused}");
    let late = staged(&worker, &content(16, 1)).await;
    lock.release().await;
    let refused = worker.commit(late.0, late.1).await.unwrap_err().to_string();
    assert!(refused.ends_with("this one stops"), "{refused}");
    assert_eq!(read(&run).await, whole);
}

/// A run was suspended past its lease, and its output now belongs to another job.
async fn a_sleeper_of_another_job_harms_nobody(backends: &Backends) {
    let sleeper = backends.made("sleeper").await.for_job("old");
    if sleeper.folder().is_some() {
        // suspension does not release the kernel's lock
        return;
    }
    let _lock = sleeper.lock(&NullObserver).await.unwrap();
    sleeper.begin(&plan("old")).await.unwrap();
    let late = staged(&sleeper, &content(13, 1)).await;
    let other = (backends.open)("sleeper").for_job("new");
    // simulates a takeover
    other.put("_stillhouse/lease.json", b"{}".to_vec()).await.unwrap();
    other.remove().await.unwrap();
    other.begin(&plan("new")).await.unwrap();
    let refused = |e: PipelineError| assert!(e.to_string().contains("taken this output over"), "{e}");
    refused(sleeper.commit(late.0, late.1).await.unwrap_err());
    refused(sleeper.begin(&plan("old")).await.unwrap_err());
    refused(sleeper.finish().await.unwrap_err());
    refused(sleeper.remove().await.unwrap_err());
    refused(sleeper.recover(Vec::new()).await.unwrap_err());
    refused(sleeper.abort_uploads(false).await.unwrap_err());

    // if it had committed anyway: its record does not count, and is removed with its shard
    let blind = (backends.open)("sleeper").for_job("old");
    let (shard, record) = staged(&blind, &content(14, 1)).await;
    blind.commit(shard, record).await.unwrap();
    let Found::Resumable { done, incomplete_uploads } = other.inspect("new").await.unwrap() else { panic!() };
    assert!(done.is_empty() && incomplete_uploads.is_empty());
    other.recover(incomplete_uploads).await.unwrap();
    assert_eq!(other.list("data").await.unwrap(), BTreeMap::new());
    assert!(other.records().await.unwrap().is_empty());
    nothing_unfinished(&other).await;
}

async fn removing_leaves_what_is_not_ours(backends: &Backends) {
    let output = backends.made("remove").await;
    output.begin(&plan("hash")).await.unwrap();
    let (shard, record) = staged(&output, &content(11, 1)).await;
    output.commit(shard, record).await.unwrap();
    output.put("notes.txt", b"mine".to_vec()).await.unwrap();
    output.put("data/notes.csv", b"mine".to_vec()).await.unwrap();
    output.remove().await.unwrap();
    let left: Vec<String> = output.list("").await.unwrap().into_keys().collect();
    assert_eq!(left, ["data/notes.csv", "notes.txt"]);
}

async fn a_failed_first_run_leaves_nothing(backends: &Backends) {
    let output = backends.made("failed").await;
    let lock = output.lock(&NullObserver).await.unwrap();
    output.begin(&plan("hash")).await.unwrap();
    std::mem::forget(staged(&output, &content(12, 6)).await);
    output.remove_if_nothing_is_committed(true).await;
    lock.release().await;
    let again = (backends.open)("failed");
    assert_eq!(again.list("").await.unwrap(), BTreeMap::new());
    assert_eq!(again.abort_uploads(true).await.unwrap(), Vec::<String>::new());
    assert!(again.folder().is_none_or(|folder| !folder.exists()));
}

async fn small_files_come_back(backends: &Backends) {
    let output = backends.made("files").await;
    output.put_json("a/b.json", &vec![1, 2, 3]).await.unwrap();
    assert_eq!(output.get_json::<Vec<u32>>("a/b.json").await.unwrap(), Some(vec![1, 2, 3]));
    assert_eq!(output.get_json::<Vec<u32>>("a/c.json").await.unwrap(), None);
    assert_eq!(
        output.size("a/b.json").await.unwrap(),
        Some(output.get("a/b.json").await.unwrap().unwrap().len() as u64)
    );
    let damaged = {
        output.put("a/d.json", b"{".to_vec()).await.unwrap();
        output.get_json::<Vec<u32>>("a/d.json").await.unwrap_err().to_string()
    };
    assert!(damaged.contains("a/d.json"), "{damaged}");
    output.delete("a/b.json").await.unwrap();
    output.delete("a/b.json").await.unwrap();
    assert!(!output.exists("a/b.json").await.unwrap());
    assert_eq!(output.list("a").await.unwrap().into_keys().collect::<Vec<_>>(), ["a/d.json"]);
}

/// On a disk a repair holds the same lock as a commit. Otherwise a run that takes over could miss a rename after its
/// check.
#[tokio::test]
async fn who_puts_a_repaired_shard_in_place_is_waited_for_as_who_commits() {
    let folder = tempfile::tempdir().unwrap();
    let run = Output::on_disk(folder.path()).unwrap().create(&NullObserver).await.unwrap().for_job("hash");
    let lock = run.lock(&NullObserver).await.unwrap();
    run.let_others_join().await.unwrap();
    let whole = content(3, 1);
    let (shard, record) = staged(&run, &whole).await;
    run.commit(shard, record.clone()).await.unwrap();
    let damaged = folder.path().join(&record.path);
    std::fs::write(&damaged, b"damaged").unwrap();
    let worker = Output::on_disk(folder.path()).unwrap().joined(&run.ticket());
    let (shard, again) = staged(&worker, &whole).await;
    // simulates a run that takes over the output and waits for workers between their check and their rename
    let looks = std::fs::File::create(folder.path().join("_stillhouse/commits")).unwrap();
    looks.lock().unwrap();
    let replacing = worker.replace(shard, &again, &record);
    tokio::pin!(replacing);
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut replacing).await.is_err());
    assert_eq!(std::fs::read(&damaged).unwrap(), b"damaged");
    looks.unlock().unwrap();
    replacing.await.unwrap();
    assert_eq!(read(&run).await, whole);
    lock.release().await;
}
