//! Proofs of what the CPU has, as types: only `detect` makes one, after asking the CPU, so that holding one is the
//! argument for calling code compiled for its instructions. No CPU is known by name.

/// Whatever the target has at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Baseline;

macro_rules! proofs {
    ($($(#[$meta:meta])* $name:ident = $asked:expr;)*) => {$(
        $(#[$meta])*
        #[cfg(target_arch = "x86_64")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) struct $name(());

        #[cfg(target_arch = "x86_64")]
        impl $name {
            pub(crate) fn detect() -> Option<Self> {
                $asked.then_some(Self(()))
            }
        }
    )*};
}

proofs! {
    /// AVX2 and FMA.
    Avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    /// AVX-512 as every CPU with it since 2017 has it.
    Avx512 = avx512();
}

#[cfg(target_arch = "x86_64")]
fn avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
}
