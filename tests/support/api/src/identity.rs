//! Identity of a client and permissions of a node: the parts of the Node authorizer and NodeRestriction that
//! affect an agent.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::resources::Resource;
use crate::store::Store;

/// Prefix of the user name of a node.
pub(crate) const NODE_USER: &str = "system:node:";

const LEASES: &str = "kube-node-lease";
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Labels below kubernetes.io and k8s.io that an agent may set on its node.
const AGENT_LABELS: &[&str] = &[
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];
const AGENT_LABEL_DOMAINS: &[&str] = &["kubelet.kubernetes.io", "node.kubernetes.io"];

/// Identity of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Identity {
    /// An administrator, who may do everything.
    Admin,
    /// The agent of this node.
    Node(String),
}

/// The operation that a request asks for.
pub(crate) struct Access<'a> {
    pub(crate) verb: &'a str,
    pub(crate) resource: &'static Resource,
    pub(crate) subresource: &'a str,
    pub(crate) namespace: &'a str,
    /// Name in the path, or in a field selector `metadata.name=`.
    pub(crate) name: &'a str,
    /// Node name in a field selector `spec.nodeName=`.
    pub(crate) node_selected: &'a str,
}

impl Identity {
    /// Returns the node whose user name is the bearer token, or the administrator if there is no token.
    pub(crate) fn from_authorization(header: &str) -> Self {
        match header.strip_prefix("Bearer ").and_then(|token| token.strip_prefix(NODE_USER)) {
            Some(node) => Self::Node(node.to_owned()),
            None => Self::Admin,
        }
    }

    /// Authorizes a request. A node may not find out whether an unrelated object exists.
    pub(crate) fn authorize(&self, store: &Store, access: &Access<'_>) -> Result<(), ApiError> {
        let Self::Node(node) = self else { return Ok(()) };
        if allows(node, store, access) {
            return Ok(());
        }
        let Access { verb, resource, namespace, name, subresource, .. } = access;
        let what = if subresource.is_empty() {
            resource.plural.to_owned()
        } else {
            format!("{}/{subresource}", resource.plural)
        };
        let place = if namespace.is_empty() {
            "at the cluster scope".to_owned()
        } else {
            format!("in the namespace {namespace:?}")
        };
        let why = format!(
            "User \"{NODE_USER}{node}\" cannot {verb} resource {what:?} in API group {:?} {place}",
            resource.group
        );
        Err(ApiError::forbidden(resource, name, &why))
    }

