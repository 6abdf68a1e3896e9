//! Rounds dense noise to its stored type so that the observed token still wins.
//!
//! ```text
//! round all to nearest ─► does x win in l + ξ by the lead? ─► yes: done
//!                         no: round ξ_x up; lower every ξ_k that still beats x just below the limit
//! ```
//!
//! With exact noise x wins, possibly by a tiny margin. Rounding to half precision lets another token win at about one
//! token in ten thousand. Cost: one pass over the row, two where x does not win at once.

use crate::replay::LEAD;
use crate::{NoiseError, NoiseStream, ValueType};

/// Rounds dense noise `xi` (`[V]` f32) of the observed token `x` to the stored type, in place. With `condition`, the
/// stored values satisfy argmax_k(l_k + ξ_k) = x with a lead of at least 2^−12. `stream` only names the position in an
/// error.
///
/// # Errors
/// If a value is outside the range of the type, or a length or the token is wrong.
pub fn round_dense(
    logits: &[f32],
    x: u32,
    value_type: ValueType,
    condition: bool,
    stream: &NoiseStream,
    xi: &mut [f32],
) -> Result<(), NoiseError> {
    crate::posterior::check_token(x, xi.len(), stream)?;
    if logits.len() != xi.len() {
        return Err(NoiseError::Length { what: "a row of logits", got: logits.len(), expected: xi.len() });
    }
    let x = x as usize;
    let exact = f64::from(xi[x]);
    if value_type == ValueType::F16 {
        for value in xi.iter_mut() {
            *value = value_type.round(f64::from(*value));
        }
    }
    let limit = |xi_x: f32| f64::from(logits[x]) + f64::from(xi_x) - LEAD;
    let beats = |k: usize, xi: &[f32], limit: f64| k != x && f64::from(logits[k]) + f64::from(xi[k]) > limit;
    if condition && (0..xi.len()).any(|k| beats(k, xi, limit(xi[x]))) {
        xi[x] = value_type.ceil(exact);
        let limit = limit(xi[x]);
        for k in 0..xi.len() {
            if beats(k, xi, limit) {
                xi[k] = value_type.floor(limit - f64::from(logits[k]));
            }
        }
    }
    match xi.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => Err(NoiseError::Unstorable {
            sequence_id: stream.sequence_id,
            position: stream.position,
            index: index as u32,
            value: if index == x { exact as f32 } else { xi[index] },
            value_type,
        }),
    }
}
