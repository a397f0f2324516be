//! Validates fields for the scheduler: affinity, tolerations, topology spread.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    NodeSelectorRequirement, NodeSelectorTerm, PodAffinityTerm, PodSpec, Toleration,
    TopologySpreadConstraint, WeightedPodAffinityTerm,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::errors::Errors;
use super::names;

const NOT_AN_OPERATOR: &str = "not a valid selector operator";

/// Validates all fields for the scheduler.
pub(super) fn all(spec: &PodSpec, errors: &mut Errors) {
    affinity(spec, errors);
    let mut gates = BTreeSet::new();
    for (i, gate) in spec.scheduling_gates.iter().flatten().enumerate() {
        let path = format_args!("spec.schedulingGates[{i}]");
        errors.format(path, &gate.name, names::qualified(&gate.name));
        if !gates.insert(gate.name.as_str()) {
            errors.duplicate(path, gate.name.as_str());
        }
    }
    if !gates.is_empty() {
        errors.forbidden("spec.nodeName", "cannot be set until all schedulingGates have been cleared");
    }
    spread(spec.topology_spread_constraints.as_deref().unwrap_or_default(), errors);
    for (i, toleration) in spec.tolerations.iter().flatten().enumerate() {
        tolerate(toleration, &format!("spec.tolerations[{i}]"), errors);
    }
    if let Some(group) = spec.scheduling_group.as_ref().and_then(|g| g.pod_group_name.as_deref()) {
        errors.format("spec.schedulingGroup.podGroupName", group, names::dns_subdomain(group));
    }
}

// validateAffinity
fn affinity(spec: &PodSpec, errors: &mut Errors) {
    let Some(affinity) = spec.affinity.as_ref() else { return };
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
    if let Some(nodes) = affinity.node_affinity.as_ref() {
        let path = "spec.affinity.nodeAffinity";
        if let Some(selector) = nodes.required_during_scheduling_ignored_during_execution.as_ref() {
            let path = format!("{path}.{REQUIRED}.nodeSelectorTerms");
            if selector.node_selector_terms.is_empty() {
                errors.required(&path, "must have at least one node selector term");
            }
            for (i, term) in selector.node_selector_terms.iter().enumerate() {
                node_term(term, true, &format!("{path}[{i}]"), errors);
            }
        }
        let preferred = nodes.preferred_during_scheduling_ignored_during_execution.iter().flatten();
        for (i, term) in preferred.enumerate() {
            let path = format!("{path}.{PREFERRED}[{i}]");
            weight(term.weight, &path, errors);
            node_term(&term.preference, false, &format!("{path}.preference"), errors);
        }
    }
    let with = affinity.pod_affinity.as_ref().map(|a| {
        let required = a.required_during_scheduling_ignored_during_execution.as_deref();
        ("podAffinity", required, a.preferred_during_scheduling_ignored_during_execution.as_deref())
    });
    let without = affinity.pod_anti_affinity.as_ref().map(|a| {
        let required = a.required_during_scheduling_ignored_during_execution.as_deref();
        ("podAntiAffinity", required, a.preferred_during_scheduling_ignored_during_execution.as_deref())
    });
    for (field, required, preferred) in [with, without].into_iter().flatten() {
        for (i, term) in required.unwrap_or_default().iter().enumerate() {
            pod_term(term, &format!("spec.affinity.{field}.{REQUIRED}[{i}]"), errors);
        }
        for (i, term) in preferred.unwrap_or_default().iter().enumerate() {
            let WeightedPodAffinityTerm { pod_affinity_term, weight: number } = term;
            let path = format!("spec.affinity.{field}.{PREFERRED}[{i}]");
            weight(*number, &path, errors);
            pod_term(pod_affinity_term, &format!("{path}.podAffinityTerm"), errors);
        }
    }
}

fn weight(weight: i32, path: &str, errors: &mut Errors) {
    if !(1..=100).contains(&weight) {
        errors.invalid(format_args!("{path}.weight"), weight, "must be in the range 1-100");
    }
}

// ValidateNodeSelectorTerm
fn node_term(term: &NodeSelectorTerm, are_values_checked: bool, path: &str, errors: &mut Errors) {
    for (i, requirement) in term.match_expressions.iter().flatten().enumerate() {
        let path = format!("{path}.matchExpressions[{i}]");
        node_expression(requirement, are_values_checked, &path, errors);
    }
    for (i, requirement) in term.match_fields.iter().flatten().enumerate() {
        node_field(requirement, &format!("{path}.matchFields[{i}]"), errors);
    }
}

