//! Paths of a pod's files, as the kubelet has them.

use std::path::{Path, PathBuf};

use quintlet_model::ids::{PodRef, PodUid};

/// `<root>/pods`
#[must_use]
pub fn pods_dir(root: &Path) -> PathBuf {
    root.join("pods")
}

/// `<root>/pods/<uid>`
#[must_use]
pub fn pod_dir(root: &Path, uid: &PodUid) -> PathBuf {
    pods_dir(root).join(uid.as_str())
}

/// Returns the directory of a volume that the pod's worker sets up itself:
/// `<root>/pods/<uid>/volumes/kubernetes.io~<plugin>/<volume>`.
#[must_use]
pub fn direct_volume_dir(root: &Path, uid: &PodUid, plugin: &str, volume: &str) -> PathBuf {
    pod_dir(root, uid).join("volumes").join(format!("kubernetes.io~{plugin}")).join(volume)
}

/// Returns the directory of the marker of an emptyDir that is set up.
#[must_use]
pub fn empty_dir_marker_dir(root: &Path, uid: &PodUid, volume: &str) -> PathBuf {
    pod_dir(root, uid).join("plugins").join("kubernetes.io~empty-dir").join(volume)
}

/// Returns the log directory of a pod: `<podLogsDir>/<namespace>_<name>_<uid>`.
#[must_use]
pub fn pod_log_dir(pod_logs_dir: &Path, pod: &PodRef) -> PathBuf {
    pod_logs_dir.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid))
}

/// Returns the log file of a container relative to its pod's log directory: `<container>/<restarts>.log`.
#[must_use]
pub fn container_log_path(container: &str, restarts: u32) -> String {
    format!("{container}/{restarts}.log")
}

/// Returns the name of the symlink in `/var/log/containers`, at most 255 bytes
/// (`pkg/kubelet/kuberuntime: logSymlink`).
#[must_use]
pub fn legacy_log_name(pod: &PodRef, container: &str, id: &str) -> String {
    const SUFFIX: &str = ".log";
    const LONGEST_STEM: usize = 255 - SUFFIX.len();
    let mut name = format!("{}_{}_{container}-{id}", pod.name, pod.namespace);
    let mut end = name.len().min(LONGEST_STEM);
    while !name.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    name.truncate(end);
    name + SUFFIX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_kubelets_layout() {
        let pod =
            PodRef { uid: PodUid::parse("u1").unwrap(), namespace: "default".into(), name: "web".into() };
        assert_eq!(pod_dir(Path::new("/r"), &pod.uid), Path::new("/r/pods/u1"));
        assert_eq!(pod_log_dir(Path::new("/l"), &pod), Path::new("/l/default_web_u1"));
        assert_eq!(container_log_path("c", 3), "c/3.log");
        assert_eq!(legacy_log_name(&pod, "c", "abc"), "web_default_c-abc.log");
        let long = legacy_log_name(&pod, &"é".repeat(200), "abc");
        assert!(long.len() <= 255 && long.ends_with(".log"));
    }
}
