//! The operators, in the order of the pipeline: one line each. Everything else about an operator is declared in its own file.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use stillhouse_schemas::problems::Problem;

use crate::declaration::{Declaration, JobFacts};
use crate::operator::{Operator, OperatorError, SplitContext};

/// The operators that every job is looked through for, in the order in which they run.
pub const OPERATORS: &[&dyn Kind] = &[
    &Of::<crate::clean::CleanConfig>::KIND,
    &Of::<crate::tokenize::TokenizeConfig>::KIND,
    &Of::<crate::pack::PackConfig>::KIND,
    &Of::<crate::extract::ExtractConfig>::KIND,
    &Of::<crate::subtokens::SubtokensConfig>::KIND,
    &Of::<crate::partitions::PartitionsConfig>::KIND,
];

/// The operators of a job, in order.
///
/// # Errors
/// Everything that this vocabulary cannot give.
pub fn of_job(facts: &JobFacts<'_>) -> Result<Vec<OperatorSpec>, Vec<Problem>> {
    let (mut specs, mut problems) = (Vec::new(), Vec::new());
    for kind in OPERATORS {
        match kind.of_job(facts) {
            Ok(spec) => specs.extend(spec),
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() { Ok(specs) } else { Err(problems) }
}

/// An operator as the registry has it: what its [`Declaration`] says, whatever its config is.
pub trait Kind: fmt::Debug + Sync {
    /// Name in plans, metrics and errors.
    fn name(&self) -> &'static str;

    /// The operator with its config for a job; `None` where the job does not ask for it.
    ///
    /// # Errors
    /// As [`Declaration::of_job`].
    fn of_job(&self, facts: &JobFacts<'_>) -> Result<Option<OperatorSpec>, Problem>;

    /// The operator with a config that was serialized.
    ///
    /// # Errors
    /// When it is no config of this operator.
    fn read(&self, config: Value) -> Result<OperatorSpec, serde_json::Error>;
}

/// The operator whose config is `T`.
pub struct Of<T>(PhantomData<fn() -> T>);

impl<T> Of<T> {
    /// Its line in the registry.
    pub const KIND: Self = Self(PhantomData);
}

impl<T: Declaration> fmt::Debug for Of<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::NAME)
    }
}

impl<T: Declaration> Kind for Of<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn of_job(&self, facts: &JobFacts<'_>) -> Result<Option<OperatorSpec>, Problem> {
        Ok(T::of_job(facts)?.map(OperatorSpec::from))
    }

    fn read(&self, config: Value) -> Result<OperatorSpec, serde_json::Error> {
        serde_json::from_value::<T>(config).map(OperatorSpec::from)
    }
}

/// An operator with its config. Serializable, so that a plan can be shipped: the config with the key `operator`, its name.
#[derive(Clone)]
pub struct OperatorSpec(Arc<dyn Config>);

/// A config whose type is not known here.
trait Config: fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn output_schema(&self, input: &Schema) -> SchemaRef;
    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError>;
    fn value(&self) -> Result<Value, serde_json::Error>;
    fn equals(&self, other: &dyn Config) -> bool;
    fn as_any(&self) -> &dyn Any;
}

impl<T: Declaration> Config for T {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn output_schema(&self, input: &Schema) -> SchemaRef {
        Declaration::output_schema(self, input)
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Declaration::operator(self, context)
    }

    fn value(&self) -> Result<Value, serde_json::Error> {
        serde_json::to_value(self)
    }

    fn equals(&self, other: &dyn Config) -> bool {
        other.as_any().downcast_ref::<T>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl OperatorSpec {
    /// Name in plans, metrics and errors.
    pub fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Schema of the output, from the schema of the input.
    pub fn output_schema(&self, input: &Schema) -> SchemaRef {
        self.0.output_schema(input)
    }

    /// Makes the operator for one split.
    ///
    /// # Errors
    /// When the config cannot work with these resources.
    pub fn build(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        self.0.operator(context)
    }

    /// The config, where it is one of this type.
    pub fn config<T: Declaration>(&self) -> Option<&T> {
        self.0.as_any().downcast_ref()
    }
}

impl<T: Declaration> From<T> for OperatorSpec {
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

/// The key that names the operator beside its config.
const OPERATOR: &str = "operator";

impl Serialize for OperatorSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut value = self.0.value().map_err(S::Error::custom)?;
        let fields = value.as_object_mut().ok_or_else(|| S::Error::custom("the config of an operator is no object"))?;
        fields.insert(OPERATOR.into(), self.name().into());
        value.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OperatorSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut value = Value::deserialize(deserializer)?;
        let name = value.as_object_mut().and_then(|fields| fields.remove(OPERATOR));
        let name = name.as_ref().and_then(Value::as_str).ok_or_else(|| D::Error::missing_field(OPERATOR))?;
        let kind = OPERATORS.iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let valid: Vec<&str> = OPERATORS.iter().map(|kind| kind.name()).collect();
            D::Error::custom(format!("operator: got {name:?}, valid: {}", valid.join(", ")))
        })?;
        kind.read(value).map_err(D::Error::custom)
    }
}
