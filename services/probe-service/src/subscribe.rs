//! Serves `Probes` of `quintlet.subscribe.v1`: what programs that are not part of Quintlet may see of probes.
//! Output, targets and commands are not among it.

use std::sync::Arc;

use futures::StreamExt as _;
use quintlet_kit::journal::{Journal, JournalCursor, JournalEvent, JournalItem};
use quintlet_kit::messages::Bounded;
use quintlet_kit::subscribe::{Subscribers, Subscription};
use quintlet_model::ids::PodRef;
use quintlet_model::probe::{ProbeKey, ProbeMemory, ProbeResult, ProbeType};
use quintlet_proto::subscribe::v1 as wire;
use quintlet_proto::subscribe::v1::probes_server::Probes;
use quintlet_proto::subscribe::v1::watch_probes_event::Event;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// The state of each probe of this instance, for subscribers.
pub(crate) type ProbeJournal = Journal<ProbeKey, wire::ProbeState>;

/// The gRPC service. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct ProbesService {
    journal: Arc<ProbeJournal>,
    subscribers: Subscribers,
    /// Ends the streams at the stop.
    stop: CancellationToken,
}

impl ProbesService {
    pub(crate) fn new(journal: Arc<ProbeJournal>, stop: CancellationToken) -> Self {
        Self { journal, subscribers: Subscribers::new("probes"), stop }
    }
}

#[tonic::async_trait]
impl Probes for ProbesService {
    type WatchStream = Bounded<wire::WatchProbesEvent>;

    async fn watch(
        &self,
        request: Request<wire::WatchProbesRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let subscription = self.subscribers.admit(&request)?;
        let resume = request.into_inner().resume;
        let resume = resume.map(|at| JournalCursor { epoch: at.epoch, seq: at.seq });
        let hello =
            wire::WatchProbesEvent { event: Some(Event::Hello(quintlet_proto::hello())), cursor: None };
        let items = self.journal.read(resume).take_until(self.stop.clone().cancelled_owned());
        let events = items.map(move |item| event(item, &subscription));
        let events = futures::stream::iter([hello]).chain(events).map(Ok);
        Ok(Response::new(Bounded::new("Probes.Watch", events)))
    }
}

fn event(
    item: JournalItem<ProbeKey, wire::ProbeState>,
    subscription: &Subscription,
) -> wire::WatchProbesEvent {
    let event = match item.event {
        JournalEvent::SnapshotBegin => Event::SnapshotBegin(wire::SnapshotBegin {}),
        JournalEvent::Value(probe) => Event::Probe((*probe).clone()),
        JournalEvent::Gone(key) => Event::Gone(wire::ProbeGone {
            uid: key.uid.to_string(),
            container: key.container,
            kind: kind(key.probe) as i32,
        }),
        JournalEvent::SnapshotEnd => Event::SnapshotEnd(wire::SnapshotEnd {}),
        JournalEvent::Resync(reason) => {
            subscription.count_resync();
            Event::Resync(wire::Resync { reason: reason.to_owned() })
        }
        JournalEvent::Beat => Event::Beat(wire::Beat {}),
    };
    let cursor = item.cursor.map(|at| wire::Cursor { epoch: at.epoch, seq: at.seq });
    wire::WatchProbesEvent { event: Some(event), cursor }
}

/// Returns what subscribers see of a probe.
pub(crate) fn state(
    pod: &PodRef,
    key: &ProbeKey,
    memory: &ProbeMemory,
    changed_unix_ns: i64,
) -> wire::ProbeState {
    wire::ProbeState {
        uid: key.uid.to_string(),
        namespace: pod.namespace.to_string(),
        name: pod.name.to_string(),
        container: key.container.clone(),
        kind: kind(key.probe) as i32,
        result: result(memory.result.unwrap_or(ProbeResult::Unknown)) as i32,
        last: result(memory.last) as i32,
        run: memory.run,
        changed_unix_ns,
    }
}

fn kind(kind: ProbeType) -> wire::ProbeKind {
    match kind {
        ProbeType::Startup => wire::ProbeKind::Startup,
        ProbeType::Readiness => wire::ProbeKind::Readiness,
        ProbeType::Liveness => wire::ProbeKind::Liveness,
    }
}

fn result(result: ProbeResult) -> wire::ProbeResult {
    match result {
        ProbeResult::Unknown => wire::ProbeResult::Unknown,
        ProbeResult::Success => wire::ProbeResult::Success,
        ProbeResult::Failure => wire::ProbeResult::Failure,
    }
}
