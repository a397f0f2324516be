//! Whether a pod's volumes are mounted or unmounted, and why not (`volume_manager.go`).

use std::time::Duration;

use quintlet_model::ids::PodUid;

use crate::VolumeName;
use crate::actual::{Actual, MountState};
use crate::desired::{Desired, Reach};

/// Longest wait for the volumes of a pod.
pub const LIMIT: Duration = Duration::from_secs(123);
/// The end of the texts after [`LIMIT`].
pub const TIMED_OUT: &str = "context deadline exceeded";

/// The volumes for which a pod waits, by reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotMounted {
    /// Names in the pod of volumes that are not mounted, sorted.
    pub unmounted: Vec<String>,
    /// Names in the pod of attachable volumes that are not attached, sorted.
    pub unattached: Vec<String>,
    /// Names in the pod of volumes that could not be resolved, sorted.
    pub unprocessed: Vec<String>,
}

impl NotMounted {
    /// Returns the kubelet's text with a cause, such as [`TIMED_OUT`].
    #[must_use]
    pub fn text(&self, cause: &str) -> String {
        format!(
            "unmounted volumes={}, unattached volumes={}, failed to process volumes={}: {cause}",
            list(&self.unmounted),
            list(&self.unattached),
            list(&self.unprocessed),
        )
    }
}

/// Returns what is missing of the volumes that a pod's containers use, by their names in the pod; `None` if
/// all are mounted.
#[must_use]
pub fn not_mounted(
    desired: &Desired,
    actual: &Actual,
    pod: &PodUid,
    expected: &[String],
) -> Option<NotMounted> {
    let volume_of = |name: &str| desired.volumes_of(pod).find(|(in_pod, _)| *in_pod == name).map(|(_, v)| v);
    let is_mounted = |name: &str| {
        let mount = volume_of(name).and_then(|volume| actual.mount(&volume.name, pod));
        mount.is_some_and(|mount| mount.state == MountState::Mounted)
    };
    let sorted = |names: Vec<&str>| {
        let mut names: Vec<String> = names.into_iter().map(str::to_owned).collect();
        names.sort();
        names.dedup();
        names
    };
    let unmounted = sorted(expected.iter().map(String::as_str).filter(|name| !is_mounted(name)).collect());
    if unmounted.is_empty() {
        return None;
    }
    let is_unattached = |volume: &crate::desired::DesiredVolume| {
        volume.reach == Reach::Attachable && actual.volume(&volume.name).is_none()
    };
    let unattached =
        desired.volumes_of(pod).filter(|(_, volume)| is_unattached(volume)).map(|(name, _)| name);
    let unprocessed = expected.iter().map(String::as_str).filter(|name| volume_of(name).is_none());
    Some(NotMounted {
        unmounted,
        unattached: sorted(unattached.collect()),
        unprocessed: sorted(unprocessed.collect()),
    })
}

/// Returns the kubelet's text for a pod with mounted volumes and a cause, such as [`TIMED_OUT`]; `None` if it
/// has none.
#[must_use]
pub fn still_mounted(actual: &Actual, pod: &PodUid, cause: &str) -> Option<String> {
    let mounted: Vec<&str> = actual.mounted_by(pod).map(VolumeName::as_str).collect();
    (!mounted.is_empty()).then(|| format!("mounted volumes=[{}]: {cause}", mounted.join(" ")))
}

/// Formats a list as Go prints it.
fn list(names: &[String]) -> String {
    format!("[{}]", names.join(" "))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::actual::Certainty;
    use crate::desired::DesiredVolume;

    #[test]
    fn the_texts_are_the_kubelets() {
        let pod = PodUid::parse("u1").unwrap();
        let volume = |name: &str, reach| {
            let shared = VolumeName::shared("kubernetes.io/csi", &format!("d^{name}"));
            DesiredVolume { name: shared, spec_name: format!("pv-{name}"), reach, size: None, label: None }
        };
        let (mut desired, mut actual) = (Desired::default(), Actual::default());
        let data = volume("data", Reach::Attachable);
        let logs = volume("logs", Reach::DeviceMountable);
        let volumes = [("logs".to_owned(), logs.clone()), ("data".to_owned(), data.clone())];
        desired.set(
            &pod,
            BTreeMap::from(volumes),
            ["error processing PVC default/x: PVC is not bound".to_owned()],
        );
        let expected = ["x".to_owned(), "logs".to_owned(), "data".to_owned()];
        let missing = not_mounted(&desired, &actual, &pod, &expected).unwrap();
        assert_eq!(
            missing.text(TIMED_OUT),
            "unmounted volumes=[data logs x], unattached volumes=[data], failed to process volumes=[x]: \
             context deadline exceeded"
        );
        assert_eq!(desired.take_errors(&pod), ["error processing PVC default/x: PVC is not bound"]);
        assert!(desired.take_errors(&pod).is_empty());
        // A volume whose mount is uncertain is not mounted for the pod, and does not keep it from ending.
        actual.attached(&data);
        actual.mount_failed(&data, &pod, Certainty::Uncertain);
        actual.attached(&logs);
        actual.mounted(&logs, &pod);
        let missing = not_mounted(&desired, &actual, &pod, &expected[1..]).unwrap();
        assert_eq!(
            missing.text(TIMED_OUT),
            "unmounted volumes=[data], unattached volumes=[], failed to process volumes=[]: context deadline exceeded"
        );
        assert_eq!(
            still_mounted(&actual, &pod, TIMED_OUT).unwrap(),
            "mounted volumes=[kubernetes.io/csi/d^logs]: context deadline exceeded"
        );
        actual.mounted(&data, &pod);
        assert_eq!(not_mounted(&desired, &actual, &pod, &expected[1..]), None);
        // Volumes that the pod's worker sets up are named with the others.
        let of_worker = VolumeName::of_pod("kubernetes.io/configmap", &pod, "config");
        let of_worker = DesiredVolume { name: of_worker, reach: Reach::Direct, ..data.clone() };
        desired.add_direct(&pod, "config".to_owned(), of_worker.clone());
        let expected = ["x".to_owned(), "data".to_owned(), "config".to_owned()];
        let missing = not_mounted(&desired, &actual, &pod, &expected).unwrap();
        assert_eq!(
            missing.text(TIMED_OUT),
            "unmounted volumes=[config x], unattached volumes=[], failed to process volumes=[x]: \
             context deadline exceeded"
        );
        actual.direct_mounted(&of_worker, &pod, false);
        assert_eq!(not_mounted(&desired, &actual, &pod, &expected[1..]), None);
        actual.unmounted(&logs.name, &pod);
        actual.unmount_failed(&data.name, &pod);
        assert_eq!(
            still_mounted(&actual, &pod, TIMED_OUT).unwrap(),
            "mounted volumes=[kubernetes.io/configmap/u1-config]: context deadline exceeded"
        );
        actual.unmount_failed(&of_worker.name, &pod);
        assert_eq!(still_mounted(&actual, &pod, TIMED_OUT), None);
    }
}
