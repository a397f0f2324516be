//! Settings of the node that more than one part of pod-sync reads.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pod_sync_decisions::probe_period::RateLimits;
use pod_sync_decisions::qos::{CgroupSettings, QosTierSettings, ResourceList};
use pod_sync_decisions::unsupported::FieldGates;

use crate::node_ips::NodeIps;

/// Default of `maxPods`.
const MAX_PODS: u32 = 110;

/// Settings of the feature gate MemoryQoS.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryQos {
    /// `memoryThrottlingFactor`; `None`: containers are not throttled.
    pub throttling_factor: Option<f64>,
    /// `memoryReservationPolicy` is `TieredReservation`.
    pub protects_requests: bool,
    /// Size of a page of memory, in bytes.
    pub page_bytes: i64,
}

/// Settings of the node and facts about it.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// Name of the Node object.
    pub node_name: String,
    /// Addresses of the Node, by their family.
    pub node_ips: NodeIps,
    /// Port of the kubelet API; 0 if it is not served.
    pub node_api_port: u16,
    /// The kubelet's root directory.
    pub root_dir: PathBuf,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// `clusterDomain`; may be empty.
    pub cluster_domain: String,
    /// `clusterDNS`; may be empty.
    pub cluster_dns: Vec<String>,
    /// `resolvConf`; `None` if it is set to an empty string.
    pub resolv_conf: Option<PathBuf>,
    /// `seccompDefault`.
    pub seccomp_default: bool,
    /// Limit by `maxPods` and `podsPerCore`.
    pub max_pods: u32,
    /// Sum of `systemReserved` and `kubeReserved`.
    pub reserved: ResourceList,
    /// `localStorageCapacityIsolation`: ephemeral storage is a resource of the node.
    pub isolates_storage: bool,
    /// Resources that hard eviction thresholds keep free.
    pub eviction_reserve: ResourceList,
    /// The limits of the cgroup of all pods exclude reserved resources (`enforceNodeAllocatable` contains
    /// `pods`).
    pub enforce_reserved: bool,
    /// Allocatable resources, for limits in the downward API.
    pub allocatable: ResourceList,
    /// Quota, process limit and protection of memory in the cgroups of pods.
    pub cgroup: CgroupSettings,
    /// Memory of the machine, in bytes.
    pub memory_bytes: i64,
    /// cgroup v2 is in use.
    pub cgroup_v2: bool,
    /// Huge page sizes of the machine, in bytes.
    pub hugepage_sizes: Vec<u64>,
    /// The swap controller is available.
    pub swap_controller: bool,
    /// Swap of the machine in bytes, if `swapBehavior` is `LimitedSwap`.
    pub limited_swap_bytes: Option<i64>,
    /// Throttling and protection of the memory of containers; `None` without the feature gate MemoryQoS or
    /// without cgroup v2.
    pub memory_qos: Option<MemoryQos>,
    /// `qosReserved` of memory, in percent; `None` without the feature gate QOSReserved.
    pub qos_reserved_percent: Option<i64>,
    /// `singleProcessOOMKill`.
    pub single_process_oom_kill: bool,
    /// SELinux is enabled, so volumes are relabelled.
    pub selinux: bool,
    /// The feature gate ContainerStopSignals is on: containers get their `lifecycle.stopSignal`, and statuses
    /// have the signal in use.
    pub stop_signals: bool,
    /// The feature gate ResourceHealthStatus is on: statuses have the health of devices.
    pub device_health: bool,
    /// The feature gate CSIVolumeHealth is on: statuses have the health of volumes.
    pub volume_health: bool,
    /// Feature gates of fields of a pod.
    pub field_gates: FieldGates,
    /// `subSecondProbes`.
    pub probe_rates: RateLimits,
    /// `allowedUnsafeSysctls`.
    pub allowed_sysctls: Vec<String>,
    /// `defaultPodSysctls`; empty without the feature gate DefaultPodSysctls.
    pub default_sysctls: BTreeMap<String, String>,
    /// AppArmor is enabled in the kernel.
    pub app_armor: bool,
    /// The existing directories `/sys/devices/system/cpu/cpu<N>/thermal_throttle`, which are masked in
    /// containers.
    pub thermal_throttle: Vec<String>,
}

impl NodeSettings {
    /// Returns the memory of the machine without `systemReserved` and `kubeReserved`, in bytes
    /// (`pkg/kubelet/cm: GetNodeAllocatableAbsolute`).
    #[must_use]
    pub fn memory_without_reservations(&self) -> i64 {
        let reserved = self.reserved.get("memory").map_or(0, |q| q.value());
        self.memory_bytes.saturating_sub(reserved).max(0)
    }

    /// Returns the settings of the cgroups of QoS classes.
    #[must_use]
    pub fn qos_tiers(&self) -> QosTierSettings {
        QosTierSettings {
            reserved_percent: self.qos_reserved_percent,
            allocatable_memory: self.memory_without_reservations(),
            // Without the feature gate, the values of an earlier configuration are removed.
            protects_memory: self
                .cgroup_v2
                .then(|| self.memory_qos.is_some_and(|memory_qos| memory_qos.protects_requests)),
        }
    }
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self {
            node_name: String::new(),
            node_ips: NodeIps::default(),
            node_api_port: 0,
            root_dir: PathBuf::from("/var/lib/kubelet"),
            pod_logs_dir: PathBuf::from("/var/log/pods"),
            cluster_domain: String::new(),
            cluster_dns: Vec::new(),
            resolv_conf: Some(PathBuf::from("/etc/resolv.conf")),
            seccomp_default: false,
            max_pods: MAX_PODS,
            reserved: ResourceList::new(),
            isolates_storage: true,
            eviction_reserve: ResourceList::new(),
            enforce_reserved: true,
            allocatable: ResourceList::new(),
            cgroup: CgroupSettings::default(),
            memory_bytes: 0,
            cgroup_v2: false,
            hugepage_sizes: Vec::new(),
            swap_controller: false,
            limited_swap_bytes: None,
            memory_qos: None,
            qos_reserved_percent: None,
            single_process_oom_kill: false,
            selinux: false,
            stop_signals: false,
            device_health: false,
            volume_health: false,
            field_gates: FieldGates::default(),
            probe_rates: RateLimits::default(),
            allowed_sysctls: Vec::new(),
            default_sysctls: BTreeMap::new(),
            app_armor: false,
            thermal_throttle: Vec::new(),
        }
    }
}
