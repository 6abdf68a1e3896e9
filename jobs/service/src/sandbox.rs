//! Confines a worker with Landlock: the kernel then denies access to every file that its job may not use.
//!
//! The checks of [`stillhouse_pipeline::access`] give the user a reason. This one also holds if a link changes after
//! the check, or if a library opens an unexpected file.
//!
//! The worker may read:
//!
//! - the folders of `access.read`;
//! - system libraries and programs, name resolution, certificates;
//! - CUDA's libraries if there is a GPU (for a conda environment all of `lib`);
//! - credentials of stores if the job uses one, the token of a cluster if the job runs on one.
//!
//! It may write:
//!
//! - the folders of `access.write`, and the scratch folder;
//! - the caches of the hub and of staged rows;
//! - devices of GPUs.

#![allow(clippy::disallowed_methods, reason = "in a worker, before its work: it has no runtime yet that could wait")]

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use stillhouse_pipeline::access::Access;

/// The newest rules that this program knows; an older kernel enforces those that it supports.
const NEWEST_ABI: ABI = ABI::V6;

/// System files that programs need.
const SYSTEM_PATHS: [&str; 23] = [
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/localtime",
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/run/systemd/resolve",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/driver/nvidia",
    "/sys/devices",
    "/sys/fs/cgroup",
    "/dev/urandom",
    "/dev/null",
];

/// Variables with paths of credentials of stores, or of files that lead to them. Jobs use the service's own
/// credentials.
const CREDENTIAL_VARIABLES: [&str; 7] = [
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_FEDERATED_TOKEN_FILE",
    "SSL_CERT_FILE",
];

/// Variables with paths of a cluster's files: its token, and the CA certificates of its scheduler.
const CLUSTER_VARIABLES: [&str; 2] = ["STILLHOUSE_CLUSTER_TOKEN_FILE", "STILLHOUSE_CLUSTER_CA_FILE"];

/// Services beyond local files that a worker uses.
#[derive(Debug, Clone, Copy)]
pub struct Uses {
    /// Whether it uses object stores.
    pub stores: bool,
    /// Whether it uses a cluster.
    pub cluster: bool,
}

/// How far the kernel enforces the confinement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confined {
    /// All rules.
    Fully,
    /// The rules that this kernel knows, at least those on files.
    Partly,
    /// None.
    Not,
}

/// Confines this process and all its children. Call it while the process has one thread. The worker can read files with
/// credentials only if the job uses the stores or the cluster that they belong to.
///
/// # Errors
/// When the kernel refuses a rule.
pub fn confine(access: &Access, scratch: &Path, uses: Uses) -> Result<Confined, String> {
    let confine_error = |e: &dyn std::fmt::Display| format!("cannot confine the worker: {e}");
    let all = AccessFs::from_all(NEWEST_ABI);
    let read = AccessFs::from_read(NEWEST_ABI);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)
        // the worker must not signal the service, which runs as the same user
        .and_then(|rules| rules.scope(Scope::from_all(NEWEST_ABI)))
        .and_then(Ruleset::create)
        .map_err(|e| confine_error(&e))?;
    let hub = std::env::var_os("HF_TOKEN_PATH").map(PathBuf::from).filter(|_| access.uses_hub());
    let cluster_files = CLUSTER_VARIABLES.into_iter().filter_map(path_variable).filter(|_| uses.cluster);
    let store_credentials = credentials().filter(|_| uses.stores);
    let system = SYSTEM_PATHS.iter().map(PathBuf::from);
    let gpus = gpu_devices();
    // find the libraries now; the rules may block the search later
    let libraries = if gpus.is_empty() { &[] } else { stillhouse_teacher::library_folders() };
    let readable = system.chain(hub).chain(store_credentials).chain(cluster_files).chain(local_paths(&access.read));
    let readable = readable.chain(libraries.iter().cloned());
    for cache in caches() {
        // a cache folder that cannot be created causes an error where it is used
        let _ = std::fs::create_dir_all(cache);
    }
    let writable = local_paths(&access.write).chain([scratch.to_path_buf()]).chain(caches()).chain(gpus);
    for (paths, rights) in [(readable.collect::<Vec<_>>(), read), (writable.collect(), all)] {
        for path in paths {
            // a path that does not exist needs no rule
            let Ok(opened) = PathFd::new(&path) else { continue };
            let rights = if path.is_dir() { rights } else { rights & AccessFs::from_file(NEWEST_ABI) };
            rules = rules.add_rule(PathBeneath::new(opened, rights)).map_err(|e| confine_error(&e))?;
        }
    }
    let status = rules.restrict_self().map_err(|e| confine_error(&e))?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => Confined::Fully,
        RulesetStatus::PartiallyEnforced => Confined::Partly,
        RulesetStatus::NotEnforced => Confined::Not,
    })
}

/// Whether this kernel supports Landlock.
pub fn is_supported() -> bool {
    let rules =
        Ruleset::default().set_compatibility(CompatLevel::HardRequirement).handle_access(AccessFs::from_all(ABI::V1));
    rules.and_then(Ruleset::create).is_ok()
}

/// The local paths among paths and URLs.
fn local_paths(named: &[String]) -> impl Iterator<Item = PathBuf> {
    let path = |n: &String| match n.strip_prefix("file://").unwrap_or(n) {
        "*" => Some("/".into()),
        n => (!n.contains("://")).then(|| n.into()),
    };
    named.iter().filter_map(path)
}

fn path_variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}

fn home() -> PathBuf {
    std::env::home_dir().unwrap_or_else(|| "/nonexistent".into())
}

fn credentials() -> impl Iterator<Item = PathBuf> {
    let folders = [".aws", ".config/gcloud", ".azure"].map(|folder| home().join(folder));
    CREDENTIAL_VARIABLES.into_iter().filter_map(path_variable).chain(folders)
}

fn caches() -> impl Iterator<Item = PathBuf> {
    let cache = path_variable("XDG_CACHE_HOME").unwrap_or_else(|| home().join(".cache"));
    let hub = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"].into_iter().filter_map(path_variable);
    hub.chain(["huggingface", "stillhouse"].map(|folder| cache.join(folder)))
}

/// The GPU devices, and files that the driver needs; the driver defines their names.
fn gpu_devices() -> Vec<PathBuf> {
    let named =
        |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("nvidia").then(|| entry.path());
    let devices = std::fs::read_dir("/dev").into_iter().flatten().flatten().filter_map(named);
    let devices: Vec<PathBuf> = devices.collect();
    // the driver uses both and names its threads in `/proc/self/task`
    let beside: &[&str] = if devices.is_empty() { &[] } else { &["/dev/shm", "/proc/self/task"] };
    devices.into_iter().chain(beside.iter().map(PathBuf::from)).collect()
}
