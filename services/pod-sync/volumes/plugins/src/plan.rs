//! Decides which plugins to deregister and to register (`pkg/kubelet/pluginmanager/reconciler`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_kit::clock;
use tokio::time::Instant;

use crate::scan::SocketId;

/// Wait after the first failure.
pub(crate) const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Longest wait between two attempts.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(122);

/// A failed operation on a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retry {
    /// The socket that the operation was for. Another socket under the same path does not wait.
    pub id: SocketId,
    /// Time before which the operation is not repeated.
    pub until: Instant,
    wait: Duration,
}

impl Retry {
    /// Returns the wait after a failure at `now`: 500 ms, then twice the wait before, up to 2m2s.
    #[must_use]
    pub fn after(previous: Option<&Self>, id: SocketId, now: Instant) -> Self {
        let wait = match previous.filter(|retry| retry.id == id) {
            Some(retry) => retry.wait.saturating_mul(2).min(LONGEST_WAIT),
            None => FIRST_WAIT,
        };
        Self { id, until: clock::deadline_after(now, wait), wait }
    }
}

/// Desired and actual state of the plugins.
#[derive(Debug, Default)]
pub struct World {
    /// Sockets in the registration directory.
    pub desired: BTreeMap<PathBuf, SocketId>,
    /// Registered plugins.
    pub actual: BTreeMap<PathBuf, SocketId>,
    /// Sockets with an operation in flight.
    pub busy: BTreeSet<PathBuf>,
    /// Sockets whose last operation failed.
    pub retries: BTreeMap<PathBuf, Retry>,
}

/// The operations to start now, at most one per socket.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RegistrationPlan {
    /// Plugins whose socket is gone or was replaced. To start before any registration.
    pub deregister: Vec<PathBuf>,
    /// Sockets of plugins to register.
    pub register: Vec<(PathBuf, SocketId)>,
    /// Time at which a failed registration is due.
    pub next: Option<Instant>,
}

/// Compares the sockets with the registered plugins.
#[must_use]
pub fn plan(world: &World, now: Instant) -> RegistrationPlan {
    let free = |path: &Path| !world.busy.contains(path);
    let mut plan = RegistrationPlan::default();
    for (path, id) in &world.actual {
        if world.desired.get(path) != Some(id) && free(path) {
            plan.deregister.push(path.clone());
        }
    }
    for (path, id) in &world.desired {
        if world.actual.contains_key(path) || !free(path) {
            continue;
        }
        match world.retries.get(path).filter(|retry| retry.id == *id && retry.until > now) {
            Some(retry) => plan.next = Some(plan.next.map_or(retry.until, |next| next.min(retry.until))),
            None => plan.register.push((path.clone(), *id)),
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path(n: u8) -> PathBuf {
        PathBuf::from(format!("/r/{n}.sock"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_replaced_socket_is_deregistered_first_and_then_registered() {
        let now = Instant::now();
        let (old, new) = (SocketId::of(1), SocketId::of(2));
        let mut world = World::default();
        world.desired.insert(path(1), new);
        world.actual.insert(path(1), old);
        assert_eq!(plan(&world, now).deregister, [path(1)]);
        assert!(plan(&world, now).register.is_empty());
        world.actual.clear();
        assert_eq!(plan(&world, now).register, [(path(1), new)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_registration_waits_and_a_new_socket_does_not() {
        let now = Instant::now();
        let mut world = World::default();
        world.desired.insert(path(1), SocketId::of(1));
        let first = Retry::after(None, SocketId::of(1), now);
        let mut longest = first.clone();
        for _ in 0..20 {
            longest = Retry::after(Some(&longest), SocketId::of(1), now);
        }
        assert_eq!((first.until - now, longest.until - now), (FIRST_WAIT, LONGEST_WAIT));
        world.retries.insert(path(1), first.clone());
        assert_eq!(
            plan(&world, now),
            RegistrationPlan { next: Some(first.until), ..RegistrationPlan::default() }
        );
        assert_eq!(plan(&world, first.until).register.len(), 1);
        world.desired.insert(path(1), SocketId::of(2));
        assert_eq!(plan(&world, now).register.len(), 1);
        assert_eq!(Retry::after(Some(&longest), SocketId::of(2), now).until - now, FIRST_WAIT);
    }

    proptest! {
        /// Sockets appear, are replaced and disappear while operations are in flight, end and fail.
        #[test]
        fn one_operation_per_socket_and_the_registered_plugins_become_those_of_the_directory(
            actions in prop::collection::vec((0_u8..5, 0_u8..4, 0_u64..3), 0..80),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().start_paused(true).enable_time().build().unwrap();
            let _guard = runtime.enter();
            let mut now = Instant::now();
            let mut world = World::default();
            let mut flying: BTreeMap<PathBuf, Option<SocketId>> = BTreeMap::new();
            for (action, n, inode) in actions {
                match action {
                    0 => drop(world.desired.insert(path(n), SocketId::of(inode))),
                    1 => drop(world.desired.remove(&path(n))),
                    2 => complete(&mut world, &mut flying, &path(n)),
                    3 => match flying.get(&path(n)) {
                        Some(Some(id)) => {
                            let retry = Retry::after(world.retries.get(&path(n)), *id, now);
                            world.retries.insert(path(n), retry);
                            world.busy.remove(&path(n));
                            flying.remove(&path(n));
                        }
                        // A deregistration does not fail.
                        Some(None) | None => complete(&mut world, &mut flying, &path(n)),
                    },
                    _ => now += Duration::from_millis(300),
                }
                start(&mut world, &mut flying, now);
            }
            // Nothing changes any more, and everything succeeds.
            for _ in 0..10 {
                now += LONGEST_WAIT;
                start(&mut world, &mut flying, now);
                for path in flying.keys().cloned().collect::<Vec<_>>() {
                    complete(&mut world, &mut flying, &path);
                }
            }
            prop_assert_eq!(&world.actual, &world.desired);
        }
    }

    fn start(world: &mut World, flying: &mut BTreeMap<PathBuf, Option<SocketId>>, now: Instant) {
        let plan = plan(world, now);
        for path in plan.deregister {
            world.actual.remove(&path);
            assert!(world.busy.insert(path.clone()), "two operations on {}", path.display());
            flying.insert(path, None);
        }
        for (path, id) in plan.register {
            assert!(!world.actual.contains_key(&path), "{} is registered twice", path.display());
            assert!(world.busy.insert(path.clone()), "two operations on {}", path.display());
            flying.insert(path, Some(id));
        }
    }

    fn complete(world: &mut World, flying: &mut BTreeMap<PathBuf, Option<SocketId>>, path: &Path) {
        if let Some(operation) = flying.remove(path) {
            world.busy.remove(path);
            if let Some(id) = operation {
                world.actual.insert(path.to_owned(), id);
            }
        }
    }
}
