//! Limits and events of the service.

use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::{Events, Statuses, UnsentEvents, WorkerWakeups};
use pod_sync_metrics::PodMetrics;
use quintlet_pods_api::v1alpha1::pods_client::PodsClient;
use tempfile::TempDir;

use super::events::tests::view;
use super::*;

/// The service with views that a test publishes, and metrics of its own.
struct Served {
    api: PodsApi,
    clock: Clock,
    stop: CancellationToken,
    _dir: TempDir,
}

impl Served {
    /// Returns the service before the sources have delivered their pods.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(100));
        let unsent = UnsentEvents::open(dir.path().join("events"), "boot");
        let socket = dir.path().join("none.sock");
        let reporting = Reporting {
            statuses: Arc::new(Statuses::new(socket.clone(), Arc::new(WorkerWakeups::default()))),
            events: Events::new(socket, unsent, clock.clone(), stop.clone()),
            views: PodViews::default(),
            metrics: PodMetrics::default(),
        };
        let mut api = PodsApi::new(Arc::new(reporting), clock.clone());
        // Those of the registry belong to all tests of the process.
        api.metrics = Metrics {
            all: Family::default(),
            lists: Family::default(),
            gets: Family::default(),
            watches: Family::default(),
            dropped: Counter::default(),
        };
        Self { api, clock, stop, _dir: dir }
    }

    /// Returns the service after the sources have delivered their pods.
    fn ready() -> Self {
        let served = Self::new();
        served.views().set_sources_ready([]);
        served
    }

    fn views(&self) -> &PodViews {
        &self.api.reporting.views
    }

    /// Publishes a pod whose annotation has this number of bytes.
    fn publish_large(&self, uid: &str, bytes: usize) {
        let mut view = (*view(uid, Some("Running"), 0)).clone();
        let mut pod = Pod::clone(&view.pod);
        pod.metadata.annotations = Some([("a".to_owned(), "x".repeat(bytes))].into());
        view.pod = Arc::new(pod);
        self.views().publish(&PodUid::parse(uid).unwrap(), view);
    }

    async fn list(&self) -> Result<Vec<Vec<u8>>, Status> {
        // The rate of calls is not what a caller of this method tests.
        self.clock.advance(Duration::from_secs(1));
        Ok(self.api.list_pods(Request::new(ListPodsRequest {})).await?.into_inner().pods)
    }

    async fn get(&self, uid: &str) -> Result<Vec<u8>, Status> {
        let request = Request::new(GetPodRequest { pod_uid: uid.to_owned() });
        Ok(self.api.get_pod(request).await?.into_inner().pod)
    }

    async fn watch(&self) -> Result<Bounded<WatchPodsEvent>, Status> {
        // As in `list`.
        self.clock.advance(Duration::from_secs(1));
        self.open_watch().await
    }

    async fn open_watch(&self) -> Result<Bounded<WatchPodsEvent>, Status> {
        Ok(self.api.watch_pods(Request::new(WatchPodsRequest {})).await?.into_inner())
    }

    /// Returns the number of requests of a method with a status.
    fn count(&self, method: &Requests, status_code: &'static str) -> u64 {
        method.get_or_create(&RequestLabel { server_api_version: "v1alpha1", status_code }).get()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Returns code and text of the error of a call.
fn error<T>(result: Result<T, Status>) -> (Code, String) {
    let status = result.map(|_| ()).unwrap_err();
    (status.code(), status.message().to_owned())
}

fn publish(views: &PodViews, uid: &str, phase: &str) {
    views.publish(&PodUid::parse(uid).unwrap(), (*view(uid, Some(phase), 0)).clone());
}

async fn next(receiver: &mut mpsc::Receiver<Result<WatchPodsEvent, Status>>) -> (EventType, usize) {
    let event = receiver.recv().await.unwrap().unwrap();
    (event.r#type(), event.pod.len())
}

#[tokio::test(start_paused = true)]
async fn a_watcher_gets_the_pods_the_end_of_the_snapshot_and_the_newest_change() {
    let views = Arc::new(PodViews::default());
    publish(&views, "a", "Pending");
    let (sender, mut receiver) = quintlet_kit::queue::channel("test", QUEUE);
    let watched = Arc::clone(&views);
    let watch = quintlet_kit::task::spawn("watch", async move { send_events(&watched, &sender).await });
    assert_eq!(next(&mut receiver).await.0, EventType::Added);
    assert_eq!(next(&mut receiver).await, (EventType::InitialSyncComplete, 0));
    publish(&views, "a", "Running");
    assert_eq!(next(&mut receiver).await.0, EventType::Modified);
    views.remove(&PodUid::parse("a").unwrap());
    assert_eq!(next(&mut receiver).await.0, EventType::Deleted);
    drop(receiver);
    assert_eq!(watch.await.unwrap().code(), Code::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn a_watch_ends_with_a_status_if_its_client_does_not_read() {
    let views = PodViews::default();
    for pod in 0..=QUEUE {
        publish(&views, &format!("u{pod}"), "Running");
    }
    let (sender, mut receiver) = quintlet_kit::queue::channel("test", QUEUE);
    let began = tokio::time::Instant::now();
    let ended = send_events(&views, &sender).await;
    assert_eq!((ended.code(), ended.message()), (Code::ResourceExhausted, "watch client channel closed"));
    assert_eq!(began.elapsed(), STALL);
    drop(sender);
    let mut queued = 0;
    while receiver.recv().await.is_some() {
        queued += 1;
    }
    assert_eq!(queued, QUEUE, "no other event waits");
}

#[tokio::test(start_paused = true)]
async fn no_method_answers_before_every_source_has_delivered_its_pods() {
    let served = Served::new();
    publish(served.views(), "a", "Running");
    let initializing = (Code::FailedPrecondition, "Kubelet is initializing".to_owned());
    assert_eq!(error(served.list().await), initializing);
    assert_eq!(error(served.get("a").await), initializing);
    assert_eq!(error(served.watch().await), initializing);
    let metrics = &served.api.metrics;
    for method in [&metrics.lists, &metrics.gets, &metrics.watches] {
        assert_eq!(served.count(method, "FailedPrecondition"), 1);
    }
    assert_eq!(served.count(&metrics.all, "FailedPrecondition"), 3);
    served.views().set_sources_ready([]);
    let listed = served.list().await.unwrap();
    assert_eq!(listed, [served.get("a").await.unwrap()]);
    let first = served.watch().await.unwrap().next().await.unwrap().unwrap();
    assert_eq!((first.r#type(), first.pod), (EventType::Added, listed[0].clone()));
    assert_eq!(served.count(&metrics.all, "OK"), 2);
}

#[tokio::test(start_paused = true)]
async fn all_methods_share_a_rate() {
    let served = Served::ready();
    let rejected = (Code::ResourceExhausted, "rejected by rate limit".to_owned());
    assert_eq!(served.list().await.unwrap(), Vec::<Vec<u8>>::new());
    for _ in 1..BURST {
        assert_eq!(error(served.get("a").await).0, Code::NotFound);
    }
    assert_eq!(error(served.get("a").await), rejected);
    assert_eq!(error(served.api.list_pods(Request::new(ListPodsRequest {})).await), rejected);
    assert_eq!(error(served.open_watch().await), rejected);
    // One call of 100 per second is due.
    served.clock.advance(Duration::from_millis(10));
    assert_eq!(error(served.get("a").await).0, Code::NotFound);
    assert_eq!(error(served.get("a").await), rejected);
    served.clock.advance(Duration::from_millis(10));
    served.open_watch().await.unwrap();
    assert_eq!(error(served.open_watch().await), rejected);
    let metrics = &served.api.metrics;
    assert_eq!(served.count(&metrics.gets, "NotFound"), u64::from(BURST));
    assert_eq!(served.count(&metrics.all, "ResourceExhausted"), 0, "a rejected call is not counted");
}

#[tokio::test(start_paused = true)]
async fn a_hundred_watches_are_open_at_once_and_the_place_of_one_that_ended_is_free() {
    let served = Served::ready();
    let mut watches = Vec::new();
    for _ in 0..WATCHES {
        watches.push(served.watch().await.unwrap());
    }
    let full = (Code::ResourceExhausted, "100 watches are open, no more are served".to_owned());
    assert_eq!(error(served.watch().await), full);
    drop(watches.pop());
    // The task of the watch ends.
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(served.count(&served.api.metrics.watches, "Canceled"), 1);
    watches.push(served.watch().await.unwrap());
    assert_eq!(error(served.watch().await), full);
    assert_eq!(served.count(&served.api.metrics.watches, "ResourceExhausted"), 2);
}

#[tokio::test]
async fn a_connection_has_a_hundred_open_calls_and_a_further_one_waits() {
    let served = Served::ready();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pods-api.sock");
    let listener = quintlet_kit::socket::bind_unix(&path, 0o600).unwrap();
    quintlet_kit::task::spawn("server", serve(served.api.clone(), listener, served.stop.clone()));
    let mut client = PodsClient::new(quintlet_kit::socket::channel(path));
    let mut watches = Vec::new();
    for _ in 0..STREAMS {
        served.clock.advance(Duration::from_secs(1));
        watches.push(client.watch_pods(WatchPodsRequest {}).await.unwrap().into_inner());
    }
    let further = client.list_pods(ListPodsRequest {});
    let waited = tokio::time::timeout(Duration::from_millis(100), further).await;
    assert!(waited.is_err(), "{waited:?}");
    drop(watches.pop());
    served.clock.advance(Duration::from_secs(1));
    client.list_pods(ListPodsRequest {}).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_too_large_is_left_out_and_does_not_hide_the_others() {
    let served = Served::ready();
    publish(served.views(), "a", "Running");
    served.publish_large("b", limits::ITEM);
    publish(served.views(), "c", "Running");
    let (first, last) = (served.get("a").await.unwrap(), served.get("c").await.unwrap());
    let listed = served.list().await.unwrap();
    // A message with the large pod would have megabytes.
    assert!(listed == [first.clone(), last.clone()], "{} pods", listed.len());
    let (code, text) = error(served.get("b").await);
    assert_eq!(code, Code::ResourceExhausted);
    assert!(text.starts_with("the pod has 41943") && text.ends_with("bytes, more than 4194304"), "{text}");
    let mut events = Vec::new();
    let mut watch = served.watch().await.unwrap();
    while let Some(event) = watch.next().await {
        let event = event.unwrap();
        events.push((event.r#type(), event.pod));
        if events.last().is_some_and(|(kind, _)| *kind == EventType::InitialSyncComplete) {
            break;
        }
    }
    let complete = (EventType::InitialSyncComplete, Vec::new());
    let expected = [(EventType::Added, first), (EventType::Added, last), complete];
    assert!(events == expected, "{} events", events.len());
    // A pod that becomes small appears as a change.
    publish(served.views(), "b", "Running");
    assert_eq!(watch.next().await.unwrap().unwrap().pod, served.get("b").await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_list_is_refused_if_its_pods_are_together_too_large() {
    let served = Served::ready();
    // The encoded pods have a few bytes more.
    let most = limits::ANSWER / limits::ITEM;
    for pod in 0..most {
        served.publish_large(&format!("u{pod}"), limits::ITEM - 1000);
    }
    assert_eq!(served.list().await.unwrap().len(), most);
    served.publish_large("u", limits::ITEM - 1000);
    let text = "the pods have more than 67108864 bytes, use WatchPods".to_owned();
    assert_eq!(error(served.list().await), (Code::ResourceExhausted, text));
    assert!(served.get("u").await.is_ok());
}
