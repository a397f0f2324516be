//! Reads fields of a configuration for rules.

use quintlet_model::go_duration;

use crate::config::Config;
use crate::diagnostics::Diagnostic;
use crate::node::{Data, LocatedValue};
use crate::table::{Document, Service, default_gate};

/// The fields of a configuration, as rules read them.
pub(super) struct View<'a> {
    pub(super) config: &'a Config,
    /// The service that the flags are for. None: all.
    pub(super) service: Option<Service>,
}

impl View<'_> {
    pub(super) fn node(&self, field: &str) -> Option<&LocatedValue> {
        self.config.value(Document::Kubelet, field)
    }

    pub(super) fn int(&self, field: &str) -> Option<i64> {
        match self.node(field)?.data {
            Data::Int(number) => Some(number),
            _ => None,
        }
    }

    pub(super) fn is(&self, field: &str) -> bool {
        self.node(field).is_some_and(|n| n.data == Data::Bool(true))
    }

    /// Returns whether a feature gate that can be set to either value is on.
    pub(super) fn gate(&self, name: &str) -> bool {
        let set = self.node("featureGates").and_then(|gates| gates.get(name));
        set.map_or_else(|| default_gate(name), |value| value.data == Data::Bool(true))
    }

    pub(super) fn text(&self, field: &str) -> &str {
        self.node(field).and_then(LocatedValue::text).unwrap_or_default()
    }

    pub(super) fn nanos(&self, field: &str) -> i64 {
        go_duration::parse(self.text(field)).unwrap_or(0)
    }

    pub(super) fn words(&self, field: &str) -> Vec<&str> {
        self.node(field)
            .map(LocatedValue::elements)
            .unwrap_or_default()
            .iter()
            .filter_map(LocatedValue::text)
            .collect()
    }

    /// Returns an error for the first of `fields` that is set, or for the first one if none is set.
    pub(super) fn blame(&self, fields: &[&str], message: String) -> Diagnostic {
        let set = fields.iter().find(|f| self.node(f).is_some_and(|n| n.origin.is_set()));
        let field = set.or(fields.first()).copied().unwrap_or_default();
        let origin = self.node(field).map_or(crate::node::Origin::Default, |n| n.origin.clone());
        Diagnostic::error(origin, field, message)
    }
}
