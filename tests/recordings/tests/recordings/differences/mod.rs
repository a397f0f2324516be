//! Intended differences from the kubelet.

use quintlet_recordings::compare::Difference;

/// An intended difference.
pub(crate) struct Known {
    /// Name of the spec; `*` for all.
    pub(crate) spec: &'static str,
    /// Path of the field; a component `*` matches any.
    pub(crate) path: &'static str,
    /// Reason for the difference.
    pub(crate) reason: &'static str,
}

/// All intended differences. One that no longer occurs fails the test.
pub(crate) const KNOWN: &[Known] = &[
    Known {
        spec: "*",
        path: "sandboxes/*/config/annotations/quintlet.dev/node",
        reason: "by it we know our own sandboxes among those of others at one runtime",
    },
    Known {
        spec: "image-volume-and-others",
        path: "containers/0/config/mounts/0/image_sub_path",
        reason: "in a pod with an image volume the kubelet sets the field for mounts of other volumes too, where it has no effect",
    },
];

/// Returns whether a difference is due to the machine. The recordings are from a machine with cgroup v1.
pub(crate) fn of_machine(difference: &Difference) -> bool {
    // cgroup v2 can kill all processes of a container together, which both agents request.
    let v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    v2 && difference.kubelet.is_none()
        && difference.path.ends_with("/linux/resources/unified")
        && difference.ours.as_deref() == Some(r#"{"memory.oom.group":"1"}"#)
}

/// Returns whether `known` describes this difference.
pub(crate) fn matches(known: &Known, spec: &str, difference: &Difference) -> bool {
    let (want, got): (Vec<&str>, Vec<&str>) =
        (known.path.split('/').collect(), difference.path.split('/').collect());
    !known.reason.is_empty()
        && (known.spec == "*" || known.spec == spec)
        && want.len() == got.len()
        && want.iter().zip(&got).all(|(w, g)| *w == "*" || w == g)
}
