//! `stillhouse executor`: builds splits that a scheduler assigns.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use stillhouse_cluster::scheduler_client::SchedulerAddress;
use stillhouse_cluster::{executor, memory, token::Token};
use stillhouse_pipeline::access::Access;
use stillhouse_pipeline::job;
use stillhouse_pipeline::run::memory_budget::MemoryBudget;
use stillhouse_pipeline::run::worker::WorkerConfig;
use stillhouse_schemas::checks::scheduler_problem;
use stillhouse_schemas::problems::Problems;

use crate::failure::Failure;

use crate::page::{Line, Page};
use crate::printer::Printer;
use crate::verbs::Threads;

const EXAMPLES: &str = "\
Examples:
  stillhouse executor                                      as many splits at once as there are processors
  stillhouse executor --scheduler https://head.cluster:50050 --device cuda:1 --slots 2
  stillhouse executor --allow s3://corpora --allow s3://shards";

/// Make splits for a scheduler: one executor per machine or device
///
/// The executor asks the scheduler for work and listens on no port. It prepares a job once, loads its teacher once, and writes shards
/// directly to the job's output with the credentials of its own environment. SIGTERM or Ctrl-C ends it; other executors make its
/// unfinished splits.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Address of the scheduler; https://HOST:PORT with TLS
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:50050")]
    scheduler: String,
    /// Splits in progress [default: one per thread; with --device 2]
    #[arg(long, value_name = "N")]
    slots: Option<NonZeroUsize>,
    /// Memory that jobs may use: their teachers on the CPU and the splits in progress. A job that needs more goes to other executors
    /// [default: nine tenths of the machine's memory, or of its control group's]
    #[arg(long, value_name = "N")]
    memory_megabytes: Option<NonZeroU64>,
    /// Device of the teachers, in place of the device in the job: cpu, cuda:N
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Name of the executor in progress and errors [default: machine and process]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A folder or store (s3://bucket/prefix) that jobs may read and write, or a web server or data set of the hub
    /// (https://host, hf://datasets/org/name) that they may read; they may access nothing else; can be repeated
    #[arg(long, value_name = "PLACE")]
    allow: Vec<String>,
    /// File with the `access` section of a service's configuration (YAML): what jobs may access
    #[arg(long, value_name = "FILE")]
    access: Option<PathBuf>,
    /// Seconds to wait for a scheduler that has not started yet
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
    #[command(flatten)]
    threads: Threads,
    /// File with the cluster's token [default: STILLHOUSE_CLUSTER_TOKEN_FILE, or the token in STILLHOUSE_CLUSTER_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// Default slots with a device. The device stays busy while one split is written and the next begins.
const SLOTS_PER_DEVICE: usize = 2;

impl Args {
    /// What jobs may access; everything if no option restricts it.
    fn allowed(&self) -> Result<Access, Failure> {
        if self.access.is_none() && self.allow.is_empty() {
            return Ok(Access::everything());
        }
        let mut access = match &self.access {
            Some(file) => {
                let wrong = |e: &dyn std::fmt::Display| Failure::Usage(format!("--access {}: {e}", file.display()));
                let text = std::fs::read_to_string(file).map_err(|e| wrong(&e))?;
                serde_yaml_ng::from_str::<Access>(&text).map_err(|e| wrong(&e))?
            }
            None => Access::default(),
        };
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        for named in &self.allow {
            let place =
                if named.contains("://") { named.clone() } else { absolute(Path::new(named)).display().to_string() };
            access.allow(place);
        }
        match access.check() {
            problems if problems.is_empty() => Ok(access),
            problems => Err(Failure::Usage(format!("what jobs may touch: {}", Problems(problems)))),
        }
    }
}

/// Runs the executor until it is stopped.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    stillhouse_cluster::log_bridge::install();
    let token = Token::load(args.token_file.as_deref())?;
    if let Some(wrong) = scheduler_problem(&args.scheduler) {
        return Err(Failure::Usage(format!("--scheduler: got {:?}; {wrong}", args.scheduler)));
    }
    let scheduler = SchedulerAddress::parse(&args.scheduler)?;
    let name = args.name.clone().unwrap_or_else(executor::default_name);
    let runtime = args.threads.requests_runtime()?;
    let usual = if args.device.is_some() { SLOTS_PER_DEVICE } else { rayon::current_num_threads() };
    let slots = args.slots.map_or(usual, NonZeroUsize::get);
    let budget = match args.memory_megabytes {
        Some(megabytes) => megabytes.get().saturating_mul(1_000_000),
        None => memory::default_limit().unwrap_or(u64::MAX),
    };
    if let Some(device) = &args.device {
        let wrong = |e: &dyn std::error::Error| Failure::Usage(format!("--device {device}: {}", job::chain(e)));
        for device in stillhouse_teacher::parse_devices(device).map_err(|e| wrong(&e))? {
            device.open().map_err(|e| wrong(&e))?;
        }
    }
    let worker = WorkerConfig {
        name,
        access: args.allowed()?,
        device: args.device.clone(),
        slots,
        memory_budget: MemoryBudget::new(budget),
    };
    let scheduler_timeout = Duration::from_secs(args.wait);
    let options = executor::Options { scheduler, scheduler_timeout, worker, token };
    let ready = |name: &str| {
        let mut page = Page::new();
        page.line(Line::plain(format!("executor {name} asks {} for splits, {slots} at once", args.scheduler)));
        printer.note(&page);
    };
    let ended = runtime.block_on(executor::run(options, ready));
    runtime.shutdown_background();
    ended.map_err(Failure::from)
}
