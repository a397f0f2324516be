//! Feature gates that affect a node agent, and the value with which Quintlet behaves.
//!
//! The list has the gates that kubelet 1.37 reads on Linux, except those that have no effect on what it does.
//! The map may contain gates of other components, and each release adds and removes gates. Therefore an
//! unknown gate, such as one that Kubernetes 1.37 removed, causes a warning (an error with `--strict`). The
//! kubelet does not start with it.

/// A feature gate.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    /// Name of the gate.
    pub name: &'static str,
    /// The value with which Quintlet behaves.
    pub fixed: bool,
    /// Stage in Kubernetes 1.37: ALPHA, BETA, DEPRECATED, or empty for GA.
    pub stage: &'static str,
}

const ALPHA: &str = "ALPHA";
const BETA: &str = "BETA";
const GA: &str = "";
const DEPRECATED: &str = "DEPRECATED";

const fn on(name: &'static str, stage: &'static str) -> Gate {
    Gate { name, fixed: true, stage }
}

const fn off(name: &'static str, stage: &'static str) -> Gate {
    Gate { name, fixed: false, stage }
}

/// If false, `crashLoopBackOff.maxContainerRestartPeriod` has no effect.
pub const CRASH_LOOP_MAX: &str = "KubeletCrashLoopBackOffMax";

/// If true, a client may read one stream of a container's log.
pub const SPLIT_STREAMS: &str = "PodLogsQuerySplitStreams";

/// If true, `/allocatedPods` is served.
pub const ALLOCATED_PODS: &str = "KubeletAllocatedPodsEndpoint";

/// If false, containers cannot be checkpointed.
pub const CHECKPOINTS: &str = "ContainerCheckpoint";

/// If true, containers are throttled below their memory limit, and requests of memory may be protected
/// (cgroup v2).
pub const MEMORY_QOS: &str = "MemoryQoS";

/// If true, `qosReserved` has its effect.
pub const QOS_RESERVED: &str = "QOSReserved";

/// Required by [`TRUST_BUNDLE_PROJECTION`].
pub const TRUST_BUNDLES: &str = "ClusterTrustBundle";

/// If true, projected volumes may have certificates of ClusterTrustBundles.
pub const TRUST_BUNDLE_PROJECTION: &str = "ClusterTrustBundleProjection";

/// If true, projected volumes may have certificates of pods.
pub const POD_CERTIFICATES: &str = "PodCertificateRequest";

/// If true, the health of volumes that CSI drivers report is an event and a metric.
pub const VOLUME_HEALTH: &str = "CSIVolumeHealth";

/// If true, emptyDir volumes of pods with a user namespace are measured by project quotas.
pub const QUOTA_MONITORING: &str = "LocalStorageCapacityIsolationFSQuotaMonitoring";

/// If true, containers get their `lifecycle.stopSignal`, and statuses have the stop signal that the runtime
/// reports.
pub const STOP_SIGNALS: &str = "ContainerStopSignals";

/// If true, the Pods API is served on its socket.
pub const PODS_API: &str = "PodsAPI";

/// If true, huge pages are not available memory, for evictions and in statistics.
pub const HUGE_PAGE_AWARE_EVICTION: &str = "HugepageAwareEviction";

/// If true, the statuses of pods have the health of their devices.
pub const DEVICE_HEALTH: &str = "ResourceHealthStatus";

/// If true, options of the CPU manager that are alpha can be set.
pub const CPU_ALPHA_OPTIONS: &str = "CPUManagerPolicyAlphaOptions";

/// If true, options of the CPU manager that are beta can be set.
pub const CPU_BETA_OPTIONS: &str = "CPUManagerPolicyBetaOptions";

/// If true, the CPU, memory and topology manager act on resources of the pod level.
pub const POD_LEVEL_MANAGERS: &str = "PodLevelResourceManagers";

/// If true, PersistentVolumes of all access modes are mounted with an SELinux label.
pub const SELINUX_MOUNT: &str = "SELinuxMount";

/// If true, HTTP probes may use HTTP/2 without TLS.
pub const H2C_PROBES: &str = "H2CContainerProbe";

