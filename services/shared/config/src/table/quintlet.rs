//! Fields of QuintletConfiguration: settings that are flags only in the kubelet, and settings of Quintlet itself.

use super::Row;
use super::Service::{CriProxy, NodeApi, Pleg, PodSync, Probe, StatusReporter};
use crate::kind::{self, Keys, Kind};

const POSITIVE: Kind = Kind::Duration(1_000_000, i64::MAX);
const ALL: &[super::Service] = &super::Service::ALL;

/// All fields of QuintletConfiguration.
pub const QUINTLET: &[Row] = &[
    Row::new("runDir", Kind::Path, "/run/quintlet").own_flag("run-dir").honoured(
        ALL,
        "directory of the sockets and of state that lives until the next boot",
        &["a_file_alone_is_enough_to_run_all_five"],
    ),
    Row::new("rootDir", Kind::Path, "/var/lib/kubelet").kubelet_flag("root-dir").honoured(
        &[NodeApi, PodSync],
        "directory of pods, volumes and checkpoints",
        &["fields_of_the_node_arrive", "fields_of_the_node_api_arrive", "names_follow_the_kubelets_layout"],
    ),
    Row::new("kubeconfig", Kind::Path, "").kubelet_flag("kubeconfig").honoured(
        &[NodeApi, PodSync, StatusReporter],
        "credentials for the API server; without it the node is standalone",
        &[
            "fields_of_the_node_arrive",
            "fields_of_the_node_api_arrive",
            "what_the_file_says_arrives",
            "a_kubeconfig_may_come_after_the_start",
        ],
    ),
    Row::new("nodeName", Kind::Text, "").kubelet_flag("hostname-override").own_flag("node-name").honoured(
        &[NodeApi, PodSync, StatusReporter],
        "name of the node; without it the host's in lower case",
        &[
            "fields_of_the_node_arrive",
            "fields_of_the_node_api_arrive",
            "what_the_file_says_arrives",
            "the_node_is_registered_and_ready_soon_after_its_facts",
        ],
    ),
    Row::new("certDir", Kind::Path, "/var/lib/kubelet/pki").kubelet_flag("cert-dir").honoured(
        &[NodeApi],
        "where a self-signed serving certificate is kept",
        &["fields_of_the_node_api_arrive", "a_self_signed_certificate_is_made_once_and_names_its_host"],
    ),
    Row::new("nodeIPs", Kind::List(&Kind::Checked(kind::address)), "").kubelet_flag("node-ip").honoured(
        &[PodSync],
        "addresses of the node",
        &["fields_of_the_node_arrive", "the_nodes_addresses_are_chosen_as_the_kubelet_chooses_them"],
    ),
    Row::new("nodeLabels", Kind::Map(Keys::Any, &Kind::Text), "")
        .kubelet_flag("node-labels")
        .own_flag("node-label")
        .honoured(
            &[PodSync, StatusReporter],
            "labels of a Node that is registered; one that is there keeps its own",
            &[
                "fields_of_the_node_arrive",
                "a_node_is_registered_with_what_the_configuration_says",
                "a_node_gives_itself_labels_that_the_api_server_takes_from_it",
            ],
        ),
    Row::new("containerLogsDir", Kind::Text, "/var/log/containers")
        .own_flag("container-logs-dir")
        .zero_counts()
        .honoured(
            &[PodSync],
            "directory of links to containers' logs, for log collectors; empty: no links",
            &["fields_of_the_node_arrive", "links_are_kept_and_broken_ones_that_are_ours_are_collected"],
        ),
    Row::new("containerdNamespace", Kind::Text, "k8s.io").own_flag("containerd-namespace").honoured(
        &[CriProxy],
        "the containerd namespace pods run in",
        &["the_file_names_the_runtime"],
    ),
    Row::new("allowUIDs", Kind::List(&Kind::Text), "").own_flag("allow-uid").honoured(
        &[CriProxy],
        "users that may connect to a socket of cri-proxy, besides root and its own, as SOCKET=USER such as read=65530",
        &["the_file_names_the_runtime"],
    ),
    Row::new("relistPeriod", POSITIVE, "1s").own_flag("relist-period").honoured(
        &[Pleg],
        "pause between full lists of the runtime without live hints",
        &["periods_come_from_the_file"],
    ),
    Row::new("relistPeriodLive", POSITIVE, "30s").own_flag("relist-period-live").honoured(
        &[Pleg],
        "pause between full lists while the runtime's hints are live",
        &["periods_come_from_the_file"],
    ),
    Row::new("relistThreshold", POSITIVE, "3m").own_flag("relist-threshold").honoured(
        &[Pleg],
        "age of the last successful list that makes the node not ready",
        &["periods_come_from_the_file"],
    ),
    Row::new("logFilter", Kind::Text, "info").own_flag("log-level").honoured(
        ALL,
        "what is logged, as a tracing filter such as info,pod_sync=debug; wins over logging.verbosity",
        &["verbosity_sets_the_log_filter_unless_that_is_set"],
    ),
    metrics("metricsListen.criProxy", &[CriProxy]),
    metrics("metricsListen.nodeApi", &[NodeApi]),
    metrics("metricsListen.plegService", &[Pleg]),
    metrics("metricsListen.probeService", &[Probe]),
    metrics("metricsListen.statusReporter", &[StatusReporter]),
    metrics("metricsListen.podSync", &[PodSync]),
];

const fn metrics(field: &'static str, by: &'static [super::Service]) -> Row {
    Row::new(field, Kind::Checked(kind::listen), "").own_flag("metrics-listen").honoured(
        by,
        "address for Prometheus metrics over HTTP at /metrics",
        &["each_service_listens_where_its_own_field_says"],
    )
}