    /// Admits the creation of an object.
    pub(crate) fn admit_create(
        &self,
        store: &Store,
        access: &Access<'_>,
        object: &Value,
    ) -> Result<(), ApiError> {
        let Self::Node(node) = self else { return Ok(()) };
        let name = if access.name.is_empty() { text(&object["metadata"]["name"]) } else { access.name };
        let deny = |why: String| Err(ApiError::forbidden(access.resource, name, &why));
        match (access.resource.plural, access.subresource) {
            ("pods", "") => match mirror_fault(node, store, object) {
                Some(why) => deny(why),
                None => Ok(()),
            },
            ("pods", "eviction") => own_pod(node, store, access, "evict pods"),
            ("serviceaccounts", "token") => {
                let bound = &object["spec"]["boundObjectRef"];
                if bound["kind"] != "Pod" || text(&bound["name"]).is_empty() {
                    return deny("node requested token not bound to a pod".to_owned());
                }
                if text(&bound["uid"]).is_empty() {
                    return deny("node requested token with a pod binding without a uid".to_owned());
                }
                let pods = find("pods")?;
                let pod = store.get(pods, access.namespace, text(&bound["name"]))?;
                if pod["metadata"]["uid"] != bound["uid"] {
                    return deny(format!(
                        "the UID in the bound object reference ({}) does not match the UID in record. The object might have been deleted and then recreated",
                        text(&bound["uid"])
                    ));
                }
                if pod["spec"]["nodeName"] != *node.as_str() {
                    return deny(
                        "node requested token bound to a pod scheduled on a different node".to_owned(),
                    );
                }
                Ok(())
            }
            ("podcertificaterequests", "") => match certificate_fault(node, store, access, object)? {
                Some(why) => deny(why),
                None => Ok(()),
            },
            ("nodes", _) if name != node => {
                deny(format!("node {node:?} is not allowed to modify node {name:?}"))
            }
            ("nodes", _) => {
                let labels = forbidden_labels(&object["metadata"]["labels"], &Value::Null);
                if labels.is_empty() {
                    return Ok(());
                }
                deny(format!(
                    "node {node:?} is not allowed to set the following labels: {}",
                    labels.join(", ")
                ))
            }
            ("leases", _) if name != node => {
                deny("can only access node lease with the same name as the requesting node".to_owned())
            }
            ("csinodes", _) if name != node => {
                deny("can only access CSINode with the same name as the requesting node".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Admits the update of an object.
    pub(crate) fn admit_update(&self, access: &Access<'_>, old: &Value, new: &Value) -> Result<(), ApiError> {
        let Self::Node(node) = self else { return Ok(()) };
        let deny = |why: String| Err(ApiError::forbidden(access.resource, access.name, &why));
        match access.resource.plural {
            "pods" if old["spec"]["nodeName"] != *node.as_str() => deny(format!(
                "node {node:?} can only update pod status for pods with spec.nodeName set to itself"
            )),
            "pods" if old["metadata"]["labels"] != new["metadata"]["labels"] => {
                deny(format!("node {node:?} cannot update labels through pod status"))
            }
            "nodes" if access.name != node => {
                deny(format!("node {node:?} is not allowed to modify node {:?}", access.name))
            }
            "nodes" => {
                // A status update does not change the spec.
                if access.subresource.is_empty() && old["spec"]["taints"] != new["spec"]["taints"] {
                    return deny(format!("node {node:?} is not allowed to modify taints"));
                }
                let owners = |object: &Value| object["metadata"]["ownerReferences"].clone();
                if owners(old) != owners(new) {
                    return deny(format!("node {node:?} is not allowed to modify ownerReferences"));
                }
                let labels = forbidden_labels(&old["metadata"]["labels"], &new["metadata"]["labels"]);
                if labels.is_empty() {
                    return Ok(());
                }
                deny(format!("is not allowed to modify labels: {}", labels.join(", ")))
            }
            _ => Ok(()),
        }
    }

    /// Admits the deletion of an object.
    pub(crate) fn admit_delete(&self, store: &Store, access: &Access<'_>) -> Result<(), ApiError> {
        let Self::Node(node) = self else { return Ok(()) };
        if access.resource.plural == "pods" {
            return own_pod(node, store, access, "delete pods");
        }
        Ok(())
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn find(plural: &str) -> Result<&'static Resource, ApiError> {
    Resource::by_plural(plural).ok_or_else(|| ApiError::new(500, "InternalError", plural))
}

/// Checks that the pod exists and is bound to this node.
fn own_pod(node: &str, store: &Store, access: &Access<'_>, what: &str) -> Result<(), ApiError> {
    let pod = store.get(access.resource, access.namespace, access.name)?;
    if pod["spec"]["nodeName"] == *node {
        return Ok(());
    }
    let why = format!("node {node:?} can only {what} with spec.nodeName set to itself");
    Err(ApiError::forbidden(access.resource, access.name, &why))
}

fn allows(node: &str, store: &Store, access: &Access<'_>) -> bool {
    let reads = matches!(access.verb, "get" | "list" | "watch");
    let writes = matches!(access.verb, "update" | "patch");
    let own = access.name == node;
    match (access.resource.plural, access.subresource) {
        ("configmaps" | "secrets", "") => reads && is_related(node, store, access),
        ("serviceaccounts" | "persistentvolumeclaims" | "resourceclaims", "") => {
            access.verb == "get" && is_related(node, store, access)
        }
        ("serviceaccounts", "token") => access.verb == "create" && is_related(node, store, access),
        ("persistentvolumes", "") => access.verb == "get",
        ("volumeattachments", "") => access.verb == "get",
        ("leases", "") => {
            access.namespace == LEASES
                && (access.verb == "create"
                    || own && (access.verb == "get" || access.verb == "delete" || writes))
        }
        ("csinodes", "") => {
            access.verb == "create" || own && (access.verb == "get" || access.verb == "delete" || writes)
        }
        ("nodes", "") => access.verb == "create" || writes || reads && own,
        ("csinodes", "status") => own && writes,
        ("nodes" | "pods", "status") => writes,
        ("pods", "") => match access.verb {
            "create" | "delete" => true,
            "list" | "watch" if access.node_selected == node => true,
            "get" | "list" | "watch" => is_related(node, store, access),
            _ => false,
        },
        ("pods", "eviction") => access.verb == "create",
        ("events", "") => access.verb == "create" || writes,
        ("services" | "runtimeclasses" | "csidrivers" | "clustertrustbundles", "") => reads,
        ("resourceslices", "") => {
            matches!(access.verb, "list" | "watch" | "deletecollection") && access.node_selected == node
        }
        ("podcertificaterequests", "") => match access.verb {
            "create" | "get" => true,
            "list" | "watch" => access.node_selected == node,
            _ => false,
        },
        ("certificatesigningrequests", "") => access.verb == "create" || reads,
        _ => false,
    }
}

/// Returns whether the object is a pod of the node or is referred to by one.
fn is_related(node: &str, store: &Store, access: &Access<'_>) -> bool {
    let Ok(pods) = find("pods") else { return false };
    if access.name.is_empty() || access.namespace.is_empty() {
        return false;
    }
    let refers = |pod: &Value| {
        let spec = &pod["spec"];
        *node == spec["nodeName"]
            && match access.resource.plural {
                "pods" => pod["metadata"]["name"] == *access.name,
                "serviceaccounts" => spec["serviceAccountName"] == *access.name,
                "resourceclaims" => resource_claims(pod).contains(&access.name),
                plural => references(spec).contains(&(plural, access.name)),
            }
    };
    !store.list(pods, access.namespace, refers, None, 1).items.is_empty()
}

/// Returns the names of a pod's ResourceClaims.
fn resource_claims(pod: &Value) -> Vec<&str> {
    let lists = [&pod["spec"]["resourceClaims"], &pod["status"]["resourceClaimStatuses"]];
    let entries = lists.into_iter().flat_map(|list| list.as_array().into_iter().flatten());
    let extended = &pod["status"]["extendedResourceClaimStatus"];
    entries.chain([extended]).map(|entry| text(&entry["resourceClaimName"])).collect()
}

/// Returns the ConfigMaps, Secrets and claims in a pod's spec, as (plural, name).
fn references(spec: &Value) -> Vec<(&'static str, &str)> {
    let mut found = Vec::new();
    let mut open = vec![spec];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(fields) => {
                for (key, inner) in fields {
                    let named = match key.as_str() {
                        "configMap" | "configMapRef" | "configMapKeyRef" => {
                            Some(("configmaps", &inner["name"]))
                        }
                        "secretRef" | "secretKeyRef" => Some(("secrets", &inner["name"])),
                        "secret" if inner["secretName"].is_string() => {
                            Some(("secrets", &inner["secretName"]))
                        }
                        "secret" => Some(("secrets", &inner["name"])),
                        "persistentVolumeClaim" => Some(("persistentvolumeclaims", &inner["claimName"])),
                        _ => None,
                    };
                    if let Some((plural, name)) = named {
                        found.push((plural, text(name)));
                    }
                    open.push(inner);
                }
            }
            Value::Array(list) => open.extend(list),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let pull_secrets = spec["imagePullSecrets"].as_array().into_iter().flatten();
    found.extend(pull_secrets.map(|secret| ("secrets", text(&secret["name"]))));
    found.retain(|(_, name)| !name.is_empty());
    found
}

/// Returns the reason why a node may not create this PodCertificateRequest.
fn certificate_fault(
    node: &str,
    store: &Store,
    access: &Access<'_>,
    request: &Value,
) -> Result<Option<String>, ApiError> {
    let spec = &request["spec"];
    let object = |plural, namespace, name: &Value| store.get(find(plural)?, namespace, text(name));
    let pod = object("pods", access.namespace, &spec["podName"])?;
    let account = object("serviceaccounts", access.namespace, &spec["serviceAccountName"])?;
    let facts = [
        ("spec.nodeName", &spec["nodeName"], json!(node)),
        ("spec.nodeUID", &spec["nodeUID"], object("nodes", "", &json!(node))?["metadata"]["uid"].clone()),
        ("spec.podUID", &spec["podUID"], pod["metadata"]["uid"].clone()),
        ("node of the pod", &pod["spec"]["nodeName"], json!(node)),
        ("spec.serviceAccountName", &spec["serviceAccountName"], pod["spec"]["serviceAccountName"].clone()),
        ("spec.serviceAccountUID", &spec["serviceAccountUID"], account["metadata"]["uid"].clone()),
    ];
    let wrong = facts.into_iter().find(|(_, got, expected)| *got != expected);
    Ok(wrong.map(|(field, got, expected)| format!("{field} is {got}, which is not {expected}")))
}

/// Returns the reason why a node may not create this pod.
fn mirror_fault(node: &str, store: &Store, pod: &Value) -> Option<String> {
    let spec = &pod["spec"];
    if !pod["metadata"]["annotations"][MIRROR].is_string() {
        return Some(format!(
            "pod does not have {MIRROR:?} annotation, node {node:?} can only create mirror pods"
        ));
    }
    if spec["nodeName"] != *node {
        return Some(format!("node {node:?} can only create pods with spec.nodeName set to itself"));
    }
    let owners = pod["metadata"]["ownerReferences"].as_array().map(Vec::as_slice).unwrap_or_default();
    let [owner] = owners else {
        return Some(format!(
            "node {node:?} can only create pods with a single owner reference set to itself"
        ));
    };
    if owner["apiVersion"] != "v1" || owner["kind"] != "Node" || owner["name"] != *node {
        return Some(format!("node {node:?} can only create pods with an owner reference set to itself"));
    }
    if owner["controller"] != true {
        return Some(format!(
            "node {node:?} can only create pods with a controller owner reference set to itself"
        ));
    }
    if owner["blockOwnerDeletion"] == true {
        return Some(format!("node {node:?} must not set blockOwnerDeletion on an owner reference"));
    }
    let live = find("nodes").and_then(|nodes| store.get(nodes, "", node)).ok();
    let uid = live.as_ref().map(|live| text(&live["metadata"]["uid"])).unwrap_or_default();
    if owner["uid"] != *uid {
        return Some(format!("node {node} UID mismatch: expected {} got {uid}", text(&owner["uid"])));
    }
    let account = text(&spec["serviceAccountName"]);
    let referenced =
        if account.is_empty() { references(spec).first().map(|r| r.0) } else { Some("serviceaccounts") };
    referenced.map(|plural| format!("node {node:?} can not create pods that reference {plural}"))
}

/// Returns the changed labels that an agent may not change.
fn forbidden_labels(old: &Value, new: &Value) -> Vec<String> {
    let keys = |labels: &Value| -> Vec<String> {
        labels.as_object().into_iter().flat_map(|map| map.keys().cloned()).collect()
    };
    let mut changed: Vec<String> =
        keys(old).into_iter().chain(keys(new)).filter(|key| old[key] != new[key]).collect();
    changed.sort_unstable();
    changed.dedup();
    let within = |domain: &str, parent: &str| {
        domain == parent || domain.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.'))
    };
    changed.retain(|key| {
        let domain = key.split_once('/').map(|(domain, _)| domain).unwrap_or_default();
        let is_agents = AGENT_LABELS.contains(&key.as_str())
            || AGENT_LABEL_DOMAINS.iter().any(|allowed| within(domain, allowed));
        within(domain, "node-restriction.kubernetes.io")
            || (within(domain, "kubernetes.io") || within(domain, "k8s.io")) && !is_agents
    });
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_agent_may_set_only_those_system_labels_that_it_reports() {
        let labels = json!({
            "app": "x", "example.com/a": "1", "kubernetes.io/hostname": "n", "node.kubernetes.io/x": "1",
            "sub.kubelet.kubernetes.io/x": "1", "node-restriction.kubernetes.io/x": "1",
            "a.node-restriction.kubernetes.io/x": "1", "node-role.kubernetes.io/master": "", "k8s.io/x": "1",
            "notkubernetes.io/x": "1",
        });
        let forbidden = [
            "a.node-restriction.kubernetes.io/x",
            "k8s.io/x",
            "node-restriction.kubernetes.io/x",
            "node-role.kubernetes.io/master",
        ];
        assert_eq!(forbidden_labels(&labels, &Value::Null), forbidden);
        assert_eq!(forbidden_labels(&Value::Null, &labels), forbidden);
        assert_eq!(forbidden_labels(&labels, &labels), Vec::<String>::new());
    }

    #[test]
    fn every_reference_to_a_configuration_is_detected() {
        let spec = json!({
            "imagePullSecrets": [{"name": "pull"}],
            "containers": [{
                "envFrom": [{"configMapRef": {"name": "from"}}, {"secretRef": {"name": "sfrom"}}],
                "env": [
                    {"valueFrom": {"configMapKeyRef": {"name": "key", "key": "k"}}},
                    {"valueFrom": {"secretKeyRef": {"name": "skey", "key": "k"}}},
                ],
            }],
            "volumes": [
                {"configMap": {"name": "vol"}}, {"secret": {"secretName": "svol"}},
                {"projected": {"sources": [{"configMap": {"name": "proj"}}, {"secret": {"name": "sproj"}}]}},
                {"persistentVolumeClaim": {"claimName": "claim"}}, {"emptyDir": {}},
            ],
        });
        let mut found = references(&spec);
        found.sort_unstable();
        assert_eq!(
            found,
            [
                ("configmaps", "from"),
                ("configmaps", "key"),
                ("configmaps", "proj"),
                ("configmaps", "vol"),
                ("persistentvolumeclaims", "claim"),
                ("secrets", "pull"),
                ("secrets", "sfrom"),
                ("secrets", "skey"),
                ("secrets", "sproj"),
                ("secrets", "svol"),
            ]
        );
    }
}