/// If true, gRPC probes may use TLS.
pub const GRPC_PROBE_TLS: &str = "GRPCContainerProbeTLS";

/// If true, containers may mount volumes with `noexec`, `nodev` and `nosuid`.
pub const BIND_MOUNT_OPTIONS: &str = "VolumeBindMountOptions";

/// If true, emptyDir volumes may have another mode than 0777.
pub const EMPTY_DIR_MODE: &str = "EmptyDirVolumeMode";

/// If true, files of configMap, secret, downwardAPI and projected volumes may have an owner.
pub const FILE_OWNERS: &str = "AtomicWriteVolumeUserFields";

/// If true, `defaultPodSysctls` has its effect.
pub const DEFAULT_POD_SYSCTLS: &str = "DefaultPodSysctls";

/// If true, memory-backed emptyDir volumes follow a resize of their `sizeLimit`.
pub const MEMORY_VOLUME_RESIZE: &str = "InPlacePodVerticalScalingMemoryBackedVolumes";

/// If true, the scheduler alone preempts pods for a resize.
pub const RESIZE_PREEMPTION: &str = "InPlacePodVerticalScalingSchedulerPreemption";

/// If true, settings of the machine that a user namespace does not allow are left out.
pub const IN_USER_NAMESPACE: &str = "KubeletInUserNamespace";

/// The gates that can be set to either value, with their defaults.
pub const SETTABLE: &[Gate] = &[
    on(CRASH_LOOP_MAX, BETA),
    off(SPLIT_STREAMS, ALPHA),
    on(CHECKPOINTS, BETA),
    on(MEMORY_QOS, BETA),
    off(QOS_RESERVED, ALPHA),
    on(TRUST_BUNDLES, GA),
    on(TRUST_BUNDLE_PROJECTION, GA),
    on(POD_CERTIFICATES, GA),
    off(VOLUME_HEALTH, ALPHA),
    off(QUOTA_MONITORING, BETA),
    off(STOP_SIGNALS, ALPHA),
    on(PODS_API, BETA),
    on(HUGE_PAGE_AWARE_EVICTION, BETA),
    on(DEVICE_HEALTH, BETA),
    on(SELINUX_MOUNT, GA),
    off(CPU_ALPHA_OPTIONS, ALPHA),
    on(CPU_BETA_OPTIONS, BETA),
    off(POD_LEVEL_MANAGERS, BETA),
    off(H2C_PROBES, ALPHA),
    off(GRPC_PROBE_TLS, ALPHA),
    off(BIND_MOUNT_OPTIONS, ALPHA),
    off(EMPTY_DIR_MODE, ALPHA),
    off(FILE_OWNERS, ALPHA),
    off(DEFAULT_POD_SYSCTLS, ALPHA),
    on(IN_USER_NAMESPACE, BETA),
    off(ALLOCATED_PODS, ALPHA),
    off(MEMORY_VOLUME_RESIZE, ALPHA),
    off(RESIZE_PREEMPTION, ALPHA),
];

/// Returns the default value of one of [`SETTABLE`].
#[must_use]
pub fn default_gate(name: &str) -> bool {
    SETTABLE.iter().any(|gate| gate.name == name && gate.fixed)
}

/// Returns whether one of [`SETTABLE`] is on with a list of `Name=true` and `Name=false`. The last occurrence
/// applies.
#[must_use]
pub fn has_gate(gates: &[String], name: &str) -> bool {
    has_gate_or(gates, name, default_gate(name))
}

/// Returns whether a gate with this default is on, as [`has_gate`] does.
#[must_use]
pub fn has_gate_or(gates: &[String], name: &str, default: bool) -> bool {
    let mut of_gate = gates.iter().filter_map(|g| g.split_once('=')).filter(|(k, _)| *k == name);
    of_gate.next_back().map_or(default, |(_, value)| value.eq_ignore_ascii_case("true"))
}

