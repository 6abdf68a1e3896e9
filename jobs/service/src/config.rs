//! The service's configuration: one YAML file with every limit; unknown keys are errors.
//!
//! ```yaml
//! listen: 127.0.0.1:7373
//! data: /var/lib/stillhouse
//! access: {read: [/corpora, "s3://corpora"], write: [/shards, "s3://shards"], hub: ["*"]}
//! capacity: {running_jobs: 4, cpu_slots: 1, gpus: [0, 1]}
//! limits: {queued_jobs: 10000}
//! ```

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stillhouse_pipeline::access::Access;
use stillhouse_pipeline::driver::has_cluster;
use stillhouse_pipeline::storage::Backoff;
use stillhouse_schemas::checks::scheduler_problem;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::storage::endpoint_problem;

use super::client_limits::StreamLimits;
use super::proxies::{self, ProxyHeader};

/// The service's configuration.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address to listen on. An address beyond loopback requires tokens.
    pub listen: SocketAddr,
    /// Folder of the queue, tokens and logs; used by one server only. Default: `$XDG_STATE_HOME/stillhouse`.
    pub data: PathBuf,
    /// Who may call: `auto` allows everyone on loopback; `token` always requires a token.
    pub auth: Auth,
    /// Names that requests may give in `Host`, besides the address and loopback's names. Behind a proxy: the proxy's
    /// name.
    pub hosts: Vec<String>,
    /// Addresses and networks (CIDR) of proxies that may name the client they forward for.
    pub trusted_proxies: Vec<String>,
    /// The header that names the client. The proxies must set it themselves: a client can forge any other header.
    pub proxy_header: ProxyHeader,
    /// Base folder of relative paths in a job file, if the submission names no folder.
    pub folder: PathBuf,
    /// Files, stores and hubs that jobs may access.
    pub access: Access,
    /// URL of the S3-compatible service for jobs without `storage.endpoint`. Default: `AWS_ENDPOINT_URL`, the profile,
    /// or Amazon.
    pub endpoint: Option<String>,
    /// The cluster that runs jobs without `engine.kind`, instead of this machine.
    pub cluster: Cluster,
    /// How many jobs run at once, and with which resources.
    pub capacity: Capacity,
    /// Limits on clients, jobs and stored data.
    pub limits: Limits,
    /// When a failed attempt is retried.
    pub retry: Retry,
    /// How long finished jobs are stored.
    pub keep: Retention,
    /// Longest wait for workers when the service stops, in seconds.
    pub shutdown_seconds: u32,
    /// Run jobs even if the kernel cannot confine them (Landlock: Linux 5.13 and newer).
    pub allow_unconfined: bool,
}

/// Who may call the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Auth {
    /// Everyone on loopback; only token holders on other addresses.
    Auto,
    /// Only token holders.
    Token,
}

/// A cluster that runs jobs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    /// The scheduler's address, as in `engine.scheduler` of a job file. The cluster's token is in the service's
    /// environment.
    pub scheduler: Option<String>,
}

/// How many jobs run at once, and with which resources.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Capacity {
    /// Jobs that run at once, on any device.
    pub running_jobs: u32,
    /// Jobs that run at once on the CPU.
    pub cpu_slots: u32,
    /// Ordinals of the GPUs that jobs may use.
    pub gpus: Vec<u32>,
    /// Jobs that run at once on each GPU.
    pub jobs_per_gpu: u32,
    /// Threads of each job. Default: the CPUs, divided by the CPU slots.
    pub threads_per_job: Option<NonZeroU32>,
    /// Address space of each worker in gigabytes (10^9 bytes). Default: no limit.
    pub worker_gigabytes: Option<u32>,
}

