//! Makes the workers of pods that were admitted or rejected, and postpones admissions.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_decisions::merge::creation_time;
use pod_sync_decisions::waiting::Waiting;
use pod_sync_layout::SourceKind;
use pod_sync_node_decisions::admission::Rejection;
use pod_sync_worker::context::{Desired, Victim};
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::pod as pods;

use super::PodManager;
use super::admission::is_ending;
use super::entry::{PendingAdmission, WorkerOrigin};

impl PodManager {
    // The Node may have been labelled for this very pod, while the watch of Nodes is behind the watch of
    // pods.
    pub(super) fn postpone_admission(
        &mut self,
        uid: PodUid,
        pending: PendingAdmission,
        awaits_runtime: bool,
    ) {
        let is_first = !self.pods.is_any_pending();
        let what = if awaits_runtime {
            "the runtime has not reported its features"
        } else {
            "the Node does not match and is read again"
        };
        if let Ok(pod_ref) = pods::pod_ref(&pending.pod) {
            self.show_waiting(&pod_ref, pending.source, &pending.pod, Waiting::NotAdmitted { what });
        }
        if pods::is_static(&pending.pod) {
            self.ctx.control.static_pod_gate.register(&uid);
        }
        self.pods.set_pending(&uid, pending);
        if is_first {
            self.admitter.read_node(awaits_runtime);
        }
    }

    pub(super) fn admit_pending(&mut self) {
        let mut pending = self.pods.take_all_pending();
        // The oldest pod has the first choice.
        pending.sort_by_key(|pending| creation_time(&pending.pod));
        for PendingAdmission { source, pod } in pending {
            let Ok(pod_ref) = pods::pod_ref(&pod) else { continue };
            if self.draining && source != SourceKind::Api {
                self.ctx.reporting.views.remove(&pod_ref.uid);
                continue;
            }
            let admitted = self.admitter.admit(&self.pods, &pod);
            if self.admitter.awaits_runtime(&admitted) {
                self.postpone_admission(pod_ref.uid, PendingAdmission { source, pod }, true);
            } else {
                self.ctx.reporting.metrics.pod_decided(&pod, admitted.is_ok());
                self.start(pod_ref, source, pod, admitted);
            }
        }
    }

    /// Makes the worker of a pod that was admitted or rejected.
    pub(super) fn start(
        &mut self,
        pod_ref: PodRef,
        source: SourceKind,
        pod: Arc<Pod>,
        admitted: Result<Vec<Victim>, Rejection>,
    ) {
        // Before the first snapshot of the API server, its pods come from the cache.
        let is_offline = source == SourceKind::Api && !self.stores.is_listed(source);
        let origin = if is_offline { WorkerOrigin::OfflineCache } else { WorkerOrigin::Source };
        if let (WorkerOrigin::OfflineCache, Err(rejection)) = (origin, &admitted) {
            return self.hold_offline(&pod_ref, &pod, rejection);
        }
        let (rejected, after) = match admitted {
            Ok(after) => (None, after),
            Err(rejection) => {
                self.ctx.reporting.metrics.pod_rejected(&rejection.reason);
                (Some(rejection), Vec::new())
            }
        };
        if source == SourceKind::Api && rejected.is_none() {
            self.ctx.reporting.metrics.start_latency.pod_accepted(&pod_ref.uid, &pod);
        }
        let mirror = self.mirrors.of_pod(&pod_ref);
        if rejected.is_none() && !is_ending(&pod) {
            self.ctx.checkpoints.allocations.allocate(&pod_ref.uid, &pod);
            if pods::is_static(&pod) {
                self.ctx.control.static_pod_gate.register(&pod_ref.uid);
            }
        }
        if source == SourceKind::Api && rejected.is_none() && !is_ending(&pod) {
            self.offline.admitted(&pod_ref.uid, &pod, origin);
        }
        let desired = Desired { pod, source, mirror, removed: false, rejected, after };
        self.spawn(pod_ref, desired, None, origin);
    }

    // Holds back a pod of the offline cache that the node does not admit. The node may look different to the
    // API server, so the pod does not fail for it.
    fn hold_offline(&mut self, pod_ref: &PodRef, pod: &Arc<Pod>, rejection: &Rejection) {
        let Rejection { reason, message } = rejection;
        tracing::info!(pod.uid = %pod_ref.uid, pod = %pod_ref, reason, message, "pod of the offline cache not admitted");
        self.pods.entry(&pod_ref.uid).is_worker_missing = true;
        let what = "the node has no room for it, or does not match, and the API server is away";
        self.show_waiting(pod_ref, SourceKind::Api, pod, Waiting::NotAdmitted { what });
    }
}
