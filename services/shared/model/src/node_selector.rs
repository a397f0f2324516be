//! Node selectors of pods and PersistentVolumes
//! (`component-helpers/scheduling/corev1: MatchNodeSelectorTerms`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};

/// Returns whether a node matches a selector, by its labels and, for `metadata.name`, by `name`.
#[must_use]
pub fn matches(
    selector: &NodeSelector,
    labels: Option<&BTreeMap<String, String>>,
    name: Option<&str>,
) -> bool {
    let label = |key: &str| labels.and_then(|labels| labels.get(key)).map(String::as_str);
    let field = |key: &str| name.filter(|_| key == "metadata.name");
    selector.node_selector_terms.iter().any(|term| matches_term(term, &label, &field))
}

fn matches_term<'a>(
    term: &NodeSelectorTerm,
    label: &impl Fn(&str) -> Option<&'a str>,
    field: &impl Fn(&str) -> Option<&'a str>,
) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    // An empty node selector term matches no object.
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|r| meets(r, label(&r.key)))
        && fields.iter().all(|r| meets(r, field(&r.key)))
}

fn meets(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = |v: &str| values.iter().any(|x| x == v);
    let compare = |ok: fn(i64, i64) -> bool| match (value.map(str::parse), values) {
        (Some(Ok(value)), [bound]) => bound.parse().is_ok_and(|bound| ok(value, bound)),
        _ => false,
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(listed),
        "NotIn" => !value.is_some_and(listed),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compare(|v, b| v > b),
        "Lt" => compare(|v, b| v < b),
        _ => false,
    }
}
