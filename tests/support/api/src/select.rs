//! Field and label selectors.

use serde_json::Value;

use crate::error::ApiError;
use crate::resources::Resource;

/// Selector of a list or watch.
#[derive(Debug, Default)]
pub(crate) struct Selector {
    fields: Vec<Term>,
    labels: Vec<Term>,
}

#[derive(Debug)]
struct Term {
    key: String,
    test: Test,
}

#[derive(Debug)]
enum Test {
    Exists,
    Absent,
    In(Vec<String>),
    NotIn(Vec<String>),
}

impl Test {
    fn holds(&self, value: Option<&str>) -> bool {
        match self {
            Self::Exists => value.is_some(),
            Self::Absent => value.is_none(),
            Self::In(set) => value.is_some_and(|v| set.iter().any(|s| s == v)),
            Self::NotIn(set) => value.is_none_or(|v| !set.iter().any(|s| s == v)),
        }
    }
}

impl Selector {
    pub(crate) fn parse(resource: &Resource, fields: &str, labels: &str) -> Result<Self, ApiError> {
        let mut selector = Self { fields: Vec::new(), labels: parse_labels(labels)? };
        for part in fields.split(',').filter(|p| !p.is_empty()) {
            let (key, negated, value) = split_equality(part).ok_or_else(|| {
                ApiError::bad_request(format!("invalid selector: '{fields}'; can't understand '{part}'"))
            })?;
            if !supported(resource, key) {
                return Err(ApiError::bad_request(format!(
                    "Unable to find {:?} that match label selector {labels:?}, field selector {fields:?}: field label not supported: {key}",
                    resource.qualified()
                )));
            }
            let set = vec![value.to_owned()];
            let test = if negated { Test::NotIn(set) } else { Test::In(set) };
            selector.fields.push(Term { key: key.to_owned(), test });
        }
        Ok(selector)
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.fields.iter().all(|term| term.test.holds(Some(&field(object, &term.key))))
            && self.labels.iter().all(|term| {
                term.test.holds(object["metadata"]["labels"].get(&term.key).and_then(Value::as_str))
            })
    }
}

/// Parses `a=b`, `a==b`, `a!=b`.
fn split_equality(part: &str) -> Option<(&str, bool, &str)> {
    if let Some((key, value)) = part.split_once("!=") {
        return Some((key.trim(), true, value.trim()));
    }
    let (key, value) = part.split_once("==").or_else(|| part.split_once('='))?;
    Some((key.trim(), false, value.trim()))
}

fn supported(resource: &Resource, key: &str) -> bool {
    if key == "metadata.name" || (resource.namespaced && key == "metadata.namespace") {
        return true;
    }
    match resource.plural {
        "pods" => matches!(
            key,
            "spec.nodeName"
                | "spec.restartPolicy"
                | "spec.schedulerName"
                | "spec.serviceAccountName"
                | "status.phase"
                | "status.podIP"
                | "status.nominatedNodeName"
        ),
        "nodes" => key == "spec.unschedulable",
        "services" => matches!(key, "spec.clusterIP" | "spec.type"),
        "podcertificaterequests" => matches!(key, "spec.signerName" | "spec.podName" | "spec.nodeName"),
        "resourceslices" => matches!(key, "spec.nodeName" | "spec.driver"),
        "secrets" => key == "type",
        "namespaces" => key == "status.phase",
        "events" => {
            key.starts_with("involvedObject.")
                || matches!(key, "reason" | "type" | "source" | "reportingComponent")
        }
        _ => false,
    }
}

/// Returns a field. An absent field is the empty string, as in the real server.
fn field(object: &Value, key: &str) -> String {
    let mut at = object;
    for part in key.split('.') {
        at = &at[part];
    }
    match at {
        Value::String(text) => text.clone(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => value.to_string(),
        Value::Null if key == "spec.unschedulable" => "false".to_owned(),
        Value::Null | Value::Array(_) | Value::Object(_) => String::new(),
    }
}

fn parse_labels(text: &str) -> Result<Vec<Term>, ApiError> {
    let mut terms = Vec::new();
    for part in split_outside_parentheses(text) {
        let part = part.trim();
        if part.is_empty() {
            continue;
        }
        terms.push(parse_label(part).ok_or_else(|| {
            ApiError::bad_request(format!(
                "unable to parse requirement: couldn't parse the selector string {part:?}"
            ))
        })?);
    }
    Ok(terms)
}

fn parse_label(part: &str) -> Option<Term> {
    if let Some(open) = part.find('(') {
        let set = part[open + 1..].strip_suffix(')')?.split(',').map(|v| v.trim().to_owned()).collect();
        let mut words = part[..open].split_whitespace();
        let (key, operator) = (words.next()?, words.next()?);
        let test = match operator {
            "in" => Test::In(set),
            "notin" => Test::NotIn(set),
            _ => return None,
        };
        return Some(Term { key: key.to_owned(), test });
    }
    if let Some((key, negated, value)) = split_equality(part) {
        let set = vec![value.to_owned()];
        return Some(Term {
            key: key.to_owned(),
            test: if negated { Test::NotIn(set) } else { Test::In(set) },
        });
    }
    match part.strip_prefix('!') {
        Some(key) => Some(Term { key: key.trim().to_owned(), test: Test::Absent }),
        None if part.contains(char::is_whitespace) => None,
        None => Some(Term { key: part.to_owned(), test: Test::Exists }),
    }
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut depth = 0_usize;
    let mut start = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn selectors_select_as_the_api_server_does() {
        let pods = Resource::by_plural("pods").unwrap();
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "labels": {"app": "web", "tier": "front"}}, "spec": {"nodeName": "w1"}});
        let cases = [
            ("", "", true),
            ("spec.nodeName=w1", "", true),
            ("spec.nodeName==w2", "", false),
            ("spec.nodeName!=w2,metadata.name=p", "", true),
            ("status.phase=", "", true),
            ("", "app=web", true),
            ("", "app!=web", false),
            ("", "app in (web, api),tier", true),
            ("", "app notin (web)", false),
            ("", "!missing", true),
            ("", "missing notin (a)", true),
            ("", "missing", false),
        ];
        for (fields, labels, want) in cases {
            assert_eq!(
                Selector::parse(pods, fields, labels).unwrap().matches(&pod),
                want,
                "{fields} {labels}"
            );
        }
        assert_eq!(Selector::parse(pods, "spec.foo=1", "").unwrap_err().code, 400);
        assert_eq!(Selector::parse(pods, "", "a b").unwrap_err().code, 400);
    }
}
