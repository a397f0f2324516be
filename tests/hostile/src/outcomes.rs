//! Compares what became of each case with a committed file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Set to write the file in place of comparing with it. What changed is then to be read line by line: it is what users see.
const UPDATE: &str = "QUINTLET_UPDATE_EXPECTED";

/// What became of each case, by field and extreme.
#[derive(Debug, Default)]
pub struct Outcomes(BTreeMap<String, BTreeMap<String, String>>);

impl Outcomes {
    /// Notes what became of a case.
    pub fn note(&mut self, path: &str, extreme: &str, outcome: impl Into<String>) {
        self.0.entry(path.to_owned()).or_default().insert(extreme.to_owned(), outcome.into());
    }

    /// One line per field and outcome, with the extremes that had it.
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

    /// Asserts that every case ended as `expected/FILE` says.
    ///
    /// # Panics
    /// One did not, or one is in the file and was not tried, or the other way round.
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
