//! Events about pods and the node: kept for `explain`, sent to status-reporter.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_kit::clock::Clock;
use quintlet_kit::queue::Counted;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_model::text;
use quintlet_proto::status::v1 as wire;
use quintlet_proto::status::v1::status_reporter_client::StatusReporterClient;
use quintlet_telemetry::{metrics, propagate};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Channel;

use crate::unsent::{QUEUE, UnsentEvents};

/// Events kept for `quintctl explain` and `quintctl watch`.
const KEPT: usize = 1000;
/// Events of one pod that are kept, so that a pod with many leaves those of others.
const KEPT_OF_POD: usize = 100;
/// Longest wait of [`record_setup_failure`].
const SETUP_FAILURE_WAIT: Duration = Duration::from_secs(3);
/// Attempts after an error that may be the event's fault.
const RETRIES: u32 = 10;

/// Type of an event (`k8s.io/api/core/v1: EventTypeNormal`, `EventTypeWarning`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventType {
    /// The pod or node works as intended.
    Normal,
    /// Something failed or may fail.
    Warning,
}

impl EventType {
    /// Returns the value of an event's `type`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Sequence number of an event in this process.
pub type EventNumber = u64;

/// An event that was recorded, with the number of its repetitions.
#[derive(Debug, Clone)]
pub struct RecordedEvent {
    /// Number of the last occurrence.
    pub number: EventNumber,
    /// Time of the last occurrence, in nanoseconds since 1970.
    pub at_unix_ns: i64,
    /// UID of the pod that the event is about.
    pub uid: String,
    /// `namespace/name`.
    pub pod: String,
    /// Normal or Warning.
    pub kind: EventType,
    /// Reason in CamelCase, as the kubelet has it.
    pub reason: String,
    /// Text for the user.
    pub message: String,
    /// Field of the pod that the event is about, like `spec.containers{main}`; empty for the whole pod.
    pub field_path: String,
    /// Occurrences of the same event.
    pub count: u32,
}

/// The events that the task `events` sends.
#[derive(Debug)]
struct Outgoing {
    unsent: Mutex<UnsentEvents>,
    added: Notify,
    queued: Gauge,
    dropped: Counter,
    queue: Counted,
}

impl Outgoing {
    // When the queue is full, the event is dropped and counted.
    fn add(&self, event: wire::RecordEventRequest, at_unix_ns: i64) {
        let trace = propagate::current_trace();
        let event = wire::RecordEventRequest { id: rand::random(), at_unix_ns, trace, ..event };
        let mut unsent = self.unsent.lock();
        if !unsent.push(event) {
            self.dropped.inc();
            self.queue.dropped();
        }
        self.count(&unsent);
        drop(unsent);
        self.added.notify_one();
    }

    fn remove_first(&self) {
        let mut unsent = self.unsent.lock();
        unsent.remove_first();
        self.count(&unsent);
    }

    fn count(&self, unsent: &UnsentEvents) {
        self.queue.set(unsent.len());
        self.queued.set(i64::try_from(unsent.len()).unwrap_or(i64::MAX));
    }
}

/// Records events about pods and the node, and sends them to status-reporter. Messages have [`text::EVENT`]
/// bytes at most. Clones share one queue.
#[derive(Debug, Clone)]
pub struct Events {
    kept: Arc<Mutex<VecDeque<RecordedEvent>>>,
    out: Arc<Outgoing>,
    clock: Clock,
    next: Arc<AtomicU64>,
}

impl Events {
    /// Creates the recorder and spawns the task `events`, which sends to the socket until `stop`, beginning
    /// with `unsent`.
    #[must_use]
    pub fn new(socket: PathBuf, unsent: UnsentEvents, clock: Clock, stop: CancellationToken) -> Self {
        let out = Arc::new(Outgoing {
            unsent: Mutex::new(unsent),
            added: Notify::new(),
            queued: metrics::gauge("quintlet_events_queued", "Events waiting to be written"),
            dropped: metrics::counter("quintlet_events_dropped", "Events lost because the queue was full"),
            queue: Counted::new("events", QUEUE),
        });
        out.count(&out.unsent.lock());
        let client = StatusReporterClient::new(quintlet_kit::socket::channel(socket));
        let sent = Arc::clone(&out);
        quintlet_kit::task::spawn("events", async move {
            stop.run_until_cancelled(send(client, &sent)).await;
        });
        Self { kept: Arc::default(), out, clock, next: Arc::default() }
    }

