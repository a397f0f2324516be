//! The service PodSync of podsync.v1: pods, decisions and events.

use std::collections::HashMap;
use std::sync::Arc;

use quintlet_kit::messages::{self, Bounded};
use quintlet_kit::queue;
use quintlet_kit::socket::Peer;
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::pod_sync_server::PodSync;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use pod_sync_offline::{OfflineCache, OfflineStart};
use pod_sync_views::{PodView, columns};
use pod_sync_worker::context::{FaultIsolation, NodeConfig, Reporting, WorkerControl};

use crate::volumes::VolumeLists;

/// Length of the queue of changes to one reader. A slow reader skips states; the workers never wait for it.
const STREAM: usize = 64;
/// The same for a reader of whole pods, which have up to 4 MiB each.
const WHOLE_STREAM: usize = 2;
/// The streams of pods and of events, in metrics.
const WATCH_PODS: &str = "PodSync.WatchPods";
const LIST_PODS: &str = "PodSync.ListPods";
const LIST_EVENTS: &str = "PodSync.ListEvents";
/// Number of events in an explanation.
const EXPLAIN_EVENTS: usize = 20;

/// Lists and explains the pods of this node, and retries suspended ones.
#[derive(Debug, Clone)]
pub(crate) struct PodService {
    pub(crate) node: Arc<NodeConfig>,
    pub(crate) reporting: Arc<Reporting>,
    pub(crate) control: Arc<WorkerControl>,
    pub(crate) faults: Arc<FaultIsolation>,
    /// The volumes in explanations.
    pub(crate) volumes: VolumeLists,
    /// The offline cache; none if it is off.
    pub(crate) offline: Option<Arc<OfflineCache>>,
}

impl PodService {
    fn find(&self, selector: &str) -> Result<Arc<PodView>, Status> {
        if let Ok(uid) = PodUid::parse(selector)
            && let Some(view) = self.reporting.views.get(&uid)
        {
            return Ok(view);
        }
        let (namespace, name) = match selector.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, selector),
        };
        let node = format!("-{}", self.node.settings.node_name.to_lowercase());
        let mut all = self.reporting.views.all();
        let pods = all.iter().map(|v| (&*v.pod_ref.namespace, &*v.pod_ref.name, v.created_unix_ns));
        let meant = meant(pods, namespace, name, &node);
        meant
            .map(|at| all.swap_remove(at))
            .ok_or_else(|| Status::not_found(format!("no pod {selector:?} on this node")))
    }
}

/// Selects one of the pods (namespace, name, time) by name: an exact match, or a static pod whose name
/// without the node suffix matches. Of two static pods with the same name, of which one replaces the other,
/// it selects the newer one.
fn meant<'a>(
    pods: impl Iterator<Item = (&'a str, &'a str, i64)>,
    namespace: Option<&str>,
    name: &str,
    node: &str,
) -> Option<usize> {
    pods.enumerate()
        .filter(|(_, (pod_namespace, ..))| namespace.is_none_or(|n| n == *pod_namespace))
        .filter_map(|(at, (_, has, time))| {
            let is_exact = has == name;
            (is_exact || has.strip_suffix(node) == Some(name)).then_some((is_exact, time, at))
        })
        .max()
        .map(|(.., at)| at)
}

/// The part of the v1 Pod that a view has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObjectPart {
    Nothing,
    ForStatistics,
    Whole,
}

impl ObjectPart {
    fn of_list(request: wire::ListPodsRequest) -> Self {
        if request.brief { Self::Nothing } else { Self::Whole }
    }

    fn of_watch(request: &wire::WatchPodsRequest) -> Self {
        match request {
            wire::WatchPodsRequest { brief: true, .. } => Self::Nothing,
            wire::WatchPodsRequest { for_statistics: true, .. } => Self::ForStatistics,
            wire::WatchPodsRequest { .. } => Self::Whole,
        }
    }

    /// Returns the JSON of this part of a pod.
    fn json(self, view: &PodView) -> Vec<u8> {
        let object = match self {
            Self::Nothing => return Vec::new(),
            Self::ForStatistics => view.object_for_statistics(),
            Self::Whole => view.object(),
        };
        serde_json::to_vec(&object).unwrap_or_default()
    }
}

