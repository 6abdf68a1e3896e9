//! A process that works for the run of another one: the same plan, made here from the same job, one split at a time.
//!
//! ```text
//!   Order ─► prepare (under this machine's own rules) ─► hash = the ticket's? ─► plan.json of the output ─► teacher ─► session
//!   Wanted ─► committed already? ─ yes ─► its record
//!                                └ no ──► execute its partition, commit for the run ─► its record
//! ```
//!
//! The order names a job, not what to do: what is read, computed and written follows from the job, which is checked here as anybody's is. A
//! worker that sees another input, another tokenizer, other weights or computes in another arithmetic refuses, and says in what it differs.
//!
//! Every two seconds a worker looks whether its run still holds the output; when it does not, what is at work ends at its next batch. That
//! is how a cancelled or dead run is told, and costs one small request. With it goes what it is at and has counted (`_stillhouse/workers`), where
//! it is at another split than two seconds before, else every ten seconds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use stillhouse_schemas::spec::EngineKind;

use super::driver::{Order, Wanted};
use super::room::{Needs, Room, Share};
use super::splits::Session;
use super::{Job, JobHash, blocking, files_of};
use crate::access::Access;
use crate::append;
use crate::differs::differences;
use crate::engine::device::DeviceQueue;
use crate::engine::pool::Pool;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::Observer;
use crate::holdouts::Holdouts;
use crate::job::{Prepared, chain, prepare_parsed};
use crate::operators::job_format;
use crate::output::{AtWork, Output, SplitAtWork};
use crate::plan;
use crate::teacher::{self, JobInput, Loaded};

/// How often a worker looks whether its run is still there.
const LOOKS: Duration = Duration::from_secs(2);

/// How often it tells how far it is.
const TELLS: Duration = Duration::from_secs(10);

/// Lines that a refusal gives of what differs.
const MOST_LINES: usize = 8;

/// A job, as this process works at it.
pub struct Worker {
    stand: Arc<Stand>,
    partitions: HashMap<SplitId, usize>,
    /// A split is worked on once at a time, however often it is asked for.
    turns: Mutex<HashMap<SplitId, Arc<tokio::sync::Mutex<()>>>>,
    watching: tokio::task::JoinHandle<()>,
    pool: Pool,
}

/// Where the work stands.
struct Stand {
    name: String,
    job: Job,
    session: Session,
    at_work: Mutex<BTreeSet<SplitId>>,
    began: Instant,
    /// Its memory, as long as it has a teacher.
    _share: Share,
}

impl Stand {
    fn splits(&self) -> BTreeSet<SplitId> {
        self.at_work.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What it is at and has counted.
    fn tell(&self, splits: &BTreeSet<SplitId>) -> AtWork {
        let states: HashMap<SplitId, _> =
            self.session.resources.at_work.all().into_iter().map(|state| (state.split, state)).collect();
        let at = |split: &SplitId| {
            let state = states.get(split);
            let reads = state.map(|state| state.reads.clone()).unwrap_or_default();
            SplitAtWork { split: *split, reads, stages: state.map(|state| state.statuses()).unwrap_or_default() }
        };
        AtWork {
            splits: splits.iter().map(at).collect(),
            progress: self.job.progress(self.began),
            ..AtWork::new(&self.name, &self.job.output)
        }
    }
}

/// A split that is at work as long as this lives.
struct Working<'a>(&'a Mutex<BTreeSet<SplitId>>, SplitId);

