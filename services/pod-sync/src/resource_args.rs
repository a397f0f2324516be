//! Flags of pods and their resources.

use std::time::Duration;

use clap::ArgAction;
use pod_sync_decisions::probe_period::RateLimits;
use pod_sync_decisions::unsupported::FieldGates;
use pod_sync_direct_volumes::quotas::ProjectQuotas;
use pod_sync_layout::MemoryQos;
use pod_sync_node_object::{EnforcedReservation, ReservationError, ReservationFields, Reservations};
use quintlet_config::table::{
    BIND_MOUNT_OPTIONS, DEFAULT_POD_SYSCTLS, DEVICE_HEALTH, EMPTY_DIR_MODE, FILE_OWNERS, GRPC_PROBE_TLS,
    H2C_PROBES, HUGE_PAGE_AWARE_EVICTION, IN_USER_NAMESPACE, MEMORY_QOS, MEMORY_VOLUME_RESIZE,
    POD_CERTIFICATES, PODS_API, QOS_RESERVED, QUOTA_MONITORING, RESIZE_PREEMPTION, SELINUX_MOUNT, SETTABLE,
    STOP_SIGNALS, TRUST_BUNDLE_PROJECTION, VOLUME_HEALTH, has_gate,
};

/// Limits of pods and their resources.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Pods and resources")]
pub struct ResourceArgs {
    /// Maximum number of images in the status of the Node, largest first. -1: all.
    #[arg(long, default_value_t = 50, allow_negative_numbers = true, value_name = "COUNT")]
    pub node_status_max_images: i32,
    /// Maximum number of pods.
    #[arg(long, default_value_t = 110, value_name = "COUNT")]
    pub max_pods: u32,
    /// Maximum number of pods per core, up to --max-pods. 0: only --max-pods applies.
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    pub pods_per_core: u32,
    /// Number of user IDs of a pod with a user namespace, a multiple of 65536.
    #[arg(long, default_value_t = pod_sync_records::ID_UNIT, value_parser = ids, value_name = "COUNT")]
    pub ids_per_pod: u32,
    /// Maximum number of processes in a pod. -1: no limit.
    #[arg(long, default_value_t = -1, allow_negative_numbers = true, value_name = "COUNT")]
    pub pod_max_pids: i64,
    /// Enforce CPU limits.
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub cpu_cfs_quota: bool,
    /// Period of CPU limits, 1ms to 1s.
    #[arg(long, default_value = "100ms", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub cpu_cfs_quota_period: Duration,
    /// Create a cgroup per pod, below one per QoS class.
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub cgroups_per_qos: bool,
    /// Amount reserved for the system, `cpu=100m`, `memory=1Gi`, `ephemeral-storage=1Gi`, `pid=100`; may be
    /// given more than once.
    #[arg(long, value_delimiter = ',', value_parser = quintlet_config::pair, value_name = "AMOUNT")]
    pub system_reserved: Vec<(String, String)>,
    /// Amount reserved for Quintlet and the runtime, as --system-reserved.
    #[arg(long, value_delimiter = ',', value_parser = quintlet_config::pair, value_name = "AMOUNT")]
    pub kube_reserved: Vec<(String, String)>,
    /// Online CPUs reserved for the system, such as 0-1,4. Their number replaces the cpu amounts of
    /// --system-reserved and --kube-reserved.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CPUS")]
    pub reserved_cpus: String,
    /// Existing cgroup that gets the limits of --system-reserved, if --enforce-node-allocatable has
    /// system-reserved.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CGROUP")]
    pub system_reserved_cgroup: String,
    /// Existing cgroup that gets the limits of --kube-reserved, if --enforce-node-allocatable has
    /// kube-reserved.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CGROUP")]
    pub kube_reserved_cgroup: String,
    /// Limits that cgroups enforce: `pods`, `system-reserved`, `kube-reserved`, the last two also with
    /// `-compressible`, or `none`.
    #[arg(long, default_value = "pods", value_delimiter = ',', value_name = "WORD")]
    pub enforce_node_allocatable: Vec<String>,
    /// Cgroup of the services, created if it is missing. Empty: they stay where they were started.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CGROUP")]
    pub kubelet_cgroups: String,
    /// Cgroup for the processes in the root cgroup, except kernel threads; created if it is missing. Empty:
    /// they stay there.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "CGROUP")]
    pub system_cgroups: String,
    /// Percentage of the memory requests of higher QoS classes that lower ones cannot use, `memory=50%`.
    /// Needs the feature gate QOSReserved.
    #[arg(long, value_delimiter = ',', value_parser = reserved_percent, value_name = "PERCENT")]
    pub qos_reserved: Vec<i64>,
    /// Part of the memory between request and limit of a container above which it is throttled; not set:
    /// containers are not throttled. Needs the feature gate MemoryQoS.
    #[arg(long, value_name = "FACTOR")]
    pub memory_throttling_factor: Option<f64>,
    /// TieredReservation: protect the memory requests of pods. Needs the feature gate MemoryQoS.
    #[arg(long, default_value = "None", value_parser = ["None", "TieredReservation"], value_name = "WORD")]
    pub memory_reservation_policy: String,
    /// Swap for pods: NoSwap, or LimitedSwap (a share of the swap for Burstable pods; requires cgroup v2).
    #[arg(long, default_value = "NoSwap", value_parser = ["NoSwap", "LimitedSwap"], value_name = "WORD")]
    pub memory_swap_behavior: String,
    /// Whether an OOM kill ends one process of a container or all. Default: one with cgroup v1, all with v2.
    #[arg(long, value_name = "BOOL")]
    pub single_process_oom_kill: Option<bool>,
    /// Use RuntimeDefault for containers without a seccomp profile.
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub seccomp_default: bool,
    /// Maximum delay of the crash-loop back-off, 1s to 5m.
    #[arg(long, default_value = "5m", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub max_container_restart_period: Duration,
    /// Maximum number of dead instances kept per container, besides a running one; at least the newest. -1:
    /// all. Default: two instances, dead or running.
    #[arg(long, allow_negative_numbers = true, value_name = "COUNT")]
    pub maximum_dead_containers_per_container: Option<i32>,
    /// Minimum age of a dead instance before it may be removed.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub minimum_container_ttl_duration: Duration,
    /// Timeout of calls to the runtime; twice as long for RunPodSandbox, none for pulls and hooks.
    #[arg(long, default_value = "2m", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub runtime_request_timeout: Duration,
    /// Interval between measurements of the disk usage of a pod's volumes. Zero or negative: never.
    #[arg(long, default_value = "1m", value_parser = period, allow_hyphen_values = true, value_name = "DURATION")]
    pub volume_stats_agg_period: Duration,
    /// Maximum number of HTTP, TCP and gRPC attempts per second of all probes to which the annotation
    /// quintlet.dev/probe-period-ms applies. 0: pods have no such probes.
    #[arg(long, default_value_t = 2000, value_name = "ATTEMPTS")]
    pub sub_second_probe_rate: u32,
    /// The same for exec probes, whose attempts each start a process in the runtime.
    #[arg(long, default_value_t = 0, value_name = "ATTEMPTS")]
    pub sub_second_exec_probe_rate: u32,
    /// Values of feature gates, as `Name=true` or `Name=false`. The last value of a gate applies.
    #[arg(long, value_delimiter = ',', value_name = "GATE", help = feature_gates_help())]
    pub feature_gates: Vec<String>,
}

