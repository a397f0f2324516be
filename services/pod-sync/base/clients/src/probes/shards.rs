//! Decides which instance of probe-service probes which pod. Does no I/O; the time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hasher as _;
use std::time::Duration;

use quintlet_model::ids::PodUid;
use tokio::time::Instant;

/// An instance that is back within this time keeps its pods. Also the longest wait for the final memory of a
/// released pod.
pub(super) const ABSENCE_LIMIT: Duration = Duration::from_secs(2);

/// Assignment of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// No instance has been live since the pod was added.
    Nowhere,
    /// The instance probes the pod.
    At(String),
    /// The instance was asked to stop probing the pod and to answer with the final memory.
    Leaving { instance: String, since: Instant },
}

impl Place {
    /// Returns the instance that has the pod or had it last.
    pub(super) fn instance(&self) -> Option<&str> {
        match self {
            Self::Nowhere => None,
            Self::At(id) | Self::Leaving { instance: id, .. } => Some(id),
        }
    }
}

/// Change of the assignment of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AssignmentDecision {
    Stay,
    /// Ask the instance to stop probing the pod and to answer with the final memory.
    Release,
    /// Assign the pod to this instance.
    Assign(String),
}

/// Decides about a pod at `place`. `best` is the live instance that should have the pod, `None` if no
/// instance is live.
///
/// A pod stays at its instance while no instance is live, since its instance may come back. An instance that
/// is not live is not asked to release the pod, since it has not answered for [`ABSENCE_LIMIT`].
pub(super) fn decide(
    place: &Place,
    best: Option<&str>,
    is_live: impl Fn(&str) -> bool,
    now: Instant,
) -> AssignmentDecision {
    match place {
        Place::Nowhere => {
            best.map_or(AssignmentDecision::Stay, |best| AssignmentDecision::Assign(best.to_owned()))
        }
        Place::At(id) => match best {
            Some(best) if best != id && is_live(id) => AssignmentDecision::Release,
            Some(best) if best != id => AssignmentDecision::Assign(best.to_owned()),
            Some(_) | None => AssignmentDecision::Stay,
        },
        Place::Leaving { instance, since } if now.saturating_duration_since(*since) >= ABSENCE_LIMIT => {
            AssignmentDecision::Assign(best.unwrap_or(instance).to_owned())
        }
        Place::Leaving { .. } => AssignmentDecision::Stay,
    }
}

/// State of one instance.
#[derive(Debug, Clone, Copy, Default)]
struct Instance {
    /// Time since when its socket has been missing.
    missing: Option<Instant>,
    /// Send time of the oldest health check that has no answer.
    silent: Option<Instant>,
    /// Whether it was live at the last call of [`Instances::liveness_changes`].
    was_live: bool,
}

impl Instance {
    fn is_live(&self, now: Instant) -> bool {
        let short =
            |since: Option<Instant>| since.is_none_or(|t| now.saturating_duration_since(t) < ABSENCE_LIMIT);
        short(self.missing) && short(self.silent)
    }
}

/// The instances of probe-service, by id.
#[derive(Debug, Default)]
pub(super) struct Instances(BTreeMap<String, Instance>);

impl Instances {
    /// Updates which sockets exist. An instance without a socket is removed after [`ABSENCE_LIMIT`].
    pub(super) fn found(&mut self, present: &BTreeSet<String>, now: Instant) {
        for id in present {
            self.0.entry(id.clone()).or_default().missing = None;
        }
        for (id, instance) in &mut self.0 {
            if !present.contains(id) {
                instance.missing.get_or_insert(now);
            }
        }
        self.0.retain(|_, i| i.missing.is_none_or(|t| now.saturating_duration_since(t) < ABSENCE_LIMIT));
    }

    /// Returns the number of instances, live or not.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Records that an instance answered. Returns whether it was unresponsive before.
    pub(super) fn answered(&mut self, id: &str) -> bool {
        self.0.get_mut(id).is_some_and(|i| i.silent.take().is_some())
    }

    /// Records that a health check sent at `sent_at` has no answer. Returns whether the instance was
    /// responsive before.
    pub(super) fn silent(&mut self, id: &str, sent_at: Instant) -> bool {
        self.0.get_mut(id).is_some_and(|i| i.silent.replace(i.silent.unwrap_or(sent_at)).is_none())
    }

    /// Returns whether an instance may have pods.
    pub(super) fn is_live(&self, id: &str, now: Instant) -> bool {
        self.0.get(id).is_some_and(|i| i.is_live(now))
    }

    /// Returns whether the passing of time alone may change which instances are live, compared with the last
    /// call of [`Instances::liveness_changes`]. A comparison with the time of this call would miss a limit
    /// that passed in between.
    pub(super) fn is_pending(&self) -> bool {
        self.0.values().any(|i| i.was_live && (i.missing.is_some() || i.silent.is_some()))
    }

