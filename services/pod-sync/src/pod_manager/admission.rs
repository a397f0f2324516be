//! Admits pods beside the others, and makes room for critical pods (`pkg/kubelet/allocation, pkg/kubelet/preemption`).

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_decisions::grace;
use pod_sync_decisions::merge::creation_time;
use pod_sync_decisions::resize::allocation;
use pod_sync_decisions::resize::feasibility::NodeResizePolicy;
use pod_sync_decisions::status::{KillCause, KillOverride};
use pod_sync_decisions::waiting::Waiting;
use pod_sync_decisions::worker::{KillPodOptions, PodFacts};
use pod_sync_layout::SourceKind;
use pod_sync_node_decisions::admission::{AdmitResult, InsufficientResource, Rejection};
use pod_sync_node_decisions::preempt;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::pod as pods;
use quintlet_model::runtime::ContainerState;

use super::PodManager;
use super::entry::PendingAdmission;
use pod_sync_containment::PodWork;
use pod_sync_worker::context::{Desired, Victim};

/// How long a pod waits for the API server to return the Node before it is rejected.
const NODE_READ: Duration = Duration::from_secs(5);
/// Reason of a rejection for which Kubernetes has no reason (`pkg/kubelet/lifecycle: UnexpectedAdmissionError`).
pub(super) const UNEXPECTED: &str = "UnexpectedAdmissionError";

/// The node as admission sees it.
#[async_trait]
pub trait Admission: Send + Sync {
    /// Decides whether the node takes a pod beside the others.
    fn admit(&self, pod: &Pod, others: &[&Pod]) -> AdmitResult;

    /// Whether the rejection only means that the runtime has not reported its features yet.
    fn awaits_runtime(&self, rejection: &Rejection) -> bool;

    /// Waits until the runtime has reported its features.
    async fn runtime_known(&self);

    /// Reads the Node from the API server, since the watch may be stale. Returns false without an API server.
    async fn refresh(&self) -> bool;

    /// Returns the properties of the node that make a resize infeasible.
    fn resize_rules(&self) -> NodeResizePolicy;
}

// The pod is being deleted, or has terminated.
pub(super) fn is_ending(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
        || pods::is_terminal_phase(pod.status.as_ref().and_then(|s| s.phase.as_deref()))
}

impl PodManager {
    pub(super) fn awaits_runtime(&self, admitted: &Result<Vec<Victim>, Rejection>) -> bool {
        admitted.as_ref().is_err_and(|rejection| self.admission.awaits_runtime(rejection))
    }

