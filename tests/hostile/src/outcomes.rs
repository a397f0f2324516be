//! Compares the outcome of each case with a committed file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;

/// Environment variable that writes the file instead of comparing with it. Review each changed line: users
/// see these outcomes.
pub(crate) const UPDATE: &str = "QUINTLET_UPDATE_EXPECTED";

/// Outcomes by field and extreme value.
#[derive(Debug, Default)]
pub struct Outcomes(BTreeMap<String, BTreeMap<String, String>>);

/// A file of expected outcomes that is compared case by case, by tests of which each has a part of the cases.
#[derive(Debug)]
pub struct Expected {
    path: PathBuf,
    // By field and extreme.
    outcomes: BTreeMap<(String, String), String>,
}

impl Expected {
    /// Reads `expected/FILE`: lines of the form `FIELD | EXTREMES | OUTCOME`.
    ///
    /// # Panics
    /// Panics if it cannot be read, or if a line has another form or repeats a case.
    #[must_use]
    pub fn read(file: &str) -> Self {
        let path = expected(file);
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|e| panic!("failed to read {}: {e}", path.display()));
        Self { outcomes: parse(&text), path }
    }

    /// Reports whether the file has this outcome for a case. While outcomes are written, any outcome is
    /// expected.
    #[must_use]
    pub fn has(&self, field: &str, extreme: &str, outcome: &str) -> bool {
        std::env::var_os(UPDATE).is_some() || self.is_expected(field, extreme, outcome)
    }

    fn is_expected(&self, field: &str, extreme: &str, outcome: &str) -> bool {
        self.outcomes.get(&(field.to_owned(), extreme.to_owned())).is_some_and(|want| want == outcome)
    }

    /// Asserts that each of these cases has the outcome of the file.
    ///
    /// # Panics
    /// Panics with one line for each case that has another outcome or is absent.
    pub fn assert_has(&self, got: &Outcomes) {
        if std::env::var_os(UPDATE).is_some() {
            return self.update(got);
        }
        let differences = self.differences(got);
        assert!(
            differences.is_empty(),
            "{} cases differ from {} ({UPDATE}=1 writes their lines; read each):\n{}",
            differences.len(),
            self.path.display(),
            differences.join("\n")
        );
    }

    fn differences(&self, got: &Outcomes) -> Vec<String> {
        let difference = |(field, extreme, got): (&str, &str, &str)| match self
            .outcomes
            .get(&(field.to_owned(), extreme.to_owned()))
        {
            Some(want) if want == got => None,
            Some(want) => Some(format!("{field} | {extreme}: expected {want:?}, got {got:?}")),
            None => Some(format!("{field} | {extreme}: absent from the file, got {got:?}")),
        };
        got.each().filter_map(difference).collect()
    }

    /// Asserts that the file has these cases, by field and extreme, and no other.
    ///
    /// # Panics
    /// Panics if it does not.
    pub fn assert_names<'a>(&self, cases: impl Iterator<Item = (&'a str, &'a str)>) {
        let want: BTreeSet<(&str, &str)> = cases.collect();
        let have: BTreeSet<(&str, &str)> =
            self.outcomes.keys().map(|(f, e)| (f.as_str(), e.as_str())).collect();
        let absent: Vec<_> = want.difference(&have).collect();
        let unknown: Vec<_> = have.difference(&want).collect();
        let path = self.path.display();
        assert!(absent.is_empty(), "cases without a line in {path}: {absent:#?}");
        assert!(unknown.is_empty(), "lines of {path} without a case: {unknown:#?}");
    }

    // Other processes update the same file.
    fn update(&self, got: &Outcomes) {
        let lock = File::open(&self.path).expect("the file of expected outcomes can be opened");
        lock.lock().expect("the file of expected outcomes can be locked");
        let text = std::fs::read_to_string(&self.path).expect("the file of expected outcomes can be read");
        let mut all = Outcomes::default();
        for ((field, extreme), outcome) in parse(&text) {
            all.note(&field, &extreme, outcome);
        }
        for (field, extreme, outcome) in got.each() {
            all.note(field, extreme, outcome);
        }
        // Written in place: the lock is on this file.
        std::fs::write(&self.path, all.text()).expect("the file of expected outcomes can be written");
    }
}

