//! Where we differ from the kubelet, on purpose.

use quintlet_recordings::compare::Difference;

/// A difference that is meant.
pub(crate) struct Known {
    /// The spec; `*` for all.
    pub(crate) spec: &'static str,
    /// The field; a part that is `*` stands for any.
    pub(crate) path: &'static str,
    /// Why.
    pub(crate) reason: &'static str,
}

/// All of them. One that is no longer there fails the test.
pub(crate) const KNOWN: &[Known] = &[
    Known {
        spec: "*",
        path: "sandboxes/*/config/annotations/quintlet.dev/node",
        reason: "by it we know our own sandboxes among those of others at one runtime",
    },
    Known {
        spec: "image-volume-and-others",
        path: "containers/0/config/mounts/0/image_sub_path",
        reason: "in a pod with an image volume the kubelet says so for mounts of other volumes too, where it means nothing",
    },
];

/// Differences between machines. The recordings are of one with cgroup v1.
pub(crate) fn of_machine(difference: &Difference) -> bool {
    // Version 2 can kill all processes of a container together, which both ask for.
    let v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    v2 && difference.kubelet.is_none()
        && difference.path.ends_with("/linux/resources/unified")
        && difference.ours.as_deref() == Some(r#"{"memory.oom.group":"1"}"#)
}

/// Whether `known` is about this difference.
pub(crate) fn matches(known: &Known, spec: &str, difference: &Difference) -> bool {
    let (want, got): (Vec<&str>, Vec<&str>) =
        (known.path.split('/').collect(), difference.path.split('/').collect());
    !known.reason.is_empty()
        && (known.spec == "*" || known.spec == spec)
        && want.len() == got.len()
        && want.iter().zip(&got).all(|(w, g)| *w == "*" || w == g)
}
