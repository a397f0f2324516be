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
}

const fn on(name: &'static str) -> Gate {
    Gate { name, fixed: true }
}

const fn off(name: &'static str) -> Gate {
    Gate { name, fixed: false }
}

/// Off, `crashLoopBackOff.maxContainerRestartPeriod` does not count.
pub const CRASH_LOOP_MAX: &str = "KubeletCrashLoopBackOffMax";

/// On, readers of a container's log may choose a stream.
pub const SPLIT_STREAMS: &str = "PodLogsQuerySplitStreams";

/// Off, no user can have a container checkpointed.
pub const CHECKPOINTS: &str = "ContainerCheckpoint";

/// The gates that can be set either way.
pub const SETTABLE: [&str; 3] = [CRASH_LOOP_MAX, SPLIT_STREAMS, CHECKPOINTS];

/// All that are known but [`SETTABLE`], by name.
pub const GATES: &[Gate] = &[
    off("AllAlpha"),
    off("AllBeta"),
    off("CPUManagerPolicyAlphaOptions"),
    on("CPUManagerPolicyBetaOptions"),
    off("CSIVolumeHealth"),
    off("ChangeContainerStatusOnKubeletRestart"),
    off("ClusterTrustBundleProjection"),
    on("ComponentFlagz"),
    on("ComponentStatusz"),
    on("ContainerRestartRules"),
    on("ContainerStopSignals"),
    on("CustomCPUCFSQuotaPeriod"),
    off("DynamicResourceAllocation"),
    on("EnvFiles"),
    on("EventedPLEG"),
    on("ExtendWebSocketsToKubelet"),
    on("GracefulNodeShutdown"),
    on("GracefulNodeShutdownBasedOnPodPriority"),
    on("HostnameOverride"),
    on("ImageMaximumGCAge"),
    on("ImageVolume"),
    on("InPlacePodLevelResourcesVerticalScaling"),
    on("InPlacePodVerticalScaling"),
    on("InPlacePodVerticalScalingInitContainers"),
    on("KubeletCgroupDriverFromCRI"),
    on("KubeletEnsureSecretPulledImages"),
    on("KubeletFineGrainedAuthz"),
    off("KubeletInUserNamespace"),
    on("KubeletPSI"),
    off("KubeletSeparateDiskGC"),
    off("KubeletServiceAccountTokenForCredentialProviders"),
    on("KubeletTracing"),
    off("LocalStorageCapacityIsolationFSQuotaMonitoring"),
    off("MemoryQoS"),
    on("NodeDeclaredFeatures"),
    on("NodeLogQuery"),
    on("NodeSwap"),
    on("PodAndContainerStatsFromCRI"),
    on("PodLevelResources"),
    on("PodObservedGenerationTracking"),
    on("PodReadyToStartContainersCondition"),
    on("ProcMountType"),
    on("RecursiveReadOnlyMounts"),
    on("ReloadKubeletServerCertificateFile"),
    on("RestartAllContainersOnContainerExits"),
    off("RotateKubeletServerCertificate"),
    on("SidecarContainers"),
    on("SupplementalGroupsPolicy"),
    off("UserNamespacesHostNetworkSupport"),
    on("UserNamespacesSupport"),
];
