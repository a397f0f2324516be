//! Full lists: they nominate the pods of which they say other than the entry, absent ones included.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use quintlet_kit::patience::{Patience, Say};
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::runtime::{ContainerState, SandboxState};
use tokio::time::Instant;

use crate::core::{Core, Nomination};
use crate::entry::differs;
use crate::metrics::StateLabel;
use crate::seams::{Filter, ListedContainer, ListedSandbox, ReadError};

/// A failed list is repeated after this at the latest, whatever the period.
const RETRY: Duration = Duration::from_secs(1);

/// Items of a list that are worked on before others have their turn: well under a millisecond.
const SLICE: usize = 256;

/// Pods of the first list that are looked at at once: the others of the [`INSPECTIONS`](crate::core::INSPECTIONS) are for who asks.
const FIRST_LOOKS: usize = 12;

#[derive(Default)]
struct Listed {
    pod: Option<PodRef>,
    sandboxes: Vec<ListedSandbox>,
    containers: Vec<ListedContainer>,
}

/// Lists, waits for the period or to be asked, lists again. Never ends.
pub(crate) async fn run(core: Arc<Core>) {
    let mut began: Option<Instant> = None;
    let mut runtime = Patience::default();
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
                    tracing::info!("the runtime lists pods again");
                }
            }
            Err(error) => match runtime.missed() {
                Say::Waiting => tracing::info!(%error, "list failed"),
                Say::Fault => tracing::warn!(%error, "list failed"),
                Say::Again => tracing::debug!(%error, "list failed"),
            },
        }
        core.heartbeat.beat();
        let failing = result.is_err();
        core.lists.lock().error = result.err().map(|e| e.to_string());
        let period = if failing { core.relist_period().min(RETRY) } else { core.relist_period() };
        tokio::select! {
            // Both only end a wait. A change of the hints, and of the period with them, asks for a list too.
            () = tokio::time::sleep(period) => {}
            () = core.relist_now.notified() => {}
        }
    }
}

/// Gives others their turn now and then: what a list of thousands is digested by shares its thread with those who look at one pod.
struct Breath(usize);

impl Breath {
    fn new() -> Self {
        Self(SLICE)
    }

    /// One item is done with.
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
    let mut breath = Breath::new();
    let pods = by_pod(core, sandboxes, containers, &mut breath).await;
    let present: HashSet<PodUid> = pods.keys().cloned().collect();
    let first = !core.store.is_primed();
    let mut first_looks = Vec::new();
    for (uid, listed) in pods {
        breath.one().await;
        let Some(nomination) = nomination(core, &uid, listed, observed) else { continue };
        if first {
            first_looks.push((uid, nomination));
        } else {
            core.nominate(&uid, Nomination { by_relist: true, ..nomination });
        }
    }
    for known in core.store.pods() {
        breath.one().await;
        if !present.contains(&known.pod.uid) && known.observed <= observed {
            let gone = Nomination { list: true, by_relist: true, ..Nomination::default() };
            core.nominate(&known.pod.uid, gone);
        }
    }
    if first {
        // Readers get their first picture when every pod of the first list has been looked at, with or without success.
        let looks = futures::stream::iter(first_looks);
        let look = |(uid, nomination)| async move {
            drop(core.inspect(&uid, nomination).await);
            core.heartbeat.beat();
        };
        looks.for_each_concurrent(FIRST_LOOKS, look).await;
        core.store.set_primed();
        tracing::info!(pods = core.store.len(), epoch = core.store.epoch(), "first full list is in");
    }
    Ok(())
}

/// What is to be looked at of a listed pod; None: the list says what the entry says.
fn nomination(core: &Core, uid: &PodUid, listed: Listed, observed: Duration) -> Option<Nomination> {
    let known = core.store.get(uid);
    // What was inspected after the list began is newer than the list.
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
    Some(Nomination {
        pod: listed.pod,
        sandboxes: listed.sandboxes.into_iter().map(|s| s.id).collect(),
        containers: listed.containers.into_iter().map(|c| (c.id, c.sandbox_id)).collect(),
        list: absent,
        complete: true,
        listed: Some(observed),
        ..Nomination::default()
    })
}

/// Puts the lists together by pod, and counts what is in them.
async fn by_pod(
    core: &Core,
    sandboxes: Vec<ListedSandbox>,
    containers: Vec<ListedContainer>,
    breath: &mut Breath,
) -> HashMap<PodUid, Listed> {
    let mut pods = HashMap::<PodUid, Listed>::new();
    let (mut unlabelled, mut running) = (0_i64, 0_i64);
    let mut states = HashMap::<ContainerState, i64>::new();
    for s in sandboxes {
        breath.one().await;
        let Some(pod) = &s.pod else {
            unlabelled = unlabelled.saturating_add(1);
            continue;
        };
        let listed = pods.entry(pod.uid.clone()).or_default();
        let ran = listed.sandboxes.iter().any(|s| s.state == SandboxState::Ready);
        running = running.saturating_add((!ran && s.state == SandboxState::Ready).into());
        listed.pod = Some(pod.clone());
        listed.sandboxes.push(s);
    }
    for c in containers {
        breath.one().await;
        let count = states.entry(c.state).or_default();
        *count = count.saturating_add(1);
        let Some(pod) = &c.pod else {
            unlabelled = unlabelled.saturating_add(1);
            continue;
        };
        let listed = pods.entry(pod.uid.clone()).or_default();
        listed.pod.get_or_insert_with(|| pod.clone());
        listed.containers.push(c);
    }
    core.metrics.unlabelled.set(unlabelled);
    core.metrics.running_pods.set(running);
    for (container_state, state) in [
        ("created", ContainerState::Created),
        ("running", ContainerState::Running),
        ("exited", ContainerState::Exited),
        ("unknown", ContainerState::Unknown),
    ] {
        let gauge = core.metrics.running_containers.get_or_create_owned(&StateLabel { container_state });
        gauge.set(states.get(&state).copied().unwrap_or_default());
    }
    pods
}

#[cfg(test)]
mod tests;