fn feature_gates_help() -> String {
    let mut names: Vec<&str> = SETTABLE.iter().map(|gate| gate.name).collect();
    names.sort_unstable();
    let names = names.join(", ");
    format!("Feature gate, `Name=true`; may be given more than once. All but these are fixed: {names}")
}

impl ResourceArgs {
    /// Returns whether cgroups limit the resources of all pods together (`enforceNodeAllocatable`).
    #[must_use]
    pub fn enforces_pods(&self) -> bool {
        self.enforce_node_allocatable.iter().any(|word| word == "pods")
    }

    /// Returns the reservations for the system and for the node agent.
    ///
    /// # Errors
    /// A resource cannot be reserved, an amount is malformed, or a CPU is not online.
    pub fn reservations(&self) -> Result<Reservations, ReservationError> {
        let fields = ReservationFields {
            system: &self.system_reserved,
            kube: &self.kube_reserved,
            cpus: &self.reserved_cpus,
        };
        Reservations::parse(fields, &pod_sync_node_object::online_cpus())
    }

    /// Returns the cgroups whose limits are the reservations.
    ///
    /// # Errors
    /// As for [`ResourceArgs::reservations`].
    pub fn enforced_reservations(&self) -> Result<Vec<EnforcedReservation>, ReservationError> {
        let (system, kube) = (&self.system_reserved_cgroup, &self.kube_reserved_cgroup);
        let protects = self.has_gate(MEMORY_QOS);
        Ok(self.reservations()?.enforced(&self.enforce_node_allocatable, system, kube, protects))
    }

    /// Returns whether projected volumes may have certificates of ClusterTrustBundles.
    #[must_use]
    pub fn projects_trust_bundles(&self) -> bool {
        self.has_gate(TRUST_BUNDLE_PROJECTION)
    }

    /// Returns whether projected volumes may have certificates of pods.
    #[must_use]
    pub fn projects_pod_certificates(&self) -> bool {
        self.has_gate(POD_CERTIFICATES)
    }

    /// Returns whether the health of volumes is reported.
    #[must_use]
    pub fn reports_volume_health(&self) -> bool {
        self.has_gate(VOLUME_HEALTH)
    }

    /// Returns whether the Pods API is served.
    #[must_use]
    pub fn serves_pods_api(&self) -> bool {
        self.has_gate(PODS_API)
    }

