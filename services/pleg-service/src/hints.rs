//! Reads runtime hints. A hint about a sandbox or container of a cached pod requests an inspection of that
//! pod. For other IDs, the resolver looks up the pod in the runtime's lists.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::neighbour::{MAX_REFUSED_RETRY, is_refusal};
use quintlet_kit::peer_startup::{PeerFailure, PeerStartup};
use quintlet_kit::queue;
use quintlet_kit::rate::LogInterval;
use quintlet_kit::timers::slotted;
use quintlet_model::ids::PodUid;
use quintlet_proto::common::v1::Trace;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::core::{Core, HintState};
use crate::expect::{UNKNOWN_LIMIT, first_look, next_pause, unknown_pause};
use crate::mailbox::InspectionRequest;
use crate::metrics::KindLabel;
use crate::traits::{Filter, HintEvent, HintKind, HintStream, ListedContainer, ListedSandbox, ReadError};

/// Most hints about unknown IDs that wait: a burst of a hundred pods with a few containers each, and their
/// events. Further hints trigger a full list.
const MAX_UNKNOWN: usize = 1024;

/// Name of their queue.
const UNRESOLVED: &str = "unknown-hints";

/// Number of unknown IDs up to which the runtime is queried for each ID, even if it has few pods. For more
/// IDs one full list is cheaper, unless the runtime has many pods.
const MIN_SINGLE_QUERIES: usize = 2;

/// Number of pods in a full list that costs about as much as a query for one ID.
const PODS_PER_QUERY: usize = 64;

/// Interval of the lookups that are not urgent.
const LOOKUP_SLOT: Duration = Duration::from_secs(1);

/// Interval between log lines of lost hints with the same reason: each event of a burst may be lost.
const LOSS_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Logs losses of hints. Each reason has an interval of its own, so that one does not hide the other.
#[derive(Debug)]
struct LossLog {
    of_reader: LogInterval,
    of_resolver: LogInterval,
}

impl LossLog {
    const fn new() -> Self {
        Self {
            of_reader: LogInterval::new(LOSS_LOG_INTERVAL),
            of_resolver: LogInterval::new(LOSS_LOG_INTERVAL),
        }
    }
}

/// The reason for which hints are lost.
#[derive(Debug, Clone, Copy)]
enum LossReason {
    /// cri-proxy dropped hints that this process did not read in time.
    Overrun,
    /// [`MAX_UNKNOWN`] hints about unknown IDs wait for the resolver.
    ResolverFull,
}

/// A hint about a sandbox or container of no cached pod.
#[derive(Debug)]
pub(crate) struct UnknownId {
    id: String,
    kind: HintKind,
    trace: Option<Trace>,
}

/// Reads the hint stream, and opens it again when it ends. Never returns.
pub(crate) async fn run(core: Arc<Core>, hints: Arc<dyn HintStream>) {
    let (unknown, unresolved) = queue::channel(UNRESOLVED, MAX_UNKNOWN);
    quintlet_kit::task::spawn("hint-resolver", resolve(Arc::clone(&core), unresolved));
    let (mut peer, mut losses) = (PeerStartup::default(), LossLog::new());
    loop {
        let mut pause = core.periods.reconnect;
        match hints.open().await {
            Ok(mut stream) => {
                peer.reached();
                core.metrics.stream_opens.inc();
                while let Some(event) = stream.next().await {
                    match event {
                        Ok(event) => handle(&core, &unknown, &mut losses, event),
                        // The client has logged it.
                        Err(error) if is_refusal(&error) => {
                            pause = pause.max(MAX_REFUSED_RETRY);
                            break;
                        }
                        Err(error) => {
                            tracing::warn!(error = error.message(), "hint stream failed, opening it again");
                            break;
                        }
                    }
                }
            }
            Err(error) => match peer.failed() {
                PeerFailure::Starting => {
                    tracing::info!(error = error.message(), "failed to open the hint stream, retrying")
                }
                PeerFailure::Down => {
                    tracing::warn!(error = error.message(), "failed to open the hint stream, retrying")
                }
                PeerFailure::Repeated => {
                    tracing::debug!(error = error.message(), "failed to open the hint stream, retrying")
                }
            },
        }
        core.metrics.stream_errors.inc();
        set_source(&core, HintState { source: "none", live: false });
        tokio::time::sleep(pause).await;
    }
}

