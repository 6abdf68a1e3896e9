//! Checks that all scans of a JPEG are complete to their last block. Decoders read zeros if a file was truncated and
//! closed with an end marker, and a progressive file without its last scans decodes to a coarser picture. Both decode
//! without an error, but not to the original image.
//!
//! ```text
//!   SOI ─ DQT, DHT, DRI, SOF ─ SOS ─ entropy-coded bits (RST …) ─ SOS … ─ EOI
//!                              │       └ walked block by block, with the Huffman tables; no values are computed
//!                              └ which coefficients of which components, to which bit: at the end all of them, to the last
//! ```
//!
//! Procedures: ITU T.81, F.2.2 (sequential) and G.1.2, G.2 (progressive). The check runs on files that the decoder
//! accepted, so it passes whatever it does not know.
//!
//! Cost: one Huffman decoding of the file. Memory: 8 bytes per block of 8×8 of a progressive file.

use std::fmt;

/// The part of a JPEG that is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Missing {
    /// Scan number, from 1; blocks (or units of several components) that it has; blocks that it needs.
    Blocks { scan: usize, present: u64, all: u64 },
    /// Component number, from 0. Some of its coefficients were never coded, or not to their last bit.
    Scans { component: usize },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks { scan, present, all } => {
                write!(f, "is truncated but has an end marker: scan {scan} has {present} of its {all} blocks")
            }
            Self::Scans { component } => {
                write!(f, "lacks its last scans: component {component} is incomplete")
            }
        }
    }
}

/// Why the walk stopped before the end of the file.
enum Stop {
    Missing(Missing),
    /// Something that the walk does not know, or that the decoder has already judged.
    Unknown,
}

/// Returns the missing part of a JPEG, if any.
pub(super) fn find_missing(bytes: &[u8]) -> Option<Missing> {
    match Walker::default().run(bytes) {
        Ok(missing) => missing,
        Err(Stop::Missing(missing)) => Some(missing),
        Err(Stop::Unknown) => None,
    }
}

/// A component of the frame.
struct Component {
    id: u8,
    /// Blocks of the component per unit: `across` horizontally, `down` vertically.
    across: usize,
    down: usize,
    /// Blocks of the component in a scan of its own, across and down.
    blocks: (usize, usize),
    /// Blocks per row, padded to whole units.
    stride: usize,
    /// Lowest bit to which each coefficient was coded; `None` if it was not.
    lowest: [Option<u8>; 64],
    /// For a progressive frame: a mask per block of the coefficients that are not zero, by zigzag index.
    nonzero: Vec<u64>,
}

struct Frame {
    is_progressive: bool,
    components: Vec<Component>,
    /// Units of a scan of several components, across and down.
    units: (usize, usize),
}

/// A Huffman code: a table for short codes, by their first bits, and the longer codes by length.
#[derive(Clone)]
struct Huffman {
    /// For each value of [`Huffman::LOOKUP_BITS`] bits: length and symbol of the code they begin with, or 0.
    first: Vec<u16>,
    /// For each length: its last code plus one, and the offset from a code to the index of its symbol.
    ends: [(u32, i32); 17],
    symbols: Vec<u8>,
}

impl Huffman {
    const LOOKUP_BITS: u32 = 9;

    fn new(counts: &[u8], symbols: &[u8]) -> Option<Self> {
        let mut first = vec![0; 1 << Self::LOOKUP_BITS];
        let mut ends = [(0, 0); 17];
        let (mut code, mut at) = (0u32, 0usize);
        for (length, count) in (1..=16u32).zip(counts) {
            let count = usize::from(*count);
            let place = at as i32 - code as i32;
            for symbol in symbols.get(at..at + count)? {
                if length <= Self::LOOKUP_BITS {
                    let shift = Self::LOOKUP_BITS - length;
                    let from = (code as usize) << shift;
                    let entry = (length as u16) << 8 | u16::from(*symbol);
                    first.get_mut(from..from + (1 << shift))?.fill(entry);
                }
                code += 1;
            }
            at += count;
            *ends.get_mut(length as usize)? = (code, place);
            if code > 1 << length {
                return None;
            }
            code <<= 1;
        }
        Some(Self { first, ends, symbols: symbols.to_vec() })
    }
}

/// Reads the bits of an entropy-coded segment.
struct BitReader<'a> {
    bytes: &'a [u8],
    at: usize,
    buffer: u64,
    count: u32,
}

/// The error at the end of a segment.
struct EndOfSegment;

