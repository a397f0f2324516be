//! Formats text, tables, times and durations for the terminal.

mod log_lines;

use std::fmt::Write as _;

pub use log_lines::Lines;

/// Nanoseconds in a second.
const SECOND: i64 = 1_000_000_000;

/// The text of a table cell without a value.
pub const NOTHING: &str = "–";

/// Returns untrusted text on one line, without control characters, so that it cannot send commands to the
/// terminal.
#[must_use]
pub fn clean(text: &str) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    line.trim().to_owned()
}

/// Returns a name for a table: without the namespace `default`, and the UID if no source has the name.
#[must_use]
pub fn short_name(name: &str, uid: &str) -> String {
    let name = if name.is_empty() { uid } else { name };
    clean(name.strip_prefix("default/").unwrap_or(name))
}

/// Returns the first names of a list that has `count` names, and the number of the others.
#[must_use]
pub fn several(names: &[String], shown: usize, count: u64) -> String {
    let shown = names.len().min(shown);
    let text = clean(&names[..shown].join(", "));
    match count.saturating_sub(u64::try_from(shown).unwrap_or(u64::MAX)) {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// Truncates text to `width` characters; an ellipsis replaces the end.
#[must_use]
pub fn fit(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut out: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        out.push('…');
    }
    out
}

/// Wraps a line at `width` characters and indents the continuation lines. Returns the line as it is if
/// `width` does not exceed `indent`.
#[must_use]
pub fn wrap(text: &str, width: usize, indent: usize) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    if chars.len() <= width || width <= indent {
        return vec![text.to_owned()];
    }
    let (first, rest) = chars.split_at(width);
    let rest = rest
        .chunks(width - indent)
        .map(|piece| format!("{}{}", " ".repeat(indent), piece.iter().collect::<String>().trim_start()));
    std::iter::once(first.iter().collect()).chain(rest).collect()
}

/// Formats a header and rows, with two spaces between columns and no trailing spaces.
#[must_use]
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let header = header.iter().map(|h| (*h).to_owned()).collect();
    for row in std::iter::once(&header).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a String does not fail.
            let _ = write!(line, "{cell:<width$}  ");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Formats an age in nanoseconds as kubectl does (`k8s.io/apimachinery/pkg/util/duration: HumanDuration`).
#[must_use]
pub fn age(ns: i64) -> String {
    let s = ns.max(0) / SECOND;
    let minutes = s / 60;
    let hours = s / 3600;
    let days = s / 86400;
    let pair = |big: i64, unit: &str, small: i64, small_unit: &str| {
        if small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{small_unit}") }
    };
    match s {
        0..120 => format!("{s}s"),
        120..600 => pair(minutes, "m", s % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => pair(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => pair(days, "d", hours % 24, "h"),
        691_200..63_072_000 => format!("{days}d"),
        _ => pair(days / 365, "y", days % 365, "d"),
    }
}

/// Formats a duration in nanoseconds; below a minute with one decimal place: `1.3ms`, `4.2s`, `3m5s`.
#[must_use]
pub fn took(ns: i64) -> String {
    let ns = ns.max(0);
    match ns {
        0..1_000_000 => format!("{}µs", ns / 1000),
        1_000_000..1_000_000_000 => tenths(ns, 1_000_000, "ms"),
        1_000_000_000..60_000_000_000 => tenths(ns, SECOND, "s"),
        _ => age(ns),
    }
}

fn tenths(ns: i64, unit: i64, name: &str) -> String {
    format!("{}.{}{name}", ns / unit, ns % unit * 10 / unit)
}

/// Formats the time of day in UTC with milliseconds.
#[must_use]
pub fn time_of_day(unix_ns: i64) -> String {
    timestamp(unix_ns).map_or_else(|| NOTHING.to_owned(), |t| t.strftime("%H:%M:%S%.3f").to_string())
}

/// Formats a time in UTC with milliseconds; 0 is no time and gives [`NOTHING`].
#[must_use]
pub fn moment(unix_ns: i64) -> String {
    if unix_ns == 0 {
        return NOTHING.to_owned();
    }
    timestamp(unix_ns).map_or_else(|| NOTHING.to_owned(), |t| format!("{t:.3}"))
}

fn timestamp(unix_ns: i64) -> Option<jiff::Timestamp> {
    jiff::Timestamp::from_nanosecond(i128::from(unix_ns)).ok()
}

/// Returns the wall time, nanoseconds since 1970.
#[must_use]
pub fn now_ns() -> i64 {
    i64::try_from(quintlet_kit::clock::Clock::system().wall().as_nanosecond()).unwrap_or(i64::MAX)
}

/// Returns the cleaned text, or [`NOTHING`] for an empty text.
#[must_use]
pub fn or_nothing(text: &str) -> String {
    if text.is_empty() { NOTHING.to_owned() } else { clean(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_lists_have_an_end() {
        assert_eq!(short_name("default/web", "u"), "web");
        assert_eq!(short_name("kube-system/web\n", "u"), "kube-system/web");
        assert_eq!(short_name("", "u"), "u");
        let names = ["a", "b", "c"].map(str::to_owned);
        assert_eq!(several(&names, 4, 3), "a, b, c");
        assert_eq!(several(&names, 2, 5), "a, b and 3 more");
        assert_eq!(several(&[], 2, 0), "");
    }

    #[test]
    fn ages_have_the_format_of_kubectl() {
        for (seconds, want) in [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (185, "3m5s"),
            (600, "10m"),
            (10_800, "3h"),
            (12_060, "3h21m"),
            (30_000, "8h"),
            (180_000, "2d2h"),
            (864_000, "10d"),
            (63_072_000, "2y"),
            (63_158_400, "2y1d"),
        ] {
            assert_eq!(age(seconds * SECOND), want, "{seconds}s");
        }
    }

    #[test]
    fn short_durations_have_one_decimal_place() {
        for (ns, want) in [
            (900, "0µs"),
            (812_000, "812µs"),
            (1_340_000, "1.3ms"),
            (4_250_000_000, "4.2s"),
            (185 * SECOND, "3m5s"),
        ] {
            assert_eq!(took(ns), want, "{ns}ns");
        }
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_lines_end_without_spaces() {
        let rows = vec![
            vec!["a".to_owned(), "–".to_owned(), String::new()],
            vec!["longer".to_owned(), "x".to_owned(), "y".to_owned()],
        ];
        assert_eq!(table(&["NAME", "B", "C"], &rows), "NAME    B  C\na       –\nlonger  x  y\n");
    }

    #[test]
    fn long_lines_are_wrapped_with_an_indent() {
        assert_eq!(wrap("  a bcdefgh", 6, 4), ["  a bc", "    de", "    fg", "    h"]);
        assert_eq!(wrap("short", 6, 4), ["short"]);
        assert_eq!(wrap("no room", 3, 4), ["no room"]);
    }

    #[test]
    fn untrusted_text_cannot_send_commands_to_the_terminal() {
        assert_eq!(clean("two\nlines \x1b[2Jgone\u{9b}x\t"), "two lines  [2Jgone x");
        assert_eq!(fit("abcdef", 4), "abc…");
        assert_eq!(fit("abcd", 4), "abcd");
        assert_eq!(fit("abcd", 0), "");
    }
}
