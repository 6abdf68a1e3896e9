//! Reads the pickles of CIFAR's Python version only: a dictionary with an array of bytes and a list of numbers.
//!
//! A pickle is a program for a stack machine, and Python's machine calls whatever the pickle names. This one calls
//! nothing. It knows the opcodes of these files and builds texts, numbers, lists, tuples and one dictionary. Of names,
//! it knows the four from which numpy rebuilds an array. Anything else is an error. The file bounds the memory: a byte
//! creates at most one value.
//!
//! ```text
//!   {'batch_label': …, 'labels': [6, 9, …], 'filenames': […],
//!    'data': _reconstruct(ndarray, (0,), 'b') ← (1, (10000, 3072), dtype('u1') ← (…), False, '…')}
//! ```

use std::collections::HashMap;
use std::ops::Range;

/// The needed content of a file.
#[derive(Debug)]
pub(super) struct CifarBatch {
    pub rows: usize,
    /// Byte range of the array in the file.
    pub data: Range<usize>,
    /// One label per row.
    pub labels: Vec<i64>,
}

/// Functions and classes that an array refers to.
const KNOWN_NAMES: [(&str, KnownName); 7] = [
    ("numpy.core.multiarray _reconstruct", KnownName::Reconstruct),
    ("numpy._core.multiarray _reconstruct", KnownName::Reconstruct),
    ("numpy ndarray", KnownName::Array),
    ("numpy dtype", KnownName::Type),
    ("numpy.dtypes UInt8DType", KnownName::Type),
    ("_codecs encode", KnownName::Encode),
    ("__builtin__ bytes", KnownName::Encode),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KnownName {
    Reconstruct,
    Array,
    Type,
    Encode,
}

#[derive(Debug, Clone)]
enum Value {
    Mark,
    None,
    Int(i64),
    /// Byte range of a text or of bytes in the file.
    Text(Range<usize>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    KnownName(KnownName),
    /// An array that is not filled yet.
    NewArray,
    /// A type, by the byte range of its name.
    Type(Range<usize>),
    Array {
        shape: Vec<i64>,
        data: Range<usize>,
    },
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    memo: HashMap<u32, Value>,
    puts: u32,
}

/// Reads the batch of a file.
///
/// # Errors
/// When the pickle is not a batch of CIFAR.
pub(super) fn batch(bytes: &[u8], labels: &str, width: usize) -> Result<CifarBatch, String> {
    let mut machine = Machine { bytes, at: 0, stack: Vec::new(), memo: HashMap::new(), puts: 0 };
    let Value::Dict(entries) = machine.run()? else { return Err("is no dictionary".into()) };
    // Python's reader leaves the following bytes to its caller
    if machine.at < bytes.len() {
        return Err(format!("has {} bytes behind its end at byte {}", bytes.len() - machine.at, machine.at));
    }
    let find = |key: &str| {
        let is =
            |value: &Value| matches!(value, Value::Text(range) if bytes.get(range.clone()) == Some(key.as_bytes()));
        entries.iter().find(|(name, _)| is(name)).map(|(_, value)| value)
    };
    let (rows, data) = match find("data") {
        Some(Value::Array { shape, data }) => match shape.as_slice() {
            [rows, columns] if *columns == width as i64 && *rows >= 0 => (*rows as usize, data.clone()),
            other => return Err(format!("`data` has shape {other:?}; valid: [n, {width}]")),
        },
        _ => return Err("has no array `data`".into()),
    };
    if Some(data.len()) != rows.checked_mul(width) {
        return Err(format!("`data` has {} bytes for {rows} rows of {width}", data.len()));
    }
    let labels: Vec<i64> = match find(labels) {
        Some(Value::List(values)) => values
            .iter()
            .map(|value| match value {
                Value::Int(number) => Ok(*number),
                _ => Err(format!("`{labels}` holds something that is no number")),
            })
            .collect::<Result<_, _>>()?,
        _ => return Err(format!("has no list `{labels}`")),
    };
    if labels.len() != rows {
        return Err(format!("has {} labels for {rows} images", labels.len()));
    }
    Ok(CifarBatch { rows, data, labels })
}

impl Machine<'_> {
    fn run(&mut self) -> Result<Value, String> {
        loop {
            let at = self.at;
            let op = self.byte()?;
            match op {
                0x80 => {
                    let version = self.byte()?;
                    if version > 5 {
                        return Err(format!("is a pickle of version {version}; valid: up to 5"));
                    }
                }
                // a frame opcode only gives the length of the following bytes
                0x95 => {
                    self.range(8)?;
                }
                b'.' => return self.pop(),
                b'(' => self.stack.push(Value::Mark),
                b'}' => self.stack.push(Value::Dict(Vec::new())),
                b']' => self.stack.push(Value::List(Vec::new())),
                b')' => self.stack.push(Value::Tuple(Vec::new())),
                b'N' => self.stack.push(Value::None),
                0x88 => self.stack.push(Value::Int(1)),
                0x89 => self.stack.push(Value::Int(0)),
                b'K' => self.int(1)?,
                b'M' => self.int(2)?,
                b'J' => self.int(4)?,
                b'U' | b'C' | 0x8c => self.text(1)?,
                b'T' | b'B' | b'X' => self.text(4)?,
                0x8e | 0x8d => self.text(8)?,
                b'q' => self.put(1)?,
                b'r' => self.put(4)?,
                0x94 => self.put(0)?,
                b'h' => self.get(1)?,
                b'j' => self.get(4)?,
                0x85..=0x87 => {
                    let n = usize::from(op - 0x84);
                    let from = self.stack.len().checked_sub(n).ok_or("takes from an empty stack")?;
                    let items = self.stack.split_off(from);
                    self.stack.push(Value::Tuple(items));
                }
                b't' => {
                    let items = self.since_mark()?;
                    self.stack.push(Value::Tuple(items));
                }
                b'a' => {
                    let item = self.pop()?;
                    self.append(vec![item])?;
                }
                b'e' => {
                    let items = self.since_mark()?;
                    self.append(items)?;
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set(vec![key, value])?;
                }
                b'u' => {
                    let items = self.since_mark()?;
                    self.set(items)?;
                }
                b'c' => self.global()?,
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let named = format!("{} {}", self.shown(&module), self.shown(&name));
                    self.name(&named)?;
                }
                b'R' => self.reduce()?,
                b'b' => self.build()?,
                other => return Err(format!("has opcode 0x{other:02x} at byte {at}, which these files do not have")),
            }
        }
    }

    fn byte(&mut self) -> Result<u8, String> {
        let byte = self.bytes.get(self.at).copied().ok_or_else(|| self.cut_off())?;
        self.at += 1;
        Ok(byte)
    }

    fn cut_off(&self) -> String {
        format!("is cut off at byte {}", self.bytes.len())
    }

    fn range(&mut self, n: usize) -> Result<Range<usize>, String> {
        let end = self.at.checked_add(n).filter(|end| *end <= self.bytes.len()).ok_or_else(|| self.cut_off())?;
        let range = self.at..end;
        self.at = end;
        Ok(range)
    }

    fn unsigned(&mut self, n: usize) -> Result<u64, String> {
        let range = self.range(n)?;
        Ok(self.bytes[range].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn int(&mut self, n: usize) -> Result<(), String> {
        let number = self.unsigned(n)?;
        let number = if n == 4 { i64::from(number as u32 as i32) } else { number as i64 };
        self.stack.push(Value::Int(number));
        Ok(())
    }

    fn text(&mut self, n: usize) -> Result<(), String> {
        let length = usize::try_from(self.unsigned(n)?).map_err(|_| self.cut_off())?;
        let range = self.range(length)?;
        self.stack.push(Value::Text(range));
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, String> {
        match self.stack.pop() {
            Some(Value::Mark) | None => Err("takes from an empty stack".into()),
            Some(value) => Ok(value),
        }
    }

    fn since_mark(&mut self) -> Result<Vec<Value>, String> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark)).ok_or("has no mark")?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    /// Keeps only values that do not change later: a list that was fetched again would have to be the same object.
    fn put(&mut self, n: usize) -> Result<(), String> {
        let index = if n == 0 { self.puts } else { self.unsigned(n)? as u32 };
        self.puts += 1;
        if let Some(value @ (Value::Text(_) | Value::KnownName(_) | Value::Int(_) | Value::None | Value::Type(_))) =
            self.stack.last()
        {
            self.memo.insert(index, value.clone());
        }
        Ok(())
    }

    fn get(&mut self, n: usize) -> Result<(), String> {
        let index = self.unsigned(n)? as u32;
        let value = self.memo.get(&index).cloned().ok_or("takes back a value that these files do not share")?;
        self.stack.push(value);
        Ok(())
    }

    fn append(&mut self, items: Vec<Value>) -> Result<(), String> {
        match self.stack.last_mut() {
            Some(Value::List(list)) => {
                list.extend(items);
                Ok(())
            }
            _ => Err("appends to what is no list".into()),
        }
    }

    fn set(&mut self, items: Vec<Value>) -> Result<(), String> {
        let Some(Value::Dict(entries)) = self.stack.last_mut() else { return Err("sets keys of no dictionary".into()) };
        let mut items = items.into_iter();
        while let (Some(key), value) = (items.next(), items.next()) {
            entries.push((key, value.ok_or("sets a key without a value")?));
        }
        Ok(())
    }

    fn global(&mut self) -> Result<(), String> {
        let mut line = || {
            let rest = self.bytes.get(self.at..).unwrap_or_default();
            let end = rest.iter().take(100).position(|byte| *byte == b'\n').ok_or("has a name without an end")?;
            self.at += end + 1;
            Ok::<_, String>(String::from_utf8_lossy(&rest[..end]).into_owned())
        };
        let named = format!("{} {}", line()?, line()?);
        self.name(&named)
    }

    fn name(&mut self, named: &str) -> Result<(), String> {
        let known = KNOWN_NAMES.iter().find(|(name, _)| *name == named).map(|(_, name)| *name);
        let name = known
            .ok_or_else(|| format!("names {named:?}, which is not of an array of numpy; nothing of it was run"))?;
        self.stack.push(Value::KnownName(name));
        Ok(())
    }

    fn shown(&self, value: &Value) -> String {
        match value {
            Value::Text(range) => self.bytes[range.clone()].iter().take(60).map(|byte| char::from(*byte)).collect(),
            _ => "?".into(),
        }
    }

    fn reduce(&mut self) -> Result<(), String> {
        let (arguments, name) = (self.pop()?, self.pop()?);
        let Value::Tuple(arguments) = arguments else { return Err("calls without a tuple".into()) };
        let made = match (name, arguments.as_slice()) {
            (Value::KnownName(KnownName::Reconstruct), [Value::KnownName(KnownName::Array), ..]) => Value::NewArray,
            (Value::KnownName(KnownName::Type), [Value::Text(range), ..]) => Value::Type(range.clone()),
            _ => return Err("calls what is not of an array of bytes; nothing of it was run".into()),
        };
        self.stack.push(made);
        Ok(())
    }

    fn build(&mut self) -> Result<(), String> {
        let state = self.pop()?;
        let target = self.pop()?;
        let made = match (target, state) {
            (Value::Type(name), Value::Tuple(_)) => Value::Type(name),
            (Value::NewArray, Value::Tuple(state)) => match state.as_slice() {
                [_, Value::Tuple(shape), Value::Type(name), Value::Int(0), Value::Text(data)] => {
                    if &self.bytes[name.clone()] != b"u1" {
                        return Err(format!(
                            "has an array of type {:?}; valid: u1",
                            self.shown(&Value::Text(name.clone()))
                        ));
                    }
                    let numbers = shape.iter().map(|value| match value {
                        Value::Int(n) => Ok(*n),
                        _ => Err("has an array with no shape".to_owned()),
                    });
                    Value::Array { shape: numbers.collect::<Result<_, _>>()?, data: data.clone() }
                }
                _ => return Err("has an array in another layout; valid: bytes, row by row".into()),
            },
            _ => return Err("fills what is no array".into()),
        };
        self.stack.push(made);
        Ok(())
    }
}