/// Limits, each in the unit of its name.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Concurrent connections.
    pub connections: u32,
    /// Extra connections, reserved for health, readiness, metrics and tokens with the scope admin.
    pub connections_kept: u32,
    /// Concurrent connections of one address, or concurrent requests of one address behind a trusted proxy.
    pub connections_per_address: u32,
    /// Concurrent live streams (events, followed logs); never more than half of `connections`.
    pub watchers: u32,
    /// Concurrent live streams of one user.
    pub watchers_per_user: u32,
    /// Concurrent live streams of one token.
    pub watchers_per_token: u32,
    /// Longest time for the head of a request, and longest pause while a client sends the rest of a refused request.
    pub header_seconds: u32,
    /// Longest time for the body of a request. The service discards the rest of a refused request for as long again.
    pub body_seconds: u32,
    /// Largest job file in kilobytes.
    pub body_kilobytes: u32,
    /// Requests per minute of one user, or of one address without a token.
    pub requests_per_minute: u32,
    /// Submissions and validations per minute of one user.
    pub submissions_per_minute: u32,
    /// Entries of `input.paths` of a job, including those of its tables; each may be a glob or a folder.
    pub paths_per_job: u32,
    /// Longest time for the checks of a submission.
    pub check_seconds: u32,
    /// Longest wait for the hub to confirm that it has the job's models; 0 skips this check.
    pub hub_seconds: u32,
    /// Waiting jobs of all users.
    pub queued_jobs: u32,
    /// Waiting jobs of one user.
    pub queued_jobs_per_user: u32,
    /// Default and maximum of a submission's `max_attempts`.
    pub max_attempts: u32,
    /// Default and maximum of the hours that one attempt may take.
    pub time_limit_hours: u32,
    /// Default and maximum of a job's shards in gigabytes (10^9 bytes).
    pub output_limit_gigabytes: u32,
    /// Seconds that a worker has to stop before it is killed.
    pub cancel_seconds: u32,
    /// Starts that a job may lose because the service was stopped or killed.
    pub interruptions: u32,
    /// Size of a job's log; the oldest lines are removed.
    pub log_megabytes: u32,
    /// Megabytes (10^6 bytes) that submissions leave free on the data folder's disk, so that running jobs can still be
    /// stored.
    pub disk_reserve_megabytes: u32,
    /// Events stored per job; beyond this number only rarer events, such as changes of state, are stored.
    pub events_per_job: u32,
    /// Concurrent reports and manifests of data sets on disk, and as many for object stores. One user gets at most all
    /// but one, one store half.
    pub reports_at_once: u32,
    /// Seconds that a report may take.
    pub report_seconds: u32,
}

/// When a failed attempt is retried: after `first`, doubled each time, up to `largest`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retry {
    /// Wait before the second attempt.
    pub first_backoff_seconds: u32,
    /// Longest wait.
    pub largest_backoff_seconds: u32,
}

/// How long the service stores finished jobs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retention {
    /// Days after which a finished job is deleted with its log and events, but never its data set. Default: never.
    pub finished_days: Option<NonZeroU32>,
}

/// The default port.
pub const DEFAULT_PORT: u16 = 7373;

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)),
            data: default_data_folder(),
            auth: Auth::Auto,
            hosts: Vec::new(),
            trusted_proxies: Vec::new(),
            proxy_header: ProxyHeader::XForwardedFor,
            folder: std::env::current_dir().unwrap_or_else(|_| "/".into()),
            access: Access::default(),
            endpoint: None,
            cluster: Cluster::default(),
            capacity: Capacity::default(),
            limits: Limits::default(),
            retry: Retry::default(),
            keep: Retention::default(),
            shutdown_seconds: 10,
            allow_unconfined: false,
        }
    }
}

