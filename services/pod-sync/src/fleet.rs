//! The one [`Workers`] of this process behind a lock, and the handles its effects act on.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pod_sync_decisions::grace;
use pod_sync_decisions::worker::{Effect, Facts, Input, Kill, Kind, Outcome, Work, Workers};
use quintlet_kit::clock::{Clock, bounded};
use quintlet_model::ids::PodUid;
use rand::RngExt as _;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::clients::Wakes;

/// Least time that who kills a pod waits for it (pkg/kubelet/pod_workers.go: killPodNow).
const KILL_WAIT: Duration = Duration::from_secs(10);

/// What a worker is told.
#[derive(Debug)]
pub enum Told {
    /// Do this; the token says that the sync in flight is to end.
    Work(Work, CancellationToken),
    /// Ask again after so long: another pod is in the way.
    Wait(Work, Duration),
    /// Ask again after so long.
    Later(Duration),
    /// End.
    End,
}

/// All pods' workers.
#[derive(Debug)]
pub struct Fleet {
    workers: Mutex<Workers>,
    clock: Clock,
    wakes: Arc<Wakes>,
    cancels: Mutex<HashMap<PodUid, CancellationToken>>,
    waiters: Mutex<HashMap<u64, oneshot::Sender<()>>>,
    waiter: AtomicU64,
}

/// A pod that was killed did not stop in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("timeout waiting to kill pod")]
pub struct KillTimeout;

impl Fleet {
    /// Without pods.
    #[must_use]
    pub fn new(resync: Duration, clock: Clock, wakes: Arc<Wakes>) -> Self {
        Self {
            workers: Mutex::new(Workers::new(resync)),
            clock,
            wakes,
            cancels: Mutex::default(),
            waiters: Mutex::default(),
            waiter: AtomicU64::new(0),
        }
    }

    /// One step. Bells, cancellations and answers to who waits are seen to here, the other effects are the caller's.
    pub fn step(&self, input: Input) -> Vec<Effect> {
        let chance = rand::rng().random_range(0.0..1.0);
        let step = self.workers.lock().step(input, self.clock.boot(), chance);
        tracing::trace!(rules = ?step.rules, "worker step");
        step.effects
            .into_iter()
            .filter(|effect| match effect {
                Effect::Wake(uid) | Effect::Restart(uid) => {
                    self.wakes.wake(uid);
                    false
                }
                Effect::Cancel(uid) => {
                    if let Some(cancel) = self.cancels.lock().get(uid) {
                        cancel.cancel();
                    }
                    false
                }
                Effect::Stopped(_, waiters) => {
                    let mut all = self.waiters.lock();
                    for answer in waiters.iter().filter_map(|w| all.remove(w)) {
                        // Who no longer waits needs no answer.
                        let _ = answer.send(());
                    }
                    false
                }
                Effect::Forget(uid) => {
                    self.cancels.lock().remove(uid);
                    // A worker that waits for nothing more has to hear of it.
                    self.wakes.wake(uid);
                    true
                }
                Effect::Spawn(_) | Effect::Work(..) | Effect::Wait(..) => true,
            })
            .collect()
    }

    /// What a worker is to do now.
    pub fn take(&self, uid: &PodUid) -> Told {
        let cancel = CancellationToken::new();
        self.cancels.lock().insert(uid.clone(), cancel.clone());
        let (mut work, mut wait) = (None, None);
        for effect in self.step(Input::Take(uid.clone())) {
            match effect {
                Effect::Work(_, w) => work = Some(w),
                Effect::Wait(_, d) => wait = Some(d),
                Effect::Forget(_) => return Told::End,
                Effect::Spawn(_)
                | Effect::Wake(_)
                | Effect::Cancel(_)
                | Effect::Stopped(..)
                | Effect::Restart(_) => {}
            }
        }
        match (work, wait) {
            (Some(work), Some(wait)) => Told::Wait(work, wait),
            (Some(work), None) => Told::Work(work, cancel),
            (None, wait) => Told::Later(wait.unwrap_or(KILL_WAIT)),
        }
    }