    /// Records an event about a pod, or about the field `field_path` of the pod.
    pub fn pod(&self, pod: &Pod, kind: EventType, reason: &str, message: &str, field_path: &str) {
        let message = text::cut(message, text::EVENT);
        let (uid, name) = (pod.metadata.uid.as_deref().unwrap_or_default(), namespaced_name(pod));
        match kind {
            EventType::Normal => tracing::debug!(pod.uid = uid, reason, text = message, "event"),
            EventType::Warning if is_node_fault(reason) => {
                tracing::warn!(pod.name = name, pod.uid = uid, reason, text = message, "warning event");
            }
            EventType::Warning => {
                tracing::info!(pod.name = name, pod.uid = uid, reason, text = message, "warning event");
            }
        }
        self.record_of_pod(pod, kind, reason, message, field_path, BTreeMap::new());
    }

    /// Records an event about a pod with annotations.
    pub fn pod_annotated(
        &self,
        pod: &Pod,
        kind: EventType,
        reason: &str,
        message: &str,
        annotations: &BTreeMap<String, String>,
    ) {
        let message = text::cut(message, text::EVENT);
        let (uid, name) = (pod.metadata.uid.as_deref().unwrap_or_default(), namespaced_name(pod));
        tracing::info!(pod.name = name, pod.uid = uid, reason, text = message, "event");
        self.record_of_pod(pod, kind, reason, message, "", annotations.clone());
    }

    /// Records a Warning about a pod and about the node that follows from the node's configuration. It is
    /// logged at INFO, since every pod like this one has it.
    pub fn pod_and_node(&self, pod: &Pod, node: &str, reason: &str, message: &str, node_message: &str) {
        let message = text::cut(message, text::EVENT);
        let (uid, name) = (pod.metadata.uid.as_deref().unwrap_or_default(), namespaced_name(pod));
        tracing::info!(pod.name = name, pod.uid = uid, reason, text = message, "warning event");
        self.record_of_pod(pod, EventType::Warning, reason, message, "", BTreeMap::new());
        self.node_unlogged(node, EventType::Warning, reason, node_message);
    }

    fn record_of_pod(
        &self,
        pod: &Pod,
        kind: EventType,
        reason: &str,
        message: &str,
        field_path: &str,
        annotations: BTreeMap<String, String>,
    ) {
        let meta = &pod.metadata;
        let namespace = meta.namespace.clone().unwrap_or_default();
        let name = meta.name.clone().unwrap_or_default();
        let uid = meta.uid.clone().unwrap_or_default();
        self.keep(&uid, &namespaced_name(pod), kind, reason, message, field_path);
        // A static pod's events go to its mirror, which has the same name; its own UID is unknown to the API
        // server.
        let request = wire::RecordEventRequest {
            kind: "Pod".to_owned(),
            namespace,
            name,
            uid,
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            field_path: field_path.to_owned(),
            r#type: kind.name().to_owned(),
            reason: reason.to_owned(),
            message: message.to_owned(),
            annotations: annotations.into_iter().collect(),
            ..wire::RecordEventRequest::default()
        };
        self.out.add(request, self.now_unix_ns());
    }

    /// Events have the time of their cause, however late they are written
    /// (`client-go/tools/record: makeEvent`).
    fn now_unix_ns(&self) -> i64 {
        unix_ns(&self.clock)
    }