impl Default for Capacity {
    fn default() -> Self {
        Self {
            running_jobs: 2,
            cpu_slots: 1,
            gpus: Vec::new(),
            jobs_per_gpu: 1,
            threads_per_job: None,
            worker_gigabytes: None,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            connections_kept: 16,
            connections_per_address: 512,
            watchers: 512,
            watchers_per_user: 64,
            watchers_per_token: 32,
            header_seconds: 10,
            body_seconds: 30,
            body_kilobytes: 1024,
            requests_per_minute: 6000,
            submissions_per_minute: 600,
            paths_per_job: 10_000,
            check_seconds: 30,
            hub_seconds: 5,
            queued_jobs: 10_000,
            queued_jobs_per_user: 5_000,
            max_attempts: 3,
            time_limit_hours: 24 * 14,
            output_limit_gigabytes: 10_000,
            cancel_seconds: 5,
            interruptions: 100,
            log_megabytes: 16,
            disk_reserve_megabytes: 64,
            events_per_job: 20_000,
            reports_at_once: 4,
            report_seconds: 60,
        }
    }
}

impl Default for Retry {
    fn default() -> Self {
        Self { first_backoff_seconds: 5, largest_backoff_seconds: 600 }
    }
}

impl Retry {
    /// The wait after this many failures.
    pub fn backoff(&self, failures: u32) -> Duration {
        let [first, largest] =
            [self.first_backoff_seconds, self.largest_backoff_seconds].map(|n| Duration::from_secs(n.into()));
        Backoff { first, largest }.limit(failures)
    }
}

impl Limits {
    /// `body_kilobytes` in bytes.
    pub fn body_bytes(&self) -> usize {
        self.body_kilobytes as usize * 1000
    }

    /// Limits on concurrent live streams, which always leave connections for other requests.
    pub fn streams(&self) -> StreamLimits {
        let all = self.watchers.min(self.connections / 2);
        StreamLimits { all, per_user: self.watchers_per_user.min(all), per_token: self.watchers_per_token.min(all) }
    }

    /// `time_limit_hours` in seconds.
    pub fn max_job_seconds(&self) -> u64 {
        u64::from(self.time_limit_hours) * 3600
    }

    /// `output_limit_gigabytes` in bytes.
    pub fn max_output_bytes(&self) -> u64 {
        u64::from(self.output_limit_gigabytes) * 1_000_000_000
    }
}

impl Capacity {
    /// Threads that each job computes with.
    pub fn threads(&self) -> usize {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        match self.threads_per_job {
            Some(n) => n.get() as usize,
            None => (processors / self.cpu_slots.clamp(1, self.running_jobs.max(1)) as usize).max(1),
        }
    }
}

impl Config {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// Names the file, line and key that cannot be read.
    #[expect(clippy::disallowed_methods, reason = "once, before the service answers anybody")]
    pub fn read(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read the configuration {shown}: {e}"))?;
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        serde_yaml_ng::from_str(&text).map_err(|e| format!("{shown}: {e}"))
    }

    /// Whether requests need a token. If `hosts` is set or a proxy is trusted, requests arrive through a proxy, and
    /// loopback does not identify the client.
    pub fn needs_token(&self) -> bool {
        let is_behind_proxy = !self.hosts.is_empty() || !self.trusted_proxies.is_empty();
        self.auth == Auth::Token || !is_loopback(self.listen.ip()) || is_behind_proxy
    }

    /// The access rules of jobs: those configured, plus the service's cluster, minus the data folder.
    pub fn job_access(&self) -> Access {
        let mut access = self.access.clone();
        access.deny.push(self.data.clone());
        access.schedulers.extend(self.cluster.scheduler.clone());
        access
    }

