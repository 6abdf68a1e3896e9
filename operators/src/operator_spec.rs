//! An operator whose config's type is erased, and the factories that make one from a job.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

use crate::config::{Column, JobContext, OperatorConfig, OperatorView, StatisticKind};
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Operator, OperatorError, SplitContext};

/// Type-erased access to the declarations of an [`OperatorConfig`].
pub trait OperatorFactory: fmt::Debug + Sync {
    /// Name of the operator in plans, metrics and errors.
    fn name(&self) -> &'static str;

    /// Section of the job file that belongs to the operator, if any.
    fn section(&self) -> Option<SectionKind>;

    /// Columns that the operator may add, in order.
    fn columns(&self) -> &'static [Column];

    /// Statistics that the operator may add.
    fn statistics(&self) -> &'static [StatisticKind];

    /// Names of the files that the operator may write beside the shards.
    fn sidecar_files(&self) -> &'static [&'static str];

    /// Returns the operator with its config for a job, or `None` if the job does not use it.
    ///
    /// # Errors
    /// See [`OperatorConfig::from_job`].
    fn resolve(&self, context: &JobContext<'_>) -> Result<Option<OperatorSpec>, Problem>;
}

/// Factory of the operator with config type `T`.
pub struct Factory<T>(PhantomData<fn() -> T>);

impl<T> Factory<T> {
    /// The value to list in the registry.
    pub const ENTRY: Self = Self(PhantomData);
}

impl<T: OperatorConfig> fmt::Debug for Factory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::NAME)
    }
}

impl<T: OperatorConfig> OperatorFactory for Factory<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn section(&self) -> Option<SectionKind> {
        T::SECTION
    }

    fn columns(&self) -> &'static [Column] {
        T::COLUMNS
    }

    fn statistics(&self) -> &'static [StatisticKind] {
        T::STATISTICS
    }

    fn sidecar_files(&self) -> &'static [&'static str] {
        T::SIDECAR_FILES
    }

    fn resolve(&self, context: &JobContext<'_>) -> Result<Option<OperatorSpec>, Problem> {
        Ok(T::from_job(context)?.map(OperatorSpec::from))
    }
}

/// An operator with its config.
#[derive(Clone)]
pub struct OperatorSpec(Arc<dyn ErasedConfig>);

/// A config of erased type.
trait ErasedConfig: fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn output_schema(&self, input: &Schema) -> SchemaRef;
    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError>;
    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)>;
    fn is_derivable(&self) -> bool;
    fn hashed_content(&self) -> Vec<(&'static str, Arc<[u8]>)>;
    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64;
    fn excess_bytes_per_token(&self, vocab_size: usize) -> f64;
    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError>;
    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError>;
    fn equals(&self, other: &dyn ErasedConfig) -> bool;
    fn as_any(&self) -> &dyn Any;
}

impl<T: OperatorConfig> ErasedConfig for T {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn output_schema(&self, input: &Schema) -> SchemaRef {
        OperatorConfig::output_schema(self, input)
    }

    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        OperatorConfig::check(self, batch, context, violations)
    }

    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        OperatorConfig::sidecar_files(self)
    }

    fn is_derivable(&self) -> bool {
        T::SECTION.is_some_and(|section| section.is_derivable)
    }

    fn hashed_content(&self) -> Vec<(&'static str, Arc<[u8]>)> {
        OperatorConfig::hashed_content(self)
    }

    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        OperatorConfig::bytes_per_token(self, before, vocab_size)
    }

    fn excess_bytes_per_token(&self, vocab_size: usize) -> f64 {
        OperatorConfig::excess_bytes_per_token(self, vocab_size)
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        OperatorConfig::view(self, row)
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        OperatorConfig::operator(self, context)
    }

    fn equals(&self, other: &dyn ErasedConfig) -> bool {
        other.as_any().downcast_ref::<T>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl OperatorSpec {
    /// Estimates the bytes per token, as [`OperatorConfig::bytes_per_token`].
    pub fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        self.0.bytes_per_token(before, vocab_size)
    }

    /// Estimates the excess over this, as [`OperatorConfig::excess_bytes_per_token`].
    pub fn excess_bytes_per_token(&self, vocab_size: usize) -> f64 {
        self.0.excess_bytes_per_token(vocab_size)
    }

    /// Name in plans, metrics and errors.
    pub fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Returns the schema of the output for this schema of the input.
    pub fn output_schema(&self, input: &Schema) -> SchemaRef {
        self.0.output_schema(input)
    }

    /// Checks the operator's columns: see [`OperatorConfig::check`].
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    pub fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        self.0.check(batch, context, violations)
    }

    /// Returns the files to write beside the shards: see [`OperatorConfig::sidecar_files`].
    pub fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        self.0.sidecar_files()
    }

    /// Whether `stillhouse derive` can make the columns: see [`stillhouse_schemas::sections::Section::IS_DERIVABLE`].
    pub fn is_derivable(&self) -> bool {
        self.0.is_derivable()
    }

    /// Returns what stands for keys of the section in the job's hash: see [`OperatorConfig::hashed_content`].
    pub fn hashed_content(&self) -> Vec<(&'static str, Arc<[u8]>)> {
        self.0.hashed_content()
    }

    /// Returns what to show of a batch's only row: see [`OperatorConfig::view`].
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    pub fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        self.0.view(row)
    }

    /// Creates the operator for one split.
    ///
    /// # Errors
    /// Fails if the config cannot work with the resources of `context`.
    pub fn build(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        self.0.operator(context)
    }

    /// Returns the config if it has type `T`.
    pub fn config<T: OperatorConfig>(&self) -> Option<&T> {
        self.0.as_any().downcast_ref()
    }
}

impl<T: OperatorConfig> From<T> for OperatorSpec {
    fn from(config: T) -> Self {
        Self(Arc::new(config))
    }
}

impl fmt::Debug for OperatorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for OperatorSpec {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(other.0.as_ref())
    }
}

/// The checks that the rows of a split must pass.
#[derive(Debug, Clone, PartialEq)]
pub struct RowChecks {
    /// What the checks compare the columns with.
    pub context: CheckContext,
    /// The operators that made the columns, in order; each checks its own ([`OperatorConfig::check`]).
    pub operators: Vec<OperatorSpec>,
}

impl RowChecks {
    /// Checks every rule on every row.
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    pub fn check(&self, batch: &RecordBatch) -> Result<Vec<Violation>, ArrowError> {
        let mut violations = Vec::new();
        for operator in &self.operators {
            operator.check(batch, &self.context, &mut violations)?;
        }
        Ok(violations)
    }
}
