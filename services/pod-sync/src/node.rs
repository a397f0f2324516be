//! What the node is: facts of the machine, the runtime's readiness, and what is told of both to status-reporter.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeDaemonEndpoints, NodeSpec, NodeStatus,
    NodeSwapStatus, NodeSystemInfo, Pod,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use pod_sync_cgroups::{Cgroups, KubepodsLimits};
use pod_sync_clients::{EventType, Events, Pleg, Runtime, Statuses};
use pod_sync_cri_config::{HandlerFeatures, NodeSettings};
use pod_sync_decisions::admission::{
    AdmitResult, NodeView, Rejection, SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED, admit,
};
use pod_sync_decisions::resize::feasibility::NodeResizePolicy;
use pod_sync_sources::api::ClusterView;
use quintlet_kit::clock::Clock;
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use quintlet_model::quantity::{Format, Quantity as Amount};
use quintlet_proto::status::v1 as wire;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::context::RuntimeState;
use crate::pod_manager::Admission;
use crate::{machine, node_status};

/// How often the runtime's Status is asked for (pkg/kubelet/kubelet.go).
const STATUS_PERIOD: Duration = Duration::from_secs(5);
/// While it does not answer.
const STATUS_RETRY: Duration = Duration::from_millis(100);
/// Without a good answer for this long the runtime is down (pkg/kubelet/runtime.go).
const DOWN_AFTER: Duration = Duration::from_secs(30);
/// How often facts are sent at least; status-reporter calls them old after 30 s.
const FACTS_PERIOD: Duration = Duration::from_secs(10);
/// What can be reserved; `pid` is no part of capacity.
pub const RESERVABLE: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "pid"];
/// The version that the API server's skew rules are applied to.
pub const KUBELET_VERSION: &str = "v1.36.0";

/// Label of a Node that the chart makes beside a kubelet's Node. It keeps the chart's DaemonSets off that Node.
const BESIDE_KUBELET: &str = "quintlet.dev/beside-kubelet";
/// Annotation of the Node: the version of Quintlet. No label: a kubelet that takes the Node over would leave it in place.
const VERSION: &str = "quintlet.dev/version";
/// Labels that are put back whenever others change them, where this node has them at all. All other labels are set when the Node
/// is created and belong to its managers afterwards.
const HELD_LABELS: [&str; 3] = ["kubernetes.io/os", "kubernetes.io/arch", BESIDE_KUBELET];
/// For how long after the start a runtime that is not ready is asked as often as one that does not answer
/// (pkg/kubelet/kubelet.go:fastStatusUpdateOnce).
const FAST_START: Duration = Duration::from_secs(120);

/// Keeps the runtime's state up to date until told to stop.
pub async fn poll_runtime(
    runtime: Runtime,
    clock: Clock,
    state: watch::Sender<RuntimeState>,
    cgroups: (Cgroups, KubepodsLimits),
    node: (Events, String),
    stop: CancellationToken,
) {
    let mut good: Option<Duration> = None;
    let mut cgroups = Some(cgroups);
    let started = clock.boot();
    let mut was_ready = false;
    loop {
        let read = {
            let read = async {
                // Before anything else of the runtime is believed: no pod starts until the groups are its driver's.
                if let Some((groups, limits)) = &cgroups {
                    set_up_cgroups(&runtime, groups, *limits, &node).await?;
                }
                read_runtime(&runtime).await
            };
            let mut read = std::pin::pin!(read);
            let age = good.map_or(Duration::ZERO, |at| clock.boot().saturating_sub(at));
            match tokio::time::timeout(DOWN_AFTER.saturating_sub(age), &mut read).await {
                Ok(read) => read,
                Err(_) => {
                    // One that hangs says it too, and is waited for all the same.
                    is_down(&state, good);
                    tokio::select! {
                        () = stop.cancelled() => return,
                        read = read => read,
                    }
                }
            }
        };
        if read.is_ok() {
            cgroups = None;
        }
        let next = match read {
            Ok(new) => {
                good = Some(clock.boot());
                was_ready |= new.is_ready();
                state.send_if_modified(|old| {
                    let changed = *old != new;
                    *old = new;
                    changed
                });
                // The first Ready is what a rollout waits for: the network's plugin often comes after the node.
                if was_ready || clock.boot().saturating_sub(started) > FAST_START {
                    STATUS_PERIOD
                } else {
                    STATUS_RETRY
                }
            }
            Err(why) => {
                tracing::debug!(why, "runtime status not read");
                if good.is_none_or(|at| clock.boot().saturating_sub(at) > DOWN_AFTER) {
                    is_down(&state, good);
                }
                STATUS_RETRY
            }
        };
        // Cutting the sleep only ends the loop.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(next) => {}
        }
    }
}

