//! Reads the hint stream, and finds the pods of IDs that are in no entry.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::peer_startup::{PeerFailure, PeerStartup};
use quintlet_model::ids::PodUid;
use quintlet_proto::common::v1::Trace;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::core::{Core, HintState};
use crate::expect::{next_pause, unknown_pause, wait_limit};
use crate::mailbox::InspectionRequest;
use crate::metrics::KindLabel;
use crate::traits::{Filter, HintEvent, HintKind, HintStream, ListedContainer, ListedSandbox, ReadError};

/// Unknown IDs that wait: a burst of a hundred pods with a few containers each, and their events. A full list replaces further ones.
const UNKNOWN: usize = 1024;

/// Unknown IDs up to this number are listed one by one, more by one list of everything if it is short.
const ONE_BY_ONE: usize = 2;

/// A list of this many pods costs about as much as a list for one ID.
const PODS_FOR_ONE: usize = 64;

/// A hint about an ID that is in no entry.
#[derive(Debug)]
pub(crate) struct Unknown {
    id: String,
    kind: HintKind,
    trace: Option<Trace>,
}

/// Reads the hint stream, and opens it again when it ends. Never returns.
pub(crate) async fn run(core: Arc<Core>, hints: Arc<dyn HintStream>) {
    let (to, from) = mpsc::channel(UNKNOWN);
    quintlet_kit::task::spawn("hint-resolver", resolve(Arc::clone(&core), from));
    let mut peer = PeerStartup::default();
    loop {
        match hints.open().await {
            Ok(mut stream) => {
                peer.reached();
                core.metrics.stream_opens.inc();
                while let Some(event) = stream.next().await {
                    match event {
                        Ok(event) => take(&core, &to, event),
                        Err(error) => {
                            tracing::warn!(error = error.message(), "hint stream failed");
                            break;
                        }
                    }
                }
            }
            Err(error) => match peer.failed() {
                PeerFailure::Starting => tracing::info!(error = error.message(), "open hint stream failed"),
                PeerFailure::Down => tracing::warn!(error = error.message(), "open hint stream failed"),
                PeerFailure::Repeated => tracing::debug!(error = error.message(), "open hint stream failed"),
            },
        }
        core.metrics.stream_errors.inc();
        set_source(&core, HintState { source: "none", live: false });
        tokio::time::sleep(core.periods.reconnect).await;
    }
}

/// Records the state of the hint source. Every change triggers a full list, since hints may have been missed before it.
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

fn take(core: &Arc<Core>, resolver: &mpsc::Sender<Unknown>, event: HintEvent) {
    match event {
        HintEvent::Source { name, live } => set_source(core, HintState { source: name, live }),
        HintEvent::Overrun { missed } => {
            core.metrics.hints_lost.inc_by(missed);
            core.relist_now.notify_one();
        }
        HintEvent::Hint { kind, id, pod, trace, at_unix_ns } => {
            if at_unix_ns > 0 {
                // The clocks differ; a negative latency counts as zero.
                let ns = core.clock.wall().as_nanosecond().saturating_sub(i128::from(at_unix_ns));
                let took = Duration::from_nanos(u64::try_from(ns).unwrap_or(0));
                core.metrics.hint_latency.observe(took.as_secs_f64());
            }
            core.metrics.hints.get_or_create_owned(&KindLabel { kind: kind.name() }).inc();
            if let Some(uid) = core.store.pod_of(&id).or(pod) {
                core.request_inspection(&uid, hinted(id, kind, trace));
            } else if matches!(kind, HintKind::Deleted | HintKind::Oom) {
                // No entry shows memory events.
                core.metrics.hints_unknown.inc();
            } else if resolver.try_send(Unknown { id, kind, trace }).is_err() {
                core.metrics.hints_lost.inc();
                core.relist_now.notify_one();
            }
        }
    }
}

fn hinted(id: String, kind: HintKind, trace: Option<Trace>) -> InspectionRequest {
    // A deleted ID needs no list, and the expectation of a later start requests its own inspection.
    let later = matches!(kind, HintKind::Created | HintKind::Started);
    let ids = if later || kind == HintKind::Deleted { Vec::new() } else { vec![id.clone()] };
    InspectionRequest { ids, later, expect: Some((id, kind)), trace, ..InspectionRequest::default() }
}