    /// Returns whether huge pages are not available memory.
    #[must_use]
    pub fn subtracts_huge_pages(&self) -> bool {
        self.has_gate(HUGE_PAGE_AWARE_EVICTION)
    }

    /// Returns whether PersistentVolumes of all access modes are mounted with an SELinux label.
    #[must_use]
    pub fn mounts_selinux_labels(&self) -> bool {
        self.has_gate(SELINUX_MOUNT)
    }

    /// Returns whether containers have stop signals of their own.
    #[must_use]
    pub fn has_stop_signals(&self) -> bool {
        self.has_gate(STOP_SIGNALS)
    }

    /// Returns whether the statuses of pods have the health of their devices.
    #[must_use]
    pub fn reports_device_health(&self) -> bool {
        self.has_gate(DEVICE_HEALTH)
    }

    /// Returns the feature gates of fields of a pod.
    #[must_use]
    pub fn field_gates(&self) -> FieldGates {
        FieldGates {
            h2c_probes: self.has_gate(H2C_PROBES),
            grpc_probe_tls: self.has_gate(GRPC_PROBE_TLS),
            bind_mount_options: self.has_gate(BIND_MOUNT_OPTIONS),
            empty_dir_mode: self.has_gate(EMPTY_DIR_MODE),
            file_owners: self.has_gate(FILE_OWNERS),
            memory_volume_resize: self.has_gate(MEMORY_VOLUME_RESIZE),
            scheduler_preempts_for_resizes: self.has_gate(RESIZE_PREEMPTION),
        }
    }

    /// Returns the limits of probes with a period below one second.
    #[must_use]
    pub fn probe_rates(&self) -> RateLimits {
        RateLimits { network: self.sub_second_probe_rate, exec: self.sub_second_exec_probe_rate }
    }

    /// Returns whether settings of the machine that a user namespace does not allow are left out.
    #[must_use]
    pub fn tolerates_user_namespace(&self) -> bool {
        self.has_gate(IN_USER_NAMESPACE)
    }

    /// Returns whether `defaultPodSysctls` has its effect.
    #[must_use]
    pub fn sets_sysctls_of_pods(&self) -> bool {
        self.has_gate(DEFAULT_POD_SYSCTLS)
    }

    /// Returns the projects that count the usage of volumes below `root_dir`. There are none while the
    /// feature gate is off.
    #[must_use]
    pub fn project_quotas(&self, root_dir: &std::path::Path) -> ProjectQuotas {
        if self.has_gate(QUOTA_MONITORING) { ProjectQuotas::new(root_dir) } else { ProjectQuotas::default() }
    }

    fn has_gate(&self, name: &str) -> bool {
        has_gate(&self.feature_gates, name)
    }

    /// Returns the percentage of `qosReserved` for memory, if the feature gate is on.
    #[must_use]
    pub fn qos_reserved_percent(&self) -> Option<i64> {
        self.qos_reserved.last().copied().filter(|_| self.has_gate(QOS_RESERVED))
    }

    /// Returns how the memory of containers is throttled and protected, if the feature gate is on.
    #[must_use]
    pub fn memory_qos(&self) -> Option<MemoryQos> {
        self.has_gate(MEMORY_QOS).then(|| MemoryQos {
            throttling_factor: self.memory_throttling_factor,
            protects_requests: self.memory_reservation_policy == "TieredReservation",
            page_bytes: i64::try_from(procfs::page_size()).unwrap_or(4096),
        })
    }

    /// Returns which dead containers are kept.
    #[must_use]
    pub fn dead_containers(&self) -> pod_sync_node_decisions::gc::GcPolicy {
        pod_sync_node_decisions::gc::GcPolicy {
            per_container: self.maximum_dead_containers_per_container,
            min_age: self.minimum_container_ttl_duration,
        }
    }
}

/// Parses `memory=50%`.
fn reserved_percent(text: &str) -> Result<i64, String> {
    let percent = text.strip_prefix("memory=").ok_or("want memory=PERCENT%")?;
    quintlet_config::checks::percentage(percent).map_err(|e| e.to_string())?;
    percent.trim_end_matches('%').parse().map_err(|e: std::num::ParseIntError| e.to_string())
}

fn ids(text: &str) -> Result<u32, String> {
    let ids: u32 = text.parse().map_err(|e| format!("{e}"))?;
    if ids > 0 && ids.is_multiple_of(pod_sync_records::ID_UNIT) {
        Ok(ids)
    } else {
        Err(format!("no multiple of {}", pod_sync_records::ID_UNIT))
    }
}

/// Parses a duration; a negative one is zero.
fn period(text: &str) -> Result<Duration, String> {
    let (is_negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let period = humantime::parse_duration(text).map_err(|e| e.to_string())?;
    Ok(if is_negative { Duration::ZERO } else { period })
}
