//! The fields of a `resource.Quantity`, which a dump shows (`apimachinery/pkg/api/resource: Quantity`).
//!
//! A quantity is a 64-bit integer with a decimal scale, or else a decimal number of any size. It may have its
//! text. Which of them it has depends on how it was written and computed, not only on its value.

use std::fmt::Write;

/// Smallest exponent of a parsed quantity.
const NANO: i32 = -9;
/// Exponent to which resources are rounded up (`pkg/apis/core/v1: SetDefaults_ResourceList`).
const MILLI: i32 = -3;

/// The text of a quantity cannot be parsed, or it does not fit into 128 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoQuantity;

#[cfg(test)]
thread_local! {
    /// Number of texts that this thread has parsed.
    pub(super) static PARSED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GoQuantity {
    amount: Amount,
    /// The text, if it is canonical.
    text: String,
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amount {
    /// `value` × 10^`scale`.
    Int { value: i64, scale: i32 },
    /// A decimal number.
    Dec(Decimal),
}

/// `unscaled` × 10^-`scale` (`gopkg.in/inf.v0: Dec`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Decimal {
    unscaled: i128,
    scale: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// That of the zero value.
    Unset,
    DecimalExponent,
    BinarySi,
    DecimalSi,
}

/// The parts of the text of a quantity.
struct Parts<'a> {
    is_negative: bool,
    /// Sign and digits.
    value: &'a str,
    /// Digits before the point, without leading zeros.
    number: &'a str,
    /// Digits after the point.
    fraction: &'a str,
    suffix: &'a str,
}

impl GoQuantity {
    /// Returns the zero value, which an absent quantity has.
    pub(super) fn zero() -> Self {
        Self { amount: Amount::Int { value: 0, scale: 0 }, text: String::new(), format: Format::Unset }
    }

    /// Parses a quantity (`apimachinery/pkg/api/resource: ParseQuantity`).
    pub(super) fn parse(text: &str) -> Result<Self, NoQuantity> {
        #[cfg(test)]
        PARSED.set(PARSED.get().saturating_add(1));
        let text = text.trim();
        let zero = Amount::Int { value: 0, scale: 0 };
        if text == "0" {
            return Ok(Self { amount: zero, text: text.to_owned(), format: Format::DecimalSi });
        }
        let parts = split(text)?;
        let (exponent, format) = exponent(parts.suffix)?;
        let digits =
            i32::try_from(parts.number.len().saturating_add(parts.fraction.len())).map_err(|_| NoQuantity)?;
        if let Some(found) = fast(text, &parts, exponent, format, digits) {
            return Ok(found);
        }
        slow(&parts, exponent, format)
    }

    /// Rounds up to thousandths, as each resource of a pod is.
    pub(super) fn rounded(mut self) -> Result<Self, NoQuantity> {
        match self.amount {
            Amount::Int { scale, .. } if scale >= MILLI => return Ok(self),
            Amount::Int { value, scale } => {
                let places = MILLI.checked_sub(scale).ok_or(NoQuantity)?;
                let value = divide_up(i128::from(value), places).ok_or(NoQuantity)?;
                let value = i64::try_from(value).map_err(|_| NoQuantity)?;
                self.amount = Amount::Int { value, scale: MILLI };
            }
            Amount::Dec(decimal) => self.amount = Amount::Dec(decimal.rounded(-MILLI)?),
        }
        self.text.clear();
        Ok(self)
    }

    /// Returns the sum of parsed quantities (`apimachinery/pkg/api/resource: Add`). A single one keeps its
    /// text.
    pub(super) fn sum<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, NoQuantity> {
        let mut parsed = texts.into_iter().map(Self::parse);
        let first = parsed.next().ok_or(NoQuantity)??;
        parsed.try_fold(first, |sum, next| sum.plus(&next?))
    }

