//! Formats fields of a pod for `fieldRef` and `resourceFieldRef` (`pkg/fieldpath`, `pkg/api/v1/resource`).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use pod_sync_decisions::qos::{self, ResourceList};
use quintlet_model::pod;
use quintlet_model::quantity::{Format, Quantity};

use super::error::ConfigError;

/// Returns a metadata field: `metadata.name`, `.namespace`, `.uid`, `.labels`, `.annotations`, or one key of
/// the latter two (`pkg/fieldpath: ExtractFieldPathAsString`).
///
/// # Errors
/// The path is none of these.
pub fn metadata_field(pod: &Pod, path: &str) -> Result<String, ConfigError> {
    let meta = &pod.metadata;
    if let Some((map, key)) = subscript(path) {
        let values = match map {
            "metadata.labels" => meta.labels.as_ref(),
            "metadata.annotations" => meta.annotations.as_ref(),
            _ => return Err(ConfigError::invalid(format!("fieldPath {path:?} does not support subscript"))),
        };
        return Ok(values.and_then(|m| m.get(key)).cloned().unwrap_or_default());
    }
    match path {
        "metadata.name" => Ok(meta.name.clone().unwrap_or_default()),
        "metadata.namespace" => Ok(meta.namespace.clone().unwrap_or_default()),
        "metadata.uid" => Ok(meta.uid.clone().unwrap_or_default()),
        "metadata.labels" => Ok(meta.labels.as_ref().map(format_map).unwrap_or_default()),
        "metadata.annotations" => Ok(meta.annotations.as_ref().map(format_map).unwrap_or_default()),
        _ => Err(ConfigError::invalid(format!("unsupported fieldPath: {path}"))),
    }
}

fn subscript(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['")
}

/// Returns sorted lines `key="escaped value"` without a trailing newline.
fn format_map(map: &BTreeMap<String, String>) -> String {
    map.iter().map(|(k, v)| format!("{k}={}", go_quote(v))).collect::<Vec<_>>().join("\n")
}

/// Quotes a string like Go's `%q`.
#[must_use]
pub fn go_quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{b}' => out.push_str("\\v"),
            '\'' => out.push('\''),
            c if printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                let _ = match code {
                    0..=0x7f => write!(out, "\\x{code:02x}"),
                    0x80..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push('"');
    out
}

// Rust escapes a combining mark at the start of a string, which Go prints. After another character it does
// not.
fn printable(c: char) -> bool {
    format!("a{c}").escape_debug().count() == 2
}

/// Input of [`resource_field`].
#[derive(Debug, Clone, Copy)]
pub struct ResourceField<'a> {
    /// The pod, in which the selector looks for its container.
    pub pod: &'a Pod,
    /// Container used if the selector names none; `None` for files of a volume.
    pub own: Option<&'a Container>,
    /// Used for limits that are not set.
    pub allocatable: &'a ResourceList,
}

/// Returns a container's request or limit as a multiple of the divisor, rounded up
/// (`pkg/api/v1/resource: ExtractContainerResourceValue`).
///
/// A limit that is not set is that of the pod or of the node, but 0 for an init container that the selector
/// names (`pkg/kubelet: defaultPodLimitsForDownwardAPI`).
///
/// # Errors
/// The container does not exist, or the resource is not supported.
pub fn resource_field(
    field: ResourceField<'_>,
    selector: &ResourceFieldSelector,
) -> Result<String, ConfigError> {
    let name = selector.container_name.as_deref().unwrap_or_default();
    let regular = || pod::spec(field.pod).containers.iter().find(|c| c.name == name);
    let init = || pod::init_containers(field.pod).iter().find(|c| c.name == name);
    let found = if name.is_empty() { field.own } else { regular() };
    let has_default = found.is_some();
    let container = found
        .or_else(|| init().filter(|_| !name.is_empty()))
        .ok_or_else(|| ConfigError::invalid(format!("container {name} not found")))?;
    let unsupported =
        || ConfigError::invalid(format!("unsupported container resource : {}", selector.resource));
    let (kind, resource) = selector.resource.split_once('.').ok_or_else(unsupported)?;
    let known = matches!(resource, "cpu" | "memory" | "ephemeral-storage");
    if !known && !resource.starts_with("hugepages-") {
        return Err(unsupported());
    }
    let amount = match kind {
        "requests" => qos::container_requests(container).get(resource).copied().unwrap_or_default(),
        "limits" => {
            let own = qos::container_limits(container).get(resource).copied().filter(|q| !q.is_zero());
            match own {
                Some(limit) => limit,
                None if known && has_default => default_limit(field, resource),
                None => Quantity::default(),
            }
        }
        _ => return Err(unsupported()),
    };
    let divisor = selector
        .divisor
        .as_ref()
        .map(Quantity::of)
        .filter(|d| !d.is_zero())
        .unwrap_or_else(|| Quantity::from_units(1, Format::Decimal));
    let (amount, divisor) = if resource == "cpu" {
        (amount.milli_value(), divisor.milli_value())
    } else {
        (amount.value(), divisor.value())
    };
    let (amount, divisor) = (i128::from(amount), i128::from(divisor));
    let up = amount.saturating_add(divisor).saturating_sub(1);
    Ok(up.checked_div_euclid(divisor.max(1)).unwrap_or(up).to_string())
}

