//! Fields of a pod that this node cannot enforce, and their effect. docs/pod-fields.md has a verdict for every field.

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::pod;

/// Event reason for a field that the node accepts and does not enforce.
pub const NOT_ENFORCED: &str = "FieldNotEnforced";
/// Event reason for resource claims that cannot be prepared (`pkg/kubelet/events`).
pub const CLAIMS_FAILED: &str = "FailedPrepareDynamicResources";

/// Returns why no container of this pod may start: its resource claims have no driver on this node.
///
/// A kubelet without the driver keeps the pod waiting with the same event (`pkg/kubelet/cm/dra`). Without its devices the pod
/// would run on the wrong hardware, or on none.
#[must_use]
pub fn unprepared_claims(pod: &Pod) -> Option<String> {
    let names: Vec<String> =
        pod::spec(pod).resource_claims.iter().flatten().map(|claim| format!("{:?}", claim.name)).collect();
    if names.is_empty() {
        return None;
    }
    let text = "no DRA driver is registered: this node does not support dynamic resource allocation";
    Some(format!("Failed to prepare dynamic resources: resource claims {}: {text}", names.join(", ")))
}

/// Returns a message for each field that is accepted and not enforced, with its path and value.
#[must_use]
pub fn not_enforced(pod: &Pod) -> Vec<String> {
    let mut out = Vec::new();
    let context = pod::spec(pod).security_context.as_ref();
    if context.and_then(|context| context.se_linux_change_policy.as_deref()) == Some("MountOption") {
        let why = "is not enforced except for volumes of the access mode ReadWriteOncePod";
        out.push(format!("spec.securityContext.seLinuxChangePolicy: MountOption {why}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use quintlet_testkit::pods::pod_json;

    #[test]
    fn resource_claims_keep_a_pod_from_starting_with_the_kubelets_event() {
        let claims = |claims: serde_json::Value| {
            pod_json(json!({"containers": [{"name": "c"}], "resourceClaims": claims}))
        };
        assert_eq!(unprepared_claims(&claims(json!(null))), None);
        assert_eq!(unprepared_claims(&claims(json!([]))), None);
        let both = claims(json!([
            {"name": "gpu", "resourceClaimTemplateName": "t"},
            {"name": "nic", "resourceClaimName": "n"},
        ]));
        assert_eq!(
            unprepared_claims(&both).as_deref(),
            Some(
                "Failed to prepare dynamic resources: resource claims \"gpu\", \"nic\": no DRA driver is registered: \
                 this node does not support dynamic resource allocation"
            )
        );
    }

    #[test]
    fn fields_that_are_not_enforced_are_named_with_their_values() {
        let of = |policy: &str| {
            let context = json!({"seLinuxChangePolicy": policy});
            not_enforced(&pod_json(json!({"containers": [{"name": "c"}], "securityContext": context})))
        };
        assert_eq!(of("Recursive"), Vec::<String>::new());
        assert!(
            of("MountOption")[0].starts_with("spec.securityContext.seLinuxChangePolicy: MountOption is not")
        );
    }
}
