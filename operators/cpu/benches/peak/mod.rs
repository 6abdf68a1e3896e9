//! Loops that only multiply and add in registers. Their rate is the limit that products are compared with.

use std::time::{Duration, Instant};
use stillhouse_cpu::Arithmetic;

/// Runs a loop `n` times and returns its floating-point operations. The CPU must have the loop's instructions.
pub type PeakLoop = fn(usize) -> f64;

/// Returns this machine's loops for an arithmetic, with the names of their instructions.
pub fn peak_loops(arithmetic: Arithmetic) -> Vec<(&'static str, PeakLoop)> {
    #[cfg(target_arch = "x86_64")]
    {
        let wide = is_x86_feature_detected!("avx512f");
        let arithmetic = match arithmetic {
            Arithmetic::F32OfF16 | Arithmetic::F32OfBf16 => Arithmetic::F32,
            other => other,
        };
        let all: [(Arithmetic, bool, &'static str, PeakLoop); 5] = [
            (Arithmetic::F32, wide, "fma zmm", x86::fma512),
            (Arithmetic::F32, is_x86_feature_detected!("fma"), "fma ymm", x86::fma256),
            (Arithmetic::F16, is_x86_feature_detected!("avx512fp16"), "fma f16 zmm", x86::fma16),
            (Arithmetic::Bf16, Arithmetic::Bf16.is_available(), "amx bf16", x86::amx_bf16),
            (Arithmetic::Bf16x3, Arithmetic::Bf16x3.is_available(), "amx bf16, three for one", x86::amx_bf16x3),
        ];
        all.into_iter()
            .filter(|(of, available, ..)| *of == arithmetic && *available)
            .map(|(_, _, name, peak_loop)| (name, peak_loop))
            .collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = arithmetic;
        Vec::new()
    }
}

/// Returns the highest rate of `threads` threads in GFLOP/s, over runs of some milliseconds.
pub fn gflops(peak_loop: PeakLoop, threads: usize, seconds: f64) -> f64 {
    let run = || {
        let start = Instant::now();
        let operations: f64 = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(|| peak_loop(100_000))).collect();
            peak_loop(100_000) + others.into_iter().filter_map(|other| other.join().ok()).sum::<f64>()
        });
        operations / start.elapsed().as_secs_f64() / 1e9
    };
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut best = run();
    while Instant::now() < end {
        best = best.max(run());
    }
    best
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::asm;
    use core::arch::x86_64::*;
    use std::hint::black_box;

    /// Number of independent sums: more than the multiplier's latency times its width needs.
    const SUMS: usize = 12;

    macro_rules! in_registers {
        ($name:ident, $features:literal, $zero:expr, $one:expr, |$sum:ident, $x:ident| $step:expr, $operations:expr) => {
            pub(super) fn $name(n: usize) -> f64 {
                #[target_feature(enable = $features)]
                fn run(n: usize) {
                    let $x = black_box($one);
                    let mut sums = [$zero; SUMS];
                    for _ in 0..n {
                        for sum in &mut sums {
                            let $sum = *sum;
                            *sum = $step;
                        }
                    }
                    black_box(sums);
                }
                // SAFETY: `peak_loops` checked the CPU for the features.
                unsafe { run(n) };
                (n * SUMS * $operations) as f64
            }
        };
    }
    in_registers!(fma512, "avx512f", _mm512_setzero_ps(), _mm512_set1_ps(0.5), |s, x| _mm512_fmadd_ps(s, x, x), 32);
    in_registers!(fma256, "avx2,fma", _mm256_setzero_ps(), _mm256_set1_ps(0.5), |s, x| _mm256_fmadd_ps(s, x, x), 16);
    in_registers!(
        fma16,
        "avx512f,avx512fp16",
        _mm512_castsi512_ph(_mm512_setzero_si512()),
        _mm512_castsi512_ph(_mm512_set1_epi16(0x3800)),
        |s, x| _mm512_fmadd_ph(s, x, x),
        64
    );

    macro_rules! in_tiles {
        ($name:ident, $multiply:literal, $operations:expr) => {
            pub(super) fn $name(n: usize) -> f64 {
                // Palette 1, eight tiles of 16 rows of 64 bytes.
                let mut configuration = [0u8; 64];
                configuration[0] = 1;
                for tile in 0..8 {
                    configuration[16 + 2 * tile] = 64;
                    configuration[48 + tile] = 16;
                }
                // SAFETY: `peak_loops` checked that the CPU has the instruction and that the process may use it. The
                // configuration is valid, and the compiler does not allocate tile registers.
                unsafe {
                    asm!(
                        "ldtilecfg [{configuration}]",
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                        "tilezero tmm4", "tilezero tmm5",
                        "2:",
                        concat!($multiply, " tmm0, tmm4, tmm5"),
                        concat!($multiply, " tmm1, tmm4, tmm5"),
                        concat!($multiply, " tmm2, tmm4, tmm5"),
                        concat!($multiply, " tmm3, tmm4, tmm5"),
                        "dec {n}",
                        "jnz 2b",
                        "tilerelease",
                        configuration = in(reg) &configuration,
                        n = inout(reg) n / 10 => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                        options(nostack),
                    );
                }
                (n / 10 * 4 * $operations) as f64
            }
        };
    }
    in_tiles!(amx_bf16, "tdpbf16ps", 2 * 16 * 16 * 32);

    /// Counts f32 operations, each of which takes three bf16 operations.
    pub(super) fn amx_bf16x3(times: usize) -> f64 {
        amx_bf16(times) / 3.0
    }
}
