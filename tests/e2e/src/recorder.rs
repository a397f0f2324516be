//! Every state that was shown from before a fault until after it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

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

/// Between two attempts to reach a pod-sync that is away.
const RETRY: Duration = Duration::from_millis(20);

/// Between two looks at the API server, which is in this process and keeps no history that can be followed here.
const LOOK: Duration = Duration::from_millis(10);

/// One thing shown.
#[derive(Debug, Clone)]
pub struct Record {
    /// Since the recorder began.
    pub at: Duration,
    /// Who showed it: [`PODSYNC`] or [`API`].
    pub by: &'static str,
    /// Name of the pod.
    pub name: String,
    /// None: it is gone.
    pub seen: Option<Seen>,
}

/// What pods showed before a fault, by who showed it and the pod's name.
pub type Before = BTreeMap<(&'static str, String), Steady>;

/// pod-sync, as it shows pods on podsync.v1.
pub const PODSYNC: &str = "pod-sync";

/// The API server.
pub const API: &str = "API";

/// Records until dropped.
#[derive(Debug)]
pub struct Recorder {
    records: Arc<Mutex<Vec<Record>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Recorder {
    /// Begins: what pod-sync shows on WatchPods, and the pods of an API server. Returns when it has the pods that are there.
    ///
    /// # Panics
    /// pod-sync does not show them.
    pub async fn start(podsync: Channel, api: Option<TestApi>) -> Self {
        let records = Arc::new(Mutex::new(Vec::new()));
        let began = Instant::now();
        let complete = CancellationToken::new();
        let mut tasks = vec![quintlet_kit::task::spawn(
            "record-podsync",
            podsync_states(podsync, Arc::clone(&records), began, complete.clone()),
        )];
        if let Some(api) = api {
            tasks.push(quintlet_kit::task::spawn("record-api", api_states(api, Arc::clone(&records), began)));
        }
        let in_time = tokio::time::timeout(LONG, complete.cancelled()).await;
        assert!(in_time.is_ok(), "pod-sync shows no snapshot of its pods");
        Self { records, tasks }
    }

    /// What was recorded so far.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.records.lock().clone()
    }

    /// Asserts that pods never showed anything else than what they showed before.
    ///
    /// # Panics
    /// One did; the message has each such state.
    pub fn assert_steady(&self, what: &str, before: &Before) {
        let mut differ = Vec::new();
        let records = self.records();
        for (by, name) in before.keys() {
            let shown = records.iter().any(|r| r.by == *by && r.name == *name);
            assert!(shown, "{what}: {by} never showed {name}; the recorder saw {} states", records.len());
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

/// Only what differs, for a message that can be read.
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
        // A stream that cannot be opened or ends is opened again: pod-sync is what gets killed.
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

async fn api_states(api: TestApi, records: Arc<Mutex<Vec<Record>>>, began: Instant) {
    let mut last: BTreeMap<String, String> = BTreeMap::new();
    loop {
        let pods: Vec<Seen> = api.list("pods").into_iter().map(Seen::from_api).collect();
        let now: BTreeMap<String, String> = pods
            .iter()
            .map(|p| (p.name().to_owned(), p.text("/metadata/resourceVersion").to_owned()))
            .collect();
        let gone = last.keys().filter(|name| !now.contains_key(*name)).map(|name| (name.clone(), None));
        let changed = pods
            .into_iter()
            .filter(|p| last.get(p.name()).map(String::as_str) != Some(p.text("/metadata/resourceVersion")))
            .map(|p| (p.name().to_owned(), Some(p)));
        let all: Vec<_> = gone.chain(changed).collect();
        for (name, seen) in all {
            records.lock().push(Record { at: began.elapsed(), by: API, name, seen });
        }
        last = now;
        tokio::time::sleep(LOOK).await;
    }
}