/// All known gates except [`SETTABLE`], sorted by name.
pub const GATES: &[Gate] = &[
    off("AllAlpha", ALPHA),
    off("AllBeta", BETA),
    on("CRIListStreaming", ALPHA),
    off("CgroupOptions", ALPHA),
    off("ChangeContainerStatusOnKubeletRestart", DEPRECATED),
    on("ComponentFlagz", BETA),
    on("ComponentStatusz", BETA),
    on("ContainerRestartRules", BETA),
    on("CustomCPUCFSQuotaPeriod", GA),
    on("DRAExtendedResource", GA),
    off("DRANodeAllocatableResources", ALPHA),
    off("DRAOptionalNodeOperations", ALPHA),
    on("DRAWorkloadResourceClaims", BETA),
    on("DisableCPUQuotaWithExclusiveCPUs", DEPRECATED),
    on("DisableNodeKubeProxyVersion", DEPRECATED),
    on("DynamicResourceAllocation", GA),
    on("EnvFiles", BETA),
    on("EventedPLEG", ALPHA),
    on("ExecProbeTimeout", GA),
    on("ExtendWebSocketsToKubelet", BETA),
    off("GitRepoVolumeDriver", DEPRECATED),
    on("GracefulNodeShutdown", BETA),
    on("GracefulNodeShutdownBasedOnPodPriority", BETA),
    on("HostnameOverride", GA),
    on("ImageMaximumGCAge", GA),
    on("ImageVolume", GA),
    off("ImageVolumeWithDigest", ALPHA),
    on("InPlacePodLevelResourcesVerticalScaling", BETA),
    on("InPlacePodVerticalScaling", GA),
    off("InPlacePodVerticalScalingExclusiveCPUs", ALPHA),
    off("InPlacePodVerticalScalingExclusiveMemory", ALPHA),
    on("InPlacePodVerticalScalingInitContainers", GA),
    on("KubeletCgroupDriverFromCRI", GA),
    on("KubeletEnsureSecretPulledImages", BETA),
    on("KubeletFineGrainedAuthz", GA),
    on("KubeletPSI", GA),
    on("KubeletPodResourcesDynamicResources", GA),
    on("KubeletPodResourcesGet", GA),
    on("KubeletPodResourcesListUseActivePods", DEPRECATED),
    on("KubeletRegistrationGetOnExistsOnly", DEPRECATED),
    off("KubeletSeparateDiskGC", BETA),
    off("KubeletServiceAccountTokenForCredentialProviders", BETA),
    on("KubeletTracing", GA),
    on("MutableCSINodeAllocatableCount", GA),
    on("NodeDeclaredFeatures", GA),
    off("NodeLifecycleConditions", ALPHA),
    on("NodeLogQuery", GA),
    on("NodeSwap", GA),
    on("PodAndContainerStatsFromCRI", BETA),
    off("PodLevelCheckpointRestore", ALPHA),
    on("PodLevelResources", BETA),
    on("PodLifecycleSleepAction", GA),
    on("PodLifecycleSleepActionAllowZero", GA),
    on("PodObservedGenerationTracking", GA),
    on("PodReadyToStartContainersCondition", GA),
    on("ProcMountType", GA),
    on("RecoverVolumeExpansionFailure", GA),
    on("RecursiveReadOnlyMounts", GA),
    off("ReduceDefaultCrashLoopBackOffDecay", ALPHA),
    on("ReloadKubeletClientCAFile", BETA),
    on("ReloadKubeletServerCertificateFile", BETA),
    on("ResourceHealthStatusMessage", BETA),
    on("RestartAllContainersOnContainerExits", BETA),
    on("RotateKubeletServerCertificate", BETA),
    off("RuntimeClassInImageCriApi", ALPHA),
    on("SELinuxMountReadWriteOncePod", GA),
    on("SupplementalGroupsPolicy", GA),
    on("SystemdWatchdog", GA),
    off("TopologyManagerPolicyAlphaOptions", ALPHA),
    on("TopologyManagerPolicyBetaOptions", BETA),
    on("TopologyManagerPolicyOptions", GA),
    off("UserNamespacesHostNetworkSupport", ALPHA),
    on("UserNamespacesSupport", GA),
];
