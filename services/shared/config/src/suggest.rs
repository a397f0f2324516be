//! Suggestions for misspelled names.

/// A suggestion differs by at most one edit per this number of letters.
const LETTERS_PER_EDIT: usize = 3;

/// Returns ` (did you mean X?)` for the most similar name, or an empty text if none is similar.
pub(crate) fn hint<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> String {
    nearest(given, known).map(|name| format!(" (did you mean {name}?)")).unwrap_or_default()
}

fn nearest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // A long key is not a misspelling, and comparing it is expensive.
    if given.len() > 100 {
        return None;
    }
    let lower = given.to_lowercase();
    known
        .map(|name| (strsim::damerau_levenshtein(&lower, &name.to_lowercase()), name))
        .filter(|(distance, name)| *distance <= (name.len().min(given.len()) / LETTERS_PER_EDIT).max(1))
        .min()
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_error_gets_a_suggestion_and_another_word_does_not() {
        let known = ["evictionHard", "evictionSoft", "maxPods"];
        for (given, want) in [
            ("evictionHardd", Some("evictionHard")),
            ("EvictionHard", Some("evictionHard")),
            ("maxpod", Some("maxPods")),
            ("something", None),
        ] {
            assert_eq!(nearest(given, known.into_iter()), want, "{given}");
        }
    }
}
