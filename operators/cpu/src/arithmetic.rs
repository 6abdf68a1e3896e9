//! The number formats of products, and the choice of this machine's code for each.

use crate::ProductError;
use crate::cpu_features::Baseline;
#[cfg(target_arch = "x86_64")]
use crate::cpu_features::{AmxBf16, AmxBf16x3, Avx2, Avx512, Fp16};
use crate::widened_weights::{BF16, F16, NarrowWeights};

/// Number formats of a product's operands and sums. Rows and results in memory are f32 with each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Arithmetic {
    /// f32 products summed in f32, on every machine.
    F32,
    /// f32 products of weights that are rounded to f16 and stored in it, on every machine. The bits are those of
    /// [`Arithmetic::F32`] with the rounded weights, at half the memory.
    F32OfF16,
    /// Like [`Arithmetic::F32OfF16`], with bf16.
    F32OfBf16,
    /// f16 products, summed in f16 over 32 inputs at a time; these sums are added in f32.
    F16,
    /// bf16 products, which are exact, summed in f32.
    Bf16,
    /// f32 products of numbers split into two bf16 each, summed in f32. Nearly f32's accuracy with bf16 instructions.
    Bf16x3,
}

/// The code that computes a product, with the proof that this CPU supports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Baseline(Baseline),
    BaselineOfF16(NarrowWeights<Baseline, F16>),
    BaselineOfBf16(NarrowWeights<Baseline, BF16>),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx2OfF16(NarrowWeights<Avx2, F16>),
    #[cfg(target_arch = "x86_64")]
    Avx2OfBf16(NarrowWeights<Avx2, BF16>),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx512OfF16(NarrowWeights<Avx512, F16>),
    #[cfg(target_arch = "x86_64")]
    Avx512OfBf16(NarrowWeights<Avx512, BF16>),
    #[cfg(target_arch = "x86_64")]
    Fp16(Fp16),
    #[cfg(target_arch = "x86_64")]
    AmxBf16(AmxBf16),
    #[cfg(target_arch = "x86_64")]
    AmxBf16x3(AmxBf16x3),
}

/// Runs `$body` with the kernel of a [`Level`].
macro_rules! with_kernel {
    ($level:expr, $kernel:ident => $body:expr) => {
        match $level {
            $crate::arithmetic::Level::Baseline($kernel) => $body,
            $crate::arithmetic::Level::BaselineOfF16($kernel) => $body,
            $crate::arithmetic::Level::BaselineOfBf16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Avx2($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Avx2OfF16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Avx2OfBf16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Avx512($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Avx512OfF16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Avx512OfBf16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Fp16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::AmxBf16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::AmxBf16x3($kernel) => $body,
        }
    };
}
pub(crate) use with_kernel;

impl Level {
    /// Returns this machine's levels for an arithmetic, fastest first.
    pub(crate) fn all(arithmetic: Arithmetic) -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let found: [Option<Self>; 3] = match arithmetic {
            Arithmetic::F32 => {
                [Avx512::detect().map(Self::Avx512), Avx2::detect().map(Self::Avx2), Some(Self::Baseline(Baseline))]
            }
            Arithmetic::F32OfF16 => [
                Avx512::detect().map(|proof| Self::Avx512OfF16(NarrowWeights(proof))),
                Avx2::detect().map(|proof| Self::Avx2OfF16(NarrowWeights(proof))),
                Some(Self::BaselineOfF16(NarrowWeights(Baseline))),
            ],
            Arithmetic::F32OfBf16 => [
                Avx512::detect().map(|proof| Self::Avx512OfBf16(NarrowWeights(proof))),
                Avx2::detect().map(|proof| Self::Avx2OfBf16(NarrowWeights(proof))),
                Some(Self::BaselineOfBf16(NarrowWeights(Baseline))),
            ],
            Arithmetic::F16 => [Fp16::detect().map(Self::Fp16), None, None],
            Arithmetic::Bf16 => [AmxBf16::detect().map(Self::AmxBf16), None, None],
            Arithmetic::Bf16x3 => [AmxBf16x3::detect().map(Self::AmxBf16x3), None, None],
        };
        #[cfg(not(target_arch = "x86_64"))]
        let found = [match arithmetic {
            Arithmetic::F32 => Some(Self::Baseline(Baseline)),
            Arithmetic::F32OfF16 => Some(Self::BaselineOfF16(NarrowWeights(Baseline))),
            Arithmetic::F32OfBf16 => Some(Self::BaselineOfBf16(NarrowWeights(Baseline))),
            Arithmetic::F16 | Arithmetic::Bf16 | Arithmetic::Bf16x3 => None,
        }];
        found.into_iter().flatten().filter(|level| is_allowed(level.name())).collect()
    }

    /// Returns this machine's fastest level for an arithmetic.
    pub(crate) fn best(arithmetic: Arithmetic) -> Result<Self, ProductError> {
        Self::all(arithmetic).first().copied().ok_or_else(|| ProductError::Unavailable {
            got: arithmetic.name(),
            valid: Arithmetic::ALL
                .iter()
                .filter(|a| a.is_available() && !a.widens())
                .map(|a| a.name())
                .collect::<Vec<_>>()
                .join(", "),
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Baseline(_) | Self::BaselineOfF16(_) | Self::BaselineOfBf16(_) => "baseline",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) | Self::Avx2OfF16(_) | Self::Avx2OfBf16(_) => "avx2+fma",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) | Self::Avx512OfF16(_) | Self::Avx512OfBf16(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Fp16(_) => "avx512fp16",
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16(_) => "amx-bf16",
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16x3(_) => "amx-bf16x3",
        }
    }
}

impl Arithmetic {
    /// All variants.
    pub const ALL: [Self; 6] = [Self::F32, Self::F32OfF16, Self::F32OfBf16, Self::F16, Self::Bf16, Self::Bf16x3];

    /// Whether this machine has the instructions. Asks the CPU at run time, and the operating system's kernel for AMX.
    #[must_use]
    pub fn is_available(self) -> bool {
        !Level::all(self).is_empty()
    }

    /// Whether weights in memory are narrower than the numbers that are multiplied.
    pub(crate) const fn widens(self) -> bool {
        matches!(self, Self::F32OfF16 | Self::F32OfBf16)
    }

    /// The name in manifests: f32, f32-of-f16, f32-of-bf16, f16, bf16 or bf16x3.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F32OfF16 => "f32-of-f16",
            Self::F32OfBf16 => "f32-of-bf16",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Bf16x3 => "bf16x3",
        }
    }
}

/// Whether this process may use the instructions of `level`. Tests restrict them with `STILLHOUSE_TEST_CPU` to imitate
/// another machine.
#[cfg(debug_assertions)]
fn is_allowed(level: &str) -> bool {
    static LIMIT: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| std::env::var("STILLHOUSE_TEST_CPU").ok());
    match LIMIT.as_deref() {
        Some("baseline") => level == "baseline",
        Some("avx2+fma") => level == "baseline" || level == "avx2+fma",
        _ => true,
    }
}

#[cfg(not(debug_assertions))]
const fn is_allowed(_: &str) -> bool {
    true
}

/// Returns the name, for a manifest, of the instructions that compute such a product on this machine; `unavailable` if
/// none do.
#[must_use]
pub fn level_name(arithmetic: Arithmetic) -> &'static str {
    Level::best(arithmetic).map_or("unavailable", Level::name)
}