/// Records the state of the hint source. Every change triggers a full list, since hints may have been missed
/// before it.
fn set_source(core: &Core, state: HintState) {
    let changed = core.hints.send_if_modified(|s| {
        let changed = s.live != state.live;
        *s = state;
        changed
    });
    if changed {
        tracing::info!(live = state.live, source = state.source, "hint source changed");
        core.relist_now.notify_one();
    }
}

/// Counts lost hints, and triggers a full list, which finds what they would have reported.
fn lose(core: &Core, log: &mut LossLog, reason: LossReason, hints: u64) {
    core.metrics.hints_lost.inc_by(hints);
    core.relist_now.notify_one();
    let (interval, reason) = match reason {
        LossReason::Overrun => (&mut log.of_reader, "cri-proxy had more than were read in time"),
        LossReason::ResolverFull => (&mut log.of_resolver, "too many about unknown IDs wait"),
    };
    if let Some(losses) = interval.count() {
        tracing::warn!(reason, hints, losses, "lost hints, listing all pods");
    }
}

fn handle(core: &Arc<Core>, resolver: &mpsc::Sender<UnknownId>, losses: &mut LossLog, event: HintEvent) {
    match event {
        HintEvent::Source { name, live } => set_source(core, HintState { source: name, live }),
        HintEvent::Overrun { missed } => lose(core, losses, LossReason::Overrun, missed),
        HintEvent::Hint { kind, id, pod, trace, at_unix_ns } => {
            if at_unix_ns > 0 {
                // The clocks differ; a negative latency counts as zero.
                let ns = core.clock.wall().as_nanosecond().saturating_sub(i128::from(at_unix_ns));
                let took = Duration::from_nanos(u64::try_from(ns).unwrap_or(0));
                core.metrics.hint_latency.observe(took.as_secs_f64());
            }
            core.metrics.hints.get_or_create_owned(&KindLabel { kind: kind.name() }).inc();
            if kind == HintKind::Deleted && pod.is_none() && core.store.pod_of(&id).is_none() {
                // Before the store is asked again, which an inspection may have changed meanwhile.
                core.removed.lock().add(id.clone());
            }
            if let Some(uid) = core.store.pod_of(&id).or(pod) {
                core.request_inspection(&uid, inspection(id, kind, trace));
            } else if matches!(kind, HintKind::Deleted | HintKind::Oom) {
                // A deletion waits for an entry with its ID. An OOM kill of an unknown container changes no
                // cached pod.
                core.metrics.hints_unknown.inc();
            } else if queue::offer(resolver, UNRESOLVED, UnknownId { id, kind, trace }).is_err() {
                lose(core, losses, LossReason::ResolverFull, 1);
            }
        }
    }
}

/// Returns the inspection that a hint requests.
fn inspection(id: String, kind: HintKind, trace: Option<Trace>) -> InspectionRequest {
    // An expectation requests its own inspection.
    let later = first_look(kind).is_some();
    let ids = if later { Vec::new() } else { vec![id.clone()] };
    InspectionRequest { ids, later, expect: Some((id, kind)), trace, ..InspectionRequest::default() }
}

/// Hints about an unknown ID, and when the runtime is queried for the ID again.
struct PendingLookup {
    hints: Vec<(HintKind, Option<Trace>)>,
    pause: Option<Duration>,
    due: Instant,
    until: Instant,
}