    /// Records an event about a PersistentVolumeClaim.
    pub fn claim(&self, claim: &PersistentVolumeClaim, kind: EventType, reason: &str, message: &str) {
        let message = text::cut(message, text::EVENT);
        let meta = claim.metadata.clone();
        let request = wire::RecordEventRequest {
            kind: "PersistentVolumeClaim".to_owned(),
            namespace: meta.namespace.unwrap_or_default(),
            name: meta.name.unwrap_or_default(),
            uid: meta.uid.unwrap_or_default(),
            resource_version: meta.resource_version.unwrap_or_default(),
            r#type: kind.name().to_owned(),
            reason: reason.to_owned(),
            message: message.to_owned(),
            ..wire::RecordEventRequest::default()
        };
        self.out.add(request, self.now_unix_ns());
    }

    /// Records an event about a PersistentVolume.
    pub fn persistent_volume(&self, name: &str, uid: &str, kind: EventType, reason: &str, message: &str) {
        let request = wire::RecordEventRequest {
            kind: "PersistentVolume".to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            r#type: kind.name().to_owned(),
            reason: reason.to_owned(),
            message: message.to_owned(),
            ..wire::RecordEventRequest::default()
        };
        self.out.add(request, self.now_unix_ns());
    }

    /// Records an event about the node.
    pub fn node(&self, name: &str, kind: EventType, reason: &str, message: &str) {
        match kind {
            EventType::Normal => tracing::debug!(reason, text = message, "node event"),
            EventType::Warning => tracing::warn!(reason, text = message, "node warning event"),
        }
        self.node_unlogged(name, kind, reason, message);
    }

    /// Records an event about the node without logging it. For events that are logged with their pod.
    pub fn node_unlogged(&self, name: &str, kind: EventType, reason: &str, message: &str) {
        self.out.add(node_event(name, kind, reason, message), self.now_unix_ns());
    }

    fn keep(&self, uid: &str, pod: &str, kind: EventType, reason: &str, message: &str, field_path: &str) {
        let at_unix_ns = self.now_unix_ns();
        let mut kept = self.kept.lock();
        let same = kept.iter().rposition(|e| {
            e.uid == uid && e.reason == reason && e.message == message && e.field_path == field_path
        });
        let count = match same.and_then(|i| kept.remove(i)) {
            Some(e) => e.count.saturating_add(1),
            None => 1,
        };
        let of_pod = kept.iter().filter(|event| event.uid == uid).count();
        if of_pod >= KEPT_OF_POD {
            let oldest = kept.iter().position(|event| event.uid == uid);
            let _older = oldest.and_then(|at| kept.remove(at));
        } else if kept.len() >= KEPT {
            kept.pop_front();
        }
        kept.push_back(RecordedEvent {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            at_unix_ns,
            uid: uid.to_owned(),
            pod: pod.to_owned(),
            kind,
            reason: reason.to_owned(),
            message: message.to_owned(),
            field_path: field_path.to_owned(),
            count,
        });
    }

    /// Returns the number that the next event will have.
    #[must_use]
    pub fn next_number(&self) -> EventNumber {
        self.next.load(Ordering::Relaxed)
    }

    /// Returns whether a pod has a Warning with the number `since` or a later one.
    #[must_use]
    pub fn has_warning_since(&self, uid: &str, since: EventNumber) -> bool {
        let kept = self.kept.lock();
        let mut new = kept.iter().rev().take_while(|e| e.number >= since);
        new.any(|e| e.uid == uid && e.kind == EventType::Warning)
    }

