//! Errors of DataFusion as errors of the input, in the user's words.

use datafusion::arrow::error::ArrowError;
use datafusion::error::DataFusionError;
use stillhouse_base::source_error::SourceError;

/// Returns the message of an error without the names of the crates that report it.
fn plain_message(error: &ArrowError) -> String {
    match error {
        ArrowError::CastError(m) | ArrowError::ParseError(m) => {
            format!("a value cannot be converted: {m}; TRY_CAST gives NULL instead")
        }
        ArrowError::DivideByZero => "a number is divided by zero; NULLIF(divisor, 0) gives NULL instead".into(),
        ArrowError::ArithmeticOverflow(m) => format!("a number is too large for its type: {m}"),
        ArrowError::ComputeError(m) | ArrowError::InvalidArgumentError(m) | ArrowError::SchemaError(m) => m.clone(),
        other => other.to_string(),
    }
}

pub(crate) fn sql_error(error: DataFusionError) -> SourceError {
    let message = error.strip_backtrace();
    match error {
        DataFusionError::Context(_, inner) | DataFusionError::Diagnostic(_, inner) => sql_error(*inner),
        DataFusionError::Shared(inner) => {
            shared_error(&inner).unwrap_or(SourceError::Sql { message, retryable: false })
        }
        DataFusionError::ArrowError(inner, _) => match *inner {
            ArrowError::ExternalError(source) => sql_error(DataFusionError::External(source)),
            other => SourceError::Sql { message: plain_message(&other), retryable: false },
        },
        DataFusionError::Execution(message) => SourceError::Sql { message, retryable: false },
        DataFusionError::External(source) => match source.downcast::<SourceError>() {
            Ok(source) => *source,
            Err(other) => match other.downcast::<DataFusionError>() {
                Ok(inner) => sql_error(*inner),
                Err(_) => SourceError::Sql { message, retryable: false },
            },
        },
        DataFusionError::IoError(_) => SourceError::Sql { message, retryable: true },
        DataFusionError::ResourcesExhausted(_) => SourceError::Sql {
            message: format!("{message}; `engine.sql_memory_megabytes` sets the memory of the query"),
            retryable: false,
        },
        _ => SourceError::Sql { message, retryable: false },
    }
}

/// Returns the source error inside an error that several parts of the query share.
fn shared_error(error: &DataFusionError) -> Option<SourceError> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        match cause.downcast_ref::<SourceError>() {
            // the error is shared and cannot be moved out, so it is rebuilt
            Some(SourceError::Record { file, position, reason, message }) => {
                return Some(SourceError::Record {
                    file: file.clone(),
                    position: position.clone(),
                    reason,
                    message: message.clone(),
                });
            }
            Some(SourceError::Corrupt { file, message }) => {
                return Some(SourceError::Corrupt { file: file.clone(), message: message.clone() });
            }
            Some(other) => return Some(SourceError::Sql { message: other.to_string(), retryable: other.retryable() }),
            None => source = cause.source(),
        }
    }
    None
}
