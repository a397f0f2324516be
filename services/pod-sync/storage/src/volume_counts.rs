//! Gauges of desired and existing volumes (pkg/kubelet/volumemanager/metrics).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_cri_config::paths;
use pod_sync_volumes::metrics::plugin;
use pod_sync_volumes::{needs_operations, referenced};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_telemetry::metrics::gauge_family;
use tokio_util::sync::CancellationToken;

use crate::Pods;

/// Interval between counts.
const PERIOD: Duration = Duration::from_secs(10);

/// Labels of the gauge: plugin, and whether the volumes are desired or exist.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VolumesLabel {
    plugin_name: String,
    state: &'static str,
}

/// Sets the gauges of desired and existing volumes periodically, until `stop`. `mounted` returns the desired and the existing volumes
/// that operations mount.
pub async fn run(
    pods: Arc<impl Pods>,
    root_dir: PathBuf,
    mounted: impl Fn() -> (Counts, Counts) + Send,
    stop: CancellationToken,
) {
    let gauges: Family<VolumesLabel, Gauge> =
        gauge_family("volume_manager_total_volumes", "Number of volumes in Volume Manager");
    let (mut desired, mut actual) = (BTreeMap::new(), BTreeMap::new());
    loop {
        let (root, pods) = (root_dir.clone(), pods.running());
        let counted = contained_request(None, task::blocking(move || count(&root, &pods))).await;
        if let Ok((mut wanted, mut there)) = counted {
            let (more_wanted, more_there) = mounted();
            add(&mut wanted, more_wanted);
            add(&mut there, more_there);
            for (state, counts, now) in [
                ("desired_state_of_world", &mut desired, wanted),
                ("actual_state_of_world", &mut actual, there),
            ] {
                // A plugin without volumes is 0, not its last count.
                counts.values_mut().for_each(|count| *count = 0);
                counts.extend(now);
                set(&gauges, state, counts);
            }
        }
        // Each branch only waits.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(PERIOD) => {}
        }
    }
}

/// Numbers of volumes by plugin.
type Counts = BTreeMap<String, i64>;

fn count(root: &Path, pods: &[(PodUid, Arc<Pod>)]) -> (Counts, Counts) {
    let (mut desired, mut actual) = (Counts::new(), Counts::new());
    for (uid, pod) in pods {
        let dir = paths::pod_dir(root, uid);
        for volume in referenced(pod).into_iter().filter(|volume| !needs_operations(volume)) {
            let plugin = plugin(volume);
            let wanted = desired.entry(plugin.to_owned()).or_default();
            *wanted = wanted.saturating_add(1);
            // Volumes of the runtime and of the host exist when the pod's directory does.
            let place = match plugin {
                "kubernetes.io/host-path" | "kubernetes.io/image" => dir.clone(),
                _ => dir.join("volumes").join(plugin.replace('/', "~")).join(&volume.name),
            };
            if place.exists() {
                let found = actual.entry(plugin.to_owned()).or_default();
                *found = found.saturating_add(1);
            }
        }
    }
    (desired, actual)
}

/// Adds counts. A plugin may have volumes of both kinds, such as those of `hostPath`.
fn add(counts: &mut Counts, more: Counts) {
    for (plugin, more) in more {
        let count = counts.entry(plugin).or_default();
        *count = count.saturating_add(more);
    }
}

fn set(gauges: &Family<VolumesLabel, Gauge>, state: &'static str, counts: &Counts) {
    for (plugin_name, count) in counts {
        gauges.get_or_create(&VolumesLabel { plugin_name: plugin_name.clone(), state }).set(*count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn desired_and_existing_volumes_are_counted_by_plugin() {
        let root = tempfile::tempdir().unwrap();
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {
                "containers": [{"name": "c", "volumeMounts": [
                    {"name": "config", "mountPath": "/a"}, {"name": "late", "mountPath": "/b"},
                    {"name": "host", "mountPath": "/c"}, {"name": "claim", "mountPath": "/d"},
                ]}],
                "volumes": [
                    {"name": "config", "configMap": {"name": "m"}}, {"name": "late", "configMap": {"name": "n"}},
                    {"name": "host", "hostPath": {"path": "/"}}, {"name": "unused", "emptyDir": {}},
                    {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}},
                ],
            },
        }))
        .unwrap();
        let uid = PodUid::parse("u1").unwrap();
        let place = paths::pod_dir(root.path(), &uid).join("volumes/kubernetes.io~configmap/config");
        std::fs::create_dir_all(place).unwrap();
        let (desired, actual) = count(root.path(), &[(uid, Arc::new(pod))]);
        let mut sum = desired.clone();
        add(&mut sum, [("kubernetes.io/host-path".to_owned(), 2), ("p".to_owned(), 1)].into());
        assert_eq!((sum["kubernetes.io/host-path"], sum["p"]), (3, 1));
        let of = |counts: &Counts| counts.iter().map(|(k, v)| (k.clone(), *v)).collect::<Vec<_>>();
        let named = |all: &[(&str, i64)]| {
            all.iter().map(|(k, v)| (format!("kubernetes.io/{k}"), *v)).collect::<Vec<_>>()
        };
        assert_eq!(of(&desired), named(&[("configmap", 2), ("host-path", 1)]));
        assert_eq!(of(&actual), named(&[("configmap", 1), ("host-path", 1)]));
    }
}
