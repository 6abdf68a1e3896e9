//! Ballista's plan codec, extended by [`JobExec`].

use std::sync::Arc;

use ballista_core::serde::BallistaPhysicalExtensionCodec;
use datafusion::common::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};
use stillhouse_pipeline::error::{ErrorKind, PipelineError};

use crate::failure;
use crate::node::{Job, JobExec};
use crate::order;
use crate::place::Workplace;
use crate::token::Token;

/// The codec of a driver, a scheduler or an executor; only an executor's has a place.
#[derive(Debug)]
pub struct Codec {
    ballista: BallistaPhysicalExtensionCodec,
    token: Token,
    place: Option<Arc<Workplace>>,
}

impl Codec {
    /// Creates the codec of a process that owns this token.
    pub fn new(token: Token, place: Option<Arc<Workplace>>) -> Self {
        Self { ballista: BallistaPhysicalExtensionCodec::default(), token, place }
    }
}

fn refused(why: String) -> DataFusionError {
    failure::of_task(&PipelineError::new(ErrorKind::Usage, why))
}

impl PhysicalExtensionCodec for Codec {
    fn try_decode(
        &self,
        bytes: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        context: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        if !order::is_order(bytes) {
            return self.ballista.try_decode(bytes, inputs, context, converter);
        }
        let order = order::from_bytes(bytes, &self.token).map_err(refused)?;
        let [input] = inputs else { return Err(refused(format!("a job over {} inputs; valid: one", inputs.len()))) };
        let job = Job { bytes: bytes.to_vec(), order, token: self.token.clone(), place: self.place.clone() };
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
