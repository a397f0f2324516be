//! Feature gates that bear on what a node agent does, and how Quintlet is fixed for each.
//!
//! The list is not all of the kubelet's: gates of other components may stand in the same map, and gates come and go with
//! each release. So a gate that is not here is warned of, not refused (an error with `--strict`).

/// A gate.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    /// Its name.
    pub name: &'static str,
    /// Quintlet behaves as with this value.
    pub fixed: bool,
    /// How far it is in Kubernetes 1.36: ALPHA, BETA, DEPRECATED, or empty for GA.
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

/// Off, `crashLoopBackOff.maxContainerRestartPeriod` does not count.
pub const CRASH_LOOP_MAX: &str = "KubeletCrashLoopBackOffMax";

/// On, readers of a container's log may choose a stream.
pub const SPLIT_STREAMS: &str = "PodLogsQuerySplitStreams";

/// Off, no user can have a container checkpointed.
pub const CHECKPOINTS: &str = "ContainerCheckpoint";

/// The gates that can be set either way.
pub const SETTABLE: [&str; 3] = [CRASH_LOOP_MAX, SPLIT_STREAMS, CHECKPOINTS];

/// What [`SETTABLE`] are where nobody sets them.
pub const DEFAULTS: [Gate; 3] = [on(CRASH_LOOP_MAX, BETA), off(SPLIT_STREAMS, ALPHA), on(CHECKPOINTS, BETA)];

/// All that are known but [`SETTABLE`], by name.
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
