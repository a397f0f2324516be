//! The state machine of all pod workers ([`PodSyncStatuses`]) behind a lock, and the handles that its effects
//! act on (`pkg/kubelet/pod_workers.go`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pod_sync_clients::WorkerWakeups;
use pod_sync_decisions::grace;
use pod_sync_decisions::worker::{
    Effect, Input, KillPodOptions, PodFacts, PodSyncStatuses, SyncPodType, Work, WorkOutcome,
};
use pod_sync_views::PodViews;
use quintlet_kit::clock::{Clock, bounded};
use quintlet_model::ids::PodUid;
use rand::RngExt as _;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Shortest time that the caller of [`PodWorkers::kill`] waits (`pkg/kubelet/pod_workers.go: killPodNow`).
const KILL_WAIT: Duration = Duration::from_secs(10);

/// The next work of a pod worker.
#[derive(Debug)]
pub enum NextWork {
    /// Run this work. The token is cancelled when a sync must not reach the runtime any more.
    Run(Work, CancellationToken),
    /// Another pod blocks this work; ask again after this time.
    Blocked(Work, Duration),
    /// There is no work; ask again after this time.
    Idle(Duration),
    /// The pod is finished and the worker exits.
    Exit,
}

/// The workers of all pods.
#[derive(Debug)]
pub struct PodWorkers {
    workers: Mutex<PodSyncStatuses>,
    clock: Clock,
    wakes: Arc<WorkerWakeups>,
    cancels: Mutex<HashMap<PodUid, CancellationToken>>,
    waiters: Mutex<HashMap<u64, oneshot::Sender<()>>>,
    waiter: AtomicU64,
}

/// Waits of at least this length end in slots of [`SLOT`], so that pods at rest share wake-ups of the
/// process.
const SLOTTED_FROM: Duration = Duration::from_secs(60);
const SLOT: Duration = Duration::from_secs(5);

/// Shortens a long wait so that it ends at a multiple of [`SLOT`] of CLOCK_BOOTTIME. A deadline is not
/// missed: its pass comes earlier and waits for the rest.
fn slotted(wait: Duration, now: Duration) -> Duration {
    let past_slot = now.saturating_add(wait).as_millis().checked_rem(SLOT.as_millis()).unwrap_or_default();
    let shorter = wait.saturating_sub(Duration::from_millis(u64::try_from(past_slot).unwrap_or_default()));
    if shorter < SLOTTED_FROM { wait } else { shorter }
}

/// The containers of a killed pod did not stop in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("timeout waiting to kill pod")]
pub struct KillTimeout;

impl PodWorkers {
    /// Returns a set without workers. `resync` is the interval between syncs of a pod at rest.
    #[must_use]
    pub fn new(resync: Duration, clock: Clock, wakes: Arc<WorkerWakeups>) -> Self {
        Self {
            workers: Mutex::new(PodSyncStatuses::new(resync)),
            clock,
            wakes,
            cancels: Mutex::default(),
            waiters: Mutex::default(),
            waiter: AtomicU64::new(0),
        }
    }

