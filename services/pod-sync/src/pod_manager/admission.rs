//! Admits pods beside the others, and makes room for critical pods
//! (`pkg/kubelet/allocation, pkg/kubelet/preemption`).

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use pod_sync_containment::PodWork;
use pod_sync_decisions::grace;
use pod_sync_decisions::resize::allocation;
use pod_sync_decisions::resize::feasibility::{NodeResizePolicy, PendingReason, PendingResize};
use pod_sync_decisions::status::{KillCause, KillOverride, UNEXPECTED_ADMISSION};
use pod_sync_decisions::worker::{KillPodOptions, PodFacts};
use pod_sync_node_decisions::admission::{AdmitResult, InsufficientResource, Rejection};
use pod_sync_node_decisions::preempt;
use pod_sync_worker::context::{Victim, WorkerContext};
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use quintlet_model::runtime::ContainerState;
use tokio::sync::Notify;

use super::entry::PodEntries;

/// How long a pod waits for the API server to return the Node before it is rejected.
const NODE_READ: Duration = Duration::from_secs(5);

/// The node as admission sees it.
#[async_trait]
pub(crate) trait Admission: Send + Sync {
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

// Names the first resource that does not suffice.
fn first_short(short: &[InsufficientResource]) -> Rejection {
    let unknown = || Rejection { reason: UNEXPECTED_ADMISSION.to_owned(), message: String::new() };
    short.first().map_or_else(unknown, InsufficientResource::rejection)
}

/// Admits pods beside those that the node has, and preempts pods for critical ones.
pub(super) struct Admitter {
    ctx: Arc<WorkerContext>,
    node: Arc<dyn Admission>,
    // Rings when the Node, or the runtime's status, was read for the pending admissions.
    node_read: Arc<Notify>,
}

impl Admitter {
    pub(super) fn new(ctx: Arc<WorkerContext>, node: Arc<dyn Admission>) -> Self {
        Self { ctx, node, node_read: Arc::default() }
    }

    /// Rings when the pending admissions can be decided.
    pub(super) fn node_read(&self) -> Arc<Notify> {
        Arc::clone(&self.node_read)
    }

    /// Reads the Node for the pending admissions, after the runtime has reported its features if they wait
    /// for that.
    pub(super) fn read_node(&self, awaits_runtime: bool) {
        let (node, node_read) = (Arc::clone(&self.node), Arc::clone(&self.node_read));
        quintlet_kit::task::spawn("read-node", async move {
            if awaits_runtime {
                node.runtime_known().await;
            }
            let read = tokio::time::timeout(NODE_READ, node.refresh()).await;
            tracing::debug!(?read, "node read for a pending admission");
            node_read.notify_one();
        });
    }

    /// Returns the properties of the node that make a resize infeasible.
    pub(super) fn resize_rules(&self) -> NodeResizePolicy {
        self.node.resize_rules()
    }

    /// Whether a rejection only means that the runtime has not reported its features yet.
    pub(super) fn awaits_runtime(&self, admitted: &Result<Vec<Victim>, Rejection>) -> bool {
        admitted.as_ref().is_err_and(|rejection| self.node.awaits_runtime(rejection))
    }

    /// Returns the pods that are preempted for this pod, or why the node rejects it.
    pub(super) fn admit(&self, managed: &PodEntries, pod: &Pod) -> Result<Vec<Victim>, Rejection> {
        if is_ending(pod) {
            return Ok(Vec::new());
        }
        let others = self.active(managed, None, !pods::is_static(pod));
        let others: Vec<&Pod> = others.iter().map(AsRef::as_ref).collect();
        match self.node.admit(pod, &others) {
            AdmitResult::Admit => Ok(Vec::new()),
            AdmitResult::Reject(rejection) => Err(rejection),
            AdmitResult::Preempt(short) => {
                let victims = preempt::pods_to_preempt(pod, &others, &short).map_err(|e| Rejection {
                    reason: UNEXPECTED_ADMISSION.to_owned(),
                    message: e.to_string(),
                })?;
                Ok(victims.into_iter().filter_map(|v| self.preempt(v, pod, &short)).collect())
            }
        }
    }