fn node_expression(r: &NodeSelectorRequirement, are_values_checked: bool, path: &str, errors: &mut Errors) {
    let values = r.values.as_deref().unwrap_or_default();
    let values_path = format_args!("{path}.values");
    match (r.operator.as_str(), values.len()) {
        ("In" | "NotIn", 0) => {
            errors.required(values_path, "must be specified when `operator` is 'In' or 'NotIn'");
        }
        ("Exists" | "DoesNotExist", 1..) => {
            errors
                .forbidden(values_path, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
        }
        ("Gt" | "Lt", 0 | 2..) => {
            errors.required(values_path, "must be specified single value when `operator` is 'Lt' or 'Gt'");
        }
        ("In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt", _) => {}
        (other, _) => errors.invalid(format_args!("{path}.operator"), other, NOT_AN_OPERATOR),
    }
    errors.format(format_args!("{path}.key"), &r.key, names::qualified(&r.key));
    if are_values_checked {
        for (i, value) in values.iter().enumerate() {
            errors.format(format_args!("{path}.values[{i}]"), value, names::label_value(value));
        }
    }
}

// ValidateNodeFieldSelectorRequirement
fn node_field(r: &NodeSelectorRequirement, path: &str, errors: &mut Errors) {
    let values = r.values.as_deref().unwrap_or_default();
    match r.operator.as_str() {
        "In" | "NotIn" => {
            if values.len() != 1 {
                errors.required(
                    format_args!("{path}.values"),
                    "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
                );
            }
        }
        other => errors.invalid(format_args!("{path}.operator"), other, NOT_AN_OPERATOR),
    }
    if r.key != "metadata.name" {
        return errors.invalid(format_args!("{path}.key"), r.key.as_str(), "not a valid field selector key");
    }
    for (i, value) in values.iter().enumerate() {
        errors.format(format_args!("{path}.values[{i}]"), value, names::dns_subdomain(value));
    }
}

// ValidateLabelSelector
fn selector(selector: Option<&LabelSelector>, path: &str, errors: &mut Errors) {
    let Some(selector) = selector else { return };
    names::labels(selector.match_labels.as_ref(), &format!("{path}.matchLabels"), errors);
    for (i, r) in selector.match_expressions.iter().flatten().enumerate() {
        let path = format!("{path}.matchExpressions[{i}]");
        let values = r.values.as_deref().unwrap_or_default();
        match (r.operator.as_str(), values.is_empty()) {
            ("In" | "NotIn", true) => errors.required(
                format_args!("{path}.values"),
                "must be specified when `operator` is 'In' or 'NotIn'",
            ),
            ("Exists" | "DoesNotExist", false) => errors.forbidden(
                format_args!("{path}.values"),
                "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
            ),
            ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => {}
            (other, _) => errors.invalid(format_args!("{path}.operator"), other, NOT_AN_OPERATOR),
        }
        errors.format(format_args!("{path}.key"), &r.key, names::qualified(&r.key));
        for (i, value) in values.iter().enumerate() {
            errors.format(format_args!("{path}.values[{i}]"), value, names::label_value(value));
        }
    }
}

fn keys_of(selector: &LabelSelector) -> BTreeSet<&str> {
    let labels = selector.match_labels.iter().flat_map(|labels| labels.keys().map(String::as_str));
    labels.chain(selector.match_expressions.iter().flatten().map(|e| e.key.as_str())).collect()
}

// validatePodAffinityTerm
fn pod_term(term: &PodAffinityTerm, path: &str, errors: &mut Errors) {
    selector(term.label_selector.as_ref(), &format!("{path}.labelSelector"), errors);
    selector(term.namespace_selector.as_ref(), &format!("{path}.namespaceSelector"), errors);
    for namespace in term.namespaces.iter().flatten() {
        errors.format(format_args!("{path}.namespace"), namespace, names::dns_label(namespace));
    }
    let matched = term.match_label_keys.as_deref().unwrap_or_default();
    let mismatched = term.mismatch_label_keys.as_deref().unwrap_or_default();
    for (field, keys) in [("matchLabelKeys", matched), ("mismatchLabelKeys", mismatched)] {
        if !keys.is_empty() && term.label_selector.is_none() {
            errors.forbidden(
                format_args!("{path}.{field}"),
                "must not be specified when labelSelector is not set",
            );
            continue;
        }
        for (i, key) in keys.iter().enumerate() {
            errors.format(format_args!("{path}.{field}[{i}]"), key, names::qualified(key));
        }
    }
    let mismatched: BTreeSet<&String> = mismatched.iter().collect();
    for (i, key) in matched.iter().enumerate().filter(|(_, key)| mismatched.contains(key)) {
        let detail = "exists in both matchLabelKeys and mismatchLabelKeys";
        errors.invalid(format_args!("{path}.matchLabelKeys[{i}]"), key.as_str(), detail);
    }
    if term.topology_key.is_empty() {
        errors.required(format_args!("{path}.topologyKey"), "can not be empty");
    }
    errors.format(
        format_args!("{path}.topologyKey"),
        &term.topology_key,
        names::qualified(&term.topology_key),
    );
}

// validateTopologySpreadConstraints
fn spread(constraints: &[TopologySpreadConstraint], errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    for (i, constraint) in constraints.iter().enumerate() {
        let path = format!("spec.topologySpreadConstraints[{i}]");
        if constraint.max_skew <= 0 {
            errors.invalid(format_args!("{path}.maxSkew"), constraint.max_skew, names::POSITIVE);
        }
        let (key, action) = (constraint.topology_key.as_str(), constraint.when_unsatisfiable.as_str());
        if key.is_empty() {
            errors.required(format_args!("{path}.topologyKey"), "can not be empty");
        }
        errors.word_if_set(
            format_args!("{path}.whenUnsatisfiable"),
            Some(action),
            &["DoNotSchedule", "ScheduleAnyway"],
        );
        if !seen.insert((key, action)) {
            errors.duplicate(
                format_args!("{path}.{{topologyKey, whenUnsatisfiable}}"),
                format!("{{{key}, {action}}}").as_str(),
            );
        }
        if let Some(domains) = constraint.min_domains {
            let path = format_args!("{path}.minDomains");
            if domains <= 0 {
                errors.invalid(path, domains, names::POSITIVE);
            }
            if action != "DoNotSchedule" {
                let detail =
                    format_args!("can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {action}");
                errors.invalid(path, domains, detail);
            }
        }
        for (field, policy) in [
            ("nodeAffinityPolicy", &constraint.node_affinity_policy),
            ("nodeTaintsPolicy", &constraint.node_taints_policy),
        ] {
            errors.word_if_set(format_args!("{path}.{field}"), policy.as_deref(), &["Honor", "Ignore"]);
        }
        let keys = constraint.match_label_keys.as_deref().unwrap_or_default();
        let selected = constraint.label_selector.as_ref().map(keys_of);
        if !keys.is_empty() && selected.is_none() {
            errors.forbidden(
                format_args!("{path}.matchLabelKeys"),
                "must not be specified when labelSelector is not set",
            );
        }
        for (i, key) in keys.iter().enumerate() {
            let path = format_args!("{path}.matchLabelKeys[{i}]");
            errors.format(path, key, names::qualified(key));
            if selected.as_ref().is_some_and(|selected| selected.contains(key.as_str())) {
                errors.invalid(path, key.as_str(), "exists in both matchLabelKeys and labelSelector");
            }
        }
        selector(constraint.label_selector.as_ref(), &format!("{path}.labelSelector"), errors);
    }
}

// ValidateTolerations
fn tolerate(t: &Toleration, path: &str, errors: &mut Errors) {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    let key = text(&t.key);
    let value = text(&t.value);
    let effect = text(&t.effect);
    let operator = text(&t.operator);
    if !key.is_empty() {
        errors.format(format_args!("{path}.key"), &key, names::qualified(&key));
    }
    let operator_path = format_args!("{path}.operator");
    if key.is_empty() && operator != "Exists" {
        let detail =
            "operator must be Exists when `key` is empty, which means \"match all values and all keys\"";
        errors.invalid(operator_path, operator.as_str(), detail);
    }
    if t.toleration_seconds.is_some() && effect != "NoExecute" {
        let detail = "effect must be 'NoExecute' when `tolerationSeconds` is set";
        errors.invalid(format_args!("{path}.effect"), effect.as_str(), detail);
    }
    match operator.as_str() {
        "" | "Equal" => errors.format(operator_path, &value, names::label_value(&value)),
        "Exists" if !value.is_empty() => {
            errors.invalid(operator_path, value.as_str(), "value must be empty when `operator` is 'Exists'");
        }
        // Lt and Gt are behind a feature gate; a kubelet with the gate accepts them.
        "Exists" | "Lt" | "Gt" => {}
        other => errors.unsupported(operator_path, other, &["Equal", "Exists"]),
    }
    if !effect.is_empty() {
        errors.word_if_set(
            format_args!("{path}.effect"),
            Some(effect.as_str()),
            &["NoSchedule", "PreferNoSchedule", "NoExecute"],
        );
    }
}
