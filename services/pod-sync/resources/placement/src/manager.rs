//! The handle that the workers of pods and the other tasks share.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use pod_sync_cpus::{ContainerCpus, CpuUpdate, RunningContainer};
use pod_sync_cri_config::resources::ContainerPlacement;
use pod_sync_machine::{CpuSet, Machine, NumaNodes};
use pod_sync_records::StateWriter;
use pod_sync_topology::TopologyAffinityError;
use quintlet_kit::clock::Clock;
use quintlet_kit::error_chain;
use quintlet_model::ids::PodUid;
use tokio::sync::Notify;

use crate::admission::{DeviceHints, NodePlacement, PlacementError};
use crate::args::PlacementSettings;
use crate::counts::AdmissionCounts;
use crate::files::{PlacementContent, PlacementFiles, StartError};
use crate::metrics::PlacementMetrics;
use crate::start::{StartedPlacement, start};

/// Inputs of [`Placement::open`].
#[derive(Debug)]
pub struct PlacementContext {
    /// The policies of the node.
    pub settings: PlacementSettings,
    /// Directory of the state files.
    pub root_dir: PathBuf,
    /// Mount point of sysfs.
    pub sys: PathBuf,
    /// Time.
    pub clock: Clock,
}

/// Reason why a pod cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionFailure {
    /// The node rejects the pod.
    #[error(transparent)]
    Rejected(#[from] PlacementError),
    /// The assignments could not be recorded, so no container may use them; another attempt may succeed.
    #[error("failed to write the state of CPUs and memory")]
    State(#[source] std::io::Error),
}

/// The CPUs and the memory of the node's pods. Clones share them.
#[derive(Debug, Clone)]
pub struct Placement {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Clock,
    machine: Machine,
    nodes: NumaNodes,
    node: Mutex<NodePlacement>,
    // CPUs that the runtime was given for a container last, by its ID.
    applied: Mutex<BTreeMap<String, CpuSet>>,
    files: StateWriter<PlacementFiles>,
    // The CPUs of running containers may differ from those that they should have.
    changed: Notify,
    metrics: PlacementMetrics,
}

impl Placement {
    // Blocks: there is no pod before the start.
    /// Reads the machine and the state files, and writes files that are missing.
    ///
    /// # Errors
    /// The configuration, the machine and the files do not fit each other.
    pub fn open(context: PlacementContext) -> Result<Self, StartError> {
        let PlacementContext { settings, root_dir, sys, clock } = context;
        let StartedPlacement { node, machine, files } = start(&settings, &root_dir, &sys)?;
        if let Some(cpus) = node.cpus() {
            let reserved = cpus.policy().reserved();
            tracing::info!(%reserved, shared = %cpus.assignments().shared, "exclusive CPUs are assigned");
        }
        let metrics = PlacementMetrics::new(&node);
        metrics.publish(&node);
        let shared = Shared {
            clock,
            nodes: machine.nodes.keys().copied().collect(),
            machine,
            node: Mutex::new(node),
            applied: Mutex::default(),
            files: StateWriter::new("CPUs and memory", files),
            changed: Notify::new(),
            metrics,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the CPUs and NUMA nodes of the machine; empty if they could not be read and no policy needs
    /// them.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.shared.machine
    }

    /// Returns the NUMA nodes of the machine.
    #[must_use]
    pub fn numa_nodes(&self) -> NumaNodes {
        self.shared.nodes
    }

    /// Runs `read` on the current assignments, for views of them.
    pub fn read<T>(&self, read: impl FnOnce(&NodePlacement) -> T) -> T {
        read(&self.shared.node.lock())
    }

    /// Returns whether a policy is set. Without one no pod needs an admission.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.shared.node.lock().is_active()
    }

    /// Returns whether the devices of pods are aligned with their CPUs and their memory.
    #[must_use]
    pub fn aligns_devices(&self) -> bool {
        self.shared.node.lock().aligns()
    }

    /// Returns the NUMA nodes for the devices of a container, before its pod is admitted.
    ///
    /// # Errors
    /// The resources of the pod cannot be aligned.
    pub fn nodes_for_devices(
        &self,
        pod: &Pod,
        container: &str,
        devices: DeviceHints<'_>,
    ) -> Result<Option<NumaNodes>, TopologyAffinityError> {
        let trial = self.shared.node.lock().clone();
        let (requests, mut counts) = (trial.requests(pod), AdmissionCounts::default());
        match trial.nodes_for(&requests, container, devices, &mut counts) {
            Ok(nodes) => Ok(nodes),
            Err(PlacementError::Topology(error)) => {
                self.shared.metrics.not_aligned(&counts);
                Err(error)
            }
            // The admission itself reports it, after the devices.
            Err(PlacementError::Cpus(_) | PlacementError::Memory(_)) => Ok(None),
        }
    }

    /// Gives the containers of a pod their CPUs and memory. The assignments are on disk when this returns. A
    /// pod that has some keeps them.
    ///
    /// Cancellation safety: the pod may have its assignments, and gets the same ones again.
    ///
    /// # Errors
    /// The pod is rejected and has nothing, or the state could not be written.
    pub async fn admit(&self, pod: &Pod, devices: DeviceHints<'_>) -> Result<(), AdmissionFailure> {
        if !self.is_active() {
            self.shared.metrics.admitted(&AdmissionCounts::default(), &Ok(()), Duration::ZERO);
            return Ok(());
        }
        let began = self.shared.clock.boot();
        {
            let mut node = self.shared.node.lock();
            let requests = node.requests(pod);
            let mut counts = AdmissionCounts::default();
            let before = node.shared().cloned();
            let admitted = node.admit(&requests, devices, &mut counts);
            let took = self.shared.clock.boot().saturating_sub(began);
            self.shared.metrics.admitted(&counts, &admitted, took);
            admitted?;
            self.shared.notify_if(before.as_ref() != node.shared());
        }
        self.shared.persist().await.map_err(AdmissionFailure::State)
    }

    /// Gives the containers of a pod that runs already what they request, if they have nothing: the state
    /// files may have been removed while the pod ran. A pod that runs is never rejected.
    pub async fn keep(&self, pod: &Pod, devices: DeviceHints<'_>) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        {
            let mut node = self.shared.node.lock();
            if node.holds(uid) {
                let requests = node.requests(pod);
                node.recognize(&requests);
                return;
            }
        }
        if let Err(error) = self.admit(pod, devices).await {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let error = error_chain(&error);
            tracing::warn!(
                pod.name = name,
                error,
                "a running pod does not have the CPUs or the memory that it requests"
            );
        }
    }

    /// Returns the CPUs and NUMA nodes for the configuration of a container.
    #[must_use]
    pub fn container(&self, uid: &PodUid, container: &str) -> ContainerPlacement {
        let node = self.shared.node.lock();
        let cpus = node.container_cpus(uid.as_str(), container);
        let memory = node.container_nodes(uid.as_str(), container);
        ContainerPlacement {
            has_exclusive_cpus: matches!(cpus, Some(ContainerCpus::Exclusive(_))),
            cpus: cpus.map(|cpus| cpus.cpus().to_string()).unwrap_or_default(),
            memory_nodes: memory.map(|nodes| nodes.to_string()).unwrap_or_default(),
        }
    }

    /// Returns whether a container of the pod has exclusive CPUs.
    #[must_use]
    pub fn has_exclusive_cpus(&self, uid: &PodUid) -> bool {
        self.shared.node.lock().has_exclusive_cpus(uid.as_str())
    }

    /// Records that the runtime has created a container with these CPUs, in the kernel's list format.
    pub fn created(&self, uid: &PodUid, container: &str, id: &str, cpus: &str) {
        let node = self.shared.node.lock();
        let Some(wanted) = node.container_cpus(uid.as_str(), container) else { return };
        let Ok(cpus) = cpus.parse::<CpuSet>() else { return };
        // The shared CPUs may have changed since the configuration was made.
        self.shared.notify_if(cpus != *wanted.cpus());
        self.shared.applied.lock().insert(id.to_owned(), cpus);
    }

    /// Ends the memory of init containers that have ended, before a container of the pod starts.
    pub async fn start_container(&self, pod: &Pod, container: &str) {
        let is_changed = {
            let mut node = self.shared.node.lock();
            let requests = node.requests(pod);
            node.memory().is_some() && node.start(&requests, container)
        };
        if is_changed {
            self.shared.persist_or_log().await;
        }
    }

    /// Ends the assignments of a pod whose containers have ended.
    pub async fn release(&self, uid: &PodUid) {
        let is_released = {
            let mut node = self.shared.node.lock();
            let before = node.shared().cloned();
            let is_released = node.release(uid.as_str());
            self.shared.notify_if(before.as_ref() != node.shared());
            is_released
        };
        if is_released {
            self.shared.persist_or_log().await;
        }
    }

    /// Ends the assignments of pods that are not known. Returns whether there were any: the state is then to
    /// be written.
    #[must_use]
    pub fn retain(&self, is_known: impl Fn(&str) -> bool) -> bool {
        let mut node = self.shared.node.lock();
        let is_changed = node.retain(is_known);
        self.shared.notify_if(is_changed);
        is_changed
    }

    /// Writes the state files, if they have changed. An error is logged.
    pub async fn write_state(&self) {
        self.shared.persist_or_log().await;
    }

    /// Returns the containers whose CPUs the runtime must change. `running` are all containers that run,
    /// without the CPUs that they have.
    pub(crate) fn updates(&self, running: &mut [RunningContainer]) -> Vec<CpuUpdate> {
        let node = self.shared.node.lock();
        let Some(cpus) = node.cpus() else { return Vec::new() };
        let mut applied = self.shared.applied.lock();
        let ids: BTreeSet<&str> = running.iter().map(|container| container.id.as_str()).collect();
        applied.retain(|id, _| ids.contains(id.as_str()));
        for container in running.iter_mut() {
            container.applied = applied.get(&container.id).cloned();
        }
        cpus.updates(running)
    }

    /// Records that the runtime has changed the CPUs of a container.
    pub(crate) fn applied(&self, update: CpuUpdate) {
        self.shared.applied.lock().insert(update.id, update.cpus);
    }

    /// Waits until the CPUs of running containers may differ from those that they should have. Dropping the
    /// future loses no change.
    pub(crate) async fn changed(&self) {
        self.shared.changed.notified().await;
    }
}

impl Shared {
    fn notify_if(&self, is_changed: bool) {
        if is_changed {
            self.changed.notify_one();
        }
    }

    /// Writes the state files, if they have changed.
    async fn persist(&self) -> std::io::Result<()> {
        let content = || {
            let node = self.node.lock();
            self.metrics.publish(&node);
            PlacementContent::of(&node).map_err(std::io::Error::other)
        };
        self.files.write_state(content, PlacementFiles::write).await
    }

    async fn persist_or_log(&self) {
        self.files.log(self.persist().await);
    }
}

#[cfg(test)]
mod tests;