    /// Returns the pods that hold resources of this node, with the larger of what was allocated to them and
    /// what their running containers have. Pods of records count with `with_unconfirmed`, also before their
    /// source has named them. They do not count against a static pod, as after a restart of a kubelet: the
    /// source may be an API server that this static pod is.
    fn active(
        &self,
        managed: &PodEntries,
        excluded: Option<&PodUid>,
        with_unconfirmed: bool,
    ) -> Vec<Arc<Pod>> {
        managed
            .workers()
            .filter(|(uid, worker)| {
                let d = worker.desired.borrow();
                Some(*uid) != excluded
                    && (with_unconfirmed || !worker.is_unconfirmed())
                    && !d.removed
                    && match d.rejected {
                        None => !self.ctx.control.pod_workers.read(|w| w.is_known_terminated(uid)),
                        Some(_) => failpoint::planted!("rejected pods counted"),
                    }
            })
            .map(|(uid, worker)| self.with_actuated(uid, &worker.desired.borrow().pod))
            .collect()
    }

    fn with_actuated(&self, uid: &PodUid, pod: &Arc<Pod>) -> Arc<Pod> {
        let allocations = &self.ctx.checkpoints.allocations;
        // Each admission asks this of all pods, and almost none has shrunk.
        if !allocations.is_more_actuated(uid, pod) {
            return Arc::clone(pod);
        }
        let Some(mut actuated) = allocations.actuated(uid) else { return Arc::clone(pod) };
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

    /// Terminates a victim and then wakes the worker of the pod that needs its resources. `short` are the
    /// insufficient resources.
    fn preempt(&self, victim: &Pod, preemptor: &Pod, short: &[InsufficientResource]) -> Option<Victim> {
        let victim_ref = pods::pod_ref(victim).ok()?;
        let preemptor = pods::pod_ref(preemptor).ok()?.uid;
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
            ctx.control.wakeups.wake(&preemptor);
        };
        let ctx = Arc::clone(&self.ctx);
        quintlet_kit::task::spawn("preempt", async move {
            let _ = ctx.faults.contained(&work, Box::pin(kill_victim)).await;
        });
        Some(Victim { uid, until })
    }

    /// Returns why the resize does not fit beside the other pods now. A critical pod preempts others, and
    /// waits for them, unless that is left to the scheduler.
    pub(super) fn deferred(
        &self,
        managed: &PodEntries,
        uid: &PodUid,
        desired: &Pod,
    ) -> Option<PendingResize> {
        let others = self.active(managed, Some(uid), true);
        let others: Vec<&Pod> = others.iter().map(AsRef::as_ref).collect();
        let rejection = match self.node.admit(desired, &others) {
            AdmitResult::Admit => return None,
            AdmitResult::Reject(rejection) => rejection,
            AdmitResult::Preempt(short) if self.resize_rules().scheduler_preempts => first_short(&short),
            AdmitResult::Preempt(short) => match preempt::pods_to_preempt(desired, &others, &short) {
                Err(e) => Rejection { reason: UNEXPECTED_ADMISSION.to_owned(), message: e.to_string() },
                Ok(victims) => {
                    for victim in victims.into_iter().filter(|v| !self.is_terminating(v)) {
                        self.preempt(victim, desired, &short);
                    }
                    first_short(&short)
                }
            },
        };
        Some(PendingResize {
            reason: PendingReason::Deferred,
            cause: rejection.reason,
            message: rejection.message,
            detail: "",
        })
    }

    fn is_terminating(&self, pod: &Pod) -> bool {
        pods::pod_ref(pod)
            .is_ok_and(|r| self.ctx.control.pod_workers.read(|w| w.is_termination_requested(&r.uid)))
    }
}
