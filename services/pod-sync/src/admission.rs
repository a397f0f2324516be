//! Admission of pods by the Node object.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, Pod};
use pod_sync_decisions::resize::feasibility::NodeResizePolicy;
use pod_sync_devices::Devices;
use pod_sync_layout::{NodeSettings, RuntimeState};
use pod_sync_node_decisions::admission::{
    AdmitResult, NodeView, POD_FEATURE_UNSUPPORTED, PressureCondition, Rejection,
    SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED, admit,
};
use pod_sync_node_object::{declared_features, node_object};
use pod_sync_placement::Placement;
use pod_sync_sources::api::ClusterView;
use quintlet_kit::failpoint;
use quintlet_model::qos::ResourceList;
use quintlet_model::quantity::{Format, Quantity};
use tokio::sync::watch;

use crate::pod_manager::Admission;

/// Returns the major and minor version of the kernel.
fn kernel() -> (u32, u32) {
    let text = std::fs::read_to_string(Path::new("/proc/sys/kernel/osrelease")).unwrap_or_default();
    let mut parts = text.split(['.', '-']).map(|p| p.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Changing conditions of the node, which admission and the reports about the Node use.
#[derive(Clone)]
pub(crate) struct NodeConditions {
    /// Whether the machine is about to shut down.
    pub(crate) shutting_down: watch::Receiver<bool>,
    /// Pressure conditions that are true.
    pub(crate) pressure: watch::Receiver<BTreeSet<PressureCondition>>,
}

/// Admits pods by the Node object of the API server, or by the one that this node would register.
pub(crate) struct NodeAdmission {
    settings: NodeSettings,
    own: Node,
    view: Arc<ClusterView>,
    client: Option<kube::Client>,
    runtime: watch::Receiver<RuntimeState>,
    conditions: NodeConditions,
    devices: Option<Devices>,
    placement: Option<Placement>,
    /// Major and minor version of the kernel.
    kernel: (u32, u32),
}

impl NodeAdmission {
    #[must_use]
    pub(crate) fn new(
        settings: NodeSettings,
        labels: &BTreeMap<String, String>,
        view: Arc<ClusterView>,
        client: Option<kube::Client>,
        runtime: watch::Receiver<RuntimeState>,
        conditions: NodeConditions,
    ) -> Self {
        let own = node_object(&settings, labels, &RuntimeState::default());
        Self {
            settings,
            own,
            view,
            client,
            runtime,
            conditions,
            devices: None,
            placement: None,
            kernel: kernel(),
        }
    }

    /// Adds the devices of device plugins to the resources of the node.
    #[must_use]
    pub(crate) fn with_devices(self, devices: Devices) -> Self {
        Self { devices: Some(devices), ..self }
    }

    /// Forbids resizes of pods whose CPUs or memory are assigned.
    #[must_use]
    pub(crate) fn with_placement(self, placement: Placement) -> Self {
        Self { placement: Some(placement), ..self }
    }

    /// Returns the allocatable resources that a pod finds.
    fn allocatable(&self, pod: &Pod) -> ResourceList {
        let mut allocatable = self.settings.allocatable.clone();
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let devices = self.devices.iter().flat_map(|devices| devices.allocatable_for(uid));
        allocatable.extend(devices.map(|(name, count)| {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            (name, Quantity::from_units(count, Format::Decimal))
        }));
        allocatable
    }
}

#[async_trait]
impl Admission for NodeAdmission {
    async fn refresh(&self) -> bool {
        let Some(client) = &self.client else { return false };
        match self.view.read_node(client.clone(), &self.settings.node_name).await {
            Ok(()) => true,
            Err(e) => {
                tracing::info!(error = quintlet_kit::error_chain(&e), "failed to read the node");
                false
            }
        }
    }

    fn resize_rules(&self) -> NodeResizePolicy {
        let limited_swap = self.settings.limited_swap_bytes.is_some();
        let policies = self
            .placement
            .as_ref()
            .map(|placement| placement.read(|node| (node.cpus().is_some(), node.memory().is_some())));
        let (static_cpu, static_memory) = policies.unwrap_or_default();
        // Tests of such a resize plant this bug on a machine with cgroup v1.
        let cgroup_v1 =
            !self.settings.cgroup_v2 && !failpoint::planted!("memory volumes resized with cgroup v1");
        let scheduler_preempts = self.settings.field_gates.scheduler_preempts_for_resizes;
        NodeResizePolicy { limited_swap, static_cpu, static_memory, cgroup_v1, scheduler_preempts }
    }

    fn awaits_runtime(&self, rejection: &Rejection) -> bool {
        let depends_on_runtime = rejection.reason == SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED
            || rejection.reason == POD_FEATURE_UNSUPPORTED && self.settings.field_gates.bind_mount_options;
        depends_on_runtime && !self.runtime.borrow().is_known()
    }

    async fn runtime_known(&self) {
        // The sender is dropped when pod-sync stops, and then no pod is admitted.
        let _ = self.runtime.clone().wait_for(RuntimeState::is_known).await;
    }

    fn admit(&self, pod: &Pod, others: &[&Pod]) -> AdmitResult {
        let node = self.view.node();
        let pressure: Vec<_> = self.conditions.pressure.borrow().iter().copied().collect();
        let strict_supplemental_groups =
            self.runtime.borrow().handlers.values().any(|h| h.supplemental_groups_policy);
        admit(
            pod,
            others,
            &NodeView {
                node: Some(node.as_deref().unwrap_or(&self.own)),
                allocatable: &self.allocatable(pod),
                pressure: &pressure,
                allowed_sysctls: &self.settings.allowed_sysctls,
                kernel: self.kernel,
                strict_supplemental_groups,
                app_armor: self.settings.app_armor,
                declared: &declared_features(&self.settings, &self.runtime.borrow()),
                shutting_down: *self.conditions.shutting_down.borrow(),
            },
        )
    }
}
