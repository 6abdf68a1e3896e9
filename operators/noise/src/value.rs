//! The types of stored noise, with rounding to nearest, up and down.

use half::f16;

/// Type of stored values: ln p_k of a correction, or dense ξ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ValueType {
    /// Two bytes. One ln p_k has an error of up to 0.004 (0.008 below −16); entries that need more accuracy get several
    /// values.
    #[default]
    F16,
    /// Four bytes.
    F32,
}

impl std::fmt::Display for ValueType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F16 => "16-bit",
            Self::F32 => "32-bit",
        })
    }
}

/// The next f16 above or below.
fn step(value: f16, up: bool) -> f16 {
    let bits = value.to_bits();
    let positive = bits & 0x8000 == 0;
    f16::from_bits(match bits & 0x7fff {
        0 => 1 | if up { 0 } else { 0x8000 },
        _ if positive == up => bits + 1,
        _ => bits - 1,
    })
}

impl ValueType {
    /// Rounds to the nearest value of the type. Always converts through f32, because a direct f64 → f16 conversion
    /// rounds once or twice depending on the CPU.
    #[must_use]
    pub fn round(self, value: f64) -> f32 {
        match self {
            Self::F16 => f16::from_f32(value as f32).to_f32(),
            Self::F32 => value as f32,
        }
    }

    /// The largest value of the type that is at most `value`.
    pub(crate) fn floor(self, value: f64) -> f32 {
        let nearest = self.round(value);
        if f64::from(nearest) > value { self.next(nearest, false) } else { nearest }
    }

    /// The smallest value of the type that is at least `value`.
    pub(crate) fn ceil(self, value: f64) -> f32 {
        let nearest = self.round(value);
        if f64::from(nearest) < value { self.next(nearest, true) } else { nearest }
    }

    /// The next value of the type above or below `value`.
    fn next(self, value: f32, up: bool) -> f32 {
        match self {
            Self::F16 => step(f16::from_f32(value), up).to_f32(),
            Self::F32 if up => value.next_up(),
            Self::F32 => value.next_down(),
        }
    }

    /// The neighbour of `rounded` on the other side of `exact` ≤ 0. Returns `None` for 32 bits, where it makes no
    /// difference, and where that neighbour is above 0.
    pub(crate) fn other_neighbour(self, rounded: f32, exact: f64) -> Option<f32> {
        match self {
            Self::F32 => None,
            Self::F16 => {
                let value = self.next(rounded, f64::from(rounded) < exact);
                (value.is_finite() && value <= 0.0).then_some(value)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floor_and_ceil_enclose_every_value() {
        for value_type in [ValueType::F16, ValueType::F32] {
            for i in -4000..4000 {
                let value = f64::from(i) * 0.0137 + 1e-9;
                let (low, high) = (value_type.floor(value), value_type.ceil(value));
                assert!(f64::from(low) <= value && value <= f64::from(high), "{low} {value} {high}");
                assert_eq!(value_type.next(low, true), high);
                assert_eq!(value_type.next(high, false), low);
                assert_eq!((value_type.floor(f64::from(low)), value_type.ceil(f64::from(low))), (low, low));
            }
            assert!(value_type.ceil(1e-30) > 0.0 && value_type.floor(-1e-30) < 0.0);
            assert_eq!((value_type.ceil(-1e-60), value_type.floor(0.0)), (0.0, 0.0));
        }
    }

    #[test]
    fn the_other_side_is_across_the_exact_value() {
        for i in 1..3000 {
            let exact = -f64::from(i) * 0.0091;
            let nearest = ValueType::F16.round(exact);
            let other = ValueType::F16.other_neighbour(nearest, exact).unwrap();
            assert!((f64::from(nearest) - exact) * (f64::from(other) - exact) <= 0.0, "{nearest} {exact} {other}");
        }
        assert_eq!(ValueType::F16.other_neighbour(0.0, -1e-9), Some(-f16::from_bits(1).to_f32()));
        assert_eq!(ValueType::F16.other_neighbour(-f16::from_bits(1).to_f32(), -1e-9), Some(0.0));
        assert_eq!(ValueType::F32.other_neighbour(-1.0, -1.1), None);
    }
}