impl<'a> Working<'a> {
    fn on(at_work: &'a Mutex<BTreeSet<SplitId>>, split: SplitId) -> Self {
        at_work.lock().unwrap_or_else(PoisonError::into_inner).insert(split);
        Self(at_work, split)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

/// What an order may do here.
#[derive(Debug, Clone)]
pub struct Place {
    /// How this process is named to people.
    pub name: String,
    /// What jobs may touch.
    pub access: Access,
    /// The device of teachers, where it is not as the job says.
    pub device: Option<String>,
    /// Splits of a job at once.
    pub slots: usize,
    /// The memory that jobs may take.
    pub room: Arc<Room>,
}

impl Worker {
    /// Gets ready to work for a run: everything but the splits.
    ///
    /// Cost: the input is listed, the plan of the run is read, the teacher is loaded.
    ///
    /// # Errors
    /// When this process may not, cannot, or would make other bytes than the run. An error of this place alone ([`PipelineError::of_place`]) is told
    /// at the output too, so that the run knows who passes its splits on.
    pub async fn join(order: &Order, place: &Place, observer: Arc<dyn Observer>) -> Result<Self> {
        let prepared = prepared(order, place, &observer).await?;
        let hash = blocking(&prepared, &observer, |p, o| plan::job_hash(p, o)).await?;
        let output = prepared.output()?.joined(&order.ticket);
        let hash = append::at_output(hash, &output).await?;
        let output = output.for_grown_job(&hash).joined(&order.ticket);
        output.still_ours().await?;
        let mut at = AtWork::new(&place.name, &output);
        let id = uuid::Uuid::new_v4().simple().to_string();
        // of who says nothing the run does not know whether it is getting ready or is not there
        output.report(&id, &at).await?;
        let ready = Self::ready(prepared, hash, output.clone(), (order, place), &id, observer).await;
        if let Err(e) = &ready
            && e.of_place
        {
            at.cannot = Some(e.to_string());
            output.report(&id, &at).await?;
        }
        ready
    }

    async fn ready(
        prepared: Arc<Prepared>,
        hash: JobHash,
        output: Output,
        (order, place): (&Order, &Place),
        id: &str,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let share = share(&prepared, order, place, &observer).await?;
        let (splits, job_files, skipped) = planned(&prepared, &hash, &output, order, &observer).await?;
        let loaded = loaded(&prepared, order, &splits, &job_files, &observer).await?;
        hash.teacher_is_still()?;
        let teacher = loaded.teachers.first().map(|teacher| teacher.info().clone());
        let devices: Result<Vec<_>, _> = loaded.teachers.into_iter().map(DeviceQueue::start).collect();
        let devices = devices.map_err(|e| PipelineError::new(ErrorKind::Model, format!("teacher: {}", chain(&e))))?;
        let stop = Arc::<AtomicBool>::default();
        let job = Job {
            holdouts: Holdouts::new(&splits, std::iter::empty()),
            bytes: AtomicU64::new(0),
            prepared,
            hash,
            output: output.clone(),
            splits: splits.clone(),
            files: job_files,
            skipped,
            committed: AtomicU64::new(0),
            done: BTreeMap::new(),
            remade: BTreeMap::new(),
            made: Mutex::default(),
            plans: Mutex::default(),
            teacher,
            arithmetic: loaded.arithmetic,
            devices,
            stop: Arc::clone(&stop),
            observer,
            driver: None,
            elsewhere: Mutex::default(),
            awaited: Mutex::default(),
        };
        let pool = Pool::new(rayon::current_num_threads());
        let pool = pool.map_err(PipelineError::output("the system gives no threads for the splits"))?;
        let session = job.session(splits, pool.spawner().map_err(PipelineError::output("the splits"))?)?;
        let partitions = session.partitions();
        let (name, at_work, began) = (place.name.clone(), Mutex::default(), Instant::now());
        let stand = Arc::new(Stand { name, job, session, at_work, began, _share: share });
        let watching = tokio::spawn(watch(Arc::clone(&stand), id.to_owned()));
        Ok(Self { stand, partitions, turns: Mutex::default(), watching, pool })
    }

    /// Whether its run is gone: nothing more is made for it.
    pub fn is_over(&self) -> bool {
        self.stand.job.stop.load(Ordering::Relaxed)
    }

    /// Makes a split and commits it for the run; one that is committed already is not made again.
    ///
    /// # Errors
    /// When it cannot be made, or when the run does not hold the output any more.
    pub async fn make(&self, wanted: &Wanted) -> Result<ShardRecord> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry(wanted.split).or_default())
        };
        let _turn = turn.lock().await;
        let Stand { job, session, at_work, .. } = self.stand.as_ref();
        job.output.still_ours().await?;
        if wanted.was.is_none()
            && let Some(record) = job.output.committed(wanted.split).await?
        {
            return Ok(record);
        }
        let Some(&partition) = self.partitions.get(&wanted.split) else {
            let message = format!("{}: the plan has no split {}", job.output, wanted.split.0);
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        };
        let _working = Working::on(at_work, wanted.split);
        let warn = |message: String| tracing::warn!("{message}");
        let made = match &wanted.was {
            None => session.execute(partition, &warn).await?,
            Some(was) => self.again(partition, was)?.execute(0, &warn).await?,
        };
        let [record] = <[ShardRecord; 1]>::try_from(made).map_err(|made| {
            let message = format!("split {} gave {} records: a fault of this program", wanted.split.0, made.len());
            PipelineError::new(ErrorKind::Output, message)
        })?;
        Ok(record)
    }

    /// A plan of one split, whose shard must come out as it was.
    fn again(&self, partition: usize, was: &ShardRecord) -> Result<Session> {
        let spawner = self.pool.spawner().map_err(PipelineError::output("the splits"))?;
        let Stand { job, session, .. } = self.stand.as_ref();
        let splits: Vec<SplitRecord> = session.split(partition).into_iter().collect();
        job.session_of(splits, &BTreeMap::from([(was.split, was.clone())]), spawner)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

/// Sets `stop` once the run has gone; a store that does not answer says nothing. Tells at the output how the work stands.
async fn watch(stand: Arc<Stand>, id: String) {
    let output = &stand.job.output;
    let (mut told, mut at) = (BTreeSet::new(), Instant::now());
    loop {
        tokio::time::sleep(LOOKS).await;
        stand.job.look_whom_devices_await(&stand.session.resources.at_work);
        match output.still_ours().await {
            Err(e) if e.retryable => continue,
            Err(e) => {
                tracing::info!("{e}");
                stand.job.stop.store(true, Ordering::Relaxed);
                return;
            }
            Ok(()) => {}
        }
        let splits = stand.splits();
        // a report of nothing could come after the run has taken the reports away
        if !splits.is_empty() && (splits != told || at.elapsed() >= TELLS) {
            match output.report(&id, &stand.tell(&splits)).await {
                Ok(()) => (told, at) = (splits, Instant::now()),
                Err(e) => tracing::debug!("{e}"),
            }
        }
    }
}

/// The memory that the job takes here, before anything of it is taken.
async fn share(prepared: &Arc<Prepared>, order: &Order, place: &Place, observer: &Arc<dyn Observer>) -> Result<Share> {
    let (room, slots) = (Arc::clone(&place.room), place.slots);
    let dtype = order.teacher.as_ref().map(|teacher| teacher.dtype);
    blocking(prepared, observer, move |p, _| room.take(Needs::of(p, dtype, slots)?)).await
}

/// The job, checked as anybody's is.
async fn prepared(order: &Order, place: &Place, observer: &Arc<dyn Observer>) -> Result<Arc<Prepared>> {
    let mut parsed = job_format().parse_json(&order.spec);
    if let Some(spec) = &mut parsed.spec {
        // here it is made
        spec.engine.kind = EngineKind::Local;
        spec.engine.scheduler = None;
        if let (Some(extract), Some(device)) = (&mut spec.extract, &place.device) {
            extract.teacher.device.clone_from(device);
        }
    }
    let (base, access, observer) = (order.base.clone(), place.access.clone(), Arc::clone(observer));
    let prepared = tokio::task::spawn_blocking(move || prepare_parsed(parsed, &base, &access, observer.as_ref()));
    Ok(Arc::new(prepared.await??))
}

type Planned = (Vec<SplitRecord>, Arc<Vec<crate::source::InputFile>>, BTreeMap<String, u64>);

/// The splits as the run has planned them, over the files as this process sees them.
async fn planned(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    order: &Order,
    observer: &Arc<dyn Observer>,
) -> Result<Planned> {
    let Some(plan) = output.plan().await? else {
        let message = format!(
            "{output}: no plan is there as this machine sees it; valid: a place that all executors and the run share"
        );
        return Err(PipelineError::new(ErrorKind::Output, message));
    };
    if hash.hash != order.ticket.job_hash || plan.job_hash != order.ticket.job_hash {
        let short = |hash: &str| hash[..12.min(hash.len())].to_owned();
        let mut message = format!(
            "the job is another one as this machine sees it (hash {}; the run has {})",
            short(&hash.hash),
            short(&order.ticket.job_hash)
        );
        differences(&plan, hash).iter().take(MOST_LINES).for_each(|line| message += &format!("\n  {line}"));
        return Err(PipelineError::new(ErrorKind::Input, message));
    }
    let (files, skipped) = files_of(prepared, hash, output, observer).await?;
    Ok((plan.splits_of(&hash.files), Arc::new(files), skipped))
}

/// The teacher in the arithmetic of the run, or a refusal.
async fn loaded(
    prepared: &Arc<Prepared>,
    order: &Order,
    splits: &[SplitRecord],
    files: &Arc<Vec<crate::source::InputFile>>,
    observer: &Arc<dyn Observer>,
) -> Result<Loaded> {
    if prepared.teacher.is_none() {
        return Ok(Loaded::default());
    }
    let (splits, files, arithmetic) = (splits.to_vec(), Arc::clone(files), order.teacher.clone());
    let load = move |p: &Prepared, o: &dyn Observer| {
        teacher::load_all(p, JobInput { splits: &splits, files: &files }, arithmetic.as_ref(), true, o)
    };
    blocking(prepared, observer, load).await
}