fn wire_view(view: &PodView, part: ObjectPart) -> wire::PodView {
    let status = view.status();
    let c = columns(&view.pod, &status, view.deletion.is_some());
    wire::PodView {
        uid: view.pod_ref.uid.to_string(),
        name: view.pod_ref.name.to_string(),
        namespace: view.pod_ref.namespace.to_string(),
        source: view.source.name().to_owned(),
        pod: part.json(view),
        worker: view.worker.to_owned(),
        waiting: view.waiting.as_ref().map(|w| wire::Waiting {
            reason: w.reason.clone(),
            message: w.message.clone(),
            container: w.container.clone(),
            since_unix_ns: w.since_unix_ns,
            until_unix_ns: w.until_unix_ns,
        }),
        ready: c.ready,
        status: if view.is_removed && matches!(view.worker, "sync" | "terminating") {
            "Terminating".to_owned()
        } else {
            c.status
        },
        restarts: c.restarts,
        pod_ip: status.pod_ip.unwrap_or_default(),
        created_unix_ns: view.created_unix_ns,
        last_restart_unix_ns: c.last_restart_unix_ns,
        version: view.version,
        resource_version: view.resource_version.clone(),
        mirror_uid: view.mirror_uid.clone(),
    }
}

/// Returns the view for a stream. A pod that is too large comes without its JSON.
fn bounded_view(view: &PodView, part: ObjectPart, stream: &'static str) -> wire::PodView {
    let complete = wire_view(view, part);
    match messages::fits_inside(&complete) {
        Ok(()) => complete,
        Err(error) => {
            messages::count_left_out(stream);
            tracing::info!(pod.uid = %view.pod_ref.uid, bytes = error.bytes, "pod is too large for the stream of pods");
            wire_view(view, ObjectPart::Nothing)
        }
    }
}

fn problems(reporting: &Reporting) -> Vec<wire::SourceProblem> {
    reporting
        .views
        .problems()
        .into_iter()
        .map(|(source, p, since)| wire::SourceProblem {
            source: source.name().to_owned(),
            origin: p.origin,
            field: p.field,
            message: p.message,
            since_unix_ns: since,
        })
        .collect()
}

fn event(event: wire::watch_pods_event::Event) -> Result<wire::WatchPodsEvent, Status> {
    Ok(wire::WatchPodsEvent { event: Some(event), trace: None })
}

#[tonic::async_trait]
impl PodSync for PodService {
    type ListPodsStream = Bounded<wire::ListPodsReply>;

    async fn list_pods(
        &self,
        request: Request<wire::ListPodsRequest>,
    ) -> Result<Response<Self::ListPodsStream>, Status> {
        let part = ObjectPart::of_list(request.into_inner());
        self.reporting.views.restored().await;
        let views = self.reporting.views.all().into_iter();
        let pods = messages::chunks(views.map(move |v| bounded_view(&v, part, LIST_PODS)));
        let pods = pods.map(|pods| wire::ListPodsReply { pods, problems: Vec::new() });
        let problems = messages::chunks(problems(&self.reporting));
        let problems = problems.map(|problems| wire::ListPodsReply { pods: Vec::new(), problems });
        Ok(Response::new(Bounded::of_chunks(LIST_PODS, pods.chain(problems))))
    }

    type WatchPodsStream = Bounded<wire::WatchPodsEvent>;

