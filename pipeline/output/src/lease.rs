//! Allows only one run at a time on an output: a locked file on a disk, a lease in an object store.
//!
//! ```text
//!   none ──create (If-None-Match)──► held ──renewed every 5 s (If-Match)──► released (deleted)
//!                                      └─ holder dead, or not renewed for 20 s ──► taken over (If-Match)
//! ```
//!
//! The kernel releases a file lock when its process ends. The holder releases a lease. If the holder was killed, a
//! process on the same machine sees that and takes the lease over at once. Another machine waits 20 seconds without
//! renewal. The waiting process measures that time, so clocks need not agree.
//!
//! The holder's workers check the lease too ([`LeaseMonitor`]). Their run has ended once the lease is released or no
//! longer renewed.
//!
//! A lease prevents duplicate work; it does not protect the data. If a holder was suspended until its lease expired,
//! the commit protocol ([`super::commit`]) and the conditional puts of other files ([`super::Output::put_if_owner`])
//! stop it.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Event, Observer};

use super::{STATE_FOLDER, disk};

/// Interval between renewals, and the time without renewal after which a lease expires.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeaseTiming {
    pub renew_interval: Duration,
    pub expiry: Duration,
}

impl Default for LeaseTiming {
    fn default() -> Self {
        Self { renew_interval: Duration::from_secs(5), expiry: Duration::from_secs(20) }
    }
}

/// Maximum attempts to take a lease. Other processes may be faster a few times, but not forever.
const MAX_ATTEMPTS: u32 = 20;

/// Held while a run works on an output.
pub struct Lock(pub(super) LockKind);

pub(super) enum LockKind {
    File(File),
    Lease(Lease),
}

impl Lock {
    /// Releases the output. If a process dies without doing so, the output becomes free anyway, in a store after a
    /// while.
    pub async fn release(self) {
        match self.0 {
            LockKind::Lease(lease) => lease.release().await,
            LockKind::File(file) => {
                if let Err(e) = disk::unlock(file).await {
                    tracing::debug!("{e}");
                }
            }
        }
    }
}

/// The content of the lease file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct LeaseRecord {
    /// Unique to the holder.
    holder: String,
    /// Machine name, for display.
    host: String,
    process: u32,
    /// Hash that identifies this boot of this machine and its PID namespace; empty if unknown.
    machine: String,
    /// When the process started, in clock ticks of the machine, because process ids are reused.
    started: String,
    renewals: u64,
}

impl LeaseRecord {
    #[expect(clippy::disallowed_methods, reason = "the kernel answers for /proc out of memory, once for a lease")]
    fn for_this_process() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let process = std::process::id();
        let boot = read("/proc/sys/kernel/random/boot_id");
        let numbers = std::fs::read_link("/proc/self/ns/pid").map(|p| p.display().to_string()).unwrap_or_default();
        let known = !boot.is_empty() && !numbers.is_empty();
        let machine = if known { hex::encode(Sha256::digest(format!("{boot} {numbers}"))) } else { String::new() };
        Self {
            holder: unique(),
            host: read("/proc/sys/kernel/hostname"),
            process,
            machine,
            started: process_start(process).unwrap_or_default(),
            renewals: 0,
        }
    }

    /// Whether this machine can see that the holder's process has ended.
    fn is_dead(&self, me: &Self) -> bool {
        // Where the processes of other users are hidden, nothing can be concluded.
        !self.machine.is_empty()
            && self.machine == me.machine
            && process_start(1).is_some()
            && process_start(self.process).is_none_or(|now| now != self.started)
    }
}

/// A unique name to distinguish holders and probes; never used in data.
pub(super) fn unique() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

/// Returns when a process of this machine started, in clock ticks since boot. `None` if it does not exist or is a
/// zombie: a killed process stays listed until its parent reads its exit code.
#[expect(clippy::disallowed_methods, reason = "the kernel answers for /proc out of memory")]
fn process_start(process: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The program name, in parentheses, may contain any characters.
    let mut after_name = stat.rsplit_once(") ")?.1.split(' ');
    let state = after_name.next()?;
    let has_ended = ["Z", "X", "x"].contains(&state);
    after_name.nth(18).filter(|_| !has_ended).map(str::to_owned)
}

