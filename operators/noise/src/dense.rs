//! Dense noise in the type it is stored in, rounded so that the observed token still wins.
//!
//! ```text
//! nearest for all ─► does x win in l + ξ, with the lead? ─► yes: done
//!                     no: ξ_x up, then every ξ_k that still beats x down, as far as it must
//! ```
//!
//! Exact noise has x win, if by next to nothing; half precision is coarse enough to turn that round at one token in ten
//! thousand. Cost: one pass over the row, two where x does not win at once.

use crate::replay::LEAD;
use crate::{NoiseError, NoiseStream, ValueType};

/// Rounds dense noise `xi` (`[V]` f32) of the observed token `x` to the stored type, in place. With `condition`,
/// argmax_k(l_k + ξ_k) = x holds for what is stored, by 2^−12 at least. `stream` only names the position in an error.
///
/// # Errors
/// If a value is beyond the range of the type, or a length is wrong.
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
