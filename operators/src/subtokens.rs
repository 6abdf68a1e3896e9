//! `subtokens`: stores every token id as ℓ digits in base b, most significant first (MDM-Prime, Chao et al. 2025).
//!
//! ```text
//!  C = 50,257, ℓ = 4:  b = ⌈C^(1/4)⌉ = 15      50256 = 14·15³ + 13·15² + 5·15 + 6  ──►  14 13 5 6
//!  input_ids `[L]` int32 ──► subtokens [L, ℓ] uint8 (b ≤ 256) or uint16, token after token
//! ```
//!
//! b is the smallest integer with b^ℓ ≥ C. It is computed with integers only, because floating-point roots are wrong at
//! exact powers. Not every string of digits is a token; [`decode`] tells which are. Padding is encoded like any other
//! token.
//!
//! With `permutation` the operator encodes another number in place of the id (index shuffling of MDM-Prime-v2, arXiv
//! 2603.16077: neighbouring ids of a BPE vocabulary are similar, so their first digits carry little information).
//! `permutation.npy` beside the shards holds the permutation. `filter_table.npy` holds the table whose rows trainers
//! AND over the digits of a token (MDM-Prime, Fig. A2). See `files`.
//!
//! Cost: ℓ divisions per token.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Array, RecordBatch, UInt8Array, UInt16Array};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

use crate::config::{Column, JobContext, OperatorConfig, token_id_bits};
use crate::invariants::{CheckContext, Violation, unsigned_column};
use crate::operator::{Emit, Operator, OperatorError, SplitContext, extend_schema};
use crate::rows::{ListRows, list_column, sequence_ids};

mod files;
mod permutation;
mod section;

pub use files::{FILTER_TABLE, PERMUTATION, shipped_permutation};
pub use permutation::Permutation;
use section::PERMUTATION_FIELD;
pub use section::{SHIPPED, SubtokensSection};

const NAME: &str = "subtokens";

/// Largest base, 2^16: a digit must fit 16 bits.
const MAX_BASE: u64 = 65_536;

/// Returns the base for a vocabulary of `vocab_size` and `length` digits: the smallest b with b^length ≥ vocab_size.
///
/// ```
/// assert_eq!(stillhouse_operators::subtokens::base(50_257, 4), 15);
/// ```
pub fn base(vocab_size: u64, length: u32) -> u64 {
    let reaches = |b: u64| b.checked_pow(length).is_none_or(|power| power >= vocab_size);
    let (mut below, mut enough) = (0, vocab_size.max(1));
    while enough - below > 1 {
        let middle = below + (enough - below) / 2;
        if reaches(middle) { enough = middle } else { below = middle }
    }
    enough
}

/// Writes the digits of an id, most significant first. Drops the leading digits of an id of `base^length` or more.
pub fn encode(id: u32, base: u32, digits: &mut [u16]) {
    let mut rest = id;
    for digit in digits.iter_mut().rev() {
        *digit = (rest % base) as u16;
        rest /= base;
    }
}

/// Returns the id with these digits, or `None` if no token has them.
pub fn decode(digits: &[u16], base: u32, vocab_size: usize) -> Option<u32> {
    let id = digits.iter().try_fold(0u64, |id, &digit| {
        let next = id.checked_mul(u64::from(base))?.checked_add(u64::from(digit))?;
        (u32::from(digit) < base).then_some(next)
    })?;
    u32::try_from(id).ok().filter(|&id| (id as usize) < vocab_size)
}

/// Lengths ℓ for which `plan` reports the idle-step ratio.
pub const PLANNED_LENGTHS: [u32; 6] = [1, 2, 3, 4, 6, 8];