// It has not answered for too long, or never.
fn is_down(state: &watch::Sender<RuntimeState>, good: Option<Duration>) {
    let text = match good {
        None => "container runtime status check may not have completed yet",
        Some(_) => "container runtime is down",
    };
    state.send_if_modified(|old| {
        let changed = old.not_ready.as_deref() != Some(text);
        old.not_ready = Some(text.to_owned());
        changed
    });
}

// The runtime's driver is ours, whatever was set; one that does not tell leaves it at that.
async fn set_up_cgroups(
    runtime: &Runtime,
    cgroups: &Cgroups,
    limits: KubepodsLimits,
    (events, node): &(Events, String),
) -> Result<(), String> {
    if let Some(driver) = runtime.cgroup_driver().await.map_err(|e| e.to_string())?
        && cgroups.set_driver(driver)
    {
        tracing::info!(?driver, "the runtime has another cgroup driver");
    }
    let has_qos_cgroups = cgroups.has_qos_cgroups();
    let cgroups = cgroups.clone();
    let made = contained_request(None, task::blocking(move || cgroups.set_up_kubepods(limits))).await;
    match made {
        Ok(Ok(())) if has_qos_cgroups => {
            let message = "Updated Node Allocatable limit across pods";
            events.node(node, EventType::Normal, "NodeAllocatableEnforced", message);
        }
        Ok(Err(e)) => {
            let error = quintlet_kit::error_chain(&e);
            // Each pod tries again, and says so where it fails.
            tracing::warn!(error, "cgroups of the node are not set up");
            let message = format!("Failed to update Node Allocatable Limits \"kubepods\": {error}");
            events.node(node, EventType::Warning, "FailedNodeAllocatableEnforcement", &message);
        }
        // Without tiers there is nothing to enforce; a panic was logged.
        Ok(Ok(())) | Err(_) => {}
    }
    Ok(())
}

