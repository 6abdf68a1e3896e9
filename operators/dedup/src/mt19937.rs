//! The random numbers of numpy's `RandomState`: the Mersenne Twister MT19937 (Matsumoto and Nishimura 1998).

const SIZE: usize = 624;
const MIDDLE: usize = 397;

/// The generator.
pub(crate) struct Mt19937 {
    state: [u32; SIZE],
    next: usize,
}

impl Mt19937 {
    /// Seeds the generator as `numpy.random.RandomState(seed)`.
    pub(crate) fn new(seed: u32) -> Self {
        let (mut state, mut word) = ([0; SIZE], seed);
        for (word_number, slot) in (1u32..).zip(&mut state) {
            *slot = word;
            word = (word ^ word >> 30).wrapping_mul(1_812_433_253).wrapping_add(word_number);
        }
        Self { state, next: SIZE }
    }

    fn next_u32(&mut self) -> u32 {
        if self.next >= SIZE {
            self.twist();
            self.next = 0;
        }
        let mut word = self.state.get(self.next).copied().unwrap_or_default();
        self.next += 1;
        word ^= word >> 11;
        word ^= word << 7 & 0x9d2c_5680;
        word ^= word << 15 & 0xefc6_0000;
        word ^ word >> 18
    }

    #[expect(clippy::indexing_slicing, reason = "indices are remainders of the array's length")]
    fn twist(&mut self) {
        for word in 0..SIZE {
            let bits = self.state[word] & 0x8000_0000 | self.state[(word + 1) % SIZE] & 0x7fff_ffff;
            let mixed = bits >> 1 ^ if bits & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[word] = self.state[(word + MIDDLE) % SIZE] ^ mixed;
        }
    }

    /// Returns a number of `least..end` as `randint(least, end, dtype=numpy.uint64)`, for ranges of more than 2³² numbers:
    /// it draws as many bits as the largest offset has until they are at most this offset.
    pub(crate) fn between(&mut self, least: u64, end: u64) -> u64 {
        let most = end.saturating_sub(least).saturating_sub(1);
        let mask = u64::MAX.checked_shr(most.leading_zeros()).unwrap_or(0);
        loop {
            let high = u64::from(self.next_u32());
            let bits = (high << 32 | u64::from(self.next_u32())) & mask;
            if bits <= most {
                return least + bits;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIME: u64 = (1 << 61) - 1;

    #[test]
    fn numbers_are_those_of_numpy() {
        // seed, first, second and last of 112 factors, first and last of 112 terms, sums modulo 2^64
        let golden = [
            [
                0,
                900450186894289456,
                1663700137427455169,
                1778425994450018244,
                1373900170940344459,
                886307586694282554,
                7068053453070407594,
                680630624369875762,
            ],
            [
                1,
                775169054918279404,
                1758426461858698313,
                223865076026037746,
                1062448801025099917,
                1097409548522419201,
                2943313736397281199,
                16794938108062934250,
            ],
            [
                2,
                1125157359331674640,
                478254495130285641,
                717863844321172688,
                825223587249401489,
                985317444286021802,
                13922225036949454370,
                2213279644644871699,
            ],
            [
                42,
                2297359619001564596,
                1396682528897996047,
                668164788960253724,
                1008993515362167465,
                2171473285054116309,
                1630400182010879917,
                13743439882690760416,
            ],
            [
                1234567,
                2066573419693323904,
                141087632826591559,
                489528265153217061,
                1717006371851854097,
                2222480671964382927,
                675364339695920418,
                12751019988014871492,
            ],
            [
                4294967295,
                1800993050274709795,
                689591756664908872,
                1802021346452794583,
                170188868942024698,
                580489220341456171,
                1341383794122263226,
                2177173588992136210,
            ],
        ];
        for row in golden {
            let mut random = Mt19937::new(row[0] as u32);
            let factors: Vec<u64> = (0..112).map(|_| random.between(1, PRIME)).collect();
            let terms: Vec<u64> = (0..112).map(|_| random.between(0, PRIME)).collect();
            let sum = |numbers: &[u64]| numbers.iter().fold(0u64, |sum, &number| sum.wrapping_add(number));
            let got = [row[0], factors[0], factors[1], factors[111], terms[0], terms[111], sum(&factors), sum(&terms)];
            assert_eq!(got, row);
        }
    }
}
