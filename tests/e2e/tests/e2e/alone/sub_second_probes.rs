//! Readiness probes each 100 ms with a real runtime: the time from the first failure to a status that is not
//! ready.

use std::time::{Duration, Instant};

use quintlet_e2e::{LONG, Node, Options, pods};
use serde_json::{Value, json};

/// Longest time from the end of a pod to a status in the API server that is not ready.
const LIMIT: Duration = Duration::from_millis(500);

/// Returns a pod that is Ready while a file with its name is in the scratch directory of the node.
fn pod(node: &Node, name: &str, period_ms: Option<&str>, handler: Value) -> Value {
    let server = pods::script(name, "trap 'exit 0' TERM; httpd -f -p 8080 -h /out & wait");
    let mut pod = pods::bound(pods::with_dir(server, &node.scratch(), "/out"));
    let main = &mut pod["spec"]["containers"][0];
    main["readinessProbe"] = handler;
    main["readinessProbe"]["periodSeconds"] = json!(1);
    main["readinessProbe"]["failureThreshold"] = json!(3);
    if let Some(period_ms) = period_ms {
        pod["metadata"]["annotations"] = json!({"quintlet.dev/probe-period-ms": period_ms});
    }
    pod
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.clone().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Returns the evaluations of a pod's readiness probe.
async fn evaluations(node: &Node, name: &str) -> u64 {
    let text = node.metrics("probe-service").await;
    let pod = format!("pod=\"{name}\"");
    let lines = text.lines().filter(|line| line.starts_with("prober_probe_total{") && line.contains(&pod));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_pod_is_not_ready_in_the_api_server_within_500_ms() {
    let mut options = Options::with_api("sub-second");
    options.extra.push(("pod-sync", "--sub-second-exec-probe-rate=20".to_owned()));
    let node = Node::start(options).await;
    let http = |name: &str| json!({"httpGet": {"path": format!("/{name}"), "port": 8080}});
    let exec = |name: &str| json!({"exec": {"command": ["test", "-e", format!("/out/{name}")]}});
    let all = [
        ("by-http", pod(&node, "by-http", Some("100"), http("by-http"))),
        ("by-exec", pod(&node, "by-exec", Some("100"), exec("by-exec"))),
        ("neighbour", pod(&node, "neighbour", None, http("neighbour"))),
    ];
    for (name, pod) in all {
        std::fs::write(node.scratch().join(name), "").unwrap();
        node.api().create_pod(pod);
    }
    for name in ["by-http", "by-exec", "neighbour"] {
        node.api().wait_for("pods", "default", name, LONG, is_ready).await;
    }
    let counted = async || (evaluations(&node, "by-http").await, evaluations(&node, "neighbour").await);
    let before = counted().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let after = counted().await;
    let (fast, neighbour) = (after.0 - before.0, after.1 - before.1);
    println!("evaluations in 10 s: {fast}, {neighbour} of the neighbour");
    assert!((80..=110).contains(&fast) && (9..=11).contains(&neighbour), "{fast}, {neighbour}");
    for name in ["by-http", "by-exec"] {
        let mut losses = Vec::new();
        for phase in [0, 17, 41, 66, 89] {
            tokio::time::sleep(Duration::from_millis(1200 + phase)).await;
            std::fs::remove_file(node.scratch().join(name)).unwrap();
            let dead = Instant::now();
            node.api().wait_for("pods", "default", name, LONG, |pod| !is_ready(pod)).await;
            losses.push(dead.elapsed());
            std::fs::write(node.scratch().join(name), "").unwrap();
            node.api().wait_for("pods", "default", name, LONG, is_ready).await;
        }
        losses.sort();
        println!("{name} is not ready after {losses:?}");
        // One of them may meet other work of the machine.
        assert!(losses[losses.len() / 2] <= LIMIT, "{name}: {losses:?}");
    }
    assert!(is_ready(&node.api().get("pods", "default", "neighbour").unwrap()));
    node.down().await;
}
