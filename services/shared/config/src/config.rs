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
            if !value.origin.is_set() || owner != service && !matches!(value.origin, Origin::Flag(_)) {
                return None;
            }
            let default = row.default_node().is_some_and(|d| d.equals(value));
            (!default).then(|| (named_value(row, value), why))
        })
        .collect()
    }
}

/// Formats a field as `field: value`. Long and secret values are omitted.
fn named_value(row: &Row, value: &LocatedValue) -> String {
    match &value.data {
        Data::List(_) | Data::Map(_) => row.field.to_owned(),
        Data::Text(text) if !row.secret && text.len() <= 40 => format!("{}: {text}", row.field),
        Data::Text(_) => row.field.to_owned(),
        other => format!("{}: {other}", row.field),
    }
}
