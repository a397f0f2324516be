//! Which memory-backed volumes change their size in a resize, and when (KEP-6030).

use k8s_openapi::api::core::v1::{Pod, Volume};
use quintlet_model::pod;

use super::allocation::{PodResources, memory_size_limit};
use crate::quantity::Quantity;

/// A memory-backed volume whose size limit changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeUpdate {
    /// Name in the spec.
    pub name: String,
    /// The limit that was last applied.
    pub applied: Quantity,
    /// The allocated limit.
    pub allocated: Quantity,
}

impl VolumeUpdate {
    /// Returns whether the volume grows. It grows after the limits of the containers and shrinks before them,
    /// so that its content fits into them at any time.
    #[must_use]
    pub fn grows(&self) -> bool {
        self.allocated > self.applied
    }
}

/// Returns the volumes whose allocated limit is not the one that was last applied, in the order of the spec.
/// A volume without a record was mounted with its allocated limit.
#[must_use]
pub fn updates(pod: &Pod, actuated: Option<&PodResources>) -> Vec<VolumeUpdate> {
    let Some(actuated) = actuated.filter(|a| !a.size_limits.is_empty()) else { return Vec::new() };
    let update = |volume: &Volume| {
        let allocated = Quantity::of(memory_size_limit(volume)?);
        let applied = Quantity::of(actuated.size_limits.get(&volume.name)?);
        (allocated != applied).then(|| VolumeUpdate { name: volume.name.clone(), allocated, applied })
    };
    pod::spec(pod).volumes.iter().flatten().filter_map(update).collect()
}

/// Returns why a volume was not resized. `is_refused`: the kernel answered EINVAL, which it does for a size
/// below the usage. The text is that of mount(8), which a kubelet runs.
#[must_use]
pub fn failure(volume: &str, is_refused: bool, error: &str) -> String {
    let why = if is_refused { "mount point not mounted or bad option" } else { error };
    format!("failed to resize volume {volume:?}: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resize::allocation::of_pod;
    use quintlet_testkit::pods::pod_json;
    use serde_json::json;

    fn pod(first: &str, second: &str) -> Pod {
        pod_json(json!({"containers": [{"name": "a", "image": "i"}], "volumes": [
            {"name": "first", "emptyDir": {"medium": "Memory", "sizeLimit": first}},
            {"name": "second", "emptyDir": {"medium": "Memory", "sizeLimit": second}},
        ]}))
    }

    #[test]
    fn volumes_change_that_differ_from_what_was_last_applied() {
        let had = of_pod(&pod("100Mi", "100Mi"));
        let changes = |first: &str, second: &str| -> Vec<(String, bool)> {
            let changes = updates(&pod(first, second), Some(&had)).into_iter();
            changes.map(|update| (update.name.clone(), update.grows())).collect()
        };
        assert_eq!(changes("100Mi", "102400Ki"), []);
        assert_eq!(changes("50Mi", "250Mi"), [("first".to_owned(), false), ("second".to_owned(), true)]);
        assert_eq!(updates(&pod("50Mi", "250Mi"), None), [], "mounted with its allocated limit");
        assert_eq!(updates(&pod("50Mi", "250Mi"), Some(&PodResources::default())), []);
    }
}