/// Returns the idle-step ratio: the expected share of `steps` sampling steps that change none of `positions` tokens of
/// ℓ = `length` digits each. The schedule is α(t) = (1 − t)^power. The formula is MDM-Prime, Eq. A6: (1/T) Σ_{k<T} \[1
/// − (α_{1−(k+1)/T} − α_{1−k/T})\]^{L·ℓ}.
///
/// ```
/// let percent = |length| (1e4 * stillhouse_operators::subtokens::idle_step_ratio(length, 1024, 1024, 1.0)).round() / 100.0;
/// assert_eq!([1, 2, 3, 4, 6, 8].map(percent), [36.77, 13.52, 4.97, 1.83, 0.25, 0.03]);
/// ```
pub fn idle_step_ratio(length: u32, steps: u32, positions: u32, power: f64) -> f64 {
    // α(1 − s) = s^power
    let alpha = |step: u32| libm::pow(f64::from(step) / f64::from(steps), power);
    let places = f64::from(positions) * f64::from(length);
    let stays = |step: u32| libm::pow(1.0 - (alpha(step + 1) - alpha(step)), places);
    (0..steps).map(stays).sum::<f64>() / f64::from(steps.max(1))
}

/// Bases of the lengths that [`elbow_length`] considers. They cover the lengths over which the paper draws the curve
/// (Figures 7 and A3): ℓ = 2 to 8 for C = 50,257, and 1 to 4 for C = 256. (Its ℓ = 2/3 for images is not an integer and
/// is left out.)
pub const ELBOW_BASES: std::ops::RangeInclusive<u64> = 4..=4096;

/// Returns the length at the elbow of the idle-step ratio ([`elbow`]), among those whose base is in [`ELBOW_BASES`].
/// With the paper's schedules this is what the paper recommends (A.2.4): 4 for text, 2 for images. Without the limits
/// on the base, the chord would depend more on the longest and shortest length than on the curve: over ℓ = 1 to 8 both
/// elbows are at 3.
///
/// ```
/// use stillhouse_operators::subtokens::{PLANNED_LENGTHS, elbow_length};
/// assert_eq!(elbow_length(&PLANNED_LENGTHS, 50_257, 1024, 1.0), Some(4));
/// assert_eq!(elbow_length(&PLANNED_LENGTHS, 256, 3072, 3.0), Some(2));
/// ```
pub fn elbow_length(lengths: &[u32], vocab_size: u64, positions: u32, power: f64) -> Option<u32> {
    let inside: Vec<u32> =
        lengths.iter().copied().filter(|&length| ELBOW_BASES.contains(&base(vocab_size, length))).collect();
    let ratio = |length: u32| idle_step_ratio(length, positions, positions, power);
    let curve: Vec<(f64, f64)> = inside.iter().map(|&length| (f64::from(length), ratio(length))).collect();
    inside.get(elbow(&curve)?).copied()
}

/// Returns the index of the elbow of a falling curve: the point farthest below the straight line between its ends.
/// `None` if no point is below it.
pub fn elbow(curve: &[(f64, f64)]) -> Option<usize> {
    let (&(x0, y0), &(x1, y1)) = (curve.first()?, curve.last()?);
    let below = |&(x, y): &(f64, f64)| (x1 - x) / (x1 - x0) - (y - y1) / (y0 - y1);
    let found = (0..curve.len()).max_by(|&a, &b| below(&curve[a]).total_cmp(&below(&curve[b])));
    found.filter(|&at| x1 > x0 && y0 > y1 && below(&curve[at]) > 0.0)
}

/// Configuration of `subtokens`. Create it with [`SubtokensConfig::new`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubtokensConfig {
    /// Permutation of the ids: the number to encode in place of each id. `None` encodes the id itself.
    pub permutation: Option<Permutation>,
    /// Whether to write the filter table beside the shards.
    pub filter_table: bool,
    /// Vocabulary size C.
    pub vocab_size: usize,
    /// Digits per token, ℓ.
    pub length: usize,
    /// Base b.
    pub base: u32,
    /// Row length: fixed, or up to a maximum.
    pub rows: RowLength,
}