/// Finds the pods of unknown IDs. containerd reports an ID before the CRI lists it, so each ID is looked up
/// repeatedly.
async fn resolve(core: Arc<Core>, mut unresolved: mpsc::Receiver<UnknownId>) {
    let mut revs = core.store.revs();
    let mut pending = HashMap::<String, PendingLookup>::new();
    let mut batch = Vec::new();
    loop {
        let due = pending.values().map(|p| p.due).min();
        tokio::select! {
            // Cancel safe: a received hint is not lost.
            n = unresolved.recv_many(&mut batch, MAX_UNKNOWN), if pending.len() < MAX_UNKNOWN => if n == 0 { return },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            // Most often an inspection for `Observe` has found the pod before a lookup is due.
            changed = revs.changed(), if !pending.is_empty() => if changed.is_err() { return },
        }
        let now = Instant::now();
        for unknown in batch.drain(..) {
            add(&mut pending, unknown, now);
        }
        pending.retain(|id, p| {
            let Some(uid) = core.store.pod_of(id) else { return true };
            for (kind, trace) in p.hints.drain(..) {
                core.request_inspection(&uid, inspection(id.clone(), kind, trace));
            }
            false
        });
        let due: Vec<String> =
            pending.iter().filter(|(_, p)| p.due <= now).map(|(id, _)| id.clone()).collect();
        if due.is_empty() {
            continue;
        }
        let listed = core.clock.boot();
        let found = find_pods(&core, &due).await.unwrap_or_else(|error| {
            tracing::debug!(%error, "failed to look up unknown IDs, retrying");
            HashMap::new()
        });
        for id in due {
            if let Some((uid, object)) = found.get(&id).cloned() {
                for (kind, trace) in pending.remove(&id).map(|p| p.hints).unwrap_or_default() {
                    let request = object.clone().request(id.clone(), kind, trace);
                    let request = InspectionRequest { listed: Some(listed), later: false, ..request };
                    core.request_inspection(&uid, request);
                }
            } else if let Some(p) = pending.get_mut(&id) {
                let pause = next_pause(p.pause);
                p.pause = Some(pause);
                p.due = lookup_after(Instant::now(), pause);
                if p.due > p.until {
                    pending.remove(&id);
                    core.metrics.hints_unknown.inc();
                }
            }
        }
    }
}

/// Returns the time of a lookup after a pause. Lookups with long pauses share their list, one a second: in a
/// burst, many IDs are new.
fn lookup_after(now: Instant, pause: Duration) -> Instant {
    let at = deadline_after(now, pause);
    if pause < LOOKUP_SLOT { at } else { slotted(at, LOOKUP_SLOT) }
}

fn add(pending: &mut HashMap<String, PendingLookup>, unknown: UnknownId, now: Instant) {
    let pause = unknown_pause(unknown.kind);
    let due = lookup_after(now, pause.unwrap_or_default());
    let until = deadline_after(due, UNKNOWN_LIMIT);
    let new = || PendingLookup { hints: Vec::new(), pause, due, until };
    let lookup = pending.entry(unknown.id).or_insert_with(new);
    if due < lookup.due {
        (lookup.due, lookup.pause) = (due, pause);
    }
    lookup.hints.push((unknown.kind, unknown.trace));
}

/// The kind of object that an ID names.
#[derive(Clone)]
enum IdOf {
    Sandbox,
    /// A container in the sandbox with this ID.
    Container(String),
}

impl IdOf {
    fn request(self, id: String, kind: HintKind, trace: Option<Trace>) -> InspectionRequest {
        let request = inspection(id.clone(), kind, trace);
        match self {
            Self::Sandbox => InspectionRequest { sandboxes: vec![id], ..request },
            // With its sandbox, whose removal would otherwise be that of an unknown ID.
            Self::Container(sandbox) => InspectionRequest {
                sandboxes: vec![sandbox.clone()],
                containers: vec![(id, sandbox)],
                ..request
            },
        }
    }
}

async fn find_pods(core: &Core, ids: &[String]) -> Result<HashMap<String, (PodUid, IdOf)>, ReadError> {
    let filters = if ids.len() <= MIN_SINGLE_QUERIES.max(core.store.len() / PODS_PER_QUERY) {
        ids.iter().map(|id| Filter::Id(id.clone())).collect()
    } else {
        vec![Filter::All]
    };
    let mut found = HashMap::new();
    for filter in filters {
        let (containers, sandboxes): (Vec<ListedContainer>, Vec<ListedSandbox>) =
            tokio::try_join!(core.runtime.containers(filter.clone()), core.runtime.sandboxes(filter))?;
        let containers =
            containers.into_iter().filter_map(|c| Some((c.id, (c.pod?.uid, IdOf::Container(c.sandbox_id)))));
        let sandboxes = sandboxes.into_iter().filter_map(|s| Some((s.id, (s.pod?.uid, IdOf::Sandbox))));
        found.extend(containers.chain(sandboxes));
    }
    Ok(found)
}