    /// Takes note of how the work went.
    pub fn done(&self, uid: &PodUid, outcome: Outcome) -> Told {
        for effect in self.step(Input::Done { uid: uid.clone(), outcome }) {
            match effect {
                Effect::Wait(_, wait) => return Told::Later(wait),
                Effect::Forget(_) => return Told::End,
                Effect::Spawn(_)
                | Effect::Work(..)
                | Effect::Wake(_)
                | Effect::Cancel(_)
                | Effect::Stopped(..)
                | Effect::Restart(_) => {}
            }
        }
        Told::Later(Duration::ZERO)
    }

    /// Asks something about the pods.
    pub fn read<T>(&self, ask: impl FnOnce(&Workers) -> T) -> T {
        ask(&self.workers.lock())
    }

    /// Ends a pod for the node's own reasons, and waits until its containers have stopped.
    ///
    /// # Errors
    /// They have not within one and a half times the grace, 10 s at least. The termination goes on.
    pub async fn kill(&self, uid: &PodUid, facts: Facts, kill: Kill) -> Result<(), KillTimeout> {
        let (answer, stopped) = oneshot::channel();
        let waiter = self.waiter.fetch_add(1, Ordering::Relaxed);
        self.waiters.lock().insert(waiter, answer);
        let limit = bounded(grace::kill_limit(kill.grace.or(facts.grace.termination)));
        let kind = Kind::Kill(Kill { waiter: Some(waiter), ..kill });
        self.step(Input::Update { uid: uid.clone(), facts, kind, quiet: false });
        let result = tokio::time::timeout(limit, stopped).await;
        self.waiters.lock().remove(&waiter);
        match result {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(KillTimeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid() -> PodUid {
        PodUid::parse("u").unwrap()
    }

    fn fleet() -> Fleet {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(9));
        let fleet = Fleet::new(Duration::from_secs(60), clock, Arc::default());
        let facts = Facts { full_name: "a_b".into(), ..Facts::default() };
        let effects = fleet.step(Input::Update { uid: uid(), facts, kind: Kind::Create, quiet: true });
        assert_eq!(effects, [Effect::Spawn(uid())]);
        fleet
    }

    #[tokio::test(start_paused = true)]
    async fn who_kills_a_pod_waits_for_its_containers_and_no_longer_than_its_grace_allows() {
        let facts = Facts { full_name: "a_b".into(), ..Facts::default() };
        let kill = Kill { evict: true, grace: Some(20), ..Kill::default() };
        let slow = fleet();
        let began = tokio::time::Instant::now();
        assert_eq!(slow.kill(&uid(), facts.clone(), kill.clone()).await, Err(KillTimeout));
        assert_eq!(began.elapsed().as_secs(), 30);

        let quick = fleet();
        let stops = async {
            tokio::task::yield_now().await;
            assert!(matches!(quick.take(&uid()), Told::Work(Work::Terminating, _)));
            assert!(matches!(quick.done(&uid(), Outcome::Advance), Told::Later(Duration::ZERO)));
        };
        let uid = uid();
        let (killed, ()) = tokio::join!(quick.kill(&uid, facts, kill), stops);
        assert_eq!(killed, Ok(()));
    }

    #[test]
    fn a_sync_in_flight_is_told_to_end_and_one_at_the_runtime_is_not() {
        for reached in [false, true] {
            let fleet = fleet();
            let Told::Work(Work::Sync, cancel) = fleet.take(&uid()) else { panic!("no sync") };
            if reached {
                fleet.step(Input::Entered(uid()));
            }
            fleet.step(Input::Remove(uid()));
            assert_eq!(cancel.is_cancelled(), !reached, "reached {reached}");
        }
    }
}
