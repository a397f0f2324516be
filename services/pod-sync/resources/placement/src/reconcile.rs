//! Gives running containers the CPUs that they should have (`pkg/kubelet/cm/cpumanager: reconcileState`).

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use pod_sync_clients::{Pleg, Runtime};
use pod_sync_cpus::{CpuUpdate, RunningContainer};
use quintlet_cri_api::v1 as cri;
use quintlet_model::ids::{ContainerId, PodUid};
use quintlet_model::runtime::ContainerState;
use tokio_util::sync::CancellationToken;

use crate::manager::Placement;

/// Number of updates at once: a runtime that is slow with one container delays others little.
const MOST_UPDATES: usize = 8;
/// Shortest interval. A shorter one would keep the runtime busy with an update that fails.
const LEAST_PERIOD: Duration = Duration::from_millis(100);
/// Interval until pleg-service has reported all pods.
const NO_SNAPSHOT: Duration = Duration::from_secs(1);

/// Inputs of [`Placement::reconcile`].
pub struct ReconcileContext {
    /// CRI calls.
    pub calls: Runtime,
    /// The observed state of all pods.
    pub pleg: Arc<Pleg>,
    /// Returns whether a pod is one of this node agent.
    pub is_managed: Box<dyn Fn(&PodUid) -> bool + Send + Sync>,
    /// `cpuManagerReconcilePeriod`.
    pub period: Duration,
    /// Ends the task.
    pub stop: CancellationToken,
}

impl std::fmt::Debug for ReconcileContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReconcileContext").field("period", &self.period).finish_non_exhaustive()
    }
}

impl Placement {
    /// Updates containers whenever the shared CPUs change, and retries failed updates after each period,
    /// until the stop. Ends at once with the policy `none`.
    pub async fn reconcile(self, context: ReconcileContext) {
        if self.read(|node| node.cpus().is_none()) {
            return;
        }
        let period = context.period.max(LEAST_PERIOD);
        loop {
            let wait = match context.running() {
                Some(mut running) => {
                    let updates = futures::stream::iter(self.updates(&mut running))
                        .for_each_concurrent(MOST_UPDATES, |update| self.update(&context.calls, update));
                    // A call that is dropped is repeated by the next process.
                    tokio::select! {
                        () = context.stop.cancelled() => return,
                        () = updates => {}
                    }
                    period
                }
                None => NO_SNAPSHOT.min(period),
            };
            // Each arm only wakes: dropping it loses nothing.
            tokio::select! {
                () = context.stop.cancelled() => return,
                () = self.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    async fn update(&self, calls: &Runtime, update: CpuUpdate) {
        let resources = cri::LinuxContainerResources {
            cpuset_cpus: update.cpus.to_string(),
            ..cri::LinuxContainerResources::default()
        };
        let Ok(id) = ContainerId::parse(&update.id) else { return };
        match calls.update_container(&id, resources).await {
            Ok(()) => {
                tracing::debug!(container.id = %id, cpus = %update.cpus, "container has other CPUs");
                self.applied(update);
            }
            // The container may have ended meanwhile.
            Err(error) => {
                tracing::info!(container.id = %id, cpus = %update.cpus, %error, "failed to change the CPUs of a container, retrying");
            }
        }
    }
}

impl ReconcileContext {
    /// Returns the containers that run or are about to start; `None` before the state of the runtime is
    /// known.
    fn running(&self) -> Option<Vec<RunningContainer>> {
        let pods = self.pleg.all()?;
        let managed = pods.iter().filter(|pod| (self.is_managed)(&pod.pod.uid));
        let containers = managed.flat_map(|pod| {
            let alive = pod.containers.iter().filter(|container| {
                matches!(container.state, ContainerState::Created | ContainerState::Running)
            });
            alive.map(|container| RunningContainer {
                pod: pod.pod.uid.to_string(),
                container: container.name.clone(),
                id: container.id.to_string(),
                applied: None,
            })
        });
        Some(containers.collect())
    }
}
