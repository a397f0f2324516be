//! Start latency of API server pods, as in the scalability SLO
//! (pkg/kubelet/util/pod_startup_latency_tracker.go): from the creation until all containers run, without the
//! time of pulls and init containers.
//!
//! The kubelet takes the time when it observes its own status by the watch. pod-sync takes it when the status
//! is computed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus, Volume};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_model::ids::PodUid;
use quintlet_telemetry::metrics::{float_gauge, histogram_of};

use crate::POD_START;

/// Pods that are starting, with the duration of their pulls.
#[derive(Debug, Clone)]
pub struct StartLatency {
    pulls: Arc<Mutex<HashMap<PodUid, Duration>>>,
    sli: Histogram,
    total: Histogram,
    first_network: Gauge<f64, AtomicU64>,
}

impl Default for StartLatency {
    fn default() -> Self {
        Self {
            pulls: Arc::default(),
            sli: histogram_of(
                "kubelet_pod_start_sli_duration_seconds",
                "Duration in seconds to start a pod, excluding time to pull images and run init containers, measured from pod creation \
                 timestamp to when all its containers are reported as started and observed via watch",
                &POD_START,
            ),
            total: histogram_of(
                "kubelet_pod_start_total_duration_seconds",
                "Duration in seconds to start a pod since creation, including time to pull images and run init containers, measured \
                 from pod creation timestamp to when all its containers are reported as started and observed via watch",
                &POD_START,
            ),
            first_network: float_gauge(
                "kubelet_first_network_pod_start_sli_duration_seconds",
                "Duration in seconds to start the first network pod, excluding time to pull images and run init containers, measured \
                 from pod creation timestamp to when all its containers are reported as started and observed via watch",
            ),
        }
    }
}

impl StartLatency {
    /// Adds a pod of the API server, unless it has started before or had to wait for a node.
    pub fn pod_accepted(&self, uid: &PodUid, pod: &Pod) {
        let status = pod.status.as_ref();
        let is_begun = status.is_some_and(|s| s.start_time.is_some());
        let conditions = status.and_then(|s| s.conditions.as_ref());
        let waited =
            conditions.into_iter().flatten().any(|c| c.type_ == "PodScheduled" && c.status == "False");
        if !is_begun && !waited {
            self.pulls.lock().insert(uid.clone(), Duration::ZERO);
        }
    }

    /// Adds the duration of a pull, which may have failed.
    pub fn image_pulled(&self, uid: &str, took: Duration) {
        let mut pulls = self.pulls.lock();
        if let Some(total) = PodUid::parse(uid).ok().and_then(|uid| pulls.get_mut(&uid)) {
            *total = total.saturating_add(took);
        }
    }

    /// Removes all other pods.
    pub fn retain(&self, known: &HashSet<PodUid>) {
        self.pulls.lock().retain(|uid, _| known.contains(uid));
    }

    /// Records the start latency of a pod once all its containers run.
    pub fn status_changed(&self, uid: &PodUid, pod: &Pod, status: &PodStatus, now: Timestamp) {
        if !has_started(status) {
            return;
        }
        let Some(pulls) = self.pulls.lock().remove(uid) else { return };
        let Some(created) = pod.metadata.creation_timestamp.as_ref() else { return };
        let seconds = |earlier: Timestamp, later: Timestamp| later.duration_since(earlier).as_secs_f64();
        let total = seconds(created.0, now);
        self.total.observe(total);
        if is_stateful(pod) {
            return;
        }
        let inits: f64 = status
            .init_container_statuses
            .iter()
            .flatten()
            .filter_map(|c| c.state.as_ref()?.terminated.as_ref())
            .filter_map(|ended| Some(seconds(ended.started_at.as_ref()?.0, ended.finished_at.as_ref()?.0)))
            .sum();
        let sli = total - pulls.as_secs_f64() - inits;
        self.sli.observe(sli);
        let of_host = pod.spec.as_ref().and_then(|s| s.host_network).unwrap_or(false);
        if !of_host && self.first_network.get() == 0.0 {
            self.first_network.set(sli);
        }
    }
}

/// Returns whether all containers run.
fn has_started(status: &PodStatus) -> bool {
    let all = status.container_statuses.as_deref().unwrap_or_default();
    let runs = |c: &k8s_openapi::api::core::v1::ContainerStatus| {
        c.state.as_ref().and_then(|s| s.running.as_ref()).is_some_and(|r| r.started_at.is_some())
    };
    !all.is_empty() && all.iter().all(runs)
}

