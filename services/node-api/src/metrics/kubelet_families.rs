//! Compares the metrics of a kubelet with those of Quintlet.

use std::collections::BTreeSet;
use std::path::Path;

/// The families that a kubelet 1.37 registers on Linux (pkg/kubelet, pkg/volume/util,
/// pkg/credentialprovider/plugin).
const FAMILIES: [&str; 141] = [
    "csi_node_storage_health_status",
    "csi_operations_seconds",
    "dra_grpc_operations_duration_seconds",
    "dra_operations_duration_seconds",
    "dra_resource_claims_in_use",
    "force_cleaned_failed_volume_operation_errors_total",
    "force_cleaned_failed_volume_operations_total",
    "kubelet_active_pods",
    "kubelet_admission_rejections_total",
    "kubelet_certificate_manager_client_expiration_renew_errors",
    "kubelet_certificate_manager_client_ttl_seconds",
    "kubelet_certificate_manager_server_rotation_seconds",
    "kubelet_certificate_manager_server_ttl_seconds",
    "kubelet_cgroup_manager_duration_seconds",
    "kubelet_cgroup_version",
    "kubelet_container_aligned_compute_resources_count",
    "kubelet_container_aligned_compute_resources_failure_count",
    "kubelet_container_log_filesystem_used_bytes",
    "kubelet_container_requested_resizes_total",
    "kubelet_containers_per_pod_count",
    "kubelet_cpu_manager_allocation_per_numa",
    "kubelet_cpu_manager_exclusive_cpu_allocation_count",
    "kubelet_cpu_manager_pinning_errors_total",
    "kubelet_cpu_manager_pinning_requests_total",
    "kubelet_cpu_manager_shared_pool_size_millicores",
    "kubelet_credential_provider_config_info",
    "kubelet_credential_provider_plugin_duration",
    "kubelet_credential_provider_plugin_errors_total",
    "kubelet_cri_losing_support",
    "kubelet_desired_pods",
    "kubelet_device_plugin_alloc_duration_seconds",
    "kubelet_device_plugin_registration_total",
    "kubelet_evented_pleg_connection_error_count",
    "kubelet_evented_pleg_connection_latency_seconds",
    "kubelet_evented_pleg_connection_success_count",
    "kubelet_eviction_stats_age_seconds",
    "kubelet_evictions",
    "kubelet_first_network_pod_start_sli_duration_seconds",
    "kubelet_graceful_shutdown_end_time_seconds",
    "kubelet_graceful_shutdown_start_time_seconds",
    "kubelet_http_inflight_requests",
    "kubelet_http_requests_duration_seconds",
    "kubelet_http_requests_total",
    "kubelet_image_garbage_collected_total",
    "kubelet_image_manager_ensure_image_requests_total",
    "kubelet_image_pull_duration_seconds",
    "kubelet_image_volume_mounted_errors_total",
    "kubelet_image_volume_mounted_succeed_total",
    "kubelet_image_volume_requested_total",
    "kubelet_imagemanager_image_mustpull_checks_total",
    "kubelet_imagemanager_inmemory_pulledrecords_usage_percent",
    "kubelet_imagemanager_inmemory_pullintents_usage_percent",
    "kubelet_imagemanager_ondisk_pulledrecords",
    "kubelet_imagemanager_ondisk_pullintents",
    "kubelet_lifecycle_handler_http_fallbacks_total",
    "kubelet_managed_ephemeral_containers",
    "kubelet_memory_manager_pinning_errors_total",
    "kubelet_memory_manager_pinning_requests_total",
    "kubelet_memory_qos_node_memory_low_bytes",
    "kubelet_memory_qos_node_memory_min_bytes",
    "kubelet_metrics_provider",
    "kubelet_mirror_pods",
    "kubelet_node_name",
    "kubelet_node_startup_duration_seconds",
    "kubelet_node_startup_post_registration_duration_seconds",
    "kubelet_node_startup_pre_kubelet_duration_seconds",
    "kubelet_node_startup_pre_registration_duration_seconds",
    "kubelet_node_startup_registration_duration_seconds",
    "kubelet_orphan_pod_cleaned_volumes",
    "kubelet_orphan_pod_cleaned_volumes_errors",
    "kubelet_orphaned_runtime_pods_total",
    "kubelet_pleg_discard_events",
    "kubelet_pleg_last_seen_seconds",
    "kubelet_pleg_pod_relist_duration_seconds",
    "kubelet_pleg_relist_duration_seconds",
    "kubelet_pleg_relist_interval_seconds",
    "kubelet_pod_deferred_accepted_resizes_total",
    "kubelet_pod_deferred_resize_duration_seconds",
    "kubelet_pod_in_progress_resizes",
    "kubelet_pod_infeasible_resizes_total",
    "kubelet_pod_level_resources_admission_total",
    "kubelet_pod_pending_resizes",
    "kubelet_pod_resize_duration_milliseconds",
    "kubelet_pod_resources_endpoint_errors_get",
    "kubelet_pod_resources_endpoint_errors_get_allocatable",
    "kubelet_pod_resources_endpoint_errors_list",
    "kubelet_pod_resources_endpoint_requests_get",
    "kubelet_pod_resources_endpoint_requests_get_allocatable",
    "kubelet_pod_resources_endpoint_requests_list",
    "kubelet_pod_resources_endpoint_requests_total",
    "kubelet_pod_start_duration_seconds",
    "kubelet_pod_start_sli_duration_seconds",
    "kubelet_pod_start_total_duration_seconds",
    "kubelet_pod_status_sync_duration_seconds",
    "kubelet_pod_watch_events_dropped_total",
    "kubelet_pod_worker_duration_seconds",
    "kubelet_pod_worker_start_duration_seconds",
    "kubelet_podcertificate_states",
    "kubelet_preemptions",
    "kubelet_restarted_pods_total",
    "kubelet_run_podsandbox_duration_seconds",
    "kubelet_run_podsandbox_errors_total",
    "kubelet_running_containers",
    "kubelet_running_pods",
    "kubelet_runtime_operations_duration_seconds",
    "kubelet_runtime_operations_errors_total",
    "kubelet_runtime_operations_total",
    "kubelet_server_expiration_renew_errors",
    "kubelet_sleep_action_terminated_early_total",
    "kubelet_started_containers_errors_total",
    "kubelet_started_containers_total",
    "kubelet_started_host_process_containers_errors_total",
    "kubelet_started_host_process_containers_total",
    "kubelet_started_pods_errors_total",
    "kubelet_started_pods_total",
    "kubelet_started_user_namespaced_pods_errors_total",
    "kubelet_started_user_namespaced_pods_total",
    "kubelet_terminated_containers_total",
    "kubelet_topology_manager_admission_duration_ms",
    "kubelet_topology_manager_admission_errors_total",
    "kubelet_topology_manager_admission_requests_total",
    "kubelet_volume_metric_collection_duration_seconds",
    "kubelet_volume_stats_available_bytes",
    "kubelet_volume_stats_capacity_bytes",
    "kubelet_volume_stats_inodes",
    "kubelet_volume_stats_inodes_free",
    "kubelet_volume_stats_inodes_used",
    "kubelet_volume_stats_used_bytes",
    "kubelet_websocket_streaming_requests_total",
    "kubelet_working_pods",
    "plugin_manager_total_plugins",
    "prober_probe_duration_seconds",
    "prober_probe_total",
    "reconstruct_volume_operations_errors_total",
    "reconstruct_volume_operations_total",
    "resource_manager_allocation_errors_total",
    "resource_manager_allocations_total",
    "resource_manager_container_assignments",
    "storage_operation_duration_seconds",
    "volume_manager_total_volumes",
    "volume_operation_total_seconds",
];

fn sources(dir: &Path, all: &mut String) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("kubelet_families.rs") {
            all.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn each_family_of_a_kubelet_is_served_or_has_a_reason_in_the_documentation() {
    let services = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut code = String::new();
    sources(services, &mut code);
    let page = include_str!("../../../../docs/support.md");
    let (_, reasons) = page.split_once("\n### Metrics of the kubelet\n").unwrap();
    // The first column of the table.
    let reasons: Vec<&str> = reasons
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split_once(" | "))
        .map(|(families, _)| families)
        .collect();
    // String literals, and names in the text of a page.
    let types = code.split("# TYPE ").skip(1).filter_map(|text| text.split(' ').next());
    let names: BTreeSet<&str> = code.split('"').chain(types).collect();
    for family in FAMILIES {
        // OpenMetrics adds the suffix.
        let registered = family.strip_suffix("_total").unwrap_or(family);
        let is_served = [family, registered].iter().any(|name| names.contains(name));
        let has_reason = reasons.iter().any(|families| families.contains(&format!("`{family}`")));
        assert_ne!(is_served, has_reason, "{family}: served {is_served}, has a reason {has_reason}");
    }
}
