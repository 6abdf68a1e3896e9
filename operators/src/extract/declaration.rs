//! What `extract` declares of itself.

use arrow::datatypes::{Schema, SchemaRef};
use stillhouse_schemas::problems::Problem;

use super::{ExtractConfig, NAME, NoiseConfig};
use crate::declaration::{Declaration, JobFacts};
use crate::operator::{Operator, OperatorError, SplitContext, extended};
use crate::vocabulary::Role;

impl Declaration for ExtractConfig {
    const NAME: &'static str = NAME;

    fn of_job(facts: &JobFacts<'_>) -> Result<Option<Self>, Problem> {
        let Some(extract) = &facts.spec.extract else { return Ok(None) };
        let eos = facts.special_ids.id(Role::Eos);
        let bos = facts.require(Role::Bos, "the teacher").or_else(|missing| eos.ok_or(missing))?;
        Ok(Some(Self {
            vocab_size: facts.vocab_size,
            bos,
            context: extract.context,
            batch_tokens: extract.teacher.batch_tokens as usize,
            noise: extract.noise.as_ref().map(|noise| NoiseConfig {
                codec: noise.codec,
                tolerance: noise.tolerance,
                condition: noise.condition,
                draws: noise.draws,
                precision: noise.resolved_precision(),
                seed: facts.spec.noise_seed(),
            }),
            topk: extract.topk as usize,
            rows: facts.rows(),
        }))
    }

    fn output_schema(&self, input: &Schema) -> SchemaRef {
        extended(input, self.fields())
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(self.build(context)?))
    }
}