    /// Returns the newest `limit` events, oldest first, of the pod `uid` or, if `uid` is empty, of all pods.
    #[must_use]
    pub fn list(&self, uid: &str, limit: usize) -> Vec<RecordedEvent> {
        let kept = self.kept.lock();
        let mut out: Vec<_> =
            kept.iter().rev().filter(|e| uid.is_empty() || e.uid == uid).take(limit).cloned().collect();
        out.reverse();
        out
    }
}

/// Records that this process cannot start, as a Warning of the node (`pkg/kubelet: Run`). Returns once
/// status-reporter has written the event, or after three seconds.
pub async fn record_setup_failure(socket: PathBuf, node: &str, error: &str, clock: &Clock) {
    let event = wire::RecordEventRequest {
        id: rand::random(),
        at_unix_ns: unix_ns(clock),
        ..node_event(node, EventType::Warning, "KubeletSetupFailed", error)
    };
    let mut client = StatusReporterClient::new(quintlet_kit::socket::channel(socket));
    let written = tokio::time::timeout(SETUP_FAILURE_WAIT, async {
        while let Err(status) = client.record_event(event.clone()).await
            && !is_refusal(status.code(), 0)
        {
            tokio::time::sleep(CONNECT_INTERVAL).await;
        }
    });
    if written.await.is_err() {
        tracing::info!("status-reporter has not written the event of the failed start in time");
    }
}

fn unix_ns(clock: &Clock) -> i64 {
    i64::try_from(clock.wall().as_nanosecond()).unwrap_or(i64::MAX)
}

fn node_event(name: &str, kind: EventType, reason: &str, message: &str) -> wire::RecordEventRequest {
    wire::RecordEventRequest {
        kind: "Node".to_owned(),
        name: name.to_owned(),
        r#type: kind.name().to_owned(),
        reason: reason.to_owned(),
        message: text::cut(message, text::EVENT).to_owned(),
        ..wire::RecordEventRequest::default()
    }
}

/// Returns whether a Warning with this reason reports a fault of the node. Other Warnings report a fault of
/// the pod.
fn is_node_fault(reason: &str) -> bool {
    matches!(
        reason,
        "FailedCreatePodContainer"
            | "FailedCreatePodSandBox"
            | "FailedKillPod"
            | "FailedPodSandBoxStatus"
            | "FailedSync"
            | "NetworkNotReady"
            | "ResizeError"
    )
}

fn namespaced_name(pod: &Pod) -> String {
    let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
    format!("{}/{}", namespace.as_deref().unwrap_or_default(), name.as_deref().unwrap_or_default())
}

/// Sends events, one after the other. Those that are unsent when pod-sync ends are sent by the next one.
async fn send(mut client: StatusReporterClient<Channel>, out: &Outgoing) {
    let mut failures = 0_u32;
    loop {
        let first = out.unsent.lock().first().cloned();
        let Some(event) = first else {
            out.added.notified().await;
            continue;
        };
        let reason = event.reason.clone();
        if let Err(status) = client.record_event(event).await {
            let code = status.code();
            if !is_refusal(code, failures) {
                failures = failures.saturating_add(u32::from(code != Code::Unavailable));
                tokio::time::sleep(CONNECT_INTERVAL).await;
                continue;
            }
            tracing::warn!(error = status.message(), reason, "status-reporter refused event");
        }
        failures = 0;
        out.remove_first();
    }
}

/// Returns whether an event is not sent again. A call has any code if status-reporter ends during it. So
/// other errors than a refusal are retried, but not without end: the event may be their cause.
///
/// `failures`: earlier answers to the same event with other codes than Unavailable.
fn is_refusal(code: Code, failures: u32) -> bool {
    match code {
        Code::Unavailable => false,
        Code::InvalidArgument => true,
        _ => failures >= RETRIES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_dropped_if_it_is_refused_or_fails_again_and_again() {
        for (code, failures, refusal) in [
            (Code::Unavailable, u32::MAX, false),
            (Code::InvalidArgument, 0, true),
            (Code::Cancelled, 0, false),
            (Code::Unknown, 9, false),
            (Code::Internal, 10, true),
        ] {
            assert_eq!(is_refusal(code, failures), refusal, "{code:?} after {failures}");
        }
    }

    #[tokio::test]
    async fn an_event_has_the_trace_in_which_it_occurred() {
        quintlet_telemetry::init("pod-sync", &quintlet_telemetry::TelemetryOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let unsent = UnsentEvents::open(dir.path().join("events"), "boot");
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::ZERO);
        let events = Events::new("/nowhere".into(), unsent, clock, CancellationToken::new());
        let pass = tracing::info_span!("pass");
        pass.in_scope(|| events.node("n1", EventType::Normal, "InPass", ""));
        events.node("n1", EventType::Normal, "Outside", "");
        let trace = propagate::trace_of(&pass);
        assert!(trace.is_some());
        let mut unsent = events.out.unsent.lock();
        for trace in [trace, None] {
            assert_eq!(unsent.first().unwrap().trace, trace);
            unsent.remove_first();
        }
    }

    #[tokio::test]
    async fn an_event_that_waits_has_the_time_of_its_cause() {
        let dir = tempfile::tempdir().unwrap();
        let unsent = UnsentEvents::open(dir.path().join("events"), "boot");
        let begin = jiff::Timestamp::from_second(1_700_000_000).unwrap();
        let clock = Clock::fixed(begin, Duration::ZERO);
        let events = Events::new("/nowhere".into(), unsent, clock.clone(), CancellationToken::new());
        let warning = EventType::Warning;
        let step = Duration::from_secs(60);
        events.pod(&Pod::default(), warning, "P", "", "");
        clock.advance(step);
        events.node("n1", warning, "N", "");
        clock.advance(step);
        events.claim(&PersistentVolumeClaim::default(), warning, "C", "");
        clock.advance(step);
        events.persistent_volume("v", "u", warning, "V", "");
        clock.advance(step);
        let mut unsent = events.out.unsent.lock();
        for (reason, seconds) in [("P", 0), ("N", 60), ("C", 120), ("V", 180)] {
            let event = unsent.first().unwrap();
            let at = (1_700_000_000 + seconds) * 1_000_000_000;
            assert_eq!((event.reason.as_str(), event.at_unix_ns), (reason, at));
            unsent.remove_first();
        }
    }

    #[tokio::test]
    async fn a_pod_with_many_events_leaves_those_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let unsent = UnsentEvents::open(dir.path().join("events"), "boot");
        let events = Events::new("/nowhere".into(), unsent, Clock::system(), CancellationToken::new());
        let pod = |uid: &str| {
            let mut pod = Pod::default();
            pod.metadata.uid = Some(uid.to_owned());
            pod
        };
        let (quiet, loud) = (pod("quiet"), pod("loud"));
        events.pod(&quiet, EventType::Warning, "BackOff", "once", "");
        for n in 0..3 * KEPT {
            events.pod(&loud, EventType::Warning, "Unhealthy", &n.to_string(), "");
        }
        let kept = events.kept.lock();
        let events_of = |uid: &str| kept.iter().filter(|event| event.uid == uid).collect::<Vec<_>>();
        assert_eq!(events_of("quiet").len(), 1);
        let of_loud = events_of("loud");
        assert_eq!(of_loud.len(), KEPT_OF_POD);
        assert_eq!(of_loud.last().unwrap().message, (3 * KEPT - 1).to_string());
    }

    #[tokio::test]
    async fn a_warning_is_logged_at_info_for_a_fault_of_the_pod_and_at_warn_for_a_fault_of_the_node() {
        let lines = quintlet_testkit::logs::Lines::default();
        let log = quintlet_testkit::logs::capture("pod-sync", tracing::Level::INFO, &lines);
        let _of_this_thread = tracing::dispatcher::set_default(&log);
        let stop = CancellationToken::new();
        let dir = tempfile::tempdir().unwrap();
        let unsent = UnsentEvents::open(dir.path().join("events"), "boot");
        let events = Events::new("/nowhere".into(), unsent, Clock::system(), stop.clone());
        let pod = Pod::default();
        for (reason, level) in [
            ("Unhealthy", "info"),
            ("BackOff", "info"),
            ("Failed", "info"),
            ("FailedMount", "info"),
            ("FailedPostStartHook", "info"),
            ("FailedCreatePodSandBox", "warn"),
            ("FailedKillPod", "warn"),
            ("NetworkNotReady", "warn"),
        ] {
            events.pod(&pod, EventType::Warning, reason, "text", "");
            let line = lines.all().pop().unwrap();
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!(line["reason"], reason);
            assert_eq!(line["level"].as_str().map(str::to_lowercase).as_deref(), Some(level), "{line}");
        }
        stop.cancel();
    }
}
