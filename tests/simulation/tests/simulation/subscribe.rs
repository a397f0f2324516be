//! Subscribers of the services' sockets: snapshots, changes, cursors, and subscribers that do not read.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use quintlet_kit::socket;
use quintlet_proto::subscribe::v1 as wire;
use quintlet_proto::subscribe::v1::containers_client::ContainersClient;
use quintlet_proto::subscribe::v1::pods_client::PodsClient;
use quintlet_proto::subscribe::v1::probes_client::ProbesClient;
use quintlet_proto::subscribe::v1::{
    ContainerState, ProbeKind, ProbeResult, watch_containers_event, watch_pods_event, watch_probes_event,
};
use quintlet_simulation::sim::LONG;
use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::ExecReply;
use serde_json::json;
use tonic::Streaming;

/// The picture of a subscriber: values by key, as the contract says that it is built.
#[derive(Debug)]
struct Picture<E, V> {
    events: Streaming<E>,
    values: BTreeMap<String, V>,
    cursor: Option<wire::Cursor>,
    resyncs: usize,
    is_complete: bool,
}

/// The effect of one event on a picture.
enum Step<V> {
    Nothing,
    Begin,
    End,
    Resync,
    Value(String, V),
    Gone(String),
}

trait Event: Debug {
    type Value: Debug + Clone;
    fn step(self) -> (Step<Self::Value>, Option<wire::Cursor>);
}

/// Implements [`Event`] for the three streams, which have the same form.
macro_rules! event {
    ($event:ident, $module:ident, $value:ident, $variant:ident, |$of:ident| $key:expr) => {
        impl Event for wire::$event {
            type Value = wire::$value;
            fn step(self) -> (Step<Self::Value>, Option<wire::Cursor>) {
                use $module::Event as E;
                let step = match self.event.unwrap() {
                    E::Hello(_) | E::Beat(_) => Step::Nothing,
                    E::SnapshotBegin(_) => Step::Begin,
                    E::SnapshotEnd(_) => Step::End,
                    E::Resync(_) => Step::Resync,
                    E::$variant($of) => Step::Value($key, $of),
                    E::Gone($of) => Step::Gone($key),
                };
                (step, self.cursor)
            }
        }
    };
}

event!(WatchContainersEvent, watch_containers_event, PodContainers, Pod, |pod| pod.uid.clone());
event!(WatchPodsEvent, watch_pods_event, PodState, Pod, |pod| pod.uid.clone());
event!(WatchProbesEvent, watch_probes_event, ProbeState, Probe, |probe| format!(
    "{}/{:?}",
    probe.uid,
    probe.kind()
));

impl<E: Event> Picture<E, E::Value> {
    fn new(events: Streaming<E>) -> Self {
        Self { events, values: BTreeMap::new(), cursor: None, resyncs: 0, is_complete: false }
    }

    /// Reads until the picture is as wanted.
    async fn until(&mut self, what: &str, wanted: impl Fn(&BTreeMap<String, E::Value>) -> bool) {
        let deadline = tokio::time::Instant::now() + LONG;
        while !self.is_complete || !wanted(&self.values) {
            let event = tokio::time::timeout_at(deadline, self.events.message()).await;
            let event = event.unwrap_or_else(|_| panic!("{what}: {:#?}", self.values));
            let (step, cursor) = event.unwrap().expect("the stream goes on").step();
            match step {
                Step::Nothing => {}
                Step::Begin => {
                    self.values.clear();
                    self.is_complete = false;
                }
                Step::End => self.is_complete = true,
                Step::Resync => self.resyncs += 1,
                Step::Value(key, value) => drop(self.values.insert(key, value)),
                Step::Gone(key) => drop(self.values.remove(&key)),
            }
            self.cursor = cursor.or(self.cursor);
        }
    }
}

type Containers = Picture<wire::WatchContainersEvent, wire::PodContainers>;

async fn containers(path: PathBuf, resume: Option<wire::Cursor>) -> Containers {
    let mut client = ContainersClient::new(socket::channel(path));
    let request = wire::WatchContainersRequest { hello: None, resume };
    Picture::new(client.watch(request).await.unwrap().into_inner())
}

