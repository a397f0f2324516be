//! Full lists. A pod that differs from its entry, or is missing in the list, is inspected.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use quintlet_kit::peer_startup::{PeerFailure, PeerStartup};
use quintlet_model::ids::{PodRef, PodUid};
use tokio::time::Instant;

use crate::core::Core;
use crate::entry::differs;
use crate::mailbox::InspectionRequest;
use crate::traits::{Filter, ListedContainer, ListedSandbox, ReadError};

/// Longest pause after a failed list.
const RETRY: Duration = Duration::from_secs(1);

/// Items of a list that are processed before other tasks run: well under a millisecond.
const SLICE: usize = 256;

/// Pods of the first list that are inspected concurrently. The rest of
/// [`INSPECTIONS`](crate::core::INSPECTIONS) is for callers.
const FIRST_LOOKS: usize = 12;

#[derive(Default)]
struct Listed {
    pod: Option<PodRef>,
    sandboxes: Vec<ListedSandbox>,
    containers: Vec<ListedContainer>,
}

/// Lists at every period and on request. Never returns.
pub(crate) async fn run(core: Arc<Core>) {
    let mut began: Option<Instant> = None;
    let mut runtime = PeerStartup::default();
    loop {
        core.heartbeat.beat();
        let now = Instant::now();
        if let Some(last) = began.replace(now) {
            core.metrics.relist_interval.observe(now.saturating_duration_since(last).as_secs_f64());
        }
        let result = list(&core, now).await;
        core.metrics.relist_duration.observe(now.elapsed().as_secs_f64());
        match &result {
            Ok(()) => {
                if runtime.reached() {
                    tracing::info!("list succeeded again");
                }
            }
            Err(error) => match runtime.failed() {
                PeerFailure::Starting => tracing::info!(%error, "list failed"),
                PeerFailure::Down => tracing::warn!(%error, "list failed"),
                PeerFailure::Repeated => tracing::debug!(%error, "list failed"),
            },
        }
        core.heartbeat.beat();
        let failing = result.is_err();
        core.lists.lock().error = result.err().map(|e| e.to_string());
        core.list_ended.notify_one();
        let period = if failing { core.relist_period().min(RETRY) } else { core.relist_period() };
        tokio::select! {
            // A dropped wait loses nothing. A change of the hint source, and thus of the period, triggers a
            // list, too.
            () = quintlet_kit::timers::pause(period) => {}
            () = core.relist_now.notified() => {}
        }
    }
}

/// Yields to other tasks every [`SLICE`] items.
struct Yielder(usize);

impl Yielder {
    fn new() -> Self {
        Self(SLICE)
    }

    /// Counts one item.
    async fn one(&mut self) {
        self.0 = self.0.saturating_sub(1);
        if self.0 == 0 {
            self.0 = SLICE;
            tokio::task::yield_now().await;
        }
    }
}

async fn list(core: &Arc<Core>, began: Instant) -> Result<(), ReadError> {
    let observed = core.clock.boot();
    let wall = core.clock.wall();
    let sandboxes = core.runtime.sandboxes(Filter::All).await?;
    core.heartbeat.beat();
    let containers = core.runtime.containers(Filter::All).await?;
    core.metrics.last_seen.set(wall.as_second());
    core.lists.lock().last = Some(began);
    let mut breath = Yielder::new();
    let pods = by_pod(core, sandboxes, containers, &mut breath).await;
    let present: HashSet<PodUid> = pods.keys().cloned().collect();
    let first = !core.store.is_primed();
    let mut first_looks = Vec::new();
    for (uid, listed) in pods {
        breath.one().await;
        let Some(request) = request_of(core, &uid, listed, observed) else { continue };
        if first {
            first_looks.push((uid, request));
        } else {
            core.request_inspection(&uid, InspectionRequest { by_relist: true, ..request });
        }
    }
    for known in core.store.pods() {
        breath.one().await;
        if !present.contains(&known.pod.uid) && known.observed <= observed {
            let gone = InspectionRequest { list: true, by_relist: true, ..InspectionRequest::default() };
            core.request_inspection(&known.pod.uid, gone);
        }
    }
    if first {
        // Readers get the first snapshot after an inspection of every pod of the first list, successful or
        // not.
        let looks = futures::stream::iter(first_looks);
        let look = |(uid, request)| async move {
            drop(core.inspect(&uid, request).await);
            core.heartbeat.beat();
        };
        looks.for_each_concurrent(FIRST_LOOKS, look).await;
        core.store.set_primed();
        tracing::info!(pods = core.store.len(), epoch = core.store.epoch(), "completed first full list");
    }
    Ok(())
}

/// Returns the request for a listed pod, or none if the list matches the entry.
fn request_of(core: &Core, uid: &PodUid, listed: Listed, observed: Duration) -> Option<InspectionRequest> {
    let known = core.store.get(uid);
    // An inspection that began after the list is newer than the list.
    let current = known.as_ref().is_some_and(|k| {
        k.observed > observed && k.error.is_none() || !differs(k, &listed.sandboxes, &listed.containers)
    });
    if current {
        return None;
    }
    let absent = known.as_ref().is_some_and(|k| {
        let sandboxes = listed.sandboxes.iter().map(|s| s.id.as_str());
        let ids: HashSet<&str> = sandboxes.chain(listed.containers.iter().map(|c| c.id.as_str())).collect();
        k.ids().iter().any(|id| !ids.contains(id.as_str()))
    });
    Some(InspectionRequest {
        pod: listed.pod,
        sandboxes: listed.sandboxes.into_iter().map(|s| s.id).collect(),
        containers: listed.containers.into_iter().map(|c| (c.id, c.sandbox_id)).collect(),
        list: absent,
        complete: true,
        listed: Some(observed),
        ..InspectionRequest::default()
    })
}

/// Groups the lists by pod, and counts entries without one.
async fn by_pod(
    core: &Core,
    sandboxes: Vec<ListedSandbox>,
    containers: Vec<ListedContainer>,
    breath: &mut Yielder,
) -> HashMap<PodUid, Listed> {
    let mut pods = HashMap::<PodUid, Listed>::new();
    let mut unlabelled = 0_i64;
    for s in sandboxes {
        breath.one().await;
        let Some(pod) = &s.pod else {
            unlabelled = unlabelled.saturating_add(1);
            continue;
        };
        let listed = pods.entry(pod.uid.clone()).or_default();
        listed.pod = Some(pod.clone());
        listed.sandboxes.push(s);
    }
    for c in containers {
        breath.one().await;
        let Some(pod) = &c.pod else {
            unlabelled = unlabelled.saturating_add(1);
            continue;
        };
        let listed = pods.entry(pod.uid.clone()).or_default();
        listed.pod.get_or_insert_with(|| pod.clone());
        listed.containers.push(c);
    }
    core.metrics.unlabelled.set(unlabelled);
    pods
}

#[cfg(test)]
mod tests;
