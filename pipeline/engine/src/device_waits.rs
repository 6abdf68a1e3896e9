//! Measures which stages idle devices wait for, by sampling the stages that are working.

use std::collections::BTreeMap;
use std::time::Instant;

use stillhouse_base::events::Progress;

/// Seconds that devices waited, by the stage that was working meanwhile.
#[derive(Debug, Default)]
pub(crate) struct DeviceWaits {
    last: Option<Instant>,
    seconds: BTreeMap<String, f64>,
}

impl DeviceWaits {
    /// Splits the time since the previous sample evenly among the working stages, once per idle device.
    pub fn sample(&mut self, now: Instant, idle_devices: usize, working_stages: &[&str]) {
        let Some(last) = self.last.replace(now) else { return };
        let seconds = now.saturating_duration_since(last).as_secs_f64() * idle_devices as f64;
        for stage in working_stages.iter().filter(|_| idle_devices > 0) {
            *self.seconds.entry((*stage).to_owned()).or_default() += seconds / working_stages.len() as f64;
        }
    }

    pub fn add_to(&self, progress: &mut Progress) {
        for stage in &mut progress.stages {
            stage.awaited_seconds += self.seconds.get(&stage.name).copied().unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use stillhouse_base::events::StageProgress;

    #[test]
    fn time_without_a_batch_is_put_down_to_the_stages_that_are_at_work() {
        let (began, mut waits) = (Instant::now(), DeviceWaits::default());
        let at = |seconds| began + Duration::from_secs(seconds);
        let samples: [(u64, usize, &[&str]); 6] = [
            // The first sample has no predecessor, so its time is not attributed.
            (10, 1, &["read"]),
            (12, 1, &["tokenize"]),
            (15, 2, &["tokenize", "write"]),
            // no idle device: nothing is attributed
            (20, 0, &["read"]),
            (21, 1, &[]),
            (22, 1, &["write"]),
        ];
        for (seconds, idle, working_stages) in samples {
            waits.sample(at(seconds), idle, working_stages);
        }
        let stage = |name: &str| StageProgress { name: name.into(), ..StageProgress::default() };
        let stages = ["read", "tokenize", "extract", "write"].map(stage).to_vec();
        let mut progress = Progress { stages, ..Progress::default() };
        waits.add_to(&mut progress);
        let seconds: Vec<f64> = progress.stages.iter().map(|stage| stage.awaited_seconds).collect();
        assert_eq!(seconds, [0.0, 5.0, 0.0, 4.0]);
        assert_eq!(progress.most_awaited(), Some("tokenize"));
    }
}
