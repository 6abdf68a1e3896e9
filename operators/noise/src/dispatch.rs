//! Runtime choice of the vector instructions that a kernel uses.
//!
//! A kernel is one plain Rust body. [`dispatched!`] compiles it three times: for AVX-512, for AVX2, and for the
//! baseline of the target. The [`Level`] argument selects one of them at run time. The bodies use no fused multiply-add
//! and sum their lanes in a fixed order, so **every level returns the same bits**. A shard therefore does not depend on
//! the machine that wrote it.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// A set of vector instructions that this machine supports.
///
/// The field is private, and only [`Level::available`] creates a `Level`, after it has queried the CPU. A `Level`
/// therefore proves that calling its code is sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level(Kind);

impl Level {
    /// Returns the widest level of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::available()[0].unwrap_or(Self(Kind::Baseline))
    }

    /// Returns all levels of this machine, widest first. Tests use this to compare their bits.
    #[must_use]
    pub fn available() -> [Option<Self>; 3] {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
        let mut levels = [Some(Self(Kind::Baseline)), None, None];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                levels = [Some(Self(Kind::Avx2)), Some(Self(Kind::Baseline)), None];
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                {
                    levels = [Some(Self(Kind::Avx512)), Some(Self(Kind::Avx2)), Some(Self(Kind::Baseline))];
                }
            }
        }
        levels
    }

    pub(crate) const fn kind(self) -> Kind {
        self.0
    }
}

/// Compiles a function body for every [`Level`]; the function gets the level as its first argument.
macro_rules! dispatched {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(level: $crate::dispatch::Level, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

            match level.kind() {
                $crate::dispatch::Kind::Baseline => body($($arg),*),
                // SAFETY: a `Level` of this kind exists only where the CPU has these features (`Level::available`).
                #[cfg(target_arch = "x86_64")]
                $crate::dispatch::Kind::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::dispatch::Kind::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    };
}
pub(crate) use dispatched;
