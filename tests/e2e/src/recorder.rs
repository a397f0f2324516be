//! Records all states of pods around a fault.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, WatchEvent, WatchParams};
use parking_lot::Mutex;
use quintlet_proto::podsync::v1::WatchPodsRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::watch_pods_event::Event;
use quintlet_testapi::TestApi;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::seen::{Seen, Steady};
use crate::wait::LONG;

/// Interval between attempts to reach a pod-sync that is down.
const RETRY: Duration = Duration::from_millis(20);

/// A recorded state.
#[derive(Debug, Clone)]
pub struct Record {
    /// Time since the recorder started.
    pub at: Duration,
    /// The service that showed it: [`PODSYNC`] or [`API`].
    pub by: &'static str,
    /// Name of the pod.
    pub name: String,
    /// `None`: the pod does not exist.
    pub seen: Option<Seen>,
}

/// States before a fault, by service and name of the pod.
pub(crate) type Before = BTreeMap<(&'static str, String), Steady>;

/// pod-sync's podsync.v1.
pub(crate) const PODSYNC: &str = "pod-sync";

/// The API server.
pub(crate) const API: &str = "API";

/// Records the states of all pods as pod-sync and the API server show them.
#[derive(Debug)]
pub struct Recorder {
    records: Arc<Mutex<Vec<Record>>>,
    /// Reason why the recording of the API server is incomplete.
    broken: Arc<Mutex<Option<String>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Recorder {
    /// Records WatchPods of pod-sync and a watch of the pods in an API server. Returns once it has the
    /// existing pods.
    ///
    /// # Panics
    /// One of the two does not deliver them.
    pub async fn start(podsync: Channel, api: Option<TestApi>) -> Self {
        let records = Arc::new(Mutex::new(Vec::new()));
        let began = Instant::now();
        let complete = CancellationToken::new();
        let mut tasks = vec![quintlet_kit::task::spawn(
            "record-podsync",
            podsync_states(podsync, Arc::clone(&records), began, complete.clone()),
        )];
        let in_time = tokio::time::timeout(LONG, complete.cancelled()).await;
        assert!(in_time.is_ok(), "pod-sync shows no snapshot of its pods");
        let broken = Arc::default();
        if let Some(api) = api {
            let complete = CancellationToken::new();
            let states = api_states(api, Arc::clone(&records), Arc::clone(&broken), began, complete.clone());
            tasks.push(quintlet_kit::task::spawn("record-api", states));
            let in_time = tokio::time::timeout(LONG, complete.cancelled()).await;
            assert!(in_time.is_ok(), "the API server lists no pods: {:?}", broken.lock());
        }
        Self { records, broken, tasks }
    }

    /// Returns the records so far.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.records.lock().clone()
    }

    fn whole(&self) -> Vec<Record> {
        assert_eq!(*self.broken.lock(), None, "the watch on the API server's pods broke");
        self.records()
    }

    /// Asserts that pods that were starting only moved forward: one UID, one instance of each container that
    /// ran, with one start time and no restart, and neither Ready nor Started went back to false.
    ///
    /// # Panics
    /// One did not; the message has each such step.
    pub fn assert_forward(&self, what: &str, names: &[&str]) {
        let records = self.whole();
        let mut backward = Vec::new();
        for name in names {
            for source in [PODSYNC, API] {
                let of_pod = records.iter().filter(|r| r.by == source && r.name == *name);
                let mut last: Option<&Seen> = None;
                for record in of_pod {
                    let at = record.at.as_millis();
                    let Some(seen) = &record.seen else {
                        backward.push(format!("{at} ms, {source}: {name} is gone"));
                        continue;
                    };
                    if let Some(last) = last {
                        let steps = steps_back(last, seen);
                        backward.extend(steps.into_iter().map(|s| format!("{at} ms, {source}: {name}: {s}")));
                    }
                    last = Some(seen);
                }
                assert!(last.is_some() || source == API, "{what}: {source} never showed {name}");
            }
        }
        assert!(backward.is_empty(), "{what}:\n{}", backward.join("\n"));
    }

    /// Asserts that pods never changed from their state before.
    ///
    /// # Panics
    /// One did; the message has each such state.
    pub fn assert_steady(&self, what: &str, before: &Before) {
        let mut differ = Vec::new();
        let records = self.whole();
        for (source, name) in before.keys() {
            let shown = records.iter().any(|r| r.by == *source && r.name == *name);
            assert!(shown, "{what}: {source} never showed {name}; the recorder saw {} states", records.len());
        }
        for record in &records {
            let Some(want) = before.get(&(record.by, record.name.clone())) else { continue };
            let at = record.at.as_millis();
            match &record.seen {
                None => differ.push(format!("{at} ms, {}: {} is gone", record.by, record.name)),
                Some(seen) if seen.steady() != *want => {
                    differ.push(format!("{at} ms, {}: {:#?}", record.by, difference(want, &seen.steady())));
                }
                Some(_) => {}
            }
        }
        assert!(
            differ.is_empty(),
            "{what}: {} of {} states differ from before:\n{}",
            differ.len(),
            records.len(),
            differ.join("\n")
        );
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Returns illegal steps of a starting pod between two states.
fn steps_back(last: &Seen, now: &Seen) -> Vec<String> {
    let mut out = Vec::new();
    let mut unless = |fine: bool, what: &str, was: &str, is: &str| {
        if !fine {
            out.push(format!("{what}: {was:?} became {is:?}"));
        }
    };
    unless(last.uid() == now.uid(), "uid", last.uid(), now.uid());
    unless(!last.is_ready() || now.is_ready(), "Ready", "True", "not True");
    let after = now.containers();
    for (name, was) in last.containers() {
        let is = after.get(&name).cloned().unwrap_or_else(|| was.clone());
        unless(is.restarts == 0, &format!("{name} restarts"), "0", &is.restarts.to_string());
        // A container whose start was interrupted never ran: it is removed, and another one is created.
        let may_go = was.id.is_empty() || (was.started_at.is_empty() && was.state.starts_with("waiting"));
        unless(may_go || was.id == is.id, &format!("{name} id"), &was.id, &is.id);
        let same_start = was.started_at.is_empty() || was.started_at == is.started_at;
        unless(same_start, &format!("{name} started at"), &was.started_at, &is.started_at);
        unless(!was.started || is.started, &format!("{name} started"), "true", "false");
        unless(
            was.state != "running" || is.state == "running",
            &format!("{name} state"),
            &was.state,
            &is.state,
        );
    }
    out
}

/// Returns only the differences, for a readable message.
fn difference(want: &Steady, got: &Steady) -> Vec<String> {
    let mut out = Vec::new();
    let mut compare = |what: String, want: String, got: String| {
        if want != got {
            out.push(format!("{what}: {want} became {got}"));
        }
    };
    compare("uid".to_owned(), want.uid.clone(), got.uid.clone());
    compare("phase".to_owned(), want.phase.clone(), got.phase.clone());
    for name in want.conditions.keys().chain(got.conditions.keys()) {
        let text = |s: &Steady| format!("{:?}", s.conditions.get(name));
        compare(format!("condition {name}"), text(want), text(got));
    }
    for name in want.containers.keys().chain(got.containers.keys()) {
        let text = |s: &Steady| format!("{:?}", s.containers.get(name));
        compare(format!("container {name}"), text(want), text(got));
    }
    out.dedup();
    out
}

async fn podsync_states(
    channel: Channel,
    records: Arc<Mutex<Vec<Record>>>,
    began: Instant,
    complete: CancellationToken,
) {
    loop {
        let request =
            WatchPodsRequest { hello: Some(quintlet_proto::hello()), ..WatchPodsRequest::default() };
        // A stream that fails or ends is opened again, since pod-sync is killed.
        if let Ok(stream) = PodSyncClient::new(channel.clone()).watch_pods(request).await {
            let mut stream = stream.into_inner();
            while let Ok(Some(message)) = stream.message().await {
                let (name, seen) = match message.event {
                    Some(Event::Pod(view)) => (view.name.clone(), Some(Seen::from_view(view))),
                    Some(Event::Removed(removed)) => (removed.name, None),
                    Some(Event::SnapshotEnd(_)) => {
                        complete.cancel();
                        continue;
                    }
                    Some(Event::Hello(_) | Event::Problems(_)) | None => continue,
                };
                records.lock().push(Record { at: began.elapsed(), by: PODSYNC, name, seen });
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Watches the API server, so that short-lived states are recorded as well.
async fn api_states(
    api: TestApi,
    records: Arc<Mutex<Vec<Record>>>,
    broken: Arc<Mutex<Option<String>>>,
    began: Instant,
    complete: CancellationToken,
) {
    let pods: Api<DynamicObject> = Api::all_with(api.client(), &ApiResource::erase::<Pod>(&()));
    let show = |object: &DynamicObject, is_there: bool| {
        let name = object.metadata.name.clone().unwrap_or_default();
        let seen = is_there.then(|| Seen::from_api(serde_json::to_value(object).unwrap_or_default()));
        records.lock().push(Record { at: began.elapsed(), by: API, name, seen });
    };
    let failed = |why: String| *broken.lock() = Some(why);
    let list = match pods.list(&ListParams::default()).await {
        Ok(list) => list,
        Err(e) => return failed(e.to_string()),
    };
    for object in &list.items {
        show(object, true);
    }
    let mut version = list.metadata.resource_version.unwrap_or_default();
    complete.cancel();
    loop {
        let mut events = match pods.watch(&WatchParams::default(), &version).await {
            Ok(events) => Box::pin(events),
            Err(e) => return failed(e.to_string()),
        };
        // A server may end a watch, which then continues from its last version.
        while let Some(Ok(event)) = events.next().await {
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    version = object.metadata.resource_version.clone().unwrap_or_default();
                    show(&object, true);
                }
                WatchEvent::Deleted(object) => {
                    version = object.metadata.resource_version.clone().unwrap_or_default();
                    show(&object, false);
                }
                WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                WatchEvent::Error(status) => return failed(status.to_string()),
            }
        }
    }
}