    /// All problems of the values.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.access.check();
        problems.iter_mut().for_each(|p| p.field.insert_str(0, "access."));
        problems.extend(
            self.nonzero_values()
                .into_iter()
                .filter(|(_, got)| *got == 0)
                .map(|(field, got)| Problem::new(field, got, "too small; valid: 1 or more")),
        );
        problems.extend(self.folder_problems());
        problems.extend(self.network_problems());
        problems.extend(self.cluster_problem());
        problems
    }

    fn cluster_problem(&self) -> Option<Problem> {
        let scheduler = self.cluster.scheduler.as_deref()?;
        let wrong = if !has_cluster() {
            "this program has no cluster support; valid: a program built with `cargo build -p stillhouse --features distributed`"
        } else {
            scheduler_problem(scheduler)?
        };
        Some(Problem::new("cluster.scheduler", format!("{scheduler:?}"), wrong))
    }

    /// Values that must be at least 1.
    fn nonzero_values(&self) -> Vec<(&'static str, u32)> {
        let (capacity, limits) = (&self.capacity, &self.limits);
        let mut nonzero_values =
            vec![("capacity.running_jobs", capacity.running_jobs), ("capacity.jobs_per_gpu", capacity.jobs_per_gpu)];
        if capacity.gpus.is_empty() {
            nonzero_values.push(("capacity.cpu_slots", capacity.cpu_slots));
        }
        nonzero_values.extend([
            ("limits.connections", limits.connections),
            ("limits.connections_kept", limits.connections_kept),
            ("limits.connections_per_address", limits.connections_per_address),
            ("limits.watchers_per_user", limits.watchers_per_user),
            ("limits.watchers_per_token", limits.watchers_per_token),
            ("limits.header_seconds", limits.header_seconds),
            ("limits.body_seconds", limits.body_seconds),
            ("limits.body_kilobytes", limits.body_kilobytes),
            ("limits.requests_per_minute", limits.requests_per_minute),
            ("limits.submissions_per_minute", limits.submissions_per_minute),
            ("limits.paths_per_job", limits.paths_per_job),
            ("limits.check_seconds", limits.check_seconds),
            ("limits.queued_jobs", limits.queued_jobs),
            ("limits.queued_jobs_per_user", limits.queued_jobs_per_user),
            ("limits.max_attempts", limits.max_attempts),
            ("limits.time_limit_hours", limits.time_limit_hours),
            ("limits.output_limit_gigabytes", limits.output_limit_gigabytes),
            ("limits.interruptions", limits.interruptions),
            ("limits.log_megabytes", limits.log_megabytes),
            ("limits.events_per_job", limits.events_per_job),
            ("limits.reports_at_once", limits.reports_at_once),
            ("limits.report_seconds", limits.report_seconds),
            ("capacity.worker_gigabytes", capacity.worker_gigabytes.unwrap_or(1)),
            ("retry.largest_backoff_seconds", self.retry.largest_backoff_seconds),
        ]);
        nonzero_values
    }

    #[expect(clippy::disallowed_methods, reason = "once, before the service answers anybody")]
    fn folder_problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (field, path) in [("data", &self.data), ("folder", &self.folder)] {
            if !path.is_absolute() {
                problems.push(Problem::new(field, path.display(), "is relative; valid: an absolute path"));
            }
        }
        if self.data.is_absolute()
            && let Some(place) = self.access.entry_containing(&self.data)
        {
            // Landlock allows a folder with everything below it, so only the path check would protect the tokens
            let message = format!("is inside {place}, which jobs may access; valid: a folder outside it");
            problems.push(Problem::new("data", self.data.display(), message));
        }
        if !self.folder.is_dir() {
            problems.push(Problem::new("folder", self.folder.display(), "is not a folder; valid: an existing folder"));
        }
        problems
    }

    fn network_problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(problem) = self.endpoint.as_deref().and_then(endpoint_problem) {
            problems.push(Problem::missing("endpoint", problem));
        }
        for (i, host) in self.hosts.iter().enumerate() {
            if host.is_empty() || !host.bytes().all(|b| b.is_ascii_alphanumeric() || b".-:[]".contains(&b)) {
                problems.push(Problem::new(
                    format!("hosts[{i}]"),
                    format!("{host:?}"),
                    "is not a host name; valid: a name such as shards.example.org, without a scheme or path",
                ));
            }
        }
        for (i, proxy) in self.trusted_proxies.iter().enumerate() {
            if proxies::parse_network(proxy).is_none() {
                let message = "is neither an address nor a network; valid: such as 10.1.2.3, 10.0.0.0/8, fd00::/8";
                problems.push(Problem::new(format!("trusted_proxies[{i}]"), format!("{proxy:?}"), message));
            }
        }
        problems
    }
}