    /// Returns the live instance with the highest hash of pod and instance (rendezvous hashing), so that
    /// adding or removing an instance moves only its own share of the pods.
    pub(super) fn best(&self, uid: &PodUid, now: Instant) -> Option<&str> {
        let live = self.0.iter().filter(|(_, i)| i.is_live(now)).map(|(id, _)| id.as_str());
        live.max_by_key(|id| {
            let mut hash = std::hash::DefaultHasher::new();
            hash.write(uid.as_str().as_bytes());
            hash.write(id.as_bytes());
            hash.finish()
        })
    }

    /// Returns the instances that have become live (`true`) or not live since the last call.
    pub(super) fn liveness_changes(&mut self, now: Instant) -> Vec<(String, bool)> {
        let changes = self.0.iter_mut().filter_map(|(id, i)| {
            let live = i.is_live(now);
            (std::mem::replace(&mut i.was_live, live) != live).then(|| (id.clone(), live))
        });
        changes.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(id: &str) -> Place {
        Place::At(id.to_owned())
    }

    fn assign(id: &str) -> AssignmentDecision {
        AssignmentDecision::Assign(id.to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_moves_from_a_live_instance_by_release_and_from_a_dead_one_at_once() {
        let now = Instant::now() + Duration::from_secs(10);
        let leaving = |ms| Place::Leaving { instance: "a".into(), since: now - Duration::from_millis(ms) };
        let live = ["a", "b"];
        for (what, place, best, live, want) in [
            ("no instance yet", Place::Nowhere, None, &[][..], AssignmentDecision::Stay),
            ("the first instance", Place::Nowhere, Some("a"), &live[..1], assign("a")),
            ("where it belongs", at("a"), Some("a"), &live[..], AssignmentDecision::Stay),
            ("another is better", at("a"), Some("b"), &live[..], AssignmentDecision::Release),
            ("its instance is away", at("a"), Some("b"), &live[1..], assign("b")),
            ("there is no other instance", at("a"), None, &[][..], AssignmentDecision::Stay),
            ("asked just now", leaving(0), Some("b"), &live[..], AssignmentDecision::Stay),
            ("asked 1.999 s ago", leaving(1999), Some("b"), &live[..], AssignmentDecision::Stay),
            ("no answer for 2 s", leaving(2000), Some("b"), &live[..], assign("b")),
            ("the better one has gone", leaving(2000), Some("a"), &live[..1], assign("a")),
            ("both have gone", leaving(2000), None, &[][..], assign("a")),
        ] {
            assert_eq!(decide(&place, best, |id| live.contains(&id), now), want, "{what}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_is_live_for_two_seconds_without_its_socket_or_an_answer() {
        let (start, both) = (Instant::now(), BTreeSet::from(["a".to_owned(), "b".to_owned()]));
        let after = |ms| start + Duration::from_millis(ms);
        let mut instances = Instances::default();
        instances.found(&both, start);
        assert_eq!(instances.liveness_changes(start), [("a".to_owned(), true), ("b".to_owned(), true)]);
        assert!(!instances.is_pending() && !instances.answered("a"));
        assert!(instances.silent("a", after(100)) && !instances.silent("a", after(600)), "the oldest counts");
        assert!(instances.is_live("a", after(2099)) && !instances.is_live("a", after(2100)));
        assert_eq!(instances.liveness_changes(after(2099)), []);
        assert!(instances.is_pending(), "the limit passes after the last look");
        assert_eq!(instances.liveness_changes(after(2100)), [("a".to_owned(), false)]);
        assert!(!instances.is_pending());
        assert!(instances.answered("a") && instances.is_live("a", after(2101)));
        let one = BTreeSet::from(["b".to_owned()]);
        instances.found(&one, after(3000));
        assert!(instances.is_live("a", after(4999)) && !instances.is_live("a", after(5000)));
        instances.found(&both, after(4999));
        assert!(instances.is_live("a", after(9000)), "it came back in time");
        instances.found(&one, after(9000));
        instances.found(&one, after(11_000));
        assert!(!instances.silent("a", after(11_000)), "the instance is removed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_instance_moves_only_its_own_share_of_pods() {
        let now = Instant::now();
        let with = |ids: &[&str]| {
            let mut instances = Instances::default();
            instances.found(&ids.iter().map(|id| (*id).to_owned()).collect(), now);
            instances
        };
        let (two, three) = (with(&["a", "b"]), with(&["a", "b", "c"]));
        let mut moved = 0;
        for i in 0..300 {
            let uid = PodUid::parse(&format!("pod-{i}")).unwrap();
            let (before, after) = (two.best(&uid, now), three.best(&uid, now));
            if before != after {
                assert_eq!(after, Some("c"));
                moved += 1;
            }
        }
        assert!((50..150).contains(&moved), "{moved}");
    }
}
