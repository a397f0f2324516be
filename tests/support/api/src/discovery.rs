//! The lists of groups, versions and resources.

use std::collections::BTreeSet;

use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use crate::faults::Faults;
use crate::reply::ok;
use crate::resources::{RESOURCES, Resource};
use crate::store::now;

/// Serves health, version and the discovery lists.
pub(crate) fn discovery(faults: &Faults, path: &str) -> Option<Response> {
    let segments: Vec<&str> = path.split('/').filter(|s| !s.is_empty()).collect();
    let groups = || {
        let mut groups: Vec<&str> = RESOURCES.iter().map(|r| r.group).filter(|g| !g.is_empty()).collect();
        groups.dedup();
        groups
    };
    let body = match segments.as_slice() {
        ["healthz" | "livez" | "readyz", ..] => return Some("ok".into_response()),
        ["version"] => json!({
            "major": "1", "minor": "37", "gitVersion": "v1.37.0", "gitCommit": "", "gitTreeState": "", "buildDate": now(),
            "goVersion": "", "compiler": "", "platform": "linux/amd64",
        }),
        ["api"] => json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}),
        ["apis"] => {
            let groups: Vec<Value> = groups()
                .into_iter()
                .map(|group| {
                    let version =
                        |name: &str| json!({"groupVersion": format!("{group}/{name}"), "version": name});
                    let all: Vec<Value> = versions(group).into_iter().map(version).collect();
                    json!({"name": group, "versions": all, "preferredVersion": version("v1")})
                })
                .collect();
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        }
        ["api", "v1"] => resource_list(faults, "", "v1"),
        ["apis", group, version] if versions(group).contains(*version) => {
            resource_list(faults, group, version)
        }
        _ => return None,
    };
    Some(ok(200, &body))
}

fn versions(group: &str) -> BTreeSet<&'static str> {
    RESOURCES.iter().filter(|r| r.group == group).map(|r| r.version).collect()
}

fn resource_list(faults: &Faults, group: &str, version: &str) -> Value {
    let verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
    let mut resources = Vec::new();
    let is_listed = |r: &&Resource| {
        r.group == group && r.version == version && faults.serves(group, version, r.plural, "")
    };
    for resource in RESOURCES.iter().filter(is_listed) {
        let entry = |name: String, verbs: &[&str]| {
            json!({
                "name": name, "singularName": resource.kind.to_lowercase(), "namespaced": resource.namespaced,
                "kind": resource.kind, "verbs": verbs,
            })
        };
        resources.push(entry(resource.plural.to_owned(), &verbs));
        if resource.has_status {
            resources.push(entry(format!("{}/status", resource.plural), &["get", "patch", "update"]));
        }
    }
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources})
}
