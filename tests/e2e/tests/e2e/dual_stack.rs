//! Tests pods with IPv6 addresses on a real runtime: dual-stack with either primary family, and IPv6 only.
//! Each node has a network namespace of its own, with one interface.

use std::net::IpAddr;
use std::process::Command;

use nix::sched::{CloneFlags, unshare};
use quintlet_e2e::{LONG, NODE, Node, Options, Seen, page, pods, until};
use quintlet_localnode::cni::Families;
use serde_json::{Value, json};

const V4: &str = "192.0.2.2";
const V6: &str = "2001:db8::2";
/// Port of the server for gRPC probes.
const GRPC_PORT: u16 = 9000;

/// Runs a test in a network namespace with an interface that has these addresses and the default routes of
/// their families.
fn in_namespace<F: Future<Output = ()>>(
    addresses: &'static [&str],
    test: impl FnOnce() -> F + Send + 'static,
) {
    let run = move || {
        // Later threads and processes of this thread are in the namespace, too.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let ip = |line: &str| {
            let out = Command::new("ip").args(line.split(' ')).output().unwrap();
            assert!(out.status.success(), "ip {line}: {}", String::from_utf8_lossy(&out.stderr));
        };
        ip("link set lo up");
        ip("link add uplink type veth peer name router");
        ip("link set router up");
        ip("link set uplink up");
        for address in addresses {
            if address.contains(':') {
                ip(&format!("address add {address}/64 dev uplink nodad"));
                ip("-6 route add default via 2001:db8::1");
            } else {
                ip(&format!("address add {address}/24 dev uplink"));
                ip("route add default via 192.0.2.1");
            }
        }
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap()
            .block_on(test());
    };
    if let Err(panic) = std::thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Serves the health service on all addresses.
async fn serve_health() {
    let (reporter, service) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
    let listener = tokio::net::TcpListener::bind(("::", GRPC_PORT)).await.unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
}

/// Returns a web server that shows its addresses, with HTTP and TCP probes of its own address.
fn web() -> Value {
    let mut pod = pods::script(
        "web",
        "(env; cat /etc/hosts) > /tmp/index.html; trap 'exit 0' TERM; httpd -f -p 8080 -h /tmp & wait",
    );
    let env = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let main = &mut pod["spec"]["containers"][0];
    main["env"] = json!([
        env("POD_IP", "status.podIP"),
        env("POD_IPS", "status.podIPs"),
        env("HOST_IP", "status.hostIP"),
        env("HOST_IPS", "status.hostIPs"),
    ]);
    main["startupProbe"] = json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 60});
    main["readinessProbe"] = json!({"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1});
    main["livenessProbe"] = json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1});
    pod
}

/// Returns a web server in the node's network, probed by the IPv6 loopback address and, by gRPC, by the
/// node's address.
fn of_host() -> Value {
    let mut pod = pods::script(
        "host",
        "echo hello > /tmp/index.html; trap 'exit 0' TERM; httpd -f -p 8081 -h /tmp & wait",
    );
    pod["spec"]["hostNetwork"] = json!(true);
    let main = &mut pod["spec"]["containers"][0];
    main["startupProbe"] =
        json!({"tcpSocket": {"host": "::1", "port": 8081}, "periodSeconds": 1, "failureThreshold": 60});
    main["readinessProbe"] =
        json!({"httpGet": {"host": "::1", "port": 8081, "path": "/"}, "periodSeconds": 1});
    main["livenessProbe"] = json!({"grpc": {"port": GRPC_PORT}, "periodSeconds": 1});
    pod
}

fn ips(pod: &Seen, list: &str) -> Vec<String> {
    let all = pod.pod["status"][list].as_array().into_iter().flatten();
    all.map(|item| item["ip"].as_str().unwrap().to_owned()).collect()
}

async fn node_page(node: &Node, path: &str) -> Result<String, String> {
    let address = node.api().url().replace("http://", "");
    let (host, port) = address.rsplit_once(':').unwrap();
    let path = format!("/api/v1/nodes/{NODE}/proxy{path}");
    page(host, port.parse().unwrap(), &path).await.map_err(|e| e.to_string())
}