    /// Returns the sum of two quantities, without a text.
    pub(super) fn plus(mut self, other: &Self) -> Result<Self, NoQuantity> {
        self.text.clear();
        if self.decimal().unscaled == 0 {
            self.format = other.format;
        }
        self.amount = match (self.amount, other.amount) {
            (sum, Amount::Int { value: 0, .. }) if matches!(sum, Amount::Int { .. }) => sum,
            (Amount::Int { value: 0, .. }, other @ Amount::Int { .. }) => other,
            (Amount::Int { .. }, Amount::Int { .. }) => {
                let sum = self.decimal().plus(other.decimal())?;
                match i64::try_from(sum.unscaled) {
                    Ok(value) => Amount::Int { value, scale: sum.scale.saturating_neg() },
                    Err(_) => Amount::Dec(sum),
                }
            }
            _ => Amount::Dec(self.decimal().plus(other.decimal())?),
        };
        Ok(self)
    }

    /// Returns whether this quantity is the larger one.
    pub(super) fn exceeds(&self, other: &Self) -> Result<bool, NoQuantity> {
        let (first, second) = self.decimal().aligned(other.decimal())?;
        Ok(first.unscaled > second.unscaled)
    }

    fn decimal(&self) -> Decimal {
        match self.amount {
            Amount::Int { value, scale } => {
                Decimal { unscaled: i128::from(value), scale: scale.saturating_neg() }
            }
            Amount::Dec(decimal) => decimal,
        }
    }

    /// Writes the fields as a dump does, without the type.
    pub(super) fn dump(&self, out: &mut dyn Write) {
        let (value, scale, decimal) = match self.amount {
            Amount::Int { value, scale } => (value, scale, None),
            Amount::Dec(decimal) => (0, 0, Some(decimal)),
        };
        let format = match self.format {
            Format::Unset => "",
            Format::DecimalExponent => "DecimalExponent",
            Format::BinarySi => "BinarySI",
            Format::DecimalSi => "DecimalSI",
        };
        // Neither a text nor a hash returns an error.
        let _ = write!(
            out,
            "{{i:(resource.int64Amount){{value:(int64){value} scale:(resource.Scale){scale}}} \
             d:(resource.infDecAmount){{Dec:(*inf.Dec)"
        );
        match decimal {
            None => {
                let _ = out.write_str("<nil>");
            }
            Some(Decimal { unscaled, scale }) => {
                let _ = write!(out, "{{unscaled:(big.Int){{neg:(bool){} abs:(big.nat)[", unscaled < 0);
                words(unscaled.unsigned_abs(), out);
                let _ = write!(out, "]}} scale:(inf.Scale){scale}}}");
            }
        }
        let _ = write!(out, "}} s:(string){} Format:(resource.Format){format}}}", self.text);
    }
}

/// Writes the 64-bit words of a number, the lowest first.
fn words(mut number: u128, out: &mut dyn Write) {
    let mut separator = "";
    while number > 0 {
        let _ = write!(out, "{separator}{}", number & u128::from(u64::MAX));
        number >>= 64;
        separator = " ";
    }
}

// `parseQuantityString`
fn split(text: &str) -> Result<Parts<'_>, NoQuantity> {
    let is_negative = text.starts_with('-');
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let significant = unsigned.trim_start_matches('0');
    if significant.is_empty() {
        return Ok(Parts { is_negative, value: "0", number: "0", fraction: "", suffix: "" });
    }
    let (number, rest) = digits(significant);
    let (fraction, suffix) = rest.strip_prefix('.').map_or(("", rest), digits);
    let value = text.strip_suffix(suffix).ok_or(NoQuantity)?;
    let letters = suffix.trim_start_matches(|c| "eEinumkKMGTP".contains(c));
    let power = letters.strip_prefix(['-', '+']).unwrap_or(letters);
    if !power.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(NoQuantity);
    }
    Ok(Parts { is_negative, value, number: if number.is_empty() { "0" } else { number }, fraction, suffix })
}

fn digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

