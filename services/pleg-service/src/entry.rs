//! What is known of one pod, and what an inspection makes of it. No I/O, no clock.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use quintlet_model::ids::{PodRef, PodUid, SandboxId};
use quintlet_model::runtime::{
    Container, ContainerState, Cursor, PodRuntime, Sandbox, SandboxState, SharedPodRuntime,
};

use crate::seams::{HintKind, ListedContainer, ListedSandbox};

/// What an inspection found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Found {
    /// The pod by what was found; None where nothing was.
    pub(crate) pod: Option<PodRef>,
    pub(crate) sandboxes: Vec<Sandbox>,
    pub(crate) containers: Vec<Container>,
}

/// What a lifecycle event tells of (pkg/kubelet/pleg PodLifecycleEventType).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ChangeKind {
    Started,
    Died,
    Removed,
    Changed,
}

/// One lifecycle event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) kind: ChangeKind,
    /// Of the container or sandbox.
    pub(crate) id: String,
    /// Empty for a sandbox.
    pub(crate) container: String,
    /// Of one that died.
    pub(crate) exit_code: i32,
}

/// What applying an inspection came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It began before the last one applied: dropped.
    Stale,
    /// The runtime knows nothing of the pod, and that is not news.
    Nothing,
    /// As before, only seen later.
    Same,
    /// News.
    Changed(Vec<Change>),
    /// The pod is gone.
    Gone(Vec<Change>),
}

/// One inspection and its result.
#[derive(Debug)]
pub(crate) struct Looked<'a> {
    /// Larger than the ticket of every inspection that began before this one.
    pub(crate) ticket: u64,
    /// CLOCK_BOOTTIME of its start.
    pub(crate) began: Duration,
    /// CLOCK_BOOTTIME of its end.
    pub(crate) ended: Duration,
    /// The pod's names, for an inspection that finds nothing to name it.
    pub(crate) pod: Option<&'a PodRef>,
    /// CLOCK_BOOTTIME of the newest evidence that the runtime has the pod: the start of a list that contains it.
    pub(crate) listed: Option<Duration>,
    /// What it found, or why it failed.
    pub(crate) found: Result<Found, String>,
}

/// One pod, as its owner keeps it.
#[derive(Debug)]
pub(crate) struct Entry {
    uid: PodUid,
    /// The store's, once it is published: a node's pods are in memory once.
    record: Option<SharedPodRuntime>,
    /// Ticket of the last inspection applied; tickets are drawn when an inspection begins.
    applied: Option<u64>,
    /// CLOCK_BOOTTIME of the end of the last inspection that found nothing of the pod.
    absent: Option<Duration>,
    /// The last addresses seen and the sandbox that had them.
    addresses: Option<(SandboxId, Vec<IpAddr>)>,
}

impl Entry {
    /// `absent` is when the pod was last found to be gone, CLOCK_BOOTTIME.
    pub(crate) fn new(uid: PodUid, absent: Option<Duration>) -> Self {
        Self { uid, record: None, applied: None, absent, addresses: None }
    }

    /// The entry of a pod that may have been published before.
    pub(crate) fn published(uid: PodUid, record: Option<SharedPodRuntime>, absent: Option<Duration>) -> Self {
        Self { record, ..Self::new(uid, absent) }
    }

    pub(crate) fn record(&self) -> Option<&PodRuntime> {
        self.record.as_deref()
    }

    /// The record has its place from now on.
    pub(crate) fn place(
        &mut self,
        publish: impl FnOnce(PodRuntime) -> SharedPodRuntime,
    ) -> Option<SharedPodRuntime> {
        let placed = publish(Arc::unwrap_or_clone(self.record.take()?));
        self.record = Some(Arc::clone(&placed));
        Some(placed)
    }

    /// The record, to be shared.
    pub(crate) fn shared(&self) -> Option<SharedPodRuntime> {
        self.record.clone()
    }

    /// Applies an inspection.
    ///
    /// A failed inspection of a pod without a record makes a record only if the runtime had the pod after it was last found
    /// to be gone. Otherwise readers would be told of a pod that is not there, and then a second time that it is gone.
    pub(crate) fn apply(&mut self, looked: Looked<'_>) -> Verdict {
        let Looked { ticket, began, ended, pod, listed, found } = looked;
        if self.applied.is_some_and(|last| ticket <= last) {
            return Verdict::Stale;
        }
        self.applied = Some(ticket);
        let old = self.record.take();
        let mut new = match found {
            Ok(found) if found.sandboxes.is_empty() && found.containers.is_empty() => {
                self.addresses = None;
                self.absent = Some(ended);
                return match old {
                    Some(old) => Verdict::Gone(changes(Some(&old), None)),
                    None => Verdict::Nothing,
                };
            }
            Ok(found) => {
                let known =
                    found.pod.or_else(|| pod.cloned()).or_else(|| old.as_ref().map(|o| o.pod.clone()));
                let mut new =
                    PodRuntime::empty(known.unwrap_or_else(|| nameless(&self.uid)), Cursor::default(), began);
                new.sandboxes = found.sandboxes;
                new.containers = found.containers;
                new.sort();
                self.keep_addresses(&mut new);
                new
            }
            Err(_) if old.is_none() && listed.is_none_or(|at| self.absent.is_some_and(|gone| at < gone)) => {
                return Verdict::Nothing;
            }
            Err(text) => {
                let mut new = old.as_deref().cloned().unwrap_or_else(|| {
                    let pod = pod.cloned().unwrap_or_else(|| nameless(&self.uid));
                    PodRuntime::empty(pod, Cursor::default(), began)
                });
                new.error = Some(text);
                new
            }
        };
        let verdict = match &old {
            Some(old) => {
                new.cursor = old.cursor;
                let seen = std::mem::replace(&mut new.observed, old.observed);
                let same = new == **old;
                new.observed = seen;
                if same { Verdict::Same } else { Verdict::Changed(changes(Some(old), Some(&new))) }
            }
            None => Verdict::Changed(changes(None, Some(&new))),
        };
        self.record = Some(Arc::new(new));
        verdict
    }

