//! The pods that a graceful node shutdown terminates.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::status::{KillCause, KillOverride};
use pod_sync_decisions::worker::{KillPodOptions, PodFacts};
use pod_sync_node_decisions::shutdown::pod_grace;
use pod_sync_shutdown::Pods;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;

use pod_sync_views::PodView;
use pod_sync_worker::context::{Reporting, WorkerControl};

/// Message of a pod's status and of its DisruptionTarget condition.
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
/// Interval between checks whether the volumes of a pod are unmounted.
const UNMOUNT_POLL: Duration = Duration::from_millis(100);

pub(crate) struct ActivePods {
    pub(crate) reporting: Arc<Reporting>,
    pub(crate) control: Arc<WorkerControl>,
}

#[async_trait]
impl Pods for ActivePods {
    type Pod = (PodUid, Arc<Pod>);

    fn active(&self) -> Vec<(Option<i32>, Self::Pod)> {
        let is_terminal = |view: &PodView| {
            let status = view.status.as_deref().or(view.pod.status.as_ref());
            pods::is_terminal_phase(status.and_then(|s| s.phase.as_deref()))
        };
        // A pod without a worker has no container to stop.
        let all = self.reporting.views.all().into_iter().filter(|v| !v.worker.is_empty());
        let is_over = |uid: &PodUid| self.control.pod_workers.has_terminated(&self.reporting.views, uid);
        let active = all.filter(|v| !is_terminal(v) && !is_over(&v.pod_ref.uid));
        active.map(|v| (pods::spec(&v.pod).priority, (v.pod_ref.uid.clone(), Arc::clone(&v.pod)))).collect()
    }

    async fn kill(&self, (uid, pod): &Self::Pod, group_seconds: u64) {
        let Ok(pod_ref) = pods::pod_ref(pod) else { return };
        let kill = KillPodOptions {
            evict: false,
            grace: Some(pod_grace(pods::spec(pod).termination_grace_period_seconds, group_seconds)),
            killed_as: Some(KillOverride {
                cause: KillCause::NodeShutdown,
                message: MESSAGE.to_owned(),
                disruption: Some(MESSAGE.to_owned()),
            }),
            ..KillPodOptions::default()
        };
        if let Err(error) =
            self.control.pod_workers.kill(uid, PodFacts::of(pod, pod_ref.full_name()), kill).await
        {
            tracing::info!(pod.uid = %uid, %error, "pod did not terminate in time, continuing shutdown");
        }
    }

    async fn wait_unmounted(&self, (uid, _): &Self::Pod) {
        while self.control.pod_workers.read(|w| w.is_known(uid) && !w.should_be_finished(uid)) {
            tokio::time::sleep(UNMOUNT_POLL).await;
        }
    }
}
