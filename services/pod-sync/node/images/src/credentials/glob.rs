//! Matches one label of a registry's host against a pattern, like Go's `filepath.Match`.
//!
//! Users control both sides: the pattern in a pull secret, and the text in an image name. Matching is not
//! recursive and takes at most t² comparisons for a text of t characters. A registry's host has at most 255
//! characters, so the cost is linear in the length of the pattern.

#[derive(Debug, Clone, PartialEq, Eq)]
enum Element {
    /// `*`: any number of characters.
    Star,
    /// `?`: one character.
    Any,
    /// The character itself.
    Is(char),
    /// `[...]` or `[^...]`.
    Class {
        negated: bool,
        /// Ranges with both ends, sorted, without overlap.
        ranges: Vec<(char, char)>,
    },
}

impl Element {
    /// Returns whether a character matches. Not for [`Element::Star`].
    fn fits(&self, c: char) -> bool {
        match self {
            Self::Star => false,
            Self::Any => true,
            Self::Is(own) => *own == c,
            Self::Class { negated, ranges } => {
                let after = ranges.partition_point(|(low, _)| *low <= c);
                let range = after.checked_sub(1).and_then(|at| ranges.get(at));
                range.is_some_and(|(_, high)| c <= *high) != *negated
            }
        }
    }
}

/// Returns whether `pattern` matches the whole `text`. A malformed pattern matches nothing.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    let Some(pattern) = parse(pattern) else { return false };
    let text: Vec<char> = text.chars().collect();
    let (mut at, mut next) = (0_usize, 0_usize);
    // The element after the last star, and the character from which the elements after that star are
    // compared.
    let mut last_star: Option<(usize, usize)> = None;
    loop {
        match (pattern.get(at), text.get(next)) {
            (Some(Element::Star), _) => {
                at = at.saturating_add(1);
                last_star = Some((at, next));
            }
            (None, None) => return true,
            (Some(element), Some(c)) if element.fits(*c) => {
                at = at.saturating_add(1);
                next = next.saturating_add(1);
            }
            // The elements do not match the rest of the text, however much the last star takes.
            (Some(_), None) => return false,
            // Only the last star needs to take more: an earlier one taking more would only move this position
            // to the right.
            (Some(_) | None, Some(_)) => {
                let Some((behind, tried)) = &mut last_star else { return false };
                *tried = tried.saturating_add(1);
                (at, next) = (*behind, *tried);
            }
        }
    }
}

/// Returns the elements of a pattern, with consecutive stars as one; `None` if it is malformed.
fn parse(pattern: &str) -> Option<Vec<Element>> {
    let mut out = Vec::new();
    let mut rest = pattern.chars();
    while let Some(c) = rest.next() {
        let element = match c {
            '*' if out.last() == Some(&Element::Star) => continue,
            '*' => Element::Star,
            '?' => Element::Any,
            '\\' => Element::Is(rest.next()?),
            '[' => class(&mut rest)?,
            c => Element::Is(c),
        };
        out.push(element);
    }
    Some(out)
}

/// Parses a class after its `[`, up to its `]`.
fn class(rest: &mut std::str::Chars<'_>) -> Option<Element> {
    let take = |rest: &mut std::str::Chars<'_>, c: char| {
        let mut ahead = rest.clone();
        let there = ahead.next() == Some(c);
        if there {
            *rest = ahead;
        }
        there
    };
    let negated = take(rest, '^');
    let mut ranges = Vec::new();
    while ranges.is_empty() || !take(rest, ']') {
        let low = bound(rest)?;
        let high = if take(rest, '-') { bound(rest)? } else { low };
        ranges.push((low, high));
    }
    ranges.retain(|(low, high)| low <= high);
    ranges.sort_unstable();
    let mut merged: Vec<(char, char)> = Vec::new();
    for (low, high) in ranges {
        match merged.last_mut() {
            Some((_, end)) if low <= *end => *end = high.max(*end),
            Some(_) | None => merged.push((low, high)),
        }
    }
    Some(Element::Class { negated, ranges: merged })
}

