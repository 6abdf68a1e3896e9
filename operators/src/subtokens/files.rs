//! The NumPy files beside the shards of a data set with sub-tokens.
//!
//! ```text
//!   permutation.npy     int32 [V]            the number that is encoded for id k
//!   filter_table.npy    bool  [ℓ, b + 1, V]  whether digit j of id k is d; row b, the mask, is true
//! ```
//!
//! V(y), the tokens that match a partly masked string of digits, is the AND of the table's rows for these digits
//! (MDM-Prime, Eq. 7, Fig. A2).

use serde_json::Value;
use stillhouse_noise::keyed_uniforms;

use super::{Permutation, SubtokensConfig, encode};

/// File name of the permutation.
pub const PERMUTATION: &str = "permutation.npy";
/// File name of the filter table.
pub const FILTER_TABLE: &str = "filter_table.npy";

/// Largest filter table in bytes: 256 MiB.
pub(super) const MAX_FILTER_TABLE_BYTES: u64 = 1 << 28;

/// Returns the built-in permutation: 0 … V − 1 shuffled with seed 0. It is the same in every job with this vocabulary,
/// so one model can read the data of all of them.
///
/// ```
/// let shipped = stillhouse_operators::subtokens::shipped_permutation(5)?;
/// assert_eq!(shipped, stillhouse_operators::subtokens::shipped_permutation(5)?);
/// # Ok::<(), String>(())
/// ```
///
/// # Errors
/// Never fails: a shuffle of 0 … V − 1 is a permutation.
pub fn shipped_permutation(vocab_size: usize) -> Result<Permutation, String> {
    let mut numbers: Vec<i64> = (0..vocab_size as i64).collect();
    keyed_uniforms(0, "subtoken_permutation", 0, 0).shuffle(&mut numbers);
    Permutation::new(&numbers, vocab_size)
}

/// Reads a permutation of the ids below `vocab_size` from the bytes of a `.npy` or JSON file.
pub(super) fn read_permutation(bytes: &[u8], vocab_size: usize) -> Result<Permutation, String> {
    Permutation::new(&parse_numbers(bytes)?, vocab_size)
}

/// Reads the numbers in a `.npy` file (integers, one axis) or a JSON list.
///
/// # Errors
/// Fails if the bytes are neither; the message says what they are and what is valid.
pub(super) fn parse_numbers(bytes: &[u8]) -> Result<Vec<i64>, String> {
    if bytes.starts_with(MAGIC) {
        return parse_npy(bytes);
    }
    let valid = "valid: a .npy file of integers with one axis, or a JSON list of integers";
    let value: Value = serde_json::from_slice(bytes).map_err(|e| format!("is not JSON ({e}); {valid}"))?;
    let list = value.as_array().ok_or_else(|| format!("is JSON but not a list; {valid}"))?;
    let number = |(at, v): (usize, &Value)| v.as_i64().ok_or_else(|| format!("has {v} for id {at}; {valid}"));
    list.iter().enumerate().map(number).collect()
}

const MAGIC: &[u8] = b"\x93NUMPY";

fn parse_npy(bytes: &[u8]) -> Result<Vec<i64>, String> {
    let cut = || "is a truncated .npy file".to_owned();
    let header = match bytes.get(6) {
        Some(1) => bytes.get(8..10).map(|b| (10, usize::from(u16::from_le_bytes([b[0], b[1]])))),
        _ => bytes.get(8..12).map(|b| (12, u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)),
    };
    let (start, size): (usize, usize) = header.ok_or_else(cut)?;
    let header = bytes.get(start..start.saturating_add(size)).ok_or_else(cut)?;
    let header = std::str::from_utf8(header).map_err(|_| "is a .npy file whose header is not text".to_owned())?;
    let after = |key: &str| header.split_once(key).map(|(_, rest)| rest.trim_start_matches([':', ' ']));
    let descr = after("'descr'").and_then(|rest| rest.split('\'').nth(1)).unwrap_or_default();
    let shape = after("'shape'").and_then(|rest| rest.strip_prefix('(')).and_then(|rest| rest.split(')').next());
    let axes: Vec<&str> = shape.unwrap_or_default().split(',').map(str::trim).filter(|axis| !axis.is_empty()).collect();
    let (order, kind) = descr.split_at(descr.len().min(1));
    let width = match kind {
        "i1" | "u1" => 1,
        "i2" | "u2" => 2,
        "i4" | "u4" => 4,
        "i8" | "u8" => 8,
        _ => 0,
    };
    let count = match axes[..] {
        [axis] => axis.parse::<usize>().ok(),
        _ => None,
    };
    let (Some(count), true) = (count, width > 0 && (order == "<" || order == "|")) else {
        return Err(format!(
            "is a .npy file of {descr:?} with shape ({}); valid: little-endian integers with one axis",
            axes.join(", ")
        ));
    };
    let values = bytes.get(start + size..).unwrap_or_default();
    if count.checked_mul(width) != Some(values.len()) {
        return Err(format!(
            "is a damaged .npy file: its header says {count} numbers, and {} bytes follow",
            values.len()
        ));
    }
    let signed = kind.starts_with('i');
    Ok(values.chunks_exact(width).map(|chunk| parse_integer(chunk, signed)).collect())
}

/// Converts little-endian bytes to a number. Saturates at `i64::MAX`, which is too large for any vocabulary.
fn parse_integer(bytes: &[u8], signed: bool) -> i64 {
    let fill = if signed && bytes.last().is_some_and(|high| *high >= 128) { 255 } else { 0 };
    let mut all = [fill; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    if signed { i64::from_le_bytes(all) } else { i64::try_from(u64::from_le_bytes(all)).unwrap_or(i64::MAX) }
}

/// Builds a `.npy` file, version 1.0, in C order. Its header is a multiple of 64 bytes.
fn write_npy(descr: &str, shape: &str, values: Vec<u8>) -> Vec<u8> {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    let rest = (MAGIC.len() + 4 + header.len() + 1).next_multiple_of(64) - (MAGIC.len() + 4 + header.len() + 1);
    header += &" ".repeat(rest);
    header.push('\n');
    let size = header.len() as u16;
    [MAGIC, &[1, 0], &size.to_le_bytes(), header.as_bytes(), &values].concat()
}

pub(super) fn permutation_npy(permutation: &Permutation) -> Vec<u8> {
    let numbers = permutation.numbers();
    write_npy(
        "<i4",
        &format!("{},", numbers.len()),
        numbers.iter().flat_map(|n| n.cast_signed().to_le_bytes()).collect(),
    )
}

pub(super) fn filter_table_npy(config: &SubtokensConfig) -> Vec<u8> {
    let (vocab, length, rows) = (config.vocab_size, config.length, config.base as usize + 1);
    let mut table = vec![0u8; length * rows * vocab];
    let mut digits = vec![0; length];
    for id in 0..vocab as u32 {
        encode(config.number(id).unwrap_or(id), config.base, &mut digits);
        for (position, &digit) in digits.iter().enumerate() {
            let row = |digit: usize| (position * rows + digit) * vocab + id as usize;
            table[row(usize::from(digit))] = 1;
            table[row(rows - 1)] = 1;
        }
    }
    write_npy("|b1", &format!("{length}, {rows}, {vocab}"), table)
}
