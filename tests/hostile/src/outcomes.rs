//! Compares the outcome of each case with a committed file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Environment variable that writes the file instead of comparing with it. Review each changed line: users see these outcomes.
const UPDATE: &str = "QUINTLET_UPDATE_EXPECTED";

/// Outcomes by field and extreme value.
#[derive(Debug, Default)]
pub struct Outcomes(BTreeMap<String, BTreeMap<String, String>>);

impl Outcomes {
    /// Records the outcome of a case.
    pub fn note(&mut self, path: &str, extreme: &str, outcome: impl Into<String>) {
        self.0.entry(path.to_owned()).or_default().insert(extreme.to_owned(), outcome.into());
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
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("expected").join(file);
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
            "what became of these cases is not what {} says ({UPDATE}=1 writes it anew; read the difference):\n{}",
            path.display(),
            different.join("\n")
        );
    }
}