/// Returns the exponent and the format of a suffix. The exponent is a power of two if the format is binary.
fn exponent(suffix: &str) -> Result<(i32, Format), NoQuantity> {
    let known = match suffix {
        "n" => (-9, Format::DecimalSi),
        "u" => (-6, Format::DecimalSi),
        "m" => (-3, Format::DecimalSi),
        "" => (0, Format::DecimalSi),
        "k" => (3, Format::DecimalSi),
        "M" => (6, Format::DecimalSi),
        "G" => (9, Format::DecimalSi),
        "T" => (12, Format::DecimalSi),
        "P" => (15, Format::DecimalSi),
        "E" => (18, Format::DecimalSi),
        "Ki" => (10, Format::BinarySi),
        "Mi" => (20, Format::BinarySi),
        "Gi" => (30, Format::BinarySi),
        "Ti" => (40, Format::BinarySi),
        "Pi" => (50, Format::BinarySi),
        "Ei" => (60, Format::BinarySi),
        other => {
            let power = other.strip_prefix(['e', 'E']).ok_or(NoQuantity)?;
            (power.parse().map_err(|_| NoQuantity)?, Format::DecimalExponent)
        }
    };
    Ok(known)
}

/// Returns the quantity as an integer, if it surely fits.
fn fast(text: &str, parts: &Parts<'_>, exponent: i32, format: Format, digits: i32) -> Option<GoQuantity> {
    let fraction = i32::try_from(parts.fraction.len()).ok()?;
    let (precision, scale, factor) = match format {
        Format::Unset => return None,
        Format::DecimalExponent | Format::DecimalSi => (18_i32.checked_sub(digits)?, exponent, 1),
        Format::BinarySi if fraction == 0 => {
            let number = digits.checked_sub(fraction)?;
            let precision = 15_i32.checked_sub(number)?.checked_sub(exponent.checked_mul(3)? / 10)?;
            (precision.checked_sub(1)?, 0, 1_i64.checked_shl(exponent.unsigned_abs())?)
        }
        Format::BinarySi => return None,
    };
    let scale = scale.checked_sub(fraction)?;
    if precision < 0 || scale < NANO {
        return None;
    }
    let shifted = format!("{}{}", parts.number, parts.fraction);
    let number: i64 = shifted.parse().ok()?;
    let product = number.checked_mul(factor)?;
    let value = if parts.is_negative { product.checked_neg()? } else { product };
    let is_canonical = match format {
        Format::BinarySi => exponent % 10 == 0 && number & 7 != 0,
        Format::Unset | Format::DecimalExponent | Format::DecimalSi => {
            scale % 3 == 0 && !shifted.ends_with("000") && !shifted.starts_with('0')
        }
    };
    let text = if is_canonical { text.to_owned() } else { String::new() };
    Some(GoQuantity { amount: Amount::Int { value, scale }, text, format })
}

/// Returns the quantity as a decimal number.
fn slow(parts: &Parts<'_>, exponent: i32, format: Format) -> Result<GoQuantity, NoQuantity> {
    let unsigned: String = parts.value.chars().filter(char::is_ascii_digit).collect();
    let unscaled: i128 = unsigned.parse().map_err(|_| NoQuantity)?;
    let scale = i32::try_from(parts.fraction.len()).map_err(|_| NoQuantity)?;
    let mut format = format;
    let mut decimal = match format {
        Format::BinarySi => {
            let factor = 1_i128.checked_shl(exponent.unsigned_abs()).ok_or(NoQuantity)?;
            Decimal { unscaled: unscaled.checked_mul(factor).ok_or(NoQuantity)?, scale }
        }
        Format::Unset | Format::DecimalExponent | Format::DecimalSi => {
            Decimal { unscaled, scale: scale.checked_sub(exponent).ok_or(NoQuantity)? }
        }
    };
    if decimal.unscaled != 0 {
        decimal = decimal.rounded(-NANO)?;
    }
    if format == Format::BinarySi {
        let one = power_of_ten(decimal.scale).ok_or(NoQuantity)?;
        let largest = one.checked_mul(i128::from(i64::MAX)).ok_or(NoQuantity)?;
        if decimal.unscaled > largest {
            decimal = Decimal { unscaled: i128::from(i64::MAX), scale: 0 };
        } else if decimal.unscaled > 0 && decimal.unscaled < one {
            format = Format::DecimalSi;
        }
    }
    if parts.is_negative {
        decimal.unscaled = decimal.unscaled.checked_neg().ok_or(NoQuantity)?;
    }
    Ok(GoQuantity { amount: Amount::Dec(decimal), text: String::new(), format })
}