    /// Feeds one input to the state machine. Wakes workers, cancels syncs and answers callers of
    /// [`Self::kill`]; returns the other effects.
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
                Effect::NotifyStopped(_, waiters) => {
                    let mut all = self.waiters.lock();
                    for answer in waiters.iter().filter_map(|w| all.remove(w)) {
                        // The receiver may have timed out; that is not an error.
                        let _ = answer.send(());
                    }
                    false
                }
                Effect::Forget(uid) => {
                    self.cancels.lock().remove(uid);
                    // An idle worker must exit.
                    self.wakes.wake(uid);
                    true
                }
                Effect::Spawn(_) | Effect::Work(..) | Effect::Wait(..) => true,
            })
            .collect()
    }

    /// Returns the work of a pod's worker.
    pub fn next_work(&self, uid: &PodUid) -> NextWork {
        let cancel = CancellationToken::new();
        self.cancels.lock().insert(uid.clone(), cancel.clone());
        let (mut work, mut wait) = (None, None);
        for effect in self.step(Input::TakeWork(uid.clone())) {
            match effect {
                Effect::Work(_, w) => work = Some(w),
                Effect::Wait(_, d) => wait = Some(d),
                Effect::Forget(_) => return NextWork::Exit,
                Effect::Spawn(_)
                | Effect::Wake(_)
                | Effect::Cancel(_)
                | Effect::NotifyStopped(..)
                | Effect::Restart(_) => {}
            }
        }
        match (work, wait) {
            (Some(work), Some(wait)) => NextWork::Blocked(work, wait),
            (Some(work), None) => NextWork::Run(work, cancel),
            (None, wait) => NextWork::Idle(wait.unwrap_or(KILL_WAIT)),
        }
    }

    /// Records the outcome of the work and returns when to ask again.
    pub fn complete_work(&self, uid: &PodUid, outcome: WorkOutcome) -> NextWork {
        for effect in self.step(Input::Done { uid: uid.clone(), outcome }) {
            match effect {
                Effect::Wait(_, wait) => return NextWork::Idle(slotted(wait, self.clock.boot())),
                Effect::Forget(_) => return NextWork::Exit,
                Effect::Spawn(_)
                | Effect::Work(..)
                | Effect::Wake(_)
                | Effect::Cancel(_)
                | Effect::NotifyStopped(..)
                | Effect::Restart(_) => {}
            }
        }
        NextWork::Idle(Duration::ZERO)
    }

    /// Returns whether no container of a pod runs any more, so that its resources are free.
    #[must_use]
    pub fn has_terminated(&self, views: &PodViews, uid: &PodUid) -> bool {
        views.get(uid).is_none() || self.read(|w| w.is_known_terminated(uid))
    }

    /// Returns whether the termination of a pod was requested, maybe during its current pass.
    #[must_use]
    pub fn is_ending(&self, uid: &PodUid) -> bool {
        self.read(|workers| workers.is_termination_requested(uid))
    }

    /// Reads from the state machine.
    pub fn read<T>(&self, ask: impl FnOnce(&PodSyncStatuses) -> T) -> T {
        ask(&self.workers.lock())
    }

    /// Terminates a pod for a reason of the node (eviction, preemption, shutdown) and waits until its
    /// containers have stopped.
    ///
    /// # Errors
    /// The containers still run after one and a half times the grace period, and 10 s at least. The
    /// termination continues.
    pub async fn kill(&self, uid: &PodUid, facts: PodFacts, kill: KillPodOptions) -> Result<(), KillTimeout> {
        let (answer, stopped) = oneshot::channel();
        let waiter = self.waiter.fetch_add(1, Ordering::Relaxed);
        self.waiters.lock().insert(waiter, answer);
        let limit = bounded(grace::kill_timeout(kill.grace.or(facts.grace.termination)));
        let kind = SyncPodType::Kill(KillPodOptions { waiter: Some(waiter), ..kill });
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

    #[test]
    fn long_waits_end_in_slots_and_are_never_longer_or_below_a_minute() {
        let ms = Duration::from_millis;
        let cases = [
            ("a retry", 15_300, 1_000, 15_300),
            ("just below", 59_999, 2_001, 59_999),
            ("rounded down", 71_234, 1_000, 69_000),
            ("in a slot", 69_000, 1_000, 69_000),
            ("too short to round", 62_000, 2_500, 62_000),
            ("rounded to a minute", 62_000, 5_000, 60_000),
        ];
        for (name, wait, now, want) in cases {
            assert_eq!(slotted(ms(wait), ms(now)), ms(want), "{name}");
        }
        let far = Duration::MAX;
        assert!(slotted(far, ms(1)) <= far);
    }

    fn workers() -> PodWorkers {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(9));
        let workers = PodWorkers::new(Duration::from_secs(60), clock, Arc::default());
        let facts = PodFacts { full_name: "a_b".into(), ..PodFacts::default() };
        let effects =
            workers.step(Input::Update { uid: uid(), facts, kind: SyncPodType::Create, quiet: true });
        assert_eq!(effects, [Effect::Spawn(uid())]);
        workers
    }

    #[tokio::test(start_paused = true)]
    async fn kill_waits_for_containers_to_stop_within_a_limit_of_the_grace_period() {
        let facts = PodFacts { full_name: "a_b".into(), ..PodFacts::default() };
        let kill = KillPodOptions { evict: true, grace: Some(20), ..KillPodOptions::default() };
        let slow = workers();
        let began = tokio::time::Instant::now();
        assert_eq!(slow.kill(&uid(), facts.clone(), kill.clone()).await, Err(KillTimeout));
        assert_eq!(began.elapsed().as_secs(), 30);

        let quick = workers();
        let stops = async {
            tokio::task::yield_now().await;
            assert!(matches!(quick.next_work(&uid()), NextWork::Run(Work::Terminating, _)));
            assert!(matches!(
                quick.complete_work(&uid(), WorkOutcome::Advance),
                NextWork::Idle(Duration::ZERO)
            ));
        };
        let uid = uid();
        let (killed, ()) = tokio::join!(quick.kill(&uid, facts, kill), stops);
        assert_eq!(killed, Ok(()));
    }

    #[test]
    fn a_removal_cancels_a_sync_unless_it_has_reached_the_runtime() {
        for reached in [false, true] {
            let workers = workers();
            let NextWork::Run(Work::Sync, cancel) = workers.next_work(&uid()) else { panic!("no sync") };
            if reached {
                workers.step(Input::RuntimeReached(uid()));
            }
            workers.step(Input::Remove(uid()));
            assert_eq!(cancel.is_cancelled(), !reached, "reached {reached}");
        }
    }
}