impl OperatorConfig for SubtokensConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<SubtokensSection>());
    const COLUMNS: &'static [Column] = &[Column {
        name: columns::SUBTOKENS,
        dtype: "fixed list uint8 (b ≤ 256) / uint16",
        when: "`subtokens`",
        shape: "[L, ℓ]",
        contract: "base-b digits of the id, most significant first; with `permutation.npy`, of the permuted id",
        meaning: "base-b digits of each token's id, most significant first (MDM-Prime)",
    }];

    const SIDECAR_FILES: &'static [&'static str] = &[PERMUTATION, FILTER_TABLE];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(section) = context.section::<SubtokensSection>()? else { return Ok(None) };
        let made = Self::new(context.vocab_size, section.length, context.rows());
        let made = made.map_err(|e| Problem::new("subtokens.length", section.length, e.to_string()))?;
        let permutation = match section.permutation.as_deref() {
            None => None,
            Some(SHIPPED) => {
                let made = files::shipped_permutation(context.vocab_size);
                Some(made.map_err(|e| Problem::new(PERMUTATION_FIELD, SHIPPED, e))?)
            }
            Some(named) => {
                let bytes = context.spec.sections.file(PERMUTATION_FIELD);
                let bytes =
                    bytes.ok_or_else(|| format!("its values are not available; a data set has them in {PERMUTATION}"));
                let read = bytes.and_then(|bytes| files::read_permutation(bytes, context.vocab_size));
                Some(read.map_err(|e| Problem::new(PERMUTATION_FIELD, format!("{named:?}"), e))?)
            }
        };
        let made = Self { permutation, filter_table: section.filter_table, ..made };
        match made.filter_table_bytes() {
            bytes if section.filter_table && bytes > files::MAX_FILTER_TABLE_BYTES => Err(Problem::new(
                "subtokens.filter_table",
                true,
                format!(
                    "the table of ℓ · (b + 1) · V = {} · {} · {} has {bytes} bytes; valid: up to {}, with a larger subtokens.length",
                    made.length,
                    u64::from(made.base) + 1,
                    made.vocab_size,
                    files::MAX_FILTER_TABLE_BYTES
                ),
            )),
            _ => Ok(Some(made)),
        }
    }

    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let permutation = self.permutation.as_ref().map(|p| (PERMUTATION, files::permutation_npy(p)));
        let table = self.filter_table.then(|| (FILTER_TABLE, files::filter_table_npy(self)));
        permutation.into_iter().chain(table).collect()
    }

    /// The numbers as little-endian uint32, so that a `.npy` and a `.json` file of the same numbers are the same job.
    fn hashed_content(&self) -> Vec<(&'static str, Arc<[u8]>)> {
        let bytes = |p: &Permutation| p.numbers().iter().flat_map(|number| number.to_le_bytes()).collect();
        self.permutation.as_ref().map(|p| (PERMUTATION_FIELD, bytes(p))).into_iter().collect()
    }

    fn fields(&self) -> Vec<Field> {
        vec![self.field()]
    }

    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
        let ids = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
        let digits = unsigned_column(batch, columns::SUBTOKENS)?;
        for row in 0..batch.num_rows() {
            let row_ids = &ids[tokens.range(row)];
            let decoded = digits.row(row).chunks(self.length).map(|d| {
                let d: Vec<u16> = d.iter().map(|&v| v as u16).collect();
                decode(&d, self.base, context.vocab_size).and_then(|number| self.id(number)).map(|id| id as i32)
            });
            if !decoded.eq(row_ids.iter().map(|&id| Some(id))) {
                violations.push(Violation::new(row, "subtokens do not decode to input_ids"));
            }
        }
        Ok(())
    }

    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        before + token_id_bits(vocab_size) / 8.0
    }

    fn operator(&self, _: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(self.build()?))
    }
}

impl SubtokensConfig {
    /// Creates the config for a vocabulary and computes its base.
    ///
    /// # Errors
    /// Fails if the base would exceed 65,536; the message names a sufficient length.
    pub fn new(vocab_size: usize, length: u32, rows: RowLength) -> Result<Self, OperatorError> {
        let needed = base(vocab_size as u64, length.max(1));
        match u32::try_from(needed) {
            Ok(base) if needed <= MAX_BASE && length > 0 => {
                Ok(Self { permutation: None, filter_table: false, vocab_size, length: length as usize, base, rows })
            }
            _ => {
                let enough = (1..=32).find(|&l| base(vocab_size as u64, l) <= MAX_BASE).unwrap_or(32);
                Err(OperatorError::Config {
                    operator: NAME,
                    message: format!(
                        "subtokens.length: got {length}, which needs base {needed} for a vocabulary of {vocab_size}; valid: \
                         {enough} or more, so that the base is at most {MAX_BASE}"
                    ),
                })
            }
        }
    }

