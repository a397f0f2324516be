//! Fields of KubeletConfiguration v1beta1 (kubelet 1.37), in the order of
//! `pkg/kubelet/apis/config: KubeletConfiguration`.

use super::Row;
use super::Service::{CriProxy, NodeApi, Pleg, PodSync, StatusReporter};
use crate::checks;
use crate::kind::{COUNT, DURATION, Keys, Kind, PORT_OR_NONE};

const ALL: &[super::Service] = &super::Service::ALL;
const TEXTS: Kind = Kind::List(&Kind::Text);
const QUANTITY: Kind = Kind::Checked(checks::quantity);
const THRESHOLD: Kind = Kind::Checked(checks::threshold);
const I64: i64 = i64::MAX;
const SECOND: i64 = 1_000_000_000;

const SIGNALS: Keys = Keys::Of(
    &[
        "memory.available",
        "allocatableMemory.available",
        "nodefs.available",
        "nodefs.inodesFree",
        "imagefs.available",
        "imagefs.inodesFree",
        "containerfs.available",
        "containerfs.inodesFree",
        "pid.available",
    ],
    "unsupported eviction signal",
);
const THRESHOLDS: Kind = Kind::Map(SIGNALS, &THRESHOLD);
const RESERVED: Kind =
    Kind::Map(Keys::Of(&["cpu", "memory", "ephemeral-storage", "pid"], "cannot be reserved"), &QUANTITY);
const TAINTS: Kind = Kind::Objects(&[
    ("key", Kind::Text, true),
    ("value", Kind::Text, false),
    ("effect", Kind::Word(&["NoSchedule", "PreferNoSchedule", "NoExecute"]), true),
    ("timeAdded", Kind::Text, false),
]);

