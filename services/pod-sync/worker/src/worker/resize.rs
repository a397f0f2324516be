//! Changes the resources of running containers (`pkg/kubelet/kuberuntime: doPodResizeAction`).

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::{CallError, EventType};
use pod_sync_cri_config::resources::{self, ContainerPlacement};
use pod_sync_decisions::qos::{CgroupState, PodCgroup};
use pod_sync_decisions::resize::message::resize_message;
use pod_sync_decisions::resize::plan::{
    self, ContainerUpdate, ResizeActions, ResizeStep, Resource, memory_decrease_error,
    memory_limit_decreases, resize_steps,
};
use pod_sync_decisions::resize::volumes::VolumeUpdate;
use pod_sync_metrics::CgroupOperation;
use quintlet_cri_api::v1 as cri;
use quintlet_kit::clock::Clock;
use quintlet_kit::task::blocking;
use quintlet_model::ids::{ContainerId, PodRef, SandboxId};
use quintlet_model::pod as pods;

use super::halt::Halt;
use super::pass::Pass;
use super::retries::{ERROR_WAIT, RetryTimes, jitter};
use crate::context::{Checkpoints, NodeConfig, PodEnvironment, Reporting, RuntimeAccess};

/// The cause of an early end of a resize.
enum Stopped {
    /// The runtime, the kernel or a check refused it.
    Refused(String),
    /// A call was interrupted.
    Interrupted(Halt),
}

impl From<CallError> for Stopped {
    fn from(e: CallError) -> Self {
        if e.is_refused_by_runtime() {
            Self::Refused(e.message)
        } else {
            Self::Interrupted(Halt::interrupted(&e))
        }
    }
}

impl From<quintlet_cgroups::CgroupError> for Stopped {
    fn from(e: quintlet_cgroups::CgroupError) -> Self {
        Self::Refused(quintlet_kit::error_chain(&e))
    }
}

/// The resizes of one pod.
pub(super) struct Resizes<'a> {
    pub(super) clock: &'a Clock,
    pub(super) node: &'a NodeConfig,
    pub(super) runtime: &'a RuntimeAccess,
    pub(super) reporting: &'a Reporting,
    pub(super) checkpoints: &'a Checkpoints,
    pub(super) environment: &'a PodEnvironment,
    pub(super) pod_ref: &'a PodRef,
    pub(super) retries: &'a mut RetryTimes,
}