/// Returns a pod with a readiness probe of each second.
fn probed(name: &str) -> serde_json::Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["readinessProbe"] = json!({"exec": {"command": ["up"]}, "periodSeconds": 1});
    pod["spec"]["containers"][0]["env"] = json!([{"name": "TOKEN", "value": "s3cret"}]);
    pod["metadata"]["annotations"] = json!({"secret": "s3cret"});
    pod
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscribers_see_containers_probes_and_pods_and_nothing_else() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_subscribers();
    sim.runtime.on_exec(|_, _| ExecReply::default());
    sim.start_all();
    let uid = sim.create(probed("web"));
    sim.wait_ready("web").await;

    let paths = sim.paths();
    let mode = std::fs::metadata(paths.pleg_subscribers()).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o666);
    let mut of_containers = containers(paths.pleg_subscribers(), None).await;
    let mut probes = ProbesClient::new(socket::channel(paths.probe_subscribers("probe-0")));
    let mut of_probes =
        Picture::new(probes.watch(wire::WatchProbesRequest::default()).await.unwrap().into_inner());
    let mut pods = PodsClient::new(socket::channel(paths.podsync_subscribers()));
    let mut of_pods = Picture::new(pods.watch(wire::WatchPodsRequest::default()).await.unwrap().into_inner());

    let newest =
        |pods: &BTreeMap<String, wire::PodContainers>| pods.get(&uid).map(|p| p.containers[0].clone());
    of_containers.until("it runs", |p| newest(p).is_some_and(|c| c.state() == ContainerState::Running)).await;
    let key = format!("{uid}/{:?}", ProbeKind::Readiness);
    of_probes.until("it passes", |p| p.get(&key).is_some_and(|p| p.result() == ProbeResult::Success)).await;
    let probe = &of_probes.values[&key];
    assert_eq!((&*probe.namespace, &*probe.name, &*probe.container), ("default", "web", "c-web"));
    of_pods.until("it is ready", |p| p.get(&uid).is_some_and(|p| p.is_ready && p.phase == "Running")).await;

    // The container ends and starts again.
    let id = sim.runtime.newest(&uid, "c-web").unwrap().id().to_owned();
    assert!(sim.runtime.exit_because(&id, 137, "OOMKilled"));
    let began_again = |p: &BTreeMap<String, wire::PodContainers>| {
        let all = p.get(&uid).map(|pod| pod.containers.clone()).unwrap_or_default();
        all.len() == 2 && all[0].state() == ContainerState::Running && all[0].restart_count == 1
    };
    of_containers.until("it runs again", began_again).await;
    let before = &of_containers.values[&uid].containers[1];
    assert_eq!((before.exit_code, before.reason.as_str(), before.restart_count), (137, "OOMKilled", 0));
    assert!(before.finished_unix_ns >= before.started_unix_ns && before.started_unix_ns > 0, "{before:?}");
    let ended = |p: &BTreeMap<String, wire::PodState>| {
        let of_pod = p.get(&uid).filter(|pod| pod.is_ready)?.containers.first()?.last_exit.clone()?;
        Some((of_pod.exit_code, of_pod.reason))
    };
    of_pods.until("how it ended", |p| ended(p) == Some((137, "OOMKilled".to_owned()))).await;
    let seen = format!("{:?}{:?}{:?}", of_containers.values, of_probes.values, of_pods.values);
    assert!(!seen.contains("s3cret"), "{seen}");

    sim.runtime.on_exec(|_, _| ExecReply { exit_code: 1, ..ExecReply::default() });
    of_probes.until("it fails", |p| p.get(&key).is_some_and(|p| p.result() == ProbeResult::Failure)).await;
    of_pods.until("it is not ready", |p| p.get(&uid).is_some_and(|p| !p.is_ready)).await;
    sim.delete("web", None);
    of_pods.until("it is gone", BTreeMap::is_empty).await;
    of_probes.until("it is gone", BTreeMap::is_empty).await;
    of_containers.until("it is gone", BTreeMap::is_empty).await;
    assert_eq!((of_containers.resyncs, of_probes.resyncs, of_pods.resyncs), (0, 0, 0));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_continues_at_its_cursor_and_starts_over_after_a_restart_of_the_service() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_subscribers();
    sim.start_all();
    let first = sim.create(pods::single("first"));
    sim.wait_ready("first").await;
    let path = sim.paths().pleg_subscribers();
    let mut before = containers(path.clone(), None).await;
    before.until("one pod", |p| p.len() == 1).await;
    let cursor = before.cursor;
    drop(before);
    let second = sim.create(pods::single("second"));
    sim.wait_ready("second").await;
    let mut after = containers(path.clone(), cursor).await;
    after.is_complete = true;
    after.until("the other pod", |p| p.contains_key(&second)).await;
    assert!(!after.values.contains_key(&first), "what had not changed was sent again: {:?}", after.values);

    sim.restart(Service::Pleg).await;
    let mut again = loop {
        let mut client = ContainersClient::new(socket::channel(path.clone()));
        let request = wire::WatchContainersRequest { hello: None, resume: after.cursor };
        match client.watch(request).await {
            Ok(events) => break Picture::new(events.into_inner()),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    again.until("both pods", |p| p.len() == 2).await;
    assert_eq!(again.resyncs, 1);
    // A cursor of the future.
    let future = again.cursor.map(|at| wire::Cursor { seq: at.seq + 1000, ..at });
    let mut early = containers(path, future).await;
    early.until("both pods", |p| p.len() == 2).await;
    assert_eq!(early.resyncs, 1);
    sim.finish().await;
}
