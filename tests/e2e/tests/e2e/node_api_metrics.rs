//! Tests the metrics that other tools, the chart's dashboard and its alerts rely on, on a real runtime,
//! through the API server's proxy.

use quintlet_e2e::mixin;
use quintlet_e2e::monitoring::{Scrape, queries};
use quintlet_e2e::otlp::Receiver;
use quintlet_e2e::{LONG, NODE, Node, Options, pods, until};
use serde_json::json;

/// A required sample: name, labels in any order, and least value.
type Wanted = (&'static str, &'static [&'static str], f64);

const WANTED: &[Wanted] = &[
    ("kubelet_node_name", &["node=\"e2e-node\""], 1.0),
    ("kubernetes_build_info", &["minor=\"37\""], 1.0),
    ("kubelet_running_pods", &[], 2.0),
    ("kubelet_running_containers", &["container_state=\"running\""], 1.0),
    ("kubelet_running_containers", &["container_state=\"exited\""], 1.0),
    ("kubelet_pod_start_duration_seconds_count", &[], 1.0),
    ("kubelet_pod_start_duration_seconds_bucket", &["le=\"3600\""], 1.0),
    ("kubelet_pod_worker_duration_seconds_count", &["operation_type=\"create\""], 2.0),
    ("kubelet_pod_worker_duration_seconds_count", &["operation_type=\"sync\""], 1.0),
    ("kubelet_pod_worker_duration_seconds_count", &["operation_type=\"kill\""], 1.0),
    ("kubelet_pleg_relist_duration_seconds_count", &[], 1.0),
    ("kubelet_pleg_last_seen_seconds", &[], 1e9),
    ("kubelet_runtime_operations_total", &["operation_type=\"run_podsandbox\""], 3.0),
    ("kubelet_runtime_operations_total", &["operation_type=\"create_container\""], 2.0),
    ("kubelet_runtime_operations_total", &["operation_type=\"start_container\""], 2.0),
    ("kubelet_runtime_operations_total", &["operation_type=\"list_podsandbox\""], 1.0),
    ("kubelet_runtime_operations_total", &["operation_type=\"status\""], 1.0),
    ("kubelet_runtime_operations_duration_seconds_count", &["operation_type=\"run_podsandbox\""], 3.0),
    (
        "kubelet_runtime_operations_duration_seconds_bucket",
        &["le=\"0.005\"", "operation_type=\"status\""],
        0.0,
    ),
    ("kubelet_runtime_operations_errors_total", &["operation_type=\"pull_image\""], 1.0),
    ("kubelet_started_pods_total", &[], 3.0),
    ("kubelet_started_containers_total", &["container_type=\"init_container\""], 1.0),
    ("kubelet_started_containers_total", &["container_type=\"container\""], 2.0),
    (
        "kubelet_started_containers_errors_total",
        &["container_type=\"container\"", "code=\"ErrImagePull\""],
        1.0,
    ),
    (
        "kubelet_terminated_containers_total",
        &["container_type=\"container\"", "exit_code=\"3\"", "reason=\"Error\""],
        1.0,
    ),
    (
        "kubelet_terminated_containers_total",
        &["container_type=\"init_container\"", "exit_code=\"0\"", "reason=\"Completed\""],
        1.0,
    ),
    ("kubelet_pod_status_sync_duration_seconds_count", &[], 1.0),
    ("kubelet_http_requests_total", &[], 1.0),
    (
        "volume_manager_total_volumes",
        &["plugin_name=\"kubernetes.io/empty-dir\"", "state=\"desired_state_of_world\""],
        1.0,
    ),
    (
        "volume_manager_total_volumes",
        &["plugin_name=\"kubernetes.io/empty-dir\"", "state=\"actual_state_of_world\""],
        1.0,
    ),
    (
        "storage_operation_duration_seconds_count",
        &[
            "operation_name=\"volume_mount\"",
            "status=\"success\"",
            "volume_plugin=\"kubernetes.io/empty-dir\"",
            "migrated=\"false\"",
        ],
        1.0,
    ),
];

async fn page(node: &Node, path: &str) -> Result<String, String> {
    let address = node.api().url().replace("http://", "");
    let (host, port) = address.rsplit_once(':').unwrap();
    let path = format!("/api/v1/nodes/{NODE}/proxy{path}");
    quintlet_e2e::page(host, port.parse().unwrap(), &path).await.map_err(|e| e.to_string())
}

fn has(text: &str, (name, labels, least): &Wanted) -> bool {
    text.lines().any(|line| {
        let Some((series, value)) = line.rsplit_once(' ') else { return false };
        series.split('{').next() == Some(*name)
            && labels.iter().all(|label| series.contains(label))
            && value.parse::<f64>().is_ok_and(|value| value >= *least)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_names_and_labels_that_other_tools_the_dashboard_and_the_alerts_use() {
    // Metrics of traces, subscribers and the offline cache exist where these are on.
    let receiver = Receiver::start().await;
    let extra = vec![
        ("pleg-service", "--subscriber-uid=65500".to_owned()),
        ("pod-sync", "--offline-cache".to_owned()),
    ];
    let options = Options {
        node_api: true,
        otlp_endpoint: Some(receiver.endpoint().to_owned()),
        extra,
        ..Options::with_api("node-api-metrics")
    };
    let node = Node::start(options).await;
    let api = node.api();

    let mut runs = pods::probed("runs");
    let mut init = pods::script("unused", "true")["spec"]["containers"][0].clone();
    init["name"] = json!("init");
    runs["spec"]["initContainers"] = json!([init]);
    api.create_pod(pods::bound(runs));
    let mut ends = pods::script("ends", "exit 3");
    ends["spec"]["restartPolicy"] = json!("Never");
    api.create_pod(pods::bound(ends));
    let mut waits = pods::sleeper("waits");
    // No server listens at this address.
    waits["spec"]["containers"][0]["image"] = json!("127.0.0.1:1/none:1");
    waits["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    api.create_pod(pods::bound(waits));
    let mut limited = pods::sleeper("limited");
    limited["spec"]["containers"][0]["resources"] = json!({"limits": {"cpu": "500m", "memory": "64Mi"}});
    api.create_pod(pods::bound(limited));
    node.wait_ready("runs").await;
    node.wait_ready("limited").await;

    until("the kubelet's metrics", LONG, async || {
        let text = page(&node, "/metrics").await?;
        let missing: Vec<&Wanted> = WANTED.iter().filter(|wanted| !has(&text, wanted)).collect();
        if missing.is_empty() { Ok(()) } else { Err(format!("{missing:?}\n{text}")) }
    })
    .await;

    let mut queries = queries();
    assert!(queries.len() > 100, "{} expressions", queries.len());
    queries.extend(mixin::queries());
    until("the metrics of the dashboard, of the alerts and of kubernetes-mixin", LONG, async || {
        let mut scrape = Scrape::default();
        for path in ["/metrics", "/metrics/cadvisor"] {
            scrape.add(&page(&node, path).await?);
        }
        let missing: Vec<String> = queries.iter().flat_map(|query| scrape.missing(query)).collect();
        if missing.is_empty() { Ok(()) } else { Err(missing.join("\n")) }
    })
    .await;
    node.down().await;
}
