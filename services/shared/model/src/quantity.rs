//! Exact Kubernetes quantities (`k8s.io/apimachinery/pkg/api/resource: Quantity`).
//!
//! A quantity is stored in units of 10⁻⁹, the finest of the format, so that sums and comparisons do not
//! round.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, Sub};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

const NANO: i128 = 1_000_000_000;
// The API stores values up to 2^63-1 exactly, which an i128 holds in units of 10⁻⁹ with room to spare.
const MAX: i128 = i64::MAX as i128 * NANO;
/// Digits after the 24th only affect the rounding.
const DIGITS_MAX: i128 = 10_i128.pow(24);

/// The notation of a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Decimal suffixes: `m`, none, `k`, `M`…
    #[default]
    Decimal,
    /// Binary suffixes: `Ki`, `Mi`…
    Binary,
    /// A decimal exponent, such as `e3`.
    Exponent,
}

/// An amount of a resource. Order and equality depend on the value, not on the notation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

/// The error for a text that is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a quantity")]
pub struct InvalidQuantity(String);

impl Quantity {
    /// Returns a quantity of whole units.
    #[must_use]
    pub fn from_units(value: i64, format: Format) -> Self {
        Self { nanos: i128::from(value).saturating_mul(NANO), format }
    }

    /// Returns a quantity of thousandths in decimal notation.
    #[must_use]
    pub fn from_milli(value: i64) -> Self {
        Self { nanos: i128::from(value).saturating_mul(NANO / 1000), format: Format::Decimal }
    }

    /// Parses a quantity such as `100m`, `1.5Gi` or `2e3`. Digits beyond 10⁻⁹ are rounded up; values are
    /// capped at ±(2^63-1).
    ///
    /// # Errors
    /// Fails if the text is not a quantity.
    pub fn parse(text: &str) -> Result<Self, InvalidQuantity> {
        Self::read(text).ok_or_else(|| InvalidQuantity(text.to_owned()))
    }

    fn read(text: &str) -> Option<Self> {
        let (negative, rest) = match text.as_bytes().first()? {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let number_end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(number_end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
            return None;
        }
        let (multiplier, ten, format) = suffix_value(suffix)?;
        let mut digits: i128 = 0;
        let mut scale: i32 = 0;
        let mut rest_nonzero = false;
        for (i, d) in whole.bytes().chain(fraction.bytes()).enumerate() {
            let in_fraction = i >= whole.len();
            if digits < DIGITS_MAX {
                digits = digits.saturating_mul(10).saturating_add(i128::from(d.saturating_sub(b'0')));
                scale = scale.saturating_sub(i32::from(in_fraction));
            } else {
                rest_nonzero |= d != b'0';
                scale = scale.saturating_add(i32::from(!in_fraction));
            }
        }
        // value = digits * 10^scale * 10^ten * multiplier, and nanos = value * 10^9. The multiplier is at
        // most 2^60.
        let exponent = scale.saturating_add(ten).saturating_add(9);
        let nanos = if digits == 0 {
            0
        } else if exponent >= 0 {
            10_i128
                .checked_pow(exponent.unsigned_abs())
                .and_then(|p| digits.checked_mul(p))
                .and_then(|v| v.checked_mul(multiplier))
                .unwrap_or(MAX)
        } else {
            match digits.checked_mul(multiplier) {
                None => return Some(Self { nanos: if negative { -MAX } else { MAX }, format }),
                Some(product) => match 10_i128.checked_pow(exponent.unsigned_abs()) {
                    None => 1,
                    Some(p) => {
                        let whole = product.checked_div(p).unwrap_or(MAX);
                        let has_rest = product.checked_rem(p).unwrap_or(0) != 0 || rest_nonzero;
                        whole.saturating_add(i128::from(has_rest))
                    }
                },
            }
        };
        let nanos = nanos.min(MAX);
        Some(Self { nanos: if negative { nanos.saturating_neg() } else { nanos }, format })
    }

    /// Parses a quantity of an API object. An invalid one counts as zero; the API server never stores such a
    /// quantity.
    #[must_use]
    pub fn of(api: &ApiQuantity) -> Self {
        Self::parse(&api.0).unwrap_or_default()
    }

    /// Returns the value in whole units, rounded up.
    #[must_use]
    pub fn value(self) -> i64 {
        self.scaled(NANO)
    }

    /// Returns the value in thousandths, rounded up.
    #[must_use]
    pub fn milli_value(self) -> i64 {
        self.scaled(NANO / 1000)
    }

    fn scaled(self, unit: i128) -> i64 {
        let up = div_ceil(self.nanos, unit);
        i64::try_from(up).unwrap_or(if up < 0 { i64::MIN } else { i64::MAX })
    }

    /// Returns whether the value is greater than zero.
    #[must_use]
    pub fn is_positive(self) -> bool {
        self.nanos > 0
    }

    /// Returns whether the value is zero.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.nanos == 0
    }

    /// Returns the quantity in the form of an API object.
    #[must_use]
    pub fn to_api(self) -> ApiQuantity {
        ApiQuantity(self.to_string())
    }
}

// `unit` is never zero here; a quantity has at most `MAX` nanos, so the sum does not reach the limit.
fn div_ceil(nanos: i128, unit: i128) -> i128 {
    let whole = nanos.checked_div_euclid(unit).unwrap_or(MAX);
    whole.saturating_add(i128::from(nanos.checked_rem_euclid(unit).unwrap_or(0) != 0))
}