/// A store, and whether it honours conditional puts.
#[derive(Clone)]
struct LeaseStore {
    store: Arc<dyn ObjectStore>,
    conditional: bool,
}

/// A lease that is held and being renewed.
pub(super) struct Lease {
    store: LeaseStore,
    record: LeaseRecord,
    renewing: tokio::task::JoinHandle<()>,
}

impl Lease {
    /// Takes the lease of an output. Sets `lost` when another run has taken it over. Without `conditional` the lease
    /// cannot prevent races: the store would let two runs create it.
    ///
    /// # Errors
    /// When another run holds it, or the store fails.
    pub async fn take(
        store: Arc<dyn ObjectStore>,
        shown: &str,
        timing: LeaseTiming,
        lost: Arc<AtomicBool>,
        conditional: bool,
        observer: &dyn Observer,
    ) -> Result<Self> {
        let store = LeaseStore { store, conditional };
        let record = LeaseRecord::for_this_process();
        let failed = |e| PipelineError::store(ErrorKind::Output, &e, "lock", shown);
        let mut announced = false;
        let mut attempts = 0;
        let version = loop {
            attempts += 1;
            if attempts > MAX_ATTEMPTS {
                let message =
                    format!("{shown}: the lease {} cannot be taken; remove it if no run is at work", lease_path());
                return Err(PipelineError::new(ErrorKind::Output, message));
            }
            if attempts > 1 {
                tokio::time::sleep(timing.renew_interval / 10).await;
            }
            // Read first: a store that ignores conditions would let a create overwrite the lease.
            let Some((holder, version)) = read(&store.store).await.map_err(failed)? else {
                match put(&store, &record, PutMode::Create).await {
                    Ok(version) => break version,
                    Err(e) if is_condition_failure(&e) => continue,
                    Err(e) => return Err(failed(e)),
                }
            };
            if holder.holder == record.holder {
                break version;
            }
            if !holder.is_dead(&record) {
                if !announced {
                    announced = true;
                    let what = format!("waiting up to {} s for a run that may have died", timing.expiry.as_secs());
                    observer.event(&Event::Preparing { what });
                }
                wait_until_expired(&store.store, &holder, timing, shown).await?;
            }
            match put(&store, &record, PutMode::Update(version)).await {
                Ok(version) => break version,
                Err(e) if is_condition_failure(&e) => {}
                Err(e) => return Err(failed(e)),
            }
        };
        let renewing = tokio::spawn(renew(store.clone(), record.clone(), version, timing, lost));
        Ok(Self { store, record, renewing })
    }

    pub(super) fn holder(&self) -> &str {
        &self.record.holder
    }

