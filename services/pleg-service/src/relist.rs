//! Full lists: they nominate the pods of which they say other than the entry, absent ones included.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::runtime::{ContainerState, SandboxState};
use tokio::time::Instant;

use crate::core::{Core, Nomination};
use crate::entry::differs;
use crate::metrics::StateLabel;
use crate::seams::{Filter, ListedContainer, ListedSandbox, ReadError};

/// A failed list is repeated after this at the latest, whatever the period.
const RETRY: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Listed {
    pod: Option<PodRef>,
    sandboxes: Vec<ListedSandbox>,
    containers: Vec<ListedContainer>,
}

/// Lists, waits for the period or to be asked, lists again. Never ends.
pub(crate) async fn run(core: Arc<Core>) {
    let mut began: Option<Instant> = None;
    let mut failing = false;
    loop {
        let now = Instant::now();
        if let Some(last) = began.replace(now) {
            core.metrics.relist_interval.observe((now - last).as_secs_f64());
        }
        let result = list(&core, now).await;
        core.metrics.relist_duration.observe(now.elapsed().as_secs_f64());
        match &result {
            Ok(()) if failing => tracing::info!("the runtime lists pods again"),
            Ok(()) => {}
            Err(error) if failing => tracing::debug!(%error, "list failed"),
            Err(error) => tracing::warn!(%error, "list failed"),
        }
        failing = result.is_err();
        core.lists.lock().error = result.err().map(|e| e.to_string());
        let period = if failing { core.relist_period().min(RETRY) } else { core.relist_period() };
        tokio::select! {
            // Both only end a wait. A change of the hints, and of the period with them, asks for a list too.
            () = tokio::time::sleep(period) => {}
            () = core.relist_now.notified() => {}
        }
    }
}

async fn list(core: &Arc<Core>, began: Instant) -> Result<(), ReadError> {
    let observed = core.clock.boot();
    let wall = core.clock.wall();
    let sandboxes = core.runtime.sandboxes(Filter::All).await?;
    let containers = core.runtime.containers(Filter::All).await?;
    core.metrics.last_seen.set(wall.as_second());
    core.lists.lock().last = Some(began);
    count(core, &sandboxes, &containers);
    let mut pods = HashMap::<PodUid, Listed>::new();
    let mut unlabelled = 0;
    for s in sandboxes {
        let Some(pod) = &s.pod else {
            unlabelled += 1;
            continue;
        };
        let listed = pods.entry(pod.uid.clone()).or_default();
        listed.pod = Some(pod.clone());
        listed.sandboxes.push(s);
    }
    for c in containers {
        let Some(pod) = &c.pod else {
            unlabelled += 1;
            continue;
        };
        let listed = pods.entry(pod.uid.clone()).or_default();
        listed.pod.get_or_insert_with(|| pod.clone());
        listed.containers.push(c);
    }
    core.metrics.unlabelled.set(unlabelled);
    let present: HashSet<PodUid> = pods.keys().cloned().collect();
    let first = !core.store.is_primed();
    let mut first_looks = Vec::new();
    for (uid, listed) in pods {
        let known = core.store.get(&uid);
        // What was inspected after the list began is newer than the list.
        let current = known.as_ref().is_some_and(|k| {
            k.observed > observed && k.error.is_none() || !differs(k, &listed.sandboxes, &listed.containers)
        });
        if current {
            continue;
        }
        let absent = known.as_ref().is_some_and(|k| {
            let sandboxes = listed.sandboxes.iter().map(|s| s.id.as_str());
            let ids: HashSet<&str> =
                sandboxes.chain(listed.containers.iter().map(|c| c.id.as_str())).collect();
            k.ids().iter().any(|id| !ids.contains(id.as_str()))
        });
        let nomination = Nomination {
            pod: listed.pod,
            sandboxes: listed.sandboxes.into_iter().map(|s| s.id).collect(),
            containers: listed.containers.into_iter().map(|c| (c.id, c.sandbox_id)).collect(),
            list: absent,
            complete: true,
            by_relist: !first,
            ..Nomination::default()
        };
        if first {
            first_looks.push(core.inspect(&uid, nomination));
        } else {
            core.nominate(&uid, nomination);
        }
    }
    for gone in core.store.pods().iter().filter(|p| !present.contains(&p.pod.uid) && p.observed <= observed) {
        core.nominate(&gone.pod.uid, Nomination { list: true, by_relist: true, ..Nomination::default() });
    }
    if first {
        // Readers get their first picture when every pod of the first list has been looked at, with or without success.
        futures::future::join_all(first_looks).await;
        core.store.set_primed();
        tracing::info!(pods = core.store.len(), epoch = core.store.epoch(), "first full list is in");
    }
    Ok(())
}

fn count(core: &Core, sandboxes: &[ListedSandbox], containers: &[ListedContainer]) {
    let ready = sandboxes.iter().filter(|s| s.state == SandboxState::Ready).filter_map(|s| s.pod.as_ref());
    let running: HashSet<&PodUid> = ready.map(|p| &p.uid).collect();
    core.metrics.running_pods.set(i64::try_from(running.len()).unwrap_or(i64::MAX));
    for (container_state, state) in [
        ("created", ContainerState::Created),
        ("running", ContainerState::Running),
        ("exited", ContainerState::Exited),
        ("unknown", ContainerState::Unknown),
    ] {
        let n = containers.iter().filter(|c| c.state == state).count();
        let gauge = core.metrics.running_containers.get_or_create_owned(&StateLabel { container_state });
        gauge.set(i64::try_from(n).unwrap_or(i64::MAX));
    }
}
