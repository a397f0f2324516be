//! Pages that scrapers read from a node with pods on a real runtime, through the API server's proxy.

use std::path::Path;

use futures::future::join_all;
use nix::sys::signal::Signal;
use quintlet_cri_api::v1::PodSandboxStatsRequest;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_e2e::{LONG, NODE, Node, Options, pods, until};
use serde_json::{Value, json};

async fn page(node: &Node, path: &str) -> Result<String, String> {
    let address = node.api().url().replace("http://", "");
    let (host, port) = address.rsplit_once(':').unwrap();
    let path = format!("/api/v1/nodes/{NODE}/proxy{path}");
    quintlet_e2e::page(host, port.parse().unwrap(), &path).await.map_err(|e| e.to_string())
}

/// Reads a page until it satisfies a condition.
async fn wait_page(node: &Node, path: &str, wanted: impl Fn(&str) -> bool) -> String {
    until(path, LONG, async || {
        let text = page(node, path).await?;
        if wanted(&text) { Ok(text) } else { Err(text) }
    })
    .await
}

async fn wait_json(node: &Node, path: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_default();
    parse(&wait_page(node, path, |text| wanted(&parse(text))).await)
}

/// Returns the value and the time in ms of the sample whose line begins with `name` and contains `within`.
fn sample(text: &str, name: &str, within: &str) -> Option<(f64, Option<i64>)> {
    let line = text.lines().find(|l| l.starts_with(name) && l.contains(within))?;
    let (_, rest) = line.rsplit_once('}').or_else(|| line.split_once(' '))?;
    let mut fields = rest.split_whitespace();
    Some((fields.next()?.parse().ok()?, fields.next().and_then(|t| t.parse().ok())))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn debug_pages_show_the_pods_and_all_services() {
    let node =
        Node::start(Options { node_api: true, sync_frequency: "7s", ..Options::with_api("node-api-pages") })
            .await;
    let api = node.api();
    // The API server reaches the node shortly after its start.
    let since = |text: &str| sample(text, "process_start_time_seconds", "");
    let started = since(&wait_page(&node, "/metrics/probes", |text| since(text).is_some()).await);
    assert!(started.is_some_and(|(v, _)| v > 1e9), "{started:?}");
    api.create_pod(pods::bound(pods::probed("web")));
    let web = node.wait_ready("web").await;

    let listed = wait_json(&node, "/pods", |list| list["items"][0]["metadata"]["name"] == "web").await;
    assert_eq!((&listed["kind"], &listed["apiVersion"]), (&json!("PodList"), &json!("v1")));
    assert_eq!(listed["items"][0]["metadata"]["uid"], web.uid());
    let running =
        wait_json(&node, "/runningpods/", |list| list["items"][0]["metadata"]["name"] == "web").await;
    assert_eq!(running["items"][0]["spec"]["containers"][0]["name"], "main", "{running}");

    let summary = wait_json(&node, "/stats/summary", |s| {
        let main = &s["pods"][0]["containers"][0];
        main["cpu"]["usageCoreNanoSeconds"].as_u64() > Some(0)
            && main["memory"]["workingSetBytes"].as_u64() > Some(0)
    })
    .await;
    assert_eq!(
        summary["pods"][0]["podRef"],
        json!({"name": "web", "namespace": "default", "uid": web.uid()})
    );
    assert_eq!((&summary["node"]["nodeName"], summary["pods"].as_array().unwrap().len()), (&json!(NODE), 1));
    assert!(summary["node"]["memory"]["workingSetBytes"].as_u64() > Some(1 << 20), "{summary}");
    let network = &summary["pods"][0]["network"];
    assert_eq!(network["name"], "eth0", "{summary}");
    assert!(network["rxBytes"].as_u64() > Some(0) && network["txBytes"].as_u64() > Some(0), "{network}");
    assert!(summary["pods"][0]["process_stats"]["process_count"].as_u64() > Some(0), "{summary}");
    let is_v1 = !std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    assert!(!is_v1 || !summary.to_string().contains("\"psi\""), "cgroups v1 count no pressure: {summary}");
    let light =
        wait_json(&node, "/stats/summary?only_cpu_and_memory=true", |s| s["pods"][0].is_object()).await;
    assert_eq!((&light["node"]["fs"], &light["pods"][0]["network"]), (&Value::Null, &Value::Null));

    let resource = wait_page(&node, "/metrics/resource", |text| {
        sample(text, "container_cpu_usage_seconds_total", "pod=\"web\"").is_some()
    })
    .await;
    let found = |name: &str, within: &str| {
        sample(&resource, name, within).unwrap_or_else(|| panic!("{name}\n{resource}"))
    };
    for name in ["container_cpu_usage_seconds_total", "container_memory_working_set_bytes"] {
        let (value, time) = found(name, "container=\"main\",namespace=\"default\",pod=\"web\"");
        assert!(value > 0.0 && time.is_some(), "{name} {value} {time:?}");
    }
    assert!(found("node_cpu_usage_seconds_total", "").1.is_some());
    let memory = std::fs::read_to_string("/sys/fs/cgroup/memory/memory.stat").unwrap_or_default();
    // With cgroups v1, swap is counted only if the kernel was started so.
    if !is_v1 || memory.contains("total_swap ") {
        for name in ["container_swap_usage_bytes", "pod_swap_usage_bytes", "node_swap_usage_bytes"] {
            assert!(found(name, "").1.is_some(), "{name}");
        }
    }
    assert_eq!(found("resource_scrape_error", "").0, 0.0);
    let (started, time) = found("container_start_time_seconds", "container=\"main\"");
    assert!(started > 1e9 && time.is_none(), "{started} {time:?}");

    let cadvisor = wait_page(&node, "/metrics/cadvisor", |text| {
        sample(text, "container_cpu_usage_seconds_total", "container=\"main\"").is_some()
    })
    .await;
    assert!(sample(&cadvisor, "machine_memory_bytes", "").is_some_and(|(v, _)| v > 0.0), "{cadvisor}");
    let of_web = "namespace=\"default\",pod=\"web\"";
    for (name, within) in [
        ("container_cpu_user_seconds_total", "container=\"main\""),
        ("container_last_seen", "container=\"main\""),
        ("container_memory_cache", "container=\"main\""),
        ("container_processes", "container=\"main\""),
        ("container_spec_cpu_shares", "container=\"main\""),
        ("container_threads", "container=\"main\""),
        ("container_processes", "container=\"\",id=\"/"),
        ("container_network_receive_packets_total", &format!("{of_web},interface=\"eth0\"")),
        ("container_cpu_usage_seconds_total", "container=\"\",id=\"/\""),
        ("container_memory_working_set_bytes", "container=\"\",id=\"/\""),
        ("container_ulimits_soft", "container=\"main\""),
    ] {
        let (_, time) =
            sample(&cadvisor, name, within).unwrap_or_else(|| panic!("{name} {within}\n{cadvisor}"));
        assert!(time.is_some(), "{name}");
    }

    let sandbox = cadvisor.lines().find(|line| {
        line.starts_with("container_memory_working_set_bytes{container=\"\",")
            && line.contains(of_web)
            && !line.contains("name=\"\"")
    });
    assert!(sandbox.is_some(), "the sandbox has a row: {cadvisor}");

    assert!(!is_v1 || !cadvisor.contains("\ncontainer_pressure_"), "{cadvisor}");

    wait_page(&node, "/metrics/probes", |text| {
        sample(text, "prober_probe_total", "pod=\"web\"").is_some_and(|(value, _)| value > 0.0)
    })
    .await;

    let services = ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync"];
    let up = |text: &str, service: &str, value: f64| {
        sample(text, "quintlet_service_up", &format!("service=\"{service}\""))
            .is_some_and(|(v, _)| v == value)
    };
    let merged = wait_page(&node, "/metrics", |text| services.iter().all(|s| up(text, s, 1.0))).await;
    assert_eq!(sample(&merged, "kubelet_node_name", NODE), Some((1.0, None)));
    let value = |name: &str, within: &str| {
        let found = sample(&merged, name, within).unwrap_or_else(|| panic!("{name} {within}\n{merged}"));
        assert!(found.1.is_none(), "{name} bears a time");
        found.0
    };
    let summaries = "method=\"GET\",path=\"stats\",server_type=\"readwrite\",long_running=\"false\"";
    for (name, within, least) in [
        ("kubelet_http_requests_total", summaries, 2.0),
        ("kubelet_http_requests_duration_seconds_count", summaries, 2.0),
        ("kubelet_http_inflight_requests", "path=\"metrics\"", 1.0),
        ("kubelet_pod_start_sli_duration_seconds_count", "", 1.0),
        ("kubelet_pod_start_total_duration_seconds_count", "", 1.0),
        ("kubelet_run_podsandbox_duration_seconds_count", "runtime_handler=\"\"", 1.0),
        ("kubelet_cgroup_version", "", 1.0),
        ("kubelet_node_startup_duration_seconds", "", 0.001),
        ("kubelet_node_startup_pre_kubelet_duration_seconds", "", 0.001),
        ("kubernetes_feature_enabled", "name=\"NodeSwap\",stage=\"\"", 1.0),
    ] {
        assert!(value(name, within) >= least, "{name} {within}\n{merged}");
    }
    for service in services.into_iter().chain(["node-api"]) {
        let of_service = format!("service=\"{service}\"");
        for name in ["process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"] {
            assert!(value(name, &of_service) > 1.0, "{name} of {service}");
        }
        assert!(value("process_cpu_seconds_total", &of_service) >= 0.0);
    }
    // The metric is updated at intervals.
    let working = "kubelet_working_pods{lifecycle=\"sync\",config=\"desired\",static=\"\"} 1\n";
    let counted = ["kubelet_desired_pods{static=\"\"} 1\n", "kubelet_active_pods{static=\"\"} 1\n", working];
    wait_page(&node, "/metrics", |text| counted.iter().all(|line| text.contains(line))).await;

    // A service that hangs keeps its last metrics, which are marked as stale.
    let relists = |text: &str| sample(text, "kubelet_pleg_relist_duration_seconds_count", "");
    assert!(relists(&merged).is_some(), "{merged}");
    node.service("pleg-service").signal(Signal::SIGSTOP);
    let stale = wait_page(&node, "/metrics", |text| up(text, "pleg-service", 0.0)).await;
    node.service("pleg-service").signal(Signal::SIGCONT);
    assert!(relists(&stale).is_some(), "{stale}");
    let mark = sample(&stale, "quintlet_service_metrics_stale", "service=\"pleg-service\"");
    assert_eq!(mark, Some((1.0, None)));
    assert!(up(&stale, "pod-sync", 1.0));
    wait_page(&node, "/metrics", |text| up(text, "pleg-service", 1.0)).await;

    assert_eq!(page(&node, "/healthz").await.as_deref(), Ok("ok"));
    node.service("pod-sync").signal(Signal::SIGSTOP);
    wait_page(&node, "/healthz", |text| text.contains("[-]syncloop failed: reason withheld")).await;
    node.service("pod-sync").signal(Signal::SIGCONT);
    wait_page(&node, "/healthz", |text| text == "ok").await;

    let config = wait_json(&node, "/configz", |c| c["kubeletconfig"].is_object()).await;
    let config = &config["kubeletconfig"];
    assert_eq!(
        (&config["kind"], &config["port"]),
        (&json!("KubeletConfiguration"), &json!(node.node_api().port()))
    );
    assert_eq!(config["authorization"]["mode"], "Webhook", "{config}");
    assert_eq!(
        config["cgroupRoot"],
        json!(node.containerd.cgroup_root()),
        "a flag of the services: {config}"
    );
    assert!(config["staticPodPath"].as_str().is_some_and(|p| p.ends_with("/manifests")), "{config}");
    assert_eq!(config["syncFrequency"], "7s", "a flag of pod-sync alone: {config}");
    for (path, word) in
        [("/statusz", "Binary version"), ("/flagz", "anonymous-auth: false"), ("/logs/", "<pre>")]
    {
        let text = page(&node, path).await.unwrap();
        assert!(text.contains(word), "{path}: {text}");
    }
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_summary_has_volumes_and_the_total_disk_usage_of_a_pod() {
    const WRITTEN: u64 = 3 << 20;
    const HOSTS: u64 = 8 << 20;
    let extra = vec![("pod-sync", "--volume-stats-agg-period=1s".to_owned())];
    let node = Node::start(Options { node_api: true, extra, ..Options::with_api("node-api-volumes") }).await;
    // As on many nodes, the user of node-api cannot read the runtime's directory.
    let closed = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(node.containerd.dir().join("root"), closed).unwrap();
    let script = "echo some words; head -c 3145728 /dev/zero > /scratch/f; head -c 1048576 /dev/zero > /memory/f; \
                  head -c 2097152 /dev/zero > /layer; head -c 8388608 /dev/zero >> /etc/hosts; trap 'exit 0' TERM; sleep 100000 & wait";
    let mut pod = pods::bound(pods::script("writer", script));
    let mounts =
        ["scratch", "memory", "facts", "host"].map(|n| json!({"name": n, "mountPath": format!("/{n}")}));
    pod["spec"]["containers"][0]["volumeMounts"] = json!(mounts);
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    pod["spec"]["volumes"] = json!([
        {"name": "scratch", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "facts", "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        {"name": "host", "hostPath": {"path": "/tmp"}},
    ]);
    node.api().create_pod(pod);
    let seen = node.wait_ready("writer").await;
    let volume = |pod: &Value, name: &str| -> Value {
        let all = pod["volume"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|v| v["name"] == name).unwrap_or_default()
    };
    let used = |disk: &Value| disk["usedBytes"].as_u64().unwrap_or(0);
    let summary = wait_json(&node, "/stats/summary", |s| {
        let pod = &s["pods"][0];
        // The runtime measures layers at its own interval.
        used(&volume(pod, "scratch")) >= WRITTEN
            && used(&volume(pod, "memory")) >= 1 << 20
            && used(&pod["containers"][0]["rootfs"]) >= 2 << 20
            && used(&pod["ephemeral-storage"]) >= HOSTS
    })
    .await;
    let pod = &summary["pods"][0];
    assert_eq!(pod["podRef"]["uid"], seen.uid());
    let names: Vec<&str> =
        pod["volume"].as_array().unwrap().iter().map(|v| v["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["scratch", "memory", "facts"],
        "what lies on the disk first; the host's is not measured"
    );
    let (scratch, memory) = (volume(pod, "scratch"), volume(pod, "memory"));
    assert!(used(&scratch) < 2 * WRITTEN && scratch["inodesUsed"] == 2, "{scratch}");
    assert_eq!((&memory["capacityBytes"], &memory["inodesUsed"]), (&json!(8 << 20), &json!(2)));
    for volume in pod["volume"].as_array().unwrap() {
        for field in ["time", "availableBytes", "inodes", "inodesFree"] {
            assert!(!volume[field].is_null(), "{field} of {volume}");
        }
    }
    let main = &pod["containers"][0];
    assert!(main["logs"]["usedBytes"].as_u64() > Some(0) && main["logs"]["inodesUsed"] == 1, "{main}");
    let whole = &pod["ephemeral-storage"];
    let least = used(&scratch) + used(&main["rootfs"]) + used(&main["logs"]) + HOSTS;
    let all = least..least + (1 << 20);
    assert!(all.contains(&used(whole)), "/etc/hosts counts, memory does not: {whole} is not in {all:?}");
    assert_eq!(whole["capacityBytes"], summary["node"]["fs"]["capacityBytes"]);
    let runtime = &summary["node"]["runtime"];
    for fs in [&runtime["imageFs"], &runtime["containerFs"], &main["rootfs"]] {
        for field in
            ["time", "availableBytes", "capacityBytes", "usedBytes", "inodes", "inodesFree", "inodesUsed"]
        {
            assert!(!fs[field].is_null(), "{field} of {fs} in {summary}");
        }
        assert!(fs["capacityBytes"].as_u64() > fs["usedBytes"].as_u64(), "{fs}");
    }
    let light =
        wait_json(&node, "/stats/summary?only_cpu_and_memory=true", |s| s["pods"][0].is_object()).await;
    assert!(
        light["pods"][0]["volume"].is_null() && light["pods"][0]["ephemeral-storage"].is_null(),
        "{light}"
    );
    let merged = wait_page(&node, "/metrics", |text| {
        let measured = "kubelet_volume_metric_collection_duration_seconds_count";
        sample(text, measured, "metric_source=\"du\"").is_some_and(|(count, _)| count > 0.0)
    })
    .await;
    assert!(!merged.contains("kubelet_volume_stats_"), "those are of claims, which there are none of");
    // Volumes are measured every second and still removed at once.
    node.api().delete("pods", "default", "writer", None).unwrap();
    node.wait_gone(seen.uid()).await;
    wait_json(&node, "/stats/summary", |s| s["pods"] == json!([])).await;
    node.down().await;
}

/// A cgroup in the root of each hierarchy, removed at the end.
struct OwnCgroup(String);

impl OwnCgroup {
    fn new() -> Self {
        Self(format!("qe2e-kubelet-{}", std::process::id()))
    }

    /// Returns whether a process is in the cgroup, in all hierarchies with controllers.
    fn has(&self, pid: i32) -> bool {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let is_v1 = !Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let lines = text.lines().filter(|line| !(is_v1 && line.starts_with("0::")));
        let places: Vec<&str> = lines.filter_map(|line| line.splitn(3, ':').nth(2)).collect();
        !places.is_empty() && places.iter().all(|place| place.trim_start_matches('/') == self.0)
    }

    /// Returns the CPU time in nanoseconds.
    fn cpu_time(&self) -> u64 {
        let root = Path::new("/sys/fs/cgroup");
        let v1 = std::fs::read_to_string(root.join("cpuacct").join(&self.0).join("cpuacct.usage"));
        if let Ok(v1) = v1 {
            return v1.trim().parse().unwrap();
        }
        let v2 = std::fs::read_to_string(root.join(&self.0).join("cpu.stat")).unwrap();
        let micros = v2.lines().find_map(|line| line.strip_prefix("usage_usec ")).unwrap();
        micros.parse::<u64>().unwrap() * 1000
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        for mount in std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
            let _absent = std::fs::remove_dir(mount.path().join(&self.0));
        }
        let _absent = std::fs::remove_dir(Path::new("/sys/fs/cgroup").join(&self.0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_services_run_in_the_cgroup_of_kubelet_cgroups_which_the_summary_shows() {
    // Dropped after the node, whose processes are in it.
    let cgroup = OwnCgroup::new();
    let argument = format!("--kubelet-cgroups=/{}", cgroup.0);
    let extra = vec![("pod-sync", argument.clone()), ("node-api", argument)];
    let node = Node::start(Options { node_api: true, extra, ..Options::with_api("node-api-cgroups") }).await;
    let services = ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync", "node-api"];
    let all_inside = async |what: &str| {
        until(what, LONG, async || {
            let is_outside = |name: &&str| !node.service(name).process().pid.is_some_and(|p| cgroup.has(p));
            let outside: Vec<_> = services.into_iter().filter(is_outside).collect();
            if outside.is_empty() { Ok(()) } else { Err(outside) }
        })
        .await;
    };
    all_inside("all services in their cgroup").await;
    let before = cgroup.cpu_time();
    let kubelet = |summary: &Value| -> Value {
        let all = summary["node"]["systemContainers"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|c| c["name"] == "kubelet").unwrap_or_default()
    };
    let summary =
        wait_json(&node, "/stats/summary", |s| kubelet(s)["cpu"]["usageCoreNanoSeconds"].is_u64()).await;
    let shown = kubelet(&summary);
    let cpu = shown["cpu"]["usageCoreNanoSeconds"].as_u64().unwrap();
    assert!((before..=cgroup.cpu_time()).contains(&cpu), "{cpu} since {before}: {shown}");
    assert!(shown["memory"]["usageBytes"].is_u64(), "{shown}");
    // The containers of pods are not processes of the services.
    node.api().create_pod(pods::bound(pods::sleeper("web")));
    node.wait_ready("web").await;
    for name in ["pod-sync", "status-reporter"] {
        let starts = node.kill9(name);
        node.wait_back(name, starts, LONG).await;
    }
    // A new pod-sync process moves itself, and others that are new.
    let starts = node.kill9("pod-sync");
    node.wait_back("pod-sync", starts, LONG).await;
    all_inside("restarted services in their cgroup").await;
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finished_pod_does_not_hide_statistics_of_other_pods_on_a_real_runtime() {
    let node = Node::start(Options { node_api: true, ..Options::with_api("node-api-finished") }).await;
    node.api().create_pod(pods::bound(pods::probed("web")));
    node.wait_ready("web").await;
    let mut done = pods::bound(pods::script("done", "true"));
    done["spec"]["restartPolicy"] = json!("Never");
    node.api().create_pod(done);
    let is_over = |p: &Value| p["status"]["phase"] == "Succeeded";
    let over = node.api().wait_for("pods", "default", "done", LONG, is_over).await;
    // containerd 1.6 fails for all containers once the cgroup of one is removed.
    let uid = over["metadata"]["uid"].as_str().unwrap().to_owned();
    until("its group is gone", LONG, async || {
        let mut left = node.pod_traces(&uid);
        left.retain(|trace| trace.starts_with("/sys/fs/cgroup/"));
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    let summary = wait_json(&node, "/stats/summary", |s| s["pods"].is_array()).await;
    let names: Vec<&Value> =
        summary["pods"].as_array().unwrap().iter().map(|p| &p["podRef"]["name"]).collect();
    assert!(names.contains(&&json!("web")), "{summary}");
    let resource = page(&node, "/metrics/resource").await.unwrap();
    assert_eq!(sample(&resource, "resource_scrape_error", "").map(|(v, _)| v), Some(0.0), "{resource}");
    assert!(page(&node, "/metrics/cadvisor").await.unwrap().contains("pod=\"web\""));
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_statistics_do_not_end_the_runtime() {
    const PODS: usize = 4;
    const SCRAPERS: usize = 6;
    const PAGES: usize = 10;
    const CALLS: usize = 1000;
    let node = Node::start(Options { node_api: true, ..Options::with_api("node-api-scrapes") }).await;
    let api = node.api();
    for n in 0..PODS {
        api.create_pod(pods::bound(pods::sleeper(&format!("web-{n}"))));
    }
    // A terminated sandbox has no cgroup, and containerd 1.6 fails to list statistics of sandboxes then.
    let mut ends = pods::script("ends", "true");
    ends["spec"]["restartPolicy"] = json!("Never");
    api.create_pod(pods::bound(ends));
    for n in 0..PODS {
        node.wait_ready(&format!("web-{n}")).await;
    }
    let listed = |summary: &Value| -> Vec<String> {
        let pods = summary["pods"].as_array().into_iter().flatten();
        pods.filter(|pod| pod["cpu"].is_object()).map(|pod| pod["podRef"]["name"].to_string()).collect()
    };
    let expected: Vec<String> = (0..PODS).map(|n| format!("\"web-{n}\"")).collect();
    wait_json(&node, "/stats/summary", |summary| listed(summary) == expected).await;

    let scrape = async |n: usize| {
        let path = ["/stats/summary", "/metrics/cadvisor", "/metrics/resource"][n % 3];
        for _ in 0..PAGES {
            let text = page(&node, path).await.unwrap();
            assert!((0..PODS).all(|n| text.contains(&format!("web-{n}"))), "{path}: {text}");
        }
    };
    // An administrator calls faster than node-api. cri-proxy refuses what the runtime may not survive.
    let sandboxes = node.listed().await.sandboxes;
    let call = async |n: usize| {
        let mut runtime = RuntimeServiceClient::new(node.cri());
        for at in n..n + CALLS {
            let pod_sandbox_id = sandboxes[at % sandboxes.len()].id.clone();
            let called = runtime.pod_sandbox_stats(PodSandboxStatsRequest { pod_sandbox_id }).await;
            // containerd refuses statistics of terminated sandboxes, which newer versions call unavailable.
            assert!(
                !called.is_err_and(|status| status.message().contains("went away")),
                "the runtime has ended"
            );
        }
    };
    let all = (0..SCRAPERS).map(scrape);
    tokio::join!(join_all(all), join_all((0..SCRAPERS).map(call)));
    wait_json(&node, "/stats/summary", |summary| listed(summary) == expected).await;
    assert!(!node.log("containerd").contains("fatal error"));
    node.assert_no_duplicates().await;
    node.down().await;
}
