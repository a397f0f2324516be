//! Durations in the format of Go's `time` package: `1m30s`, `1.5h`, `250ms`.

use std::time::Duration;

/// Units with their lengths in nanoseconds, longest first.
const UNITS: [(&str, i64); 8] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1000),
    ("µs", 1000),
    ("μs", 1000),
    ("ns", 1),
];

/// A text is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// The text has another format.
    #[error("not a duration, expected for example 30s, 1m30s or 1.5h")]
    Format,
    /// This number has no unit.
    #[error("a duration needs a unit, e.g. {0}s")]
    NoUnit(String),
    /// This unit is unknown.
    #[error("{0} is not a unit of time, expected h, m, s, ms, us or ns")]
    Unit(String),
    /// The duration exceeds the range of nanoseconds in 64 bits.
    #[error("longer than 290 years")]
    TooLong,
}

/// Parses a duration and returns it in nanoseconds (Go: `time.ParseDuration`).
///
/// # Errors
/// The text is not a duration, or the duration is too long.
pub fn parse(text: &str) -> Result<i64, DurationError> {
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(DurationError::Format);
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(end);
        let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
            return Err(DurationError::Format);
        }
        if unit.is_empty() {
            return Err(DurationError::NoUnit(number.to_owned()));
        }
        let Some((_, nanos)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(DurationError::Unit(unit.to_owned()));
        };
        let unit = i128::from(*nanos);
        let mut value = parse_digits(whole).ok_or(DurationError::TooLong)?.saturating_mul(unit);
        // Digits far below a nanosecond are ignored.
        let digits: String = fraction.chars().take(18).collect();
        if !digits.is_empty() {
            let scale = 10_i128.pow(u32::try_from(digits.len()).unwrap_or(18));
            let part = parse_digits(&digits).ok_or(DurationError::TooLong)?.saturating_mul(unit);
            value = value.saturating_add(part.checked_div(scale).unwrap_or(0));
        }
        total = total.saturating_add(value);
        if total > i128::from(i64::MAX) {
            return Err(DurationError::TooLong);
        }
        rest = tail;
    }
    let total = if negative { total.saturating_neg() } else { total };
    i64::try_from(total).map_err(|_| DurationError::TooLong)
}

/// Parses up to 19 significant digits, which exceed the longest duration in any unit. Returns `None` for more
/// digits.
fn parse_digits(digits: &str) -> Option<i128> {
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Some(0);
    }
    if digits.len() > 19 { None } else { digits.parse().ok() }
}

/// Formats a duration as Go does (`time.Duration.String`): `3m5.2s`, `1m0s`, `1.5ms`, `0s`.
#[must_use]
pub fn format(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let fraction = |value: u128, unit: u128, digits: usize| {
        let (whole, rest) = (value.checked_div(unit), value.checked_rem(unit));
        let text = format!("{}.{:0digits$}", whole.unwrap_or(0), rest.unwrap_or(0));
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match nanos {
        0 => "0s".to_owned(),
        1..1_000 => format!("{nanos}ns"),
        1_000..1_000_000 => format!("{}µs", fraction(nanos, 1_000, 3)),
        1_000_000..1_000_000_000 => format!("{}ms", fraction(nanos, 1_000_000, 6)),
        _ => {
            let (hours, minutes) = (duration.as_secs() / 3600, duration.as_secs() / 60 % 60);
            let seconds = fraction(nanos % 60_000_000_000, 1_000_000_000, 9);
            match (hours, minutes) {
                (0, 0) => format!("{seconds}s"),
                (0, _) => format!("{minutes}m{seconds}s"),
                (_, _) => format!("{hours}h{minutes}m{seconds}s"),
            }
        }
    }
}

/// Formats a duration in nanoseconds without units of zero: `1m`, `1m30s`, `250ms`, `0s`. [`parse`] reads it
/// as well.
#[must_use]
pub fn format_short(nanos: i64) -> String {
    if nanos == 0 {
        return "0s".to_owned();
    }
    let mut out = String::from(if nanos < 0 { "-" } else { "" });
    let mut rest = nanos.unsigned_abs();
    for (unit, size) in UNITS.iter().filter(|(unit, _)| unit.is_ascii()) {
        let size = size.unsigned_abs();
        if let Some(whole @ 1..) = rest.checked_div(size) {
            out.push_str(&format!("{whole}{unit}"));
            rest = rest.checked_rem(size).unwrap_or(0);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000_000;

    #[test]
    fn durations_are_parsed_as_in_go() {
        for (text, want) in [
            ("0", 0),
            ("0s", 0),
            ("5s", 5 * S),
            ("1m0s", 60 * S),
            ("1.5h", 5400 * S),
            ("1h30m5s", 5405 * S),
            (".5s", S / 2),
            ("250ms", S / 4),
            ("-1s", -S),
            ("10us", 10_000),
            ("1.0000000001s", S),
        ] {
            assert_eq!(parse(text), Ok(want), "{text}");
        }
        for (text, part) in [
            ("", "not a duration"),
            ("5", "a duration needs a unit, e.g. 5s"),
            ("1m30", "a duration needs a unit, e.g. 30s"),
            ("soon", "not a duration"),
            ("5 s", "not a unit"),
            ("1d", "d is not a unit of time"),
            ("1.2.3s", "not a duration"),
            (".s", "not a duration"),
            ("9999999999999h", "longer"),
            ("99999999999999999999999999999999h", "longer"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_printed_duration_is_short_and_parses_to_the_same_value() {
        for (nanos, want) in
            [(0, "0s"), (60 * S, "1m"), (90 * S, "1m30s"), (S / 4, "250ms"), (-S, "-1s"), (S + 1, "1s1ns")]
        {
            assert_eq!(format_short(nanos), want);
            assert_eq!(parse(want), Ok(nanos));
        }
        for nanos in [i64::MAX, i64::MAX - 12_345, 86_400 * S + 1001] {
            assert_eq!(parse(&format_short(nanos)), Ok(nanos));
        }
    }

    #[test]
    fn durations_are_written_as_go_writes_them() {
        for (nanos, want) in [
            (0, "0s"),
            (1, "1ns"),
            (1_500, "1.5µs"),
            (2_000_000, "2ms"),
            (2_000_001, "2.000001ms"),
            (250_000_000, "250ms"),
            (1_000_000_000, "1s"),
            (1_500_000_000, "1.5s"),
            (10_000_000_000, "10s"),
            (60_000_000_000, "1m0s"),
            (80_000_000_000, "1m20s"),
            (90_000_000_001, "1m30.000000001s"),
            (185_200_000_000, "3m5.2s"),
            (300_000_000_000, "5m0s"),
            (3_600_000_000_000, "1h0m0s"),
            (3_661_000_000_001, "1h1m1.000000001s"),
            (7_200_000_000_000, "2h0m0s"),
        ] {
            assert_eq!(format(Duration::from_nanos(nanos)), want);
        }
    }
}
