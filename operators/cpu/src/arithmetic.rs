//! The types of a product, and which code of this machine computes them.

use crate::ProductError;
use crate::cpu::Baseline;
#[cfg(target_arch = "x86_64")]
use crate::cpu::{AmxBf16, AmxBf16x3, AmxInt8, Avx2, Avx512, Fp16, Vnni};

/// The types of a product; rows and results are f32 in memory with each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Arithmetic {
    /// f32 products summed in f32, on every machine.
    F32,
    /// f16 products summed in f16 over 32 inputs at a time, those sums in f32.
    F16,
    /// bf16 products, exact, summed in f32.
    Bf16,
    /// f32 products of numbers that are the sum of two of bf16, summed in f32: nearly f32's accuracy, by the instructions of bf16.
    Bf16x3,
    /// 8-bit products, summed exactly.
    Int8,
}

/// The code that computes a product, with the proof that it may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Baseline(Baseline),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Fp16(Fp16),
    #[cfg(target_arch = "x86_64")]
    Vnni(Vnni),
    #[cfg(target_arch = "x86_64")]
    AmxBf16(AmxBf16),
    #[cfg(target_arch = "x86_64")]
    AmxBf16x3(AmxBf16x3),
    #[cfg(target_arch = "x86_64")]
    AmxInt8(AmxInt8),
}

/// Runs `$body` with the kernel of a [`Level`].
macro_rules! with_kernel {
    ($level:expr, $kernel:ident => $body:expr) => {
        match $level {
            $crate::arithmetic::Level::Baseline($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Avx2($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Avx512($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Fp16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::Vnni($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::AmxBf16($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::AmxBf16x3($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::arithmetic::Level::AmxInt8($kernel) => $body,
        }
    };
}
pub(crate) use with_kernel;

impl Level {
    /// The levels of this machine for a product, fastest first.
    pub(crate) fn all(arithmetic: Arithmetic) -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let found: [Option<Self>; 3] = match arithmetic {
            Arithmetic::F32 => {
                [Avx512::detect().map(Self::Avx512), Avx2::detect().map(Self::Avx2), Some(Self::Baseline(Baseline))]
            }
            Arithmetic::F16 => [Fp16::detect().map(Self::Fp16), None, None],
            Arithmetic::Bf16 => [AmxBf16::detect().map(Self::AmxBf16), None, None],
            Arithmetic::Bf16x3 => [AmxBf16x3::detect().map(Self::AmxBf16x3), None, None],
            Arithmetic::Int8 => [AmxInt8::detect().map(Self::AmxInt8), Vnni::detect().map(Self::Vnni), None],
        };
        #[cfg(not(target_arch = "x86_64"))]
        let found = [(arithmetic == Arithmetic::F32).then_some(Self::Baseline(Baseline))];
        found.into_iter().flatten().filter(|level| is_allowed(level.name())).collect()
    }

    /// The fastest level of this machine.
    pub(crate) fn best(arithmetic: Arithmetic) -> Result<Self, ProductError> {
        Self::all(arithmetic).first().copied().ok_or_else(|| ProductError::Unavailable {
            got: arithmetic.name(),
            valid: Arithmetic::ALL.iter().filter(|a| a.available()).map(|a| a.name()).collect::<Vec<_>>().join(", "),
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Baseline(_) => "baseline",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2+fma",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Fp16(_) => "avx512fp16",
            #[cfg(target_arch = "x86_64")]
            Self::Vnni(_) => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16(_) => "amx-bf16",
            #[cfg(target_arch = "x86_64")]
            Self::AmxBf16x3(_) => "amx-bf16x3",
            #[cfg(target_arch = "x86_64")]
            Self::AmxInt8(_) => "amx-int8",
        }
    }
}

impl Arithmetic {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Bf16x3, Self::Int8];

    /// Whether this machine has the instructions, asked of the CPU (and, for AMX, of the kernel) at run time.
    #[must_use]
    pub fn available(self) -> bool {
        !Level::all(self).is_empty()
    }

    /// f32, f16, bf16, bf16x3 or int8.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Bf16x3 => "bf16x3",
            Self::Int8 => "int8",
        }
    }
}

/// Whether this process may take these instructions; a test takes most of them away, to be another type of machine.
#[cfg(debug_assertions)]
fn is_allowed(level: &str) -> bool {
    static MOST: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| std::env::var("STILLHOUSE_TEST_CPU").ok());
    match MOST.as_deref() {
        Some("baseline") => level == "baseline",
        Some("avx2+fma") => level == "baseline" || level == "avx2+fma",
        _ => true,
    }
}

#[cfg(not(debug_assertions))]
const fn is_allowed(_: &str) -> bool {
    true
}

/// The instructions that compute such a product on this machine, for a manifest; `unavailable` where none do.
#[must_use]
pub fn level(arithmetic: Arithmetic) -> &'static str {
    Level::best(arithmetic).map_or("unavailable", Level::name)
}
