//! What the rules and dashboards of kubernetes-mixin (commit aa38e2b, 2026-08) need of `/metrics` and
//! `/metrics/cadvisor`.
//!
//! Not in the table:
//! - what Quintlet does not have (docs/support.md): `rest_client_*`, `go_goroutines`
//! - what a node has that renews its certificates: `kubelet_certificate_manager_*`,
//!   `kubelet_server_expiration_renew_errors`
//! - what a kubelet 1.36 does not have: `kubelet_node_config_error`, `storage_operation_errors_total`
//! - `kubelet_volume_stats_*`, which needs a claim: `each_claim_appears_once_and_other_volumes_do_not` of
//!   node-api
//! - `container_fs_*`, which needs a kernel that counts I/O for containers: with cgroups v1, current kernels
//!   do so only where a limit is set. `devices_have_the_names_that_dashboards_select` of node-api

use std::collections::BTreeSet;

use crate::monitoring::Query;

/// A container of a pod, which has an image: the rules of recorded usage and all tables of containers select
/// it so.
const CONTAINER: &str = r#"{container=~".+",container!="POD",image=~".+",namespace=~".+",pod=~".+"}"#;
/// The network of a pod.
const NETWORK: &str = r#"{namespace=~".+",pod=~".+"}"#;

/// A family, a selector of series that a rule or panel must find, and labels by which one aggregates.
type Row = (&'static str, &'static str, &'static [&'static str]);

const ROWS: [Row; 41] = [
    ("container_cpu_usage_seconds_total", CONTAINER, &[]),
    ("container_cpu_cfs_periods_total", CONTAINER, &[]),
    ("container_cpu_cfs_throttled_periods_total", CONTAINER, &[]),
    ("container_memory_working_set_bytes", CONTAINER, &[]),
    ("container_memory_rss", CONTAINER, &[]),
    ("container_memory_cache", CONTAINER, &[]),
    ("container_memory_swap", CONTAINER, &[]),
    ("container_memory_usage_bytes", CONTAINER, &[]),
    ("container_network_receive_bytes_total", NETWORK, &[]),
    ("container_network_receive_packets_total", NETWORK, &[]),
    ("container_network_receive_packets_dropped_total", NETWORK, &[]),
    ("container_network_transmit_bytes_total", NETWORK, &[]),
    ("container_network_transmit_packets_total", NETWORK, &[]),
    ("container_network_transmit_packets_dropped_total", NETWORK, &[]),
    ("kubelet_node_name", r#"{node=~".+"}"#, &[]),
    ("kubelet_running_pods", "", &[]),
    ("kubelet_running_containers", r#"{container_state="running"}"#, &[]),
    ("volume_manager_total_volumes", r#"{state="actual_state_of_world"}"#, &["plugin_name"]),
    ("volume_manager_total_volumes", r#"{state="desired_state_of_world"}"#, &["plugin_name"]),
    ("kubelet_runtime_operations_total", "", &["operation_type"]),
    ("kubelet_runtime_operations_errors_total", "", &["operation_type"]),
    ("kubelet_runtime_operations_duration_seconds_bucket", "", &["operation_type", "le"]),
    ("kubelet_pod_start_duration_seconds_count", "", &[]),
    ("kubelet_pod_start_duration_seconds_bucket", "", &["le"]),
    ("kubelet_pod_worker_duration_seconds_count", "", &["operation_type"]),
    ("kubelet_pod_worker_duration_seconds_bucket", "", &["operation_type", "le"]),
    ("storage_operation_duration_seconds_count", "", &["operation_name", "volume_plugin"]),
    ("storage_operation_duration_seconds_bucket", "", &["operation_name", "volume_plugin", "le"]),
    ("kubelet_cgroup_manager_duration_seconds_count", "", &["operation_type"]),
    ("kubelet_cgroup_manager_duration_seconds_bucket", "", &["operation_type", "le"]),
    ("kubelet_pleg_relist_duration_seconds_count", "", &[]),
    ("kubelet_pleg_relist_duration_seconds_bucket", "", &["le"]),
    ("kubelet_pleg_relist_interval_seconds_bucket", "", &["le"]),
    ("kubelet_evictions", "", &["eviction_signal"]),
    ("process_resident_memory_bytes", "", &[]),
    ("process_cpu_seconds_total", "", &[]),
    // Rows of the node, of QoS classes and of sandboxes, which recorded sums per node exclude by `image!=""`.
    ("container_cpu_usage_seconds_total", r#"{id="/",container="",image=""}"#, &[]),
    ("container_memory_working_set_bytes", r#"{id="/",container="",image=""}"#, &[]),
    ("container_memory_rss", r#"{id="/",container="",image=""}"#, &[]),
    (
        "container_memory_working_set_bytes",
        r#"{id=~".*/besteffort|.*kubepods-besteffort.slice",image=""}"#,
        &[],
    ),
    ("machine_memory_bytes", "", &[]),
];

/// Returns a query for each row.
#[must_use]
pub fn queries() -> Vec<Query> {
    let query = |(family, selector, labels): &Row| Query {
        place: "kubernetes-mixin".to_owned(),
        expr: format!("sum by ({}) ({family}{selector})", labels.join(", ")),
        legend: BTreeSet::new(),
    };
    ROWS.iter().map(query).collect()
}
