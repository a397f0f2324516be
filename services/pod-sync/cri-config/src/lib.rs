//! The CRI configuration of a pod's sandbox and containers: what RunPodSandbox and CreateContainer carry.
//!
//! There are no tasks and no channels.
//!
//! Functions here are pure but for three edges: [`env::EnvObjects::fetch`] asks an [`objects::ObjectSource`],
//! [`subpath`] and [`mounts::make_mounts`] prepare files below the pod's directory, and [`dns::read_resolv_conf`]
//! reads the node's file. The texts of [`error::ConfigError`] are the kubelet's, since they become the message of
//! a container that waits with `CreateContainerConfigError`.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::path::PathBuf;

use pod_sync_decisions::qos::{CgroupSettings, ResourceList};

pub mod container;
pub mod cri_extensions;
pub mod dns;
pub mod env;
pub mod env_file;
pub mod error;
pub mod expand;
pub mod fields;
pub mod go_json;
pub mod hostname;
pub mod hosts;
pub mod mounts;
pub mod node_ips;
pub mod objects;
pub mod paths;
pub mod resources;
pub mod sandbox;
pub mod security;
pub mod services;
pub mod subpath;

use self::node_ips::NodeIps;

/// Pods a node takes where `maxPods` is not set.
const MAX_PODS: u32 = 110;

/// What configurations take from the node: settings and facts.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// Name of the node.
    pub node_name: String,
    /// Addresses of the node.
    pub node_ips: NodeIps,
    /// Port of the node API; 0 when there is none.
    pub node_api_port: u16,
    /// The kubelet's root directory.
    pub root_dir: PathBuf,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// `clusterDomain`; may be empty.
    pub cluster_domain: String,
    /// `clusterDNS`; may be empty.
    pub cluster_dns: Vec<String>,
    /// `resolvConf`; `None` where the setting is the empty text.
    pub resolv_conf: Option<PathBuf>,
    /// `seccompDefault`.
    pub seccomp_default: bool,
    /// `maxPods` and `podsPerCore` together.
    pub max_pods: u32,
    /// `systemReserved` and `kubeReserved` together.
    pub reserved: ResourceList,
    /// What hard eviction keeps free.
    pub eviction_reserve: ResourceList,
    /// What is reserved is kept from the cgroup of all pods (`enforceNodeAllocatable` has `pods`).
    pub enforce_reserved: bool,
    /// Allocatable of the node, for downward API limits.
    pub allocatable: ResourceList,
    /// CFS quota and period.
    pub cgroup: CgroupSettings,
    /// Memory of the machine, bytes.
    pub memory_bytes: i64,
    /// The unified hierarchy is in use.
    pub cgroup_v2: bool,
    /// Huge page sizes of the machine, bytes.
    pub hugepage_sizes: Vec<u64>,
    /// The swap controller is there.
    pub swap_controller: bool,
    /// Swap of the machine in bytes where the behaviour is `LimitedSwap`.
    pub limited_swap_bytes: Option<i64>,
    /// `singleProcessOOMKill`.
    pub single_process_oom_kill: bool,
    /// SELinux is on, so volumes are relabelled.
    pub selinux: bool,
    /// `allowedUnsafeSysctls`.
    pub allowed_sysctls: Vec<String>,
    /// The kernel enforces AppArmor profiles.
    pub app_armor: bool,
    /// The existing `/sys/devices/system/cpu/cpu<N>/thermal_throttle` directories, masked in containers.
    pub thermal_throttle: Vec<String>,
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
            eviction_reserve: ResourceList::new(),
            enforce_reserved: true,
            allocatable: ResourceList::new(),
            cgroup: CgroupSettings::default(),
            memory_bytes: 0,
            cgroup_v2: false,
            hugepage_sizes: Vec::new(),
            swap_controller: false,
            limited_swap_bytes: None,
            single_process_oom_kill: false,
            selinux: false,
            allowed_sysctls: Vec::new(),
            app_armor: false,
            thermal_throttle: Vec::new(),
        }
    }
}

/// What the pod's runtime handler can do (CRI Status).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HandlerFeatures {
    /// Recursive read-only mounts.
    pub recursive_read_only_mounts: bool,
    /// User namespaces.
    pub user_namespaces: bool,
    /// `supplementalGroupsPolicy: Strict`.
    pub supplemental_groups_policy: bool,
}
