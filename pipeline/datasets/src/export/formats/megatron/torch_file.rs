//! Encodes tensors in the file format of `torch.save`: an uncompressed zip of a pickle and the values.
//!
//! ```text
//!   archive/data.pkl    {"name": [tensor, …], …}; a tensor refers to its values by number
//!   archive/byteorder   little
//!   archive/data/0, 1…  values, in row-major order
//!   archive/version     3
//! ```
//!
//! The crate `zip`, which candle already depends on, writes the zip. This module writes the pickle: candle only reads
//! pickles, and crates that write them do not support persistent ids, by which torch refers to values. A tensor of an
//! older torch type has a storage of that type (`HalfStorage`); a uint16 tensor has an untyped storage and a dtype.
//! torch writes both in the same way, and `torch.load(weights_only=True)` accepts both.

use std::io::{Cursor, Write};

use zip::result::ZipResult;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

/// The type of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Float32,
    Float16,
    Bfloat16,
    UInt16,
    Bool,
}

/// A tensor with three axes; values in row-major order, little-endian.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub kind: Kind,
    pub shape: [usize; 3],
    pub bytes: Vec<u8>,
}

/// Encodes named lists of tensors as a file.
///
/// # Errors
/// If the file would exceed 4 GB.
pub(super) fn encode(lists: &[(&str, &[Tensor])]) -> ZipResult<Vec<u8>> {
    let values: usize = lists.iter().flat_map(|(_, tensors)| tensors.iter()).map(|tensor| tensor.bytes.len()).sum();
    let mut zip = ZipWriter::new(Cursor::new(Vec::with_capacity(values + 4096)));
    let stored = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(DateTime::default());
    let mut file = |name: &str, bytes: &[u8]| -> ZipResult<()> {
        zip.start_file(format!("archive/{name}"), stored)?;
        Ok(zip.write_all(bytes)?)
    };
    file("data.pkl", &pickle(lists))?;
    file("byteorder", b"little")?;
    for (number, tensor) in lists.iter().flat_map(|(_, tensors)| tensors.iter()).enumerate() {
        file(&format!("data/{number}"), &tensor.bytes)?;
    }
    file("version", b"3\n")?;
    Ok(zip.finish()?.into_inner())
}

const PROTO_2: &[u8] = &[0x80, 2];
const MARK: u8 = b'(';
const TUPLE: u8 = b't';
const TUPLE3: u8 = 0x87;
const EMPTY_TUPLE: u8 = b')';
const EMPTY_LIST: u8 = b']';
const EMPTY_DICT: u8 = b'}';
const APPEND: u8 = b'a';
const SETITEMS: u8 = b'u';
const FALSE: u8 = 0x89;
const REDUCE: u8 = b'R';
const PERSISTENT_ID: u8 = b'Q';
const STOP: u8 = b'.';

fn pickle(lists: &[(&str, &[Tensor])]) -> Vec<u8> {
    let mut out = PROTO_2.to_vec();
    out.extend([EMPTY_DICT, MARK]);
    let mut number = 0;
    for (name, tensors) in lists {
        text(&mut out, name);
        out.push(EMPTY_LIST);
        for value in *tensors {
            tensor(&mut out, value, number);
            out.push(APPEND);
            number += 1;
        }
    }
    out.extend([SETITEMS, STOP]);
    out
}

fn tensor(out: &mut Vec<u8>, tensor: &Tensor, number: usize) {
    let elements: usize = tensor.shape.iter().product();
    // a type without its own storage: the storage counts bytes, and the dtype is the last argument
    let untyped = tensor.kind == Kind::UInt16;
    global(out, "torch._utils", if untyped { "_rebuild_tensor_v3" } else { "_rebuild_tensor_v2" });
    out.extend([MARK, MARK]);
    text(out, "storage");
    match tensor.kind {
        Kind::Float32 => global(out, "torch", "FloatStorage"),
        Kind::Float16 => global(out, "torch", "HalfStorage"),
        Kind::Bfloat16 => global(out, "torch", "BFloat16Storage"),
        Kind::Bool => global(out, "torch", "BoolStorage"),
        Kind::UInt16 => global(out, "torch.storage", "UntypedStorage"),
    }
    text(out, &number.to_string());
    text(out, "cpu");
    integer(out, if untyped { elements * 2 } else { elements });
    out.extend([TUPLE, PERSISTENT_ID]);
    integer(out, 0);
    let [_, rows, columns] = tensor.shape;
    for axes in [tensor.shape, [rows * columns, columns, 1]] {
        axes.into_iter().for_each(|n| integer(out, n));
        out.push(TUPLE3);
    }
    out.push(FALSE);
    global(out, "collections", "OrderedDict");
    out.extend([EMPTY_TUPLE, REDUCE]);
    if untyped {
        global(out, "torch", "uint16");
    }
    out.extend([TUPLE, REDUCE]);
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn global(out: &mut Vec<u8>, module: &str, name: &str) {
    out.extend(format!("c{module}\n{name}\n").into_bytes());
}

/// Encodes an integer: BININT (4 bytes, signed) if it fits, else LONG1.
fn integer(out: &mut Vec<u8>, n: usize) {
    match i32::try_from(n) {
        Ok(n) => {
            out.push(b'J');
            out.extend(n.to_le_bytes());
        }
        Err(_) => {
            // LONG1: a length, then two's complement; the most significant bit is the sign
            out.extend([0x8a, 9]);
            out.extend((n as u64).to_le_bytes());
            out.push(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_of_the_same_tensors_always() {
        let tensor = Tensor { kind: Kind::Float16, shape: [2, 1, 2], bytes: vec![0, 60, 0, 188, 0, 0, 0, 64] };
        let low = Tensor { kind: Kind::UInt16, shape: [2, 1, 2], bytes: vec![1, 0, 2, 0, 3, 0, 4, 0] };
        let lists: [(&str, &[Tensor]); 2] =
            [("values", std::slice::from_ref(&tensor)), ("indices_low", std::slice::from_ref(&low))];
        let file = encode(&lists).unwrap();
        assert_eq!(file, encode(&lists).unwrap());
        assert!(file.starts_with(b"PK\x03\x04"));
        let has = |needle: &[u8]| file.windows(needle.len()).any(|window| window == needle);
        assert!(has(b"archive/data/1") && has(b"HalfStorage") && has(b"torch\nuint16") && has(&tensor.bytes));
    }
}
