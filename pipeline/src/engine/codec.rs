//! Plans as bytes, for other processes: DataFusion's own protocol, with the nodes of this house as CBOR in it (floats are exact there).
//!
//! What comes out of the bytes is the same plan: it makes the same shards, given the same input, tokenizer and teacher in its session.

use std::sync::Arc;

use bytes::Bytes;
use datafusion::common::{DataFusionError, Result, internal_err};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::bytes::{
    physical_plan_from_bytes_with_extension_codec, physical_plan_to_bytes_with_extension_codec,
};
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};
use serde::{Deserialize, Serialize};
use stillhouse_operators::registry::OperatorSpec;

use super::operator::OperatorExec;
use super::sink::{ShardSinkExec, Shards};
use super::source::{Corpus, SplitsExec};

/// A node without its input.
#[derive(Serialize, Deserialize)]
enum Node {
    Splits(Corpus),
    Operator(OperatorSpec),
    ShardSink(Shards),
}

/// The nodes of this house, for DataFusion's protocol.
#[derive(Debug, Default, Clone, Copy)]
pub struct Codec;

fn external(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> DataFusionError {
    DataFusionError::External(error.into())
}

impl PhysicalExtensionCodec for Codec {
    fn try_decode(
        &self,
        bytes: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        _: &TaskContext,
        _: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let node: Node = ciborium::from_reader(bytes).map_err(external)?;
        Ok(match (node, inputs) {
            (Node::Splits(corpus), []) => Arc::new(SplitsExec::new(corpus)),
            (Node::Operator(spec), [input]) => Arc::new(OperatorExec::new(spec, Arc::clone(input))),
            (Node::ShardSink(shards), [input]) => Arc::new(ShardSinkExec::new(shards, Arc::clone(input))?),
            (_, inputs) => return internal_err!("a node of this house with {} inputs", inputs.len()),
        })
    }

    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        bytes: &mut Vec<u8>,
        _: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        let node = if let Some(node) = node.downcast_ref::<SplitsExec>() {
            Node::Splits(node.corpus().clone())
        } else if let Some(node) = node.downcast_ref::<OperatorExec>() {
            Node::Operator(node.spec().clone())
        } else if let Some(node) = node.downcast_ref::<ShardSinkExec>() {
            Node::ShardSink(node.shards().clone())
        } else {
            return internal_err!("{} is no node of this house", node.name());
        };
        ciborium::into_writer(&node, bytes).map_err(external)
    }
}

/// A plan as bytes.
///
/// # Errors
/// When it has a node that neither DataFusion nor this house knows.
pub fn to_bytes(plan: &Arc<dyn ExecutionPlan>) -> Result<Bytes> {
    physical_plan_to_bytes_with_extension_codec(Arc::clone(plan), &Codec)
}

/// The plan that bytes hold.
///
/// # Errors
/// When they do not hold one.
pub fn from_bytes(bytes: &[u8], context: &TaskContext) -> Result<Arc<dyn ExecutionPlan>> {
    physical_plan_from_bytes_with_extension_codec(bytes, context, &Codec)
}
