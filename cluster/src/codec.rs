//! Ballista's plan codec, extended by [`JobExec`].

use std::sync::Arc;

use ballista_core::serde::BallistaPhysicalExtensionCodec;
use datafusion::common::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};
use stillhouse_pipeline::error::{ErrorKind, PipelineError};

use crate::executor_jobs::ExecutorJobs;
use crate::failure;
use crate::node::{Job, JobExec};
use crate::sealed_spec;
use crate::token::Token;

/// The codec of a driver, a scheduler or an executor; only an executor's has jobs.
#[derive(Debug)]
pub struct Codec {
    ballista: BallistaPhysicalExtensionCodec,
    token: Token,
    executor_jobs: Option<Arc<ExecutorJobs>>,
}

impl Codec {
    /// Creates the codec of a process that owns this token.
    pub fn new(token: Token, executor_jobs: Option<Arc<ExecutorJobs>>) -> Self {
        Self { ballista: BallistaPhysicalExtensionCodec::default(), token, executor_jobs }
    }
}

fn usage_error(why: String) -> DataFusionError {
    failure::to_task_error(&PipelineError::new(ErrorKind::Usage, why))
}

impl PhysicalExtensionCodec for Codec {
    fn try_decode(
        &self,
        bytes: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        context: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        if !sealed_spec::is_sealed_spec(bytes) {
            return self.ballista.try_decode(bytes, inputs, context, converter);
        }
        let spec = sealed_spec::from_bytes(bytes, &self.token).map_err(usage_error)?;
        let [input] = inputs else {
            return Err(usage_error(format!("a job over {} inputs; valid: one", inputs.len())));
        };
        let job =
            Job { bytes: bytes.to_vec(), spec, token: self.token.clone(), executor_jobs: self.executor_jobs.clone() };
        Ok(Arc::new(JobExec::new(Arc::new(job), Arc::clone(input))))
    }

    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        bytes: &mut Vec<u8>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        match node.downcast_ref::<JobExec>() {
            Some(job) => {
                bytes.extend_from_slice(job.bytes());
                Ok(())
            }
            None => self.ballista.try_encode(node, bytes, converter),
        }
    }
}
