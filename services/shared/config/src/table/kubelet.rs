//! Fields of KubeletConfiguration v1beta1 (kubelet 1.36), in the order of `pkg/kubelet/apis/config: KubeletConfiguration`.

use super::Row;
use super::Service::{CriProxy, NodeApi, Pleg, PodSync, StatusReporter};
use crate::kind::{self, COUNT, DURATION, Keys, Kind, PORT_OR_NONE};

const ALL: &[super::Service] = &super::Service::ALL;
const TEXTS: Kind = Kind::List(&Kind::Text);
const QUANTITY: Kind = Kind::Checked(kind::quantity);
const THRESHOLD: Kind = Kind::Checked(kind::threshold);
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
    Row::new("enableServer", Kind::Bool, "true").kubelet_flag("enable-server").honoured(&[NodeApi], "false: neither HTTPS nor the read-only port; health alone", &["fields_of_the_node_api_arrive", "without_the_server_only_health_is_served"]),
    Row::new("staticPodPath", Kind::Path, "")
        .kubelet_flag("pod-manifest-path")
        .own_flag("manifests")
        .honoured(&[PodSync], "directory or file of pod manifests", &["fields_of_sources_arrive", "manifests_become_pods_and_go_with_their_files"]),
    Row::new("staticPodURL", Kind::Text, "").kubelet_flag("manifest-url").honoured(
        &[PodSync],
        "URL of a pod or a list of pods",
        &["fields_of_sources_arrive", "pods_of_a_url_run_change_survive_its_failures_and_go"],
    ),
    Row::new("staticPodURLHeader", Kind::Map(Keys::Any, &TEXTS), "")
        .kubelet_flag("manifest-url-header")
        .secret()
        .honoured(&[PodSync], "headers for that URL", &["fields_of_sources_arrive", "a_url_is_read_as_the_kubelet_reads_it"]),
    Row::new("syncFrequency", DURATION, "1m").kubelet_flag("sync-frequency").honoured(
        &[PodSync],
        "how often a pod is looked at when nothing happened to it",
        &["fields_of_sources_arrive", "waits_are_the_kubelets_with_jitter_and_short_where_nothing_is_known"],
    ),
    Row::new("fileCheckFrequency", DURATION, "20s").kubelet_flag("file-check-frequency").honoured(
        &[PodSync],
        "how often manifests are read again when nothing seems to have changed",
        &["fields_of_sources_arrive", "a_change_behind_a_link_is_found_at_the_next_look"],
    ),
    Row::new("httpCheckFrequency", DURATION, "20s").kubelet_flag("http-check-frequency").honoured(
        &[PodSync],
        "how often staticPodURL is fetched",
        &["fields_of_sources_arrive", "a_url_is_read_as_the_kubelet_reads_it"],
    ),
    Row::new("address", Kind::Checked(kind::address_or_none), "0.0.0.0")
        .kubelet_flag("address")
        .honoured(&[NodeApi], "address of the HTTPS and read-only ports", &["fields_of_the_node_api_arrive", "address_and_ports_are_those_of_the_configuration"]),
    Row::new("port", Kind::Int(0, 65535), "10250").own_flag("node-api-port").kubelet_flag("port").honoured(&[NodeApi, PodSync], "port of the HTTPS API, also published in the Node", &["fields_of_the_node_api_arrive", "fields_of_the_node_arrive", "address_and_ports_are_those_of_the_configuration"]),
    Row::new("readOnlyPort", PORT_OR_NONE, "0").kubelet_flag("read-only-port").honoured(&[NodeApi], "port without TLS and credentials, and without what acts on containers; 0: none", &["fields_of_the_node_api_arrive", "address_and_ports_are_those_of_the_configuration"]),
    Row::new("volumePluginDir", Kind::Path, "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/")
        .kubelet_flag("volume-plugin-dir")
        .not_yet(PodSync, None),
    Row::new("providerID", Kind::Text, "").kubelet_flag("provider-id").honoured(
        &[StatusReporter],
        "spec.providerID of a Node that is registered",
        &["a_node_is_registered_with_what_the_configuration_says"],
    ),
    Row::new("tlsCertFile", Kind::Path, "").kubelet_flag("tls-cert-file").honoured(&[NodeApi], "serving certificate with its chain, read again when it changes; without it a self-signed one", &["fields_of_the_node_api_arrive", "a_serving_certificate_is_read_again_when_it_changes"]),
    Row::new("tlsPrivateKeyFile", Kind::Path, "").kubelet_flag("tls-private-key-file").honoured(&[NodeApi], "its key, likewise", &["fields_of_the_node_api_arrive", "a_serving_certificate_is_read_again_when_it_changes"]),
    Row::new("tlsCipherSuites", TEXTS, "").kubelet_flag("tls-cipher-suites").honoured(&[NodeApi], "suites of TLS 1.2 by IANA name; those that are unsafe are left out with a warning", &["fields_of_the_node_api_arrive", "only_the_suites_and_groups_of_the_configuration_are_spoken"]),
    Row::new(
        "tlsMinVersion",
        Kind::Word(&["", "VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"]),
        "",
    )
    .kubelet_flag("tls-min-version")
    .honoured(&[NodeApi], "VersionTLS12 (without it, too) or VersionTLS13; older ones are refused", &["fields_of_the_node_api_arrive", "what_lets_nobody_in_or_cannot_be_asked_is_an_error_at_the_start", "only_the_versions_of_tls_that_are_allowed_are_spoken"]),
    Row::new("tlsCurvePreferences", Kind::List(&Kind::Int(0, 65535)), "")
        .kubelet_flag("tls-curve-preferences")
        .honoured(&[NodeApi], "groups by IANA number: 29 (X25519), 23 (P-256), 24 (P-384); others of Go are left out with a warning", &["fields_of_the_node_api_arrive", "only_the_suites_and_groups_of_the_configuration_are_spoken"]),
    Row::new("rotateCertificates", Kind::Bool, "false")
        .kubelet_flag("rotate-certificates")
        .not_yet(PodSync, Some("false")),
    Row::new("serverTLSBootstrap", Kind::Bool, "false")
        .kubelet_flag("rotate-server-certificates")
        .not_yet(PodSync, Some("false")),
    Row::new("authentication.x509.clientCAFile", Kind::Path, "")
        .kubelet_flag("client-ca-file")
        .honoured(&[NodeApi], "CA bundle of client certificates, read again when it changes", &["fields_of_the_node_api_arrive", "a_client_certificate_says_who_asks_if_our_ca_signed_it_and_the_ca_is_read_again"]),
    Row::new("authentication.webhook.enabled", Kind::Bool, "true")
        .kubelet_flag("authentication-token-webhook")
        .zero_counts()
        .honoured(&[NodeApi], "bearer tokens are reviewed by the API server", &["fields_of_the_node_api_arrive", "answers_about_users_are_kept_and_tokens_are_asked_about_once", "what_lets_nobody_in_or_cannot_be_asked_is_an_error_at_the_start"]),
    Row::new("authentication.webhook.cacheTTL", DURATION, "2m")
        .kubelet_flag("authentication-token-webhook-cache-ttl")
        .honoured(&[NodeApi], "how long an answer about a token counts", &["fields_of_the_node_api_arrive", "answers_about_users_count_as_long_as_the_configuration_says"]),
    Row::new("authentication.anonymous.enabled", Kind::Bool, "false")
        .kubelet_flag("anonymous-auth")
        .honoured(&[NodeApi], "requests without credentials are system:anonymous's", &["fields_of_the_node_api_arrive", "without_credentials_one_is_anonymous_only_if_that_is_allowed_and_a_bad_token_never_is"]),
    Row::new("authorization.mode", Kind::Word(&["", "AlwaysAllow", "Webhook"]), "Webhook")
        .kubelet_flag("authorization-mode")
        .honoured(&[NodeApi], "Webhook asks the API server, AlwaysAllow nobody", &["fields_of_the_node_api_arrive", "every_endpoint_wants_somebody_who_may", "health_fails_while_the_sync_loop_is_stuck"]),
    Row::new("authorization.webhook.cacheAuthorizedTTL", DURATION, "5m")
        .kubelet_flag("authorization-webhook-cache-authorized-ttl")
        .honoured(&[NodeApi], "how long its yes counts", &["fields_of_the_node_api_arrive", "answers_about_users_count_as_long_as_the_configuration_says"]),
    Row::new("authorization.webhook.cacheUnauthorizedTTL", DURATION, "30s")
        .kubelet_flag("authorization-webhook-cache-unauthorized-ttl")
        .honoured(&[NodeApi], "how long its no counts", &["fields_of_the_node_api_arrive", "answers_about_users_count_as_long_as_the_configuration_says"]),
    Row::new("registryPullQPS", COUNT, "").kubelet_flag("registry-qps").zero_counts().honoured(
        &[PodSync],
        "pulls begun per second, one more is a failed one; without it, and with 0, no limit",
        &["fields_of_images_arrive", "pulls_begin_as_often_as_the_bucket_allows"],
    ),
    Row::new("registryBurst", COUNT, "").kubelet_flag("registry-burst").honoured(
        &[PodSync],
        "pulls begun at once before that limit counts; without it 10",
        &["fields_of_images_arrive", "pulls_begin_as_often_as_the_bucket_allows"],
    ),
    Row::new("eventRecordQPS", COUNT, "50").kubelet_flag("event-qps").zero_counts().honoured(
        &[StatusReporter],
        "events written per second; 0: no limit",
        &["events_keep_to_their_rate"],
    ),
    Row::new("eventBurst", COUNT, "100").kubelet_flag("event-burst").honoured(
        &[StatusReporter],
        "events written at once before that limit counts",
        &["events_keep_to_their_rate"],
    ),
    Row::new("enableDebuggingHandlers", Kind::Bool, "true")
        .kubelet_flag("enable-debugging-handlers")
        .honoured(&[NodeApi], "false: logs, exec, attach, port-forward, run and more answer 405", &["fields_of_the_node_api_arrive", "handlers_that_are_off_answer_405"]),
    Row::new("enableContentionProfiling", Kind::Bool, "false")
        .kubelet_flag("contention-profiling")
        .ignored(NodeApi, "profiles Go's locks; there are none here"),
    Row::new("healthzPort", PORT_OR_NONE, "10248")
        .kubelet_flag("healthz-port")
        .zero_counts()
        .honoured(&[NodeApi], "port of the plain health endpoint; 0: none", &["fields_of_the_node_api_arrive", "address_and_ports_are_those_of_the_configuration"]),
    Row::new("healthzBindAddress", Kind::Checked(kind::address_or_none), "127.0.0.1")
        .kubelet_flag("healthz-bind-address")
        .honoured(&[NodeApi], "its address", &["fields_of_the_node_api_arrive", "address_and_ports_are_those_of_the_configuration"]),
    Row::new("oomScoreAdj", Kind::Int(-1000, 1000), "-999")
        .kubelet_flag("oom-score-adj")
        .zero_counts()
        .not_yet(PodSync, None),
    Row::new("clusterDomain", Kind::Text, "").kubelet_flag("cluster-domain").honoured(
        &[PodSync],
        "domain of the cluster, in DNS search lists",
        &["fields_of_dns_arrive", "the_policy_selects_cluster_host_or_nothing"],
    ),
    Row::new("clusterDNS", Kind::List(&Kind::Checked(kind::address)), "").kubelet_flag("cluster-dns").honoured(
        &[PodSync],
        "DNS servers of pods with policy ClusterFirst",
        &["fields_of_dns_arrive", "the_policy_selects_cluster_host_or_nothing"],
    ),
    Row::new("streamingConnectionIdleTimeout", DURATION, "4h")
        .kubelet_flag("streaming-connection-idle-timeout")
        .ignored(NodeApi, "the runtime's streaming server decides when an idle connection ends"),
    Row::new("nodeStatusUpdateFrequency", DURATION, "10s").kubelet_flag("node-status-update-frequency").honoured(
        &[StatusReporter],
        "shortest time between two writes of the Node's status that are not urgent",
        &["the_node_is_written_as_often_as_the_configuration_says"],
    ),
    Row::new("nodeStatusReportFrequency", DURATION, "5m").honoured(
        &[StatusReporter],
        "how often the Node's status is written when nothing changed",
        &["the_node_is_written_as_often_as_the_configuration_says"],
    )
    .own_flag("node-status-report-frequency"),
    Row::new("nodeLeaseDurationSeconds", Kind::Int(1, i32::MAX as i64), "40")
        .own_flag("node-lease-duration-seconds")
        .honoured(
            &[StatusReporter],
            "seconds the node's lease counts; it is renewed after a quarter of them",
            &["the_lease_lasts_as_long_as_the_configuration_says"],
        ),
    Row::new("imageMinimumGCAge", DURATION, "2m").kubelet_flag("minimum-image-ttl-duration").honoured(
        &[PodSync],
        "an image that came more recently is not removed",
        &["fields_of_images_arrive", "the_longest_unused_goes_first_and_what_is_used_new_or_pinned_stays"],
    ),
    Row::new("imageMaximumGCAge", DURATION, "0s").own_flag("image-maximum-gc-age").honoured(
        &[PodSync],
        "an image that nobody used for so long is removed, whatever the disk; 0s: never",
        &["fields_of_images_arrive", "age_counts_only_once_this_process_is_as_old"],
    ),
    Row::new("imageGCHighThresholdPercent", Kind::Int(0, 100), "85").kubelet_flag("image-gc-high-threshold").zero_counts().honoured(
        &[PodSync],
        "percent of the disk in use from which on images are removed; 100: never",
        &["fields_of_images_arrive", "space_is_freed_from_the_high_threshold_to_the_low_one"],
    ),
    Row::new("imageGCLowThresholdPercent", Kind::Int(0, 100), "80").kubelet_flag("image-gc-low-threshold").zero_counts().honoured(
        &[PodSync],
        "percent in use at which enough are removed",
        &["fields_of_images_arrive", "space_is_freed_from_the_high_threshold_to_the_low_one"],
    ),
    Row::new("volumeStatsAggPeriod", Kind::Duration(i64::MIN, I64), "1m")
        .kubelet_flag("volume-stats-agg-period")
        .honoured(
            &[PodSync],
            "how often it is measured what a pod's volumes take on the disk; negative: never",
            &["fields_of_statistics_arrive", "each_pod_is_measured_once_in_a_period_and_one_that_is_gone_is_forgotten"],
        ),
    Row::new("kubeletCgroups", Kind::Text, "").kubelet_flag("kubelet-cgroups").not_yet(PodSync, None),
    Row::new("systemCgroups", Kind::Text, "").kubelet_flag("system-cgroups").not_yet(PodSync, None),
    Row::new("cgroupRoot", Kind::Text, "/").kubelet_flag("cgroup-root").honoured(
        &[NodeApi, PodSync],
        "cgroup under which kubepods stands",
        &["fields_of_cgroups_arrive", "a_pods_group_is_named_as_the_driver_wants_it", "fields_of_the_node_api_arrive", "the_group_is_found_in_both_versions_and_by_both_drivers"],
    ),
    Row::new("cgroupsPerQOS", Kind::Bool, "true").kubelet_flag("cgroups-per-qos").honoured(
        &[PodSync],
        "pods have cgroups of their own, in a tier per class",
        &["fields_of_cgroups_arrive", "without_tiers_no_group_is_made_or_named"],
    ),
    Row::new("cgroupDriver", Kind::Word(&["", "cgroupfs", "systemd"]), "cgroupfs")
        .kubelet_flag("cgroup-driver")
        .honoured(
            &[PodSync],
            "who makes cgroups, where the runtime does not tell",
            &["fields_of_images_arrive", "a_pods_group_is_named_as_the_driver_wants_it"],
        ),
    Row::new("cpuManagerPolicy", Kind::Word(&["", "none", "static"]), "none")
        .kubelet_flag("cpu-manager-policy")
        .not_yet(PodSync, Some("none")),
    Row::new("cpuManagerPolicyOptions", Kind::Map(Keys::Any, &Kind::Text), "")
        .kubelet_flag("cpu-manager-policy-options")
        .not_yet(PodSync, None),
    Row::new("cpuManagerReconcilePeriod", DURATION, "10s")
        .kubelet_flag("cpu-manager-reconcile-period")
        .not_yet(PodSync, None),
    Row::new("memoryManagerPolicy", Kind::Word(&["", "None", "Static"]), "None")
        .kubelet_flag("memory-manager-policy")
        .not_yet(PodSync, Some("None")),
    Row::new(
        "topologyManagerPolicy",
        Kind::Word(&["", "none", "best-effort", "restricted", "single-numa-node"]),
        "none",
    )
    .kubelet_flag("topology-manager-policy")
    .not_yet(PodSync, Some("none")),
    Row::new("topologyManagerScope", Kind::Word(&["", "container", "pod"]), "container")
        .kubelet_flag("topology-manager-scope")
        .not_yet(PodSync, None),
    Row::new("topologyManagerPolicyOptions", Kind::Map(Keys::Any, &Kind::Text), "")
        .kubelet_flag("topology-manager-policy-options")
        .not_yet(PodSync, None),
    Row::new("qosReserved", Kind::Map(Keys::Of(&["memory"], "cannot be reserved"), &Kind::Checked(kind::percentage)), "")
        .kubelet_flag("qos-reserved")
        .not_yet(PodSync, None),
    Row::new("runtimeRequestTimeout", DURATION, "2m").kubelet_flag("runtime-request-timeout").honoured(
        &[CriProxy, Pleg, PodSync],
        "when a call to the runtime is given up; pulls, execs and attaches have no such limit",
        &[
            "a_call_is_given_up_when_the_configuration_says",
            "a_slow_list_is_waited_for_as_long_as_the_configuration_says",
            "the_file_names_the_runtime",
        ],
    ),
    Row::new("hairpinMode", Kind::Word(&["", "promiscuous-bridge", "hairpin-veth", "none"]), "promiscuous-bridge")
        .kubelet_flag("hairpin-mode")
        .ignored(PodSync, "the network plugin decides; the kubelet does not use it either"),
    Row::new("maxPods", COUNT, "110").kubelet_flag("max-pods").honoured(
        &[PodSync],
        "pods the node takes",
        &["pods_are_as_many_as_the_node_and_its_cores_take"],
    ),
    Row::new("podCIDR", Kind::Text, "").kubelet_flag("pod-cidr").honoured(
        &[PodSync],
        "addresses of the pods of a node without an API server, told to the runtime; with one the Node's podCIDRs are",
        &["fields_of_the_node_arrive", "the_runtime_is_told_the_addresses_of_the_pods"],
    ),
    Row::new("podPidsLimit", Kind::Int(-1, I64), "-1").kubelet_flag("pod-max-pids").zero_counts().honoured(
        &[PodSync],
        "processes in a pod; -1 and 0: no limit",
        &["fields_of_cgroups_arrive", "a_pods_group_lives_from_first_use_to_the_last_process"],
    ),
    Row::new("resolvConf", Kind::Path, "/etc/resolv.conf").kubelet_flag("resolv-conf").zero_counts().honoured(
        &[PodSync],
        "resolv.conf of pods with DNS policy Default; empty: none",
        &["fields_of_dns_arrive", "the_policy_selects_cluster_host_or_nothing"],
    ),
    Row::new("cpuCFSQuota", Kind::Bool, "true").kubelet_flag("cpu-cfs-quota").honoured(
        &[PodSync],
        "CPU limits are enforced",
        &["fields_of_cgroups_arrive", "a_burstable_pod_is_limited_only_if_every_container_is"],
    ),
    Row::new("cpuCFSQuotaPeriod", Kind::Duration(1_000_000, SECOND), "100ms")
        .kubelet_flag("cpu-cfs-quota-period")
        .honoured(&[PodSync], "period of CPU limits", &["fields_of_cgroups_arrive", "a_burstable_pod_is_limited_only_if_every_container_is"]),
    Row::new("nodeStatusMaxImages", Kind::Int(-1, i32::MAX as i64), "50")
        .kubelet_flag("node-status-max-images")
        .zero_counts()
        .honoured(&[PodSync], "images that the Node names", &["images_of_the_node_arrive", "the_largest_images_are_told_with_five_names"]),
    Row::new("maxOpenFiles", Kind::Int(0, I64), "1000000").kubelet_flag("max-open-files").not_yet(PodSync, None),
    Row::new("contentType", Kind::Text, "application/vnd.kubernetes.protobuf")
        .kubelet_flag("kube-api-content-type")
        .ignored(StatusReporter, "the API server is spoken to in JSON"),
    Row::new("kubeAPIQPS", COUNT, "").kubelet_flag("kube-api-qps").zero_counts().honoured(
        &[StatusReporter],
        "writes of pods to the API server per second; without it, and with 0, no limit",
        &["writes_of_pods_keep_to_a_rate_that_is_set"],
    ),
    Row::new("kubeAPIBurst", COUNT, "").kubelet_flag("kube-api-burst").honoured(
        &[StatusReporter],
        "writes of pods at once before that limit counts; without it 100",
        &["writes_of_pods_keep_to_a_rate_that_is_set"],
    ),
    Row::new("serializeImagePulls", Kind::Bool, "").kubelet_flag("serialize-image-pulls").honoured(
        &[PodSync],
        "true: one pull at a time, false: no limit of its own; not set: 8 in all and 4 from one registry",
        &["fields_of_images_arrive", "pulls_are_as_many_as_the_settings_allow"],
    ),
    Row::new("maxParallelImagePulls", Kind::Int(1, i32::MAX as i64), "").own_flag("max-parallel-image-pulls").honoured(
        &[PodSync],
        "pulls at once, whatever the registry",
        &["fields_of_images_arrive", "pulls_are_as_many_as_the_settings_allow"],
    ),
    Row::new(
        "evictionHard",
        THRESHOLDS,
        "{memory.available: 100Mi, nodefs.available: 10%, nodefs.inodesFree: 5%, imagefs.available: 15%, imagefs.inodesFree: 5%}",
    )
    .kubelet_flag("eviction-hard")
    .honoured(
        &[PodSync],
        "memory.available and nodefs.available are kept back from allocatable; nothing is evicted yet, of which a warning tells",
        &["what_hard_eviction_keeps_free_is_not_allocatable"],
    ),
    Row::new("evictionSoft", THRESHOLDS, "").kubelet_flag("eviction-soft").not_yet(PodSync, None),
    Row::new("evictionSoftGracePeriod", Kind::Map(SIGNALS, &DURATION), "")
        .kubelet_flag("eviction-soft-grace-period")
        .not_yet(PodSync, None),
    Row::new("evictionMinimumReclaim", THRESHOLDS, "")
        .kubelet_flag("eviction-minimum-reclaim")
        .not_yet(PodSync, None),
    Row::new("evictionPressureTransitionPeriod", DURATION, "5m")
        .kubelet_flag("eviction-pressure-transition-period")
        .not_yet(PodSync, None),
    Row::new("evictionMaxPodGracePeriod", Kind::Int(i32::MIN as i64, i32::MAX as i64), "0")
        .kubelet_flag("eviction-max-pod-grace-period")
        .not_yet(PodSync, None),
    Row::new("mergeDefaultEvictionSettings", Kind::Bool, "false").not_yet(PodSync, None),
    Row::new("kernelMemcgNotification", Kind::Bool, "false")
        .kubelet_flag("kernel-memcg-notification")
        .not_yet(PodSync, Some("false")),
    Row::new("enableControllerAttachDetach", Kind::Bool, "true")
        .kubelet_flag("enable-controller-attach-detach")
        .not_yet(PodSync, Some("true")),
    Row::new("protectKernelDefaults", Kind::Bool, "false")
        .kubelet_flag("protect-kernel-defaults")
        .not_yet(PodSync, None),
    Row::new("makeIPTablesUtilChains", Kind::Bool, "true")
        .kubelet_flag("make-iptables-util-chains")
        .not_yet(PodSync, Some("false")),
    Row::new("iptablesMasqueradeBit", Kind::Int(0, 31), "14")
        .kubelet_flag("iptables-masquerade-bit")
        .zero_counts()
        .ignored(PodSync, "the kubelet no longer marks packets either"),
    Row::new("iptablesDropBit", Kind::Int(0, 31), "15")
        .kubelet_flag("iptables-drop-bit")
        .zero_counts()
        .ignored(PodSync, "the kubelet no longer marks packets either"),
    Row::new("featureGates", Kind::Map(Keys::Any, &Kind::Bool), "").kubelet_flag("feature-gates").honoured(
        &[PodSync, NodeApi],
        "ContainerCheckpoint, KubeletCrashLoopBackOffMax, PodLogsQuerySplitStreams; every other gate is fixed, and a value that differs is warned of",
        &["a_gate_turns_the_maximum_of_the_back_off_off", "with_its_gate_a_log_is_read_stream_by_stream", "without_its_gate_there_is_no_checkpoint"],
    ),
    Row::new("failSwapOn", Kind::Bool, "true").kubelet_flag("fail-swap-on").not_yet(PodSync, Some("false")),
    Row::new("memorySwap.swapBehavior", Kind::Word(&["", "NoSwap", "LimitedSwap"]), "NoSwap")
        .own_flag("memory-swap-behavior")
        .honoured(
            &[PodSync],
            "with LimitedSwap, Burstable pods get a share of the machine's swap (cgroup v2)",
            &["swap_is_for_nobody_unless_limited_swap_is_set"],
        ),
    Row::new("containerLogMaxSize", Kind::Checked(kind::signed_quantity), "10Mi")
        .kubelet_flag("container-log-max-size")
        .honoured(
            &[PodSync],
            "size from which a container's log is rotated; negative: never",
            &["a_log_is_rotated_once_it_is_too_large_and_made_where_it_is_missing"],
        ),
    Row::new("containerLogMaxFiles", Kind::Int(2, i32::MAX as i64), "5")
        .kubelet_flag("container-log-max-files")
        .honoured(
            &[PodSync],
            "files of one container's log, the one that is written to included",
            &["a_follower_gets_every_line_once_while_the_log_is_rotated_and_compressed"],
        ),
    Row::new("containerLogMaxWorkers", Kind::Int(1, i32::MAX as i64), "1")
        .own_flag("container-log-max-workers")
        .honoured(&[PodSync], "logs that are rotated at once", &["no_more_logs_are_rotated_at_once_than_there_are_workers"]),
    Row::new("containerLogMonitorInterval", Kind::Duration(3 * SECOND, I64), "10s")
        .own_flag("container-log-monitor-interval")
        .honoured(
            &[PodSync],
            "how often logs are looked at",
            &["a_follower_gets_every_line_once_while_the_log_is_rotated_and_compressed"],
        ),
    Row::new("configMapAndSecretChangeDetectionStrategy", Kind::Word(&["", "Get", "Cache", "Watch"]), "Watch")
        .not_yet(PodSync, None),
    Row::new("systemReserved", RESERVED, "").kubelet_flag("system-reserved").honoured(
        &[PodSync],
        "kept back from allocatable, and from the pods' cgroup where enforceNodeAllocatable has pods",
        &["what_is_reserved_is_kept_from_pods"],
    ),
    Row::new("kubeReserved", RESERVED, "").kubelet_flag("kube-reserved").honoured(
        &[PodSync],
        "as systemReserved",
        &["what_is_reserved_is_kept_from_pods"],
    ),
    Row::new("reservedSystemCPUs", Kind::Text, "").kubelet_flag("reserved-cpus").not_yet(PodSync, None),
    Row::new("systemReservedCgroup", Kind::Text, "").kubelet_flag("system-reserved-cgroup").not_yet(PodSync, None),
    Row::new("kubeReservedCgroup", Kind::Text, "").kubelet_flag("kube-reserved-cgroup").not_yet(PodSync, None),
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
        "pods: the cgroup of all pods is limited to what is not reserved (the other words have no effect yet)",
        &["what_is_reserved_is_kept_from_pods"],
    ),
    Row::new("allowedUnsafeSysctls", TEXTS, "").kubelet_flag("allowed-unsafe-sysctls").honoured(
        &[PodSync],
        "sysctls, or patterns of them, that pods may set besides the safe ones",
        &["an_unsafe_sysctl_is_admitted_where_it_is_allowed"],
    ),
    Row::new("shutdownGracePeriod", DURATION, "0s").own_flag("shutdown-grace-period").honoured(
        &[PodSync],
        "how long a shutdown of the machine waits for pods; 0s: it does not",
        &["fields_of_the_shutdown_arrive", "a_shutdown_waits_until_pods_have_ended_by_their_priority"],
    ),
    Row::new("shutdownGracePeriodCriticalPods", DURATION, "0s")
        .own_flag("shutdown-grace-period-critical-pods")
        .honoured(
            &[PodSync],
            "how much of that is for critical pods, which end last",
            &["fields_of_the_shutdown_arrive", "a_shutdown_waits_until_pods_have_ended_by_their_priority"],
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
        "how long pods from a priority on are waited for, the lowest first",
        &["fields_of_the_shutdown_arrive", "pods_end_by_priority_each_with_its_share"],
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
    .not_yet(PodSync, None),
    Row::new("enableProfilingHandler", Kind::Bool, "true").ignored(NodeApi, "profiles Go; /debug/pprof answers 405"),
    Row::new("enableDebugFlagsHandler", Kind::Bool, "true").ignored(NodeApi, "sets the verbosity of Go's logger; /debug/flags answers 405"),
    Row::new("enableSystemLogHandler", Kind::Bool, "true").own_flag("enable-system-log-handler").honoured(&[NodeApi], "false: /logs/ answers 405", &["fields_of_the_node_api_arrive", "handlers_that_are_off_answer_405"]),
    Row::new("enableSystemLogQuery", Kind::Bool, "false").own_flag("enable-system-log-query").honoured(
        &[NodeApi],
        "/logs/?query= reads the journal of services and log files, as far as the node API's user may",
        &["a_query_reads_files_and_the_journal_of_services", "what_a_query_may_not_ask_is_said"],
    ),
    Row::new("seccompDefault", Kind::Bool, "false").kubelet_flag("seccomp-default").honoured(
        &[PodSync],
        "containers without a seccomp profile get RuntimeDefault",
        &["fields_of_security_arrive", "profiles_come_from_container_then_annotation_then_pod"],
    ),
    Row::new("memoryThrottlingFactor", Kind::Number(0.0, 1.0), "0.9").not_yet(PodSync, None),
    Row::new("memoryReservationPolicy", Kind::Word(&["", "None", "TieredReservation"]), "None")
        .not_yet(PodSync, Some("None")),
    Row::new("registerWithTaints", TAINTS, "").kubelet_flag("register-with-taints").honoured(
        &[StatusReporter],
        "taints of a Node that is registered",
        &["a_node_is_registered_with_what_the_configuration_says"],
    ),
    Row::new("registerNode", Kind::Bool, "true").kubelet_flag("register-node").honoured(
        &[StatusReporter],
        "the Node object is made if it is not there",
        &["without_registration_the_node_is_waited_for"],
    ),
    Row::new("localStorageCapacityIsolation", Kind::Bool, "true")
        .kubelet_flag("local-storage-capacity-isolation")
        .not_yet(PodSync, None),
    Row::new("containerRuntimeEndpoint", Kind::Checked(kind::unix_endpoint), "unix:///run/containerd/containerd.sock")
        .kubelet_flag("container-runtime-endpoint")
        .own_flag("runtime-endpoint")
        .honoured(&[CriProxy], "the runtime's socket", &["the_file_names_the_runtime"]),
    Row::new("imageServiceEndpoint", Kind::Checked(kind::unix_endpoint), "")
        .kubelet_flag("image-service-endpoint")
        .honoured(
            &[CriProxy],
            "socket of the image service where that is another one",
            &["images_may_have_a_socket_of_their_own", "the_file_names_the_runtime"],
        ),
    Row::new("failCgroupV1", Kind::Bool, "true").not_yet(PodSync, Some("false")),
    Row::new("singleProcessOOMKill", Kind::Bool, "").own_flag("single-process-oom-kill").honoured(
        &[PodSync],
        "whether the kernel kills one process of a container or all; without it one with cgroup v1, all with v2",
        &["fields_of_security_arrive", "the_unified_hierarchy_gets_group_kill_and_swap"],
    ),
    Row::new("crashLoopBackOff.maxContainerRestartPeriod", Kind::Duration(SECOND, 300 * SECOND), "5m")
        .own_flag("max-container-restart-period")
        .honoured(
            &[PodSync],
            "longest delay before a container that keeps ending is started again",
            &["a_short_maximum_caps_the_first_delay_too", "fields_of_sources_arrive"],
        ),
    Row::new("podLogsDir", Kind::Checked(kind::clean_path), "/var/log/pods").own_flag("pod-logs-dir").honoured(
        &[CriProxy, NodeApi, PodSync],
        "directory of the pods' logs",
        &["fields_of_the_node_arrive", "fields_of_the_node_api_arrive", "names_follow_the_kubelets_layout"],
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
        "which images that are there already are used only with credentials that opened them, or after another pull",
        &["fields_of_images_arrive", "an_image_is_for_those_whose_credentials_opened_it"],
    ),
    Row::new("preloadedImagesVerificationAllowlist", TEXTS, "")
        .own_flag("preloaded-images-verification-allowlist")
        .honoured(
            &[PodSync],
            "images that NeverVerifyAllowlistedImages lets every pod use",
            &["fields_of_images_arrive", "an_image_is_for_those_whose_credentials_opened_it"],
        ),
    Row::new("userNamespaces.idsPerPod", Kind::Int(65536, u32::MAX as i64), "65536")
        .own_flag("ids-per-pod")
        .honoured(
            &[PodSync],
            "ids of a pod with a user namespace of its own, a multiple of 65536",
            &["a_pod_has_as_many_ids_as_are_set_and_one_of_another_setting_keeps_those_it_has"],
        ),
    Row::new("podsPerCore", COUNT, "0").kubelet_flag("pods-per-core").honoured(
        &[PodSync],
        "pods per core, up to maxPods; 0: maxPods alone",
        &["pods_are_as_many_as_the_node_and_its_cores_take"],
    ),
    Row::new("logging.format", Kind::Word(&["", "text", "json"]), "text")
        .kubelet_flag("logging-format")
        .own_flag("log-format")
        .honoured(ALL, "form of the log lines", &["a_file_alone_is_enough_to_run_all_five"]),
    Row::new("logging.verbosity", Kind::Int(0, u32::MAX as i64), "0").honoured(
        ALL,
        "0 to 3: info, 4 and 5: debug, more: trace; logFilter wins",
        &["verbosity_sets_the_log_filter_unless_that_is_set"],
    ),
    Row::new("logging.flushFrequency", Kind::DurationOrNanos, "5s")
        .kubelet_flag("log-flush-frequency")
        .ignored(PodSync, "every log line is written at once"),
    Row::new(
        "logging.vmodule",
        Kind::Objects(&[("filePattern", Kind::Text, true), ("verbosity", Kind::Int(0, u32::MAX as i64), true)]),
        "",
    )
    .kubelet_flag("vmodule")
    .ignored(PodSync, "names files of Go; logFilter in the Quintlet document selects by service"),
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
    Row::new("tracing.endpoint", Kind::Checked(kind::collector), "").own_flag("otlp-endpoint").honoured(
        ALL,
        "OTLP/gRPC endpoint of traces, host:port or a URL; without it spans stay in memory",
        &["fields_of_telemetry_arrive", "a_pod_of_the_api_server_comes_in_one_trace_and_goes_in_another"],
    ),
    Row::new("tracing.samplingRatePerMillion", Kind::Int(0, 1_000_000), "")
        .not_yet(PodSync, Some("1000000")),
    Row::new("runOnce", Kind::Bool, "false")
        .kubelet_flag("runonce")
        .refused("unsupported: the kubelet has given it up, and `quintctl up --once` is for tests"),
];
