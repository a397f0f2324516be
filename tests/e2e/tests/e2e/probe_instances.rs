//! Two instances of probe-service, one of which hangs: the other one probes its pods until it resumes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use quintlet_kit::socket;
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use quintlet_proto::probe::v1::watch_event::Event;
use quintlet_proto::probe::v1::{Evaluation, WatchRequest};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

/// Number of pods: with a probability of 2047 in 2048 both instances have some.
const PODS: usize = 12;

/// Every pod is probed once a second.
const WINDOW: Duration = Duration::from_secs(3);

/// Longest time until another instance probes the pods of one that hangs: a health check per second, 2 s
/// without a response, one probe period, and a margin for a slow machine.
const TAKEN_OVER: Duration = Duration::from_secs(8);

/// Returns a pod that is Ready while a file with its name is in the scratch directory of the node. Commands,
/// twelve a second, would take a whole processor.
fn pod(node: &Node, name: &str) -> Value {
    let server = pods::script(name, "trap 'exit 0' TERM; httpd -f -p 8080 -h /out & wait");
    let mut pod = pods::with_dir(server, &node.scratch(), "/out");
    pod["spec"]["containers"][0]["readinessProbe"] = json!({
        "httpGet": {"path": format!("/{name}"), "port": 8080},
        "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 1,
    });
    pod
}

/// Reads the evaluations of an instance until `end`. Returns the names of the pods that it probed.
async fn probed_by(node: &Node, instance: &str, end: Instant) -> BTreeSet<String> {
    let mut client = ProbeClient::new(socket::channel(node.paths().probe(instance)));
    let request = WatchRequest { hello: Some(quintlet_proto::hello()), ..Default::default() };
    let mut events = client.watch(request).await.unwrap().into_inner();
    let mut names = BTreeSet::new();
    while let Ok(event) = timeout_at(end, events.message()).await {
        if let Some(Event::Evaluation(Evaluation { pod_name, .. })) = event.unwrap().unwrap().event {
            names.insert(pod_name);
        }
    }
    names
}

/// Returns the instances that probe each pod within [`WINDOW`].
async fn shares(node: &Node) -> BTreeMap<String, Vec<&'static str>> {
    let end = Instant::now() + WINDOW;
    let (first, second) = tokio::join!(probed_by(node, "probe-0", end), probed_by(node, "probe-1", end));
    let mut shares: BTreeMap<String, Vec<&'static str>> = BTreeMap::new();
    for (instance, names) in [("probe-0", first), ("probe-1", second)] {
        for name in names {
            shares.entry(name).or_default().push(instance);
        }
    }
    shares
}

/// Waits until each pod is probed by one instance.
async fn settled(node: &Node) -> BTreeMap<String, Vec<&'static str>> {
    until("each pod probed by one instance", LONG, async || {
        let shares = shares(node).await;
        let once = shares.len() == PODS && shares.values().all(|instances| instances.len() == 1);
        if once { Ok(shares) } else { Err(shares) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_an_unresponsive_prober_move_to_the_other_one_and_return() {
    let mut node = Node::start(Options::standalone("probers")).await;
    let names: Vec<String> = (0..PODS).map(|n| format!("probed-{n}")).collect();
    for name in &names {
        std::fs::write(node.scratch().join(name), "").unwrap();
        node.pod_manifest(&pod(&node, name));
    }
    for name in &names {
        node.wait_ready(name).await;
    }
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    let before = node.steady(&all).await;
    node.add_prober().await;
    let shares = settled(&node).await;
    // The name of a static pod ends with the node's name.
    let probed = |instance: &str| {
        let mine = |name: &&String| {
            let instances = shares.iter().find(|(pod, _)| pod.starts_with(&format!("{name}-")));
            instances.is_some_and(|(_, instances)| instances[..] == [instance])
        };
        names.iter().filter(mine).cloned().collect::<Vec<_>>()
    };
    let (first, second) = (probed("probe-0"), probed("probe-1"));
    println!("probe-0: {first:?}, probe-1: {second:?}");
    assert!(!first.is_empty() && !second.is_empty(), "both have a share: {shares:?}");
    assert_eq!(node.steady(&all).await, before, "moving a share changes no pod");

    node.stop("probe-1");
    let fails = &second[0];
    std::fs::remove_file(node.scratch().join(fails)).unwrap();
    let seen = node.wait_pod(fails, "not Ready", TAKEN_OVER, |p| !p.is_ready()).await;
    println!("{seen}");
    std::fs::write(node.scratch().join(fails), "").unwrap();
    node.wait_pod(fails, "Ready again", TAKEN_OVER, Seen::is_ready).await;
    node.cont("probe-1");
    until("the shares as before", LONG, async || {
        let now = settled(&node).await;
        if now == shares { Ok(()) } else { Err(now) }
    })
    .await;
    let others: Vec<&str> = all.iter().copied().filter(|name| name != fails).collect();
    for (pod, shown) in node.steady(&others).await {
        assert_eq!(before.get(&pod), Some(&shown), "{pod:?} has changed");
    }
    let container = node.pod(fails).await.unwrap().container("main");
    assert_eq!((container.restarts, container.ready), (0, true));
    node.down().await;
}
