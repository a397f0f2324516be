//! The version of Kubernetes whose kubelet Quintlet implements.

/// `nodeInfo.kubeletVersion` of the Node. The API server applies its version skew rules to it.
pub const KUBELET_VERSION: &str = "v1.37.0";

/// Major and minor version, as in user agents and on the status page.
pub const MINOR_VERSION: &str = "1.37";

/// User agent of HTTP and gRPC probes.
pub const PROBE_USER_AGENT: &str = "kube-probe/1.37";

/// User agent of HTTP hooks.
pub const HOOK_USER_AGENT: &str = "kube-lifecycle/1.37";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_forms_of_the_version_agree() {
        assert_eq!(KUBELET_VERSION, format!("v{MINOR_VERSION}.0"));
        assert_eq!(PROBE_USER_AGENT, format!("kube-probe/{MINOR_VERSION}"));
        assert_eq!(HOOK_USER_AGENT, format!("kube-lifecycle/{MINOR_VERSION}"));
    }
}