/// Whether only this machine can reach the address; includes IPv4-mapped IPv6 addresses.
pub fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

fn default_data_folder() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = variable("XDG_STATE_HOME").or_else(|| Some(std::env::home_dir()?.join(".local/state")));
    state.unwrap_or_else(std::env::temp_dir).join("stillhouse")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_or_too_small_is_reported() {
        let wrong = serde_yaml_ng::from_str::<Config>("limits: {body_megabytes: 1}").unwrap_err().to_string();
        assert!(wrong.contains("body_megabytes") && wrong.contains("body_kilobytes"), "{wrong}");
        let config: Config =
            serde_yaml_ng::from_str("{data: x, capacity: {cpu_slots: 0}, limits: {queued_jobs: 0}, hosts: ['a/b'], trusted_proxies: [10.0.0.0/8, '10.0.0.0/33', '*']}")
                .unwrap();
        let fields: Vec<String> = config.problems().into_iter().map(|p| p.field).collect();
        let expected = [
            "capacity.cpu_slots",
            "limits.queued_jobs",
            "data",
            "hosts[0]",
            "trusted_proxies[1]",
            "trusted_proxies[2]",
        ];
        assert_eq!(fields, expected);
    }

    #[test]
    fn the_example_has_every_key_with_its_default() {
        let text = include_str!("../../service.yaml");
        let example: Config = serde_yaml_ng::from_str(text).unwrap();
        let value = |config: &Config| serde_json::to_value(config).unwrap();
        let (mut example, mut default) = (value(&example), value(&Config::default()));
        for path in ["data", "folder", "access"] {
            example[path].take();
            default[path].take();
        }
        assert_eq!(example, default);
        let written: serde_json::Value = serde_yaml_ng::from_str(text).unwrap();
        let keys = |v: &serde_json::Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        for section in ["", "/access", "/capacity", "/retry", "/limits", "/keep"] {
            let all = value(&Config::default());
            let (mut has, mut must) = (keys(written.pointer(section).unwrap()), keys(all.pointer(section).unwrap()));
            has.sort();
            must.sort();
            assert_eq!(has, must, "{section}");
        }
    }

    #[test]
    fn other_addresses_than_loopback_need_tokens() {
        let listen = |listen: &str| Config { listen: listen.parse().unwrap(), ..Config::default() };
        for (address, needs) in [
            ("127.0.0.1:1", false),
            ("127.9.0.1:1", false),
            ("[::1]:1", false),
            ("[::ffff:127.0.0.1]:1", false),
            ("0.0.0.0:1", true),
            ("[::]:1", true),
            ("10.0.0.1:1", true),
        ] {
            assert_eq!(listen(address).needs_token(), needs, "{address}");
        }
        assert!(Config { auth: Auth::Token, ..Config::default() }.needs_token());
        // a proxy on this machine forwards for any client
        assert!(Config { hosts: vec!["shards.example.org".into()], ..Config::default() }.needs_token());
        assert!(Config { trusted_proxies: vec!["127.0.0.1".into()], ..Config::default() }.needs_token());
    }

    #[test]
    fn streams_never_take_all_connections() {
        let limits = Limits { connections: 100, watchers: 5000, watchers_per_user: 5000, ..Limits::default() };
        let streams = limits.streams();
        assert_eq!((streams.all, streams.per_user, streams.per_token), (50, 50, 32));
        let all = Limits::default();
        assert!(all.streams().per_user * 4 < all.connections && all.streams().per_token < all.streams().per_user);
    }

    #[test]
    fn waits_double_up_to_the_largest() {
        let retry = Retry { first_backoff_seconds: 5, largest_backoff_seconds: 60 };
        let waits: Vec<u64> = [1, 2, 3, 4, 5, 40].map(|n| retry.backoff(n).as_secs()).to_vec();
        assert_eq!(waits, [5, 10, 20, 40, 60, 60]);
    }
}