    async fn release(self) {
        self.renewing.abort();
        let is_own =
            matches!(read(&self.store.store).await, Ok(Some((holder, _))) if holder.holder == self.record.holder);
        if is_own && let Err(e) = self.store.store.delete(&lease_path()).await {
            tracing::warn!("cannot release the lease; it expires by itself: {e}");
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

/// Waits until the holder has not renewed its lease for the expiry time. Fails as soon as it renews.
async fn wait_until_expired(
    store: &Arc<dyn ObjectStore>,
    holder: &LeaseRecord,
    timing: LeaseTiming,
    shown: &str,
) -> Result<()> {
    let since = Instant::now();
    while since.elapsed() < timing.expiry {
        tokio::time::sleep(timing.renew_interval / 2).await;
        match read(store).await.map_err(|e| PipelineError::store(ErrorKind::Output, &e, "lock", shown))? {
            Some((now, _)) if now == *holder => {}
            Some((now, _)) => {
                return Err(PipelineError::new(
                    ErrorKind::Busy,
                    format!(
                        "{shown}: another run is working on this output (process {} on {}); wait for it or stop it",
                        now.process, now.host
                    ),
                )
                .retryable());
            }
            None => return Ok(()),
        }
    }
    Ok(())
}

/// Renews the lease until it is lost or the task is aborted. Retries when the store fails.
async fn renew(
    store: LeaseStore,
    mut record: LeaseRecord,
    mut version: UpdateVersion,
    timing: LeaseTiming,
    lost: Arc<AtomicBool>,
) {
    loop {
        tokio::time::sleep(timing.renew_interval).await;
        record.renewals += 1;
        let put = put(&store, &record, PutMode::Update(version.clone()));
        // A hanging put must not outlast the lease. The next renewal shows whether it took effect.
        let Ok(renewed) = tokio::time::timeout(timing.renew_interval, put).await else { continue };
        match renewed {
            Ok(new) => version = new,
            Err(e) if is_condition_failure(&e) => match read(&store.store).await {
                // An earlier renewal succeeded but its response was lost.
                Ok(Some((holder, now))) if holder.holder == record.holder => version = now,
                Ok(_) => {
                    lost.store(true, Ordering::Relaxed);
                    return;
                }
                Err(e) => tracing::debug!("lease: {e}"),
            },
            Err(e) => tracing::debug!("lease: {e}"),
        }
    }
}

/// State of the lease from the point of view of one holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaseState {
    /// Held by this holder; the number of its renewals.
    Held(u64),
    /// Held by another one.
    HeldByOther,
    /// Free.
    Free,
}

/// Reads the lease and compares its holder.
pub(super) async fn lease_state(store: &Arc<dyn ObjectStore>, holder: &str) -> object_store::Result<LeaseState> {
    Ok(match read(store).await? {
        Some((record, _)) if record.holder == holder => LeaseState::Held(record.renewals),
        Some(_) => LeaseState::HeldByOther,
        None => LeaseState::Free,
    })
}

/// Time that workers wait for a renewal.
fn renewal_timeout(timing: LeaseTiming) -> Duration {
    timing.expiry + 3 * timing.renew_interval
}

/// A worker's view of its run's lease: the number of renewals, and when that number last changed.
#[derive(Debug, Default)]
pub struct LeaseMonitor(Option<(u64, Instant)>);

impl LeaseMonitor {
    /// Whether the holder is gone. A run that fails to renew for less than the expiry time continues. The wait also
    /// covers three renewal intervals: the sleep before the first failed renewal, and the sleep and the request timeout
    /// of the last one.
    fn is_expired(&mut self, renewals: u64, now: Instant, timing: LeaseTiming) -> bool {
        match self.0 {
            Some((before, since)) if before == renewals => now.duration_since(since) >= renewal_timeout(timing),
            _ => {
                self.0 = Some((renewals, now));
                false
            }
        }
    }

    /// Like [`LeaseMonitor::is_expired`], for the current time and the default timing. Returns the time waited.
    pub(super) fn expired(&mut self, renewals: u64) -> Option<Duration> {
        let timing = LeaseTiming::default();
        self.is_expired(renewals, Instant::now(), timing).then(|| renewal_timeout(timing))
    }
}

/// Describes the holder of the lease, unless its process is known to be dead.
pub(super) async fn describe_holder(store: &Arc<dyn ObjectStore>) -> object_store::Result<Option<String>> {
    let held = read(store).await?.filter(|(holder, _)| !holder.is_dead(&LeaseRecord::for_this_process()));
    Ok(held.map(|(holder, _)| format!("process {} on {}", holder.process, holder.host)))
}

fn lease_path() -> Path {
    Path::from(format!("{STATE_FOLDER}/lease.json"))
}

/// Whether the condition of a conditional put failed.
pub(super) fn is_condition_failure(e: &object_store::Error) -> bool {
    matches!(e, object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
}

async fn put(store: &LeaseStore, record: &LeaseRecord, mode: PutMode) -> object_store::Result<UpdateVersion> {
    let bytes =
        serde_json::to_vec(record).map_err(|e| object_store::Error::Generic { store: "lease", source: Box::new(e) })?;
    let mode = if store.conditional { mode } else { PutMode::Overwrite };
    let options = PutOptions { mode, ..PutOptions::default() };
    store.store.put_opts(&lease_path(), PutPayload::from(bytes), options).await.map(UpdateVersion::from)
}

async fn read(store: &Arc<dyn ObjectStore>) -> object_store::Result<Option<(LeaseRecord, UpdateVersion)>> {
    let got = match store.get(&lease_path()).await {
        Ok(got) => got,
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        Err(e) => return Err(e),
    };
    let version = UpdateVersion { e_tag: got.meta.e_tag.clone(), version: got.meta.version.clone() };
    // A file of another format is not a valid lease. It is taken over if it does not change.
    let record = serde_json::from_slice(&got.bytes().await?).unwrap_or_else(|_| LeaseRecord {
        holder: String::new(),
        host: "an unknown machine".into(),
        process: 0,
        machine: String::new(),
        started: String::new(),
        renewals: 0,
    });
    Ok(Some((record, version)))
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;
    use stillhouse_base::events::NullObserver;

    const FAST: LeaseTiming =
        LeaseTiming { renew_interval: Duration::from_millis(20), expiry: Duration::from_millis(400) };

    fn conditional(store: &Arc<dyn ObjectStore>) -> LeaseStore {
        LeaseStore { store: Arc::clone(store), conditional: true }
    }

    async fn take(store: &Arc<dyn ObjectStore>) -> Result<Lease> {
        Lease::take(Arc::clone(store), "memory", FAST, Arc::default(), true, &NullObserver).await
    }

    #[tokio::test]
    async fn one_holder_at_a_time() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let first = take(&store).await.unwrap();
        let refused = take(&store).await.err().unwrap().to_string();
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
        first.release().await;
        take(&store).await.unwrap().release().await;
        assert!(read(&store).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_dead_process_of_this_machine_is_taken_over_at_once() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut dead = LeaseRecord::for_this_process();
        dead.holder = "dead".into();
        dead.started = "0".into();
        assert!(dead.is_dead(&LeaseRecord::for_this_process()));
        put(&conditional(&store), &dead, PutMode::Create).await.unwrap();
        let lease =
            Lease::take(Arc::clone(&store), "memory", LeaseTiming::default(), Arc::default(), true, &NullObserver);
        // The timeout is far below the 20 s after which any lease expires.
        tokio::time::timeout(Duration::from_secs(10), lease).await.unwrap().unwrap();
    }

    /// Proves that a killed process counts as dead while it is a zombie, as under a container's first process.
    #[test]
    fn a_killed_process_is_dead_before_its_parent_has_asked_for_its_exit_code() {
        let mut killed = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let began = process_start(killed.id());
        assert!(began.is_some());
        let holder = LeaseRecord { process: killed.id(), started: began.unwrap(), ..LeaseRecord::for_this_process() };
        assert!(!holder.is_dead(&LeaseRecord::for_this_process()));
        killed.kill().unwrap();
        // Waits for the process to end without reaping it.
        // SAFETY: `waitid` writes only to `info`.
        let ended = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, killed.id(), &raw mut info, libc::WEXITED | libc::WNOWAIT)
        };
        assert_eq!(ended, 0);
        let is_dead = holder.is_dead(&LeaseRecord::for_this_process());
        killed.wait().unwrap();
        assert!(is_dead);
    }

    #[test]
    fn a_worker_gives_a_run_up_that_does_not_renew_and_no_other() {
        let (began, timing) = (Instant::now(), LeaseTiming::default());
        let mut pulse = LeaseMonitor::default();
        let mut is_expired =
            |renewals: u64, seconds: u64| pulse.is_expired(renewals, began + Duration::from_secs(seconds), timing);
        assert!(!is_expired(7, 0) && !is_expired(7, 34) && is_expired(7, 35) && is_expired(7, 36));
        // a renewal proves it alive; a worker that checks rarely cannot know that nothing happened in between
        assert!(!is_expired(8, 37) && !is_expired(9, 200) && !is_expired(9, 234) && is_expired(9, 235));
    }

    #[tokio::test]
    async fn who_looks_at_a_lease_sees_whose_it_is() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let lease = take(&store).await.unwrap();
        let holder = lease.holder().to_owned();
        assert!(matches!(lease_state(&store, &holder).await.unwrap(), LeaseState::Held(_)));
        assert_eq!(lease_state(&store, "another one").await.unwrap(), LeaseState::HeldByOther);
        lease.release().await;
        assert_eq!(lease_state(&store, &holder).await.unwrap(), LeaseState::Free);
    }

    #[tokio::test]
    async fn a_lease_that_is_not_renewed_is_taken_over_and_its_holder_is_reported() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let lost = Arc::new(AtomicBool::new(false));
        let mut sleeper = LeaseRecord::for_this_process();
        sleeper.machine = "elsewhere".into();
        let version = put(&conditional(&store), &sleeper, PutMode::Create).await.unwrap();
        let taken = take(&store).await.unwrap();
        renew(conditional(&store), sleeper, version, FAST, Arc::clone(&lost)).await;
        assert!(lost.load(Ordering::Relaxed));
        taken.release().await;
    }
}
