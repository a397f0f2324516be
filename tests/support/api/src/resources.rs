//! The resources this server knows.

/// One resource of the API.
#[derive(Debug)]
pub(crate) struct Resource {
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespaced: bool,
    /// Whether the status is written only through `/status`.
    pub(crate) has_status: bool,
    /// Whether a PUT may omit the resourceVersion.
    pub(crate) unconditional_update: bool,
}

const fn resource(
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
    namespaced: bool,
    has_status: bool,
) -> Resource {
    Resource { group, version, plural, kind, namespaced, has_status, unconditional_update: true }
}

pub(crate) static RESOURCES: &[Resource] = &[
    resource("", "v1", "pods", "Pod", true, true),
    resource("", "v1", "nodes", "Node", false, true),
    resource("", "v1", "namespaces", "Namespace", false, true),
    resource("", "v1", "configmaps", "ConfigMap", true, false),
    resource("", "v1", "secrets", "Secret", true, false),
    resource("", "v1", "services", "Service", true, true),
    resource("", "v1", "serviceaccounts", "ServiceAccount", true, false),
    resource("", "v1", "events", "Event", true, false),
    resource("", "v1", "persistentvolumes", "PersistentVolume", false, true),
    resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", true, true),
    Resource {
        unconditional_update: false,
        ..resource("coordination.k8s.io", "v1", "leases", "Lease", true, false)
    },
    resource("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", false, false),
    resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", true, true),
    resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", false, false),
    resource("storage.k8s.io", "v1", "csidrivers", "CSIDriver", false, false),
    resource("storage.k8s.io", "v1", "csinodes", "CSINode", false, true),
    resource("storage.k8s.io", "v1", "volumeattachments", "VolumeAttachment", false, true),
    // Both versions have the same objects.
    resource("certificates.k8s.io", "v1", "clustertrustbundles", "ClusterTrustBundle", false, false),
    resource("certificates.k8s.io", "v1", "podcertificaterequests", "PodCertificateRequest", true, true),
    resource("certificates.k8s.io", "v1beta1", "clustertrustbundles", "ClusterTrustBundle", false, false),
    resource("certificates.k8s.io", "v1beta1", "podcertificaterequests", "PodCertificateRequest", true, true),
    resource(
        "certificates.k8s.io",
        "v1",
        "certificatesigningrequests",
        "CertificateSigningRequest",
        false,
        true,
    ),
];

impl Resource {
    /// Returns the name as in messages: `pods`, `leases.coordination.k8s.io`.
    pub(crate) fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.to_owned() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// Returns the API version, such as `v1` or `coordination.k8s.io/v1`.
    pub(crate) fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    pub(crate) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Resource> {
        RESOURCES.iter().find(|r| r.group == group && r.version == version && r.plural == plural)
    }

    /// Returns the resource of this plural name, in any group.
    pub(crate) fn by_plural(plural: &str) -> Option<&'static Resource> {
        RESOURCES.iter().find(|r| r.plural == plural)
    }
}

/// The object or collection of a URL path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) resource: &'static str,
    pub(crate) group: String,
    pub(crate) version: String,
    /// Namespace; empty for cluster scope or all namespaces.
    pub(crate) namespace: String,
    /// Name; empty for the collection.
    pub(crate) name: String,
    pub(crate) subresource: String,
}

impl Target {
    /// Parses `/api/v1/…` and `/apis/<group>/<version>/…`. Returns `None` for other paths and unknown
    /// resources.
    pub(crate) fn parse(path: &str) -> Option<Self> {
        let segments: Vec<&str> = path.split('/').filter(|s| !s.is_empty()).collect();
        let (group, version, rest) = match segments.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", name] => ("", vec!["namespaces", *name]),
            ["namespaces", name, sub @ ("status" | "finalize")] => ("", vec!["namespaces", *name, *sub]),
            ["namespaces", ns, rest @ ..] if !rest.is_empty() => (*ns, rest.to_vec()),
            rest => ("", rest.to_vec()),
        };
        let (plural, name, subresource) = match rest.as_slice() {
            [plural] => (*plural, "", ""),
            [plural, name] => (*plural, *name, ""),
            [plural, name, sub] => (*plural, *name, *sub),
            _ => return None,
        };
        let resource = Resource::find(group, version, plural)?;
        if resource.namespaced && namespace.is_empty() && !name.is_empty() {
            return None;
        }
        Some(Self {
            resource: resource.plural,
            group: group.to_owned(),
            version: version.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: subresource.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_paths_are_parsed_to_their_targets() {
        let cases = [
            ("/api/v1/pods", Some(("pods", "", "", ""))),
            ("/api/v1/namespaces/a/pods", Some(("pods", "a", "", ""))),
            ("/api/v1/namespaces/a/pods/p/status", Some(("pods", "a", "p", "status"))),
            ("/api/v1/namespaces/a", Some(("namespaces", "", "a", ""))),
            ("/api/v1/namespaces/a/status", Some(("namespaces", "", "a", "status"))),
            ("/api/v1/nodes/n/status", Some(("nodes", "", "n", "status"))),
            ("/apis/coordination.k8s.io/v1/namespaces/k/leases/n", Some(("leases", "k", "n", ""))),
            (
                "/api/v1/namespaces/a/serviceaccounts/default/token",
                Some(("serviceaccounts", "a", "default", "token")),
            ),
            ("/api/v1/pods/p", None),
            ("/api/v1/unknowns", None),
            ("/version", None),
        ];
        for (path, want) in cases {
            let got = Target::parse(path);
            let got = got
                .as_ref()
                .map(|t| (t.resource, t.namespace.as_str(), t.name.as_str(), t.subresource.as_str()));
            assert_eq!(got, want, "{path}");
        }
    }
}