/// Starts pods on a node with these addresses, the first of which is primary, and checks their addresses,
/// probes and statistics.
async fn check(name: &'static str, families: Families, node_ips: &[&str]) {
    serve_health().await;
    let extra = vec![("pod-sync", format!("--node-ip={}", node_ips.join(",")))];
    let node = Node::start(Options { families, node_api: true, extra, ..Options::with_api(name) }).await;
    let api = node.api();
    api.create_pod(pods::bound(web()));
    api.create_pod(pods::bound(of_host()));
    let (web, host) = (node.wait_ready("web").await, node.wait_ready("host").await);
    let object = |name: &str| Seen::from_api(api.get("pods", "default", name).unwrap());

    let stated = api.get("nodes", "", NODE).unwrap();
    let addresses = stated["status"]["addresses"].as_array().unwrap();
    let internal: Vec<&str> = addresses
        .iter()
        .filter(|a| a["type"] == "InternalIP")
        .map(|a| a["address"].as_str().unwrap())
        .collect();
    assert_eq!(internal, node_ips);

    let pod_ips = ips(&web, "podIPs");
    let is_v6 = |ip: &str| ip.parse::<IpAddr>().unwrap().is_ipv6();
    let wanted: Vec<bool> = node_ips.iter().map(|ip| is_v6(ip)).collect();
    assert_eq!(
        pod_ips.iter().map(|ip| is_v6(ip)).collect::<Vec<_>>(),
        wanted,
        "the order of the node: {pod_ips:?}"
    );
    for seen in [&web, &object("web")] {
        assert_eq!((seen.ip(), ips(seen, "podIPs")), (pod_ips[0].as_str(), pod_ips.clone()));
        assert_eq!(
            (seen.text("/status/hostIP"), ips(seen, "hostIPs")),
            (node_ips[0], node_ips.iter().map(|ip| (*ip).to_owned()).collect())
        );
    }
    for seen in [&host, &object("host")] {
        assert_eq!(
            (seen.ip(), ips(seen, "podIPs")),
            (node_ips[0], ips(seen, "hostIPs")),
            "a pod in the node's network"
        );
    }

    // Each address of the pod is reachable, and the container knows all of them.
    for ip in &pod_ips {
        let text = page(ip, 8080, "/").await.unwrap();
        for line in [
            format!("POD_IP={}", pod_ips[0]),
            format!("POD_IPS={}", pod_ips.join(",")),
            format!("HOST_IP={}", node_ips[0]),
            format!("HOST_IPS={}", node_ips.join(",")),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in {text}");
        }
        let own = text.lines().filter(|l| l.ends_with("\tweb")).map(|l| l.split('\t').next().unwrap());
        assert_eq!(own.collect::<Vec<_>>(), pod_ips, "{text}");
    }
    let before = ["web", "host"].map(|name| object(name).container("main"));
    // Liveness probes of either kind have been evaluated by now, and killed nothing.
    until("liveness probes by TCP and gRPC", LONG, async || {
        let text = node_page(&node, "/metrics/probes").await?;
        let passed = |pod: &str, kind: &str| {
            let is_probe = |line: &&str| {
                line.starts_with("prober_probe_total{")
                    && line.contains(&format!("pod=\"{pod}\""))
                    && line.contains(kind)
            };
            text.lines().filter(is_probe).any(|l| l.contains("result=\"successful\"") && !l.ends_with(" 0"))
        };
        let all = ["web", "host"].iter().all(|pod| passed(pod, "Liveness") && passed(pod, "Readiness"));
        let has_failed = text
            .lines()
            .any(|l| l.contains("Liveness") && l.contains("result=\"failed\"") && !l.ends_with(" 0"));
        if all && !has_failed { Ok(()) } else { Err(text) }
    })
    .await;
    assert_eq!(["web", "host"].map(|name| object(name).container("main")), before);

    let used = |stats: &Value| {
        let interfaces = &stats["network"]["interfaces"][0];
        interfaces["name"] == "eth0"
            && interfaces["rxBytes"].as_u64() > Some(0)
            && interfaces["txBytes"].as_u64() > Some(0)
    };
    until("network statistics", LONG, async || {
        let summary: Value =
            serde_json::from_str(&node_page(&node, "/stats/summary").await?).map_err(|e| e.to_string())?;
        let summary_of = |name: &str| {
            summary["pods"]
                .as_array()
                .and_then(|all| all.iter().find(|p| p["podRef"]["name"] == name).cloned())
        };
        let cadvisor = node_page(&node, "/metrics/cadvisor").await?;
        let counts = |direction: &str| {
            let start = format!("container_network_{direction}_packets_total{{");
            cadvisor.lines().any(|l| {
                let value = l
                    .rsplit_once('}')
                    .and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<f64>().ok());
                l.starts_with(&start)
                    && l.contains("pod=\"web\"")
                    && l.contains("interface=\"eth0\"")
                    && value > Some(0.0)
            })
        };
        if summary_of("web").is_some_and(|web| used(&web)) && counts("receive") && counts("transmit") {
            Ok(())
        } else {
            Err(format!("{summary:#} {cadvisor}"))
        }
    })
    .await;
    node.down().await;
}

#[test]
fn a_dual_stack_pod_has_an_ipv4_address_first_and_both_families_are_served() {
    in_namespace(&[V4, V6], || check("dual-stack", Families::Dual, &[V4, V6]));
}

#[test]
fn a_dual_stack_pod_has_an_ipv6_address_first_where_the_nodes_primary_address_is_ipv6() {
    in_namespace(&[V4, V6], || check("dual-stack-v6", Families::Dual, &[V6, V4]));
}

#[test]
fn an_ipv6_only_pod_is_started_probed_and_measured() {
    in_namespace(&[V6], || check("ipv6-only", Families::V6, &[V6]));
}
