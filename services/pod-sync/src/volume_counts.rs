//! Counts the volumes that pods ask for and those that are on the node (pkg/kubelet/volumemanager/metrics).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_cri_config::paths;
use pod_sync_volumes::metrics::plugin;
use pod_sync_volumes::referenced;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_telemetry::metrics::gauge_family;
use tokio_util::sync::CancellationToken;

use crate::context::Context;

/// How often volumes are counted.
const COUNT_EVERY: Duration = Duration::from_secs(10);

/// Volumes of a kind that are wanted, or there.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VolumesLabel {
    plugin_name: String,
    state: &'static str,
}

/// Counts the volumes that pods want and those that are there, now and then, until told to stop.
pub(crate) async fn run(ctx: Arc<Context>, stop: CancellationToken) {
    let gauges: Family<VolumesLabel, Gauge> =
        gauge_family("volume_manager_total_volumes", "Number of volumes in Volume Manager");
    let (mut desired, mut actual) = (BTreeMap::new(), BTreeMap::new());
    loop {
        let pods: Vec<(PodUid, Arc<Pod>)> = ctx
            .views
            .all()
            .into_iter()
            .filter(|view| !ctx.is_over(&view.pod_ref.uid))
            .map(|view| (view.pod_ref.uid.clone(), Arc::clone(&view.pod)))
            .collect();
        let root = ctx.node.root_dir.clone();
        let counted = contained_request(None, task::blocking(move || count(&root, &pods))).await;
        if let Ok((wanted, there)) = counted {
            for (state, counts, now) in [
                ("desired_state_of_world", &mut desired, wanted),
                ("actual_state_of_world", &mut actual, there),
            ] {
                // What is gone is none, not what it was.
                counts.values_mut().for_each(|count| *count = 0);
                counts.extend(now);
                set(&gauges, state, counts);
            }
        }
        // Both only wait.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(COUNT_EVERY) => {}
        }
    }
}

type Counts = BTreeMap<String, i64>;

fn count(root: &Path, pods: &[(PodUid, Arc<Pod>)]) -> (Counts, Counts) {
    let (mut desired, mut actual) = (Counts::new(), Counts::new());
    for (uid, pod) in pods {
        let dir = paths::pod_dir(root, uid);
        for volume in referenced(pod) {
            let plugin = plugin(volume);
            let wanted = desired.entry(plugin.to_owned()).or_default();
            *wanted = wanted.saturating_add(1);
            // What the runtime or the host has is there as soon as the pod's directory is.
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
    fn volumes_are_counted_as_they_are_wanted_and_as_they_are_there() {
        let root = tempfile::tempdir().unwrap();
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {
                "containers": [{"name": "c", "volumeMounts": [
                    {"name": "config", "mountPath": "/a"}, {"name": "late", "mountPath": "/b"},
                    {"name": "host", "mountPath": "/c"},
                ]}],
                "volumes": [
                    {"name": "config", "configMap": {"name": "m"}}, {"name": "late", "configMap": {"name": "n"}},
                    {"name": "host", "hostPath": {"path": "/"}}, {"name": "unused", "emptyDir": {}},
                ],
            },
        }))
        .unwrap();
        let uid = PodUid::parse("u1").unwrap();
        let place = paths::pod_dir(root.path(), &uid).join("volumes/kubernetes.io~configmap/config");
        std::fs::create_dir_all(place).unwrap();
        let (desired, actual) = count(root.path(), &[(uid, Arc::new(pod))]);
        let of = |counts: &Counts| counts.iter().map(|(k, v)| (k.clone(), *v)).collect::<Vec<_>>();
        let named = |all: &[(&str, i64)]| {
            all.iter().map(|(k, v)| (format!("kubernetes.io/{k}"), *v)).collect::<Vec<_>>()
        };
        assert_eq!(of(&desired), named(&[("configmap", 2), ("host-path", 1)]));
        assert_eq!(of(&actual), named(&[("configmap", 1), ("host-path", 1)]));
    }
}
