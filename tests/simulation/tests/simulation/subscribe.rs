//! Subscribers of the services' sockets: snapshots, changes, cursors, and subscribers that do not read.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use quintlet_kit::args::paths::Paths;
use quintlet_kit::socket;
use quintlet_proto::subscribe::v1 as wire;
use quintlet_proto::subscribe::v1::containers_client::ContainersClient;
use quintlet_proto::subscribe::v1::pods_client::PodsClient;
use quintlet_proto::subscribe::v1::probes_client::ProbesClient;
use quintlet_proto::subscribe::v1::{
    ContainerState, ProbeKind, ProbeResult, watch_containers_event, watch_pods_event, watch_probes_event,
};
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{ExecReply, FakeRuntime};
use serde_json::json;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// The picture of a subscriber: values by key, as the contract says that it is built.
#[derive(Debug)]
struct Picture<E, V> {
    events: Streaming<E>,
    values: BTreeMap<String, V>,
    cursor: Option<wire::Cursor>,
    resyncs: usize,
    is_complete: bool,
    /// Changes outside of a snapshot.
    changes: usize,
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

trait Event: Debug + Sized {
    type Value: Debug + Clone + PartialEq;
    /// The service that sends the events.
    const SERVICE: Service;
    fn socket(paths: &Paths) -> PathBuf;
    async fn open(channel: Channel, resume: Option<wire::Cursor>) -> Result<Streaming<Self>, Status>;
    fn step(self) -> (Step<Self::Value>, Option<wire::Cursor>);
}

/// Implements [`Event`] for the three streams, which have the same form.
macro_rules! event {
    (
        $event:ident, $module:ident, $value:ident, $variant:ident, |$of:ident| $key:expr,
        $service:ident, $client:ident, $request:ident, |$paths:ident| $socket:expr
    ) => {
        impl Event for wire::$event {
            type Value = wire::$value;
            const SERVICE: Service = Service::$service;
            fn socket($paths: &Paths) -> PathBuf {
                $socket
            }
            async fn open(channel: Channel, resume: Option<wire::Cursor>) -> Result<Streaming<Self>, Status> {
                let request = wire::$request { hello: None, resume };
                Ok($client::new(channel).watch(request).await?.into_inner())
            }
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

event!(
    WatchContainersEvent,
    watch_containers_event,
    PodContainers,
    Pod,
    |pod| pod.uid.clone(),
    Pleg,
    ContainersClient,
    WatchContainersRequest,
    |paths| paths.pleg_subscribers()
);
event!(
    WatchPodsEvent,
    watch_pods_event,
    PodState,
    Pod,
    |pod| pod.uid.clone(),
    PodSync,
    PodsClient,
    WatchPodsRequest,
    |paths| paths.podsync_subscribers()
);
event!(
    WatchProbesEvent,
    watch_probes_event,
    ProbeState,
    Probe,
    |probe| format!("{}/{:?}", probe.uid, probe.kind()),
    Probe,
    ProbesClient,
    WatchProbesRequest,
    |paths| paths.probe_subscribers("probe-0")
);

impl<E: Event> Picture<E, E::Value> {
    fn new(events: Streaming<E>) -> Self {
        let (values, cursor) = (BTreeMap::new(), None);
        Self { events, values, cursor, resyncs: 0, is_complete: false, changes: 0 }
    }

    /// Opens a stream, once the service serves.
    async fn open(sim: &Sim, resume: Option<wire::Cursor>) -> Self {
        let deadline = tokio::time::Instant::now() + LONG;
        loop {
            match E::open(socket::channel(E::socket(&sim.paths())), resume).await {
                Ok(events) => return Self::new(events),
                Err(error) => assert!(tokio::time::Instant::now() < deadline, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Opens a stream whose client takes about a KiB and reads nothing until its end.
    async fn open_stalled(sim: &Sim) -> Self {
        let address = format!("unix://{}", E::socket(&sim.paths()).display());
        let endpoint = Endpoint::from_shared(address).unwrap();
        Self::new(E::open(endpoint.initial_stream_window_size(1024).connect_lazy(), None).await.unwrap())
    }

    /// Reads until the picture is as wanted.
    async fn until(&mut self, what: &str, wanted: impl Fn(&BTreeMap<String, E::Value>) -> bool) {
        let deadline = tokio::time::Instant::now() + LONG;
        while !self.is_complete || !wanted(&self.values) {
            let event = tokio::time::timeout_at(deadline, self.events.message()).await;
            let event = event.unwrap_or_else(|_| panic!("{what}: {:#?}", self.values));
            self.apply(event.unwrap().expect("the stream goes on"));
        }
    }

    /// Applies an event. Returns whether it is a beat or a greeting.
    fn apply(&mut self, event: E) -> bool {
        let (step, cursor) = event.step();
        let is_beat = matches!(step, Step::Nothing);
        match step {
            Step::Nothing => {}
            Step::Begin => {
                self.values.clear();
                self.is_complete = false;
            }
            Step::End => self.is_complete = true,
            Step::Resync => self.resyncs += 1,
            Step::Value(key, value) => {
                self.changes += usize::from(self.is_complete);
                self.values.insert(key, value);
            }
            Step::Gone(key) => {
                self.changes += 1;
                self.values.remove(&key);
            }
        }
        self.cursor = cursor.or(self.cursor);
        is_beat
    }

    /// Reads until nothing changes for the time between two beats.
    async fn settle(&mut self) {
        loop {
            let event = tokio::time::timeout(LONG, self.events.message()).await.expect("an event or a beat");
            if self.apply(event.unwrap().expect("the stream goes on")) {
                return;
            }
        }
    }
}

type Containers = Picture<wire::WatchContainersEvent, wire::PodContainers>;
type Pods = Picture<wire::WatchPodsEvent, wire::PodState>;
type Probes = Picture<wire::WatchProbesEvent, wire::ProbeState>;

/// Returns a pod with a readiness probe of each second.
fn probed(name: &str) -> serde_json::Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["readinessProbe"] = json!({"exec": {"command": ["up"]}, "periodSeconds": 1});
    pod
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscribers_see_containers_probes_and_pods() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_subscribers();
    sim.runtime.on_exec(|_, _| ExecReply::default());
    sim.start_all();
    let uid = sim.create(probed("web"));
    sim.wait_ready("web").await;

    let paths = sim.paths();
    let mode = std::fs::metadata(paths.pleg_subscribers()).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o666);
    let mut of_containers = Containers::open(&sim, None).await;
    let mut of_probes = Probes::open(&sim, None).await;
    let mut of_pods = Pods::open(&sim, None).await;

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

async fn resumes_and_starts_over<E: Event>() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_subscribers();
    sim.runtime.on_exec(|_, _| ExecReply::default());
    sim.start_all();
    let first = sim.create(probed("first"));
    sim.wait_ready("first").await;
    let has = |uid: &str, values: &BTreeMap<String, E::Value>| values.keys().any(|key| key.starts_with(uid));
    let mut before = Picture::<E, E::Value>::open(&sim, None).await;
    before.until("one pod", |values| has(&first, values)).await;
    before.settle().await;
    let cursor = before.cursor;
    drop(before);
    let second = sim.create(probed("second"));
    sim.wait_ready("second").await;
    let mut after = Picture::<E, E::Value>::open(&sim, cursor).await;
    after.is_complete = true;
    after.until("the other pod", |values| has(&second, values)).await;
    assert!(!has(&first, &after.values), "what had not changed was sent again: {:?}", after.values);
    assert_eq!(after.resyncs, 0);

    sim.restart(E::SERVICE).await;
    let mut again = Picture::<E, E::Value>::open(&sim, after.cursor).await;
    again.until("both pods", |values| has(&first, values) && has(&second, values)).await;
    assert_eq!(again.resyncs, 1);
    // A cursor of the future.
    let future = again.cursor.map(|at| wire::Cursor { seq: at.seq + 1000, ..at });
    let mut early = Picture::<E, E::Value>::open(&sim, future).await;
    early.until("both pods", |values| has(&first, values) && has(&second, values)).await;
    assert_eq!(early.resyncs, 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_of_containers_continues_at_its_cursor_and_starts_over_after_a_restart() {
    resumes_and_starts_over::<wire::WatchContainersEvent>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_of_probes_continues_at_its_cursor_and_starts_over_after_a_restart() {
    resumes_and_starts_over::<wire::WatchProbesEvent>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_of_pods_continues_at_its_cursor_and_starts_over_after_a_restart() {
    resumes_and_starts_over::<wire::WatchPodsEvent>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_subscriber_delays_no_other_one_and_reads_the_latest_state_at_last() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_subscribers();
    sim.runtime.on_exec(|_, _| ExecReply::default());
    sim.start_all();
    let mut uids = vec![sim.create(probed("first"))];
    sim.wait_ready("first").await;
    let mut of_containers = Containers::open(&sim, None).await;
    let mut of_probes = Probes::open(&sim, None).await;
    let mut of_pods = Pods::open(&sim, None).await;
    let mut stalled_containers = Containers::open_stalled(&sim).await;
    let mut stalled_probes = Probes::open_stalled(&sim).await;
    let mut stalled_pods = Pods::open_stalled(&sim).await;

    for round in 0..12 {
        let name = format!("web-{round}");
        let uid = sim.create(probed(&name));
        sim.wait_ready(&name).await;
        of_containers.until("it runs", |values| values.contains_key(&uid)).await;
        of_probes.until("it is probed", |values| values.keys().any(|key| key.starts_with(&uid))).await;
        of_pods.until("it is ready", |values| values.get(&uid).is_some_and(|pod| pod.is_ready)).await;
        if round % 4 == 3 {
            uids.push(uid);
            continue;
        }
        sim.delete(&name, None);
        of_containers.until("it is gone", |values| !values.contains_key(&uid)).await;
        of_probes.until("it is gone", |values| !values.keys().any(|key| key.starts_with(&uid))).await;
        of_pods.until("it is gone", |values| !values.contains_key(&uid)).await;
    }
    // The newest state of all reaches the subscribers that read.
    sim.runtime.on_exec(|_, _| ExecReply { exit_code: 1, ..ExecReply::default() });
    let fails = |probe: &wire::ProbeState| probe.result() == ProbeResult::Failure;
    let all = uids.len();
    of_probes.until("all fail", |values| values.len() == all && values.values().all(fails)).await;
    let no_pod_is_ready = |values: &BTreeMap<String, wire::PodState>| {
        values.len() == all && values.values().all(|pod| !pod.is_ready)
    };
    of_pods.until("no pod is ready", no_pod_is_ready).await;

    stalled_containers.until("the latest containers", |values| *values == of_containers.values).await;
    stalled_probes
        .until("the latest results", |values| values.len() == all && values.values().all(fails))
        .await;
    stalled_pods.until("the latest pods", no_pod_is_ready).await;
    for (stalled, read) in [
        (stalled_containers.changes, of_containers.changes),
        (stalled_pods.changes, of_pods.changes),
        (stalled_probes.changes, of_probes.changes),
    ] {
        assert!(stalled < read, "the stream did not stall: {stalled} changes of {read}");
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_an_api_server_that_answers_late_are_in_the_first_snapshot() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_subscribers();
    let uid = sim.create(pods::single("web"));
    sim.manifest("static", &pods::manifest("static"));
    sim.api.faults().block("list pods");
    sim.api.faults().block("watch pods");
    sim.start_all();
    let runs = |r: &FakeRuntime| r.containers().iter().any(|c| c.name() == "c-static" && c.running());
    sim.wait_runtime("the static pod runs", runs).await;
    let mut of_pods = Pods::open(&sim, None).await;
    for _ in ["hello", "beat", "beat"] {
        let event = tokio::time::timeout(LONG, of_pods.events.message()).await.unwrap().unwrap().unwrap();
        let (step, cursor) = event.step();
        assert!(matches!(step, Step::Nothing) && cursor.is_none(), "nothing is known yet");
    }
    sim.api.faults().clear();
    of_pods.until("a snapshot", |_| true).await;
    assert!(of_pods.values.contains_key(&uid) && of_pods.values.len() == 2, "{:?}", of_pods.values);
    sim.finish().await;
}