    /// Returns the number to encode for an id.
    fn number(&self, id: u32) -> Option<u32> {
        self.permutation.as_ref().map_or(Some(id), |p| p.number(id))
    }

    /// Returns the id that is encoded as this number.
    fn id(&self, number: u32) -> Option<u32> {
        self.permutation.as_ref().map_or(Some(number), |p| p.id(number))
    }

    /// Returns the size of the filter table in bytes.
    fn filter_table_bytes(&self) -> u64 {
        (self.length as u64) * (u64::from(self.base) + 1) * self.vocab_size as u64
    }

    fn field(&self) -> Field {
        self.rows.field(columns::SUBTOKENS, columns::subtoken_type(self.base), None, Some(self.length))
    }

    /// Builds the operator.
    ///
    /// # Errors
    /// Fails if the base is wrong for this vocabulary and length.
    pub fn build(&self) -> Result<Subtokens, OperatorError> {
        let valid = Self::new(self.vocab_size, u32::try_from(self.length).unwrap_or(u32::MAX), self.rows)?;
        if valid.base != self.base {
            return Err(OperatorError::Config {
                operator: NAME,
                message: format!("base: got {}, valid: {}", self.base, valid.base),
            });
        }
        if let Some(numbers) =
            self.permutation.as_ref().map(Permutation::numbers).filter(|n| n.len() != self.vocab_size)
        {
            return Err(OperatorError::Config {
                operator: NAME,
                message: format!("permutation: got {} numbers, valid: {}", numbers.len(), self.vocab_size),
            });
        }
        Ok(Subtokens { config: self.clone() })
    }
}

/// The operator.
#[derive(Debug)]
pub struct Subtokens {
    config: SubtokensConfig,
}

impl Subtokens {
    fn column(&self, batch: &RecordBatch) -> Result<ArrayRef, OperatorError> {
        let arrow = OperatorError::arrow(NAME);
        let rows = ListRows::from_batch(batch, columns::INPUT_IDS).map_err(&arrow)?;
        let ids: &Int32Array = rows.values(columns::INPUT_IDS).map_err(&arrow)?;
        let SubtokensConfig { vocab_size, length, base, .. } = self.config;
        let number = |id: i32| {
            u32::try_from(id).ok().filter(|&id| (id as usize) < vocab_size).and_then(|id| self.config.number(id))
        };
        let lengths: Vec<usize> = (0..rows.len()).map(|row| rows.range(row).len() * length).collect();
        let mut digits = vec![0u16; lengths.iter().sum()];
        let mut rest = digits.as_mut_slice();
        for row in 0..rows.len() {
            for (position, &id) in ids.values()[rows.range(row)].iter().enumerate() {
                let (now, later) = rest.split_at_mut(length);
                rest = later;
                match number(id) {
                    Some(number) => encode(number, base, now),
                    None => {
                        let sequence = sequence_ids(batch).map_err(&arrow)?.value(row);
                        return Err(OperatorError::Data {
                            operator: NAME,
                            place: format!("sequence {sequence}, position {position}"),
                            message: format!("got token id {id}, valid: 0 to {}", vocab_size - 1),
                        });
                    }
                }
            }
        }
        let values: ArrayRef = match columns::subtoken_type(base) {
            DataType::UInt8 => Arc::new(UInt8Array::from_iter_values(digits.iter().map(|&digit| digit as u8))),
            _ => Arc::new(UInt16Array::from(digits)),
        };
        list_column(&self.config.field(), values, &lengths).map_err(arrow)
    }
}

impl Operator for Subtokens {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let arrays = batch.columns().iter().cloned().chain([self.column(batch)?]).collect();
        let output = RecordBatch::try_new(extend_schema(&batch.schema(), self.config.fields()), arrays);
        emit(output.map_err(OperatorError::arrow(NAME))?)
    }
}

#[cfg(test)]
mod tests;
