//! Feature gates that affect a node agent, and the value with which Quintlet behaves.
//!
//! The list does not have all gates of the kubelet. The map may contain gates of other components, and each release adds and
//! removes gates. Therefore an unknown gate causes a warning (an error with `--strict`).

/// A feature gate.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    /// Name of the gate.
    pub name: &'static str,
    /// The value with which Quintlet behaves.
    pub fixed: bool,
    /// Stage in Kubernetes 1.36: ALPHA, BETA, DEPRECATED, or empty for GA.
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

/// If false, containers cannot be checkpointed.
pub const CHECKPOINTS: &str = "ContainerCheckpoint";

/// The gates that can be set to either value.
pub const SETTABLE: [&str; 3] = [CRASH_LOOP_MAX, SPLIT_STREAMS, CHECKPOINTS];

/// Default values of [`SETTABLE`].
pub const DEFAULTS: [Gate; 3] = [on(CRASH_LOOP_MAX, BETA), off(SPLIT_STREAMS, ALPHA), on(CHECKPOINTS, BETA)];

/// All known gates except [`SETTABLE`], sorted by name.
pub const GATES: &[Gate] = &[
    off("AllAlpha", ALPHA),
    off("AllBeta", BETA),
    off("CPUManagerPolicyAlphaOptions", ALPHA),
    on("CPUManagerPolicyBetaOptions", BETA),
    off("CSIVolumeHealth", ALPHA),
    off("ChangeContainerStatusOnKubeletRestart", DEPRECATED),
    off("ClusterTrustBundleProjection", BETA),
    on("ComponentFlagz", BETA),
    on("ComponentStatusz", BETA),
    on("ContainerRestartRules", BETA),
    on("ContainerStopSignals", ALPHA),
    on("CustomCPUCFSQuotaPeriod", GA),
    off("DynamicResourceAllocation", GA),
    on("EnvFiles", BETA),
    on("EventedPLEG", ALPHA),
    on("ExtendWebSocketsToKubelet", BETA),
    on("GracefulNodeShutdown", BETA),
    on("GracefulNodeShutdownBasedOnPodPriority", BETA),
    on("HostnameOverride", BETA),
    on("ImageMaximumGCAge", GA),
    on("ImageVolume", GA),
    on("InPlacePodLevelResourcesVerticalScaling", BETA),
    on("InPlacePodVerticalScaling", GA),
    on("InPlacePodVerticalScalingInitContainers", BETA),
    on("KubeletCgroupDriverFromCRI", GA),
    on("KubeletEnsureSecretPulledImages", BETA),
    on("KubeletFineGrainedAuthz", GA),
    off("KubeletInUserNamespace", ALPHA),
    on("KubeletPSI", GA),
    off("KubeletSeparateDiskGC", BETA),
    off("KubeletServiceAccountTokenForCredentialProviders", BETA),
    on("KubeletTracing", GA),
    off("LocalStorageCapacityIsolationFSQuotaMonitoring", BETA),
    off("MemoryQoS", ALPHA),
    on("NodeDeclaredFeatures", BETA),
    on("NodeLogQuery", GA),
    on("NodeSwap", GA),
    on("PodAndContainerStatsFromCRI", ALPHA),
    on("PodLevelResources", BETA),
    on("PodObservedGenerationTracking", GA),
    on("PodReadyToStartContainersCondition", BETA),
    on("ProcMountType", GA),
    on("RecursiveReadOnlyMounts", GA),
    on("ReloadKubeletServerCertificateFile", BETA),
    on("RestartAllContainersOnContainerExits", BETA),
    off("RotateKubeletServerCertificate", BETA),
    on("SidecarContainers", GA),
    on("SupplementalGroupsPolicy", GA),
    off("UserNamespacesHostNetworkSupport", ALPHA),
    on("UserNamespacesSupport", GA),
];