struct Pending {
    hints: Vec<(HintKind, Option<Trace>)>,
    pause: Option<Duration>,
    due: Instant,
    until: Instant,
}

/// Finds the pods of unknown IDs. containerd reports an ID before the CRI shows it, so each is looked for repeatedly.
async fn resolve(core: Arc<Core>, mut from: mpsc::Receiver<Unknown>) {
    let longest = wait_limit(HintKind::Created).unwrap_or_default();
    let mut revs = core.store.revs();
    let mut pending = HashMap::<String, Pending>::new();
    let mut batch = Vec::new();
    loop {
        let due = pending.values().map(|p| p.due).min();
        tokio::select! {
            // Cancel safe: a received hint is not lost.
            n = from.recv_many(&mut batch, UNKNOWN), if pending.len() < UNKNOWN => if n == 0 { return },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            // Most often `Observe` has found it before a list is due.
            changed = revs.changed(), if !pending.is_empty() => if changed.is_err() { return },
        }
        let now = Instant::now();
        for unknown in batch.drain(..) {
            let pause = unknown_pause(unknown.kind);
            let due = deadline_after(now, pause.unwrap_or_default());
            let new = || Pending { hints: Vec::new(), pause, due, until: deadline_after(now, longest) };
            let known = pending.entry(unknown.id).or_insert_with(new);
            if due < known.due {
                (known.due, known.pause) = (due, pause);
            }
            known.hints.push((unknown.kind, unknown.trace));
        }
        pending.retain(|id, p| {
            let Some(uid) = core.store.pod_of(id) else { return true };
            for (kind, trace) in p.hints.drain(..) {
                core.request_inspection(&uid, hinted(id.clone(), kind, trace));
            }
            false
        });
        let due: Vec<String> =
            pending.iter().filter(|(_, p)| p.due <= now).map(|(id, _)| id.clone()).collect();
        if due.is_empty() {
            continue;
        }
        let listed = core.clock.boot();
        let found = match find(&core, &due).await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, "list unknown IDs failed");
                HashMap::new()
            }
        };
        for id in due {
            if let Some((uid, place)) = found.get(&id).cloned() {
                for (kind, trace) in pending.remove(&id).map(|p| p.hints).unwrap_or_default() {
                    let request = place.clone().request(id.clone(), kind, trace);
                    core.request_inspection(&uid, InspectionRequest { listed: Some(listed), ..request });
                }
            } else if let Some(p) = pending.get_mut(&id) {
                let pause = next_pause(p.pause);
                p.pause = Some(pause);
                p.due = deadline_after(Instant::now(), pause);
                if p.due > p.until {
                    pending.remove(&id);
                    core.metrics.hints_unknown.inc();
                }
            }
        }
    }
}

#[derive(Clone)]
enum Place {
    Sandbox,
    Container(String),
}

impl Place {
    fn request(self, id: String, kind: HintKind, trace: Option<Trace>) -> InspectionRequest {
        let request = hinted(id.clone(), kind, trace);
        match self {
            Self::Sandbox => InspectionRequest { sandboxes: vec![id], ..request },
            Self::Container(sandbox) => InspectionRequest { containers: vec![(id, sandbox)], ..request },
        }
    }
}

async fn find(core: &Core, ids: &[String]) -> Result<HashMap<String, (PodUid, Place)>, ReadError> {
    let filters = if ids.len() <= ONE_BY_ONE.max(core.store.len() / PODS_FOR_ONE) {
        ids.iter().map(|id| Filter::Id(id.clone())).collect()
    } else {
        vec![Filter::All]
    };
    let mut found = HashMap::new();
    for filter in filters {
        let (containers, sandboxes): (Vec<ListedContainer>, Vec<ListedSandbox>) =
            tokio::try_join!(core.runtime.containers(filter.clone()), core.runtime.sandboxes(filter))?;
        let containers =
            containers.into_iter().filter_map(|c| Some((c.id, (c.pod?.uid, Place::Container(c.sandbox_id)))));
        let sandboxes = sandboxes.into_iter().filter_map(|s| Some((s.id, (s.pod?.uid, Place::Sandbox))));
        found.extend(containers.chain(sandboxes));
    }
    Ok(found)
}
