//! Observes the runtime state of the pod, which is never older than the last action of its worker.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use pod_sync_clients::{ObserveError, Observed, Pleg};
use pod_sync_decisions::worker::freshness::{Freshness, NextObservation};
use pod_sync_layout::paths;
use quintlet_kit::clock::Clock;
use quintlet_kit::failpoint;
use quintlet_kit::task::blocking;
use quintlet_model::ids::{ContainerId, PodRef, SandboxId};
use quintlet_model::runtime::{ContainerState, Cursor, Known, PodRuntime, SharedPodRuntime};

use super::termination_message::{self, Places};
use crate::context::NodeConfig;

/// The runtime state could not be observed.
#[derive(Debug)]
pub(super) enum NotObserved {
    /// pleg-service does not answer.
    Unavailable(String),
    /// pleg-service was restarted, and has not inspected the pod yet.
    Restarted,
    /// The runtime failed.
    Runtime(String),
}

/// Observes one pod.
pub(super) struct Observer {
    clock: Clock,
    node: Arc<NodeConfig>,
    pleg: Arc<Pleg>,
    pod_ref: PodRef,
    freshness: Freshness,
    last: Option<SharedPodRuntime>,
    // Termination messages of exited containers.
    termination_messages: HashMap<ContainerId, String>,
}

impl Observer {
    /// Returns the observer of a pod that has not been observed yet.
    pub(super) fn new(clock: Clock, node: Arc<NodeConfig>, pleg: Arc<Pleg>, pod_ref: PodRef) -> Self {
        let (freshness, termination_messages) = (Freshness::default(), HashMap::new());
        Self { clock, node, pleg, pod_ref, freshness, last: None, termination_messages }
    }

    /// Returns the runtime state of the pod, never older than the last action.
    pub(super) async fn observe(&mut self) -> Result<SharedPodRuntime, NotObserved> {
        let uid = &self.pod_ref.uid;
        let cached = self.pleg.get(uid);
        let runtime = match (self.freshness.next_observation(cached.as_deref()), cached) {
            (NextObservation::UseCached, Some(cached)) => cached,
            (look, cached) => {
                let last = cached.as_ref().or(self.last.as_ref());
                let mut known = last.map_or_else(Known::default, |p| Known::of(p));
                known.add(self.freshness.created());
                let full = look != NextObservation::Inspect { full: false };
                if failpoint::planted!("observation waits for a tick") {
                    tokio::time::sleep(Duration::from_secs(10)).await;
                }
                match self.pleg.observe(uid, known, full).await {
                    // A restarted pleg-service has only listed the pods, which is not a full inspection.
                    Ok(observed) if !full && !self.freshness.is_from_epoch(observed.epoch) => {
                        return Err(NotObserved::Restarted);
                    }
                    Ok(Observed { pod: Some(runtime), .. }) => runtime,
                    Ok(Observed { pod: None, epoch }) => {
                        let cursor = Cursor { epoch, rev: 0 };
                        Arc::new(PodRuntime::empty(self.pod_ref.clone(), cursor, self.clock.boot()))
                    }
                    Err(ObserveError::Unavailable(why)) => return Err(NotObserved::Unavailable(why)),
                    Err(ObserveError::Runtime(why)) => return Err(NotObserved::Runtime(why)),
                }
            }
        };
        self.freshness.observed(runtime.cursor.epoch);
        self.take_over(&runtime).await;
        Ok(runtime)
    }

    /// Takes over a runtime state, and reads the termination messages of containers that have exited.
    pub(super) async fn take_over(&mut self, runtime: &SharedPodRuntime) {
        self.last = Some(Arc::clone(runtime));
        let exited = runtime.containers.iter().filter(|c| c.state == ContainerState::Exited);
        let unread: Vec<_> =
            exited.filter(|c| !self.termination_messages.contains_key(&c.id)).cloned().collect();
        if !unread.is_empty() {
            let pod = self.node.pod_dir(&self.pod_ref.uid);
            let logs = paths::pod_log_dir(&self.node.settings.pod_logs_dir, &self.pod_ref);
            let read = move || {
                let places = Places { pod: &pod, logs: &logs };
                unread.into_iter().map(|c| (c.id.clone(), termination_message::of(&c, places))).collect()
            };
            let read: Vec<_> = blocking(read).await;
            self.termination_messages.extend(read);
        }
        self.termination_messages.retain(|id, _| runtime.containers.iter().any(|c| c.id == *id));
    }

    /// Returns the last runtime state.
    pub(super) fn last(&self) -> Option<&SharedPodRuntime> {
        self.last.as_ref()
    }

    /// Returns the termination messages of exited containers.
    pub(super) fn termination_messages(&self) -> &HashMap<ContainerId, String> {
        &self.termination_messages
    }

    /// Returns the newest runtime state without an inspection, unless it is older than the last one.
    pub(super) fn newest(&self) -> Option<SharedPodRuntime> {
        let runtime = self.pleg.get(&self.pod_ref.uid)?;
        let is_older = self.last.as_ref().is_some_and(|last| last.cursor > runtime.cursor);
        (!is_older && runtime.error.is_none()).then_some(runtime)
    }

    /// Returns the containers that have exited by the newest runtime state.
    pub(super) fn newest_exited(&self) -> Option<HashSet<ContainerId>> {
        let runtime = self.newest()?;
        let exited = runtime.containers.iter().filter(|c| c.state == ContainerState::Exited);
        Some(exited.map(|c| c.id.clone()).collect())
    }

    /// Records the end of an action. The next observation must be newer.
    pub(super) fn acted(&mut self) {
        self.freshness.action_ended(self.clock.boot());
    }

    /// Demands that the next observation lists all containers and sandboxes: an interrupted call may have
    /// created some.
    pub(super) fn require_full_inspection(&mut self) {
        self.freshness.require_full_inspection();
    }

    /// Records that a container was created. The next observation must have it.
    pub(super) fn container_created(&mut self, id: &ContainerId, sandbox: &SandboxId) {
        self.freshness.container_created(id, sandbox);
    }

    /// Records that a sandbox was created. The next observation must have it.
    pub(super) fn sandbox_created(&mut self, id: &SandboxId) {
        self.freshness.sandbox_created(id);
    }
}