    async fn watch_pods(
        &self,
        request: Request<wire::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        use wire::watch_pods_event::Event;
        let part = ObjectPart::of_watch(&request.into_inner());
        let (name, places) = match part {
            ObjectPart::Whole => ("watch-whole-pods", WHOLE_STREAM),
            ObjectPart::Nothing | ObjectPart::ForStatistics => ("watch-pods", STREAM),
        };
        let (tx, rx) = queue::channel(name, places);
        let reporting = Arc::clone(&self.reporting);
        quintlet_kit::task::spawn("watch-pods", async move {
            let mut versions = reporting.views.subscribe();
            let mut sent: HashMap<PodUid, Arc<PodView>> = HashMap::new();
            let mut sent_problems = None;
            if tx.send(event(Event::Hello(quintlet_proto::hello()))).await.is_err() {
                return;
            }
            reporting.views.restored().await;
            let mut first = true;
            loop {
                versions.mark_unchanged();
                let now: HashMap<PodUid, Arc<PodView>> =
                    reporting.views.all().into_iter().map(|v| (v.pod_ref.uid.clone(), v)).collect();
                let mut out = Vec::new();
                for (uid, view) in &sent {
                    if !now.contains_key(uid) {
                        out.push(Event::Removed(wire::PodRemoved {
                            uid: uid.to_string(),
                            name: view.pod_ref.name.to_string(),
                            namespace: view.pod_ref.namespace.to_string(),
                        }));
                    }
                }
                let mut changed: Vec<_> = now
                    .values()
                    .filter(|v| sent.get(&v.pod_ref.uid).is_none_or(|s| s.version != v.version))
                    .collect();
                if first {
                    // node-api passes the snapshot on as it arrives.
                    changed.sort_by(|a, b| {
                        let (a, b) = (&a.pod_ref, &b.pod_ref);
                        (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid))
                    });
                } else {
                    changed.sort_by_key(|v| v.version);
                }
                // Each view is made when it is sent: together they may have hundreds of megabytes.
                for e in out
                    .drain(..)
                    .map(event)
                    .chain(changed.into_iter().map(|v| event(Event::Pod(bounded_view(v, part, WATCH_PODS)))))
                {
                    if tx.send(e).await.is_err() {
                        return;
                    }
                }
                let problems = problems(&reporting);
                if sent_problems.as_ref() != Some(&problems) {
                    out.push(Event::Problems(wire::Problems { problems: problems.clone() }));
                    sent_problems = Some(problems);
                }
                if std::mem::take(&mut first) {
                    out.push(Event::SnapshotEnd(wire::SnapshotEnd {}));
                }
                for e in out {
                    if tx.send(event(e)).await.is_err() {
                        return;
                    }
                }
                sent = now;
                // The version only signals a change; the views are read above.
                tokio::select! {
                    () = tx.closed() => return,
                    changed = versions.changed() => if changed.is_err() { return },
                }
            }
        });
        Ok(Response::new(Bounded::new(WATCH_PODS, ReceiverStream::new(rx))))
    }

    async fn get_pod(
        &self,
        request: Request<wire::GetPodRequest>,
    ) -> Result<Response<wire::PodView>, Status> {
        self.reporting.views.restored().await;
        Ok(Response::new(wire_view(&*self.find(&request.into_inner().pod)?, ObjectPart::Whole)))
    }

    async fn explain(
        &self,
        request: Request<wire::ExplainRequest>,
    ) -> Result<Response<wire::ExplainReply>, Status> {
        self.reporting.views.restored().await;
        let view = self.find(&request.into_inner().pod)?;
        let status = view.status();
        let containers = status
            .init_container_statuses
            .iter()
            .chain(&status.container_statuses)
            .chain(&status.ephemeral_container_statuses)
            .flatten()
            .map(explain_container)
            .collect();
        let d = &view.decision;
        let offline = self.offline.as_ref().and_then(|cache| cache.start_of(&view.pod_ref.uid));
        Ok(Response::new(wire::ExplainReply {
            pod: Some(wire_view(&view, ObjectPart::Whole)),
            decision: offline.iter().map(OfflineStart::describe).chain(d.lines.iter().cloned()).collect(),
            decided_unix_ns: d.at_unix_ns,
            runtime_epoch: d.saw.epoch,
            runtime_rev: d.saw.rev,
            observed_before_ms: d.age_ms,
            containers,
            last_errors: d.errors.clone(),
            events: self.events(view.pod_ref.uid.as_str(), EXPLAIN_EVENTS),
            trace_id: d.trace_id.clone(),
            volumes: self.volumes.of_pods(Some(&view.pod_ref.uid)),
        }))
    }

    async fn retry(
        &self,
        request: Request<wire::RetryRequest>,
    ) -> Result<Response<wire::RetryReply>, Status> {
        let is_operator = |peer: &Peer| peer.uid == 0 || peer.uid == nix::unistd::geteuid().as_raw();
        if !request.extensions().get::<Peer>().is_some_and(is_operator) {
            return Err(Status::permission_denied("only root may have a pod tried again"));
        }
        self.reporting.views.restored().await;
        let selector = request.into_inner().pod;
        let uid = match self.find(&selector) {
            Ok(view) => view.pod_ref.uid.clone(),
            // An orphaned pod has no view.
            Err(unknown) => PodUid::parse(&selector)
                .ok()
                .filter(|uid| self.faults.containment.suspension(uid).is_some())
                .ok_or(unknown)?,
        };
        let waited = self.faults.containment.end_suspension(&uid);
        tracing::info!(pod.uid = %uid, waited, "operator requested a retry of the suspended pod");
        self.control.wakeups.wake(&uid);
        self.control.wakeups.wake_housekeeping();
        Ok(Response::new(wire::RetryReply { uid: uid.to_string(), waited }))
    }

    type ListEventsStream = Bounded<wire::ListEventsReply>;

    async fn list_events(
        &self,
        request: Request<wire::ListEventsRequest>,
    ) -> Result<Response<Self::ListEventsStream>, Status> {
        let request = request.into_inner();
        let limit = if request.limit == 0 { usize::MAX } else { request.limit as usize };
        let events = messages::chunks(self.events(&request.uid, limit));
        let events = events.map(|events| wire::ListEventsReply { events });
        Ok(Response::new(Bounded::of_chunks(LIST_EVENTS, events)))
    }
}

