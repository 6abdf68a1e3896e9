//! CPU features as proof types. Only `detect` makes a proof, after it has asked the CPU, so holding one is enough to
//! call code compiled for its instructions. Detection asks for features, never for CPU models.

/// The minimum features of the compilation target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Baseline;

macro_rules! proofs {
    ($($(#[$meta:meta])* $name:ident = $is_supported:expr;)*) => {$(
        $(#[$meta])*
        #[cfg(target_arch = "x86_64")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) struct $name(());

        #[cfg(target_arch = "x86_64")]
        impl $name {
            pub(crate) fn detect() -> Option<Self> {
                $is_supported.then_some(Self(()))
            }
        }
    )*};
}

proofs! {
    /// AVX2, FMA and F16C; every CPU with AVX2 has the other two.
    Avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    /// AVX-512 F, DQ, BW and VL, which every CPU with AVX-512 has had since 2017.
    Avx512 = avx512();
    /// AVX-512 with arithmetic on f16.
    Fp16 = avx512() && is_x86_feature_detected!("avx512fp16");
    /// AMX tiles of bf16, AVX-512 conversions to bf16, and the operating system's permission to use tiles.
    AmxBf16 = avx512() && is_x86_feature_detected!("avx512bf16") && amx(22);
}

/// The proof of [`AmxBf16`], for products of numbers split into two bf16 parts.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AmxBf16x3(AmxBf16);

#[cfg(target_arch = "x86_64")]
impl AmxBf16x3 {
    pub(crate) fn detect() -> Option<Self> {
        AmxBf16::detect().map(Self)
    }

    pub(crate) fn bf16(self) -> AmxBf16 {
        self.0
    }
}

#[cfg(target_arch = "x86_64")]
fn avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
}

/// Returns whether the CPU has AMX tiles and feature bit `bit`, and the operating system lets this process use tiles.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx(bit: u32) -> bool {
    use core::arch::x86_64::{__cpuid, __cpuid_count, __get_cpuid_max};
    use std::sync::OnceLock;

    /// EDX of CPUID leaf 7 if this process may use tiles, else 0.
    static FEATURES: OnceLock<u32> = OnceLock::new();
    const OSXSAVE: u32 = 1 << 27;
    const TILE: u32 = 1 << 24;
    /// Tile configuration and tile data in XCR0: set if the kernel saves both on a context switch.
    const STATE: u32 = 0b11 << 17;

    let features = *FEATURES.get_or_init(|| {
        if __get_cpuid_max(0).0 < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
            return 0;
        }
        let features = __cpuid_count(7, 0).edx;
        let enabled: u32;
        // SAFETY: OSXSAVE guarantees the instruction, which reads XCR0 into eax and edx.
        unsafe {
            core::arch::asm!("xgetbv", in("ecx") 0, out("eax") enabled, out("edx") _, options(nomem, nostack));
        }
        if features & TILE == 0 || enabled & STATE != STATE {
            return 0;
        }
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const TILE_DATA: libc::c_ulong = 18;
        // SAFETY: the system call takes two integers, and either grants tiles to this process or fails.
        let granted = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) } == 0;
        if granted { features } else { 0 }
    });
    features & (1 << bit) != 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
const fn amx(_bit: u32) -> bool {
    false
}