impl BitReader<'_> {
    /// Fills the buffer with bytes up to the next marker.
    fn fill(&mut self) {
        while self.count <= 56 {
            let Some(byte) = self.bytes.get(self.at) else { return };
            if *byte == 0xff {
                if self.bytes.get(self.at + 1) != Some(&0) {
                    return;
                }
                self.at += 1;
            }
            self.at += 1;
            self.buffer = self.buffer << 8 | u64::from(*byte);
            self.count += 8;
        }
    }

    /// Returns the next bits without consuming them; zeros after the end.
    fn peek(&self, n: u32) -> usize {
        let bits = match self.count.checked_sub(n) {
            Some(behind) => self.buffer >> behind,
            None => self.buffer << (n - self.count),
        };
        (bits & ((1 << n) - 1)) as usize
    }

    /// Reads up to 16 bits.
    fn take(&mut self, n: u32) -> Result<u32, EndOfSegment> {
        if n == 0 {
            return Ok(0);
        }
        if self.count < n {
            self.fill();
        }
        let bits = self.peek(n) as u32;
        self.count = self.count.checked_sub(n).ok_or(EndOfSegment)?;
        Ok(bits)
    }

    /// Reads the next symbol; `None` if the bits are not a code, which can happen with the zeros after the end.
    fn symbol(&mut self, code: &Huffman) -> Result<Option<u8>, EndOfSegment> {
        if self.count < 16 {
            self.fill();
        }
        let entry = code.first.get(self.peek(Huffman::LOOKUP_BITS)).copied().unwrap_or(0);
        if entry != 0 {
            self.count = self.count.checked_sub(u32::from(entry >> 8)).ok_or(EndOfSegment)?;
            return Ok(Some(entry as u8));
        }
        for length in Huffman::LOOKUP_BITS + 1..=16 {
            let bits = self.peek(length) as u32;
            let (end, place) = code.ends.get(length as usize).copied().unwrap_or_default();
            if bits < end {
                self.count = self.count.checked_sub(length).ok_or(EndOfSegment)?;
                let symbol = usize::try_from(bits as i32 + place).ok().and_then(|at| code.symbols.get(at));
                return Ok(symbol.copied());
            }
        }
        if self.count < 16 { Err(EndOfSegment) } else { Ok(None) }
    }

    /// Moves past the restart marker that must follow.
    fn restart(&mut self) -> Result<(), EndOfSegment> {
        (self.buffer, self.count) = (0, 0);
        let marker = next_marker(self.bytes, self.at).ok_or(EndOfSegment)?;
        if !matches!(self.bytes.get(marker), Some(0xd0..=0xd7)) {
            return Err(EndOfSegment);
        }
        self.at = marker + 1;
        Ok(())
    }
}

/// Returns the index of the next marker's code: after one or more bytes 0xff, and not 0.
fn next_marker(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == 0xff)?;
        at += bytes.get(at..)?.iter().position(|byte| *byte != 0xff)?;
        if bytes.get(at) != Some(&0) {
            return Some(at);
        }
    }
}

/// What a scan codes: coefficients `from` to `to`, from bit `high` (0: none coded yet) down to bit `low`.
#[derive(Clone, Copy)]
struct Band {
    from: usize,
    to: usize,
    high: u8,
    low: u8,
}

#[derive(Default)]
struct Walker {
    dc: [Option<Huffman>; 4],
    ac: [Option<Huffman>; 4],
    restart: u64,
    frame: Option<Frame>,
    scans: usize,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

impl Walker {
    fn run(mut self, bytes: &[u8]) -> Result<Option<Missing>, Stop> {
        let mut at = 2;
        while let Some(marker) = next_marker(bytes, at) {
            at = marker + 1;
            let code = bytes.get(marker).copied().unwrap_or_default();
            match code {
                0xd9 => break,
                0x01 | 0xd0..=0xd8 => continue,
                _ => {}
            }
            let length = u16_at(bytes, at).ok_or(Stop::Unknown)?;
            let segment = bytes.get(at + 2..at + length.max(2)).ok_or(Stop::Unknown)?;
            at += length.max(2);
            match code {
                0xc4 => self.tables(segment).ok_or(Stop::Unknown)?,
                0xdd => self.restart = u16_at(segment, 0).ok_or(Stop::Unknown)? as u64,
                0xc0..=0xc2 if self.frame.is_none() => {
                    self.frame = Some(Frame::parse(segment, code == 0xc2).ok_or(Stop::Unknown)?);
                }
                // unsupported processes, or a second frame
                0xc0..=0xcf => return Err(Stop::Unknown),
                0xda => at = self.scan(segment, bytes, at)?,
                _ => {}
            }
        }
        let frame = self.frame.ok_or(Stop::Unknown)?;
        let is_complete = |component: &Component| component.lowest.iter().all(|lowest| *lowest == Some(0));
        let missing = frame.components.iter().position(|component| !is_complete(component));
        Ok(missing.map(|component| Missing::Scans { component }))
    }

