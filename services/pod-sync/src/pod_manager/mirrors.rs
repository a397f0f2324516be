//! Mirror pods: the objects by which the API server shows static pods (`pkg/kubelet/pod: mirrorClient`).

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_containment::PodWork;
use pod_sync_decisions::merge::PodOperation;
use pod_sync_worker::context::WorkerContext;
use quintlet_model::ids::PodRef;
use quintlet_model::pod;

use super::entry::PodEntries;

/// Mirror pods as the API server has them.
pub(super) struct Mirrors {
    ctx: Arc<WorkerContext>,
    // By namespace and name.
    by_name: HashMap<(String, String), Arc<Pod>>,
}

impl Mirrors {
    pub(super) fn new(ctx: Arc<WorkerContext>) -> Self {
        Self { ctx, by_name: HashMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Returns the mirror pod of a static pod.
    pub(super) fn of_pod(&self, pod_ref: &PodRef) -> Option<Arc<Pod>> {
        self.by_name.get(&(pod_ref.namespace.to_string(), pod_ref.name.to_string())).cloned()
    }

    /// Applies a change of a mirror pod, and passes it to the worker of its static pod.
    pub(super) fn change(&mut self, op: PodOperation, mirror: Arc<Pod>, pods: &PodEntries) {
        let Ok(mirror_ref) = pod::pod_ref(&mirror) else { return };
        let key = (mirror_ref.namespace.to_string(), mirror_ref.name.to_string());
        let now = match op {
            PodOperation::Remove => {
                self.by_name.remove(&key);
                None
            }
            PodOperation::Add | PodOperation::Update | PodOperation::Delete | PodOperation::Reconcile => {
                self.by_name.insert(key.clone(), Arc::clone(&mirror));
                Some(mirror)
            }
        };
        for (_, worker) in pods.workers() {
            let is_its_static_pod = {
                let d = worker.desired.borrow();
                pod::is_static(&d.pod)
                    && d.pod.metadata.namespace.as_deref() == Some(&key.0)
                    && d.pod.metadata.name.as_deref() == Some(&key.1)
            };
            if is_its_static_pod {
                worker.desired.send_modify(|d| d.mirror.clone_from(&now));
            }
        }
    }

    /// Deletes the mirror pods of static pods that are gone.
    pub(super) fn delete_orphaned(&self, pods: &PodEntries) {
        for ((namespace, name), mirror) in &self.by_name {
            let wanted = pods.workers().any(|(_, worker)| {
                let d = worker.desired.borrow();
                pod::is_static(&d.pod)
                    && d.pod.metadata.namespace.as_ref() == Some(namespace)
                    && d.pod.metadata.name.as_ref() == Some(name)
            });
            // The mirror shows the status of its pod until the pod has terminated.
            let ending = self
                .ctx
                .control
                .pod_workers
                .read(|w| w.is_static_terminating(&format!("{name}_{namespace}")));
            if !wanted && !ending {
                let ctx = Arc::clone(&self.ctx);
                let mirror = Arc::clone(mirror);
                let Ok(work) = pod::pod_ref(&mirror).map(|mirror| PodWork::of(&mirror)) else { continue };
                if self.ctx.faults.containment.suspension(&work.uid).is_some() {
                    continue;
                }
                quintlet_kit::task::spawn("orphan-mirror", async move {
                    let deleted = ctx
                        .faults
                        .contained(&work, Box::pin(ctx.reporting.statuses.delete_mirror(&mirror.metadata)))
                        .await;
                    if let Some(Err(error)) = deleted {
                        tracing::info!(
                            mirror.uid = mirror.metadata.uid,
                            %error,
                            "failed to delete an orphaned mirror pod, retrying"
                        );
                    }
                });
            }
        }
    }
}
