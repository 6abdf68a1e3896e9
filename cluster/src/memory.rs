//! The memory that a process may use: that of its machine, or the limit of its control group (a container, a Slurm job)
//! if lower.

use std::fs;
use std::path::{Path, PathBuf};

/// The share of the memory for jobs; the rest is for the program, the system and allocator overhead.
const JOB_SHARE: f64 = 0.9;

/// Default memory limit for jobs in bytes; `None` if the system does not report its memory.
pub fn default_limit() -> Option<u64> {
    let total = total(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let lowest = limits(&groups, Path::new("/sys/fs/cgroup")).into_iter().fold(total, u64::min);
    Some((lowest as f64 * JOB_SHARE) as u64)
}

fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// The limits of the groups in `/proc/self/cgroup` and of their ancestors, for cgroup v1 and v2.
fn limits(groups: &str, root: &Path) -> Vec<u64> {
    let mut files: Vec<PathBuf> = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let (folder, name) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            all if all.split(',').any(|one| one == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        let relative = Path::new(group.trim_start_matches('/'));
        files.extend(relative.ancestors().map(|group| folder.join(group).join(name)));
    }
    // "max" does not parse: it means no limit
    files.iter().filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_and_every_group_around_the_process_bound_it() {
        assert_eq!(total("MemFree: 5 kB\nMemTotal:       24737456 kB\n"), Some(24_737_456 * 1024));
        assert_eq!(total("MemTotal: much"), None);
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("memory.max", "max\n");
        write("slurm/memory.max", "8000\n");
        write("slurm/job_1/memory.max", "9000\n");
        write("other/memory.max", "1\n");
        write("memory/box/memory.limit_in_bytes", "700\n");
        let mut found = limits("0::/slurm/job_1\n", root);
        found.sort_unstable();
        assert_eq!(found, [8000, 9000]);
        assert_eq!(limits("4:cpu,memory:/box\n3:pids:/box\n", root), [700]);
        assert_eq!(limits("", root), [] as [u64; 0]);
        assert!(default_limit().is_some_and(|bytes| bytes > 100_000_000));
    }
}