impl Resizes<'_> {
    /// Applies the resize. A refusal is reported in the status and retried later; the rest of the pass
    /// continues.
    pub(super) async fn resize(
        &mut self,
        pass: &Pass,
        actions: &ResizeActions,
        sandbox: &SandboxId,
    ) -> Result<(), Halt> {
        let began = self.clock.boot();
        let resized = self.resize_all(pass, actions, sandbox).await;
        let took = self.clock.boot().saturating_sub(began);
        self.reporting.metrics.operations.resized(resized.is_ok(), took);
        match resized {
            Ok(()) => Ok(()),
            Err(Stopped::Interrupted(halt)) => Err(halt),
            Err(Stopped::Refused(why)) => {
                let (uid, pod) = (&self.pod_ref.uid, &pass.pod);
                let (generation, now) = (pod.metadata.generation, self.clock.wall());
                if self.checkpoints.allocations.conditions(uid, |c| c.set_error(&why, generation, now)) {
                    let message = resize_message("error", pod, generation, &why);
                    self.reporting.events.pod(pod, EventType::Warning, "ResizeError", &message, "");
                }
                self.retries.resize = self.clock.boot().saturating_add(jitter(ERROR_WAIT));
                Ok(())
            }
        }
    }

    async fn resize_all(
        &self,
        pass: &Pass,
        actions: &ResizeActions,
        sandbox: &SandboxId,
    ) -> Result<(), Stopped> {
        let pod = &pass.pod;
        // The allocation that is actuated here.
        self.checkpoints.allocations.flush().await;
        self.resize_volumes(pod, actions.volumes.iter().filter(|volume| !volume.grows())).await?;
        self.resize_containers(pod, actions, sandbox).await?;
        self.resize_volumes(pod, actions.volumes.iter().filter(|volume| volume.grows())).await
    }

    async fn resize_volumes(
        &self,
        pod: &Arc<Pod>,
        updates: impl Iterator<Item = &VolumeUpdate>,
    ) -> Result<(), Stopped> {
        for update in updates {
            let volumes = self.environment.volumes.clone();
            let (owner, uid) = (Arc::clone(pod), self.pod_ref.uid.clone());
            let name = update.name.clone();
            blocking(move || volumes.resize(&owner, &uid, &name)).await.map_err(Stopped::Refused)?;
            self.checkpoints.allocations.actuate_volume(
                &self.pod_ref.uid,
                &update.name,
                update.allocated.to_api(),
            );
            self.checkpoints.allocations.flush().await;
        }
        Ok(())
    }

    async fn resize_containers(
        &self,
        pod: &Arc<Pod>,
        actions: &ResizeActions,
        sandbox: &SandboxId,
    ) -> Result<(), Stopped> {
        let wanted = self.environment.pod_cgroups(&self.pod_ref.uid).pod_values(pod);
        for resource in [Resource::Memory, Resource::Cpu] {
            let updates = actions.of(resource);
            if updates.is_empty() && !actions.pod {
                continue;
            }
            let (cgroups, uid) = (self.environment.cgroups.clone(), self.pod_ref.uid.clone());
            let owner = Arc::clone(pod);
            let now = blocking(move || cgroups.current_values(&owner, &uid)).await?;
            if resource == Resource::Memory {
                let usage = self.usage(updates).await?;
                if let Some(why) = memory_decrease_error(&now, &wanted, updates, |id| usage.get(id).copied())
                {
                    return Err(Stopped::Refused(why));
                }
            }
            for step in resize_steps(resource, &now, &wanted) {
                match step {
                    ResizeStep::PodLimit | ResizeStep::PodRequest => {
                        let values = part(&wanted, resource, step);
                        self.resize_group(pod, sandbox, &now, values).await?;
                    }
                    ResizeStep::Containers => {
                        for update in updates {
                            self.update(pod, resource, update).await?;
                        }
                    }
                }
            }
            if actions.pod {
                let had = self.checkpoints.allocations.actuated(&self.pod_ref.uid).and_then(|a| a.pod_level);
                let has = plan::actuated_pod_level(had, pods::spec(pod).resources.as_ref(), resource);
                self.checkpoints.allocations.actuate_pod(&self.pod_ref.uid, Some(has));
                self.checkpoints.allocations.flush().await;
            }
        }
        if actions.pod {
            self.checkpoints.allocations.actuate_pod(&self.pod_ref.uid, pods::spec(pod).resources.clone());
        }
        Ok(())
    }

    /// Returns the memory usage of containers whose limit decreases. Containers of unknown usage are left to
    /// the check of the whole pod.
    async fn usage(&self, updates: &[ContainerUpdate]) -> Result<HashMap<ContainerId, i64>, Stopped> {
        let mut usage = HashMap::new();
        for (update, _) in memory_limit_decreases(updates) {
            match self.runtime.calls.container_memory(&update.id).await {
                Ok(Some(bytes)) => {
                    usage.insert(update.id.clone(), bytes);
                }
                Ok(None) => {}
                Err(e) if e.is_refused_by_runtime() => {
                    tracing::info!(pod.uid = %self.pod_ref.uid, container.id = %update.id, error = %e, "failed to read memory usage");
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(usage)
    }

    // The runtime is updated first: a sandbox that is a virtual machine must grow with its cgroup.
    async fn resize_group(
        &self,
        pod: &Arc<Pod>,
        sandbox: &SandboxId,
        now: &CgroupState,
        values: PodCgroup,
    ) -> Result<(), Stopped> {
        let node = &self.node.settings;
        let overhead = resources::sandbox_overhead(pod, node);
        let has_exclusive_cpus = self.environment.placement.has_exclusive_cpus(&self.pod_ref.uid);
        let requested = resources::sandbox_resources(pod, node, has_exclusive_cpus);
        self.update_sandbox(sandbox, overhead.clone(), requested).await?;
        let (cgroups, uid) = (self.environment.cgroups.clone(), self.pod_ref.uid.clone());
        let owner = Arc::clone(pod);
        let began = self.clock.boot();
        let written = blocking(move || cgroups.set_values(&owner, &uid, &values)).await;
        let took = self.clock.boot().saturating_sub(began);
        self.reporting.metrics.operations.cgroup(CgroupOperation::Update, took);
        let Err(e) = written else { return Ok(()) };
        let back = cri::LinuxContainerResources {
            cpu_shares: i64::try_from(now.cpu_shares).unwrap_or(i64::MAX),
            cpu_quota: now.cpu_quota_us.unwrap_or(-1),
            cpu_period: i64::try_from(node.cgroup.period_us).unwrap_or(i64::MAX),
            memory_limit_in_bytes: now.memory_limit.unwrap_or(-1),
            ..cri::LinuxContainerResources::default()
        };
        self.update_sandbox(sandbox, overhead, back).await?;
        Err(e.into())
    }

    async fn update_sandbox(
        &self,
        sandbox: &SandboxId,
        overhead: cri::LinuxContainerResources,
        resources: cri::LinuxContainerResources,
    ) -> Result<(), Stopped> {
        match self.runtime.calls.update_sandbox(sandbox, overhead, resources).await {
            // Most runtimes do not implement it.
            Err(e) if e.is_refused_by_runtime() && e.code == tonic::Code::Unimplemented => Ok(()),
            other => Ok(other?),
        }
    }

    async fn update(&self, pod: &Pod, resource: Resource, update: &ContainerUpdate) -> Result<(), Stopped> {
        let all = pods::spec(pod).containers.iter().chain(pods::init_containers(pod));
        let Some(spec) = all.into_iter().find(|c| c.name == update.name) else { return Ok(()) };
        let (allocations, uid) = (&self.checkpoints.allocations, &self.pod_ref.uid);
        // The other resource is updated in its own step.
        let (requested, actuated) =
            plan::actuated_resources(spec, update, resource, allocations.actuated(uid).as_ref());
        let mut container = spec.clone();
        container.resources = Some(requested);
        // The runtime keeps its sets of CPUs and nodes, which only the reconciliation changes: it knows what
        // it has sent.
        let placed = self.environment.placement.container(uid, &container.name);
        let placement = ContainerPlacement { cpus: String::new(), memory_nodes: String::new(), ..placed };
        let resources = resources::container_resources(pod, &container, &self.node.settings, &placement);
        self.runtime.calls.update_container(&update.id, resources).await?;
        allocations.actuate(uid, &update.name, actuated);
        allocations.flush().await;
        Ok(())
    }
}

fn part(wanted: &PodCgroup, resource: Resource, step: ResizeStep) -> PodCgroup {
    let none = PodCgroup::default();
    match (resource, step) {
        (Resource::Memory, ResizeStep::PodLimit) => PodCgroup { memory_bytes: wanted.memory_bytes, ..none },
        (Resource::Cpu, ResizeStep::PodLimit) => {
            PodCgroup { cpu_quota_us: wanted.cpu_quota_us, cpu_period_us: wanted.cpu_period_us, ..none }
        }
        (Resource::Cpu, ResizeStep::PodRequest) => PodCgroup { cpu_shares: wanted.cpu_shares, ..none },
        (Resource::Memory, ResizeStep::PodRequest) => {
            PodCgroup { memory_min: wanted.memory_min, memory_low: wanted.memory_low, ..none }
        }
        (_, ResizeStep::Containers) => none,
    }
}
