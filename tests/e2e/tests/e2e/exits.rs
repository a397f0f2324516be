//! The exit events of the runtime suffice to publish exits: the relist period is longer than the test.
//!
//! The test prints the delay, which `make bench` measures. It fails for a missing exit, not for a slow
//! machine.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintlet_e2e::{LONG, Node, Options, pods};
use quintlet_kit::messages::whole;
use quintlet_kit::{socket, task};
use quintlet_proto::debug::v1::MetricsRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::pleg::v1::pleg_client::PlegClient;
use quintlet_proto::pleg::v1::watch_event::Event;
use quintlet_proto::pleg::v1::{ContainerState, WatchRequest};
use serde_json::{Value, json};

const PODS: usize = 10;
const CONTAINERS: usize = 10;

/// Returns a pod whose containers exit once a line is written to their FIFO.
fn pod(index: usize, scratch: &std::path::Path) -> Value {
    let mut pod = pods::script(&format!("exits-{index}"), "");
    pod["spec"]["restartPolicy"] = json!("Never");
    let template = pod["spec"]["containers"][0].clone();
    let containers = (0..CONTAINERS).map(|c| {
        let mut container = template.clone();
        container["name"] = json!(format!("c{c}"));
        container["command"] = json!(["sh", "-c", format!("read line < /go/{index}-{c}; exit 3")]);
        container
    });
    pod["spec"]["containers"] = containers.collect();
    pods::with_dir(pod, scratch, "/go")
}

async fn relists(node: &Node) -> u64 {
    let mut client = DebugClient::new(socket::channel(node.paths().pleg()));
    let text = whole(client.metrics(MetricsRequest::default())).await.unwrap().into_inner().text;
    let count = text.lines().find_map(|l| l.strip_prefix("kubelet_pleg_relist_duration_seconds_count "));
    count.expect("relists are counted").trim().parse().unwrap()
}

fn unix_ns() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(now.as_nanos()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_exits_are_published_without_one_relist() {
    let extra = ["--relist-period", "10m", "--relist-period-live", "10m"];
    let extra = extra.map(|a| ("pleg-service", a.to_owned())).to_vec();
    let node = Node::start(Options { extra, ..Options::standalone("exits") }).await;
    let scratch = node.scratch();
    for index in 0..PODS {
        for c in 0..CONTAINERS {
            nix::unistd::mkfifo(&scratch.join(format!("{index}-{c}")), nix::sys::stat::Mode::S_IRWXU)
                .unwrap();
        }
        node.pod_manifest(&pod(index, &scratch));
    }
    for index in 0..PODS {
        let name = format!("exits-{index}");
        node.wait_pod(&name, "all its containers run", LONG * 3, |p| {
            p.containers().values().filter(|c| c.state == "running").count() == CONTAINERS
        })
        .await;
    }
    let mut watch = PlegClient::new(socket::channel(node.paths().pleg()))
        .watch(WatchRequest { hello: Some(quintlet_proto::hello()), resume: None })
        .await
        .unwrap()
        .into_inner();
    let before = relists(&node).await;
    assert!(before > 0, "the first list is counted");

    let mut seen: BTreeMap<(String, String), i64> = BTreeMap::new();
    let mut due: Vec<(usize, usize)> = (0..PODS).flat_map(|p| (0..CONTAINERS).map(move |c| (p, c))).collect();
    let mut snapshot = false;
    while seen.len() < PODS * CONTAINERS {
        let event = tokio::time::timeout(LONG, watch.message()).await;
        let event = event.unwrap_or_else(|_| panic!("exits not published: {} of them came", seen.len()));
        match event.unwrap().unwrap().event {
            Some(Event::SnapshotEnd(_)) => snapshot = true,
            Some(Event::Pod(record)) => {
                let now = unix_ns();
                for c in record.containers.iter().filter(|c| c.state() == ContainerState::Exited) {
                    assert_eq!(c.exit_code, 3, "{c:?}");
                    let late = now - c.finished_unix_ns;
                    seen.entry((record.name.clone(), c.name.clone())).or_insert(late);
                }
            }
            _ => {}
        }
        // The next container exits once all earlier exits were observed: a hundred separate exits.
        let exited = PODS * CONTAINERS - due.len();
        if snapshot
            && seen.len() == exited
            && let Some((p, c)) = due.pop()
        {
            let fifo = scratch.join(format!("{p}-{c}"));
            task::blocking(move || std::fs::write(fifo, "go\n")).await.unwrap();
        }
    }
    assert_eq!(relists(&node).await, before, "a relist ran: what was seen may have come from it");
    let pods: BTreeSet<&String> = seen.keys().map(|(pod, _)| pod).collect();
    assert_eq!(pods.len(), PODS);
    let mut late: Vec<i64> = seen.into_values().collect();
    late.sort_unstable();
    let ms = |ns: i64| Duration::from_nanos(u64::try_from(ns).unwrap_or_default()).as_millis();
    println!("exit → Watch: p50 {} ms, p99 {} ms", ms(late[late.len() / 2]), ms(late[late.len() - 2]));
    node.down().await;
}
