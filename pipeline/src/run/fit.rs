//! Checks whether this process fits a run: the device of its teachers, and its view of the input.

use stillhouse_schemas::spec::JobSpec;

use super::worker::WorkerConfig;
use crate::driver::TaskSpec;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::identity::JobHash;
use crate::job::chain;
use crate::output::PlanRecord;

/// Maximum number of differing files that a refusal lists.
pub(super) const MAX_LINES: usize = 8;

/// Why this process cannot work for a job that another one could: its teachers' device is of another kind than the
/// run's, or is missing.
pub(super) async fn device_mismatch(
    spec: &JobSpec,
    task: &TaskSpec,
    config: &WorkerConfig,
) -> Result<Option<PipelineError>> {
    let (Some(run_kind), Some(extract)) = (task.device.clone(), &spec.extract) else { return Ok(None) };
    let named = config.device.clone().unwrap_or_else(|| extract.teacher.device.clone());
    let look = move || {
        let devices = match stillhouse_teacher::parse_devices(&named) {
            Ok(devices) => devices,
            Err(e) => return Some(chain(&e)),
        };
        let kind = if devices.iter().all(|device| device.is_cpu()) { "cpu" } else { "cuda" };
        if kind != run_kind {
            return Some(format!("teachers compute on {named} here ({kind}), the run's on {run_kind}"));
        }
        devices.iter().find_map(|device| device.open().err()).map(|e| chain(&e))
    };
    let why = tokio::task::spawn_blocking(look).await.map_err(PipelineError::worker_stopped(ErrorKind::Model))?;
    let error = |why| PipelineError::new(ErrorKind::Model, format!("extract.teacher.device: {why}")).machine_specific();
    Ok(why.map(error))
}

/// Returns an error if this machine sees another file than the run planned with: one that was rewritten since, or a
/// different local copy.
pub(super) fn check_same_input(plan: &PlanRecord, hash: &JobHash) -> Result<()> {
    let pairs = plan.files.iter().zip(&hash.files);
    let others: Vec<_> = pairs.filter(|(planned, here)| !planned.state.matches_on_other_machine(&here.state)).collect();
    if others.is_empty() {
        return Ok(());
    }
    let mut message = "the input is another one as this machine sees it".to_owned();
    for (planned, here) in others.iter().take(MAX_LINES) {
        message += &format!("\n  {}: {}; the run has {}", here.path, here.state, planned.state);
    }
    if let Some(more) = others.len().checked_sub(MAX_LINES).filter(|more| *more > 0) {
        message += &format!("\n  and {more} more");
    }
    message += "\nvalid: files that all machines share, or copies that have their times (cp -p, rsync -t); where they were changed, the same \
                command again";
    Err(PipelineError::new(ErrorKind::Input, message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::access::Access;
    use crate::identity::PlannedFile;
    use crate::run::memory_budget::MemoryBudget;
    use stillhouse_base::file_state::FileState;
    use stillhouse_operators::registry::job_format;

    #[tokio::test]
    async fn a_device_of_another_kind_than_the_runs_is_for_other_executors() {
        let text = json!({
            "version": 1, "name": "x", "input": {"paths": ["a.jsonl"], "format": "jsonl"}, "pack": {"length": 8},
            "extract": {"teacher": {"path": "teacher", "device": "cpu"}}, "output": {"path": "out"},
        });
        let spec = job_format().parse_json(&text.to_string()).spec.unwrap();
        let looked = async |device: Option<&str>, of_run: Option<&str>| {
            let ticket = serde_json::from_value(json!({"job_hash": "abc"})).unwrap();
            let device_of_run = of_run.map(str::to_owned);
            let (spec_text, base) = (text.to_string(), "/".into());
            let task = TaskSpec { spec: spec_text, base, ticket, teacher: None, device: device_of_run };
            let device = device.map(str::to_owned);
            let config = WorkerConfig {
                name: "here".into(),
                access: Access::everything(),
                device,
                slots: 1,
                memory_budget: MemoryBudget::new(1),
            };
            device_mismatch(&spec, &task, &config).await.unwrap().map(|e| (e.machine_specific, e.to_string()))
        };
        // without a teacher the device does not matter; without a device of its own, the executor uses the job's
        assert_eq!(looked(Some("cuda:7"), None).await, None);
        assert_eq!((looked(None, Some("cpu")).await, looked(Some("cpu"), Some("cpu")).await), (None, None));
        let told = "extract.teacher.device: teachers compute on cpu here (cpu), the run's on cuda";
        assert_eq!(looked(None, Some("cuda")).await, Some((true, told.to_owned())));
        let (machine_specific, told) = looked(Some("cuda:7"), Some("cpu")).await.unwrap();
        assert!(
            machine_specific && told.ends_with("teachers compute on cuda:7 here (cuda), the run's on cpu"),
            "{told}"
        );
        let (machine_specific, told) = looked(Some("cuda:7"), Some("cuda")).await.unwrap();
        assert!(machine_specific && told.contains("cuda:7"), "{told}");
    }

    #[test]
    fn an_input_of_other_times_or_sizes_is_named_and_one_of_other_inodes_is_the_same() {
        let file = |bytes, modified_ns, tag: &str| PlannedFile {
            path: "/in/a.jsonl".into(),
            name: "a.jsonl".into(),
            state: FileState { bytes, modified_ns, e_tag: Some(tag.into()), version: None },
        };
        let differs = |a: &PlannedFile, b: &PlannedFile| !a.state.matches_on_other_machine(&b.state);
        let disk = file(10, Some(5), "inode 1");
        assert!(!differs(&disk, &file(10, Some(5), "inode 2")));
        assert!(differs(&disk, &file(10, Some(6), "inode 1")) && differs(&disk, &file(11, Some(5), "inode 1")));
        // an object has only its ETag
        let object = file(10, None, "a");
        assert!(differs(&object, &file(10, None, "b")) && !differs(&object, &file(10, None, "a")));
    }
}
