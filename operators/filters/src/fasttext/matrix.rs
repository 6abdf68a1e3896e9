//! Matrices of a model: rows of 32-bit numbers, or rows of codes of a product quantizer (Jégou et al. 2011).

use super::FasttextError;
use super::reader::{Reader, floats};

/// Values that the code of one part of a row may have.
const CENTROIDS: usize = 256;

/// A matrix in the bytes of the model.
pub(super) struct Matrix {
    rows: usize,
    columns: usize,
    values: Values,
}

enum Values {
    /// Where the first row begins.
    Dense(usize),
    Quantized {
        /// Where the codes begin; a row has one for each part.
        codes: usize,
        parts: Quantizer,
        /// Where the code of each row's length lies, and the lengths.
        lengths: Option<(usize, Quantizer)>,
    },
}

/// The values that codes stand for.
struct Quantizer {
    parts: usize,
    /// Columns of a part, and of the last one.
    width: usize,
    last_width: usize,
    centroids: Vec<f32>,
}

impl Quantizer {
    fn read(reader: &mut Reader<'_>, columns: usize, name: &'static str) -> Result<Self, FasttextError> {
        let [width_of_all, parts, width, last_width] = {
            let mut size = || reader.int_in("a size of the quantizer", 1, 1 << 16).map(|size| size as usize);
            [size()?, size()?, size()?, size()?]
        };
        // at most 2^16 · 2^16, which a 64-bit number holds
        let described = (parts as u64 - 1) * width as u64 + last_width as u64;
        if width_of_all != columns || described != columns as u64 || last_width > width {
            return Err(FasttextError::Invalid {
                field: "the quantizer's width",
                got: described as i64,
                valid: format!("{columns}, the columns of {name}"),
            });
        }
        Ok(Self { parts, width, last_width, centroids: reader.floats(columns * CENTROIDS, name)? })
    }

    /// The values of a part.
    fn part(&self, part: usize, code: u8) -> &[f32] {
        let width = if part + 1 == self.parts { self.last_width } else { self.width };
        let at = part * CENTROIDS * self.width + usize::from(code) * width;
        &self.centroids[at..at + width]
    }
}

impl Matrix {
    pub(super) fn read(reader: &mut Reader<'_>, is_quantized: bool, name: &'static str) -> Result<Self, FasttextError> {
        let has_lengths = is_quantized && reader.flag(name)?;
        let rows = reader.count(name, 1, true)?;
        let columns = reader.count(name, 1, true)?;
        let too_large =
            || FasttextError::Invalid { field: name, got: i64::MAX, valid: "a size that fits the memory".into() };
        if !is_quantized {
            let values = Values::Dense(reader.position());
            let bytes = rows.checked_mul(columns).and_then(|values| values.checked_mul(4)).ok_or_else(too_large)?;
            reader.take(bytes, name)?;
            return Ok(Self { rows, columns, values });
        }
        let codes_size = reader.count("the number of codes", 1, false)?;
        let codes = reader.position();
        reader.take(codes_size, name)?;
        let parts = Quantizer::read(reader, columns, name)?;
        if rows.checked_mul(parts.parts) != Some(codes_size) {
            return Err(FasttextError::Invalid {
                field: "the number of codes",
                got: codes_size as i64,
                valid: format!("{} for each of {rows} rows", parts.parts),
            });
        }
        let lengths = if has_lengths {
            let at = reader.position();
            reader.take(rows, name)?;
            Some((at, Quantizer::read(reader, 1, name)?))
        } else {
            None
        };
        Ok(Self { rows, columns, values: Values::Quantized { codes, parts, lengths } })
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// Checks that a matrix has the rows and columns that are used.
    pub(super) fn check_shape(&self, field: &'static str, rows: usize, columns: usize) -> Result<(), FasttextError> {
        let check = |got: usize, is_valid: bool, valid: String| match is_valid {
            true => Ok(()),
            false => Err(FasttextError::Invalid { field, got: got as i64, valid }),
        };
        check(self.rows, self.rows >= rows, format!("at least {rows} rows"))?;
        check(self.columns, self.columns == columns, format!("{columns} columns"))
    }

    /// Adds a row to a vector.
    pub(super) fn add_row(&self, bytes: &[u8], row: usize, sum: &mut [f32]) {
        match &self.values {
            Values::Dense(at) => {
                sum.iter_mut().zip(self.dense_row(bytes, *at, row)).for_each(|(sum, value)| *sum += value);
            }
            Values::Quantized { codes, parts, lengths } => {
                let length = length_of_row(bytes, lengths.as_ref(), row);
                let row = &bytes[codes + row * parts.parts..][..parts.parts];
                for ((part, &code), sum) in row.iter().enumerate().zip(sum.chunks_mut(parts.width)) {
                    let values = parts.part(part, code);
                    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += length * value);
                }
            }
        }
    }

    /// The scalar product of a row and a vector, summed from the first column to the last.
    pub(super) fn dot_row(&self, bytes: &[u8], row: usize, vector: &[f32]) -> f32 {
        let sum = |sum: f32, values: &[f32], vector: &[f32]| {
            values.iter().zip(vector).fold(sum, |sum, (value, x)| sum + value * x)
        };
        match &self.values {
            Values::Dense(at) => {
                self.dense_row(bytes, *at, row).zip(vector).fold(0.0, |sum, (value, x)| sum + value * x)
            }
            Values::Quantized { codes, parts, lengths } => {
                let length = length_of_row(bytes, lengths.as_ref(), row);
                let row = &bytes[codes + row * parts.parts..][..parts.parts];
                let of_part = row.iter().enumerate().zip(vector.chunks(parts.width));
                length * of_part.fold(0.0, |total, ((part, &code), x)| sum(total, parts.part(part, code), x))
            }
        }
    }

    fn dense_row<'b>(&self, bytes: &'b [u8], at: usize, row: usize) -> impl Iterator<Item = f32> + 'b {
        floats(&bytes[at + row * self.columns * 4..][..self.columns * 4])
    }
}

fn length_of_row(bytes: &[u8], lengths: Option<&(usize, Quantizer)>, row: usize) -> f32 {
    lengths.map_or(1.0, |(at, quantizer)| quantizer.part(0, bytes[at + row])[0])
}
