//! A valid configuration: the value of each field with its origin.

use crate::diagnostics::Diagnostic;
use crate::node::{Data, LocatedValue, Origin};
use crate::table::{Document, FieldSupport, GATES, Row, Service};

/// A valid configuration, with a value for every field that is set or has a default.
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) kubelet: LocatedValue,
    pub(crate) quintlet: LocatedValue,
    /// Problems that do not prevent a start.
    pub warnings: Vec<Diagnostic>,
}

impl Config {
    /// Returns the value of a field, or `None` if it is not set and has no default.
    #[must_use]
    pub fn value(&self, document: Document, field: &str) -> Option<&LocatedValue> {
        self.document(document).at(field)
    }

    /// Returns the merged document.
    #[must_use]
    pub fn document(&self, document: Document) -> &LocatedValue {
        match document {
            Document::Kubelet => &self.kubelet,
            Document::Quintlet => &self.quintlet,
        }
    }

    /// Returns the feature gates with a value that has no effect, as one line, or `None` if there are none.
    #[must_use]
    pub fn fixed_gates(&self) -> Option<String> {
        let mut named: Vec<String> = Vec::new();
        for entry in self.kubelet.get("featureGates").map(LocatedValue::entries).unwrap_or_default() {
            let fixed = GATES.iter().find(|g| g.name == entry.key).map(|g| g.fixed);
            if fixed.is_some_and(|fixed| entry.value.data != Data::Bool(fixed)) {
                named.push(format!("featureGates.{}: {}", entry.key, entry.value.data));
            }
        }
        (!named.is_empty()).then(|| named.join(", "))
    }

    /// Returns the fields of `service` that are set and will never have an effect, each with the reason.
    #[must_use]
    pub fn ignored(&self, service: Service) -> Vec<(String, &'static str)> {
        let rows = Document::Kubelet.rows().iter();
        rows.filter_map(|row| {
            let FieldSupport::Ignored { owner, why } = row.support else { return None };
            let value = self.value(Document::Kubelet, row.field)?;
            // Only the owner warns of a field in a file. A flag is on the command line of one service.
            let is_warned_here = owner == service || matches!(value.origin, Origin::Flag(_));
            if !value.origin.is_set() || !is_warned_here {
                return None;
            }
            let is_default = row.default_node().is_some_and(|default| default.equals(value));
            (!is_default).then(|| (named_value(row, value), why))
        })
        .collect()
    }
}

/// Longest text of a value in a warning, in bytes.
const LONGEST_VALUE: usize = 40;

/// Formats a field as `field: value`. Lists, maps, long texts and secrets are omitted.
fn named_value(row: &Row, value: &LocatedValue) -> String {
    if row.secret {
        return row.field.to_owned();
    }
    match &value.data {
        Data::List(_) | Data::Map(_) => row.field.to_owned(),
        Data::Text(text) if text.len() > LONGEST_VALUE => row.field.to_owned(),
        Data::Text(text) => format!("{}: {text}", row.field),
        other => format!("{}: {other}", row.field),
    }
}