fn expected(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("expected").join(file)
}

fn parse(text: &str) -> BTreeMap<(String, String), String> {
    let mut all = BTreeMap::new();
    for (at, line) in text.lines().enumerate() {
        let parts: Vec<&str> = line.splitn(3, " | ").collect();
        let [field, extremes, outcome] = parts[..] else {
            panic!("line {}: {line:?} is not of the form FIELD | EXTREMES | OUTCOME", at + 1);
        };
        for extreme in extremes.split(' ') {
            let before = all.insert((field.to_owned(), extreme.to_owned()), outcome.to_owned());
            assert!(before.is_none(), "line {}: {field} | {extreme} is there twice", at + 1);
        }
    }
    all
}

impl Outcomes {
    /// Records the outcome of a case.
    pub fn note(&mut self, path: &str, extreme: &str, outcome: impl Into<String>) {
        self.0.entry(path.to_owned()).or_default().insert(extreme.to_owned(), outcome.into());
    }

    /// Returns field, extreme and outcome of each case.
    fn each(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        self.0.iter().flat_map(|(field, by_extreme)| {
            by_extreme.iter().map(|(extreme, outcome)| (field.as_str(), extreme.as_str(), outcome.as_str()))
        })
    }

    /// Returns one line per field and outcome, with the extreme values that had it.
    fn text(&self) -> String {
        let mut out = String::new();
        for (path, by_extreme) in &self.0 {
            let mut by_outcome: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for (extreme, outcome) in by_extreme {
                by_outcome.entry(outcome).or_default().push(extreme);
            }
            for (outcome, extremes) in by_outcome {
                let _infallible = writeln!(out, "{path} | {} | {outcome}", extremes.join(" "));
            }
        }
        out
    }

    /// Asserts that all outcomes are those of `expected/FILE`.
    ///
    /// # Panics
    /// An outcome differs, or a case is missing on either side.
    pub fn assert_expected(&self, file: &str) {
        let path = expected(file);
        let got = self.text();
        if std::env::var_os(UPDATE).is_some() {
            std::fs::write(&path, &got).expect("the file of expected outcomes can be written");
            return;
        }
        let want = std::fs::read_to_string(&path).unwrap_or_default();
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let (got, want) = (lines(&got), lines(&want));
        let missing = want.iter().filter(|l| !got.contains(l)).map(|l| format!("- {l}"));
        let new = got.iter().filter(|l| !want.contains(l)).map(|l| format!("+ {l}"));
        let different: Vec<String> = missing.chain(new).take(40).collect();
        assert!(
            different.is_empty(),
            "the outcomes of these cases differ from {} ({UPDATE}=1 rewrites the file; review the difference):\n{}",
            path.display(),
            different.join("\n")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Expected {
        Expected { path: PathBuf::new(), outcomes: parse(text) }
    }

    #[test]
    fn each_case_that_differs_or_is_absent_has_a_line() {
        let expected = read(
            "spec.a | max min | Ready\nspec.a | no-items | event FailedMount\nspec.b | max | Failed x | y\n",
        );
        let mut got = Outcomes::default();
        got.note("spec.a", "max", "Ready");
        got.note("spec.b", "max", "Failed x | y");
        assert_eq!(expected.differences(&got), Vec::<String>::new());
        assert!(expected.is_expected("spec.a", "no-items", "event FailedMount"));
        assert!(!expected.is_expected("spec.a", "min", "event FailedMount"));
        assert!(!expected.is_expected("spec.c", "max", "Ready"));
        got.note("spec.a", "min", "event FailedMount");
        got.note("spec.c", "max", "Ready");
        assert_eq!(
            expected.differences(&got),
            [
                "spec.a | min: expected \"Ready\", got \"event FailedMount\"",
                "spec.c | max: absent from the file, got \"Ready\"",
            ]
        );
    }

    #[test]
    #[should_panic(expected = "cases without a line")]
    fn a_case_without_a_line_is_named() {
        read("spec.a | max | Ready\n").assert_names([("spec.a", "max"), ("spec.a", "min")].into_iter());
    }

    #[test]
    #[should_panic(expected = "without a case")]
    fn a_line_without_a_case_is_named() {
        read("spec.a | max min | Ready\n").assert_names([("spec.a", "max")].into_iter());
    }
}