/// Parses one end of a range. `-` and `]` need a backslash there.
fn bound(rest: &mut std::str::Chars<'_>) -> Option<char> {
    match rest.next()? {
        '-' | ']' => None,
        '\\' => rest.next(),
        c => Some(c),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use tokio::time::Instant;

    use super::*;

    /// The definition in the documentation of `filepath.Match`, by exhaustive search; `None` if malformed.
    fn slow(pattern: &[u8], text: &[u8]) -> Option<bool> {
        let Some((first, rest)) = pattern.split_first() else { return Some(text.is_empty()) };
        // A pattern is malformed whatever the text, so it is always parsed to its end.
        match first {
            b'*' => {
                let mut any = false;
                for skipped in 0..=text.len() {
                    any |= slow(rest, &text[skipped..])?;
                }
                Some(any)
            }
            b'?' => one(rest, text, |_| true),
            b'\\' => {
                let (c, rest) = rest.split_first()?;
                one(rest, text, |t| t == *c)
            }
            b'[' => {
                let (negated, mut rest) = match rest {
                    [b'^', rest @ ..] => (true, rest),
                    rest => (false, rest),
                };
                let mut ranges = Vec::new();
                loop {
                    if let ([b']', behind @ ..], false) = (rest, ranges.is_empty()) {
                        return one(behind, text, |t| {
                            ranges.iter().any(|(low, high)| (*low..=*high).contains(&t)) != negated
                        });
                    }
                    let low = end(&mut rest)?;
                    let mut high = low;
                    if let [b'-', behind @ ..] = rest {
                        rest = behind;
                        high = end(&mut rest)?;
                    }
                    ranges.push((low, high));
                }
            }
            c => one(rest, text, |t| t == *c),
        }
    }

    fn end(rest: &mut &[u8]) -> Option<u8> {
        let (mut c, mut behind) = rest.split_first()?;
        match c {
            b'-' | b']' => return None,
            b'\\' => (c, behind) = behind.split_first()?,
            _ => {}
        }
        *rest = behind;
        Some(*c)
    }

    fn one(rest: &[u8], text: &[u8], fits: impl FnOnce(u8) -> bool) -> Option<bool> {
        match text.split_first() {
            Some((t, left)) => Some(slow(rest, left)? && fits(*t)),
            None => slow(rest, text).map(|_| false),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(quintlet_testkit::budget::cases(20_000)))]

        #[test]
        fn matching_equals_exhaustive_search(
            pattern in r"[ab*?\[\]\^\-\\]{0,9}",
            text in r"[ab\\\[^\-]{0,7}",
        ) {
            let want = slow(pattern.as_bytes(), text.as_bytes()).unwrap_or(false);
            prop_assert_eq!(matches(&pattern, &text), want);
        }

        #[test]
        fn stars_between_letters_match_as_trying_everything_does(
            pattern in "[ab*]{0,12}",
            text in "[ab]{0,10}",
        ) {
            prop_assert_eq!(Some(matches(&pattern, &text)), slow(pattern.as_bytes(), text.as_bytes()));
        }
    }

    #[test]
    fn malformed_patterns_match_nothing_and_a_class_has_gos_form() {
        for (pattern, text, want) in [
            ("[", "[", false),
            ("[]", "]", false),
            ("[]a]", "]", false),
            ("[-]", "-", false),
            ("[a-]", "a", false),
            (r"[\-x]", "-", true),
            (r"[\]a]", "]", true),
            ("[a-c-]", "a", false),
            ("[^a-c]", "d", true),
            ("[^a-c]", "b", false),
            ("[^bc]", "é", true),
            ("[z-a]", "m", false),
            ("[^z-a]", "m", true),
            ("[a-fc-z]", "x", true),
            ("*[", "a", false),
            (r"a\", "a", false),
            (r"a\*b", "a*b", true),
            (r"a\*b", "axb", false),
            ("[*]", "*", true),
            ("", "", true),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, text), want, "{pattern} for {text}");
        }
    }

    #[test]
    fn the_worst_patterns_of_a_secret_cost_no_more_than_their_length() {
        let text = "a".repeat(250);
        let length = 1 << 19;
        for pattern in [
            format!("{}b", "*a".repeat(40)),
            format!("{}b", "*a".repeat(length / 2)),
            format!("{}*b", "a".repeat(length)),
            format!("{}b", "*".repeat(length)),
            format!("{}b", "*?".repeat(length / 2)),
            format!("*[{}]b", "b-c".repeat(length / 3)),
        ] {
            let began = Instant::now();
            assert!(!matches(&pattern, &text));
            let took = began.elapsed();
            assert!(took < Duration::from_secs(2), "{took:?} for {}…", &pattern[..20]);
        }
    }
}
