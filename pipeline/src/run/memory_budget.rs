//! The memory budget of an executor, shared by its jobs. Reserves the memory of a job before anything is loaded, so
//! that the kernel never has to kill the process.
//!
//! ```text
//!   job = fixed part (tokenizer, plans) + teachers on the CPU (weights, a pass, logits) + row groups of the concurrent splits
//! ```
//!
//! `engine.memory_megabytes` separately limits what operators hold within a split.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use stillhouse_schemas::spec::Dtype;
use stillhouse_teacher::{host_bytes, parse_devices};

use super::splits::ROW_GROUPS_PER_SPLIT;
use crate::engine::teacher::precision;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::job::{Prepared, chain};

const MEGABYTE: u64 = 1_000_000;
/// Fixed memory of a job besides its teacher and splits: a tokenizer of 128,256 entries, plans, request buffers.
/// Measured.
const JOB_BYTES: u64 = 250 * MEGABYTE;

/// The memory budget of this process's jobs.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: u64,
    reserved: Mutex<u64>,
}

/// A reservation of memory, released on drop.
#[derive(Debug)]
pub(super) struct Reservation {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *self.budget.reserved.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
}

impl MemoryBudget {
    /// Creates a budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, reserved: Mutex::default() })
    }

    pub(super) fn reserve(self: &Arc<Self>, needs: MemoryNeeds) -> Result<Reservation> {
        let bytes = needs.total();
        let mut taken = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if *taken + bytes > self.limit {
            let others = match *taken {
                0 => String::new(),
                taken => format!(", of which other jobs use {}", megabytes(taken)),
            };
            let message = format!(
                "the job takes {} of memory ({needs}), this executor has {}{others}; valid: --memory-megabytes of a machine that has more, \
                 fewer --slots, a smaller extract.teacher.batch_tokens or output.row_group_megabytes",
                megabytes(bytes),
                megabytes(self.limit)
            );
            return Err(PipelineError::new(ErrorKind::Model, message).machine_specific());
        }
        *taken += bytes;
        Ok(Reservation { budget: Arc::clone(self), bytes })
    }
}

/// Memory that a job needs, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MemoryNeeds {
    weights: u64,
    pass: u64,
    logits: u64,
    splits: u64,
}

impl MemoryNeeds {
    /// Needs of a job with `concurrent_splits` concurrent splits.
    pub fn for_job(prepared: &Prepared, dtype: Option<Dtype>, concurrent_splits: usize) -> Result<Self> {
        let row_groups = u64::from(ROW_GROUPS_PER_SPLIT) * u64::from(prepared.spec.output.row_group_megabytes);
        let needs = Self { splits: concurrent_splits as u64 * row_groups * MEGABYTE, ..Self::default() };
        let (Some(found), Some(extract)) = (&prepared.teacher, &prepared.spec.extract) else { return Ok(needs) };
        let failed = |e| PipelineError::new(ErrorKind::Model, format!("teacher: {}", chain(&e)));
        // a teacher on a GPU checks the GPU's memory when it is loaded; a missing GPU is reported then
        let teachers =
            parse_devices(&extract.teacher.device).map_err(failed)?.iter().filter(|d| d.is_cpu()).count() as u64;
        if teachers == 0 {
            return Ok(needs);
        }
        let (spec, dtype) = (&extract.teacher, dtype.unwrap_or(extract.teacher.dtype));
        let bytes = host_bytes(
            &found.path,
            precision(dtype).unwrap_or_default(),
            spec.batch_tokens as usize,
            &spec.ignore_tensors,
        );
        let bytes = bytes.map_err(failed)?;
        Ok(Self {
            weights: teachers * bytes.weights,
            pass: teachers * bytes.pass,
            logits: teachers * bytes.logits,
            ..needs
        })
    }

    fn total(self) -> u64 {
        JOB_BYTES + self.weights + self.pass + self.logits + self.splits
    }
}

impl fmt::Display for MemoryNeeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { weights, pass, logits, splits } = *self;
        write!(f, "itself {}", megabytes(JOB_BYTES))?;
        for (what, bytes) in [("weights", weights), ("a pass", pass), ("logits", logits), ("splits", splits)] {
            if bytes > 0 {
                write!(f, ", {what} {}", megabytes(bytes))?;
            }
        }
        Ok(())
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{} MB", bytes.div_ceil(MEGABYTE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_share_the_budget_and_release_it() {
        let budget = MemoryBudget::new(JOB_BYTES * 2 + 700 * MEGABYTE);
        let needs = |splits| MemoryNeeds { splits: splits * MEGABYTE, ..MemoryNeeds::default() };
        let first = budget.reserve(needs(500)).unwrap();
        let refused = budget.reserve(needs(300)).unwrap_err();
        assert!(refused.machine_specific);
        assert_eq!(
            refused.to_string(),
            "the job takes 550 MB of memory (itself 250 MB, splits 300 MB), this executor has 1200 MB, of which other jobs use 750 MB; \
             valid: --memory-megabytes of a machine that has more, fewer --slots, a smaller extract.teacher.batch_tokens or \
             output.row_group_megabytes"
        );
        drop(first);
        drop(budget.reserve(needs(300)).unwrap());
        assert_eq!(*budget.reserved.lock().unwrap(), 0);
    }
}