    fn tables(&mut self, mut segment: &[u8]) -> Option<()> {
        while let Some((kind, rest)) = segment.split_first() {
            let (counts, rest) = rest.split_at_checked(16)?;
            let (symbols, rest) = rest.split_at_checked(counts.iter().map(|count| usize::from(*count)).sum())?;
            let tables = if kind >> 4 == 0 { &mut self.dc } else { &mut self.ac };
            *tables.get_mut(usize::from(kind & 15))? = Some(Huffman::new(counts, symbols)?);
            segment = rest;
        }
        Some(())
    }

    /// Walks a scan; returns the position after it.
    fn scan(&mut self, header: &[u8], bytes: &[u8], at: usize) -> Result<usize, Stop> {
        self.scans += 1;
        let frame = self.frame.as_mut().ok_or(Stop::Unknown)?;
        let scan = Scan::parse(header, frame, &self.dc, &self.ac).ok_or(Stop::Unknown)?;
        let (units, single) = match scan.parts.as_slice() {
            [part] => (frame.components[part.component].blocks, true),
            _ => (frame.units, false),
        };
        let all = units.0 as u64 * units.1 as u64;
        let mut bits = BitReader { bytes, at, buffer: 0, count: 0 };
        let mut run = 0;
        for unit in 0..all {
            let mut walked = Ok(true);
            if self.restart > 0 && unit > 0 && unit % self.restart == 0 {
                run = 0;
                walked = bits.restart().map(|()| true);
            }
            if walked.is_ok() {
                let place = ((unit % units.0 as u64) as usize, (unit / units.0 as u64) as usize);
                walked = scan.walk_unit(frame, place, single, &mut bits, &mut run);
            }
            match walked {
                Ok(true) => {}
                Ok(false) => return Err(Stop::Unknown),
                Err(EndOfSegment) => {
                    return Err(Stop::Missing(Missing::Blocks { scan: self.scans, present: unit, all }));
                }
            }
        }
        for part in &scan.parts {
            let coded = frame.components[part.component].lowest.get_mut(scan.band.from..=scan.band.to);
            coded.into_iter().flatten().for_each(|lowest| *lowest = Some(scan.band.low));
        }
        Ok(bits.at)
    }
}

impl Frame {
    fn parse(segment: &[u8], is_progressive: bool) -> Option<Self> {
        let (height, width) = (u16_at(segment, 1)?, u16_at(segment, 3)?);
        let count = usize::from(*segment.get(5)?);
        let parts: Vec<(u8, usize, usize)> = segment
            .get(6..6 + 3 * count)?
            .chunks_exact(3)
            .map(|part| (part[0], usize::from(part[1] >> 4), usize::from(part[1] & 15)))
            .collect();
        let is_sampling = |n: &usize| (1..=4).contains(n);
        if height == 0 || width == 0 || !parts.iter().all(|(_, h, v)| is_sampling(h) && is_sampling(v)) {
            return None;
        }
        let max = (parts.iter().map(|part| part.1).max()?, parts.iter().map(|part| part.2).max()?);
        let units = (width.div_ceil(8 * max.0), height.div_ceil(8 * max.1));
        let component = |(id, across, down): (u8, usize, usize)| {
            let blocks = ((width * across).div_ceil(max.0).div_ceil(8), (height * down).div_ceil(max.1).div_ceil(8));
            let stride = units.0 * across;
            let all = if is_progressive { stride * units.1 * down } else { 0 };
            Component { id, across, down, blocks, stride, lowest: [None; 64], nonzero: vec![0; all] }
        };
        Some(Self { is_progressive, components: parts.into_iter().map(component).collect(), units })
    }
}

/// A component of a scan, with its Huffman codes.
struct Part<'a> {
    component: usize,
    dc: Option<&'a Huffman>,
    ac: Option<&'a Huffman>,
}

struct Scan<'a> {
    parts: Vec<Part<'a>>,
    band: Band,
    is_progressive: bool,
}

impl<'a> Scan<'a> {
    /// Returns `None` for headers that T.81 does not allow, and if a table is missing.
    fn parse(header: &[u8], frame: &Frame, dc: &'a [Option<Huffman>; 4], ac: &'a [Option<Huffman>; 4]) -> Option<Self> {
        let count = usize::from(*header.first()?);
        let part = |two: &[u8]| {
            let component = frame.components.iter().position(|component| component.id == two[0])?;
            let table = |tables: &'a [Option<Huffman>; 4], n: u8| tables.get(usize::from(n))?.as_ref();
            Some(Part { component, dc: table(dc, two[1] >> 4), ac: table(ac, two[1] & 15) })
        };
        let parts: Vec<Part<'_>> = header.get(1..1 + 2 * count)?.chunks_exact(2).map(part).collect::<Option<_>>()?;
        let [from, to, bits] = *header.get(1 + 2 * count..)?.first_chunk::<3>()?;
        let band = match frame.is_progressive {
            true => Band { from: usize::from(from), to: usize::from(to), high: bits >> 4, low: bits & 15 },
            false => Band { from: 0, to: 63, high: 0, low: 0 },
        };
        let needs_dc = band.from == 0 && band.high == 0;
        let needs_ac = band.to > 0;
        let has = |part: &Part<'_>| (!needs_dc || part.dc.is_some()) && (!needs_ac || part.ac.is_some());
        let in_order = band.from <= band.to && band.to < 64 && band.low < 14;
        let apart = !frame.is_progressive || ((band.from == 0) == (band.to == 0) && (band.from == 0 || count == 1));
        let valid = count > 0 && in_order && apart && parts.iter().all(has);
        valid.then_some(Self { parts, band, is_progressive: frame.is_progressive })
    }