// (multiplier, power of ten, format)
fn suffix_value(suffix: &str) -> Option<(i128, i32, Format)> {
    Some(match suffix {
        "" => (1, 0, Format::Decimal),
        "n" => (1, -9, Format::Decimal),
        "u" => (1, -6, Format::Decimal),
        "m" => (1, -3, Format::Decimal),
        "k" => (1, 3, Format::Decimal),
        "M" => (1, 6, Format::Decimal),
        "G" => (1, 9, Format::Decimal),
        "T" => (1, 12, Format::Decimal),
        "P" => (1, 15, Format::Decimal),
        "E" => (1, 18, Format::Decimal),
        "Ki" => (1 << 10, 0, Format::Binary),
        "Mi" => (1 << 20, 0, Format::Binary),
        "Gi" => (1 << 30, 0, Format::Binary),
        "Ti" => (1 << 40, 0, Format::Binary),
        "Pi" => (1 << 50, 0, Format::Binary),
        "Ei" => (1 << 60, 0, Format::Binary),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits.is_empty() || digits.len() > 4 || !digits.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            (1, exponent.parse().ok()?, Format::Exponent)
        }
    })
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl Add for Quantity {
    type Output = Self;
    /// Keeps the notation of the left operand, unless that is zero.
    fn add(self, other: Self) -> Self {
        let format = if self.nanos == 0 { other.format } else { self.format };
        Self { nanos: self.nanos.saturating_add(other.nanos).clamp(-MAX, MAX), format }
    }
}

impl Sub for Quantity {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        let format = if self.nanos == 0 { other.format } else { self.format };
        Self { nanos: self.nanos.saturating_sub(other.nanos).clamp(-MAX, MAX), format }
    }
}

impl Sum for Quantity {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), Add::add)
    }
}

/// Writes the canonical form: no fraction and the largest possible suffix.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        // A binary quantity has no fraction, and is written in decimal notation below 1Ki.
        if self.format == Format::Binary && self.nanos.abs() >= 1024 * NANO {
            let mut value = div_ceil(self.nanos, NANO);
            let mut suffixes = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].into_iter();
            let mut suffix = "";
            while value % 1024 == 0
                && let Some(larger) = suffixes.next()
            {
                value /= 1024;
                suffix = larger;
            }
            return write!(f, "{value}{suffix}");
        }
        let mut value = self.nanos;
        // The decimal suffixes with their powers of ten.
        let larger =
            [("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
        let mut larger = larger.into_iter();
        let (mut suffix, mut exponent) = ("n", -9);
        while value % 1000 == 0
            && let Some(next) = larger.next()
        {
            value /= 1000;
            (suffix, exponent) = next;
        }
        match self.format {
            Format::Exponent if exponent == 0 => write!(f, "{value}"),
            Format::Exponent => write!(f, "{value}e{exponent}"),
            Format::Decimal | Format::Binary => write!(f, "{value}{suffix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantities_are_parsed_exactly() {
        for (text, milli, units) in [
            ("100m", 100, 1),
            ("1", 1000, 1),
            ("1.5", 1500, 2),
            (".5", 500, 1),
            ("5.", 5000, 5),
            ("0", 0, 0),
            ("-1", -1000, -1),
            ("-1500m", -1500, -1),
            ("+2k", 2_000_000, 2000),
            ("1e3", 1_000_000, 1000),
            ("1E-3", 1, 1),
            ("128Mi", 134_217_728_000, 134_217_728),
            ("1.5Gi", 1_610_612_736_000, 1_610_612_736),
            ("1n", 1, 1),
            ("0.1n", 1, 1),
            ("100000000000000000000000000000000", i64::MAX, i64::MAX),
        ] {
            let q = Quantity::parse(text).unwrap();
            assert_eq!((q.milli_value(), q.value()), (milli, units), "{text}");
        }
        for bad in ["", "m", "1.2.3", "1Kim", "abc", "1 Gi", "--1", "1e", "1e99999", "1ki"] {
            assert!(Quantity::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_canonical_form_is_that_of_the_api() {
        for (text, want) in [
            ("1000m", "1"),
            ("0.5", "500m"),
            ("1500", "1500"),
            ("2000", "2k"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("512Ki", "512Ki"),
            ("0.5Ki", "512"),
            ("1e3", "1e3"),
            ("0Mi", "0"),
            ("100m", "100m"),
        ] {
            assert_eq!(Quantity::parse(text).unwrap().to_string(), want, "{text}");
        }
    }

    #[test]
    fn a_sum_keeps_the_format_of_its_first_operand() {
        let q = |t| Quantity::parse(t).unwrap();
        assert_eq!((q("64Mi") + q("64Mi")).to_string(), "128Mi");
        assert_eq!((q("0") + q("64Mi")).to_string(), "64Mi");
        assert_eq!(["100m", "0.9"].map(q).into_iter().sum::<Quantity>().to_string(), "1");
        assert_eq!(q("1Ki"), q("1024"));
        assert!(q("1k") < q("1Ki"));
    }

    proptest! {
        #[test]
        fn a_printed_quantity_parses_to_an_equal_one(milli in -1_000_000_000_000_i64..1_000_000_000_000) {
            let q = Quantity::from_milli(milli);
            prop_assert_eq!(Quantity::parse(&q.to_string()).unwrap(), q);
        }

        #[test]
        fn a_printed_binary_quantity_parses_to_an_equal_one(units in 0_i64..i64::MAX) {
            let q = Quantity::from_units(units, Format::Binary);
            prop_assert_eq!(Quantity::parse(&q.to_string()).unwrap(), q);
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = Quantity::parse(&text);
        }

        #[test]
        fn no_number_panics(text in "[-+]?[0-9.]{0,60}([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,5})?") {
            let _ = Quantity::parse(&text).map(|q| (q.value(), q.milli_value(), q.to_string()));
        }
    }
}
