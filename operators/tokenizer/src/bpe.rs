//! BPE: splits a word into symbols (bytes or characters) and merges adjacent pairs, always the leftmost pair of the
//! lowest rank.
//!
//! ```text
//!  l o w e r      ranks of pairs:  lo 7   ow 3   we -   er 1
//!  l o w er       merge er; look up the ranks with its neighbours again
//!  l ow er        …
//! ```
//!
//! For a word of up to [`MAX_SCANNED_BYTES`] bytes, each merge scans all pairs for the lowest rank, which is fastest
//! for typical words. A longer word uses a heap of pairs, so that n bytes cost O(n log n). Both give the same ids,
//! which a test verifies.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::table::decode_utf8;

/// Bytes of the longest word that is merged by scanning.
const MAX_SCANNED_BYTES: usize = 48;
/// Buffer capacity, in symbols, that is kept after a long word.
const MAX_KEPT_SYMBOLS: usize = 1 << 16;
/// Marks a missing token, rank or neighbour.
const NONE: u32 = u32::MAX;

/// Hash table from pairs of tokens to their rank and merged token.
#[derive(Debug)]
struct MergeTable {
    slots: Box<[Slot]>,
    shift: u32,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    pair: u64,
    rank: u32,
    id: u32,
}

/// Ids are below `u32::MAX`, so no pair has this key.
const EMPTY_SLOT: Slot = Slot { pair: u64::MAX, rank: NONE, id: NONE };

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl MergeTable {
    /// Creates a table of pairs in rank order. If a pair occurs more than once, the last rank counts.
    fn new(merges: &[(u32, u32, u32)]) -> Self {
        let size = (2 * merges.len()).next_power_of_two().max(2);
        let mut table = Self { slots: vec![EMPTY_SLOT; size].into(), shift: 64 - size.trailing_zeros() };
        for (rank, &(left, right, id)) in (0..).zip(merges) {
            let at = table.slot_index(pair(left, right));
            table.slots[at] = Slot { pair: pair(left, right), rank, id };
        }
        table
    }

    /// Index of the slot of a pair, or of the empty slot for it. At least half of the slots are empty.
    #[inline]
    fn slot_index(&self, pair: u64) -> usize {
        let mut at = (pair.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        loop {
            let slot = &self.slots[at];
            if slot.pair == pair || slot.pair == EMPTY_SLOT.pair {
                return at;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// Rank and merged id of a pair; [`NONE`] for both if the pair does not merge.
    #[inline]
    fn get(&self, left: u32, right: u32) -> (u32, u32) {
        let slot = &self.slots[self.slot_index(pair(left, right))];
        (slot.rank, slot.id)
    }
}

/// The initial symbols of a word.
#[derive(Debug)]
pub(crate) enum Alphabet {
    /// The token of each byte; [`NONE`] for a byte without a token, which is dropped.
    Bytes(Box<[u32; 256]>),
    /// The tokens of characters, and the byte tokens for characters that have none.
    Chars { ascii: Box<[u32; 128]>, others: HashMap<u32, u32>, bytes: Box<[u32; 256]> },
}

impl Alphabet {
    pub(crate) fn bytes(bytes: [Option<u32>; 256]) -> Self {
        Self::Bytes(Box::new(bytes.map(|id| id.unwrap_or(NONE))))
    }

    pub(crate) fn chars(chars: HashMap<u32, u32>, bytes: [u32; 256]) -> Self {
        let id = |byte: usize| chars.get(&(byte as u32)).copied().unwrap_or(bytes[byte]);
        Self::Chars { ascii: Box::new(std::array::from_fn(id)), others: chars, bytes: Box::new(bytes) }
    }

    /// Calls `symbol` with the initial tokens of a word, at most one per byte.
    #[inline]
    fn for_each_symbol(&self, word: &[u8], mut symbol: impl FnMut(u32)) {
        match self {
            Self::Bytes(bytes) => {
                let ids = word.iter().map(|byte| bytes[usize::from(*byte)]);
                ids.filter(|id| *id != NONE).for_each(symbol);
            }
            Self::Chars { ascii, others, bytes } => {
                let mut at = 0;
                while at < word.len() {
                    let first = usize::from(word[at]);
                    if first < 128 {
                        symbol(ascii[first]);
                        at += 1;
                        continue;
                    }
                    let (code, length) = decode_utf8(word, at);
                    match others.get(&code) {
                        Some(id) => symbol(*id),
                        None => word[at..at + length].iter().for_each(|byte| symbol(bytes[usize::from(*byte)])),
                    }
                    at += length;
                }
            }
        }
    }
}

/// A vocabulary with its merges.
#[derive(Debug)]
pub(crate) struct Bpe {
    alphabet: Alphabet,
    merges: MergeTable,
    /// Tokens by their bytes, for `ignore_merges`: a word that is a token is not merged.
    whole_words: Option<HashMap<Box<[u8]>, u32>>,
}

/// A symbol of a long word, in a doubly linked list.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    id: u32,
    previous: u32,
    next: u32,
}

/// A symbol of a short word, with the rank and the result of its merge with the next symbol.
#[derive(Debug, Clone, Copy)]
struct ScannedSymbol {
    id: u32,
    rank: u32,
    merged: u32,
}

/// Reusable buffers for merging.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<u64>>,
}

impl Bpe {
    /// Creates a model from an alphabet, the merges (left, right, merged) in rank order, and the tokens by their bytes
    /// for `ignore_merges`.
    pub(crate) fn new(
        alphabet: Alphabet,
        merges: &[(u32, u32, u32)],
        whole_words: Option<HashMap<Box<[u8]>, u32>>,
    ) -> Self {
        Self { alphabet, merges: MergeTable::new(merges), whole_words }
    }

    /// Appends the ids of a word.
    pub(crate) fn encode(&self, word: &[u8], workspace: &mut Workspace, ids: &mut Vec<u32>) {
        if let Some(&id) = self.whole_words.as_ref().and_then(|words| words.get(word)) {
            ids.push(id);
        } else if word.len() <= MAX_SCANNED_BYTES {
            self.encode_short(word, ids);
        } else {
            self.encode_long(word, workspace, ids);
        }
    }

    fn encode_short(&self, word: &[u8], ids: &mut Vec<u32>) {
        let mut symbols = [ScannedSymbol { id: NONE, rank: NONE, merged: NONE }; MAX_SCANNED_BYTES];
        let mut count = 0;
        self.alphabet.for_each_symbol(word, |id| {
            symbols[count].id = id;
            count += 1;
        });
        for at in 1..count {
            (symbols[at - 1].rank, symbols[at - 1].merged) = self.merges.get(symbols[at - 1].id, symbols[at].id);
        }
        loop {
            let symbols = &mut symbols[..count];
            let mut lowest = NONE;
            let mut at = 0;
            for (i, symbol) in symbols.iter().enumerate() {
                if symbol.rank < lowest {
                    (lowest, at) = (symbol.rank, i);
                }
            }
            if lowest == NONE {
                break;
            }
            symbols[at].id = symbols[at].merged;
            symbols.copy_within(at + 2.., at + 1);
            count -= 1;
            let symbols = &mut symbols[..count];
            (symbols[at].rank, symbols[at].merged) = match symbols.get(at + 1) {
                Some(next) => self.merges.get(symbols[at].id, next.id),
                None => (NONE, NONE),
            };
            if at > 0 {
                (symbols[at - 1].rank, symbols[at - 1].merged) = self.merges.get(symbols[at - 1].id, symbols[at].id);
            }
        }
        ids.extend(symbols[..count].iter().map(|symbol| symbol.id));
    }

    /// Encodes a word of less than 2^32 bytes; [`crate::FastTokenizer::encode`] rejects larger texts.
    fn encode_long(&self, word: &[u8], workspace: &mut Workspace, ids: &mut Vec<u32>) {
        let Workspace { symbols, queue } = workspace;
        symbols.clear();
        queue.clear();
        self.alphabet.for_each_symbol(word, |id| {
            let at = symbols.len() as u32;
            symbols.push(Symbol { id, previous: at.wrapping_sub(1), next: at + 1 });
        });
        let Some(last) = symbols.last_mut() else { return };
        last.next = NONE;
        // Lowest rank first, then leftmost.
        let entry = |rank: u32, at: u32| Reverse(u64::from(rank) << 32 | u64::from(at));
        for at in 1..symbols.len() {
            let (rank, _) = self.merges.get(symbols[at - 1].id, symbols[at].id);
            if rank != NONE {
                queue.push(entry(rank, at as u32 - 1));
            }
        }
        while let Some(Reverse(top)) = queue.pop() {
            let at = top as u32;
            let Symbol { id, previous, next } = symbols[at as usize];
            // This symbol was merged into another, or has no right neighbour.
            if id == NONE || next == NONE {
                continue;
            }
            let right = symbols[next as usize];
            let (rank, merged) = self.merges.get(id, right.id);
            // The pair has changed since it was queued.
            if rank != (top >> 32) as u32 {
                continue;
            }
            symbols[next as usize].id = NONE;
            symbols[at as usize] = Symbol { id: merged, previous, next: right.next };
            if right.next != NONE {
                symbols[right.next as usize].previous = at;
                let (rank, _) = self.merges.get(merged, symbols[right.next as usize].id);
                if rank != NONE {
                    queue.push(entry(rank, at));
                }
            }
            if previous != NONE {
                let (rank, _) = self.merges.get(symbols[previous as usize].id, merged);
                if rank != NONE {
                    queue.push(entry(rank, previous));
                }
            }
        }
        ids.extend(symbols.iter().map(|symbol| symbol.id).filter(|&id| id != NONE));
        symbols.shrink_to(MAX_KEPT_SYMBOLS);
        queue.shrink_to(MAX_KEPT_SYMBOLS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes a to d are tokens 0 to 3, the other bytes have none. The merges compete, also for the same token.
    fn bpe(whole_words: Option<HashMap<Box<[u8]>, u32>>) -> Bpe {
        let mut bytes = [None; 256];
        (b'a'..=b'd').zip(0..).for_each(|(byte, id)| bytes[usize::from(byte)] = Some(id));
        // aa ab ca aab cab cd aaaa abcd(ab+cd) bc
        let merges = [
            (0, 0, 4),
            (0, 1, 5),
            (2, 0, 6),
            (0, 5, 7),
            (4, 1, 7),
            (6, 1, 8),
            (2, 3, 9),
            (4, 4, 10),
            (5, 9, 11),
            (1, 2, 12),
        ];
        Bpe::new(Alphabet::bytes(bytes), &merges, whole_words)
    }

    /// The definition: merges the leftmost pair of the lowest rank until no pair merges.
    fn defined(bpe: &Bpe, word: &[u8]) -> Vec<u32> {
        let mut ids = Vec::new();
        bpe.alphabet.for_each_symbol(word, |id| ids.push(id));
        loop {
            let pairs = ids.windows(2).enumerate().map(|(at, two)| (bpe.merges.get(two[0], two[1]), at));
            let Some(((_, merged), at)) =
                pairs.filter(|((rank, _), _)| *rank != NONE).min_by_key(|((rank, _), at)| (*rank, *at))
            else {
                return ids;
            };
            ids.splice(at..at + 2, [merged]);
        }
    }

    #[test]
    fn every_short_word_is_merged_as_defined_both_ways() {
        let (bpe, mut workspace) = (bpe(None), Workspace::default());
        for length in 0..=7u32 {
            for mut number in 0..5u32.pow(length) {
                let word: Vec<u8> = std::iter::repeat_with(|| {
                    let digit = number % 5;
                    number /= 5;
                    b'a' + digit as u8
                })
                .take(length as usize)
                .collect();
                let (mut short, mut long) = (Vec::new(), Vec::new());
                bpe.encode_short(&word, &mut short);
                bpe.encode_long(&word, &mut workspace, &mut long);
                assert_eq!(short, defined(&bpe, &word), "{word:?}");
                assert_eq!(short, long, "{word:?}");
            }
        }
    }

    #[test]
    fn a_word_that_is_a_token_is_taken_as_it_is_where_merges_are_ignored() {
        let word: Box<[u8]> = b"aab".as_slice().into();
        let (mut ids, mut workspace) = (Vec::new(), Workspace::default());
        bpe(Some([(word, 77)].into())).encode(b"aab", &mut workspace, &mut ids);
        bpe(None).encode(b"aab", &mut workspace, &mut ids);
        bpe(Some(HashMap::new())).encode(b"dab", &mut workspace, &mut ids);
        assert_eq!(ids, [77, 7, 3, 5]);
    }
}
