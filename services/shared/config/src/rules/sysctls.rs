//! Rules about sysctls of pods (`pkg/kubelet/apis/config/validation`).

use std::collections::BTreeMap;

use quintlet_model::sysctl::{is_valid_name, namespace_of, normal_name};

use super::view::View;
use crate::diagnostics::Diagnostic;
use crate::node::LocatedValue;

/// Checks that each sysctl of `defaultPodSysctls` has a valid name and a namespace, and occurs once.
pub(super) fn check(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    const FIELD: &str = "defaultPodSysctls";
    let mut seen: BTreeMap<String, &str> = BTreeMap::new();
    for entry in view.node(FIELD).map(LocatedValue::entries).unwrap_or_default() {
        let name = normal_name(&entry.key);
        let problem = if !is_valid_name(&entry.key) {
            "must have at most 253 characters, in words of a-z, 0-9, - and _ with dots or slashes".to_owned()
        } else if namespace_of(&name).is_none() {
            "is not namespaced, and cannot be set for pods".to_owned()
        } else if let Some(first) = seen.insert(name, &entry.key) {
            format!("is the same sysctl as {first}")
        } else {
            continue;
        };
        out.push(Diagnostic::error(entry.origin.clone(), format!("{FIELD}.{}", entry.key), problem));
    }
}