    // The Node may have been labelled for this very pod, while the watch of Nodes is behind the watch of pods.
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
        if !is_first {
            return;
        }
        let (admission, node_read) = (Arc::clone(&self.admission), Arc::clone(&self.node_read));
        quintlet_kit::task::spawn("read-node", async move {
            if awaits_runtime {
                admission.runtime_known().await;
            }
            let read = tokio::time::timeout(NODE_READ, admission.refresh()).await;
            tracing::debug!(?read, "node read for a pending admission");
            node_read.notify_one();
        });
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
            let admitted = self.admit(&pod);
            if self.awaits_runtime(&admitted) {
                self.postpone_admission(pod_ref.uid, PendingAdmission { source, pod }, true);
            } else {
                self.start(pod_ref, source, pod, admitted);
            }
        }
    }

    // Makes the worker of a pod that was admitted or rejected.
    pub(super) fn start(
        &mut self,
        pod_ref: PodRef,
        source: SourceKind,
        pod: Arc<Pod>,
        admitted: Result<Vec<Victim>, Rejection>,
    ) {
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
        let key = (pod_ref.namespace.to_string(), pod_ref.name.to_string());
        let mirror = self.mirrors.get(&key).cloned();
        if rejected.is_none() && !is_ending(&pod) {
            self.ctx.checkpoints.allocations.allocate(&pod_ref.uid, &pod);
            if pods::is_static(&pod) {
                self.ctx.control.static_pod_gate.register(&pod_ref.uid);
            }
        }
        let desired = Desired { pod, source, mirror, removed: false, rejected, after };
        self.spawn(pod_ref, desired, None, false);
    }

    // Returns the pods that are preempted for this pod, or why the node rejects it.
    pub(super) fn admit(&self, pod: &Pod) -> Result<Vec<Victim>, Rejection> {
        if is_ending(pod) {
            return Ok(Vec::new());
        }
        let others = self.active(None);
        let others: Vec<&Pod> = others.iter().map(AsRef::as_ref).collect();
        match self.admission.admit(pod, &others) {
            AdmitResult::Admit => Ok(Vec::new()),
            AdmitResult::Reject(rejection) => Err(rejection),
            AdmitResult::Preempt(short) => {
                let victims = preempt::pods_to_preempt(pod, &others, &short)
                    .map_err(|e| Rejection { reason: UNEXPECTED.to_owned(), message: e.to_string() })?;
                Ok(victims.into_iter().filter_map(|v| self.preempt(v, pod, &short)).collect())
            }
        }
    }

    // Returns the pods that hold resources of this node, with the larger of what was allocated to them and what their running
    // containers have.
    pub(super) fn active(&self, but: Option<&PodUid>) -> Vec<Arc<Pod>> {
        self.pods
            .workers()
            .filter(|(uid, worker)| {
                let d = worker.desired.borrow();
                Some(*uid) != but && !d.removed && d.rejected.is_none() && !self.is_over(uid)
            })
            .map(|(uid, worker)| self.with_actuated(uid, &worker.desired.borrow().pod))
            .collect()
    }

    fn with_actuated(&self, uid: &PodUid, pod: &Arc<Pod>) -> Arc<Pod> {
        let Some(mut actuated) = self.ctx.checkpoints.allocations.actuated(uid) else {
            return Arc::clone(pod);
        };
        let runtime = self.ctx.runtime.pleg.get(uid);
        let newest = |name: &str| runtime.as_ref().and_then(|r| r.newest(name));
        actuated
            .containers
            .retain(|name, _| newest(name).is_some_and(|c| c.state == ContainerState::Running));
        match allocation::larger(pod, &actuated) {
            Cow::Borrowed(_) => Arc::clone(pod),
            Cow::Owned(larger) => Arc::new(larger),
        }
    }

    // Terminates a victim and then wakes the worker of the pod that needs its resources. `short` are the insufficient resources.
    pub(super) fn preempt(&self, victim: &Pod, by: &Pod, short: &[InsufficientResource]) -> Option<Victim> {
        let victim_ref = pods::pod_ref(victim).ok()?;
        let by = pods::pod_ref(by).ok()?.uid;
        let message = preempt::PREEMPTED_MESSAGE;
        self.ctx.reporting.events.pod(victim, EventType::Warning, preempt::PREEMPTING, message, "");
        let kill = KillPodOptions {
            evict: true,
            killed_as: Some(KillOverride {
                cause: KillCause::Preempting,
                message: message.to_owned(),
                disruption: Some(preempt::DISRUPTION_MESSAGE.to_owned()),
            }),
            ..KillPodOptions::default()
        };
        let limit = grace::kill_timeout(pods::spec(victim).termination_grace_period_seconds);
        let until = self.ctx.clock.boot().saturating_add(limit);
        let uid = victim_ref.uid.clone();
        let (ctx, victim) = (Arc::clone(&self.ctx), victim.clone());
        let work = PodWork::of(&victim_ref);
        let resource = short.first().map(|s| s.resource.clone()).unwrap_or_default();
        let kill_victim = async move {
            let facts = PodFacts::of(&victim, victim_ref.full_name());
            let killed = ctx.control.pod_workers.kill(&victim_ref.uid, facts, kill).await;
            if killed.is_ok() {
                ctx.reporting.metrics.pod_preempted(&resource);
            }
            if let Err(e) = killed {
                tracing::warn!(pod.uid = %victim_ref.uid, error = %e, "preempted pod not terminated in time, no longer waiting");
                let text = "Container runtime did not kill the pod within specified grace period.";
                ctx.reporting.events.pod(&victim, EventType::Warning, "ExceededGracePeriod", text, "");
            }
            ctx.control.wakeups.wake(&by);
        };
        let ctx = Arc::clone(&self.ctx);
        quintlet_kit::task::spawn("preempt", async move {
            let _ = ctx.faults.contained(&work, Box::pin(kill_victim)).await;
        });
        Some(Victim { uid, until })
    }
}