fn default_limit(field: ResourceField<'_>, resource: &str) -> Quantity {
    let pod_level = pod::spec(field.pod).resources.as_ref().and_then(|r| r.limits.as_ref());
    pod_level
        .and_then(|l| l.get(resource))
        .map(Quantity::of)
        .filter(|q| !q.is_zero())
        .or_else(|| field.allocatable.get(resource).copied())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_of;
    use serde_json::json;

    #[test]
    fn metadata_has_the_format_of_the_downward_api() {
        let mut p = pod_of(json!({"containers": []}));
        p.metadata.labels =
            Some([("b".into(), "2".into()), ("a".into(), "x\"y\n\u{7f}é\u{200b}'".into())].into());
        for (path, want) in [
            ("metadata.name", "web"),
            ("metadata.namespace", "default"),
            ("metadata.uid", "u1"),
            ("metadata.labels", "a=\"x\\\"y\\n\\x7fé\\u200b'\"\nb=\"2\""),
            ("metadata.labels['b']", "2"),
            ("metadata.labels['none']", ""),
            ("metadata.annotations['kubernetes.io/config.source']", "api"),
        ] {
            assert_eq!(metadata_field(&p, path).unwrap(), want, "{path}");
        }
        assert_eq!(
            metadata_field(&p, "spec.containers").unwrap_err().to_string(),
            "unsupported fieldPath: spec.containers"
        );
        assert_eq!(
            metadata_field(&p, "spec.x['a']").unwrap_err().to_string(),
            "fieldPath \"spec.x['a']\" does not support subscript"
        );
    }

    #[test]
    fn a_resource_is_divided_and_rounded_up() {
        let p = pod_of(json!({"containers": [{"name": "c", "resources": {
            "requests": {"cpu": "1500m", "memory": "64Mi"},
            "limits": {"memory": "100Mi", "hugepages-2Mi": "4Mi"}}}]}));
        let allocatable: ResourceList = [("cpu", "4"), ("memory", "8Gi"), ("ephemeral-storage", "10Gi")]
            .map(|(k, v)| (k.to_owned(), Quantity::parse(v).unwrap()))
            .into();
        let field = ResourceField { pod: &p, own: None, allocatable: &allocatable };
        let ask = |resource: &str, divisor: &str| {
            let selector: ResourceFieldSelector = serde_json::from_value(
                json!({"containerName": "c", "resource": resource, "divisor": divisor}),
            )
            .unwrap();
            resource_field(field, &selector).map_err(|e| e.to_string())
        };
        for (resource, divisor, want) in [
            ("requests.cpu", "0", "2"),
            ("requests.cpu", "1m", "1500"),
            ("limits.cpu", "1", "4"),
            ("requests.memory", "1Mi", "64"),
            ("limits.memory", "1", "104857600"),
            ("limits.memory", "64Mi", "2"),
            ("limits.ephemeral-storage", "1Gi", "10"),
            ("requests.ephemeral-storage", "1Gi", "0"),
            ("limits.hugepages-2Mi", "1Mi", "4"),
        ] {
            assert_eq!(ask(resource, divisor).unwrap(), want, "{resource} {divisor}");
        }
        assert_eq!(ask("limits.gpu", "1").unwrap_err(), "unsupported container resource : limits.gpu");
        let nobody: ResourceFieldSelector =
            serde_json::from_value(json!({"containerName": "x", "resource": "limits.cpu"})).unwrap();
        assert_eq!(resource_field(field, &nobody).unwrap_err().to_string(), "container x not found");
    }

    #[test]
    fn a_pod_level_limit_precedes_the_nodes_allocatable() {
        let p = pod_of(json!({"containers": [{"name": "c"}], "resources": {"limits": {"cpu": "2"}}}));
        let allocatable: ResourceList = [("cpu".to_owned(), Quantity::parse("4").unwrap())].into();
        let own = &p.spec.as_ref().unwrap().containers[0];
        let selector: ResourceFieldSelector =
            serde_json::from_value(json!({"resource": "limits.cpu"})).unwrap();
        let field = ResourceField { pod: &p, own: Some(own), allocatable: &allocatable };
        assert_eq!(resource_field(field, &selector).unwrap(), "2");
    }

    #[test]
    fn a_default_limit_is_for_regular_containers_and_for_the_container_itself() {
        let p = pod_of(json!({"initContainers": [{"name": "i"}], "containers": [{"name": "c"}]}));
        let allocatable: ResourceList = [("cpu".to_owned(), Quantity::parse("4").unwrap())].into();
        let spec = p.spec.as_ref().unwrap();
        let init = &spec.init_containers.as_ref().unwrap()[0];
        for (own, name, want) in [
            (None, "c", Ok("4")),
            (None, "i", Ok("0")),
            (Some(init), "", Ok("4")),
            (Some(init), "i", Ok("0")),
            (Some(init), "c", Ok("4")),
            (None, "", Err("container  not found")),
        ] {
            let selector = json!({"resource": "limits.cpu", "containerName": name});
            let selector: ResourceFieldSelector = serde_json::from_value(selector).unwrap();
            let field = ResourceField { pod: &p, own, allocatable: &allocatable };
            let got = resource_field(field, &selector).map_err(|e| e.to_string());
            assert_eq!(
                got,
                want.map(str::to_owned).map_err(str::to_owned),
                "{:?} {name:?}",
                own.map(|c| &c.name)
            );
        }
    }
}