    /// The addresses of a stopped sandbox stay with it until a newer one is ready or the pod is gone, since the runtime
    /// forgets them at the stop and the pod's status still needs them (kubelet: pkg/kubelet/pleg getPodIPs).
    fn keep_addresses(&mut self, pod: &mut PodRuntime) {
        if let Some(active) = pod.active_sandbox() {
            self.addresses = (!active.ips.is_empty()).then(|| (active.id.clone(), active.ips.clone()));
        }
        let Some((owner, ips)) = &self.addresses else { return };
        for sandbox in &mut pod.sandboxes {
            if sandbox.id == *owner && sandbox.state == SandboxState::NotReady && sandbox.ips.is_empty() {
                sandbox.ips.clone_from(ips);
            }
        }
    }
}

fn nameless(uid: &PodUid) -> PodRef {
    PodRef { uid: uid.clone(), namespace: "".into(), name: "".into() }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Exited,
    Created,
    Unknown,
}

fn phases(pod: Option<&PodRuntime>) -> BTreeMap<&str, (Phase, &str, i32)> {
    let Some(pod) = pod else { return BTreeMap::new() };
    let sandboxes = pod.sandboxes.iter().map(|s| {
        let phase = match s.state {
            SandboxState::Ready => Phase::Running,
            SandboxState::NotReady => Phase::Exited,
        };
        (s.id.as_str(), (phase, "", 0))
    });
    let containers = pod.containers.iter().map(|c| {
        let phase = match c.state {
            ContainerState::Created => Phase::Created,
            ContainerState::Running => Phase::Running,
            ContainerState::Exited => Phase::Exited,
            ContainerState::Unknown => Phase::Unknown,
        };
        (c.id.as_str(), (phase, c.name.as_str(), c.exit_code))
    });
    sandboxes.chain(containers).collect()
}

/// The events between two states of a pod (pkg/kubelet/pleg/generic.go generateEvents). Created and unknown differ here.
pub(crate) fn changes(old: Option<&PodRuntime>, new: Option<&PodRuntime>) -> Vec<Change> {
    let (old, new) = (phases(old), phases(new));
    let mut out = Vec::new();
    let mut event = |kind, id: &str, container: &str, exit_code| {
        out.push(Change { kind, id: id.to_owned(), container: container.to_owned(), exit_code });
    };
    for (id, (was, name, code)) in &old {
        if !new.contains_key(id) {
            if *was != Phase::Exited {
                event(ChangeKind::Died, id, name, *code);
            }
            event(ChangeKind::Removed, id, name, 0);
        }
    }
    for (id, (is, name, code)) in &new {
        if old.get(id).is_some_and(|(was, _, _)| was == is) {
            continue;
        }
        match is {
            Phase::Running => event(ChangeKind::Started, id, name, 0),
            Phase::Exited => event(ChangeKind::Died, id, name, *code),
            Phase::Created | Phase::Unknown => event(ChangeKind::Changed, id, name, 0),
        }
    }
    out
}

/// Whether what a hint told of shows in the record (None: the pod is gone).
pub(crate) fn effect_shows(kind: HintKind, id: &str, record: Option<&PodRuntime>) -> bool {
    let sandbox = record.and_then(|r| r.sandboxes.iter().find(|s| s.id.as_str() == id));
    let container = record.and_then(|r| r.containers.iter().find(|c| c.id.as_str() == id));
    let visible = sandbox.is_some() || container.is_some();
    match kind {
        HintKind::Created => visible,
        HintKind::Started => visible && container.is_none_or(|c| c.state != ContainerState::Created),
        HintKind::Exited => {
            sandbox.is_none_or(|s| s.state == SandboxState::NotReady)
                && container.is_none_or(|c| c.state == ContainerState::Exited)
        }
        HintKind::Deleted => !visible,
        HintKind::Oom => true,
    }
}

/// Whether a list says other than the record: ids or states.
pub(crate) fn differs(
    record: &PodRuntime,
    sandboxes: &[ListedSandbox],
    containers: &[ListedContainer],
) -> bool {
    record.error.is_some()
        || record.sandboxes.len() != sandboxes.len()
        || record.containers.len() != containers.len()
        || sandboxes
            .iter()
            .any(|l| !record.sandboxes.iter().any(|s| s.id.as_str() == l.id && s.state == l.state))
        || containers
            .iter()
            .any(|l| !record.containers.iter().any(|c| c.id.as_str() == l.id && c.state == l.state))
}

#[cfg(test)]
mod tests;