/// Returns whether the pod has volumes other than those that the node creates.
fn is_stateful(pod: &Pod) -> bool {
    let is_made = |v: &Volume| {
        v.secret.is_some()
            || v.config_map.is_some()
            || v.downward_api.is_some()
            || v.empty_dir.is_some()
            || v.projected.is_some()
    };
    pod.spec.iter().flat_map(|s| s.volumes.iter().flatten()).any(|v| !is_made(v))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn latency() -> StartLatency {
        // Of their own: the registry's are the process's.
        StartLatency {
            pulls: Arc::default(),
            sli: Histogram::new(POD_START),
            total: Histogram::new(POD_START),
            first_network: Gauge::default(),
        }
    }

    fn pod(volumes: Value, status: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"containers": [{"name": "c"}], "volumes": volumes},
            "status": status,
        }))
        .unwrap()
    }

    fn status(second_runs: bool) -> PodStatus {
        let container = |name: &str, state: Value| json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state});
        let running = json!({"running": {"startedAt": "2026-01-01T00:00:19Z"}});
        let second = if second_runs { running.clone() } else { json!({"waiting": {"reason": "x"}}) };
        serde_json::from_value(json!({
            "initContainerStatuses": [container("i", json!({"terminated": {"exitCode": 0,
                "startedAt": "2026-01-01T00:00:10Z", "finishedAt": "2026-01-01T00:00:13Z"}}))],
            "containerStatuses": [container("a", running), container("b", second)],
        }))
        .unwrap()
    }

    /// Sum and count, as the text has them.
    fn figures(histogram: &Histogram) -> (f64, u64) {
        let mut registry = quintlet_telemetry::metrics::Registry::default();
        registry.register("h", "h", histogram.clone());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let value =
            |name: &str| text.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<f64>().ok()).unwrap();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        (value("h_sum"), value("h_count") as u64)
    }

    #[test]
    fn a_start_counts_once_when_all_run_without_pulls_and_init_containers() {
        let starts = latency();
        let (uid, now) = (PodUid::parse("u1").unwrap(), "2026-01-01T00:00:20Z".parse().unwrap());
        let plain = pod(json!([{"name": "v", "emptyDir": {}}]), json!({}));
        starts.pod_accepted(&uid, &plain);
        starts.image_pulled("u1", Duration::from_secs(4));
        starts.image_pulled("u1", Duration::from_secs(1));
        starts.image_pulled("another", Duration::from_secs(9));
        starts.status_changed(&uid, &plain, &status(false), now);
        assert_eq!(figures(&starts.total), (0.0, 0), "one does not run yet");
        starts.status_changed(&uid, &plain, &status(true), now);
        starts.status_changed(&uid, &plain, &status(true), now);
        assert_eq!((figures(&starts.total), figures(&starts.sli)), ((20.0, 1), (12.0, 1)));
        assert_eq!(starts.first_network.get(), 12.0);
    }

    #[test]
    fn the_start_latency_excludes_earlier_unscheduled_and_stateful_pods() {
        let now = "2026-01-01T00:00:20Z".parse().unwrap();
        let uid = PodUid::parse("u1").unwrap();
        let unscheduled = json!({"conditions": [{"type": "PodScheduled", "status": "False"}]});
        for (volumes, before, total) in [
            (json!([]), json!({"startTime": "2026-01-01T00:00:01Z"}), 0),
            (json!([]), unscheduled, 0),
            (json!([{"name": "v", "hostPath": {"path": "/"}}]), json!({}), 1),
        ] {
            let starts = latency();
            let pod = pod(volumes, before);
            starts.pod_accepted(&uid, &pod);
            starts.status_changed(&uid, &pod, &status(true), now);
            assert_eq!((figures(&starts.total).1, figures(&starts.sli).1), (total, 0), "{pod:?}");
        }
        let starts = latency();
        let plain = pod(json!([]), json!({}));
        starts.pod_accepted(&uid, &plain);
        starts.retain(&HashSet::new());
        starts.status_changed(&uid, &plain, &status(true), now);
        assert_eq!(figures(&starts.total).1, 0, "it was gone");
    }
}
