//! Fields of QuintletConfiguration: settings that are flags only in the kubelet, and settings of Quintlet
//! itself.

use super::Row;
use super::Service::{CriProxy, NodeApi, Pleg, PodSync, Probe, StatusReporter};
use crate::checks;
use crate::kind::{COUNT, Keys, Kind};

const POSITIVE: Kind = Kind::Duration(1_000_000, i64::MAX);
const ALL: &[super::Service] = &super::Service::ALL;
/// Services that publish something for programs that are not part of Quintlet.
const SUBSCRIBABLE: &[super::Service] = &[Pleg, PodSync, Probe];

/// The same, and the service that passes it on over TCP.
const RELAYED: &[super::Service] = &[NodeApi, Pleg, PodSync, Probe];

/// All fields of QuintletConfiguration.
pub const QUINTLET: &[Row] = &[
    Row::new("runDir", Kind::Path, "/run/quintlet").own_flag("run-dir").honoured(
        ALL,
        "directory of sockets and of state that lasts until the next boot"
    ),
    Row::new("rootDir", Kind::Path, "/var/lib/kubelet").kubelet_flag("root-dir").honoured(
        &[NodeApi, PodSync],
        "directory of pods, volumes and checkpoints"
    ),
    Row::new("kubeconfig", Kind::Path, "").kubelet_flag("kubeconfig").honoured(
        &[NodeApi, PodSync, StatusReporter],
        "credentials for the API server; not set: the node is standalone"
    ),
    Row::new("nodeName", Kind::Text, "").kubelet_flag("hostname-override").own_flag("node-name").honoured(
        &[NodeApi, PodSync, StatusReporter],
        "name of the node; not set: the host name in lower case"
    ),
    Row::new("certDir", Kind::Path, "/var/lib/kubelet/pki").kubelet_flag("cert-dir").honoured(
        &[NodeApi, PodSync],
        "directory of the certificates that pod-sync requests, and of the self-signed serving certificate, which is in /var/lib/quintlet/pki in the place of a kubelet"
    ),
    Row::new("nodeIPs", Kind::List(&Kind::Checked(checks::address)), "").kubelet_flag("node-ip").honoured(
        &[PodSync, StatusReporter],
        "addresses of the node; with an external cloud provider, also an annotation of the Node"
    ),
    Row::new("nodeLabels", Kind::Map(Keys::Any, &Kind::Text), "")
        .kubelet_flag("node-labels")
        .own_flag("node-label")
        .honoured(
            &[PodSync, StatusReporter],
            "labels of the Node at its registration; an existing Node keeps its labels"
        ),
    Row::new("runtimeCgroups", Kind::Text, "").kubelet_flag("runtime-cgroups").honoured(
        &[NodeApi],
        "cgroup of the runtime, of which /stats/summary has statistics; the runtime is not moved"
    ),
    Row::new("setKernelTunables", Kind::Bool, "").own_flag("set-kernel-tunables").honoured(
        &[PodSync],
        "kernel tunables that pods rely on are set at the start; not set: true with a KubeletConfiguration, false without"
    ),
    Row::new("containerLogsDir", Kind::Text, "/var/log/containers")
        .own_flag("container-logs-dir")
        .zero_counts()
        .honoured(
            &[PodSync],
            "directory of links to containers' logs, for log collectors; empty: no links"
        ),
    Row::new("containerdNamespace", Kind::Text, "k8s.io").own_flag("containerd-namespace").honoured(
        &[CriProxy],
        "containerd namespace of pods"
    ),
    Row::new("allowUIDs", Kind::List(&Kind::Text), "").own_flag("allow-uid").honoured(
        &[CriProxy],
        "users that may connect to a socket of cri-proxy, in addition to root and its own user, as SOCKET=USER such as read=65530"
    ),
    Row::new("subscribers.uids", Kind::List(&Kind::Text), "").own_flag("subscriber-uid").honoured(
        SUBSCRIBABLE,
        "users, by name or number, that may subscribe to containers, probes and pods"
    ),
    Row::new("subscribers.gids", Kind::List(&Kind::Text), "").own_flag("subscriber-gid").honoured(
        SUBSCRIBABLE,
        "groups, by name or number, whose processes may subscribe"
    ),
    Row::new("subscribers.tls.listen", Kind::Checked(checks::listen), "").own_flag("subscriber-listen").honoured(
        RELAYED,
        "address and port at which node-api serves subscribers over TCP with mutual TLS; not set: none"
    ),
    Row::new("subscribers.tls.certFile", Kind::Path, "").own_flag("subscriber-cert-file").honoured(
        &[NodeApi],
        "serving certificate for subscribers with its chain, reloaded when it changes"
    ),
    Row::new("subscribers.tls.keyFile", Kind::Path, "").own_flag("subscriber-key-file").honoured(
        &[NodeApi],
        "private key of subscribers.tls.certFile, reloaded when it changes"
    ),
    Row::new("subscribers.tls.clientCAFile", Kind::Path, "").own_flag("subscriber-client-ca-file").honoured(
        &[NodeApi],
        "CA bundle that verifies the certificates of subscribers, reloaded when it changes"
    ),
    Row::new("subscribers.tls.names", Kind::List(&Kind::Text), "").own_flag("subscriber-name").honoured(
        &[NodeApi],
        "common names of the certificates of clients that may subscribe over TCP"
    ),
    Row::new("subSecondProbes.networkRate", COUNT, "2000").own_flag("sub-second-probe-rate").zero_counts().honoured(
        &[PodSync],
        "HTTP, TCP and gRPC attempts per second of all probes to which the annotation quintlet.dev/probe-period-ms applies; 0: pods have no such probes"
    ),
    Row::new("subSecondProbes.execRate", COUNT, "0").own_flag("sub-second-exec-probe-rate").honoured(
        &[PodSync],
        "the same for exec probes, whose attempts each start a process in the runtime"
    ),
    Row::new("offlineCache.enabled", Kind::Bool, "false").own_flag("offline-cache").honoured(
        &[PodSync],
        "admitted pods are kept on the disk with what they need, and start after a boot while the API server is away"
    ),
    Row::new("offlineCache.startAfter", POSITIVE, "20s").own_flag("offline-start-after").honoured(
        &[PodSync],
        "time without an answer of the API server after which pods start from the cache"
    ),
    Row::new("offlineCache.credential", Kind::Text, "").own_flag("offline-credential").honoured(
        &[PodSync],
        "key that encrypts the cache: the name of a systemd credential, or an absolute path; not set: not encrypted"
    ),
    Row::new("relistPeriod", POSITIVE, "1s").own_flag("relist-period").honoured(
        &[Pleg],
        "pause between full lists of the runtime without live hints"
    ),
    Row::new("relistPeriodLive", POSITIVE, "30s").own_flag("relist-period-live").honoured(
        &[Pleg],
        "pause between full lists with live hints"
    ),
    Row::new("relistThreshold", POSITIVE, "3m").own_flag("relist-threshold").honoured(
        &[Pleg],
        "age of the last successful list at which the node becomes not ready"
    ),
    Row::new("logFilter", Kind::Text, "info").own_flag("log-level").honoured(
        ALL,
        "tracing filter of log lines, such as info,pod_sync=debug; takes precedence over logging.verbosity"
    ),
    metrics("metricsListen.criProxy", &[CriProxy]),
    metrics("metricsListen.nodeApi", &[NodeApi]),
    metrics("metricsListen.plegService", &[Pleg]),
    metrics("metricsListen.probeService", &[Probe]),
    metrics("metricsListen.statusReporter", &[StatusReporter]),
    metrics("metricsListen.podSync", &[PodSync]),
];

const fn metrics(field: &'static str, services: &'static [super::Service]) -> Row {
    Row::new(field, Kind::Checked(checks::listen), "")
        .own_flag("metrics-listen")
        .honoured(services, "address for Prometheus metrics over HTTP at /metrics")
}