impl PodService {
    fn events(&self, uid: &str, limit: usize) -> Vec<wire::EventView> {
        self.reporting
            .events
            .list(uid, limit)
            .into_iter()
            .map(|e| wire::EventView {
                at_unix_ns: e.at_unix_ns,
                pod: e.pod,
                r#type: e.kind.name().to_owned(),
                reason: e.reason,
                message: e.message,
                field_path: e.field_path,
                count: e.count,
            })
            .collect()
    }
}

fn explain_container(s: &k8s_openapi::api::core::v1::ContainerStatus) -> wire::ContainerExplain {
    let state = s.state.clone().unwrap_or_default();
    let last = s
        .last_state
        .as_ref()
        .and_then(|l| l.terminated.as_ref())
        .map(|t| format!("; exited {} {:?} before", t.exit_code, t.reason.clone().unwrap_or_default()));
    let (word, detail) = if let Some(w) = state.waiting {
        (
            w.reason.unwrap_or_else(|| "waiting".to_owned()),
            w.message.unwrap_or_default() + &last.unwrap_or_default(),
        )
    } else if state.running.is_some() {
        let started = if s.started == Some(true) { "" } else { ", startup probe has not passed" };
        let ready = if s.ready { "ready" } else { "not ready" };
        ("running".to_owned(), format!("{ready}{started}"))
    } else if let Some(t) = state.terminated {
        (
            "exited".to_owned(),
            format!("{} {:?} {}", t.exit_code, t.reason.unwrap_or_default(), t.message.unwrap_or_default()),
        )
    } else {
        ("unknown".to_owned(), String::new())
    };
    wire::ContainerExplain {
        name: s.name.clone(),
        state: word,
        detail,
        restarts: u32::try_from(s.restart_count).unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exact_name_is_selected_before_a_static_pod_whose_name_matches_without_the_node() {
        let pods =
            [("a", "web-n1", 9), ("b", "web", 1), ("a", "web", 2), ("b", "db-n1", 3), ("b", "db-n1", 5)];
        for (namespace, name, want) in [
            (Some("a"), "web", Some(2)),
            (Some("a"), "web-n1", Some(0)),
            (Some("b"), "web", Some(1)),
            (None, "web", Some(2)),
            (Some("b"), "db", Some(4)),
            (None, "db-n1", Some(4)),
            (Some("a"), "db", None),
            (None, "-n1", None),
        ] {
            assert_eq!(meant(pods.into_iter(), namespace, name, "-n1"), want, "{namespace:?} {name}");
        }
    }
}
