//! Errors and warnings about a configuration, and their text form.

use std::fmt::Write as _;

use crate::node::Origin;

/// The severity of a diagnostic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The service does not start.
    Error,
    /// The service logs the diagnostic and starts.
    Warning,
}

/// A problem of the configuration that a person should correct.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Severity of the diagnostic.
    pub severity: Severity,
    /// Origin of the wrong value.
    pub origin: Origin,
    /// Path of the field, `a.b[0].c`; empty if the diagnostic does not concern a field.
    pub path: String,
    /// Description of the problem, with the value if that helps.
    pub message: String,
}

impl Diagnostic {
    /// Returns a diagnostic that prevents the start.
    #[must_use]
    pub fn error(origin: Origin, path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, origin, path: path.into(), message: message.into() }
    }

    /// Returns a diagnostic that is only logged.
    #[must_use]
    pub fn warning(origin: Origin, path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(origin, path, message) }
    }

    /// Returns whether the diagnostic is an error.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }

    /// Returns the path and the message.
    #[must_use]
    pub fn text(&self) -> String {
        if self.path.is_empty() { self.message.clone() } else { format!("{}: {}", self.path, self.message) }
    }

    /// Returns the name of the source, by which diagnostics are grouped.
    fn source(&self) -> String {
        match &self.origin {
            Origin::File(file, _) => file.display().to_string(),
            Origin::Flag(_) => "flags".to_owned(),
            Origin::Default | Origin::Follows(_) => "defaults".to_owned(),
        }
    }

    fn place(&self) -> String {
        match &self.origin {
            Origin::File(_, line) => format!("line {line}  "),
            Origin::Flag(flag) => format!("{flag}  "),
            Origin::Default | Origin::Follows(_) => String::new(),
        }
    }

    fn line(&self) -> usize {
        match &self.origin {
            Origin::File(_, line) => *line,
            Origin::Flag(_) | Origin::Default | Origin::Follows(_) => 0,
        }
    }
}

/// Formats all diagnostics with a block per file: errors by line, then warnings by line. The text ends with a
/// newline.
#[must_use]
pub fn render(diagnostics: &[Diagnostic]) -> String {
    let mut sources: Vec<String> = Vec::new();
    for diagnostic in diagnostics {
        let source = diagnostic.source();
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    let mut out = String::new();
    for source in sources {
        let mut of_source: Vec<&Diagnostic> = diagnostics.iter().filter(|m| m.source() == source).collect();
        of_source.sort_by_key(|m| (!m.is_error(), m.line()));
        let errors = of_source.iter().filter(|m| m.is_error()).count();
        let (count, noun) = if errors > 0 { (errors, "problem") } else { (of_source.len(), "warning") };
        let plural = if count == 1 { "" } else { "s" };
        // Writing to a String does not fail.
        let _ = writeln!(out, "quintlet: {count} {noun}{plural} in {source}");
        for diagnostic in of_source {
            let warning = if diagnostic.is_error() { "" } else { "warning: " };
            let _ = writeln!(out, "  {warning}{}{}", diagnostic.place(), diagnostic.text());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn diagnostics_are_grouped_by_file_and_sorted_by_line() {
        let at = |line| Origin::File(Path::new("/etc/quintlet/config.yaml").into(), line);
        let diagnostics = [
            Diagnostic::warning(
                at(31),
                "evictionHardd",
                "unknown field, ignored (did you mean evictionHard?)",
            ),
            Diagnostic::error(
                at(30),
                "evictionHard.memory.available",
                "\"10%x\" is neither a quantity nor a percentage",
            ),
            Diagnostic::error(at(14), "syncFrequency", "\"5\": a duration needs a unit, e.g. 5s"),
            Diagnostic::error(
                at(22),
                "imageGCHighThresholdPercent",
                "40 is below imageGCLowThresholdPercent 80",
            ),
            Diagnostic::error(Origin::Flag("--max-pods".into()), "maxPods", "-1 is below 0"),
        ];
        assert_eq!(
            render(&diagnostics),
            "\
quintlet: 3 problems in /etc/quintlet/config.yaml
  line 14  syncFrequency: \"5\": a duration needs a unit, e.g. 5s
  line 22  imageGCHighThresholdPercent: 40 is below imageGCLowThresholdPercent 80
  line 30  evictionHard.memory.available: \"10%x\" is neither a quantity nor a percentage
  warning: line 31  evictionHardd: unknown field, ignored (did you mean evictionHard?)
quintlet: 1 problem in flags
  --max-pods  maxPods: -1 is below 0
"
        );
    }
}
