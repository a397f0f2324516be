//! The entry of one pod, and the effect of an inspection on it. No I/O, no clock.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use quintlet_model::ids::{PodRef, PodUid, SandboxId};
use quintlet_model::runtime::{
    Container, ContainerState, Cursor, PodRuntime, Sandbox, SandboxState, SharedPodRuntime,
};

use crate::traits::{HintKind, ListedContainer, ListedSandbox};

/// Sandboxes and containers that an inspection found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct InspectedPod {
    /// The pod, if anything was found.
    pub(crate) pod: Option<PodRef>,
    pub(crate) sandboxes: Vec<Sandbox>,
    pub(crate) containers: Vec<Container>,
}

/// Type of a lifecycle event (`pkg/kubelet/pleg: PodLifeCycleEventType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ChangeKind {
    Started,
    Died,
    Removed,
    Changed,
}

/// A lifecycle event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) kind: ChangeKind,
    /// ID of the container or sandbox.
    pub(crate) id: String,
    /// Name of the container; empty for a sandbox.
    pub(crate) container: String,
    /// Exit code of a terminated container.
    pub(crate) exit_code: i32,
}

/// Effect of an inspection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum InspectionEffect {
    /// The inspection began before the last one that was applied, and was dropped.
    Stale,
    /// The runtime does not have the pod, and there was no entry.
    Nothing,
    /// The state is unchanged.
    Same,
    /// The state changed.
    Changed(Vec<Change>),
    /// The pod is gone.
    Gone(Vec<Change>),
}

/// An inspection with its result.
#[derive(Debug)]
pub(crate) struct Inspection<'a> {
    /// Larger than the tickets of all inspections that began before.
    pub(crate) ticket: u64,
    /// CLOCK_BOOTTIME of the start.
    pub(crate) began: Duration,
    /// CLOCK_BOOTTIME of the end.
    pub(crate) ended: Duration,
    /// Namespace and name of the pod, for an inspection that finds nothing.
    pub(crate) pod: Option<&'a PodRef>,
    /// CLOCK_BOOTTIME of the start of the newest list that contains the pod.
    pub(crate) listed: Option<Duration>,
    pub(crate) found: Result<InspectedPod, String>,
}

/// The state of one pod, kept by its owner.
#[derive(Debug)]
pub(crate) struct PodState {
    uid: PodUid,
    /// Shared with the store after publication, so that each pod is in memory once.
    record: Option<SharedPodRuntime>,
    /// Ticket of the last inspection that was applied.
    applied: Option<u64>,
    /// CLOCK_BOOTTIME of the end of the last inspection that did not find the pod.
    absent: Option<Duration>,
    /// The last addresses of the pod, and the sandbox that had them.
    addresses: Option<(SandboxId, Vec<IpAddr>)>,
}

impl PodState {
    /// `absent` is the CLOCK_BOOTTIME at which the pod was last found to be gone.
    pub(crate) fn new(uid: PodUid, absent: Option<Duration>) -> Self {
        Self { uid, record: None, applied: None, absent, addresses: None }
    }

    /// Creates the entry of a pod from its published record, if any.
    pub(crate) fn published(uid: PodUid, record: Option<SharedPodRuntime>, absent: Option<Duration>) -> Self {
        Self { record, ..Self::new(uid, absent) }
    }

    pub(crate) fn record(&self) -> Option<&PodRuntime> {
        self.record.as_deref()
    }

    /// Publishes the record with `place`, which gives it its cursor.
    pub(crate) fn place(
        &mut self,
        publish: impl FnOnce(PodRuntime) -> SharedPodRuntime,
    ) -> Option<SharedPodRuntime> {
        let placed = publish(Arc::unwrap_or_clone(self.record.take()?));
        self.record = Some(Arc::clone(&placed));
        Some(placed)
    }

    pub(crate) fn shared(&self) -> Option<SharedPodRuntime> {
        self.record.clone()
    }

    /// Applies an inspection.
    ///
    /// A failed inspection of a pod without a record makes a record only if the runtime had the pod after it
    /// was last found to be gone. Otherwise readers would get a pod that does not exist, and then its removal
    /// a second time.
    pub(crate) fn apply(&mut self, looked: Inspection<'_>) -> InspectionEffect {
        let Inspection { ticket, began, ended, pod, listed, found } = looked;
        if self.applied.is_some_and(|last| ticket <= last) {
            return InspectionEffect::Stale;
        }
        self.applied = Some(ticket);
        let old = self.record.take();
        let mut new = match found {
            Ok(found) if found.sandboxes.is_empty() && found.containers.is_empty() => {
                self.addresses = None;
                self.absent = Some(ended);
                return match old {
                    Some(old) => InspectionEffect::Gone(changes(Some(&old), None)),
                    None => InspectionEffect::Nothing,
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
                return InspectionEffect::Nothing;
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
        let effect = match &old {
            Some(old) => {
                new.cursor = old.cursor;
                let seen = std::mem::replace(&mut new.observed, old.observed);
                let same = new == **old;
                new.observed = seen;
                if same {
                    InspectionEffect::Same
                } else {
                    InspectionEffect::Changed(changes(Some(old), Some(&new)))
                }
            }
            None => InspectionEffect::Changed(changes(None, Some(&new))),
        };
        self.record = Some(Arc::new(new));
        effect
    }

    /// Keeps the addresses of a stopped sandbox until a newer one is ready or the pod is gone. The runtime
    /// drops them at the stop, but the pod's status still needs them (`pkg/kubelet/pleg: getPodIPs`).
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

/// Returns the events between two states of a pod (`pkg/kubelet/pleg: generateEvents`, but for created and
/// unknown).
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

fn find<'a>(id: &str, record: Option<&'a PodRuntime>) -> (Option<&'a Sandbox>, Option<&'a Container>) {
    let sandbox = record.and_then(|r| r.sandboxes.iter().find(|s| s.id.as_str() == id));
    let container = record.and_then(|r| r.containers.iter().find(|c| c.id.as_str() == id));
    (sandbox, container)
}

/// Reports whether the record has a sandbox or container with this ID. `record` is none if the pod is gone.
pub(crate) fn is_visible(id: &str, record: Option<&PodRuntime>) -> bool {
    !matches!(find(id, record), (None, None))
}

/// Reports whether the record shows the change of a hint. `record` is none if the pod is gone.
///
/// It shows no exit of an ID that it does not have: that may be a container that exited before its first
/// inspection.
pub(crate) fn effect_shows(kind: HintKind, id: &str, record: Option<&PodRuntime>) -> bool {
    let (sandbox, container) = find(id, record);
    let visible = sandbox.is_some() || container.is_some();
    match kind {
        HintKind::Created => visible,
        HintKind::Started => visible && container.is_none_or(|c| c.state != ContainerState::Created),
        HintKind::Exiting | HintKind::Exited => {
            sandbox.is_some_and(|s| s.state == SandboxState::NotReady)
                || container.is_some_and(|c| c.state == ContainerState::Exited)
        }
        HintKind::Deleted => !visible,
        HintKind::Oom => true,
    }
}

/// Reports whether the IDs or states of a list differ from the record.
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
