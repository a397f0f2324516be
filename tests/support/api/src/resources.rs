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

/// Returns a resource of objects without a namespace and without a status of its own.
const fn cluster_scoped(
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
) -> Resource {
    Resource {
        group,
        version,
        plural,
        kind,
        namespaced: false,
        has_status: false,
        unconditional_update: true,
    }
}

/// Returns a resource of objects in namespaces without a status of its own.
const fn namespaced(
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
) -> Resource {
    Resource { namespaced: true, ..cluster_scoped(group, version, plural, kind) }
}

pub(crate) static RESOURCES: &[Resource] = &[
    namespaced("", "v1", "pods", "Pod").with_status(),
    cluster_scoped("", "v1", "nodes", "Node").with_status(),
    cluster_scoped("", "v1", "namespaces", "Namespace").with_status(),
    namespaced("", "v1", "configmaps", "ConfigMap"),
    namespaced("", "v1", "secrets", "Secret"),
    namespaced("", "v1", "services", "Service").with_status(),
    namespaced("", "v1", "serviceaccounts", "ServiceAccount"),
    namespaced("", "v1", "events", "Event"),
    cluster_scoped("", "v1", "persistentvolumes", "PersistentVolume").with_status(),
    namespaced("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim").with_status(),
    Resource { unconditional_update: false, ..namespaced("coordination.k8s.io", "v1", "leases", "Lease") },
    cluster_scoped("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass"),
    namespaced("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim").with_status(),
    cluster_scoped("resource.k8s.io", "v1", "resourceslices", "ResourceSlice"),
    cluster_scoped("storage.k8s.io", "v1", "csidrivers", "CSIDriver"),
    cluster_scoped("storage.k8s.io", "v1", "csinodes", "CSINode").with_status(),
    cluster_scoped("storage.k8s.io", "v1", "volumeattachments", "VolumeAttachment").with_status(),
    // Both versions have the same objects.
    cluster_scoped("certificates.k8s.io", "v1", "clustertrustbundles", "ClusterTrustBundle"),
    namespaced("certificates.k8s.io", "v1", "podcertificaterequests", "PodCertificateRequest").with_status(),
    cluster_scoped("certificates.k8s.io", "v1beta1", "clustertrustbundles", "ClusterTrustBundle"),
    namespaced("certificates.k8s.io", "v1beta1", "podcertificaterequests", "PodCertificateRequest")
        .with_status(),
    cluster_scoped("certificates.k8s.io", "v1", "certificatesigningrequests", "CertificateSigningRequest")
        .with_status(),
];

impl Resource {
    /// Returns the resource with a status that is written only through `/status`.
    const fn with_status(self) -> Self {
        Self { has_status: true, ..self }
    }

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