/// All fields of KubeletConfiguration.
pub const KUBELET: &[Row] = &[
    Row::new("enableServer", Kind::Bool, "true").kubelet_flag("enable-server").honoured(&[NodeApi], "false: only the health endpoint is served, neither HTTPS nor the read-only port"),
    Row::new("staticPodPath", Kind::Path, "")
        .kubelet_flag("pod-manifest-path")
        .own_flag("manifests")
        .honoured(&[PodSync], "directory or file of pod manifests"),
    Row::new("staticPodURL", Kind::Text, "").kubelet_flag("manifest-url").honoured(
        &[PodSync],
        "URL of a pod or a list of pods"
    ),
    Row::new("staticPodURLHeader", Kind::Map(Keys::Any, &TEXTS), "")
        .kubelet_flag("manifest-url-header")
        .secret()
        .honoured(&[PodSync], "headers of requests for staticPodURL"),
    Row::new("syncFrequency", DURATION, "1m").kubelet_flag("sync-frequency").honoured(
        &[PodSync],
        "interval of syncs of a pod without changes"
    ),
    Row::new("fileCheckFrequency", DURATION, "20s").kubelet_flag("file-check-frequency").honoured(
        &[PodSync],
        "interval of full reads of the manifests, in addition to file notifications"
    ),
    Row::new("httpCheckFrequency", DURATION, "20s").kubelet_flag("http-check-frequency").honoured(
        &[PodSync],
        "interval of requests for staticPodURL"
    ),
    Row::new("address", Kind::Checked(checks::address_or_none), "0.0.0.0")
        .kubelet_flag("address")
        .honoured(&[NodeApi], "address of the HTTPS and read-only ports"),
    Row::new("port", Kind::Int(0, 65535), "10250").own_flag("node-api-port").kubelet_flag("port").honoured(&[NodeApi, PodSync], "port of the HTTPS API, also published in the Node"),
    Row::new("readOnlyPort", PORT_OR_NONE, "0").kubelet_flag("read-only-port").honoured(&[NodeApi], "port without TLS and credentials, for reads only; 0: none"),
    Row::new("volumePluginDir", Kind::Path, "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/")
        .kubelet_flag("volume-plugin-dir")
        .ignored(PodSync, "no driver of FlexVolume is called: a pod with such a volume waits with the event FailedMount"),
    Row::new("providerID", Kind::Text, "").kubelet_flag("provider-id").honoured(
        &[StatusReporter],
        "spec.providerID of the Node at its registration"
    ),
    Row::new("tlsCertFile", Kind::Path, "").kubelet_flag("tls-cert-file").honoured(&[NodeApi], "serving certificate with its chain, reloaded when it changes; not set: self-signed"),
    Row::new("tlsPrivateKeyFile", Kind::Path, "").kubelet_flag("tls-private-key-file").honoured(&[NodeApi], "private key of tlsCertFile, reloaded when it changes"),
    Row::new("tlsCipherSuites", TEXTS, "").kubelet_flag("tls-cipher-suites").honoured(&[NodeApi], "cipher suites of TLS 1.2 by IANA name; insecure ones are skipped with a warning"),
    Row::new(
        "tlsMinVersion",
        Kind::Word(&["", "VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"]),
        "",
    )
    .kubelet_flag("tls-min-version")
    .honoured(&[NodeApi], "VersionTLS12 (the default) or VersionTLS13; older versions are refused"),
    Row::new("tlsCurvePreferences", Kind::List(&Kind::Int(0, 65535)), "")
        .kubelet_flag("tls-curve-preferences")
        .honoured(&[NodeApi], "groups by IANA number: 29 (X25519), 23 (P-256), 24 (P-384); other groups that Go supports are skipped with a warning"),
    Row::new("rotateCertificates", Kind::Bool, "false")
        .kubelet_flag("rotate-certificates")
        .honoured(&[PodSync], "another client certificate is requested after 70 to 90 % of its life"),
    Row::new("serverTLSBootstrap", Kind::Bool, "false")
        .kubelet_flag("rotate-server-certificates")
        .honoured(&[NodeApi, PodSync], "the serving certificate is requested from the API server for the addresses of the Node, and renewed; tlsCertFile excludes it"),
    Row::new("authentication.x509.clientCAFile", Kind::Path, "")
        .kubelet_flag("client-ca-file")
        .honoured(&[NodeApi], "CA bundle for client certificates, reloaded when it changes"),
    Row::new("authentication.webhook.enabled", Kind::Bool, "true")
        .kubelet_flag("authentication-token-webhook")
        .zero_counts()
        .honoured(&[NodeApi], "bearer tokens are reviewed by the API server"),
    Row::new("authentication.webhook.cacheTTL", DURATION, "2m")
        .kubelet_flag("authentication-token-webhook-cache-ttl")
        .honoured(&[NodeApi], "how long the result of a token review is cached"),
    Row::new("authentication.anonymous.enabled", Kind::Bool, "false")
        .kubelet_flag("anonymous-auth")
        .honoured(&[NodeApi], "requests without credentials are authenticated as system:anonymous"),
    Row::new("authorization.mode", Kind::Word(&["", "AlwaysAllow", "Webhook"]), "Webhook")
        .kubelet_flag("authorization-mode")
        .honoured(&[NodeApi], "Webhook: SubjectAccessReviews of the API server; AlwaysAllow: every request is allowed"),
    Row::new("authorization.webhook.cacheAuthorizedTTL", DURATION, "5m")
        .kubelet_flag("authorization-webhook-cache-authorized-ttl")
        .honoured(&[NodeApi], "how long an allowed SubjectAccessReview is cached"),
    Row::new("authorization.webhook.cacheUnauthorizedTTL", DURATION, "30s")
        .kubelet_flag("authorization-webhook-cache-unauthorized-ttl")
        .honoured(&[NodeApi], "how long a denied SubjectAccessReview is cached"),
    Row::new("registryPullQPS", COUNT, "").kubelet_flag("registry-qps").zero_counts().honoured(
        &[PodSync],
        "limit of pull starts per second; a pull above it fails; 0 or not set: no limit"
    ),
    Row::new("registryBurst", COUNT, "").kubelet_flag("registry-burst").honoured(
        &[PodSync],
        "burst of registryPullQPS; not set: 10"
    ),
    Row::new("eventRecordQPS", COUNT, "50").kubelet_flag("event-qps").zero_counts().honoured(
        &[StatusReporter],
        "limit of events per second; 0: no limit"
    ),
    Row::new("eventBurst", COUNT, "100").kubelet_flag("event-burst").honoured(
        &[StatusReporter],
        "burst of eventRecordQPS"
    ),
    Row::new("enableDebuggingHandlers", Kind::Bool, "true")
        .kubelet_flag("enable-debugging-handlers")
        .honoured(&[NodeApi], "false: logs, exec, attach, port-forward, run and other debugging handlers answer 405"),
    Row::new("enableContentionProfiling", Kind::Bool, "false")
        .kubelet_flag("contention-profiling")
        .ignored(NodeApi, "profiles locks of the Go runtime"),
    Row::new("healthzPort", PORT_OR_NONE, "10248")
        .kubelet_flag("healthz-port")
        .zero_counts()
        .honoured(&[NodeApi], "port of the health endpoint without TLS; 0: none"),
    Row::new("healthzBindAddress", Kind::Checked(checks::address_or_none), "127.0.0.1")
        .kubelet_flag("healthz-bind-address")
        .honoured(&[NodeApi], "address of the health endpoint"),
    Row::new("oomScoreAdj", Kind::Int(-1000, 1000), "-999")
        .kubelet_flag("oom-score-adj")
        .zero_counts()
        .honoured(&[PodSync, CriProxy], "score of these processes for the kernel's choice of a process to kill; that of the other services is set by the systemd units"),
    Row::new("clusterDomain", Kind::Text, "").kubelet_flag("cluster-domain").honoured(
        &[PodSync],
        "domain of the cluster, in DNS search lists"
    ),
    Row::new("clusterDNS", Kind::List(&Kind::Checked(checks::address)), "").kubelet_flag("cluster-dns").honoured(
        &[PodSync],
        "DNS servers of pods with policy ClusterFirst"
    ),
    Row::new("streamingConnectionIdleTimeout", DURATION, "4h")
        .kubelet_flag("streaming-connection-idle-timeout")
        .ignored(NodeApi, "the runtime's streaming server closes idle connections"),
    Row::new("nodeStatusUpdateFrequency", DURATION, "10s").kubelet_flag("node-status-update-frequency").honoured(
        &[StatusReporter],
        "minimum time between two writes of the Node's status that are not urgent"
    ),
    Row::new("nodeStatusReportFrequency", DURATION, "5m").honoured(
        &[StatusReporter],
        "interval of writes of the Node's status without changes"
    )
    .own_flag("node-status-report-frequency"),
    Row::new("nodeLeaseDurationSeconds", Kind::Int(1, i32::MAX as i64), "40")
        .own_flag("node-lease-duration-seconds")
        .honoured(
            &[StatusReporter],
            "duration of the node's lease in seconds; it is renewed after a quarter of that time"
        ),
    Row::new("imageMinimumGCAge", DURATION, "2m").kubelet_flag("minimum-image-ttl-duration").honoured(
        &[PodSync],
        "minimum age of an image before it is removed"
    ),
    Row::new("imageMaximumGCAge", DURATION, "0s").own_flag("image-maximum-gc-age").honoured(
        &[PodSync],
        "an image that is unused for longer is removed regardless of disk usage; 0s: never"
    ),
    Row::new("imageGCHighThresholdPercent", Kind::Int(0, 100), "85").kubelet_flag("image-gc-high-threshold").zero_counts().honoured(
        &[PodSync],
        "disk usage in percent at which images are removed; 100: never"
    ),
    Row::new("imageGCLowThresholdPercent", Kind::Int(0, 100), "80").kubelet_flag("image-gc-low-threshold").zero_counts().honoured(
        &[PodSync],
        "disk usage in percent down to which images are removed"
    ),
    Row::new("volumeStatsAggPeriod", Kind::Duration(i64::MIN, I64), "1m")
        .kubelet_flag("volume-stats-agg-period")
        .honoured(
            &[PodSync],
            "interval of measurements of the disk usage of volumes; negative: never"
        ),
    Row::new("kubeletCgroups", Kind::Text, "").kubelet_flag("kubelet-cgroups").honoured(
        &[NodeApi, PodSync],
        "cgroup of the services, created if it is missing, and of the statistics kubelet; not set: they stay where they were started"
    ),
    Row::new("systemCgroups", Kind::Text, "").kubelet_flag("system-cgroups").honoured(
        &[NodeApi, PodSync],
        "cgroup for the processes in the root cgroup, except kernel threads, and of the statistics misc; needs cgroupRoot"
    ),
    Row::new("cgroupRoot", Kind::Text, "/").kubelet_flag("cgroup-root").honoured(
        &[NodeApi, PodSync],
        "parent cgroup of kubepods"
    ),
    Row::new("cgroupsPerQOS", Kind::Bool, "true").kubelet_flag("cgroups-per-qos").honoured(
        &[PodSync],
        "each pod has a cgroup below the cgroup of its QoS class"
    ),
    Row::new("cgroupDriver", Kind::Word(&["", "cgroupfs", "systemd"]), "cgroupfs")
        .kubelet_flag("cgroup-driver")
        .honoured(
            &[PodSync],
            "cgroup driver, if the runtime does not report one"
        ),
    Row::new("cpuManagerPolicy", Kind::Word(&["", "none", "static"]), "none")
        .kubelet_flag("cpu-manager-policy")
        .honoured(
            &[PodSync],
            "static: containers of Guaranteed pods with a whole number of CPUs get exclusive CPUs"
        ),
    Row::new("cpuManagerPolicyOptions", Kind::Map(Keys::Any, &Kind::Text), "")
        .kubelet_flag("cpu-manager-policy-options")
        .honoured(
            &[PodSync],
            "options of the policy static; others than the kubelet's are refused"
        ),
    Row::new("cpuManagerReconcilePeriod", DURATION, "10s")
        .kubelet_flag("cpu-manager-reconcile-period")
        .honoured(
            &[PodSync],
            "interval between comparisons of the CPUs of running containers; changes are applied at once"
        ),
    Row::new("memoryManagerPolicy", Kind::Word(&["", "None", "Static"]), "None")
        .kubelet_flag("memory-manager-policy")
        .honoured(
            &[PodSync],
            "Static: the memory of Guaranteed pods comes from NUMA nodes that have enough of it"
        ),
    Row::new(
        "topologyManagerPolicy",
        Kind::Word(&["", "none", "best-effort", "restricted", "single-numa-node"]),
        "none",
    )
    .kubelet_flag("topology-manager-policy")
    .honoured(
        &[PodSync],
        "how CPUs, memory and devices are aligned on NUMA nodes, and which pods are rejected"
    ),
    Row::new("topologyManagerScope", Kind::Word(&["", "container", "pod"]), "container")
        .kubelet_flag("topology-manager-scope")
        .honoured(
            &[PodSync],
            "container: each container is aligned on its own; pod: all containers together"
        ),
    Row::new("topologyManagerPolicyOptions", Kind::Map(Keys::Any, &Kind::Text), "")
        .kubelet_flag("topology-manager-policy-options")
        .honoured(
            &[PodSync],
            "prefer-closest-numa-nodes, max-allowable-numa-nodes; others are refused"
        ),
    Row::new("qosReserved", Kind::Map(Keys::Of(&["memory"], "cannot be reserved"), &Kind::Checked(checks::percentage)), "")
        .kubelet_flag("qos-reserved")
        .honoured(
            &[PodSync],
            "memory: percentage of the requests of higher QoS classes that lower ones cannot use; needs the feature gate QOSReserved"
        ),
    Row::new("runtimeRequestTimeout", DURATION, "2m").kubelet_flag("runtime-request-timeout").honoured(
        &[CriProxy, Pleg, PodSync],
        "timeout of runtime calls other than pull, exec and attach"
    ),
    Row::new("hairpinMode", Kind::Word(&["", "promiscuous-bridge", "hairpin-veth", "none"]), "promiscuous-bridge")
        .kubelet_flag("hairpin-mode")
        .ignored(PodSync, "the network plugin decides; the kubelet ignores the field as well"),
    Row::new("maxPods", COUNT, "110").kubelet_flag("max-pods").honoured(
        &[PodSync],
        "maximum number of pods"
    ),
    Row::new("podCIDR", Kind::Text, "").kubelet_flag("pod-cidr").honoured(
        &[PodSync],
        "pod CIDR of a standalone node, passed to the runtime; with an API server, the Node's podCIDRs are passed"
    ),
    Row::new("podPidsLimit", Kind::Int(-1, I64), "-1").kubelet_flag("pod-max-pids").zero_counts().honoured(
        &[PodSync],
        "maximum number of processes in a pod; -1 and 0: no limit"
    ),
    Row::new("resolvConf", Kind::Path, "/etc/resolv.conf").kubelet_flag("resolv-conf").zero_counts().honoured(
        &[PodSync],
        "resolv.conf of pods with DNS policy Default; empty: none"
    ),
    Row::new("cpuCFSQuota", Kind::Bool, "true").kubelet_flag("cpu-cfs-quota").honoured(
        &[PodSync],
        "CPU limits are enforced"
    ),
    Row::new("cpuCFSQuotaPeriod", Kind::Duration(1_000_000, SECOND), "100ms")
        .kubelet_flag("cpu-cfs-quota-period")
        .honoured(&[PodSync], "period of CPU limits"),
    Row::new("nodeStatusMaxImages", Kind::Int(-1, i32::MAX as i64), "50")
        .kubelet_flag("node-status-max-images")
        .zero_counts()
        .honoured(&[PodSync], "maximum number of images in the Node's status"),
    Row::new("maxOpenFiles", Kind::Int(0, I64), "1000000")
        .kubelet_flag("max-open-files")
        .honoured(&[PodSync], "limit of open files"),
    Row::new("contentType", Kind::Text, "application/vnd.kubernetes.protobuf")
        .kubelet_flag("kube-api-content-type")
        .ignored(StatusReporter, "requests to the API server use JSON"),
    Row::new("kubeAPIQPS", COUNT, "").kubelet_flag("kube-api-qps").zero_counts().honoured(
        &[StatusReporter],
        "limit of pod writes to the API server per second; 0 or not set: no limit"
    ),
    Row::new("kubeAPIBurst", COUNT, "").kubelet_flag("kube-api-burst").honoured(
        &[StatusReporter],
        "burst of kubeAPIQPS; not set: 100"
    ),
    Row::new("serializeImagePulls", Kind::Bool, "").kubelet_flag("serialize-image-pulls").honoured(
        &[PodSync],
        "true: one pull at a time; false: no limit; not set: 8 concurrent pulls, 4 per registry"
    ),
    Row::new("maxParallelImagePulls", Kind::Int(1, i32::MAX as i64), "").own_flag("max-parallel-image-pulls").honoured(
        &[PodSync],
        "maximum number of concurrent pulls"
    ),
    Row::new(
        "evictionHard",
        THRESHOLDS,
        "{memory.available: 100Mi, nodefs.available: 10%, nodefs.inodesFree: 5%, imagefs.available: 15%, imagefs.inodesFree: 5%}",
    )
    .kubelet_flag("eviction-hard")
    .honoured(
        &[PodSync],
        "thresholds of evictions; memory.available and nodefs.available reduce allocatable; containerfs signals follow nodefs or imagefs"
    ),
    Row::new("evictionSoft", THRESHOLDS, "").kubelet_flag("eviction-soft").honoured(
        &[PodSync],
        "thresholds of evictions after a grace period; one at or below the hard one is refused, also on this machine an amount against a percentage"
    ),
    Row::new("evictionSoftGracePeriod", Kind::Map(SIGNALS, &DURATION), "")
        .kubelet_flag("eviction-soft-grace-period")
        .honoured(&[PodSync], "grace periods of evictionSoft"),
    Row::new("evictionMinimumReclaim", Kind::Map(SIGNALS, &Kind::Checked(checks::minimum_reclaim)), "")
        .kubelet_flag("eviction-minimum-reclaim")
        .honoured(&[PodSync], "amounts above the thresholds at which evictions end"),
    Row::new("evictionPressureTransitionPeriod", DURATION, "5m")
        .kubelet_flag("eviction-pressure-transition-period")
        .honoured(&[PodSync], "time for which a pressure condition stays true after its threshold was crossed"),
    Row::new("evictionMaxPodGracePeriod", Kind::Int(i32::MIN as i64, i32::MAX as i64), "0")
        .kubelet_flag("eviction-max-pod-grace-period")
        .honoured(&[PodSync], "longest grace period of an eviction for a soft threshold"),
    Row::new("mergeDefaultEvictionSettings", Kind::Bool, "false")
        .own_flag("merge-default-eviction-settings")
        .honoured(&[PodSync], "true: signals that evictionHard does not name keep their default"),
    Row::new("kernelMemcgNotification", Kind::Bool, "false")
        .kubelet_flag("kernel-memcg-notification")
        .honoured(&[PodSync], "true: the kernel reports when memory usage crosses a threshold; with cgroup v2 only when all pods together reach their limit"),
    Row::new("enableControllerAttachDetach", Kind::Bool, "true")
        .kubelet_flag("enable-controller-attach-detach")
        .honoured(&[PodSync, StatusReporter], "annotation of the Node; false: volumes that need an attachment are not mounted"),
    Row::new("protectKernelDefaults", Kind::Bool, "false")
        .kubelet_flag("protect-kernel-defaults")
        .honoured(&[PodSync], "true: no start if a kernel tunable is not as pods need it; false: it is set, as setKernelTunables says"),
    Row::new("makeIPTablesUtilChains", Kind::Bool, "").kubelet_flag("make-iptables-util-chains").honoured(
        &[PodSync],
        "the chains KUBE-IPTABLES-HINT and KUBE-FIREWALL of iptables exist, if iptables is installed; not set: true with a KubeletConfiguration, false without"
    ),
    Row::new("iptablesMasqueradeBit", Kind::Int(0, 31), "14")
        .kubelet_flag("iptables-masquerade-bit")
        .zero_counts()
        .ignored(PodSync, "the kubelet no longer marks packets"),
    Row::new("iptablesDropBit", Kind::Int(0, 31), "15")
        .kubelet_flag("iptables-drop-bit")
        .zero_counts()
        .ignored(PodSync, "the kubelet no longer marks packets"),
    Row::new("featureGates", Kind::Map(Keys::Any, &Kind::Bool), "").kubelet_flag("feature-gates").honoured(
        &[PodSync, NodeApi],
        "AtomicWriteVolumeUserFields, CPUManagerPolicyAlphaOptions, CPUManagerPolicyBetaOptions, CSIVolumeHealth, ClusterTrustBundle, ClusterTrustBundleProjection, ContainerCheckpoint, ContainerStopSignals, DefaultPodSysctls, EmptyDirVolumeMode, GRPCContainerProbeTLS, H2CContainerProbe, HugepageAwareEviction, InPlacePodVerticalScalingMemoryBackedVolumes, InPlacePodVerticalScalingSchedulerPreemption, KubeletAllocatedPodsEndpoint, KubeletCrashLoopBackOffMax, KubeletInUserNamespace, LocalStorageCapacityIsolationFSQuotaMonitoring, MemoryQoS, PodCertificateRequest, PodLevelResourceManagers, PodLogsQuerySplitStreams, PodsAPI, QOSReserved, ResourceHealthStatus, SELinuxMount and VolumeBindMountOptions; all other gates are fixed, and a different value causes a warning"
    ),
    Row::new("failSwapOn", Kind::Bool, "").kubelet_flag("fail-swap-on").honoured(
        &[PodSync],
        "true: no start while the machine swaps; not set: true with a KubeletConfiguration, false without"
    ),
    Row::new("memorySwap.swapBehavior", Kind::Word(&["", "NoSwap", "LimitedSwap"]), "NoSwap")
        .own_flag("memory-swap-behavior")
        .honoured(
            &[PodSync],
            "LimitedSwap: Burstable pods get a share of the machine's swap (cgroup v2)"
        ),
    Row::new("containerLogMaxSize", Kind::Checked(checks::signed_quantity), "10Mi")
        .kubelet_flag("container-log-max-size")
        .honoured(
            &[PodSync],
            "size at which a container's log is rotated; negative: never"
        ),
    Row::new("containerLogMaxFiles", Kind::Int(2, i32::MAX as i64), "5")
        .kubelet_flag("container-log-max-files")
        .honoured(
            &[PodSync],
            "maximum number of log files of a container, including the current one"
        ),
    Row::new("containerLogMaxWorkers", Kind::Int(1, i32::MAX as i64), "1")
        .own_flag("container-log-max-workers")
        .honoured(&[PodSync], "number of concurrent log rotations"),
    Row::new("containerLogMonitorInterval", Kind::Duration(3 * SECOND, I64), "10s")
        .own_flag("container-log-monitor-interval")
        .honoured(
            &[PodSync],
            "interval of checks for logs to rotate"
        ),
    Row::new("configMapAndSecretChangeDetectionStrategy", Kind::Word(&["", "Get", "Cache", "Watch"]), "Watch")
        .own_flag("config-map-and-secret-change-detection-strategy")
        .honoured(
            &[PodSync],
            "Watch: a watch per object; Cache: read again after the time to live from the Node's annotation node.alpha.kubernetes.io/ttl, or a minute; Get: read for each use"
        ),
    Row::new("systemReserved", RESERVED, "").kubelet_flag("system-reserved").honoured(
        &[PodSync],
        "reduces allocatable, and the limits of kubepods if enforceNodeAllocatable contains pods"
    ),
    Row::new("kubeReserved", RESERVED, "").kubelet_flag("kube-reserved").honoured(
        &[PodSync],
        "same as systemReserved"
    ),
    Row::new("reservedSystemCPUs", Kind::Checked(checks::cpu_list), "").kubelet_flag("reserved-cpus").honoured(
        &[PodSync],
        "CPUs whose number replaces the cpu amounts of systemReserved and kubeReserved, and that are never exclusive; others than online ones are refused"
    ),
    Row::new("systemReservedCgroup", Kind::Text, "").kubelet_flag("system-reserved-cgroup").honoured(
        &[PodSync],
        "existing cgroup that gets the limits of systemReserved, if enforceNodeAllocatable contains system-reserved or system-reserved-compressible"
    ),
    Row::new("kubeReservedCgroup", Kind::Text, "").kubelet_flag("kube-reserved-cgroup").honoured(
        &[PodSync],
        "existing cgroup that gets the limits of kubeReserved, if enforceNodeAllocatable contains kube-reserved or kube-reserved-compressible"
    ),
    Row::new(
        "enforceNodeAllocatable",
        Kind::List(&Kind::Word(&[
            "none",
            "pods",
            "system-reserved",
            "kube-reserved",
            "system-reserved-compressible",
            "kube-reserved-compressible",
        ])),
        "[pods]",
    )
    .kubelet_flag("enforce-node-allocatable")
    .zero_counts()
    .honoured(
        &[PodSync],
        "pods: kubepods is limited to the resources that are not reserved; system-reserved, kube-reserved: their cgroups are limited to what is reserved, with -compressible by CPU shares only"
    ),
    Row::new("allowedUnsafeSysctls", TEXTS, "").kubelet_flag("allowed-unsafe-sysctls").honoured(
        &[PodSync],
        "sysctls or patterns that pods may set in addition to the safe sysctls"
    ),
    Row::new("defaultPodSysctls", Kind::Map(Keys::Any, &Kind::Text), "").own_flag("default-pod-sysctls").honoured(
        &[PodSync],
        "sysctls of all pods, which those of a pod override; a pod in the node's IPC, network or user namespace has none of that namespace; needs the feature gate DefaultPodSysctls"
    ),
    Row::new("shutdownGracePeriod", DURATION, "0s").own_flag("shutdown-grace-period").honoured(
        &[PodSync],
        "time for pods to terminate at a node shutdown; 0s: none"
    ),
    Row::new("shutdownGracePeriodCriticalPods", DURATION, "0s")
        .own_flag("shutdown-grace-period-critical-pods")
        .honoured(
            &[PodSync],
            "part of shutdownGracePeriod for critical pods, which terminate last"
        ),
    Row::new(
        "shutdownGracePeriodByPodPriority",
        Kind::Objects(&[
            ("priority", Kind::Int(i32::MIN as i64, i32::MAX as i64), true),
            ("shutdownGracePeriodSeconds", Kind::Int(0, I64), true),
        ]),
        "",
    )
    .own_flag("shutdown-grace-period-by-pod-priority")
    .honoured(
        &[PodSync],
        "time for pods to terminate, by minimum priority, lowest first"
    ),
    Row::new(
        "reservedMemory",
        Kind::Objects(&[
            ("numaNode", Kind::Int(0, i32::MAX as i64), true),
            ("limits", Kind::Map(Keys::Any, &QUANTITY), true),
        ]),
        "",
    )
    .kubelet_flag("reserved-memory")
    .honoured(
        &[PodSync],
        "memory of each NUMA node that no pod gets, with the policy Static of memoryManagerPolicy"
    ),
    Row::new("enableProfilingHandler", Kind::Bool, "true")
        .own_flag("enable-profiling-handler")
        .honoured(&[NodeApi], "/debug/pprof/ serves profiles of node-api, without those of the Go runtime; false: it answers 405"),
    Row::new("enableDebugFlagsHandler", Kind::Bool, "true")
        .own_flag("enable-debug-flags-handler")
        .honoured(&[NodeApi], "PUT /debug/flags/v sets the verbosity of node-api's log lines; false: it answers 405"),
    Row::new("enableSystemLogHandler", Kind::Bool, "true").own_flag("enable-system-log-handler").honoured(&[NodeApi], "false: /logs/ answers 405"),
    Row::new("enableSystemLogQuery", Kind::Bool, "false").own_flag("enable-system-log-query").honoured(
        &[NodeApi],
        "/logs/?query= returns the journal of services and log files that the user of node-api may read"
    ),
    Row::new("seccompDefault", Kind::Bool, "false").kubelet_flag("seccomp-default").honoured(
        &[PodSync],
        "RuntimeDefault is the profile of containers without a seccomp profile"
    ),
    Row::new("memoryThrottlingFactor", Kind::Number(0.0, 1.0), "").own_flag("memory-throttling-factor").honoured(
        &[PodSync],
        "part of the memory between the request and the limit of a container above which it is throttled (memory.high); not set: containers are not throttled; needs the feature gate MemoryQoS and cgroup v2"
    ),
    Row::new("memoryReservationPolicy", Kind::Word(&["", "None", "TieredReservation"]), "None")
        .own_flag("memory-reservation-policy")
        .honoured(
            &[PodSync],
            "TieredReservation: memory requests of Guaranteed pods are memory.min, those of Burstable pods memory.low; needs the feature gate MemoryQoS and cgroup v2"
        ),
    Row::new("registerWithTaints", TAINTS, "").kubelet_flag("register-with-taints").honoured(
        &[StatusReporter],
        "taints of the Node at its registration"
    ),
    Row::new("registerNode", Kind::Bool, "true").kubelet_flag("register-node").honoured(
        &[StatusReporter],
        "the Node object is created if it is missing"
    ),
    Row::new("localStorageCapacityIsolation", Kind::Bool, "true")
        .kubelet_flag("local-storage-capacity-isolation")
        .honoured(&[PodSync], "false: pods above their limits of local storage are not evicted, and ephemeral-storage is no resource of the Node"),
    Row::new("containerRuntimeEndpoint", Kind::Checked(checks::unix_endpoint), "unix:///run/containerd/containerd.sock")
        .kubelet_flag("container-runtime-endpoint")
        .own_flag("runtime-endpoint")
        .honoured(&[CriProxy], "socket of the runtime, which a process of root must serve"),
    Row::new("imageServiceEndpoint", Kind::Checked(checks::unix_endpoint), "")
        .kubelet_flag("image-service-endpoint")
        .honoured(
            &[CriProxy],
            "socket of the image service, if it differs"
        ),
    Row::new("failCgroupV1", Kind::Bool, "").own_flag("fail-cgroup-v1").honoured(
        &[PodSync],
        "true: no start on a machine with cgroup v1; not set: true with a KubeletConfiguration, false without"
    ),
    Row::new("singleProcessOOMKill", Kind::Bool, "").own_flag("single-process-oom-kill").honoured(
        &[PodSync],
        "whether the kernel kills one process of a container or all; not set: one with cgroup v1, all with v2"
    ),
    Row::new("crashLoopBackOff.maxContainerRestartPeriod", Kind::Duration(SECOND, 300 * SECOND), "5m")
        .own_flag("max-container-restart-period")
        .honoured(
            &[PodSync],
            "maximum back-off of container restarts"
        ),
    Row::new("podLogsDir", Kind::Checked(checks::clean_path), "/var/log/pods").own_flag("pod-logs-dir").honoured(
        &[CriProxy, NodeApi, PodSync],
        "directory of pod logs"
    ),
    Row::new(
        "imagePullCredentialsVerificationPolicy",
        Kind::Word(&[
            "",
            "NeverVerify",
            "NeverVerifyPreloadedImages",
            "NeverVerifyAllowlistedImages",
            "AlwaysVerify",
        ]),
        "NeverVerifyPreloadedImages",
    )
    .own_flag("image-pull-credentials-verification-policy")
    .honoured(
        &[PodSync],
        "which present images require pull credentials that were verified, or another pull"
    ),
    Row::new("preloadedImagesVerificationAllowlist", TEXTS, "")
        .own_flag("preloaded-images-verification-allowlist")
        .honoured(
            &[PodSync],
            "images that every pod may use with NeverVerifyAllowlistedImages"
        ),
    Row::new("userNamespaces.idsPerPod", Kind::Int(65536, u32::MAX as i64), "65536")
        .own_flag("ids-per-pod")
        .honoured(
            &[PodSync],
            "number of IDs of a pod with its own user namespace, a multiple of 65536"
        ),
    Row::new("podsPerCore", COUNT, "0").kubelet_flag("pods-per-core").honoured(
        &[PodSync],
        "maximum number of pods per core, up to maxPods; 0: maxPods only"
    ),
    Row::new("logging.format", Kind::Word(&["", "text", "json"]), "text")
        .kubelet_flag("logging-format")
        .own_flag("log-format")
        .honoured(ALL, "format of log lines"),
    Row::new("logging.verbosity", Kind::Int(0, u32::MAX as i64), "0").honoured(
        ALL,
        "0 to 3: info, 4 and 5: debug, above: trace; logFilter takes precedence"
    ),
    Row::new("logging.flushFrequency", Kind::DurationOrNanos, "5s")
        .kubelet_flag("log-flush-frequency")
        .ignored(PodSync, "log lines are written without a delay"),
    Row::new(
        "logging.vmodule",
        Kind::Objects(&[("filePattern", Kind::Text, true), ("verbosity", Kind::Int(0, u32::MAX as i64), true)]),
        "",
    )
    .kubelet_flag("vmodule")
    .ignored(PodSync, "selects Go source files; logFilter of QuintletConfiguration selects by module"),
    Row::new("logging.options.text.splitStream", Kind::Bool, "false")
        .kubelet_flag("log-text-split-stream")
        .ignored(PodSync, "logs go to stderr, unbuffered"),
    Row::new("logging.options.text.infoBufferSize", QUANTITY, "\"0\"")
        .kubelet_flag("log-text-info-buffer-size")
        .ignored(PodSync, "logs go to stderr, unbuffered"),
    Row::new("logging.options.json.splitStream", Kind::Bool, "false")
        .kubelet_flag("log-json-split-stream")
        .ignored(PodSync, "logs go to stderr, unbuffered"),
    Row::new("logging.options.json.infoBufferSize", QUANTITY, "\"0\"")
        .kubelet_flag("log-json-info-buffer-size")
        .ignored(PodSync, "logs go to stderr, unbuffered"),
    Row::new("showHiddenMetricsForVersion", Kind::Text, "")
        .kubelet_flag("show-hidden-metrics-for-version")
        .ignored(PodSync, "no metric is hidden"),
    Row::new("tracing.endpoint", Kind::Checked(checks::collector), "").own_flag("otlp-endpoint").honoured(
        ALL,
        "OTLP endpoint for traces, host:port or a URL; not set: spans stay in memory"
    ),
    Row::new("tracing.samplingRatePerMillion", Kind::Int(0, 1_000_000), "")
        .own_flag("sampling-rate-per-million")
        .honoured(
            ALL,
            "number of a million traces to export, of those that no other service began; not set: 0 with an endpoint in a file, \
             otherwise all"
        ),
    Row::new("runOnce", Kind::Bool, "false")
        .kubelet_flag("runonce")
        .refused("unsupported: the kubelet has deprecated it; `quintctl up --once` serves tests"),
];