    /// Walks a unit: a block of the only component, or the blocks of several. False if bits are not a code.
    fn walk_unit(
        &self,
        frame: &mut Frame,
        (x, y): (usize, usize),
        single: bool,
        bits: &mut BitReader<'_>,
        run: &mut u32,
    ) -> Result<bool, EndOfSegment> {
        for part in &self.parts {
            let component = &mut frame.components[part.component];
            let (across, down) = if single { (1, 1) } else { (component.across, component.down) };
            for block in 0..across * down {
                let (x, y) = (x * across + block % across, y * down + block / across);
                let walked = match self.is_progressive {
                    false => walk_sequential_block(part, bits)?,
                    true => {
                        let place = y * component.stride + x;
                        let Some(nonzero) = component.nonzero.get_mut(place) else { return Ok(false) };
                        self.walk_progressive_block(part, nonzero, bits, run)?
                    }
                };
                if !walked {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// G.1.2 and G.2, with the leniency of decoders: a run past the end of the block ends it.
    fn walk_progressive_block(
        &self,
        part: &Part<'_>,
        nonzero: &mut u64,
        bits: &mut BitReader<'_>,
        run: &mut u32,
    ) -> Result<bool, EndOfSegment> {
        let Band { from, to, high, .. } = self.band;
        if from == 0 {
            return match part.dc {
                _ if high > 0 => bits.take(1).map(|_| true),
                Some(code) => skip_dc_difference(code, bits),
                None => Ok(false),
            };
        }
        let Some(code) = part.ac else { return Ok(false) };
        let mut k = from;
        while k <= to && *run == 0 {
            let Some(symbol) = bits.symbol(code)? else { return Ok(false) };
            let (zeros, size) = (u32::from(symbol >> 4), u32::from(symbol & 15));
            if size == 0 && zeros < 15 {
                // end-of-band run: this many blocks, from this one on, have no new coefficients
                *run = (1 << zeros) + bits.take(zeros)?;
                break;
            }
            let mut zeros = zeros;
            if high == 0 {
                bits.take(size)?;
                k += zeros as usize;
            } else {
                // the sign of a new coefficient, then a correction bit for each nonzero coefficient that it passes
                bits.take(size.min(1))?;
                while k <= to {
                    if *nonzero >> k & 1 == 1 {
                        bits.take(1)?;
                    } else if zeros == 0 {
                        break;
                    } else {
                        zeros -= 1;
                    }
                    k += 1;
                }
            }
            if size > 0 && k < 64 {
                *nonzero |= 1 << k;
            }
            k += 1;
        }
        if *run > 0 {
            let left = if high > 0 && k <= to { *nonzero >> k << k & (u64::MAX >> (63 - to)) } else { 0 };
            for _ in 0..left.count_ones() {
                bits.take(1)?;
            }
            *run -= 1;
        }
        Ok(true)
    }
}

/// Reads the difference of a DC coefficient.
fn skip_dc_difference(code: &Huffman, bits: &mut BitReader<'_>) -> Result<bool, EndOfSegment> {
    match bits.symbol(code)? {
        Some(size @ 0..=16) => bits.take(size.into()).map(|_| true),
        _ => Ok(false),
    }
}

/// Walks a block of a sequential scan.
fn walk_sequential_block(part: &Part<'_>, bits: &mut BitReader<'_>) -> Result<bool, EndOfSegment> {
    let (Some(dc), Some(ac)) = (part.dc, part.ac) else { return Ok(false) };
    if !skip_dc_difference(dc, bits)? {
        return Ok(false);
    }
    let mut k = 1;
    while k < 64 {
        let Some(symbol) = bits.symbol(ac)? else { return Ok(false) };
        let (zeros, size) = (symbol >> 4, symbol & 15);
        if size == 0 && zeros < 15 {
            break;
        }
        bits.take(size.into())?;
        k += usize::from(zeros) + 1;
    }
    Ok(true)
}
