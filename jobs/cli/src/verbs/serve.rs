//! `stillhouse serve`: runs the batch-job service.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stillhouse_schemas::problems::{Problem, Problems};

use crate::failure::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::table::Table;
use stillhouse_pipeline::units;
use stillhouse_service::config::{Config, is_loopback};
use stillhouse_service::sandbox;

const EXAMPLES: &str = "\
Examples:
  stillhouse serve                                   on this machine; jobs may touch the folder it is started in
  stillhouse serve --allow /corpora --allow s3://shards/team
  stillhouse serve --allow s3://corpora --allow s3://shards --endpoint http://minio:9000
  stillhouse serve --config service.yaml             every limit, see docs/SERVICE.md
  stillhouse serve --config service.yaml --check     look at the configuration, start nothing
  stillhouse token create --user ada --scope read --scope submit";

/// Serve a queue of jobs: REST API, web page, metrics
///
/// The data folder keeps the jobs, so they survive crashes: after a restart, running jobs resume. Without a
/// configuration file the service listens on loopback, needs no tokens there, and lets jobs read and write below
/// the current folder.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Configuration file (YAML)
    #[arg(long, value_name = "FILE", env = "STILLHOUSE_CONFIG")]
    config: Option<PathBuf>,
    /// Address and port to listen on [default: 127.0.0.1:7373]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Folder of the queue, the tokens and the logs [default: ~/.local/state/stillhouse]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// A folder or store (s3://bucket/prefix) that jobs may read and write, or a web server or data set of the hub
    /// (https://host, hf://datasets/org/name) that they may read; can be repeated
    #[arg(long, value_name = "PLACE")]
    allow: Vec<String>,
    /// URL of an S3-compatible service that jobs may name; the first is the default of jobs that name none; can be repeated
    #[arg(long, value_name = "URL")]
    endpoint: Vec<String>,
    /// Check the configuration and describe it; exit code 2 if something is wrong
    #[arg(long)]
    pub check: bool,
    /// With --check: one JSON object
    #[arg(long, requires = "check")]
    pub json: bool,
    /// Log lines as JSON or as text [default: text on a terminal]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}

/// Format of log lines
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line
    Json,
    /// For people
    Text,
    /// Level and text alone, for a log that adds the time itself
    #[value(skip)]
    Bare,
}

/// Combines the configuration file with the command-line options.
pub fn configuration(
    file: Option<&Path>,
    data: Option<&Path>,
    listen: Option<SocketAddr>,
    allow: &[String],
    endpoints: &[String],
) -> Result<Config, Failure> {
    let mut config = match file {
        Some(file) => Config::read(file).map_err(Failure::Usage)?,
        None => Config::default(),
    };
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    if let Some(data) = data {
        config.data = absolute(data);
    }
    if let Some(listen) = listen {
        config.listen = listen;
    }
    let place = |named: &String| {
        if named.contains("://") { named.clone() } else { absolute(Path::new(named)).display().to_string() }
    };
    let mut places: Vec<String> = allow.iter().map(place).collect();
    if file.is_none() {
        if places.is_empty() {
            places.push(config.folder.display().to_string());
        }
        // models of the hub are public, and only their own loader reads them
        config.access.hub.push("*".into());
    }
    places.into_iter().for_each(|place| config.access.allow(place));
    config.access.endpoints.extend(endpoints.iter().cloned());
    config.endpoint = config.endpoint.or_else(|| endpoints.first().cloned());
    Ok(config)
}

/// Runs the service, or checks its configuration.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let config = configuration(args.config.as_deref(), args.data.as_deref(), args.listen, &args.allow, &args.endpoint)?;
    let mut problems = config.problems();
    if !sandbox::is_supported() && !config.allow_unconfined {
        let message = "this kernel cannot confine jobs (it needs Landlock, Linux 5.13); valid: true, which runs jobs without confinement";
        problems.push(Problem::new("allow_unconfined", false, message));
    }
    if args.check {
        return check(&config, Problems(problems), args.json, printer);
    }
    if !problems.is_empty() {
        let about = args.config.as_ref().map(|f| f.display().to_string()).unwrap_or_else(|| "the options".into());
        return Err(Failure::Configuration(about, Problems(problems)));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::System(format!("cannot start threads: {e}")))?;
    let served = runtime.block_on(stillhouse_service::serve(config, |config| announce(config, printer)));
    runtime.shutdown_background();
    served.map_err(Failure::System)
}

fn announce(config: &Config, printer: &Printer) {
    tracing::info!(listen = %config.listen, data = %config.data.display(), "serving");
    if config.needs_token() && !is_loopback(config.listen.ip()) {
        tracing::warn!("tokens travel in the clear: put a proxy with TLS in front of this address");
    }
    let mut page = Page::new();
    let open =
        if config.needs_token() { "with a token (stillhouse token create)" } else { "no token needed on this machine" };
    page.line(
        Line::new().with(Tone::Strong, format!("http://{}", config.listen)).with(Tone::Plain, format!("  {open}")),
    );
    printer.note(&page);
}

fn check(config: &Config, problems: Problems, json: bool, printer: &Printer) -> Result<(), Failure> {
    if json {
        printer.json(
            &serde_json::json!({"valid": problems.0.is_empty(), "problems": problems.0, "configuration": config}),
        )?;
        return if problems.0.is_empty() { Ok(()) } else { Err(Failure::WrongConfiguration) };
    }
    if !problems.0.is_empty() {
        return Err(Failure::Configuration("the configuration".into(), problems));
    }
    let mut table = Table::new("ll").indent(0);
    let mut fact = |name: &str, value: String| table.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    let listed = |places: &[String]| if places.is_empty() { "nothing".to_owned() } else { places.join(", ") };
    fact("listens on", config.listen.to_string());
    fact("tokens", if config.needs_token() { "needed".into() } else { "not needed: loopback".into() });
    if !config.trusted_proxies.is_empty() {
        fact("trusted proxies", config.trusted_proxies.join(", "));
    }
    fact("data", config.data.display().to_string());
    fact("jobs may read", listed(&config.access.read));
    fact("jobs may write", listed(&config.access.write));
    fact("hub", listed(&config.access.hub));
    fact("private networks", if config.access.private_networks { "allowed" } else { "refused" }.into());
    fact("endpoints in job files", listed(&config.access.endpoints));
    if let Some(endpoint) = &config.endpoint {
        fact("endpoint of other jobs", endpoint.clone());
    }
    if let Some(scheduler) = &config.cluster.scheduler {
        fact("jobs run on the cluster", scheduler.clone());
    }
    let capacity = &config.capacity;
    let gpus: Vec<String> = capacity.gpus.iter().map(u32::to_string).collect();
    fact(
        "runs at once",
        format!("{}, {} on the processor", units::counted(capacity.running_jobs.into(), "job"), capacity.cpu_slots),
    );
    fact(
        "GPUs",
        if gpus.is_empty() {
            "none".into()
        } else {
            format!("{}, {} each", gpus.join(", "), units::counted(capacity.jobs_per_gpu.into(), "job"))
        },
    );
    fact(
        "confined by",
        if sandbox::is_supported() {
            "the kernel (Landlock)".into()
        } else {
            "nothing: this kernel has no Landlock".to_owned()
        },
    );
    let mut page = Page::new();
    page.facts(table);
    printer.page(&page)?;
    Ok(())
}