impl Decimal {
    fn plus(self, other: Self) -> Result<Self, NoQuantity> {
        let (first, second) = self.aligned(other)?;
        let unscaled = first.unscaled.checked_add(second.unscaled).ok_or(NoQuantity)?;
        Ok(Self { unscaled, scale: first.scale })
    }

    /// Returns both numbers with the larger one of their scales, so that neither changes.
    fn aligned(self, other: Self) -> Result<(Self, Self), NoQuantity> {
        let scale = self.scale.max(other.scale);
        Ok((self.rounded(scale)?, other.rounded(scale)?))
    }

    /// Returns the number with this scale, rounded away from zero.
    fn rounded(self, scale: i32) -> Result<Self, NoQuantity> {
        let more = scale.checked_sub(self.scale).ok_or(NoQuantity)?;
        let unscaled = if more >= 0 {
            power_of_ten(more).and_then(|factor| self.unscaled.checked_mul(factor))
        } else {
            divide_up(self.unscaled, more.checked_neg().ok_or(NoQuantity)?)
        };
        Ok(Self { unscaled: unscaled.ok_or(NoQuantity)?, scale })
    }
}

fn power_of_ten(exponent: i32) -> Option<i128> {
    10_i128.checked_pow(u32::try_from(exponent).ok()?)
}

/// Divides by a power of ten, away from zero.
fn divide_up(number: i128, places: i32) -> Option<i128> {
    let Some(divisor) = power_of_ten(places) else { return Some(number.signum()) };
    let quotient = number.checked_div(divisor)?;
    let has_remainder = number.checked_rem(divisor)? != 0;
    Some(if has_remainder { quotient.checked_add(number.signum())? } else { quotient })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dumped(texts: &[&str]) -> String {
        let mut out = String::new();
        GoQuantity::sum(texts.iter().copied()).unwrap().dump(&mut out);
        out
    }

    #[test]
    fn sums_have_the_representation_of_go() {
        let int = |value: i64, scale: i32, text: &str, format: &str| {
            format!(
                "{{i:(resource.int64Amount){{value:(int64){value} scale:(resource.Scale){scale}}} \
                 d:(resource.infDecAmount){{Dec:(*inf.Dec)<nil>}} s:(string){text} \
                 Format:(resource.Format){format}}}"
            )
        };
        for (texts, want) in [
            (&["500m"][..], int(500, -3, "500m", "DecimalSI")),
            (&["500m", "500m"], int(1000, -3, "", "DecimalSI")),
            (&["1", "500m"], int(1500, -3, "", "DecimalSI")),
            (&["500m", "1"], int(1500, -3, "", "DecimalSI")),
            (&["0", "1Gi"], int(1_073_741_824, 0, "", "BinarySI")),
            (&["1Gi", "0"], int(1_073_741_824, 0, "", "BinarySI")),
            (&["1e3", "1"], int(1001, 0, "", "DecimalExponent")),
        ] {
            assert_eq!(dumped(texts), want, "{texts:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(texts in proptest::collection::vec("[-+]?[0-9.]{0,42}[eEinumkKMGTP]{0,2}[-+]?[0-9]{0,11}|\\PC*", 1..4)) {
            let sum = GoQuantity::sum(texts.iter().map(String::as_str));
            if let Ok(rounded) = sum.clone().and_then(GoQuantity::rounded) {
                let mut out = String::new();
                rounded.dump(&mut out);
                let _ = sum.unwrap().exceeds(&rounded);
            }
        }
    }
}