async fn read_runtime(runtime: &Runtime) -> Result<RuntimeState, String> {
    let status = runtime.status().await.map_err(|e| e.to_string())?;
    let version = runtime.version().await.map_err(|e| e.to_string())?;
    let conditions = status.status.unwrap_or_default().conditions;
    let failing = |name: &str| match conditions.iter().find(|c| c.r#type == name) {
        Some(c) if c.status => None,
        Some(c) => Some(format!("{}={} reason:{} message:{}", c.r#type, c.status, c.reason, c.message)),
        None => Some(format!("{name}=false reason: message:")),
    };
    let policy = status.features.as_ref().map(|f| f.supplemental_groups_policy);
    let handlers: BTreeMap<String, HandlerFeatures> = status
        .runtime_handlers
        .iter()
        .map(|h| {
            let f = h.features.unwrap_or_default();
            let features = HandlerFeatures {
                recursive_read_only_mounts: f.recursive_read_only_mounts,
                user_namespaces: f.user_namespaces,
                supplemental_groups_policy: policy == Some(true),
            };
            (h.name.clone(), features)
        })
        .collect();
    Ok(RuntimeState {
        name: version.runtime_name,
        version: version.runtime_version,
        not_ready: failing("RuntimeReady").map(|c| format!("container runtime not ready: {c}")),
        network_not_ready: failing("NetworkReady")
            .map(|c| format!("container runtime network not ready: {c}")),
        handlers,
        supplemental_groups_policy: policy,
    })
}

/// What of the node changes while it runs.
#[derive(Debug)]
pub struct Changing {
    /// What the runtime told of itself.
    pub runtime: watch::Receiver<RuntimeState>,
    /// The machine is about to go down.
    pub shutting_down: watch::Receiver<bool>,
    /// The runtime's images, once they were listed.
    pub images: watch::Receiver<Option<Vec<ContainerImage>>>,
    /// The node's addresses, once they were found.
    pub ips: watch::Receiver<Option<Vec<IpAddr>>>,
}

/// Tells status-reporter what the node is, at once when something changed and every few seconds, until told to stop.
pub async fn report(
    settings: NodeSettings,
    labels: BTreeMap<String, String>,
    changing: Changing,
    pleg: Arc<Pleg>,
    statuses: Arc<Statuses>,
    clock: Clock,
    stop: CancellationToken,
) {
    let Changing { mut runtime, mut shutting_down, mut images, mut ips } = changing;
    let mut wait = Duration::ZERO;
    loop {
        // Whatever woke it, everything is read anew.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
            changed = runtime.changed() => if changed.is_err() { return },
            // Its sender ends before this does where no shutdown is waited for.
            Ok(()) = shutting_down.changed() => {}
            Ok(()) = images.changed() => {}
            Ok(()) = ips.changed() => {}
        }
        let state = runtime.borrow_and_update().clone();
        let mut not_ready: Vec<String> = state.not_ready.iter().cloned().collect();
        if let Err(error) = pleg.check_health().await {
            not_ready.push(format!("PLEG is not healthy: {error}"));
        }
        not_ready.extend(state.network_not_ready.iter().cloned());
        if *shutting_down.borrow_and_update() {
            not_ready.push(crate::shutdown::NOT_READY.to_owned());
        }
        let mut node = held(&settings, &labels, &state);
        let status = node.status.get_or_insert_default();
        // Without any, those that the API server has stay.
        status.addresses = ips.borrow_and_update().as_ref().map(|ips| addresses(&settings.node_name, ips));
        node_status::of_runtime(
            status,
            &state,
            images.borrow_and_update().clone(),
            settings.node_api_port != 0,
        );
        let request = wire::UpdateNodeRequest {
            source: "pod-sync".to_owned(),
            node: serde_json::to_vec(&node).unwrap_or_default(),
            not_ready: not_ready.clone(),
            observed_boottime_ns: u64::try_from(clock.boot().as_nanos()).unwrap_or(u64::MAX),
        };
        wait = match statuses.client().update_node(request).await {
            Ok(_) if not_ready.is_empty() => FACTS_PERIOD,
            // What holds Ready back may be over any moment.
            Ok(_) => Duration::from_millis(500),
            Err(_) => STATUS_RETRY,
        };
    }
}

/// The Node object with the labels that are put back.
pub(crate) fn held(
    settings: &NodeSettings,
    labels: &BTreeMap<String, String>,
    runtime: &RuntimeState,
) -> Node {
    let mut node = node_object(settings, labels, runtime);
    if let Some(labels) = &mut node.metadata.labels {
        labels.retain(|key, _| HELD_LABELS.contains(&key.as_str()));
    }
    node
}

/// The Node object as far as pod-sync is its source.
#[must_use]
pub fn node_object(
    settings: &NodeSettings,
    labels: &BTreeMap<String, String>,
    runtime: &RuntimeState,
) -> Node {
    let name = settings.node_name.clone();
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let mut all: BTreeMap<String, String> = [
        ("kubernetes.io/hostname", name.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", arch),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", arch),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .collect();
    all.extend(labels.clone());
    let root = Path::new("/");
    let read = |path: &str| std::fs::read_to_string(path).map(|s| s.trim().to_owned()).unwrap_or_default();
    let os_image = read("/etc/os-release")
        .lines()
        .find_map(|l| l.strip_prefix("PRETTY_NAME=").map(|v| v.trim_matches('"').to_owned()))
        .unwrap_or_else(|| "Linux".to_owned());
    let container_runtime = if runtime.name.is_empty() {
        "Unknown".to_owned()
    } else {
        format!("{}://{}", runtime.name, node_status::plain_version(&runtime.version))
    };
    let capacity = capacity(settings);
    Node {
        metadata: ObjectMeta {
            name: Some(name),
            labels: Some(all),
            annotations: Some(
                [
                    ("volumes.kubernetes.io/controller-managed-attach-detach".to_owned(), "true".to_owned()),
                    (VERSION.to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
                ]
                .into(),
            ),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec::default()),
        status: Some(NodeStatus {
            allocatable: Some(allocatable(settings)),
            capacity: Some(capacity),
            daemon_endpoints: Some(NodeDaemonEndpoints {
                kubelet_endpoint: (settings.node_api_port != 0)
                    .then(|| DaemonEndpoint { port: i32::from(settings.node_api_port) }),
            }),
            node_info: Some(NodeSystemInfo {
                architecture: arch.to_owned(),
                boot_id: quintlet_kit::boot::boot_id(),
                container_runtime_version: container_runtime,
                kernel_version: read("/proc/sys/kernel/osrelease"),
                kubelet_version: KUBELET_VERSION.to_owned(),
                machine_id: machine::machine_id(root),
                operating_system: "linux".to_owned(),
                os_image,
                swap: Some(swap_bytes())
                    .filter(|bytes| *bytes > 0)
                    .map(|bytes| NodeSwapStatus { capacity: Some(bytes) }),
                system_uuid: machine::system_uuid(root),
                ..NodeSystemInfo::default()
            }),
            ..NodeStatus::default()
        }),
    }
}

/// The addresses of a node with this name.
#[must_use]
pub fn addresses(name: &str, ips: &[IpAddr]) -> Vec<NodeAddress> {
    let of = |address: String, kind: &str| NodeAddress { address, type_: kind.to_owned() };
    let ips = ips.iter().map(|ip| of(ip.to_string(), "InternalIP"));
    ips.chain([of(name.to_owned(), "Hostname")]).collect()
}

/// Capacity of the machine: CPUs, memory, huge pages, disk of the root directory, pods.
#[must_use]
pub fn capacity(settings: &NodeSettings) -> BTreeMap<String, Quantity> {
    let disk = nix::sys::statvfs::statvfs(&settings.root_dir)
        .map_or(0, |s| s.blocks().saturating_mul(s.fragment_size()));
    [
        ("cpu", cpus().to_string()),
        ("memory", format!("{}Ki", settings.memory_bytes / 1024)),
        ("ephemeral-storage", format!("{}Ki", disk / 1024)),
        ("pods", settings.max_pods.to_string()),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), Quantity(v)))
    .chain(huge_pages(settings).into_iter().map(|(k, v)| (k, Amount::from_units(v, Format::Binary).to_api())))
    .collect()
}

fn huge_pages(settings: &NodeSettings) -> BTreeMap<String, i64> {
    machine::huge_pages(Path::new("/sys/kernel/mm/hugepages"), &settings.hugepage_sizes)
}

/// What is left for pods: capacity without what is reserved, what hard eviction keeps free and, of memory, huge pages.
#[must_use]
pub fn allocatable(settings: &NodeSettings) -> BTreeMap<String, Quantity> {
    let mut left = capacity(settings);
    let mut take = |name: &str, taken: Amount| {
        if let Some(amount) = left.get_mut(name).filter(|_| taken.is_positive()) {
            let rest = Amount::of(amount) - taken;
            *amount = if rest.is_positive() { rest } else { Amount::default() }.to_api();
        }
    };
    for (name, reserved) in settings.reserved.iter().chain(&settings.eviction_reserve) {
        take(name, *reserved);
    }
    for bytes in huge_pages(settings).into_values() {
        take("memory", Amount::from_units(bytes, Format::Binary));
    }
    left
}

/// What all pods may take together: the machine, without what is reserved where that is enforced.
#[must_use]
pub fn pod_limits(settings: &NodeSettings) -> KubepodsLimits {
    let reserved = |name: &str| {
        let amount = settings.reserved.get(name).copied().filter(|_| settings.enforce_reserved);
        amount.unwrap_or_default()
    };
    let pids = reserved("pid");
    KubepodsLimits {
        memory_bytes: (settings.memory_bytes > 0)
            .then(|| settings.memory_bytes.saturating_sub(reserved("memory").value()).max(0)),
        cpu_milli: Some((cpus().saturating_mul(1000)).saturating_sub(reserved("cpu").milli_value()).max(0)),
        pids: pids.is_positive().then(|| pid_capacity().saturating_sub(pids.value()).max(1)),
    }
}

/// CPUs of the machine.
#[must_use]
pub fn cpus() -> i64 {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    i64::try_from(cpus).unwrap_or(i64::MAX)
}

/// Pods a node of so many cores takes (`maxPods`, `podsPerCore`).
#[must_use]
pub fn max_pods(cpus: i64, most: u32, per_core: u32) -> u32 {
    if per_core == 0 {
        return most;
    }
    let by_cores = i64::from(per_core).saturating_mul(cpus);
    most.min(u32::try_from(by_cores).unwrap_or(u32::MAX))
}

/// Processes the machine can have.
fn pid_capacity() -> i64 {
    let read = |path: &str| std::fs::read_to_string(path).ok().and_then(|t| t.trim().parse::<i64>().ok());
    let limits = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"].map(read);
    limits.into_iter().flatten().min().unwrap_or(i64::MAX)
}

/// Swap of the machine in bytes.
#[must_use]
pub fn swap_bytes() -> i64 {
    use procfs::Current as _;
    procfs::Meminfo::current().map_or(0, |m| i64::try_from(m.swap_total).unwrap_or(i64::MAX))
}

/// Kernel version, (major, minor).
fn kernel() -> (u32, u32) {
    let text = std::fs::read_to_string(Path::new("/proc/sys/kernel/osrelease")).unwrap_or_default();
    let mut parts = text.split(['.', '-']).map(|p| p.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Admission by the Node object, or by the one that would be registered.
pub struct NodeAdmission {
    settings: NodeSettings,
    own: Node,
    view: Arc<ClusterView>,
    client: Option<kube::Client>,
    runtime: watch::Receiver<RuntimeState>,
    shutting_down: watch::Receiver<bool>,
}

impl NodeAdmission {
    /// For this node.
    #[must_use]
    pub fn new(
        settings: NodeSettings,
        labels: &BTreeMap<String, String>,
        view: Arc<ClusterView>,
        client: Option<kube::Client>,
        runtime: watch::Receiver<RuntimeState>,
        shutting_down: watch::Receiver<bool>,
    ) -> Self {
        let own = node_object(&settings, labels, &RuntimeState::default());
        Self { settings, own, view, client, runtime, shutting_down }
    }
}

#[async_trait]
impl Admission for NodeAdmission {
    async fn refresh(&self) -> bool {
        let Some(client) = &self.client else { return false };
        match self.view.read_node(client.clone(), &self.settings.node_name).await {
            Ok(()) => true,
            Err(e) => {
                tracing::info!(error = quintlet_kit::error_chain(&e), "node not read");
                false
            }
        }
    }

    fn resize_rules(&self) -> NodeResizePolicy {
        // Neither CPUs nor memory are given out to pods of their own: both managers' policies are none.
        NodeResizePolicy {
            limited_swap: self.settings.limited_swap_bytes.is_some(),
            ..NodeResizePolicy::default()
        }
    }

    fn awaits_runtime(&self, rejection: &Rejection) -> bool {
        rejection.reason == SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED && !self.runtime.borrow().is_known()
    }

    async fn runtime_known(&self) {
        // Without its reader nobody is admitted any more.
        let _ = self.runtime.clone().wait_for(RuntimeState::is_known).await;
    }

    fn admit(&self, pod: &Pod, others: &[&Pod]) -> AdmitResult {
        let node = self.view.node();
        let strict_supplemental_groups =
            self.runtime.borrow().handlers.values().any(|h| h.supplemental_groups_policy);
        admit(
            pod,
            others,
            &NodeView {
                node: Some(node.as_deref().unwrap_or(&self.own)),
                allocatable: &self.settings.allocatable,
                pressure: &[],
                allowed_sysctls: &self.settings.allowed_sysctls,
                kernel: kernel(),
                strict_supplemental_groups,
                app_armor: self.settings.app_armor,
                declared: &node_status::declared(self.settings.node_api_port != 0),
                shutting_down: *self.shutting_down.borrow(),
            },
        )
    }
}
