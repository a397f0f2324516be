//! Dead pods that a node agent left before Quintlet took its place. They have neither the mark of this node
//! nor a directory; the cgroup that the runtime was given for them shows that they are of this node.
//!
//! A kubelet removes all dead pods of the runtime (`pkg/kubelet/kuberuntime: evictSandboxes`). Quintlet may
//! share a runtime with another agent, whose pods have other cgroups.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use pod_sync_worker::context::WorkerContext;
use quintlet_model::ids::{PodUid, SandboxId};
use quintlet_model::runtime::{ContainerState, PodRuntime, SandboxState, SharedPodRuntime};
use tokio::task::JoinHandle;

/// Finds out which dead pods without a mark and a directory are of this node.
#[derive(Debug, Default)]
pub(crate) struct DeadForeignPods {
    /// By the newest sandbox of a pod: whether its cgroup is one of this node.
    answers: Arc<Mutex<HashMap<SandboxId, bool>>>,
    /// Pods to ask the runtime about.
    unknown: Vec<(PodUid, SandboxId)>,
    asking: Option<JoinHandle<()>>,
}

impl DeadForeignPods {
    /// Returns whether a pod is dead, and its cgroup is one of this node. The runtime is asked about it once
    /// [`DeadForeignPods::ask`] is called.
    pub(crate) fn has(&mut self, pod: &PodRuntime) -> bool {
        let Some(newest) = pod.sandboxes.first().filter(|_| is_dead(pod)) else { return false };
        let answer = self.answers.lock().get(&newest.id).copied();
        if answer.is_none() {
            self.unknown.push((pod.pod.uid.clone(), newest.id.clone()));
        }
        answer.unwrap_or(false)
    }

    /// Forgets the answers about sandboxes that are not among those of the runtime.
    pub(crate) fn forget_gone(&mut self, pods: &[SharedPodRuntime]) {
        let is_present = |id: &SandboxId| pods.iter().flat_map(|pod| &pod.sandboxes).any(|s| s.id == *id);
        self.answers.lock().retain(|id, _| is_present(id));
    }

    /// Asks the runtime about the pods that were not known, one after the other. A call that fails is made
    /// again in a later run.
    pub(crate) fn ask(&mut self, ctx: &Arc<WorkerContext>) {
        let unknown = std::mem::take(&mut self.unknown);
        if unknown.is_empty() || self.asking.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let (ctx, answers) = (Arc::clone(ctx), Arc::clone(&self.answers));
        self.asking = Some(quintlet_kit::task::spawn("dead-foreign-pods", async move {
            for (uid, id) in unknown {
                match ctx.runtime.calls.sandbox_cgroup_parent(&id).await {
                    Ok(parent) => {
                        let is_ours = parent.is_some_and(|p| ctx.environment.cgroups.is_parent_of(&p, &uid));
                        answers.lock().insert(id, is_ours);
                    }
                    Err(error) => {
                        tracing::debug!(%error, pod.uid = %uid, "the cgroup of a dead pod is not known");
                        return;
                    }
                }
            }
        }));
    }
}

fn is_dead(pod: &PodRuntime) -> bool {
    pod.sandboxes.iter().all(|sandbox| sandbox.state == SandboxState::NotReady)
        && pod.containers.iter().all(|container| container.state == ContainerState::Exited)
}
